"""Roles of one mesh axis in one call: shard a factor, carry unreduced values, or repeat the work.

A role fixes the state that the axis requires of every operand and gives to every result. A strategy
is one role for each axis of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from fshard._util.cache import CACHE_SIZE
from fshard._util.dtypes import is_inexact
from fshard._util.errors import fail
from fshard.layout.spec import Spec
from fshard.layout.validation import state_problems
from fshard.ops.core.call import Meta, OpCall, name_of
from fshard.ops.core.rule import Dims, Mode, Rule


class AxisState(NamedTuple):
    """State of one tensor on one mesh axis.

    `name` is sharded, invariant, reduced or unreduced; a role requires `any` of an operand whose
    values are not read. A sharded state has the tensor dim, and the position in that dim of the
    factor that is sharded (`NO_FACTOR` if the shards are not those of one factor). An unreduced
    state has the reduction `kind`.
    """

    name: str
    dim: int = 0
    position: int = 0
    kind: str = ""


INVARIANT = AxisState("invariant")
REDUCED = AxisState("reduced")
ANY = AxisState("any")
NO_FACTOR = -1


@lru_cache(maxsize=CACHE_SIZE)
def _unreduced(kind: str) -> AxisState:
    return AxisState("unreduced", 0, 0, kind)


@dataclass(frozen=True, slots=True)
class Role:
    """Role of one mesh axis: its label, and the states of operands and results under it.

    `factor` is the factor that the axis shards, None if it shards none.
    """

    label: str | Mode
    operands: tuple[AxisState, ...]
    results: tuple[AxisState | None, ...]
    factor: str | None = None

    @property
    def name(self) -> str:
        """Name of the role in printed text."""
        return self.label if isinstance(self.label, str) else f"unreduced {self.label}"

    @property
    def sharded_dims(self) -> set[tuple[int, int]]:
        """Pairs of the index of a result and its dim that the axis shards."""
        states = enumerate(self.results)
        return {(index, x.dim) for index, x in states if x is not None and x.name == "sharded"}


def roles_of(rule: Rule, call: OpCall, *, grad: bool) -> tuple[Role, ...]:
    """Return every role that the rule offers to an axis; the last, all invariant, always exists.

    With `grad`, leave out the roles whose gradients would be wrong.
    """
    return _roles(rule, call.operands, call.results, grad)


@lru_cache(maxsize=CACHE_SIZE)
def _roles(
    rule: Rule, operands: tuple[Meta, ...], results: tuple[Meta | None, ...], grad: bool
) -> tuple[Role, ...]:
    # Ranks use the same operand for different work: it is reduced, so that gradients are summed.
    shared = tuple(
        ANY if index in rule.unread else REDUCED if is_inexact(meta) else INVARIANT
        for index, meta in enumerate(operands)
    )
    factor_states = (
        [_factor_states(dims) for dims in rule.operands],
        [_factor_states(dims) for dims in rule.results],
    )
    roles = [
        _sharding_role(rule, factor, shared, factor_states, results)
        for factor in rule.factors
        if _may_shard(rule, factor, grad)
    ]
    reduced = tuple(None if m is None else REDUCED if is_inexact(m) else INVARIANT for m in results)
    invariant = tuple(None if m is None else INVARIANT for m in results)
    for mode in rule.modes:
        if grad and mode in rule.no_grad:
            continue
        states = list(shared)
        for index in mode.operands:
            states[index] = _unreduced(mode.kind)
        # If an operand is reduced, the results that the mode leaves replicated are reduced too.
        replicated = reduced if REDUCED in states else invariant
        result_states = tuple(
            state if state is None or kind is None else _unreduced(kind)
            for state, kind in zip(replicated, mode.results, strict=True)
        )
        roles.append(Role(mode, tuple(states), result_states))
    roles.append(Role("reduced", shared, reduced))
    unchanged = tuple(ANY if i in rule.unread else INVARIANT for i, _ in enumerate(operands))
    roles.append(Role("invariant", unchanged, invariant))
    return tuple(role for role in roles if _dtypes_allow(role, operands, results))


def _may_shard(rule: Rule, factor: str, grad: bool) -> bool:
    return rule.kind(factor) not in ("unsharded", "permuted") and not (
        grad and factor in rule.no_grad
    )


FactorStates = dict[str, AxisState]


def _factor_states(dims: Dims | None) -> FactorStates:
    """Return the sharded state of a tensor for every factor of its dims."""
    return {
        factor: AxisState("sharded", dim, position)
        for dim, factors in enumerate(dims or ())
        for position, factor in enumerate(factors)
    }


def _sharding_role(
    rule: Rule,
    factor: str,
    shared: Sequence[AxisState],
    factor_states: tuple[Sequence[FactorStates], Sequence[FactorStates]],
    results: Sequence[Meta | None],
) -> Role:
    """Return the role that shards `factor`, and the slices of it, wherever they occur."""
    kinds, sharded = dict(rule.reductions), rule.with_slices(factor)
    if rule.kind(factor) == "sum":
        states = enumerate(shared)
        shared = [_unreduced("sum") if i in rule.added else state for i, state in states]

    def sharded_state(states: FactorStates) -> AxisState | None:
        return next((state for name, state in states.items() if name in sharded), None)

    return Role(
        factor,
        tuple(sharded_state(states) or other
              for states, other in zip(factor_states[0], shared, strict=True)),
        tuple(
            None if dims is None or meta is None
            else sharded_state(states) or _unreduced(kinds[factor])
            for dims, states, meta in zip(rule.results, factor_states[1], results, strict=True)
        ),
        factor,
    )  # fmt: skip


def _dtypes_allow(role: Role, operands: Sequence[Meta], results: Sequence[Meta | None]) -> bool:
    """Return True if tensors of these dtypes can have the unreduced states of the role."""
    pairs = *zip(role.operands, operands, strict=True), *zip(role.results, results, strict=True)
    return all(
        _can_be_unreduced(state.kind, meta.dtype)
        for state, meta in pairs
        if state is not None and meta is not None and state.name == "unreduced"
    )


@lru_cache(maxsize=CACHE_SIZE)
def _can_be_unreduced(kind: str, dtype: torch.dtype) -> bool:
    """Return True if a tensor of the dtype can be unreduced by the reduction `kind`."""
    return not state_problems((("x", kind),), (), dtype)


def factor_sizes(rule: Rule, call: OpCall) -> dict[str, int]:
    """Return the size of every factor, from the dims it has alone, and by division.

    Raises:
        ShardingError: if the rule does not fit the shapes of the call.
    """
    sizes = dict(rule.sizes)
    pairs: list[tuple[Dims | None, Meta | None]] = [
        *zip(rule.operands, call.operands, strict=False),
        *zip(rule.results, call.results, strict=False),
    ]
    counts = (len(rule.operands), len(rule.results)), (len(call.operands), len(call.results))
    if counts[0] != counts[1]:
        fail(_where(rule, call), f"{counts[1][0]} operands and {counts[1][1]} results",
             f"the rule has {counts[0][0]} and {counts[0][1]}",
             "write one list of factors for every tensor")  # fmt: skip
    tensors = [(dims, meta) for dims, meta in pairs if dims is not None and meta is not None]
    for dims, meta in tensors:
        if len(dims) != meta.ndim:
            fail(_where(rule, call), f"a tensor of shape {meta.shape}",
                 f"the rule writes it with {len(dims)} dims",
                 "one letter, 1 or parenthesis for every dim")  # fmt: skip
    listed = [(dim, size) for dims, m in tensors for dim, size in zip(dims, m.shape, strict=True)]
    for dim, size in listed:
        if len(dim) == 1 and sizes.setdefault(dim[0], size) != size:
            fail(_where(rule, call), f"factor {dim[0]!r} of sizes {sizes[dim[0]]} and {size}",
                 "a factor has one size", "give dims of other sizes other letters")  # fmt: skip
    products = [(dim, size) for dim, size in listed if len(dim) > 1]
    for _ in products:
        for dim, size in products:
            unknown = [f for f in dim if f not in sizes]
            if len(unknown) == 1:
                known = math.prod(sizes[f] for f in dim if f in sizes)
                sizes[unknown[0]] = size // known if known else 0
    for dim, size in products:
        if any(f not in sizes for f in dim) or math.prod(sizes[f] for f in dim) != size:
            fail(_where(rule, call), f"dim ({''.join(dim)}) of size {size}",
                 "the sizes of its factors multiply to it, and are known from other dims",
                 "give every factor a dim of its own somewhere")  # fmt: skip
    return sizes


def _where(rule: Rule, call: OpCall) -> str:
    return f"the rule of {name_of(call.op)}: {rule}"


def axis_states(dims: Dims, spec: Spec, sizes: Mapping[str, int]) -> dict[str, AxisState]:
    """Return the state of a tensor on each axis of its mesh.

    Args:
        dims: the factors of every dim of the tensor.
        spec: the layout of the tensor.
        sizes: the size of every factor.
    """
    p = spec.partition
    states = dict.fromkeys(spec.mesh.axes, INVARIANT)
    states |= {axis: REDUCED for axis, _ in p.reduced_kinds}
    states |= {axis: AxisState("unreduced", kind=kind) for axis, kind in p.unreduced_kinds}
    for dim, axes in enumerate(p.dims):
        if not axes:
            continue
        if len(dims[dim]) == 1:
            states |= dict.fromkeys(axes, AxisState("sharded", dim, 0))
        else:
            states |= _states_in_dim(dim, dims[dim], axes, spec, sizes)
    return states


def _states_in_dim(
    dim: int, factors: Sequence[str], axes: Iterable[str], spec: Spec, sizes: Mapping[str, int]
) -> dict[str, AxisState]:
    """Return the state of each axis of a dim that is a product of factors, major to minor."""
    states: dict[str, AxisState] = {}
    current, parts, last = 0, 1, len(factors) - 1
    for axis in axes:
        n = spec.mesh.shape[axis]
        while current < last and parts == sizes[factors[current]]:
            current, parts = current + 1, 1
        aligned = current == last or (
            current < last and _keeps_minor_factors(spec, dim, factors, current, sizes, parts * n)
        )
        states[axis] = AxisState("sharded", dim, current if aligned else NO_FACTOR)
        if not aligned:
            current = len(factors)
        parts *= n
    return states


def _keeps_minor_factors(
    spec: Spec, dim: int, factors: Sequence[str], position: int, sizes: Mapping[str, int],
    parts: int,
) -> bool:  # fmt: skip
    """Return True if `parts` shards of the factor at `position` leave minor factors unsharded."""
    if spec.sizes[dim] is None:
        return parts > 0 and sizes[factors[position]] % parts == 0
    minor = math.prod(sizes[f] for f in factors[position + 1 :])
    return minor > 0 and all(size % minor == 0 for size in spec.sizes[dim] or ())
