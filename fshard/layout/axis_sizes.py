"""Sizes of the axes of a mesh by name, with an error for other names."""

from __future__ import annotations

from typing import NoReturn

from fshard._util.errors import ShardingError, did_you_mean, fail


class UnknownAxisError(ShardingError, KeyError):
    """Name that is not an axis of a mesh; also the type of error that a mapping raises."""

    __str__ = Exception.__str__


class AxisSizes(dict[str, int]):
    """Sizes of axes by name.

    >>> AxisSizes(dp=2, tp=4)["tq"]
    Traceback (most recent call last):
    fshard.layout.axis_sizes.UnknownAxisError: mesh.shape
      given: axis 'tq' of axes dp, tp
      rule:  an axis must be one of dp, tp
      fix:   did you mean 'tp'?
    """

    def __missing__(self, name: object) -> NoReturn:
        known = ", ".join(self)
        fail("mesh.shape", f"axis {name!r} of axes {known}", f"an axis must be one of {known}",
             did_you_mean(str(name), self, f"use one of {known}"), UnknownAxisError)  # fmt: skip
