"""Boundary of `shard_map`: unreduced and reduced states, redistributed pairs, non-tensors."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import fshard as fs
from fshard import Mesh, P, Sharded, ShardingError, Spec
from tests.helpers.spec_grid import message, random_global

MESH = Mesh(x=2, y=3)
F64 = torch.float64


def reals(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_global(shape, F64, seed) / 4


def both_orders(f: Any, *args: torch.Tensor) -> list[Any]:
    """Return the result, its gradients and the gradients of their squares."""
    out = f(*args)
    first = torch.autograd.grad((out**2).sum(), args, create_graph=True)
    return [out, first, torch.autograd.grad(sum((g**2).sum() for g in first), args)]


# -- gradients of some arguments -----------------------------------------------------------


@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_computes_the_requested_gradients_alone(create_graph: bool) -> None:
    computed = []

    def body(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = (fs.pcast(weight, "x", to="varying") for weight in (a, b))
        for weight, name in (a, "a"), (b, "b"):
            weight.register_hook(lambda _, name=name: computed.append(name))
        return fs.psum((torch.tanh(x @ a) @ b).square().sum(), "x")

    mesh = Mesh(x=2)
    x, a, b = (reals(4, 4, seed=i).requires_grad_() for i in range(3))
    f = fs.shard_map(body, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P())
    (grad,) = torch.autograd.grad(f(x, a, b), b, create_graph=create_graph)
    assert computed == ["b", "b"]
    (want,) = torch.autograd.grad((torch.tanh(x @ a) @ b).square().sum(), b)
    torch.testing.assert_close(grad, want)


def test_arguments_may_be_written_before_backward() -> None:
    x = reals(4).requires_grad_()
    y = fs.shard_map(torch.sin, mesh=Mesh(x=2), in_specs=P("x"), out_specs=P("x"))(x)
    want = x.detach().cos()
    with torch.no_grad():
        x.zero_()
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, want)


# -- unreduced and reduced -----------------------------------------------------------------


STATES = [
    P(unreduced={"x"}), P(unreduced={"x", "y"}), P("y", unreduced={"x"}), P(unreduced={"x": "avg"}),
    P(reduced={"x"}), P(reduced={"x", "y"}), P("y", reduced={"x"}),
    P(unreduced={"y"}, reduced={"x"}), P(None, ("y", "x")), P("x", unreduced={"y"}),
]  # fmt: skip


@pytest.mark.parametrize("p", STATES, ids=repr)
@pytest.mark.parametrize("pair", [False, True], ids=["plain", "pair"])
def test_unreduced_and_reduced_states_pass_the_boundary(p: Any, pair: bool) -> None:
    """Linear bodies keep the state of arguments; gradients have the dual specs."""
    x = reals(6, 6).requires_grad_()
    mapped = fs.shard_map(lambda v: 3 * v, mesh=MESH, in_specs=p, out_specs=p, check=False)

    def whole(x: torch.Tensor) -> torch.Tensor:
        if not pair:
            return mapped(x)  # type: ignore[no-any-return]
        out = mapped(fs.shard(x, Spec(MESH, p, shape=(6, 6), dtype=F64)))
        assert out.spec == Spec(MESH, p, shape=(6, 6), dtype=F64)
        return fs.unshard(out)

    torch.testing.assert_close(both_orders(whole, x), both_orders(lambda x: 3 * x, x))


def test_tensor_with_unreduced_spec_is_zero_off_coordinate_0() -> None:
    x = reals(4)
    seen: list[torch.Tensor] = []

    def body(v: torch.Tensor) -> torch.Tensor:
        seen.append(v)
        return fs.psum(v, "x")

    mapped = fs.shard_map(body, mesh=MESH, in_specs=P(unreduced={"x"}), out_specs=P(), check=False)
    assert torch.equal(mapped(x), x)
    for rank, mine in enumerate(seen):
        assert torch.equal(mine, x if MESH.coords(rank)["x"] == 0 else torch.zeros(4, dtype=F64))


@pytest.mark.parametrize("out", [P("x"), P("x", unreduced={"y"})], ids=repr)
def test_gradients_of_reduced_weights_are_summed(out: Any) -> None:
    """Multiply rows by weights that are reduced along x, with partial sums along y.

    Along x the weights are reduced, so that their gradient is a sum over x, without a cast.
    """
    x, w = reals(4, 6).requires_grad_(), reals(6, 5, seed=1).requires_grad_()

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        partial = x @ w
        return fs.psum(partial, "y") if "y" not in out.unreduced else partial

    mapped = fs.shard_map(
        body, mesh=MESH, in_specs=(P("x", "y"), P("y", reduced={"x"})), out_specs=out, check=False
    )
    torch.testing.assert_close(both_orders(mapped, x, w), both_orders(torch.matmul, x, w))


def test_unreduced_pairs_stay_unreduced_in_linear_bodies() -> None:
    """The sum of two unreduced values is an unreduced value of the sum."""
    a, b = reals(4, seed=1).requires_grad_(), reals(4, seed=2).requires_grad_()
    p = P(unreduced={"x"})
    mapped = fs.shard_map(
        lambda a, b: fs.psum_scatter(a + 2 * b, "x", tiled=True), mesh=MESH, in_specs=p,
        out_specs=P("x"), check=False,
    )  # fmt: skip

    def whole(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        spec = Spec(MESH, p, shape=(4,), dtype=F64)
        return fs.unshard(mapped(fs.shard(a, spec), b))

    torch.testing.assert_close(both_orders(whole, a, b), both_orders(lambda a, b: a + 2 * b, a, b))


# -- pairs of other specs --------------------------------------------------------------------


LAYOUTS = [P(), P("x"), P("y", "x"), P(("x", "y")), P(None, "y"), P("x", unreduced={"y"}),
           P(reduced={"x"})]  # fmt: skip


@pytest.mark.parametrize(("src", "dst"), list(itertools.permutations(LAYOUTS, 2)), ids=repr)
def test_redistribute_inputs_converts_pairs(src: Any, dst: Any) -> None:
    x = reals(6, 6).requires_grad_()
    pair = fs.shard(x, Spec(MESH, src, shape=(6, 6), dtype=F64))
    target = pair.spec.replace(partition=dst)
    options: dict[str, Any] = {"in_specs": dst, "out_specs": dst}
    strict = fs.shard_map(lambda v: 2 * v, mesh=MESH, check=False, **options)
    prog = fs.redistribute(pair.spec, target)
    cost = prog.cost()
    words = "1 launch" if cost.launches == 1 else f"{cost.launches} launches"
    lines = str(prog).replace("\n", "\n           ")
    with pytest.raises(ShardingError) as caught:
        strict(pair)
    assert str(caught.value) == message(
        "shard_map(<lambda>)",
        f"v: a pair of {pair.spec}",
        f"in_specs require {target}",
        "redistribute_inputs=True, or fs.reshard(pair, spec) before the call; it sends at most "
        f"{cost.bytes_sent:,} B per rank in {words}:\n           {lines}",
    )
    with fs.comm_log() as planned:
        prog(pair.local)
    free = fs.shard_map(
        lambda v: 2 * v, mesh=MESH, redistribute_inputs=True, check=False, **options
    )
    with fs.comm_log() as log:
        out = free(pair)
    assert log.to_dict() == planned.to_dict()
    assert out.spec == target
    assert torch.equal(fs.unshard(out), 2 * x)
    (grad,) = torch.autograd.grad((fs.unshard(out) * x.detach()).sum(), x)
    assert torch.equal(grad, 2 * x)


def test_redistribute_inputs_chunks_uneven_dims() -> None:
    x = reals(5, 4)
    pair = fs.shard(x, Spec(MESH, P(None, "x"), shape=(5, 4), dtype=F64))
    mapped = fs.shard_map(
        lambda v: v + 1, mesh=MESH, in_specs=P("y"), out_specs=P("y"), redistribute_inputs=True
    )
    out = mapped(pair)
    assert out.spec == Spec(MESH, P("y"), shape=(5, 4), dtype=F64, uneven="chunk")
    assert torch.equal(fs.unshard(out), x + 1)


# -- results other than tensors ---------------------------------------------------------------


def test_values_other_than_tensors_pass_through() -> None:
    class Config:
        scale = 3

    config = Config()

    def body(v: torch.Tensor, config: Config, rest: dict[str, Any]) -> Any:
        return {"v": v * config.scale, "config": config, "rows": v.shape[0], "nan": float("nan"),
                "array": np.arange(3), **rest}  # fmt: skip

    mapped = fs.shard_map(
        body, mesh=MESH, in_specs=(P("x"), None, None),
        out_specs={"v": P("x"), "config": None, "rows": None, "nan": P(), "name": None, "n": None,
                   "array": None},
    )  # fmt: skip
    x = reals(4)
    out = mapped(x, config, {"name": "a", "n": [1, None]})
    assert torch.equal(out["v"], 3 * x)
    assert out["config"] is config
    assert (out["rows"], out["name"], out["n"]) == (2, "a", [1, None])
    assert out["nan"] != out["nan"]
    assert out["array"].tolist() == [0, 1, 2]


def test_pair_results_leave_other_values_bare() -> None:
    x = reals(4)
    mapped = fs.shard_map(
        lambda v: (v, "name"), mesh=MESH, in_specs=P("x"), out_specs=(P("x"), None)
    )
    out, name = mapped(fs.shard(x, Spec(MESH, P("x"), shape=(4,), dtype=F64)))
    assert isinstance(out, Sharded)
    assert name == "name"


def test_tuples_of_specs_are_trees() -> None:
    """Two specs, or a P and a spec, are not a pair."""
    x = reals(7)
    spec = Spec(MESH, P("x"), shape=(7,), dtype=F64, sizes={0: (5, 2)})
    for out_specs in ((P(), spec), (spec, spec)):

        def body(v: torch.Tensor, whole: bool = out_specs[0] == P()) -> Any:
            return (v.new_ones(7) if whole else v), 2 * v

        mapped = fs.shard_map(body, mesh=MESH, in_specs=(spec,), out_specs=out_specs, check=False)
        first, second = mapped(x)
        assert torch.equal(first, torch.ones(7, dtype=F64) if out_specs[0] == P() else x)
        assert torch.equal(second, 2 * x)


# -- what is logged --------------------------------------------------------------------------


def test_boundary_communicates_only_for_results() -> None:
    """Arguments send nothing; results are gathered and summed."""
    x = reals(6, 6).requires_grad_()
    outs = (P("x"), P("x", unreduced={"y"}), P())
    mapped = fs.shard_map(
        lambda v: (v, v, v.sum()), mesh=MESH, in_specs=P("x"), out_specs=outs, check=False
    )
    with fs.comm_log() as log:
        results = mapped(x)
    with fs.comm_log() as wanted:
        for p in outs[:2]:
            fs.unshard(fs.shard(x, Spec(MESH, p, shape=(6, 6), dtype=F64)))
    assert log.to_dict() == wanted.to_dict()
    assert log.counts
    with fs.comm_log() as log:
        torch.autograd.grad(results[0].sum() + results[2].sum(), x)
    assert log.to_dict()["backward"] == [
        {"op": "all_gather", "axes": ["x"], "count": 1, "bytes": 3 * 6 * 8}
    ], "a gradient is put together as a result is; cotangents are at hand"


OTHERS: list[tuple[Any, Any]] = [
    (lambda at: at, ("0", "1")),
    (lambda at: {"loss": at / 2, "n": 3}, ("0.0", "0.5")),
    (lambda at: "a" if at else "b", ("'b'", "'a'")),
    (lambda at: None if at else 1.0, ("1.0", "None")),
    (lambda at: float("nan"), None),
    (lambda at: ("same", 3), None),
    (lambda at: object(), None),
]


@pytest.mark.parametrize("at", range(len(OTHERS)))
@pytest.mark.parametrize("check", [True, "values"])
def test_check_values_compares_non_tensors_under_one_rank(at: int, check: Any) -> None:
    """One rank compares values as a simulation of all ranks does."""
    make, differ = OTHERS[at]

    def body(x: torch.Tensor) -> Any:
        return x, make(int(fs.axis_index("x")))  # which the host reads

    mesh = Mesh(x=2)
    mapped = fs.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=(P("x"), None), check=check)
    if differ is None:
        assert len(fs.simulate(mesh, mapped, torch.ones(4))) == 2
        return
    with pytest.raises(ShardingError) as caught:
        fs.simulate(mesh, mapped, torch.ones(4))
    path = "result[1]['loss']" if at == 1 else "result[1]"
    text = re.sub(r"; the ranks may have diverged.*", "", str(caught.value))
    assert text == message(
        "shard_map(body)",
        f"{path}: rank 0 returned {differ[0]}, rank 1 {differ[1]}",
        "a result that is not a tensor must be equal on every rank",
        "torch.tensor([value]) with an out spec that concatenates the ranks' values",
    )


@pytest.mark.parametrize(
    ("arrays", "equal"),
    [
        ((np.ones(2), np.ones(2)), True),
        ((np.array([np.nan, 1.0]), np.array([np.nan, 1.0])), True),
        ((np.array(["a"]), np.array(["a"])), True),
        ((np.ones(1), np.ones(2)), False),
        ((np.ones(3), np.ones(2)), False),
        ((np.ones(2), np.zeros(2)), False),
        ((np.ones(()), 1.0), False),
    ],
)
def test_arrays_of_ranks_are_compared_by_shape_and_element(arrays: Any, equal: bool) -> None:
    remaining = iter(arrays)
    mapped = fs.shard_map(lambda: next(remaining), mesh=Mesh(x=2), in_specs=(), out_specs=None)
    if equal:
        assert mapped() is arrays[0]
    else:
        with pytest.raises(ShardingError, match="a result that is not a tensor must be equal"):
            mapped()


def test_pairs_that_ranks_return_are_refused() -> None:
    pair = fs.shard(torch.ones(2), Mesh(x=2), P("x"))
    mapped = fs.shard_map(lambda: fs.Sharded(*pair), mesh=Mesh(x=2), in_specs=(), out_specs=None)
    with pytest.raises(ShardingError, match="a result that is not a tensor must be equal"):
        mapped()


@pytest.mark.parametrize("check", [True, False])
def test_results_without_a_backward_pass_are_freed(check: bool) -> None:
    mapped = fs.shard_map(
        lambda x: 2 * x, mesh=Mesh(x=2), in_specs=P("x"), out_specs=P("x"), check=check
    )
    x = torch.ones(4, requires_grad=True)
    refs = [weakref.ref(value) for value in (x, mapped(x))]
    mapped(fs.shard(x, Mesh(x=2), P("x")))
    del x
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
