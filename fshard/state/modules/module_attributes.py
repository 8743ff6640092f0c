"""Attributes of `nn.Module` that a distributed module lacks: its state is an argument of a call."""

from __future__ import annotations

from typing import NoReturn

import torch

from fshard._util.errors import ShardingError, fail

_STATE = '{"params": distributed.params, "buffers": distributed.buffers}'
_MODE = "distributed.module.{name}(), which calls of distributed read"
_CONVERTED = "fs.state.distribute_module(module.{name}(...), mesh, ...) of the converted module"
_GRADIENTS = "fs.state.value_and_grad(loss)(distributed.params, ...) returns new gradients"
_FIXES = {
    "forward": "distributed(distributed.params, distributed.buffers, ...)",
    "state_dict": f"{_STATE}, which fs.state.save takes",
    "load_state_dict": "fs.state.load(directory, distributed.specs), whose params and buffers are "
                       "arguments of a call",
    "parameters": "distributed.params.values()",
    "named_parameters": "distributed.params.items()",
    "named_buffers": "distributed.buffers.items()",
    **dict.fromkeys(("train", "eval"), _MODE),
    **dict.fromkeys(("to", "to_empty", "cuda", "cpu", "type", "float", "double", "half",
                     "bfloat16"), _CONVERTED),
    **dict.fromkeys(("zero_grad", "requires_grad_"), _GRADIENTS),
}  # fmt: skip
"""By the name of a method of modules the code to write in its place."""


class NotAModuleError(ShardingError, AttributeError):
    """Attribute of modules on a distributed module; also the error that Python itself raises."""


def refuse_attribute(module: torch.nn.Module, name: str) -> NoReturn:
    """Raise `NotAModuleError` for an attribute of a module, `AttributeError` for any other.

    Args:
        module: the module of one device.
        name: an attribute that the distributed module lacks.
    """
    if name.startswith("__") or not hasattr(module, name):
        raise AttributeError(f"'DistributedModule' object has no attribute {name!r}")
    fix = _FIXES.get(name, "distributed.module.{name}").replace("{name}", name)
    fail(f"DistributedModule.{name}", f"{name} of a distributed {type(module).__name__}",
         "a distributed module must be called with its state, distributed(params, buffers, ...): "
         "it is a function, not an nn.Module", fix, NotAModuleError)  # fmt: skip
