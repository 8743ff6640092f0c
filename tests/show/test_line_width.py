"""Texts of programs and batches fit a terminal and stay complete."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import Mesh, P, Spec
from fshard._util.text import WIDTH, below, columns, folded
from tests.helpers.strategies import meshes, spec_pairs

LONG = Mesh(data=2, tensor=3, expert=2)
WORDS = st.text(st.sampled_from("ab,+;.[]{}() "), max_size=120)


def without_spaces(text: str) -> str:
    return "".join(text.split())


def check(text: str, *expected: str) -> None:
    """Check that a text fits, and is complete unless it is abbreviated with `…`."""
    assert all(len(line) <= WIDTH for line in text.splitlines()), text
    assert all(line == line.rstrip() for line in text.splitlines()), text
    if "…" not in text:
        assert all(without_spaces(part) in without_spaces(text) for part in expected)


@given(st.data())
@settings(max_examples=100)
def test_texts_of_programs_and_batches_fit(data: st.DataObject) -> None:
    mesh = data.draw(st.just(LONG) | meshes(max_axes=3))
    pairs = data.draw(st.lists(spec_pairs(mesh), min_size=1, max_size=3))
    src = {f"layers.{i}.attention.weight": a for i, (a, _) in enumerate(pairs)}
    dst = {f"layers.{i}.attention.weight": b for i, (_, b) in enumerate(pairs)}
    batch = fs.redistribute(src, dst)
    for prog in batch.leaves:
        assert prog is not None
        check(str(prog), prog.ends, *map(str, prog.steps))
        check(str(prog.T), prog.T.ends)
    check(str(batch), *(str(step) for prog in batch.leaves if prog for step in prog.steps))


@given(WORDS, st.integers(0, 8))
def test_folded_lines_fit(text: str, margin: int) -> None:
    lines = folded(text, margin)
    assert all(len(line) <= WIDTH and line.startswith(" " * margin) for line in lines if line)
    if margin + len(text) <= WIDTH:
        assert lines == [" " * margin + text]
    assert "…" in "".join(lines) or without_spaces("".join(lines)) == without_spaces(text)


@given(st.lists(st.tuples(WORDS, WORDS), max_size=3))
def test_rows_fit_as_columns_or_below_each_other(rows: Any) -> None:
    lines = columns(rows) or below(rows)
    assert all(len(line) <= WIDTH for line in lines)
    assert len(columns(rows)) in (0, len(rows))


def test_long_lines_are_broken_between_parts() -> None:
    mesh = Mesh(data=8, tensor=8, expert=4)
    src = Spec(mesh, P(("data", "expert"), unreduced={"tensor"}), shape=(65536, 4096))
    dst = src.replace(partition=P("expert", ("tensor", "data")))
    assert (
        str(fs.redistribute(src, dst, forward_dtype=torch.bfloat16))
        == """\
f32[65536@(data,expert),4096]{unreduced: tensor}
    -> f32[65536@expert,4096@(tensor,data)]
    on Mesh(data=8, tensor=8, expert=4), sends in bf16
  reduce_scatter(tensor, dim 0)
    f32[65536@(data,expert,tensor),4096]  14,680,064 B
  exchange(P('expert', ('tensor', 'data')))
    f32[65536@expert,4096@(tensor,data)]  2,097,152 B"""
    )
    assert (
        str(fs.redistribute({"w": src}, {"w": dst}))
        == """\
1 leaf on Mesh(data=8, tensor=8, expert=4), 2 launches, 33,554,432 B sent
  ['w']
    f32[65536@(data,expert),4096]{unreduced: tensor}
        -> f32[65536@expert,4096@(tensor,data)]
    reduce_scatter(tensor, dim 0); exchange(P('expert', ('tensor', 'data')))"""
    )


@pytest.mark.parametrize("shards", [64, 512])
def test_hundreds_of_sizes_are_abbreviated(shards: int) -> None:
    """Texts of more than 4 lines are abbreviated with `…`."""
    sizes = tuple(range(1, shards + 1))
    src = Spec(Mesh(x=shards), P("x"), shape=(sum(sizes), 4), sizes={0: sizes})
    text = str(fs.redistribute(src, src.replace(partition=P(None))))
    check(text, f"-> {src.replace(partition=P(None))}")
    assert text.count("\n") <= 5
    assert ("…" in text) == (shards > 64)
