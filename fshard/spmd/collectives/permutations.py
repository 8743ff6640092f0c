"""Values sent from rank to rank by their indices along named axes; `jax.lax`'s names and results.

A permutation and a broadcast are linear operations of their own: their transposes are the
inverse permutation, and a sum that only the source receives. Trees take one launch per dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Axes, Mesh, as_axes
from fshard.layout.validation import as_ints
from fshard.run.autograd.linear_function import FinishAll, Tensors
from fshard.run.packing import concat_flat, nbytes_of, split_flat
from fshard.run.transports.base import Transport
from fshard.run.transports.observed_calls import notify_collective
from fshard.spmd.axis_env import resolve_axes
from fshard.spmd.collectives.collective_plan import (
    CollectivePlan,
    Transfer,
    collective,
    require_tensor,
)
from fshard.spmd.collectives.wire_dtypes import WireDtypes, check_wire_dtypes, send_in
from fshard.spmd.types import TypeSignature, format_axes


@dataclass(frozen=True, slots=True)
class PermuteOp:
    """Each rank's values to another rank of its group; zeros where nothing arrives.

    `shapes` are the shapes of the locals of each index, where they differ between ranks.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    perm: tuple[tuple[int, int], ...]
    shapes: tuple[tuple[torch.Size, ...], ...] | None = None

    @property
    def T(self) -> PermuteOp:  # noqa: N802 - the mathematical name
        """Return the transpose."""
        shapes = self.shapes
        if shapes is not None:
            sources = {dst: src for src, dst in self.perm}
            shapes = tuple(shapes[sources.get(i, i)] for i in range(len(shapes)))
        return PermuteOp(self.mesh, self.axes, tuple((dst, src) for src, dst in self.perm), shapes)

    def wider(self, n: int) -> PermuteOp:
        """Return the operation on tensors with a last dim of size `n` more."""
        if self.shapes is None:
            return self
        shapes = tuple(tuple(torch.Size((*s, n)) for s in row) for row in self.shapes)
        return PermuteOp(self.mesh, self.axes, self.perm, shapes)

    def launch(self, transport: Transport, xs: Tensors) -> FinishAll:
        """Start the operation on locals of this rank."""
        group = self.mesh.group(transport.rank, self.axes)
        index = group.index(transport.rank)
        target = next((dst for src, dst in self.perm if src == index), None)
        source = next((src for src, dst in self.perm if dst == index), None)
        flat = concat_flat(xs)
        own = [x.shape for x in xs]
        shapes = own if self.shapes is None or source is None else self.shapes[source]
        send, receive = [0] * len(group), [0] * len(group)
        if target is not None:
            send[target] = flat.numel()
        if source is not None:
            receive[source] = sum(map(math.prod, shapes))
        nbytes = 0 if target in (None, index) else nbytes_of(flat)
        notify_collective("ppermute", self.axes, nbytes, transport.rank, flat.dtype)
        payload = flat if target is not None else flat[:0]
        finish_exchange = transport.all_to_all(payload, send, receive, group)
        nothing = flat.new_zeros(()).expand(flat.shape) if source is None else None

        def finish() -> Tensors:  # which does not keep what was sent
            received = finish_exchange()
            return split_flat(received if nothing is None else nothing.clone(), shapes)

        return finish


