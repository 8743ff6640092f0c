"""Types of a rank's tensors along the mesh axes, and the rules for results of operations.

Along an axis a tensor is invariant (one value, the same on every rank; the axis is not listed),
varying (any value), reduced (the same value, used for different work) or unreduced (a partial sum,
or a candidate of a maximum). Cotangents: varying and invariant stay, reduced and unreduced swap.
A value that varies for no other reason than that the host has read varying values before is
control-dependent: it may be equal on all ranks, which is then compared.
The rules are those of JAX's varying manual axes (`jax.typeof`, JAX 0.11): operands of an operation
agree along every axis, after casts whose transpose is the sum that gradients need; unreduced
operands enter linear operations only.
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

State = tuple[str, str]
"""(word, reduction): varying, reduced or unreduced; the reduction is "" for varying."""

VARYING: State = ("varying", "")
CONTROL_DEPENDENT: State = ("varying", "by control")

UNSEEN = (
    "types show no difference, which may enter by text, caught errors, hooks, threads or containers"
)
"""Clause of errors for values that differ between ranks though their types are invariant."""

CASTS = {
    ("invariant", "varying"),
    ("invariant", "reduced"),
    ("varying", "unreduced"),
    ("reduced", "varying"),
}
"""Pairs (source, target) of the states between which `pcast` converts."""


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """States of a tensor along the axes where it is not invariant; equal ones are one object.

    >>> States.of({"x": VARYING}) is States.of({"x": VARYING}), States.of({}) is INVARIANT
    (True, True)
    """

    items: tuple[tuple[str, State], ...]
    unreduced: bool

    @staticmethod
    def of(states: dict[str, State]) -> States:
        """Return the states of a mapping from axes."""
        return _interned(tuple(sorted(states.items())))

    @staticmethod
    def varying(axes: Iterable[str]) -> States:
        """Return varying along `axes`, invariant along all others."""
        return States.of(dict.fromkeys(axes, VARYING))

    def at(self, axis: str) -> State | None:
        """Return the state along one axis; None is invariant."""
        for name, state in self.items:
            if name == axis:
                return state
        return None

    def axes(self, word: str) -> tuple[str, ...]:
        """Return the axes along which the state is `word`."""
        return tuple([axis for axis, state in self.items if state[0] == word])

    def updated(self, axes: Iterable[str], state: State | None) -> States:
        """Return the same states but for `state` along `axes`."""
        others = {axis: current for axis, current in self.items if axis not in axes}
        return States.of(others if state is None else {**others, **dict.fromkeys(axes, state)})

    @property
    def dual(self) -> States:
        """States of a cotangent."""
        swap = {"reduced": "unreduced", "unreduced": "reduced", "varying": "varying"}
        return States.of({axis: (swap[word], kind) for axis, (word, kind) in self.items})

    def __str__(self) -> str:
        parts = []
        for word in ("varying", "unreduced", "reduced"):
            axes = [
                axis if state == "varying" or kind == "sum" else f"{axis}={kind}"
                for axis, (state, kind) in self.items
                if state == word
            ]
            if axes:
                parts.append(f"{word}: {', '.join(axes)}")
        return f"{{{'; '.join(parts)}}}" if parts else ""


@cache
def _interned(items: tuple[tuple[str, State], ...]) -> States:
    return States(items, any(state[0] == "unreduced" for _, state in items))


INVARIANT = States.of({})


@lru_cache(maxsize=4096)
def states_of(p: PartitionSpec) -> States:
    """Return the states of the locals of a global tensor with the partition `p`.

    >>> str(states_of(PartitionSpec("x", None, unreduced={"y"})))
    '{varying: x; unreduced: y}'
    """
    states = {axis: VARYING for dim in p.dims for axis in dim}
    states |= {axis: ("unreduced", kind) for axis, kind in p.unreduced_kinds}
    states |= {axis: ("reduced", kind) for axis, kind in p.reduced_kinds}
    return States.of(states)


@dataclass(frozen=True, slots=True)
class LocalType:
    """Type of a rank's tensor: shape, dtype, and its states along the mesh axes.

    Attributes:
        shape: the local shape.
        dtype: the dtype.
        states: the states along the axes where it is not invariant.

    >>> import torch
    >>> import fshard as fs
    >>> @fs.shard_map(mesh=fs.Mesh(dp=2), in_specs=fs.P("dp"), out_specs=None)
    ... def type_of(x):
    ...     return fs.typeof(x)
    >>> kind = type_of(torch.zeros(4, 16))
    >>> kind, kind.varying
    (f32[2,16]{varying: dp}, ('dp',))
    """

    shape: torch.Size
    dtype: torch.dtype
    states: States

    @property
    def varying(self) -> tuple[str, ...]:
        """Axes along which the tensor varies, sorted."""
        return self.states.axes("varying")

    @property
    def unreduced(self) -> tuple[str, ...]:
        """Axes along which the tensor is a partial sum, sorted."""
        return self.states.axes("unreduced")

    @property
    def reduced(self) -> tuple[str, ...]:
        """Axes along which the tensor is one value that ranks use for different work, sorted."""
        return self.states.axes("reduced")

    def __str__(self) -> str:
        name = DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return f"{name}[{','.join(map(str, self.shape))}]{self.states}"

    __repr__ = __str__


# -- operations --------------------------------------------------------------------------


class TypeRule(enum.Enum):
    """Tensor operands in which an operation is linear, and which it takes unreduced."""

    OTHER = "none"
    MOVE = "all jointly, without arithmetic"
    LINEAR = "all jointly"
    SCALED = "the first"
    MASKED = "all but the first, jointly"
    PRODUCT = "each by itself"


@dataclass(frozen=True, slots=True)
class TypeConflict:
    """Axis along which operands do not agree, the rule they break, and a fix."""

    axis: str
    rule: str
    fix: str


@dataclass(frozen=True, slots=True)
class JoinedStates:
    """States of a result, and the states to which its operands are cast."""

    result: States
    operands: tuple[States, ...]


@lru_cache(maxsize=4096)
def join_states(operands: tuple[States, ...], rule: TypeRule) -> JoinedStates | TypeConflict:
    """Infer the states of an operation's result from those of its operands.

    An invariant operand is cast to varying (its gradient becomes a sum) or to reduced where
    another one is; reduced agrees with varying. Unreduced operands pass where `rule` allows.

    >>> joined = join_states((States.varying(["x"]), INVARIANT), TypeRule.OTHER)
    >>> print(joined.result, joined.operands[1])
    {varying: x} {varying: x}
    """
    axes = sorted({axis for states in operands for axis, _ in states.items})
    result: dict[str, State] = {}
    targets: list[dict[str, State]] = [{} for _ in operands]
    for axis in axes:
        outcome = _join_along(axis, [states.at(axis) for states in operands], rule)
        if isinstance(outcome, TypeConflict):
            return outcome
        result[axis], casts = outcome
        for target, state in zip(targets, casts, strict=True):
            target[axis] = state
    return JoinedStates(States.of(result), tuple(map(States.of, targets)))


def _join_along(
    axis: str, states: Sequence[State | None], rule: TypeRule
) -> tuple[State, list[State]] | TypeConflict:
    """Return the result's state along one axis, and the states to which operands are cast."""
    words = set(map(state_word, states))
    if "unreduced" in words:
        return _join_unreduced(axis, states, rule)
    others = {state for state in states if state is not None}
    if "varying" in words and others <= {VARYING, CONTROL_DEPENDENT, ("reduced", "sum")}:
        state = CONTROL_DEPENDENT if others == {CONTROL_DEPENDENT} else VARYING
        return state, [state] * len(states)
    if len(others) == 1 and (others == {("reduced", "sum")} or "invariant" not in words):
        (common,) = others
        return common, [common] * len(states)
    return TypeConflict(
        axis,
        f"an operand reduced by avg along {axis} must meet others of that state alone: its "
        "gradient is a share of an average",
        f"take it reduced by sum, P(reduced={{{axis!r}}})",
    )


