"""One rank calls a collective with another argument: an error, whatever the argument is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard.program.program import Program
from fshard.spmd.collectives.collective_plan import COLLECTIVE_PLANS

MESH = fs.Mesh(a=2, b=2)
OTHER_DEVICES = fs.Mesh({"a": 2, "b": 2}, devices=(0, 1, 3, 2))
AXES = ("a", "b")
GROUPS = [[0, 1], [2, 3]]
WIRES = {"forward_dtype": [torch.bfloat16], "backward_dtype": [torch.bfloat16]}
COMMON: dict[str, list[Any]] = {
    "axis_name": [("b", "a")],
    "mesh": [OTHER_DEVICES],
}
GROUPED: dict[str, list[Any]] = {"axis_index_groups": [GROUPS, [[0, 1, 3, 2]]]}
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]

CALLS: dict[Any, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    fs.psum: ({}, GROUPED | WIRES),
    fs.pmean: ({}, GROUPED | WIRES),
    fs.pmax: ({}, GROUPED | WIRES),
    fs.pmin: ({}, GROUPED | WIRES),
    fs.pprod: ({}, GROUPED | WIRES),
    fs.all_gather: ({}, {"axis": [1, 2], "tiled": [True], "to": ["invariant"], **GROUPED, **WIRES}),
    fs.psum_scatter: (
        {"tiled": True},
        {"scatter_dimension": [1], "tiled": [False], "kind": ["max"], **GROUPED, **WIRES},
    ),
    fs.all_to_all: (
        {"split_axis": 0, "concat_axis": 0, "tiled": True},
        {"split_axis": [1], "concat_axis": [1], "tiled": [False], **GROUPED, **WIRES},
    ),
    fs.pswapaxes: (
        {"axis": 0},
        {"axis": [1], "axis_index_groups": [[[0, 1, 2, 3]], [[0, 1, 3, 2]]], **WIRES},
    ),
    fs.ppermute: ({"perm": RING}, {"perm": [RING[:2], RING[::-1], [(3, 1), (0, 2)]], **WIRES}),
    fs.pshuffle: ({"perm": [1, 2, 3, 0]}, {"perm": [[3, 0, 1, 2]], **WIRES}),
    fs.pbroadcast: ({"source": 0}, {"source": [1, 3]}),
}
"""Collectives with their first arguments, and other values of each argument."""
LOCAL = {fs.pcast}
"""Collectives whose forward sends nothing."""


def text_of_divergence(call: Callable[[int], Any]) -> str:
    def body() -> Any:
        return call(int(fs.axis_index(AXES, mesh=MESH)))

    with pytest.raises(ShardingError) as caught:
        fs.simulate(MESH, body)
    return str(caught.value)


def call_one(collective: Any, x: Any, options: Any, y: Any, others: Any, rank: int) -> Any:
    """Return `collective(x, **options)`, on rank 3 `collective(y, **others)`."""
    return collective(y, **others) if rank == 3 else collective(x, **options)


def assert_shown(text: str, name: str = "fs.") -> None:
    """Assert that the error shows two different calls, of rank 3 and of another one."""
    rows = text.split("\n")
    lines = [line for line in rows if line.startswith("  rank") and f": {name}" in line]
    lines += [line for line in rows if f"waiting in {name}" in line]
    assert any(line.startswith("  rank 3 ") for line in lines), text
    calls = {line.partition(": ")[2].removeprefix("waiting in ") for line in lines}
    assert len(calls) > 1, text


def test_every_argument_of_every_collective_is_varied() -> None:
    assert set(CALLS) | LOCAL == set(COLLECTIVE_PLANS)
    for collective, (_, variants) in CALLS.items():
        names = set(inspect.signature(collective).parameters) - {"x"}
        missing = names - set(variants) - set(COMMON)
        assert missing <= set(WIRES), (collective.__name__, missing)


@pytest.mark.parametrize("collective", CALLS, ids=lambda f: f.__name__)
def test_other_arguments_on_one_rank_raise(collective: Any) -> None:
    first, variants = CALLS[collective]
    first = {"axis_name": AXES, "mesh": MESH} | first
    x = torch.ones(4, 4)
    for name, values in (COMMON | variants).items():
        for value in values:
            other = first | {name: value}
            assert_shown(text_of_divergence(partial(call_one, collective, x, first, x, other)))


@pytest.mark.parametrize("collective", CALLS, ids=lambda f: f.__name__)
def test_other_tensors_on_one_rank_raise(collective: Any) -> None:
    options = {"axis_name": AXES, "mesh": MESH} | CALLS[collective][0]
    x, y = torch.ones(4, 4), torch.ones(4, 4, 2)
    for first, other in (
        (x, x.double()),
        (x, torch.ones(4, 4, 1)),
        (y, torch.ones(4, 8, 1) if collective is not fs.pswapaxes else torch.ones(4, 4, 1, 2)),
        ([x, y], [y, x]),
        ({"u": x, "v": y}, {"u": y, "v": x}),
    ):
        call = partial(call_one, collective, first, options, other, options)
        assert_shown(text_of_divergence(call))


def program(*steps: fs.AllReduce | fs.AllGather, partition: Any) -> Program:
    return Program(fs.Spec(MESH, partition, shape=(4, 4)), steps)


SUM = P(unreduced={"a", "b"})


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (program(fs.AllReduce(("a", "b")), partition=SUM),
         program(fs.AllReduce(("b", "a")), partition=SUM)),
        (program(fs.AllReduce(("a", "b")), partition=SUM),
         program(fs.AllReduce(("b",)), fs.AllReduce(("a",)), partition=SUM)),
        (program(fs.AllReduce(("a", "b")), partition=SUM),
         program(fs.AllReduce(("a", "b"), "reduced"), partition=SUM)),
        (program(fs.AllReduce(("a", "b")), partition=SUM),
         program(fs.AllReduce(("a", "b")), partition=P(unreduced={"a": "max", "b": "max"}))),
        (program(fs.AllGather(("a", "b"), 0), partition=P(("a", "b"))),
         program(fs.AllGather(("b", "a"), 0), partition=P(("b", "a")))),
    ],
)  # fmt: skip
def test_other_steps_on_one_rank_raise(first: Program, other: Program) -> None:
    def call(rank: int, run: Callable[[Program, torch.Tensor], Any]) -> Any:
        prog = other if rank == 3 else first
        return run(prog, torch.ones(prog.src.local_shape(rank)))

    for run in (Program.__call__, lambda prog, x: prog(x, async_op=True).wait()):
        assert_shown(text_of_divergence(partial(call, run=run)), "the program")


def test_other_programs_of_a_batch_on_one_rank_raise() -> None:
    first, other = ([fs.Spec(MESH, P(a), shape=(4, 4)) for a in axes] for axes in ("ab", "ba"))

    def call(rank: int) -> Any:
        specs = other if rank == 3 else first
        targets = [spec.replace(partition=P()) for spec in specs]
        return fs.redistribute(specs, targets)([torch.ones(2, 4)] * 2)

    assert_shown(text_of_divergence(call), "the batch")


def test_other_source_of_a_scatter_raises() -> None:
    spec, x = fs.Spec(MESH, P(AXES), shape=(4,)), torch.ones(4)
    text = text_of_divergence(lambda rank: fs.scatter(x, spec, src=int(rank == 3)))
    assert "fs.scatter(f32[4@(a,b)], src=1) over a, b" in text
