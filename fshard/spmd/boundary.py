"""The boundary of a mapped function: arguments become locals, results become global or pairs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch

from fshard._util.errors import Problem, ShardingError, did_you_mean, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Sharded, Spec
from fshard.layout.tree import flatten, is_pair, map_leaves, paths
from fshard.plan.redistribute import redistribute
from fshard.program.program import Program
from fshard.run.execute import check_local, check_shards
from fshard.run.global_tensors import check_sharding, lay_out, shard
from fshard.run.transports.base import Transport
from fshard.spmd.in_specs import Argument, DimSpec, PathSpec
from fshard.spmd.mesh_scope import Scope

__all__ = ["check_others", "check_specs", "nothing", "place_all", "result_specs"]

FIRST = operator.itemgetter(0)
"""The local of a pair."""


@lru_cache(maxsize=4096)
def _even(mesh: Mesh, p: PartitionSpec, shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
    return Spec(mesh, p, shape=shape, dtype=dtype)


def _each(
    where: str, function: Callable[..., Any], rows: Iterable[tuple[str, tuple[Any, ...]]]
) -> list[Any]:
    """`function(*args)` of every row; one `ShardingError` with all failures, each with its path."""
    done: list[Any] = []
    problems: list[Problem] = []
    for path, args in rows:
        try:
            done.append(function(*args))
        except ShardingError as error:
            if not error.problems:
                raise
            problems += [Problem(f"{path}: {p.given}", p.rule, p.fix) for p in error.problems]
    raise_if(where, problems)
    return done


# -- specs ----------------------------------------------------------------------------


def check_specs(where: str, scope: Scope, slots: Sequence[PathSpec], out_specs: Any) -> None:
    """Raise `ShardingError` for leaves of `in_specs` and `out_specs` that the scope cannot have."""
    leaves = list(zip(paths(out_specs, "out_specs"), flatten(out_specs)[0], strict=True))
    problems: list[Problem] = []
    for path, given in (*slots, *leaves):
        problems += [
            Problem(f"{path}: {p.given}", p.rule, p.fix) for p in _spec_problems(given, scope)
        ]
    raise_if(where, problems)


def _spec_problems(given: Any, scope: Scope) -> list[Problem]:
    if given is None or isinstance(given, DimSpec):
        return []
    if isinstance(given, Spec):
        if scope.adopt(given) is None:
            return [Problem(f"the spec {given} on {given.mesh}", f"the mesh is {scope.named_mesh}",
                            "given.replace(mesh=mesh)")]  # fmt: skip
        p = given.partition
    elif isinstance(given, PartitionSpec):
        p = given
    else:
        return [Problem(f"the spec {given!r}", "a leaf of specs is a P, a Spec or None",
                        "P('x'), or P() for a value that is whole on every rank")]  # fmt: skip
    return [_axis_problem(axis, p, scope) for axis in p.axes if axis not in scope.axes]


def _axis_problem(axis: str, p: PartitionSpec, scope: Scope) -> Problem:
    known = scope.named_mesh.axes
    if axis not in known:
        return Problem(f"axis {axis!r} on {scope.named_mesh}", f"the mesh's axes are {', '.join(known)}",
                       did_you_mean(axis, known, f"use one of {', '.join(known)}"))  # fmt: skip
    if axis in scope.bound_axes:
        fix = f"leave {axis!r} out: each of its ranks maps what it holds"
    else:
        names = ", ".join(repr(a) for a in scope.mesh.axes if a in scope.axes or a == axis)
        fix = f"axis_names={{{names}}}"
    return Problem(f"axis {axis!r} in {p!r}",
                   f"the axes that are mapped here are {", ".join(scope.mapped_axes)}", fix)  # fmt: skip


# -- arguments ------------------------------------------------------------------------


def place_all(
    where: str,
    slots: Sequence[PathSpec],
    values: Sequence[Any],
    scope: Scope,
    transport: Transport | None,
    redistribute_inputs: bool,
) -> tuple[Argument, ...]:
    """How every argument becomes a local; raises `ShardingError`, all failures at once."""

    def place(path: str, given: Any, value: Any) -> Argument:
        if given is None:
            return Argument(path)
        if is_pair(value):
            spec, prog = _place_pair(where, value, given, scope, transport, redistribute_inputs)
            return Argument(path, spec, FIRST if prog is None else lambda pair: prog(pair[0]))
        if isinstance(value, torch.Tensor):
            spec = _place_tensor(value, given, scope)
            check_sharding(value, spec)
            every = transport is None
            cut = lambda x: lay_out(x, spec) if every else shard(x, spec).local  # noqa: E731
            return Argument(path, spec, cut)
        if not isinstance(given, PartitionSpec) or given.axes:
            fail(
                where,
                f"a value of type {type(value).__name__} with {_word(given)}",
                "only tensors and pairs can be cut",
                "torch.as_tensor(x) of an array; None, or P() for a number",
            )
        return Argument(path)

    rows = [(path, (path, given, x)) for (path, given), x in zip(slots, values, strict=True)]
    return tuple(_each(where, place, rows))


def _word(given: Any) -> str:
    return f"{given.keyword} {given.dim}" if isinstance(given, DimSpec) else repr(given)


def _place_tensor(value: torch.Tensor, given: Any, scope: Scope) -> Spec:
    """A plain tensor: a global value along the mapped axes, of which each rank takes its part."""
    if isinstance(given, Spec):
        spec = scope.adopt(given)
        assert spec is not None
        return spec
    p = given.of(value.ndim) if isinstance(given, DimSpec) else given
    try:
        return _even(scope.mesh, p, value.shape, value.dtype)
    except ShardingError as error:
        place = "a Spec in in_specs" if given is p else "fs.shard_map and a Spec"
        way = "uneven=", f"{place} with uneven="
        raise_if("", [Problem(p.given, p.rule, p.fix.replace(*way)) for p in error.problems])
        raise


def _place_pair(
    where: str,
    pair: tuple[Any, Spec],
    given: Any,
    scope: Scope,
    transport: Transport | None,
    redistribute_inputs: bool,
) -> tuple[Spec, Program | None]:
    """A pair: its locals are the ranks' own, once they lie as `in_specs` ask."""
    local = pair[0]
    spec, target = _agreed(where, pair[1], given, scope)
    prog = None if target == spec else redistribute(spec, target)
    if prog is not None and not redistribute_inputs:
        fail(where, f"a pair of {spec}", f"in_specs ask for {target}", _fix(prog))
    if transport is None:
        check_shards(local, spec, where)
    else:
        check_local(local, spec, transport, where)
    return target, prog


