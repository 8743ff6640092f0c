"""Pytrees: leaves, their order, paths, and prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import (
    append_cache_key,
    broadcast_prefix,
    flatten,
    flatten_like,
    is_pair,
    map_leaves,
    opaque_problem,
    paths,
    unflatten,
)
from tests.helpers.spec_grid import message
from tests.helpers.spmd.model_output import (
    Attributes,
    Carry,
    CausalLMOutput,
    Layer,
    Unregistered,
)

SPEC = Spec(Mesh(x=2), P("x"), shape=(4,))
TENSOR = torch.zeros(2)


LEAVES = st.one_of(
    st.none(), st.integers(0, 9), st.sampled_from([SPEC, P("x"), P(("x", "y")), P()])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
        st.builds(Layer, inner, inner),
    ),
    max_leaves=8,
)


@given(TREES)
def test_unflatten_inverts_flatten(tree: Any) -> None:
    leaves, treedef = flatten(tree)
    assert unflatten(treedef, leaves) == tree
    assert map_leaves(lambda leaf: leaf, tree) == tree
    assert map_leaves(lambda a, b: (a == b, 0)[1], tree, tree) == unflatten(
        treedef, [0] * len(leaves)
    )


@given(TREES)
def test_paths_evaluate_to_the_leaves(tree: Any) -> None:
    leaves, _ = flatten(tree)
    assert [eval(path, {"tree": tree}) for path in paths(tree, "tree")] == leaves


@given(TREES)
def test_leaves_and_equal_trees_are_prefixes(tree: Any) -> None:
    leaves, _ = flatten(tree)
    assert broadcast_prefix(P("x"), tree, "in_specs", "f") == [P("x")] * len(leaves)
    assert broadcast_prefix(None, tree, "in_specs", "f") == [None] * len(leaves)
    assert broadcast_prefix(tree, tree, "in_specs", "f") == leaves


@pytest.mark.parametrize(
    "leaf",
    [SPEC, P("x", "y"), P(), TENSOR, None, 3, "text", (TENSOR, SPEC), Sharded((TENSOR,) * 2, SPEC),
     Sharded(TENSOR, SPEC), ((TENSOR, TENSOR), SPEC)],
    ids=str,
)  # fmt: skip
def test_specs_tensors_and_pairs_are_leaves(leaf: Any) -> None:
    leaves, _ = flatten({"a": leaf})
    assert len(leaves) == 1
    local, spec = leaf if is_pair(leaf) else (leaf, None)
    assert leaves[0] is leaf or (leaves[0].local is local and leaves[0].spec is spec)


def test_is_pair() -> None:
    assert is_pair((TENSOR, SPEC))
    assert is_pair(Sharded(TENSOR, SPEC))
    assert not is_pair([TENSOR, SPEC])
    assert not is_pair((TENSOR, P("x")))
    assert not is_pair((TENSOR, TENSOR, SPEC))
    assert not is_pair(Layer(TENSOR, SPEC))
    assert not is_pair(SPEC)


def test_dict_keys_are_sorted() -> None:
    leaves, treedef = flatten({"b": 1, "a": 2})
    assert leaves == [2, 1]
    assert list(unflatten(treedef, leaves)) == ["b", "a"]


def test_prefix_covers_subtrees() -> None:
    tree = ({"w": 1, "b": [2, 3]}, 4, None)
    assert broadcast_prefix(({"w": P("x"), "b": None}, P(), P("y")), tree, "in_specs", "f") == [
        None, None, P("x"), P(), P("y")]  # fmt: skip


@pytest.mark.parametrize(
    ("prefix", "given", "fix"),
    [
        ((P("x"),), "in_specs has length 1, the value 2", "an entry for each"),
        (
            ({"w": P("x")}, P()),
            "in_specs[0] has the keys ['w'], the value ['b', 'w']",
            "an entry for each",
        ),
        (
            ([P("x"), P()], P()),
            "in_specs[0] is a list where the value is a dict",
            "a dict of specs",
        ),
        (
            ({"w": P(), "b": [P(), P(), P()]}, P()),
            "in_specs[0]['b'] has length 3, the value 2",
            "an entry for each",
        ),
        ((P(), (P(), P())), "in_specs[1] is a tuple where the value is an int", "one spec"),
    ],
)
def test_wrong_prefix_raises(prefix: Any, given: str, fix: str) -> None:
    with pytest.raises(ShardingError) as caught:
        broadcast_prefix(prefix, ({"w": 1, "b": [2, 3]}, 4), "in_specs", "shard_map(f)")
    fix += "" if fix == "one spec" else ", or one spec for all of it"
    assert str(caught.value) == message(
        "shard_map(f)",
        given,
        "in_specs must be a tree prefix of the values: a leaf of it covers a subtree",
        fix,
    )


def test_wrong_prefix_lists_all_places() -> None:
    with pytest.raises(ShardingError) as caught:
        broadcast_prefix(([P()], {"a": P()}), ([1, 2], {"b": 1}), "out_specs", "shard_map(f)")
    assert [problem.given for problem in caught.value.problems] == [
        "out_specs[0] has length 1, the value 2",
        "out_specs[1] has the keys ['a'], the value ['b']",
    ]


def test_registered_classes_are_containers_of_their_class() -> None:
    output = CausalLMOutput(logits=TENSOR, hidden_states=(TENSOR, 2))
    tree = {"out": output, "carry": Carry([1]), "attributes": Attributes(z=3, a=None)}
    leaves, treedef = flatten(tree)
    assert leaves[:3] == [3, None, 1]
    assert paths(tree, "tree") == [
        "tree['attributes']['z']", "tree['attributes']['a']", "tree['carry'].state[0]",
        "tree['out']['logits']", "tree['out']['hidden_states'][0]",
        "tree['out']['hidden_states'][1]"]  # fmt: skip
    rebuilt = unflatten(treedef, range(6))
    out = CausalLMOutput(logits=3, hidden_states=(4, 5))
    assert rebuilt == {"out": out, "carry": Carry([2]), "attributes": Attributes(z=0, a=1)}
    assert (rebuilt["out"].logits, rebuilt["out"].loss, rebuilt["attributes"].a) == (3, None, 1)
    assert (type(rebuilt["out"]), type(rebuilt["attributes"])) == (CausalLMOutput, Attributes)


def test_cache_keys_of_registered_classes_tell_fields_apart() -> None:
    def key(tree: Any) -> tuple[Any, ...]:
        parts: list[Any] = []
        append_cache_key(tree, [], parts)
        return tuple(parts)

    assert key(CausalLMOutput(logits=1)) == key(CausalLMOutput(logits=2))
    assert hash(key(CausalLMOutput(logits=1))) == hash(key(CausalLMOutput(logits=2)))
    assert key(CausalLMOutput(logits=1)) != key(CausalLMOutput(loss=1))
    assert key(Carry(1)) != key(Carry(1, 2)) != key(Attributes(state=1))


def test_prefixes_of_registered_classes() -> None:
    value = {"out": CausalLMOutput(loss=1, logits=(2, 3))}
    prefix = {"out": CausalLMOutput(loss=P(), logits=P("x"))}
    assert broadcast_prefix(prefix, value, "out_specs", "f") == [P(), P("x"), P("x")]
    assert flatten_like(prefix, value, ("a", "b"), "f") == [1, (2, 3)]
    with pytest.raises(ShardingError) as caught:
        broadcast_prefix({"out": CausalLMOutput(logits=P())}, value, "out_specs", "f")
    assert caught.value.problems[0].given == (
        "out_specs['out'] has the keys ['logits'], the value ['loss'], ['logits']"
    )
    with pytest.raises(ShardingError, match=r"b has the keys .state, .step, a .state"):
        flatten_like(Carry(1), Carry(1, 2), ("a", "b"), "f")


def test_unregistered_dataclass_names_the_registration() -> None:
    assert opaque_problem(Unregistered(3), "result") is None
    problem = opaque_problem(Unregistered([TENSOR]), "result")
    assert problem is not None
    assert problem.given == "result is an Unregistered, with tensors in it"
    assert problem.fix == "torch.export.register_dataclass(Unregistered), once, before the call"
