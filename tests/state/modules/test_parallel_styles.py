"""Parallel styles: layouts of parameters, constraints at boundaries, and their errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import Mesh, P
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.ops.block_cases import collectives_of
from tests.state.modules.module_cases import (
    TiedLanguageModel,
    assert_close,
    check_equals_one_device,
    noise,
    words,
)

MESH = Mesh(dp=2, tp=2)
state = fs.state
COLWISE, ROWWISE = state.colwise("tp"), state.rowwise("tp")


class Block(nn.Module):
    """Pre-norm attention and feed-forward layers, called by keyword, as in transformers."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp = MLP(width)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (layer(x).view(split).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        z: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return z

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y, _ = self.mlp(hidden=self.norm2(x))
        return x + y


class MLP(nn.Module):
    """Layer that returns a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.up(hidden).relu()
        return self.down(y), y


class Stack(nn.Module):
    """Blocks, a norm, logits and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 12)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        logits = self.out(self.norm(x))
        loss: Tensor = self.loss(logits.flatten(0, 1), labels.flatten())
        return loss


def stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack().double()


INPUTS = {"x": noise(4, 6, 8), "labels": words(4, 6)}
TENSOR = {
    r"layers\.\d+\.[qkv]": COLWISE,
    r"layers\.\d+\.o": ROWWISE,
    r"layers\.\d+\.mlp\.up": COLWISE,
    r"layers\.\d+\.mlp\.down": ROWWISE,
    "out": COLWISE,
    "loss": state.loss_parallel("tp"),
}
SEQUENCE = {
    r"layers\.\d+\.norm\d|norm": state.sequence("tp"),
    r"layers\.\d+\.o": state.rowwise("tp", output=1),
    r"layers\.\d+\.mlp\.down": state.rowwise("tp", output=1),
    r"layers\.\d+\.mlp": state.prepare_input("tp", {"hidden": None}),
    **{pattern: style for pattern, style in TENSOR.items() if style is not ROWWISE},
}
PLANS: dict[str, tuple[dict[str, fs.state.Style], dict[str, Any]]] = {
    "tensor": (TENSOR, {}),
    "tensor and data": (TENSOR, {"in_specs": P("dp")}),
    "tensor and FSDP": (TENSOR, {"in_specs": P("dp"), "fsdp": "dp"}),
    "sequence": (SEQUENCE, {"in_specs": (P("dp", "tp"), P("dp"))}),
    "sequence and FSDP": (SEQUENCE, {"in_specs": (P("dp", "tp"), P("dp")), "fsdp": "dp"}),
}


@pytest.mark.parametrize("case", PLANS)
def test_styles_equal_one_device(case: str) -> None:
    styles, options = PLANS[case]
    distributed = state.distribute_module(stack(), MESH, styles=styles, **options)
    check_equals_one_device(distributed, INPUTS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in distributed.module.modules())


def collectives(case: str, length: int = 1024, words: int = 12) -> tuple[Counter[str], ...]:
    """Return the number of collectives over `tp` of both passes, on long sequences."""
    styles, options = PLANS[case]
    module = stack()
    module.out = nn.Linear(8, words).double()
    distributed = state.distribute_module(module, MESH, styles=styles, **options)
    x = torch.empty(4, length, 8, dtype=torch.float64, device="meta")
    labels = torch.empty(4, length, dtype=torch.int64, device="meta")
    call = distributed.partition.trace((distributed.params, distributed.buffers, None), x, labels)
    return tuple(
        Counter({op: n for (op, axes), n in counts.items() if axes == ("tp",)})
        for counts in collectives_of(call)
    )


def test_tensor_styles_send_what_megatron_does() -> None:
    """Each layer sums activations twice in each pass, and the logits' layer once backward.

    The loss takes the maximum and the sum of each row, and the logit of the target, if it is sent
    apart.
    """
    forward, backward = collectives("tensor and data", words=4096)
    assert set(forward) == {"AllReduce"}
    assert forward["AllReduce"] in (4 + 2, 4 + 3)
    assert backward["AllReduce"] == 4 + 1
    assert set(backward) == {"AllReduce"}


def test_sequence_styles_gather_and_reduce_scatter() -> None:
    """Gathers before attention, feed-forward layer and logits, and scatters after the first two."""
    forward, backward = collectives("sequence", words=4096)
    assert (forward["AllGather"], forward["ReduceScatter"]) == (4 + 1, 4)
    assert (backward["ReduceScatter"], backward["AllGather"]) == (4 + 1, 4)


def test_outputs_are_constrained_by_position_or_path() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), MLP(8)).double()
    for key in (1, "1"):
        styles = {"1": state.prepare_output("tp", {key: -1})}
        distributed = state.distribute_module(module, MESH, styles=styles, in_specs=P("dp"))
        (_, hidden), _ = distributed(distributed.params, distributed.buffers, noise(4, 8))
        assert str(hidden.spec) == "f64[4@dp,32@tp]"


