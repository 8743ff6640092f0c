"""Image models of other packages with sharded space equal one device; skipped if not installed.

Every activation stays sharded in space but the last few pixels, and what is sent are halos, sums,
and, of attention between all pixels, keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import AllReduce, Exchange, HaloExchange, HaloReduce, Mesh, P, Spec
from fshard.partition.ir import Operation
from fshard.partition.partitioned_call import PartitionedCall
from tests.partition.models.model_checks import InFloat64, tensors_in
from tests.partition.models.zoo import noise

F64 = torch.float64
BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
FEW = 32
"""Pixels that need not be sharded."""


class Case(NamedTuple):
    """Module, the size of its image, and other arguments; `attends` if all pixels attend to all."""

    module: nn.Module
    size: tuple[int, ...]
    channels: int = 3
    rest: tuple[Tensor, ...] = ()
    attends: bool = False


def steps() -> Tensor:
    """Return a time step of a denoiser for each of two samples."""
    return torch.tensor([1, 5])


def unet2d() -> Case:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    return Case(UNet2DModel(**BLOCKS, **blocks, add_attention=False), (22, 30), 3, (steps(),))


def unet2d_attention() -> Case:
    from diffusers import UNet2DModel

    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    blocks = {"down_block_types": down, "up_block_types": up, "attention_head_dim": 4}
    return Case(UNet2DModel(**BLOCKS, **blocks), (22, 30), 3, (steps(),), True)


def unet2d_condition() -> Case:
    from diffusers import UNet2DConditionModel

    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    blocks = {"down_block_types": down, "up_block_types": up, "attention_head_dim": 4}
    model = UNet2DConditionModel(**BLOCKS, **blocks, cross_attention_dim=16)
    return Case(model, (22, 30), 4, (steps(), noise(2, 6, 16)), True)


def autoencoder() -> Case:
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2,
              "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip
    return Case(AutoencoderKL(**BLOCKS, **blocks), (22, 30), attends=True)


def convnext() -> Case:
    import timm

    model = timm.create_model(
        "convnext_atto", num_classes=10, depths=(1, 1, 2, 1), dims=(8, 16, 16, 32)
    )
    return Case(model, (75, 67))


def resnet50() -> Case:
    from torchvision.models import resnet50

    return Case(resnet50(weights=None, num_classes=10), (61, 75))


def r3d() -> Case:
    from torchvision.models.video import r3d_18

    return Case(r3d_18(weights=None, num_classes=5), (5, 21, 35))


def fcn() -> Case:
    from torchvision.models.segmentation import fcn_resnet50

    return Case(fcn_resnet50(weights=None, weights_backbone=None, num_classes=4), (61, 75))


def deeplab() -> Case:
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large as model

    return Case(model(weights=None, weights_backbone=None, num_classes=4), (61, 75))


QUICK = (unet2d, unet2d_attention, convnext)
CASES = [
    *QUICK,
    *(pytest.param(case, marks=pytest.mark.slow)
      for case in (unet2d_condition, autoencoder, resnet50, r3d, fcn, deeplab)),
]  # fmt: skip


def uneven_sizes(size: tuple[int, ...], layout: str) -> dict[str, Any]:
    """Return the shard sizes of the last two dims of an image: even, chunks, or far from even."""
    if layout == "chunk":
        return {"uneven": "chunk"}
    first = len(size) - 2 + 2
    rows, columns = 5 * size[-2] // 8, size[-1] // 3
    return {"sizes": {first: (rows, size[-2] - rows), first + 1: (columns, size[-1] - columns)}}


def is_image(spec: Spec) -> bool:
    """Return True for values of more than a few pixels, not of channels alone."""
    return math.prod(spec.shape[2:]) > FEW and sum(size > 1 for size in spec.shape[1:]) > 1


def check_sharded(call: PartitionedCall, case: Case, ndim: int) -> None:
    """Assert that "h" and "w" shard all results of more than a few pixels."""
    specs = [
        spec
        for line in call.lines
        if isinstance(line, Operation)
        for spec in line.strategy.out_specs
        if spec is not None
    ]
    pixels = [
        spec
        for spec in specs
        if (spec.ndim == ndim and is_image(spec))
        or (case.attends and spec.ndim == 3 and math.prod(spec.shape[1:]) > 1000)
    ]
    unsharded = [
        str(spec)
        for spec in pixels
        if not {"h", "w"} <= {axis for dim in spec.partition.dims for axis in dim}
    ]
    assert len(pixels) > 30
    assert unsharded == []


def busy_dims(spec: Spec) -> list[list[str]]:
    """Return the axes of several ranks that shard each dim."""
    return [[axis for axis in dim if spec.mesh.shape[axis] > 1] for dim in spec.partition.dims]


def check_traffic(call: PartitionedCall, attends: bool) -> None:
    """Assert that halos and sums are sent, and blocks of images only where all pixels attend.

    Tensors of other shard sizes are aligned, by some rows, before they are joined.
    """
    for prog in call.programs:
        for program in (prog, prog.T):
            aligns = busy_dims(program.src) == busy_dims(program.dst)
            sends = zip(program.steps, program.specs[1:], program.step_bytes, strict=True)
            for step, spec, sent in sends:
                if isinstance(step, HaloExchange | HaloReduce) or not sent:
                    continue
                if isinstance(step, AllReduce) and (program is not prog or not is_image(spec)):
                    continue
                local = max(map(program.src.local_nbytes, call.mesh.ranks))
                if not (aligns and isinstance(step, Exchange) and sent < local):
                    assert attends, f"{program}: {step}"


@pytest.mark.filterwarnings("ignore")  # the packages' own
@pytest.mark.parametrize("layout", ["chunk", "sizes"])
@pytest.mark.parametrize("build", CASES)
def test_model_with_sharded_space_equals_one_device(build: Callable[[], Case], layout: str) -> None:
    torch.manual_seed(0)
    try:
        case = build()
    except ImportError as error:
        pytest.skip(f"the extra `models` is not installed: {error}")
    module = case.module.double().train()
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
    mesh, x = Mesh(dp=2 if layout == "chunk" else 1, h=2, w=2), noise(2, case.channels, *case.size)
    partition = P("dp", *(None,) * (x.ndim - 3), "h", "w")
    spec = Spec(mesh, partition, shape=x.shape, dtype=F64, **uneven_sizes(case.size, layout))

    def outputs(state: dict[str, Tensor], *args: Tensor) -> list[Tensor]:
        with InFloat64():
            return list(tensors_in(torch.func.functional_call(module, state, args)))

    part = fs.partition(outputs, mesh=mesh, params=P(),
                        in_specs=(spec, *(P("dp"),) * len(case.rest)))  # fmt: skip
    results = []
    for run in (outputs, part):
        state = {k: v.detach().clone() for k, v in module.state_dict().items()}
        leaves = [state[name].requires_grad_() for name, _ in module.named_parameters()]
        ys = run(state, x.requires_grad_(), *case.rest)
        loss = torch.stack([(0.7 * y + 0.3 * y.square()).sin().mean() for y in ys]).sum()
        grads = torch.autograd.grad(loss, [x, *leaves], allow_unused=True)
        buffers = [state[name] for name, _ in module.named_buffers()]
        results.append((ys, [g for g in grads if g is not None], buffers))
    call = part.trace({k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in
                       module.state_dict(keep_vars=True).items()}, x, *case.rest)  # fmt: skip
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)
    check_sharded(call, case, x.ndim)
    check_traffic(call, case.attends)
