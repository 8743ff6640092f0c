"""Writes in place become new values of the graph; arguments are written at its end.

The oracle is the same function on one device, run on clones: results, gradients, and the final
values of the arguments.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P
from fshard.partition.ir import Write

MESH = Mesh(dp=2, tp=2)


def sample(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# -- writes into results -------------------------------------------------------------------


def of_views(x: Tensor) -> Tensor:
    y = x * 2
    view = y.view(2, 8).view(16)
    y.add_(1)
    return view


def of_parts(x: Tensor) -> Tensor:
    y = x * 2
    part = y[:2]
    y.add_(1)
    return part


def a_part(x: Tensor) -> Tensor:
    y = x * 2
    y[1:3, ::2] += x[1:3, :2]
    y.t()[0].mul_(3)
    return y


def of_complex(x: Tensor) -> Tensor:
    modes = torch.fft.rfft(x)
    low = torch.zeros_like(modes)
    low[:, :2] = modes[:, :2] * (1 + 2j)
    low[:, 2] = modes[:, 0]
    return torch.fft.irfft(low, x.shape[1])


def an_element(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[2] = x[1]
    y[:, 3] = 7
    return y * x


def by_mask(x: Tensor) -> Tensor:
    y = x.clone()
    y[x.detach() > 0] = 0
    y.masked_fill_(y.detach() < -1, 5.0)
    return y


def by_index(x: Tensor) -> Tensor:
    y = x * 2
    y[torch.tensor([0, 2]), torch.tensor([1, 1])] = x[0, :2]
    y.index_add_(0, torch.tensor([3]), x[:1])
    return y


def rotary(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    even, odd = x[..., ::2], x[..., 1::2]
    out[..., ::2] = even - odd
    out[..., 1::2] = even + odd
    return out


def diagonal(x: Tensor) -> Tensor:
    y = x * 1
    y.diagonal().add_(1)
    y.fill_diagonal_(2)
    return y @ x


def a_list(x: Tensor) -> list[Tensor]:
    ys = [x * 2, x.sin()]
    torch._foreach_add_(ys, [x, x])
    torch._foreach_mul_(ys, 3)
    return ys


def out_of(x: Tensor) -> Tensor:
    out = torch.zeros(4, 4, dtype=torch.float64)
    with torch.no_grad():
        torch.add(x.detach(), 1, out=out)
    return out + x


def by_a_returned_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.cos()
    row = y[1]
    row += 1
    flat = y.reshape(-1)
    flat.mul_(2)
    return y, row


def recomputed(x: Tensor) -> Tensor:
    def inner(v: Tensor) -> Tensor:
        w = v.clone()
        w[0] = 0
        return w.sin()

    y: Tensor = checkpoint(inner, x, use_reentrant=False)
    return y


def as_other_dtype(x: Tensor) -> Tensor:
    y = x.to(torch.complex128).clone()
    torch.view_as_real(y)[..., 1] = x
    return y.abs()


WRITERS = [
    of_views, of_parts, a_part, of_complex, an_element, by_mask, by_index, rotary, diagonal, a_list,
    out_of, by_a_returned_view, recomputed, as_other_dtype,
]  # fmt: skip
LAYOUTS = [P("dp"), P(None, "tp"), P("tp", "dp"), P(("dp", "tp")), P()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", WRITERS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_writes_become_values(fn: Callable[[Tensor], Any], layout: P) -> None:
    torch.manual_seed(0)
    x = sample(4, 4).requires_grad_()
    actual, expected = fs.partition(fn, mesh=MESH, in_specs=layout)(x), fn(x)
    torch.testing.assert_close(actual, expected)
    actual, expected = (y if isinstance(y, Tensor) else torch.cat([*map(torch.ravel, y)])
                   for y in (actual, expected))  # fmt: skip
    grads, expected_grads = (torch.autograd.grad(y.sin().sum(), x) for y in (actual, expected))
    torch.testing.assert_close(grads, expected_grads)


# -- writes into arguments ------------------------------------------------------------------


def moment(p: Tensor, g: Tensor, m: Tensor) -> None:
    m.mul_(0.9).add_(g)
    p.add_(m, alpha=-0.1)


def teacher(p: Tensor, g: Tensor, m: Tensor) -> Tensor:
    m.lerp_(p, 0.1)
    m[0] = g[1]
    return m * 2


def cache(p: Tensor, g: Tensor, m: Tensor) -> Tensor:
    m[:, 1:3] = p[:, :2]
    return m @ g


@pytest.mark.parametrize("fn", [moment, teacher, cache], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_locals_of_arguments_are_written(fn: Callable[..., Any], layout: P) -> None:
    inputs = [sample(4, 4) for _ in range(3)]
    expected = [x.clone() for x in inputs]
    result = fn(*expected)
    part = fs.partition(fn, mesh=MESH, in_specs=layout)
    pairs = [
        fs.shard(x.clone(), fs.Spec(MESH, layout, shape=(4, 4), dtype=x.dtype)) for x in inputs
    ]
    pairs_result = part(*pairs)
    locals_ = [local for pair in pairs for local in pair.local]
    for pair, x in zip(pairs, expected, strict=True):
        torch.testing.assert_close(fs.unshard(pair), x)
    again = part(*inputs)  # plain tensors are written as well
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(x, y)
    if result is not None:
        torch.testing.assert_close(again, result)
        torch.testing.assert_close(fs.unshard(pairs_result), result)
    assert all(before is after for before, after in zip(
        locals_, (local for pair in pairs for local in pair.local), strict=True))  # fmt: skip


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return y.mul_(x.cos()) + x


def scaled_gradient(x: Tensor, y: Tensor) -> Tensor:
    """Write an argument with a gradient; a function that takes gradients is traced otherwise."""
    (grad,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
    return y.view(-1)[2:].div_(grad.flatten()[2:]).sin()


@pytest.mark.parametrize("fn", [scaled, scaled_gradient], ids=lambda fn: fn.__name__)
def test_values_that_are_overwritten_are_saved_for_gradients(fn: Callable[..., Tensor]) -> None:
    x, y, right = sample(4, 4).requires_grad_(), sample(4, 4), sample(4, 4)
    right.copy_(y)
    actual, expected = fs.partition(fn, mesh=MESH, in_specs=P("dp"))(x, y), fn(x, right)
    torch.testing.assert_close((actual, y), (expected, right))
    grads, right_grads = (torch.autograd.grad(z.sin().sum(), x) for z in (actual, expected))
    torch.testing.assert_close(grads, right_grads)


def test_overwritten_values_without_gradients_are_not_copied() -> None:
    def average(x: Tensor, m: Tensor) -> Tensor:
        m.mul_(0.9).add_(x.detach(), alpha=0.1)
        return x * 2

    made = fs.partition(average, mesh=MESH).trace(sample(4).requires_grad_(), sample(4))
    assert not [line for line in made.lines if "clone" in getattr(line, "name", "")]


def twice(p: Tensor, g: Tensor) -> None:
    with torch.no_grad():
        p.mul_(0.9)
        p.add_(g, alpha=-0.1)


def test_argument_with_gradient_is_written_twice() -> None:
    inputs, g = sample(4, 4).requires_grad_(), sample(4, 4)
    right = inputs.detach().clone()
    twice(right, g)
    fs.partition(twice, mesh=MESH, in_specs=P("dp", "tp"))(inputs, g)
    torch.testing.assert_close(inputs.detach(), right)


def test_running_statistics_are_those_of_the_global_batch() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
        torch.nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    ).double()  # fmt: skip
    reference = copy.deepcopy(module)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    part = fs.partition(module, mesh=MESH, params=P(), in_specs=(P(("dp", "tp")),))
    for _ in range(3):
        x = sample(8, 3, 6, 6)
        actual, expected = part(state, x), reference(x)
        torch.testing.assert_close(actual, expected)
        grads = torch.autograd.grad(actual.sin().sum(), list(module.parameters()))
        expected_grads = torch.autograd.grad(expected.sin().sum(), list(reference.parameters()))
        torch.testing.assert_close(grads, expected_grads)
    for buffer, expected_buffer in zip(module.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected_buffer)
    made_of = part.trace(state, x)
    names = sorted(name for name, _ in module.named_buffers())
    written = [line.name for line in made_of.lines if isinstance(line, Write)]
    assert written == [f"args[0]['{name}']" for name in names if name != "3.num_batches_tracked"]


def test_statistics_written_twice_have_no_gradient() -> None:
    def fn(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        y = torch.nn.functional.batch_norm(x, mean, var, training=True)
        y = torch.nn.functional.batch_norm(y * x, mean, var, training=True)
        return y - mean

    x = sample(4, 4).requires_grad_()
    part = fs.partition(fn, mesh=MESH, in_specs=(P("dp"), P(), P()))
    buffers, expected_buffers = (
        [torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)] for _ in range(2)
    )
    actual, expected = part(x, *buffers), fn(x, *expected_buffers)
    torch.testing.assert_close((actual, buffers), (expected, expected_buffers))
    grads, expected_grads = (torch.autograd.grad(y.sin().sum(), x) for y in (actual, expected))
    torch.testing.assert_close(grads, expected_grads)


def written_after_use(x: Tensor) -> tuple[Tensor, ...]:
    laid = fs.constrain(x, P("dp"))
    turned = fs.constrain(x, P()).t()
    x.add_(1)
    return laid, turned, x


@pytest.mark.parametrize("layout", [P("dp"), P()], ids=str)
def test_results_share_no_memory_with_written_arguments(layout: P) -> None:
    x = sample(4, 4)
    y = x.clone()
    spec = fs.Spec(MESH, layout, shape=(4, 4), dtype=x.dtype)
    pair = fs.shard(x.clone(), spec)
    part = fs.partition(written_after_use, mesh=MESH)
    output = part(pair)
    for actual, expected in zip((*output, pair), (*written_after_use(y), y), strict=True):
        torch.testing.assert_close(fs.unshard(actual), expected)


def test_foreach_writes_lists_of_arguments() -> None:
    torch.manual_seed(0)
    shapes = [(4, 8), (8,), (8, 4)]

    def fused(ps: list[Tensor], gs: list[Tensor], ms: list[Tensor]) -> None:
        torch._foreach_mul_(ms, 0.9)
        torch._foreach_add_(ms, gs)
        torch._foreach_add_(ps, ms, alpha=-0.1)

    lists = [[sample(*shape) for shape in shapes] for _ in range(3)]
    right = copy.deepcopy(lists)
    part = fs.partition(fused, mesh=MESH, in_specs=P("dp"))
    for _ in range(2):
        with torch.no_grad():
            part(*lists)
            fused(*right)
    torch.testing.assert_close(lists, right)
    assert all(prog.is_local for prog in part.trace(*lists).programs)


def test_foreach_writes_elements_that_others_read_in_turn() -> None:
    """The gradients are those of the single writes, which PyTorch has wrong for such lists."""

    def on_lists(x: Tensor) -> Tensor:
        y, z, total = x * 2, x.cos(), x.detach().sum()
        torch._foreach_add_([y, y.view(-1), y[1]], [x, x.view(-1), y[2]])
        torch._foreach_add_([y, z], [z, y])
        torch._foreach_mul_([y, y], [0.5, 3.0])
        with torch.no_grad():
            torch._foreach_mul_([total, total], total)
            torch._foreach_lerp_([y, y.detach()], [y * 2, y * 3], 0.25)
        return y + z * total

    def in_turn(x: Tensor) -> Tensor:
        y, z, total = x * 2, x.cos(), x.detach().sum()
        y.add_(x).add_(x)
        y[1].add_(y[2])
        y.add_(z)
        z.add_(y)
        y = y.mul_(0.5).mul_(3.0)
        with torch.no_grad():
            y.copy_((y * 1.25).lerp(y * 3, 0.25))
        return y + z * total**4

    x = sample(4, 4).requires_grad_()
    results = fs.partition(on_lists, mesh=MESH, in_specs=P("dp"))(x), in_turn(x)
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), x) for y in results))


def test_explain_lists_written_arguments() -> None:
    part = fs.partition(moment, mesh=MESH, in_specs=P("dp"))
    shapes = [torch.ones(4, 4) for _ in range(3)]
    assert str(part.explain(*shapes, only="layouts")).splitlines()[1:-4] == [
        "                spec             forward",
        "────────────────────────────────────────",
        "args[0], ...    3 x f32[4@dp,4]",
        "mul             f32[4@dp,4]",
        "add             f32[4@dp,4]",
        "add_1           f32[4@dp,4]",
        "writes args[0]",
        "writes args[2]",
    ]


# -- refused writes -------------------------------------------------------------------------

CLOSED_OVER = torch.ones(4, dtype=torch.float64)


def a_closed_over_tensor(x: Tensor) -> Tensor:
    CLOSED_OVER.add_(1)
    return x + CLOSED_OVER


def an_argument(x: Tensor) -> Tensor:
    return x.mul_(2)


def turned(x: Tensor) -> Tensor:
    return x.unsqueeze_(0)


@pytest.mark.parametrize(
    ("fn", "refused"),
    [
        (a_closed_over_tensor, "add_ writes a tensor that the function closes over"),
        (an_argument, "args[0] is written, and requires grad"),
        (turned, "argument 0 of shape (4,) becomes one of (1, 4)"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_untraceable_writes_are_refused(fn: Callable[..., Any], refused: str) -> None:
    part = fs.partition(fn, mesh=MESH)
    with pytest.raises(fs.ShardingError) as caught:
        part(torch.ones(4, dtype=torch.float64, requires_grad=True))
    given = str(caught.value).splitlines()[1]
    assert re.sub(rf" at {re.escape(__file__)}:\d+", "", given) == f"  given: {refused}"
    torch.testing.assert_close(CLOSED_OVER, torch.ones(4, dtype=torch.float64))


def test_buffers_on_another_device_are_refused() -> None:
    net = torch.nn.BatchNorm1d(4, device="meta").eval()
    params, x = dict(net.named_parameters()), torch.ones(2, 4, device="meta")
    part = fs.partition(net, mesh=MESH, params=P())
    with pytest.raises(fs.ShardingError, match="must be on one device"):
        part.trace(params, x)
    part.trace(params | dict(net.named_buffers()), x)  # the fix


def without_gradient(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y.mul_(3)
    return y


def detached(x: Tensor) -> Tensor:
    y = x * 2
    y.detach().add_(1)
    return y


def detached_alias(x: Tensor) -> Tensor:
    cache = x.detach()
    cache[0] = x[1]
    return cache * 2


def an_argument_before_it_is_used(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.clamp_(-1, 1)
    return x * 2


def of_parts_under_no_grad(x: Tensor) -> Tensor:
    """Write a view under no_grad, and read the whole tensor and another view of it."""
    y = x * 2
    first, rest = y[:2], y[2:]
    y.mul_(x.sin())
    with torch.no_grad():
        torch._foreach_add_([first], [x[2:]])
        rest.exp_()
    return y.sin() + torch.cat([rest, first])


def two_histories(x: Tensor) -> Tensor:
    """Write values with gradients to two detached tensors and to the one they share memory with."""
    y = x.sin()
    first, second = y.detach(), y.detach()[1:]
    first.mul_(x)
    second.add_(x[:3].cos())
    y.mul_(x.exp())
    return torch.cat([y * x, first * x, second * x[1:]])


def read_before_and_after(x: Tensor) -> Tensor:
    y = x * 2
    before = y.detach().sin() + y + 1
    with torch.no_grad():
        y.mul_(x)
    return before + y


def decayed(x: Tensor) -> Tensor:
    """Take a step of decoupled weight decay where the function takes gradients itself."""
    (gradient,) = torch.autograd.grad(x.square().sum(), x)
    with torch.no_grad():
        x.mul_(0.9)
        x.sub_(0.1 * gradient)
    return x * x.sin()


def reshaped_after_a_gradient(x: Tensor) -> Tensor:
    w = x.detach().clone().requires_grad_()
    torch.autograd.grad(w.square().sum(), w)
    with torch.no_grad():
        w.unsqueeze_(0).mul_(2)
    return (w * x).sum(0)


def detached_after_a_gradient(x: Tensor) -> Tensor:
    """Write a value with a gradient to a row of a detached tensor, below autograd."""
    torch.autograd.grad(x.square().sum(), x)
    y = x * 2
    cache = y.detach()
    cache[0] = x[1]
    return cache.sin() + y.sin()


def detached_values(x: Tensor) -> Tensor:
    """Write values with a gradient by a detached alias, as EMA codebooks do."""
    average = torch.ones(4, dtype=x.dtype)
    average.data.mul_(0.9).add_(x, alpha=0.1)
    return average * x


def detached_cache(x: Tensor) -> Tensor:
    cache = x.sin().detach()
    cache[0] = x[1]
    cache.mul_(x.cos())
    return cache.sin()


SCALE = torch.full((2,), 3.0, dtype=torch.float64)


def viewed_under_no_grad(x: Tensor) -> Tensor:
    """Read a view of a written value under no_grad before it is read with gradients."""
    y = x * 2
    y.add_(x.sin() * SCALE.sum())
    first, rest = y.split(2)
    with torch.no_grad():
        largest = first.max() + SCALE.sum()
    return torch.cat([first / largest, rest * SCALE])


def view_of_a_written_base(x: Tensor) -> Tensor:
    """Write a view under no_grad after its base, in a function that takes gradients."""
    torch.autograd.grad((x * x).sum(), x)
    y = x * 1.0
    view = y.view(-1)
    with torch.no_grad():
        y.mul_(2)
        view.add_(1)
    return y.sin() + view


class Product(torch.autograd.Function):
    """Product whose forward, under no_grad, is the first use of its operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


