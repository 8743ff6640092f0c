"""Specs of the arguments of a partitioned function, and the problems of arguments without one."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fshard._util.errors import Problem, ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair, tensors_in
from fshard.plan.redistribute import redistribute

__all__ = ["hides_tensors", "leaf_spec", "located", "opaque_leaf"]


def leaf_spec(
    leaf: Any, requested: Any, name: str, mesh: Mesh, problems: list[Problem]
) -> Spec | None:
    """Return the spec of one leaf of the arguments, and append what is wrong to `problems`.

    Args:
        leaf: a tensor, a pair, a spec, or any other value, whose spec is None.
        requested: the item of `in_specs` for it.
        name: its path in errors.
        mesh: the mesh of the function.
        problems: a list to extend.
    """
    tensor = leaf[1] if is_pair(leaf) else leaf
    if not isinstance(tensor, torch.Tensor | Spec):
        problems += [opaque_leaf(tensor, name)] if hides_tensors(tensor) else []
        return None
    if isinstance(tensor, Spec) and tensor.mesh != mesh:
        problems.append(Problem(f"{name}: {tensor} on {tensor.mesh}",
                                f"the function runs on {mesh}",
                                "fs.reshard(pair, spec) with a spec on that mesh"))  # fmt: skip
        return None
    if isinstance(tensor, Spec) and requested is None:
        return tensor
    p = PartitionSpec() if requested is None else requested
    try:
        spec = p if isinstance(p, Spec) else Spec(
            mesh, p, shape=tuple(tensor.shape), dtype=tensor.dtype,
            sizes=_shard_sizes_of(tensor, p))  # fmt: skip
    except ShardingError as error:
        problems += located(f"{name}: {p}", error, "in_specs")
        return None
    if isinstance(tensor, Spec) and tensor != spec:
        prog = redistribute(tensor, spec)
        problems.append(Problem(f"{name}: {tensor}", f"the function requires {spec}",
                                "fs.reshard(pair, spec), which is\n"
                                + textwrap.indent(str(prog), "    ")))  # fmt: skip
    return spec


def hides_tensors(value: Any) -> bool:
    """Return True if a value that is not a tensor or module has tensors among its attributes."""
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return False
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return any(True for _ in tensors_in([value, getattr(value, "__dict__", None), slots]))


def opaque_leaf(value: Any, name: str) -> Problem:
    """Return the problem of a leaf that hides tensors."""
    return Problem(f"{name} is a {type(value).__name__}, with tensors in it",
                   "tensors must be in tuples, named tuples, lists and dicts to be found",
                   "a dict of them: vars(...) of a dataclass")  # fmt: skip


def located(place: str, error: ShardingError, argument: str) -> list[Problem]:
    """Return the problems of an error with the place where they are, and fixes that fit there."""
    replacement = "uneven=", f"a Spec in {argument} with uneven="
    return [Problem(f"{place}, {problem.given}", problem.rule, problem.fix.replace(*replacement))
            for problem in error.problems]  # fmt: skip


def _shard_sizes_of(tensor: Any, p: PartitionSpec) -> Mapping[int, Sequence[int] | None] | None:
    """Return the shard sizes of a pair's spec, for the dims that `p` shards over the same axes."""
    if not isinstance(tensor, Spec):
        return None
    dims = p.dims + ((),) * (tensor.ndim - len(p.dims))
    return {d: tensor.sizes[d] for d in range(tensor.ndim) if dims[d] == tensor.partition.dims[d]}
