"""Trees of parameters: specs by rules on their paths, creation in a layout, redistribution."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import attrgetter
from typing import Any, cast

import torch

from fshard._torch.fake_tensors import FakeTensorMode
from fshard._torch.init_functions import patched_dirac
from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import Problem, ShardingError, did_you_mean, fail, raise_if
from fshard.layout.mesh import Mesh, as_mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import (
    TENSORS,
    broadcast_prefix,
    flatten,
    leaf_names,
    local_of,
    map_leaves,
    read_placements,
    spec_of,
    unflatten,
)
from fshard.partition.partition import partition
from fshard.plan.redistribute import redistribute
from fshard.random.keys import key_problems
from fshard.run.execute import check_local, check_shards
from fshard.run.global_tensors import shard, unshard
from fshard.run.transports.base import Transport, current_transport

Rules = Sequence[tuple[str, PartitionSpec | None]]
"""Pairs of a regular expression on paths and a partition, None for a leaf without one."""


def match_rules(rules: Rules, tree: Any, /, *, mesh: Mesh | None = None) -> Any:
    r"""Return the partition of every leaf of a tree, by the first rule that matches its path.

    The path of a leaf consists of its keys joined by dots, as the names of a module's `state_dict`:
    `layers.0.attention.wq.weight`. A rule must match the path from its first character to its last.
    Tensors of no dims are `P()` without a rule.

    Args:
        rules: pairs `(pattern, partition)`, in order of precedence. A pattern is a regular
            expression of `re`; `.*` matches any part of a path.
        tree: pytree of tensors, pairs, specs or anything with a shape, also on the meta device.
        mesh: the mesh of the partitions: dims that they do not divide are then reported.

    Returns:
        A tree of partitions with the structure of `tree`.

    Raises:
        ShardingError: lists every leaf that no rule matches, every rule that is not used, every
            partition with more dims than its leaf, and with `mesh` every unknown axis and every dim
            that does not divide.

    After EasyLM's and T5X's partition rules.

    >>> import torch
    >>> import fshard as fs
    >>> params = {"embed.weight": torch.ones(8, 4), "out.weight": torch.ones(2, 4)}
    >>> fs.state.match_rules([(r"embed\..*", fs.P("tp")), (r".*\.weight", fs.P())], params)
    {'embed.weight': P('tp'), 'out.weight': P()}
    """
    uneven_fix = "leave mesh= out, and shard with uneven sizes"
    where = "fs.state.match_rules"
    owner = None if mesh is None else as_mesh(mesh, where)
    return matched_partitions(where, read_placements(rules, owner), tree, owner, uneven_fix)


def matched_partitions(
    where: str, rules: Rules, tree: Any, mesh: Mesh | None, uneven_fix: str
) -> Any:
    """Return the partition of every leaf, as `match_rules` does.

    Args:
        where: function, for errors.
        rules: the rules.
        tree: the tree.
        mesh: the mesh, None to accept dims that do not divide.
        uneven_fix: how the caller shards a dim that does not divide.
    """
    leaves, treedef = flatten(tree)
    names = leaf_names(tree)
    patterns = _compiled(where, rules)
    used: set[int] = set()
    problems: list[Problem] = []
    matched: list[PartitionSpec | None] = []
    for name, leaf in zip(names, leaves, strict=True):
        shape = tuple(getattr(leaf, "shape", ()))
        if isinstance(leaf, torch.nn.Module):
            fail(where, f"a {type(leaf).__name__} as a leaf", "the tree must be of tensors",
                 "dict(module.named_parameters())")  # fmt: skip
        index = next((i for i, pattern in enumerate(patterns) if pattern.fullmatch(name)), None)
        if index is None:
            if shape:
                problems.append(Problem(f"{name} of shape {shape}",
                                        "every leaf must match a rule",
                                        f'add (r"{re.escape(name)}", fs.P())'))  # fmt: skip
            matched.append(PartitionSpec())
            continue
        used.add(index)
        p = rules[index][1]
        matched.append(p)
        if p is not None:
            problems += _problems(name, shape, rules[index][0], p, mesh, uneven_fix)
    problems += [
        Problem(f"the rule {pattern!r}", "every rule must be the first that matches some leaf",
                did_you_mean(pattern, names, "remove it, or move it before the rule that matches "
                             "its leaves"))
        for index, (pattern, _) in enumerate(rules) if index not in used
    ]  # fmt: skip
    raise_if(where, problems)
    return unflatten(treedef, matched)


def _compiled(where: str, rules: Rules) -> list[re.Pattern[str]]:
    """Return the patterns of rules; raise `ShardingError` for rules that are none."""
    patterns: list[re.Pattern[str]] = []
    problems: list[Problem] = []
    for index, rule in enumerate(rules):
        try:
            pattern, p = rule
            if p is not None and not isinstance(p, PartitionSpec):
                raise TypeError(f"{p!r} is not a P")
            patterns.append(re.compile(pattern))
        except (TypeError, ValueError, re.error) as error:
            problems.append(Problem(f"rules[{index}] = {rule!r}: {error}",
                                    "a rule must be a pair of a regular expression and a P or None",
                                    '(r".*\\.weight", fs.P("tp"))'))  # fmt: skip
    raise_if(where, problems)
    return patterns


def _problems(
    name: str,
    shape: tuple[int, ...],
    pattern: str,
    p: PartitionSpec,
    mesh: Mesh | None,
    uneven_fix: str,
) -> list[Problem]:
    """Return the problems of one leaf with its partition."""
    given = f"{name} of shape {shape} with {p!r}, by the rule {pattern!r}"
    if len(p) > len(shape):
        return [Problem(given, f"a partition must have at most {len(shape)} dims, as the leaf has",
                        f'(r"{re.escape(name)}", fs.P()) before that rule')]  # fmt: skip
    if mesh is None:
        return []
    unknown = [axis for axis in p.axes if axis not in mesh.axes]
    if unknown:
        axes = ", ".join(mesh.axes)
        return [Problem(given, f"an axis must be one of {axes}, not {unknown[0]!r}",
                        did_you_mean(unknown[0], mesh.axes, f"use one of {axes}"))]  # fmt: skip
    problems = []
    for dim, names in enumerate(p.dims):
        n = mesh.axis_size(names)
        if shape[dim] % n:
            fixed = [entry if d != dim else () for d, entry in enumerate(p.dims)]
            problems.append(Problem(
                given, f"dim {dim} of size {shape[dim]} must be divisible by {n}, the ranks along "
                f"{', '.join(names)}",
                f'(r"{re.escape(name)}", fs.{PartitionSpec(*fixed)!r}) before that rule; or '
                f"{uneven_fix}"))  # fmt: skip
    return problems


def init(
    fn: Callable[..., Any], key: torch.Tensor, specs: Any, /, *args: Any, mesh: Mesh | None = None
) -> Any:
    """Create the tensors that a function of a key returns, each directly in its layout.

    The function is traced and partitioned: its draws of `fs.random` create the shards of each rank
    alone, so that a model larger than the memory of one rank is initialised, with the same values
    on every layout. A `torch.nn.Module` that it constructs within `fs.random.keyed(key)` draws its
    initial parameters so. `torch.nn.init.orthogonal_` alone computes the global tensor on every
    rank, which keeps its shard.

    Args:
        fn: function of the key, and of `args`, to a pytree of tensors.
        key: key of `fs.random`, int64 of shape `(2,)`, equal on every rank.
        specs: pytree of `P` or `Spec`, a prefix of the result's; or rules as for `match_rules`.
        args: other arguments of `fn`, replicated.
        mesh: the mesh; by default that of the specs.

    Returns:
        The tree with pairs as leaves, without gradients.

    Raises:
        ShardingError: a missing mesh, specs or rules do not fit the result, or the function
            cannot be traced.

    >>> import torch
    >>> import fshard as fs
    >>> def fn(key):
    ...     with fs.random.keyed(key):
    ...         return dict(torch.nn.Linear(4, 8).named_parameters())
    >>> params = fs.state.init(fn, fs.random.key(0), fs.P("x"), mesh=fs.Mesh(x=2))
    >>> params["weight"].spec, params["bias"].local[0].shape
    (f32[8@x,4], torch.Size([4]))
    """
    where = "fs.state.init"
    raise_if(where, key_problems(key))
    if mesh is None:
        meshes = {spec.mesh for spec in flatten(specs)[0] if isinstance(spec, Spec)}
        if len(meshes) != 1:
            fail(where, f"specs of {len(meshes)} meshes", "the mesh must be that of all specs",
                 "mesh=fs.Mesh(dp=2, tp=4)")  # fmt: skip
        (mesh,) = meshes
    mesh = as_mesh(mesh, where)
    if are_rules(specs):
        specs = match_rules(specs, shapes_of(fn, key, *args), mesh=mesh)
    part = partition(fn, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs)
    key_pair = shard(key, mesh, PartitionSpec())
    with torch.no_grad(), patched_dirac():
        return part(key_pair, *args)


def are_rules(specs: Any) -> bool:
    """Return True for a list of rules, as `match_rules` takes it."""
    return (
        isinstance(specs, list | tuple)
        and len(specs) > 0
        and all(isinstance(r, tuple) and len(r) == 2 and isinstance(r[0], str) for r in specs)
    )


def shapes_of(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function with tensors on the meta device, without computing values.

    Args:
        fn: function that makes tensors of global shapes.
        args: its arguments.

    Returns:
        The result of `fn` with fake tensors, after `jax.eval_shape`.

    >>> import torch
    >>> import fshard as fs
    >>> fs.state.shapes_of(torch.nn.Linear, 4, 8).weight.shape
    torch.Size([8, 4])
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf: Any) -> Any:
        return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

    with mode, torch.no_grad():
        return fn(*map_leaves(fake, args))


def tree_shard(tree: Any, specs: Any, /, *, mesh: Mesh | None = None) -> Any:
    """Shard a tree of global tensors that every process holds, without communication.

    Args:
        tree: pytree of tensors; other leaves stay as they are.
        specs: pytree of `P` or `Spec`, a prefix of the tree's; None leaves a tensor as it is.
        mesh: the mesh of each `P`.

    Returns:
        The tree with a pair for every tensor with a spec. The gradient of a tensor is gathered, as
        with `fs.shard`.

    Raises:
        ShardingError: the specs are not a prefix of the tree, a `P` has no mesh, or a tensor is not
            of its spec.

    >>> import torch
    >>> import fshard as fs
    >>> params = {"w": torch.ones(4, 2), "b": torch.ones(2)}
    >>> fs.state.tree_shard(params, {"w": fs.P("x"), "b": fs.P()}, mesh=fs.Mesh(x=2))["w"].spec
    f32[4@x,2]
    """
    where = "fs.state.tree_shard"
    leaves, treedef = flatten(tree)
    owner = None if mesh is None else as_mesh(mesh, where)
    layouts = broadcast_prefix(read_placements(specs, owner), tree, "specs", where)
    if owner is None and any(isinstance(layout, PartitionSpec) for layout in layouts):
        fail(where, "a P without a mesh", "the mesh of every P must be given",
             "mesh=fs.Mesh(dp=2, tp=4)")  # fmt: skip

    def place(leaf: Any, layout: Any) -> Any:
        if isinstance(layout, Spec):
            return shard(leaf, layout)
        is_placed = isinstance(leaf, torch.Tensor) and layout is not None
        return shard(leaf, cast(Mesh, owner), layout) if is_placed else leaf

    return unflatten(treedef, by_leaf(where, tree, place, leaves, layouts))


def by_leaf(where: str, tree: Any, function: Callable[..., Any], *columns: Sequence[Any]) -> Any:
    """Return the results of a function of every leaf; one error has the problems of all, by name.

    Args:
        where: the caller, for the error.
        tree: tree whose leaves the function is called for.
        function: function without effects of an item of each column.
        columns: items by leaf.
    """
    with suppress(ShardingError):
        return [*map(function, *columns)]
    problems = []
    for name, *items in zip(leaf_names(tree), *columns, strict=True):
        try:
            function(*items)
        except ShardingError as error:
            prefix = f"{name}: " if name else ""
            problems += [Problem(f"{prefix}{problem.given}", problem.rule, problem.fix)
                         for problem in error.problems]  # fmt: skip
    raise_if(where, problems)
    return [*map(function, *columns)]  # which raises


def tree_unshard(tree: Any, /) -> Any:
    """Return a tree with the global tensor of every pair, on every rank.

    Args:
        tree: pytree of pairs; other leaves stay as they are.

    Returns:
        The tree with tensors in the place of pairs. Collectives of all pairs share launches. The
        gradient of a pair is sharded as `spec.dual` says.

    Raises:
        ShardingError: a local is not of its spec.

    >>> import torch
    >>> import fshard as fs
    >>> pairs = fs.state.tree_shard([torch.arange(4)], fs.P("x"), mesh=fs.Mesh(x=2))
    >>> fs.state.tree_unshard(pairs)
    [tensor([0, 1, 2, 3])]
    """
    replicated = tree_reshard(tree, PartitionSpec())
    return map_leaves(lambda leaf: unshard(leaf) if isinstance(leaf, Sharded) else leaf, replicated)


def tree_reshard(tree: Any, specs: Any, /, **options: Any) -> Any:
    """Redistribute all pairs of a tree, by one batch of programs that share launches.

    Args:
        tree: pytree of pairs; other leaves stay as they are.
        specs: pytree of `P` or `Spec`, a prefix of the tree's; None leaves a pair as it is. Dims
            that a `P` does not divide are chunked as `torch.chunk` does.
        **options: options of `fs.redistribute`.

    Returns:
        The tree with redistributed pairs. Gradients are redistributed back, likewise in a batch.

    Raises:
        ShardingError: the specs are not a prefix of the tree, or no program exists.

    >>> import torch
    >>> import fshard as fs
    >>> pairs = fs.state.tree_shard({"w": torch.ones(4, 2)}, fs.P("x"), mesh=fs.Mesh(x=2))
    >>> fs.state.tree_reshard(pairs, fs.P(None, "x"))["w"].spec
    f32[4,2@x]
    """
    leaves, treedef = flatten(tree)
    mesh = next((leaf.mesh for leaf in leaves if isinstance(leaf, Sharded)), None)
    specs = read_placements(specs, mesh)
    layouts = broadcast_prefix(specs, tree, "specs", "fs.state.tree_reshard")

    def target_of(leaf: Any, layout: Any) -> Spec | None:
        if not isinstance(leaf, Sharded) or layout is None:
            return None
        is_spec = isinstance(layout, Spec)
        return layout if is_spec else leaf.spec.replace(partition=layout, uneven="chunk")

    targets = by_leaf("fs.state.tree_reshard", tree, target_of, leaves, layouts)
    indices = [i for i, target in enumerate(targets) if target is not None]
    moved = [leaves[i] for i in indices], [targets[i] for i in indices]
    for i, pair in zip(indices, reshard_pairs(*moved, **options), strict=True):
        leaves[i] = pair
    return unflatten(treedef, leaves)


_shape_of, _dtype_of, _device_of = map(attrgetter, ("shape", "dtype", "device"))


def _are_in_place(
    pairs: Sequence[Sharded], targets: tuple[Spec, ...], transport: Transport
) -> bool:
    """Return True if all pairs have their target's layout and locals of it, as is mostly so."""
    if tuple(map(spec_of, pairs)) != targets:
        return False
    locals_ = [*map(local_of, pairs)]
    if not {*map(type, locals_)} <= TENSORS:
        return False
    shapes_and_dtypes = [*map(_shape_of, locals_)], [*map(_dtype_of, locals_)]
    return _shapes_and_dtypes(targets, transport.rank) == shapes_and_dtypes and all(
        map(transport.accepts, {*map(_device_of, locals_)})
    )


