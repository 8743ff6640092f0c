"""Published bandwidths of collectives beside the model, each with its source.

Bus bandwidths are those of nccl-tests: bytes that a rank must receive, by the time. Where a preset
leaves something out, the row says what, and its bound is wider.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import fshard as fs

T, P = fs.Topology, fs.P
BYTES = 2**32
"""Size of the tensors; at this size the published bandwidths are at their peak."""


class Published(NamedTuple):
    """Published bus bandwidth in GB/s, and the largest relative error of the model."""

    machine: T
    ranks: int
    collective: str
    published: float
    within: float
    source: str


NCCL = {
    "H100 x 8, all-gather": Published(
        T.dgx_h100(), 8, "all_gather", 370, 0.05,
        "github.com/NVIDIA/nccl-tests/issues/212: NVIDIA, rings reach 370 of 450 GB/s"),
    "H100 x 8, reduce-scatter": Published(
        T.dgx_h100(), 8, "reduce_scatter", 370, 0.05, "as for all-gather"),
    "H100 x 8, all-reduce along rings": Published(
        T.dgx_h100(), 8, "all_reduce", 370, 0.05, "as for all-gather, with NCCL_ALGO=RING"),
    "H100 x 8, all-reduce in the switch": Published(
        T.dgx_h100(), 8, "all_reduce", 476, 0.26,
        "github.com/NVIDIA/nccl-tests/issues/290: measured. NVLink SHARP adds up in the switch, "
        "which the model leaves out"),
    "H100 x 16, all-gather": Published(
        T.dgx_h100(), 16, "all_gather", 8 * 47, 0.05,
        "github.com/NVIDIA/nccl-tests/issues/290: NVIDIA, 46 to 48 GB/s of each of 8 cards"),
    "H100 x 16, all-to-all": Published(
        T.dgx_h100(), 16, "all_to_all", 2 * 47, 0.55,
        "github.com/NVIDIA/nccl-tests/issues/130: NVIDIA, N / (N - 1) of a card's bandwidth on N "
        "nodes. The model sends all messages through the card, as on many nodes"),
    "A100 x 8, all-reduce along rings": Published(
        T.dgx_a100(), 8, "all_reduce", 240, 0.05,
        "github.com/NVIDIA/nccl/issues/1712: NVIDIA, close to 240 GB/s"),
    "A100 x 24, all-reduce, 4 cards of 200 Gb/s a node": Published(
        T("half the cards", inner=T.dgx_a100().inner, outer=fs.Link(2.7e-6, 0.9 * 12.5e9),
          node_size=8), 24, "all_reduce", 96, 0.07,
        "github.com/NVIDIA/nccl-tests/issues/119: measured, 96 of 100 GB/s"),
}  # fmt: skip


def bus_bandwidth(machine: T, ranks: int, collective: str) -> float:
    """Return the modelled bus bandwidth in GB/s of a tensor of `BYTES` on each rank or on all."""
    mesh, shape = fs.Mesh(x=ranks), (BYTES // 4 // 24 * 24,)
    step, before = {
        "all_gather": (fs.AllGather("x", 0), P("x")),
        "reduce_scatter": (fs.ReduceScatter("x", 0), P(unreduced={"x"})),
        "all_reduce": (fs.AllReduce("x"), P(unreduced={"x"})),
        "all_to_all": (fs.AllToAll("x", 0, 1), P("x", None)),
    }[collective]
    spec = fs.Spec(mesh, before, shape=shape if collective != "all_to_all" else (*shape, ranks))
    cost = fs.Program(spec, (step,), topology=machine).cost()
    return cost.bytes_received / cost.time / 1e9


@pytest.mark.parametrize("name", NCCL)
def test_bus_bandwidths_of_nccl(name: str) -> None:
    row = NCCL[name]
    modelled = bus_bandwidth(row.machine, row.ranks, row.collective)
    assert modelled == pytest.approx(row.published, rel=row.within), row.source


@pytest.mark.parametrize(
    ("shape", "measured", "within"),
    [((2048, 8192), 680e-6, 0.18), ((256, 256), 8e-6, 0.36)],
    ids=["34 MB", "131 kB"],
)
def test_gathers_on_a_tpu_v5e(shape: tuple[int, int], measured: float, within: float) -> None:
    """Profiles in "How to Scale Your Model", part 3, pop quiz 2: a gather over 4 chips in a row.

    The model has the promised bandwidth and hops of 1 us alone, as the book's formula.
    """
    spec = fs.Spec(fs.Mesh(X=8, Y=4), P("Y"), shape=shape, dtype=torch.bfloat16)
    prog = fs.Program(spec, (fs.AllGather("Y", 0),), topology=T.tpu_v5e((8, 4)))
    assert prog.cost().time == pytest.approx(measured, rel=within)


def table() -> str:
    """Return the published figures beside the model's, as lines of text."""
    lines = []
    for name, row in NCCL.items():
        modelled = bus_bandwidth(row.machine, row.ranks, row.collective)
        lines.append(f"{name:<52}{row.published:>6.0f}{modelled:>6.0f}  {row.source}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
