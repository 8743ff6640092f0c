"""Agreement with DTensor: results of `distribute_tensor` and `redistribute`, rank by rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute

import fshard as fs
from fshard import Mesh, P, Spec
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spec_grid import random_global, random_locals

MESHES = [Mesh(x=2), Mesh(x=2, y=2), Mesh(x=4), Mesh(x=3, y=1)]
SHAPES = [(4, 4), (12, 6), (5, 3), (7, 5), (1, 6), (3, 0), (2, 3, 4)]
Placements = tuple[Placement, ...]


@cache
def device_mesh(mesh: Mesh) -> Any:
    """Return DTensor's mesh of the same devices, once per process."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes)


def placements_of(mesh: Mesh, ndim: int, kind: str | None = "sum") -> list[Placements]:
    """Return all placements of a tensor in which partial axes have one kind."""
    options: list[Placement] = [Replicate(), *map(Shard, range(ndim))]
    if kind is not None:
        options.append(Partial(kind))
    return list(itertools.product(options, repeat=len(mesh.axes)))


def spec_of(mesh: Mesh, placements: Placements, shape: Sequence[int]) -> Spec:
    return Spec.from_placements(mesh, placements, shape, torch.float64)


def here(mesh: Mesh) -> int:
    return list(mesh.ranks).index(dist.get_rank())


def assert_same(own: torch.Tensor, other_value: torch.Tensor, *what: object) -> None:
    assert own.shape == other_value.shape, (*what, tuple(own.shape), tuple(other_value.shape))
    torch.testing.assert_close(own, other_value, msg=lambda text: f"{what}\n{text}")


# -- distribute ----------------------------------------------------------------------------


def distribute_all(mesh: Mesh) -> int:
    fs.init(mesh)
    count = 0
    for shape in SHAPES:
        x = random_global(shape, torch.float64)
        for placements in placements_of(mesh, len(shape), kind=None):
            spec = spec_of(mesh, placements, shape)
            assert spec.placements == placements
            other_value = distribute(x, device_mesh(mesh), placements, src_data_rank=None)
            local, _ = fs.shard(x, spec)
            assert_same(local, other_value.to_local(), spec, placements)
            assert torch.equal(fs.unshard((local, spec)), x)
            count += 1
    return count


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_shards_equal_distribute_tensor(mesh: Mesh) -> None:
    axes = len(mesh.axes)
    assert set(run_ranks(mesh.size, distribute_all, mesh)) == {6 * 3**axes + 4**axes}


# -- redistribute --------------------------------------------------------------------------


def transitions(mesh: Mesh, kind: str, count: int) -> list[tuple[tuple[int, ...], Placements, Any]]:
    """Return the pairs of placements that DTensor supports: partial only as a source."""
    results = []
    for shape in SHAPES:
        for a, b in itertools.product(placements_of(mesh, len(shape), kind), repeat=2):
            saved = all(p == q for p, q in zip(a, b, strict=True) if isinstance(q, Partial))
            if saved and (kind == "sum" or any(isinstance(p, Partial) for p in a)):
                results.append((shape, a, b))
    return random.Random(0).sample(results, min(count, len(results)))


def redistribute_all(mesh: Mesh, kind: str, count: int) -> int:
    fs.init(mesh)
    pairs = transitions(mesh, kind, count)
    for i, (shape, a, b) in enumerate(pairs):
        src, dst = spec_of(mesh, a, shape), spec_of(mesh, b, shape)
        local = random_locals(src, i)[here(mesh)]
        stride = torch.empty(shape).stride()
        value = DTensor.from_local(
            local.clone(), device_mesh(mesh), a, shape=torch.Size(shape), stride=stride
        )
        other_value = value.redistribute(placements=b).to_local()
        own = fs.redistribute(src, dst)(local)
        assert_same(own, other_value, src, dst, a, b)
    return len(pairs)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["sum", "avg", "max"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_redistributed_shards_equal_dtensor(mesh: Mesh, kind: str) -> None:
    counts = run_ranks(mesh.size, redistribute_all, mesh, kind, 150 if kind == "sum" else 60)
    # One axis and one reduction have 29 transitions.
    assert min(counts) >= 29


def reorder_all(mesh: Mesh) -> int:
    fs.init(mesh)
    partitions = [
        P(("x", "y")), P(("y", "x")), P(None, ("y", "x")), P(None, ("x", "y")), P("y", "x"), P("x"),
        P("y"), P(),
    ]  # fmt: skip
    pairs = list(itertools.permutations(partitions, 2))
    for i, (p, q) in enumerate(pairs):
        src = Spec(mesh, p, shape=(12, 12), dtype=torch.float64)
        dst = src.replace(partition=q)
        local = random_locals(src, i)[here(mesh)]
        value = DTensor.from_local(
            local.clone(), device_mesh(mesh), src.placements,
            shape=torch.Size((12, 12)), stride=(12, 1),
        )  # fmt: skip
        other_value = value.redistribute(placements=dst.placements).to_local()
        assert_same(fs.redistribute(src, dst)(local), other_value, src, dst)
    return len(pairs)


@pytest.mark.parametrize("mesh", [MESHES[1], MESHES[3]], ids=str)
def test_shard_orders_equal_dtensor(mesh: Mesh) -> None:
    """Axes in another order than the mesh's are DTensor's `_StridedShard`."""
    assert set(run_ranks(mesh.size, reorder_all, mesh)) == {56}


# -- gradients -----------------------------------------------------------------------------


def differentiate_all(mesh: Mesh, count: int) -> int:
    """Compare gradients from sums to targets without sums, where DTensor's are right."""
    fs.init(mesh)
    pairs = [
        item
        for item in transitions(mesh, "sum", 4 * count)
        if not any(isinstance(q, Partial) for q in item[2])
    ][:count]
    for i, (shape, a, b) in enumerate(pairs):
        src, dst = spec_of(mesh, a, shape), spec_of(mesh, b, shape)
        local = random_locals(src, i)[here(mesh)]
        cotangent = random_locals(dst.dual, i + 1)[here(mesh)]
        own, other_value = (local.clone().requires_grad_() for _ in range(2))
        stride = torch.empty(shape).stride()
        value = DTensor.from_local(
            other_value, device_mesh(mesh), a, shape=torch.Size(shape), stride=stride
        )
        value.redistribute(placements=b).to_local().backward(cotangent)
        fs.redistribute(src, dst)(own).backward(cotangent)
        assert own.grad is not None
        assert other_value.grad is not None
        assert_same(own.grad, other_value.grad, src, dst, a, b)
    return len(pairs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_equal_dtensor(mesh: Mesh) -> None:
    assert min(run_ranks(mesh.size, differentiate_all, mesh, 60)) >= 30


def average_gradient() -> tuple[float, float]:
    mesh = Mesh(x=2)
    fs.init(mesh)
    src = spec_of(mesh, (Partial("avg"),), (1,))
    local, other_value = (torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    fs.redistribute(src, spec_of(mesh, (Replicate(),), (1,)))(local).sum().backward()
    value = DTensor.from_local(other_value, device_mesh(mesh), (Partial("avg"),))
    value.redistribute(placements=(Replicate(),)).to_local().sum().backward()
    assert local.grad is not None
    assert other_value.grad is not None
    return local.grad.item(), other_value.grad.item()


def test_gradient_of_an_average_that_dtensor_gets_wrong() -> None:
    """The mean of two values has the derivative 1/2 by each of them."""
    for local, other_value in run_ranks(2, average_gradient):
        assert local == 0.5
        assert other_value == 1.0, "DTensor's has changed: include averages in the test above"