def test_embeddings_and_transposed_layers() -> None:
    module = TiedLanguageModel().double()
    for embed, out in ((ROWWISE, COLWISE), (COLWISE, ROWWISE)):
        styles = {"embed": embed, "out": out}
        distributed = state.distribute_module(
            module, MESH, styles=styles, in_specs={"text": P("dp"), "shift": None}
        )
        check_equals_one_device(distributed, {"text": words(4, 6), "shift": 0.0})
    assert distributed.params["embed.weight"].spec.partition == P(None, "tp")


def test_rules_give_the_layout_of_other_parameters() -> None:
    rules = [(r".*\.weight", P("dp")), (r".*", P())]
    distributed = state.distribute_module(
        stack(), MESH, partition=rules, styles={r"layers\.0\.mlp\.up": COLWISE}
    )
    assert str(distributed.params["layers.0.mlp.up.weight"].spec) == "f64[32@tp,8]"
    assert str(distributed.params["layers.1.mlp.up.weight"].spec) == "f64[32@dp,8]"


ERRORS: dict[str, tuple[dict[Any, Any], str]] = {
    "unused": ({"layers.0.up": COLWISE}, "the style 'layers.0.up'"),
    "pattern": ({"(": COLWISE}, r"styles must map regular expressions"),
    "no style": ({"out": "colwise"}, r"'colwise' for 'out'"),
    "module": ({r"layers\.0\.norm1": COLWISE}, "a LayerNorm"),
    "argument": (
        {r"layers\.0\.mlp": state.prepare_input("tp", {"hiden": None})},
        "an argument must be one of hidden, mask",
    ),
    "axis": ({"out": state.colwise("x")}, "an axis must be one of dp, tp"),
}


BAD_STYLES: dict[str, Callable[[], Any]] = {
    "axes must be a name": lambda: state.colwise(3),  # type: ignore[arg-type]
    "an axis must be named once": lambda: state.colwise(("tp", "tp")),
    "the dim 'x' of 0": lambda: state.colwise("tp", output="x"),  # type: ignore[arg-type]
    "must map positions or names": lambda: state.prepare_input(
        "tp", [0]),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("rule", BAD_STYLES)
def test_styles_that_fit_no_module_are_refused(rule: str) -> None:
    with pytest.raises(fs.ShardingError, match=rule):
        BAD_STYLES[rule]()


@pytest.mark.parametrize("case", ERRORS)
def test_errors_of_plans_name_the_rule(case: str) -> None:
    styles, message = ERRORS[case]
    with pytest.raises(fs.ShardingError, match=message):
        state.distribute_module(stack(), MESH, styles=styles)


CALL_ERRORS: dict[str, tuple[fs.state.Style, str]] = {
    "dim": (state.prepare_input("tp", {0: 3}), r"dim 3 of a tensor of shape \(4, 6, 8\)"),
    "result": (state.prepare_output("tp", {2: 0}), "the result 2"),
}


@pytest.mark.parametrize("case", CALL_ERRORS)
def test_errors_of_calls_name_the_module(case: str) -> None:
    style, message = CALL_ERRORS[case]
    distributed = state.distribute_module(stack(), MESH, styles={r"layers\.1\.mlp": style})
    with pytest.raises(fs.ShardingError, match=message) as caught:
        distributed(distributed.params, distributed.buffers, **INPUTS)
    assert r"of 'layers.1.mlp'" in str(caught.value)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in distributed.module.modules())


def test_a_tied_weight_has_one_layout() -> None:
    with pytest.raises(fs.ShardingError, match="a tied weight must have one layout"):
        state.distribute_module(
            TiedLanguageModel(), MESH, styles={"embed": COLWISE, "out": COLWISE}
        )


# -- beside DTensor --------------------------------------------------------------------------


def beside_dtensor() -> list[tuple[Tensor, Tensor]]:
    """Return losses and gradients by styles, each with that of DTensor's `parallelize_module`."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    fs.init(mesh := Mesh(tp=2))
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()
    x = noise(2, 4, 8)
    styles = {"0": state.sequence("tp"), "1": COLWISE, "3": state.rowwise("tp", output=1)}
    distributed = state.distribute_module(module, mesh, styles=styles)

    def loss_of(params: Any) -> Any:
        y, _ = distributed(params, distributed.buffers, x)
        assert str(y.spec) == "f64[2,4@tp,8]"
        return fs.unshard(y).sin().sum()

    value, grads = state.value_and_grad(loss_of)(distributed.params)
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallel = parallelize_module(module, mesh.to_device_mesh(), plan)
    y = parallel(DTensor.from_local(x, mesh.to_device_mesh(), [Replicate()], run_check=False))
    loss = y.full_tensor().sin().sum()
    loss.backward()
    pairs = [(value, loss.detach())]
    for name, parameter in parallel.named_parameters():
        assert parameter.grad is not None
        pairs.append((fs.unshard(grads[name]), parameter.grad.full_tensor()))
    return pairs


def test_styles_equal_dtensors_on_processes() -> None:
    for pairs in run_ranks(2, beside_dtensor):
        assert len(pairs) == 7
        for actual, expected in pairs:
            assert_close(actual, expected)
