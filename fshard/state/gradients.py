"""Trees of gradients: computed beside a loss, added up without communication, and clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import flatten, flatten_like, leaf_names, unflatten
from fshard.run.global_tensors import unshard
from fshard.state.local_updates import map_locals
from fshard.state.parameters import tree_reshard


def value_and_grad(
    fn: Callable[..., Any], /, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that computes a loss and the gradients of its first argument.

    Args:
        fn: function of a tree of pairs and of other arguments to a scalar: a pair, as
            `fs.partition` and `fs.shard_map` return it, or a tensor.
        has_aux: True if `fn` returns `(scalar, anything)`.

    Returns:
        A function with the arguments of `fn` that returns `(value, grads)`, or
        `((value, aux), grads)`. The value is a tensor. Every gradient is a pair in the dual layout
        `pair.spec.dual`: unreduced along an axis that the parameter is `reduced` on. Leaves that
        are not pairs of a floating dtype have None.

    Raises:
        ShardingError: from the call, if the first argument has no pair of a floating dtype.

    After `jax.value_and_grad`.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=2)
    >>> loss_fn = fs.partition(lambda w, x: (x * w["scale"]).sum(), mesh=mesh)
    >>> params = fs.state.tree_shard({"scale": torch.ones(2)}, fs.P("x"), mesh=mesh)
    >>> x = fs.shard(torch.tensor([3.0, 4.0]), mesh, fs.P("x"))
    >>> value, grads = fs.state.value_and_grad(loss_fn)(params, x)
    >>> value, fs.unshard(grads["scale"])
    (tensor(7.), tensor([3., 4.]))
    """

    def run(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, treedef = flatten(params)
        tracked = [_tracked(leaf) for leaf in leaves]
        inputs = [x for leaf in tracked if leaf is not None for x in _tensors(leaf)]
        if not inputs:
            fail("fs.state.value_and_grad", "a first argument without pairs of a floating dtype",
                 "the first argument must be a tree with pairs that have gradients",
                 "fs.state.tree_shard(params, specs, mesh=mesh)")  # fmt: skip
        pairs = [leaf if new is None else new for leaf, new in zip(leaves, tracked, strict=True)]
        with torch.enable_grad():
            result = fn(unflatten(treedef, pairs), *args, **kwargs)
            value, aux = result if has_aux else (result, None)
            value = value if isinstance(value, torch.Tensor) else unshard(value)
            grads = iter(torch.autograd.grad(value, inputs, materialize_grads=True))
        gradients = [
            None if leaf is None
            else Sharded(next(grads) if isinstance(leaf.local, torch.Tensor)
                         else tuple(next(grads) for _ in leaf.local), leaf.spec.dual)
            for leaf in tracked
        ]  # fmt: skip
        value = value.detach()
        return ((value, aux) if has_aux else value), unflatten(treedef, gradients)

    return run


def _tracked(leaf: Any) -> Sharded | None:
    """Return a pair of new leaves of autograd, None for a leaf without a gradient."""
    if not isinstance(leaf, Sharded) or not leaf.spec.dtype.is_floating_point:
        return None
    (local,) = map_locals(lambda xs: [x.detach().requires_grad_() for x in xs], [leaf])
    return Sharded(local, leaf.spec)


def _tensors(pair: Sharded) -> Sequence[torch.Tensor]:
    return [pair.local] if isinstance(pair.local, torch.Tensor) else pair.local


def accumulate(total: Any, grads: Any, /, *, weight: float = 1.0) -> Any:
    """Add a tree of gradients to a total, without communication.

    Gradients that are unreduced stay so: with parameters that are `reduced` along the axes of the
    batch, several micro-batches need one reduction, in `fs.state.tree_reshard(total, ...)` or
    in the optimizer.

    Args:
        total: the total so far, None at first.
        grads: tree of pairs, in the layouts of `total`.
        weight: factor of `grads`, as 1 / number of micro-batches.

    Returns:
        The tree `total + weight * grads`, in new memory.

    Raises:
        ShardingError: the trees or the layouts differ, or an unreduced value is not a sum.

    >>> import torch
    >>> import fshard as fs
    >>> spec = fs.Spec(fs.Mesh(dp=2), fs.P(unreduced={"dp"}), shape=(1,))
    >>> grads = {"w": fs.Sharded((torch.ones(1), torch.ones(1)), spec)}
    >>> total = fs.state.accumulate(fs.state.accumulate(None, grads), grads)
    >>> fs.state.tree_unshard(total)
    {'w': tensor([4.])}
    """
    where = "fs.state.accumulate"
    leaves, treedef = flatten(grads)
    totals = [None] * len(leaves) if total is None else [
        leaf for subtree in flatten_like(grads, total, ("grads", "total"), where)
        for leaf in flatten(subtree)[0]
    ]  # fmt: skip
    raise_if(where, [
        Problem(f"{name}: {_text(new)} added to {_text(old)}",
                "gradients must be pairs of one layout, sums where they are unreduced",
                "fs.state.tree_reshard(grads, specs) with those of total")
        for name, new, old in zip(leaf_names(grads), leaves, totals, strict=True)
        if new is not None and not _adds_up(new, old)
    ])  # fmt: skip

    def add(leaf: Any, old: Any) -> Any:
        if leaf is None:
            return old
        if old is None:
            (local,) = map_locals(lambda xs: [weight * x for x in xs], [leaf])
        else:
            (local,) = map_locals(lambda xs: [torch.add(*xs, alpha=weight)], [old, leaf])
        return Sharded(local, leaf.spec)

    with torch.no_grad():
        return unflatten(treedef, [*map(add, leaves, totals)])


def _adds_up(new: Any, old: Any) -> bool:
    if not isinstance(new, Sharded):
        return False
    kinds = {kind for _, kind in new.spec.partition.unreduced_kinds}
    return kinds <= {"sum", "avg"} and (old is None or old.spec == new.spec)


def _text(leaf: Any) -> str:
    return str(leaf.spec) if isinstance(leaf, Sharded) else type(leaf).__name__


def clip_by_global_norm(
    grads: Any, max_norm: float, /, *, eps: float = 1e-6
) -> tuple[Any, torch.Tensor]:
    """Scale a tree of gradients so that their joint norm is at most `max_norm`.

    One all-reduce of a scalar over the axes that shard some gradient. Replicated gradients count
    once.

    Args:
        grads: tree of pairs of one mesh, none unreduced; other leaves stay as they are.
        max_norm: the largest norm of all elements together.
        eps: added to the norm in the quotient `max_norm / (norm + eps)`.

    Returns:
        The scaled tree in the same layouts, and the norm before, a scalar tensor on every rank.

    Raises:
        ShardingError: a gradient is unreduced, there are several meshes, or `max_norm` is not a
            number above 0.

    The values of `torch.nn.utils.clip_grad_norm_`.

    >>> import torch
    >>> import fshard as fs
    >>> grads = fs.state.tree_shard({"w": torch.tensor([3.0, 4.0])}, fs.P("x"), mesh=fs.Mesh(x=2))
    >>> clipped, norm = fs.state.clip_by_global_norm(grads, 1.0)
    >>> norm, fs.unshard(clipped["w"])
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    where = "fs.state.clip_by_global_norm"
    leaves, treedef = flatten(grads)
    pairs = [leaf for leaf in leaves if isinstance(leaf, Sharded)]
    raise_if(where, [
        Problem(f"{name}: {leaf.spec}", "gradients must be reduced before their norm is taken",
                "fs.state.tree_reshard(grads, specs) before")
        for name, leaf in zip(leaf_names(grads), leaves, strict=True)
        if isinstance(leaf, Sharded) and leaf.spec.partition.unreduced_kinds
    ])  # fmt: skip
    if not isinstance(max_norm, int | float) or not max_norm > 0:
        fail(where, f"max_norm={max_norm!r}", "max_norm must be a number above 0",
             "max_norm=1.0, say; inf takes the norm and clips nothing")  # fmt: skip
    meshes = {pair.spec.mesh for pair in pairs}
    if len(meshes) != 1:
        fail(where, f"pairs on {len(meshes)} meshes", "gradients must be pairs on one mesh",
             "fs.state.tree_reshard(grads, specs) before")  # fmt: skip
    with torch.no_grad():
        norm = unshard(_squares(pairs, *meshes)).sqrt()
        scale = (max_norm / (norm + eps)).clamp(max=1.0)
        scaled = map_locals(lambda xs: [x * scale.to(x.dtype) for x in xs], pairs)
    locals_ = iter(scaled)
    return unflatten(treedef, [
        Sharded(next(locals_), leaf.spec) if isinstance(leaf, Sharded) else leaf for leaf in leaves
    ]), norm  # fmt: skip


def _squares(pairs: Sequence[Sharded], mesh: Mesh) -> Sharded:
    """Return the sum of squares of all elements, unreduced along the axes that shard any pair."""
    sharded = [{axis for names in pair.spec.partition.dims for axis in names} for pair in pairs]
    axes = {axis for names in sharded for axis in names}
    dtype = max((pair.spec.dtype for pair in pairs), key=lambda dtype: dtype.itemsize)
    dtype = max(dtype, torch.float32, key=lambda dtype: dtype.itemsize)

    def scalar(names: set[str]) -> Spec:
        return Spec(mesh, PartitionSpec(unreduced=names), shape=(), dtype=dtype)

    by_axes: dict[frozenset[str], list[Sharded]] = {}
    for pair, names in zip(pairs, sharded, strict=True):
        by_axes.setdefault(frozenset(names), []).append(pair)
    norm = torch.linalg.vector_norm
    sums = [
        Sharded(map_locals(lambda xs: [sum(norm(x, dtype=dtype).square() for x in xs)], group)[0],
                scalar({*names}))
        for names, group in by_axes.items()
    ]  # fmt: skip
    sums = tree_reshard(sums, scalar(axes))
    (total,) = map_locals(lambda xs: [torch.stack(xs).sum()], sums)
    return Sharded(total, scalar(axes))
