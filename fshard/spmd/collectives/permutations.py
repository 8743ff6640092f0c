"""Values sent from rank to rank by their places along named axes; `jax.lax`'s names and values.

A permutation and a broadcast are linear operations of their own: their transposes are the
inverse permutation, and a sum that the source alone keeps. Trees go in one launch per dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Axes, Mesh, as_axes
from fshard.layout.validation import as_ints
from fshard.run.autograd.linear_function import FinishAll, Tensors
from fshard.run.packing import concat_flat, split_flat
from fshard.run.transports.base import Transport, notify
from fshard.spmd.axis_env import resolve_axes
from fshard.spmd.collectives.collective_plan import (
    CollectivePlan,
    Transfer,
    collective,
    require_tensor,
)
from fshard.spmd.collectives.wire_dtypes import WireDtypes, check_wires, send_in
from fshard.spmd.types import TypeSignature, format_axes

__all__ = ["pbroadcast", "ppermute", "pshuffle"]


@dataclass(frozen=True, slots=True)
class _Permute:
    """Each rank's values to another rank of its group; zeros where nothing arrives."""

    mesh: Mesh
    axes: tuple[str, ...]
    perm: tuple[tuple[int, int], ...]

    @property
    def T(self) -> _Permute:  # noqa: N802 - the mathematical name
        return _Permute(self.mesh, self.axes, tuple((dst, src) for src, dst in self.perm))

    def wider(self, n: int) -> _Permute:
        return self

    def launch(self, transport: Transport, xs: Tensors) -> FinishAll:
        group = self.mesh.group(transport.rank, self.axes)
        here = group.index(transport.rank)
        goes = dict(self.perm).get(here)
        comes = dict(self.T.perm).get(here)
        flat = concat_flat([x.reshape(-1) for x in xs])
        send = [flat.numel() if at == goes else 0 for at in range(len(group))]
        receive = [flat.numel() if at == comes else 0 for at in range(len(group))]
        notify("ppermute", self.axes, 0 if goes in (None, here) else flat.nbytes, transport.rank)
        sent = flat if goes is not None else flat[:0]
        moved = transport.all_to_all(sent, send, receive, group)
        shapes = [x.shape for x in xs]

        def finish() -> Tensors:
            got = moved()
            return split_flat(got if comes is not None else torch.zeros_like(flat), shapes)

        return finish


@dataclass(frozen=True, slots=True)
class _Broadcast:
    """The source's values to its whole group; with `back` everyone's sum to the source."""

    mesh: Mesh
    axes: tuple[str, ...]
    source: int
    back: bool = False

    @property
    def T(self) -> _Broadcast:  # noqa: N802 - the mathematical name
        return _Broadcast(self.mesh, self.axes, self.source, not self.back)

    def wider(self, n: int) -> _Broadcast:
        return self

    def launch(self, transport: Transport, xs: Tensors) -> FinishAll:
        group = self.mesh.group(transport.rank, self.axes)
        n, is_source = len(group), group[self.source] == transport.rank
        flat = concat_flat(xs)
        everyone = [flat.numel()] * n if is_source else [0] * n
        one = [flat.numel() if at == self.source else 0 for at in range(n)]
        shapes = [x.shape for x in xs]
        if self.back:
            nbytes = 0 if is_source else flat.nbytes
            notify("reduce", self.axes, nbytes, transport.rank)
            addends = transport.all_to_all(flat, one, everyone, group)

            def total() -> Tensors:
                got = addends()
                mine = got.view(n, -1).sum(0, dtype=got.dtype) if is_source else None
                return split_flat(torch.zeros_like(flat) if mine is None else mine, shapes)

            return total
        nbytes = (n - 1) * flat.nbytes if is_source else 0
        notify("broadcast", self.axes, nbytes, transport.rank)
        moved = transport.all_to_all(flat.repeat(n if is_source else 0), everyone, one, group)
        return lambda: split_flat(moved(), shapes)


def _plan(name: str, op: _Permute | _Broadcast, wires: WireDtypes) -> CollectivePlan:
    sent = send_in(op, wires)

    def leaf(value: Any) -> Any:
        x = require_tensor(value, name)
        check_wires(name, x.dtype, wires)
        return Transfer(sent, x) if x.numel() else x.clone()

    return CollectivePlan(name, leaf, TypeSignature(op.axes))


def _along(axes: tuple[str, ...]) -> str:
    return f" along {', '.join(axes)}" if axes else ""


