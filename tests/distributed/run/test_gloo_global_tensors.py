"""Conversion of global tensors on real processes, ranks outside of the mesh, and fs.init."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec
from fshard.run.transports import base as transport
from fshard.run.transports.base import Finish, Group
from tests.helpers.gloo.harness import Ranks, outcomes, run_ranks
from tests.helpers.spec_grid import all_specs, random_global, random_locals

MESH = Mesh({"x": 2, "y": 2}, devices=(2, 0, 3, 1))
PART = Mesh({"x": 2}, devices=(3, 1))


def errors(size: int, function: Callable[..., Any], *args: Any) -> list[str]:
    """Return the texts of the `ShardingError` that every rank raises."""
    results = [item.error for item in outcomes(size, function, *args)]
    assert all(isinstance(item, ShardingError) for item in results), results
    return [str(item) for item in results]


def layouts() -> list[Spec]:
    """Return layouts of every state, even and uneven, also unreduced by other kinds than sum."""
    even = all_specs(MESH, (4, 4), dtype=torch.float64)
    uneven = all_specs(
        MESH, (5, 3), ("invariant", "unreduced"), dtype=torch.float64, uneven="chunk"
    )
    kinds = [
        Spec(MESH, P("x", unreduced={"y": kind}), shape=(4, 3), dtype=torch.float64)
        for kind in ("avg", "max", "min")
    ]
    owner = Spec(MESH, P(("y", "x")), shape=(6,), sizes={0: (0, 6, 0, 0)}, dtype=torch.float64)
    shares = Spec(MESH, P("x", reduced={"y": "avg"}), shape=(4, 3), dtype=torch.float64)
    return [*even[::2], *uneven[::2], *kinds, owner, shares]


# -- shard and unshard -----------------------------------------------------------------


def move(specs: Sequence[Spec], place: int | None) -> list[dict[str, Any]]:
    """Shard, unshard and reshard with gradients, on one rank or with place=None on all."""
    rows = []
    for i, spec in enumerate(specs):
        linear = all(kind in ("sum", "avg") for _, kind in spec.partition.unreduced_kinds)
        x = random_global(spec.shape, spec.dtype, i).requires_grad_(linear)
        local, _ = fs.shard(x, spec)
        row = {"local": local, "whole": fs.unshard((local, spec)), "grad": torch.empty(0)}
        weights = random_global(spec.shape, spec.dtype, i + 1)
        if linear:
            (row["grad"],) = torch.autograd.grad((row["whole"] ** 2 * weights).sum(), x)
        else:
            with pytest.raises(ShardingError, match="must be sum or avg, which are linear"):
                fs.shard(x.requires_grad_(), spec)

        free: Any = tuple(item.requires_grad_() for item in random_locals(spec, i))
        free = free if place is None else free[place]
        row["moved"] = fs.reshard((free, spec), P()).local
        row["free"] = fs.unshard((free, spec))
        row["grads"] = torch.autograd.grad((row["free"] ** 2 * weights).sum(), free)
        rows.append(row)
    return rows


def move_on_rank(specs: Sequence[Spec]) -> list[dict[str, Any]]:
    fs.init(MESH)
    rows = move(specs, list(MESH.ranks).index(dist.get_rank()))
    return [{key: detached(value) for key, value in row.items()} for row in rows]


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else tuple(map(detached, value))


def test_shard_unshard_and_reshard_agree_with_the_simulation() -> None:
    specs = layouts()
    by_rank = run_ranks(4, move_on_rank, specs)
    for i, want in enumerate(move(specs, None)):
        for place, rank in enumerate(MESH.ranks):
            actual = by_rank[rank][i]
            for key in ("local", "moved"):
                torch.testing.assert_close(actual[key], want[key][place].detach())
            torch.testing.assert_close(actual["grads"][0], want["grads"][place])
            for key in ("whole", "grad", "free"):
                torch.testing.assert_close(actual[key], want[key].detach())


# -- scatter ---------------------------------------------------------------------------


class Recorder:
    """Transport that counts the bytes sent to other ranks."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.rank, self.device = inner, inner.rank, inner.device
        self.sent: list[int] = []

    def accepts(self, device: torch.device) -> bool:
        return bool(self.inner.accepts(device))

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        assert x.numel() == sum(send)
        place = group.index(self.rank)
        self.sent.append(x.element_size() * sum(n for i, n in enumerate(send) if i != place))
        finish: Finish = self.inner.all_to_all(x, send, receive, group)
        return finish


