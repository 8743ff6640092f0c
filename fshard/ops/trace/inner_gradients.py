"""Gradients and transforms within a traced function: `torch.autograd.grad`, `torch.func`, `vmap`.

Functions are traced above autograd, which then runs on what was traced. What a function asks of
autograd itself is not seen there. Such a function is traced once more, below autograd: then its
gradients are operations as all others, and whole training steps are partitioned. What autograd
would not differentiate after it, because no graph was asked for, is detached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import fx
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import BackwardHook

from fshard._torch.autograd_state import graph_task_id
from fshard._torch.fake_tensors import FakeTensor
from fshard._torch.functorch import forward_ad_level, transform_level
from fshard._torch.modes import TorchDispatchMode, function_modes
from fshard._util.errors import fail
from fshard.layout.tree import tensors_in
from fshard.ops.core.builders import is_inexact
from fshard.ops.core.call import map_instances
from fshard.ops.trace.covariance import WITHOUT_NUMBERS
from fshard.spmd.closure_inputs import graph_leaves

__all__ = ["Above", "Below", "Saved", "TakesGradients", "gradients_within", "refuse_grads"]

ASKS = {
    torch.autograd.grad, torch.Tensor.backward, torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    torch.Tensor.register_hook, torch.Tensor.retain_grad,
}  # fmt: skip
"""What a function says that takes gradients itself."""


class TakesGradients(BaseException):
    """A function takes gradients, or maps over a dim: it has to be traced below autograd.

    No `Exception`, for the function may catch those.
    """


def _levels() -> tuple[int, int]:
    """How many transforms of `torch.func` run, and how many of forward differentiation."""
    return transform_level() or 0, forward_ad_level()


class _Watch(TorchFunctionMode):
    """What is refused wherever a function is traced; `where` is what errors are of.

    `wanted` are the tensors whose gradients are asked for.
    """

    def __init__(self, where: str, wanted: Sequence[bool]) -> None:
        super().__init__()
        self.where, self.wanted = where, any(wanted)

    def refuse(self, func: Any) -> None:
        """Raise `ShardingError` for what no graph says."""
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            fail(self.where, "x.data = y, which no graph says",
                 "a function is traced as the operations that it runs",
                 "x.data.copy_(y), or use y")  # fmt: skip
        if func == torch.Tensor.register_hook and self.wanted:
            fail(self.where, "x.register_hook(...), with gradients",
                 "a function is traced as what it computes, and the gradient is that of what was "
                 "traced: hooks would be left out",
                 "s * y + ((1 - s) * y).detach() scales the gradient of y by s; other changes "
                 "where gradients come out")  # fmt: skip


class Above(_Watch):
    """Raises `TakesGradients` where a function does what can only be seen below autograd.

    Tensors do not require grad there; one that is asked whether it does says what it would.
    """

    def __init__(self, where: str, wanted: Sequence[bool]) -> None:
        super().__init__(where, wanted)
        self.levels = _levels()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.refuse(func)
        if func in ASKS or _levels() != self.levels:
            raise TakesGradients
        out = WITHOUT_NUMBERS.get(func, func)(*args, **(kwargs or {}))
        if func == torch.Tensor.requires_grad.__get__ and not out:  # type: ignore[attr-defined]
            return self.wanted and torch.is_grad_enabled() and is_inexact(args[0])
        return out


class Below(_Watch):
    """Detaches what would have no graph: gradients without one, and what is made under no_grad.

    Only if gradients are tracked around it, else nothing has a graph.
    """

    def __init__(self, where: str, wanted: Sequence[bool], tracked: bool) -> None:
        super().__init__(where, wanted)
        self.tracked = tracked

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.refuse(func)
        out = WITHOUT_NUMBERS.get(func, func)(*args, **(kwargs or {}))
        plain = func is not torch.autograd.grad or _keeps(kwargs or {})
        if func == _GRAD and out is not None:  # which backward() has left
            plain = out.requires_grad
        if not self.tracked or (torch.is_grad_enabled() and plain):
            return out
        return map_instances(out, torch.Tensor, lambda x: x.detach() if is_inexact(x) else x)


_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]


def _keeps(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `torch.autograd.grad` asks for gradients that have gradients."""
    return bool(kwargs.get("create_graph"))


