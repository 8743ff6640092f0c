"""Calibration on real processes: values are plausible, and equal on every rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard._util.errors import ShardingError
from tests.helpers import spec_grid
from tests.helpers.gloo.harness import outcomes, run_ranks


def calibrated(mesh: fs.Mesh, save: str | None = None) -> fs.Topology:
    fs.init(mesh)
    return fs.calibrate(mesh, seconds=0.2, save=save)


def assert_sane(topology: fs.Topology) -> None:
    links = [topology.inner, topology.outer, *(link for _, link in topology.links)]
    for link in links:
        assert 0 <= link.latency < 60
        assert 0 < link.bandwidth < math.inf
    assert 0 <= topology.launch < 60
    assert 0 <= topology.message < 60
    assert 0 < topology.memory < math.inf
    assert 0 <= topology.overlap <= 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("size", "mesh"),
    [
        (4, fs.Mesh(dp=2, one=1, tp=2)),
        (4, fs.Mesh(x=3, devices=[3, 0, 1])),
        (2, fs.Mesh(x=2)),
        (2, fs.Mesh(x=1)),
        (2, fs.Mesh(x=1, devices=[1])),
    ],
    ids=str,
)
def test_topology_is_equal_on_every_rank(size: int, mesh: fs.Mesh, tmp_path: Path) -> None:
    path = tmp_path / "wires.json"
    first, *rest = run_ranks(size, calibrated, mesh, str(path))
    assert all(other == first for other in rest)
    assert_sane(first)
    assert first.name == "calibrated"
    assert mesh.size > 1 or first.overlap == 1
    axes = [axis for axis, n in mesh.shape.items() if n > 1]
    assert {name for name, _ in first.links} == {*axes, *([",".join(axes)] if axes[1:] else [])}
    assert 0 < first.flops_per_second(torch.float32) < math.inf
    assert fs.Topology.load(path) == first
    for name, link in first.links:
        assert first.link(mesh, name.split(",")) == link
        assert first.inner.latency >= link.latency
        assert first.inner.bandwidth <= link.bandwidth
    src = fs.Spec(mesh, fs.P(mesh.axes), shape=(12,))
    assert fs.redistribute(src, src.replace(partition=fs.P()), topology=first).cost().time > 0


def refused(mesh: fs.Mesh, other: fs.Mesh, seconds: float, save: Any) -> None:
    fs.init(mesh)
    fs.calibrate(other, seconds=seconds, save=save)


def test_wrong_arguments_are_refused_on_every_rank(tmp_path: Path) -> None:
    mesh, path = fs.Mesh(x=2), str(tmp_path / "nowhere" / "wires.json")
    for other, seconds, save, text in [
        (fs.Mesh(x=3), 0.0, None, spec_grid.message(
            "fs.calibrate", "seconds=0.0", "seconds must be positive", "seconds=10.0")
            + "\n\n" + spec_grid.message(
            "", "Mesh(x=3) with ranks up to 2",
            "ranks must be among the 2 processes of the world, 0..1",
            "a mesh of at most 2, or more processes").removeprefix("\n")),
        (mesh, 0.1, path, spec_grid.message(
            "fs.calibrate", f"save={path!r}",
            "rank 0, the first of the mesh, must be able to write the file",
            "a path in a directory that exists; or leave it out, and topology.save(path) later")),
        (mesh, 0.1, 3, spec_grid.message(
            "fs.calibrate", "save=3", "a path must be a str or a Path", "save='topology.json'")),
        (mesh, 0.1, "a\0", spec_grid.message(
            "fs.calibrate", "save='a\\x00'",
            "rank 0, the first of the mesh, must be able to write the file",
            "a path in a directory that exists; or leave it out, and topology.save(path) later")),
    ]:  # fmt: skip
        for outcome in outcomes(2, refused, mesh, other, seconds, save):
            assert isinstance(outcome.error, ShardingError)
            assert str(outcome.error) == text
