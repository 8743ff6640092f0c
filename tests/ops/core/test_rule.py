"""Rules: their text, what kinds of factors they have, the roles they give, and walks of dims."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.call import Meta, OpCall
from fshard.ops.core.rule import Mode, Rule, Slice, rule
from fshard.ops.strategy.axis_roles import (
    INVARIANT,
    NO_FACTOR,
    AxisState,
    factor_sizes,
    roles_of,
    axis_states,
)
from tests.helpers.spec_grid import message

MESH = Mesh(x=2, y=3)

F64, I64, BOOL = torch.float64, torch.int64, torch.bool


def call(rule: Rule, *shapes: tuple[int, ...], results: tuple[tuple[int, ...], ...],
         dtype: torch.dtype = F64) -> OpCall:  # fmt: skip
    operands = tuple(Meta(shape, dtype) for shape in shapes)
    return OpCall("an op", (), {}, operands, tuple(Meta(shape, dtype) for shape in results))


def said(make: Callable[[], object]) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(ShardingError) as caught:
        make()
    return str(caught.value)


# -- texts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "operands", "results"),
    [
        ("i->i", ((("i",),),), ((("i",),),)),
        ("ik,kj->ij", ((("i",), ("k",)), (("k",), ("j",))), ((("i",), ("j",)),)),
        ("(ij)k->i(jk)", ((("i", "j"), ("k",)),), ((("i",), ("j", "k")),)),
        ("1i,i1->i", (((), ("i",)), (("i",), ())), ((("i",),),)),
        ("i->", ((("i",),),), ((),)),
        (",i->i", ((), (("i",),)), ((("i",),),)),
        ("ij->i,j", ((("i",), ("j",)),), ((("i",),), (("j",),))),
        (" i k , k j -> i j ", ((("i",), ("k",)), (("k",), ("j",))), ((("i",), ("j",)),)),
        ("(1i)->i", ((("i",),),), ((("i",),),)),
    ],
)
def test_a_text_is_read_dim_by_dim(text: str, operands: object, results: object) -> None:
    made = rule(text)
    assert made.operands == operands
    assert made.results == results


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("ik,kj->ij", "ik,kj->ij  {k sum}"),
        ("(ij)k->i(jk)", "(ij)k->i(jk)"),
        ("1i->i", "1i->i"),
        ("ij->", "ij->  {i sum; j sum}"),
    ],
)
def test_a_rule_prints_as_it_is_written(text: str, printed: str) -> None:
    assert str(rule(text)) == printed
    assert rule(str(rule(text)).split("  ")[0]) == rule(text)


def test_long_names_of_factors_are_set_apart() -> None:
    made = Rule(((("d0",), ("d1", "d2")),), ((("d0",), ()),), reductions=(("d1", "max"),))
    assert str(made) == "d0 (d1 d2)->d0 ()  {d1 max; d2 unsharded}"


def test_modes_print_what_they_make() -> None:
    made = rule(
        "i,i->i",
        linear=(0, (0, 1)),
        modes=(Mode((1,), "max", ("min",)), Mode((0,), "sum", (None,))),
    )
    assert str(made) == (
        "i,i->i  {unreduced 1 max -> min; unreduced 0 sum -> invariant; unreduced 0 sum; "
        "unreduced 0 avg; unreduced 0+1 sum; unreduced 0+1 avg}"
    )


def test_kinds_of_factors() -> None:
    made = rule("abcde->ab", reduce={"c": "max"}, unsharded="a", permuted="b")
    assert {f: made.kind(f) for f in made.factors} == {
        "a": "unsharded", "b": "permuted", "c": "max", "d": "unsharded", "e": "unsharded",
    }  # fmt: skip


def test_a_factor_that_one_of_two_results_lacks_is_reduced() -> None:
    assert rule("ij->ij,i").kind("j") == "sum"
    assert rule("ij->ij,i", reduce={}).kind("j") == "unsharded"


def test_every_rank_has_of_a_slice_what_it_has_of_the_whole() -> None:
    """All slices and paddings of 7 places, in all parts of three ranks: counted one by one."""
    cuts = [(a, b - a, 7 - b) for a in range(8) for b in range(a, 8)]
    for start, stop, step in itertools.product(range(-2, 8), range(10), (1, 2, 3)):
        found = Slice("b", "a", start, stop, step)
        places = range(start, stop, step)
        assert len(found) == len(places)
        for parts in cuts:
            first, second = parts[0], parts[0] + parts[1]
            mine = (
                [at for at in places if at < first],
                [at for at in places if first <= at < second],
                [at for at in places if max(first, second) <= at],
            )
            assert found.sizes(parts) == tuple(map(len, mine)), (found, parts)


def test_a_slice_is_cut_as_what_it_is_of() -> None:
    made = replace(rule("ab->ac", reduce={}), slices=(Slice("c", "b", 1, 4),))
    assert str(made) == "ab->ac  {c b[1:4]}"
    assert made.factors == ("a", "b")
    assert made.kind("b") == "pass-through"
    laid = {
        role.name: role.results
        for role in roles_of(made, call(made, (2, 6), results=((2, 3),)), grad=False)
    }
    assert laid["b"] == (AxisState("sharded", 1, 0),)


# -- errors -------------------------------------------------------------------------------


ERRORS = {
    "no arrow": (
        lambda: rule("ik,kj"),
        """\
