"""`functional`: a module as a pure function of its parameters and buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fshard._torch.module_state import call_with_state, children
from fshard._util.errors import Problem, raise_if
from fshard.partition.arguments import with_tied_names

Tensors = dict[str, Any]
"""Tensors, pairs or specs by the names of a module's `named_parameters` or `named_buffers`."""


class Functional(NamedTuple):
    """Module as a pure function, as `fs.state.functional` returns it.

    Attributes:
        fn: function `fn(params, buffers, *args, **kwargs)` to `(output, new_buffers)`.
        params: the module's parameters by name, each tied one under its first name alone.
        buffers: the module's buffers by name, likewise.

    >>> import torch
    >>> import fshard as fs
    >>> sorted(fs.state.functional(torch.nn.BatchNorm1d(2)).buffers)
    ['num_batches_tracked', 'running_mean', 'running_var']
    """

    fn: Callable[..., tuple[Any, Tensors]]
    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def functional(module: torch.nn.Module, /) -> Functional:
    """Return a module as a pure function, with its parameters and its buffers.

    The module is not changed, and nothing is registered on it; it lends its code. New values of
    buffers, such as running statistics, are in `new_buffers`, never in the arguments. The
    function is differentiable in `params` and in the arguments of the module.

    Args:
        module: any module, also on the meta device.

    Returns:
        `(fn, params, buffers)`. `fn(params, buffers, *args, **kwargs)` calls the module's `forward`
        and returns `(output, new_buffers)`, always both. `params` and `buffers` are dicts of the
        module's own tensors; a tensor with several names, such as a tied weight, is one entry,
        under the first name. `buffers` includes those that a `state_dict` leaves out.

    Raises:
        ShardingError: from the call, if a name is missing or unknown, or if the module creates a
            parameter, a buffer or a submodule that it did not have.

    After `torch.func.functional_call`, which it calls; the pair of results is `flax`'s
    `apply(..., mutable=["batch_stats"])`.

    >>> import torch
    >>> import fshard as fs
    >>> fn, params, buffers = fs.state.functional(torch.nn.BatchNorm1d(2))
    >>> y, updated = fn(params, buffers, torch.ones(4, 2))
    >>> buffers["running_mean"], updated["running_mean"]
    (tensor([0., 0.]), tensor([0.1000, 0.1000]))
    """
    params: dict[str, torch.Tensor] = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    where = f"fs.state.functional({type(module).__name__})"

    def fn(params: Tensors, buffers: Tensors, *args: Any, **kwargs: Any) -> tuple[Any, Tensors]:
        _check_names(where, module, params, buffers)
        copies = {name: x.clone() for name, x in buffers.items()}
        values = with_tied_names(module, {**params, **copies})
        # It writes into `values` the buffers that the module replaces.
        with _no_new_children(where, module):
            output = call_with_state(module, values, args, kwargs)
        return output, {name: values[name] for name in buffers}

    fn.__name__ = type(module).__name__
    fn.__signature__ = _signature(module)  # type: ignore[attr-defined]
    return Functional(fn, params, buffers)


@contextmanager
def _no_new_children(where: str, module: torch.nn.Module) -> Iterator[None]:
    """Remove tensors and submodules that the block adds to a module or a submodule, and raise."""
    before = {path: (m, children(m)) for path, m in module.named_modules()}
    created = []
    try:
        yield
    finally:
        for path, (submodule, old) in before.items():
            for name, x in children(submodule).items():
                if x is not None and old.get(name) is None:
                    created.append((f"{path}.{name}".removeprefix("."), x))
                    if name in old:
                        setattr(submodule, name, None)
                    else:
                        delattr(submodule, name)
    raise_if(where, [
        Problem(f"a call that creates the {_kind(name, x)}",
                "parameters, buffers and submodules must be there before the call, to be "
                "arguments and results of it",
                "one call of the module itself before fs.state.functional, which creates "
                f"{name}")
        for name, x in created
    ])  # fmt: skip


def _kind(name: str, x: torch.Tensor | torch.nn.Module) -> str:
    """Return what a child is, with its name and its shape or type."""
    if isinstance(x, torch.nn.Module):
        return f"submodule {name}, a {type(x).__name__}"
    kind = "parameter" if isinstance(x, torch.nn.Parameter) else "buffer"
    return f"{kind} {name} of shape {tuple(x.shape)}"


def _signature(module: torch.nn.Module) -> inspect.Signature:
    """Return the signature of the function: `params`, `buffers` and the arguments of `forward`."""
    _, *parameters = inspect.signature(type(module).forward).parameters.values()
    kind = inspect.Parameter.POSITIONAL_ONLY
    state = [inspect.Parameter(name, kind) for name in ("params", "buffers")]
    return inspect.Signature([*state, *parameters])


def _check_names(
    where: str, module: torch.nn.Module, params: Mapping[str, Any], buffers: Mapping[str, Any]
) -> None:
    """Raise `ShardingError` for names that are missing or that the module lacks."""
    problems = []
    for argument, given, named in (
        ("params", params, module.named_parameters()),
        ("buffers", buffers, module.named_buffers()),
    ):
        names = [name for name, _ in named]
        missing, unknown = ([*dict.fromkeys(a).keys() - set(b)] for a, b in
                            ((names, given), (given, names)))  # fmt: skip
        for kind, wrong in (("without", missing), ("with", unknown)):
            if wrong:
                problems.append(Problem(f"{argument} {kind} {', '.join(sorted(wrong))}",
                                        f"{argument} must have the {len(names)} names of the "
                                        "module, each tied tensor under its first name",
                                        f"the {argument} of fs.state.functional(module), with "
                                        "other values"))  # fmt: skip
    raise_if(where, problems)
