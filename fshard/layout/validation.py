"""What makes a mesh, a partition and shard sizes a layout: the checks behind `Spec`."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Set

import torch

from fshard._util.errors import Problem, did_you_mean
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import LINEAR, Kinds, PartitionSpec, chunk_sizes

__all__ = [
    "Sizes",
    "by_dim",
    "mixed_kinds",
    "resolve_sizes",
    "state_problems",
    "type_problems",
    "value_problems",
    "whole_numbers",
]

Sizes = tuple[tuple[int, ...] | None, ...]


def whole_numbers(given: object) -> tuple[int, ...] | None:
    """A sequence of whole numbers as a tuple of int; None where it is something else."""
    if isinstance(given, str | bytes | Mapping | Set) or not isinstance(given, Iterable):
        return None
    try:
        return tuple(operator.index(each) for each in given)
    except TypeError:
        return None


def by_dim(sizes: object, ndim: int, problems: list[Problem]) -> dict[int, tuple[int, ...]]:
    """The caller's sizes by non-negative dim; adds to `problems`."""
    if sizes is not None and not isinstance(sizes, Mapping):
        problems.append(Problem(f"sizes={sizes!r}", "sizes are a mapping from dim to its sizes",
                                "sizes={0: (3, 5)}, say"))  # fmt: skip
        return {}
    found: dict[int, tuple[int, ...]] = {}
    for dim, each in (sizes or {}).items():
        if each is None:
            continue
        numbers = whole_numbers(each)
        if numbers is None:
            problems.append(Problem(f"sizes={{{dim!r}: {each!r}}}", "sizes are whole numbers",
                                    "sizes={0: (3, 5)}, say"))  # fmt: skip
        elif not isinstance(dim, int) or not -ndim <= dim < ndim:
            there = f"a dim is in {-ndim}..{ndim - 1}" if ndim else "a 0-dim tensor has no dims"
            problems.append(Problem(f"sizes={{{dim!r}: ...}}", there, "name a dim it has"))
        elif dim % ndim in found:
            at = dim % ndim
            problems.append(Problem(f"sizes of dims {at} and {at - ndim}",
                                    f"dim {at} is given twice", "give its sizes once"))  # fmt: skip
        else:
            found[dim % ndim] = numbers
    return found


def type_problems(mesh: object, partition: object, shape: object, dtype: object) -> list[Problem]:
    """What is no mesh, partition, shape or dtype at all."""
    problems = []
    if not isinstance(mesh, Mesh) or not isinstance(partition, PartitionSpec):
        problems.append(Problem(f"Spec({type(mesh).__name__}, {type(partition).__name__})",
                                "a spec is made from a Mesh and a PartitionSpec",
                                "fs.Spec(mesh, P('x', None), shape=(8, 16))"))  # fmt: skip
    if whole_numbers(shape) is None:
        problems.append(Problem(f"shape={shape!r}", "a shape is a sequence of whole numbers",
                                "shape=(8, 16), say"))  # fmt: skip
    if not isinstance(dtype, torch.dtype):
        problems.append(Problem(f"dtype={dtype!r}", "a dtype is a torch.dtype",
                                "dtype=torch.float32, say"))  # fmt: skip
    return problems


def value_problems(
    mesh: Mesh,
    partition: PartitionSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    uneven: str | None,
) -> list[Problem]:
    """Everything wrong with a spec that needs no sizes to see."""
    known = ", ".join(mesh.axes)
    problems = [
        Problem(f"axis {axis!r} on {mesh}", f"the mesh's axes are {known or 'none'}",
                did_you_mean(axis, mesh.axes, f"use one of {known}"))
        for axis in dict.fromkeys(partition.axes) if axis not in mesh.axes
    ]  # fmt: skip
    if len(partition) > len(shape):
        problems.append(Problem(
            f"{partition!r} with {len(partition)} entries for shape {shape}",
            f"a tensor of {len(shape)} dims has at most {len(shape)} entries",
            f"drop {len(partition) - len(shape)} of them, trailing None too"))  # fmt: skip
    if any(size < 0 for size in shape):
        problems.append(Problem(f"shape {shape}", "sizes are at least 0", "check the shape"))
    if uneven not in (None, "chunk"):
        problems.append(Problem(f"uneven={uneven!r}", "uneven is None or 'chunk'",
                                "uneven='chunk', or sizes={dim: (...)}"))  # fmt: skip
    problems += state_problems(partition.unreduced_kinds, partition.reduced_kinds, dtype)
    return problems


def mixed_kinds(unreduced: Kinds, reduced: Kinds) -> bool:
    """Whether reductions stand side by side whose order would matter.

    A tensor that is reduced by a sum holds its values and mixes with all; one that holds
    shares of an average is half way through a linear reduction.
    """
    kinds = {kind for _, kind in unreduced} | {kind for _, kind in reduced if kind != "sum"}
    return len(kinds) > 1 and not kinds <= set(LINEAR)


def state_problems(unreduced: Kinds, reduced: Kinds, dtype: torch.dtype) -> list[Problem]:
    """What forbids these states for a tensor of `dtype`, if anything."""
    inexact = dtype.is_floating_point or dtype.is_complex
    problems = []
    if mixed_kinds(unreduced, reduced):
        given = ", ".join(f"{axis}={kind}" for axis, kind in (*unreduced, *reduced))
        problems.append(Problem(f"several reductions at once: {given}",
            "reductions other than sum and avg do not mix: their order would matter",
            "reduce over one axis first"))  # fmt: skip
    for axis, kind in (*unreduced, *reduced):
        if kind == "avg" and not inexact:
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
    given: dict[int, tuple[int, ...]],
    uneven: str | None,
    problems: list[Problem],
) -> Sizes:
    """Per dim: None where the shards are equal, else their sizes; adds to `problems`."""
    resolved: list[tuple[int, ...] | None] = []
    for dim, (size, axes) in enumerate(zip(shape, dims, strict=True)):
        if not all(axis in mesh.axes for axis in axes):
            continue  # a problem already: how many shards there would be is not known
        parts = [mesh.shape[axis] for axis in axes]
        shards = math.prod(parts)
        sizes = given.get(dim)
        if sizes is not None:
            if len(sizes) != shards or sum(sizes) != size or any(n < 0 for n in sizes):
                problems.append(Problem(
                    f"sizes={{{dim}: {sizes}}}",
                    f"dim {dim} of size {size} has {shards} shards over {axes or 'no axes'}: "
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
                f"{shards} shards divide a dim evenly; {size} % {shards} = {size % shards}",
                f"uneven='chunk' (shards of {brief}), sizes={{{dim}: (...)}}, "
                f"or pad the dim to {-(-size // shards) * shards}"))  # fmt: skip
            resolved.append(None)
    return tuple(resolved)
