"""Values in a notebook: each that prints has HTML beside its plain text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from tests.show.html_pages import html_text

MESH = fs.Mesh(dp=2, tp=4)
SRC = fs.Spec(MESH, fs.P("dp", "tp"), shape=(8, 16))
WEIGHT = fs.Spec(MESH, fs.P("tp"), shape=(16, 32))
PROG = fs.redistribute(SRC, SRC.replace(partition=fs.P()))


def log() -> fs.CommLog:
    with fs.comm_log() as filled:
        fs.reshard(fs.shard(torch.ones(8, 16), SRC), fs.P("dp"))
    return filled


VALUES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "Spec": (lambda: SRC, ["f32[8@dp,16@tp]", "dp=1"]),
    "Spec of 3 dims": (lambda: fs.Spec(MESH, fs.P(None, "dp", "tp"), shape=(2, 8, 16)), ["tp=3"]),
    "Mesh": (lambda: MESH, ["dp=2", "tp=3"]),
    "Mesh of 65,536": (lambda: fs.Mesh(x=256, y=256), ["65535"]),
    "Topology": (fs.Topology.dgx_h100, ["DGX H100, nodes of 8", "launch", "692 TFLOP/s"]),
    "torus": (fs.Topology.tpu_v5e, ["TPU v5e, torus 16x16"]),
    "Cost": (PROG.cost, ["peak memory", "launches"]),
    "Bound": (lambda: fs.lower_bound(PROG.src, PROG.dst), ["received, at least", "448 B"]),
    "Program": (lambda: PROG, ["lower bound"]),
    "Batch": (lambda: fs.redistribute([SRC], [SRC.replace(partition=fs.P())]), ["1 program"]),
    "Strategy": (lambda: fs.propagate(torch.matmul, SRC, WEIGHT), ["ik,kj->ij", "dp: i, tp: k"]),
    "Auto": (
        lambda: fs.auto(torch.relu, fs.Mesh(x=4), [fs.Spec(fs.Mesh(x=4), fs.P(), shape=(64, 8))]),
        ["args[0]", "chosen", "relu"],
    ),
    "CommLog": (log, ["all_gather"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_have_html_beside_their_text(name: str) -> None:
    function, texts = VALUES[name]
    value = function()
    bundle = value._repr_mimebundle_()
    assert bundle["text/plain"] == str(value)
    page = html_text(bundle["text/html"])
    for text in texts:
        assert text in page, page
