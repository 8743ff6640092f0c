"""Closed-form result shapes of common operations, and of those that have no meta kernel.

A formula returns None for arguments that PyTorch might refuse, convert or warn about; then the
operation itself is run on meta tensors. The shapes are those of PyTorch's documentation. The first
run of a meta kernel that is written in Python may import `torch._dynamo`, which takes a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fshard._util.dtypes import is_inexact
from fshard.ops.core.builders import valid_dim
from fshard.ops.core.call import Meta, Results, argument, instances_in

Shape = tuple[int, ...]
ShapeLaw = Callable[[Any, Sequence[Any], Mapping[str, Any]], Results | None]
"""Results of a call `(op, args, kwargs)` without running it at full size, or None."""
GetArgument = Callable[[str], Any]
"""Argument of a call by its name in the schema."""
Formula = Callable[[list[Meta], GetArgument], Shape | Meta | None]
"""Shape of the only result; a `Meta` if its dtype is not that of the operands."""

FLOATS = (torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INEXACT = (*FLOATS, *COMPLEX)


def formula_law(formula: Formula, dtypes: Sequence[torch.dtype] = ()) -> ShapeLaw:
    """Return the law of a formula for operands of one dtype, which must be in `dtypes` if given."""

    def law(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
        operands = instances_in((*args, *kwargs.values()), Meta)
        if not operands or len({_kind(meta.dtype, dtypes) for meta in operands}) > 1:
            return None
        dtype = operands[0].dtype
        if dtypes and dtype not in dtypes:
            return None
        result = formula(operands, lambda name: argument(op, args, kwargs, name))
        if result is None:
            return None
        return (result if isinstance(result, Meta) else Meta(result, dtype),), 0

    return law


def _kind(dtype: torch.dtype, dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the dtype that operands have in common: among complex ones windows are real."""
    return dtype.to_complex() if dtypes is COMPLEX and dtype.is_floating_point else dtype


def broadcast_shape(shapes: Sequence[Shape]) -> Shape | None:
    """Return the shape that all shapes broadcast to, or None if they do not broadcast."""
    result: list[int] = []
    for shape in shapes:
        result[:0] = [1] * (len(shape) - len(result))
        for i in range(1, len(shape) + 1):
            if shape[-i] != 1:
                if result[-i] not in (1, shape[-i]):
                    return None
                result[-i] = shape[-i]
    return tuple(result)


def matmul(operands: list[Meta], get: GetArgument) -> Shape | None:
    """Rows of the first operand, columns of the second, over the broadcast batch dims."""
    left, right = operands[0].shape, operands[1].shape
    if not left or not right or operands[0].dtype == torch.bool:
        return None
    rows, columns = left[-2:-1], right[-1:] if len(right) > 1 else ()
    batch = broadcast_shape([left[:-2], right[:-2]])
    fits = left[-1] == right[-2:][0]
    return None if batch is None or not fits else batch + rows + columns


def matmul_of_dims(left: int, right: int) -> Formula:
    """Return the formula of a matrix product of operands with `left` and `right` dims."""

    def formula(operands: list[Meta], get: GetArgument) -> Shape | None:
        fits = (operands[0].ndim, operands[1].ndim) == (left, right)
        return matmul(operands, get) if fits else None

    return formula


def linear(operands: list[Meta], get: GetArgument) -> Shape | None:
    """Batch dims of the input, and one feature for each row of the weight."""
    (shape, weight), rest = (meta.shape for meta in operands[:2]), operands[2:]
    if not shape or len(weight) != 2 or weight[1] != shape[-1] or not is_inexact(operands[0]):
        return None
    return shape[:-1] + weight[:1] if all(meta.shape == weight[:1] for meta in rest) else None


def covariance(operands: list[Meta], get: GetArgument) -> Shape | None:
    """One element for each pair of rows; no dims for a single row."""
    shape = operands[0].shape
    if len(operands) > 1 or len(shape) not in (1, 2) or not all(shape) or shape[-1] < 2:
        return None
    return shape[:-1] * 2 if shape[0] > 1 else ()


def outer(operands: list[Meta], get: GetArgument) -> Shape | None:
    """One row for each element of a vector, one column for each element of another."""
    left, right = operands[0].shape, operands[1].shape
    return left + right if len(left) == len(right) == 1 else None


