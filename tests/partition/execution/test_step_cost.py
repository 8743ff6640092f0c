"""Time and memory of steps, beside formulas computed by hand and counted on one device."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fshard as fs
from fshard import P
from fshard.partition.step_cost.memory_timeline import CATEGORIES
from fshard.partition.step_cost.roofline import Roofline

BATCH, IN, HIDDEN = 64, 32, 128
MESH = fs.Mesh(dp=2, tp=4)


def mlp(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the loss of a perceptron."""
    return (torch.relu(x @ p["up"]) @ p["down"]).square().mean()


def sample_params() -> dict[str, torch.Tensor]:
    """Return parameters without values."""
    shapes = {"up": (IN, HIDDEN), "down": (HIDDEN, IN)}
    return {
        name: torch.empty(shape, device="meta", requires_grad=True)
        for name, shape in shapes.items()
    }


def megatron(**options: Any) -> Any:
    """Return the planned step of a perceptron in tensor and data parallel."""
    part = fs.partition(mlp, mesh=MESH, params={"up": P(None, "tp"), "down": P("tp")},
                        in_specs=P("dp"), out_specs=P(), **options)  # fmt: skip
    return part.trace(sample_params(), torch.empty(BATCH, IN, device="meta"))


def flops_of(roofline: Roofline, *names: str) -> dict[str, int]:
    """Return FLOPs by phase of the events of some names."""
    phases: dict[str, int] = {}
    for event in roofline.events:
        if event.name in names:
            phases[event.phase] = phases.get(event.phase, 0) + event.flops
    return phases


