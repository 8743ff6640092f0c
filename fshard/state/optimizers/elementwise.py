"""Optimizers that treat every element alone: the kernels of `torch.optim` on locals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch.optim.sgd import sgd as sgd_kernel

from fshard._torch.operators import AdamWOptions, foreach_adamw, fused_adamw
from fshard._util.cache import CACHE_SIZE
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import local_of, spec_of
from fshard.state.optimizers.optimizer import Optimizer, Rate, Slots, rate_at
from fshard.state.optimizers.option_checks import OptionChecks

Tensors = list[torch.Tensor]
MAX_GROUP = 2**17
"""Bytes of parameters that one call of PyTorch updates on a CPU, unless one tensor has more."""
_device_of, _nbytes_of = map(attrgetter, ("device", "nbytes"))


def sgd(
    lr: Rate, *, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
    nesterov: bool = False, fused: bool | None = None, specs: Any = None,
) -> Optimizer:  # fmt: skip
    """Return stochastic gradient descent on trees of pairs.

    Args:
        lr: learning rate, or a function of the number of the step to it.
        momentum: factor of the momentum; 0 keeps no state.
        dampening: the gradient enters the momentum with the factor `1 - dampening`.
        weight_decay: factor of the parameter that is added to its gradient.
        nesterov: True for Nesterov's momentum.
        fused: choice of the kernel, as in `torch.optim.SGD`.
        specs: layout of the state, see `fs.state.Optimizer`.

    Returns:
        The optimizer. Its state is `momentum`.

    Raises:
        ShardingError: an argument is out of range.

    Its values are those of `torch.optim.SGD` on one device.

    >>> import torch
    >>> import fshard as fs
    >>> params = fs.state.tree_shard([torch.ones(2)], fs.P("x"), mesh=fs.Mesh(x=2))
    >>> optimizer = fs.state.sgd(0.1, momentum=0.9)
    >>> state, params = optimizer.update(params, optimizer.init(params), params)
    >>> fs.unshard(params[0]), fs.unshard(state["momentum"][0])
    (tensor([0.9000, 0.9000]), tensor([1., 1.]))
    """
    checks = OptionChecks("fs.state.sgd")
    checks.rate(lr)
    checks.at_least("momentum", momentum, 0)
    checks.at_least("weight_decay", weight_decay, 0)
    if nesterov and (not momentum or dampening):
        checks.add("nesterov", nesterov, f"False with momentum={momentum!r} and "
                   f"dampening={dampening!r}", "True, momentum=0.9, dampening=0.0")  # fmt: skip
    checks.end()

    def slots(spec: Spec) -> dict[str, Spec | None]:
        return {"momentum": spec} if momentum else {}

    def kernel(
        step: int, params: Tensors, grads: Tensors, buffers: Sequence[torch.Tensor] = ()
    ) -> None:
        # A buffer of None is set to the gradient, without dampening: the first step.
        created: list[torch.Tensor | None] = [*buffers] if step > 1 else [None] * len(params)
        sgd_kernel(params, grads, created, fused=fused, weight_decay=weight_decay,
                   lr=rate_at(lr, step), maximize=False, momentum=momentum, dampening=dampening,
                   nesterov=nesterov)  # fmt: skip
        for buffer, new in zip(buffers, created, strict=False):
            if new is not None and new is not buffer:
                buffer.copy_(new)

    return Optimizer("fs.state.sgd", slots, _on_locals(kernel), specs)


def adamw(
    lr: Rate, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
    weight_decay: float = 0.01, fused: bool | None = None, specs: Any = None,
) -> Optimizer:  # fmt: skip
    """Return AdamW on trees of pairs.

    Args:
        lr: learning rate, or a function of the number of the step to it.
        betas: decay of the means of gradients and of their squares.
        eps: added to the root of the mean of squares.
        weight_decay: decoupled decay of parameters, times the learning rate.
        fused: True for PyTorch's fused kernel; else several tensors are updated by each call.
        specs: layout of the state, see `fs.state.Optimizer`.

    Returns:
        The optimizer. Its state is `mean` and `square`.

    Raises:
        ShardingError: an argument is out of range.

    Its values are those of `torch.optim.AdamW` on one device (arXiv 1711.05101).

    >>> import torch
    >>> import fshard as fs
    >>> params = fs.state.tree_shard([torch.ones(2)], fs.P("x"), mesh=fs.Mesh(x=2))
    >>> optimizer = fs.state.adamw(0.1, specs=fs.P("x"))
    >>> state, params = optimizer.update(params, optimizer.init(params), params)
    >>> fs.unshard(params[0]), int(fs.unshard(state["step"]))
    (tensor([0.8990, 0.8990]), 1)
    """
    checks = OptionChecks("fs.state.adamw")
    checks.rate(lr)
    if checks.pair("betas", betas, "(0.9, 0.999)"):
        checks.fraction("betas[0]", betas[0], "0.9")
        checks.fraction("betas[1]", betas[1], "0.999")
    checks.at_least("eps", eps, 0, "1e-8, say")
    checks.at_least("weight_decay", weight_decay, 0)
    checks.end()

    def slots(spec: Spec) -> dict[str, Spec | None]:
        return {"mean": spec, "square": spec}

    update, limit = (fused_adamw, math.inf) if fused else (foreach_adamw, MAX_GROUP)

    def kernel(step: int, *columns: Tensors) -> None:
        if columns[0][0].is_complex():
            columns = tuple([*map(torch.view_as_real, xs)] for xs in columns)
        update(*columns, options=AdamWOptions(step, rate_at(lr, step), *betas, eps, weight_decay))

    return Optimizer("fs.state.adamw", slots, _on_locals(kernel, limit), specs)


@lru_cache(maxsize=CACHE_SIZE)
def _rows_of_calls(
    specs: tuple[Spec, ...], nbytes: tuple[int, ...], devices: tuple[torch.device, ...],
    limit: float,
) -> list[list[int]]:  # fmt: skip
    """Return the indices of the parameters of every call: nonempty, of one dtype and device.

    Args:
        specs: layouts of the parameters.
        nbytes: bytes of their locals.
        devices: device of each local, or the one of all.
        limit: bytes that a call updates at most, unless one local has more.
    """
    calls: dict[Any, list[list[int]]] = {}
    filled: dict[Any, int] = {}
    for index, (spec, size) in enumerate(zip(specs, nbytes, strict=True)):
        if not size:
            continue
        kind = spec.dtype, devices[index % len(devices)]
        parts, total = calls.setdefault(kind, []), filled.get(kind, 0) + size
        if not parts or total > limit:
            parts.append([])
            total = size
        filled[kind] = total
        parts[-1].append(index)
    return [rows for parts in calls.values() for rows in parts]


def _on_locals(kernel: Callable[..., None], limit: float = math.inf) -> Any:
    """Return the kernel on pairs of one that takes lists of one rank's nonempty tensors.

    Args:
        kernel: function of the step and of lists of tensors: parameters, gradients and each slot,
            all of one dtype and device.
        limit: bytes of parameters that it is called with at most on a CPU.
    """

    def run(step: int, grads: list[Sharded], slots: Slots, params: list[Sharded]) -> None:
        specs = tuple(map(spec_of, params))
        columns = [[*map(local_of, column)] for column in (params, grads, *slots.values())]
        simulated = not isinstance(columns[0][0], torch.Tensor)
        for rank in range(len(columns[0][0])) if simulated else (None,):
            tensors = columns if rank is None else [[x[rank] for x in xs] for xs in columns]
            nbytes = tuple(map(_nbytes_of, tensors[0]))
            devices = [*map(_device_of, tensors[0])]
            if devices.count(devices[0]) == len(devices):
                del devices[1:]
            at_most = limit if devices[0].type == "cpu" else math.inf
            calls = _rows_of_calls(specs, nbytes, tuple(devices), at_most)
            for rows in calls:
                is_all = len(rows) == len(specs)
                kernel(step, *tensors if is_all else [[xs[i] for i in rows] for xs in tensors])

    return run
