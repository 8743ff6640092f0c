"""Partitioned functions on processes: values and gradients of one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from random import Random
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from tests.helpers.custom_functions import CUSTOM_FUNCTIONS
from tests.helpers.gloo.harness import Ranks, run_ranks
from tests.helpers.ops.random_functions import RandomCase, Results
from tests.helpers.ops.training_steps import in_place_step, layer_params
from tests.helpers.spec_grid import message

MESH = Mesh(x=2)


def on_rank(seed: int) -> Results:
    fs.init(MESH)
    return RandomCase(Random(seed), [MESH]).of_rank()


@pytest.mark.parametrize("seed", range(6))
def test_random_functions(seed: int) -> None:
    case = RandomCase(Random(seed), [MESH])
    for results in run_ranks(2, on_rank, seed):
        case.compare(results)


def train_on_rank(layout: str) -> tuple[torch.Tensor, ...]:
    """Run three training steps that write local parameters; return global ones and losses."""
    fs.init(MESH)
    specs = {"a": P(layout), "b": P(None, layout)}
    part = fs.partition(in_place_step, mesh=MESH, params=specs, in_specs=(P("x"),))
    x = torch.arange(16, dtype=torch.float64).reshape(4, 4) / 16
    params = {}
    for name, param in layer_params().items():
        local, spec = fs.shard(
            param, fs.Spec(MESH, specs[name], shape=param.shape, dtype=param.dtype)
        )
        params[name] = fs.Sharded(local.clone().requires_grad_(), spec)
    pair = fs.shard(x, fs.Spec(MESH, P("x"), shape=x.shape, dtype=x.dtype))
    values = [fs.unshard(part(params, pair)) for _ in range(3)]
    return (*(fs.unshard(param).detach() for param in params.values()), *values)


@pytest.mark.parametrize("layout", ["x", ()])
def test_training_steps_write_local_parameters(layout: str) -> None:
    params = {name: param.requires_grad_() for name, param in layer_params().items()}
    x = torch.arange(16, dtype=torch.float64).reshape(4, 4) / 16
    values = [in_place_step(params, x) for _ in range(3)]
    for results in run_ranks(2, train_on_rank, layout):
        for one, other in zip(results, (*params.values(), *values), strict=True):
            torch.testing.assert_close(one, other.detach())


def with_a_closure(layout: P) -> tuple[torch.Tensor, ...]:
    """Return a loss and the gradient of a tensor that the function closes over."""
    torch.manual_seed(0)
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 4, dtype=torch.float64)
    part = fs.partition(lambda x: (x @ w).sin().sum(), mesh=MESH, in_specs=(layout,))
    value = part(x)
    value.backward()
    assert w.grad is not None
    return value.detach(), w.grad


def closure_on_rank(layout: P) -> tuple[torch.Tensor, ...]:
    fs.init(MESH)
    return with_a_closure(layout)


@pytest.mark.parametrize("layout", [P("x"), P(None, "x"), P()], ids=str)
def test_closed_over_tensors_have_gradients_on_every_rank(layout: P) -> None:
    expected = with_a_closure(P())
    torch.testing.assert_close(with_a_closure(layout), expected)
    for results in run_ranks(2, closure_on_rank, layout):
        torch.testing.assert_close(results, expected)


def at_a_position(layout: P) -> tuple[torch.Tensor, ...]:
    """Return values and a gradient of a function that writes and reads `x[i]` for a traced `i`."""

    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = x * 1
        part = y[i]
        y[i + 1, :2] += part[2:]
        part.mul_(2)
        return y.sin() * y[:, i]

    x = torch.arange(16.0, dtype=torch.float64).view(4, 4).requires_grad_()
    part = fs.partition(fn, mesh=MESH, in_specs=(layout, P()))
    value = part(x, torch.tensor(1))
    return value.detach(), *torch.autograd.grad(value.sum(), x)


def positions_on_rank(layout: P) -> tuple[torch.Tensor, ...]:
    fs.init(MESH)
    return at_a_position(layout)


@pytest.mark.parametrize("layout", [P("x"), P(None, "x")], ids=str)
def test_elements_at_traced_positions_are_those_of_one_device(layout: P) -> None:
    expected = at_a_position(P())
    torch.testing.assert_close(at_a_position(layout), expected)
    for results in run_ranks(2, positions_on_rank, layout):
        torch.testing.assert_close(results, expected)


class ProductAndSine(torch.autograd.Function):
    """Two results, of which one has a gradient for `w`, and a backward for those that are used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return x @ w, x.sin()

    @staticmethod
    def backward(ctx: Any, product: Any, sine: Any) -> Any:
        x, w = ctx.saved_tensors
        zero = torch.zeros_like(x)
        through_sine = zero if sine is None else sine * x.cos()
        if product is None:
            return through_sine, None
        return through_sine + product @ w.mT, x.mT @ product


