"""Modules on a mesh: layouts, values, gradients, buffers, creation from a key, and checkpoints."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import Mesh, P
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.tensor_memory import LargestTensor
from tests.state.modules.module_cases import (
    BatchNormNet,
    Counter,
    TiedLanguageModel,
    assert_close,
    check_equals_one_device,
    mlp,
    noise,
    objective,
    words,
)

MESH = Mesh(dp=2, tp=2)
TENSOR_RULES = [
    (r"embed\.weight", P("tp")),
    (r".*\.mlp\.0\..*", P("tp")),
    (r".*\.mlp\.2\.weight", P(None, "tp")),
    (r".*", P()),
]
TEXT = {"text": words(4, 6), "shift": 0.25}
TEXT_SPECS = {"text": P("dp"), "shift": None}
CONVOLUTION_RULES = [(r"net\.0\..*", P("tp")), (r"net\.4\.weight", P(None, "tp")), (r".*", P())]
LAYOUTS: dict[str, tuple[type[nn.Module], dict[str, Any], dict[str, Any]]] = {
    "tied, replicated": (TiedLanguageModel, TEXT, {"in_specs": TEXT_SPECS}),
    "tied, FSDP": (TiedLanguageModel, TEXT, {"in_specs": TEXT_SPECS, "fsdp": ("dp", "tp")}),
    "tied, tensor": (TiedLanguageModel, TEXT, {"partition": TENSOR_RULES, "hold": "tp"}),
    "tied, both": (
        TiedLanguageModel,
        TEXT,
        {"in_specs": TEXT_SPECS, "partition": TENSOR_RULES, "hold": "tp", "fsdp": "dp"},
    ),
    "batch norm, FSDP": (
        BatchNormNet,
        {"x": noise(8, 3, 4, 4)},
        {"in_specs": P("dp"), "fsdp": "dp"},
    ),
    "batch norm, channels": (
        BatchNormNet,
        {"x": noise(8, 3, 4, 4)},
        {"in_specs": P("dp"), "partition": CONVOLUTION_RULES, "hold": "tp"},
    ),
    "written buffers": (Counter, {"x": noise(8, 4)}, {"in_specs": P("dp"), "fsdp": "tp"}),
}


def module_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize("case", LAYOUTS)
def test_distributed_module_equals_one_device(case: str) -> None:
    kind, inputs, options = LAYOUTS[case]
    module = module_of(kind)
    before = copy.deepcopy(module.state_dict())
    distributed = fs.state.distribute_module(module, MESH, **options)
    check_equals_one_device(distributed, inputs)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


def test_locals_are_leaves_that_require_grad_as_the_parameters_do() -> None:
    module = module_of(TiedLanguageModel)
    module.embed.weight.requires_grad_(False)
    params = fs.state.distribute_module(module, MESH, fsdp="dp").params
    assert not params["embed.weight"].local[0].requires_grad
    shard = params["blocks.0.norm.weight"].local[0]
    assert shard.requires_grad
    assert shard.is_leaf
    assert type(shard) is torch.Tensor


def test_training_and_evaluation_follow_the_module() -> None:
    module = module_of(BatchNormNet)
    distributed = fs.state.distribute_module(module, MESH, in_specs=P("dp"))
    x = noise(8, 3, 4, 4)
    _, buffers = distributed(distributed.params, distributed.buffers, x)
    module.eval()
    y, same = distributed(distributed.params, buffers, x)
    for name, pair in same.items():
        assert torch.equal(fs.unshard(pair), fs.unshard(buffers[name]))
    module.load_state_dict(fs.state.tree_unshard({**distributed.params, **buffers}))
    assert_close(fs.unshard(y), module(x))


def test_torch_func_differentiates_distributed_modules() -> None:
    module = module_of(BatchNormNet)
    distributed = fs.state.distribute_module(module, MESH, in_specs=P("dp"), fsdp="tp")
    x = noise(8, 3, 4, 4)

    def loss(params: Any) -> Any:
        y, _ = distributed(params, distributed.buffers, x)
        return fs.unshard(y).sin().sum()

    grads = torch.func.grad(loss)(distributed.params)
    module(x).sin().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert_close(fs.unshard(grads[name]), parameter.grad, name)


def test_a_module_trains_as_on_one_device() -> None:
    module = module_of(TiedLanguageModel)
    options = LAYOUTS["tied, both"][2]
    distributed = fs.state.distribute_module(module, MESH, **options)
    optimizer = fs.state.adamw(0.01)
    params, state = distributed.params, optimizer.init(distributed.params)
    torch_optimizer = torch.optim.AdamW(module.parameters(), 0.01)

    def loss_of(params: Any) -> Any:
        output, _ = distributed(params, distributed.buffers, **TEXT)
        return objective(fs.state.tree_unshard(output))

    for _ in range(3):
        value, grads = fs.state.value_and_grad(loss_of)(params)
        state, params = optimizer.update(grads, state, params)
        torch_optimizer.zero_grad()
        loss = objective(module(**TEXT))
        loss.backward()
        torch_optimizer.step()
        assert_close(value, loss.detach())
    for name, parameter in module.named_parameters():
        assert_close(fs.unshard(params[name]), parameter.detach(), name)


def test_dropout_by_a_key_drops_the_elements_of_one_device() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4), nn.Dropout(0.1))
    styles = {"0": fs.state.colwise("tp"), "2": fs.state.rowwise("tp")}
    distributed = fs.state.distribute_module(module, MESH, in_specs=P("dp"), styles=styles)
    x = torch.randn(6, 4)
    outputs = []
    for seed in (0, 1):
        key = fs.random.key(seed)
        y, _ = distributed.keyed(key)(distributed.params, distributed.buffers, x)
        with fs.random.keyed(key):
            expected = module(x)
        outputs.append(fs.unshard(y))
        assert torch.equal(outputs[-1] == 0, expected == 0)
        torch.testing.assert_close(outputs[-1], expected)
    assert not torch.equal(*outputs)
    with pytest.raises(fs.ShardingError, match="draws must be keyed"):
        distributed(distributed.params, distributed.buffers, x)


# -- meta modules ----------------------------------------------------------------------------


class Rotary(nn.Module):
    """Module with a buffer that its constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("angles", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) * self.angles
        return y


