"""Einsum-like factor letters of operands, and the rule of a sum of products."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fshard._util.dtypes import is_inexact
from fshard.ops.core.builders import linear_modes
from fshard.ops.core.call import Meta, OpCall
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.rules.shard_call import ShardCall


def text_dims(text: str) -> Dims:
    """Return one letter per dim.

    >>> text_dims("ik")
    (('i',), ('k',))
    """
    return tuple((letter,) for letter in text)


def letters(count: int, excluded: Iterable[str] = "") -> str:
    """Return `count` letters that are not in `excluded`, from b on.

    >>> letters(2, "ck")
    'bd'
    """
    available = [x for x in string.ascii_letters[1:] + "a" if x not in excluded]
    return "".join(available[:count]) if count else ""


def trailing_dims(text: str, ndim: int) -> Dims:
    """Return the factors of a tensor with `ndim` dims that broadcasts to the dims of `text`.

    >>> trailing_dims("bij", 1), trailing_dims("bij", 0)
    ((('j',),), ())
    """
    return text_dims(text[len(text) - ndim :])


def no_factors(meta: Meta) -> Dims:
    """Return dims without factors: the tensor must be unsharded."""
    return ((),) * meta.ndim


def drop_broadcast(operands: Sequence[Dims], metas: Sequence[Meta]) -> tuple[Dims, ...]:
    """Return the operands' factors without those of dims of size 1 that broadcast."""
    lengths: dict[str, int] = {}
    for dims, meta in zip(operands, metas, strict=True):
        for dim, size in zip(dims, meta.shape, strict=True):
            if len(dim) == 1 and size != 1:
                lengths[dim[0]] = size
    return tuple(
        tuple(
            () if len(dim) == 1 and size == 1 and lengths.get(dim[0], 1) != 1 else dim
            for dim, size in zip(dims, meta.shape, strict=True)
        )
        for dims, meta in zip(operands, metas, strict=True)
    )


def contraction_rule(
    call: OpCall, operands: Sequence[Dims], result: Dims, *, bias: int | None = None,
    linear_in: Iterable[int] | None = None, local: Callable[..., Any] | None = None,
) -> Rule:  # fmt: skip
    """Return the rule of a sum of products: factors that the result lacks are summed.

    `bias` is the operand added to the products; `linear_in` are the operands the result is
    linear in, by default all but the bias.
    """
    dims = drop_broadcast(operands, call.operands)
    factors = dict.fromkeys(f for operand_dims in dims for dim in operand_dims for f in dim)
    result_factors = {f for dim in result for f in dim}
    products = tuple(i for i in range(len(dims)) if i != bias)
    linear = products if linear_in is None else tuple(linear_in)
    if call.results[0] is not None and widens_integers(call.operands[0], call.results[0]):
        linear = ()
    modes = linear_modes(*linear) if bias is None else bias_modes(bias, linear)
    if bias is not None and local is None:
        local = ShardCall(once=(bias,), skip_empty=False)
    kinds = tuple(sorted((f, "sum") for f in factors if f not in result_factors))
    added = frozenset() if bias is None else frozenset((bias,))
    return Rule(dims, (result,), kinds, modes=modes, local=local, added=added)


def widens_integers(source: Meta, result: Meta) -> bool:
    """Return True if integers are converted to a dtype in which sums overflow differently."""
    return source.dtype != result.dtype and not is_inexact(source)


def bias_modes(bias: int, products: Iterable[int]) -> tuple[Mode, ...]:
    """Return the modes of a sum of a bias and products, with the bias counted once."""
    linear = tuple(products)
    pairs = tuple(tuple(sorted((i, bias))) for i in linear)
    return linear_modes(*linear, *pairs) + linear_modes(bias, affine=True)
