"""Cool a hot spot in a block of metal whose cells are sharded unevenly over a 2-D mesh.

    python examples/heat_equation.py                         # 4 simulated devices
    torchrun --nproc-per-node 4 examples/heat_equation.py 50

The heat equation with a 7-point stencil on a 3-D grid. Rows and columns of cells are sharded, in
shards of different sizes. In each step every rank receives the faces that its cells lack, a halo of
one cell, and computes on its own cells. Outside of the block the temperature is 0. The picture is
the temperature in the middle plane; temperatures are compared with one device.
"""

from __future__ import annotations

import math
import os
import sys

import torch
from torch import Tensor

import fshard as fs
from fshard import P

SHAPE = (14, 26, 8)
ROWS, COLUMNS = (9, 5), (16, 10)
RATE = 0.15
SHADES = " .:-=+*#%@"


def hot_spot() -> Tensor:
    """Return the temperature at first: a warm block and a hot spot in one half."""
    x, y, z = (torch.arange(float(n), dtype=torch.float64) for n in SHAPE)
    distance = (x[:, None, None] - 5) ** 2 + (y[:, None] - 17) ** 2 / 4 + (z - 4) ** 2
    return 0.1 + torch.exp(-distance / 8)


def diffused(padded: Tensor) -> Tensor:
    """Return the cells after one step, from the cells with one neighbour on each side."""
    u = padded[1:-1, 1:-1, 1:-1]
    neighbours = (
        padded[2:, 1:-1, 1:-1] + padded[:-2, 1:-1, 1:-1] + padded[1:-1, 2:, 1:-1]
        + padded[1:-1, :-2, 1:-1] + padded[1:-1, 1:-1, 2:] + padded[1:-1, 1:-1, :-2]
    )  # fmt: skip
    return u + RATE * (neighbours - 6 * u)


def step_of_rank(u: Tensor) -> Tensor:
    """Advance this rank's cells by one step."""
    halo = {0: (1, 1), 1: (1, 1), 2: (1, 1)}
    axes, sizes = {0: "rows", 1: "columns"}, {0: ROWS, 1: COLUMNS}
    return diffused(fs.domain.halo_exchange(u, halo, axis_name=axes, sizes=sizes))


def picture(u: Tensor) -> str:
    """Return the middle plane as shades."""
    plane = (u[:, :, SHAPE[2] // 2] / 1.1 * len(SHADES)).long().clamp(max=len(SHADES) - 1)
    return "\n".join("  " + "".join(SHADES[i] * 2 for i in row) for row in plane.tolist())


def main(steps: int = 30) -> int:
    """Run the steps and print the field; return 1 if it differs from one device's."""
    mesh = fs.Mesh(rows=2, columns=2)
    if "RANK" in os.environ:
        fs.init(mesh, backend="gloo")  # the tensors are on the CPU
    expected = hot_spot()
    sizes = {0: ROWS, 1: COLUMNS}
    spec = fs.Spec(mesh, P("rows", "columns"), shape=SHAPE, dtype=torch.float64, sizes=sizes)
    cells = fs.shard(expected, spec)
    layout = P("rows", "columns")
    step = fs.local_map(step_of_rank, in_specs=layout, out_specs=layout)
    pictures = [picture(expected)]
    with fs.comm_log() as log:
        for _ in range(steps):
            cells = step(cells)
    for _ in range(steps):
        expected = diffused(torch.nn.functional.pad(expected, (1, 1) * 3))
    field = fs.unshard(cells)
    difference = (field - expected).abs().max().item()
    if int(os.environ.get("RANK", "0")) == 0:
        pictures.append(picture(field))
        for title, text in zip(("at first", f"after {steps} steps"), pictures, strict=True):
            print(f"{title}, {cells.spec}:", text, sep="\n")
        print(log)
        heat = math.fsum(field.flatten().tolist())
        print(f"heat {heat:.10f}, temperatures differ by at most {difference:.1e}.")
    return int(difference > 1e-12)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
