"""Custom `autograd.Function`s in partitioned functions: forward and backward of one device."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import FunctionMeta
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P
from fshard.partition.ir import CustomGradient
from fshard.partition.partitioned_call import PartitionedCall
from tests.helpers.custom_functions import (
    CUSTOM_FUNCTIONS,
    DIFFERENTIABLE_TWICE,
    Exp,
    Relu,
    Round,
    exp,
    exponential,
    linear,
    relu,
    round_,
)

MESH = Mesh(dp=2, tp=2)
LAYOUTS = [(P("dp"), P(None, "tp")), (P("tp", "dp"), P("dp")), (P(), P(("tp", "dp")))]


def sample() -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("fn", CUSTOM_FUNCTIONS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_backward_of_custom_functions_equals_one_device(
    fn: Callable[..., Tensor], layouts: tuple[P, P]
) -> None:
    torch.manual_seed(0)
    inputs = sample(), sample()
    values = fs.partition(fn, mesh=MESH, in_specs=layouts)(*inputs), fn(*inputs)
    torch.testing.assert_close(*values)
    weight = torch.randn_like(values[0])
    for _ in range(1 + (fn in DIFFERENTIABLE_TWICE)):
        grads, expected = (
            torch.autograd.grad(
                (y * weight).sum(), inputs, create_graph=True, materialize_grads=True
            )
            for y in values
        )
        torch.testing.assert_close(grads, expected)
        values, weight = (torch.stack(grads).sin(), torch.stack(expected).sin()), torch.tensor(1.0)


class SquareOfOldCode(torch.autograd.Function):
    """Square that reads what it saved by the name of PyTorch before 0.4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * ctx.saved_variables[0] * grads[0]


@pytest.mark.filterwarnings("ignore:'saved_variables' is deprecated")
def test_saved_variables_are_the_saved_tensors() -> None:
    x, square = sample(), SquareOfOldCode.apply
    values = fs.partition(square, mesh=MESH, in_specs=P("dp"))(x), square(x)
    torch.testing.assert_close(*[torch.autograd.grad(y.sum(), x) for y in values])


@pytest.mark.parametrize("requires_grad", [(True, False), (False, True), (False, False)])
def test_gradients_that_are_not_requested_are_not_planned(requires_grad: tuple[bool, bool]) -> None:
    x, w = (sample().detach().requires_grad_(needs) for needs in requires_grad)
    part = fs.partition(lambda x, w: linear(x, w, None), mesh=MESH, in_specs=(P("dp"), P()))
    y, expected = part(x, w), linear(x, w, None)
    torch.testing.assert_close(y, expected)
    inputs = [t for t in (x, w) if t.requires_grad]
    assert y.requires_grad == bool(inputs)
    if inputs:
        grads, expected_grads = (torch.autograd.grad(v.sum(), inputs) for v in (y, expected))
        torch.testing.assert_close(grads, expected_grads)
    # The gradient of the replicated weight is summed over dp, that of x needs nothing.
    assert part.trace(x, w).cost(backward=True).launches == requires_grad[1]


def test_explain_shows_the_collectives_of_a_custom_backward() -> None:
    mesh = Mesh(dp=2)
    part = fs.partition(lambda x, w: linear(x, w, None), mesh=mesh, in_specs=(P("dp"), P()))
    pairs = [
        fs.shard(sample(), fs.Spec(mesh, p, shape=(4, 4), dtype=torch.float64))
        for p in (P("dp"), P())
    ]
    rows = str(part.trace(*pairs)).splitlines()
    index = next(i for i, row in enumerate(rows) if row.startswith("custom backward"))
    assert rows[index + 1].split() == ["←", "all_reduce(dp)", "f64[4,4]", "128", "B"]
    with fs.comm_log() as log:
        torch.cat(part(*pairs).local).sum().backward()
    assert log.forward.total_bytes == 0
    assert log.backward.counts["all_reduce", "dp"] == 1


