"""Operations on lists of tensors, element by element: `_foreach_*` and their like.

Every element is a call with a strategy of its own, so that one axis can shard some elements and not
others, along different dims. An operand that all elements use is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard._torch.operators import all_op_names, qualified_name, schema_of
from fshard._util.dtypes import is_inexact
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.call import Meta, OpCall, map_call, meta_results
from fshard.ops.core.registry import register_decomposition
from fshard.ops.rules.reduce.moments import wide
from fshard.ops.rules.reduce.reduction_decompositions import root
from fshard.ops.strategy.axis_roles import AxisState, Role
from fshard.ops.strategy.local_call import RankContext, flat, run_local
from fshard.ops.strategy.strategy import Strategy

StrategyOf = Callable[[Any, tuple[Any, ...], dict[str, Any]], Strategy | None]


class ElementCall(NamedTuple):
    """Call of one element; `operands` are indices into the operands of the call on lists."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[int, ...]


_RENAMED = {"norm": "linalg_vector_norm"}
_SCALAR_FORMS = {"maximum": "clamp_min", "minimum": "clamp_max"}
_LISTS = ("atleast_1d.Sequence", "atleast_2d.Sequence", "atleast_3d.Sequence")
_NO_ELEMENT_OP = ("_foreach_addcmul.Tensor", "_foreach_addcdiv.Tensor", "_foreach_powsum.Scalar")
"""Operations on lists that no single operation on an element computes."""


def _elementwise() -> dict[Any, Any]:
    """Return the operation on one element for every operation on lists."""
    element_ops: dict[Any, Any] = {}
    for full in all_op_names():
        space, _, rest = full.partition("::")
        base, _, overload = rest.partition(".")
        if (
            space != "aten"
            or not (base.startswith("_foreach_") or rest in _LISTS)
            or rest in _NO_ELEMENT_OP
        ):
            continue
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        name = base.removeprefix("_foreach_")
        if overload.startswith("Scalar") and name in _SCALAR_FORMS:
            name = _SCALAR_FORMS[name]
        packet = getattr(torch.ops.aten, _RENAMED.get(name, name), None)
        if packet is not None and not schema_of(op).is_mutable:
            element_ops[op] = packet
    return element_ops


_ELEMENTWISE = _elementwise()


def is_foreach(op: Any) -> bool:
    """Return True if an operation works on lists of tensors, element by element."""
    return op in _ELEMENTWISE


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Spec | torch.Tensor)


def element_calls(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[ElementCall]:
    """Return the call of every element; an argument that is not a list belongs to all of them."""
    first = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple))
    names = [parameter.name for parameter in schema_of(op).arguments]
    calls = [ElementCall(_ELEMENTWISE[op], (), {}, ()) for _ in first]
    operand = 0
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        is_list = isinstance(value, list | tuple)
        for index, (call, _) in enumerate(zip(calls, first, strict=True)):
            arg = value[index] if is_list else value
            operands = (operand + index if is_list else operand,) if _is_tensor(arg) else ()
            calls[index] = _with(call, _PARAMETERS.get((qualified_name(call.op), name), name),
                                 arg, operands, positional=name in names[: len(args)])  # fmt: skip
        operand += sum(map(_is_tensor, value)) if is_list else _is_tensor(value)
    return calls


_PARAMETERS = {
    (f"aten::{name}", parameter): "value"
    for name in ("addcmul", "addcdiv") for parameter in ("value", "scalars")
}  # fmt: skip


def _with(
    call: ElementCall, name: str, value: Any, operands: tuple[int, ...], *, positional: bool
) -> ElementCall:
    """Return a call with one more argument."""
    op, args, kwargs, before = call
    if name in ("value", "alpha", "dtype") or not positional:
        return ElementCall(op, args, {**kwargs, name: value}, before + operands)
    return ElementCall(op, (*args, value), kwargs, before + operands)


def foreach_strategy(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    specs: Sequence[Spec],
    strategy_of: StrategyOf,
    *,
    grad: bool,
) -> Strategy | None:
    """Return the strategy of a call on lists, made of those of its elements; None if one has none.

    Only calls of elements run on meta tensors, equal ones once.
    """
    metas, named = map_call(args, kwargs, Spec, Meta.of)
    if len({len(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple)}) > 1:
        meta_results(op, metas, named)  # raises for lists of different lengths
    calls = element_calls(op, args, kwargs)
    uses = [operand for call in calls for operand in call.operands]
    shared = [operand for operand in dict.fromkeys(uses) if uses.count(operand) > 1]
    axes = _busy_axes(spec for operand, spec in enumerate(specs) if operand not in shared)
    required = {operand: _reduced_on(specs[operand], axes, replicate=True) for operand in shared}
    if grad and shared:
        # Gradients of a shared operand are summed, so the other operands are reduced with it.
        required |= {
            operand: _reduced_on(specs[operand], axes) for operand in uses if operand not in shared
        }
    strategies: list[Strategy] = []
    for call in calls:
        left = iter(call.operands)
        placed = tuple(_required(arg, left, required) for arg in call.args)
        options = {key: _required(arg, left, required) for key, arg in call.kwargs.items()}
        strategy = strategy_of(call.op, placed, options)
        if strategy is None:
            return None
        strategies.append(strategy)
    in_specs = list(specs)
    for call, strategy in zip(calls, strategies, strict=True):
        for operand, spec in zip(call.operands, strategy.in_specs, strict=True):
            in_specs[operand] = required[operand] if operand in shared else spec
    # PyTorch's operations on lists have no gradient for an operand that all elements use.
    separate = bool(grad and shared) or any(s.rule.local is not None for s in strategies)
    description = OpCall(
        op, metas, named, tuple(map(Meta.of, specs)),
        tuple(meta for strategy in strategies for meta in strategy.call.results),
    )  # fmt: skip
    return _combined(description, specs, in_specs, strategies, separate)


