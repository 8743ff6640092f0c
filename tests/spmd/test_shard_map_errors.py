"""Error texts of `shard_map` and `local_map`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, Sharded, ShardingError, Spec
from tests.helpers.spec_grid import message

MESH = Mesh(x=2, y=3)
X = torch.zeros(6, 6)


def pair_of(x: torch.Tensor, p: fs.PartitionSpec, mesh: Mesh = MESH) -> Sharded:
    return fs.shard(x, Spec(mesh, p, shape=x.shape, dtype=x.dtype))


def identity(v: Any) -> Any:
    return v


def two(v: Any, w: Any) -> Any:
    return v, w


def scalar(v: Any) -> Any:
    return v.sum()


def uneven(v: Any) -> Any:
    return v[: 1 + int(fs.axis_index("x"))]


def retyped(v: Any) -> Any:
    return v.double() if fs.axis_index("x") else v


def branching(v: Any) -> Any:
    return (v, v) if fs.axis_index("y") == 2 else v


def numbered(v: Any) -> Any:
    return v, {"place": int(fs.axis_index("y"))}


def named(x: torch.Tensor) -> tuple[torch.Tensor, str]:
    return x, "name"


def number(v: Any) -> Any:
    return 3


def unbound(v: Any) -> Any:
    return fs.psum(v, "q")


P_OR_SPEC = "a leaf of specs must be a P, a Spec or None"
WHOLE = "P('x'), or P() for a value that is equal on every rank"
Case = tuple[Callable[..., Any], Any, Any, tuple[Any, ...], str, str, str]

# Function, in_specs, out_specs, arguments; given, rule and fix of the error.
REFUSED: list[Case] = [
    # specs
    (identity, P("q"), P(), (X,), "v: axis 'q' on Mesh(x=2, y=3)", "an axis must be one of x, y",
     "use one of x, y"),
    (identity, P("x"), P("xx"), (X,), "out_specs: axis 'xx' on Mesh(x=2, y=3)",
     "an axis must be one of x, y", "did you mean 'x'?"),
    (two, "x", P(), (X, X), "in_specs of type str",
     "in_specs must be a P, a tuple by position, or a dict by name", "in_specs=(P('x'), P())"),
    (two, [P("x"), P()], P(), (X, X), "in_specs of type list",
     "in_specs must be a P, a tuple by position, or a dict by name", "in_specs=(P('x'), P())"),
    (two, ("x", P()), P(), (X, X), "v: the spec 'x' of type str", P_OR_SPEC, WHOLE),
    (identity, P("x"), "x", (X,), "out_specs: the spec 'x' of type str", P_OR_SPEC, WHOLE),
    (identity, Spec(Mesh(x=2), P("x"), shape=(6, 6)), P("x"), (X,),
     "v: the spec f32[6@x,6] on Mesh(x=2)", "the mesh is Mesh(x=2, y=3)",
     "given.replace(mesh=mesh)"),
    # prefixes
    (two, (P("x"),), P(), (X, X), "in_specs of length 1 for 2 arguments",
     "in_specs must have one entry per argument, by position",
     "a tuple with one entry each, or one P for all"),
    (two, (P("x"),) * 3, P(), (X, X), "in_specs of length 3 for 2 arguments",
     "in_specs must have one entry per argument, by position",
     "a tuple with one entry each, or one P for all"),
    (two, {"v": P("x")}, P(), (X, X), "in_specs for v",
     "every argument must have a spec; 'w' has none", "in_specs={..., 'w': P()}"),
    # arguments
    (identity, P("x", None, None), P(), (X,),
     "v: P('x', None, None) with 3 entries for shape (6, 6)",
     "a tensor of 2 dims must have at most 2 entries", "drop 1 of them, trailing None too"),
    (identity, P("x"), P(), (X[:5],), "v: dim 0 of size 5 over x=2",
     "2 shards must divide the dim; 5 % 2 = 1",
     ("a Spec in in_specs with uneven='chunk' (shards of (3, 2)), sizes={0: (...)}, "
     "or pad the dim to 6")),
    (identity, P(("x", "y")), P(), (X[:5],), "v: dim 0 of size 5 over x=2 x y=3",
     "6 shards must divide the dim; 5 % 6 = 5",
     ("a Spec in in_specs with uneven='chunk' (shards of (1, 1, 1, 1, 1, 0)), "
     "sizes={0: (...)}, or pad the dim to 6")),
    (identity, P("x"), P(), (3,), "v: a value of type int with P('x')",
     "only tensors and pairs can be sharded",
     "torch.as_tensor(x) of an array; None, or P() for a number"),
    # results
    (identity, P("x"), None, (X,), "result: a tensor of shape (3, 6) with the out spec None",
     "the out spec None is for results other than tensors",
     "P() promises a value that is equal on every rank, P('x') concatenates along dim 0"),
    (scalar, P("x"), P("x"), (X,), "result: a local of 0 dims with P('x')",
     "a tensor of 0 dims must have at most 0 entries", "unsqueeze a scalar, x[None], to shard it"),
    (identity, P("x"), P("x", None, None), (X,),
     "result: a local of 2 dims with P('x', None, None)",
     "a tensor of 2 dims must have at most 2 entries", "drop entries"),
    (uneven, P("x"), P("x"), (X,), "result: rank 3 returned shape (2, 6), torch.float32",
     "f32[2@x,6] has there shape (1, 6), torch.float32",
     "give a Spec with sizes= as the out spec of an uneven result"),
    (retyped, P("x"), P("x"), (X,), "result: rank 3 returned shape (3, 6), torch.float64",
     "f32[6@x,6] has there shape (3, 6), torch.float32",
     "give a Spec with sizes= as the out spec of an uneven result"),
    (branching, P("x"), P("x"), (X,),
     "rank 0 returned PyTreeSpec(*, NoneIsLeaf), rank 2 PyTreeSpec((*, *), NoneIsLeaf)",
     "every rank must return the same structure", "return the same tree on every rank"),
    (numbered, P("x"), (P("x"), None), (X,), "result[1]['place']: rank 0 returned 0, rank 1 1",
     "a result that is not a tensor must be equal on every rank",
     "torch.tensor([value]) with an out spec that concatenates the ranks' values"),
    (number, P("x"), P("x"), (X,), "result: a int with the out spec P('x')",
     "only tensors can be sharded, and only tensors and numbers have P()",
     "None, or P() for a number; torch.tensor([value]) to concatenate the ranks' values"),
    (named, P("x"), (P("x"), P()), (X,), "result[1]: a str with the out spec P()",
     "only tensors can be sharded, and only tensors and numbers have P()",
     "None, or P() for a number; torch.tensor([value]) to concatenate the ranks' values"),
]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("case", REFUSED, ids=[item[4] for item in REFUSED])
def test_refused_specs_and_arguments(case: Case, grad: bool) -> None:
    fn, in_specs, out_specs, args, *words = case
    mapped = fs.shard_map(fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check=False)
    if grad:
        args = tuple(a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args)
    with pytest.raises(ShardingError) as caught:
        mapped(*args)
    assert str(caught.value) == message(f"shard_map({fn.__name__})", *words)


def test_in_specs_that_are_not_a_prefix() -> None:
    for in_specs, out_specs, args, word in (
        (({"a": P("x")},), P(), ({"b": X},), "in_specs[0]"),
        (([P("x")],), P(), ((X,),), "in_specs[0]"),
        ((([P("x")], P("x")),), P(), (([X, X], X),), "in_specs[0][0]"),
        (P("x"), (P("x"), P()), (X,), "out_specs"),
    ):
        mapped = fs.shard_map(identity, mesh=MESH, in_specs=in_specs, out_specs=out_specs)
        with pytest.raises(ShardingError, match="tree prefix of the values") as caught:
            mapped(*args)
        value = str(caught.value).split("\n")[1]
        assert f"key path {word}" in value.replace("    ", " ") or word in value


def test_collective_along_unmapped_axis() -> None:
    mapped = fs.shard_map(
        two, mesh=MESH, axis_names={"x"}, in_specs=(P("x", "y"), P(unreduced={"y"})),
        out_specs=(P("x"), P("y")),
    )  # fmt: skip
    with pytest.raises(ShardingError) as caught:
        mapped(X, X)
    rule, fix = "the axes that are mapped here are x", "axis_names={'x', 'y'}"
    assert str(caught.value).split("\n\n") == [
        message("shard_map(two)", "v: axis 'y' in P('x', 'y')", rule, fix),
        *(
            message("", value, rule, fix).lstrip("\n")
            for value in ("w: axis 'y' in P(unreduced={'y'})", "out_specs[1]: axis 'y' in P('y')")
        ),
    ]


def test_axis_named_twice() -> None:
    for make, value in (
        (lambda: P("x", "x"), "axis 'x' 2 times in P('x', 'x')"),
        (lambda: P("x", reduced={"x"}), "axis 'x' 2 times in P('x'), reduced={'x': 'sum'}"),
    ):
        with pytest.raises(ShardingError) as caught:
            make()
        assert str(caught.value) == message(
            "fs.PartitionSpec",
            value,
            "an axis must be named at most once in a spec",
            "name 'x' for one dim, or in one of unreduced= and reduced=",
        )


def test_all_bad_arguments_are_listed() -> None:
    mapped = fs.shard_map(lambda tree, w: w, mesh=MESH, in_specs=(P("x"), P("y")), out_specs=P("y"))
    with pytest.raises(ShardingError) as caught:
        mapped({"a": X[:5], "b": [X, X[:3]]}, X[:4])
    results = re.findall(r"given: (.*?): dim", str(caught.value))
    assert results == ["tree['a']", "tree['b'][1]", "w"]


def test_all_bad_results_are_listed() -> None:
    mapped = fs.shard_map(
        lambda v: {"a": v.sum(), "b": v, "c": v}, mesh=MESH, in_specs=P("x"),
        out_specs={"a": P("x"), "b": P("x"), "c": None},
    )  # fmt: skip
    with pytest.raises(ShardingError) as caught:
        mapped(X)
    assert re.findall(r"given: (.*?): a", str(caught.value)) == ["result['a']", "result['c']"]


KNOWN = "the options are in_specs=, out_specs=, mesh=, axis_names=, redistribute_inputs=, check="
OPTIONS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"mesh": {"x": 2}}, "a mesh of type dict", "a mesh must be a fs.Mesh", "fs.Mesh(dp=2, tp=4)"),
    ({"mesh": Mesh()}, "mesh=Mesh()", "there must be at least one axis to map",
     "mesh=fs.Mesh(x=1)"),
    ({"axis_names": "x"}, "axis_names='x'",
     "axis_names must be a set, frozenset or tuple of axis names", "axis_names={'x'}"),
    ({"axis_names": ["x"]}, "axis_names=['x']",
     "axis_names must be a set, frozenset or tuple of axis names", "axis_names={'x'}"),
    ({"axis_names": ["y", "x"]}, "axis_names=['y', 'x']",
     "axis_names must be a set, frozenset or tuple of axis names", "axis_names={'y', 'x'}"),
    ({"axis_names": [1], "mesh": Mesh(data=2, model=3)}, "axis_names=[1]",
     "axis_names must be a set, frozenset or tuple of axis names",
     "axis_names={'data'}, or leave it out: all of Mesh(data=2, model=3)"),
    ({"axis_names": 1, "mesh": None}, "axis_names=1",
     "axis_names must be a set, frozenset or tuple of axis names",
     "leave it out: all that are not mapped yet"),
    ({"check": [True]}, "check=[True]",
     "check must be True, False, 'strict', 'values' or 'collectives'", "leave it out: True"),
    ({"check": torch.ones(2)}, "check=tensor([1., 1.])",
     "check must be True, False, 'strict', 'values' or 'collectives'", "leave it out: True"),
    ({"check_vma": True}, "check_vma=True", KNOWN,
     "check=True, which tracks the types of tensors, or check=False"),
    ({"check_rep": False}, "check_rep=False", KNOWN,
     "check=True, which tracks the types of tensors, or check=False"),
    ({"auto": ("y",)}, "auto=('y',)", KNOWN,
     "axis_names=, the axes that are mapped: all but those of auto"),
    ({"axis_name": "x"}, "axis_name='x'", KNOWN, "did you mean 'axis_names'?"),
    ({"device": "cpu"}, "device='cpu'", KNOWN, "leave device out"),
    ({"check": "value"}, "check='value'",
     "check must be True, False, 'strict', 'values' or 'collectives'", "did you mean 'values'?"),
    ({"check": 1}, "check=1",
     "check must be True, False, 'strict', 'values' or 'collectives'", "leave it out: True"),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(OPTIONS)))
def test_wrong_options(at: int) -> None:
    options, *words = OPTIONS[at]
    value = {"mesh": MESH, "in_specs": P(), "out_specs": P()} | options
    with pytest.raises(ShardingError) as caught:
        fs.shard_map(identity, **value)
    assert str(caught.value) == message("fs.shard_map", *words)


def test_first_argument_must_be_a_function() -> None:
    for where, call in (
        ("fs.shard_map", lambda: fs.shard_map(3, mesh=MESH, in_specs=P(), out_specs=P())),  # type: ignore[arg-type]
        ("fs.local_map", lambda: fs.local_map(3, in_specs=P(), out_specs=P())),  # type: ignore[arg-type]
        ("fs.smap", lambda: fs.smap(3, axis_name="x", in_axes=0, out_axes=0)),  # type: ignore[arg-type]
    ):
        with pytest.raises(ShardingError) as caught:
            call()
        assert str(caught.value) == message(
            where, "3", "the first argument must be a function", f"{where}(fn, ...)"
        )


def test_unknown_axis_names() -> None:
    mapped = fs.shard_map(
        identity, mesh=MESH, axis_names={"x", "yy"}, in_specs=P("x"), out_specs=P("x")
    )
    with pytest.raises(ShardingError) as caught:
        mapped(X)
    assert str(caught.value) == message(
        "shard_map(identity)",
        "axis 'yy' on Mesh(x=2, y=3)",
        "an axis must be one of x, y",
        "did you mean 'y'?",
    )


def test_unbound_axis_names() -> None:
    with pytest.raises(ShardingError) as caught:
        fs.shard_map(unbound, mesh=MESH, in_specs=P("x"), out_specs=P())(X)
    assert str(caught.value) == message(
        "fs.psum", "axis 'q' on Mesh(x=2, y=3)", "an axis must be one of x, y", "use one of x, y"
    )
    with pytest.raises(ShardingError) as caught:
        unbound(X)
    assert str(caught.value) == message(
        "fs.psum",
        "an unbound axis name: 'q'",
        "axis names are bound inside shard_map",
        "call fs.psum in a function under fs.shard_map, or give mesh=",
    )


def test_calls_that_do_not_match_the_signature() -> None:
    mapped = fs.shard_map(two, mesh=MESH, in_specs=P(), out_specs=P())
    with pytest.raises(TypeError, match="missing a required argument: 'w'"):
        mapped(X)
    with pytest.raises(TypeError, match="too many positional arguments"):
        mapped(X, X, X)


# -- pairs -----------------------------------------------------------------------------


def test_pair_with_another_layout() -> None:
    mapped = fs.shard_map(identity, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    value = pair_of(X, P("y"))
    with pytest.raises(ShardingError) as caught:
        mapped(value)
    prog = fs.redistribute(value.spec, value.spec.replace(partition=P("x")))
    lines = str(prog).replace("\n", "\n           ")
    cost = prog.cost()
    assert str(caught.value) == message(
        "shard_map(identity)",
        "v: a pair of f32[6@y,6]",
        "in_specs require f32[6@x,6]",
        "redistribute_inputs=True, or fs.reshard(pair, spec) before the call; it sends at most "
        f"{cost.bytes_sent} B per rank in {cost.launches} launch:\n           {lines}",
    )
    assert torch.equal(fs.unshard(mapped(fs.reshard(value, P("x")))), X)


def test_pair_on_another_mesh() -> None:
    mapped = fs.shard_map(identity, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ShardingError) as caught:
        mapped(pair_of(X, P("x"), Mesh(x=2)))
    assert str(caught.value) == message(
        "shard_map(identity)",
        "v: a pair of f32[6@x,6] on Mesh(x=2)",
        "the mesh is Mesh(x=2, y=3)",
        "unshard it, or map over its mesh",
    )
    wrong = (pair_of(X, P("x")).local[:5], Spec(MESH, P("x"), shape=(6, 6)))
    with pytest.raises(ShardingError, match=re.escape("5 shards for Mesh(x=2, y=3)")):
        mapped(wrong)


# -- errors of bodies --------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
def test_error_in_the_body_names_its_rank(grad: bool) -> None:
    def fails(v: torch.Tensor) -> torch.Tensor:
        if fs.axis_index("tp") == 1 and fs.axis_index("dp") == 1:
            raise ZeroDivisionError("mine")
        return fs.psum(v, "tp")

    x = torch.zeros(4, requires_grad=grad)
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        fs.shard_map(fails, mesh=Mesh(dp=2, tp=2), in_specs=P(), out_specs=P())(x)
    assert caught.value.__notes__ == ["on rank 3 (dp=1, tp=1) of a simulated Mesh(dp=2, tp=2)"]
    frames = [item.name for item in caught.traceback]
    assert frames.count("fails") == 1, "the traceback is that of the rank"


def test_error_in_an_inner_body_names_its_rank_once() -> None:
    def inner(v: torch.Tensor) -> torch.Tensor:
        if fs.axis_index("y") == 1:
            raise ZeroDivisionError("mine")
        return v

    def outer(v: torch.Tensor) -> torch.Tensor:
        return fs.shard_map(inner, in_specs=P(), out_specs=P())(v)  # type: ignore[no-any-return]

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        fs.shard_map(outer, mesh=MESH, axis_names={"x"}, in_specs=P(), out_specs=P())(X)
    assert caught.value.__notes__ == ["on rank 1 (x=0, y=1) of a simulated Mesh(x=2, y=3)"]


def test_branch_that_some_ranks_take() -> None:
    def body(v: torch.Tensor) -> torch.Tensor:
        return fs.psum(v, "x") if v.sum() > 0 else v

    mapped = fs.shard_map(body, mesh=Mesh(x=2), in_specs=P("x"), out_specs=P(), check=False)
    with pytest.raises(ShardingError, match="the simulation stands still") as caught:
        mapped(torch.tensor([1.0, -1.0]))
    line = body.__code__.co_firstlineno + 1
    assert f" at {__file__}:{line}" in str(caught.value)


@dataclass
class Total:
    value: torch.Tensor
    count: int


@pytest.mark.parametrize("check", [True, False])
def test_results_are_trees_of_registered_classes(check: bool) -> None:
    def call(read: Callable[[Total], Any]) -> Any:
        mapped = fs.shard_map(
            lambda x: read(Total(fs.psum(x, "x"), 3)),
            mesh=Mesh(x=2), in_specs=P("x"), out_specs=P(), check=check,
        )  # fmt: skip
        return mapped(torch.ones(2))

    with pytest.raises(ShardingError, match="given: result is a Total, with tensors in it"):
        call(lambda total: total)
    assert call(vars) == {"value": torch.tensor([2.0]), "count": 3}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_at_arguments() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        (x**3).sum().backward(create_graph=True)
        return x

    mapped = fs.shard_map(body, mesh=Mesh(x=2), in_specs=P("x"), out_specs=P("x"), check=False)
    with pytest.raises(ShardingError, match=r"backward\(create_graph=True\) in a body, down to"):
        mapped(torch.ones(4, requires_grad=True))
