"""Programs and comparisons that tests of batches share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

import fshard as fs
from fshard import Batch, Mesh, P, Program, ShardingError, Spec

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


def only(batch: Batch, keep: Sequence[bool]) -> Batch:
    """Return the batch of some of the leaves."""
    leaves = [leaf for leaf, saved in zip(batch.leaves, keep, strict=True) if saved]
    return Batch(leaves, bucket_bytes=batch.bucket_bytes)


def owned_matrices(mesh: Mesh, count: int) -> list[Leaf]:
    """Return matrices that Muon moves: each on one rank in turn, then reduced on every rank."""
    axes, n = mesh.axes, mesh.size
    leaves = []
    for i in range(count):
        shape = (1 + i % 7, 2)
        sizes = [shape[0] if i % n == rank else 0 for rank in range(n)]
        owned = Spec(mesh, P(axes), shape=shape, sizes={0: sizes})
        leaves.append((owned, Spec(mesh, P(reduced=set(axes)), shape=shape)))
    return leaves


def gathered_parameters(dims: int = 20) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return specs of matrices sharded over dp and tp and of uneven vectors, gathered over dp."""
    mesh = Mesh(dp=2, tp=2)

    def leaf(shape: Sequence[int], before: P, *after: Any) -> tuple[Spec, Spec]:
        src = Spec(mesh, before, shape=shape, uneven="chunk")
        return src, src.replace(partition=P(*after, reduced={"dp"}))

    pairs = [
        {"w": leaf((8, 4 * (1 + i % 3)), P("dp", "tp"), None, "tp"), "b": leaf((5 + i,), P("dp"))}
        for i in range(dims)
    ]
    src, dst = (
        {"layers": [{name: pair[end] for name, pair in layer.items()} for layer in pairs],
         "norm": leaf((7,), P("dp"))[end], "none": None}
        for end in (0, 1)
    )  # fmt: skip
    return src, dst
