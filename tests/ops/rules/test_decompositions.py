"""Decompositions: the same results on global tensors, small messages over sharded dims."""

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
from fshard.program.cost.links import Link
from fshard.program.cost.topology import Topology
from tests.helpers.ops.normalization_samples import (
    BATCHES,
    GROUPS,
    LAYERS,
    OTHERS,
    WITH_RUNNING,
)
from tests.helpers.ops.op_checks import difference
from tests.helpers.ops.reduction_samples import NORMS, REDUCTIONS
from tests.helpers.ops.samples import Sample, normal
from tests.helpers.ops.scan_samples import SCANS

SAMPLES: dict[str, Sample] = {
    name: make
    for samples in (LAYERS, GROUPS, BATCHES, WITH_RUNNING, OTHERS, REDUCTIONS, NORMS, SCANS)
    for name, make in samples.items()
    if decomposition_of(functional_of(make()[0])) is not None
}


def run(op: Any, args: Sequence[Any], grad: bool) -> tuple[list[Any], list[torch.Tensor | None]]:
    """Return the results of a call and the gradients of a weighted sum of them."""
    leaves: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not (grad and value.dtype.is_floating_point):
            return value
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[-1]

    results = flat(op(*map(leaf, args)))
    total = torch.zeros((), dtype=torch.float64)
    for i, x in enumerate(results):
        if x is not None and x.requires_grad:
            generator = torch.Generator().manual_seed(i)
            total = total + (x * torch.rand(x.shape, generator=generator)).sum()
    if not total.requires_grad:
        return results, [None] * len(leaves)
    return results, list(torch.autograd.grad(total, leaves, allow_unused=True))


@pytest.mark.parametrize("name", SAMPLES)
def test_decompositions_are_right(name: str) -> None:
    op, *args = SAMPLES[name]()
    op = functional_of(op)
    decomposition = decomposition_of(op)
    assert decomposition is not None
    # Without gradients: gradient kernels, NaN, running statistics.
    skips_gradients = "backward" in op._schema.name or "nan" in name or name in WITH_RUNNING
    grad = not skips_gradients
    results, grads = run(decomposition, args, grad)
    expected, right = run(op, args, grad)
    assert len(results) == len(expected)
    for actual, leaves in zip((*results, *grads), (*expected, *right), strict=True):
        if actual is None or leaves is None:
            assert not any(x is not None and x.any() for x in (actual, leaves))
        else:
            # The variance of a batch is a difference of squares.
            roundings = 1024 if name.startswith("batch_norm") else 64
            assert difference(actual.detach(), leaves.detach(), roundings) == ""


# -- over sharded dims ---------------------------------------------------------------------

N = 1 << 12
# Slow links and cheap launches, so that small tensors suffice to make decompositions pay off.
SLOW = Topology(inner=Link(latency=1e-7, bandwidth=1e8), launch=1e-7)
ROWS, COLUMNS, LAST = 3, P(None, "x"), P("x")
Case = tuple[
    Callable[..., torch.Tensor], tuple[tuple[int, ...], ...], tuple[PartitionSpec, ...], int
]
CASES: dict[str, Case] = {
    "amax": (lambda x: x.amax(1), ((ROWS, N),), (COLUMNS,), 3),
    "amin of ties": (lambda x: x.round().amin(1), ((ROWS, N),), (COLUMNS,), 3),
    "max": (lambda x: x.max(), ((ROWS, N),), (COLUMNS,), 3),
    "max.dim": (lambda x: x.max(1)[0], ((ROWS, N),), (COLUMNS,), 3),
    "argmax": (lambda x: x.argmax(1) + 0 * x.sum(), ((ROWS, N),), (COLUMNS,), 3),
    "var": (lambda x: x.var(1), ((ROWS, N),), (COLUMNS,), 2),
    "std": (lambda x: x.std(), ((ROWS, N),), (COLUMNS,), 2),
    "norm": (lambda x: x.norm(), ((ROWS, N),), (COLUMNS,), 1),
    "norm 3": (lambda x: torch.linalg.vector_norm(x, 3, 1), ((ROWS, N),), (COLUMNS,), 1),
    "norm inf": (lambda x: torch.linalg.vector_norm(x, math.inf, 1), ((ROWS, N),), (COLUMNS,), 3),
    "logsumexp": (lambda x: x.logsumexp(1), ((ROWS, N),), (COLUMNS,), 2),
    "softmax": (lambda x: x.softmax(1), ((ROWS, N),), (COLUMNS,), 2),
    "log_softmax": (lambda x: x.log_softmax(1), ((ROWS, N),), (COLUMNS,), 2),
    "softmax of uneven parts": (lambda x: x.softmax(1), ((ROWS, N + 1),), (COLUMNS,), 2),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, [N], w, b), ((ROWS, N), (N,), (N,)),
                   (COLUMNS, LAST, LAST), 2),
    "rms_norm": (lambda x, w: F.rms_norm(x, [N], w), ((ROWS, N), (N,)), (COLUMNS, LAST), 1),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), ((1, 6, N), (6,)),
                   (P(None, None, "x"), P()), 2),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((N, 3), (3,), (3,)),
                   (LAST, P(), P()), 2),
    "cosine": (lambda x, y: F.cosine_similarity(x, y, 1), ((ROWS, N), (ROWS, N)),
               (COLUMNS, COLUMNS), 3),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0), ((ROWS, N),), (COLUMNS,), 1),
    "normalize": (lambda x: F.normalize(x, dim=1), ((ROWS, N),), (COLUMNS,), 1),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), ((ROWS, N), (ROWS, 1)),
                    (COLUMNS, P()), 1),
}  # fmt: skip


