"""What brute force finds right on one axis of two and of three ranks, and a rule does not accept.

Every choice of a state for each operand (whole, cut along a dim, addends) is run as the operation
stands, and its results are put together in every way there is. What gives the whole result on
both meshes is right, whatever the rule says. Layouts that need other arguments on each rank (a
`view`'s shape) are not found so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import fshard as fs
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Sharded, Spec
from fshard.layout.validation import state_problems
from fshard.ops.core.call import map_instances
from fshard.ops.strategy.axis_roles import AxisState, roles_of
from fshard.ops.strategy.local_call import flat
from tests.helpers.ops.op_checks import call_with, lie
from tests.helpers.ops.op_database import differ

__all__ = ["refused", "works"]

MESHES = (Mesh(x=2), Mesh(x=3))
MOST_OPERANDS, MOST_CHOICES = 3, 64

Layout = tuple[tuple[str, ...], tuple[str, ...]]


def works(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the rule of a call lets an axis do anything but repeat the work."""
    call, rule, _, _ = call_with(op, args, kwargs)
    roles = roles_of(rule, call, grad=False)
    return any(each.factor is not None or "unreduced" in each.name for each in roles)


def refused(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The layouts of a call that are right, and that its rule does not accept, as texts."""
    call, rule, _, tensors = call_with(op, args, kwargs)
    if not tensors or len(tensors) > MOST_OPERANDS:
        return []
    roles = roles_of(rule, call, grad=False)
    accepted = [_text(role.operands, role.results) for role in roles]
    right: set[Layout] | None = None
    for given in _variants(tensors):
        try:
            whole = flat(_placed(call.op, args, kwargs, given))
        except Exception:
            continue
        if any(each is None or not each.numel() for each in whole) or _says_nothing(whole):
            continue
        for mesh in MESHES:
            found = set(_right(call.op, args, kwargs, given, whole, mesh))
            right = found if right is None else right & found
    return [f"{', '.join(ins)} -> {', '.join(outs)}"
            for ins, outs in sorted(right or ()) if not _accepts(accepted, ins, outs)]  # fmt: skip


def _accepts(accepted: Sequence[Layout], ins: Sequence[str], outs: Sequence[str]) -> bool:
    """Whether a role gives these results, of operands so or whole ones: which send nothing."""
    return any(
        made == tuple(outs)
        and all(have in (want, "I") or want == "any" for have, want in zip(ins, asked, strict=True))
        for asked, made in accepted
    )


def _variants(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors, and others of their shapes: what is wrong may not show in all numbers.

    Signs hide it of a maximum, or of an absolute value; numbers that never are the same or zero
    hide it of comparisons, and numbers below one of what is rounded. Integers may be indices.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(x: torch.Tensor, most: int) -> torch.Tensor:
        if x.dtype == torch.bool:
            return torch.randint(0, 2, x.shape, generator=generator) > 0
        if not (x.dtype.is_floating_point or x.dtype.is_complex):
            return x
        return torch.randint(-most, most + 1, x.shape, generator=generator).to(x.dtype)

    yield list(tensors)
    yield [-x if x.dtype.is_floating_point or x.dtype.is_complex else x for x in tensors]
    yield [drawn(x, 1) for x in tensors]
    yield [drawn(x, 9) / 2 if x.dtype.is_floating_point else drawn(x, 9) for x in tensors]
    yield [drawn(x, 9).abs() + 1 if x.dtype.is_floating_point else x for x in tensors]


def _says_nothing(whole: Sequence[torch.Tensor]) -> bool:
    """Whether all elements of the results are alike, or some are no numbers."""
    alike = all(x.numel() > 1 and bool((x == x.flatten()[0]).all()) for x in whole)
    return alike or not all(x.isfinite().all() for x in whole)


def _text(operands: Sequence[AxisState], results: Sequence[AxisState | None]) -> Layout:
    def one(state: AxisState | None) -> str:
        if state is None:
            return "none"
        words = {"sharded": f"S{state.dim}", "unreduced": f"U{state.kind}", "any": "any"}
        return words.get(state.name, "I")

    return tuple(map(one, operands)), tuple(map(one, results))


def _right(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor], mesh: Mesh,
) -> Iterator[Layout]:  # fmt: skip
    options = [_states(each, mesh) for each in tensors]
    choices = itertools.islice(itertools.product(*options), 1, MOST_CHOICES)
    for choice in choices:
        shards = [
            lie(x, spec, at) for at, (x, (_, spec)) in enumerate(zip(tensors, choice, strict=True))
        ]
        try:
            made = [flat(_placed(op, args, kwargs, mine)) for mine in zip(*shards, strict=True)]
        except Exception:
            continue
        if any(len(each) != len(whole) for each in made):  # unbind of a part
            continue
        ways = [_ways([each[at] for each in made], one, mesh) for at, one in enumerate(whole)]
        for outs in itertools.product(*ways):
            yield tuple(name for name, _ in choice), tuple(outs)


def _states(x: torch.Tensor, mesh: Mesh) -> list[tuple[str, Spec]]:
    lay = lambda p, **more: Spec(mesh, p, shape=x.shape, dtype=x.dtype, **more)  # noqa: E731
    found = [("I", lay(PartitionSpec()))]
    found += [
        (f"S{dim}", lay(PartitionSpec(*[None] * dim, "x"), uneven="chunk"))
        for dim, size in enumerate(x.shape) if size >= mesh.size
    ]  # fmt: skip
    return found + [(f"U{kind}", lay(PartitionSpec(unreduced={"x": kind})))
                    for kind in ("sum", "max") if _exists(kind, x)]  # fmt: skip


def _exists(kind: str, x: torch.Tensor) -> bool:
    return not state_problems((("x", kind),), (), x.dtype)


def _placed(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mine: Sequence[Any]) -> Any:
    left = iter(mine)
    put = lambda value: map_instances(value, torch.Tensor, lambda _: next(left))  # noqa: E731
    return op(*[put(each) for each in args], **{key: put(each) for key, each in kwargs.items()})


def _ways(parts: Sequence[Any], whole: torch.Tensor, mesh: Mesh) -> list[str]:
    """The states in which the parts are the whole; whole on every rank excludes all others."""
    if not all(isinstance(each, torch.Tensor) for each in parts):
        return []
    if all(not differ(each, whole) for each in parts):
        return ["I"]
    found = [
        f"S{dim}"
        for dim, size in enumerate(whole.shape)
        if size >= mesh.size and not differ(_joined(parts, whole, dim), whole)
    ]
    kinds = [kind for kind in ("sum", "max", "min") if _exists(kind, whole)]
    same = all(each.shape == whole.shape and each.dtype == whole.dtype for each in parts)
    for kind in kinds if same else ():
        spec = Spec(
            mesh, PartitionSpec(unreduced={"x": kind}), shape=whole.shape, dtype=whole.dtype
        )
        if not differ(fs.unshard(Sharded(tuple(each.contiguous() for each in parts), spec)), whole):
            found.append(f"U{kind}")
    return found


def _joined(parts: Sequence[torch.Tensor], whole: torch.Tensor, dim: int) -> torch.Tensor | None:
    try:
        return torch.cat(list(parts), dim)
    except RuntimeError:
        return None