@lru_cache(maxsize=CACHE_SIZE)
def _shapes_and_dtypes(
    specs: tuple[Spec, ...], rank: int
) -> tuple[list[torch.Size], list[torch.dtype]] | None:
    """Return the shapes and the dtypes of a rank's locals, None if a spec lacks the rank."""
    if not all(rank in spec.mesh for spec in specs):
        return None
    return [torch.Size(spec.local_shape(rank)) for spec in specs], [spec.dtype for spec in specs]


def reshard_pairs(
    pairs: Sequence[Sharded], targets: Sequence[Spec], **options: Any
) -> list[Sharded]:
    """Redistribute pairs by one batch of programs; pairs that have their target's layout stay.

    Args:
        pairs: the pairs.
        targets: the layout of each.
        **options: options of `fs.redistribute`.

    Raises:
        ShardingError: a local is not of its spec, or no program exists.
    """
    transport = current_transport()
    if transport is not None and _are_in_place(pairs, tuple(targets), transport):
        return [*pairs]
    results, moved = [*pairs], []
    for i, (pair, target) in enumerate(zip(pairs, targets, strict=True)):
        if pair.spec is not target and pair.spec != target:
            moved.append(i)
        elif transport is None:
            check_shards(pair.local, target, "fs.state.tree_reshard")
        else:
            check_local(pair.local, target, transport, "fs.state.tree_reshard")
    if moved:
        batch = redistribute([pairs[i].spec for i in moved], [targets[i] for i in moved], **options)
        locals_ = batch([pairs[i].local for i in moved])
        for i, local in zip(moved, locals_, strict=True):
            results[i] = Sharded(local, targets[i])
    return results
