"""Checks of the arguments of optimizers, with the limits of `torch.optim`."""

from __future__ import annotations

import math
from typing import Any

from fshard._util.errors import Problem, raise_if


class OptionChecks:
    """Problems of the arguments of one optimizer; `end` raises them together.

    Args:
        where: the function, for errors.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.problems: list[Problem] = []

    def end(self) -> None:
        """Raise `ShardingError` if there are problems."""
        raise_if(self.where, self.problems)

    def rate(self, rate: Any) -> None:
        """Require a learning rate: a number from 0, or a function of the step."""
        if not callable(rate):
            self.at_least("lr", rate, 0, "1e-3, say, or lambda step: 1e-3 / step")

    def at_least(self, name: str, value: Any, low: float, fix: str = "") -> None:
        """Require a finite number from `low`."""
        if not _is_number(value) or value < low:
            self.add(name, value, f"a finite number of at least {low:g}", fix or f"{low:g}, say")

    def fraction(self, name: str, value: Any, fix: str) -> None:
        """Require a number from 0 to below 1."""
        if not _is_number(value) or not 0 <= value < 1:
            self.add(name, value, "a number from 0 to below 1", f"{fix}, say")

    def pair(self, name: str, values: Any, fix: str) -> bool:
        """Require a tuple of two; return True if it is one."""
        if isinstance(values, tuple) and len(values) == 2:
            return True
        self.add(name, values, "a tuple of two numbers", f"{fix}, say")
        return False

    def positive_int(self, name: str, value: Any, fix: str) -> None:
        """Require an int from 1."""
        if type(value) is not int or value < 1:
            self.add(name, value, "an int of at least 1", f"{fix}, say")

    def add(self, name: str, value: Any, rule: str, fix: str) -> None:
        """Add the problem of one argument."""
        self.problems.append(Problem(f"{name}={value!r}", f"{name} must be {rule}",
                                     f"{name}={fix}"))  # fmt: skip


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
