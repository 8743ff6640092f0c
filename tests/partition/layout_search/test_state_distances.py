"""Least times between layouts beside the programs of `fs.redistribute`.

Those of one axis, with the others left out, are not longer than those of all axes.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, Spec, Topology
from fshard.partition.layout_search.state_distances import (
    AxisTuple,
    distances,
    gradient_distances,
    joint_indices,
)

CASES = [
    (Mesh(x=2, y=2), Topology.node(), (16, 32)),
    (Mesh(x=4, y=2), Topology.cluster(2), (1024, 2048)),
    (Mesh(x=2, y=4), Topology.cluster(2), (1024, 2048)),
    (Mesh(x=8), Topology.node(), (1024, 2048, 8)),
    (Mesh(x=32), Topology.node(), (1024, 2048)),
    (Mesh(x=2, y=4), Topology.tpu_v5e((2, 4)), (1024, 2048)),
    (Mesh(x=2, y=2), Topology.tpu_v5e((4, 1)), (1024, 2048)),
    (Mesh(x=2, y=8), Topology.dgx_h100(), (64, 128, 256)),
    (Mesh(x=4, y=4), Topology.dgx_h100(), (1024, 2048)),
    (Mesh(x=16), Topology.dgx_h100(), (1024, 2048)),
]


def joint_specs(mesh: Mesh, shape: tuple[int, ...]) -> list[Spec]:
    """Return the specs of all joint states, in the order of their indices."""
    specs = []
    for states in itertools.product(("i", "r", "u", *range(len(shape))), repeat=len(mesh.axes)):
        of = dict(zip(mesh.axes, states, strict=True))
        dims = [tuple(a for a in mesh.axes if of[a] == d) or None for d in range(len(shape))]
        unreduced, reduced = ({a for a in mesh.axes if of[a] == kind} for kind in "ur")
        specs.append(Spec(mesh, P(*dims, unreduced=unreduced, reduced=reduced), shape=shape))
    return specs


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mesh", "on", "shape"), CASES, ids=lambda x: x.name if isinstance(x, Topology) else str(x)
)
def test_no_program_is_faster_than_the_distance(
    mesh: Mesh, on: Topology, shape: tuple[int, ...]
) -> None:
    specs, (axes, parts) = joint_specs(mesh, shape), AxisTuple.refined(mesh, on)
    nbytes, draw = 4 * torch.Size(shape).numel(), random.Random(0)
    codes = [*itertools.product(range(3 + len(shape)), repeat=len(mesh.axes))]
    states = joint_indices(torch.tensor(codes)[:, parts], len(shape))
    forward, backward = (f(axes, on, len(shape), nbytes)[states][:, states]
                         for f in (distances, gradient_distances))  # fmt: skip
    alone = [distances(AxisTuple.of(mesh, on, (axis,)), on, len(shape), nbytes)
             for axis in mesh.axes]  # fmt: skip
    ratios = []
    for _ in range(60):
        i, j = draw.randrange(len(specs)), draw.randrange(len(specs))
        src, dst = specs[i], specs[j]
        time = fs.redistribute(src, dst, topology=on).cost(on).time
        of_gradient = fs.redistribute(dst.dual, src.dual, topology=on).cost(on).time
        assert forward[i, j] <= time + 1e-12, (src, dst)
        assert backward[i, j] <= of_gradient + 1e-12, (src, dst)
        for table, before, after in zip(alone, codes[i], codes[j], strict=True):
            assert table[before, after] <= forward[i, j] + 1e-12, (src, dst)
        ratios.append(float(forward[i, j]) / time if time else 1.0)
    assert sorted(ratios)[30] > 0.3