@lru_cache(maxsize=4096)
def _agreed(where: str, spec: Spec, given: Any, scope: Scope) -> tuple[Spec, Spec]:
    """The spec of a pair on the mesh that is mapped over, and the one that is asked for."""
    spec = _on_scope(where, spec, scope)
    if isinstance(given, Spec):
        target = scope.adopt(given)
        assert target is not None
        return spec, target
    p = given.of(spec.ndim) if isinstance(given, DimSpec) else given
    return spec, spec.replace(partition=p, uneven="chunk")


def _fix(prog: Program) -> str:
    """The program that brings a pair to its in_spec, and what it costs."""
    cost = prog.cost()
    launches = "1 launch" if cost.launches == 1 else f"{cost.launches} launches"
    lines = str(prog).replace("\n", "\n           ")
    return (
        "redistribute_inputs=True, or fs.reshard(pair, spec) before the call; it sends at most "
        f"{cost.bytes_sent:,} B per rank in {launches}:\n           {lines}"
    )


def _on_scope(where: str, spec: Spec, scope: Scope) -> Spec:
    """The spec of a pair on the mesh that is mapped over."""
    adopted = scope.adopt(spec)
    odd = [axis for axis in spec.partition.axes if axis not in scope.axes]
    known = [axis for axis in odd if axis in scope.named_mesh.axes]
    if adopted is None and not (known and scope.named_mesh == spec.mesh):
        fail(
            where,
            f"a pair of {spec} on {spec.mesh}",
            f"the mesh is {scope.mesh}",
            "unshard it, or map over its mesh",
        )
    if not odd:
        assert adopted is not None
        return adopted
    axes = ", ".join(map(repr, odd))
    names = ", ".join(repr(a) for a in scope.named_mesh.axes if a in scope.axes or a in odd)
    mapped = any(axis in scope.bound_axes for axis in odd)
    fail(
        where,
        f"a pair of {spec}, along {axes}",
        f"a pair lies along the axes that are mapped here only: {", ".join(scope.mapped_axes)}",
        "fs.local_map, which maps all axes of a pair"
        if mapped
        else f"axis_names={{{names}}}, or fs.reshard(pair, spec) without {axes}",
    )


# -- results --------------------------------------------------------------------------


