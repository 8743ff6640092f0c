"""Settings of every test: one thread, Hypothesis without clocks, a small heap to collect."""

from __future__ import annotations

import gc
import os
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import is_hypothesis_test, settings

from tests.helpers.thorough import THOROUGH

# Tests are thousands of small operations, in several processes: more threads are slower.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start

gc.set_threshold(50_000, 20, 20)  # tests make many objects and few cycles

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


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all cases of a test with `sampled(n)` as slow, except every n-th one; order the rest.

    An n that divides the number of values of no parameter reaches all values of all parameters.
    Drawn tests have a third of their examples unless the run is thorough.
    """
    if not THOROUGH:
        for test in {item.obj for item in items if is_hypothesis_test(getattr(item, "obj", None))}:
            used = test._hypothesis_internal_use_settings
            fewer = settings(used, max_examples=-(-used.max_examples // 3))
            test._hypothesis_internal_use_settings = fewer
    # Searches of the heap for references take seconds each once the suite has filled its caches.
    items.sort(key=lambda item: item.get_closest_marker("searches_heap") is None)
    places: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and item.get_closest_marker("slow") is None:
            name = item.nodeid.partition("[")[0]
            if places[name] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            places[name] += 1


@cache
def uses_processes(path: str) -> bool:
    """Return whether a file's tests run on real processes."""
    text = (ROOT / path).read_text()
    return path.startswith("tests/distributed/") or "run_ranks" in text or "Ranks(" in text


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