def test_the_plan_of_a_custom_backward_prints_and_counts_its_own_backward() -> None:
    part = fs.partition(lambda x, w: linear(x, w, None), mesh=Mesh(dp=2), in_specs=(P("dp"), P()))
    lines = part.trace(sample(), sample()).lines
    (plan,) = [line.gradient.call for line in lines if isinstance(line, CustomGradient)]
    assert isinstance(plan, PartitionedCall)
    assert plan.requires_grad == (True,) * len(plan.in_specs)
    assert "→ all_reduce(dp)" in repr(plan)
    # Each of the two gradients is a product of a rank's 2 rows.
    events = plan.roofline().events
    assert sum(x.flops for x in events if x.phase == "forward") == 2 * (2 * 2 * 4 * 4)
    assert any(x.phase == "backward" for x in events)
    # The backward pass of a product keeps both factors; they are arguments.
    assert plan.saved_bytes().total == 0


CLOSED_OVER = sample()


def test_closed_over_tensors_have_custom_gradients() -> None:
    fn = lambda x: x @ round_(exp(CLOSED_OVER))  # noqa: E731
    x = sample().detach()
    part = fs.partition(fn, mesh=MESH, in_specs=P("dp"))
    grads = [torch.autograd.grad(f(x).sin().sum(), CLOSED_OVER)[0] for f in (part, fn)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_transforms_around_custom_functions(transform: Callable[..., Any]) -> None:
    inputs = sample().detach(), sample().detach()
    part = fs.partition(lambda x, w: exp(x @ w).sum(), mesh=MESH, in_specs=LAYOUTS[0])
    actual, expected = (
        torch.vmap(transform(f), (0, None))(inputs[0][None], inputs[1])
        for f in (part, lambda x, w: exponential(x, w).sum())
    )
    torch.testing.assert_close(actual, expected)


def test_once_differentiable_backward_refuses_a_second_one() -> None:
    x, weight = sample(), sample()
    y = fs.partition(relu, mesh=MESH, in_specs=P("dp"))(x)
    (grad,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


class SumTwice(Round):
    """Sum that is returned twice: autograd gives the gradient of both to the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        y = x.sum(0)
        return y, y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (2 * grads[0] + 3 * grads[1]).expand(4, 4)


def test_a_tensor_that_is_returned_twice_has_the_gradient_of_autograd() -> None:
    x = sample()

    def fn(x: Tensor) -> Tensor:
        first, second = SumTwice.apply(x)
        return first * 5 + second.sin()

    part = fs.partition(fn, mesh=MESH, in_specs=P("dp"))
    grads = [torch.autograd.grad(f(x).sum(), x)[0] for f in (part, fn)]
    torch.testing.assert_close(*grads)


def test_traced_tensors_of_custom_functions_are_freed_without_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc, "collect", pytest.fail)
    fs.partition(linear, mesh=MESH, in_specs=(*LAYOUTS[0], None))(sample(), sample(), None)


# -- refused ----------------------------------------------------------------------------------


class ThroughNumpy(Round):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)


class ReadsGradient(Round):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] if grads[0].sum() > 0 else -grads[0]


class WritesInput(Round):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)


KEPT: list[Tensor] = []


class KeepsGradient(Round):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        KEPT.append(grads[0] * 2)
        return grads[0]


class Unmaterialized(torch.autograd.Function):
    """Any number of results; the gradient depends on which of them are used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, needs: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.needs = needs
        return tuple(x**i for i in range(1, count + 1))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert all(grads[i] is not None for i in ctx.needs), "a gradient is missing"
        (x,) = ctx.saved_tensors
        missing = 1 + sum(3**i for i, g in enumerate(grads) if g is None)
        terms = [i * g * x ** (i - 1) for i, g in enumerate(grads, 1) if g is not None]
        return missing * torch.stack(terms).sum(0), None, None


unmaterialized: Any = Unmaterialized.apply


class UnmaterializedAlone(Round):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.round()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(y)
        return x * 1, y


OPERATIONS = "the forward and the backward of a custom autograd.Function are traced as the"


@pytest.mark.parametrize(
    ("function", "cause", "rule"),
    [
        (ThroughNumpy, "ThroughNumpy.forward: RuntimeError: .numpy() is not supported", OPERATIONS),
        (
            ReadsGradient,
            "ReadsGradient.backward: aten._local_scalar_dense.default needs a tensor's values",
            OPERATIONS,
        ),
        (
            WritesInput,
            "WritesInput.forward, which calls ctx.mark_dirty",
            "a custom function that is traced must not write its inputs",
        ),
        (KeepsGradient, "a result of mul is kept outside of the function", "the function is"),
    ],
)
def test_custom_functions_that_cannot_be_traced_are_refused(
    function: type[torch.autograd.Function], cause: str, rule: str
) -> None:
    apply = function.apply
    part = fs.partition(lambda x: apply(x * 1), mesh=MESH, in_specs=P("dp"))
    with pytest.raises(fs.ShardingError) as caught:
        part(sample())
    where, given, stated, _ = str(caught.value).splitlines()
    assert where.startswith("fs.partition(<lambda>)")
    assert given.startswith(f"  given: {cause}")
    assert stated.startswith(f"  rule:  {rule}")
    KEPT.clear()
    assert "apply" not in vars(torch.autograd.Function.__base__)
    assert Exp.apply(sample()).requires_grad
    assert Relu.apply(sample()).requires_grad


def test_cotangents_that_are_not_materialized() -> None:
    """With one differentiable result, or without gradients, there is nothing to decide."""
    alone, x = UnmaterializedAlone.apply, sample()
    part = fs.partition(lambda x: alone(x)[0], mesh=MESH, in_specs=P("dp"))
    grads = [torch.autograd.grad(call(x).sum(), x) for call in (part, lambda x: alone(x)[0])]
    torch.testing.assert_close(*grads)
    part = fs.partition(lambda x: unmaterialized(x, 5, ())[0], mesh=MESH, in_specs=P("dp"))
    torch.testing.assert_close(part(x.detach()), x.detach())


USED = [used for n in (1, 2, 3) for used in itertools.combinations(range(3), n)]
PART = fs.partition(
    lambda x: [y.sin() for y in unmaterialized(x.cos(), 3, ())],
    mesh=MESH,
    in_specs=P("tp", "dp"),
)


@pytest.mark.parametrize("used", USED, ids=str)
def test_unmaterialized_cotangents_of_results_that_are_not_used_are_none(
    used: tuple[int, ...],
) -> None:
    """The caller uses some results of the partitioned function, or the function itself does."""
    some = lambda f: lambda x: sum(f(x)[i] for i in used)  # noqa: E731
    x, (fn, part) = sample(), map(some, (PART.fn, PART))
    within = fs.partition(fn, mesh=MESH, in_specs=P("dp")) if used == (0, 2) else part
    ys = fn(x), part(x), within(x)
    expected, *actual = (torch.autograd.grad((y**2).sum(), x) for y in ys)
    for grads in actual:
        torch.testing.assert_close(grads, expected)


def test_unmaterialized_cotangents_in_gradients_of_the_function_itself() -> None:
    def fn(x: Tensor) -> Tensor:
        y = unmaterialized(x, 2, ())[1].sum()
        return torch.autograd.grad(y, x, create_graph=True)[0].sin()

    x = sample()
    part = fs.partition(fn, mesh=MESH, in_specs=P("dp"))
    torch.testing.assert_close(part(x), fn(x))


def test_results_that_an_unmaterialized_backward_needs() -> None:
    x = sample()
    part = fs.partition(lambda x: unmaterialized(x, 2, (0,)), mesh=MESH, in_specs=P("dp"))
    grads = [torch.autograd.grad(y[0].sum(), x) for y in (part(x), unmaterialized(x, 2, (0,)))]
    torch.testing.assert_close(*grads)
    both = fs.partition(lambda x: unmaterialized(x, 2, (0, 1)), mesh=MESH, in_specs=P("dp"))
    for f, used, missing in ((part, 1, "0"), (both, 1, "0"), (both, 0, "1")):
        with pytest.raises(fs.ShardingError, match=f"without cotangents of its outputs {missing}"):
            f(x)[used].sum().backward()
    pair = fs.shard(x, MESH, P("dp"))
    (grad,) = torch.autograd.grad(part(pair)[0].local[2].sum(), x)  # that of one rank alone
    torch.testing.assert_close(
        grad, 4 * torch.tensor([0.0, 0, 1, 1])[:, None].expand(4, 4).double()
    )
    many = fs.partition(lambda x: unmaterialized(x, 5, ()), mesh=MESH, in_specs=P("dp"))
    with pytest.raises(fs.ShardingError, match="must have at most 4 of them"):
        many(x)


class Averaged(torch.autograd.Function):
    """Function whose `setup_context` writes an argument."""

    @staticmethod
    def forward(x: Tensor, average: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        inputs[1].mul_(0.5).add_(output)
        ctx.save_for_backward(inputs[1].clone())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.saved_tensors[0], None


averaged = Averaged.apply


def test_setup_context_runs_once() -> None:
    part = fs.partition(averaged, mesh=MESH, in_specs=(P("dp"), P("dp")))
    results = []
    for fn in (averaged, part):
        x, average = torch.ones(2, requires_grad=True), torch.ones(2)
        results.append((average, *torch.autograd.grad(fn(x, average).sum(), x)))
    assert [x.tolist() for x in results[1]] == [x.tolist() for x in results[0]] == [[2.5] * 2] * 2


def test_forwards_that_are_called_have_the_gradients_of_their_operations() -> None:
    def call(x: Tensor) -> Tensor:
        assert Exp._backward_cls is not None  # what `apply` looks up first
        return Averaged.forward(x, x)

    x = torch.ones(2, requires_grad=True)
    part = fs.partition(call, mesh=MESH, in_specs=P("dp"))
    assert torch.autograd.grad(part(x).sum(), x)[0].tolist() == [2.0, 2.0]


class OwnGradient(torch.autograd.Function):
    """Sine whose forward takes the gradient that its backward multiplies with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = leaf.sin()
            (ctx.gradient,) = torch.autograd.grad(y.sum(), leaf)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.gradient


def test_forwards_that_take_gradients_run_in_checkpoints() -> None:
    def call(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(OwnGradient.apply, x, use_reentrant=False)
        return y * x

    part = fs.partition(call, mesh=MESH, in_specs=P("dp"))
    x = sample()
    grads = [torch.autograd.grad(fn(x).sum(), x)[0] for fn in (part, call)]
    torch.testing.assert_close(*grads)


class LooksUpItself(FunctionMeta):
    """Metaclass that looks up the attributes of its classes, without that of PyTorch."""

    def __getattribute__(self, name: str) -> Any:
        return type.__getattribute__(self, name)


class LooksUpByParent(FunctionMeta):
    """Metaclass whose look-ups end in that of PyTorch."""

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


@pytest.mark.parametrize("metaclass", [LooksUpItself, LooksUpByParent])
def test_metaclasses_with_their_own_lookups(metaclass: type) -> None:
    """Custom gradients are traced, and the metaclasses are afterwards as before."""
    before = vars(metaclass)["__getattribute__"]
    own = metaclass("OwnRound", (Round,), {})
    x = sample()
    part = fs.partition(own.apply, mesh=MESH, in_specs=P("dp"))
    grads = [torch.autograd.grad(fn(x).sum(), x) for fn in (part, Round.apply)]
    torch.testing.assert_close(*grads)
    assert vars(metaclass)["__getattribute__"] is before