def test_flops_of_a_perceptron_are_two_for_each_weight_and_row() -> None:
    flops = flops_of(megatron().roofline(), "matmul", "matmul_1")
    forward = 2 * (IN * HIDDEN + HIDDEN * IN) * BATCH // MESH.size
    # The first product has no gradient for the data: one product less than twice the forward's.
    assert flops == {"forward": forward, "backward": 2 * forward - forward // 2}


def test_time_of_a_product_is_the_roofline() -> None:
    topology = fs.Topology("test", memory=1e9, flops=(("float32", 1e11),), kernel=1e-6)
    part = fs.partition(torch.matmul, mesh=fs.Mesh(x=2), in_specs=(P("x"), P()))
    for rows, bound in ((2, "memory"), (2000, "compute")):
        a, b = torch.empty(rows, 4096, device="meta"), torch.empty(4096, 4096, device="meta")
        (event,) = part.trace(a, b).roofline(topology).events
        flops = 2 * rows // 2 * 4096 * 4096
        nbytes = 4 * (4096 * rows // 2 + 4096 * 4096 + 4096 * rows // 2)
        assert (event.flops, event.nbytes, event.bound) == (flops, nbytes, bound)
        assert event.time == pytest.approx(max(flops / 1e11, nbytes / 1e9) + 1e-6)


def test_totals_add_up_and_the_share_of_the_longest_limit_is_the_bound() -> None:
    roofline = megatron().roofline(fs.Topology.dgx_h100())
    compute = sum(event.time for event in roofline.of("compute"))
    assert roofline.time == pytest.approx(compute + roofline.exposed)
    assert sum(roofline.passes) == pytest.approx(roofline.time)
    assert sum(roofline.shares.values()) == pytest.approx(roofline.time)
    assert roofline.time <= roofline.time_in_turn
    assert roofline.bound == "communication"
    assert json.loads(json.dumps(roofline.to_dict()))["flops"] == roofline.flops
    assert "bound by communication" in roofline.bound_text


def test_collectives_are_those_of_the_cost() -> None:
    call = megatron()
    for backward, phase in ((False, "forward"), (True, "backward")):
        cost, events = call.cost(backward=backward), call.roofline().of("communication", phase)
        assert len(events) == cost.launches
        assert sum(event.nbytes for event in events) == cost.bytes_sent


def test_bytes_of_uneven_layouts_are_those_of_the_busiest_rank_of_the_pass() -> None:
    """The first rank sends most in one gather, the second in the other."""
    mesh = fs.Mesh(x=2)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return fs.constrain(b * fs.constrain(a * 2, P()).sum(), P())

    src = fs.Spec(mesh, P("x"), shape=(4, 8), sizes={0: (1, 3)})
    args = [fs.shard(torch.ones(4, 8), spec) for spec in (src, src.replace(sizes={0: (3, 1)}))]
    part = fs.partition(fn, mesh=mesh)
    call = part.trace(*args)
    with fs.comm_log() as log:
        part(*args)
    assert call.cost().bytes_sent == log.total_bytes == 32 + 96
    assert call.cost().bytes_received == 96 + 32
    assert {row[0]: row[2] for row in call.explain(only="layouts").footer}["sent"] == "128 B"
    assert fs.Cost.in_turn(prog.cost() for prog in call.programs).bytes_sent == 2 * 96


def test_launched_gathers_hide_behind_the_computation() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    part = fs.partition(net, mesh=fs.Mesh(dp=4), params=P("dp"), in_specs=P("dp"),
                        topology=fs.Topology.dgx_h100())  # fmt: skip
    x = torch.empty(16384, 1024, device="meta")
    roofline = part.trace(dict(net.named_parameters()), x).roofline()
    hidden = [x for x in roofline.of("communication", "forward") if not x.waited]
    assert hidden
    assert all(roofline.overlapped(event) for event in hidden)
    assert roofline.hidden == pytest.approx(roofline.communication - roofline.exposed)
    assert roofline.time < roofline.time_in_turn


def test_explain_shows_one_kind_on_request_and_refuses_others() -> None:
    call = megatron()
    assert "matmul" not in str(call.explain(only="communication"))
    assert "all_reduce(" not in str(call.explain(only="compute"))
    assert str(call.roofline().table("compute")) == str(call.explain(only="compute"))
    with pytest.raises(fs.ShardingError, match="only must be"):
        call.explain(only="bytes")


def test_equal_layers_are_folded_with_their_source_lines() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6)))

    def fn(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for i in range(6):
            y = torch.nn.functional.linear(x, p[f"{i}.weight"], p[f"{i}.bias"])
            x = x + torch.nn.functional.gelu(y)
        return x

    call = fs.partition(fn, mesh=fs.Mesh(x=2), params=P(), in_specs=P("x")).trace(
        dict(layers.named_parameters()), torch.empty(4, 16)
    )
    text = str(call.explain(only="compute"))
    assert "each of 6 layers:" in text
    assert text.count("test_step_cost.py:") == 2
    assert text.count("linear") == 1
    # The first layer keeps the argument, which the caller holds.
    assert "each of 5 layers:" in str(call.explain(only="layouts"))


def test_memory_of_a_perceptron() -> None:
    call = megatron()
    memory = call.memory(optimizer=2)
    held = dict(zip(CATEGORIES, memory.timeline[0].held, strict=True))
    parameters = 4 * 2 * IN * HIDDEN // 4
    assert held["parameters"] == parameters
    assert held["optimizer"] == 2 * parameters
    assert held["arguments"] == 4 * BATCH // 2 * IN
    assert (
        sum(memory.at_peak.values())
        == memory.peak
        == sum(x.nbytes for x in memory.values) + (held["optimizer"])
    )
    end = dict(zip(CATEGORIES, memory.timeline[-1].held, strict=True))
    assert end["gradients"] == parameters
    assert end["activations"] == end["gathered"] == 0
    assert json.loads(json.dumps(memory.to_dict()))["peak"] == memory.peak
    assert max(map(len, str(memory).splitlines())) <= 80


def test_saved_activations_are_those_of_saved_bytes() -> None:
    call = megatron()
    forward = [x for x in call.memory().timeline if x.phase == "forward"][-1]
    held = dict(zip(CATEGORIES, forward.held, strict=True))
    saved = call.saved_bytes()
    assert (held["activations"], held["gathered"]) == (saved.activations, saved.gathered)


@pytest.mark.parametrize("form", ["tree", "optimizer"])
def test_optimizer_state_by_tree_or_optimizer(form: str) -> None:
    call = megatron()
    specs = [spec for spec, grad in zip(call.in_specs, call.requires_grad, strict=True) if grad]
    optimizer = fs.state.adamw(1e-3) if form == "optimizer" else {"m": specs, "v": specs}
    assert call.memory(optimizer=optimizer).at_peak["optimizer"] == 2 * 4 * 2 * IN * HIDDEN // 4


def test_remat_frees_gathered_parameters() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))
    x = torch.empty(4096, 256, device="meta")
    peaks = {}
    for remat in (None, "gathers"):
        part = fs.partition(net, mesh=fs.Mesh(dp=4), params=P("dp"), in_specs=P("dp"), remat=remat)
        call = part.trace(dict(net.named_parameters()), x)
        forward = [x for x in call.memory().timeline if x.phase == "forward"][-1]
        peaks[remat] = forward.held[CATEGORIES.index("gathered")]
        again = call.roofline().of("communication", "recompute")
        assert bool(again) == (remat is not None)
    assert peaks == {None: 4 * 7 * 256 * 256, "gathers": 0}


