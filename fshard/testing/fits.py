"""`assert_fits`: the predicted memory of a partitioned step, within a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fshard._util.errors import fail
from fshard.partition.partition import Partition
from fshard.partition.step_cost.memory_limit import check_memory, different_ranks
from fshard.partition.step_cost.memory_timeline import StepMemory

WHERE = "fs.testing.assert_fits"


def assert_fits(
    function: Partition, args: Sequence[Any], *, memory: int, optimizer: Any = 0
) -> StepMemory:
    """Assert that a step of a partitioned function holds at most `memory` bytes on every rank.

    Nothing runs: the memory is that of `function.trace(*args).memory()`, with a backward pass if an
    argument requires gradients.

    Args:
        function: the function, as `fs.partition` returns it.
        args: positional arguments: pairs, tensors (also on the meta device), or specs.
        memory: bytes.
        optimizer: the state of an optimizer, as for `memory()`: a multiple of the parameters'
            bytes, a tree of specs or pairs, or an optimizer of `fs.state`.

    Returns:
        The memory of the rank that holds the most.

    Raises:
        AssertionError: a rank holds more; the text is the table of its memory at the peak.
        ShardingError: the function is not partitioned, `memory` is no number of bytes, or an
            operation does not run without values.

    >>> import torch
    >>> import fshard as fs
    >>> part = fs.partition(torch.relu, mesh=fs.Mesh(dp=4), in_specs=fs.P("dp"))
    >>> fs.testing.assert_fits(part, [torch.ones(1024)], memory=2048).peak
    2048
    """
    if not isinstance(function, Partition):
        fail(WHERE, f"a function of type {type(function).__name__}",
             "the function must be partitioned", "fs.partition(fn, mesh=mesh, in_specs=...)"
             )  # fmt: skip
    check_memory(memory, WHERE, optional=False)
    call = function.trace(*args)
    ranks = (call.memory(optimizer=optimizer, rank=rank) for rank in different_ranks(call))
    most = max(ranks, key=lambda held: held.peak)
    if most.peak > memory:
        raise AssertionError(f"{WHERE}: {most.peak} bytes exceed memory={memory}\n{most}")
    return most
