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
