"""Settings of every test: Hypothesis without clocks, the same examples, a small heap to collect."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A clock makes tests fail on a busy machine; chance makes them fail on another's change.
settings.register_profile("fshard", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("fshard")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Exempt what exists from garbage collection, so that a test pays for its own objects alone.

    A collection of all that the suite has imported, traced and cached takes a second or more.
    """
    gc.collect()
    gc.freeze()


@cache
def uses_processes(path: str) -> bool:
    """Return whether a file's tests run on real processes."""
    return path.startswith("tests/distributed/") or "run_ranks" in (ROOT / path).read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file on one worker, which fills its caches, and files in their order.

    All tests on real processes run on the same worker, so that they share the processes.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByProcesses(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "processes" if uses_processes(path) else path

    config.option.loadscopereorder = False  # the last files in their order are short
    return ByProcesses(config, log)