def given_to_a_custom_function(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1)
    product: Tensor = Product.apply(*y.chunk(2))
    return product


@pytest.mark.parametrize(
    "fn",
    [
        detached_values, detached_cache, viewed_under_no_grad, given_to_a_custom_function,
        without_gradient, detached, detached_alias, an_argument_before_it_is_used,
        of_parts_under_no_grad, two_histories, read_before_and_after, decayed,
        detached_after_a_gradient, reshaped_after_a_gradient, view_of_a_written_base,
    ],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
def test_gradients_of_written_values_are_those_of_one_device(
    fn: Callable[[Tensor], Tensor],
) -> None:
    values = torch.randn(4, dtype=torch.float64)
    results = []
    for f in (fs.partition(fn, mesh=MESH, in_specs=P("dp")), fn):
        x = values.clone().requires_grad_()
        output = f(x)
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), x), x])
    torch.testing.assert_close(*results)


def dropped_into(x: Tensor) -> Tensor:
    y = x * 2
    torch.nn.functional.dropout(y, 0.5, training=False).add_(1)
    return y


def dropped_before(x: Tensor) -> Tensor:
    y = x * 2
    z = torch.nn.functional.feature_alpha_dropout(y, 0.0, training=True)
    y.add_(1)
    return z


def summed_into(x: Tensor) -> Tensor:
    y = x * 2
    torch.einsum("ij->ij", y).add_(1)
    return y


