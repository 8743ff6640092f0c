"""The simulator around mapped functions: memory, threads, settings, random state, errors."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fshard as fs
from fshard import P, ShardingError
from fshard.run.transports.divergence_report import explain_with

MESH = fs.Mesh(x=2)


CUT = P("x")
PAIR = fs.shard(torch.ones(2), fs.Spec(MESH, CUT, shape=(2,)))


def mapped(fn: Any, *, out_specs: Any = CUT, mesh: fs.Mesh = MESH) -> Any:
    return fs.shard_map(fn, mesh=mesh, in_specs=CUT, out_specs=out_specs, check=False)


# -- memory ------------------------------------------------------------------------------------


def test_simulation_frees_its_tensors() -> None:
    gc.disable()
    try:
        results = fs.simulate(fs.Mesh(x=4), lambda: torch.zeros(10))
        alive = [weakref.ref(item) for item in results]
        del results
        assert [item() for item in alive] == [None] * 4
    finally:
        gc.enable()


def test_simulation_frees_its_tensors_after_an_error() -> None:
    saved: list[Any] = []

    def body() -> None:
        x = torch.zeros(10)
        saved.append(weakref.ref(x))
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fs.simulate(MESH, body)
    gc.collect()
    assert [item() for item in saved] == [None]


class Stop(Exception):
    pass


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("end", ["returns", "raises", "parts"])
def test_mapped_call_frees_its_tensors(check: bool, grad: bool, end: str) -> None:
    """Arguments and inputs of collectives are freed without a garbage collection."""
    saved: list[weakref.ref[Any]] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        saved.append(weakref.ref(x))
        is_last = len(saved) % 2 == 0
        if end == "parts" and is_last:
            return x * 2
        y = fs.psum(x * x, "x") + x
        if end == "raises" and is_last:
            raise Stop
        return y

    mesh = fs.Mesh(x=2)
    call = fs.shard_map(body, mesh=mesh, in_specs=CUT, out_specs=CUT, check=check)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            x = torch.ones(4, requires_grad=grad)
            saved.append(weakref.ref(x))
            saved.append(weakref.ref(x))
            if end == "returns":
                y = call(x)
                if grad:
                    y.sum().backward()
                del y
            else:
                with suppress(Stop, ShardingError):
                    call(x)
            del x
        assert [item() for item in saved] == [None] * 12
    finally:
        gc.enable()


@pytest.mark.parametrize("create_graph", [False, True])
def test_result_frees_arguments_after_backward(create_graph: bool) -> None:
    """The graph frees its saved tensors as on one device."""
    x = torch.ones(4, requires_grad=True)
    value_held = x * 2
    alive = weakref.ref(value_held)
    y = mapped(lambda v: v * v)(value_held)
    del value_held
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph, retain_graph=False)
    del grad
    gc.collect()
    assert alive() is None
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        y.sum().backward()


def test_threads_are_reused() -> None:
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
        unsharded = fs.Spec(mesh, spec, shape=(4,))
        one = fs.shard(x, unsharded)
        fs.unshard(one).add_(100)
        for item in fs.reshard(one, P()).local:
            item.add_(100)
        assert torch.equal(fs.unshard(one), x)
    out = mapped(body, mesh=mesh)(pair)
    assert torch.equal(fs.unshard(out), x)
    for item in out.local:
        item.add_(100)
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


def test_recomputed_body_draws_the_same_values() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        saved = (torch.rand(len(x)) < 0.5).double()
        return fs.psum(x * saved, "x") * (torch.rand(len(x)) < 0.5).double() * x

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


def test_recomputed_body_runs_under_its_autocast() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mapped(lambda a: a @ a.T, out_specs=P(None, "x"))(x).float()
    (once,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(once, again)


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_required_on_some_ranks_alone(create_graph: bool) -> None:
    spec = fs.Spec(MESH, P("x"), shape=(4,))
    still, moving = torch.ones(2), torch.ones(2, requires_grad=True)
    y = mapped(lambda x: fs.psum(x * x, "x"), out_specs=P())(((still, moving), spec))
    (grad,) = torch.autograd.grad(fs.unshard(y).sum(), [moving], create_graph=create_graph)
    assert torch.equal(grad, torch.full((2,), 2.0))


# -- closed-over tensors -----------------------------------------------------------------------


def test_closures_used_by_one_rank() -> None:
    w = torch.ones(2, requires_grad=True)

    def on_one_rank(x: torch.Tensor) -> torch.Tensor:
        return x * w if int(fs.axis_index("x")) == 0 else x * 1

    x = torch.arange(4.0)
    with pytest.raises(ShardingError, match="gradients that differ on ranks 0 and 1"):
        torch.autograd.grad(mapped(on_one_rank)(x).sum(), w)

    def on_a_rank() -> torch.Tensor:
        return torch.autograd.grad(mapped(lambda x: x * w)(x).sum(), w)[0]

    for local, part in zip(fs.simulate(MESH, on_a_rank), (x[:2], x[2:]), strict=True):
        assert torch.equal(local, part), "as under torchrun: each rank's own"


# -- errors -------------------------------------------------------------------------------------


ORDER = """
  rule:  every rank of a group must call the same collectives in the same order
  fix:   move the collective out of the branch that only some ranks take"""
BACKWARD_ORDER = """
  rule:  every rank of a group must call the same collectives in the same order; backward a rank \
