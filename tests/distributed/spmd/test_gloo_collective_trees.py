"""Trees, groups, started collectives and ragged exchanges on gloo, compared with a simulation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.gloo.harness import outcomes, run_ranks
from tests.helpers.spmd.collective_cases import this_rank
from tests.helpers.spmd.collective_trees import ON_TREES, values_and_gradients
from tests.helpers.spmd.ragged_cases import ragged_by_hand, ragged_on_rank

MESH = Mesh({"x": 2, "y": 2}, devices=(2, 0, 3, 1))
RAGGED_MESH = Mesh({"y": 3}, devices=(2, 0, 3))


def trees() -> list[Any]:
    """Return values and gradients of every collective on a tree, and its surplus launches."""
    results = []
    for op, forward, _ in ON_TREES.values():
        with fs.comm_log() as log:
            values = values_and_gradients(lambda xs, op=op: op(xs, ("y", "x"), mesh=MESH), MESH)
        results.append((values, log.forward.counts.total() - bool(forward)))
    return results


def trees_on_rank() -> list[Any]:
    fs.init(MESH)
    return trees()


def test_gloo_trees_equal_simulated_ones() -> None:
    simulated = fs.simulate(MESH, trees)
    by_rank = run_ranks(4, trees_on_rank)
    for index, rank in enumerate(MESH.ranks):
        for name, (expected, _), (actual, more) in zip(
            ON_TREES, simulated[index], by_rank[rank], strict=True
        ):
            torch.testing.assert_close(
                actual, expected, msg=lambda text, name=name: f"{name}: {text}"
            )
            assert more == 0, f"{name} goes in one launch"


def others() -> dict[str, Any]:
    x = torch.arange(4.0) * (1 + this_rank(MESH))
    groups: dict[str, Any] = {"axis_index_groups": [[2, 0], [1, 3]], "mesh": MESH}
    axes = ("x", "y")
    pending = fs.start(fs.psum, x, axes, mesh=MESH)
    other = fs.start(fs.all_gather, {"a": x, "b": x.long()}, "y", mesh=MESH)
    leaf = x.clone().requires_grad_()
    later = fs.start(fs.psum_scatter, leaf[:2], "y", mesh=MESH)
    results = {
        "groups": [op(x, axes, **groups) for op in (fs.psum, fs.pmean, fs.pmax, fs.pmin, fs.pprod)],
        "gather": fs.all_gather(x, axes, **groups),
        "swap": fs.pswapaxes(x[:2], axes, 0, **groups),
        "places": [fs.pargmax(x % 5, axes, mesh=MESH), fs.pargmin(x % 5, axes, mesh=MESH)],
    }
    (grad,) = torch.autograd.grad(later.wait() * (2 + this_rank(MESH)), leaf)
    return results | {"grad": grad, "other": other.wait(), "sum": pending.wait()}


def others_on_rank() -> Any:
    fs.init(MESH)
    return others()


def test_gloo_groups_and_started_collectives_equal_simulated_ones() -> None:
    simulated = fs.simulate(MESH, others)
    by_rank = run_ranks(4, others_on_rank)
    for index, rank in enumerate(MESH.ranks):
        torch.testing.assert_close(by_rank[rank], simulated[index])


def ragged() -> list[torch.Tensor]:
    fs.init(RAGGED_MESH)
    return ragged_on_rank(RAGGED_MESH) if dist.get_rank() in RAGGED_MESH else []


def test_gloo_ragged_exchange() -> None:
    by_rank = run_ranks(4, ragged)
    for rank, expected in zip(RAGGED_MESH.ranks, ragged_by_hand(RAGGED_MESH), strict=True):
        torch.testing.assert_close(by_rank[rank], [t.detach() for t in expected])


def forget() -> None:
    fs.init(MESH)
    fs.shard_map(
        lambda v: (fs.start(fs.psum, v, "x"), v)[1], mesh=MESH, in_specs=P(), out_specs=P()
    )(torch.ones(2))


def test_started_and_never_waited_for() -> None:
    for outcome in outcomes(4, forget):
        assert isinstance(outcome.error, ShardingError), outcome.traceback
        assert "1 pending result never waited for: fs.psum" in str(outcome.error)
