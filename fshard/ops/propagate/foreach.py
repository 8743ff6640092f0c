"""Operations on lists of tensors, element by element: `_foreach_*` and their like.

Every element is a call of its own, that lies and moves as that call would alone: some elements are
cut on an axis and others not, along dims of their own. What all elements use is whole on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.call import Meta, OpCall, map_call, meta_results
from fshard.ops.core.registry import register_decomposition
from fshard.ops.strategy.axis_roles import Role, AxisState
from fshard.ops.strategy.local_call import RankContext, flat, run_local
from fshard.ops.strategy.strategy import Strategy

__all__ = ["Element", "elements_of", "in_lists", "is_list"]

Choose = Callable[[Any, tuple[Any, ...], dict[str, Any]], Strategy | None]


class Element(NamedTuple):
    """One element's call, and which of the operands of the whole call are its own."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    places: tuple[int, ...]


_RENAMED = {"norm": "linalg_vector_norm"}
_WITH_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}
_LISTS = ("atleast_1d.Sequence", "atleast_2d.Sequence", "atleast_3d.Sequence")
_APART = ("_foreach_addcmul.Tensor", "_foreach_addcdiv.Tensor", "_foreach_powsum.Scalar")
"""What no operation on one element does: by others, if at all."""


def _elementwise() -> dict[Any, Any]:
    """Of every operation on lists the one on an element."""
    found: dict[Any, Any] = {}
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        base, _, overload = rest.partition(".")
        if (
            space != "aten"
            or not (base.startswith("_foreach_") or rest in _LISTS)
            or rest in _APART
        ):
            continue
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        name = base.removeprefix("_foreach_")
        if overload.startswith("Scalar") and name in _WITH_NUMBERS:
            name = _WITH_NUMBERS[name]
        packet = getattr(torch.ops.aten, _RENAMED.get(name, name), None)
        if packet is not None and not op._schema.is_mutable:
            found[op] = packet
    return found


_ELEMENTWISE = _elementwise()


def is_list(op: Any) -> bool:
    """Whether an operation is one on lists, element by element."""
    return op in _ELEMENTWISE


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Spec | torch.Tensor)


def elements_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Element]:
    """The calls of the elements; arguments that are no lists belong to all of them."""
    listed = next(each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple))
    names = [each.name for each in op._schema.arguments]
    made = [Element(_ELEMENTWISE[op], (), {}, ()) for _ in listed]
    place = 0
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        many = isinstance(value, list | tuple)
        for at, (element, _) in enumerate(zip(made, listed, strict=True)):
            own = value[at] if many else value
            places = (place + at if many else place,) if _is_tensor(own) else ()
            made[at] = _with(element, _NAMED.get((element.op._qualified_op_name, name), name),
                             own, places, positional=name in names[: len(args)])  # fmt: skip
        place += sum(map(_is_tensor, value)) if many else _is_tensor(value)
    return made


_NAMED = {
    (f"aten::{name}", given): "value"
    for name in ("addcmul", "addcdiv") for given in ("value", "scalars")
}  # fmt: skip


def _with(
    element: Element, name: str, value: Any, places: tuple[int, ...], *, positional: bool
) -> Element:
    op, args, kwargs, before = element
    if name in ("value", "alpha", "dtype") or not positional:
        return Element(op, args, {**kwargs, name: value}, before + places)
    return Element(op, (*args, value), kwargs, before + places)


def in_lists(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    specs: Sequence[Spec],
    choose: Choose,
    *,
    grad: bool,
) -> Strategy | None:
    """The strategy of a call on lists, of those of its elements; None if one has none.

    The operation itself is not asked what it returns: its elements are, the same of them once.
    """
    metas, named = map_call(args, kwargs, Spec, Meta.of)
    if len({len(each) for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)}) > 1:
        meta_results(op, metas, named)  # which refuses lists of other lengths
    elements = elements_of(op, args, kwargs)
    uses = [at for element in elements for at in element.places]
    shared = [at for at in dict.fromkeys(uses) if uses.count(at) > 1]
    cut = _cut_axes(spec for at, spec in enumerate(specs) if at not in shared)
    asked = {at: _everywhere(specs[at], cut, whole=True) for at in shared}
    if grad and shared:
        # Elements that are whole are so for every rank's other work, as what they are used with.
        asked |= {at: _everywhere(specs[at], cut) for at in uses if at not in shared}
    chosen: list[Strategy] = []
    for element in elements:
        left = iter(element.places)
        one, given, options, _ = element
        placed = tuple(_placed(each, left, asked) for each in given)
        found = choose(one, placed, {key: _placed(v, left, asked) for key, v in options.items()})
        if found is None:
            return None
        chosen.append(found)
    ins = list(specs)
    for element, strategy in zip(elements, chosen, strict=True):
        for at, spec in zip(element.places, strategy.in_specs, strict=True):
            ins[at] = asked[at] if at in shared else spec
    # PyTorch's own operations on lists have no gradient of what all elements use.
    apart = bool(grad and shared) or any(each.rule.local is not None for each in chosen)
    call = OpCall(
        op, metas, named, tuple(map(Meta.of, specs)),
        tuple(meta for each in chosen for meta in each.call.results),
    )  # fmt: skip
    return _together(call, specs, ins, chosen, apart)


