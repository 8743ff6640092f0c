"""Ranks that call with different global shapes raise before the collective; gloo would abort."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.gloo.harness import Ranks, run_ranks

MESH = Mesh(x=2)
GRID = Mesh(x=2, y=2)


def gathers(rows: int) -> None:
    fs.unshard(fs.shard(torch.ones(rows, 4), MESH, P("x")))


def reshards(rows: int) -> None:
    fs.reshard(fs.shard(torch.ones(rows, 4), MESH, P("x")), P(None, "x"))


def reshards_tree(rows: int) -> None:
    specs = [fs.Spec(MESH, P("x"), shape=(n, 4)) for n in (4, rows)]
    batch = fs.redistribute(specs, [spec.replace(partition=P()) for spec in specs])
    batch([torch.ones(spec.local_shape(0)) for spec in specs])


def gathers_result_of_map(rows: int) -> None:
    fs.shard_map(torch.sin, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(torch.ones(rows, 4))


def gathers_in_partition(rows: int) -> None:
    part = fs.partition(lambda x: x @ x.T, mesh=MESH, in_specs=P("x"))
    part(fs.shard(torch.ones(rows, 4), MESH, P("x")))


def recomputes_in_partition(rows: int) -> None:
    fn = lambda x, w: (x @ w).sin().sum()  # noqa: E731
    part = fs.partition(fn, mesh=MESH, in_specs=(P("x"), P("x")), remat="all")
    part(torch.ones(rows, 4), torch.ones(4, 4).requires_grad_())


def sums_in_body(rows: int) -> None:
    body = lambda x: fs.psum(x, "x")  # noqa: E731
    f = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check=False)
    f(torch.ones(rows, 4))


def multiplies_in_body(rows: int) -> None:
    f = fs.shard_map(lambda x: fs.all_gather_matmul(x, torch.ones(4, 4), "x"), mesh=MESH,
                     in_specs=P("x"), out_specs=P("x"), check=False)  # fmt: skip
    f(torch.ones(rows, 4))


def sums_in_uneven_body(rows: int) -> None:
    spec = fs.Spec(MESH, P("x"), shape=(4,), sizes={0: (1, 3)})
    f = fs.shard_map(lambda x: fs.psum(torch.ones(rows), "x"), mesh=MESH, in_specs=P("x"),
                     out_specs=P(), check=False)  # fmt: skip
    f((torch.ones(spec.local_shape(dist.get_rank())), spec))


LAYOUTS = (gathers, reshards, reshards_tree, gathers_result_of_map, gathers_in_partition,
           recomputes_in_partition)  # fmt: skip
SHAPES = sums_in_body, sums_in_body, multiplies_in_body


def error_of(function: Callable[[int], None], rows: int) -> str:
    with pytest.raises(ShardingError) as error:
        function(rows)
    return str(error.value)


def errors_of_rank() -> list[str]:
    fs.init(MESH)
    return [error_of(function, 4 + 4 * dist.get_rank()) for function in LAYOUTS + SHAPES]


def test_different_global_shapes_are_refused_on_every_rank() -> None:
    first, second = run_ranks(2, errors_of_rank)
    for function, *texts in zip(LAYOUTS + SHAPES, first, second, strict=True):
        for text in texts:
            head, *lines, _, _ = text.split("\n")
            assert head == "ranks of the group (0, 1) call different collectives"
            for rank, line in enumerate(lines):
                assert line.startswith(f"  rank {rank} (x={rank}): ")
                shape = f"({2 + 2 * rank}, 4)" if function in SHAPES else f"f32[{4 + 4 * rank}@x,4]"
                assert shape in line
                assert f" at {__file__}:" in line


def new_shape_on_rank_1(function: Callable[[int], None]) -> None:
    fs.init(MESH, timeout=2)
    function(4)
    function(4 + 4 * dist.get_rank())


@pytest.mark.parametrize("function", [gathers, sums_in_uneven_body])
def test_rank_that_is_alone_with_a_shape_waits_until_the_timeout(
    function: Callable[[int], None],
) -> None:
    """Both name the call: one waits in it, the other for it."""
    with closing(Ranks(2, init=False)) as ranks:
        outcomes = ranks.outcomes(new_shape_on_rank_1, function)
    first, second = (outcome.error for outcome in outcomes)
    assert "timed out after" not in outcomes[1].traceback  # as `store.wait` logs
    assert isinstance(first, ShardingError)
    assert "over x: " in str(first)
    assert f"among the ranks (0, 1) did not end at {__file__}:" in str(first)
    head, line, *_ = str(second).split("\n")
    assert head == "1 of the ranks (0, 1) have come to a call that is new to them"
    assert line.startswith("  rank 1 (x=1): ")
    assert ("f32[8@x,4] -> f32[8,4]" if function is gathers else "torch.float32 of (8,)") in line


def shapes_of_rows() -> list[list[int]]:
    """Use another global shape in each row of a grid; collectives have the ranks of a row."""
    fs.init(GRID)
    row = GRID.coords(dist.get_rank())["x"]
    x = torch.ones(2 + row, 4)
    pair = fs.shard(x, GRID, P(None, "y"))
    results = [fs.reshard(pair, P()).local, fs.unshard(pair)]
    if row == 0:  # without a collective no other rank is waited for
        results.append(fs.reshard(fs.shard(torch.ones(6, 4), GRID, P()), P("x", "y")).local)
    with pytest.raises(ShardingError, match=r"rank 0 .* over y, x: .*\n.*rank \d .* over x, y: "):
        fs.all_gather(x[:1], ("x", "y") if dist.get_rank() else ("y", "x"), mesh=GRID)
    return [list(y.shape) for y in results]


def test_ranks_of_one_collective_are_compared_alone() -> None:
    for rank, shapes in enumerate(run_ranks(4, shapes_of_rows)):
        assert shapes == [[2, 4]] * 2 + [[3, 2]] if rank < 2 else [[3, 4]] * 2