calls the transposes of those whose results it has used
  fix:   torch.where(condition, a, b) in the place of a branch that only some ranks take"""
ALIKE = """
  rule:  every rank of a group must call the same collective, with one shape, dtype and arguments
  fix:   look at what made the ranks differ before these lines"""


def line(fn: Any, after: int) -> str:
    return f"{__file__}:{fn.__code__.co_firstlineno + after}"


def text_of(run: Any) -> str:
    with pytest.raises(ShardingError) as caught:
        run()
    assert not hasattr(caught.value, "__notes__")
    return str(caught.value)


def test_collectives_are_distinguished_by_name() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        if fs.axis_index("x") == 1:
            return fs.pshuffle(x, "x", [1, 0])
        return fs.ppermute(x, "x", [(0, 1), (1, 0)])

    wire = "over x: all_to_all(torch.float32) of (1,) at"
    assert text_of(lambda: mapped(body)(torch.ones(2))) == (
        f"""ranks of the group (0, 1) call different collectives
  rank 0 (x=0): fs.ppermute(perm=[[0, 1], [1, 0]]) {wire} {line(body, 3)}
  rank 1 (x=1): fs.pshuffle(perm=[1, 0]) {wire} {line(body, 2)}{ALIKE}"""
    )


def test_remark_of_a_rank_is_in_the_error() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        explain_with(lambda: "branched on a varying value")
        return fs.psum(x, ("y", "x")) if fs.axis_index(("x", "y")) else x

    mesh = fs.Mesh(x=2, y=1)
    f = mapped(body, mesh=mesh)
    wait = "waiting in fs.psum over x: all_reduce(sum, torch.float32, (1,)) for [0]"
    assert text_of(lambda: f(torch.ones(2))) == (
        f"""the simulation stands still: ranks wait for others that never come
  rank 0 (x=0, y=0): returned
    branched on a varying value
  rank 1 (x=1, y=0): {wait} at {line(body, 2)}
    branched on a varying value{ORDER}"""
    )


def test_ranks_in_one_position_share_a_line() -> None:
    mesh = fs.Mesh(dp=4, tp=2)

    def body(x: torch.Tensor) -> torch.Tensor:
        if fs.axis_index("dp") == 3:
            explain_with(lambda: "branched on a varying value")
            return x
        if fs.axis_index("tp") == 1:
            return x
        return fs.psum(x, "tp")

    f = fs.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check=False)
    wait = "waiting in fs.psum over tp: all_reduce(sum, torch.float32, (1,)) for [1, 3, 5]"
    assert text_of(lambda: f(torch.ones(4))) == (
        f"""the simulation stands still: ranks wait for others that never come
  ranks 0 (dp=0, tp=0), 2 (dp=1, tp=0), 4 (dp=2, tp=0): {wait} at {line(body, 6)}
  ranks 1 (dp=0, tp=1), 3 (dp=1, tp=1), 5 (dp=2, tp=1): returned
  ranks 6 (dp=3, tp=0), 7 (dp=3, tp=1): returned
    branched on a varying value{ORDER}"""
    )


def test_coordinates_of_many_ranks_are_omitted() -> None:
    mesh = fs.Mesh({"x": 8}, devices=(0, 2, 1, 3, 4, 5, 6, 7))
    order = "ranks [0, 2, 1, 3, 4, 5, 6, 7]"
    wait = f"waiting in fs.psum over x, {order}: all_reduce(sum, torch.float32, (1,)) for [3]"

    def body(x: torch.Tensor) -> torch.Tensor:
        return x if fs.axis_index("x") == 3 else fs.psum(x, "x")

    assert text_of(lambda: mapped(body, mesh=mesh)(torch.ones(8))) == (
        f"""the simulation stands still: ranks wait for others that never come
  ranks 0, 1, 2, 4, 5, 6, 7: {wait} at {line(body, 1)}
  rank 3 (x=3): returned{ORDER}"""
    )


def test_started_collective_has_its_line() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        if fs.axis_index("x") == 1:
            return x
        pending = fs.start(fs.psum, x, "x")
        total: torch.Tensor = pending.wait()
        return total

    wait = "waiting in fs.psum over x: all_reduce(sum, torch.float32, (1,)) for [1]"
    assert text_of(lambda: mapped(body)(torch.ones(2))) == (
        f"""the simulation stands still: ranks wait for others that never come
  rank 0 (x=0): {wait} at {line(body, 4)}, of the call at {line(body, 3)}
  rank 1 (x=1): returned{ORDER}"""
    )


@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_has_the_name_and_the_line_of_the_call(create_graph: bool) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        if fs.axis_index("x") == 1:
            return fs.all_gather(x, "x", tiled=True).detach().sum() * x
        return fs.all_gather(x, "x", tiled=True).sum() * x

    x = torch.ones(4, requires_grad=True)
    y = mapped(body)(x)
    call = "backward of fs.all_gather(tiled=True) over x"
    wait = f"waiting in {call}: reduce_scatter(sum, torch.float32, (2, 2))"
    values = text_of(lambda: torch.autograd.grad(y.sum(), x, create_graph=create_graph))
    assert values == (
        f"""the simulation stands still: ranks wait for others that never come
  rank 0 (x=0): {wait} for [1], of the call at {line(body, 3)}
  rank 1 (x=1): returned{BACKWARD_ORDER}"""
    )


def test_programs_and_conversions_have_names() -> None:
    sharded = fs.Spec(MESH, P("x"), shape=(4,))
    prog = fs.redistribute(sharded, sharded.replace(partition=P()))

    def with_a_program() -> Any:
        return prog(torch.ones(2)) if int(fs.axis_index("x", mesh=MESH)) else None

    def with_a_start() -> Any:
        return prog(torch.ones(2), async_op=True).wait() if with_a_rank() else None

    def with_from_local() -> Any:
        return fs.from_local(torch.ones(2), MESH, P("x")) if with_a_rank() else None

    def with_scatter() -> Any:
        return fs.scatter(None, sharded) if with_a_rank() else None

    def with_a_rank() -> int:
        return int(fs.axis_index("x", mesh=MESH))

    steps = "(f32[4@x], all_gather(x, dim 0))"
    for body, name in (
        (with_a_program, f"the program to f32[4]{steps} over x: all_gather"),
        (with_a_start, f"the program to f32[4]{steps} over x: all_gather"),
        (with_from_local, "fs.from_local over x: all_gather"),
        (with_scatter, "fs.scatter(f32[4@x], src=0) over x: all_to_all"),
    ):
        text = text_of(lambda body=body: fs.simulate(MESH, body))
        assert f"rank 1 (x=1): waiting in {name}(" in text
        assert f" at {line(body, 1)}" in text


class Refuses(torch.autograd.Function):
    """Function whose backward fails on the second rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: int) -> torch.Tensor:
        ctx.rank = rank
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.rank == 1:
            raise KeyError("mine")
        return grad, None