def glu(operands: list[Meta], get: GetArgument) -> Shape | None:
    """Half of one dim."""
    shape = operands[0].shape
    dim = valid_dim(get("dim"), len(shape))
    if dim is None or shape[dim] % 2 or not shape[dim]:
        return None
    return (*shape[:dim], shape[dim] // 2, *shape[dim + 1 :])


def instance_norm(operands: list[Meta], get: GetArgument) -> Shape | None:
    """Shape of the first operand; the others have one element for each channel."""
    x, *others = operands
    has_statistics = get("running_mean") is not None and get("running_var") is not None
    if x.ndim < 3 or not all(x.shape) or math.prod(x.shape[2:]) < 2 or not is_inexact(x):
        return None
    fits = all(other.shape == x.shape[1:2] for other in others)
    return x.shape if fits and (get("use_input_stats") or has_statistics) else None


def vstack(operands: list[Meta], get: GetArgument) -> Shape | None:
    """Sizes of dim 0 added; vectors and numbers are rows."""
    return _concatenated([(1,) * (2 - meta.ndim) + meta.shape for meta in operands], 0)


def column_stack(operands: list[Meta], get: GetArgument) -> Shape | None:
    """Sizes of dim 1 added; vectors and numbers are columns."""
    return _concatenated([x.shape if x.ndim > 1 else (math.prod(x.shape), 1) for x in operands], 1)


def concatenation(operands: list[Meta], get: GetArgument) -> Shape | None:
    """Sizes of one dim added."""
    return _concatenated([meta.shape for meta in operands], get("dim"))


def _concatenated(shapes: Sequence[Shape], dim_argument: int) -> Shape | None:
    first = shapes[0]
    dim = valid_dim(dim_argument, len(first))
    # torch.cat accepts an empty vector beside operands of any number of dims.
    if dim is None or any(len(shape) != len(first) or shape == (0,) for shape in shapes):
        return None
    if any(shape[:dim] + shape[dim + 1 :] != first[:dim] + first[dim + 1 :] for shape in shapes):
        return None
    return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])


def stack(operands: list[Meta], get: GetArgument) -> Shape | None:
    """Shape of each operand with a new dim as long as the list."""
    first, dim = operands[0].shape, valid_dim(get("dim"), operands[0].ndim + 1)
    if dim is None or any(meta.shape != first for meta in operands):
        return None
    return (*first[:dim], len(operands), *first[dim:])


def combinations(operands: list[Meta], get: GetArgument) -> Shape | None:
    """One row for each combination of `r` elements of a vector."""
    (n,), r = operands[0].shape if operands[0].ndim == 1 else (0,), get("r")
    if n < 1 or r < 1:
        return None
    return math.comb(n + r - 1 if get("with_replacement") else n, r), r


def istft(operands: list[Meta], get: GetArgument) -> Meta | None:
    """Length of the signal whose overlapping windows, real ones, were transformed."""
    x, size = operands[0], get("n_fft")
    width = size if get("win_length") is None else get("win_length")
    fits = all(w.shape == (width,) and not w.dtype.is_complex for w in operands[1:])
    hop = size // 4 if get("hop_length") is None else get("hop_length")
    if x.ndim not in (2, 3) or not all(x.shape) or not fits or not 0 < hop <= width <= size:
        return None
    onesided = x.shape[-2] != size if get("onesided") is None else get("onesided")
    if get("return_complex") or x.shape[-2] != (size // 2 + 1 if onesided else size):
        return None
    total, start = size + hop * (x.shape[-1] - 1), size // 2 if get("center") else 0
    length = total - 2 * start if get("length") is None else get("length")
    if length < 1 or start + length > total:
        return None
    return Meta((*x.shape[:-2], length), x.dtype.to_real())


FORMULA_LAWS: tuple[tuple[ShapeLaw, str], ...] = (
    (formula_law(matmul), "matmul"),
    (formula_law(matmul_of_dims(2, 1)), "mv"),
    (formula_law(matmul_of_dims(1, 1)), "dot vdot"),
    (formula_law(matmul_of_dims(2, 2)), "mm.default"),
    (formula_law(linear), "linear.default"),
    (formula_law(covariance, INEXACT), "cov corrcoef"),
    (formula_law(concatenation), "cat.default concat.default concatenate.default"),
    (formula_law(stack), "stack"),
    (formula_law(vstack), "vstack row_stack"),
    (formula_law(column_stack), "column_stack"),
    (formula_law(outer), "outer"),
    (formula_law(glu, FLOATS), "glu"),
    (formula_law(instance_norm), "instance_norm"),
    (formula_law(combinations), "combinations"),
    (formula_law(istft, COMPLEX), "istft"),
)
"""Laws with the names of their operations. Without one, `cov`, `combinations` and `istft` would
run on zeros of the global shape."""
