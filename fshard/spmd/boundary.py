"""Boundary of a mapped function: arguments to locals, locals to global tensors or pairs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from fshard._torch.symbolic_numbers import has_symbolic_sizes
from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import Problem, ShardingError, did_you_mean, fail, raise_if
from fshard._util.text import type_name
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import flatten, map_leaves, non_tensor_problem, opaque_problem, paths
from fshard.plan.redistribute import redistribute
from fshard.program.program import Program
from fshard.run.autograd.replicate import CotangentCheck, GlobalInput, compare_values
from fshard.run.execute import check_local, check_shards
from fshard.run.global_tensors import check_sharding, local_of, shard_blocks, shard_program
from fshard.run.graphs.blocks import block_shape
from fshard.run.transports.base import Label, Transport, check_device, labelled, warn_alone
from fshard.spmd.in_specs import Argument, DimSpec, PathSpec
from fshard.spmd.mesh_scope import Scope
from fshard.spmd.rank_calls import Locals
from fshard.spmd.simulated_map import Slots
from fshard.spmd.types import UNSEEN, format_axes

LOCAL_OF_PAIR = operator.attrgetter("local")


@lru_cache(maxsize=CACHE_SIZE)
def _even_spec(mesh: Mesh, p: PartitionSpec, shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
    return Spec(mesh, p, shape=shape, dtype=dtype)


def _call_all(
    where: str, function: Callable[..., Any], rows: Iterable[tuple[str, tuple[Any, ...]]]
) -> list[Any]:
    """Return `function(*args)` of all rows (path, args); raise one error with all failures."""
    results: list[Any] = []
    problems: list[Problem] = []
    for path, args in rows:
        try:
            results.append(function(*args))
        except ShardingError as error:
            if not error.problems:
                raise
            problems += _at_path(path, error.problems)
    raise_if(where, problems)
    return results


def _at_path(path: str, problems: Iterable[Problem]) -> list[Problem]:
    return [Problem(f"{path}: {p.given}", p.rule, p.fix) for p in problems]


# -- specs ----------------------------------------------------------------------------


def check_specs(where: str, scope: Scope, in_specs: Sequence[PathSpec], out_specs: Any) -> None:
    """Raise `ShardingError` for leaves of `in_specs` and `out_specs` that the scope forbids."""
    leaves = zip(paths(out_specs, "out_specs"), flatten(out_specs)[0], strict=True)
    problems: list[Problem] = []
    for path, leaf in (*in_specs, *leaves):
        problems += _at_path(path, _spec_problems(leaf, scope))
    raise_if(where, problems)


def _spec_problems(leaf: Any, scope: Scope) -> list[Problem]:
    if leaf is None or isinstance(leaf, DimSpec):
        return []
    if isinstance(leaf, Spec):
        if scope.adopt(leaf) is None:
            return [Problem(f"the spec {leaf} on {leaf.mesh}", f"the mesh is {scope.named_mesh}",
                            "given.replace(mesh=mesh)")]  # fmt: skip
        p = leaf.partition
    elif isinstance(leaf, PartitionSpec):
        p = leaf
    else:
        return [Problem(f"the spec {leaf!r} of type {type_name(leaf)}",
                        "a leaf of specs must be a P, a Spec or None",
                        "P('x'), or P() for a value that is equal on every rank")]  # fmt: skip
    return [_axis_problem(axis, p, scope) for axis in p.axes if axis not in scope.axes]


def _axis_problem(axis: str, p: PartitionSpec, scope: Scope) -> Problem:
    known = scope.named_mesh.axes
    if axis not in known:
        return Problem(f"axis {axis!r} on {scope.named_mesh}",
                       f"an axis must be one of {', '.join(known)}",
                       did_you_mean(axis, known, f"use one of {', '.join(known)}"))  # fmt: skip
    if axis in scope.bound_axes:
        fix = f"leave {axis!r} out: each of its ranks maps its own values"
    else:
        names = ", ".join(repr(a) for a in scope.mesh.axes if a in scope.axes or a == axis)
        fix = f"axis_names={{{names}}}"
    rule = f"the axes that are mapped here are {', '.join(scope.mapped_axes)}"
    return Problem(f"axis {axis!r} in {p!r}", rule, fix)


# -- arguments ------------------------------------------------------------------------


def at_boundary(where: str, mesh: Mesh) -> labelled:
    """Return a context whose collectives redistribute arguments and gather results."""
    return labelled(_boundary_label(where, mesh))


@lru_cache(maxsize=CACHE_SIZE)
def _boundary_label(where: str, mesh: Mesh) -> Label:
    return Label(f"the boundary of {where}", mesh)


def uneven_axes(arguments: Sequence[Argument]) -> frozenset[str]:
    """Return the axes along which shards of an argument have different sizes."""
    specs = [arg.spec for arg in arguments if arg.spec is not None]
    return frozenset(
        axis for spec in specs for axes, sizes in zip(spec.partition.dims, spec.sizes, strict=True)
        if sizes is not None for axis in axes
    )  # fmt: skip


def plan_arguments(
    where: str,
    in_specs: Sequence[PathSpec],
    values: Sequence[Any],
    scope: Scope,
    transport: Transport | None,
    redistribute_inputs: bool,
    typed: bool,
) -> tuple[Argument, ...]:
    """Return how every argument becomes a local; raise `ShardingError` with all failures.

    A simulation raises for gradients that differ between ranks, whether types are tracked or not.
    """

    def plan(path: str, leaf: Any, value: Any) -> Argument:
        if leaf is None or value is None:
            return Argument(path)
        if isinstance(value, Sharded):
            spec, prog = _plan_pair(where, value, leaf, scope, transport, redistribute_inputs)
            run = LOCAL_OF_PAIR if prog is None else lambda pair: prog(pair.local)
            return Argument(path, spec, run)
        if isinstance(value, torch.Tensor):
            spec = _tensor_spec(value, leaf, scope)
            check_sharding(value, spec)
            if transport is None:
                check = _gradient_check(where, path, spec, typed)
                slot = GlobalInput(shard_program(spec), check, copied=True)
                return Argument(path, spec, slot=slot)
            if has_symbolic_sizes(value):
                return Argument(path, spec, partial(shard_blocks, spec=spec))
            return Argument(path, spec, lambda x: local_of(x, spec, where))
        if not isinstance(leaf, PartitionSpec) or leaf.axes:
            if opaque := opaque_problem(value, f"with {_describe(leaf)} a value that"):
                raise_if(where, [opaque])
            fail(where, f"a value of type {type(value).__name__} with {_describe(leaf)}",
                 "only tensors and pairs can be sharded",
                 "torch.as_tensor(x) of an array; None, or P() for a number")  # fmt: skip
        return Argument(path)

    rows = [(path, (path, leaf, x)) for (path, leaf), x in zip(in_specs, values, strict=True)]
    return tuple(_call_all(where, plan, rows))


def slots_of(arguments: Sequence[Argument], values: Sequence[Any]) -> tuple[Slots, Locals]:
    """Return the slots of the arguments with a spec, in a simulation, and their tensors."""
    warn_alone()
    slots: list[GlobalInput | None] = []
    flat: list[torch.Tensor] = []
    for arg, value in zip(arguments, values, strict=True):
        if arg.spec is None:
            continue
        slots.append(arg.slot)
        if arg.slot is None:
            flat += arg.to_local(value)
        else:
            check_sharding(value, arg.spec)
            flat.append(value)
    return tuple(slots), tuple(flat)


def closure_input(
    where: str, mesh: Mesh, typed: bool, x: torch.Tensor, is_shared: bool
) -> GlobalInput:
    """Return the slot of a tensor that is no argument of a function.

    One that all ranks share, which the function closes over, has equal gradients on all of them.
    Others are of one rank, and the gradients of the other ranks are zero.
    """
    p = PartitionSpec() if is_shared else PartitionSpec(reduced=set(mesh.axes))
    spec = Spec(mesh, p, shape=x.shape, dtype=x.dtype)
    check = _gradient_check(where, "closure", spec, typed) if is_shared else None
    return GlobalInput(shard_program(spec), check)


def _gradient_check(where: str, path: str, spec: Spec, typed: bool) -> CotangentCheck | None:
    """Return a check that gradients are equal along the axes that `spec` omits; None without."""
    mesh, p = spec.mesh, spec.partition
    axes = tuple([axis for axis in mesh.axes if axis not in p.axes])
    ranks, along = list(mesh.ranks), format_axes(axes)
    if mesh.axis_size(axes) == 1:
        return None

    def refuse(first: int, other: int, *_: torch.Tensor) -> None:
        rule = f"along {', '.join(axes)}, which the spec omits, a gradient must be equal: "
        fix = f"fs.pcast({path}, {along}, to='varying') before its use"
        fail(where,
             f"{path}: gradients that differ on ranks {ranks[first]} and {ranks[other]}",
             rule + (f"a branch may use it on some ranks alone; else {UNSEEN}" if typed else
                     "check=False sums none, and under torchrun every rank keeps its part"),
             f"torch.where(condition, a, b) in the place of a branch; else {fix}" if typed else
             f"{fix}; or check=True, which inserts it")  # fmt: skip

    groups = [[ranks.index(rank) for rank in group] for group in mesh.groups(axes)]
    return lambda cotangents: compare_values(cotangents, groups, refuse)


def _describe(leaf: Any) -> str:
    return f"{leaf.keyword} {leaf.dim}" if isinstance(leaf, DimSpec) else repr(leaf)


def _partition_of(leaf: Any, ndim: int) -> PartitionSpec:
    """Return the partition that a leaf of specs means for a tensor of `ndim` dims."""
    p: PartitionSpec = leaf.of(ndim) if isinstance(leaf, DimSpec) else leaf
    return p


def _adopted(leaf: Spec, scope: Scope) -> Spec:
    """Return a checked `Spec` of `in_specs` or `out_specs` on the mesh that is mapped over."""
    spec = scope.adopt(leaf)
    assert spec is not None
    return spec


def _tensor_spec(value: torch.Tensor, leaf: Any, scope: Scope) -> Spec:
    """Return the spec of a plain tensor, which is a global value along the mapped axes."""
    if isinstance(leaf, Spec):
        return _adopted(leaf, scope)
    p = _partition_of(leaf, value.ndim)
    try:
        return _even_spec(scope.mesh, p, _planned_shape(value, scope.mesh, p), value.dtype)
    except ShardingError as error:
        option = "a Spec in in_specs" if leaf is p else "fs.shard_map and a Spec"
        texts = "uneven=", f"{option} with uneven="
        raise_if("", [Problem(p.given, p.rule, p.fix.replace(*texts)) for p in error.problems])
        raise


def _planned_shape(x: torch.Tensor, mesh: Mesh, p: PartitionSpec) -> torch.Size:
    """Return the shape of a global tensor, in blocks if symbols among its sizes divide."""
    if not has_symbolic_sizes(x):
        return x.shape
    counts = {dim: mesh.axis_size(axes) for dim, axes in enumerate(p.dims) if axes}
    if all(dim < x.ndim and x.shape[dim] % n == 0 for dim, n in counts.items()):
        return block_shape(x, counts)
    return torch.Size(map(int, x.shape))


def _plan_pair(
    where: str,
    pair: Sharded,
    leaf: Any,
    scope: Scope,
    transport: Transport | None,
    redistribute_inputs: bool,
) -> tuple[Spec, Program | None]:
    """Return the spec that `in_specs` require of a pair, and the program there if one is needed."""
    local = pair.local
    spec, target = _pair_specs(where, pair.spec, leaf, scope)
    prog = None if target == spec else redistribute(spec, target)
    if prog is not None and not redistribute_inputs:
        fail(where, f"a pair of {spec}", f"in_specs require {target}", _redistribute_fix(prog))
    if transport is None:
        check_shards(local, spec, where)
    else:
        check_local(local, spec, transport, where)
        check_device(local.device, transport, where)
    return target, prog


@lru_cache(maxsize=CACHE_SIZE)
def _pair_specs(where: str, spec: Spec, leaf: Any, scope: Scope) -> tuple[Spec, Spec]:
    """Return the spec of a pair on the mesh that is mapped over, and the required one."""
    spec = _adopt_pair_spec(where, spec, scope)
    if isinstance(leaf, Spec):
        return spec, _adopted(leaf, scope)
    return spec, spec.replace(partition=_partition_of(leaf, spec.ndim), uneven="chunk")


def _redistribute_fix(prog: Program) -> str:
    """Return a fix with the program that redistributes a pair to its in_spec, and its cost."""
    cost = prog.cost()
    launches = "1 launch" if cost.launches == 1 else f"{cost.launches} launches"
    lines = str(prog).replace("\n", "\n           ")
    return (
        "redistribute_inputs=True, or fs.reshard(pair, spec) before the call; it sends at most "
        f"{cost.bytes_sent:,} B per rank in {launches}:\n           {lines}"
    )


def _adopt_pair_spec(where: str, spec: Spec, scope: Scope) -> Spec:
    """Return a pair's spec on the mesh that is mapped over; raise if it has other axes."""
    adopted = scope.adopt(spec)
    unmapped = [axis for axis in spec.partition.axes if axis not in scope.axes]
    known = [axis for axis in unmapped if axis in scope.named_mesh.axes]
    if adopted is None and not (known and scope.named_mesh == spec.mesh):
        fail(where, f"a pair of {spec} on {spec.mesh}", f"the mesh is {scope.mesh}",
             "unshard it, or map over its mesh")  # fmt: skip
    if not unmapped:
        assert adopted is not None
        return adopted
    axes = ", ".join(map(repr, unmapped))
    names = ", ".join(
        repr(axis) for axis in scope.named_mesh.axes if axis in scope.axes or axis in unmapped
    )
    fail(
        where,
        f"a pair of {spec}, along {axes}",
        f"the axes of a pair must be mapped here; mapped are {', '.join(scope.mapped_axes)}",
        "fs.local_map, which maps all axes of a pair"
        if any(axis in scope.bound_axes for axis in unmapped)
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
    """Return the specs of the tensors in results; raise `ShardingError` with all failures.

    Args:
        where: function, for errors.
        results: path, out spec and local (all shards in a simulation) of each tensor.
        arguments: the call's arguments; results take uneven shard sizes from them.
        scope: scope of the call.
        transport: this rank's transport, None in a simulation.
    """

    def spec_of(leaf: Any, local: Any) -> Spec:
        return _result_spec(where, local, leaf, arguments, scope, transport)

    return _call_all(where, spec_of, [(path, (leaf, local)) for path, leaf, local in results])


def _result_spec(
    where: str,
    local: Any,
    leaf: Any,
    arguments: Sequence[Argument],
    scope: Scope,
    transport: Transport | None,
) -> Spec:
    """Return the spec of a result, from the shapes of its locals and the arguments' sizes."""
    mesh = scope.mesh
    shards = [(transport.rank, local)] if transport else list(zip(mesh.ranks, local, strict=True))
    first_rank, first = shards[0]
    if leaf is None:
        fail(where, f"a tensor of shape {tuple(first.shape)} with the out spec None",
             "the out spec None is for results other than tensors",
             "P() promises a value that is equal on every rank, P('x') concatenates along dim 0",
        )  # fmt: skip
    if isinstance(leaf, Spec):
        spec = _adopted(leaf, scope)
    else:
        p = _partition_of(leaf, first.ndim)
        if len(p) > first.ndim:
            fail(where, f"a local of {first.ndim} dims with {p!r}",
                 f"a tensor of {first.ndim} dims must have at most {first.ndim} entries",
                 "unsqueeze a scalar, x[None], to shard it" if first.ndim == 0 else "drop entries",
            )  # fmt: skip
        uneven = tuple([arg.spec for arg in arguments if arg.spec and not arg.spec.is_even])
        spec = _global_spec(block_shape(first), first.dtype, p, first_rank, uneven, scope)
    for rank, x in shards:
        if block_shape(x) != spec.local_shape(rank) or x.dtype != spec.dtype:
            fail(where, f"rank {rank} returned shape {tuple(x.shape)}, {x.dtype}",
                 f"{spec} has there shape {spec.local_shape(rank)}, {spec.dtype}",
                 "give a Spec with sizes= as the out spec of an uneven result")  # fmt: skip
    return spec


@lru_cache(maxsize=CACHE_SIZE)
def _global_spec(
    local: tuple[int, ...],
    dtype: torch.dtype,
    p: PartitionSpec,
    rank: int,
    uneven: tuple[Spec, ...],
    scope: Scope,
) -> Spec:
    """Return the spec of a partition and one local: even, or with the sizes of an argument."""
    mesh, shape, sizes = scope.mesh, list(local), {}
    candidates = [
        (axes, spec.shard_sizes(dim))
        for spec in uneven
        for dim, axes in enumerate(spec.partition.dims)
        if spec.sizes[dim] is not None
    ]
    for dim, axes in enumerate(p.dims):
        index = mesh.index(rank, axes) if axes and candidates else 0
        fitting = {s for names, s in candidates if names == axes and s[index] == shape[dim]}
        if len(fitting) == 1:
            (sizes[dim],) = fitting
        if axes:
            shape[dim] = sum(sizes[dim]) if dim in sizes else shape[dim] * mesh.axis_size(axes)
    return Spec(mesh, p, shape=shape, dtype=dtype, sizes=sizes)


def result_problems(result: Any, leaves: Sequence[Any]) -> list[Problem]:
    """Return the problems of the leaves of a mapped function's result, in any out spec."""
    problems: list[Problem] = []
    for leaf, path in zip(leaves, paths(result, "result"), strict=True):
        opaque = opaque_problem(leaf, path)
        if opaque is not None:
            problems.append(opaque)
        elif isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            problems.append(Problem(f"{path}: a tensor of {leaf.layout}",
                                    "a tensor that is returned must be dense",
                                    "return x.to_dense()"))  # fmt: skip
    return problems


def check_non_tensors(where: str, results: Iterable[tuple[str, Any, Any]]) -> None:
    """Raise `ShardingError` for results other than tensors whose out spec is of a tensor."""
    fix = "; torch.tensor([value]) to concatenate the ranks' values"
    problems = (
        non_tensor_problem(value, leaf, path, _describe(leaf), fix) for path, leaf, value in results
    )
    raise_if(where, [problem for problem in problems if problem is not None])


def empty_results(scope: Scope, out_specs: Any, pairs: bool) -> Any:
    """Return the results of a rank outside of the mesh: empty tensors in the tree `out_specs`."""

    def empty(leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, Spec):
            x = torch.empty((0,) * max(1, leaf.ndim), dtype=leaf.dtype)
            return Sharded(x, leaf) if pairs else x
        p: PartitionSpec = leaf.smallest if isinstance(leaf, DimSpec) else leaf
        x = torch.empty((0,) * max(1, len(p)))
        return Sharded(x, Spec(scope.mesh, p, shape=x.shape)) if pairs else x

    return map_leaves(empty, out_specs)
