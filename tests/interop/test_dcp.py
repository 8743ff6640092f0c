"""Checkpoints of `torch.distributed.checkpoint`, to and from FSDP2, DTensors and plain tensors."""

from __future__ import annotations

import pathlib
import pickle
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fshard as fs
from fshard import Mesh, P, Spec
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.strategies import specs as drawn_specs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
WIDTH = 10  # 4 ranks have 3, 3, 3 and 1 rows


def model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, WIDTH), nn.GELU(), nn.Linear(WIDTH, 3)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on the same data on every rank."""
    for step in steps:
        x = torch.arange(24).view(4, 6).double().sin() + step
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def expected(steps: int) -> dict[str, torch.Tensor]:
    """Return parameters and moments of one device, by DCP's names."""
    model, optimizer = model_and_optimizer(0)
    train(model, optimizer, range(steps))
    params, state = get_state_dict(model, optimizer)
    moments = {
        f"optim.state.{name}.{key}": x
        for name, slots in state["state"].items()
        for key, x in slots.items()
    }
    return {f"model.{name}": x for name, x in params.items()} | moments


def fsdp2(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the module and its optimizer, each layer and the rest sharded by FSDP2."""
    torch.manual_seed(seed)
    model, _ = model_and_optimizer(seed)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def save_fsdp2(directory: str) -> None:
    model, optimizer = fsdp2(0)
    train(model, optimizer, range(2))
    params, state = get_state_dict(model, optimizer)
    dcp.save({"model": params, "optim": state}, checkpoint_id=directory)


def continue_fsdp2(directory: str) -> float:
    """Load a checkpoint into FSDP2, train on, and return the difference from one device."""
    model, optimizer = fsdp2(1)
    train(model, optimizer, range(1))  # the optimizer has a state to load into
    params, state = get_state_dict(model, optimizer)
    tree = {"model": params, "optim": state}
    dcp.load(tree, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=params, optim_state_dict=state)
    train(model, optimizer, range(2, 4))
    reference = expected(4)
    return max(
        float((x.full_tensor() - reference[f"model.{name}"]).abs().max())
        for name, x in model.state_dict().items()
    )


def load_on_ranks(directory: str) -> tuple[float, bool, dict[str, str]]:
    """Load the pairs of a checkpoint of pairs; return the differences, and layouts of locals."""
    difference = continue_fsdp2(directory)
    plain = {"model": {"0.weight": torch.zeros(WIDTH, 6).double()}}
    dcp.load(plain, checkpoint_id=directory)
    weight = plain["model"]["0.weight"]
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    same = True
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)]):
        target = distribute_tensor(torch.zeros_like(weight), device_mesh, placements)
        dcp.load({"model": {"0.weight": target}}, checkpoint_id=directory)
        same &= torch.equal(target.full_tensor(), weight)
    mesh = Mesh(a=2, b=2)
    fs.init(mesh)
    pairs = fs.state.load(directory, {"model": P("b"), "optim": None}, mesh=mesh)["model"]
    fs.interop.save_dcp(f"{directory}/again", pairs)
    again = fs.state.load(f"{directory}/again", P("a"), mesh=mesh)
    same &= torch.equal(fs.unshard(again["0.weight"]), weight)
    return difference, same, {name: str(pair.spec) for name, pair in pairs.items()}


def test_fsdp2_to_pairs_and_back(tmp_path: Path) -> None:
    """FSDP2 on 4 ranks, pairs on a simulated 2x3 mesh, FSDP2 and DTensors on 4 ranks, pairs."""
    run_ranks(4, save_fsdp2, str(tmp_path / "fsdp2"))
    tree = fs.state.load(tmp_path / "fsdp2")
    by_dcp = {"model": {name: torch.zeros_like(x) for name, x in tree["model"].items()}}
    dcp.load(by_dcp, checkpoint_id=tmp_path / "fsdp2", no_dist=True)
    reference = expected(2)
    for name, x in by_dcp["model"].items():
        assert torch.equal(tree["model"][name], x)
        torch.testing.assert_close(x, reference[f"model.{name}"], rtol=0, atol=1e-12)
    assert tree["optim"]["param_groups"][0]["lr"] == 0.1

    mesh = Mesh(x=2, y=3)
    layouts = {
        "model": {
            name: P("y", "x") if x.ndim == 2 else P("x") for name, x in by_dcp["model"].items()
        },
        "optim": {
            "state": {
                name: {key: P("y") if x.ndim else P() for key, x in slots.items()}
                for name, slots in tree["optim"]["state"].items()
            },
            "param_groups": None,
        },
    }
    pairs = fs.state.load(tmp_path / "fsdp2", layouts, mesh=mesh)
    assert str(pairs["model"]["0.weight"].spec) == "f64[10@y:chunk,6@x]"
    for name, x in fs.state.tree_unshard(pairs["model"]).items():
        assert torch.equal(x, tree["model"][name])
    for name, slots in fs.state.tree_unshard(pairs["optim"]["state"]).items():
        for key, x in slots.items():
            assert torch.equal(x, tree["optim"]["state"][name][key])
    fs.interop.save_dcp(tmp_path / "pairs", pairs)
    for difference, same, specs in run_ranks(4, load_on_ranks, str(tmp_path / "pairs")):
        assert difference < 1e-12
        assert same
        assert specs["0.weight"] == "f64[10@b,6]"


# -- values, layouts and errors, in this process -------------------------------------------------


@settings(max_examples=15, deadline=None, derandomize=True)
@given(drawn_specs().filter(lambda spec: not spec.partition.unreduced_kinds))
def test_any_layout_is_saved(tmp_path_factory: pytest.TempPathFactory, spec: Spec) -> None:
    directory = tmp_path_factory.mktemp("dcp")
    x = torch.arange(torch.Size(spec.shape).numel()).view(spec.shape).to(spec.dtype)
    fs.interop.save_dcp(directory, {"a": [fs.shard(x, spec), 3], "b": None})
    loaded = fs.state.load(directory)
    assert torch.equal(loaded["a"][0], x)
    assert (loaded["a"][1], loaded["b"]) == (3, None)
    target = {"a": [torch.zeros_like(x), 0]}
    dcp.load(target, checkpoint_id=directory, no_dist=True)
    assert torch.equal(target["a"][0], x)


@pytest.mark.parametrize(
    "tree", [{}, [], torch.arange(4), 3], ids=["dict", "list", "tensor", "int"]
)
def test_trees_of_one_item_load(tree: Any, tmp_path: Path) -> None:
    fs.interop.save_dcp(tmp_path, tree)
    loaded = fs.state.load(tmp_path)
    assert type(loaded) is type(tree)
    assert torch.equal(loaded, tree) if isinstance(tree, torch.Tensor) else loaded == tree


def test_empty_containers_are_kept(tmp_path: Path) -> None:
    tree = {"a": [{}, {"w": torch.ones(2)}], "b": {}, "c": [], "d": {"e": {}}}
    fs.interop.save_dcp(tmp_path, tree)
    loaded = fs.state.load(tmp_path)
    assert torch.equal(loaded["a"][1].pop("w"), torch.ones(2))
    assert loaded == {"a": [{}, {}], "b": {}, "c": [], "d": {"e": {}}}
    target = {"a": [{}, {"w": torch.zeros(2)}], "b": {}, "c": []}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(target["a"][1]["w"], torch.ones(2))


class Evil:
    """Object whose unpickling writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def saved(directory: Path) -> Path:
    dcp.save({"w": torch.ones(4), "v": torch.ones(2)}, checkpoint_id=directory, no_dist=True)
    return directory


def replace_metadata(directory: Path, change: Callable[[Any], Any]) -> None:
    path = directory / ".metadata"
    path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))


