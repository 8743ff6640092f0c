"""Rules: their text, kinds of factors, roles of mesh axes, and factors of sharded dims."""

from __future__ import annotations

import itertools
import math
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
    axis_states,
    factor_sizes,
    roles_of,
)
from tests.helpers.spec_grid import error_text, message

MESH = Mesh(x=2, y=3)

F64, I64, BOOL = torch.float64, torch.int64, torch.bool


def call(rule: Rule, *shapes: tuple[int, ...], results: tuple[tuple[int, ...], ...],
         dtype: torch.dtype = F64) -> OpCall:  # fmt: skip
    operands = tuple(Meta(shape, dtype) for shape in shapes)
    return OpCall("an op", (), {}, operands, tuple(Meta(shape, dtype) for shape in results))


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
def test_parse_factors_of_dims(text: str, operands: object, results: object) -> None:
    parsed = rule(text)
    assert parsed.operands == operands
    assert parsed.results == results


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("ik,kj->ij", "ik,kj->ij  {k sum}"),
        ("(ij)k->i(jk)", "(ij)k->i(jk)"),
        ("1i->i", "1i->i"),
        ("ij->", "ij->  {i sum; j sum}"),
    ],
)
def test_str_of_a_rule_is_its_text(text: str, printed: str) -> None:
    assert str(rule(text)) == printed
    assert rule(str(rule(text)).split("  ")[0]) == rule(text)


def test_str_separates_long_factor_names() -> None:
    grouped = Rule(((("d0",), ("d1", "d2")),), ((("d0",), ()),), reductions=(("d1", "max"),))
    assert str(grouped) == "d0 (d1 d2)->d0 ()  {d1 max; d2 unsharded}"


def test_str_of_modes_names_result_kinds() -> None:
    parsed = rule(
        "i,i->i",
        linear=(0, (0, 1)),
        modes=(Mode((1,), "max", ("min",)), Mode((0,), "sum", (None,))),
    )
    assert str(parsed) == (
        "i,i->i  {unreduced 1 max -> min; unreduced 0 sum -> invariant; unreduced 0 sum; "
        "unreduced 0 avg; unreduced 0+1 sum; unreduced 0+1 avg}"
    )


def test_kind_of_each_factor() -> None:
    parsed = rule("abcde->ab", reduce={"c": "max"}, unsharded="a", permuted="b")
    assert {f: parsed.kind(f) for f in parsed.factors} == {
        "a": "unsharded", "b": "permuted", "c": "max", "d": "unsharded", "e": "unsharded",
    }  # fmt: skip


def test_factor_lacking_in_one_of_two_results_is_reduced() -> None:
    assert rule("ij->ij,i").kind("j") == "sum"
    assert rule("ij->ij,i", reduce={}).kind("j") == "unsharded"


def test_slice_sizes_follow_shards_of_the_sliced_factor() -> None:
    """Count all slices and paddings of 7 elements, for all shard sizes of three ranks."""
    all_sizes = [(a, b - a, 7 - b) for a in range(8) for b in range(a, 8)]
    for start, stop, step in itertools.product(range(-2, 8), range(10), (1, 2, 3)):
        part = Slice("b", "a", start, stop, step)
        positions = range(start, stop, step)
        assert len(part) == len(positions)
        for sizes in all_sizes:
            first, second = sizes[0], sizes[0] + sizes[1]
            by_rank = (
                [i for i in positions if i < first],
                [i for i in positions if first <= i < second],
                [i for i in positions if max(first, second) <= i],
            )
            assert part.sizes(sizes) == tuple(map(len, by_rank)), (part, sizes)


def test_slice_is_sharded_with_the_sliced_factor() -> None:
    sliced = replace(rule("ab->ac", reduce={}), slices=(Slice("c", "b", 1, 4),))
    assert str(sliced) == "ab->ac  {c b[1:4]}"
    assert sliced.factors == ("a", "b")
    assert sliced.kind("b") == "pass-through"
    results = {
        role.name: role.results
        for role in roles_of(sliced, call(sliced, (2, 6), results=((2, 3),)), grad=False)
    }
    assert results["b"] == (AxisState("sharded", 1, 0),)


# -- errors -------------------------------------------------------------------------------


