"""Initial values of parameters: equal on every layout, with the statistics of `torch.nn.init`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import init

import fshard as fs
from fshard import P
from tests.helpers.tensor_memory import LargestTensor

R, KEY = fs.random, fs.random.key(3)
MESHES = (fs.Mesh(x=1, y=1), fs.Mesh(x=2, y=3), fs.Mesh(x=8), fs.Mesh(x=5))
Draw = Callable[[torch.Tensor, Any], Any]
DRAWS: dict[str, tuple[Draw, Callable[[torch.Tensor], torch.Tensor]]] = {
    "trunc_normal": (R.trunc_normal, init.trunc_normal_),
    "trunc_normal of limits": (
        lambda key, to: R.trunc_normal(key, to, mean=0.5, std=2.0, a=-1.0, b=4.0),
        lambda x: init.trunc_normal_(x, mean=0.5, std=2.0, a=-1.0, b=4.0)),
    "trunc_normal of a tail": (
        lambda key, to: R.trunc_normal(key, to, std=0.5, a=1.0, b=2.0),
        lambda x: init.trunc_normal_(x, std=0.5, a=1.0, b=2.0)),
    "xavier_uniform": (
        lambda key, to: R.xavier_uniform(key, to, gain=1.5),
        lambda x: init.xavier_uniform_(x, gain=1.5)),
    "xavier_normal": (R.xavier_normal, init.xavier_normal_),
    "kaiming_uniform": (
        lambda key, to: R.kaiming_uniform(key, to, a=math.sqrt(5)),
        lambda x: init.kaiming_uniform_(x, a=math.sqrt(5))),
    "kaiming_normal": (
        lambda key, to: R.kaiming_normal(key, to, mode="fan_out", nonlinearity="relu"),
        lambda x: init.kaiming_normal_(x, mode="fan_out", nonlinearity="relu")),
    "orthogonal": (lambda key, to: R.orthogonal(key, to, gain=2), lambda x: init.orthogonal_(x, 2)),
}  # fmt: skip


def layouts(mesh: fs.Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[fs.Spec]:
    """Yield specs with axes on any dim or none, uneven, and unreduced along the first."""
    for choice in itertools.product(range(-1, len(shape)), repeat=len(mesh.axes)):
        dims = [
            tuple(axis for axis, dim in zip(mesh.axes, choice, strict=True) if dim == d)
            for d in range(len(shape))
        ]
        for unreduced in ((), mesh.axes[:1]) if choice[0] == -1 else ((),):
            p = P(*dims, unreduced={*unreduced})
            yield fs.Spec(mesh, p, shape=shape, dtype=dtype, uneven="chunk")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_values_are_equal_on_every_layout(name: str, mesh: fs.Mesh) -> None:
    draw, _ = DRAWS[name]
    for dtype, shape in itertools.product((torch.float32, torch.float64), ((7, 6), (4, 3, 5))):
        expected = draw(KEY, torch.empty(shape, dtype=dtype))
        for spec in layouts(mesh, shape, dtype):
            pair = draw(KEY, spec)
            assert pair.spec == spec
            assert torch.equal(fs.unshard(pair), expected), spec


@pytest.mark.parametrize("name", DRAWS)
def test_statistics_are_those_of_torch(name: str) -> None:
    """Compare 300,000 values with as many of PyTorch: moments and quantiles to 5 errors."""
    draw, fill = DRAWS[name]
    shape = (500, 600)
    ours = draw(KEY, torch.empty(shape, dtype=torch.float64)).flatten()
    torch.manual_seed(0)
    theirs = fill(torch.empty(shape, dtype=torch.float64)).flatten()
    std, count = theirs.std(), ours.numel()
    error = 5 * math.sqrt(2 / count)
    assert abs(ours.mean() - theirs.mean()) < error * std
    assert abs(ours.std() / std - 1) < error
    levels = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    below = (ours[:, None] <= theirs.sort().values[(levels * count).long()]).double().mean(0)
    assert (below - levels).abs().max() < error / 2
    if "uniform" in name or "trunc" in name:
        assert ours.min() >= theirs.min() - 0.1 * std
        assert ours.max() <= theirs.max() + 0.1 * std


@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (8, 3), (4, 3, 2), (1, 5)])
def test_orthogonal_has_orthonormal_rows_or_columns(shape: tuple[int, ...]) -> None:
    q = R.orthogonal(KEY, shape, dtype=torch.float64).flatten(1)
    gram = q @ q.T if q.shape[0] <= q.shape[1] else q.T @ q
    torch.testing.assert_close(gram, torch.eye(len(gram), dtype=torch.float64))


def test_truncated_values_are_within_limits() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = R.trunc_normal(KEY, (10_000,), std=0.02, a=-0.03, b=0.01, dtype=dtype)
        limits = torch.tensor([-0.03, 0.01], dtype=dtype)
        assert limits[0] <= x.min() < x.max() <= limits[1]


@pytest.mark.parametrize("name", [name for name in DRAWS if name != "orthogonal"])
def test_no_tensor_is_larger_than_a_shard(name: str) -> None:
    spec = fs.Spec(fs.Mesh(x=4, y=2), P("x", "y"), shape=(64, 32))
    with LargestTensor() as largest:
        DRAWS[name][0](KEY, spec)
    assert largest.numel == 64 * 32 // 8


@pytest.mark.parametrize("name", DRAWS)
def test_init_creates_them_in_layouts(name: str) -> None:
    draw, _ = DRAWS[name]
    params = fs.state.init(lambda key: draw(key, (6, 4)), KEY, P("x"), mesh=fs.Mesh(x=2))
    assert params.local[0].shape == (3, 4)
    assert torch.equal(fs.unshard(params), draw(KEY, (6, 4)))


FILLS: dict[str, Callable[[torch.Tensor], Any]] = {
    name: getattr(init, f"{name}_")
    for name in ("uniform", "normal", "xavier_uniform", "xavier_normal", "kaiming_uniform",
                 "kaiming_normal", "trunc_normal", "orthogonal", "ones", "zeros", "eye")
} | {
    "trunc_normal of a tail": lambda x: init.trunc_normal_(x, 0.0, 0.5, a=1.0, b=2.0),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FILLS)
def test_functions_of_torch_fill_shards_alone(name: str) -> None:
    """In a keyed block, with equal values on every layout and no tensor larger than a shard."""

    def create(key: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key):
            x = torch.empty(64, 32)
            FILLS[name](x)
            return x

    for mesh, p in ((fs.Mesh(x=8), P("x")), (fs.Mesh(x=2, y=3), P("x", "y")), (MESHES[3], P("x"))):
        spec = fs.Spec(mesh, p, shape=(64, 32), uneven="chunk")
        with LargestTensor() as largest:
            pair = fs.state.init(create, KEY, spec)
        assert torch.equal(fs.unshard(pair), create(KEY))
        if name != "orthogonal":  # its columns depend on each other
            assert largest.numel == max(spec.local_shape(0)[0] * spec.local_shape(0)[1], 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(8, 8, 3), (8, 2, 5), (4, 6, 3, 2), (6, 5, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_dirac_creates_shards_alone(shape: tuple[int, ...], groups: int) -> None:
    expected = init.dirac_(torch.empty(shape), groups)

    def create(key: torch.Tensor) -> torch.Tensor:
        return init.dirac_(torch.empty(shape), groups)

    for mesh, p in ((MESHES[2], P("x")), (MESHES[1], P("x", "y")), (MESHES[3], P(None, "x"))):
        spec = fs.Spec(mesh, p, shape=shape, uneven="chunk")
        with LargestTensor() as largest:
            pair = fs.state.init(create, KEY, spec)
        assert torch.equal(fs.unshard(pair), expected)
        assert largest.numel == max(math.prod(spec.local_shape(0)), 2)
    with pytest.raises(fs.ShardingError, match="dim 0 must be divisible by groups"):
        fs.state.init(lambda key: init.dirac_(torch.empty(5, 2, 3), 2), KEY, spec)


def test_trunc_normal_of_torch_is_itself_outside_of_keyed_blocks() -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(0)
        return init.trunc_normal_(torch.empty(100))

    before = draw()
    with fs.random.keyed(KEY):
        x = init.trunc_normal_(torch.empty(100))
        generator = torch.Generator().manual_seed(0)
        seeded = init.trunc_normal_(torch.empty(100), generator=generator)
    assert torch.equal(x, R.trunc_normal(fs.random.fold_in(KEY, 0), (100,)))
    assert torch.equal(seeded, before)
    assert torch.equal(draw(), before)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: R.xavier_normal(KEY, (4,)), "at least 2 dims"),
    (lambda: R.orthogonal(KEY, (4,)), "at least 2 dims"),
    (lambda: R.orthogonal(KEY, (4, 4), dtype=torch.bfloat16), "must be one of torch.float32"),
    (lambda: R.kaiming_normal(KEY, (4, 4), mode="fan"), "mode must be one of fan_in, fan_out"),
    (lambda: R.kaiming_normal(KEY, (4, 4), nonlinearity="gelu"), "nonlinearity='gelu'"),
    (lambda: R.trunc_normal(KEY, 4, std=0.0), "std must be positive"),
    (lambda: R.trunc_normal(KEY, 4, a=1.0, b=-1.0), "a below b"),
    (lambda: R.trunc_normal(KEY, 4, a=7.0, b=8.0), "dtype=torch.float64"),
    (lambda: R.trunc_normal(torch.ones(2), 4), "a key must be an int64 tensor"),
]


@pytest.mark.parametrize(("draw", "error"), REFUSED)
def test_arguments_are_checked(draw: Callable[[], Any], error: str) -> None:
    with pytest.raises(fs.ShardingError, match=error):
        draw()


def test_truncated_values_of_a_far_tail() -> None:
    x = R.trunc_normal(KEY, (1000,), a=7.0, b=8.0, dtype=torch.float64)
    assert 7.0 <= x.min() < 7.1
    assert x.max() <= 8.0
