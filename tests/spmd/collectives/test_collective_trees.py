"""Collectives of trees, in groups, started ahead, and of meta and fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.spmd.collective_cases import this_rank
from tests.helpers.spmd.collective_trees import F64, MESH, ON_TREES, leaves, values_and_gradients


@pytest.mark.parametrize("name", list(ON_TREES))
@pytest.mark.parametrize("axes", ["y", ("y", "x")], ids=str)
def test_tree_in_one_launch_is_bit_equal_to_its_leaves(name: str, axes: Any) -> None:
    op, forward, backward = ON_TREES[name]
    one = fs.simulate(
        MESH, values_and_gradients, lambda xs: [op({"a": x}, axes, mesh=MESH)["a"] for x in xs]
    )
    with fs.comm_log() as log:
        all_ = fs.simulate(MESH, values_and_gradients, lambda xs: op(xs, axes, mesh=MESH))
    for single, tree in zip(one, all_, strict=True):
        for was, now in zip(single, tree, strict=True):
            assert all(
                (w is None and n is None) or torch.equal(w, n)
                for w, n in zip(was, now, strict=True)
            )
    assert log.forward.counts[forward, axes] == (1 if forward else 0)
    assert log.forward.counts.total() == (1 if forward else 0)
    with fs.comm_log() as log:
        fs.simulate(MESH, first_gradient, op, axes)
    assert log.backward.counts.total() == (1 if backward else 0)
    assert log.backward.counts[backward, axes] == (1 if backward else 0)


def first_gradient(op: Callable[..., Any], axes: Any) -> None:
    xs = leaves(this_rank(MESH))
    torch.autograd.grad(sum(y.sum() for y in op(xs, axes, mesh=MESH)), xs)


def test_one_launch_per_dtype_and_no_gradient_without_need() -> None:
    def body() -> Any:
        w = torch.ones(2, requires_grad=True)
        tree = {"w": w, "b": torch.ones(3), "n": torch.tensor([1, 2]), "none": None, "five": 5}
        out = fs.psum(tree, "y", mesh=MESH)
        top = fs.pmax({"w": w, "b": tree["b"]}, "y", mesh=MESH)
        out["b"].add_(1)  # does not share memory
        (grad,) = torch.autograd.grad(out["w"].sum() + top["w"].sum(), w)
        return out, grad, [top["w"].requires_grad, top["b"].requires_grad]

    with fs.comm_log() as log:
        out, grad, wants = fs.simulate(MESH, body)[0]
    assert log.forward.counts["all_reduce", "y"] == 2 + 1
    assert out["w"].requires_grad
    assert not out["b"].requires_grad
    assert wants == [True, False]
    assert (out["w"].tolist(), out["b"].tolist(), out["n"].tolist()) == ([3, 3], [4, 4, 4], [3, 6])
    assert (out["none"], out["five"]) == (None, 15)
    torch.testing.assert_close(grad, torch.full((2,), 1 + 1 / 3))


# -- products and indices -----------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_pprod_gradient_with_zeros(zeros: int) -> None:
    mesh = Mesh(i=3)
    full = torch.tensor([[2.0, 3.0], [5.0, 7.0], [11.0, 13.0]], dtype=F64)
    full[:zeros, 0] = 0.0

    def loss(product: torch.Tensor) -> torch.Tensor:
        return (product**2 + product).sum()

    def gradients(fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        x = full.clone().requires_grad_()
        (first,) = torch.autograd.grad(fn(x), x, create_graph=True)
        return first, *torch.autograd.grad((first**2).sum(), x)

    mapped = fs.shard_map(
        lambda x: loss(fs.pprod(x[0], "i")), mesh=mesh, in_specs=P("i"), out_specs=P()
    )
    torch.testing.assert_close(gradients(mapped), gradients(lambda x: loss(x.prod(0))))


def test_pprod_of_integers_booleans_and_numbers() -> None:
    mesh = Mesh(i=3)

    def body() -> Any:
        mine = torch.tensor(this_rank(mesh))
        return fs.pprod({"a": mine + 1, "b": mine < 2, "c": 2}, "i", mesh=mesh)

    out = fs.simulate(mesh, body)[0]
    assert (out["a"].item(), out["a"].dtype) == (6, torch.int64)
    assert (out["b"].item(), out["b"].dtype) == (False, torch.bool)
    assert out["c"] == 8


def test_pargmax_takes_the_lowest_of_equal_indices() -> None:
    mesh = Mesh(x=2, y=2)
    rows = torch.tensor([[1.0, 5, -1, 0], [4, 5, -2, torch.nan], [4, 2, -2, 1], [0, 5, -1, 2]])

    def body() -> Any:
        mine = rows[this_rank(mesh)]
        axes = ("x", "y")
        return (
            fs.pargmax({"f": mine, "b": mine > 3}, axes, mesh=mesh),
            fs.pargmin(mine[:3], axes, mesh=mesh), fs.pargmax(mine[:3], ("y", "x"), mesh=mesh),
        )  # fmt: skip

    for high, low, swapped in fs.simulate(mesh, body):
        assert high["f"].tolist() == [1, 0, 0, 1]
        assert high["b"].tolist() == [1, 0, 0, 0]
        assert high["f"].dtype == torch.int64
        assert low.tolist() == [3, 2, 1]
        assert swapped.tolist() == [1, 0, 0]


# -- groups ----------------------------------------------------------------------------------


def test_reductions_in_groups() -> None:
    mesh = Mesh({"i": 4}, devices=(2, 0, 3, 1))
    groups = [[3, 0], [1, 2]]

    def body() -> Any:
        i = fs.axis_index("i", mesh=mesh)
        x = (i + 1.0).requires_grad_()
        options: dict[str, Any] = {"axis_index_groups": groups, "mesh": mesh}
        ops = (fs.psum, fs.pmean, fs.pmax, fs.pmin, fs.pprod)
        ys = [op(x, "i", **options) for op in ops]
        grads = [torch.autograd.grad(y, x)[0].item() for y in ys]
        return int(i), [y.item() for y in ys], grads, fs.psum(1, "i", **options)

    # Both ranks of a group have a cotangent of 1.
    expected = {
        0: ([5, 2.5, 4, 1, 4], [2, 1, 0, 2, 8]),
        3: ([5, 2.5, 4, 1, 4], [2, 1, 2, 0, 2]),
        1: ([5, 2.5, 3, 2, 6], [2, 1, 0, 2, 6]),
        2: ([5, 2.5, 3, 2, 6], [2, 1, 2, 0, 4]),
    }
    with fs.comm_log() as log:
        results = fs.simulate(mesh, body)
    for i, ys, grads, ones in results:
        assert (ys, grads, ones) == (*expected[i], 2)
    assert log.forward.counts["all_reduce", "i"] == 4


# -- ahead -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ON_TREES if name not in ("pmax", "pmin")])
def test_started_collectives_equal_immediate_ones(name: str) -> None:
    op = ON_TREES[name][0]
    plain = {"pcast": (fs.pcast, {"to": "varying"}), "ppermute": (fs.ppermute, {"perm": [(0, 1)]})}
    known = {"psum": fs.psum, "pmean": fs.pmean, "pprod": fs.pprod, "all_gather": fs.all_gather}
    plain |= {key: (fn, {}) for key, fn in known.items()}
    plain |= {
        "all_gather(1)": (fs.all_gather, {"axis": -1, "tiled": True}),
        "psum_scatter": (fs.psum_scatter, {"tiled": True}),
        "all_to_all": (fs.all_to_all, {"split_axis": 0, "concat_axis": -1, "tiled": True}),
        "pbroadcast": (fs.pbroadcast, {"source": 1}),
    }
    fn, options = plain[name]

    def ahead(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        first = fs.start(fn, xs, "y", mesh=MESH, **options)
        second = fs.start(fs.psum, torch.ones(()), "x", mesh=MESH)
        assert second.wait().item() == 2
        out: list[torch.Tensor] = first.wait()
        return out

    expected = fs.simulate(MESH, values_and_gradients, lambda xs: op(xs, "y", mesh=MESH))
    results = fs.simulate(MESH, values_and_gradients, ahead)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)


def test_started_collectives_must_be_waited_for_once() -> None:
    def forget(x: torch.Tensor) -> torch.Tensor:
        fs.start(fs.psum, x, "x")
        saved = fs.start(fs.all_gather, x, "x")
        fs.start(fs.pmax, x, "x").wait()
        return x + 0 * len(repr(saved))

    def twice(x: torch.Tensor) -> torch.Tensor:
        total = fs.start(fs.psum, x, "x")
        total.wait()
        out: torch.Tensor = total.wait()
        return out

    def break_off(x: torch.Tensor) -> torch.Tensor:
        fs.start(fs.psum, x, "x")
        raise KeyError("another error")

    def call(fn: Callable[..., Any]) -> Any:
        mesh = Mesh(x=2)
        return fs.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(torch.ones(2))

    text = r"2 pending results never waited for: fs.psum at .*py:\d+, fs.all_gather at .*py:\d+"
    with pytest.raises(ShardingError, match=text):
        call(forget)
    with pytest.raises(ShardingError, match=r"Pending.wait\n.*a second wait"):
        call(twice)
    with pytest.raises(KeyError, match="another error"):
        call(break_off)


def test_simulated_ranks_must_wait_for_started_collectives() -> None:
    mesh = Mesh(x=2)

    def forget() -> None:
        fs.start(fs.psum, torch.ones(1), "x", mesh=mesh)

    def break_off() -> None:
        forget()
        raise KeyError("another error")

    line = forget.__code__.co_firstlineno + 1
    with pytest.raises(ShardingError) as caught:
        fs.simulate(mesh, forget)
    assert str(caught.value) == (
        "fs.psum\n"
        f"  given: 1 pending result never waited for: fs.psum at {__file__}:{line}\n"
        "  rule:  a collective that a simulated rank starts must be waited for, once, before it "
        "returns\n"
        "  fix:   pending.wait()"
    )
    with pytest.raises(KeyError, match="another error"):
        fs.simulate(mesh, break_off)


# -- meta and fake tensors -------------------------------------------------------------------


def everything(x: torch.Tensor, mesh: Mesh | None) -> list[torch.Tensor]:
    options: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    out = [
        fs.psum(x, "y", **options), fs.pmean(x, ("x", "y"), **options), fs.pmax(x, "x", **options),
        fs.pprod(x, "y", **options), fs.pcast(x, "y", to="varying", **options),
        fs.all_gather(x, "y", axis=1, **options),
        fs.psum_scatter(x, "y", tiled=True, **options),
        fs.all_to_all(x, "y", 0, 1, tiled=True, **options), fs.pswapaxes(x[:2], "x", 0, **options),
        fs.ppermute(x, "y", [(0, 1)], **options), fs.pshuffle(x, "y", [1, 2, 0], **options),
        fs.pbroadcast(x, "y", 0, **options), fs.start(fs.psum, x, "y", **options).wait(),
    ]  # fmt: skip
    return [*out, *fs.psum([x, x.sum()], "x", **options)]


SHAPES_OUT = [
    (3, 4), (3, 4), (3, 4), (3, 4), (3, 4), (3, 3, 4), (1, 4), (1, 12), (2, 4),
    (3, 4), (3, 4), (3, 4), (3, 4), (3, 4), (),
]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_meta_and_fake_tensors_do_not_communicate(kind: str, grad: bool) -> None:
    mode = FakeTensorMode()
    if kind == "meta":
        make: Callable[..., torch.Tensor] = lambda *s: torch.zeros(s, dtype=F64, device="meta")  # noqa: E731
    else:
        make = lambda *s: mode.from_tensor(torch.zeros(s, dtype=F64))  # noqa: E731
    x = make(3, 4).requires_grad_(grad)
    with fs.comm_log() as log:
        outside = everything(x, MESH)
        inside = fs.simulate(MESH, everything, x, MESH)[5]
        mapped = fs.shard_map(
            lambda v: everything(v, None)[0], mesh=MESH, in_specs=P(), out_specs=P()
        )(x)
        if grad:
            with mode if kind == "fake" else nullcontext():  # for PyTorch's own prod_backward
                (back,) = torch.autograd.grad(sum(y.sum() for y in outside), x)
            assert (tuple(back.shape), back.dtype, back.device) == ((3, 4), F64, x.device)
    assert not log.counts
    for results in (outside, inside):
        assert [tuple(y.shape) for y in results] == SHAPES_OUT
        assert {(y.dtype, y.device, y.requires_grad) for y in results} == {(F64, x.device, grad)}
    assert tuple(mapped.shape) == (3, 4)
