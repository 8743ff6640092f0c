"""Key of a call of a partitioned function, and its arguments by position."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard._util.errors import fail
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair
from fshard.ops.core.call import instances_in

__all__ = ["CallSignature", "requires_grad", "tensor_leaves", "to_positional"]

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class CallSignature:
    """Cache key of a call beside its specs.

    Attributes:
        requires_grad: for every tensor, if its gradient is requested.
        devices: the device of every tensor.
        grad_enabled: the grad mode.
        state: the default dtype, and the training flags of the modules.
    """

    requires_grad: tuple[bool, ...]
    devices: tuple[torch.device, ...]
    grad_enabled: bool
    state: Any

    @staticmethod
    def of(
        leaves: Sequence[Any], specs: Sequence[Spec | None], state: Any, *, runs: bool
    ) -> CallSignature:
        """Return the signature of a call; unless it `runs`, meta tensors count as CPU tensors."""
        enabled, tensors = torch.is_grad_enabled(), tensor_leaves(leaves, specs)
        flags = tuple(enabled and requires_grad(leaf) for leaf in tensors)
        devices = [_device(leaf) for leaf in tensors]
        if not runs:
            devices = [CPU if device.type == "meta" else device for device in devices]
        return CallSignature(flags, tuple(devices), enabled, state)

    @property
    def device(self) -> torch.device:
        """Device of the first tensor that is not on the CPU, else the CPU."""
        return next((device for device in self.devices if device != CPU), CPU)


def _device(leaf: Any) -> torch.device:
    """Return the device of a tensor or of a pair's local; a spec counts as a CPU tensor."""
    tensors = instances_in(leaf[0] if is_pair(leaf) else leaf, torch.Tensor)
    return tensors[0].device if tensors else CPU


def tensor_leaves(leaves: Sequence[Any], specs: Sequence[Spec | None]) -> list[Any]:
    """Return the leaves that have a spec: tensors, pairs and specs."""
    return [leaf for leaf, spec in zip(leaves, specs, strict=True) if spec is not None]


def requires_grad(leaf: Any) -> bool:
    """Return True if the gradient of a leaf is requested; of a spec, if its dtype allows one."""
    if isinstance(leaf, Spec):
        return leaf.dtype.is_floating_point
    local = leaf[0] if is_pair(leaf) else leaf
    if isinstance(local, torch.Tensor):
        return local.requires_grad
    return isinstance(local, Sequence) and any(getattr(x, "requires_grad", False) for x in local)


def to_positional(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str
) -> tuple[Any, ...]:
    """Return the arguments of a call by position, with defaults for those left out in between.

    Raises:
        TypeError: Python's own, for a call that does not fit the signature.
        ShardingError: for keyword-only arguments.

    >>> to_positional(lambda x, scale=1.0, mask=None: x, (0,), {"mask": 2}, "here")
    (0, 1.0, 2)
    """
    bound = inspect.signature(fn).bind(*args, **kwargs)
    passed = {*bound.arguments}
    bound.apply_defaults()
    positional: list[Any] = []
    count = 0
    for name, parameter in bound.signature.parameters.items():
        value = bound.arguments[name]
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            if name in passed:
                fail(where, f"{name} given by name", "a spec must belong to a positional argument",
                     "functools.partial(fn, ...) for an argument without tensors, or a positional "
                     "parameter")  # fmt: skip
        elif parameter.kind is parameter.VAR_POSITIONAL:
            positional += value
        else:
            positional.append(value)
        if name in passed:
            count = len(positional)
    return tuple(positional[:count])
