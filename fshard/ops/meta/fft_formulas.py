"""Shapes of Fourier transforms in closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fshard.ops.core.builders import valid_dim
from fshard.ops.core.call import Meta

__all__ = ["Given", "Shape", "fourier", "waves"]

Shape = tuple[int, ...]
Given = Callable[[str], Any]
"""An argument of a call, by its name."""
NORMS = (None, "backward", "forward", "ortho")


def fourier(kind: str, count: int | None) -> Callable[[list[Meta], Given], Meta | None]:
    """A transform of complex numbers, or "real" to them, or "to real" from half of them.

    It is along one dim, the last two, or all that are given where `count` is None.
    """

    def formula(operands: list[Meta], given: Given) -> Meta | None:
        x = operands[0]
        found = _transformed(x.shape, given, count)
        if found is None or given("norm") not in NORMS:
            return None
        dims, sizes, last = found
        if kind == "to real":
            sizes[-1] = 2 * (sizes[-1] - 1) if last is None else last
        elif kind == "real":
            sizes[-1] = sizes[-1] // 2 + 1
        if min(sizes) < 1:
            return None
        shape = list(x.shape)
        for dim, size in zip(dims, sizes, strict=True):
            shape[dim] = size
        dtype = x.dtype.to_real() if kind == "to real" else x.dtype.to_complex()
        return Meta(tuple(shape), dtype)

    return formula


def _transformed(
    shape: Shape, given: Given, count: int | None
) -> tuple[list[int], list[int], int | None] | None:
    """The dims of a transform, their sizes, and the last of these as it is given."""
    lengths, dims = given("n" if count == 1 else "s"), given("dim")
    if count == 1:
        lengths, dims = None if lengths is None else [lengths], [dims]
    if dims is None:
        dims = list(range(-len(lengths), 0)) if lengths is not None else list(range(len(shape)))
    placed = [valid_dim(dim, len(shape)) for dim in dims]
    places = [dim for dim in placed if dim is not None]
    if not places or len({*places}) < len(placed) or not all(shape):
        return None
    if lengths is not None and (len(lengths) != len(places) or min(lengths) < 1):
        return None
    sizes = [shape[dim] for dim in places] if lengths is None else list(lengths)
    return places, sizes, None if lengths is None else lengths[-1]


def waves(operands: list[Meta], given: Given) -> Meta | None:
    """What windows of a signal were, overlapping and added: an inverse of `stft`."""
    x, size = operands[0], given("n_fft")
    hop = size // 4 if given("hop_length") is None else given("hop_length")
    window = given("window") is None and given("win_length") in (None, size)
    if x.ndim not in (2, 3) or not all(x.shape) or not window or not 0 < hop <= size:
        return None
    half = x.shape[-2] != size if given("onesided") is None else given("onesided")
    if given("return_complex") or x.shape[-2] != (size // 2 + 1 if half else size):
        return None
    whole, start = size + hop * (x.shape[-1] - 1), size // 2 if given("center") else 0
    length = whole - 2 * start if given("length") is None else given("length")
    if length < 1 or start + length > whole:
        return None
    return Meta((*x.shape[:-2], length), x.dtype.to_real())