def _placed(value: Any, places: Iterator[int], asked: Mapping[int, Spec]) -> Any:
    return asked.get(next(places), value) if isinstance(value, Spec) else value


def _cut_axes(specs: Iterable[Spec]) -> frozenset[str]:
    """The axes on which ranks do different work with some of these."""
    found: set[str] = set()
    for spec in specs:
        p = spec.partition
        found |= {axis for dim in p.dims for axis in dim}
        found |= {axis for axis, _ in (*p.unreduced_kinds, *p.reduced_kinds)}
    return frozenset(found)


def _everywhere(spec: Spec, axes: frozenset[str], *, whole: bool = False) -> Spec:
    """The tensor as what ranks use for different work on these axes where it is the same on all."""
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return spec.replace(partition=PartitionSpec()) if whole else spec
    p = PartitionSpec() if whole else spec.partition
    kept = _cut_axes([spec]) if not whole else frozenset[str]()
    if not whole and any(kind != "sum" for _, kind in p.unreduced_kinds):
        return spec
    reduced = {axis: "sum" for axis in spec.mesh.axes if axis in axes and axis not in kept}
    reduced |= dict(p.reduced_kinds)
    return spec.replace(
        partition=PartitionSpec(*p.dims, unreduced=dict(p.unreduced_kinds), reduced=reduced)
    )


def _together(
    call: OpCall,
    specs: Sequence[Spec],
    ins: Sequence[Spec],
    chosen: Sequence[Strategy],
    apart: bool,
) -> Strategy:
    """One strategy of many; its rule is that of the first element, its roles name all."""
    rule = replace(chosen[0].rule, local=_OneByOne(tuple(chosen)) if apart else None)
    return Strategy(
        call.op, rule, call, _roles(chosen), tuple(specs), tuple(ins),
        tuple(spec for each in chosen for spec in each.out_specs), list(range(len(call.results))),
        sum(each.time for each in chosen),
        any(each.sends for each in chosen) or tuple(specs) != tuple(ins), chosen[0].topology,
    )  # fmt: skip


def _roles(chosen: Sequence[Strategy]) -> tuple[tuple[str, Role], ...]:
    made = []
    for at, (axis, _) in enumerate(chosen[0].roles):
        roles = [each.roles[at][1] for each in chosen]
        operands: list[AxisState] = [state for role in roles for state in role.operands]
        results = [state for role in roles for state in role.results]
        name = " / ".join(dict.fromkeys(role.name for role in roles))
        made.append((axis, Role(name, tuple(operands), tuple(results))))
    return tuple(made)


@dataclass(frozen=True, eq=False, slots=True)
class _OneByOne:
    """A local call element by element, where one of them has a way of its own."""

    chosen: tuple[Strategy, ...]

    def __call__(self, op: Any, args: Any, kwargs: Mapping[str, Any], here: RankContext) -> list[Any]:
        parts = elements_of(op, args, kwargs)
        return [
            run_local(strategy, here.rank, part.args, part.kwargs)[0]
            for strategy, part in zip(self.chosen, parts, strict=True)
        ]


# -- by others -----------------------------------------------------------------------------


def _one_by_one(op: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """The operation on a list as operations on its elements."""
    return [each for part in elements_of(op, args, kwargs)
            for each in flat(part.op(*part.args, **part.kwargs))]  # fmt: skip


for _op in _ELEMENTWISE:
    register_decomposition(_op)(partial(_one_by_one, _op))


@register_decomposition(torch.ops.aten._foreach_addcmul.Tensor)
def products_added(
    self: list[Any], tensor1: list[Any], tensor2: list[Any], scalars: torch.Tensor
) -> list[Any]:
    """`self + scalars * tensor1 * tensor2` of every element."""
    return [
        x + s * (a * b) for x, a, b, s in zip(self, tensor1, tensor2, scalars.unbind(), strict=True)
    ]


@register_decomposition(torch.ops.aten._foreach_addcdiv.Tensor)
def quotients_added(
    self: list[Any], tensor1: list[Any], tensor2: list[Any], scalars: torch.Tensor
) -> list[Any]:
    """`self + scalars * tensor1 / tensor2` of every element."""
    return [
        x + s * (a / b) for x, a, b, s in zip(self, tensor1, tensor2, scalars.unbind(), strict=True)
    ]
