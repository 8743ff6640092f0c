"""Smooth a noisy point cloud whose points are sharded over the ranks, then balance the shards.

    python examples/point_cloud_knn.py                       # 4 simulated devices
    torchrun --nproc-per-node 4 examples/point_cloud_knn.py 10 20000

Points on a sphere are measured with noise. Gradient descent pulls each point towards its nearest
neighbours, which are searched among points that move around a ring of ranks: a rank holds its own
points and one block of the others. The ranks have points of one region each, and in dense regions
points have many neighbours: `fs.domain.balance` proposes shards of equal numbers of neighbours, and
one exchange moves the points there. Losses are compared with one device up to 2000 points.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

import fshard as fs
from fshard import P

NEIGHBOURS, RATE, RADIUS = 12, 0.2, 0.3


def cloud(count: int) -> Tensor:
    """Return noisy points near the unit sphere, denser in the north, sorted from the south."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    x[:, 2] += 1.5 * torch.rand(count, generator=generator, dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True)
    x = x + 0.05 * torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x[x[:, 2].argsort()]


def mean_square(distances: Tensor) -> Tensor:
    """Return the mean squared distance."""
    return distances.square().mean()


def step_on_ring(points: fs.Sharded) -> tuple[fs.Sharded, float]:
    """Take a step of gradient descent on shards; return the points and the loss before."""
    locals_ = (points.local,) if isinstance(points.local, Tensor) else points.local
    shards = [x.detach().requires_grad_() for x in locals_]
    moving = fs.Sharded(tuple(shards) if len(shards) > 1 else shards[0], points.spec)
    _, distances = fs.domain.knn(moving, moving, NEIGHBOURS)
    loss = fs.unshard(fs.on_pairs(mean_square, mode="auto")(distances))
    grads = torch.autograd.grad(loss, shards)
    rate = RATE * points.spec.shape[0]
    moved = [(x - rate * g).detach() for x, g in zip(shards, grads, strict=True)]
    return fs.Sharded(tuple(moved) if len(moved) > 1 else moved[0], points.spec), loss.item()


def step_on_one_device(x: Tensor) -> tuple[Tensor, float]:
    """Take the same step on global tensors."""
    x = x.detach().requires_grad_()
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    loss = mean_square(distances.topk(NEIGHBOURS, largest=False).values)
    (grad,) = torch.autograd.grad(loss, x)
    return (x - RATE * len(x) * grad).detach(), loss.item()


def main(steps: int = 10, count: int = 1000) -> int:
    """Smooth a cloud and balance it; return 1 if the losses differ from one device's."""
    ranks = int(os.environ.get("WORLD_SIZE", "4"))
    mesh = fs.Mesh(ranks=ranks)
    if "RANK" in os.environ:
        fs.init(mesh, backend="gloo")  # the tensors are on the CPU
    is_first_rank = int(os.environ.get("RANK", "0")) == 0
    x = cloud(count)
    spec = fs.Spec(mesh, P("ranks"), shape=x.shape, dtype=x.dtype, uneven="chunk")
    points = fs.shard(x, spec)
    max_difference = 0.0
    for step in range(1, steps + 1):
        points, loss = step_on_ring(points)
        single = ""
        if count <= 2000:
            x, expected = step_on_one_device(x)
            max_difference = max(max_difference, abs(loss - expected))
            single = f"  one device {expected:.10f}"
        if is_first_rank and (step == 1 or step == steps):
            print(f"step {step:4}  loss {loss:.10f}{single}")
    counts = fs.unshard(fs.domain.radius_search(points, points, RADIUS, size=1)[2])
    balanced = fs.domain.balance(spec, counts)
    with fs.comm_log() as log:
        points = fs.reshard(points, balanced)
    if is_first_rank:
        for layout in (spec, balanced):
            loads = [int(part.sum()) for part in counts.split(layout.shard_sizes(0))]
            print(f"{layout}: neighbours {loads}")
        print("Communicated to balance the shards:", log, sep="\n")
        print(f"Losses differ by at most {max_difference:.1e}.")
    return int(max_difference > 1e-9)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
