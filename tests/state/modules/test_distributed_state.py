"""State of distributed modules: checkpoints by specs, copies, pickles, compilation, state dicts."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import Mesh, P
from tests.state.modules.module_cases import BatchNormNet, TiedLanguageModel, assert_close, noise

MESH = Mesh(dp=2, tp=2)


def module_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def styled() -> tuple[nn.Module, fs.state.DistributedModule]:
    module = module_of(BatchNormNet)
    return module, fs.state.distribute_module(
        module, MESH, styles={"net.4": fs.state.colwise("tp")}, fsdp="dp", in_specs=P("dp")
    )


def test_a_checkpoint_loads_exactly_by_the_specs_of_the_module(tmp_path: Path) -> None:
    _, source = styled()
    state = {"params": source.params, "buffers": source.buffers}
    fs.state.save(tmp_path, state)
    loaded = fs.state.load(tmp_path, source.specs)
    for part, pairs in state.items():
        assert [*loaded[part]] == [*pairs]
        for name, pair in pairs.items():
            assert loaded[part][name].spec == pair.spec
            assert all(map(torch.equal, loaded[part][name].local, pair.local))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
                         ids=["deepcopy", "pickle"])  # fmt: skip
def test_copies_have_a_state_and_a_module_of_their_own(copied: Any) -> None:
    module, source = styled()
    other = copied(source)
    x = noise(8, 3, 4, 4)
    with torch.no_grad():
        for pair in source.params.values():
            for local in pair.local:
                local.zero_()
    y, buffers = other(other.params, other.buffers, x)
    assert_close(fs.unshard(y), module(x))
    assert_close(fs.unshard(buffers["net.1.running_mean"]), module.net[1].running_mean)
    assert other.module is not module
    assert other.styled[0].module is other.module.net[4]
    assert other.specs == source.specs
    assert other.params["net.4.weight"].local[0].requires_grad
    assert "all_gather" in str(other.explain(x))


def test_compiled_distributed_modules_equal_eager_ones() -> None:
    module, source = styled()
    x = noise(8, 3, 4, 4)
    y, _ = torch.compile(source, backend="aot_eager")(source.params, source.buffers, x)
    assert_close(fs.unshard(y), module(x))


def test_state_dicts_go_to_pairs_and_back() -> None:
    module = module_of(TiedLanguageModel)
    source = fs.state.distribute_module(module, MESH, fsdp="dp")
    twin = TiedLanguageModel().double()
    state = fs.state.tree_unshard({**source.params, **source.buffers})
    result = twin.load_state_dict(state, strict=False)
    assert result.missing_keys == ["out.weight"]  # tied: its first name has its values
    for name, x in module.state_dict().items():
        assert torch.equal(twin.state_dict()[name], x)
    params = {name: twin.state_dict()[name] for name in source.params}
    again = fs.state.tree_shard(params, source.specs["params"])
    for name, pair in source.params.items():
        assert all(map(torch.equal, again[name].local, pair.local))


FIXES = {"state_dict": 2, "parameters": 2, "named_parameters": 2, "named_buffers": 3,
         "named_modules": 2, "forward": 2}  # fmt: skip
"""By the method of a module the number of items that its fix has."""


@pytest.mark.parametrize("name", FIXES)
def test_attributes_of_modules_name_the_functional_code(name: str) -> None:
    net = nn.Sequential(nn.BatchNorm1d(4))
    distributed = fs.state.distribute_module(net, MESH, in_specs=P("dp"))
    with pytest.raises(fs.ShardingError, match=f"{name} of a distributed Sequential") as caught:
        getattr(distributed, name)
    assert isinstance(caught.value, AttributeError)
    assert not hasattr(distributed, name)
    fix = str(caught.value).rpartition("fix:")[2].partition(", which")[0].strip()
    value = eval(fix.replace("...", "noise(4, 4).float()"), globals(), {"distributed": distributed})
    assert len([*(value() if callable(value) else value)]) == FIXES[name]


def test_calls_without_the_state_name_the_functional_code() -> None:
    distributed = fs.state.distribute_module(nn.Linear(4, 4), MESH)
    x: Any = noise(2, 4).float()
    for call in (distributed, distributed.keyed(fs.random.key(0))):
        for args in ((x,), (x, x), (distributed.params, x)):
            with pytest.raises(
                fs.ShardingError,
                match=r"distributed\(distributed\.params, distributed\.buffers, \.\.\.\)",
            ):
                call(*args)


@pytest.mark.parametrize("name", ["load_state_dict", "to", "double", "zero_grad"])
def test_methods_that_change_a_module_are_refused(name: str) -> None:
    distributed = fs.state.distribute_module(nn.Linear(4, 4), MESH)
    with pytest.raises(fs.ShardingError, match=r"fix: +fs\.state\."):
        getattr(distributed, name)


def test_other_attributes_are_missing_as_of_any_object() -> None:
    distributed = fs.state.distribute_module(nn.Linear(4, 4), MESH)
    with pytest.raises(AttributeError, match="'DistributedModule' object has no attribute 'nope'"):
        _ = distributed.nope


def test_calls_are_in_the_mode_of_the_module() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    distributed = fs.state.distribute_module(net, MESH, in_specs=P("dp"))
    x = noise(4, 4)
    distributed.module.eval()
    y, buffers = distributed(distributed.params, distributed.buffers, x)
    assert_close(fs.unshard(y), net(x))
    assert int(fs.unshard(buffers["0.num_batches_tracked"])) == 0
    distributed.module.train()
    _, buffers = distributed.keyed(fs.random.key(0))(distributed.params, distributed.buffers, x)
    assert int(fs.unshard(buffers["0.num_batches_tracked"])) == 1
