"""Factories equal PyTorch's on one device, bit for bit, on every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from tests.helpers.tensor_memory import LargestTensor

MESHES = (fs.Mesh(x=1, y=1), fs.Mesh(x=2, y=3), fs.Mesh(x=8), fs.Mesh(x=5))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def layouts(mesh: fs.Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[fs.Spec]:
    """Yield the specs of a shape: axes on any dim or none, uneven, and unreduced along the first.

    The sum over ranks of booleans is not one of them.
    """
    for choice in itertools.product(range(-1, len(shape)), repeat=len(mesh.axes)):
        dims = [
            tuple(axis for axis, dim in zip(mesh.axes, choice, strict=True) if dim == d)
            for d in range(len(shape))
        ]
        yield fs.Spec(mesh, P(*dims), shape=shape, dtype=dtype, uneven="chunk")
        if choice[0] == -1 and dtype != torch.bool:
            p = P(*dims, unreduced={mesh.axes[0]})
            yield fs.Spec(mesh, p, shape=shape, dtype=dtype, uneven="chunk")


FACTORIES: dict[str, tuple[Callable[[fs.Spec], fs.Sharded], Callable[[fs.Spec], torch.Tensor]]] = {
    "zeros": (fs.zeros, lambda s: torch.zeros(s.shape, dtype=s.dtype)),
    "ones": (fs.ones, lambda s: torch.ones(s.shape, dtype=s.dtype)),
    "full": (lambda s: fs.full(s, 3), lambda s: torch.full(s.shape, 3, dtype=s.dtype)),
    "eye": (fs.eye, lambda s: torch.eye(*s.shape, dtype=s.dtype)),
    "tril": (
        lambda s: fs.tril(s, 1),
        lambda s: torch.ones(s.shape, dtype=s.dtype).tril(1),
    ),
    "triu": (
        lambda s: fs.triu(s, -2),
        lambda s: torch.ones(s.shape, dtype=s.dtype).triu(-2),
    ),
    "zeros_like": (
        lambda s: fs.zeros_like(fs.ones(s)),
        lambda s: torch.zeros(s.shape, dtype=s.dtype),
    ),
}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_values_equal_one_device_on_every_layout(name: str, mesh: fs.Mesh) -> None:
    create, on_one_device = FACTORIES[name]
    for dtype in DTYPES:
        for spec in layouts(mesh, (6, 7), dtype):
            pair = create(spec)
            assert pair.spec == spec
            assert torch.equal(fs.unshard(pair), on_one_device(spec)), spec


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    ("start", "step"), [(0, 1), (5, -3), (2**53, 1), (0.1, 0.3), (-1e6, 1e-3)], ids=str
)
def test_arange_rounds_once_on_every_layout(mesh: fs.Mesh, start: float, step: float) -> None:
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.float64):
        exact = torch.tensor([start + i * step for i in range(11)], dtype=torch.float64)
        if isinstance(start, int):
            exact = torch.tensor([start + i * step for i in range(11)])
        for spec in layouts(mesh, (11,), dtype):
            assert torch.equal(fs.unshard(fs.arange(spec, start, step)), exact.to(dtype)), spec


@pytest.mark.parametrize("name", FACTORIES)
def test_no_tensor_is_larger_than_a_shard(name: str) -> None:
    spec = fs.Spec(fs.Mesh(x=4, y=2), P("x", "y"), shape=(64, 32))
    with LargestTensor() as largest:
        FACTORIES[name][0](spec)
    assert largest.numel == 64 * 32 // 8


def test_a_rank_creates_its_shard_alone() -> None:
    spec = fs.Spec(fs.Mesh(x=2), P("x"), shape=(5,), dtype=torch.int64, uneven="chunk")
    locals_ = fs.simulate(spec.mesh, lambda: fs.arange(spec).local)
    assert [x.tolist() for x in locals_] == [[0, 1, 2], [3, 4]]


def test_types_of_created_tensors_are_those_of_the_spec() -> None:
    mesh = fs.Mesh(x=2)

    @fs.shard_map(mesh=mesh, in_specs=(), out_specs=(P("x"), P()))
    def body() -> tuple[torch.Tensor, torch.Tensor]:
        sharded = fs.arange(fs.Spec(mesh, P("x"), shape=(4,))).local
        assert str(fs.typeof(sharded)) == "f32[2]{varying: x}"
        return sharded, fs.ones(fs.Spec(mesh, P(), shape=(2,))).local

    sharded, invariant = body()
    assert sharded.tolist() == [0, 1, 2, 3]
    assert invariant.tolist() == [1, 1]


def test_locals_are_leaves_with_a_gradient() -> None:
    pair = fs.zeros(fs.Spec(fs.Mesh(x=2), P("x"), shape=(4,)), requires_grad=True)
    (fs.unshard(pair) * torch.arange(4.0)).sum().backward()
    assert [x.grad.tolist() for x in pair.local if x.grad is not None] == [[0, 1], [2, 3]]
    replicas = fs.ones(fs.Spec(fs.Mesh(x=2), P(), shape=(2,))).local
    replicas[0].add_(1)
    assert replicas[1].tolist() == [1, 1]


def test_like_functions_follow_dtype_layout_and_device() -> None:
    x = fs.empty(fs.Spec(fs.Mesh(x=2), P("x"), shape=(4,)), device="meta")
    assert {local.device.type for local in fs.ones_like(x).local} == {"meta"}
    y = fs.full_like(fs.zeros(x.spec), 2, dtype=torch.int32)
    assert str(y.spec) == "i32[4@x]"
    assert fs.unshard(y).tolist() == [2, 2, 2, 2]
    assert fs.empty_like(y).spec == y.spec


SPEC = fs.Spec(fs.Mesh(x=2), P("x"), shape=(4,))
BAD_CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "not a spec": (lambda: fs.zeros((4,)), "the layout must be a fs.Spec"),  # type: ignore[arg-type]
    "tensor value": (lambda: fs.full(SPEC, torch.ones(())), "fill_value must be a number"),  # type: ignore[arg-type]
    "gradient of ints": (
        lambda: fs.ones(SPEC.replace(dtype=torch.int64), requires_grad=True),
        "must be of a floating or complex dtype",
    ),
    "infinite step": (lambda: fs.arange(SPEC, 0, float("inf")), "step must be a finite number"),
    "matrix arange": (
        lambda: fs.arange(fs.Spec(SPEC.mesh, P("x"), shape=(4, 4))),
        "the spec must have one dim",
    ),
    "vector eye": (lambda: fs.eye(SPEC), "at least two dims"),
    "float diagonal": (
        lambda: fs.tril(fs.Spec(SPEC.mesh, P("x"), shape=(4, 4)), 0.5),  # type: ignore[arg-type]
        "diagonal must be an int",
    ),
    "not a pair": (lambda: fs.zeros_like(torch.ones(4)), r"fs\.zeros\(spec\) of a Spec"),  # type: ignore[arg-type]
    "in a trace": (
        lambda: fs.partition(lambda x: x + fs.zeros(SPEC).local, mesh=SPEC.mesh, in_specs=P("x"))(
            torch.ones(4)
        ),
        r"torch\.zeros of the global shape",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments_are_refused_by_name(case: str) -> None:
    call, message = BAD_CALLS[case]
    with pytest.raises(fs.ShardingError, match=message):
        call()
