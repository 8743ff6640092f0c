"""Pictures of a partitioned step: computation and links, memory; and plots of all pictures."""

from __future__ import annotations

import itertools
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard._util.text import bytes_text
from fshard.show.pictures.memory_picture import MemoryPicture
from fshard.show.pictures.step_picture import StepPicture
from tests.show.html_pages import html_text

P = fs.P
MESH = fs.Mesh(dp=2, tp=2)
SPEC = fs.Spec(MESH, P("dp", None, unreduced={"tp"}), shape=(4, 6))


def mlp(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x + torch.relu(x @ p["up"]) @ p["down"]


@cache
def call(width: int = 512) -> Any:
    """A step of two matrix products, tensor parallel with sharded parameters."""
    part = fs.partition(mlp, mesh=MESH, params={"up": P("dp", "tp"), "down": P("tp")},
                        in_specs=P("dp"))  # fmt: skip
    params = {"up": torch.empty(width, 4 * width, device="meta", requires_grad=True),
              "down": torch.empty(4 * width, width, device="meta", requires_grad=True)}  # fmt: skip
    return part.trace(params, torch.empty(256, width, device="meta"))


def test_bars_of_a_step_are_its_events() -> None:
    roofline = call().roofline()
    picture = fs.visualize(roofline, header="one step")
    assert isinstance(picture, StepPicture)
    assert len(picture.bars) == len(roofline.events)
    assert max(bar.end for bar in picture.bars) == roofline.time
    compute = [bar for bar in picture.bars if bar.lane == "compute"]
    assert {bar.kind for bar in compute} == {"forward", "backward"}
    for one, other in itertools.pairwise(compute):
        assert one.end <= other.start * (1 + 1e-9)
    text = str(picture)
    assert text.startswith("one step\nrank 0 of Mesh(dp=2, tp=2)")
    assert "all_reduce(tp)" in text
    assert "▄▄ backward" in text


def test_curve_of_memory_reaches_its_peak() -> None:
    memory = call().memory()
    picture = fs.visualize(memory)
    assert isinstance(picture, MemoryPicture)
    total = max(sum(picture.held_at(i * picture.end / 50, (i + 1) * picture.end / 50))
                for i in range(51))  # fmt: skip
    assert total == memory.peak
    lines = str(picture).splitlines()
    assert f"peak {bytes_text(memory.peak)} at " in lines[0]
    rows = [line.partition("│")[2] for line in lines if "│" in line]
    assert rows[0].strip()  # the top line is reached, at the peak alone
    assert all(len(upper.replace(" ", "")) <= len(lower.replace(" ", ""))
               for upper, lower in itertools.pairwise(rows))  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
def test_pictures_of_steps_fit_the_width(width: int) -> None:
    for value in (call().roofline(), call().memory()):
        picture = fs.visualize(value)
        assert all(len(line) <= width for line in picture.text(width).splitlines())
        assert "rank 0" in html_text(picture.html())


def test_a_step_of_many_operations_is_short() -> None:
    part = fs.partition(lambda x: [x := x + 1 for _ in range(300)][-1], mesh=MESH, in_specs=P())
    traced = part.trace(torch.zeros(4))
    for value in (traced.roofline(), traced.memory()):
        assert len(str(fs.visualize(value)).splitlines()) < 30


@pytest.mark.parametrize(
    "value",
    [SPEC, fs.Spec(MESH, P(), shape=()), fs.Spec(MESH, P(), shape=(0, 2)), MESH, fs.Mesh(),
     fs.Mesh(x=256, y=256), fs.Spec(fs.Mesh(a=2, b=2, c=2), P("a", "b", "c"), shape=(2, 4, 8)),
     fs.redistribute(SPEC, SPEC.replace(partition=P())), fs.redistribute(SPEC, SPEC)],
    ids=str,
)  # fmt: skip
def test_plots_are_written(value: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    axes = fs.visualize(value, header="title").plot()
    axes.figure.savefig(tmp_path / "plot.png", dpi=20)
    assert axes.get_title(loc="left") == "title"
    assert fs.visualize(value).plot(axes) is axes


def test_plots_of_a_step_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for value in (call().roofline(), call().memory()):
        fs.visualize(value).plot().figure.savefig(tmp_path / "plot.png", dpi=20)


def test_plots_require_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(fs.ShardingError, match=r"pip install 'fshard\[notebook\]'"):
        fs.visualize(SPEC).plot()
    assert str(fs.visualize(SPEC))
