"""Brute-force search for layouts that are right on one axis of 2 and 3 ranks but not in a rule.

Every choice of a state per operand (replicated, sharded along a dim, unreduced) is run with the
unchanged operation, and its results are combined in every possible way. A layout that gives the
global result on both meshes is right. Layouts that need other arguments per rank (a `view`'s
shape) are not found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import fshard as fs
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.validation import state_problems
from fshard.ops.core.call import map_instances
from fshard.ops.strategy.axis_roles import AxisState, roles_of
from fshard.ops.strategy.local_call import flat
from tests.helpers.ops.op_checks import call_with, shards_of
from tests.helpers.ops.op_database import result_difference

__all__ = ["refused_layouts_of", "works"]

MESHES = (Mesh(x=2), Mesh(x=3))
MOST_OPERANDS, MOST_CHOICES = 3, 64

Layout = tuple[tuple[str, ...], tuple[str, ...]]


def works(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a rule has a role other than replicated computation."""
    call, rule, _, _ = call_with(op, args, kwargs)
    roles = roles_of(rule, call, grad=False)
    return any(x.factor is not None or "unreduced" in x.name for x in roles)


def refused_layouts_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Return the layouts of a call that are right but not in its rule, as texts."""
    call, rule, _, tensors = call_with(op, args, kwargs)
    if not tensors or len(tensors) > MOST_OPERANDS:
        return []
    roles = roles_of(rule, call, grad=False)
    accepted = [_text(role.operands, role.results) for role in roles]
    right: set[Layout] | None = None
    for inputs in _variants(tensors):
        try:
            full = flat(_placed(call.op, args, kwargs, inputs))
        except Exception:
            continue
        if any(x is None or not x.numel() for x in full) or _is_uninformative(full):
            continue
        for mesh in MESHES:
            matches = set(_right_layouts(call.op, args, kwargs, inputs, full, mesh))
            right = matches if right is None else right & matches
    return [f"{', '.join(ins)} -> {', '.join(outs)}"
            for ins, outs in sorted(right or ()) if not _accepts(accepted, ins, outs)]  # fmt: skip


def _accepts(accepted: Sequence[Layout], ins: Sequence[str], outs: Sequence[str]) -> bool:
    """Return True if a role gives these results from these operands, or from replicated ones."""
    return any(
        result == tuple(outs)
        and all(
            have in (want, "I") or want == "any" for have, want in zip(ins, requested, strict=True)
        )
        for requested, result in accepted
    )


def _variants(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors, and others of their shapes, on which errors show.

    Signs hide errors of a maximum or an absolute value; distinct nonzero values hide those of
    comparisons, values below one those of rounding. Integers may be indices and stay the same.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(x: torch.Tensor, limit: int) -> torch.Tensor:
        if x.dtype == torch.bool:
            return torch.randint(0, 2, x.shape, generator=generator) > 0
        if not (x.dtype.is_floating_point or x.dtype.is_complex):
            return x
        return torch.randint(-limit, limit + 1, x.shape, generator=generator).to(x.dtype)

    yield list(tensors)
    yield [-x if x.dtype.is_floating_point or x.dtype.is_complex else x for x in tensors]
    yield [drawn(x, 1) for x in tensors]
    yield [drawn(x, 9) / 2 if x.dtype.is_floating_point else drawn(x, 9) for x in tensors]
    yield [drawn(x, 9).abs() + 1 if x.dtype.is_floating_point else x for x in tensors]


def _is_uninformative(full: Sequence[torch.Tensor]) -> bool:
    """Return True if all elements of the results are equal, or some are not finite."""
    similar = all(x.numel() > 1 and bool((x == x.flatten()[0]).all()) for x in full)
    return similar or not all(x.isfinite().all() for x in full)


def _text(operands: Sequence[AxisState], results: Sequence[AxisState | None]) -> Layout:
    def one(state: AxisState | None) -> str:
        if state is None:
            return "none"
        words = {"sharded": f"S{state.dim}", "unreduced": f"U{state.kind}", "any": "any"}
        return words.get(state.name, "I")

    return tuple(map(one, operands)), tuple(map(one, results))


def _right_layouts(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor],
    full: Sequence[torch.Tensor], mesh: Mesh,
) -> Iterator[Layout]:  # fmt: skip
    options = [_states(item, mesh) for item in tensors]
    choices = itertools.islice(itertools.product(*options), 1, MOST_CHOICES)
    for choice in choices:
        shards = [
            shards_of(x, spec, i)
            for i, (x, (_, spec)) in enumerate(zip(tensors, choice, strict=True))
        ]
        try:
            result = [flat(_placed(op, args, kwargs, local)) for local in zip(*shards, strict=True)]
        except Exception:
            continue
        if any(len(item) != len(full) for item in result):  # unbind of a shard
            continue
        ways = [
            _result_states([item[i] for item in result], actual, mesh)
            for i, actual in enumerate(full)
        ]
        for outs in itertools.product(*ways):
            yield tuple(name for name, _ in choice), tuple(outs)


def _states(x: torch.Tensor, mesh: Mesh) -> list[tuple[str, Spec]]:
    lay = lambda p, **extra: Spec(mesh, p, shape=x.shape, dtype=x.dtype, **extra)  # noqa: E731
    states = [("I", lay(PartitionSpec()))]
    states += [
        (f"S{dim}", lay(PartitionSpec(*[None] * dim, "x"), uneven="chunk"))
        for dim, size in enumerate(x.shape) if size >= mesh.size
    ]  # fmt: skip
    return states + [(f"U{kind}", lay(PartitionSpec(unreduced={"x": kind})))
                    for kind in ("sum", "max") if _exists(kind, x)]  # fmt: skip


def _exists(kind: str, x: torch.Tensor) -> bool:
    return not state_problems((("x", kind),), (), x.dtype)


def _placed(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], local: Sequence[Any]) -> Any:
    remaining = iter(local)
    put = lambda value: map_instances(value, torch.Tensor, lambda _: next(remaining))  # noqa: E731
    return op(*[put(x) for x in args], **{key: put(x) for key, x in kwargs.items()})


def _result_states(parts: Sequence[Any], full: torch.Tensor, mesh: Mesh) -> list[str]:
    """Return the states in which the parts equal the global tensor; replicated comes alone."""
    if not all(isinstance(x, torch.Tensor) for x in parts):
        return []
    if all(not result_difference(x, full) for x in parts):
        return ["I"]
    states = [
        f"S{dim}"
        for dim, size in enumerate(full.shape)
        if size >= mesh.size and not result_difference(_joined(parts, full, dim), full)
    ]
    kinds = [kind for kind in ("sum", "max", "min") if _exists(kind, full)]
    same = all(x.shape == full.shape and x.dtype == full.dtype for x in parts)
    for kind in kinds if same else ():
        spec = Spec(mesh, PartitionSpec(unreduced={"x": kind}), shape=full.shape, dtype=full.dtype)
        if not result_difference(
            fs.unshard(Sharded(tuple(x.contiguous() for x in parts), spec)), full
        ):
            states.append(f"U{kind}")
    return states


def _joined(parts: Sequence[torch.Tensor], full: torch.Tensor, dim: int) -> torch.Tensor | None:
    try:
        return torch.cat(list(parts), dim)
    except RuntimeError:
        return None
