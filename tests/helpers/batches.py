"""Programs and comparisons that tests of batches share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

import fshard as fs
from fshard import Program, ShardingError, Spec

Leaf = tuple[Spec, Spec]


Specs = dict[str, Spec]


def program(a: Spec, b: Spec, exchange: bool) -> Program:
    """Return the program of one exchange if there is one and `exchange`; else the planned one."""
    if exchange:
        with suppress(ShardingError):
            return Program(a, (fs.Exchange(b.partition, b.sizes, b.mesh),), b)
    return fs.redistribute(a, b)


def ends(leaves: Sequence[Leaf]) -> tuple[list[Spec], list[Spec]]:
    return [a for a, _ in leaves], [b for _, b in leaves]


def check_equal(got: Sequence[Any], want: Sequence[Any]) -> None:
    for actual, expected in zip(got, want, strict=True):
        assert len(actual) == len(expected)
        for x, y in zip(actual, expected, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