def _pairs(perm: Any, n: int, axes: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Sources and destinations of n places, counted from 0; raises for all that are wrong."""
    named, problems = format_axes(axes), []
    found: list[tuple[int, int]] = []
    listed = list(perm) if isinstance(perm, Iterable) else [perm]
    pairs = [as_ints(each) for each in listed]
    if any(pair is None or len(pair) != 2 for pair in pairs):
        rule = "perm has pairs of places, (source, destination)"
        fail("fs.ppermute", f"perm={perm!r}", rule, f"perm=[(0, {min(1, n - 1)})], say")
    for pair in pairs:
        (src, dst), places = pair or (), range(-n, n)
        if src in places and dst in places:
            found.append((src % n, dst % n))
            continue
        rule = f"places{_along(axes)} are {-n}..{n - 1}"
        problems.append(Problem(f"{pair} in perm", rule, f"({src % n}, {dst % n}), say"))
    for at, word in enumerate(("source", "destination")):
        for place in sorted({pair[at] for pair in found}):
            same = [pair for pair in found if pair[at] == place]
            if len(same) < 2:
                continue
            given = f"{word} {place} in {', '.join(map(repr, same))} of perm"
            rule = f"every {word} occurs at most once"
            fix = f"fs.pbroadcast(x, {named}, {place}), or an fs.ppermute for each destination"
            if word == "destination":
                fix = " + ".join(f"fs.ppermute(x, {named}, [{pair}])" for pair in same)
            if len(set(same)) == 1:
                given, fix = f"{same[0]} {len(same)} times in perm", f"{same[0]} once"
                rule = "every source and every destination occurs at most once"
            problems.append(Problem(given, rule, fix))
    raise_if("fs.ppermute", list(dict.fromkeys(problems)))
    return tuple(found)


@collective
def ppermute(
    axis_name: Axes,
    perm: Sequence[tuple[int, int]],
    *,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Send `x` from rank `src` to rank `dst` of the axes for every `(src, dst)` in `perm`.

    `jax.lax.ppermute`, PyTorch's `permute_tensor`. Ranks that receive nothing get zeros.
    Transpose: the inverse. `forward_dtype` and `backward_dtype` are what the two send; results
    have the dtype of `x`. Raises `ShardingError` for places that are repeated or do not exist,
    and for floating dtypes of integers.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: ppermute(x, "i", [(0, 1), (1, 2)]), mesh=fs.Mesh(i=3),
    ...                  in_specs=fs.P("i"), out_specs=fs.P("i"))
    >>> f(torch.tensor([1.0, 2.0, 3.0]))
    tensor([0., 1., 2.])
    """
    where, axes = resolve_axes(axis_name, mesh, "fs.ppermute")
    pairs = _pairs(perm, where.axis_size(axes), as_axes(axis_name))
    return _plan("fs.ppermute", _Permute(where, axes, pairs), (forward_dtype, backward_dtype))


@collective
def pshuffle(
    axis_name: Axes,
    perm: Sequence[int],
    *,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """The `x` of rank `perm[i]` on rank i of the axes: indexing by a permutation.

    `jax.lax.pshuffle`, PyTorch's `permute_tensor` with the inverse. Transpose: the inverse.
    Dtypes as `ppermute`. Raises `ShardingError` where `perm` does not have every place once.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: pshuffle(x, "i", [2, 0, 1]), mesh=fs.Mesh(i=3),
    ...                  in_specs=fs.P("i"), out_specs=fs.P("i"))
    >>> f(torch.tensor([1.0, 2.0, 3.0]))
    tensor([3., 1., 2.])
    """
    where, axes = resolve_axes(axis_name, mesh, "fs.pshuffle")
    n = where.axis_size(axes)
    sources = as_ints(perm)
    if sources is None or sorted(sources) != list(range(n)):
        fail(
            "fs.pshuffle",
            f"perm={perm}",
            f"perm has every place 0..{n - 1}{_along(axes)} once",
            "fs.ppermute(x, axis, [(src, dst), ...]) leaves places out",
        )
    pairs = tuple((src, dst) for dst, src in enumerate(sources))
    return _plan("fs.pshuffle", _Permute(where, axes, pairs), (forward_dtype, backward_dtype))


@collective
def pbroadcast(
    axis_name: Axes,
    source: int,
    *,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """The `x` of rank `source` of the axes, on every rank.

    `jax.lax.pbroadcast`, PyTorch's `broadcast`: the source sends to everyone, nobody else sends.
    Transpose: the sum of all cotangents at the source, zeros elsewhere; they are sent and added
    in `backward_dtype`. Dtypes as `ppermute`. Raises `ShardingError` for a source that does not
    exist.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: pbroadcast(x, "i", 1), mesh=fs.Mesh(i=3),
    ...                  in_specs=fs.P("i"), out_specs=fs.P("i"))
    >>> f(torch.tensor([1.0, 2.0, 3.0]))
    tensor([2., 2., 2.])
    """
    where, axes = resolve_axes(axis_name, mesh, "fs.pbroadcast")
    n = where.axis_size(axes)
    if not isinstance(source, int) or not -n <= source < n:
        near = source % n if isinstance(source, int) else 0
        rule = f"places{_along(axes)} are {-n}..{n - 1}"
        fail("fs.pbroadcast", f"source={source!r}", rule, f"source={near}, say")
    op = _Broadcast(where, axes, source % n)
    return _plan("fs.pbroadcast", op, (forward_dtype, backward_dtype))
