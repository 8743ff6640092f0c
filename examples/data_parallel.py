"""Train an `nn.Module` data-parallel by decorating its loss function.

    python examples/data_parallel.py                        # 4 simulated devices in one process
    torchrun --nproc-per-node 4 examples/data_parallel.py   # 4 real processes, the same losses

The module, the optimizer and `loss.backward()` stay unchanged. A tensor that the mapped function
closes over is replicated, and its gradient is the sum over all devices. A second module is trained
without fshard, and the script checks that both have the same losses.
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
    """Return points `[batch, 2]` on the arms of a spiral, and the arm `[batch]` of each."""
    radius = torch.rand(BATCH, generator=generator, dtype=torch.float64)
    arm = torch.randint(CLASSES, (BATCH,), generator=generator)
    angle = 2 * torch.pi * (radius + arm / CLASSES)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm


def main(steps: int) -> int:
    """Train both modules and print their losses; return 0 if they agree, else 1."""
    mesh = fs.Mesh(dp=int(os.environ.get("WORLD_SIZE", "4")))
    if "RANK" in os.environ:  # set by torchrun
        fs.init(mesh, backend="gloo")  # the tensors are on the CPU

    torch.manual_seed(0)  # the same parameters in every process
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, CLASSES)).double()
    twin = copy.deepcopy(model)

    @fs.shard_map(mesh=mesh, in_specs=P("dp"), out_specs=P())
    def loss_of(x: Tensor, arm: Tensor) -> Tensor:
        """Return the mean loss of the global batch from this device's shard of it."""
        # `model(x)` is correct too, with one all-reduce per parameter; this cast needs one in all.
        params = fs.pcast(dict(model.named_parameters()), "dp", to="varying")
        return fs.pmean(F.cross_entropy(functional_call(model, params, x), arm), "dp")

    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.02) for module in (model, twin)]
    generator = torch.Generator().manual_seed(0)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    max_difference = 0.0
    for step in range(1, steps + 1):
        x, arm = spirals(generator)
        with fs.comm_log() as log:
            losses = [loss_of(x, arm), F.cross_entropy(twin(x), arm)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        sharded, single = (loss.item() for loss in losses)
        max_difference = max(max_difference, abs(sharded - single))
        if is_first_rank and (step == 1 or step % 50 == 0):
            print(f"step {step:4}  loss {sharded:.10f}  one device {single:.10f}")
    if is_first_rank:
        print(f"Communicated in one step, on {mesh}:", log, sep="\n")
        print(f"Losses differ by at most {max_difference:.1e}.")
    return int(max_difference > 1e-9)


if __name__ == "__main__":
    sys.exit(main(steps=int(sys.argv[1]) if len(sys.argv) > 1 else 200))