def sent(call: PartitionedCall) -> Counter[str]:
    """Count the collectives of a call by kind."""
    return Counter(
        type(step).__name__
        for line in call.lines if isinstance(line, Redistribution)
        for step, wire in zip(line.program.steps, line.program.step_bytes, strict=True) if wire
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_decompositions_over_sharded_dims_send_reductions_only(name: str) -> None:
    """Values and gradients equal one device's; only all-reduces send."""
    fn, shapes, layouts, max_collectives = CASES[name]
    mesh = Mesh(x=4)
    args = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    specs = tuple(
        fs.Spec(mesh, p, shape=x.shape, dtype=x.dtype, uneven="chunk")
        for p, x in zip(layouts, args, strict=True)
    )
    partitioned = fs.partition(fn, mesh=mesh, in_specs=specs, topology=SLOW)
    collectives = sent(partitioned.trace(*args))
    assert set(collectives) == {"AllReduce"}
    assert collectives.total() <= max_collectives
    result, expected = partitioned(*args), fn(*args)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-11)
    grads = torch.autograd.grad(result.sin().sum(), args)
    for actual, leaves in zip(grads, torch.autograd.grad(expected.sin().sum(), args), strict=True):
        torch.testing.assert_close(actual, leaves, rtol=1e-9, atol=1e-11)


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("size", "k"), [(7, 1), (8, 0), (13, 3), (101, 2), (4096, 3)])
def test_topk_over_a_sharded_dim_ends(size: int, k: int) -> None:
    """A dim of prime size is a single block."""
    x = normal(2, size)
    pair = fs.shard(x, fs.Spec(Mesh(x=3), COLUMNS, shape=(2, size), dtype=x.dtype, uneven="chunk"))
    values, indices = fs.apply(torch.topk, pair, k, mode="auto")
    expected = torch.topk(x, k)
    assert torch.equal(fs.unshard(values), expected.values)
    assert torch.equal(fs.unshard(indices), expected.indices)


LIBRARY = torch.library.Library("fshard_endless", "DEF")
for _name in ("first", "second"):
    LIBRARY.define(f"{_name}(Tensor x, int n) -> Tensor")
    LIBRARY.impl(_name, lambda x, n: x.cumsum(-1) + n, "CompositeExplicitAutograd")


@pytest.mark.timeout(100)
def test_decompositions_that_never_end_run_by_their_rule() -> None:
    """Two operations decompose into each other with other arguments, on tensors of one size."""
    ops = torch.ops.fshard_endless
    for op, other in ((ops.first, ops.second), (ops.second, ops.first)):
        fs.register_rule(op)(fs.rule("is->is", unsharded="s"))
        fs.register_decomposition(op)(lambda x, n, other=other: other(x, n + 1) - 1)
    x = normal(2, 6)
    pair = fs.shard(x, fs.Spec(Mesh(x=3), COLUMNS, shape=(2, 6), dtype=x.dtype))
    result = fs.apply(ops.first, pair, 0, mode="auto")
    torch.testing.assert_close(fs.unshard(result), x.cumsum(-1))


def test_positions_are_global() -> None:
    mesh = Mesh(x=2)
    x = torch.zeros(2, 5)
    pair = fs.shard(x, fs.Spec(mesh, P(None, "x"), shape=(2, 5), sizes={1: (2, 3)}))
    indices = fs.apply(torch.ops.fshard.positions.default, pair, 1)
    assert fs.unshard(indices).tolist() == [[0, 1, 2, 3, 4]] * 2
