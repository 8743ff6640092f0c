"""Pairs and DTensors on real processes: the same memory, gradients and process groups."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, Spec
from tests.helpers.gloo.harness import run_ranks

MESH = Mesh(dp=2, tp=2)
DIMS = ((), ("dp",), ("tp",), ("dp", "tp"), ("tp", "dp"))


def round_trips() -> int:
    """Convert all layouts of a 6x5 tensor to DTensors and back; return how many there are."""
    from torch.distributed.tensor import DTensor

    fs.init(MESH)
    x, count = torch.arange(30.0).view(6, 5), 0
    for rows, columns in itertools.product(DIMS, repeat=2):
        if set(rows) & set(columns):
            continue
        free = [axis for axis in MESH.axes if axis not in (*rows, *columns)]
        for unreduced in [{}, *({axis: "sum"} for axis in free)]:
            try:
                spec = Spec(
                    MESH, P(rows, columns, unreduced=unreduced), shape=(6, 5), uneven="chunk"
                )
                spec.placements  # noqa: B018 - raises where DTensor has no such layout
            except fs.ShardingError:
                continue
            pair = fs.shard(x, spec)
            dtensor = fs.to_dtensor(pair)
            assert isinstance(dtensor, DTensor)
            assert dtensor.to_local().data_ptr() == pair.local.data_ptr()
            assert torch.equal(dtensor.full_tensor(), x), spec
            back = fs.from_dtensor(dtensor)
            assert back.spec.is_equivalent(spec), (back.spec, spec)
            assert back.local.data_ptr() == pair.local.data_ptr()
            assert torch.equal(fs.unshard(back), x), spec
            count += 1
    return count


def test_layouts_round_trip_without_copies() -> None:
    counts = run_ranks(4, round_trips)
    assert counts == [counts[0]] * 4
    assert counts[0] == 17


def gradients() -> None:
    """Differentiate through both conversions, sharded and partial."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    fs.init(MESH)
    w = torch.arange(8.0).view(2, 4) + 1
    x = torch.ones(2, 4, requires_grad=True)
    pair = fs.shard(x, MESH, P("dp", "tp"))
    scaled = fs.to_dtensor(pair) * fs.to_dtensor(fs.shard(w, MESH, P("dp", "tp")))
    total = fs.from_dtensor(scaled.sum())
    assert total.spec.partition == P(unreduced={"dp", "tp"})
    fs.unshard(total).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, w)
    device_mesh = MESH.to_device_mesh()
    assert device_mesh is MESH.to_device_mesh()
    local = fs.from_local(torch.ones(2, 2), device_mesh, (Replicate(), Shard(-1)))
    assert str(local.spec) == "f32[2,4@tp]"
    moved = fs.reshard(local, (Shard(0), Replicate()))
    assert str(moved.spec) == "f32[2@dp,4]"
    sums = fs.from_local(torch.ones(2), device_mesh, (Partial(), Replicate()))
    assert fs.unshard(sums).tolist() == [2, 2]


def test_gradients_cross_both_conversions() -> None:
    run_ranks(4, gradients)


def shared_groups() -> list[bool]:
    """Convert a DeviceMesh: neither collectives along its axes nor the way back make groups."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.distributed_c10d import _world  # type: ignore[attr-defined]

    def groups() -> int:
        return len(_world.pg_map)

    fs.init(MESH)
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh = Mesh.from_device_mesh(device_mesh)
    before = groups()
    rank = torch.distributed.get_rank()
    assert fs.psum(torch.tensor(float(rank)), "a", mesh=device_mesh) == 2 * (rank % 2) + 2
    mesh.to_device_mesh()
    return [groups() == before, mesh == Mesh(a=2, b=2)]


def test_process_groups_are_shared() -> None:
    assert run_ranks(4, shared_groups) == [[True, True]] * 4


BAD: dict[str, tuple[Any, str]] = {
    "a tensor": (lambda: fs.from_dtensor(torch.ones(2)), "the argument must be a DTensor"),
    "simulated pair": (
        lambda: fs.to_dtensor(fs.zeros(Spec(Mesh(x=2), P("x"), shape=(2,)))),
        "one process for each rank",
    ),
    "no pair": (lambda: fs.to_dtensor(torch.ones(2)), "must be a pair"),  # type: ignore[arg-type]
    "no device mesh": (lambda: Mesh.from_device_mesh(3), "must be a torch.distributed DeviceMesh"),
    "simulated mesh": (lambda: Mesh(x=2).to_device_mesh(), r"fs\.init\(mesh\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_other_arguments_are_refused(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(fs.ShardingError, match=message):
        call()


def device_meshes() -> list[str]:
    """Use device meshes of several constructors, and placements, where a mesh and a P are."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard

    names = ("dp", "tp")
    override = {"dp": "gloo", "tp": "gloo"}
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=override)
    fs.init(device_mesh)
    groups = [device_mesh.get_group(name) for name in names]
    of_groups = DeviceMesh.from_group(
        groups, "cpu", torch.arange(4).view(2, 2), mesh_dim_names=("p", "q")
    )
    assert Mesh.from_device_mesh(of_groups) == Mesh(p=2, q=2)
    rank = torch.distributed.get_rank()
    x = torch.arange(8.0) if rank == 0 else None
    pairs = [
        fs.scatter(x, device_mesh, P("tp")),
        fs.scatter(x, device_mesh, (Replicate(), Shard(0))),
        fs.scatter(x, device_mesh["tp"], P("tp")) if rank < 2 else None,
        fs.from_local(torch.ones(2), device_mesh, (Shard(0), Partial())),
        fs.psum(torch.ones(2), "q", mesh=of_groups),
        fs.psum(torch.ones(2), "tp", mesh=device_mesh["tp"]),
    ]
    w = torch.ones(4, requires_grad=True)
    sharded = fs.shard(w, device_mesh, P("tp"))
    full = fs.reshard(sharded, P(reduced={"tp", "dp"})).local
    (full * (rank + 1)).sum().backward()  # each rank's own term of the loss
    assert w.grad is not None
    return [str(getattr(value, "spec", value)) for value in (*pairs, w.grad)]


def test_device_meshes_and_placements_are_taken() -> None:
    for rank, texts in enumerate(run_ranks(4, device_meshes)):
        assert texts == [
            "f32[8@tp]", "f32[8@tp]", "f32[8@tp]" if rank < 2 else "None",
            "f32[4@dp]{unreduced: tp}", "tensor([2., 2.])", "tensor([2., 2.])",
            "tensor([10., 10., 10., 10.])",
        ]  # fmt: skip


def backend_by_axis() -> str:
    with pytest.raises(fs.ShardingError) as caught:
        fs.init(MESH, backend={"dp": "gloo"})  # type: ignore[arg-type]
    return str(caught.value)


def test_a_backend_by_axis_is_refused_with_a_fix() -> None:
    assert all("backend_override=" in text for text in run_ranks(4, backend_by_axis))
