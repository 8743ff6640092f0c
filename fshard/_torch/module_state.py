"""Dictionaries that a call of an `nn.Module` reads, and metas of tensors."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.nn.modules import module as all_modules

CHILDREN = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
BASE_CLASSES: frozenset[type] = frozenset((torch.nn.Module, object))
"""Classes whose methods read nothing but the dictionaries above."""

meta_getter: Callable[[torch.Tensor], tuple[Any, ...]] = attrgetter(
    "shape", "dtype", "device", "requires_grad"
)
"""Return what a trace depends on of a tensor that it closes over."""


def children(module: torch.nn.Module) -> dict[str, Any]:
    """Return the parameters, buffers and submodules of a module itself by name, `None` included."""
    attributes = vars(module)
    return {name: x for kind in CHILDREN for name, x in attributes[kind].items()}


def state_dictionaries(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the dictionaries of a module's children, tensors and hooks, and of global hooks."""
    attributes = vars(module)
    own = [attributes[name] for name in (*CHILDREN, *HOOKS) if name in attributes]
    return own + [getattr(all_modules, f"_global{name}") for name in HOOKS]