def move_file(metadata: Any) -> Any:
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    return metadata


def drop_chunk(metadata: Any) -> Any:
    metadata.state_dict_metadata["w"].chunks.clear()
    return metadata


def transformed(metadata: Any) -> Any:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]
    return metadata


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "file cut short": (
        lambda d: (d / "__0_0.distcp").write_bytes((d / "__0_0.distcp").read_bytes()[:-9]),
        "the file must have"),
    "file missing": (lambda d: (d / "__0_0.distcp").unlink(), "missing"),
    "file damaged": (lambda d: (d / "__0_0.distcp").write_bytes(
        bytes((d / "__0_0.distcp").stat().st_size)), "must be one that torch.load"),
    "metadata cut short": (
        lambda d: (d / ".metadata").write_bytes((d / ".metadata").read_bytes()[:50]),
        "as torch.distributed.checkpoint writes it"),
    "metadata of text": (lambda d: (d / ".metadata").write_text("{}"), "as torch.distributed"),
    "metadata of a dict": (lambda d: (d / ".metadata").write_bytes(pickle.dumps({})), "as torch.d"),
    "code in metadata": (
        lambda d: (d / ".metadata").write_bytes(pickle.dumps(Evil(d / "touched"))),
        "which DCP does not write"),
    "path out of the directory": (lambda d: replace_metadata(d, move_file), r"'\.\./secret'"),
    "missing chunk": (lambda d: replace_metadata(d, drop_chunk), "must cover each element once"),
    "transformed": (lambda d: replace_metadata(d, transformed), "must be stored as they are"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused(damage: str, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    change(saved(tmp_path))
    with pytest.raises(fs.ShardingError, match=message):
        fs.state.load(tmp_path)
    assert not (tmp_path / "touched").exists()


class OlderPickler(pickle.Pickler):
    """Pickler of members of enumerations by name, as Python 3.11.0 to 3.11.4 pickles them."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


class Attribute:
    """Object whose pickle asks for an attribute of a class of DCP."""

    def __reduce__(self) -> Any:
        return getattr, (dcp.metadata.TensorStorageMetadata, "__init__")


def test_metadata_of_other_pythons_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for module in ("pathlib", "pathlib._local"):  # that of Python 3.13
        monkeypatch.setitem(sys.modules, module, pathlib)
        monkeypatch.setattr(pathlib.PosixPath, "__module__", module)
        path.write_bytes(pickle.dumps(metadata))
        assert module.encode() in path.read_bytes()
        assert torch.equal(fs.state.load(tmp_path)["w"], torch.ones(4))
    with path.open("wb") as opened:
        OlderPickler(opened).dump(metadata)
    assert b"getattr" in path.read_bytes()
    assert torch.equal(fs.state.load(tmp_path)["w"], torch.ones(4))
    path.write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(fs.ShardingError, match=r"the attribute __init__ of .* DCP does not write"):
        fs.state.load(tmp_path)


def test_code_in_a_value_is_not_run(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "f": Evil(tmp_path / "touched")}, checkpoint_id=tmp_path / "x",
             no_dist=True)  # fmt: skip
    with pytest.raises(fs.ShardingError, match="must be one that") as caught:
        fs.state.load(tmp_path / "x")
    assert "f@ in" in str(caught.value)
    assert "save it again without the value" in str(caught.value)
    assert not (tmp_path / "touched").exists()


def test_what_dcp_lacks_is_refused(tmp_path: Path) -> None:
    unreduced = fs.shard(torch.ones(2), Mesh(x=2), P(unreduced={"x"}))
    for tree, message in (
        ({"w": unreduced}, "must not be unreduced"),
        ({"f": print}, "f: a builtin_function_or_method"),
        ({"a.b": 1, "a": {"b": 2}}, "two leaves of the name"),
    ):
        with pytest.raises(fs.ShardingError, match=message):
            fs.interop.save_dcp(tmp_path, tree)
    with pytest.raises(fs.ShardingError, match=r"outside of fs\.simulate"):
        fs.simulate(Mesh(x=2), lambda: fs.interop.save_dcp(tmp_path, [torch.ones(2)]))
    assert not [*tmp_path.iterdir()]
