"""The simulator and mapped functions as neighbours: memory, threads, settings, randomness."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fshard as fs
from fshard import P, ShardingError

MESH = fs.Mesh(x=2)


CUT = P("x")


def mapped(fn: Any, *, out_specs: Any = CUT, mesh: fs.Mesh = MESH) -> Any:
    return fs.shard_map(fn, mesh=mesh, in_specs=CUT, out_specs=out_specs)


# -- memory ------------------------------------------------------------------------------------


def test_nothing_is_kept_of_a_simulation() -> None:
    gc.disable()
    try:
        results = fs.simulate(fs.Mesh(x=4), lambda: torch.zeros(10))
        alive = [weakref.ref(each) for each in results]
        del results
        assert [each() for each in alive] == [None] * 4
    finally:
        gc.enable()


def test_nothing_is_kept_after_an_error() -> None:
    kept: list[Any] = []

    def body() -> None:
        x = torch.zeros(10)
        kept.append(weakref.ref(x))
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fs.simulate(MESH, body)
    gc.collect()
    assert [each() for each in kept] == [None]


def test_threads_are_kept_and_not_multiplied() -> None:
    def run() -> None:
        fs.simulate(MESH, lambda: fs.psum(torch.ones(1), "x", mesh=MESH))

    run()
    before = threading.active_count()
    for _ in range(50):
        run()
    assert threading.active_count() <= before + MESH.size


@pytest.mark.parametrize("mesh", [fs.Mesh(x=1), fs.Mesh(x=2)], ids=str)
def test_results_have_memory_of_their_own(mesh: fs.Mesh) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        fs.psum(x, "x").add_(100)
        fs.all_gather(x, "x", tiled=True).add_(100)
        return x

    x = torch.arange(4.0)
    pair = fs.shard(x, fs.Spec(mesh, P("x"), shape=(4,)))
    for spec in (P(), P(reduced={"x"})):
        whole = fs.Spec(mesh, spec, shape=(4,))
        one = fs.shard(x, whole)
        fs.unshard(one).add_(100)
        for each in fs.reshard(one, P()).local:
            each.add_(100)
        assert torch.equal(fs.unshard(one), x)
    out = mapped(body, mesh=mesh)(pair)
    assert torch.equal(fs.unshard(out), x)
    for each in out.local:
        each.add_(100)
    assert torch.equal(fs.unshard(pair), x)


# -- settings of the thread --------------------------------------------------------------------


def test_ranks_run_under_the_callers_settings() -> None:
    x = torch.ones(4)
    with torch.inference_mode():
        assert mapped(lambda x: x.add_(1))(x).is_inference()
    with torch.device("meta"):
        assert fs.simulate(MESH, lambda: torch.ones(2).device.type) == ["meta", "meta"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mapped(lambda a: a @ a.T, out_specs=P(None, "x"))(torch.ones(4, 4))
    assert out.dtype == torch.bfloat16
    with torch.no_grad():
        assert fs.simulate(MESH, torch.is_grad_enabled) == [False, False]
    # And nothing of it is left behind.
    assert fs.simulate(MESH, torch.is_inference_mode_enabled) == [False, False]
    assert fs.simulate(MESH, lambda: torch.ones(2).device.type) == ["cpu", "cpu"]
    assert torch.ones(1).device.type == "cpu"


def test_flops_of_all_ranks_are_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        mapped(lambda a: a @ a.T, out_specs=P(None, "x"))(torch.ones(4, 8))
    assert counter.get_total_flops() == 2 * (2 * 2 * 2 * 8)


# -- gradients that are recomputed -------------------------------------------------------------


def test_a_body_recomputed_draws_the_same_numbers() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        kept = (torch.rand(len(x)) < 0.5).double()
        return fs.psum(x * kept, "x") * (torch.rand(len(x)) < 0.5).double() * x

    f = mapped(body)
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(8, dtype=torch.float64, requires_grad=True)
        y = f(x)
        (once,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        after = torch.get_rng_state()
        (again,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.equal(once, again)
        assert torch.equal(after, torch.get_rng_state())


def test_a_body_recomputed_under_its_autocast() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mapped(lambda a: a @ a.T, out_specs=P(None, "x"))(x).float()
    (once,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(once, again)


@pytest.mark.parametrize("create_graph", [False, True])
def test_some_ranks_alone_require_grad(create_graph: bool) -> None:
    spec = fs.Spec(MESH, P("x"), shape=(4,))
    still, moving = torch.ones(2), torch.ones(2, requires_grad=True)
    y = mapped(lambda x: fs.psum(x * x, "x"), out_specs=P())(((still, moving), spec))
    (grad,) = torch.autograd.grad(fs.unshard(y).sum(), [moving], create_graph=create_graph)
    assert torch.equal(grad, torch.full((2,), 2.0))


# -- closed-over tensors -----------------------------------------------------------------------


def test_closures_are_refused_on_every_rank() -> None:
    w = torch.ones(2, requires_grad=True)

    def on_one_rank(x: torch.Tensor) -> torch.Tensor:
        return x * w if int(fs.axis_index("x")) == 1 else x * 1

    for x in (torch.ones(4), torch.ones(4, requires_grad=True)):
        with pytest.raises(ShardingError, match="closed-over tensor"):
            mapped(on_one_rank)(x)
        with pytest.raises(ShardingError, match="closed-over tensor"):
            fs.simulate(MESH, lambda x=x: mapped(lambda x: x * w)(x))


# -- errors -------------------------------------------------------------------------------------


def test_an_error_in_reading_results_is_the_one_that_is_raised() -> None:
    def ragged(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(int(fs.axis_index("x")) + 1)

    with pytest.raises(ShardingError, match=r"different collectives|rank 1 returned"):
        fs.simulate(MESH, lambda: mapped(ragged)(torch.arange(4.0)))