def _join_unreduced(
    axis: str, states: Sequence[State | None], rule: TypeRule
) -> tuple[State, list[State]] | TypeConflict:
    """Return the result of `_join_along` where some operand is unreduced along the axis."""
    fix = f"fs.psum(operand, {axis!r}) before"
    linear = _linear_operands(states, rule)
    if not linear:
        reason = (
            "a product of two sums is not the sum of the products"
            if rule is TypeRule.PRODUCT
            else "the sum over the axis is still to be taken, and the operation is not linear"
        )
        return TypeConflict(
            axis, f"operands unreduced along {axis} must enter linear operations: {reason}", fix
        )
    reductions = {states[index] for index in linear}
    first = states[linear[0]]
    if len(reductions) > 1 or first is None or first[0] != "unreduced":
        return TypeConflict(
            axis,
            f"the operands of a linear operation must all be unreduced along {axis} by one "
            "reduction, or none: another is added once on every rank",
            fix,
        )
    if first[1] not in LINEAR and rule is not TypeRule.MOVE:
        reason = f"the {first[1]} over {axis} must be taken before the operation"
        return TypeConflict(axis, reason, f"fs.p{first[1]}(operand, {axis!r}) before")
    factor: State = ("reduced", first[1])
    factors = {state for index, state in enumerate(states) if index not in linear}
    if factors - {None, factor} or (None in factors and first[1] != "sum"):
        reason = f"a factor of an operand unreduced along {axis} must be equal on every rank"
        return TypeConflict(axis, reason, fix)
    return first, [first if index in linear else factor for index in range(len(states))]


