"""Collectives launched now and waited for later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from fshard.errors import fail
from fshard.run.execute import Pending
from fshard.spmd.axes import started
from fshard.spmd.plans import PLANS, begin

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
    asynchronous. Raises `ShardingError` for a function that is no collective, for a maximum or
    minimum of what requires grad, and, when the mapped function returns, for a result that was
    never waited for; outside of `shard_map` that is a `ResourceWarning`.

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
    plan = PLANS.get(op)
    if plan is None:
        fail(
            "fs.start",
            f"{getattr(op, '__name__', op)!r}",
            "what starts is a collective: " + ", ".join(sorted(p.__name__ for p in PLANS.values())),
            "fs.start(fs.psum, x, axis)",
        )
    made = plan(*args, **kwargs)
    return started(Pending(begin(made, x, ahead=True), made.name))
