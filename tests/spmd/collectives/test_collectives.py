"""Collectives by axis name: `jax.lax`'s values and transposes, errors, and the simulator."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.spec_grid import random_global
from tests.helpers.spmd.collective_cases import (
    CASES,
    MESHES,
    Collective,
    Tensors,
    arguments,
    axes_of,
    by_oracle,
    run_on_rank,
    this_rank,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_transposes_equal_the_oracle(case: Collective, mesh: Mesh) -> None:
    for axes in axes_of(mesh):
        xs = arguments(case, mesh, axes, torch.float64)
        ys, cts, grads = by_oracle(case, mesh, axes, xs)

        outputs = fs.simulate(mesh, run_on_rank, case, mesh, axes, (xs, cts))
        for (y, grad, again), want_y, want_grad in zip(outputs, ys, grads, strict=True):
            torch.testing.assert_close(y, want_y)
            torch.testing.assert_close(grad, want_grad)
            if again is not None:
                torch.testing.assert_close(again, want_y, msg="the transpose's transpose")


# -- JAX's own examples --------------------------------------------------------------------

LONG = Mesh(x=4, y=2)


def each_rank(fn: Callable[[torch.Tensor], Any], mesh: Mesh = LONG) -> list[Any]:
    """Return `fn` of the rank as a tensor, for every rank."""
    return fs.simulate(mesh, lambda: fn(torch.tensor(float(this_rank(mesh)))))


def test_several_axes_are_ordered_major_to_minor() -> None:
    gather = each_rank(lambda v: fs.all_gather(v, ("y", "x"), mesh=LONG).tolist())
    assert gather == [[0, 2, 4, 6, 1, 3, 5, 7]] * 8
    gather = each_rank(lambda v: fs.all_gather(v, ("x", "y"), mesh=LONG).tolist())
    assert gather == [[0, 1, 2, 3, 4, 5, 6, 7]] * 8
    assert each_rank(lambda _: int(fs.axis_index(("y", "x"), mesh=LONG))) == [
        0, 4, 1, 5, 2, 6, 3, 7,
    ]  # fmt: skip
    assert each_rank(lambda _: int(fs.axis_index("x", mesh=LONG))) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert each_rank(lambda _: fs.axis_size(("y", "x"), mesh=LONG)) == [8] * 8
    index = fs.simulate(LONG, lambda: fs.axis_index("y", mesh=LONG))[1]
    assert (index.dtype, index.ndim) == (torch.int64, 0)


def test_psum_of_numbers_booleans_and_trees() -> None:
    mesh = Mesh(i=4)

    def body(v: torch.Tensor) -> Any:
        tree = {"b": (v, [2 * v]), "a": 3, "c": v > 1}
        return fs.psum(tree, "i", mesh=mesh)

    out = each_rank(body, mesh)[2]
    assert list(out) == ["b", "a", "c"]
    assert out["a"] == 12, "a Python number times the ranks"
    assert (out["b"][0].item(), out["b"][1][0].item()) == (6.0, 12.0)
    assert (out["c"].dtype, out["c"].item()) == (torch.int64, 2)
    assert each_rank(lambda v: fs.pmax({"v": v, "n": 1}, "i", mesh=mesh), mesh)[0] == {
        "v": torch.tensor(3.0), "n": 1,
    }  # fmt: skip


def test_pmean_of_integers_is_a_float() -> None:
    mesh = Mesh(i=4)
    out = each_rank(lambda v: fs.pmean(v.long(), "i", mesh=mesh), mesh)
    assert [(x.dtype, x.item()) for x in out] == [(torch.float32, 1.5)] * 4
    assert each_rank(lambda _: fs.pmean(5, "i", mesh=mesh), mesh) == [5] * 4


def test_movements_of_all_dtypes() -> None:
    mesh = Mesh(i=2)
    for dtype in (torch.bool, torch.int64, torch.int8, torch.complex64, torch.bfloat16):
        xs = [random_global((2, 4), torch.int64, seed).abs().to(dtype) for seed in (0, 1)]

        def body(xs: Tensors = xs) -> list[torch.Tensor]:
            x = xs[this_rank(mesh)]
            return [
                fs.all_gather(x, "i", mesh=mesh),
                fs.all_to_all(x, "i", 0, 1, mesh=mesh),
                fs.ppermute(x, "i", [(0, 1)], mesh=mesh),
            ]

        for rank, (gather, swapped, moved) in enumerate(fs.simulate(mesh, body)):
            assert torch.equal(gather, torch.stack(xs))
            assert torch.equal(swapped, torch.stack([x[rank] for x in xs], 1))
            assert torch.equal(moved, xs[0] if rank else torch.zeros_like(xs[0]))


def test_ties_of_pmax_share_the_gradient() -> None:
    mesh = Mesh(i=4)

    def body() -> torch.Tensor:
        x = torch.tensor([1.0, 2.0, 5.0])[[min(this_rank(mesh), 1), 1, 2]].requires_grad_()
        return torch.autograd.grad(fs.pmax(x, "i", mesh=mesh).sum(), x)[0]

    actual = torch.stack(fs.simulate(mesh, body))
    third = 1 / 3
    expected = torch.tensor([[0, 0.25, 0.25]] + [[third, 0.25, 0.25]] * 3)
    torch.testing.assert_close(actual, expected)


def test_pcast_transposes() -> None:
    """Casts from invariant transpose to sums, others to identities."""
    mesh = Mesh(i=4)

    def grads() -> list[float]:
        scale = 1.0 + this_rank(mesh)
        outputs = []
        for options in (
            {"to": "varying"}, {"to": "reduced"}, {"to": "unreduced"},
            {"to": "varying", "src": "reduced"},
        ):  # fmt: skip
            x = torch.ones((), requires_grad=True)
            y = fs.pcast({"x": x, "n": 3}, "i", mesh=mesh, **options)  # type: ignore[arg-type]
            assert y["n"] == 3
            assert y["x"].item() == 1.0
            outputs.append(torch.autograd.grad(scale * y["x"], x)[0].item())
        return outputs

    outputs = fs.simulate(mesh, grads)
    assert [row[:2] for row in outputs] == [[10.0, 10.0]] * 4
    assert [row[2:] for row in outputs] == [[s, s] for s in (1.0, 2.0, 3.0, 4.0)]


def test_collectives_along_axes_of_size_1() -> None:
    mesh = Mesh(x=1, y=2)
    x = torch.arange(6.0).reshape(1, 6)

    def body() -> list[Any]:
        return [
            fs.psum(x, "x", mesh=mesh), fs.all_gather(x, "x", mesh=mesh),
            fs.psum_scatter(x, "x", tiled=True, mesh=mesh), fs.psum_scatter(x, "x", mesh=mesh),
            fs.all_to_all(x, "x", 0, 1, mesh=mesh), fs.ppermute(x, "x", [], mesh=mesh),
            fs.ppermute(x, "x", [(0, 0)], mesh=mesh),
        ]  # fmt: skip

    for out in fs.simulate(mesh, body):
        expected = [x, x[None], x, x[0], x.t(), 0 * x, x]
        for actual, case in zip(out, expected, strict=True):
            assert torch.equal(actual, case)


# -- errors ----------------------------------------------------------------------

X = torch.zeros(3, 4)
MESH = Mesh(x=2, y=3)

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: fs.psum(X, "x"), "an unbound axis name: 'x'"),
    (lambda: fs.axis_index(("x", "y")), "an unbound axis name: 'x', 'y'"),
    (lambda: fs.psum(X, "q", mesh=MESH), "axis 'q' on Mesh(x=2, y=3)"),
    (lambda: fs.psum(X, ("x", "x"), mesh=MESH), "axis 'x' 2 times"),
    (lambda: fs.all_gather(X, "x", axis=3, mesh=MESH), "axis=3 of a result of 3 dims"),
    (lambda: fs.all_gather(X, "x", axis=2, tiled=True, mesh=MESH), "axis=2 of a tensor of 2 dims"),
    (lambda: fs.all_gather(X, "x", to="sharded", mesh=MESH), "to must be varying, invariant or"),
    (
        lambda: fs.psum_scatter(X, "x", tiled=True, mesh=MESH),
        "the 2 ranks along the axes must divide the dim; 3 % 2 = 1",
    ),
    (lambda: fs.psum_scatter(X, "x", mesh=MESH), "one entry for each of the 2 ranks"),
    (lambda: fs.psum_scatter(X[0, 0], "x", mesh=MESH), "a 0-dim tensor has no dims"),
    (lambda: fs.all_to_all(X, "y", 1, 0, tiled=True, mesh=MESH), "4 % 3 = 1"),
    (lambda: fs.all_to_all(X, "y", 1, 0, mesh=MESH), "split_axis=1 of size 4"),
    (lambda: fs.all_to_all(X, "y", 0, 2, mesh=MESH), "concat_axis=2 of a tensor of 2 dims"),
    (lambda: fs.pswapaxes(X, "y", 1, mesh=MESH), "axis=1 of size 4"),
    (lambda: fs.all_gather([X, 3], "x", mesh=MESH), "a leaf of type int"),
    (lambda: fs.pargmax(3, "x", mesh=MESH), "the leaves of the tree must be tensors, or None"),
    (lambda: fs.pshuffle(X, "y", [0, 1, 1], mesh=MESH), "every index 0..2 along y once"),
    (lambda: fs.pbroadcast(X, "y", 3, mesh=MESH), "indices along y must be in -3..2"),
    (
        lambda: fs.psum(X, "y", axis_index_groups=[[0, 1], [2]], mesh=MESH),
        "the groups must be lists of one size and have every index 0..2 once",
    ),
    (
        lambda: fs.all_gather(X, ("x", "y"), axis_index_groups=[[0, 1, 2], [3, 4, 4]], mesh=MESH),
        "fix:   axis_index_groups=[[0, 1, 2], [3, 4, 5]], say",
    ),
    (lambda: fs.pmax(X, "x", axis_index_groups=[], mesh=MESH), "axis_index_groups=[] along x"),
    (
        lambda: fs.start(torch.sum, X, 0),
        "the first argument must be a collective: all_gather, all_to_all",
    ),
    (
        lambda: fs.start(fs.pmax, X.clone().requires_grad_(), "x", mesh=MESH),
        "sums and movements can be started with gradients",
    ),
    (lambda: fs.ppermute(X, "y", [(0, 3)], mesh=MESH), "indices along y must be in -3..2"),
    (lambda: fs.ppermute(X, "y", [(0, 1), (0, 2)], mesh=MESH), "source 0 in (0, 1)"),
    (lambda: fs.ppermute(X, "y", [(0, 1), (-1, 1)], mesh=MESH), "destination 1 in (0, 1)"),
    (
        lambda: fs.pcast(X, "x", to="varying", src="unreduced", mesh=MESH),
        "a cast from 'unreduced' to 'varying'",
    ),
    (lambda: fs.pcast(X, "x", to="invariant", mesh=MESH), "to='invariant'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_refused_arguments(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ShardingError, match=re.escape(text)) as caught:
        fs.simulate(MESH, call)
    assert not hasattr(caught.value, "problems") or caught.value.problems
    assert str(caught.value).startswith(("fs.", "all_", "p"))


def test_collectives_outside_of_ranks_are_refused() -> None:
    for call in (lambda: fs.axis_index("x", mesh=MESH), lambda: fs.psum(X, "x", mesh=MESH)):
        with pytest.raises(ShardingError, match=r"in a process that is not a rank of it"):
            call()
    assert fs.axis_size(("x", "y"), mesh=MESH) == 6


# -- divergence and the simulator -------------------------------------------------------------


def text_of(error: pytest.ExceptionInfo[ShardingError]) -> str:
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])


def test_rank_that_returns_while_others_wait() -> None:
    mesh = Mesh(x=3)

    def body() -> Any:
        if this_rank(mesh) == 1:
            return None
        return fs.psum(torch.ones(2), "x", mesh=mesh)

    with pytest.raises(ShardingError, match="the simulation stands still") as caught:
        fs.simulate(mesh, body)
    text = text_of(caught)
    line = body.__code__.co_firstlineno + 3
    assert (
        "ranks 0 (x=0), 2 (x=2): waiting in fs.psum over x: "
        f"all_reduce(sum, torch.float32, (2,)) for [1] at {__file__}:{line}"
    ) in text
    assert "rank 1 (x=1): returned" in text
    assert "rule:  every rank of a group must call the same collectives in the same order" in text


def test_ranks_that_call_different_collectives() -> None:
    mesh = Mesh(x=2)

    def body() -> Any:
        if this_rank(mesh) == 1:
            return fs.pmax(torch.ones(2), "x", mesh=mesh)
        return fs.psum(torch.ones(2), "x", mesh=mesh)

    with pytest.raises(ShardingError, match="call different collectives") as caught:
        fs.simulate(mesh, body)
    line = body.__code__.co_firstlineno
    text = text_of(caught)
    wire = "torch.float32, (2,)) at"
    sum_, max_ = "fs.psum over x: all_reduce(sum", "fs.pmax over x: all_reduce(max"
    assert f"rank 0 (x=0): {sum_}, {wire} {__file__}:{line + 3}" in text
    assert f"rank 1 (x=1): {max_}, {wire} {__file__}:{line + 2}" in text


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2).double(), torch.ones(2, 1)])
def test_ranks_with_different_shapes_or_dtypes(other: torch.Tensor) -> None:
    mesh = Mesh(x=2)
    with pytest.raises(ShardingError, match="with one shape, dtype and arguments"):
        fs.simulate(
            mesh, lambda: fs.psum(other if this_rank(mesh) else torch.ones(2), "x", mesh=mesh)
        )


def test_ranks_waiting_in_a_cycle() -> None:
    """Each rank waits along another axis first; the error names all of them."""
    mesh = Mesh(x=2, y=2)

    def body() -> Any:
        order = ("x", "y") if this_rank(mesh) in (0, 3) else ("y", "x")
        for axis in order:
            fs.psum(torch.ones(()), axis, mesh=mesh)

    with pytest.raises(ShardingError, match="the simulation stands still") as caught:
        fs.simulate(mesh, body)
    text = text_of(caught)
    assert "ranks 0 (x=0, y=0), 3 (x=1, y=1): waiting in fs.psum over x" in text
    assert "ranks 1 (x=0, y=1), 2 (x=1, y=0): waiting in fs.psum over y" in text


def test_divergence_in_backward_names_the_forward_line() -> None:
    mesh = Mesh(x=2)

    def body() -> Any:
        x = torch.ones(2, requires_grad=True)
        y = fs.pcast(x, "x", to="varying", mesh=mesh)
        if this_rank(mesh) == 0:
            y.sum().backward()
        return x.grad

    with pytest.raises(ShardingError, match="the simulation stands still") as caught:
        fs.simulate(mesh, body)
    assert f"at {__file__}:{body.__code__.co_firstlineno + 4}" in text_of(caught)


def test_exception_of_a_rank_is_raised_once() -> None:
    mesh = Mesh(x=2, y=2)
    reached = []

    def body() -> Any:
        fs.psum(torch.ones(()), "x", mesh=mesh)
        if this_rank(mesh) == 2:
            raise KeyError("oops")
        reached.append(this_rank(mesh))
        fs.psum(torch.ones(()), "x", mesh=mesh)
        reached.append(this_rank(mesh))

    with pytest.raises(KeyError, match="oops") as caught:
        fs.simulate(mesh, body)
    assert caught.value.__notes__ == ["on rank 2 (x=1, y=0) of a simulated Mesh(x=2, y=2)"]
    assert 0 not in reached[reached.index(0) + 1 :], "rank 0 was waiting for rank 2"
    # The next simulation starts fresh.
    assert fs.simulate(mesh, lambda: fs.psum(1, ("x", "y"), mesh=mesh)) == [4] * 4


def test_simulation_is_deterministic_and_in_rank_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mesh = Mesh({"x": 2, "y": 2}, devices=(3, 1, 2, 0))

    def body() -> float:
        print("before", this_rank(mesh))
        x = torch.tensor([1e8, 1.0, -1e8, 1.0])[this_rank(mesh)]
        total = fs.psum(x, ("y", "x"), mesh=mesh)
        print("after", this_rank(mesh))
        return float(total)

    results, prints = [], []
    for _ in range(3):
        results.append(fs.simulate(mesh, body))
        prints.append(capsys.readouterr().out.split("\n")[:-1])
    assert results[0] == results[1] == results[2]
    assert prints[0] == prints[1] == prints[2]
    assert prints[0][:4] == [f"before {rank}" for rank in range(4)]


def test_simulations_nest_and_share_nothing() -> None:
    outer, inner = Mesh(x=2), Mesh(z=3)

    def body() -> Any:
        mine = this_rank(outer)
        inside = fs.simulate(inner, lambda: fs.psum(mine + fs.axis_index("z", mesh=inner), "z",
                                                    mesh=inner).item())  # fmt: skip
        return fs.psum(torch.tensor(inside[0]), "x", mesh=outer).item()

    assert fs.simulate(outer, body) == [3 + 6] * 2


def test_simulate_gives_ranks_their_part_of_pairs() -> None:
    mesh = Mesh(x=2)
    pair = fs.shard(torch.arange(4.0), fs.Spec(mesh, P("x"), shape=(4,)))

    def body(value: Any, tree: Any) -> Any:
        return value.local.tolist(), value.spec.shape, tree["a"][0].local.shape, tree["n"]

    out = fs.simulate(mesh, body, pair, {"a": [pair], "n": None})
    assert out == [([0.0, 1.0], (4,), (2,), None), ([2.0, 3.0], (4,), (2,), None)]


def test_grad_mode_and_autocast_reach_the_ranks() -> None:
    mesh = Mesh(x=2)
    with torch.no_grad():
        assert fs.simulate(mesh, torch.is_grad_enabled) == [False] * 2
    with torch.inference_mode():
        assert fs.simulate(mesh, torch.is_grad_enabled) == [False] * 2
    with torch.autocast("cpu", torch.bfloat16):
        out = fs.simulate(mesh, lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        assert out == [torch.bfloat16] * 2
    assert fs.simulate(mesh, torch.is_grad_enabled) == [True] * 2
    assert fs.simulate(mesh, torch.is_autocast_enabled) == [False] * 2
