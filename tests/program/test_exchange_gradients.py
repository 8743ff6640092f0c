"""Gradients of exchanges that reduce maxima and products."""

from __future__ import annotations

import itertools

import pytest
import torch

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import Spec
from fshard.program.exchange_boxes import (
    converted_axes,
    reduction_axes,
)
from fshard.program.infer import infer
from fshard.program.program import Program
from fshard.program.steps import (
    AllReduce,
    CollectivePermute,
    Exchange,
    ReduceScatter,
    Remesh,
    Step,
)
from tests.helpers import spec_grid
from tests.helpers.spec_grid import exchange, may_exchange

ELSEWHERE = Mesh({"a": 3}, devices=range(1, 4))


def gradients(prog: Program, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run a program in a simulation; return outputs, and gradients for random cotangents."""
    xs = [x.requires_grad_() for x in spec_grid.random_locals(prog.src, seed)]
    ys = prog(tuple(xs))
    cotangents = spec_grid.random_locals(as_sums(prog.dst).dual, seed=1)
    return list(ys), list(torch.autograd.grad(ys, xs, cotangents))


def as_sums(spec: Spec) -> Spec:
    p = spec.partition
    sums = P(*p.partitions, unreduced=set(p.unreduced), reduced=p.reduced)
    return spec.replace(partition=sums)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("other", [Mesh(x=2, y=2), ELSEWHERE], ids=str)
def test_max_exchange_has_the_gradient_of_an_all_reduce(kind: str, other: Mesh) -> None:
    mesh, shape = Mesh(x=2, y=2), (12,)
    before = spec_grid.all_specs(mesh, shape, ("unreduced",), kind=kind, dtype=torch.float64)
    after = spec_grid.all_specs(other, shape, kind=kind, dtype=torch.float64)
    pairs = [pair for pair in itertools.product(before, after) if may_exchange(*pair)]
    for src, dst in pairs:
        axes = reduction_axes(src, dst)
        # A tensor embedded in neutral elements has no gradient.
        if not axes or any(axis in dst.partition.unreduced for axis in converted_axes(src, dst)):
            continue
        apart = Program(src, (AllReduce(axes), exchange(infer(AllReduce(axes), src), dst)))
        at_once = Program(src, (exchange(src, dst),))
        assert apart.dst == at_once.dst == dst
        for one, two in zip(gradients(apart), gradients(at_once), strict=True):
            assert all(map(torch.equal, one, two))


CANDIDATES = [
    (CollectivePermute(P("y", unreduced={"x": "max"})), AllReduce("x")),
    (Exchange(P(unreduced={"y": "max"})), AllReduce("y")),
    (Remesh(Mesh(a=2, b=2), P("a", unreduced={"b": "max"})), AllReduce("b")),
    (Remesh(Mesh(a=2, b=2), P("a", unreduced={"b": "max"})), ReduceScatter("b", 0)),
    (Exchange(P("y")),),
    (Exchange(P("a"), ((2, 1, 5),), ELSEWHERE),),
    (Exchange(P("y", unreduced={"x"})), AllReduce("x")),
]


@pytest.mark.parametrize("steps", CANDIDATES, ids=lambda steps: " ".join(map(str, steps)))
def test_max_gradient_is_that_of_one_device(steps: tuple[Step, ...]) -> None:
    """The gradient is the same if shards are exchanged before the maximum is taken, or with it."""
    src = parse("f64[8@x]{unreduced: y=max}", Mesh(x=2, y=2))
    prog = Program(src, steps)
    _, back = gradients(prog)
    wholes = torch.stack([spec_grid.random_global((8,), torch.float64, place) for place in (0, 1)])
    cotangent = spec_grid.global_of(prog.dst, spec_grid.random_locals(prog.dst, seed=1))
    (expected,) = torch.autograd.grad(wholes.requires_grad_().amax(0), wholes, cotangent)
    for rank, gradient in zip(src.mesh.ranks, back, strict=True):
        assert torch.equal(gradient, expected[src.mesh.index(rank, "y")][src.index(rank)])


def test_gradient_of_a_product_is_refused() -> None:
    src = parse("f32[8]{unreduced: x=product}", Mesh(x=2))
    with pytest.raises(ShardingError) as caught:
        Program(src, (Exchange(P("x")),))((torch.ones(8, requires_grad=True),) * 2)
    assert str(caught.value) == spec_grid.message(
        "running f32[8]{unreduced: x=product} -> f32[8@x]",
        "exchange(P('x')) on a tensor that requires grad",
        "a reduction with a gradient must be a sum, average, maximum or minimum",
        "detach() the local, or reduce by another reduction")  # fmt: skip


def test_second_derivative_of_a_maximum() -> None:
    src = parse("f64[4]{unreduced: x=max}", Mesh(x=2))
    prog = Program(src, (Exchange(P("x")),))
    xs = tuple(torch.tensor(v, dtype=torch.float64, requires_grad=True)
               for v in ([1.0, 5.0, 2.0, 7.0], [3.0, 4.0, 6.0, 0.0]))  # fmt: skip
    assert torch.autograd.gradcheck(lambda *xs: prog(xs), xs)
    assert torch.autograd.gradgradcheck(lambda *xs: prog(xs), xs)
