"""What a rank's tensor means along each mesh axis, and what follows for results of operations.

Along an axis a tensor is invariant (one value, the same on every rank; the axis is not named),
varying (anything), reduced (the same value, used for different work) or unreduced (an addend).
The cotangent of a varying tensor varies, of an invariant one is invariant, of a reduced one
unreduced and the other way round. The rules are those of JAX's varying manual axes (`jax.typeof`,
JAX 0.11): operands of one operation agree along every axis, and a cast makes them agree whose
transpose is the sum that gradients need; what is unreduced passes linear operations only.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from fshard._util.errors import did_you_mean
from fshard.layout.partition_spec import LINEAR, PartitionSpec
from fshard.layout.spec import DTYPE_NAMES

__all__ = [
    "CASTS",
    "INVARIANT",
    "VARYING",
    "JoinedStates",
    "LocalType",
    "State",
    "States",
    "TypeConflict",
    "TypeRule",
    "TypeSignature",
    "apply_signature",
    "format_axes",
    "join_states",
    "newly_cast_axes",
    "state_word",
    "states_of",
    "suggest_instead_of_cast",
    "suggest_state",
]  # fmt: skip

State = tuple[str, str]
"""One of the words varying, reduced and unreduced, and for the latter two the reduction."""

VARYING: State = ("varying", "")


CASTS = {
    ("invariant", "varying"),
    ("invariant", "reduced"),
    ("varying", "unreduced"),
    ("reduced", "varying"),
}
"""What `pcast` casts from, and to."""


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """The states of a tensor along the axes where it is not invariant; equal ones are one object.

    >>> States.of({"x": VARYING}) is States.of({"x": VARYING}), States.of({}) is INVARIANT
    (True, True)
    """

    items: tuple[tuple[str, State], ...]
    unreduced: bool

    @staticmethod
    def of(states: dict[str, State]) -> States:
        """The states of a mapping from axes."""
        return _interned(tuple(sorted(states.items())))

    @staticmethod
    def varying(axes: Iterable[str]) -> States:
        """Varying along `axes`, invariant along all others."""
        return States.of(dict.fromkeys(axes, VARYING))

    def at(self, axis: str) -> State | None:
        """The state along one axis; None is invariant."""
        return next((state for name, state in self.items if name == axis), None)

    def axes(self, word: str) -> tuple[str, ...]:
        """The axes along which the state is `word`."""
        return tuple(axis for axis, state in self.items if state[0] == word)

    def updated(self, axes: Iterable[str], state: State | None) -> States:
        """The same with another state along `axes`."""
        kept = {axis: each for axis, each in self.items if axis not in axes}
        return States.of(kept if state is None else {**kept, **dict.fromkeys(axes, state)})

    @property
    def dual(self) -> States:
        """The states of a cotangent."""
        swap = {"reduced": "unreduced", "unreduced": "reduced", "varying": "varying"}
        return States.of({axis: (swap[word], kind) for axis, (word, kind) in self.items})

    def __str__(self) -> str:
        parts = []
        for word in ("varying", "unreduced", "reduced"):
            named = [
                axis if kind in ("", "sum") else f"{axis}={kind}"
                for axis, (each, kind) in self.items
                if each == word
            ]
            if named:
                parts.append(f"{word}: {', '.join(named)}")
        return f"{{{'; '.join(parts)}}}" if parts else ""


@cache
def _interned(items: tuple[tuple[str, State], ...]) -> States:
    return States(items, any(state[0] == "unreduced" for _, state in items))


INVARIANT = States.of({})


@lru_cache(maxsize=4096)
def states_of(p: PartitionSpec) -> States:
    """The states of the locals of a global tensor that lies as `p`.

    >>> str(states_of(PartitionSpec("x", None, unreduced={"y"})))
    '{varying: x; unreduced: y}'
    """
    states = {axis: VARYING for dim in p.dims for axis in dim}
    states |= {axis: ("unreduced", kind) for axis, kind in p.unreduced_kinds}
    states |= {axis: ("reduced", kind) for axis, kind in p.reduced_kinds}
    return States.of(states)


@dataclass(frozen=True, slots=True)
class LocalType:
    """The type of a rank's tensor: shape, dtype, and its states along the mesh axes.

    >>> x = torch.zeros(2, 16)
    >>> print(LocalType(x.shape, x.dtype, States.varying(["dp"])))
    f32[2,16]{varying: dp}
    """

    shape: torch.Size
    dtype: torch.dtype
    states: States

    @property
    def varying(self) -> tuple[str, ...]:
        """The axes along which it varies, sorted."""
        return self.states.axes("varying")

    @property
    def unreduced(self) -> tuple[str, ...]:
        """The axes along which it is an addend, sorted."""
        return self.states.axes("unreduced")

    @property
    def reduced(self) -> tuple[str, ...]:
        """The axes along which it is one value for different work, sorted."""
        return self.states.axes("reduced")

    def __str__(self) -> str:
        name = DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return f"{name}[{','.join(map(str, self.shape))}]{self.states}"

    __repr__ = __str__


# -- operations --------------------------------------------------------------------------


class TypeRule(enum.Enum):
    """In which of its tensor operands an operation is linear: those it takes unreduced."""

    OTHER = "none"
    MOVE = "all jointly, without arithmetic"
    LINEAR = "all jointly"
    SCALED = "the first"
    MASKED = "all but the first, jointly"
    PRODUCT = "each by itself"


@dataclass(frozen=True, slots=True)
class TypeConflict:
    """Why operands do not go together along an axis, and what helps."""

    axis: str
    rule: str
    fix: str


@dataclass(frozen=True, slots=True)
class JoinedStates:
    """The states of a result, and those that the operands are cast to for it."""

    result: States
    operands: tuple[States, ...]


@lru_cache(maxsize=4096)
def join_states(operands: tuple[States, ...], rule: TypeRule) -> JoinedStates | TypeConflict:
    """What an operation makes of operands in given states.

    Invariant goes with varying after a cast that sums its gradient, reduced with varying as it
    is; invariant goes with reduced after a cast. Unreduced operands pass where `rule` allows.

    >>> joined = join_states((States.varying(["x"]), INVARIANT), TypeRule.OTHER)
    >>> print(joined.result, joined.operands[1])
    {varying: x} {varying: x}
    """
    axes = sorted({axis for each in operands for axis, _ in each.items})
    result: dict[str, State] = {}
    targets: list[dict[str, State]] = [{} for _ in operands]
    for axis in axes:
        found = [each.at(axis) for each in operands]
        outcome = _along(axis, found, rule)
        if isinstance(outcome, TypeConflict):
            return outcome
        result[axis], states = outcome
        for target, state in zip(targets, states, strict=True):
            target[axis] = state
    return JoinedStates(States.of(result), tuple(States.of(each) for each in targets))


def _along(
    axis: str, found: Sequence[State | None], rule: TypeRule
) -> tuple[State, list[State]] | TypeConflict:
    """The result's state along one axis, and the operands' that it takes."""
    words = set(map(state_word, found))
    if "unreduced" in words:
        return _unreduced(axis, found, rule)
    others = {each for each in found if each is not None}
    if others == {VARYING} or others == {VARYING, ("reduced", "sum")}:
        return VARYING, [VARYING] * len(found)
    if len(others) == 1 and (others == {("reduced", "sum")} or "invariant" not in words):
        (state,) = others
        return state, [state] * len(found)
    return TypeConflict(
        axis,
        f"a value reduced by avg along {axis} goes with others of that kind alone: its gradient "
        "is a share of an average",
        f"take it reduced by sum, P(reduced={{{axis!r}}})",
    )


def _unreduced(
    axis: str, found: Sequence[State | None], rule: TypeRule
) -> tuple[State, list[State]] | TypeConflict:
    reduce = f"fs.psum(operand, {axis!r}) before"
    places = _linear_places(found, rule)
    if not places:
        why = (
            "a product of two sums is not the sum of the products"
            if rule is TypeRule.PRODUCT
            else "a sum over it is still to be taken, and the operation is not linear"
        )
        return TypeConflict(
            axis, f"what is unreduced along {axis} passes linear operations: {why}", reduce
        )
    states = {found[at] for at in places}
    state = found[places[0]]
    if len(states) > 1 or state is None or state[0] != "unreduced":
        return TypeConflict(
            axis,
            f"the operands of a linear operation are all unreduced along {axis} by one reduction, "
            "or none: another is added once on every rank",
            reduce,
        )
    if state[1] not in LINEAR and rule is not TypeRule.MOVE:
        why = f"a {state[1]} over {axis} is still to be taken: what is computed of it is not that"
        return TypeConflict(axis, why, f"fs.p{state[1]}(operand, {axis!r}) before")
    factor: State = ("reduced", state[1])
    factors = {each for at, each in enumerate(found) if at not in places}
    if factors - {None, factor} or (None in factors and state[1] != "sum"):
        why = f"a factor of what is unreduced along {axis} is the same on every rank along it"
        return TypeConflict(axis, why, reduce)
    return state, [state if at in places else factor for at in range(len(found))]


def _linear_places(found: Sequence[State | None], rule: TypeRule) -> list[int]:
    """The operands in which, jointly, the operation is linear as far as they need it."""
    everything = list(range(len(found)))
    match rule:
        case TypeRule.MOVE | TypeRule.LINEAR:
            return everything
        case TypeRule.SCALED:
            return everything[:1]
        case TypeRule.MASKED:
            return everything[1:] or everything
        case TypeRule.PRODUCT:
            places = [
                at for at, each in enumerate(found) if each is not None and each[0] == "unreduced"
            ]
            return places if len(places) == 1 else []
        case TypeRule.OTHER:
            return []


@lru_cache(maxsize=4096)
def newly_cast_axes(states: States, target: States) -> tuple[str, ...]:
    """The axes along which a tensor is invariant, and is something else where it is cast to.

    >>> newly_cast_axes(INVARIANT, States.varying(["x"]))
    ('x',)
    """
    return tuple(axis for axis, _ in target.items if states.at(axis) is None)


# -- collectives -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TypeSignature:
    """What a collective takes and gives along its axes.

    It takes what varies, and what is unreduced by one of `reductions`. What is invariant along
    some of the axes is cast to varying, with `all_or_none` only if it is along all of them.
    One with `cast_to` is no collective, and takes what `CASTS` says. Off its axes one that is
    not `linear` takes nothing unreduced.
    """

    axes: tuple[str, ...]
    gives: State | None = VARYING
    reductions: tuple[str, ...] = ()
    all_or_none: bool = False
    linear: bool = True
    cast_to: str | None = None
    source: str | None = None


@lru_cache(maxsize=4096)
def apply_signature(states: States, signature: TypeSignature) -> JoinedStates | TypeConflict:
    """What a collective makes of an operand, which it is cast to first.

    >>> total = apply_signature(States.varying(["x", "y"]), TypeSignature(("x",), None, ("sum",)))
    >>> print(total.result)
    {varying: y}
    """
    axes = signature.axes
    if not axes:
        return JoinedStates(states, (states,))
    words = {axis: state_word(states.at(axis)) for axis in axes}
    if signature.cast_to is not None:
        return _recast(states, words, signature)
    outside = [axis for axis in states.axes("unreduced") if axis not in axes]
    if outside and not signature.linear:
        (axis, *_) = outside
        rule = f"what is unreduced along {axis} passes linear collectives only"
        return TypeConflict(axis, rule, f"fs.psum(x, {axis!r}) before")
    found = set(words.values())
    if "unreduced" in found:
        return _addends(states, words, signature)
    listed = ", ".join(f"{word} along {axis}" for axis, word in words.items())
    if "invariant" in found and signature.all_or_none and len(found) > 1:
        still = tuple(axis for axis, word in words.items() if word == "invariant")
        fix = f"leave out {', '.join(still)}"
        if not {"max", "min"} & set(signature.reductions):
            fix += (
                f", or fs.pcast(x, {format_axes(still)}, to='varying') first, if the equal values "
            )
            fix += "are to count once per rank"
        rule = f"along its axes the operand is in one state; here it is {listed}"
        return TypeConflict(still[0], rule, fix)
    shares = [a for a in axes if states.at(a) == ("reduced", "avg")]
    if shares:
        rule = f"along its axes the operand varies; here it is {listed}, by avg"
        return TypeConflict(
            shares[0], rule, f"take it reduced by sum, P(reduced={{{shares[0]!r}}})"
        )
    target = states.updated(axes, VARYING)
    return JoinedStates(target.updated(axes, signature.gives), (target,))


def _addends(
    states: States, words: dict[str, str], signature: TypeSignature
) -> JoinedStates | TypeConflict:
    """What a collective makes of an operand that is unreduced along some of its axes."""
    axes = signature.axes
    unreduced = tuple(axis for axis, word in words.items() if word == "unreduced")
    kinds = {kind for axis, (_, kind) in states.items if axis in unreduced}
    if unreduced == axes and kinds <= set(signature.reductions):
        return JoinedStates(states.updated(axes, signature.gives), (states,))
    takes = " or ".join(signature.reductions)
    rule = "along its axes the operand varies"
    if takes:
        rule += f", or is unreduced by {takes} along all of them"
    listed = ", ".join(f"{word} along {axis}" for axis, word in words.items())
    (kind, *_) = sorted(kinds)
    reduce = {"sum": "psum", "avg": "pmean", "product": "pprod"}.get(kind, f"p{kind}")
    fix = f"fs.{reduce}(x, {format_axes(unreduced)}) first"
    if signature.all_or_none and unreduced != axes:
        fix += f", then over {', '.join(a for a in axes if a not in unreduced)}"
    return TypeConflict(unreduced[0], f"{rule}; here it is {listed}", fix)


def state_word(state: State | None) -> str:
    """The word for a state."""
    return "invariant" if state is None else state[0]


def format_axes(axes: Sequence[str]) -> str:
    """Axes as one writes them for a collective."""
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


def _recast(
    states: States, words: dict[str, str], signature: TypeSignature
) -> JoinedStates | TypeConflict:
    """What `pcast` makes of an operand."""
    to, axes = str(signature.cast_to), signature.axes
    if len(set(words.values())) > 1:
        listed = ", ".join(f"{word} along {axis}" for axis, word in words.items())
        groups = [[a for a in axes if words[a] == word] for word, to_ in CASTS if to_ == to]
        fixes = [f"fs.pcast(x, {format_axes(each)}, to={to!r})" for each in sorted(groups) if each]
        return TypeConflict(axes[0], f"along its axes the operand is in one state; here it is {listed}",
                     ", and then ".join(fixes) or "leave the cast out")  # fmt: skip
    (word,) = set(words.values())
    if signature.source not in (None, word):
        rule = f"src is the state that the operand has; here it is {word} along {', '.join(axes)}"
        return TypeConflict(axes[0], rule, "leave src out")
    if (word, to) not in CASTS:
        ways = ", ".join(f"{a} to {b}" for a, b in sorted(CASTS))
        rule = f"casts are {ways}; here it is {word} along {', '.join(axes)}"
        return TypeConflict(axes[0], rule, suggest_instead_of_cast(word, to, axes))
    if word == "reduced" and any(states.at(axis) != ("reduced", "sum") for axis in axes):
        return TypeConflict(axes[0], "what is reduced by avg has the gradient of a share",
                     f"take it reduced by sum, P(reduced={{{axes[0]!r}}})")  # fmt: skip
    return JoinedStates(states.updated(axes, signature.gives), (states,))


def suggest_state(word: object, known: Sequence[str]) -> str:
    """The fix for a word that is none of the `known` states; JAX's word is invarying for one."""
    word = {"invarying": "invariant"}.get(str(word), str(word))
    return did_you_mean(word, known, f"use one of {', '.join(known)}")


def suggest_instead_of_cast(word: str, to: str, axes: Sequence[str]) -> str:
    """What to do in place of a cast that there is not."""
    if word == to:
        return "leave the cast out"
    if to == "unreduced":
        return (
            f"torch.where(fs.axis_index({format_axes(axes)}) == 0, x, 0), which varies: the value "
            "once, and zeros; then the cast"
        )
    if word == "reduced":
        return (
            f"fs.psum of what is made of it; fs.pcast(x, {format_axes(axes)}, to='varying') first"
        )
    return f"fs.psum(x, {format_axes(axes)}) goes from {word} to invariant; then the cast"
