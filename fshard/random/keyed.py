"""`fs.random.keyed`: PyTorch's own random functions draw with a key.

A function mode replaces each random function by one of `torch_replacements`. Functions that are
written in Python run without their check for function modes, and their callees are replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fshard._torch.checkpointing import Form, checkpoint_form, current_form
from fshard._torch.init_functions import patched_trunc_normal
from fshard._torch.modes import function_modes
from fshard._util.errors import fail, raise_if
from fshard.ops.prng.keyed_block import keyed_block_hook
from fshard.ops.trace.trace import trace_depth
from fshard.random.initializers import trunc_normal
from fshard.random.keys import fold_in, key_problems
from fshard.random.torch_replacements import REPLACEMENTS
from fshard.run.transports.base import current_transport
from fshard.spmd.axis_env import current_axes
from fshard.spmd.tracking.torch_effects import Action, draws, effect_of

DRAW_NOTHING = ("fractional_max_pool2d", "fractional_max_pool3d")
"""Kernels that take their random samples as an argument."""
RECURRENT_FIX = "dropout=0.0, and F.dropout between the layers, each called alone"


class KeyedMode(TorchFunctionMode):
    """Function mode that replaces random functions; a `KeyedBlock`."""

    def __init__(self, key: torch.Tensor, first: int | torch.Tensor = 0) -> None:
        super().__init__()
        self.key, self.first, self.count = key, first, 0
        self.depth, self.scope = trace_depth(), (current_axes(), current_transport())

    @staticmethod
    def resumed(key: torch.Tensor, first: int | torch.Tensor) -> KeyedMode:
        """Return a block whose first draw has the key `fold_in(key, first)`."""
        return KeyedMode(key, first)

    @property
    def is_mapped(self) -> bool:
        """True in a mapped function that the block encloses."""
        axes, transport = self.scope
        return current_axes() is not axes or current_transport() is not transport

    def next(self) -> torch.Tensor:
        """Return the key of the next draw; raise if the block encloses a traced or mapped call."""
        if trace_depth() > self.depth:
            fail("fs.random.keyed", "a block around a traced function",
                 "the block must be in the traced function, which runs again with other keys",
                 "def f(key, x): and in it with fs.random.keyed(key):; distributed.keyed(key) "
                 "for a DistributedModule")  # fmt: skip
        if self.is_mapped:
            fail("fs.random.keyed", "a block around a mapped function",
                 "the block must be in the mapped function: it counts the draws of one rank",
                 "with fs.random.keyed(key): in the function, with the key as an argument"
                 )  # fmt: skip
        next_key = fold_in(self.key, self.first + self.count)
        self.count += 1
        return next_key

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        effect = effect_of(func)
        if (
            effect.action is not Action.RANDOM
            or kwargs.get("generator") is not None
            or not draws(func, effect.name, args, kwargs)
        ):
            return func(*args, **kwargs)
        if inspect.isfunction(func):
            with self:  # replace the functions that it calls
                return without_mode_check(func)(*args, **kwargs)
        if effect.name in DRAW_NOTHING:
            return func(*args, **kwargs)
        replacement = REPLACEMENTS.get(effect.name)
        if replacement is None:
            fail("fs.random.keyed", f"{effect.name}()",
                 "a random function in the block must have a form that draws with a key",
                 RECURRENT_FIX if effect.name in ("lstm", "gru", "rnn_tanh", "rnn_relu") else
                 "draw before the block, or pass generator=; or write it with draws of fs.random"
                 )  # fmt: skip
        return _as_factory(lambda *a, **k: replacement(self.next, *a, **k), args, kwargs)


def _as_factory(
    run: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Run a draw, and apply the keyword arguments that PyTorch's factories share."""
    ignored = ("layout", "pin_memory", "memory_format", "names", "generator")
    rest = {name: arg for name, arg in kwargs.items() if name not in ignored}
    args = (*(rest.pop(name) for name in ("input", "self", "tensor") if name in rest), *args)
    out, requires_grad = rest.pop("out", None), rest.pop("requires_grad", False)
    drawn = run(*args, **rest)
    if out is not None:
        return out.resize_(drawn.shape).copy_(drawn)  # type: ignore[no-any-return]
    return drawn.requires_grad_() if requires_grad else drawn