def scatter_recorded(specs: Sequence[Spec], src: int) -> list[tuple[torch.Tensor, list[int]]]:
    """Return the locals of scattered tensors and the bytes sent, by `all_to_all` alone."""
    fs.init(MESH)
    world = transport.current_transport()
    rows = []
    try:
        for i, spec in enumerate(specs):
            recorder = Recorder(world)
            transport.set_world(recorder)  # type: ignore[arg-type]
            local = random_global(spec.shape, spec.dtype, i) if dist.get_rank() == src else None
            rows.append((fs.scatter(local, spec, src=src).local, recorder.sent))
    finally:
        transport.set_world(world)
    return rows


@pytest.mark.parametrize("src", [0, 3])
def test_scatter_sends_each_rank_its_shard_alone(src: int) -> None:
    specs = layouts() + [
        Spec(MESH, P(("x", "y")), shape=(4, 2), dtype=dtype)
        for dtype in (torch.bool, torch.complex64, torch.bfloat16, torch.int64)
    ]
    by_rank = run_ranks(4, scatter_recorded, specs, src)
    for i, spec in enumerate(specs):
        want = fs.shard(random_global(spec.shape, spec.dtype, i), spec).local
        neutral = dict(spec.partition.unreduced_kinds)
        rest = 0
        for place, rank in enumerate(MESH.ranks):
            local, sent = by_rank[rank][i]
            torch.testing.assert_close(local, want[place], rtol=0, atol=0)
            absent = any(
                MESH.coords(rank)[axis] and kind != "avg" for axis, kind in neutral.items()
            )
            if rank != src:
                rest += 0 if absent else spec.local_nbytes(rank)
                assert sent == [0, 0], "the header and the shards come from src alone"
        header, shards = by_rank[src][i][1]
        assert shards == rest, spec
        assert header == 3 * 67 * 8


def scatter_with_gradient(spec: Spec, src: int, grad: bool) -> tuple[Any, Any, bool]:
    fs.init(MESH)
    x = random_global(spec.shape, spec.dtype).requires_grad_(grad)
    # What the others give is not looked at.
    value = x if dist.get_rank() == src else torch.zeros(3, requires_grad=True)
    local = fs.scatter(value, spec, src=src).local
    if grad:
        (fs.unshard((local, spec)) ** 2).sum().backward()
    return x.grad, value.grad if value is not x else None, local.requires_grad


def test_gradient_of_scatter_is_on_src() -> None:
    for spec in layouts()[::4]:
        if not all(kind in ("sum", "avg") for _, kind in spec.partition.unreduced_kinds):
            continue
        by_rank = run_ranks(4, scatter_with_gradient, spec, 2, True)
        x = random_global(spec.shape, spec.dtype)
        assert all(wants for *_, wants in by_rank)
        assert all(other is None for _, other, _ in by_rank)
        torch.testing.assert_close(by_rank[2][0], 2 * x)
        assert [grad is None for grad, *_ in by_rank] == [True, True, False, True]
        assert not any(wants for *_, wants in run_ranks(4, scatter_with_gradient, spec, 2, False))


def scatter_twice(spec: Spec) -> str:
    fs.init(MESH)
    x = torch.ones(spec.shape, requires_grad=True)
    pair = fs.scatter(x if dist.get_rank() == 0 else None, spec)
    loss = (fs.unshard(pair) ** 3).sum()
    if dist.get_rank() != 0:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward")
            loss.backward(create_graph=True)
        return ""
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable") as caught:
        grad.sum().backward()
    return str(caught.value)


def test_scatter_has_no_second_derivative() -> None:
    spec = Spec(MESH, P("x"), shape=(4,))
    assert "marked with @once_differentiable" in run_ranks(4, scatter_twice, spec)[0]


