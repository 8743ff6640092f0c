"""`smap`: a function mapped along one mesh axis, with dims instead of specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.tree import flatten, map_leaves, paths
from fshard.spmd.in_specs import DimSpec
from fshard.spmd.mesh_scope import check_mesh
from fshard.spmd.shard_map import mapped

__all__ = ["smap"]


def smap(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    in_axes: Any,
    out_axes: Any,
    axis_name: str,
    mesh: Mesh | None = None,
    check: bool | str = True,
) -> Any:
    """`shard_map` along one axis: which dim it cuts, or None; call or decorator form.

    `in_axes` and `out_axes` are an int, None, or a tree prefix of these, as `vmap`'s; negative
    ints count from the last dim. None is `P()`: the same value on every rank. The body may name
    the axis, and in the body of another `smap` or `shard_map` what that maps too; `mesh=None`
    takes the mesh of that. `check` is as `shard_map`'s.

    After `jax.smap` (JAX 0.11), whose negative ints mean dim 0. Raises `ShardingError` for ints
    that no dim has, and as `shard_map` does.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=2, y=2)
    >>> @smap(mesh=mesh, axis_name="x", in_axes=(0, None), out_axes=0)
    ... def rows(a, b):
    ...     return smap(torch.matmul, axis_name="y", in_axes=(None, -1), out_axes=-1)(a, b)
    >>> rows(torch.ones(2, 3), torch.ones(3, 4))
    tensor([[3., 3., 3., 3.],
            [3., 3., 3., 3.]])
    """
    check_mesh(mesh, "fs.smap")
    if not isinstance(axis_name, str):
        fail(
            "fs.smap",
            f"axis_name={axis_name!r}",
            "smap maps one axis, named by a string",
            "axis_name='x', or fs.shard_map for several",
        )
    in_specs = _specs("in_axes", in_axes, axis_name)
    out_specs = _specs("out_axes", out_axes, axis_name)
    names = frozenset({axis_name})
    options: dict[str, Any] = {"redistribute_inputs": False, "check": check}
    return mapped(fn, "fs.smap", mesh, in_specs, out_specs, names, **options)


def _specs(word: str, axes: Any, axis_name: str) -> Any:
    """The specs that `axes` mean; raises `ShardingError` for leaves that are no ints."""
    if word == "in_axes" and not isinstance(axes, int | tuple | Mapping | None):
        fail(
            "fs.smap",
            f"in_axes of type {type(axes).__name__}",
            "in_axes is an int, None, a tuple by position, or a dict by name",
            "in_axes=(0, None)",
        )
    raise_if(
        "fs.smap",
        [
            Problem(
                f"{path}: {leaf!r}", f"a leaf of {word} is an int or None", f"{word}=0, or None"
            )
            for path, leaf in zip(paths(axes, word), flatten(axes)[0], strict=True)
            if leaf is not None and type(leaf) is not int
        ],
    )
    return map_leaves(
        lambda leaf: PartitionSpec() if leaf is None else DimSpec(axis_name, leaf, word), axes
    )
