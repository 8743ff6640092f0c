"""Tests on real processes share them: one worker of xdist runs them all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import harness

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("gloo"))


@pytest.fixture(scope="session", autouse=True)
def end_ranks() -> Iterator[None]:
    """End the processes with the session."""
    yield
    harness.close_all()
