"""Pictures and tables: exact text, 80 columns, well-formed HTML, colours in rich."""

from __future__ import annotations

import io
import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import fshard as fs
from fshard._util.text import WIDTH
from fshard.show.pictures.layout_picture import LayoutPicture
from fshard.show.pictures.picture_grid import fit, slabs, view_of
from fshard.show.pictures.shard_owners import holders_text, states_in_words
from tests.helpers.spec_grid import peak_memory_below, random_global
from tests.helpers.strategies import meshes, spec_pairs, specs
from tests.show.html_pages import html_text

P = fs.PartitionSpec
MESH = fs.Mesh(dp=2, tp=4)
LINEAR = {"kinds": ("sum", "avg")}
EXTREME = {"kinds": ("max",), "states": ("sharded", "invariant", "unreduced")}
LAYOUTS = st.sampled_from([LINEAR, EXTREME]).flatmap(
    lambda options: meshes(max_axes=4, permuted=True).flatmap(lambda mesh: specs(mesh, **options))
)


def spec(partition: fs.PartitionSpec, shape: tuple[int, ...], **options: object) -> fs.Spec:
    return fs.Spec(MESH, partition, shape=shape, **options)  # type: ignore[arg-type]


def text(value: str) -> str:
    """A block of a test as the lines it stands for."""
    return textwrap.dedent(value).strip("\n")