def _linear_operands(states: Sequence[State | None], rule: TypeRule) -> list[int]:
    """Return the indices of the operands in which, jointly, the operation is linear."""
    everything = list(range(len(states)))
    match rule:
        case TypeRule.MOVE | TypeRule.LINEAR:
            return everything
        case TypeRule.SCALED:
            return everything[:1]
        case TypeRule.MASKED:
            return everything[1:] or everything
        case TypeRule.PRODUCT:
            unreduced = [i for i, state in enumerate(states) if state_word(state) == "unreduced"]
            return unreduced if len(unreduced) == 1 else []
        case TypeRule.OTHER:
            return []


@lru_cache(maxsize=4096)
def newly_cast_axes(states: States, target: States) -> tuple[str, ...]:
    """Return the axes along which `states` is invariant and `target` is not.

    >>> newly_cast_axes(INVARIANT, States.varying(["x"]))
    ('x',)
    """
    return tuple(axis for axis, _ in target.items if states.at(axis) is None)


@lru_cache(maxsize=4096)
def control_cast_axes(states: States, target: States) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes along which a cast makes a value control-dependent, and no longer so.

    >>> control_cast_axes(INVARIANT, States.of({"x": CONTROL_DEPENDENT}))
    (('x',), ())
    """
    entered, left = (
        tuple(
            axis
            for axis, state in items.items
            if state == CONTROL_DEPENDENT and others.at(axis) == end
        )
        for items, others, end in ((target, states, None), (states, target, VARYING))
    )
    return entered, left


# -- collectives -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TypeSignature:
    """States that a collective takes and returns along its axes.

    It takes varying operands, and unreduced ones of one of `reductions`. Invariant operands are
    cast to varying, with `all_or_none` only if they are invariant along all of the axes.
    A signature with `cast_to` belongs to `pcast`, which converts between the pairs of `CASTS`.
    Unless `linear`, operands must not be unreduced along other axes.
    """

    axes: tuple[str, ...]
    result: State | None = VARYING
    reductions: tuple[str, ...] = ()
    all_or_none: bool = False
    linear: bool = True
    cast_to: str | None = None
    source: str | None = None


@lru_cache(maxsize=4096)
def apply_signature(states: States, signature: TypeSignature) -> JoinedStates | TypeConflict:
    """Infer the states of a collective's result, and those to which its operand is cast.

    >>> total = apply_signature(States.varying(["x", "y"]), TypeSignature(("x",), None, ("sum",)))
    >>> print(total.result)
    {varying: y}
    """
    axes = signature.axes
    if not axes:
        return JoinedStates(states, (states,))
    words = {axis: state_word(states.at(axis)) for axis in axes}
    if signature.cast_to is not None:
        return _apply_cast(states, words, signature)
    outside = [axis for axis in states.axes("unreduced") if axis not in axes]
    if outside and not signature.linear:
        (axis, *_) = outside
        rule = f"operands unreduced along {axis} must enter linear collectives"
        return TypeConflict(axis, rule, f"fs.psum(x, {axis!r}) before")
    found = set(words.values())
    if "unreduced" in found:
        return _apply_to_unreduced(states, words, signature)
    listed = _list_words(words)
    if "invariant" in found and signature.all_or_none and len(found) > 1:
        invariant = tuple(axis for axis, word in words.items() if word == "invariant")
        fix = f"leave out {', '.join(invariant)}"
        if not {"max", "min"} & set(signature.reductions):
            fix += (
                f", or fs.pcast(x, {format_axes(invariant)}, to='varying') first, if the equal "
                "values are to count once per rank"
            )
        rule = f"along its axes the operand must be in one state; here it is {listed}"
        return TypeConflict(invariant[0], rule, fix)
    averaged = [axis for axis in axes if states.at(axis) == ("reduced", "avg")]
    if averaged:
        rule = f"along its axes the operand must vary; here it is {listed}, by avg"
        fix = f"take it reduced by sum, P(reduced={{{averaged[0]!r}}})"
        return TypeConflict(averaged[0], rule, fix)
    target = states.updated(axes, VARYING)
    return JoinedStates(target.updated(axes, signature.result), (target,))


def _apply_to_unreduced(
    states: States, words: dict[str, str], signature: TypeSignature
) -> JoinedStates | TypeConflict:
    """Infer a collective's result for an operand that is unreduced along some of its axes."""
    axes = signature.axes
    unreduced = tuple(axis for axis, word in words.items() if word == "unreduced")
    kinds = {kind for axis, (_, kind) in states.items if axis in unreduced}
    if unreduced == axes and kinds <= set(signature.reductions):
        return JoinedStates(states.updated(axes, signature.result), (states,))
    rule = "along its axes the operand must vary"
    if signature.reductions:
        rule += f", or be unreduced by {' or '.join(signature.reductions)} along all of them"
    (kind, *_) = sorted(kinds)
    reduce = {"sum": "psum", "avg": "pmean", "product": "pprod"}.get(kind, f"p{kind}")
    fix = f"fs.{reduce}(x, {format_axes(unreduced)}) first"
    if signature.all_or_none and unreduced != axes:
        fix += f", then over {', '.join(axis for axis in axes if axis not in unreduced)}"
    return TypeConflict(unreduced[0], f"{rule}; here it is {_list_words(words)}", fix)


