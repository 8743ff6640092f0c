"""Optimizers that treat every element alone: the kernels of `torch.optim` on locals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.optim.sgd import sgd as sgd_kernel

from fshard._torch.operators import AdamWOptions, foreach_adamw, fused_adamw
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.state.optimizers.optimizer import Optimizer, Rate, Slots, rate_at
from fshard.state.optimizers.option_checks import OptionChecks

Tensors = list[torch.Tensor]
MAX_GROUP = 2**17
"""Bytes of parameters that one call of PyTorch updates on a CPU, unless one tensor has more."""
_dtype_of, _device_of, _nbytes_of = map(attrgetter, ("dtype", "device", "nbytes"))


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
        step: int, grads: Tensors, params: Tensors, buffers: Sequence[torch.Tensor] = ()
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

    update, groups = (fused_adamw, _by_dtype) if fused else (foreach_adamw, _small_groups)

    def kernel(
        step: int, grads: Tensors, params: Tensors, means: Tensors, squares: Tensors
    ) -> None:
        columns = [params, grads, means, squares]
        if any(map(torch.is_complex, params)):
            columns = [[torch.view_as_real(x) if x.is_complex() else x for x in xs]
                       for xs in columns]  # fmt: skip
        options = AdamWOptions(step, rate_at(lr, step), *betas, eps, weight_decay)
        for group in groups(columns):
            update(*group, options=options)

    return Optimizer("fs.state.adamw", slots, _on_locals(kernel), specs)


def _by_dtype(columns: Sequence[Tensors]) -> Iterable[Sequence[Tensors]]:
    """Return the columns of each dtype and device."""
    kinds = [*zip(map(_dtype_of, columns[0]), map(_device_of, columns[0]), strict=True)]
    if len({*kinds}) == 1:
        return [columns]
    return [[[x for x, other in zip(xs, kinds, strict=True) if other == kind] for xs in columns]
            for kind in dict.fromkeys(kinds)]  # fmt: skip


def _small_groups(columns: Sequence[Tensors]) -> Iterator[Sequence[Tensors]]:
    """Yield consecutive parts of columns: on a CPU those that stay in its cache meanwhile."""
    limit = MAX_GROUP if columns[0][0].device.type == "cpu" else math.inf
    first, total = 0, 0
    for index, nbytes in enumerate(map(_nbytes_of, columns[0])):
        if total + nbytes > limit and index > first:
            yield [xs[first:index] for xs in columns]
            first, total = index, 0
        total += nbytes
    yield [xs[first:] for xs in columns]


def _on_locals(kernel: Callable[..., None]) -> Any:
    """Return the kernel on pairs of one that takes lists of one rank's nonempty tensors."""

    def run(step: int, grads: list[Sharded], slots: Slots, params: list[Sharded]) -> None:
        columns: list[Sequence[Any]] = [grads, params, *slots.values()]
        simulated = not isinstance(params[0].local, torch.Tensor)
        for index in range(len(params[0].local)) if simulated else (None,):
            tensors = [[p.local if index is None else p.local[index] for p in column]
                       for column in columns]  # fmt: skip
            if not all(map(torch.numel, tensors[0])):
                rows = [row for row in zip(*tensors, strict=True) if row[0].numel()]
                tensors = [*map(list, zip(*rows, strict=True))]
            if tensors:
                kernel(step, *tensors)

    return run
