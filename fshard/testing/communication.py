"""`assert_communicates` and `assert_local`: collectives that a call may run, counted by a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fshard._util.errors import fail
from fshard.show.comm.comm_log import comm_log
from fshard.show.comm.expected_counts import Counts, compare_counts
from fshard.testing.differentiable import requiring_grad, run_backward


def assert_communicates(
    function: Callable[..., Any],
    args: Sequence[Any],
    counts: Counts,
    *,
    bytes: int | None = None,  # noqa: A002 - the word of `fs.comm_log`
    backward: Counts | None = None,
    backward_bytes: int | None = None,
) -> Any:
    """Assert that a call runs these collectives and no others.

    Collectives are counted as `fs.comm_log` counts them: a launch that all ranks take part in
    counts once, and the boundary of a function counts too, such as the gathering of results where
    `shard_map` returns plain tensors.

    Args:
        function: the function to call.
        args: positional arguments of the call, a tuple or a list.
        counts: number of launches of each operation in the forward pass, by the names of
            `fs.comm_log`, `{"all_reduce": 2}`; or by operation and axes,
            `{("all_reduce", "tp"): 2}`.
        bytes: bytes that the busiest rank sends in the forward pass; not compared if None.
        backward: number of launches of each operation in the backward pass of the sum of all
            results, with all floating arguments requiring gradients. If None, only the forward pass
            runs.
        backward_bytes: bytes that the busiest rank sends in the backward pass.

    Returns:
        The results of the call.

    Raises:
        AssertionError: a count or the bytes differ; the text is a table of expected and counted
            launches.
        ShardingError: `args` is not a tuple or a list, or there are bytes for a backward pass that
            does not run.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(tp=2)
    >>> x = fs.shard(torch.ones(4, 8), mesh, fs.P(None, "tp"))
    >>> w = fs.shard(torch.ones(8, 4), mesh, fs.P("tp"))
    >>> def layer(x, w):
    ...     return fs.reshard(fs.apply(torch.matmul, x, w), fs.P())
    >>> y = fs.testing.assert_communicates(
    ...     layer, (x, w), {"all_reduce": 1}, bytes=64, backward={})
    >>> fs.testing.assert_communicates(layer, (x, w), {("all_gather", "tp"): 1})
    Traceback (most recent call last):
    AssertionError: fs.testing.assert_communicates: collectives that ran
    pass     operation   axes  expected  ran  bytes
    ────────────────────────────────────────────────────────
    forward  all_gather  tp           1    0      -  differs
    forward  all_reduce  tp           0    1   64 B  differs
    """
    return _checked_call("fs.testing.assert_communicates", function, args, counts, bytes=bytes,
                         backward=backward, backward_bytes=backward_bytes)  # fmt: skip


def _checked_call(
    where: str, function: Callable[..., Any], args: Sequence[Any], counts: Counts, *,
    bytes: int | None = None,  # noqa: A002
    backward: Counts | None = None, backward_bytes: int | None = None,
) -> Any:  # fmt: skip
    """Return the results of a call; raise if it runs other collectives."""
    if not isinstance(args, tuple | list):
        fail(
            where,
            f"args is a {type(args).__name__}",
            "args must be a tuple or a list of positional arguments",
            "(x,) for one argument",
        )
    if backward is None and backward_bytes is not None:
        fail(
            where,
            f"backward_bytes={backward_bytes} without backward=",
            "bytes of a backward pass must come with the launches of one",
            "backward={...}, or leave backward_bytes out",
        )
    with comm_log() as log:
        outputs = function(*(args if backward is None else requiring_grad(tuple(args))))
        if backward is not None:
            run_backward(outputs)
    phases = [("forward", log.forward, counts, bytes)]
    if backward is not None:
        phases.append(("backward", log.backward, backward, backward_bytes))
    compare_counts(where, phases)
    return outputs


def assert_local(
    function: Callable[..., Any], args: Sequence[Any], *, backward: bool = False
) -> Any:
    """Assert that a call runs no collective.

    Args:
        function: the function to call.
        args: positional arguments of the call, a tuple or a list.
        backward: if True, also run the backward pass of the sum of all results, with all floating
            arguments requiring gradients, which must not run a collective either.

    Returns:
        The results of the call.

    Raises:
        AssertionError: a collective ran; the text is a table of them.
        ShardingError: `args` is not a tuple or a list.

    >>> import torch
    >>> import fshard as fs
    >>> x = fs.shard(torch.ones(4, 8), fs.Mesh(tp=2), fs.P(None, "tp"))
    >>> y = fs.testing.assert_local(lambda x: fs.apply(torch.relu, x), (x,), backward=True)
    """
    where = "fs.testing.assert_local"
    return _checked_call(where, function, args, {}, backward={} if backward else None)
