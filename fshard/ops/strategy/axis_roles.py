"""What one mesh axis can do for one call: cut a factor, carry addends, or repeat the work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from fshard._util.errors import fail
from fshard.layout.spec import Spec
from fshard.layout.validation import state_problems
from fshard.ops.core.builders import is_inexact
from fshard.ops.core.call import Meta, OpCall, name_of
from fshard.ops.core.rule import Dims, Mode, Rule

__all__ = ["Role", "State", "factor_sizes", "roles_of", "states_of"]


class State(NamedTuple):
    """How one tensor lies on one axis: `word` is sharded, invariant, reduced or unreduced.

    A role asks for `any` of them of an operand that is not read.

    Sharded states have the dim, and the place of the factor in it (-1 where the shards are not
    those of a factor); unreduced ones their kind.
    """

    word: str
    dim: int = 0
    place: int = 0
    kind: str = ""


INVARIANT = State("invariant")
REDUCED = State("reduced")
ANY = State("any")
NOWHERE = -1


@lru_cache(maxsize=64)
def _unreduced(kind: str) -> State:
    return State("unreduced", 0, 0, kind)


@dataclass(frozen=True, slots=True)
class Role:
    """What an axis does: what it is called, the states it asks of operands and gives results.

    `factor` is the one that it cuts, if it does.
    """

    label: str | Mode
    operands: tuple[State, ...]
    results: tuple[State | None, ...]
    factor: str | None = None

    @property
    def name(self) -> str:
        """What it is called in texts."""
        return self.label if isinstance(self.label, str) else f"unreduced {self.label}"


@lru_cache(maxsize=8192)
def _roles(
    rule: Rule, operands: tuple[Meta, ...], results: tuple[Meta | None, ...], grad: bool
) -> tuple[Role, ...]:
    # What every rank uses for other work is reduced: its gradients then are addends.
    same = tuple(
        ANY if at in rule.unread else REDUCED if is_inexact(each) else INVARIANT
        for at, each in enumerate(operands)
    )
    places = [_places(dims) for dims in rule.operands], [_places(dims) for dims in rule.results]
    roles = [
        _cutting(rule, factor, same, places, results)
        for factor in rule.factors
        if _may_cut(rule, factor, grad)
    ]
    made = tuple(None if m is None else REDUCED if is_inexact(m) else INVARIANT for m in results)
    still = tuple(None if m is None else INVARIANT for m in results)
    for mode in rule.modes:
        if grad and mode in rule.grad:
            continue
        asked = list(same)
        for place in mode.operands:
            asked[place] = _unreduced(mode.kind)
        # What other operands make is used for other work there, as they are.
        alike = made if REDUCED in asked else still
        given = tuple(
            each if each is None or kind is None else _unreduced(kind)
            for each, kind in zip(alike, mode.results, strict=True)
        )
        roles.append(Role(mode, tuple(asked), given))
    roles.append(Role("reduced", same, made))
    everywhere = tuple(ANY if at in rule.unread else INVARIANT for at, _ in enumerate(operands))
    roles.append(Role("invariant", everywhere, still))
    return tuple(role for role in roles if _exists(role, operands, results))


def roles_of(rule: Rule, call: OpCall, *, grad: bool) -> tuple[Role, ...]:
    """Every role that the rule has for an axis; the last one, all invariant, always exists."""
    return _roles(rule, call.operands, call.results, grad)


def _may_cut(rule: Rule, factor: str, grad: bool) -> bool:
    return rule.kind(factor) not in ("whole", "permuted") and not (grad and factor in rule.grad)


Places = dict[str, State]


def _places(dims: Dims | None) -> Places:
    """The state of a tensor on an axis that cuts a factor, by factor."""
    return {
        factor: State("sharded", dim, place)
        for dim, factors in enumerate(dims or ())
        for place, factor in enumerate(factors)
    }


def _cutting(
    rule: Rule,
    factor: str,
    same: Sequence[State],
    places: tuple[Sequence[Places], Sequence[Places]],
    results: Sequence[Meta | None],
) -> Role:
    kinds, cut = dict(rule.reductions), rule.as_cut(factor)

    def where(found: Places) -> State | None:
        return next((state for name, state in found.items() if name in cut), None)

    return Role(
        factor,
        tuple(where(found) or each for found, each in zip(places[0], same, strict=True)),
        tuple(
            None if dims is None or meta is None
            else where(found) or _unreduced(kinds[factor])
            for dims, found, meta in zip(rule.results, places[1], results, strict=True)
        ),
        factor,
    )  # fmt: skip


def _exists(role: Role, operands: Sequence[Meta], results: Sequence[Meta | None]) -> bool:
    """Whether tensors of these dtypes can be in the states of the role."""
    pairs = *zip(role.operands, operands, strict=True), *zip(role.results, results, strict=True)
    for state, meta in pairs:
        if state is None or meta is None or state.word != "unreduced":
            continue
        if not _can_lack(state.kind, meta.dtype):
            return False
    return True


@lru_cache(maxsize=1024)
def _can_lack(kind: str, dtype: torch.dtype) -> bool:
    """Whether a tensor of that dtype can be unreduced so."""
    return not state_problems((("x", kind),), (), dtype)


def factor_sizes(rule: Rule, call: OpCall) -> dict[str, int]:
    """The length of every factor, from the dims that it is alone on, and by division.

    Raises `ShardingError` where the rule does not fit the shapes.
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
    known = [(dims, meta) for dims, meta in pairs if dims is not None and meta is not None]
    for dims, meta in known:
        if len(dims) != meta.ndim:
            fail(_where(rule, call), f"a tensor of shape {meta.shape}",
                 f"the rule writes it with {len(dims)} dims",
                 "one letter, 1 or parenthesis for every dim")  # fmt: skip
    flat = [(dim, size) for dims, m in known for dim, size in zip(dims, m.shape, strict=True)]
    for dim, size in flat:
        if len(dim) == 1 and sizes.setdefault(dim[0], size) != size:
            fail(_where(rule, call), f"factor {dim[0]!r} of sizes {sizes[dim[0]]} and {size}",
                 "a factor has one size", "give dims of other sizes other letters")  # fmt: skip
    left = [(dim, size) for dim, size in flat if len(dim) > 1]
    for _ in left:
        for dim, size in left:
            unknown = [f for f in dim if f not in sizes]
            if len(unknown) == 1:
                rest = math.prod(sizes[f] for f in dim if f in sizes)
                sizes[unknown[0]] = size // rest if rest else 0
    for dim, size in left:
        if any(f not in sizes for f in dim) or math.prod(sizes[f] for f in dim) != size:
            fail(_where(rule, call), f"dim ({''.join(dim)}) of size {size}",
                 "the sizes of its factors multiply to it, and are known from other dims",
                 "give every factor a dim of its own somewhere")  # fmt: skip
    return sizes


