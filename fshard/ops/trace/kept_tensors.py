"""Tensors without values that a traced function keeps outside: in modules, lists and caches."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from fshard._torch.fake_tensors import FakeTensor, FakeTensorMode
from fshard._torch.memory import storage_address
from fshard._torch.modes import DispatchMode
from fshard._util.errors import ShardingError, fail
from fshard.layout.tree import tensors_in
from fshard.ops.core.call import base_name
from fshard.ops.trace.functionalize import refuse_closure_write, refuse_sparse, written_operands
from fshard.run.transports.divergence_report import user_line


class LeftTensorError(ShardingError):
    """Call with a tensor without values that a failed trace has left."""


class FailedTraceMode(FakeTensorMode):
    """Mode of a trace that failed: calls with its tensors raise `LeftTensorError`.

    The function may have kept some in a module or a cache.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> NoReturn:
        refuse_left(base_name(func), (args, kwargs), clears=True)
        raise AssertionError("the mode runs for its tensors alone")


def end_failed(mode: FakeTensorMode) -> None:
    """Refuse calls with the tensors of a trace that failed."""
    mode.__class__ = FailedTraceMode  # traces need a mode of PyTorch's class, as its operators do


def _is_left(x: Any) -> bool:
    return type(x) is FakeTensor and type(x.fake_mode) is FailedTraceMode


def refuse_left(name: str, operands: Any, *, clears: bool = False) -> None:
    """Raise `LeftTensorError` for operands of an operation that a failed trace has left.

    With `clears`, caches of `functools` that keep some are emptied.
    """
    for x in filter(_is_left, tensors_in(operands)):
        given = f"a tensor of shape {tuple(x.shape)} without values{_container_of(x)}"
        fail(f"{name}{user_line(None, None)}", given,
             "operands must have values: a function whose trace failed has kept this one outside",
             "call it again: caches of functools that kept such tensors are empty now"
             if clears and clear_left()
             else "remove it there; a call on global tensors then computes it",
             LeftTensorError)  # fmt: skip


class ClosureGuard(DispatchMode):
    """Mode that refuses writes to tensors that a traced function closes over.

    `check_leaks` refuses results that the function keeps outside, which have no values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own: set[int] = set()
        self.results: list[tuple[weakref.ref[torch.Tensor], str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for x in tensors_in(written_operands(func, args, kwargs or {})):
            if not isinstance(x, FakeTensor) and storage_address(x) not in self.own:
                refuse_closure_write(base_name(func))
        operands = [*tensors_in((args, kwargs))]
        refuse_left(base_name(func), operands)
        refuse_sparse(operands, base_name(func))
        out = func(*args, **(kwargs or {}))
        results = [*tensors_in(out)]
        refuse_sparse(results, base_name(func))
        before = {storage_address(x) for x in operands}
        self.own |= {storage_address(x) for x in results} - before
        if func is not torch.ops.aten.empty_strided.default:  # a constant, which the mode keeps
            self.results += [(weakref.ref(x), base_name(func)) for x in results
                             if isinstance(x, FakeTensor)]  # fmt: skip
        return out

    def check_leaks(self, arguments: Sequence[torch.Tensor], where: str) -> None:
        """Raise `ShardingError` if a result or an argument is kept outside of the function.

        Caches of `functools` that keep some are emptied; the functions that they cache are called
        again where their values are needed. `arguments` must be the only container of the
        arguments.
        """
        if not (self._alive(arguments) or _kept(arguments)):
            return
        gc.collect(1)  # reference cycles are not outside, and those of this trace are young
        if not (self._alive(arguments) or _kept(arguments)):
            return
        with _unfrozen():
            gc.collect()
            clear_caches([*(x for x, _ in self._alive(arguments)), *_kept(arguments)])
            given = self._first_kept(arguments)
        if not given:
            return
        fail(where, f"{given} is kept outside of the function",
             "the function is traced once on tensors without values, which are of no use after it",
             "return it; a value that a module or a cache keeps is removed there, and computed "
             "before by a call on global tensors")  # fmt: skip

    def _first_kept(self, arguments: Sequence[torch.Tensor]) -> str:
        """Return the name of a result or an argument that is kept, "" if none is."""
        for x, name in self._alive(arguments):
            return f"a result of {name}{_container_of(x)}"
        for x in _kept(arguments):
            index = next(i for i, argument in enumerate(arguments) if argument is x)
            return f"argument {index}{_container_of(x)}"
        return ""

    def _alive(self, arguments: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, str]]:
        """Return the results that exist, arguments left out, with their operations."""
        ids = {id(x) for x in arguments}
        results = [(ref(), name) for ref, name in self.results]
        return [(x, name) for x, name in results if x is not None and id(x) not in ids]


STARTUP_FROZEN = 2_000
"""More objects than Python itself freezes as it starts: 375 in Python 3.12. A user's call freezes
hundreds of thousands, PyTorch's among them."""


@contextmanager
def _unfrozen() -> Iterator[None]:
    """Find objects in the block that `gc.freeze` hides.

    If the user has called it, all objects are frozen afterwards.
    """
    count = gc.get_freeze_count()
    gc.unfreeze()
    try:
        yield
    finally:
        if count > STARTUP_FROZEN:
            gc.freeze()


def _container_of(x: torch.Tensor) -> str:
    """Return a clause with the dict or attribute that keeps a tensor, "" for others."""
    for owner in gc.get_referrers(x):
        items = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
        key = next((key for key, value in items.items() if value is x), None)
        if key is not None:
            objects = [y for y in gc.get_referrers(owner) if getattr(y, "__dict__", None) is owner]
            name = type([*objects, owner][0]).__name__
            return f", under {key!r} of a {name},"
    return ""


CONTAINERS = (tuple, list, dict)
"""Types of the containers that are followed."""
MAX_DEPTH = 6
"""Containers around a tensor that are followed, one in another, up to the cache."""


def clear_left() -> bool:
    """Empty the caches that keep tensors of failed traces; return True if there were some."""
    with _unfrozen():
        return clear_caches([x for x in gc.get_objects() if _is_left(x)])


def clear_caches(kept: list[torch.Tensor]) -> bool:
    """Empty each `functools.lru_cache` that keeps some tensors, in containers too.

    Referrers are followed, since what all caches contain can take minutes to walk.

    Args:
        kept: the tensors.

    Returns:
        True if there was one.
    """
    level: list[Any] = kept
    caches: list[Any] = []
    for _ in range(MAX_DEPTH):
        found = gc.get_referrers(*level) if level else []
        caches += [x for x in found if type(x) is functools._lru_cache_wrapper]
        level = [x for x in found if type(x) in CONTAINERS and x is not level and x is not kept]
        del found  # it refers to the next level, too
    for cache in caches:
        cache.cache_clear()
    return bool(caches)


def _kept(arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the arguments that other objects than `arguments` refer to.

    Frames end, and mapped regions enter the modes around them again, as that of `fs.random.keyed`.
    """
    # By index: a variable of a loop would be a third reference, beside the container and the call.
    return [
        arguments[i] for i in range(len(arguments))
        if sys.getrefcount(arguments[i]) > 2 and any(
            x is not arguments and not isinstance(x, FrameType | TorchFunctionMode)
            for x in gc.get_referrers(arguments[i])
        )
    ]  # fmt: skip
