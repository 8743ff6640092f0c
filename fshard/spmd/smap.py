"""`smap`: a function mapped along one mesh axis, with dims instead of specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.tree import flatten, map_leaves, paths
from fshard.spmd.in_specs import DimSpec
from fshard.spmd.mapped_function import map_function
from fshard.spmd.mesh_scope import mapped_mesh


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
    """Map a function along one mesh axis, as `shard_map` with dims instead of specs.

    Args:
        fn: the function of local tensors; without it, a decorator is returned.
        in_axes: dim of each argument that is sharded over the axis, as in `torch.vmap`: an int
            (negative ones count from the last dim), None for an argument that every rank gets
            unsharded (`P()`), a tuple of these by position, or a dict by name; tree prefixes.
        out_axes: dim of each result along which the ranks' results are concatenated, or None for
            a result that is equal on every rank; a tree prefix of the results.
        axis_name: the axis. The body may name it, and the axes that an enclosing `smap` or
            `shard_map` maps.
        mesh: the mesh; None takes the mesh of the enclosing `smap` or `shard_map`.
        check: as in `shard_map`.

    Returns:
        The mapped function, which takes and returns global tensors (or pairs).

    Raises:
        ShardingError: a dim that a tensor does not have, and as `shard_map`.

    Gradients are those of `shard_map`. After `jax.smap` (JAX 0.11), where negative ints mean dim 0.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=2, y=2)
    >>> @fs.smap(mesh=mesh, axis_name="x", in_axes=(0, None), out_axes=0)
    ... def rows(a, b):
    ...     return fs.smap(torch.matmul, axis_name="y", in_axes=(None, -1), out_axes=-1)(a, b)
    >>> rows(torch.ones(2, 3), torch.ones(3, 4))
    tensor([[3., 3., 3., 3.],
            [3., 3., 3., 3.]])
    """
    mesh = mapped_mesh(mesh, "fs.smap")
    if not isinstance(axis_name, str):
        fail("fs.smap", f"axis_name={axis_name!r}",
             "axis_name must be a string: smap maps one axis",
             "axis_name='x', or fs.shard_map for several")  # fmt: skip
    in_specs = _specs_of("in_axes", in_axes, axis_name)
    out_specs = _specs_of("out_axes", out_axes, axis_name)
    names = frozenset({axis_name})
    options: dict[str, Any] = {"redistribute_inputs": False, "check": check}
    return map_function(fn, "fs.smap", mesh, in_specs, out_specs, names, **options)


def _specs_of(keyword: str, axes: Any, axis_name: str) -> Any:
    """Return the specs of `in_axes` or `out_axes`: an int is a sharded dim, None is `P()`.

    Raises:
        ShardingError: a leaf is neither.
    """
    if keyword == "in_axes" and not isinstance(axes, int | tuple | Mapping | None):
        fail("fs.smap", f"in_axes of type {type(axes).__name__}",
             "in_axes must be an int, None, a tuple by position, or a dict by name",
             "in_axes=(0, None)")  # fmt: skip
    rule = f"a leaf of {keyword} must be an int or None"
    raise_if("fs.smap", [
        Problem(f"{path}: {leaf!r}", rule, f"{keyword}=0, or None")
        for path, leaf in zip(paths(axes, keyword), flatten(axes)[0], strict=True)
        if leaf is not None and type(leaf) is not int
    ])  # fmt: skip
    return map_leaves(
        lambda leaf: PartitionSpec() if leaf is None else DimSpec(axis_name, leaf, keyword), axes
    )