@pytest.mark.parametrize("create_graph", [False, True])
def test_error_in_backward_names_its_rank(create_graph: bool) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return Refuses.apply(fs.psum(x, "x"), int(fs.axis_index("x")))  # type: ignore[no-any-return, no-untyped-call]

    y = mapped(body)(torch.ones(4, requires_grad=True))
    with pytest.raises(KeyError, match="mine") as caught:
        y.sum().backward(create_graph=create_graph)
    assert caught.value.__notes__ == ["on rank 1 (x=1) of a simulated Mesh(x=2)"]
    assert "backward" in [item.name for item in caught.traceback]


def test_error_in_a_nested_simulation_names_both_ranks() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    def body(x: torch.Tensor) -> torch.Tensor:
        fs.psum(x, "x")
        return x if fs.axis_index("x") == 0 else fs.unshard(mapped(inner)(PAIR))

    with pytest.raises(KeyError, match="mine") as caught:
        mapped(body)(torch.ones(4))
    assert caught.value.__notes__ == [
        "on rank 0 (x=0) of a simulated Mesh(x=2)",
        "on rank 1 (x=1) of a simulated Mesh(x=2)",
    ]
    assert [item.name for item in caught.traceback][-1] == "inner"


def test_error_in_reading_results_is_raised() -> None:
    def ragged(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(int(fs.axis_index("x")) + 1)

    with pytest.raises(ShardingError, match=r"different collectives|rank 1 returned"):
        fs.simulate(MESH, lambda: mapped(ragged)(torch.arange(4.0)))


def test_ranks_have_as_many_threads_as_the_caller() -> None:
    mesh, threads = fs.Mesh(x=3), torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            assert fs.simulate(mesh, torch.get_num_threads) == [count] * 3
    finally:
        torch.set_num_threads(threads)
