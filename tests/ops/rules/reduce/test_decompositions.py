"""Operations done by others: the same on whole tensors, and what is sent where dims stay cut."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fshard as fs
from fshard import Mesh, P, PartitionSpec
from fshard.ops.core.registry import decomposition_of, functional_of
from fshard.ops.strategy.local_call import flat
from fshard.partition.ir import Redistribution
from fshard.partition.partitioned_call import PartitionedCall
from fshard.program.cost.topology import Link, Topology
from tests.helpers.ops.op_checks import difference
from tests.ops.rules.nn import test_norms
from tests.ops.rules.reduce import test_reductions, test_scans

SAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    name: make
    for samples in (
        test_norms.LAYERS, test_norms.GROUPS, test_norms.BATCHES, test_norms.WITH_RUNNING,
        test_norms.OTHERS, test_reductions.OF_ONE, test_reductions.NORMS, test_scans.SAMPLES,
    )
    for name, make in samples.items()
    if decomposition_of(functional_of(make()[0])) is not None
}  # fmt: skip


def run(op: Any, args: Sequence[Any], grad: bool) -> tuple[list[Any], list[torch.Tensor | None]]:
    """What a call returns, and the gradients of a weighted sum of it."""
    leaves: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not (grad and value.dtype.is_floating_point):
            return value
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[-1]

    made = flat(op(*map(leaf, args)))
    total = torch.zeros((), dtype=torch.float64)
    for at, each in enumerate(made):
        if each is not None and each.requires_grad:
            generator = torch.Generator().manual_seed(at)
            total = total + (each * torch.rand(each.shape, generator=generator)).sum()
    if not total.requires_grad:
        return made, [None] * len(leaves)
    return made, list(torch.autograd.grad(total, leaves, allow_unused=True))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_same_is_computed(name: str) -> None:
    op, *args = SAMPLES[name]()
    op = functional_of(op)
    how = decomposition_of(op)
    assert how is not None
    # Not asked for: gradients of gradients' kernels and of NaN; running statistics have none.
    without = "backward" in op._schema.name or "nan" in name or name in test_norms.WITH_RUNNING
    grad = not without
    made, grads = run(how, args, grad)
    expected, right = run(op, args, grad)
    assert len(made) == len(expected)
    for one, other in zip((*made, *grads), (*expected, *right), strict=True):
        if one is None or other is None:
            assert not any(x is not None and x.any() for x in (one, other))
        else:
            assert difference(one.detach(), other.detach()) == ""


# -- over dims that stay cut ---------------------------------------------------------------

N = 1 << 12
# Numbers are slow to move and messages cheap, so that what is small need not be large here.
SLOW = Topology(inner=Link(latency=1e-7, bandwidth=1e8), launch=1e-7)
ROWS, CUT, LAST = 3, P(None, "x"), P("x")
Case = tuple[
    Callable[..., torch.Tensor], tuple[tuple[int, ...], ...], tuple[PartitionSpec, ...], int
]
CASES: dict[str, Case] = {
    "amax": (lambda x: x.amax(1), ((ROWS, N),), (CUT,), 3),
    "amin of ties": (lambda x: x.round().amin(1), ((ROWS, N),), (CUT,), 3),
    "max": (lambda x: x.max(), ((ROWS, N),), (CUT,), 3),
    "max.dim": (lambda x: x.max(1)[0], ((ROWS, N),), (CUT,), 3),
    "argmax": (lambda x: x.argmax(1) + 0 * x.sum(), ((ROWS, N),), (CUT,), 3),
    "var": (lambda x: x.var(1), ((ROWS, N),), (CUT,), 2),
    "std": (lambda x: x.std(), ((ROWS, N),), (CUT,), 2),
    "norm": (lambda x: x.norm(), ((ROWS, N),), (CUT,), 1),
    "norm 3": (lambda x: torch.linalg.vector_norm(x, 3, 1), ((ROWS, N),), (CUT,), 1),
    "norm inf": (lambda x: torch.linalg.vector_norm(x, math.inf, 1), ((ROWS, N),), (CUT,), 3),
    "logsumexp": (lambda x: x.logsumexp(1), ((ROWS, N),), (CUT,), 2),
    "softmax": (lambda x: x.softmax(1), ((ROWS, N),), (CUT,), 2),
    "log_softmax": (lambda x: x.log_softmax(1), ((ROWS, N),), (CUT,), 2),
    "softmax of uneven parts": (lambda x: x.softmax(1), ((ROWS, N + 1),), (CUT,), 2),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, [N], w, b), ((ROWS, N), (N,), (N,)),
                   (CUT, LAST, LAST), 2),
    "rms_norm": (lambda x, w: F.rms_norm(x, [N], w), ((ROWS, N), (N,)), (CUT, LAST), 1),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), ((1, 6, N), (6,)),
                   (P(None, None, "x"), P()), 2),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((N, 3), (3,), (3,)),
                   (LAST, P(), P()), 2),
    "cosine": (lambda x, y: F.cosine_similarity(x, y, 1), ((ROWS, N), (ROWS, N)), (CUT, CUT), 3),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0), ((ROWS, N),), (CUT,), 1),
    "normalize": (lambda x: F.normalize(x, dim=1), ((ROWS, N),), (CUT,), 1),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), ((ROWS, N), (ROWS, 1)),
                    (CUT, P()), 1),
}  # fmt: skip


def sent(made: PartitionedCall) -> Counter[str]:
    """The collectives of a call, by kind."""
    return Counter(
        type(step).__name__
        for line in made.lines if isinstance(line, Redistribution)
        for step, wire in zip(line.program.steps, line.program.step_bytes, strict=True) if wire
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_dim_stays_cut_and_only_numbers_are_summed(name: str) -> None:
    """Values and gradients are one device's; no part of an operand leaves its rank."""
    fn, shapes, layouts, most = CASES[name]
    mesh = Mesh(x=4)
    args = [
        test_reductions.rand(*shape, seed=at).requires_grad_() for at, shape in enumerate(shapes)
    ]
    specs = tuple(
        fs.Spec(mesh, p, shape=x.shape, dtype=x.dtype, uneven="chunk")
        for p, x in zip(layouts, args, strict=True)
    )
    part = fs.partition(fn, mesh=mesh, in_specs=specs, topology=SLOW)
    collectives = sent(part.trace(*args))
    assert set(collectives) == {"AllReduce"}
    assert collectives.total() <= most
    made, whole = part(*args), fn(*args)
    torch.testing.assert_close(made, whole, rtol=1e-10, atol=1e-11)
    grads = torch.autograd.grad(made.sin().sum(), args)
    for one, other in zip(grads, torch.autograd.grad(whole.sin().sum(), args), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_places_are_those_of_the_whole() -> None:
    mesh = Mesh(x=2)
    x = torch.zeros(2, 5)
    pair = fs.shard(x, fs.Spec(mesh, P(None, "x"), shape=(2, 5), sizes={1: (2, 3)}))
    made = fs.apply(torch.ops.fshard.positions.default, pair, 1)
    assert fs.unshard(made).tolist() == [[0, 1, 2, 3, 4]] * 2
