"""Pictures of meshes: on nodes, on tori, by coordinates; unfit and large ones too."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from tests.helpers.strategies import meshes
from tests.show.html_pages import html_text

T = fs.Topology
MACHINES = (None, T.node(), T.cluster(2), T.dgx_h100(), T.tpu_v5e((4, 2)), T.tpu_v4())


def test_text_on_a_torus() -> None:
    picture = fs.visualize(fs.Mesh(x=2, y=16), topology=T.tpu_v5e((2, 16)), header="slice")
    assert str(picture) == textwrap.dedent(
        """\
        slice
        Mesh(x=2, y=16) on TPU v5e, grid 2x16, no ring along dim 0
          axis    along       gathers    exchanges  latency
          ● x=2   row of 2    45.0 GB/s  45.0 GB/s  1.00 µs
          ▲ y=16  ring of 16  90.0 GB/s  21.1 GB/s  8.00 µs
        dim 0 ↓ ● x   dim 1 → ▲ y
        ╌  0 ─  1 ─  2 ─  3 ─  4 ─  … ─ 15 ╌
           │    │    │    │    │         │
        ╌ 16 ─ 17 ─ 18 ─ 19 ─ 20 ─  … ─ 31 ╌"""
    )


@settings(max_examples=60)
@given(meshes(max_axes=4, permuted=True), st.sampled_from(MACHINES), st.sampled_from([80, 120]))
def test_pictures_of_any_mesh(mesh: fs.Mesh, machine: T | None, width: int) -> None:
    """Nothing raises, also where a mesh does not fit the machine, and lines fit the width."""
    picture = fs.visualize(mesh, topology=machine)
    assert all(len(line) <= width for line in picture.text(width).splitlines())
    assert "Mesh(" in html_text(picture.html())


@pytest.mark.parametrize("machine", MACHINES)
def test_large_meshes_are_short(machine: T | None) -> None:
    for mesh in (fs.Mesh(x=256, y=256), fs.Mesh(x=10_000), fs.Mesh(x=16, y=64, z=64), fs.Mesh()):
        assert len(str(fs.visualize(mesh, topology=machine)).splitlines()) < 60


def test_misfits_are_named() -> None:
    text = str(fs.visualize(fs.Mesh(x=3), topology=T.tpu_v5e((4, 4))))
    assert "x=3  does not fit the torus" in text


def test_own_links_are_named() -> None:
    wires = T.of({"x": fs.Link(latency=1e-6, bandwidth=1e9)})
    assert "a link of its own" in str(fs.visualize(fs.Mesh(x=2), topology=wires))
    with pytest.raises(fs.ShardingError, match="topology= for a Spec"):
        fs.visualize(fs.Spec(fs.Mesh(x=2), fs.P(), shape=(2,)), topology=wires)
