"""DTensor's placements in trees of layouts, and in rules, in the place of partitions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

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
