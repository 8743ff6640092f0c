"""Optimizers that treat every element alone: the kernels of `torch.optim` on locals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.adam import adam as adam_kernel
from torch.optim.sgd import sgd as sgd_kernel

from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.state.optimizers.optimizer import Optimizer, Rate, Slots, rate_at
from fshard.state.optimizers.option_checks import OptionChecks

Tensors = list[torch.Tensor]


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
        fused: choice of the kernel, as in `torch.optim.AdamW`.
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

    def kernel(
        step: int, grads: Tensors, params: Tensors, means: Tensors, squares: Tensors
    ) -> None:
        # The kernel counts the step itself, in one scalar a parameter.
        device = params[0].device if fused else None
        steps = [*torch.full((len(params),), step - 1.0, device=device).unbind()]
        adam_kernel(params, grads, means, squares, [], steps, fused=fused, amsgrad=False,
                    has_complex=any(p.is_complex() for p in params), beta1=betas[0], beta2=betas[1],
                    lr=rate_at(lr, step), weight_decay=weight_decay, eps=eps, maximize=False,
                    decoupled_weight_decay=True)  # fmt: skip

    return Optimizer("fs.state.adamw", slots, _on_locals(kernel), specs)


def _on_locals(kernel: Callable[..., None]) -> Any:
    """Return the kernel on pairs of one that takes lists of one rank's nonempty tensors."""

    def run(step: int, grads: list[Sharded], slots: Slots, params: list[Sharded]) -> None:
        columns: list[Sequence[Any]] = [grads, params, *slots.values()]
        simulated = not isinstance(params[0].local, torch.Tensor)
        for index in range(len(params[0].local)) if simulated else (None,):
            tensors = [[p.local if index is None else p.local[index] for p in column]
                       for column in columns]  # fmt: skip
            rows = [row for row in zip(*tensors, strict=True) if row[0].numel()]
            if rows:
                kernel(step, *map(list, zip(*rows, strict=True)))

    return run