def scatter_given(given: Any, spec: Spec, src: int) -> None:
    fs.init(MESH)
    fs.scatter(given if dist.get_rank() == 1 else None, spec, src=src)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (torch.zeros(4, 5), "on rank 1 a tensor of shape (4, 5) and torch.float32"),
        (
            torch.zeros(4, 6, dtype=torch.int64),
            "on rank 1 a tensor of shape (4, 6) and torch.int64",
        ),
        (None, "on rank 1 no tensor"),
        ([1, 2], "on rank 1 no tensor"),
    ],
)
def test_wrong_tensor_on_src_raises_the_same_error_on_every_rank(given: Any, text: str) -> None:
    spec = Spec(MESH, P("x", "y"), shape=(4, 6))
    results = errors(4, scatter_given, given, spec, 1)
    assert len(set(results)) == 1
    assert text in results[0]
    assert "for f32[4@x,6@y] it must have shape (4, 6) and torch.float32" in results[0]
    assert "src must be one of [0, 1, 2, 3]" in errors(4, scatter_given, given, spec, 4)[0]


def scatter_unknown_shape() -> tuple[Spec, list[float]]:
    fs.init(MESH)
    x = torch.arange(6.0, dtype=torch.float64) if dist.get_rank() == 1 else None
    pair = fs.scatter(x, MESH, P(("x", "y")), src=1)
    with pytest.raises(ShardingError, match="on rank 1 no tensor"):
        fs.scatter(None, MESH, P("x"), src=1)
    return pair.spec, fs.unshard(pair).tolist()


def test_scatter_sends_the_shape_that_only_the_source_knows() -> None:
    expected = Spec(MESH, P(("x", "y")), shape=(6,), dtype=torch.float64, uneven="chunk")
    for spec, values in run_ranks(4, scatter_unknown_shape):
        assert spec == expected
        assert values == list(range(6))


# -- from_local ------------------------------------------------------------------------


def infer(specs: Sequence[Spec]) -> list[tuple[Spec, ...]]:
    fs.init(MESH)
    place = list(MESH.ranks).index(dist.get_rank())
    rows = []
    for spec in specs:
        local = random_locals(spec)[place].requires_grad_()
        sizes = {dim: sharded for dim, sharded in enumerate(spec.sizes) if sharded is not None}
        value = fs.from_local(local, MESH, spec.partition, sizes=sizes)
        assert value.local is local
        results = [
            value.spec,
            fs.from_local(local, MESH, spec.partition, sizes=sizes, check=False).spec,
        ]
        results.append(fs.from_local(local, MESH, spec.partition).spec)
        results.append(
            fs.from_local(local, MESH, spec.partition, shape=spec.shape, check=False).spec
        )
        if spec == spec.replace(sizes={0: None}, uneven="chunk"):
            chunked = fs.from_local(local, MESH, spec.partition, sizes="chunk", shape=spec.shape)
            results.append(chunked.spec)
        rows.append(tuple(results))
    return rows


def test_from_local_infers_the_same_spec_on_every_rank() -> None:
    specs = layouts()
    for row in run_ranks(4, infer, specs):
        for spec, results in zip(specs, row, strict=True):
            assert set(results) == {spec}


def from_locals(locals_: Sequence[torch.Tensor], p: fs.PartitionSpec, options: Any) -> Spec:
    fs.init(MESH)
    return fs.from_local(locals_[dist.get_rank()], MESH, p, **options).spec


def differing_replicas() -> tuple[str, list[float], bool]:
    fs.init(MESH)
    local = torch.full((2,), float(dist.get_rank()), requires_grad=True)
    with pytest.raises(ShardingError) as error:
        fs.from_local(local, MESH, P("y"), check="values")
    pair = fs.from_local(local, MESH, P("y"), check="broadcast")
    return str(error.value), pair.local.tolist(), pair.local.is_leaf and pair.local.requires_grad


def test_replicas_are_compared_and_broadcast() -> None:
    results = run_ranks(4, differing_replicas)
    first, second = MESH.groups("x")
    assert [values for _, values, _ in results] == [
        [float((first if rank in first else second)[0])] * 2 for rank in range(4)
    ]
    assert len({text for text, _, _ in results}) == 1
    assert f"values on rank {first[1]} that differ from those on rank {first[0]}" in results[0][0]
    assert all(is_leaf for _, _, is_leaf in results)