PICTURES = {
    "sharded": (
        spec(P("dp", "tp"), (8, 16)),
        """
        f32[8@dp,16@tp] on Mesh(dp=2, tp=4)
        ● dp=2 shards dim 0   ▲ tp=4 shards dim 1
                       tp=0    tp=1    tp=2    tp=3
        dim 0  dim 1    0:4     4:8    8:12    12:16
                     ┌───────┬───────┬───────┬───────┐
                     │       │       │       │       │
        dp=0     0:4 │   0   │   1   │   2   │   3   │
                     │       │       │       │       │
                     │       │       │       │       │
                     ├───────┼───────┼───────┼───────┤
                     │       │       │       │       │
        dp=1     4:8 │   4   │   5   │   6   │   7   │
                     │       │       │       │       │
                     │       │       │       │       │
                     └───────┴───────┴───────┴───────┘
        each rank holds f32[4,4], 64 B of 512 B
        """,
    ),
    "replicas": (
        spec(P("tp"), (8,), dtype=torch.int64),
        """
        i64[8@tp] on Mesh(dp=2, tp=4)
        ● dp=2 invariant   ▲ tp=4 shards dim 0
                   tp=0         tp=1         tp=2         tp=3
        dim 0      0:2          2:4          4:6          6:8
              ┌────────────┬────────────┬────────────┬────────────┐
              │    0, 4    │    1, 5    │    2, 6    │    3, 7    │
              └────────────┴────────────┴────────────┴────────────┘
        each rank holds i64[2], 16 B of 64 B
        invariant over dp: ranks such as 0, 4 hold the same
        """,
    ),
    "unreduced": (
        spec(P("dp", unreduced={"tp"}), (4,)),
        """
        f32[4@dp]{unreduced: tp} on Mesh(dp=2, tp=4)
        ● dp=2 shards dim 0   ▲ tp=4 unreduced
                         dp=0                     dp=1
        dim 0            0:2                      2:4
              ┌────────────────────────┬────────────────────────┐
              │     0 + 1 + 2 + 3      │     4 + 5 + 6 + 7      │
              └────────────────────────┴────────────────────────┘
        each rank holds f32[2], 8 B of 16 B
        unreduced over tp: each value is the sum of 4 ranks, such as 0, 1, 2, 3
        """,
    ),
    "scalar, unreduced on all axes of a mesh": (
        fs.Spec(fs.Mesh(tp=2), P(unreduced={"tp": "max"}), shape=()),
        """
        f32[]{unreduced: tp=max} on Mesh(tp=2)
        ● tp=2 unreduced (max)
         ┌────────────────────────────────────────────────┐
         │                   max(0, 1)                    │
         └────────────────────────────────────────────────┘
        each rank holds f32[], 4 B of 4 B
        unreduced over tp: the value is the maximum of ranks 0, 1
        """,
    ),
    "uneven, with an empty shard": (
        spec(P("tp", reduced={"dp"}), (16, 4), sizes={0: (3, 5, 0, 8)}),
        """
        f32[16@tp:3+5+0+8,4]{reduced: dp} on Mesh(dp=2, tp=4)
        ● dp=2 reduced   ▲ tp=4 shards dim 0
        dim 0  dim 1    0:4
                     ┌───────┐
        tp=0     0:3 │ 0 & 4 │
                     ├───────┤
        tp=1     3:8 │ 1 & 5 │
                     │       │
                     ├───────┤
                     │       │
        tp=3    8:16 │ 3 & 7 │
                     │       │
                     │       │
                     └───────┘
        uneven: the largest local has 128 B of 256 B
        dim 0 has shards of 3, 5, 0, 8
        empty: tp=2, where ranks hold nothing
        reduced over dp: ranks such as 0 & 4 hold the same value, each for its own work;
        the gradient is unreduced
        """,
    ),
    "several axes on one dim": (
        spec(P(("tp", "dp")), (9,), uneven="chunk"),
        """
        f32[9@(tp,dp):chunk] on Mesh(dp=2, tp=4)
        ● dp=2 shards dim 0   ▲ tp=4 shards dim 0
                  tp=0     tp=0     tp=1     tp=1     tp=2     tp=2
                  dp=0     dp=1     dp=0     dp=1     dp=0     dp=1
        dim 0      0:2      2:3      3:5      5:6      6:8      8:9
              ┌───────────┬─────┬───────────┬─────┬───────────┬─────┐
              │     0     │  4  │     1     │  5  │     2     │  6  │
              └───────────┴─────┴───────────┴─────┴───────────┴─────┘
        uneven: the largest local has 8 B of 36 B
        dim 0 has shards of 2, 1, 2, 1, 2, 1, 0, 0
        empty: (tp=3,dp=0), (tp=3,dp=1), where ranks hold nothing
        """,
    ),
    "no elements": (
        spec(P("dp"), (0, 3)),
        """
        f32[0@dp,3] on Mesh(dp=2, tp=4)
        ● dp=2 shards dim 0   ▲ tp=4 invariant
        the tensor has no elements: no rank holds anything
        """,
    ),
    "three dims": (
        fs.Spec(fs.Mesh(a=2), P(None, None, "a"), shape=(2, 3, 4)),
        """
        f32[2,3,4@a] on Mesh(a=2)
        ● a=2 shards dim 2
                         a=0       a=1
        dim 1  dim 2     0:2       2:4
                     ┌─────────┬─────────┐
                     │         │         │
                     │         │         │
                     │         │         │
                 0:3 │    0    │    1    │
                     │         │         │
                     │         │         │
                     │         │         │
                     └─────────┴─────────┘
        not drawn: dim 0 (0:2), unsharded
        each rank holds f32[2,3,2], 48 B of 96 B
        """,
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_text_of_pictures(name: str) -> None:
    value, expected = PICTURES[name]
    assert str(fs.visualize(value)) == text(expected)


def test_pictures_of_large_meshes_are_short_and_cheap() -> None:
    mesh = fs.Mesh(x=1024, y=1024)
    with peak_memory_below(4 << 20):  # a table of the ranks takes 8 MiB and more
        drawn = str(fs.visualize(fs.Spec(mesh, P("x", "y"), shape=(4096, 4096))))
        assert "1047552" in drawn
        assert len(drawn.splitlines()) < 25
        drawn = str(fs.visualize(fs.Spec(mesh, P("x", unreduced={"y": "max"}), shape=(4096, 4096))))
        assert "0 … 1023 (1,024)" in drawn
        assert "the maximum of 1,024 ranks, such as 0, 1, 2, … 1023 (1,024 in all)" in (
            drawn.replace("\n", " ")
        )
        assert (
            len(str(fs.visualize(fs.Spec(mesh, P("x", None, "y"), shape=(4096, 2, 4096))))) < 2500
        )


@settings(max_examples=300)
@given(LAYOUTS)
def test_pictures_of_any_layout_fit_80_columns(drawn: fs.Spec) -> None:
    for line in str(fs.visualize(drawn)).splitlines():
        assert len(line) <= 80, str(fs.visualize(drawn))
        assert line == line.rstrip()


@settings(max_examples=200)
@given(LAYOUTS)
def test_every_rank_is_drawn_in_its_shard(drawn: fs.Spec) -> None:
    """On a small mesh every rank that holds elements is in the cell of its shard, of its slab."""
    if 0 in drawn.shape:
        return
    view, seen = view_of(drawn), list[int]()
    for slab in slabs(drawn):
        if slab is None:
            return
        picture = fit(drawn, slab=slab)
        spans = dict(zip(view.slabs, (segment.span for segment in slab), strict=True))
        spans |= {dim: f"0:{drawn.shape[dim]}" for dim in view.rest}
        for row, line in zip(picture.rows, picture.cells, strict=True):
            for column, (cell, _) in zip(picture.columns, line, strict=True):
                text = " ".join(cell)
                if row.index is None or column.index is None or "…" in text:
                    return
                at: dict[Any, str] = {**spans, view.row: row.span, view.column: column.span}
                for rank in map(int, "".join(c if c.isdigit() else " " for c in text).split()):
                    seen.append(rank)
                    index = [f"{s.start}:{s.stop}" for s in drawn.index(rank)]
                    assert index == [at[dim] for dim in range(drawn.ndim)], (drawn, rank)
    filled = [rank for rank in drawn.mesh.ranks if 0 not in drawn.local_shape(rank)]
    assert sorted(seen) == filled


@settings(max_examples=50)
@given(spec_pairs())
def test_explanations_of_any_program_fit_80_columns(pair: tuple[fs.Spec, fs.Spec]) -> None:
    explained = str(fs.redistribute(*pair).explain(fs.Topology.cluster(2)))
    assert max(map(len, explained.splitlines())) <= 80, explained


# -- expressions and words -----------------------------------------------------------------

CUBE = fs.Mesh(a=2, b=2, c=2)


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        (P(), "0, 1, 2, 3, 4, 5, 6, 7"),
        (P(None, unreduced={"c"}), "0 + 1, 2 + 3, 4 + 5, 6 + 7"),
        (P("a", unreduced={"c"}), "0 + 1, 2 + 3"),
        (P("a", unreduced={"b", "c"}), "0 + 1 + 2 + 3"),
        (P("a", unreduced={"b": "avg", "c": "sum"}), "avg(0, 2) + avg(1, 3)"),
        (P("a", unreduced={"b": "sum", "c": "avg"}), "avg(0 + 2, 1 + 3)"),
        (P("a", unreduced={"c": "avg"}), "avg(0, 1), avg(2, 3)"),
        (P("a", unreduced={"b": "product", "c": "product"}), "product(0, 1, 2, 3)"),
    ],
)
def test_cells_show_replicas_and_unreduced_values(
    partition: fs.PartitionSpec, expected: str
) -> None:
    assert holders_text(fs.Spec(CUBE, partition, shape=(4,)), (0,)) == expected


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        (P(unreduced={"a", "b"}), ("unreduced over a, b: each value is the sum of 4 ranks, "
         "such as 0, 2, 4, 6")),
        (P(unreduced={"a", "b", "c"}), ("unreduced over a, b, c: the value is the sum of ranks "
         "0, 1, 2, 3, 4, 5, 6, 7")),
        (P(unreduced={"a": "avg"}), ("unreduced over a: each value is the average of 2 ranks, "
         "such as 0, 4")),
        (P(reduced={"a": "avg"}), ("reduced over a: ranks such as 0 & 4 hold equal shares of the "
         "value, each for its own work; the gradient is unreduced")),
        (P("a"), "invariant over b, c: ranks such as 0, 1, 2, 3 hold the same"),
    ],
)  # fmt: skip
def test_sentences_about_states(partition: fs.PartitionSpec, expected: str) -> None:
    assert states_in_words(fs.Spec(CUBE, partition, shape=(4,)))[0] == expected


