"""Checks of meshes, partitions, shapes and shard sizes for `Spec`, and of plain tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Set

import torch

from fshard._util.dtypes import is_inexact_dtype
from fshard._util.errors import Problem, did_you_mean, fail
from fshard._util.text import type_name
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import LINEAR, Kinds, PartitionSpec, chunk_sizes

Sizes = tuple[tuple[int, ...] | None, ...]
"""Shard sizes of each dim, major to minor; None for a dim whose shards are equal."""


def as_ints(value: object) -> tuple[int, ...] | None:
    """Return a sequence of ints as a tuple, None for anything else."""
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        return None
    try:
        return tuple(map(operator.index, value))
    except TypeError:
        return None


def sizes_by_dim(sizes: object, ndim: int, problems: list[Problem]) -> dict[int, tuple[int, ...]]:
    """Return the shard sizes by non-negative dim; add to `problems`."""
    if sizes is not None and not isinstance(sizes, Mapping):
        problems.append(Problem(f"sizes={sizes!r}", "sizes must be a mapping from dim to sizes",
                                "sizes={0: (3, 5)}, say"))  # fmt: skip
        return {}
    result: dict[int, tuple[int, ...]] = {}
    for dim, dim_sizes in (sizes or {}).items():
        if dim_sizes is None:
            continue
        ints = as_ints(dim_sizes)
        if ints is None:
            problems.append(Problem(f"sizes={{{dim!r}: {dim_sizes!r}}}", "sizes must be ints",
                                    "sizes={0: (3, 5)}, say"))  # fmt: skip
        elif not isinstance(dim, int) or not -ndim <= dim < ndim:
            rule = f"a dim must be in {-ndim}..{ndim - 1}" if ndim else "a 0-dim tensor has no dims"
            problems.append(Problem(f"sizes={{{dim!r}: ...}}", rule, "name a dim it has"))
        elif dim % ndim in result:
            positive, negative = dim % ndim, dim % ndim - ndim
            problems.append(Problem(f"sizes of dims {positive} and {negative}, which are one dim",
                                    "sizes of a dim must be given once",
                                    f"drop those of {negative}"))  # fmt: skip
        else:
            result[dim % ndim] = ints
    return result


def type_problems(mesh: object, partition: object, shape: object, dtype: object) -> list[Problem]:
    """Return the problems of arguments of a wrong type."""
    problems = []
    if not isinstance(mesh, Mesh) or not isinstance(partition, PartitionSpec):
        problems.append(Problem(f"Spec({type_name(mesh)}, {type_name(partition)})",
                                "the arguments must be a Mesh and a PartitionSpec",
                                "fs.Spec(mesh, P('x', None), shape=(8, 16))"))  # fmt: skip
    if as_ints(shape) is None:
        text = repr(shape)
        text = text if len(text) < 60 else f"a {type(shape).__name__}"
        problems.append(Problem(f"shape={text}", "a shape must be a sequence of ints",
                                "shape=(8, 16), say"))  # fmt: skip
    if not isinstance(dtype, torch.dtype):
        problems.append(Problem(f"dtype={dtype!r}", "a dtype must be a torch.dtype",
                                "dtype=torch.float32, say"))  # fmt: skip
    return problems


def value_problems(
    mesh: Mesh,
    partition: PartitionSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    uneven: str | None,
) -> list[Problem]:
    """Return the problems of a spec that do not depend on its shard sizes."""
    known = ", ".join(mesh.axes)
    problems = [
        Problem(f"axis {axis!r} on {mesh}",
                f"an axis must be one of {known}" if known else "the mesh has no axes",
                did_you_mean(axis, mesh.axes, f"use one of {known}"))
        for axis in dict.fromkeys(partition.axes) if axis not in mesh.axes
    ]  # fmt: skip
    if len(partition) > len(shape):
        problems.append(Problem(
            f"{partition!r} with {len(partition)} entries for shape {shape}",
            f"a tensor of {len(shape)} dims must have at most {len(shape)} entries",
            f"drop {len(partition) - len(shape)} of them, trailing None too"))  # fmt: skip
    if any(size < 0 for size in shape):
        problems.append(Problem(f"shape {shape}", "sizes must be at least 0", "check the shape"))
    if uneven not in (None, "chunk"):
        problems.append(Problem(f"uneven={uneven!r}", "uneven must be None or 'chunk'",
                                "uneven='chunk', or sizes={dim: (...)}"))  # fmt: skip
    problems += state_problems(partition.unreduced_kinds, partition.reduced_kinds, dtype)
    return problems


def has_mixed_reductions(unreduced: Kinds, reduced: Kinds) -> bool:
    """Return True if several reductions are pending whose order matters.

    A tensor reduced by a sum has its values and mixes with all. A tensor reduced by an average has
    shares of its values, which mix with linear reductions alone.
    """
    kinds = {kind for _, kind in unreduced} | {kind for _, kind in reduced if kind != "sum"}
    return len(kinds) > 1 and not kinds <= set(LINEAR)


def state_problems(unreduced: Kinds, reduced: Kinds, dtype: torch.dtype) -> list[Problem]:
    """Return the problems of unreduced and reduced axes for a tensor of `dtype`."""
    problems = []
    if has_mixed_reductions(unreduced, reduced):
        text = ", ".join(f"{axis}={kind}" for axis, kind in (*unreduced, *reduced))
        problems.append(Problem(f"several reductions at once: {text}",
            "several reductions must be sum and avg, or their order would matter",
            "reduce over one axis first"))  # fmt: skip
    for axis, kind in (*unreduced, *reduced):
        if kind == "avg" and not is_inexact_dtype(dtype):
            problems.append(Problem(
                f"{axis!r} averaged, dtype {dtype}", "an average of integers is not an integer",
                "use sum, or a floating dtype"))  # fmt: skip
        if kind in ("max", "min") and dtype.is_complex:
            problems.append(Problem(f"{axis!r} unreduced by {kind}, dtype {dtype}",
                "complex numbers have no order", "use sum"))  # fmt: skip
        if kind == "sum" and dtype == torch.bool and (axis, kind) in unreduced:
            problems.append(Problem(
                f"{axis!r} summed, dtype torch.bool", "booleans have no sum",
                "use max (any), min (all), or an integer dtype"))  # fmt: skip
    return problems


def resolve_sizes(
    mesh: Mesh,
    dims: tuple[tuple[str, ...], ...],
    shape: tuple[int, ...],
    sizes_of: dict[int, tuple[int, ...]],
    uneven: str | None,
    problems: list[Problem],
) -> Sizes:
    """Return for each dim None if its shards are equal, else their sizes; add to `problems`."""
    resolved: list[tuple[int, ...] | None] = []
    for dim, (size, axes) in enumerate(zip(shape, dims, strict=True)):
        if not all(axis in mesh.axes for axis in axes):
            continue  # a problem already; the number of shards is unknown
        parts = [mesh.shape[axis] for axis in axes]
        shards = math.prod(parts)
        sizes = sizes_of.get(dim)
        if sizes is not None:
            if len(sizes) != shards or sum(sizes) != size or any(n < 0 for n in sizes):
                problems.append(Problem(
                    f"sizes={{{dim}: {sizes}}}",
                    f"dim {dim} of size {size} over {axes or 'no axes'} must have "
                    f"{shards} sizes of at least 0 that sum to {size}, not "
                    f"{len(sizes)} that sum to {sum(sizes)}",
                    f"sizes={{{dim}: {chunk_sizes(size, parts)}}}, say"))  # fmt: skip
            resolved.append(None if len(set(sizes)) <= 1 else sizes)
        elif size % shards == 0:
            resolved.append(None)
        elif uneven == "chunk":
            resolved.append(chunk_sizes(size, parts))
        else:
            chunked = chunk_sizes(size, parts)
            brief = str(chunked) if shards <= 16 else f"({', '.join(map(str, chunked[:4]))}, ...)"
            problems.append(Problem(
                f"dim {dim} of size {size} over {' x '.join(f'{a}={mesh.shape[a]}' for a in axes)}",
                f"{shards} shards must divide the dim; {size} % {shards} = {size % shards}",
                f"uneven='chunk' (shards of {brief}), sizes={{{dim}: (...)}}, "
                f"or pad the dim to {-(-size // shards) * shards}"))  # fmt: skip
            resolved.append(None)
    return tuple(resolved)


def _fix_of(x: object) -> str:
    """Return the fix for a value in the place of a global tensor."""
    if hasattr(x, "spec") and hasattr(x, "local"):
        return "fs.reshard(pair, P(...)); fs.unshard(pair) is a global tensor"
    if isinstance(x, torch.nn.Module):
        return "fs.state.distribute_module(module, mesh)"
    items = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    if any(isinstance(item, torch.Tensor) for item in items):
        return "fs.state.tree_shard(tree, P(...), mesh=mesh)"
    return "torch.as_tensor(value)"


def check_plain_tensor(x: object, where: str) -> None:
    """Raise `ShardingError` unless `x` is a dense tensor without a layout, as a `DTensor` has."""
    if not isinstance(x, torch.Tensor):
        fail(where, f"a {type(x).__name__}", "a global tensor must be a torch.Tensor", _fix_of(x))
    if x.layout is not torch.strided:
        fail(
            where,
            f"a tensor of {x.layout}",
            "a tensor that is sharded must be dense",
            "x.to_dense()",
        )
    if type(x).__module__.startswith("torch.distributed."):
        fail(
            where,
            f"a {type(x).__name__}",
            "a tensor must be a plain torch.Tensor, without a layout of its own",
            "x.full_tensor() for the global tensor, or fs.from_dtensor(x), a pair",
        )