def result_specs(
    where: str,
    results: Sequence[tuple[str, Any, Any]],
    arguments: Sequence[Argument],
    scope: Scope,
    transport: Transport | None,
) -> list[Spec]:
    """The specs of tensors of all ranks, or of this one.

    `results` are paths, out specs and locals; raises `ShardingError`, all failures at once.
    """

    def read(given: Any, local: Any) -> Spec:
        return _result_spec(where, local, given, arguments, scope, transport)

    return _each(where, read, [(path, (given, local)) for path, given, local in results])


def _result_spec(
    where: str,
    local: Any,
    given: Any,
    arguments: Sequence[Argument],
    scope: Scope,
    transport: Transport | None,
) -> Spec:
    """The spec of a result, read off the locals at hand and the arguments' uneven dims."""
    mesh = scope.mesh
    shards = [(transport.rank, local)] if transport else list(zip(mesh.ranks, local, strict=True))
    rank, first = shards[0]
    if given is None:
        fail(
            where,
            f"a tensor of shape {tuple(first.shape)} with the out spec None",
            "None is for what is no tensor",
            "P() promises a value that is equal on every rank, P('x') puts dim 0 together",
        )
    if isinstance(given, Spec):
        spec = scope.adopt(given)
        assert spec is not None
    else:
        p = given.of(first.ndim) if isinstance(given, DimSpec) else given
        if len(p) > first.ndim:
            fail(
                where,
                f"a local of {first.ndim} dims with {p!r}",
                f"a tensor of {first.ndim} dims has at most {first.ndim} entries",
                "unsqueeze a scalar, x[None], to cut it" if first.ndim == 0 else "drop entries",
            )
        uneven = [each.spec for each in arguments if each.spec and not each.spec.is_even]
        spec = _global_spec(first.shape, first.dtype, p, rank, tuple(uneven), scope)
    for each, shard_ in shards:
        if shard_.shape != spec.local_shape(each) or shard_.dtype != spec.dtype:
            fail(
                where,
                f"rank {each} returned shape {tuple(shard_.shape)}, {shard_.dtype}",
                f"{spec} has there shape {spec.local_shape(each)}, {spec.dtype}",
                "give a Spec with sizes= as the out spec of an uneven result",
            )
    return spec


@lru_cache(maxsize=4096)
def _global_spec(
    local: tuple[int, ...],
    dtype: torch.dtype,
    p: PartitionSpec,
    rank: int,
    arguments: tuple[Spec, ...],
    scope: Scope,
) -> Spec:
    """The spec of a partition and one local: even, or with the sizes an argument has there."""
    mesh, shape, sizes = scope.mesh, list(local), {}
    uneven = [
        (axes, spec.shard_sizes(dim))
        for spec in arguments
        for dim, axes in enumerate(spec.partition.dims)
        if spec.sizes[dim] is not None
    ]
    for dim, axes in enumerate(p.dims):
        place = mesh.index(rank, axes) if axes and uneven else 0
        found = {cut for names, cut in uneven if names == axes and cut[place] == shape[dim]}
        if len(found) == 1:
            (sizes[dim],) = found
        if axes:
            shape[dim] = sum(sizes[dim]) if dim in sizes else shape[dim] * mesh.axis_size(axes)
    return Spec(mesh, p, shape=shape, dtype=dtype, sizes=sizes)


def check_others(where: str, results: Sequence[tuple[str, Any, Any]]) -> None:
    """Raise `ShardingError` for results that are no tensors and have a spec that cuts them."""
    raise_if(
        where,
        [
            Problem(
                f"{path}: a {type(value).__name__} with the out spec {_word(given)}",
                "only tensors can be cut",
                "None, or P() for a number; torch.tensor([value]) to put the ranks' together",
            )
            for path, given, value in results
            if given is not None and (not isinstance(given, PartitionSpec) or given.axes)
        ],
    )


def nothing(scope: Scope, out_specs: Any, pairs: bool) -> Any:
    """What a rank outside of the mesh gets: empty results, of the dims that `out_specs` tell."""

    def leaf(given: Any) -> Any:
        if given is None:
            return None
        if isinstance(given, Spec):
            empty = torch.empty((0,) * max(1, given.ndim), dtype=given.dtype)
            return Sharded(empty, given) if pairs else empty
        p: PartitionSpec = given.smallest if isinstance(given, DimSpec) else given
        empty = torch.empty((0,) * max(1, len(p)))
        return Sharded(empty, Spec(scope.mesh, p, shape=empty.shape)) if pairs else empty

    return map_leaves(leaf, out_specs)
