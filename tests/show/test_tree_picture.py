"""Pictures of trees of layouts: rows by path, folded layers, widths, and odd values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, Spec

MESH = Mesh(dp=2, tp=4)
UP = Spec(MESH, P("dp", "tp"), shape=(64, 256))


def test_every_tensor_of_a_tree_has_a_row() -> None:
    tree = {
        "mlp": [UP, fs.zeros(UP.replace(partition=P("dp")))],
        "scale": Spec(MESH, P(), shape=()),
    }
    text = str(fs.visualize(tree, header="weights"))
    assert text.splitlines()[:3] == [
        "weights",
        "3 tensors on Mesh(dp=2, tp=4), 131,076 B, 40,964 B of a rank",
        "● dp=2   ▲ tp=4",
    ]
    for row in ("mlp.0", "f32[64@dp,256] ", "8,192 B", "scale", "f32[] "):
        assert row in text


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = torch.nn.Linear(8, 16), torch.nn.LayerNorm(8)


def test_equal_layers_of_a_module_are_folded() -> None:
    model = torch.nn.Sequential(*[Layer() for _ in range(12)], torch.nn.Linear(8, 24))
    picture = fs.visualize(fs.state.distribute_module(model, MESH, fsdp="dp"))
    lines = str(picture).splitlines()
    assert lines[0].startswith("50 tensors on")
    assert "each of 12 such:" in lines
    assert sum(".up.weight" in line for line in lines) == 1
    assert any(line.startswith("12.weight") for line in lines)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_rows_fit(width: int) -> None:
    tree = {"a_module": {"with_a_long_name": {"weight": UP}}, "b": UP}
    for line in fs.visualize(tree).text(width).splitlines():
        assert len(line) <= width
    assert "tp" in fs.visualize(tree).html()


@pytest.mark.parametrize("value", [None, {}, [UP, 3], 3, {"a": None}], ids=repr)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(fs.ShardingError, match=r"the value must be a Spec, a \(local, spec\) pair"):
        fs.visualize(value)