def on_meta(kind: Any) -> nn.Module:
    with torch.device("meta"):
        module: nn.Module = kind()
    return module


def test_meta_modules_are_created_equally_on_every_mesh() -> None:
    expected = None
    for mesh in (Mesh(dp=1, tp=1), MESH, Mesh(dp=3, tp=1)):
        distributed = fs.state.distribute_module(
            on_meta(BatchNormNet), mesh, fsdp="dp", key=fs.random.key(1)
        )
        params = fs.state.tree_unshard(distributed.params)
        assert torch.equal(params["net.1.weight"], torch.ones(8))
        assert params["net.4.weight"].std() > 0.01
        expected = expected or params
        assert all(torch.equal(x, expected[name]) for name, x in params.items())
        assert torch.equal(fs.unshard(distributed.buffers["net.1.running_var"]), torch.ones(8))


def test_each_rank_creates_its_shards_of_a_meta_module() -> None:
    module = on_meta(lambda: nn.Linear(64, 64))
    options: dict[str, Any] = {"fsdp": ("dp", "tp"), "key": fs.random.key(0)}
    fs.state.distribute_module(module, MESH, **options)  # imports
    with LargestTensor() as largest:
        fs.state.distribute_module(module, MESH, **options)
    assert largest.numel <= 2 * 64 * 64 // 4


def test_tied_meta_modules_are_created_once_by_init_fn() -> None:
    def init_fn(module: Any) -> None:
        module.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
        module.scale.fill_(0.25)
        nn.init.normal_(module.embed.weight, std=0.02)

    module = on_meta(TiedLanguageModel)
    distributed = fs.state.distribute_module(
        module, MESH, partition=TENSOR_RULES, key=fs.random.key(0), init_fn=init_fn
    )
    weight = fs.unshard(distributed.params["embed.weight"])
    assert 0.01 < weight.std() < 0.03
    assert fs.unshard(distributed.buffers["scale"]) == 0.25
    output, _ = distributed(distributed.params, distributed.buffers, words(4, 6))
    assert output["logits"].shape == (4, 6, 12)
    assert all(x.is_meta for x in module.parameters())


