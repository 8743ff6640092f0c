"""Fixtures that pytest finds where fshard is installed; `-p no:fshard` leaves them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fshard.testing.ranks
from fshard.show.comm.comm_log import CommLog
from fshard.show.comm.comm_log import comm_log as _comm_log


@pytest.fixture
def comm_log() -> Iterator[CommLog]:
    """Return a log of the collectives that run in the test."""
    with _comm_log() as log:
        yield log


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """Return `fs.testing.run_ranks`."""
    return fshard.testing.ranks.run_ranks


def pytest_sessionfinish() -> None:
    """End the processes that `run_ranks` has kept."""
    fshard.testing.ranks.close_ranks()
