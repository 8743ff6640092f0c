"""Fixture that limits PyTorch to one thread, for tests of thousands of small operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

__all__ = ["one_thread"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Run a module's tests with one thread, and restore the number afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
