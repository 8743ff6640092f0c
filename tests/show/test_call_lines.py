"""Lines of the user's calls in logs of collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs

P = fs.PartitionSpec
TWO = fs.Mesh(tp=2)
GATHER = fs.redistribute(fs.Spec(TWO, P("tp"), shape=(8,)), fs.Spec(TWO, P(), shape=(8,)))


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: fs.psum(x, "tp"),
        lambda x: fs.psum((x, x.double()), "tp"),
        lambda x: fs.pmax(x, "tp"),
        lambda x: fs.all_gather(x, "tp"),
        lambda x: fs.psum_scatter(x, "tp", tiled=True),
        lambda x: fs.all_to_all(x, "tp", 0, 0, tiled=True),
        lambda x: fs.ppermute(x, "tp", [(0, 1)]),
        lambda x: fs.pbroadcast(x, "tp", 1),
        lambda x: fs.start(fs.psum, x, "tp").wait(),
        lambda x: GATHER(x.clone()),
    ],
)  # fmt: skip
def test_the_line_is_that_of_the_innermost_call_of_fshard(collective: Any) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        collective(x)
        return x

    run = fs.shard_map(body, mesh=TWO, in_specs=P("tp"), out_specs=P("tp"), check=False)
    pair = fs.shard(torch.ones(8), TWO, P("tp"))  # whose call has no traffic at its boundary
    with fs.comm_log() as log:
        run(pair)
    lines = {row[0] for row in log.by("line").rows if row[1]}
    assert lines == {f"{__file__}:{collective.__code__.co_firstlineno}"}


def deep(depth: int, x: torch.Tensor) -> torch.Tensor:
    return deep(depth - 1, x) if depth else fs.psum(x, "tp")


@pytest.mark.parametrize("check", [False, True])
def test_lines_of_equal_collectives_that_alternate(check: bool) -> None:
    program = fs.redistribute(
        fs.Spec(TWO, P(unreduced={"tp"}), shape=(4,)), fs.Spec(TWO, P(), shape=(4,))
    )

    def body(x: torch.Tensor) -> torch.Tensor:
        for depth in range(3):
            fs.psum(x, "tp")
            fs.pmean(x, "tp"), fs.psum(x, "tp")
            deep(depth, x)
            program(fs.pcast(x, "tp", to="unreduced") if check else x)
        return x

    run = fs.shard_map(body, mesh=TWO, in_specs=P("tp"), out_specs=P("tp"), check=check)
    with fs.comm_log() as log:
        run(fs.shard(torch.ones(8), TWO, P("tp")))
    start, inner = body.__code__.co_firstlineno, deep.__code__.co_firstlineno
    counts = {start + 2: "3", start + 3: "6", inner + 1: "3", start + 5: "3"}
    rows = {row[0]: row[1] for row in log.by("line").rows if row[1]}
    assert rows == {f"{__file__}:{line}": count for line, count in counts.items()}