def _where(rule: Rule, call: OpCall) -> str:
    return f"the rule of {name_of(call.op)}: {rule}"


def states_of(dims: Dims, spec: Spec, sizes: Mapping[str, int]) -> dict[str, State]:
    """How a tensor that lies as `spec` is on each axis of its mesh, in factors."""
    p = spec.partition
    states = dict.fromkeys(spec.mesh.axes, INVARIANT)
    states |= {axis: REDUCED for axis, _ in p.reduced_kinds}
    states |= {axis: State("unreduced", kind=kind) for axis, kind in p.unreduced_kinds}
    for dim, axes in enumerate(p.dims):
        if not axes:
            continue
        if len(dims[dim]) == 1:
            states |= dict.fromkeys(axes, State("sharded", dim, 0))
        else:
            states |= _walk(dim, dims[dim], axes, spec, sizes)
    return states


def _walk(
    dim: int, factors: Sequence[str], axes: Iterable[str], spec: Spec, sizes: Mapping[str, int]
) -> dict[str, State]:
    """The factors of a dim that its axes cut, major to minor."""
    found: dict[str, State] = {}
    place, cut = 0, 1
    for axis in axes:
        n = spec.mesh.shape[axis]
        while place < len(factors) - 1 and cut == sizes[factors[place]]:
            place, cut = place + 1, 1
        here = place if place < len(factors) else NOWHERE
        if (
            here != NOWHERE
            and place < len(factors) - 1
            and not _cuts(spec, dim, factors, place, sizes, cut * n)
        ):
            here = NOWHERE
        found[axis] = State("sharded", dim, here)
        if here == NOWHERE:
            place = len(factors)
        cut *= n
    return found


def _cuts(
    spec: Spec, dim: int, factors: Sequence[str], place: int, sizes: Mapping[str, int], parts: int
) -> bool:
    """Whether cutting a factor so leaves what is minor to it whole."""
    if spec.sizes[dim] is None:
        return parts > 0 and sizes[factors[place]] % parts == 0
    minor = math.prod(sizes[f] for f in factors[place + 1 :])
    return minor > 0 and all(size % minor == 0 for size in spec.sizes[dim] or ())