@dataclass(frozen=True, slots=True)
class BroadcastOp:
    """The source's values to its whole group; with `transposed` the group's sum to the source."""

    mesh: Mesh
    axes: tuple[str, ...]
    source: int
    transposed: bool = False

    @property
    def T(self) -> BroadcastOp:  # noqa: N802 - the mathematical name
        """Return the transpose."""
        return BroadcastOp(self.mesh, self.axes, self.source, not self.transposed)

    def wider(self, n: int) -> BroadcastOp:
        """Return the operation on tensors with a last dim of size `n` more."""
        return self

    def launch(self, transport: Transport, xs: Tensors) -> FinishAll:
        """Start the operation on locals of this rank."""
        group = self.mesh.group(transport.rank, self.axes)
        n, is_source = len(group), group[self.source] == transport.rank
        flat = concat_flat(xs)
        at_source = [flat.numel()] * n if is_source else [0] * n
        by_source = [flat.numel() if i == self.source else 0 for i in range(n)]
        shapes = [x.shape for x in xs]
        if self.transposed:
            nbytes = 0 if is_source else nbytes_of(flat)
            notify_collective("reduce", self.axes, nbytes, transport.rank, flat.dtype)
            finish_exchange = transport.all_to_all(flat, by_source, at_source, group)

            def finish_sum() -> Tensors:
                received = finish_exchange()
                if not is_source:
                    return split_flat(torch.zeros_like(flat), shapes)
                return split_flat(received.view(n, -1).sum(0, dtype=received.dtype), shapes)

            return finish_sum
        nbytes = (n - 1) * nbytes_of(flat) if is_source else 0
        notify_collective("broadcast", self.axes, nbytes, transport.rank, flat.dtype)
        payload = flat.repeat(n if is_source else 0)
        finish = transport.all_to_all(payload, at_source, by_source, group)
        return lambda: split_flat(finish(), shapes)


def _plan(name: str, op: PermuteOp | BroadcastOp, wires: WireDtypes) -> CollectivePlan:
    cast_op = send_in(op, wires)

    def leaf(value: Any) -> Any:
        x = require_tensor(value, name)
        check_wire_dtypes(name, x.dtype, wires)
        return Transfer(cast_op, x) if x.numel() else x.clone()

    return CollectivePlan(name, leaf, TypeSignature(op.axes), op.axes)


def _along(axes: tuple[str, ...]) -> str:
    return f" along {', '.join(axes)}" if axes else ""


