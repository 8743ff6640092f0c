"""Train an `nn.Module` data-parallel: the loop that you have, and a decorator on the loss.

    python examples/data_parallel.py                        # 4 simulated devices in one process
    torchrun --nproc-per-node 4 examples/data_parallel.py   # 4 real processes, the same losses

The module stays as it is, and so do the optimizer and `loss.backward()`. What the mapped function
closes over is one value on every device, and its gradient is the sum of what all of them find. A
second module, trained without fshard, must have come to the same numbers.
"""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import fshard as fs
from fshard import P

BATCH, CLASSES = 64, 3


def spirals(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points [batch, 2] on arms of a spiral, and which arm each is on."""
    radius = torch.rand(BATCH, generator=generator, dtype=torch.float64)
    arm = torch.randint(CLASSES, (BATCH,), generator=generator)
    angle = 2 * torch.pi * (radius + arm / CLASSES)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm


def main(steps: int) -> int:
    """Train both modules, compare, and tell."""
    mesh = fs.Mesh(dp=int(os.environ.get("WORLD_SIZE", "4")))
    if "RANK" in os.environ:  # set by torchrun
        fs.init(mesh, backend="gloo")  # the tensors are on the CPU

    torch.manual_seed(0)  # the same parameters in every process
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, CLASSES)).double()
    twin = copy.deepcopy(model)

    @fs.shard_map(mesh=mesh, in_specs=P("dp"), out_specs=P())
    def loss_of(x: Tensor, arm: Tensor) -> Tensor:
        """The mean loss of the whole batch, from this device's part of it."""
        # `model(x)` is right too, with a sum for each parameter: cast at once, it is one for all.
        params = fs.pcast(dict(model.named_parameters()), "dp", to="varying")
        return fs.pmean(F.cross_entropy(functional_call(model, params, x), arm), "dp")

    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.02) for each in (model, twin)]
    generator = torch.Generator().manual_seed(0)
    leads = os.environ.get("RANK", "0") == "0"
    apart = 0.0
    for step in range(1, steps + 1):
        x, arm = spirals(generator)
        with fs.comm_log() as log:
            losses = [loss_of(x, arm), F.cross_entropy(twin(x), arm)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        ours, theirs = (loss.item() for loss in losses)
        apart = max(apart, abs(ours - theirs))
        if leads and (step == 1 or step % 50 == 0):
            print(f"step {step:4}  loss {ours:.10f}  one device {theirs:.10f}")
    if leads:
        print(f"Communicated in one step, on {mesh}:", log, sep="\n")
        print(f"Losses differ by at most {apart:.1e}.")
    return int(apart > 1e-9)


if __name__ == "__main__":
    sys.exit(main(steps=int(sys.argv[1]) if len(sys.argv) > 1 else 200))
