"""`redistribute(spec_a, spec_b)`: the program from one layout to another."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

from fshard.errors import Problem, fail, raise_if
from fshard.plan.search import search
from fshard.program.program import Program
from fshard.program.rewrite import fuse_slices
from fshard.program.steps import Cast, Step
from fshard.program.topology import Topology
from fshard.spec import Spec

__all__ = ["redistribute"]

NODE = Topology.node()
Steps = tuple[type, ...]


def redistribute(
    src: Spec,
    dst: Spec,
    /,
    *,
    cost: Topology | str | None = None,
    max_memory: int | None = None,
    exclude: Iterable[type] = (),
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Program:
    """The cheapest program of collectives from `src` to `dst`, planned without communicating.

    `cost` is a `Topology` (the default is a single node) or "bytes"; `max_memory` bounds the
    bytes that a step's input and output take on any rank; `exclude` names step types not to
    use; `forward_dtype` and `backward_dtype` are what the program and its transpose send.
    The search follows Rink et al., arXiv 2112.01075; a plan is cached by its arguments.

    Raises `ShardingError` where the global shapes or the meshes differ, where a reduction
    would turn into another, and where no program keeps to the restrictions.

    >>> from fshard.mesh import Mesh
    >>> from fshard.partition import PartitionSpec as P
    >>> mesh = Mesh(dp=2, tp=4)
    >>> src = Spec(mesh, P("dp", "tp"), shape=(1024, 512))
    >>> print(redistribute(src, src.replace(partition=P(("dp", "tp"), None))))
    f32[1024@dp,512@tp] -> f32[1024@(dp,tp),512] on Mesh(dp=2, tp=4)
      all_to_all(tp, dim 1 -> 0)  f32[1024@(dp,tp),512]  196,608 B
    """
    return _plan(
        src,
        dst,
        NODE if cost is None else cost,
        max_memory,
        exclude if isinstance(exclude, tuple) else tuple(exclude),
        forward_dtype,
        backward_dtype,
    )


@lru_cache(maxsize=16384)
def _plan(
    src: Spec,
    dst: Spec,
    cost: Topology | str,
    max_memory: int | None,
    exclude: Steps,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> Program:
    raise_if("fs.redistribute", _problems(src, dst, cost))
    topology = None if isinstance(cost, str) else cost
    steps: list[Step] = []
    here, there = src, dst
    if src.dtype != dst.dtype:
        # Cast where fewer bytes are sent, but never addends to a dtype that rounds them away.
        exact = dst.dtype.is_floating_point or dst.dtype.is_complex or not src.partition.unreduced
        narrower = dst.dtype.itemsize < src.dtype.itemsize and exact
        if narrower or src.dtype == torch.bool:
            here = src._with(dtype=dst.dtype)
        else:
            there = dst._with(dtype=src.dtype)
    found = search(here, there, topology, max_memory, frozenset(exclude))
    if found is None:
        fail(
            "fs.redistribute",
            f"{src} -> {dst}, max_memory={max_memory}, "
            f"exclude={[each.__name__ for each in exclude]}",
            "no program keeps to the restrictions",
            _way_out(src, dst, topology, max_memory, exclude),
        )
    steps = fuse_slices(here, found)
    if here is not src:
        steps = [Cast(dst.dtype), *steps]
    elif there is not dst:
        steps = [*steps, Cast(dst.dtype)]
    return Program(src, steps, dst, forward_dtype=forward_dtype, backward_dtype=backward_dtype)


def _problems(src: Spec, dst: Spec, cost: Topology | str) -> list[Problem]:
    if not isinstance(src, Spec) or not isinstance(dst, Spec):
        return [
            Problem(
                f"redistribute({type(src).__name__}, {type(dst).__name__})",
                "both are Specs",
                "spec.replace(partition=P(...)) makes the target",
            )
        ]
    problems = []
    if isinstance(cost, str) and cost != "bytes":
        problems.append(
            Problem(
                f"cost={cost!r}",
                'cost is a Topology or "bytes"',
                'cost=fs.Topology.cluster(), or cost="bytes"',
            )
        )
    if src.mesh != dst.mesh:
        problems.append(
            Problem(
                f"{src} on {src.mesh}, {dst} on {dst.mesh}",
                "both specs are of one mesh",
                "dst.replace(mesh=src.mesh), or unshard and shard",
            )
        )
    if src.shape != dst.shape:
        problems.append(
            Problem(
                f"{src} -> {dst}",
                f"a layout change keeps the global shape: {src.shape} is not {dst.shape}",
                "reshape first; dst.replace(shape=src.shape) keeps it",
            )
        )
    if src.dtype.is_complex and not dst.dtype.is_complex:
        problems.append(
            Problem(
                f"{src} -> {dst}",
                "a cast from complex to real drops the imaginary part",
                "take torch.real first, or keep the dtype",
            )
        )
    before, after = src.partition.unreduced, dst.partition.unreduced
    for axis in before:
        kinds = {before[axis], after.get(axis, before[axis])}
        if len(kinds) == 2 and not kinds <= {"sum", "avg"}:
            problems.append(
                Problem(
                    f"axis {axis!r} from unreduced {before[axis]} to unreduced {after[axis]}",
                    f"candidates of a {before[axis]} are not addends of a {after[axis]}",
                    f"reduce over {axis!r} first: a target without it among unreduced=",
                )
            )
    return problems


def _way_out(
    src: Spec, dst: Spec, topology: Topology | None, max_memory: int | None, exclude: Steps
) -> str:
    """A fix that was tried: what an unrestricted plan uses and holds."""
    freely = redistribute(src, dst, cost=topology or "bytes")
    peak = freely.cost().peak_memory
    used = sorted({type(step).__name__ for step in freely.steps if isinstance(step, exclude)})
    fixes = [f"allow {', '.join(used)}"] if used else []
    if max_memory is not None and peak > max_memory:
        fixes.append(f"give max_memory={peak}")
    return " and ".join(fixes) or "lift one of the two restrictions"
