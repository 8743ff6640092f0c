"""What generators of contractions and of batched operations share: letters, and calls on parts.

A rank's part of a loop may be empty, and a bias that every rank adds to its part of a sum would be
added many times: `ShardCall` runs an operation where either can happen.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fshard.ops.core.builders import is_inexact, linear_modes
from fshard.ops.core.call import Meta, OpCall
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.rules.shard_call import ShardCall

__all__ = [
    "addend_modes", "contraction_rule", "drop_broadcast", "letters", "text_dims", "trailing_dims",
    "unsharded_dims",
]  # fmt: skip


# -- factors --------------------------------------------------------------------------------


def text_dims(text: str) -> Dims:
    """One letter for every dim.

    >>> text_dims("ik")
    (('i',), ('k',))
    """
    return tuple((letter,) for letter in text)


def letters(count: int, taken: Iterable[str] = "") -> str:
    """As many letters, the first of the alphabet from b on, that are not taken.

    >>> letters(2, "ck")
    'bd'
    """
    free = [each for each in string.ascii_letters[1:] + "a" if each not in taken]
    return "".join(free[:count]) if count else ""


def trailing_dims(text: str, ndim: int) -> Dims:
    """The factors of a tensor that broadcasts to one with the dims of `text`.

    >>> trailing_dims("bij", 1), trailing_dims("bij", 0)
    ((('j',),), ())
    """
    return text_dims(text[len(text) - ndim :])


def unsharded_dims(meta: Meta) -> Dims:
    """No factors: a tensor that is needed whole."""
    return ((),) * meta.ndim


def drop_broadcast(operands: Sequence[Dims], metas: Sequence[Meta]) -> tuple[Dims, ...]:
    """The factors of operands without those along which they broadcast."""
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
    call: OpCall,
    operands: Sequence[Dims],
    result: Dims,
    *,
    addend: int | None = None,
    linear_in: Iterable[int] | None = None,
    local: Callable[..., Any] | None = None,
) -> Rule:
    """The rule of a sum of products: factors that the result lacks are summed.

    `linear_in` are the operands it is linear in, all but the addend if not given.
    """
    dims = drop_broadcast(operands, call.operands)
    seen = dict.fromkeys(f for each in dims for dim in each for f in dim)
    made = {f for dim in result for f in dim}
    places = [at for at in range(len(dims)) if at != addend] if linear_in is None else linear_in
    if call.results[0] is not None and widens_integers(call.operands[0], call.results[0]):
        places = ()
    modes = linear_modes(*places) if addend is None else addend_modes(addend, places)
    if addend is not None and local is None:
        local = ShardCall(once=(addend,), zeros=False)
    kinds = tuple(sorted((f, "sum") for f in seen if f not in made))
    return Rule(dims, (result,), kinds, modes=modes, local=local)


def widens_integers(source: Meta, made: Meta) -> bool:
    """Whether integers become numbers of another range, where their sums do not overflow alike."""
    return source.dtype != made.dtype and not is_inexact(source)


def addend_modes(addend: int, products: Iterable[int]) -> tuple[Mode, ...]:
    """Modes of a sum of an addend and of products, each linear, of the addend counted once."""
    places = tuple(products)
    both = tuple(tuple(sorted((at, addend))) for at in places)
    return linear_modes(*places, *both) + linear_modes(addend, affine=True)


# -- on one rank ----------------------------------------------------------------------------
