"""Forward mode in bodies: its one level, which ranks share, and `linearize` without graphs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree

from fshard._torch.autograd_state import version_of
from fshard._util.errors import fail

_SHARED: list[bool] = []


def share_forward_level() -> Callable[[], None] | None:
    """Keep the running level of forward mode open; return the function that ends the sharing.

    Until then no code enters or leaves a level: simulated ranks in turn use this one. The end
    leaves the level, which was entered by one of the ranks. Return None if it is shared already.
    """
    if _SHARED:
        return None
    enter: Any
    leave: Any
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    level = forward_ad._current_level

    def entered() -> int:
        return level

    def left(*, level: int | None = None) -> None:
        pass

    def end() -> None:
        _SHARED.clear()
        forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter, leave
        leave(level=level)

    _SHARED.append(True)
    forward_ad.enter_dual_level, forward_ad.exit_dual_level = entered, left
    return end


@contextmanager
def linearizing_by_jvp() -> Iterator[None]:
    """Let `torch.func.linearize` return a function that runs `jvp` in the block, not a graph.

    Ranks that take turns cannot record graphs, and the operations of a graph do not show which of
    its collectives' results are invariant. The function that is linearized runs again in each call.
    """
    with _LOCK:
        _BLOCKS.append(None)
        vars(eager_transforms)["lazy_dynamo_disallow"] = _recorder
    try:
        yield
    finally:
        with _LOCK:
            _BLOCKS.pop()
            if not _BLOCKS:
                vars(eager_transforms)["lazy_dynamo_disallow"] = _DISALLOW


_LOCK, _BLOCKS = threading.Lock(), list[None]()
_DISALLOW: Any = eager_transforms.lazy_dynamo_disallow
Flat = Sequence[torch.Tensor]


def _recorder(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what `linearize` calls in the place of `make_fx` and of the folding of constants."""
    return _derivative_of if function is make_fx else lambda derivative: derivative


def _derivative_of(trace: Callable[[Flat], Any]) -> Callable[[Flat], Callable[..., Flat]]:
    """Return the derivative whose graph `linearize` would record, a function of flat tangents."""
    cells: Any = inspect.getclosurevars(trace).nonlocals
    function, primals, structure = map(cells.get, ("func", "flat_primals", "primals_argspec"))
    versions = list(map(_version, primals))

    def of_flat(*xs: torch.Tensor) -> Any:
        return function(*_pytree.tree_unflatten(xs, structure))

    def derivative(*tangents: torch.Tensor) -> Flat:
        if versions != list(map(_version, primals)):
            fail("torch.func.linearize in a body", "arguments that were written since",
                 "they must be those of the linearization: the function runs again",
                 "linearize(f, x.clone())")  # fmt: skip
        results: Any = torch.func.jvp(of_flat, tuple(primals), tangents)
        return _pytree.tree_leaves(results[1])

    return lambda _: derivative


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else version_of(x)
