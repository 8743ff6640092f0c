"""Dictionaries that a call of an `nn.Module` reads, and comparisons of metas of tensors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import guards
from torch.nn.modules import module as all_modules
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

CHILDREN = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
BASE_CLASSES: frozenset[type] = frozenset((torch.nn.Module, object))
"""Classes whose methods read nothing but the dictionaries above."""

meta_getter: Callable[[torch.Tensor], tuple[Any, ...]] = attrgetter(
    "shape", "dtype", "device", "requires_grad"
)
"""Return what a trace depends on of a tensor that it closes over."""

dict_version: Callable[[dict[Any, Any]], int] | None = (
    guards.dict_version if sys.version_info < (3, 12) else None
)
"""Return a number that another one follows at every change of a dict; None if Python has none."""


def same_metas(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function of as many tensors that is True for different ones with the same metas.

    They agree in their types, dispatch keys, shape, dtype, device and `requires_grad` with those
    given, which it does not keep alive. It is one call in C.

    >>> agree = same_metas([torch.ones(2), torch.ones(3, 4)])
    >>> agree(torch.zeros(2), torch.zeros(4, 3).T), agree(torch.zeros(2), torch.zeros(3))
    (True, False)
    """
    sizes: Any = [[*x.shape] for x in tensors]
    strides: Any = [[None] * x.ndim for x in tensors]
    check: Callable[..., bool] = guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    return check


def children(module: torch.nn.Module) -> dict[str, Any]:
    """Return the parameters, buffers and submodules of a module itself by name, `None` included."""
    attributes = vars(module)
    return {name: x for kind in CHILDREN for name, x in attributes[kind].items()}


def state_dictionaries(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the dictionaries of a module's children, tensors and hooks, and of global hooks."""
    attributes = vars(module)
    own = [attributes[name] for name in (*CHILDREN, *HOOKS) if name in attributes]
    return own + _global_hooks()


def _global_hooks() -> list[dict[Any, Any]]:
    return [getattr(all_modules, f"_global{name}") for name in HOOKS]


_CALLS: list[Any] = []
"""`nn.Module._call_impl` from before the first running block of `calls_by`, for each block."""
_CALLS_LOCK = threading.Lock()


@contextmanager
def calls_by(call: Callable[..., Any]) -> Iterator[None]:
    """Let `call(original, module, *args, **kwargs)` call every module in the block.

    Blocks of several threads may overlap; the first one's `call` is that of all. Global hooks would
    be part of the state of a trace, and to replace `__call__` would take milliseconds.
    """
    with _CALLS_LOCK:
        original = _CALLS[0] if _CALLS else nn.Module._call_impl
        if not _CALLS:
            nn.Module._call_impl = lambda *args, **kwargs: call(original, *args, **kwargs)  # type: ignore[method-assign]
        _CALLS.append(original)
    try:
        yield
    finally:
        with _CALLS_LOCK:
            _CALLS.pop()
            if not _CALLS:
                nn.Module._call_impl = original  # type: ignore[method-assign]


TRACKERS = ("ModTracker", "ModuleTracker")
"""Classes whose global hooks record which module runs, as for `CommDebugMode`."""


@contextmanager
def without_module_trackers() -> Iterator[None]:
    """Call no hooks of PyTorch's module trackers in the block: they add hooks to modules."""
    tracked = [
        (hooks, key, hook)
        for hooks in _global_hooks()
        for key, hook in hooks.items()
        if any(x.__name__ in TRACKERS for x in type(getattr(hook, "__self__", None)).__mro__)
    ]
    for hooks, key, _ in tracked:
        del hooks[key]
    try:
        yield
    finally:
        for hooks, key, hook in tracked:
            hooks[key] = hook


def recomputed_weights(objects: Iterable[Any]) -> list[tuple[dict[str, Any], str, Any]]:
    """Return the weights that hooks of modules compute before each call, as attributes.

    The hooks are those of `torch.nn.utils.prune`, and of the older `weight_norm` and
    `spectral_norm`, which are not parametrizations.

    Returns:
        The attributes of a module, the name of the weight among them, and its value.
    """
    weights = []
    for module in objects:
        hooks = module._forward_pre_hooks.values() if isinstance(module, nn.Module) else ()
        for hook in hooks:
            if isinstance(hook, BasePruningMethod | WeightNorm | SpectralNorm):
                name = hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name
                weights.append((vars(module), name, vars(module).get(name)))
    return weights


@contextmanager
def conversions_by(convert: Callable[..., nn.Module]) -> Iterator[None]:
    """Let `convert(original, module, fn, recurse)` do `module.to(...)` and its like in the block.

    `fn` converts a tensor, `original(module, fn, recurse)` is PyTorch's conversion.
    """
    original = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        return convert(original, self, fn, recurse)

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def call_with_state(
    module: nn.Module, values: dict[str, torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a module with other parameters and buffers, and leave it as it was.

    Buffers that the module replaces are replaced in `values`.

    `torch.func.functional_call` leaves the weights in the lists of recurrent layers, and in modules
    under two names, which it would restore twice.
    """
    owners = {
        f"{path}.{name}" if path else name: (id(owner), name)
        for path, owner in module.named_modules(remove_duplicate=False)
        for name in (*owner._parameters, *owner._buffers)
    }
    names = {owners.get(name, name): name for name in values}
    state = {name: values[name] for name in names.values()}
    layers = [x for x in module.modules() if isinstance(x, nn.RNNBase)]
    before = [[*layer._flat_weights] for layer in layers]
    try:
        return torch.func.functional_call(module, state, tuple(args), kwargs, tie_weights=False)
    finally:
        values.update((name, state[names[owners.get(name, name)]]) for name in values)
        for layer, weights in zip(layers, before, strict=True):
            layer._flat_weights = weights
