"""DTensor's placements and DeviceMesh in the place of partitions and meshes, in trees and rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fshard as fs
from fshard import Mesh, P

ROWS, COLUMNS = [Shard(0), Replicate()], (Replicate(), Shard(1))
TREE: dict[str, Any] = {"a": torch.arange(16.0).view(4, 4), "b": torch.ones(4, 4)}
ON = Mesh(x=2, y=2)
LAYOUTS: dict[str, Any] = {"a": ROWS, "b": COLUMNS}


def loaded(specs: Any, directory: Path) -> Any:
    fs.state.save(directory, TREE)
    return fs.state.load(directory, specs, mesh=ON)


def drawn(key: torch.Tensor) -> Any:
    return {name: fs.random.normal(key, (4, 4)) for name in TREE}


TAKEN: dict[str, Callable[[Path], Any]] = {
    "tree_shard": lambda _: fs.state.tree_shard(TREE, LAYOUTS, mesh=ON),
    "tree_reshard": lambda _: fs.state.tree_reshard(
        fs.state.tree_shard(TREE, P(), mesh=ON), LAYOUTS),
    "match_rules": lambda _: fs.state.tree_shard(
        TREE, fs.state.match_rules([("a", ROWS), ("b", COLUMNS)], TREE, mesh=ON), mesh=ON),
    "init": lambda _: fs.state.init(drawn, fs.random.key(0), LAYOUTS, mesh=ON),
    "init by rules": lambda _: fs.state.init(
        drawn, fs.random.key(0), [("a", ROWS), ("b", COLUMNS)], mesh=ON),
    "load": lambda path: loaded(LAYOUTS, path),
    "load by rules": lambda path: loaded([("a", ROWS), ("b", COLUMNS)], path),
    "optimizer": lambda _: fs.state.adamw(1e-3, specs=LAYOUTS).init(
        fs.state.tree_shard(TREE, P(), mesh=ON))["mean"],
    "partition": lambda _: fs.partition(
        lambda p, x: {name: x + p[name] for name in p}, mesh=ON, params=LAYOUTS, in_specs=P(),
        out_specs=LAYOUTS)(fs.state.tree_shard(TREE, LAYOUTS, mesh=ON), torch.ones(4, 4)),
    "shard_map": lambda _: fs.shard_map(
        lambda p: p, mesh=ON, in_specs=(LAYOUTS,), out_specs=LAYOUTS,
    )(fs.state.tree_shard(TREE, LAYOUTS, mesh=ON)),
    "distribute_module": lambda _: fs.state.distribute_module(
        torch.nn.ParameterDict(TREE), ON, partition=[("a", ROWS), ("b", COLUMNS)]).params,
    "distribute_module of a tree": lambda _: fs.state.distribute_module(
        torch.nn.ParameterDict(TREE), ON, partition=LAYOUTS).params,
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_trees_of_placements_are_taken_as_trees_of_partitions(name: str, tmp_path: Path) -> None:
    """Lists and tuples of placements are leaves, wherever there is a mesh."""
    result = TAKEN[name](tmp_path)
    assert [str(result[key].spec) for key in TREE] == ["f32[4@x,4]", "f32[4,4@y]"]


def test_placements_without_a_mesh_are_refused() -> None:
    with pytest.raises(fs.ShardingError, match=r"Shard\(dim=0\).*is not a P"):
        fs.state.match_rules([(".*", ROWS)], TREE)


@pytest.fixture(scope="module")
def device_mesh() -> Iterator[Any]:
    """A DeviceMesh of 2 x 2 ranks in one process."""
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    torch.distributed.destroy_process_group()


TEXTS: dict[str, Callable[[Any], Any]] = {
    "Spec": lambda mesh: fs.Spec(mesh, ROWS, shape=(4, 4)),
    "Spec.replace": lambda mesh: fs.Spec(mesh, P(), shape=(4, 4)).replace(partition=ROWS),
    "from_dtensor": lambda mesh: fs.from_dtensor(
        DTensor.from_local(torch.ones(2, 4), mesh, ROWS), mesh).spec,
    "parse": lambda mesh: fs.parse("f32[4@x,4]", mesh),
    "shard": lambda mesh: fs.shard(torch.ones(4, 4), mesh, ROWS).spec,
    "scatter": lambda mesh: fs.scatter(torch.ones(4, 4), mesh, ROWS).spec,
    "from_local": lambda mesh: fs.from_local((torch.ones(2, 4),) * 4, mesh, ROWS).spec,
    "reshard": lambda mesh: fs.reshard(fs.shard(torch.ones(4, 4), mesh, P()), ROWS).spec,
    "simulate": lambda mesh: fs.simulate(
        mesh, lambda x: (fs.psum(x, "x", mesh=mesh), fs.Spec(mesh, ROWS, shape=(4, 4))),
        torch.ones(1))[0][1],
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_device_meshes_and_placements_are_taken(name: str, device_mesh: Any) -> None:
    assert str(TEXTS[name](device_mesh)) == "f32[4@x,4]"


def test_device_meshes_are_seen_and_written_as_meshes(device_mesh: Any) -> None:
    assert str(fs.visualize(device_mesh)) == str(fs.visualize(ON))
    assert fs.interop.to_shardy(device_mesh) == fs.interop.to_shardy(ON)
    pair = fs.shard(torch.ones(4, 4), device_mesh, ROWS)
    fs.testing.assert_layout({"w": pair}, {"w": ROWS})
    with pytest.raises(AssertionError, match="expected"):
        fs.testing.assert_layout(pair, COLUMNS)


def test_a_constraint_names_the_partition_of_placements() -> None:
    """A traced function has no mesh; the fix of the error is the layout on a mesh."""
    x = torch.ones(4, 4)
    with pytest.raises(fs.ShardingError, match="without a mesh") as caught:
        fs.constrain(x, ROWS)  # type: ignore[arg-type]
    fix = str(caught.value).partition("fix:")[2]
    names = {"fs": fs, "mesh": ON, "x": x, "Shard": Shard, "Replicate": Replicate}
    assert eval(fix.strip(), names) == P("x", None)