FOUR = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("rank_2", "partition", "options", "text"),
    [
        (FOUR[:, :2], P("x"), {}, "rank 2 (x=0, y=0) holds shape (2, 2)"),
        (FOUR[:1], P("x"), {}, "rank 2 (x=0, y=0) holds shape (1, 3)"),
        (FOUR[:1], P("x"), {"sizes": {0: (2, 2)}}, "rank 2 (x=0, y=0) holds shape (1, 3)"),
        (FOUR[:1], P("x"), {"sizes": "chunk", "shape": (4, 3)}, "rank 2 (x=0, y=0) holds"),
        (FOUR[0], P("x"), {}, "rank 2 holds 1 dims of torch.float32, rank 0 2"),
        (FOUR.long(), P("x"), {}, "rank 2 holds 2 dims of torch.int64, rank 0 2"),
        (FOUR, P("x"), {"shape": (5, 3)}, "the shape of these locals is (4, 3)"),
        (FOUR, P("x", None, None), {}, "at most 2 entries"),
        (FOUR, P("q"), {}, "axis 'q'"),
        (FOUR, P("x"), {"sizes": "chunk"}, "without shape="),
    ],
)
def test_wrong_local_is_refused_on_every_rank(
    rank_2: torch.Tensor, partition: fs.PartitionSpec, options: dict[str, Any], text: str
) -> None:
    results = errors(4, from_locals, (FOUR, FOUR, rank_2, FOUR), partition, options)
    assert len(set(results)) == 1
    assert text in results[0]


def test_all_wrong_ranks_are_named() -> None:
    results = errors(4, from_locals, (FOUR, FOUR[:, 1:], FOUR, FOUR[:, 1:]), P("x"), {})
    assert re.findall(r"rank (\d) \(", results[0]) == ["1", "3"]


# -- locals that are not this rank's ---------------------------------------------------


def run_wrong_local(kind: str) -> None:
    fs.init(MESH)
    spec = Spec(MESH, P("x", "y"), shape=(4, 6))
    prog = fs.redistribute(spec, spec.replace(partition=P("x")))
    wrong = {"shape": torch.zeros(4, 6), "dtype": torch.zeros(2, 3).double(),
             "device": torch.zeros(2, 3, device="meta")}  # fmt: skip
    prog(wrong[kind])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("shape", "on rank 0 (x=0, y=1) a local of shape (4, 6) and torch.float32"),
        ("dtype", "on rank 0 (x=0, y=1) a local of shape (2, 3) and torch.float64"),
        ("device", "on rank 0 a local on meta"),
    ],
)
def test_local_of_another_spec_is_refused(kind: str, text: str) -> None:
    assert text in errors(4, run_wrong_local, kind)[0]


# -- ranks outside of the mesh ---------------------------------------------------------


def outside() -> dict[str, Any]:
    """Run every conversion on a mesh of ranks 3 and 1 of four."""
    fs.init(PART)
    inside = dist.get_rank() in PART
    spec = Spec(PART, P("x"), shape=(4,))
    x = torch.arange(4.0, requires_grad=True)
    pair = fs.shard(x, spec)
    prog = fs.redistribute(spec, spec.replace(partition=P()))
    local = prog(pair.local)
    local.sum().backward()
    pending = prog(pair.local.detach(), async_op=True)
    double = fs.shard_map(lambda v: 2 * v, mesh=PART, in_specs=P("x"), out_specs=P("x"))
    results = {
        "shard": pair.local,
        "run": local,
        "pending": pending.wait(),
        "unshard": fs.unshard(pair),
        "reshard": fs.reshard(pair, P()).local,
        "scatter": fs.scatter(x if dist.get_rank() == 1 else None, spec, src=1).local,
        "from_local": fs.from_local(torch.ones(2 * inside), PART, P("x")).local,
        "given": fs.from_local(torch.ones(2 * inside), PART, P("x"), shape=(4,)).local,
        "shard_map": double(x),
    }
    assert fs.from_local(torch.ones(2 * inside), PART, P("x"), shape=(4,)).spec == spec
    return {key: item.detach() for key, item in results.items()} | {"grad": x.grad}