ERRORS = {
    "no text": (
        lambda: rule(("ik", "kj")),  # type: ignore[arg-type]
        """\
fs.rule
  given: a tuple
  rule:  a rule must be a text
  fix:   "ik,kj->ij", say""",
    ),
    "no arrow": (
        lambda: rule("ik,kj"),
        """\
fs.rule('ik,kj')
  given: ik,kj
  rule:  a rule must have an arrow between operands and results
  fix:   "ik,kj->ij", say""",
    ),
    "letters": (
        lambda: rule("i?->i"),
        """\
fs.rule('i?->i')
  given: '?' in 'i?'
  rule:  a dim must be a letter, 1, or letters in parentheses
  fix:   "(ij)k->i(jk)", say""",
    ),
    "twice": (
        lambda: rule("ii->i"),
        """\
fs.rule('ii->i')
  given: factor 'i' 2 times in 'ii'
  rule:  a factor must be on at most one dim of a tensor
  fix:   give the second one another letter""",
    ),
    "unknown factors and kinds, all at once": (
        lambda: rule("ij->i", unsharded="z", reduce={"j": "mean"}, linear=(3,)),
        """\
fs.rule('ij->i')
  given: factor 'z'
  rule:  a factor must be one of i, j
  fix:   name one of them

  given: reduce j='mean'
  rule:  a reduction must be one of sum, avg, max, min, product
  fix:   reduce='sum', say

  given: operand 3
  rule:  an operand must be in 0..0
  fix:   name one of them""",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_rule_error_texts(name: str) -> None:
    make, text = ERRORS[name]
    assert error_text(make) == text


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
def test_misfit_of_rule_and_call_is_refused(name: str) -> None:
    (shapes, results), *text = MISFITS[name]
    parsed = rule("i->i")
    error = error_text(lambda: factor_sizes(parsed, call(parsed, *shapes, results=results)))
    assert error == message("the rule of an op: i->i", *text)


def test_factor_sizes_of_a_compound_dim_need_other_dims() -> None:
    parsed = rule("(ij)->(ij)")
    error = error_text(lambda: factor_sizes(parsed, call(parsed, (6,), results=((6,),))))
    assert error == (
        "the rule of an op: (ij)->(ij)\n"
        "  given: dim (ij) of size 6\n"
        "  rule:  the sizes of its factors multiply to it, and are known from other dims\n"
        "  fix:   give every factor a dim of its own somewhere"
    )


def test_factor_sizes_by_division() -> None:
    parsed = rule("(ij)k->i(jk)")
    assert factor_sizes(parsed, call(parsed, (6, 5), results=((2, 15),))) == {
        "i": 2,
        "j": 3,
        "k": 5,
    }
    chain = rule("(abc),(bc),c->a")
    sizes = factor_sizes(chain, call(chain, (24,), (12,), (4,), results=((2,),)))
    assert sizes == {"a": 2, "b": 3, "c": 4}


def test_factor_sizes_of_an_empty_dim() -> None:
    parsed = rule("(ij)->ij")
    assert factor_sizes(parsed, call(parsed, (0,), results=((0, 3),))) == {"i": 0, "j": 3}


# -- roles --------------------------------------------------------------------------------


def test_roles_of_a_matrix_product() -> None:
    parsed = rule("ik,kj->ij", linear=(0,))
    shapes = call(parsed, (4, 6), (6, 8), results=((4, 8),))
    roles = {
        role.name: (role.operands, role.results) for role in roles_of(parsed, shapes, grad=False)
    }
    s, u, reduced = (
        (lambda d: AxisState("sharded", d, 0)),
        AxisState("unreduced", kind="sum"),
        AxisState("reduced"),
    )
    assert roles["i"] == ((s(0), reduced), (s(0),))
    assert roles["k"] == ((s(1), s(0)), (u,))
    assert roles["j"] == ((reduced, s(1)), (s(1),))
    assert roles["unreduced 0 sum"] == ((u, reduced), (u,))
    assert "unreduced 1 sum" not in roles


def test_unsharded_and_permuted_factors_have_no_role() -> None:
    parsed = rule("ijk->ijk", unsharded="i", permuted="j")
    shapes = call(parsed, (2, 2, 2), results=((2, 2, 2),))
    factors = {role.factor for role in roles_of(parsed, shapes, grad=False)}
    assert factors == {None, "k"}


def test_no_grad_factors_have_no_role_with_gradients() -> None:
    parsed = rule("ij->i", reduce="max", no_grad="j")
    shapes = call(parsed, (2, 2), results=((2,),))
    factors = {
        grad: {role.factor for role in roles_of(parsed, shapes, grad=grad)}
        for grad in (False, True)
    }
    assert factors == {False: {None, "i", "j"}, True: {None, "i"}}


def test_integers_are_never_reduced_and_bools_never_summed() -> None:
    parsed = rule("ij->i")
    integers = roles_of(parsed, call(parsed, (2, 2), results=((2,),), dtype=I64), grad=False)
    assert not any(state.name == "reduced" for role in integers for state in role.operands)
    assert {role.factor for role in integers} == {None, "i", "j"}
    booleans = roles_of(parsed, call(parsed, (2, 2), results=((2,),), dtype=BOOL), grad=False)
    assert {role.factor for role in booleans} == {None, "i"}


# -- factors of sharded dims --------------------------------------------------------------


def factor_positions(text: str, lengths: dict[str, int], entry: object, sizes: object = None,
                     mesh: Mesh = MESH) -> dict[str, int]:  # fmt: skip
    """Return, for each axis, the position of the factor that it shards in the only dim."""
    dims = rule(text).operands[0]
    size = math.prod(lengths[factor] for factor in dims[0])
    shards = {"sizes": {0: sizes}} if sizes else {"uneven": "chunk"}
    spec = Spec(mesh, PartitionSpec(entry), shape=(size,), **shards)
    states = axis_states(dims, spec, lengths)
    return {axis: state.position for axis, state in states.items() if state.name == "sharded"}


@pytest.mark.parametrize(
    ("lengths", "entry", "positions"),
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
def test_axes_shard_factors_of_a_dim_major_to_minor(
    lengths: dict[str, int], entry: object, positions: dict[str, int]
) -> None:
    assert factor_positions("(ij)->ij", lengths, entry) == positions


def test_uneven_shards_of_full_rows_shard_the_first_factor() -> None:
    lengths = {"i": 3, "j": 4}
    assert factor_positions("(ij)->ij", lengths, "x", (8, 4)) == {"x": 0}
    assert factor_positions("(ij)->ij", lengths, "x", (0, 12)) == {"x": 0}
    assert factor_positions("(ij)->ij", lengths, "x", (7, 5)) == {"x": NO_FACTOR}


def test_the_only_factor_of_a_dim_may_have_any_shard_sizes() -> None:
    assert factor_positions("i->i", {"i": 5}, "x", (5, 0)) == {"x": 0}
    assert factor_positions("i->i", {"i": 5}, ("y", "x")) == {"y": 0, "x": 0}


def test_shards_of_a_factor_contain_all_minor_factors() -> None:
    """An axis that shards a factor leaves all factors minor to it unsharded."""
    mesh = Mesh(x=2, y=2)
    for i, j, k in itertools.product((1, 2, 3, 4), repeat=3):
        lengths = {"i": i, "j": j, "k": k}
        for entry in ("x", ("x", "y")):
            spec = Spec(mesh, PartitionSpec(entry), shape=(i * j * k,), uneven="chunk")
            positions = factor_positions("(ijk)->ijk", lengths, entry, mesh=mesh)
            if NO_FACTOR in positions.values():
                continue
            sharded = {"ijk"[positions[axis]] for axis in spec.partition.dims[0]}
            minor = 1
            for factor in reversed("ijk"):
                if factor in sharded:
                    break
                minor *= lengths[factor]
            assert all(size % minor == 0 for size in spec.shard_sizes(0)), (lengths, positions)


def test_unmentioned_axes_are_invariant() -> None:
    spec = Spec(Mesh(x=2, y=2), PartitionSpec("x", unreduced={"y": "max"}), shape=(4,))
    states = axis_states(((("i"),),), spec, {"i": 4})
    assert states == {"x": AxisState("sharded", 0, 0), "y": AxisState("unreduced", kind="max")}
    plain = Spec(Mesh(x=2), PartitionSpec(), shape=(4,))
    assert axis_states((("i",),), plain, {"i": 4}) == {"x": INVARIANT}


def test_rules_compare_and_hash_by_value() -> None:
    assert rule("ij->i") == rule("ij->i")
    assert hash(rule("ij->i")) == hash(rule("ij->i"))
    assert rule("ij->i") != rule("ij->i", reduce="max")
    with pytest.raises(ShardingError):
        rule("")
