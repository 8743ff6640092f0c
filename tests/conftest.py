"""Settings of every test: Hypothesis without clocks, the same examples, a small heap to collect."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import settings

# A clock makes tests fail on a busy machine; chance makes them fail on another's change.
settings.register_profile("fshard", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("fshard")

GROUPS = {"tests/distributed/": "gloo", "tests/repository/test_examples.py": "examples"}
"""Tests that one worker runs, by the beginning of their ids."""


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Exempt what exists from garbage collection, so that a test pays for its own objects alone.

    A collection of all that the suite has imported, traced and cached takes a second or more.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all tests on real processes on one worker, so that they share them; examples likewise.

    Marks of xdist_group do not do it: xdist 3.8 writes them where pytest 9.2 does not look.
    """
    from xdist.scheduler import LoadGroupScheduling

    class ByProcesses(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return next((group for path, group in GROUPS.items() if nodeid.startswith(path)), scope)

    return ByProcesses(config, log)