fs.rule('ik,kj')
  given: ik,kj
  rule:  a rule has an arrow between operands and results
  fix:   "ik,kj->ij", say""",
    ),
    "letters": (
        lambda: rule("i?->i"),
        """\
fs.rule('i?->i')
  given: '?' in 'i?'
  rule:  a dim is a letter, 1, or letters in parentheses
  fix:   "(ij)k->i(jk)", say""",
    ),
    "twice": (
        lambda: rule("ii->i"),
        """\
fs.rule('ii->i')
  given: factor 'i' 2 times in 'ii'
  rule:  a factor is on at most one dim of a tensor
  fix:   give the second one another letter""",
    ),
    "unknown factors and kinds, all at once": (
        lambda: rule("ij->i", unsharded="z", reduce={"j": "mean"}, linear=(3,)),
        """\
fs.rule('ij->i')
  given: factor 'z'
  rule:  the factors of this rule are i, j
  fix:   name one of them

  given: reduce j='mean'
  rule:  a reduction is one of sum, avg, max, min, product
  fix:   reduce='sum', say

  given: operand 3
  rule:  the rule has operands 0..0
  fix:   name one of them""",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    make, text = ERRORS[name]
    assert said(make) == text


MISFITS = {
    "operands": (
        (((4,), (4,)), ((4,),)),
        "2 operands and 1 results",
        "the rule has 1 and 1",
        "write one list of factors for every tensor",
    ),
    "dims": (
        (((4, 5),), ((4,),)),
        "a tensor of shape (4, 5)",
        "the rule writes it with 1 dims",
        "one letter, 1 or parenthesis for every dim",
    ),
    "sizes": (
        (((4,),), ((5,),)),
        "factor 'i' of sizes 4 and 5",
        "a factor has one size",
        "give dims of other sizes other letters",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_rule_that_does_not_fit_its_call(name: str) -> None:
    (shapes, results), *text = MISFITS[name]
    made = rule("i->i")
    found = said(lambda: factor_sizes(made, call(made, *shapes, results=results)))
    assert found == message("the rule of an op: i->i", *text)


def test_factors_of_compound_dims_need_sizes() -> None:
    made = rule("(ij)->(ij)")
    found = said(lambda: factor_sizes(made, call(made, (6,), results=((6,),))))
    assert found == (
        "the rule of an op: (ij)->(ij)\n"
        "  given: dim (ij) of size 6\n"
        "  rule:  the sizes of its factors multiply to it, and are known from other dims\n"
        "  fix:   give every factor a dim of its own somewhere"
    )


def test_sizes_of_factors_by_division() -> None:
    made = rule("(ij)k->i(jk)")
    assert factor_sizes(made, call(made, (6, 5), results=((2, 15),))) == {"i": 2, "j": 3, "k": 5}
    chain = rule("(abc),(bc),c->a")
    sizes = factor_sizes(chain, call(chain, (24,), (12,), (4,), results=((2,),)))
    assert sizes == {"a": 2, "b": 3, "c": 4}


def test_sizes_of_factors_of_an_empty_dim() -> None:
    made = rule("(ij)->ij")
    assert factor_sizes(made, call(made, (0,), results=((0, 3),))) == {"i": 0, "j": 3}


# -- roles --------------------------------------------------------------------------------


def test_the_roles_of_a_product() -> None:
    made = rule("ik,kj->ij", linear=(0,))
    shapes = call(made, (4, 6), (6, 8), results=((4, 8),))
    found = {
        role.name: (role.operands, role.results) for role in roles_of(made, shapes, grad=False)
    }
    s, u, reduced = (
        (lambda d: AxisState("sharded", d, 0)),
        AxisState("unreduced", kind="sum"),
        AxisState("reduced"),
    )
    assert found["i"] == ((s(0), reduced), (s(0),))
    assert found["k"] == ((s(1), s(0)), (u,))
    assert found["j"] == ((reduced, s(1)), (s(1),))
    assert found["unreduced 0 sum"] == ((u, reduced), (u,))
    assert "unreduced 1 sum" not in found


def test_what_is_whole_or_permuted_is_not_cut() -> None:
    made = rule("ijk->ijk", unsharded="i", permuted="j")
    shapes = call(made, (2, 2, 2), results=((2, 2, 2),))
    factors = {role.factor for role in roles_of(made, shapes, grad=False)}
    assert factors == {None, "k"}


def test_with_gradients_factors_in_grad_are_not_cut() -> None:
    made = rule("ij->i", reduce="max", no_grad="j")
    shapes = call(made, (2, 2), results=((2,),))
    cut = {
        grad: {role.factor for role in roles_of(made, shapes, grad=grad)} for grad in (False, True)
    }
    assert cut == {False: {None, "i", "j"}, True: {None, "i"}}


def test_integers_are_never_reduced_and_booleans_have_no_sums() -> None:
    made = rule("ij->i")
    integers = roles_of(made, call(made, (2, 2), results=((2,),), dtype=I64), grad=False)
    assert not any(state.name == "reduced" for role in integers for state in role.operands)
    assert {role.factor for role in integers} == {None, "i", "j"}
    booleans = roles_of(made, call(made, (2, 2), results=((2,),), dtype=BOOL), grad=False)
    assert {role.factor for role in booleans} == {None, "i"}


# -- walks of compound dims ---------------------------------------------------------------


def walked(text: str, lengths: dict[str, int], entry: object, sizes: object = None,
           mesh: Mesh = MESH) -> dict[str, int]:  # fmt: skip
    """Of every axis the place of the factor that it cuts in the one dim of the only operand."""
    made = rule(text)
    whole = 1
    for factor in made.operands[0][0]:
        whole *= lengths[factor]
    given = {"sizes": {0: sizes}} if sizes else {"uneven": "chunk"}
    spec = Spec(mesh, PartitionSpec(entry), shape=(whole,), **given)
    found = axis_states(made.operands[0], spec, lengths)
    return {axis: state.position for axis, state in found.items() if state.name == "sharded"}


@pytest.mark.parametrize(
    ("lengths", "entry", "places"),
    [
        ({"i": 2, "j": 6}, "x", {"x": 0}),
        ({"i": 4, "j": 6}, "x", {"x": 0}),
        ({"i": 3, "j": 4}, "x", {"x": NO_FACTOR}),
        ({"i": 1, "j": 4}, "x", {"x": 1}),
        ({"i": 2, "j": 6}, ("x", "y"), {"x": 0, "y": 1}),
        ({"i": 6, "j": 4}, ("x", "y"), {"x": 0, "y": 0}),
        ({"i": 3, "j": 2}, ("y", "x"), {"y": 0, "x": 1}),
        ({"i": 2, "j": 2}, ("y", "x"), {"y": NO_FACTOR, "x": NO_FACTOR}),
    ],
)
def test_axes_walk_the_factors_of_a_dim_major_to_minor(
    lengths: dict[str, int], entry: object, places: dict[str, int]
) -> None:
    assert walked("(ij)->ij", lengths, entry) == places


def test_uneven_shards_cut_the_first_factor_where_they_hold_whole_rows() -> None:
    lengths = {"i": 3, "j": 4}
    assert walked("(ij)->ij", lengths, "x", (8, 4)) == {"x": 0}
    assert walked("(ij)->ij", lengths, "x", (0, 12)) == {"x": 0}
    assert walked("(ij)->ij", lengths, "x", (7, 5)) == {"x": NO_FACTOR}


def test_the_only_factor_of_a_dim_is_cut_however_uneven() -> None:
    assert walked("i->i", {"i": 5}, "x", (5, 0)) == {"x": 0}
    assert walked("i->i", {"i": 5}, ("y", "x")) == {"y": 0, "x": 0}


def test_a_walk_says_where_every_shard_lies() -> None:
    """An axis at a place cuts that factor alone: its shards are whole in all that is minor."""
    mesh = Mesh(x=2, y=2)
    for i, j, k in itertools.product((1, 2, 3, 4), repeat=3):
        lengths = {"i": i, "j": j, "k": k}
        for entry in ("x", ("x", "y")):
            spec = Spec(mesh, PartitionSpec(entry), shape=(i * j * k,), uneven="chunk")
            places = walked("(ijk)->ijk", lengths, entry, mesh=mesh)
            if NO_FACTOR in places.values():
                continue
            cut = dict.fromkeys("ijk", 1)
            for axis in spec.partition.dims[0]:
                cut["ijk"[places[axis]]] *= mesh.shape[axis]
            minor = 1
            for factor in reversed("ijk"):
                if cut[factor] > 1:
                    break
                minor *= lengths[factor]
            assert all(size % minor == 0 for size in spec.shard_sizes(0)), (lengths, entry, places)


def test_a_state_of_an_axis_that_is_not_named_is_invariant() -> None:
    spec = Spec(Mesh(x=2, y=2), PartitionSpec("x", unreduced={"y": "max"}), shape=(4,))
    made = axis_states(((("i"),),), spec, {"i": 4})
    assert made == {"x": AxisState("sharded", 0, 0), "y": AxisState("unreduced", kind="max")}
    plain = Spec(Mesh(x=2), PartitionSpec(), shape=(4,))
    assert axis_states((("i",),), plain, {"i": 4}) == {"x": INVARIANT}


def test_rules_are_values() -> None:
    assert rule("ij->i") == rule("ij->i")
    assert hash(rule("ij->i")) == hash(rule("ij->i"))
    assert rule("ij->i") != rule("ij->i", reduce="max")
    with pytest.raises(ShardingError):
        rule("")