def test_permuted_devices_are_drawn_as_ranks() -> None:
    mesh = fs.Mesh({"x": 2}, devices=(7, 3))
    drawn = str(fs.visualize(fs.Spec(mesh, P("x"), shape=(4,))))
    assert drawn.splitlines()[5].split("│")[1:3] == [f"{7:^24}", f"{3:^24}"]


# -- pairs ---------------------------------------------------------------------------------


def test_pair_shows_equations_of_its_locals() -> None:
    value = spec(P("dp", None, unreduced={"tp"}), (4, 8))
    lines = str(fs.visualize(fs.shard(torch.zeros(4, 8), value))).splitlines()
    assert lines[-2:] == [
        "global[0:2, 0:8] = local[0] + local[1] + local[2] + local[3]",
        "global[2:4, 0:8] = local[4] + local[5] + local[6] + local[7]",
    ]
    pair = (fs.shard(torch.zeros(8), spec(P("tp"), (8,))).local, spec(P("tp"), (8,)))
    assert "global[2:4] = local[1] = local[5]" in str(fs.visualize(pair))


@settings(max_examples=60)
@given(specs(splits=("even",), dtype=torch.float64, kinds=("sum", "avg")))
def test_equations_hold(drawn: fs.Spec) -> None:
    """The notes of a pair are true equations, evaluated as Python."""
    if drawn.partition.reduced_kinds and "avg" in dict(drawn.partition.reduced_kinds).values():
        return
    value = random_global(drawn.shape, torch.float64)
    pair = fs.shard(value, drawn)
    names = {
        "sum": lambda *xs: torch.stack(xs).sum(0),
        "avg": lambda *xs: torch.stack(xs).mean(0),
        "local": pair.local,
        "value": value,
    }
    picture = fs.visualize(pair)
    assert isinstance(picture, LayoutPicture)
    for note in picture.notes:
        if note.startswith("global[") and " = " in note:
            sides = note.replace("global[", "value[").split(" = ")
            first, *rest = [eval(side, names) for side in sides]
            assert all(torch.equal(first, other) for other in rest), note


