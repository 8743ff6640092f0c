"""Shapes of results in closed form: of operations that PyTorch's meta forms compose of many.

A formula says nothing, None, wherever PyTorch might refuse the arguments, convert dtypes or warn:
then the operation is asked itself. The shapes are those of PyTorch's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fshard.ops.core.builders import is_inexact, valid_dim, wrap_dim
from fshard.ops.core.call import Meta, Results, argument, instances_in
from fshard.ops.meta.fft_formulas import Given, Shape, fourier, waves

__all__ = ["FORMULAS", "Law", "broadcast"]

Law = Callable[[Any, Sequence[Any], Mapping[str, Any]], Results | None]
Formula = Callable[[list[Meta], Given], Shape | Meta | list[Meta] | None]
"""The shape of the only result, or its meta where the dtype is another; a list of several."""

FLOATS = (torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
EXACT = (*FLOATS, *COMPLEX)
"""What linear algebra and Fourier transforms are computed in."""


def law(
    formula: Formula,
    dtypes: Sequence[torch.dtype] = (),
    least: int = 0,
    *,
    indexed: bool = False,
) -> Law:
    """The law of a formula for a first operand of these dtypes, if given, and of so many dims.

    All are of its dtype, but for an index where one is `indexed`.
    """

    def told(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
        operands = instances_in((*args, *kwargs.values()), Meta)
        found = {each.dtype for each in operands} - ({torch.int64} if indexed else set())
        if not operands or len(found) > 1:
            return None
        x = operands[0]
        if x.ndim < least or (dtypes and x.dtype not in dtypes):
            return None
        made = formula(operands, lambda name: argument(op, args, kwargs, name))
        if made is None:
            return None
        if isinstance(made, list):
            return tuple(made), list(range(len(made)))
        return (made if isinstance(made, Meta) else Meta(made, x.dtype),), 0

    return told


def broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """The shape to which all broadcast; None if they do not."""
    made: list[int] = []
    for shape in shapes:
        made[:0] = [1] * (len(shape) - len(made))
        for at in range(1, len(shape) + 1):
            if shape[-at] != 1:
                if made[-at] not in (1, shape[-at]):
                    return None
                made[-at] = shape[-at]
    return tuple(made)


# -- products ------------------------------------------------------------------------------


def matmul(operands: list[Meta], given: Given) -> Shape | None:
    """Rows of the first by columns of the second, over what their other dims broadcast to."""
    left, right = operands[0].shape, operands[1].shape
    if not left or not right or operands[0].dtype == torch.bool:
        return None
    rows, columns = left[-2:-1], right[-1:] if len(right) > 1 else ()
    lead = broadcast([left[:-2], right[:-2]])
    fits = left[-1] == right[-2:][0]
    return None if lead is None or not fits else lead + rows + columns


def of_dims(one: int, other: int) -> Formula:
    """A matrix product of tensors of so many dims."""

    def formula(operands: list[Meta], given: Given) -> Shape | None:
        fits = (operands[0].ndim, operands[1].ndim) == (one, other)
        return matmul(operands, given) if fits else None

    return formula


def inner(operands: list[Meta], given: Given) -> Shape | None:
    """A sum over the last dims."""
    left, right = operands[0].shape, operands[1].shape
    fits = left and right and left[-1] == right[-1] and operands[0].dtype != torch.bool
    return left[:-1] + right[:-1] if fits else None


def outer(operands: list[Meta], given: Given) -> Shape | None:
    """Every element of a vector with every one of another."""
    left, right = operands[0].shape, operands[1].shape
    return left + right if len(left) == len(right) == 1 else None


def vecdot(operands: list[Meta], given: Given) -> Shape | None:
    """A sum of products along a dim."""
    left, right = operands[0].shape, operands[1].shape
    dim = valid_dim(given("dim"), len(left))
    if left != right or dim is None or not is_inexact(operands[0]):
        return None
    return left[:dim] + left[dim + 1 :]


def linear(operands: list[Meta], given: Given) -> Shape | None:
    """As many features as the weight has rows."""
    (shape, weight), rest = (each.shape for each in operands[:2]), operands[2:]
    if not shape or len(weight) != 2 or weight[1] != shape[-1] or not is_inexact(operands[0]):
        return None
    return shape[:-1] + weight[:1] if all(each.shape == weight[:1] for each in rest) else None


def kron(operands: list[Meta], given: Given) -> Shape:
    """Sizes multiply, aligned at the last dims."""
    left, right = operands[0].shape, operands[1].shape
    n = max(len(left), len(right))
    pairs = zip((1,) * (n - len(left)) + left, (1,) * (n - len(right)) + right, strict=True)
    return tuple(one * other for one, other in pairs)


def bilinear(operands: list[Meta], given: Given) -> Shape | None:
    """As many features as the weight has matrices."""
    one, other, weight = (each.shape for each in operands[:3])
    fits = one and other and one[:-1] == other[:-1] and len(weight) == 3
    if not fits or weight[1:] != one[-1:] + other[-1:] or not is_inexact(operands[0]):
        return None
    return one[:-1] + weight[:1] if operands[3:] in ([], [Meta(weight[:1], operands[0].dtype)]) \
        else None  # fmt: skip


# -- matrices ------------------------------------------------------------------------------


def _matrix(operands: list[Meta]) -> tuple[Shape, int, int] | None:
    """Batch, rows and columns of the only operand."""
    shape = operands[0].shape
    fits = len(operands) == 1 and all(shape)
    return (shape[:-2], shape[-2], shape[-1]) if fits else None


def inverse(operands: list[Meta], given: Given) -> Shape | None:
    """A pseudoinverse has rows and columns exchanged."""
    found = _matrix(operands)
    return None if found is None else (*found[0], found[2], found[1])


def hermitian_inverse(operands: list[Meta], given: Given) -> Shape | None:
    """A pseudoinverse that may take its matrices for Hermitian ones."""
    square = operands[0].shape[-1] == operands[0].shape[-2]
    return inverse(operands, given) if square or not given("hermitian") else None


def rank(operands: list[Meta], given: Given) -> Meta | None:
    """A whole number for every matrix."""
    found = _matrix(operands)
    fits = found is not None and (found[1] == found[2] or not given("hermitian"))
    return Meta(found[0], torch.int64) if found is not None and fits else None


def condition(operands: list[Meta], given: Given) -> Meta | None:
    """A real number for every matrix."""
    found = _matrix(operands)
    if found is None or given("p") is not None:
        return None
    return Meta(found[0], operands[0].dtype.to_real())


def determinant(operands: list[Meta], given: Given) -> Shape | None:
    """A number for every square matrix."""
    found = _matrix(operands)
    return found[0] if found is not None and found[1] == found[2] else None


def power(operands: list[Meta], given: Given) -> Shape | None:
    """As many rows and columns."""
    shape = operands[0].shape
    return shape if shape[-2] == shape[-1] else None


def vander(operands: list[Meta], given: Given) -> Shape | None:
    """So many powers of every element."""
    shape, n = operands[0].shape, given("N")
    n = shape[-1] if n is None else n
    return (*shape, n) if n > 1 else None


def covariance(operands: list[Meta], given: Given) -> Shape | None:
    """A number for each two rows, and one alone for a single row."""
    shape = operands[0].shape
    if len(operands) > 1 or len(shape) not in (1, 2) or not all(shape) or shape[-1] < 2:
        return None
    return shape[:-1] * 2 if shape[0] > 1 else ()


# -- diagonals and joined tensors ----------------------------------------------------------


def diagonal(operands: list[Meta], given: Given) -> Shape | None:
    """A vector as a diagonal, or that of a matrix."""
    shape, offset = operands[0].shape, given("diagonal")
    if len(shape) == 1:
        return (shape[0] + abs(offset),) * 2
    if len(shape) != 2:
        return None
    rows, columns = shape[0] + min(offset, 0), shape[1] - max(offset, 0)
    return (min(rows, columns),) if min(rows, columns) > 0 else None


def flat_diagonal(operands: list[Meta], given: Given) -> Shape:
    """All elements as a diagonal."""
    return (math.prod(operands[0].shape) + abs(given("offset")),) * 2


def embedded_diagonal(operands: list[Meta], given: Given) -> Shape | None:
    """The last dim as the diagonals of two."""
    shape = operands[0].shape
    n = len(shape) + 1
    dims = {valid_dim(given("dim1"), n), valid_dim(given("dim2"), n)}
    if None in dims or len(dims) < 2 or not shape:
        return None
    left = iter(shape[:-1])
    return tuple(shape[-1] + abs(given("offset")) if at in dims else next(left) for at in range(n))


def blocks(operands: list[Meta], given: Given) -> Shape | None:
    """Matrices one after the other along both dims; vectors are rows."""
    shapes = [(1,) * (2 - each.ndim) + each.shape for each in operands]
    if any(len(each) > 2 for each in shapes):
        return None
    return sum(each[0] for each in shapes), sum(each[1] for each in shapes)


def joined(operands: list[Meta], given: Given) -> Shape | None:
    """One after the other along a dim."""
    return _joined([each.shape for each in operands], given("dim"))


def _joined(shapes: Sequence[Shape], dim: int) -> Shape | None:
    first = shapes[0]
    at = valid_dim(dim, len(first))
    # An empty vector may stand beside anything.
    if at is None or any(len(each) != len(first) or each == (0,) for each in shapes):
        return None
    if any(each[:at] + each[at + 1 :] != first[:at] + first[at + 1 :] for each in shapes):
        return None
    return (*first[:at], sum(each[at] for each in shapes), *first[at + 1 :])


def stacked(operands: list[Meta], given: Given) -> Shape | None:
    """Beside one another along a new dim."""
    first, dim = operands[0].shape, valid_dim(given("dim"), operands[0].ndim + 1)
    if dim is None or any(each.shape != first for each in operands):
        return None
    return (*first[:dim], len(operands), *first[dim:])


def columns(operands: list[Meta], given: Given) -> Shape | None:
    """One after the other along dim 1, of which vectors and numbers are given one."""
    return _joined([each.shape if each.ndim > 1 else (math.prod(each.shape), 1)
                    for each in operands], 1)  # fmt: skip


def rows(operands: list[Meta], given: Given) -> Shape | None:
    """One after the other along dim 0, of which vectors and numbers are given one."""
    return _joined([(1,) * (2 - each.ndim) + each.shape for each in operands], 0)


def combinations(operands: list[Meta], given: Given) -> Shape | None:
    """So many elements of a vector in every way."""
    (n,), r = operands[0].shape if operands[0].ndim == 1 else (0,), given("r")
    if n < 1 or r < 1:
        return None
    return math.comb(n + r - 1 if given("with_replacement") else n, r), r


def taken(operands: list[Meta], given: Given) -> Shape | None:
    """As many elements along a dim as indices."""
    x, at = operands
    dim = None if given("dim") is None else valid_dim(given("dim"), x.ndim)
    if dim is None or at.ndim != x.ndim or at.dtype != torch.int64:
        return None
    before = broadcast([x.shape[:dim], at.shape[:dim]])
    after = broadcast([x.shape[dim + 1 :], at.shape[dim + 1 :]])
    if before is None or after is None:
        return None
    return (*before, at.shape[dim], *after)


def written(operands: list[Meta], given: Given) -> Shape | None:
    """The first operand, into which as many slices are written as there are indices."""
    x, index, source = operands[0], given("index"), given("source")
    dim = valid_dim(given("dim"), x.ndim)
    if dim is None or index.ndim != 1 or index.dtype != torch.int64 or source.dtype != x.dtype:
        return None
    fits = source.shape == (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
    return x.shape if fits else None


def filled(operands: list[Meta], given: Given) -> Shape | None:
    """The first operand, of which what an index names is one real number."""
    x, index, value = operands[0], given("index"), given("value")
    dim = valid_dim(given("dim"), x.ndim)
    fits = dim is not None and index.ndim == 1 and index.dtype == torch.int64
    return x.shape if fits and is_inexact(x) and isinstance(value, int | float) else None


def added(operands: list[Meta], given: Given) -> Shape | None:
    """The same with addition."""
    plain = isinstance(given("alpha"), int) and is_inexact(operands[0])
    return written(operands, given) if plain else None


# -- along a dim ---------------------------------------------------------------------------


def gated(operands: list[Meta], given: Given) -> Shape | None:
    """Half of a dim."""
    shape = operands[0].shape
    dim = valid_dim(given("dim"), len(shape))
    if dim is None or shape[dim] % 2 or not shape[dim]:
        return None
    return (*shape[:dim], shape[dim] // 2, *shape[dim + 1 :])


def trapezoid(operands: list[Meta], given: Given) -> Shape | None:
    """A sum along a dim."""
    found = running_trapezoid(operands, given)
    if found is None:
        return None
    dim = wrap_dim(given("dim"), len(found))
    return found[:dim] + found[dim + 1 :]


def running_trapezoid(operands: list[Meta], given: Given) -> Shape | None:
    """A sum between each two neighbours along a dim."""
    shape = operands[0].shape
    dim = valid_dim(given("dim"), len(shape))
    if dim is None or shape[dim] < 2 or not is_inexact(operands[0]):
        return None
    if any(x.shape not in (shape, shape[dim : dim + 1]) for x in operands[1:]):
        return None
    return (*shape[:dim], shape[dim] - 1, *shape[dim + 1 :])


def gradient(operands: list[Meta], given: Given) -> list[Meta] | None:
    """For every dim a tensor of the same shape."""
    x = operands[0]
    dims = range(x.ndim) if given("dim") is None else [valid_dim(given("dim"), x.ndim)]
    spacing = given("spacing")
    plain = spacing is None or isinstance(spacing, int | float)
    least = given("edge_order") + 1
    if not dims or least not in (2, 3) or not plain or not is_inexact(x):
        return None
    if any(dim is None or x.shape[dim] < least for dim in dims):
        return None
    return [x for _ in dims]


# -- norms and losses ----------------------------------------------------------------------


def normalized(operands: list[Meta], given: Given) -> Shape | None:
    """The first operand, whose channels the others have a number for each."""
    x, *others = operands
    own = given("running_mean") is None or given("running_var") is None
    if x.ndim < 3 or not all(x.shape) or math.prod(x.shape[2:]) < 2 or not is_inexact(x):
        return None
    fits = all(each.shape == x.shape[1:2] for each in others)
    return x.shape if fits and (given("use_input_stats") or not own) else None


def alignments(operands: list[Meta], given: Given) -> Shape | None:
    """A number for every sequence, or one of them all."""
    x, targets = operands
    if x.ndim != 3 or targets.ndim != 2 or targets.shape[0] != x.shape[1]:
        return None
    known = (given("input_lengths"), x.shape[0]), (given("target_lengths"), targets.shape[1])
    if any(
        len(each) != x.shape[1] or min(each, default=0) < 1 or max(each) > top
        for each, top in known
    ):
        return None
    if not 0 <= given("blank") < x.shape[2] or targets.dtype != torch.int64:
        return None
    return x.shape[1:2] if given("reduction") == 0 else ()


FORMULAS: tuple[tuple[Law, str], ...] = (
    (law(matmul), "matmul"),
    (law(of_dims(2, 1)), "mv"),
    (law(of_dims(1, 1)), "dot vdot"),
    (law(of_dims(2, 2)), "mm.default"),
    (law(inner), "inner"),
    (law(outer), "outer"),
    (law(vecdot), "linalg_vecdot"),
    (law(linear), "linear.default"),
    (law(kron), "kron"),
    (law(bilinear), "bilinear"),
    (law(inverse, EXACT, 2), "pinverse"),
    (law(hermitian_inverse, EXACT, 2), "linalg_pinv"),
    (law(rank, EXACT, 2), "linalg_matrix_rank"),
    (law(condition, EXACT, 2), "linalg_cond.default"),
    (law(determinant, EXACT, 2), "linalg_det logdet det"),
    (law(power, EXACT, 2), "linalg_matrix_power matrix_power"),
    (law(vander, EXACT, 1), "linalg_vander"),
    (law(covariance, EXACT), "cov corrcoef"),
    (law(diagonal), "diag"),
    (law(flat_diagonal), "diagflat"),
    (law(embedded_diagonal), "diag_embed"),
    (law(blocks), "block_diag"),
    (law(joined), "cat.default concat.default concatenate.default"),
    (law(stacked), "stack"),
    (law(columns), "column_stack"),
    (law(rows), "vstack row_stack"),
    (law(combinations), "combinations"),
    (law(taken, indexed=True), "take_along_dim"),
    (law(written, indexed=True), "index_copy.default"),
    (law(filled, indexed=True), "index_fill.int_Scalar"),
    (law(added, indexed=True), "index_add.default"),
    (law(gated, FLOATS, 1), "glu"),
    (law(trapezoid), "trapezoid trapz"),
    (law(running_trapezoid), "cumulative_trapezoid"),
    (law(gradient), "gradient.scalarint"),
    (law(normalized), "instance_norm"),
    (law(alignments, FLOATS, 3, indexed=True), "ctc_loss.IntList"),
    (law(fourier("complex", 1), EXACT), "fft_fft fft_ifft"),
    (law(fourier("real", 1), FLOATS), "fft_rfft fft_ihfft"),
    (law(fourier("to real", 1), EXACT), "fft_irfft fft_hfft"),
    (law(fourier("complex", None), EXACT), "fft_fft2 fft_ifft2 fft_fftn fft_ifftn"),
    (law(fourier("real", None), FLOATS), "fft_rfft2 fft_ihfft2 fft_rfftn fft_ihfftn"),
    (law(fourier("to real", None), EXACT), "fft_irfft2 fft_hfft2 fft_irfftn fft_hfftn"),
    (law(waves, COMPLEX), "istft"),
)  # fmt: skip
