"""Halo steps on real processes equal those of a simulation, to second order."""

from __future__ import annotations

import torch

from fshard import HaloExchange, Mesh, P, Program, Spec
from tests.helpers.gloo.program_cases import Case, case, check_cases

MESH = Mesh({"h": 2, "w": 2}, devices=(2, 0, 3, 1))


def programs() -> list[Case]:
    """Return exchanges and reductions: corners, several hops, empty shards, replicas, wrapping."""
    grid = Spec(MESH, P("h", "w"), shape=(6, 8), dtype=torch.float64)
    line = Spec(MESH, P(("w", "h")), shape=(6, 2), dtype=torch.float64, sizes={0: (1, 3, 0, 2)})
    both = HaloExchange((((0, 4), (2, 6)), ((-1, 5), (3, 9))))
    hops = HaloExchange((((0, 4), (-1, 6), (2, 3), (2, 8)),))
    replicated = HaloExchange((((0, 4), (2, 6)),))
    progs = [
        Program(grid, (both,)),
        Program(line, (hops,)),
        Program(grid.replace(partition=P("h", unreduced={"w"})), (replicated,)),
        Program(grid.replace(partition=P("h")), (replicated,)),
    ]
    formats = ("plain", "strided", "transposed", "offset")
    cases = [case(prog, 2, memory) for prog, memory in zip(progs, formats, strict=True)]
    return [*cases, *(case(prog.T, 2) for prog in progs)]


def test_halo_programs_equal_the_simulation() -> None:
    check_cases(MESH, programs())
