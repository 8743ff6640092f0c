"""Image models with sharded space: values, gradients, and what they send."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import HaloExchange, HaloReduce, Mesh, P, Spec
from fshard.partition.ir import Operation, Redistribution
from fshard.partition.partitioned_call import PartitionedCall
from tests.helpers.ops.blocks import image, unet

F64 = torch.float64
MESH = Mesh(dp=1, h=2, w=2)
SPATIAL = P("dp", None, "h", "w")


def sent_by(call: PartitionedCall) -> Counter[str]:
    """Return how many steps of each type send forward."""
    steps: Counter[str] = Counter()
    for prog in call.programs:
        sends = zip(prog.steps, prog.step_bytes, strict=True)
        steps.update(type(step).__name__ for step, sent in sends if sent)
    return steps


def spatial(call: PartitionedCall, least: int) -> tuple[int, int]:
    """Return the numbers of results of four dims of at least `least` elements: sharded, all."""
    specs = [
        spec
        for line in call.lines
        if isinstance(line, Operation)
        for spec in line.strategy.out_specs
        if spec is not None and spec.ndim == 4 and min(spec.shape[2:]) >= least
    ]
    sharded = [spec for spec in specs if all(spec.partition.dims[2:])]
    return len(sharded), len(specs)


def check_model(model: Any, x: torch.Tensor, spec: Spec) -> PartitionedCall:
    """Compare a model's values and gradients with one device; return the partitioned call."""
    params = dict(model.named_parameters())
    part = fs.partition(model, mesh=spec.mesh, params=P(), in_specs=spec)
    inputs = [x.requires_grad_(), *params.values()]
    outputs = part(dict(model.state_dict(keep_vars=True)), x), model(x)
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
    weight = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    grads = [torch.autograd.grad((y * weight).sum(), inputs) for y in outputs]
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-8)
    return part.trace(dict(model.state_dict(keep_vars=True)), x)


@pytest.mark.parametrize("sizes", [None, {2: (9, 7), 3: (3, 9)}], ids=["even", "uneven"])
def test_unet_sends_halos_and_reductions(sizes: Any) -> None:
    """Every activation stays sharded in space; nothing is gathered."""
    x = image(16, 12)
    spec = Spec(MESH, SPATIAL, shape=x.shape, dtype=F64, sizes=sizes)
    call = check_model(unet(), x, spec)
    sharded, results = spatial(call, 2)
    assert sharded == results > 30
    steps = sent_by(call)
    assert steps.keys() <= {"HaloExchange", "AllReduce", "Exchange"}
    # Tensors of other shard sizes are aligned before they are joined.
    assert steps["Exchange"] <= 4
    backward = {type(step) for prog in call.programs for step in prog.T.steps}
    assert {HaloReduce} <= backward
    assert not any("gathered" in line for line in str(call).splitlines())


def test_axes_that_may_be_replicated_are_gathered_if_that_is_faster() -> None:
    x, model = image(8, 8), unet()
    for replicate, gathers in ((), False), (("h", "w"), True):
        part = fs.partition(model, mesh=MESH, params=P(), in_specs=SPATIAL, replicate=replicate)
        text = str(part.explain(dict(model.named_parameters()), x))
        assert ("all_gather" in text or "gathered along" in text) == gathers


def test_training_step_of_a_unet() -> None:
    """The gradients that a function computes, by the rules of the backward operations."""
    model, x = unet(), image(8, 12)
    params: dict[str, torch.Tensor] = dict(model.named_parameters())

    def step(params: dict[str, torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        loss = torch.func.functional_call(model, params, (x,)).square().mean()
        return list(torch.autograd.grad(loss, list(params.values())))

    spec = Spec(MESH, SPATIAL, shape=x.shape, dtype=F64, sizes={2: (3, 5), 3: (4, 8)})
    part = fs.partition(step, mesh=MESH, params=P(), in_specs=spec, out_specs=P())
    torch.testing.assert_close(part(params, x), step(params, x), rtol=1e-9, atol=1e-9)
    steps = sent_by(part.trace(params, x))
    assert steps["HaloReduce"] >= 6
    halos = [
        line for line in part.trace(params, x).lines
        if isinstance(line, Redistribution) and isinstance(line.program.steps[-1], HaloExchange)
    ]  # fmt: skip
    sources = Counter((line.source.value, line.program) for line in halos)
    assert max(sources.values()) == 1  # a window is exchanged once, for forward and backward
