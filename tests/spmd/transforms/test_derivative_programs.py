"""Derivatives of derivatives in programs, mapped and partitioned, equal those of one device."""

from __future__ import annotations

import pytest

from fshard import Mesh
from tests.helpers.spmd.derivatives.derivative_programs import PROGRAMS, Place, Wrap
from tests.helpers.spmd.transform_cases import close


@pytest.mark.parametrize("place", ["mapped", "partition"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_equal_one_device(program: str, place: Place) -> None:
    mesh, run = Mesh(x=2), PROGRAMS[program]
    close(run(Wrap(place, mesh)), run(Wrap("dense", mesh)))
