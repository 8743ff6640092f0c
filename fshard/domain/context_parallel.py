"""`fs.domain.context_parallel`: a function whose attention is over a sharded sequence."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from fshard._util.errors import fail
from fshard.domain.sharded_attention import ORDERS, scaled_dot_product_attention
from fshard.layout.mesh import Axes
from fshard.random.keyed import without_mode_check
from fshard.spmd.axis_env import resolve_axes

Result = TypeVar("Result")
NAME = "fs.domain.context_parallel"


def context_parallel(
    fn: Callable[..., Result],
    /,
    axis_name: Axes,
    *,
    order: str = "contiguous",
    sizes: Sequence[int] | None = None,
) -> Callable[..., Result]:
    """Transform a function or module so that its attention is over a sequence sharded along axes.

    Within the body of a `shard_map` over the axes, each `scaled_dot_product_attention` that the
    function calls becomes `fs.domain.scaled_dot_product_attention` along them: a ring. All other
    operations run on this rank's positions. Positional embeddings and masks are arguments that are
    sharded, too.

    Args:
        fn: the function, or module, to be called in the body.
        axis_name: the axis, or a tuple of axes, along which the sequence is sharded.
        order: "contiguous", or "zigzag" for sequences in the order `fs.domain.zigzag_order`.
        sizes: the number of positions on each index along the axes. If they are left out, and an
            argument of the mapped function is uneven along the axes, the ranks exchange them at
            every attention.

    Returns:
        A function of the same arguments, this rank's.

    Raises:
        ShardingError: another order; from the call, axes that are not mapped, and what
            `fs.domain.scaled_dot_product_attention` refuses.

    Attention that is written with other functions stays local, and so is wrong; attention to keys
    that are not sharded, such as cross attention to a short text, needs the original function. In
    `nn.MultiheadAttention` pass `need_weights=False`. The functional counterpart of DTensor's
    `context_parallel`, which patches the function for a block of code.

    >>> import torch
    >>> import fshard as fs
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    >>> sharded = fs.P(None, "cp")
    >>> ring = fs.shard_map(fs.domain.context_parallel(layer, "cp"), mesh=fs.Mesh(cp=2),
    ...                     in_specs=sharded, out_specs=sharded)
    >>> x = torch.randn(1, 6, 8)
    >>> torch.allclose(ring(x), layer(x), atol=1e-5)
    True
    """
    if order not in ORDERS:
        fail(NAME, f"order={order!r}", "order must be 'contiguous' or 'zigzag'",
             "order='contiguous'")  # fmt: skip
    if not callable(fn):
        fail(NAME, f"{fn!r}", "the first argument must be a function", 'context_parallel(fn, "cp")')
    options = {"axis_name": axis_name, "order": order, "query_sizes": sizes, "key_sizes": sizes}

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Result:
        resolve_axes(axis_name, None, NAME)
        with _RingMode(options):
            return fn(*args, **kwargs)

    return call


class _RingMode(TorchFunctionMode):
    """Function mode that replaces attention by a ring with these options."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            ring: Callable[..., Any] = scaled_dot_product_attention
            return ring(*args, **kwargs, **self.options)
        if func is torch.nn.functional.multi_head_attention_forward:
            if _SIGNATURE.bind(*args, **kwargs).arguments.get("need_weights", True):
                fail(NAME, "attention with need_weights=True",
                     "weights are not computed for all keys at once: need_weights must be False",
                     "need_weights=False in the call of nn.MultiheadAttention")  # fmt: skip
            with self:  # replace the function that it calls
                return without_mode_check(func)(*args, **kwargs)
        return func(*args, **kwargs)


_SIGNATURE = inspect.signature(torch.nn.functional.multi_head_attention_forward)
