"""Collectives launched now and waited for later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import torch

from fshard._torch.dynamo import call_while_tracing
from fshard._util.errors import fail
from fshard.run.execute import Pending
from fshard.run.transports.divergence_report import call_line
from fshard.spmd.axis_env import register_pending
from fshard.spmd.collectives.collective_plan import COLLECTIVE_PLANS, launch_collective

Options = ParamSpec("Options")


def start(
    op: Callable[Concatenate[Any, Options], Any],
    x: Any,
    /,
    *args: Options.args,
    **kwargs: Options.kwargs,
) -> Pending:
    """Launch the collective `op(x, *args, **kwargs)` now, to overlap it with computation.

    Args:
        op: a collective of one step: `fs.psum`, `fs.all_gather`, `fs.ppermute`, ...
        x: its operand, a tree of tensors.
        *args: its positional arguments.
        **kwargs: its options.

    Returns:
        A `Pending`; its `wait()`, called once, returns the result.

    Raises:
        ShardingError: a function that is not a collective or takes several steps
            (`ragged_all_to_all`, `pargmax`, `pargmin`); a maximum or minimum of a tensor that
            requires grad; at the end of the mapped function or the simulated rank, a result that
            was never waited for (elsewhere that is a `RuntimeWarning`).

    Gradients are those of `op`; the transpose is not asynchronous. Under `torch.compile` it is one
    node, and the compiler decides when to wait. After JAX's `psum_start` and PyTorch's
    `async_op=True`.

    >>> import torch
    >>> import fshard as fs
    >>> @fs.shard_map(mesh=fs.Mesh(i=2), in_specs=fs.P("i"), out_specs=fs.P())
    ... def f(x):
    ...     total = fs.start(fs.psum, x, "i")
    ...     square = x * x
    ...     return total.wait() + fs.psum(square, "i")
    >>> f(torch.tensor([1.0, 2.0]))
    tensor([8.])
    """
    _check_op(op)
    if torch.compiler.is_dynamo_compiling():
        result = op(x, *args, **kwargs)
        return Pending(lambda: result)
    plan = COLLECTIVE_PLANS[op](*args, **kwargs)
    finish = launch_collective(plan, x, ahead=True)
    return register_pending(Pending(finish, plan.name, call_line()))


@call_while_tracing  # to follow it, the tracer would have to know every collective
def _check_op(op: Callable[..., Any]) -> None:
    """Raise `ShardingError` for a function that is not a collective of one step."""
    if not callable(op) or op not in COLLECTIVE_PLANS:
        names = sorted(plan.__name__ for plan in COLLECTIVE_PLANS.values())
        fail("fs.start", f"{getattr(op, '__name__', op)!r}",
             "the first argument must be a collective: " + ", ".join(names),
             "fs.start(fs.psum, x, axis)")  # fmt: skip
