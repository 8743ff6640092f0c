"""Tensors for sample calls, and checks of samples' rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.helpers.ops.op_checks import call_with, check_call

Sample = Callable[[], tuple[Any, ...]]
"""Function that returns an operation, its arguments and possibly a dict of keyword arguments."""


def rand(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """Return values around zero but not near it; integers from -4 to 4."""
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape) + len(shape))
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-4, 5, shape, generator=generator, dtype=dtype)
    result = torch.randn(shape, generator=generator, dtype=dtype)
    return result + 0.1 * result.sgn()


def positive(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return float64 values between 0.25 and 1.25."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.25


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normally distributed float64 values."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    """Return int64 values from `low` to `high - 1`."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def aten_op(name: str) -> Any:
    """Return the aten overload of a name such as "sum.dim_IntList"; the default one for "sum"."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


class Draws:
    """Values drawn by an own generator, reproducible in any order of tests."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def real(self, *shape: int) -> torch.Tensor:
        """Return values between 0 and 1."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def below(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        """Return integers from `low` to `high - 1`."""
        return torch.randint(low, high, shape, generator=self.generator)


def split_sample(sample: Sample) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return operation, arguments and keyword arguments of a sample."""
    op, *args = sample()
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    return op, tuple(args), kwargs


def rule_errors(sample: Sample, *, grad: bool = True, two_axes: bool = False) -> list[str]:
    """Return the errors of a sample's rule; see `check_call`."""
    op, args, kwargs = split_sample(sample)
    return check_call(op, *args, grad=grad, two_axes=two_axes, **kwargs)


def rule_text(op: Any, *args: Any, **kwargs: Any) -> str:
    """Return the text of the rule of a call; `args` may be those of a sample."""
    called, inputs, options = split_sample(lambda: (op, *args))
    return str(call_with(called, inputs, {**options, **kwargs})[1])


def rule_factors(op: Any, *args: Any, **kwargs: Any) -> str:
    """Return the text of the rule of a call without factor kinds and modes."""
    return rule_text(op, *args, **kwargs).partition("  {")[0]