def copied(x: Tensor) -> Tensor:
    y = x * 2
    z = torch.einsum("ij->ji", y).clone().add_(1)
    return z + y.t()


@pytest.mark.parametrize("fn", [dropped_into, dropped_before, summed_into, copied])
@pytest.mark.parametrize("grad", [False, True])
def test_operand_returned_by_an_operation_is_written_with_it(
    fn: Callable[[Tensor], Tensor], grad: bool
) -> None:
    """Schemas of these operations declare their results as new tensors."""
    x = sample(4, 6).requires_grad_(grad)
    output = fs.partition(fn, mesh=MESH, in_specs=P("dp"))(x)
    torch.testing.assert_close(output, fn(x))
    if grad:
        grads = [torch.autograd.grad(y.sin().sum(), x) for y in (output, fn(x))]
        torch.testing.assert_close(*grads)


def test_undeclared_views_are_refused_when_written() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        torch.einsum("ij->ji", y).add_(1)
        return y

    with pytest.raises(fs.ShardingError) as caught:
        fs.partition(fn, mesh=MESH)(sample(4, 6))
    assert str(caught.value) == (
        "fs.partition\n"
        "  given: add_ writes the memory of mul, in which einsum is too\n"
        "  rule:  an operation that returns a view says so in its schema\n"
        "  fix:   a clone() of einsum, or of the tensor that is written"
    )


