"""Fused optimizer steps of PyTorch as operations without writes, one for each parameter.

Steps of gradient scalers are sums and products of each gradient.

`torch._fused_adamw_` and its like write lists of tensors in one kernel, and have neither a
functional form nor, in part, a kernel for shapes. In a trace each parameter is updated by
`fshard::fused_update`, which runs the same kernel on copies, and the results are copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fshard._torch.operators import UNSCALE, UPDATE_SCALE, fused_step, norms, schema_of

OPTIONS = {
    "adam": ("lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize"),
    "adamw": ("lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize"),
    "sgd": ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "is_first_step"),
    "adagrad": ("lr", "lr_decay", "weight_decay", "eps", "maximize"),
}
"""Options of every kernel, in the order in which `fshard::fused_update` has their values."""
STATES = {"adam": 3, "adamw": 3, "sgd": 1, "adagrad": 1}
"""Number of lists of state tensors that a kernel writes; without momentum, say, one is empty."""

_LIBRARY = torch.library.Library("fshard", "FRAGMENT")
_LIBRARY.define(
    "fused_update(str kernel, Tensor[] tensors, int[] states, Tensor? step, Tensor? found_inf, "
    "Tensor? lr, float[] options) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _fused_update(
    kernel: str, tensors: Sequence[torch.Tensor], states: Sequence[int], step: torch.Tensor | None,
    found_inf: torch.Tensor | None, lr: torch.Tensor | None, options: Sequence[float],
) -> list[torch.Tensor]:  # fmt: skip
    """Return a parameter and its state after a step.

    Args:
        kernel: a name of `OPTIONS`.
        tensors: the parameter, its state tensors, and its gradient, all of one shape.
        states: for every list of the kernel, 1 if it has a tensor, 0 if it is empty.
        step: number of the step, if the kernel takes it.
        found_inf: 1 to leave everything as it is.
        lr: the learning rate, if it is a tensor.
        options: values of the options of the kernel.
    """
    *written, grad = tensors
    results = [x.clone() for x in written]
    if grad.numel():
        param, *rest = results
        remaining = iter(rest)
        lists = [[next(remaining)] if present else [] for present in states]
        op = getattr(torch.ops.aten, f"_fused_{kernel}_")
        kinds = {arg.name: str(arg.type) for arg in schema_of(op.default).arguments}
        named: dict[str, Any] = {
            name: bool(value) if kinds[name] == "bool" else value
            for name, value in zip(OPTIONS[kernel], options, strict=True)
        }
        if lr is not None:
            named["lr"] = lr
        steps = [] if step is None else [[step]]
        op([param], [grad], *lists, *steps, **named, found_inf=found_inf)
    return results


_LIBRARY.impl("fused_update", _fused_update, "CompositeExplicitAutograd")
_LIBRARY.impl("fused_update", torch.library.fallthrough_kernel, "Autograd")


def _fake_update(kernel: str, tensors: Sequence[torch.Tensor], *_: Any) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in tensors[:-1]]


torch.library.register_fake("fshard::fused_update", _fake_update, lib=_LIBRARY)


def _step(
    kernel: str, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], *lists: Any,
    lr: Any, grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Write the parameters and states of a fused step, and the gradients that it unscales."""
    columns, steps = lists[: STATES[kernel]], [*lists[STATES[kernel] :]]
    states = [int(bool(column)) for column in columns]
    is_tensor = isinstance(lr, torch.Tensor)
    options["lr"] = 0.0 if is_tensor else lr
    values = [float(options[name]) for name in OPTIONS[kernel]]
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if grad_scale is not None:
            grad.div_(grad_scale)
        written = [param, *(column[index] for column in columns if column)]
        results = torch.ops.fshard.fused_update(
            kernel, [*written, grad], states, steps[0][index] if steps else None, found_inf,
            lr if is_tensor else None, values)  # fmt: skip
        for x, result in zip(written, results, strict=True):
            x.copy_(result)


def _unscale(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Multiply gradients by `inv_scale`, and set `found_inf` to 1 if one of them is not finite."""
    filled = [grad for grad in grads if grad.numel()]
    if filled:
        maxima = torch.stack(norms(filled, float("inf")))
        found_inf.masked_fill_(~maxima.isfinite().all(), 1)
    for grad in filled:
        grad.mul_(inv_scale.squeeze())


def _update_scale(
    scale: torch.Tensor, growth_tracker: torch.Tensor, found_inf: torch.Tensor,
    scale_growth_factor: float, scale_backoff_factor: float, growth_interval: int,
) -> torch.Tensor:  # fmt: skip
    """Write the next scale of a gradient scaler, and its number of steps with finite gradients."""
    found = found_inf.reshape(scale.shape) != 0
    steps = growth_tracker + 1
    grown = scale * scale_growth_factor
    grows = (steps == growth_interval) & grown.isfinite()
    kept = torch.where(grows, grown, scale)
    growth_tracker.copy_(torch.where(found | (steps == growth_interval), 0, steps))
    return scale.copy_(torch.where(found, scale * scale_backoff_factor, kept))


FUSED_STEPS: dict[Any, Callable[..., Any]] = {
    **{fused_step(kernel): partial(_step, kernel) for kernel in OPTIONS},
    UNSCALE: _unscale,
    UPDATE_SCALE: _update_scale,
}
"""Replacements of PyTorch's fused steps, and of those of gradient scalers, in a trace."""
