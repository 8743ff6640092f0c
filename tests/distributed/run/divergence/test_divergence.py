"""Errors of real ranks that call different collectives: every rank raises, and none hangs."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import P, ShardingError
from fshard.run.transports.divergence_check import _CheckedTransport
from fshard.run.transports.divergence_report import explain_with, fingerprint
from fshard.run.transports.process_end import Listener
from fshard.run.transports.torch_distributed import ProcessWorld
from tests.helpers.gloo.harness import Outcome, Ranks, outcomes, run_ranks

PAIR = fs.Mesh(x=2)
GRID = fs.Mesh(dp=2, tp=2)
ORDER = """
  rule:  every rank of a group must call the same collectives in the same order
  fix:   move the collective out of the branch that only some ranks take"""
ALIKE = """
  rule:  every rank of a group must call the same collective, with one shape, dtype and arguments
  fix:   look at what made the ranks differ before these lines"""


def checked(fn: Callable[..., Any], mesh: fs.Mesh = PAIR, check: Any = "collectives") -> Any:
    every = P(mesh.axes)
    return fs.shard_map(fn, mesh=mesh, in_specs=every, out_specs=every, check=check)


def run(
    fn: Callable[..., Any], mesh: fs.Mesh = PAIR, timeout: float = 60, check: Any = "collectives"
) -> Any:
    """Run `fn` as a mapped function of ones on this rank."""
    fs.init(mesh, timeout=timeout)
    spec = fs.Spec(mesh, P(mesh.axes), shape=(2 * mesh.size,))
    return checked(fn, mesh, check)((torch.ones(2), spec))


def line(fn: Callable[..., Any], after: int) -> str:
    return f"at {__file__}:{fn.__code__.co_firstlineno + after}"


def same(done: list[Outcome], text: str, ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        assert isinstance(done[rank].error, ShardingError), done[rank]
        assert str(done[rank].error) == text
        assert not getattr(done[rank].error, "__notes__", [])


# -- what differs ------------------------------------------------------------------------------


def other_collective(x: torch.Tensor) -> torch.Tensor:
    if fs.axis_index("x") == 1:
        return fs.pmean(x, "x")
    return fs.psum(x, "x")


def other_shape(x: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1:
        x = x[:1]
    return fs.psum(x, "x")


def other_axis_first(x: torch.Tensor) -> torch.Tensor:
    first, then = ("dp", "tp") if dist.get_rank() in (0, 3) else ("tp", "dp")
    return fs.psum(fs.psum(x, first), then)


def test_different_collectives() -> None:
    done = outcomes(2, run, other_collective)
    wire = "torch.float32, (2,))"
    told = f"the host read varying values: bool() {line(other_collective, 1)}"
    same(done, f"""ranks of the group (0, 1) call different collectives
  rank 0 (x=0): fs.psum over x: all_reduce(sum, {wire} {line(other_collective, 3)}
    {told}
  rank 1 (x=1): fs.pmean over x: all_reduce(avg, {wire} {line(other_collective, 2)}
    {told}{ALIKE}""", (0, 1))  # fmt: skip


def other_permutation(x: torch.Tensor) -> torch.Tensor:
    perm = [(0, 1), (1, 0)] if dist.get_rank() else [(0, 1)]
    return fs.ppermute(x, "x", perm)


def test_different_permutations() -> None:
    done = outcomes(2, run, other_permutation)
    where = f"over x: all_to_all(torch.float32) of (2,) {line(other_permutation, 2)}"
    same(done, f"""ranks of the group (0, 1) call different collectives
  rank 0 (x=0): fs.ppermute(perm=[[0, 1]]) {where}
  rank 1 (x=1): fs.ppermute(perm=[[0, 1], [1, 0]]) {where}{ALIKE}""", (0, 1))  # fmt: skip


def other_order_of_axes(x: torch.Tensor) -> torch.Tensor:
    return fs.psum(x, ("tp", "dp") if dist.get_rank() == 1 else ("dp", "tp"))


def test_different_orders_of_axes() -> None:
    done = outcomes(4, run, other_order_of_axes, GRID)
    wire = f"all_reduce(sum, torch.float32, (2,)) {line(other_order_of_axes, 1)}"
    same(done, f"""ranks of the group (0, 1, 2, 3) call different collectives
  ranks 0 (dp=0, tp=0), 2 (dp=1, tp=0), 3 (dp=1, tp=1): fs.psum over dp, tp: {wire}
  rank 1 (dp=0, tp=1): fs.psum over tp, dp: {wire}{ALIKE}""", (0, 1, 2, 3))  # fmt: skip


def test_different_shapes() -> None:
    done = outcomes(2, run, other_shape)
    where = line(other_shape, 3)
    same(done, f"""ranks of the group (0, 1) call different collectives
  rank 0 (x=0): fs.psum over x: all_reduce(sum, torch.float32, (2,)) {where}
  rank 1 (x=1): fs.psum over x: all_reduce(sum, torch.float32, (1,)) {where}{ALIKE}""",
        (0, 1))  # fmt: skip


def test_ranks_waiting_in_a_cycle() -> None:
    done = outcomes(4, run, other_axis_first, GRID)
    wire = f"all_reduce(sum, torch.float32, (2,)) {line(other_axis_first, 2)}"
    same(done, f"""ranks wait for each other
  ranks 0 (dp=0, tp=0), 3 (dp=1, tp=1): waiting in fs.psum over dp: {wire}
  ranks 1 (dp=0, tp=1), 2 (dp=1, tp=0): waiting in fs.psum over tp: {wire}{ORDER}""",
        (0, 1, 2, 3))  # fmt: skip


def gradient_alone() -> torch.Tensor:
    fs.init(PAIR)
    w = torch.ones(4, requires_grad=True)
    total = fs.shard_map(lambda x: fs.psum((x * w).sum(), "x"), mesh=PAIR,
                         in_specs=P("x"), out_specs=P(), check="collectives")  # fmt: skip
    y = total(torch.ones(8))
    if dist.get_rank() == 0:
        y.backward()
    return total(torch.ones(8))


def test_a_gradient_alone_and_the_next_call_wait_for_each_other() -> None:
    """The two wait in one group, which has one verdict for both."""
    done = outcomes(2, gradient_alone)
    for rank in (0, 1):
        text = str(done[rank].error)
        assert text.startswith("ranks wait for each other\n  rank 0 (x=0): waiting in backward of")
        assert "  rank 1 (x=1): waiting in fs.psum over x: all_reduce" in text


# -- who does not come -------------------------------------------------------------------------


def returns_early(x: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() % 2 == 1:
        explain_with(lambda: "branched on a varying value")
        return x
    return fs.psum(x, "tp")


def raises(x: torch.Tensor) -> torch.Tensor:
    x = fs.psum(x, ("dp", "tp"))
    if dist.get_rank() == 3:
        raise ValueError("boom\nand more")
    return fs.psum(x, "tp") + fs.psum(x, "dp")


def is_late(x: torch.Tensor) -> torch.Tensor:
    x = fs.psum(x, "x")
    fs.init(PAIR, timeout=0.5)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.set("rank 1 is past the first", "")
        store.wait(["rank 0 has waited"])
        return fs.pmax(x, "x")
    store.wait(["rank 1 is past the first"])
    try:
        return fs.pmax(x, "x")
    finally:
        store.set("rank 0 has waited", "")


def test_rank_that_returns_while_others_wait() -> None:
    done = outcomes(4, run, returns_early, GRID)
    wait = "waiting in fs.psum over tp: all_reduce(sum, torch.float32, (2,)) for"
    for dp, (here, away) in enumerate([(0, 1), (2, 3)]):
        same(done, f"""ranks wait for others that never come
  rank {here} (dp={dp}, tp=0): {wait} [{away}] {line(returns_early, 4)}
  rank {away} (dp={dp}, tp=1): returned
    branched on a varying value{ORDER}""", (here,))  # fmt: skip
        assert done[away].error is None


def test_rank_that_raises_while_others_wait() -> None:
    done = outcomes(4, run, raises, GRID)
    error = done[3].error
    assert isinstance(error, ValueError)
    assert str(error) == "boom\nand more"
    assert error.__notes__ == ["on rank 3 (dp=1, tp=1) of Mesh(dp=2, tp=2)"]
    assert "on rank 3 (dp=1, tp=1)" in done[3].traceback
    assert f"line {raises.__code__.co_firstlineno + 3}, in raises" in done[3].traceback
    raised = f"rank 3 (dp=1, tp=1): raised ValueError: boom {line(raises, 3)}"
    wait = "waiting in fs.psum over tp: all_reduce(sum, torch.float32, (2,)) for [3]"
    same(done, f"""ranks wait for others that never come
  rank 2 (dp=1, tp=0): {wait} {line(raises, 4)}
  {raised}
  rule:  every rank of a group must call the same collectives in the same order
  fix:   look at the error of rank 3""", (2,))  # fmt: skip
    for rank in (0, 1):
        assert isinstance(done[rank].error, ShardingError)
        assert "ranks wait for others that never come" in str(done[rank].error)
    assert raised in str(done[1].error)
    assert "rank 2 (dp=1, tp=0): raised ShardingError: ranks wait" in str(done[0].error)


def test_late_rank() -> None:
    with closing(Ranks(2)) as ranks:
        done = ranks.outcomes(run, is_late)
    same(done, f"""ranks waited 0.5 s for others that did not come
  rank 0 (x=0): waiting in fs.pmax over x: all_reduce(max, torch.float32, (2,)) for [1] \
{line(is_late, 10)}
  rank 1 (x=1): running, last in fs.psum over x: all_reduce(sum, torch.float32, (2,)) \
{line(is_late, 1)}
  rule:  every rank of a group must call the same collectives in the same order
  fix:   move the collective out of the branch that only some ranks take; for ranks that are \
only late, fs.init(mesh, timeout=seconds)""", (0, 1))  # fmt: skip


def wrong_local() -> Any:
    fs.init(PAIR, timeout=60)
    spec = fs.Spec(PAIR, P("x"), shape=(4,))
    local = torch.ones(2 + dist.get_rank())
    return checked(lambda x: fs.psum(x, "x"))((local, spec))


def test_wrong_local_on_one_rank() -> None:
    right, wrong = outcomes(2, wrong_local)
    assert "rank 1 (x=1) a local of shape (3,)" in str(wrong.error)
    assert "rank 1 (x=1): raised ShardingError: shard_map(<lambda>)" in str(right.error)


def differs_and_sleeps(x: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() >= 2:
        time.sleep(2.5)
    return (fs.pmean if dist.get_rank() == 1 else fs.psum)(x, ("dp", "tp"))


def test_differing_ranks_wait_briefly_for_a_late_one() -> None:
    done = outcomes(4, run, differs_and_sleeps, GRID)
    where = f"torch.float32, (2,)) {line(differs_and_sleeps, 3)}"
    same(done, f"""ranks of the group (0, 1, 2, 3) call different collectives
  rank 0 (dp=0, tp=0): fs.psum over dp, tp: all_reduce(sum, {where}
  rank 1 (dp=0, tp=1): fs.pmean over dp, tp: all_reduce(avg, {where}
  ranks 2 (dp=1, tp=0), 3 (dp=1, tp=1): running{ALIKE}""", (0, 1, 2, 3))  # fmt: skip


# -- backward ----------------------------------------------------------------------------------


def two_ways(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gathered = fs.all_gather(x, "x", tiled=True)
    turned = fs.ppermute(x, "x", [(0, 1), (1, 0)])
    return gathered, turned


def backward_apart() -> None:
    fs.init(PAIR, timeout=60)
    x = torch.ones(2, requires_grad=True)
    spec = fs.Spec(PAIR, P("x"), shape=(4,))
    both = checked(two_ways)((x, spec))
    both[dist.get_rank()].local.sum().backward()


def test_different_collectives_in_backward() -> None:
    done = outcomes(2, backward_apart)
    index = line(backward_apart, 5)
    gather, permute = "fs.all_gather(tiled=True)", "fs.ppermute(perm=[[0, 1], [1, 0]])"
    same(done, f"""ranks of the group (0, 1) call different collectives
  rank 0 (x=0): backward of {gather} over x: reduce_scatter(sum, torch.float32, (2, 2)) \
{index}, of the call {line(two_ways, 1)}
  rank 1 (x=1): backward of {permute} over x: all_to_all(torch.float32) of (2,) \
{index}, of the call {line(two_ways, 2)}{ALIKE}""", (0, 1))  # fmt: skip


# -- what stays as it is -----------------------------------------------------------------------


def all_of_them(x: torch.Tensor) -> Any:
    pending = fs.start(fs.psum, x, ("dp", "tp"))
    y = fs.all_gather(x, ("tp", "dp"), tiled=True).sum() + fs.pmax(x, "tp")
    y = y * fs.ppermute(x, "dp", [(0, 1), (1, 0)]) + fs.psum_scatter(x, "tp", tiled=True).sum()
    return y * 1 + pending.wait()


def values_and_keys() -> Any:
    fs.init(GRID, timeout=60)
    spec = fs.Spec(GRID, P(("dp", "tp")), shape=(8,))

    def once(check: Any) -> list[torch.Tensor]:
        x = (torch.arange(2.0) + dist.get_rank()).requires_grad_()
        y = checked(all_of_them, GRID, check)((x, spec)).local
        return [y, *torch.autograd.grad(y.sin().sum(), x)]

    plain, compared = once(True), once("collectives")
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    before = store.num_keys()
    for _ in range(10):
        once("collectives")
    dist.barrier()
    after = store.num_keys()
    dist.barrier()
    return [torch.equal(a, b) for a, b in zip(plain, compared, strict=True)], after - before


def test_checked_values_equal_unchecked_ones_and_keys_are_removed() -> None:
    assert run_ranks(4, values_and_keys) == [([True, True], 0)] * 4


# -- verdicts ----------------------------------------------------------------------------------


@pytest.fixture
def pair() -> list[_CheckedTransport]:
    """Return the checked transports of two ranks in this process, with short timeouts."""
    store = dist.HashStore()
    main, cpu, limit = weakref.ref(store), torch.device("cpu"), timedelta(milliseconds=1)
    listeners = [Listener(store, "address of {}", rank) for rank in (0, 1)]
    return [
        _CheckedTransport(ProcessWorld(rank, cpu, limit, main, 1, listener), PAIR)
        for rank, listener in enumerate(listeners)
    ]


@pytest.mark.parametrize("slow", ["waited", ""])
def test_first_verdict_wins(
    pair: list[_CheckedTransport], monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """A rank that is about to report a missing one goes on if the other comes first."""
    call = fingerprint("all_reduce", torch.ones(2), "sum")
    first, second = pair
    write = first._write_verdict

    def sleeps(group: Any, moment: Any, old: str, text: str, *rest: Any) -> str:
        monkeypatch.undo()
        if slow:
            assert text.startswith("ranks waited 0.001 s")
            second._compare(call, (0, 1))
        else:
            store: Any = second.store
            store.compare_set("verdict (0, 1)", old, json.dumps([moment, "given up", []]))
        return write(group, moment, old, text, *rest)

    with first.call(), second.call():
        monkeypatch.setattr(first, "_write_verdict", sleeps)
        if slow:
            first._compare(call, (0, 1))
            assert first.status.passed == second.status.passed == {"(0, 1)": (1, 0)}
        else:
            with pytest.raises(ShardingError, match="given up"):
                first._compare(call, (0, 1))
            with pytest.raises(ShardingError, match="given up"):
                second._compare(call, (0, 1))


def test_rank_that_raised_no_longer_waits(pair: list[_CheckedTransport]) -> None:
    """A rank whose comparison timed out outside of a call, as in backward, awaits no collective."""
    first, second = pair
    with first.call(), second.call():
        pass
    with pytest.raises(ShardingError, match=r"ranks waited 0\.001 s"):
        first._compare(fingerprint("all_reduce", torch.ones(2), "sum"), (0, 1))
    assert first.status.awaited is None
    _, statuses = second._read((0, 1), (0, 1))
    assert statuses[0].awaited is None
    assert statuses[0].position.startswith("raised ShardingError: ranks waited")


def test_rank_that_raised_in_an_earlier_call_is_not_blamed(pair: list[_CheckedTransport]) -> None:
    first, second = pair
    with pytest.raises(KeyError), first.call():
        raise KeyError("earlier")
    with second.call():
        pass
    with pytest.raises(ValueError, match="later"), second.call():
        raise ValueError("later")
    with first.call(), pytest.raises(ShardingError, match=r"look at the error of rank 1$"):
        first._compare(fingerprint("all_reduce", torch.ones(2), "sum"), (0, 1))


# -- ragged exchanges --------------------------------------------------------------------------


def ragged() -> torch.Tensor:
    """Exchange rows where rank 0 alone expects another number than is sent to it."""
    fs.init(PAIR)
    rows, i = torch.ones(2), dist.get_rank()
    receive = [1, 2 - i]
    return fs.ragged_all_to_all(
        rows, torch.zeros(3), [0, 1], [1, 1], [i, i], receive, axis_name="x", mesh=PAIR
    )


def test_ragged_sizes_that_differ_between_ranks() -> None:
    """Both ranks raise before either is in an exchange that the other does not call."""
    same(outcomes(2, ragged), """fs.ragged_all_to_all
  given: recv_sizes[1]=2 on rank 0 along the axes, to which rank 1 sends 1 rows
  rule:  recv_sizes[j] on rank i along the axes must be send_sizes[i] on rank j
  fix:   recv_sizes = fs.all_to_all(send_sizes, axis, 0, 0)""", (0, 1))  # fmt: skip


# -- process groups that are made anew ---------------------------------------------------------


def added(x: torch.Tensor) -> torch.Tensor:
    return fs.psum(x, "x")


def lives() -> list[Any]:
    """Call on rank 0 alone with the first process groups, and without fs.init on later ones."""
    fs.init(PAIR, timeout=60)
    spec = fs.Spec(PAIR, P("x"), shape=(4,))
    once = checked(added, check="collectives")
    plain = [fs.psum(torch.ones(2), "x", mesh=PAIR) for _ in range(4)]
    if dist.get_rank() == 0:
        fs.init(PAIR, timeout=0.1)
        with pytest.raises(ShardingError, match="ranks waited"):
            once((torch.ones(2), spec))
    dist.barrier()
    # The addresses of the first life stay in a store that outlives it: PyTorch would read them.
    names = "second life", dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(*names), rank=rank, world_size=2)
    results: list[Any] = []
    for use in (
        lambda: fs.axis_index("x", mesh=PAIR),
        lambda: fs.psum(torch.ones(2), "x", mesh=PAIR),
        lambda: once((torch.ones(2), spec)),
    ):
        with pytest.raises(ShardingError) as caught:
            use()
        results.append(str(caught.value))
    fs.init(PAIR, timeout=100)
    results.append(once((torch.ones(2), spec)).local.tolist())
    results.append([int(item.sum()) for item in plain])
    dist.destroy_process_group()
    return results


REPLACED = """fshard
  given: other process groups than those of fs.init
  rule:  the process groups must be those that existed at fs.init
  fix:   call fs.init(mesh) again after dist.init_process_group"""


def test_replaced_process_groups() -> None:
    with closing(Ranks(2, init=False)) as ranks:
        results = ranks.run(lives)
    assert results == [[REPLACED, REPLACED, REPLACED, [2.0, 2.0], [4] * 4]] * 2


# -- without the check -------------------------------------------------------------------------


def late_without_a_check(x: torch.Tensor) -> torch.Tensor:
    fs.psum(x, "x")  # the first call of a shape waits in the store
    if fs.axis_index("x") == 1:
        time.sleep(3.5)
        return x
    return fs.psum(x, "x")


# The group has all ranks, or some.
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_backend_timeout_names_the_collective(world: int) -> None:
    with closing(Ranks(world, init=False)) as ranks:
        first, second, *_ = ranks.outcomes(run, late_without_a_check, PAIR, 2, False)
    assert second.error is None
    assert isinstance(first.error, ShardingError)
    head, value, *rest = str(first.error).split("\n")
    assert head == (f"fs.psum over x: all_to_all among the ranks (0, 1) did not end "
                    f"{line(late_without_a_check, 5)}")  # fmt: skip
    assert value.startswith("  given: ")
    assert "2000ms" in value
    rule, fix = rest
    assert rule == (
        "  rule:  every rank of its group must call a collective, within the timeout of "
        "fs.init(mesh, timeout=seconds)"
    )
    assert fix == (
        '  fix:   fs.shard_map(..., check="collectives") names the ranks that do not call it, '
        "and what they do instead"
    )
    assert "direct cause" in first.traceback
    assert first.error.__notes__ == ["on rank 0 (x=0) of Mesh(x=2)"]


def fails(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("mine")


@pytest.mark.parametrize("rank", [0, 1])
def test_error_of_the_body_names_its_rank(rank: int) -> None:
    error = outcomes(2, run, fails, PAIR, 60, False)[rank].error
    assert isinstance(error, KeyError)
    assert error.__notes__ == [f"on rank {rank} (x={rank}) of Mesh(x=2)"]
