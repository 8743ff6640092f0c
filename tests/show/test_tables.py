"""Text of tables, widths and units."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard._util.text import bytes_text, rate_text, time_text, wrap
from fshard.program.cost.model import step_parts
from fshard.show.pictures.picture_grid import lengths
from fshard.show.table import Column, Table
from tests.helpers.strategies import spec_pairs

MESH = fs.Mesh(dp=2, tp=4)


def text(value: str) -> str:
    """A block of a test as the lines it stands for."""
    return textwrap.dedent(value).strip("\n")


def test_text_of_explain() -> None:
    src = fs.parse("f32[1024@dp,512@tp]", MESH)
    dst = fs.parse("f32[1024@(dp,tp),512]", MESH)
    # 196,608 B at 98.304 GB/s are 2 µs, a launch is 6, 3 messages 0.45; to start a copy is 0.90,
    # of 524,288 B 0.26.
    wires = fs.Topology.of({"tp": fs.Link(latency=0.0, bandwidth=98.304e9)})
    assert str(fs.redistribute(src, dst).explain(wires)) == text(
        """
        f32[1024@dp,512@tp] -> f32[1024@(dp,tp),512] on Mesh(dp=2, tp=4), topology
        custom
        step                        spec after                  sent     time     memory
        ────────────────────────────────────────────────────────────────────────────────
        (start)                     f32[1024@dp,512@tp]                        262,144 B
        all_to_all(tp, dim 1 -> 0)  f32[1024@(dp,tp),512]  196,608 B  9.61 µs  262,144 B

        time of                     startup     wire   copies  link
        ───────────────────────────────────────────────────────────────────────────
        all_to_all(tp, dim 1 -> 0)  6.45 µs  2.00 µs  1.16 µs  tp (0 µs, 98.3 GB/s)
        bound by startup on tp (0 µs, 98.3 GB/s): 67 % of 9.61 µs

        busiest rank    this program  lower bound  ratio
        ────────────────────────────────────────────────
        bytes received     196,608 B    196,608 B  1.00x
        peak memory        262,144 B    262,144 B  1.00x
        bytes sent         196,608 B
        launches                   1
        time                 9.61 µs
        """
    )
    assert "nothing to do" in str(fs.redistribute(src, src).explain())
    named = str(fs.redistribute(src, dst).explain(fs.Topology.cluster(4)))
    assert "topology\ncluster, nodes of 4" in named


@settings(max_examples=50)
@given(spec_pairs(), st.sampled_from([None, torch.float32]))
def test_steps_of_explain_add_up(pair: tuple[fs.Spec, fs.Spec], sent: torch.dtype | None) -> None:
    src, dst = (end.replace(dtype=torch.float64) for end in pair)
    prog = fs.redistribute(src, dst, forward_dtype=sent)
    costs = [
        fs.Program(before, (step,), forward_dtype=sent).cost()
        for before, step in zip(prog.specs, prog.steps, strict=False)
    ]
    assert tuple(cost.bytes_sent for cost in costs) == prog.step_bytes
    assert sum(cost.time for cost in costs) == pytest.approx(prog.cost().time)
    rows = prog.explain().steps.rows[1:]
    assert [row[2] for row in rows] == [bytes_text(n) for n in prog.step_bytes]


def test_explain_names_the_link_that_bounds_a_program() -> None:
    src = fs.parse("f32[4096@dp,4096@tp]", MESH)
    prog = fs.redistribute(src, src.replace(partition=fs.P()))
    slow, fast = fs.Link(latency=1e-3, bandwidth=1e15), fs.Link(latency=0.0, bandwidth=1e12)
    thin = fs.Link(latency=0.0, bandwidth=1e6)
    for dp, memory, bound in (
        (slow, 1e15, "startup on dp"),
        (thin, 1e15, "bandwidth of dp"),
        (fast, 1e9, "copies in memory"),
    ):
        links = {"dp": dp, "tp": fast}
        topology = fs.Topology.of(links, launch=0.0, message=0.0, memory=memory)
        explained = prog.explain(topology)
        assert explained.bound_text.startswith(f"bound by {bound}")
        triples = zip(prog.steps, prog.specs, prog.specs[1:], strict=False)
        times = [step_parts(topology, *triple) for triple in triples]
        assert sum(map(sum, times)) == pytest.approx(prog.cost(topology).time)
        assert [row[1:4] for row in explained.times.rows] == [
            tuple(map(time_text, time)) for time in times if any(time)
        ]


def test_explain_shows_only_what_is_requested() -> None:
    src = fs.parse("f32[64,64]{unreduced: dp}", MESH)
    steps = (fs.AllSlice("tp", 1), fs.ReduceScatter("dp", 0), fs.AllGather("tp", 1))
    prog = fs.Program(src, steps)
    for only, count in (("communication", 2), ("compute", 1), (None, 3)):
        explained = prog.explain(only=only)
        assert len(explained.steps.rows) == count + 1
        assert len(explained.times.rows) == count
    with pytest.raises(fs.ShardingError, match="only must be 'communication', 'compute' or None"):
        prog.explain(only="comm")


def test_table_wraps_its_widest_column() -> None:
    columns = (Column("name", wrap=True), Column("n", right=True))
    rows = (("a long cell, of several words, that wraps", "1"),)
    table = Table("", columns, rows, footer=(("total", "1"),))
    assert table.text(20) == text(
        """
        name               n
        ────────────────────
        a long cell, of    1
        several words,
        that wraps
        ────────────────────
        total              1
        """
    )


def test_tables_do_not_break_names_and_shapes() -> None:
    """A first cell without room has a line of its own; a narrow table, each cell."""
    columns = (Column("leaf", wrap=True), Column("from", wrap=True), Column("step", wrap=True))
    rows = (
        ("['self_attn.in_proj_weight'][0]", "f32[4096,4096]{unreduced: dp}",
         "collective_permute(P(('tp', 'dp')))"),
        ("['w']", "f32[8@dp]", "all_slice(dp, dim 0)"),
    )  # fmt: skip
    assert Table("", columns, rows).text(62) == text(
        """
        leaf               from            step
        ──────────────────────────────────────────────────────────────
        ['self_attn.in_proj_weight'][0]
                           f32[4096,4096]  collective_permute(P(('tp',
                           {unreduced:     'dp')))
                           dp}
        ['w']              f32[8@dp]       all_slice(dp, dim 0)
        """
    )
    assert Table("", columns, rows).text(40) == text(
        """
        ────────────────────────────────────────
        ['self_attn.in_proj_weight'][0]
          from  f32[4096,4096]{unreduced: dp}
          step  collective_permute(P(('tp',
                'dp')))
        ['w']
          from  f32[8@dp]
          step  all_slice(dp, dim 0)
        ────────────────────────────────────────
        """
    )


@given(st.text("ab .,+{[]'", max_size=60), st.integers(4, 20))
def test_wrap_keeps_the_width(words: str, width: int) -> None:
    lines = wrap(words, width, max_lines=100)
    assert all(len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == words.replace(" ", "")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 80))
def test_lengths_are_in_proportion(sizes: list[int], total: int) -> None:
    result = lengths(sizes, [3] * len(sizes), total, 60)
    assert sum(result) <= 60
    for a, x in zip(sizes, result, strict=True):
        for b, y in zip(sizes, result, strict=True):
            assert (a <= b) <= (x <= y)


def test_units_of_texts() -> None:
    assert [bytes_text(n) for n in (0, (1 << 20) - 1, 1 << 20, 10_000_000, 1 << 40)] == [
        "0 B", "1,048,575 B", "1.00 MiB", "9.54 MiB", "1.00 TiB"]  # fmt: skip
    assert [rate_text(n) for n in (1e4, 999e6, 45e9, 2.68e12)] == [
        "0.01 MB/s", "999 MB/s", "45.0 GB/s", "2.68 TB/s"]  # fmt: skip
    assert [time_text(s) for s in (0, 1e-7, 1e-3, 2.5, 125)] == [
        "0 µs", "0.10 µs", "1.00 ms", "2.50 s", "125 s"]  # fmt: skip


@pytest.mark.parametrize("width", [-5, 0, 19, "80", True, 80.0])
def test_width_must_be_columns(width: Any) -> None:
    with fs.comm_log() as log:
        pass
    for printed in (log, fs.visualize(MESH), Table("", (Column("a"),), (("b",),))):
        with pytest.raises(fs.ShardingError, match="width must be an int of at least 20 columns"):
            printed.text(width)


def test_halos_have_no_lower_bound() -> None:
    src = fs.Spec(fs.Mesh(h=2), fs.P("h"), shape=(8,))
    program = fs.Program(src, (fs.HaloExchange((((0, 5), (3, 8)),)),))
    received = next(x for x in str(program.explain()).splitlines() if "bytes received" in x)
    assert received.split() == ["bytes", "received", "4", "B"]