# -- functions written in Python ------------------------------------------------------------


def _never(*_: object) -> bool:
    return False


MODE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_NO_CHECKS = dict.fromkeys(MODE_CHECKS, _never)


class _TorchWithoutModes:
    """Stand-in of the module `torch` whose checks for function modes return False."""

    overrides = SimpleNamespace(**_NO_CHECKS)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@cache
def without_mode_check(func: FunctionType) -> Callable[..., Any]:
    """Copy a function without its `has_torch_function` check, to avoid infinite recursion."""
    names = {**func.__globals__, **_NO_CHECKS, "torch": _TorchWithoutModes()}
    contents = [cell.cell_contents for cell in func.__closure__ or ()]
    # A boolean dispatch closes over two forms of the same function, each with a check.
    closure = tuple(
        CellType(without_mode_check(x) if inspect.isfunction(x) else x) for x in contents
    )
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, closure)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


# -- activation checkpointing ---------------------------------------------------------------


def _current_mode() -> KeyedMode | None:
    """Return the mode of the innermost block of this thread."""
    stack = function_modes()
    return next((mode for mode in reversed(stack) if isinstance(mode, KeyedMode)), None)


@keyed_block_hook.set
def _drawing_mode() -> KeyedMode | None:
    """Return the mode of the innermost block, None in functions that it may not draw in."""
    mode = _current_mode()
    if mode is None or mode.is_mapped or trace_depth() > mode.depth:
        return None
    return mode


def _checkpoint(outer: Form, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Checkpoint `fn` by `outer` so that its recomputation in backward draws the same values."""
    mode = _current_mode()
    if mode is None:
        return outer(fn, *args, **kwargs)
    first = mode.first + mode.count

    def rerun(*xs: Any, **kwargs: Any) -> Any:
        with mode.resumed(mode.key, first):
            return fn(*xs, **kwargs)

    return outer(rerun, *args, **kwargs)


@contextmanager
def keyed(key: torch.Tensor, /) -> Iterator[None]:
    """Make PyTorch's random functions in the block draw with a key: dropout, `torch.rand`, ...

    Draw n has the key `fold_in(key, n)`; no generator is used or changed. A function with such a
    block is therefore a function of its arguments, with the same result on one device and in
    `fs.partition`; `fs.apply` in the block draws as the operation on one device does. In a
    `fs.shard_map` all ranks draw the same; fold `fs.axis_index` into the key for other draws on
    each rank. `torch.utils.checkpoint` repeats its draws in the recomputation. Under `torch.vmap`
    one key draws once for the batch. Attention with `dropout_p` is computed by matrix products. A
    call with `generator=` uses that generator.

    Args:
        key: A key, int64 of shape `(2,)`, from `fs.random.key`, `split` or `fold_in`.

    Returns:
        A context manager.

    Raises:
        ShardingError: If `key` is not a key; within the block, for random functions without a
            form that draws with a key (`torch.poisson`, `nn.LSTM(dropout=...)`), and for draws in
            a mapped or traced function that the block encloses.

    Gradients are those of PyTorch's functions, with the drawn values held constant.

    >>> import torch
    >>> import fshard as fs
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    >>> def run(key, w, x):
    ...     with fs.random.keyed(key):
    ...         return torch.func.functional_call(net, w, (x,))
    >>> args = fs.random.key(0), dict(net.named_parameters()), torch.randn(6, 4)
    >>> spread = fs.partition(run, mesh=fs.Mesh(dp=3), in_specs=(fs.P(), fs.P(), fs.P("dp")))
    >>> torch.allclose(spread(*args), run(*args), atol=1e-6)
    True
    """
    raise_if("fs.random.keyed", key_problems(key))
    form = checkpoint_form(partial(_checkpoint, current_form()))
    with form, patched_trunc_normal(_fill_trunc_normal), KeyedMode(key):
        yield


def _fill_trunc_normal(
    x: torch.Tensor, mean: float, std: float, a: float, b: float
) -> torch.Tensor | None:
    """Fill a tensor by `fs.random.trunc_normal`; return None outside of blocks."""
    mode = _current_mode()
    if mode is None:
        return None
    with torch.no_grad():
        values = trunc_normal(mode.next(), x.detach(), mean=mean, std=std, a=a, b=b)
        return x.copy_(values)
