"""Tensors that a partitioned function creates: in the layouts of their uses, with one value."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.partition.ir import Factory
from tests.helpers.spec_grid import one_in
from tests.helpers.tensor_memory import LargestTensor

MESHES = (fs.Mesh(x=1, y=1), fs.Mesh(x=2, y=3), fs.Mesh(x=8, y=1), fs.Mesh(x=5, y=1))
PARTITIONS = (fs.P(), fs.P("x"), fs.P(None, "y"), fs.P(("y", "x")), fs.P("y", "x"))
ROWS, COLUMNS = 12, 7

FACTORIES: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(ROWS, COLUMNS),
    "ones": lambda: torch.ones(ROWS, COLUMNS, dtype=torch.float64),
    "full": lambda: torch.full((ROWS, COLUMNS), 2.5),
    "full of bools": lambda: torch.full((ROWS, COLUMNS), True),
    "eye": lambda: torch.eye(ROWS, COLUMNS),
    "arange": lambda: torch.arange(COLUMNS),
    "arange of steps": lambda: torch.arange(20, 20 - 3 * COLUMNS, -3),
    "arange of float32": lambda: torch.arange(1.0, COLUMNS + 1),
    "arange of fractions": lambda: torch.arange(0, 0.1 * COLUMNS - 0.05, 0.1),
    "scalar": lambda: torch.scalar_tensor(3.0),
    "empty": lambda: torch.empty(ROWS, COLUMNS).fill_(1.5),
    "empty_strided": lambda: torch.empty_strided((ROWS, COLUMNS), (1, ROWS)).fill_(1.5),
    "causal mask": lambda: torch.full((ROWS, COLUMNS), -1e9).triu(1),
    "positions": lambda: torch.arange(ROWS)[:, None] * 0.5,
    "rotary": lambda: torch.outer(torch.arange(12.0), 1 / 10 ** (torch.arange(7) / 7)).cos(),
    "linspace": lambda: torch.linspace(0, 1, COLUMNS),
    "written": lambda: torch.zeros(ROWS, COLUMNS).index_fill_(0, torch.tensor([2]), 1.0),
}


@one_in(7)
@pytest.mark.parametrize("name", FACTORIES)
def test_created_tensors_have_the_values_of_one_device(name: str, every: int) -> None:
    create = FACTORIES[name]
    x = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)
    for mesh, p in [*itertools.product(MESHES, PARTITIONS)][len(name) % every :: every]:
        spec = fs.Spec(mesh, p, shape=x.shape, uneven="chunk")
        part = fs.partition(lambda x: (create() + x, create()), mesh=mesh)
        total, created = part(fs.shard(x, spec))
        expected = create() + x
        assert torch.equal(fs.unshard(total), expected), (mesh, p)
        assert torch.equal(fs.unshard(created), create()), (mesh, p)
        assert total.spec.is_equivalent(spec.replace(dtype=expected.dtype))


SHARDED = ["zeros", "ones", "full", "eye", "empty", "empty_strided", "causal mask", "positions"]


@pytest.mark.parametrize("name", SHARDED)
def test_a_created_tensor_is_sharded_where_its_use_is(name: str) -> None:
    create, mesh = FACTORIES[name], fs.Mesh(x=4)
    spec = fs.Spec(mesh, fs.P("x"), shape=(ROWS, COLUMNS))
    call = fs.partition(lambda x: create() + x, mesh=mesh).trace(spec)
    layouts = [line.spec.partition for line in call.lines if isinstance(line, Factory)]
    assert [p.dims[0] for p in layouts] == [("x",)]
    assert not call.programs
    assert "replicated" not in str(call.explain())


def test_wave_numbers_of_uneven_shards_are_created_sharded() -> None:
    mesh = fs.Mesh(x=2, y=2)

    def fn(x: torch.Tensor) -> torch.Tensor:
        k = torch.fft.fftfreq(ROWS)[:, None] ** 2 + torch.fft.rfftfreq(2 * COLUMNS - 1) ** 2
        return x * torch.where(k == 0, torch.zeros_like(k), 1 / torch.where(k == 0, 1, k))

    spec = fs.Spec(mesh, fs.P("x", "y"), shape=(ROWS, COLUMNS), sizes={0: (8, 4), 1: (2, 5)})
    x = torch.randn(ROWS, COLUMNS)
    part = fs.partition(fn, mesh=mesh, in_specs=spec)
    pair = fs.shard(x, spec)
    torch.testing.assert_close(fs.unshard(part(pair)), fn(x))
    with LargestTensor() as largest:
        part(pair)
    assert largest.numel == 8 * 5
    assert all(prog.is_local for prog in part.trace(spec).programs)


def test_one_created_tensor_has_the_layouts_of_all_uses() -> None:
    mesh = fs.Mesh(x=4)

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        ones = torch.ones(4, 8)
        return x + ones, y + ones, x * ones

    x, y = torch.rand(4, 8), torch.rand(4, 8)
    part = fs.partition(fn, mesh=mesh, in_specs=(fs.P("x"), fs.P(None, "x")))
    call = part.trace(x, y)
    specs = [line.spec.partition for line in call.lines if isinstance(line, Factory)]
    assert specs == [fs.P("x", None), fs.P(None, "x")]
    for result, expected in zip(part(x, y), fn(x, y), strict=True):
        assert torch.equal(result, expected)


def test_a_sharded_result_is_created_without_the_global_tensor() -> None:
    mesh = fs.Mesh(x=4)

    def fn(x: torch.Tensor) -> Any:
        return x + 1, torch.zeros(1024, 64)

    part = fs.partition(fn, mesh=mesh, out_specs=(None, fs.P("x")))
    pair = fs.shard(torch.ones(4), mesh, fs.P("x"))
    part(pair)
    with LargestTensor() as largest:
        _, zeros = part(pair)
    assert largest.numel == 1024 * 64 // 4
    assert zeros.spec.partition == fs.P("x", None)


def test_init_creates_constants_in_their_layouts() -> None:
    def fn(key: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": fs.random.normal(key, (8, 4)), "bias": torch.zeros(8),
                "scale": torch.ones(8), "positions": torch.arange(8)}  # fmt: skip

    params = fs.state.init(fn, fs.random.key(0), fs.P("x"), mesh=fs.Mesh(x=4))
    assert {name: pair.local[1].shape[0] for name, pair in params.items()} == dict.fromkeys(
        params, 2
    )
    for name, value in fn(fs.random.key(0)).items():
        assert torch.equal(fs.unshard(params[name]), value), name


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "rand": (lambda: torch.rand(4), r"fs\.random\.uniform\(key, spec\)"),
    "randn": (lambda: torch.randn(4), r"fs\.random\.normal\(key, spec\)"),
    "randint": (lambda: torch.randint(0, 3, (4,)), r"fs\.random\.randint\(key, spec, low, high\)"),
    "randperm": (lambda: torch.randperm(4), r"fs\.random\.permutation\(key, spec\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unkeyed_draws_are_refused_with_their_keyed_form(name: str) -> None:
    draw, fix = REFUSED[name]
    x = fs.shard(torch.ones(4), fs.Mesh(x=2), fs.P("x"))
    with pytest.raises(fs.ShardingError, match=f"(?s)draws must be keyed.*{fix}"):
        fs.partition(lambda x: x + draw(), mesh=fs.Mesh(x=2))(x)

    def keyed(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key):
            return x + draw()

    part, key = fs.partition(keyed, mesh=fs.Mesh(x=2)), fs.random.key(0)
    assert torch.equal(fs.unshard(part(x, key)), keyed(torch.ones(4), key))


@pytest.mark.parametrize(
    ("create", "args", "fix"),
    [
        (torch.arange, (4,), r"fs\.arange\(spec, start, step\)"),
        (torch.zeros, (4,), r"fs\.zeros\(spec\)"),
        (torch.full, ((4,), 1.0), r"fs\.full\(spec, value\)"),
        (torch.randn, (4,), r"fs\.random\.normal\(key, spec\)"),
    ],
)
def test_apply_names_the_factory_of_pairs(
    create: Callable[..., Any], args: tuple[Any, ...], fix: str
) -> None:
    with pytest.raises(fs.ShardingError, match=f"(?s)must be a pair.*{fix}"):
        fs.apply(create, *args)
