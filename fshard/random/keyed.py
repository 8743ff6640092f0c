"""`keyed`: code that draws by itself, as modules do, draws by a key."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fshard._torch.checkpointing import CHECKPOINT_FUNCTION, RECOMPUTE, replace_checkpoint
from fshard._torch.modes import function_modes
from fshard._util.errors import fail, raise_if
from fshard.ops.trace.trace import trace_depth
from fshard.random.sampling import _key_problems, fold_in
from fshard.random.torch_replacements import INSTEAD
from fshard.run.transports.base import current_transport
from fshard.spmd.axis_env import current_axes
from fshard.spmd.tracking.torch_effects import Word, draws, kind_of

__all__ = ["keyed"]


GIVEN = ("fractional_max_pool2d", "fractional_max_pool3d")
"""Kernels that draw nothing: what is drawn for them is given."""
RECURRENT = "dropout=0.0, and F.dropout between the layers, each called alone"


class _Keyed(TorchFunctionMode):
    """Replaces what draws from a generator; the n-th draw has the key with n folded in."""

    def __init__(self, key: torch.Tensor, count: int = 0) -> None:
        super().__init__()
        self.key, self.count = key, count
        self.traces, self.place = trace_depth(), (current_axes(), current_transport())

    def next(self) -> torch.Tensor:
        """The key of the next draw."""
        if trace_depth() > self.traces:
            fail("fs.random.keyed", "a block around a function that is traced",
                 "what is traced is run again with other keys: the key is an argument of it",
                 "def f(key, x): and in it with fs.random.keyed(key):")  # fmt: skip
        bound, transport = self.place
        if current_axes() is not bound or current_transport() is not transport:
            fail("fs.random.keyed", "a block around a function that ranks run",
                 "a block counts the draws of one rank, as often as that runs",
                 "with fs.random.keyed(key): in the function, which the key is an argument "
                 "of")  # fmt: skip
        made = fold_in(self.key, self.count)
        self.count += 1
        return made

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        if (
            kind.word is not Word.RANDOM
            or kwargs.get("generator") is not None  # which somebody has chosen
            or not draws(func, kind.name, args, kwargs)
        ):
            return func(*args, **kwargs)
        if inspect.isfunction(func):
            with self:  # it is made of others
                return _past(func)(*args, **kwargs)
        if kind.name in GIVEN:
            return func(*args, **kwargs)
        instead = INSTEAD.get(kind.name)
        if instead is None:
            fail("fs.random.keyed", f"{kind.name}()",
                 "it draws in a way that is not written with a key",
                 RECURRENT if kind.name in ("lstm", "gru", "rnn_tanh", "rnn_relu") else
                 "draw before, or with a generator=; fs.random has draws to write it with"
                 )  # fmt: skip
        return _like_factories(lambda *a, **k: instead(self.next, *a, **k), args, kwargs)


def _like_factories(
    run: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """A draw with the arguments that all functions of PyTorch which make tensors have."""
    plain = ("layout", "pin_memory", "memory_format", "names", "generator")
    rest = {key: each for key, each in kwargs.items() if key not in plain}
    args = (*(rest.pop(name) for name in ("input", "self", "tensor") if name in rest), *args)
    out, wants_grad = rest.pop("out", None), rest.pop("requires_grad", False)
    made = run(*args, **rest)
    if out is not None:
        return out.resize_(made.shape).copy_(made)  # type: ignore[no-any-return]
    return made.requires_grad_() if wants_grad else made


# -- functions that are made of others ------------------------------------------------------


def _never(*_: object) -> bool:
    return False


ASKING = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_UNASKED = dict.fromkeys(ASKING, _never)


class _Torch:
    """`torch`, where nobody takes a call."""

    overrides = SimpleNamespace(**_UNASKED)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@cache
def _past(func: FunctionType) -> Callable[..., Any]:
    """A function of PyTorch's, past its question who takes the call; those that it calls ask.

    It is what told of the call, and would tell of it again for ever.
    """
    names = {**func.__globals__, **_UNASKED, "torch": _Torch()}
    cells = [each.cell_contents for each in func.__closure__ or ()]
    # What it chooses from is the same call under other names, and asks too.
    closure = tuple(CellType(_past(x) if inspect.isfunction(x) else x) for x in cells)
    past = FunctionType(func.__code__, names, func.__name__, func.__defaults__, closure)
    past.__kwdefaults__ = func.__kwdefaults__
    return past


# -- what is computed again -----------------------------------------------------------------

_RUNNING: list[_Keyed] = []
_REPLACING = threading.Lock()


def _here() -> _Keyed | None:
    """The innermost block of this thread."""
    stack = function_modes()
    return next((mode for mode in reversed(stack) if isinstance(mode, _Keyed)), None)


def _recomputed(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `torch.utils.checkpoint` runs again in backward draws what it drew."""
    mode = _here()
    if mode is None:
        return RECOMPUTE(fn, *args, **kwargs)
    key, count = mode.key, mode.count

    def again(*xs: Any, **named: Any) -> Any:
        with _Keyed(key, count):
            return fn(*xs, **named)

    return RECOMPUTE(again, *args, **kwargs)


class _Reentrant:
    """In the place of the checkpoint that runs without a graph."""

    @staticmethod
    def apply(*args: Any) -> Any:
        if _here() is not None:
            fail("fs.random.keyed", "torch.utils.checkpoint with use_reentrant=True",
                 "what is computed again draws the same numbers, and here nobody could tell it to",
                 "use_reentrant=False")  # fmt: skip
        return CHECKPOINT_FUNCTION.apply(*args)


@contextmanager
def keyed(key: torch.Tensor, /) -> Iterator[None]:
    """Draw by a key in the block: dropout, `torch.rand` and all that draws from a generator.

    The n-th draw has the key `fold_in(key, n)`, and no generator is asked or changed: a function
    with such a block in it depends on its arguments alone, and gives the same numbers on one
    device, in `fs.partition`, and of the same tensors in a `fs.shard_map`. There ranks that are to
    draw apart fold their `fs.axis_index` in. What `torch.utils.checkpoint` computes again
    (`use_reentrant=False`) draws the same. Under `torch.vmap` one key draws once for all. Attention
    with `dropout_p` is computed in products and sums. Calls with `generator=` draw from that.

    Raises `ShardingError` for what is no key, in the block for functions that draw in ways that are
    not written with a key (`torch.poisson`, `nn.LSTM(dropout=...)`), and for a block that is around
    a mapped or traced function, not in it.

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
    raise_if("fs.random.keyed", _key_problems(key))
    mode = _Keyed(key)
    with _REPLACING:
        if not _RUNNING:
            replace_checkpoint(_recomputed, _Reentrant)
        _RUNNING.append(mode)
    try:
        with mode:
            yield
    finally:
        with _REPLACING:
            _RUNNING.remove(mode)
            if not _RUNNING:
                replace_checkpoint(RECOMPUTE, CHECKPOINT_FUNCTION)