class Saved(TorchDispatchMode):
    """Sees what autograd has saved and takes out again, of which the graph says it is detached.

    A gradient that is differentiated again is one of the results that were saved for it too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[fx.Node, bool] = {}
        self.unpacked: set[fx.Node | None] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for each in tensors_in((args, kwargs or {})):
            node = _node_of(each) if each.requires_grad else None
            # What a function detaches has no gradient, or is a leaf that it made.
            saved = node in self.unpacked or not each.is_leaf
            if saved and node is not None and node.target is _DETACH:
                self.found[node] = each.is_leaf
        out = func(*args, **(kwargs or {}))
        if func is _DETACH and graph_task_id() != -1:  # autograd runs backward
            self.unpacked.add(_node_of(out))
        return out

    def join(self) -> None:
        """Let the graph say so: what was taken out is what was saved."""
        for node, is_leaf in self.found.items():
            source = node
            # A leaf may itself be detached from another tensor, a result of operations is not.
            while source.target is _DETACH and (not is_leaf or source in self.unpacked):
                source = source.args[0]  # type: ignore[assignment]
            node.replace_all_uses_with(source)


_DETACH = torch.ops.aten.detach.default


def _node_of(x: torch.Tensor) -> fx.Node | None:
    """The node of a tensor in the graph that is traced; None for others."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode: Any = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(x, mode.tracer, None)
    return None if slot is None else slot.proxy.node


# -- what PyTorch tells no mode of --------------------------------------------------------------


def refuse_grads(given: str, where: str) -> NoReturn:
    """Raise `ShardingError` for gradients that would be left in tensors from outside."""
    fail(where, given, "a traced function returns what it makes, gradients too",
         "torch.autograd.grad(loss, w) returns it; or backward() to w.detach().requires_grad_(), "
         "made within")  # fmt: skip


@contextmanager
def gradients_within(
    wanted: Sequence[bool], tracing: Callable[[], int], where: str
) -> Iterator[None]:
    """Refuse in the block what has gradients of its own, which no graph of operations has.

    That are custom functions, backward hooks of modules, checkpoints that run backward for
    themselves, and `backward()` to what the function closes over. `tracing` says whether it is
    this thread that traces.
    """
    plain = {owner: vars(owner)[name] for owner, name in _PATCHED}

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = not cls.__module__.startswith("torch.") or cls.__name__ == "CheckpointFunction"
        if tracing() and own and torch.is_grad_enabled() and (any(wanted) or _held(args)):
            _refuse_function(cls, where)
        return plain[Function].__get__(None, cls)(*args, **kwargs)

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(mode, Above) for mode in function_modes()):
            raise TakesGradients
        if tracing() and _held(tensors):
            refuse_grads("backward() fills .grad of a tensor that the function closes over", where)
        return plain[torch.autograd](tensors, *args, **kwargs)

    def hook(self: Any, *args: Any) -> None:
        if tracing() and (any(wanted) or torch.is_grad_enabled()):
            fail(where, "a module with backward hooks",
                 "a function is traced as what it computes, and the gradient is that of what was "
                 "traced: hooks would be left out",
                 "take gradients within the function, or change them where they come "
                 "out")  # fmt: skip
        plain[BackwardHook](self, *args)

    Function.apply = classmethod(apply)  # type: ignore[assignment]
    torch.autograd.backward = backward
    BackwardHook.__init__ = hook  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for owner, name in _PATCHED:
            setattr(owner, name, plain[owner])


_PATCHED: tuple[tuple[Any, str], ...] = (
    (Function, "apply"), (torch.autograd, "backward"), (BackwardHook, "__init__"),
)  # fmt: skip


def _held(given: Any) -> bool:
    """Whether a gradient would come to a tensor from outside of the traced function."""
    return any(not isinstance(leaf, FakeTensor) for leaf in graph_leaves([*tensors_in(given)]))


def _refuse_function(cls: Any, where: str) -> NoReturn:
    if cls.__name__ == "CheckpointFunction":
        fail(where, "checkpoint(..., use_reentrant=True)",
             "it runs backward for itself, where nothing is traced",
             "checkpoint(..., use_reentrant=False)")  # fmt: skip
    fail(where, f"{cls.__name__}.apply, with gradients",
         "a function is traced as what it computes, and the gradient is that of what was "
         "traced: the backward of a custom function would be left out",
         "write y + (f(x) - y).detach() for a straight-through gradient, take gradients "
         "within the function, or make it an operation: torch.library.custom_op, "
         "register_autograd and fs.register_rule")  # fmt: skip
