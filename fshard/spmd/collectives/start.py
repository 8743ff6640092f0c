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

__all__ = ["start"]

Options = ParamSpec("Options")


def start(
    op: Callable[Concatenate[Any, Options], Any],
    x: Any,
    /,
    *args: Options.args,
    **kwargs: Options.kwargs,
) -> Pending:
    """Launch the collective `op(x, *args, **kwargs)` now; `wait()`, once, gives its result.

    JAX's `psum_start` and its like, PyTorch's `async_op=True`: what is computed between the two
    overlaps with the communication. The result is differentiable, its transpose is not
    asynchronous. In a graph of `torch.compile` it is one node, finished when the compiler says so.

    Raises `ShardingError` for a function that is no collective, for those that take several
    steps (`ragged_all_to_all`, `pargmax`, `pargmin`), for a maximum or minimum of what requires
    grad, and, when the mapped function or the simulated rank returns, for a result that was never
    waited for; elsewhere that is a `RuntimeWarning`.

    >>> import torch
    >>> import fshard as fs
    >>> @fs.shard_map(mesh=fs.Mesh(i=2), in_specs=fs.P("i"), out_specs=fs.P())
    ... def f(x):
    ...     total = start(fs.psum, x, "i")
    ...     square = x * x
    ...     return total.wait() + fs.psum(square, "i")
    >>> f(torch.tensor([1.0, 2.0]))
    tensor([8.])
    """
    _check(op)
    if torch.compiler.is_compiling():
        done = op(x, *args, **kwargs)
        return Pending(lambda: done)
    made = COLLECTIVE_PLANS[op](*args, **kwargs)
    return register_pending(Pending(launch_collective(made, x, ahead=True), made.name, call_line()))


@call_while_tracing
def _check(op: Callable[..., Any]) -> None:
    """Raise `ShardingError` for a function that is no collective."""
    if op not in COLLECTIVE_PLANS:
        fail(
            "fs.start",
            f"{getattr(op, '__name__', op)!r}",
            "what starts is a collective: "
            + ", ".join(sorted(p.__name__ for p in COLLECTIVE_PLANS.values())),
            "fs.start(fs.psum, x, axis)",
        )