def test_pair_on_one_rank_shows_the_rank() -> None:
    value = spec(P("dp", None, unreduced={"tp"}), (4, 8))
    pair = fs.shard(torch.zeros(4, 8), value)
    drawn = fs.simulate(MESH, lambda local: str(fs.visualize(local)), pair)
    assert drawn[5].splitlines()[-1] == (
        "this is rank 5 (dp=1,tp=1): local f32[2,8] is a partial sum of global[2:4, 0:8]"
    )


def test_values_of_a_pair_are_drawn_on_request() -> None:
    value = fs.Spec(fs.Mesh(x=2, y=2), P("x", None, unreduced={"y"}), shape=(2, 2))
    shards = tuple(torch.full((1, 2), float(rank)) for rank in range(4))
    assert str(fs.visualize((shards, value), values=True, header="logits")) == text(
        """
        logits
        f32[2@x,2]{unreduced: y} on Mesh(x=2, y=2)
        ● x=2 shards dim 0   ▲ y=2 unreduced
        dim 0  dim 1       0:2
                     ┌──────────────┐
                     │    rank 0    │
        x=0      0:1 │     0  0     │
                     │   + rank 1   │
                     │     1  1     │
                     ├──────────────┤
                     │    rank 2    │
        x=1      1:2 │     2  2     │
                     │   + rank 3   │
                     │     3  3     │
                     └──────────────┘
        each rank holds f32[1,2], 8 B of 16 B
        unreduced over y: each value is the sum of 2 ranks, such as 0, 1
        global[0:1, 0:2] = local[0] + local[1]
        global[1:2, 0:2] = local[2] + local[3]
        """
    )


