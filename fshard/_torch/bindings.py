"""Python functions in the places of operators: parsing their arguments takes half of the time.

A function of the same name may run another overload, or have other defaults. It is taken only if on
tensors without values it dispatches the same operators with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fshard._torch.dynamo import tree_map
from fshard._torch.functorch import without_transforms
from fshard._torch.modes import DisableTorchFunction, DispatchMode, without_dispatch_modes
from fshard._torch.operators import OpOverload, TensorBase, builtin_of, schema_of

_HOMES: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C._nn, TensorBase)


class _DispatchLog(DispatchMode):
    """Operators that run in a block, with their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls.append((func, tree_map(_described, (args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _described(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.device
    return type(x), x


def direct_function(
    op: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the fastest function that runs an operator on arguments like these.

    Args:
        op: the operator.
        args: positional arguments, with tensors on the meta device.
        kwargs: arguments by name.

    >>> x = torch.empty(2, 3, device="meta")
    >>> direct_function(torch.ops.aten.relu.default, (x,), {}) is torch.relu
    True
    >>> loss = torch.ops.aten.cross_entropy_loss.default  # by name, reduction=0 is the default
    >>> direct_function(loss, (x, x), {}) is loss._op
    True
    """
    builtin = builtin_of(op)
    namespace, _, name = schema_of(op).name.partition("::")
    if namespace != "aten":
        return builtin
    candidates = [getattr(home, name) for home in _HOMES if hasattr(home, name)]
    with torch.no_grad(), DisableTorchFunction(), without_dispatch_modes(), without_transforms():
        expected = _dispatched(builtin, args, kwargs) if candidates else []
        for function in candidates:
            if expected and _dispatched(function, args, kwargs) == expected:
                return function  # type: ignore[no-any-return]
    return builtin


def _dispatched(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the operators that a call dispatches; [] if PyTorch refuses it."""
    log = _DispatchLog()
    try:
        with log:
            function(*args, **kwargs)
    except Exception:  # noqa: BLE001 - no meta kernel, or no such arguments
        return []
    return log.calls