def _check_perm(perm: Any, n: int, axes: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Return (source, destination) pairs of n indices, from 0; raise with all that is wrong."""
    rows = [as_ints(row) for row in (perm if isinstance(perm, Iterable) else [perm])]
    if any(row is None or len(row) != 2 for row in rows):
        rule = "perm must have pairs of indices, (source, destination)"
        fail("fs.ppermute", f"perm={perm!r}", rule, f"perm=[(0, {min(1, n - 1)})], say")
    problems: list[Problem] = []
    pairs: list[tuple[int, int]] = []
    for row in rows:
        (src, dst), indices = row or (), range(-n, n)
        if src in indices and dst in indices:
            pairs.append((src % n, dst % n))
            continue
        rule = f"indices{_along(axes)} must be in {-n}..{n - 1}"
        problems.append(Problem(f"{row} in perm", rule, f"({src % n}, {dst % n}), say"))
    problems += _repeated(pairs, format_axes(axes))
    raise_if("fs.ppermute", list(dict.fromkeys(problems)))
    return tuple(pairs)


def _repeated(pairs: Sequence[tuple[int, int]], axes: str) -> list[Problem]:
    """Return the problems of sources and destinations that occur more than once."""
    problems: list[Problem] = []
    for side, word in enumerate(("source", "destination")):
        for index in sorted({pair[side] for pair in pairs}):
            same = [pair for pair in pairs if pair[side] == index]
            if len(same) < 2:
                continue
            given = f"{word} {index} in {', '.join(map(repr, same))} of perm"
            rule = f"every {word} must occur at most once"
            fix = f"fs.pbroadcast(x, {axes}, {index}), or an fs.ppermute for each destination"
            if word == "destination":
                fix = " + ".join(f"fs.ppermute(x, {axes}, [{pair}])" for pair in same)
            if len(set(same)) == 1:
                given, fix = f"{same[0]} {len(same)} times in perm", f"{same[0]} once"
                rule = "every source and every destination must occur at most once"
            problems.append(Problem(given, rule, fix))
    return problems


@collective
def ppermute(
    axis_name: Axes,
    perm: Sequence[tuple[int, int]],
    *,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Send values from rank `src` to rank `dst` of axes for every `(src, dst)` in `perm`.

    Args:
        x: tensors of any shape, equal on all ranks, or a tree of them.
        axis_name: the axis, or a tuple of axes.
        perm: pairs of indices along the axes, each source and each destination at most once.
        forward_dtype: dtype in which values are sent; the result has the dtype of `x`.
        backward_dtype: dtype in which the transpose sends.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of tensors of the shapes of `x`, zeros on ranks that receive nothing.

    Raises:
        ShardingError: indices that are repeated or do not exist; a floating dtype for integers.

    Transpose: the inverse permutation. After `jax.lax.ppermute`; PyTorch's `permute_tensor`.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.ppermute(x, "i", [(0, 1), (1, 2)]), mesh=fs.Mesh(i=3),
    ...                  in_specs=fs.P("i"), out_specs=fs.P("i"))
    >>> f(torch.tensor([1.0, 2.0, 3.0]))
    tensor([0., 1., 2.])
    """
    owner, axes = resolve_axes(axis_name, mesh, "fs.ppermute")
    pairs = _check_perm(perm, owner.axis_size(axes), as_axes(axis_name))
    return _plan("fs.ppermute", PermuteOp(owner, axes, pairs), (forward_dtype, backward_dtype))


@collective
def pshuffle(
    axis_name: Axes,
    perm: Sequence[int],
    *,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Return on rank i of axes the values of rank `perm[i]`, as indexing by a permutation.

    Args:
        x: tensors of any shape, equal on all ranks, or a tree of them.
        axis_name: the axis, or a tuple of axes.
        perm: every index along the axes once.
        forward_dtype: dtype in which values are sent; the result has the dtype of `x`.
        backward_dtype: dtype in which the transpose sends.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of tensors of the shapes of `x`.

    Raises:
        ShardingError: a `perm` that does not have every index once; a floating dtype for integers.

    Transpose: the inverse permutation. After `jax.lax.pshuffle`; PyTorch's `permute_tensor` with
    the inverse.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.pshuffle(x, "i", [2, 0, 1]), mesh=fs.Mesh(i=3),
    ...                  in_specs=fs.P("i"), out_specs=fs.P("i"))
    >>> f(torch.tensor([1.0, 2.0, 3.0]))
    tensor([3., 1., 2.])
    """
    owner, axes = resolve_axes(axis_name, mesh, "fs.pshuffle")
    n = owner.axis_size(axes)
    sources = as_ints(perm)
    if sources is None or sorted(sources) != list(range(n)):
        fail("fs.pshuffle", f"perm={perm}",
             f"perm must have every index 0..{n - 1}{_along(axes)} once",
             "fs.ppermute(x, axis, [(src, dst), ...]) leaves indices out")  # fmt: skip
    pairs = tuple((src, dst) for dst, src in enumerate(sources))
    return _plan("fs.pshuffle", PermuteOp(owner, axes, pairs), (forward_dtype, backward_dtype))


@collective
def pbroadcast(
    axis_name: Axes,
    source: int,
    *,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Return the values of rank `source` of axes, on every rank.

    Args:
        x: tensors of any shape, equal on all ranks, or a tree of them.
        axis_name: the axis, or a tuple of axes.
        source: index along the axes; only it sends.
        forward_dtype: dtype in which values are sent; the result has the dtype of `x`.
        backward_dtype: dtype in which the transpose sends and adds.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of tensors of the shapes of `x`.

    Raises:
        ShardingError: a source that does not exist; a floating dtype for integers.

    Transpose: the sum of all cotangents at the source, zeros elsewhere. After `jax.lax.pbroadcast`;
    PyTorch's `broadcast`.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.pbroadcast(x, "i", 1), mesh=fs.Mesh(i=3),
    ...                  in_specs=fs.P("i"), out_specs=fs.P("i"))
    >>> f(torch.tensor([1.0, 2.0, 3.0]))
    tensor([2., 2., 2.])
    """
    owner, axes = resolve_axes(axis_name, mesh, "fs.pbroadcast")
    n = owner.axis_size(axes)
    if not isinstance(source, int) or not -n <= source < n:
        valid = source % n if isinstance(source, int) else 0
        rule = f"indices{_along(axes)} must be in {-n}..{n - 1}"
        fail("fs.pbroadcast", f"source={source!r}", rule, f"source={valid}, say")
    op = BroadcastOp(owner, axes, source % n)
    return _plan("fs.pbroadcast", op, (forward_dtype, backward_dtype))
