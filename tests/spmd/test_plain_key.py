"""Cache keys of arguments: equal exactly for equal values of equal types, at any depth."""

from __future__ import annotations

import array
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard import Mesh
from fshard.spmd.collectives.argument_key import plain_key

NUMBERS = st.sampled_from([0, 1, 7, -1, ord("s"), 2**31, 2**40, False, True, None, "", "s", "x"])
OTHERS = st.sampled_from([0.0, 1.0, b"", b"\x01", (1.0,), {1}, array.array("b", [1])])
NESTED = st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner))
MESHES = [Mesh(x=2), Mesh(x=2), Mesh(y=2)]
VALUES = NUMBERS | NESTED | st.sampled_from([torch.float32, torch.int64, *MESHES])
CALLS = st.tuples(st.lists(VALUES, max_size=3), st.dictionaries(st.sampled_from("ab"), VALUES))


def typed(value: Any) -> Any:
    """Return a value that compares by values and types."""
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    if isinstance(value, dict):
        return [(name, typed(item)) for name, item in value.items()]
    return type(value), value


def alike(call: Any, other: Any) -> bool:
    return [typed(item) for item in call] == [typed(item) for item in other]


@given(CALLS, CALLS)
def test_keys_are_equal_for_equal_values_and_types(call: Any, other: Any) -> None:
    keys = [plain_key(tuple(args), named) for args, named in (call, other)]
    assert None not in keys
    assert (keys[0] == keys[1]) == alike(call, other)
    again = plain_key(tuple(call[0]), dict(call[1]))
    assert (again, hash(again)) == (keys[0], hash(keys[0]))


SIMILAR: list[list[Any]] = [
    [[(0, 1)], [(0, True)], [[0, 1]], ((0, 1),), [(0, 1), ()], [0, 1], [(0,), (1,)], "01"],
    [0, False, None, "", [], (), [0], (0,), [False], [[]], ["0"]],
    [("x", "y"), ["x", "y"], ("x", ("y",)), "xy", ("xy",), ("y", "x")],
]


def test_similar_values_have_different_keys() -> None:
    for values in SIMILAR:
        calls: list[Any] = [((item,), {}) for item in values] + [
            ((), {"a": item}) for item in values
        ]
        calls += [((item, [1]), {}) for item in values] + [((item, "a"), {}) for item in values]
        calls += [((item,), {"a": [1]}) for item in values] + [((item, 1), {}) for item in values]
        assert len({plain_key(*call) for call in calls}) == len(calls)


@given(OTHERS, NESTED)
def test_other_objects_have_no_key(other: Any, plain: Any) -> None:
    for value in (other, [other], (other, 1), [plain, [other]], (0, (other,))):
        assert plain_key((plain, value), {}) is None
        assert plain_key((plain,), {"a": value}) is None
    assert plain_key((torch.zeros(1),), {}) is None
    assert plain_key(([torch.zeros(1)],), {}) is None


def test_changed_list_has_another_key() -> None:
    perm = [(0, 1), (1, 0)]
    before = plain_key(("x", perm), {})
    perm[0] = (0, True)
    assert plain_key(("x", perm), {}) != before
    perm[0] = (0, 1)
    assert plain_key(("x", perm), {}) == before
    perm.append(perm)  # type: ignore[arg-type]
    assert plain_key(("x", perm), {}) is None
