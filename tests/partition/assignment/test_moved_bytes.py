"""Choices between the rule of an operation and its decomposition, by the bytes that they move."""

from __future__ import annotations

import torch

import fshard as fs
from fshard import P


def test_small_statistics_are_gathered_and_large_values_stay() -> None:
    mesh, slice_of_tpus = fs.Mesh(dp=4, tp=4), fs.Topology.tpu_v5e((4, 4))
    x = torch.empty(32, 2048, 2048, device="meta", requires_grad=True)
    part = fs.partition(lambda x: torch.nn.functional.layer_norm(x, (2048,)), mesh=mesh,
                        in_specs=P(None, None, ("dp", "tp")), topology=slice_of_tpus)  # fmt: skip
    text = str(part.trace(x))
    assert "moment_sums" in text
    assert "all_to_all" not in text


def test_values_are_moved_in_place_of_gathers() -> None:
    x = torch.empty(64, 64, 64, device="meta")
    for sizes in ({"x": 2, "y": 2}, {"x": 4, "y": 1}):
        mesh = fs.Mesh(sizes)
        call = fs.partition(torch.fft.fftn, mesh=mesh, in_specs=P("x", "y")).trace(x)
        assert call.cost().peak_memory <= 2 * 2 * x.nbytes // mesh.size, str(call)
