"""End the shared processes with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.gloo import harness


@pytest.fixture(scope="session", autouse=True)
def end_ranks() -> Iterator[None]:
    """End the processes with the session."""
    yield
    harness.close_all()