def _list_words(words: dict[str, str]) -> str:
    return ", ".join(f"{word} along {axis}" for axis, word in words.items())


def state_word(state: State | None) -> str:
    """Return the word for a state."""
    return "invariant" if state is None else state[0]


def format_axes(axes: Sequence[str]) -> str:
    """Format axes as the argument of a collective."""
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


def _apply_cast(
    states: States, words: dict[str, str], signature: TypeSignature
) -> JoinedStates | TypeConflict:
    """Infer the states of a `pcast`."""
    target, axes = str(signature.cast_to), signature.axes
    controlled = [axis for axis in axes if states.at(axis) == CONTROL_DEPENDENT]
    if target == "varying":  # it stands for an invariant value
        words = words | dict.fromkeys(controlled, "invariant")
    if len(set(words.values())) > 1:
        groups = [[a for a in axes if words[a] == word] for word, to in CASTS if to == target]
        fixes = [f"fs.pcast(x, {format_axes(g)}, to={target!r})" for g in sorted(groups) if g]
        rule = f"along its axes the operand must be in one state; here it is {_list_words(words)}"
        return TypeConflict(axes[0], rule, ", and then ".join(fixes) or "leave the cast out")
    (word,) = set(words.values())
    if signature.source not in (None, word):
        rule = f"src must be the operand's state; here it is {word} along {', '.join(axes)}"
        return TypeConflict(axes[0], rule, "leave src out")
    if (word, target) not in CASTS:
        casts = ", ".join(f"{a} to {b}" for a, b in sorted(CASTS))
        rule = f"casts are {casts}; here it is {word} along {', '.join(axes)}"
        return TypeConflict(axes[0], rule, suggest_instead_of_cast(word, target, axes))
    if word == "reduced" and any(states.at(axis) != ("reduced", "sum") for axis in axes):
        rule = "the operand must be reduced by sum: by avg its gradient is a share of an average"
        return TypeConflict(axes[0], rule, f"take it reduced by sum, P(reduced={{{axes[0]!r}}})")
    result = states.updated(axes, signature.result)
    return JoinedStates(result, (result if controlled and target == "varying" else states,))


def suggest_state(word: object, known: Sequence[str]) -> str:
    """Return the fix for a word that is not one of the states `known`; JAX writes "invarying"."""
    word = {"invarying": "invariant"}.get(str(word), str(word))
    return did_you_mean(word, known, f"use one of {', '.join(known)}")


def suggest_instead_of_cast(word: str, target: str, axes: Sequence[str]) -> str:
    """Return the fix for a cast that does not exist."""
    if word == target:
        return "leave the cast out"
    if target == "unreduced":
        return (
            f"torch.where(fs.axis_index({format_axes(axes)}) == 0, x, 0), which varies: the value "
            "once, and zeros; then the cast"
        )
    if word == "reduced":
        return (
            f"fs.psum of what is computed from it; fs.pcast(x, {format_axes(axes)}, "
            "to='varying') first"
        )
    return f"fs.psum(x, {format_axes(axes)}) goes from {word} to invariant; then the cast"
