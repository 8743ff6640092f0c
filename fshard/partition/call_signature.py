"""Calls of a partitioned function: what tells them apart beside the specs of their tensors."""

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

__all__ = ["How", "by_place", "tensors_of", "wants_grad"]

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class How:
    """What tells calls apart beside specs: whose gradients are asked for, and where tensors are.

    `enabled` says whether gradients are tracked, `device` is where what is computed is, `state`
    what else the function sees: the default dtype, and which modules are in training.
    """

    wanted: tuple[bool, ...]
    devices: tuple[torch.device, ...]
    enabled: bool
    state: Any

    @staticmethod
    def of(leaves: Sequence[Any], specs: Sequence[Spec | None], state: Any, *, runs: bool) -> How:
        """That of a call, of its tensors and pairs; of one that is only laid out they may be meta.

        Then they stand for tensors with numbers, wherever those are.
        """
        enabled, tensors = torch.is_grad_enabled(), tensors_of(leaves, specs)
        wanted = tuple(enabled and wants_grad(leaf) for leaf in tensors)
        devices = [_device(leaf) for leaf in tensors]
        places = tuple(each if runs or each.type != "meta" else CPU for each in devices)
        return How(wanted, places, enabled, state)

    @property
    def device(self) -> torch.device:
        """Where what is computed is: with the first tensor that is not on the host, else there."""
        return next((each for each in self.devices if each != CPU), CPU)


def _device(leaf: Any) -> torch.device:
    """Where a tensor or a pair's local is; of specs nobody knows, and it does not matter."""
    found = instances_in(leaf[0] if is_pair(leaf) else leaf, torch.Tensor)
    return found[0].device if found else CPU


def tensors_of(leaves: Sequence[Any], specs: Sequence[Spec | None]) -> list[Any]:
    """The leaves that are tensors or pairs."""
    return [leaf for leaf, spec in zip(leaves, specs, strict=True) if spec is not None]


def wants_grad(leaf: Any) -> bool:
    """Whether a leaf's gradient is asked for; of specs, which cannot say, if it may be."""
    if isinstance(leaf, Spec):
        return leaf.dtype.is_floating_point
    local = leaf[0] if is_pair(leaf) else leaf
    if isinstance(local, torch.Tensor):
        return local.requires_grad
    return isinstance(local, Sequence) and any(getattr(x, "requires_grad", False) for x in local)


def by_place(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str
) -> tuple[Any, ...]:
    """The arguments of a call with those that are given by name in their places.

    Defaults fill what is left out before them. Raises Python's own TypeError for a call that does
    not fit, and `ShardingError` for arguments that have no place.

    >>> by_place(lambda x, scale=1.0, mask=None: x, (0,), {"mask": 2}, "here")
    (0, 1.0, 2)
    """
    bound = inspect.signature(fn).bind(*args, **kwargs)
    given = {*bound.arguments}
    bound.apply_defaults()
    kept: list[Any] = []
    count = 0
    for name, parameter in bound.signature.parameters.items():
        value = bound.arguments[name]
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            if name in given:
                fail(where, f"{name} given by name", "a spec is that of an argument by its place",
                     "functools.partial(fn, ...) for what is no tensor, or a place for "
                     "it")  # fmt: skip
        elif parameter.kind is parameter.VAR_POSITIONAL:
            kept += value
        else:
            kept.append(value)
        if name in given:
            count = len(kept)
    return tuple(kept[:count])
