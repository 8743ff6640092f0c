"""Pictures of programs: bytes between ranks, times of the parts of a step, text and HTML."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings

import fshard as fs
from fshard.program.cost.traffic import traffic
from fshard.show.pictures.program_picture import MAX_MATRIX, ProgramPicture
from fshard.show.pictures.rank_transfers import program_transfers
from tests.helpers.strategies import spec_pairs
from tests.show.html_pages import html_text

P = fs.P


@settings(max_examples=150)
@given(spec_pairs())
def test_transfers_add_up_to_the_traffic(pair: tuple[fs.Spec, fs.Spec]) -> None:
    """The busiest receiver and sender are those of the cost model, up to rounding of shares."""
    prog = fs.redistribute(*pair)
    ranks = sorted({*prog.src.mesh.ranks, *prog.dst.mesh.ranks})
    for step, src, dst in zip(prog.steps, prog.specs, prog.specs[1:], strict=False):
        sent = program_transfers(fs.Program(src, (step,)), ranks)
        expected = traffic(step, src, dst)
        slack = 2 * len(ranks) * src.dtype.itemsize if isinstance(step, fs.AllReduce) else 0
        received = max(sum(sent[a, b] for a in ranks) for b in ranks)
        assert abs(received - expected.received) <= slack, (step, src, dst)
        if not isinstance(step, fs.Exchange):  # whose holders send whole pieces, not equal parts
            most = max(sum(sent[a, b] for b in ranks) for a in ranks)
            assert abs(most - expected.sent) <= slack, (step, src, dst)


@settings(max_examples=40)
@given(spec_pairs())
def test_pictures_of_any_program(pair: tuple[fs.Spec, fs.Spec]) -> None:
    """Bars add up to the cost; lines fit 80 and 120 columns; pages are well-formed."""
    prog = fs.redistribute(*pair)
    picture = fs.visualize(prog, topology=fs.Topology.cluster(2))
    assert isinstance(picture, ProgramPicture)
    cost = prog.cost(fs.Topology.cluster(2))
    assert sum(bar.end - bar.start for bar in picture.bars) == pytest.approx(cost.time, abs=1e-10)
    for width in (80, 120):
        assert all(len(line) <= width for line in picture.text(width).splitlines())
    assert str(prog.src) in html_text(picture.html())


def test_text_of_a_program() -> None:
    src = fs.Spec(fs.Mesh(x=4), P("x"), shape=(8, 8))
    prog = fs.redistribute(src, src.replace(partition=P(None, "x")))
    wires = fs.Topology.of({"x": fs.Link(latency=0.0, bandwidth=24e6)})
    text = str(fs.visualize(prog, topology=wires, header="turn"))
    assert text.splitlines()[0] == "turn"
    assert "░░ latency   ▓▓ bytes" in text
    assert text.endswith(
        """\
bytes from each rank (rows) to each other one (columns)
      0   1   2   3
   0  ·  16  16  16
   1 16   ·  16  16
   2 16  16   ·  16
   3 16  16  16   ·"""
    )


def test_large_and_empty_programs_are_drawn() -> None:
    src = fs.Spec(fs.Mesh(x=256, y=256), P("x", "y"), shape=(4096, 4096))
    gathered = fs.visualize(fs.redistribute(src, src.replace(partition=P())))
    assert isinstance(gathered, ProgramPicture)
    assert len(gathered.ranks) == MAX_MATRIX
    assert "8 of 65,536 ranks" in str(gathered)
    swapped = fs.redistribute(src, src.replace(partition=P("y", "x")))
    assert "none of these ranks sends to another" in str(fs.visualize(swapped))
    rows = fs.Spec(src.mesh, P(("x", "y")), shape=(65536, 256))
    moved = fs.visualize(fs.Program(rows, (fs.Exchange(P(None, "x")),)))
    assert isinstance(moved, ProgramPicture)
    assert moved.transfers == dict.fromkeys(itertools.permutations(moved.ranks, 2), 4)
    assert "no rank sends anything" in str(fs.visualize(fs.redistribute(src, src)))