def test_rank_outside_of_the_mesh_gets_empty_tensors() -> None:
    by_rank = run_ranks(4, outside)
    for rank, row in enumerate(by_rank):
        for key, value in row.items():
            if rank not in PART and key != "grad":
                assert value.numel() == 0, (rank, key)
    for rank in (1, 3):
        place = PART.coords(rank)["x"]
        row = by_rank[rank]
        assert row["shard"].tolist() == row["scatter"].tolist() == [2.0 * place, 2.0 * place + 1]
        for key in ("run", "pending", "unshard", "reshard"):
            assert row[key].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert row["shard_map"].tolist() == [0.0, 2.0, 4.0, 6.0]
        assert row["grad"].tolist() == [1.0] * 4


# -- simulations inside of a rank ------------------------------------------------------


def simulate_inside() -> tuple[Any, ...]:
    """Simulate a mesh in each process, selected by passing tuples of shards."""
    fs.init(MESH)
    mesh = Mesh(a=3)
    spec = Spec(mesh, P("a"), shape=(6,))
    locals_ = tuple(torch.arange(6.0, requires_grad=True).split(2))
    prog = fs.redistribute(spec, spec.replace(partition=P()))
    out = prog(locals_)
    unsharded = fs.unshard((out, prog.dst))
    output = fs.from_local(locals_, mesh, P("a"))
    totals = fs.simulate(mesh, lambda: fs.psum(torch.ones(()), "a", mesh=mesh).item())
    # The processes are ranks still.
    real = fs.psum(torch.tensor(float(dist.get_rank())), ("x", "y"), mesh=MESH)
    return len(out), unsharded.tolist(), output.spec == spec, totals, real.item()


def test_simulation_inside_a_rank() -> None:
    want = (3, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], True, [3.0] * 3, 6.0)
    assert run_ranks(4, simulate_inside) == [want] * 4


# -- fs.init ---------------------------------------------------------------------------


def init_from_torchrun(store: str) -> list[Any]:
    """Start, start again, end, and use process groups that were started elsewhere."""
    mesh = Mesh(x=2)
    results: list[Any] = []
    try:
        with pytest.raises(ShardingError, match="the 2 processes of the world") as caught:
            fs.init(Mesh(x=3))
        assert not dist.is_initialized(), "nothing half-done"
        results.append(str(caught.value))
        fs.init(mesh, timeout=100)
        results.append(fs.psum(torch.ones(()), "x", mesh=mesh).item())
        first = transport.current_transport()
        fs.init(mesh, backend="gloo", timeout=timedelta(seconds=30))
        assert transport.current_transport() is first
        assert first.timeout == timedelta(seconds=30)  # type: ignore[union-attr]
        fs.init(Mesh({"y": 2}, devices=(1, 0)))
        with pytest.raises(ShardingError, match="the 2 processes of the world"):
            fs.init(Mesh(x=4))
        with pytest.raises(ShardingError, match="must be among those that run, 0, 1"):
            fs.psum(torch.ones(()), "x", mesh=Mesh(x=4))
        results.append(fs.psum(torch.ones(()), "x", mesh=mesh).item())
        dist.destroy_process_group()
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        fs.init(mesh)
        assert transport.current_transport() is not first
        results.append(fs.psum(torch.ones(()), "x", mesh=mesh).item())
    finally:
        transport.set_world(None)
        if dist.is_initialized():
            dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def bare() -> Iterator[Ranks]:
    """Yield two processes of their own, since a second start could read the first one's keys."""
    ranks = Ranks(2, init=False)
    yield ranks
    ranks.close()


def test_init_under_torchrun(bare: Ranks, tmp_path: Path) -> None:
    first, second = bare.run(init_from_torchrun, str(tmp_path / "store"))
    assert first == second
    assert first[1:] == [2.0] * 3
    assert "torchrun --nproc-per-node 3, or a mesh of at most 2" in first[0]


def init_without_environment() -> str:
    saved = {name: os.environ.pop(name) for name in ("RANK", "MASTER_ADDR")}
    try:
        fs.init(Mesh(x=2))
    except ShardingError as error:
        return str(error)
    finally:
        os.environ.update(saved)
    return ""


def test_init_without_the_environment_of_torchrun(bare: Ranks) -> None:
    text = bare.run(init_without_environment)[0]
    assert "no RANK, MASTER_ADDR in the environment" in text
