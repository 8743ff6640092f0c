"""Merged dims of which a minor one is sharded: heads of a batch, sequence-first batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fshard as fs
from fshard import Mesh, P
from fshard.ops.core.call import Meta
from fshard.ops.trace.trace import trace

MESH = Mesh(dp=2)
WEIGHT = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def linear_rows(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.view(-1, 4), w).view(3, 2, 5)


def chain(x: Tensor, w: Tensor) -> Tensor:
    rows = F.linear(x.flatten(0, 1).sin(), w, w[:, 0])
    return (F.gelu(rows) * w[:, 1]).reshape(3, 2, 5, 1)


def two_splits(x: Tensor, w: Tensor) -> Tensor:
    rows = x.reshape(6, 4)
    return F.linear(rows, w).view(3, 2, 5) + rows.exp().view(3, 2, 2, 2).sum((2, 3))[:, :, None]


def merged_heads(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.view(3, 2, 2, 2).transpose(2, 3).reshape(6, 4), w).unflatten(0, (3, 2))


def other_split(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.view(6, 4), w).view(2, 3, 5)


def mixed_rows(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.view(6, 4), w).cumsum(0).view(3, 2, 5)


def rows_of_two(x: Tensor, w: Tensor) -> Tensor:
    rows = x.view(6, 4)
    return (rows * rows.flip(0)).view(3, 2, 4) * w.sum()


def divided_by_the_sum(x: Tensor, w: Tensor) -> Tensor:
    rows = x.view(6, 4)
    return (rows / rows.exp().sum(dim=None, keepdim=True)).view(3, 2, 4) * w.sum()


SEPARATED = [linear_rows, chain, two_splits, merged_heads]


@pytest.mark.parametrize(
    "fn", [*SEPARATED, other_split, mixed_rows, rows_of_two, divided_by_the_sum]
)
def test_merged_rows_equal_one_device(fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    w = WEIGHT.clone().requires_grad_()
    part = fs.partition(fn, mesh=MESH, in_specs=(P(None, "dp"), P()))
    y = part(x, w)
    expected = fn(x, w)
    torch.testing.assert_close(y, expected)
    actual, right = (torch.autograd.grad(out.sin().sum(), (x, w)) for out in (y, expected))
    torch.testing.assert_close(actual, right)
    if fn in SEPARATED:
        programs = part.trace(x, w).programs
        assert all(program.is_local for program in programs), programs


@pytest.mark.parametrize("batch_first", [False, True])
def test_data_parallel_transformer_reduces_gradients_alone(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=batch_first).double()
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    batch = P("dp") if batch_first else P(None, "dp")

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, params, (x,)).square().mean()

    params = dict(layer.named_parameters())
    part = fs.partition(loss, mesh=MESH, in_specs=(P(), batch), out_specs=P())
    with fs.comm_log() as log:
        actual = torch.autograd.grad(part(params, x), list(params.values()))
    expected = torch.autograd.grad(loss(params, x), list(params.values()))
    torch.testing.assert_close(actual, expected)
    assert set(log.counts) == {("all_reduce", "dp")}
    assert (log.forward.counts.total(), log.backward.counts.total()) == (1, 1)


class Attention(nn.Module):
    """Attention of 4 heads by two products of batches of matrices, and biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map a `(batch, length, width)` tensor to one of the same shape."""
        q, k, v = (
            layer(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = (q @ k.mT).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


COLUMNS = {
    f"{name}.{kind}": P("tp") for name in ("query", "key", "value") for kind in ("weight", "bias")
}
MEGATRON = COLUMNS | {"out.weight": P(None, "tp"), "out.bias": P()}


@pytest.mark.parametrize(
    ("params", "x_spec", "collectives"),
    [
        (MEGATRON, P("dp"), {fs.AllReduce}),
        ({}, P(None, ("dp", "tp")), {fs.AllGather, fs.ReduceScatter, fs.AllReduce}),
    ],
    ids=["tensor parallel", "sequence parallel"],
)
def test_gradients_within_attention_have_the_collectives_of_megatron(
    params: dict[str, fs.PartitionSpec], x_spec: fs.PartitionSpec, collectives: set[type]
) -> None:
    torch.manual_seed(0)
    net = Attention(32).double()
    weights = dict(net.named_parameters())
    x = torch.randn(4, 8, 32, dtype=torch.float64)

    def step(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
        y = torch.func.functional_call(net, p, (x,))
        return y, *torch.autograd.grad(y.square().sum(), [*p.values()])

    specs = {name: params.get(name, P()) for name in weights}
    part = fs.partition(
        step, mesh=Mesh(dp=2, tp=2), in_specs=(specs, x_spec), out_specs=(x_spec, *specs.values())
    )
    torch.testing.assert_close(part(weights, x), step(weights, x))
    # Heads stay sharded, though products of batches have one dim for batch and heads; so does the
    # length, though gradients of weights are sums over one dim for batch and length.
    programs = part.trace(weights, x).programs
    steps = {type(step) for program in programs for step in program.steps if not program.is_local}
    assert steps - {fs.AllSlice} == collectives


Step = Callable[[Tensor, Tensor, int], Tensor]


def merged(x: Tensor, w: Tensor, choice: int) -> Tensor:
    dim = choice % max(1, x.ndim - 1)
    return x.flatten(dim, dim + 1) if x.ndim > 1 else x


def split(x: Tensor, w: Tensor, choice: int) -> Tensor:
    dim = choice % x.ndim
    factors = [n for n in (2, 3) if x.shape[dim] % n == 0]
    return x.unflatten(dim, (factors[choice % len(factors)], -1)) if factors and x.ndim < 5 else x


def transposed(x: Tensor, w: Tensor, choice: int) -> Tensor:
    return x.transpose(choice % x.ndim, choice // 4 % x.ndim)


def multiplied(x: Tensor, w: Tensor, choice: int) -> Tensor:
    matrix = w[: 3 * x.shape[-1]].view(x.shape[-1], 3)
    if choice % 4 == 0 and x.ndim > 1:  # both operands merge the dims over which it sums
        tensor = w[: 3 * x.shape[-2] * x.shape[-1]].view(x.shape[-2], x.shape[-1], 3)
        return x.flatten(-2).sin() @ tensor.cos().flatten(0, 1)
    if choice % 4 == 1 and x.ndim > 1:
        return x @ x.mT
    return x @ matrix if choice % 4 == 2 else F.linear(x, matrix.T, matrix[0])


def combined(x: Tensor, w: Tensor, choice: int) -> Tensor:
    if choice % 4 == 0:
        return x.softmax(choice % x.ndim)
    return [x.sin() * x, x + x[..., :1], torch.where(x > 0, x, 0.5)][choice % 4 - 1]


def summed(x: Tensor, w: Tensor, choice: int) -> Tensor:
    return x.sum(choice % x.ndim, keepdim=choice % 2 == 0 or x.ndim == 1)


STEPS = [merged, split, split, transposed, multiplied, multiplied, combined, combined, summed]
steps = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 11)), min_size=2, max_size=8)


@settings(max_examples=60, deadline=None)
@example([(split, 0), (multiplied, 4), (combined, 3), (multiplied, 2)], False)
@given(steps, st.booleans())
def test_separated_graphs_compute_the_same(steps: list[tuple[Step, int]], above: bool) -> None:
    x = torch.linspace(-2, 2, 24, dtype=torch.float64).view(2, 3, 4).requires_grad_()
    w = torch.linspace(-1, 1, 3 * 24, dtype=torch.float64).requires_grad_()

    def run(x: Tensor, w: Tensor) -> list[Tensor]:
        y = x
        for step, choice in steps:
            y = step(y, w, choice)
        y = y + w[0]
        if above:
            return [y]
        return [y, *torch.autograd.grad(y.cos().sum(), (x, w), create_graph=True)]

    graph = trace(
        run, [Meta.of(x), Meta.of(w)], "fn", above=above, requires_grad=[True, True]
    ).graph
    results, expected = graph(x, w), run(x, w)
    torch.testing.assert_close(results, expected)
    actual, right = (torch.autograd.grad(out[0].cos().sum(), (x, w)) for out in (results, expected))
    torch.testing.assert_close(actual, right)
