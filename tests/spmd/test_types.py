"""Laws of the algebra of types: joined states of operands, and results of collectives."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from fshard import P
from fshard.spmd.types import (
    CASTS,
    INVARIANT,
    VARYING,
    JoinedStates,
    LocalType,
    State,
    States,
    TypeConflict,
    TypeRule,
    TypeSignature,
    apply_signature,
    join_states,
    states_of,
)

ONE: tuple[State | None, ...] = (
    None, VARYING, ("reduced", "sum"), ("reduced", "avg"), ("unreduced", "sum"),
    ("unreduced", "avg"), ("unreduced", "max"),
)  # fmt: skip
"""All states along one axis, with several reductions."""
ALONG_X = [States.of({} if item is None else {"x": item}) for item in ONE]
ALONG_BOTH = [
    States.of({axis: item for axis, item in (("x", a), ("y", b)) if item is not None})
    for a, b in itertools.product(ONE, repeat=2)
]
SUM: State = ("unreduced", "sum")


def test_equal_states_are_one_object_and_print_as_specs_do() -> None:
    assert States.of({"y": VARYING, "x": SUM}) is States.of({"x": SUM, "y": VARYING})
    states = states_of(P("x", ("y",), unreduced={"z": "max"}, reduced={"w"}))
    assert str(states) == "{varying: x, y; unreduced: z=max; reduced: w}"
    assert str(INVARIANT) == ""
    assert states_of(P(None)) is INVARIANT
    assert str(LocalType(torch.Size([2, 3]), torch.bfloat16, states)).startswith("bf16[2,3]{")


def test_local_types_list_their_axes() -> None:
    kind = LocalType(
        torch.Size([]), torch.float32, states_of(P("b", unreduced={"x"}, reduced={"a"}))
    )
    assert (kind.varying, kind.unreduced, kind.reduced) == (("b",), ("x",), ("a",))


@pytest.mark.parametrize("states", ALONG_BOTH, ids=str)
def test_dual_is_an_involution(states: States) -> None:
    assert states.dual.dual is states
    swap = {"varying": "varying", "reduced": "unreduced", "unreduced": "reduced"}
    for axis, (word, kind) in states.items:
        assert states.dual.at(axis) == (swap[word], kind)


@pytest.mark.parametrize("rule", TypeRule)
def test_single_operand_keeps_its_states_or_is_refused(rule: TypeRule) -> None:
    for states in ALONG_BOTH:
        joined = join_states((states,), rule)
        if isinstance(joined, JoinedStates):
            assert joined.result is states
            assert joined.operands == (states,)
        else:
            assert states.unreduced


@pytest.mark.parametrize("rule", [TypeRule.OTHER, TypeRule.MOVE, TypeRule.LINEAR, TypeRule.PRODUCT])
def test_join_is_symmetric(rule: TypeRule) -> None:
    for a, b in itertools.product(ALONG_BOTH, repeat=2):
        one, other = join_states((a, b), rule), join_states((b, a), rule)
        if isinstance(one, JoinedStates):
            assert isinstance(other, JoinedStates)
            assert one.result is other.result
            assert one.operands == other.operands[::-1]
        else:
            assert isinstance(other, TypeConflict)


@pytest.mark.parametrize("rule", TypeRule)
def test_join_is_separate_by_axis(rule: TypeRule) -> None:
    """Joining along two axes equals joining along each."""
    for a, b in itertools.product(ALONG_BOTH, repeat=2):
        both = join_states((a, b), rule)
        single = {axis: join_states((_only(a, axis), _only(b, axis)), rule) for axis in ("x", "y")}
        if (
            all(isinstance(item, JoinedStates) for item in single.values())
            and rule is not TypeRule.PRODUCT
        ):
            assert isinstance(both, JoinedStates)
        if isinstance(both, JoinedStates):
            for axis, item in single.items():
                assert isinstance(item, JoinedStates)
                assert both.result.at(axis) == item.result.at(axis)


def _only(states: States, axis: str) -> States:
    return States.of({name: state for name, state in states.items if name == axis})


@pytest.mark.parametrize("rule", TypeRule)
def test_join_of_cast_operands_is_idempotent(rule: TypeRule) -> None:
    """Operands in the joined states are not cast again, and give the same result."""
    for operands in itertools.product(ALONG_X, repeat=2):
        joined = join_states(operands, rule)
        if isinstance(joined, JoinedStates):
            again = join_states(joined.operands, rule)
            assert again == joined


@pytest.mark.parametrize("rule", TypeRule)
def test_join_casts_are_pcasts(rule: TypeRule) -> None:
    for operands in itertools.product(ALONG_X, repeat=3):
        joined = join_states(operands, rule)
        if isinstance(joined, JoinedStates):
            for before, after in zip(operands, joined.operands, strict=True):
                was, now = (_word(item.at("x")) for item in (before, after))
                assert was == now or (was, now) in CASTS


def _word(state: State | None) -> str:
    return "invariant" if state is None else state[0]


def test_join_is_associative() -> None:
    """f(a, b, c) has the type of f(f(a, b), c)."""
    for a, b, c in itertools.product(ALONG_X, repeat=3):
        for rule in (TypeRule.OTHER, TypeRule.LINEAR, TypeRule.MOVE):
            full, first = join_states((a, b, c), rule), join_states((a, b), rule)
            if isinstance(first, JoinedStates):
                second = join_states((first.result, c), rule)
                assert isinstance(second, JoinedStates) == isinstance(full, JoinedStates)
                if isinstance(second, JoinedStates) and isinstance(full, JoinedStates):
                    assert second.result is full.result


def test_linear_rules_keep_the_value_of_unreduced_operands() -> None:
    """Unreduced operands pass exactly where the sum of results is the result of sums."""
    u, v = torch.tensor([2.0, 3.0]), torch.tensor([5.0, 7.0])  # partial sums on two ranks
    c = torch.tensor(11.0)
    states = {"u": States.of({"x": SUM}), "v": States.of({"x": SUM}), "c": INVARIANT}
    stored = {"u": u, "v": v, "c": torch.stack([c, c])}
    full = {"u": u.sum(), "v": v.sum(), "c": c}
    functions: dict[TypeRule, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        TypeRule.LINEAR: torch.add, TypeRule.PRODUCT: torch.mul, TypeRule.SCALED: torch.div,
        TypeRule.OTHER: torch.atan2,
    }  # fmt: skip
    for rule, function in functions.items():
        for a, b in itertools.product("uvc", repeat=2):
            joined = join_states((states[a], states[b]), rule)
            right = torch.allclose(function(stored[a], stored[b]).sum(), function(full[a], full[b]))
            unreduced = isinstance(joined, JoinedStates) and joined.result.unreduced
            assert unreduced == right


# -- collectives -----------------------------------------------------------------------------


def test_signatures_of_reductions() -> None:
    total = TypeSignature(("x", "y"), None, ("sum",), all_or_none=True)
    for states in ALONG_BOTH:
        joined = apply_signature(states, total)
        words = {_word(states.at(axis)) for axis in ("x", "y")}
        kinds = {states.at(axis) for axis in ("x", "y")} - {None, VARYING}
        takes = (
            words == {"invariant"}
            or ("invariant" not in words and not kinds)
            or ("invariant" not in words and kinds == {("reduced", "sum")})
            or (words == {"unreduced"} and kinds == {SUM})
        )
        assert isinstance(joined, JoinedStates) == takes, states
        if isinstance(joined, JoinedStates):
            assert joined.result is INVARIANT


def test_movements_cast_each_axis_and_refuse_unreduced() -> None:
    move = TypeSignature(("x", "y"))
    for states in ALONG_BOTH:
        joined = apply_signature(states, move)
        kinds = {states.at(axis) for axis in ("x", "y")} - {None, VARYING, ("reduced", "sum")}
        assert isinstance(joined, JoinedStates) == (not kinds), states
        if isinstance(joined, JoinedStates):
            assert joined.result is States.varying(["x", "y"])


def test_only_linear_collectives_pass_unreduced_along_other_axes() -> None:
    states = States.of({"x": VARYING, "y": SUM})
    linear, extreme = (
        TypeSignature(("x",), None, ("sum",)),
        TypeSignature(("x",), None, ("max",), linear=False),
    )
    joined = apply_signature(states, linear)
    assert isinstance(joined, JoinedStates)
    assert joined.result is States.of({"y": SUM})
    assert isinstance(apply_signature(states, extreme), TypeConflict)


def test_casts_are_jaxs() -> None:
    words: dict[str, State | None] = {
        "invariant": None, "varying": VARYING, "reduced": ("reduced", "sum"), "unreduced": SUM,
    }  # fmt: skip
    for source, to in itertools.product(words, repeat=2):
        state = words[source]
        states = States.of({} if state is None else {"x": state})
        joined = apply_signature(states, TypeSignature(("x",), words[to], cast_to=to))
        assert isinstance(joined, JoinedStates) == ((source, to) in CASTS)
        if isinstance(joined, JoinedStates):
            assert joined.result.at("x") == words[to]