def test_meta_modules_without_a_key_have_specs_to_load_to(tmp_path: Path) -> None:
    module = module_of(BatchNormNet)
    source = fs.state.distribute_module(module, MESH, in_specs=P("dp"), fsdp="dp")
    fs.state.save(tmp_path, {"params": source.params, "buffers": source.buffers})
    target = fs.state.distribute_module(
        on_meta(BatchNormNet).double(), Mesh(x=3), in_specs=None, fsdp="x"
    )
    assert target.params["net.4.weight"] == target.specs["params"]["net.4.weight"]
    state = fs.state.load(tmp_path, target.specs)
    y, buffers = target(state["params"], state["buffers"], noise(8, 3, 4, 4))
    assert str(state["params"]["net.4.weight"].spec) == "f64[8,128@x:chunk]"
    assert_close(fs.unshard(y), module(noise(8, 3, 4, 4)))
    assert_close(fs.unshard(buffers["net.1.running_mean"]), module.net[1].running_mean)


class WithConstant(nn.Module):
    """Module whose buffer is computed where it is constructed, and by no initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("inverse", 1 / torch.arange(1.0, 9.0))

    def reset_parameters(self) -> None:
        """Initialise the layer alone."""


def test_what_initialisation_does_not_write_is_nan_on_every_rank() -> None:
    with torch.device("meta"):
        module = WithConstant()
    distributed = fs.state.distribute_module(
        module, Mesh(x=2), partition=[(".*", P())], key=fs.random.key(0)
    )
    assert fs.unshard(distributed.buffers["inverse"]).isnan().all()
    assert not fs.unshard(distributed.params["layer.weight"]).isnan().any()


class WithPositions(WithConstant):
    """Module with a buffer of integers that its initialisation writes only with `write`."""

    def __init__(self, write: bool) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("positions", torch.arange(4))

    def reset_parameters(self) -> None:
        """Initialise the buffer."""
        if self.write:
            self.positions = torch.arange(4)


def test_integers_that_initialisation_does_not_write_are_refused() -> None:
    options: dict[str, Any] = {"key": fs.random.key(0), "partition": [(".*", P())]}
    with torch.device("meta"):
        modules = [WithPositions(True), WithPositions(False)]
    distributed = fs.state.distribute_module(modules[0], Mesh(x=2), **options)
    assert torch.equal(fs.unshard(distributed.buffers["positions"]), torch.arange(4))
    with pytest.raises(fs.ShardingError, match=r"positions of torch\.int64 on the meta device"):
        fs.state.distribute_module(modules[1], Mesh(x=2), **options)


def test_a_module_of_one_parameter_loads_by_its_specs(tmp_path: Path) -> None:
    linear = nn.Linear(4, 8, bias=False)
    distributed = fs.state.distribute_module(linear, Mesh(x=2), partition=[(".*", P("x"))])
    fs.state.save(tmp_path, {"params": distributed.params, "buffers": distributed.buffers})
    loaded = fs.state.load(tmp_path, {"params": distributed.specs["params"]})
    assert torch.equal(fs.unshard(loaded["params"]["weight"]), linear.weight)


def test_meta_modules_are_explained_with_the_gradients_of_parameters_alone() -> None:
    distributed = fs.state.distribute_module(on_meta(Rotary), MESH, in_specs=P("dp"))
    layouts, _ = str(distributed.explain(torch.empty(64, 4, device="meta"))).split("\nlaunches", 1)
    reduced = [above for above, row in pairwise(layouts.splitlines()) if row.startswith("←")]
    assert [row.split()[0] for row in reduced] == [
        "args[0][0]['layer.bias']",
        "args[0][0]['layer.weight']",
    ]


# -- errors and text -------------------------------------------------------------------------

ERRORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "unmatched": (mlp, {"partition": [(r".*weight", P())]}, r"0\.bias of shape \(32,\)"),
    "unused": (mlp, {"partition": [("x", P()), (".*", P())]}, "the rule 'x'"),
    "not divisible": (
        lambda: mlp(3),
        {"partition": [(r"2\.weight", P("tp")), (".*", P())]},
        r"dim 0 of size 3 must be divisible by 2.*\n.*uneven=\"chunk\"",
    ),
    "uneven": (mlp, {"uneven": "pad"}, 'uneven must be None or "chunk"'),
    "axis": (mlp, {"fsdp": "x"}, "an axis must be one of dp, tp"),
    "held": (mlp, {"hold": "x"}, "an axis must be one of dp, tp"),
    "no module": (lambda: len, {}, "the first argument must be a module"),
    "key": (mlp, {"key": fs.random.key(0)}, "must be on the meta device"),
    "without reset": (
        lambda: on_meta(Rotary),
        {"key": fs.random.key(0)},
        r"Rotary, a Rotary on the meta device without reset_parameters\(\)",
    ),
    "partly meta": (
        lambda: nn.Sequential(on_meta(mlp), mlp()),
        {},
        "must be on the meta device, or none",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_rule(case: str) -> None:
    build, options, message = ERRORS[case]
    with pytest.raises(fs.ShardingError, match=message):
        fs.state.distribute_module(build(), MESH, **options)


def test_uneven_dims_are_chunked() -> None:
    rules = [(r"2\.weight", P("tp")), (".*", P())]
    module = mlp(3).double()
    distributed = fs.state.distribute_module(module, MESH, partition=rules, uneven="chunk")
    assert str(distributed.params["2.weight"].spec) == "f64[3@tp:chunk,12]"
    check_equals_one_device(distributed, {"input": noise(4, 3)})


def test_rules_may_name_buffers() -> None:
    rules = [(r".*running_mean", P("tp")), (".*", P())]
    distributed = fs.state.distribute_module(module_of(BatchNormNet), MESH, partition=rules)
    assert str(distributed.buffers["net.1.running_mean"].spec) == "f64[8@tp]"
    _, buffers = distributed(distributed.params, distributed.buffers, noise(8, 3, 4, 4))
    assert buffers["net.1.running_mean"].spec == distributed.buffers["net.1.running_mean"].spec


def test_table_lists_layouts_and_all_names() -> None:
    distributed = fs.state.distribute_module(module_of(TiedLanguageModel), MESH, fsdp="dp")
    lines = str(distributed).splitlines()
    assert lines[0] == "TiedLanguageModel on Mesh(dp=2, tp=2): 13 parameters, 1 buffer"
    assert " ".join(lines[3].split()) == "embed.weight = out.weight f64[12@dp,8] 768 B 384 B"
    assert distributed._repr_mimebundle_()["text/plain"] == str(distributed)
    assert "linear" in str(distributed.explain(text=words(4, 6)))


# -- processes -------------------------------------------------------------------------------


def on_ranks(case: str) -> tuple[dict[str, torch.Tensor], ...]:
    fs.init(MESH)
    kind, inputs, options = LAYOUTS[case]
    distributed = fs.state.distribute_module(module_of(kind), MESH, **options)

    def loss_of(params: Any) -> Any:
        output, buffers = distributed(params, distributed.buffers, **inputs)
        return objective(fs.state.tree_unshard(output)), buffers

    (_, buffers), grads = fs.state.value_and_grad(loss_of, has_aux=True)(distributed.params)
    return fs.state.tree_unshard(grads), fs.state.tree_unshard(buffers)


@pytest.mark.parametrize("case", ["tied, both", "batch norm, FSDP"])
def test_processes_equal_one_device(case: str) -> None:
    kind, inputs, _ = LAYOUTS[case]
    module = module_of(kind)
    objective(module(**inputs)).backward()
    for grads, buffers in run_ranks(4, on_ranks, case):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            assert_close(grads[name], parameter.grad, name)
        for name, buffer in module.named_buffers():
            assert_close(buffers[name], buffer, name)


def synchronized() -> tuple[dict[str, Any], int]:
    fs.init(mesh := Mesh(x=3))
    rank = torch.distributed.get_rank()
    state = {
        "w": torch.full((2, 3), float(rank), dtype=torch.bfloat16),
        "n": torch.tensor(rank),
        "mask": torch.tensor([rank == 1, True]),
        "empty": torch.zeros(0),
        "name": "other",
    }
    with fs.comm_log() as log:
        result = fs.state.sync_module(state, mesh, src=1)
    return result, sum(log.counts.values())


def test_all_ranks_get_the_values_of_one_by_one_launch() -> None:
    for result, launches in run_ranks(3, synchronized):
        assert launches == 1
        assert torch.equal(result["w"], torch.ones(2, 3, dtype=torch.bfloat16))
        assert result["n"] == 1
        assert result["mask"].tolist() == [True, True]
        assert result["name"] == "other"


def test_sync_module_copies_in_a_simulation_and_checks_the_rank() -> None:
    module = mlp()
    state = fs.state.sync_module(module.state_dict(), MESH, src=3)
    assert torch.equal(state["0.weight"], module[0].weight)
    assert state["0.weight"] is not module[0].weight
    with pytest.raises(fs.ShardingError, match="src must be a rank of"):
        fs.state.sync_module({}, MESH, src=4)
