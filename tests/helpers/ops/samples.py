"""Tensors for samples of operations, and the check that all samples of a table pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.helpers.ops.op_checks import call_with, check_call

Sample = Callable[[], tuple[Any, ...]]
"""Makes an operation, its arguments, and last a dict of its keyword arguments if it has some."""


def rand(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """Numbers around zero, none of which is near it; integers from -4 to 4."""
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape) + len(shape))
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-4, 5, shape, generator=generator, dtype=dtype)
    made = torch.randn(shape, generator=generator, dtype=dtype)
    return made + 0.1 * made.sgn()


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
    """Numbers by a generator of one's own, the same ones every time, whatever else is run."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def real(self, *shape: int) -> torch.Tensor:
        """Numbers between 0 and 1."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def below(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        """Integers from `low` on below `high`."""
        return torch.randint(low, high, shape, generator=self.generator)


def taken_apart(sample: Sample) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Operation, arguments, and keyword arguments of a sample."""
    op, *args = sample()
    named = args.pop() if args and isinstance(args[-1], dict) else {}
    return op, tuple(args), named


def wrong(sample: Sample, *, grad: bool = True, two_axes: bool = False) -> list[str]:
    """What `check_call` finds wrong with a sample's rule."""
    op, args, named = taken_apart(sample)
    return check_call(op, *args, grad=grad, two_axes=two_axes, **named)


def text(op: Any, *args: Any, **kwargs: Any) -> str:
    """The text of the rule of a call; `args` may be those of a sample."""
    called, given, named = taken_apart(lambda: (op, *args))
    return str(call_with(called, given, {**named, **kwargs})[1])


def loops(op: Any, *args: Any, **kwargs: Any) -> str:
    """The text of the rule of a call without what is said of its factors and operands."""
    return text(op, *args, **kwargs).partition("  {")[0]