def test_arguments_are_written_without_gradients() -> None:
    for fn in (without_gradient, detached, an_argument, an_argument_before_it_is_used):
        x = sample(4)
        y = x.clone()
        torch.testing.assert_close(fs.partition(fn, mesh=MESH, in_specs=P("dp"))(x), fn(y))
        torch.testing.assert_close(x, y)


def test_argument_in_the_memory_of_a_written_one_is_refused() -> None:
    part = fs.partition(lambda x, y: x.add_(y).sum(), mesh=MESH)
    x = torch.ones(4)
    with pytest.raises(fs.ShardingError) as caught:
        part(x, x[:4])
    assert str(caught.value) == (
        "fs.partition(<lambda>)\n"
        "  given: args[1] in the memory of args[0], which is written\n"
        "  rule:  the function was traced for tensors that share no memory\n"
        "  fix:   give it a clone() of one of them"
    )
    assert part(x, x.clone()) == 8


def test_written_argument_in_the_memory_of_a_closure_is_refused() -> None:
    module = torch.nn.Linear(2, 2, bias=False)
    params = {name: param.detach() for name, param in module.named_parameters()}

    def step(p: dict[str, Tensor], x: Tensor) -> Tensor:
        p["weight"].mul_(2)
        y: Tensor = module(x)
        return y

    part = fs.partition(step, mesh=MESH, params=P(), in_specs=(P("dp"),))
    x = torch.ones(2, 2)
    with pytest.raises(fs.ShardingError) as caught:
        part(params, x)
    assert str(caught.value) == (
        "fs.partition(step)\n"
        "  given: args[0]['weight'], which is written, in the memory of a tensor that the function "
        "closes over\n"
        "  rule:  the function was traced for tensors that share no memory\n"
        "  fix:   use the argument alone: torch.func.functional_call(module, params, args) in "
        "place of module(*args)"
    )

    def with_fix(p: dict[str, Tensor], x: Tensor) -> Tensor:
        p["weight"].mul_(2)
        y: Tensor = torch.func.functional_call(module, p, (x,))
        return y

    copies = {name: param.clone() for name, param in params.items()}
    part = fs.partition(with_fix, mesh=MESH, params=P(), in_specs=(P("dp"),))
    torch.testing.assert_close(part(copies, x), with_fix(params, x))
    copies = {name: param.clone() for name, param in params.items()}
    fs.partition(step, mesh=MESH, params=P(), in_specs=(P("dp"),))(copies, x)