def one_device_flops(fn: Any, *args: Any) -> int:
    """Return the FLOPs that PyTorch's counter counts in a forward and a backward pass."""
    with FlopCounterMode(display=False) as counter:
        fn(*args).backward()
    return int(counter.get_total_flops())


def llama() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a small Llama of transformers, with attention as products, and token ids."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), torch.zeros(4, 8, dtype=torch.long)


def convolutions() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a small network of convolutions, one of them in groups, and images."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, padding=1, groups=8), torch.nn.Conv2d(8, 16, 1),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10),
    )  # fmt: skip
    return net, torch.randn(4, 3, 16, 16)


@pytest.mark.parametrize("make", [llama, convolutions])
def test_flops_of_models_are_those_of_one_device_by_ranks(make: Any) -> None:
    model, x = make()

    def loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model, p, (x,))
        values: torch.Tensor = getattr(out, "logits", out)
        return values.float().square().mean()

    params, mesh = dict(model.named_parameters()), fs.Mesh(dp=2)
    call = fs.partition(loss, mesh=mesh, params=P(), in_specs=P("dp")).trace(params, x)
    assert call.roofline().product_flops * mesh.size == one_device_flops(loss, params, x)


def test_weights_of_inference_are_parameters() -> None:
    part = fs.partition(torch.matmul, mesh=fs.Mesh(x=2), params=P(), in_specs=P(None, "x"))
    memory = part.trace(torch.empty(4, 8), torch.empty(8, 6)).memory()
    assert memory.at_peak["parameters"] == 4 * 8 * 4
    assert memory.at_peak["arguments"] == 8 * 3 * 4


@pytest.mark.parametrize(
    ("topology", "latency", "bandwidth"),
    [
        (fs.Topology.tpu_v5p((4, 4, 16)), 1e-6, 9e10),
        (fs.Topology("test", message=0.1), 0.1, 3.6e11),
    ],
    ids=("ring", "switch"),
)
def test_ppermute_sends_one_message_to_the_next_rank(
    topology: fs.Topology, latency: float, bandwidth: float
) -> None:
    mesh = fs.Mesh(c=16) if topology.node_size is None else fs.Mesh(a=4, b=4, c=16)
    ring = [(i, (i + 1) % 16) for i in range(16)]
    shift = fs.shard_map(lambda x: fs.ppermute(x, "c", ring), mesh=mesh, in_specs=P("c"),
                         out_specs=P("c"))  # fmt: skip
    part = fs.partition(shift, mesh=mesh, in_specs=P("c"))
    (event,) = part.trace(torch.empty(16 * 1024, 1024, device="meta")).roofline(topology).events
    startup = topology.launch + (0.6e-6 if topology.node_size is None else 0.0)
    assert event.name == "ppermute(c)"
    assert event.time == pytest.approx(startup + latency + 1024 * 4096 / bandwidth)


def test_complex_products_count_eight_for_each_multiplication() -> None:
    part = fs.partition(torch.matmul, mesh=fs.Mesh(x=2), in_specs=(P("x"), P()))
    a, b = (torch.empty(64, 64, dtype=torch.complex64, device="meta") for _ in range(2))
    topology = fs.Topology("test", kernel=0.0, memory=1e15,
                           flops={"float32": 1e12, "float64": 1e9})  # fmt: skip
    (event,) = part.trace(a, b).roofline(topology).events
    assert (event.flops, event.time) == (8 * 32 * 64 * 64, pytest.approx(8 * 32 * 64 * 64 / 1e12))


def test_layers_of_lstms_count_products() -> None:
    layer, rows = torch.nn.LSTM(16, 8, batch_first=True), 4 * 10
    part = fs.partition(lambda x: layer(x)[0], mesh=fs.Mesh(dp=2), in_specs=P("dp"))
    once = 2 * rows * 4 * 8 * (16 + 8)
    x = torch.empty(8, 10, 16, device="meta", requires_grad=True)
    assert part.trace(x).roofline().product_flops == 3 * once


def test_steps_without_elements_hold_nothing() -> None:
    part = fs.partition(torch.relu, mesh=fs.Mesh(x=2), in_specs=P("x"))
    memory = part.trace(torch.empty(0, 4, requires_grad=True)).memory()
    assert (memory.peak, memory.places) == (0, {})
    assert "0 B" in str(fs.visualize(memory))
