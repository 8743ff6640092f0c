"""Check that a change of Python state is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fshard as fs
from fshard import Mesh
from fshard.partition.partition import Partition

MESH = Mesh(dp=2)


def check_sees(fn: Callable[..., Any], change: Callable[[], Any], *args: Any) -> Partition:
    """Assert that a change is seen, and that the change alters the result."""
    args = args or (torch.arange(1.0, 5.0),)
    part = fs.partition(fn, mesh=MESH)
    before = part(*args)
    torch.testing.assert_close(before, fn(*args))
    change()
    after = part(*args)
    torch.testing.assert_close(after, fn(*args))
    assert before.dtype != after.dtype or not torch.equal(before, after)
    return part