def _required(value: Any, operands: Iterator[int], required: Mapping[int, Spec]) -> Any:
    return required.get(next(operands), value) if isinstance(value, Spec) else value


def _busy_axes(specs: Iterable[Spec]) -> frozenset[str]:
    """Return the axes on which some of the layouts is not invariant."""
    axes: set[str] = set()
    for spec in specs:
        p = spec.partition
        axes |= {axis for dim in p.dims for axis in dim}
        axes |= {axis for axis, _ in (*p.unreduced_kinds, *p.reduced_kinds)}
    return frozenset(axes)


def _reduced_on(spec: Spec, axes: frozenset[str], *, replicate: bool = False) -> Spec:
    """Return the layout with the invariant axes among `axes` made reduced.

    With `replicate`, the tensor is unsharded first. Integer tensors do not become reduced.
    """
    if not is_inexact(spec):
        return spec.replace(partition=PartitionSpec()) if replicate else spec
    p = PartitionSpec() if replicate else spec.partition
    busy = _busy_axes([spec]) if not replicate else frozenset[str]()
    if not replicate and any(kind != "sum" for _, kind in p.unreduced_kinds):
        return spec
    reduced = {axis: "sum" for axis in spec.mesh.axes if axis in axes and axis not in busy}
    reduced |= dict(p.reduced_kinds)
    return spec.replace(
        partition=PartitionSpec(*p.dims, unreduced=dict(p.unreduced_kinds), reduced=reduced)
    )


def _combined(
    call: OpCall, specs: Sequence[Spec], in_specs: Sequence[Spec], strategies: Sequence[Strategy],
    separate: bool,
) -> Strategy:  # fmt: skip
    """Return one strategy of many: the rule of the first element, roles that name all."""
    local = _ElementByElement(tuple(strategies)) if separate else None
    rule = replace(strategies[0].rule, local=local)
    return Strategy(
        call.op, rule, call, _roles(strategies), tuple(specs), tuple(in_specs),
        tuple(spec for strategy in strategies for spec in strategy.out_specs),
        (None,) * len(in_specs),
        (None,) * sum(len(strategy.out_specs) for strategy in strategies),
        list(range(len(call.results))), sum(strategy.time for strategy in strategies),
        any(strategy.sends for strategy in strategies) or tuple(specs) != tuple(in_specs),
        strategies[0].topology,
    )  # fmt: skip


def _roles(strategies: Sequence[Strategy]) -> tuple[tuple[str, Role], ...]:
    combined = []
    for index, (axis, _) in enumerate(strategies[0].roles):
        roles = [strategy.roles[index][1] for strategy in strategies]
        operands: list[AxisState] = [state for role in roles for state in role.operands]
        results = [state for role in roles for state in role.results]
        name = " / ".join(dict.fromkeys(role.name for role in roles))
        combined.append((axis, Role(name, tuple(operands), tuple(results))))
    return tuple(combined)


@dataclass(frozen=True, eq=False, slots=True)
class _ElementByElement:
    """A rule's `local` that runs every element by its own strategy."""

    strategies: tuple[Strategy, ...]

    def __call__(
        self, op: Any, args: Any, kwargs: Mapping[str, Any], here: RankContext
    ) -> list[Any]:
        return [
            run_local(strategy, here.rank, call.args, call.kwargs)[0]
            for strategy, call in zip(self.strategies, element_calls(op, args, kwargs), strict=True)
        ]


# -- decompositions ------------------------------------------------------------------------


def _element_by_element(op: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Compute an operation on lists as operations on the elements."""
    return [result for call in element_calls(op, args, kwargs)
            for result in flat(call.op(*call.args, **call.kwargs))]  # fmt: skip


for _op in _ELEMENTWISE:
    register_decomposition(_op)(partial(_element_by_element, _op))


@register_decomposition(torch.ops.aten._foreach_norm.Scalar)
def _foreach_norm(
    self: list[torch.Tensor],
    ord: float = 2,  # noqa: A002
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return norms whose sums of squares are stacked first, and so reduced in one launch."""
    sizes = [(x if dtype is None else x.to(dtype)).abs() for x in self]
    if ord != 2 or len({size.dtype for size in sizes}) > 1:
        return _element_by_element(torch.ops.aten._foreach_norm.Scalar, self, ord, dtype=dtype)
    squares = [wide(size).square().sum() for size in sizes]
    return list(root(torch.stack(squares)).to(sizes[0].dtype).unbind())


@register_decomposition(torch.ops.aten._foreach_addcmul.Tensor)
def _foreach_addcmul(
    self: list[Any], tensor1: list[Any], tensor2: list[Any], scalars: torch.Tensor
) -> list[Any]:
    """Return `self + scalars * tensor1 * tensor2` of every element."""
    return [
        x + s * (a * b) for x, a, b, s in zip(self, tensor1, tensor2, scalars.unbind(), strict=True)
    ]


@register_decomposition(torch.ops.aten._foreach_addcdiv.Tensor)
def _foreach_addcdiv(
    self: list[Any], tensor1: list[Any], tensor2: list[Any], scalars: torch.Tensor
) -> list[Any]:
    """Return `self + scalars * tensor1 / tensor2` of every element."""
    return [
        x + s * (a / b) for x, a, b, s in zip(self, tensor1, tensor2, scalars.unbind(), strict=True)
    ]