def test_replicas_that_differ_are_drawn_one_by_one() -> None:
    value = fs.Spec(fs.Mesh(x=3), P(), shape=(1,))
    shards = tuple(torch.tensor([number]) for number in (1.0, 1.0, 2.0))
    lines = str(fs.visualize((shards, value), values=True)).splitlines()
    assert [line.strip(" │") for line in lines[4:8]] == ["ranks 0, 1", "1", "rank 2", "2"]


@settings(max_examples=60)
@given(specs(dtype=torch.float32), st.sampled_from([80, 120]))
def test_values_of_any_pair_fit_the_width(drawn: fs.Spec, width: int) -> None:
    pair = fs.shard(random_global(drawn.shape, torch.float32), drawn)
    picture = fs.visualize(pair, values=True)
    html_text(picture.html())
    assert all(len(line) <= width for line in picture.text(width).splitlines())


def test_visualize_refuses_other_values() -> None:
    with pytest.raises(fs.ShardingError, match=r"given: a value of type PartitionSpec"):
        fs.visualize(P())  # type: ignore[arg-type]
    with pytest.raises(fs.ShardingError, match=r"values=True for a Spec"):
        fs.visualize(spec(P("tp"), (8,)), values=True)
    with pytest.raises(fs.ShardingError, match=r"1 shards for Mesh\(dp=2, tp=4\)"):
        fs.visualize(((torch.zeros(8),), spec(P("tp"), (8,))))
    with pytest.raises(fs.ShardingError, match=r"fs\.visualize\n  given: on ranks 0, 1, .*\(3,\)"):
        fs.visualize(((torch.zeros(3),) * 8, spec(P("tp"), (8,))))
    with pytest.raises(fs.ShardingError, match="in a process that is not a rank"):
        fs.visualize((torch.zeros(8), spec(P("tp"), (8,))))


# -- notebooks and terminals ---------------------------------------------------------------


@settings(max_examples=60)
@given(LAYOUTS)
def test_html_of_layouts(drawn: fs.Spec) -> None:
    bundle = fs.visualize(drawn)._repr_mimebundle_()
    assert bundle["text/plain"] == str(fs.visualize(drawn))
    assert str(drawn) in html_text(bundle["text/html"])
    bundle = drawn._repr_mimebundle_()
    assert bundle["text/plain"] == str(drawn)
    assert str(drawn) in html_text(bundle["text/html"])


def test_html_of_programs() -> None:
    src, dst = spec(P("dp", "tp"), (8, 16)), spec(P(unreduced={"dp"}), (8, 16))
    prog = fs.redistribute(src, dst)
    bundle = prog._repr_mimebundle_()
    assert bundle["text/plain"] == str(prog)
    page = html_text(bundle["text/html"])
    assert all(str(step) in page for step in prog.steps)
    assert "lower bound" in page
    assert prog.explain()._repr_mimebundle_()["text/html"] == bundle["text/html"]


def rendered(value: object, **options: object) -> str:
    out = io.StringIO()
    Console(file=out, width=WIDTH, **options).print(value)  # type: ignore[arg-type]
    return out.getvalue()


@pytest.mark.parametrize("name", PICTURES)
def test_rich_draws_pictures_in_colour(name: str) -> None:
    picture = fs.visualize(PICTURES[name][0])
    coloured = rendered(picture, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    assert "\x1b" not in str(picture)
    plain = [line.rstrip() for line in rendered(picture).splitlines()]
    assert plain == str(picture).splitlines()


def test_rich_gives_each_shard_a_colour() -> None:
    picture = fs.visualize(PICTURES["sharded"][0])
    coloured = rendered(picture, force_terminal=True, color_system="truecolor")
    backs = {part.split("m")[0] for part in coloured.split("\x1b[") if ";48;2;" in part}
    assert len(backs) == 7  # the palette; neighbours differ


def test_rich_draws_tables() -> None:
    prog = fs.redistribute(spec(P("dp"), (8, 16)), spec(P(), (8, 16)))
    assert "\x1b[" in rendered(prog.explain(), force_terminal=True)
    assert "\x1b" not in str(prog.explain())
    assert "all_gather" in rendered(prog.explain())