def gradients_of_ranks(ranks: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return gradients of a loss for which every rank uses another result."""
    torch.manual_seed(0)
    x, w = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    part = fs.partition(ProductAndSine.apply, mesh=MESH)
    results = part(fs.shard(x, MESH, P("x")), fs.shard(w, MESH, P()))
    locals_ = [y.local if isinstance(y.local, tuple) else (y.local,) * 2 for y in results]
    loss = torch.stack([locals_[rank][rank].sum() for rank in ranks]).sum()
    return torch.autograd.grad(loss, (x, w))


def custom_on_rank() -> list[tuple[torch.Tensor, ...]]:
    """Return values and gradients of the custom functions, on the mesh of two ranks."""
    fs.init(MESH)
    specs = P("x"), P(None, "x")
    results = [custom(fs.partition(fn, mesh=MESH, in_specs=specs)) for fn in CUSTOM_FUNCTIONS]
    return [*results, gradients_of_ranks((torch.distributed.get_rank(),))]


def custom(fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x, w = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = fn(x, w)
    grads = torch.autograd.grad(y.sin().sum(), (x, w), materialize_grads=True)
    return y.detach(), *grads


def test_custom_functions() -> None:
    expected = [*map(custom, CUSTOM_FUNCTIONS), gradients_of_ranks((0, 1))]
    for results in run_ranks(2, custom_on_rank):
        torch.testing.assert_close(results, expected)


def gradient_of_rank_0(check: Any) -> None:
    """Use a result of a custom function on rank 0 alone, and take its gradient there."""
    fs.init(MESH, timeout=60 if check else 2)
    spec = fs.Spec(MESH, P("x"), shape=(4, 4))
    part = fs.partition(ProductAndSine.apply, mesh=MESH, in_specs=(P("x"), P()))
    w = torch.ones(4, 4, requires_grad=True)

    def body(x: torch.Tensor) -> torch.Tensor:
        product, _ = part((x, spec), w)
        if torch.distributed.get_rank() == 0:
            return torch.autograd.grad(product.local.sum(), w)[0]
        return w.detach()

    f = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check=check)
    f((torch.ones(2, 4), spec))


@pytest.mark.parametrize("check", ["collectives", pytest.param(False, marks=pytest.mark.slow)])
def test_rank_that_uses_no_result_of_a_custom_function_is_waited_for_by_its_name(
    check: Any,
) -> None:
    with closing(Ranks(2, init=False)) as ranks:
        waiting, returned = ranks.outcomes(gradient_of_rank_0, check)
    assert returned.error is None
    text = str(waiting.error)
    start = gradient_of_rank_0.__code__.co_firstlineno
    place = f"at {__file__}:{start + 10}, of the call at {__file__}:{start + 8}"
    call = "backward of ProductAndSine over x: all_reduce"
    if check:
        assert f"rank 0 (x=0): waiting in {call}(max, torch.int32, (2,)) for [1] {place}" in text
        assert "rank 1 (x=1): returned" in text
    else:
        assert text.startswith(f"{call} among the ranks (0, 1) did not end {place}\n")


def experts(w: torch.Tensor, x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return the outputs of some experts for the rows that `nonzero` selects for them."""
    out = torch.zeros_like(x)
    for index, expert in enumerate(w):
        (rows,) = torch.nonzero(x.argmax(-1) == first + index, as_tuple=True)
        out = out.index_add(0, rows, torch.tanh(x[rows] @ expert))
    return out


def local_experts(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return fs.psum(experts(w, x, int(fs.axis_index("x")) * w.shape[0]), "x")


def mixture_on_rank() -> tuple[torch.Tensor, ...]:
    """Return loss and gradients of a mapped mixture of experts in a partitioned function."""
    fs.init(MESH)
    mapped = fs.shard_map(local_experts, mesh=MESH, in_specs=(P("x"), P()), out_specs=P())
    part = fs.partition(
        lambda w, x: mapped(w, torch.sin(x)).square().sum(),
        mesh=MESH,
        in_specs=(P(), P("x")),
        out_specs=P(),
    )
    w, x = mixture_inputs()
    loss = part(w, x)
    return loss.detach(), *torch.autograd.grad(loss, [w, x])


def mixture_inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (4, 4, 4), (6, 4)
    kwargs = {"generator": generator, "dtype": torch.float64}
    return [torch.randn(shape, **kwargs).requires_grad_() for shape in shapes]  # type: ignore[call-overload]


def test_mapped_mixture_equals_one_device() -> None:
    w, x = mixture_inputs()
    loss = experts(w, torch.sin(x)).square().sum()
    expected = loss.detach(), *torch.autograd.grad(loss, [w, x])
    for results in run_ranks(2, mixture_on_rank):
        torch.testing.assert_close(results, expected)


def refusals_of_dtensors_on_rank() -> list[str]:
    fs.init(MESH)
    pair = fs.shard(torch.arange(4.0), fs.Spec(MESH, P("x"), shape=(4,)))
    dtensor = fs.to_dtensor(pair)
    calls: list[Callable[[], object]] = [
        lambda: fs.auto(torch.relu, MESH, [dtensor]),
        lambda: fs.from_local(dtensor, MESH, P("x")),
    ]
    texts = []
    for call in calls:
        with pytest.raises(fs.ShardingError) as error:
            call()
        texts.append(str(error.value))
    fs.auto(torch.relu, MESH, [dtensor.full_tensor()])  # the fixes
    fs.auto(torch.relu, MESH, [fs.from_dtensor(dtensor)])
    return texts


def test_dtensors_are_refused_by_auto_and_from_local() -> None:
    given = "a DTensor"
    rule = "a tensor must be a plain torch.Tensor, without a layout of its own"
    fix = "x.full_tensor() for the global tensor, or fs.from_dtensor(x), a pair"
    expected = [message(where, given, rule, fix) for where in ("fs.auto: args[0]", "fs.from_local")]
    assert run_ranks(2, refusals_of_dtensors_on_rank) == [expected] * 2


def surrounded_region_on_rank() -> tuple[object, ...]:
    """Return a result under a keyed block and autocast, and modelled and counted collectives."""
    fs.init(MESH)
    mapped = fs.shard_map(
        lambda w, x: fs.psum(x @ w, "x"), mesh=MESH, in_specs=(P("x"), P(None, "x")), out_specs=P()
    )
    part = fs.partition(surrounded(mapped), mesh=MESH, in_specs=(P(), P("x"), P(None, "x")))
    w, x = mixture_inputs()
    args = fs.random.key(0), w[0].detach().requires_grad_(), x
    call = part.trace(*args)
    with fs.comm_log() as log:
        result = part(*(fs.shard(arg, spec) for arg, spec in zip(args, call.in_specs, strict=True)))
        torch.autograd.grad(result.local.sum(), args[1:])
    return (
        result.local.detach(),
        call.cost().launches - log.forward.counts.total(),
        call.cost().bytes_sent - log.forward.total_bytes,
    )


def surrounded(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    def run(key: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key), torch.autocast("cpu", dtype=torch.bfloat16):
            return product(w.float(), x.float()) + torch.rand(6, 4)

    return run


def test_region_in_a_keyed_block_and_autocast() -> None:
    w, x = mixture_inputs()
    expected = surrounded(lambda w, x: x @ w)(fs.random.key(0), w[0], x)
    for result, *differences in run_ranks(2, surrounded_region_on_rank):
        torch.testing.assert_close(result, expected.detach(), rtol=0.05, atol=0.05)
        assert differences == [0, 0]
