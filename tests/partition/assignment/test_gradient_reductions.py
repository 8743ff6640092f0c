"""Redistributions of a partitioned function whose transposes send least: hybrid layouts."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import astuple
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from fshard.partition.assignment.gradient_reductions import FlowNetwork
from fshard.partition.ir import Redistribution
from tests.helpers.ops.block_cases import BYTES

CUBE = Mesh(a=2, b=2, c=2)
AXES = [axes for n in range(4) for axes in itertools.permutations(CUBE.axes, n)]


def product(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x @ w


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_gradients_of_hybrid_weights_are_redistributed_as_if_planned_alone(axes: Any) -> None:
    """The gradient is scattered over the axes of the weight before it is reduced over the rest."""
    w = torch.empty(512, 1024, device="meta", requires_grad=True)
    x = torch.empty(2**15, 512, device="meta")
    part = fs.partition(product, mesh=CUBE, in_specs=(P(axes), P(CUBE.axes)))
    call = part.trace(w, x)
    spec = fs.Spec(CUBE, P(axes), shape=(512, 1024))
    used = spec.replace(partition=P(reduced=set(CUBE.axes)))
    assert [line.program.dst for line in call.lines if isinstance(line, Redistribution)] == [used]
    for cost, prog in (
        (call.cost(), fs.redistribute(spec, used)),
        (call.cost(backward=True), fs.redistribute(used.dual, spec.dual)),
    ):
        assert astuple(cost) == pytest.approx(astuple(prog.cost()))


def test_gradient_of_a_hybrid_weight_is_that_of_one_device() -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(256, 4, dtype=torch.float64)
    part = fs.partition(product, mesh=CUBE, in_specs=(P("b"), P(CUBE.axes)), topology=BYTES)
    assert "← reduce_scatter(b, dim 0)" in str(part.explain(w, x))
    grads = [torch.autograd.grad(f(w, x).sin().sum(), w) for f in (part, product)]
    torch.testing.assert_close(*grads)


# -- casts of what is computed ------------------------------------------------------------------


def batch_norm(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    mean, var = torch.zeros(8, dtype=x.dtype), torch.ones(8, dtype=x.dtype)
    return torch.nn.functional.batch_norm(x, mean, var, w, b, training=True)


def scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Use three functions of one sum for different work, and return one of them too."""
    total = x.square().sum(0)
    root, inverse = total.sqrt(), 1 / (1 + total)
    with torch.no_grad():
        count = total.log()
    return (x * root + inverse).tanh() * count, inverse


@pytest.mark.parametrize(
    ("fn", "shapes"), [(batch_norm, [(8,), (8,), (64, 8, 64, 64)]), (scaled, [(16, 8)])]
)
def test_gradients_of_a_sum_are_reduced_before_its_functions_are_differentiated(
    fn: Any, shapes: list[tuple[int, ...]]
) -> None:
    """A sum over ranks has one gradient to reduce, however many functions of it are used."""
    torch.manual_seed(0)
    mesh, inputs = Mesh(x=2), [torch.randn(s, dtype=torch.float64) for s in shapes]
    leaves = [x.requires_grad_() for x in inputs]
    specs = (*(P() for _ in shapes[1:]), P("x"))
    part = fs.partition(fn, mesh=mesh, in_specs=specs)
    call = part.trace(*leaves)
    assert call.cost(backward=True).launches == 1
    assert call.cost().launches == 1
    losses = []
    for run in (part, fn):
        outs = run(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        losses.append(sum(out.sin().sum() for out in outs))
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss in losses))


def test_results_of_a_reduced_operation_are_cast_back_where_they_are_results() -> None:
    def determinant(x: Any, w: Any) -> Any:
        sign, logarithm = torch.linalg.slogdet(w.mT @ w + torch.eye(4))
        return logarithm, x * sign + x

    x, w = torch.ones(8, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    part = fs.partition(determinant, mesh=fs.Mesh(x=2), in_specs=P(None, "x"))
    grads = [torch.autograd.grad(fn(x, w.requires_grad_())[0], w) for fn in (part, determinant)]
    torch.testing.assert_close(*grads)


def test_network_has_the_minimum_cut_nearest_to_the_source() -> None:
    generator = random.Random(0)
    for _ in range(60):
        edges = {
            (a, b): generator.choice([1.0, 2.0, 3.0])
            for a, b in itertools.permutations(["invariant", 0, 1, 2, 3, "reduced"], 2)
            if generator.random() < 0.4 and a != "reduced" and b != "invariant"
        }
        network = FlowNetwork()
        for (a, b), capacity in edges.items():
            network.add(a, b, capacity)
        side = network.sink_side() | {"reduced"}

        def cut(sink: set[Any], edges: dict[Any, float] = edges) -> float:
            return sum(c for (a, b), c in edges.items() if a not in sink and b in sink)

        sides = [{"reduced", *s} for n in range(5) for s in itertools.combinations(range(4), n)]
        assert cut(side) == min(map(cut, sides))


def test_norms_of_a_list_are_reduced_in_one_launch() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(s, dtype=torch.float64) for s in ((8, 4), (8,), (4, 8), (2,))]
    for order, launches in ((2.0, 1), (1.0, 4), (math.inf, 4)):
        norms = functools.partial(torch.ops.aten._foreach_norm.Scalar, ord=order)
        part = fs.partition(norms, mesh=Mesh(x=2), in_specs=(P("x"),), out_specs=P())
        assert part.trace(grads).cost().launches <= launches
        torch.testing.assert_close(part(grads), norms(grads))
    total = fs.partition(
        lambda xs: torch.nn.utils.get_total_norm(xs, foreach=True), mesh=Mesh(x=2),
        in_specs=(P("x"),))  # fmt: skip
    assert total.trace(grads).cost().launches == 1
    torch.testing.assert_close(total(grads), torch.nn.utils.get_total_norm(grads))


# -- held parameters ----------------------------------------------------------------------------


def layers(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Run layers of a gated perceptron with normalization and residuals."""
    for up, down in zip(params[::2], params[1::2], strict=True):
        hidden = torch.nn.functional.rms_norm(x, (x.shape[-1],))
        x = x + torch.nn.functional.silu(hidden @ up) @ down
    return x


def test_held_parameters_stay_sharded_where_they_are_used() -> None:
    """More activations than parameters: gathering the weights would send less."""
    mesh, count = Mesh(dp=2, tp=2), 3
    params = [
        torch.empty(shape, device="meta", requires_grad=True)
        for _ in range(count) for shape in ((1024, 4096), (4096, 1024))
    ]  # fmt: skip
    specs = [P(None, "tp"), P("tp")] * count
    x = torch.empty(2**16, 1024, device="meta")
    gathered = []
    for hold in ((), "tp"):
        part = fs.partition(layers, mesh=mesh, params=specs, in_specs=(P("dp"),), hold=hold)
        call = part.trace(params, x)
        assert ("gathered: matmul" in str(call)) is not bool(hold)
        inputs = set(call._inputs[: len(params)])
        moves = [line for line in call.lines if isinstance(line, Redistribution)]
        sent = [move for move in moves if not move.program.is_local]
        gathered.append([move for move in sent if move.source.value in inputs])
    assert gathered[0]
    assert not gathered[1]


def test_held_axes_must_be_axes_of_the_mesh_with_params() -> None:
    with pytest.raises(fs.ShardingError, match="the held tensors must be those of params"):
        fs.partition(layers, mesh=CUBE, hold="a")
    with pytest.raises(fs.ShardingError, match="hold"):
        fs.partition(layers, mesh=CUBE, params=P(), hold=("a", "tp"))
