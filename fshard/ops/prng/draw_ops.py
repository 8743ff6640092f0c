"""Draws by a key as operations of PyTorch: `fshard::uniform` and the like, of any part of a whole.

An operation draws the elements of a tensor of `shape` from `start` on, `size` of every dim; so a
rank draws its own part, and graphs show one line. `like` is a tensor whose layout and device a
draw follows, and of which nothing is read. Several keys, stacked, give as many tensors, stacked.

From bits to numbers it goes as in `jax.random`, whose numbers come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fshard.ops.prng.threefry import Box, Hash, Words, derived, fill, word, words_of

__all__ = ["BITS", "DRAWN", "FLOATS", "INTEGERS", "OPS"]

FLOATS: dict[torch.dtype, tuple[int, int]] = {
    torch.float16: (16, 10), torch.bfloat16: (8, 7), torch.float32: (32, 23),
    torch.float64: (64, 52),
}  # fmt: skip
"""Of every dtype the bits that are drawn, and those of its mantissa, which they become."""
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
BITS: dict[torch.dtype, torch.dtype] = {
    torch.uint8: torch.int8, torch.uint16: torch.int16, torch.uint32: torch.int32,
    torch.uint64: torch.int64,
} | {dtype: dtype for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)}  # fmt: skip
"""Dtypes of bits, and the signed one of the same width."""
MANTISSAS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}

PLACE = "Tensor? like, Tensor key, SymInt[] shape, SymInt[] start, SymInt[] size"
MADE = "ScalarType dtype, Device? device=None"
DRAWN = {
    "bits": f"({PLACE}, *, {MADE}) -> Tensor",
    "uniform": f"({PLACE}, float low, float high, *, {MADE}) -> Tensor",
    "normal": f"({PLACE}, *, {MADE}) -> Tensor",
    "randint": f"({PLACE}, int low, int last, *, {MADE}) -> Tensor",
    "bernoulli": f"({PLACE}, float p, *, {MADE}) -> Tensor",
    "permutation": f"({PLACE}, *, {MADE}) -> Tensor",
}
"""The operations that draw, with their arguments."""

_LIBRARY = torch.library.Library("fshard", "FRAGMENT")
OPS = torch.ops.fshard

Write = Callable[[Hash, torch.Tensor], None]
"""Writes a block of a result from the words of its places."""


# -- from words to numbers ------------------------------------------------------------------


def _bits(words: Words, dtype: torch.dtype) -> Write:
    """A word, or as much of it as there is room for; two of them in 64 bits."""

    def write(hash_: Hash, out: torch.Tensor) -> None:
        x, y = hash_(words)
        out.copy_(_wide(x, y) if dtype.itemsize == 8 else x.bitwise_xor_(y))

    return write


def _wide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two words as one of 64 bits."""
    return (x.long() << 32).bitwise_or_(y.long() & 0xFFFFFFFF)


def _unit(words: Words, dtype: torch.dtype) -> Write:
    """Numbers from 0 to 1, without 1: bits become the mantissa of a number from 1 to 2."""
    width, mantissa = FLOATS[dtype]
    one = (1 << (dtype.itemsize * 8 - 2)) - (1 << mantissa)

    def write(hash_: Hash, out: torch.Tensor) -> None:
        x, y = hash_(words)
        if width == 64:
            made = (_wide(x, y) >> 12).bitwise_and_((1 << 52) - 1).bitwise_or_(one)
        else:
            x.bitwise_xor_(y).bitwise_right_shift_(word(width - mantissa))
            x.bitwise_and_(word((1 << mantissa) - 1)).bitwise_or_(word(one))
            made = x.to(MANTISSAS[dtype])
        torch.sub(made.view(dtype), 1.0, out=out)

    return write


def _between(words: Words, dtype: torch.dtype, low: float, high: float) -> Write:
    """Numbers from `low` to `high`."""
    unit = _unit(words, dtype)
    if (low, high) == (0.0, 1.0):
        return unit
    least, most = (torch.tensor(x, dtype=dtype, device="cpu") for x in (low, high))
    span, first = (most - least).item(), least.item()
    exact = math.frexp(span)[0] == 0.5  # the product is, of a power of two

    def write(hash_: Hash, out: torch.Tensor) -> None:
        unit(hash_, out)
        # XLA rounds a product and a sum once. In float64 there is nothing wider to do so in.
        wide = out.double() if dtype == torch.float32 and not exact else out
        out.copy_(wide.mul_(span).add_(first).clamp_(min=first))

    return write


def _normal(words: Words, dtype: torch.dtype) -> Write:
    """The inverse of the distribution function, of numbers from -1 to 1 without either."""
    ends = torch.tensor([-1.0, 0.0, math.sqrt(2)], dtype=dtype, device="cpu")
    between = _between(words, dtype, torch.nextafter(ends[0], ends[1]).item(), 1.0)
    scale = ends[2].item()

    def write(hash_: Hash, out: torch.Tensor) -> None:
        between(hash_, out)
        torch.erfinv(out, out=out)
        out.mul_(scale)

    return write


def _true(words: Words, p: float) -> Write:
    """Whether a number from 0 to 1 is less than `p`, in float32; ones and zeros in other dtypes."""
    unit = _unit(words, torch.float32)
    least = torch.tensor(p, dtype=torch.float32, device="cpu").item()

    def write(hash_: Hash, out: torch.Tensor) -> None:
        drawn = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        unit(hash_, drawn)
        torch.lt(drawn, least, out=out)

    return write


def _integer(keys: Sequence[Words], dtype: torch.dtype, low: int, last: int) -> Write:
    """The remainder of twice as many bits as are asked for, at least of 64.

    All is computed modulo the width, as JAX does.
    """
    width = 64 if dtype.itemsize == 8 else 32
    span = last - low + 1
    whole = span == 1 << width
    half = (1 << width // 2) % span
    upper = (half * half & (1 << width) - 1) % span
    rest = _remainder if width == 64 else torch.fmod  # words of 32 bits are above zero in int64

    def drawn(hash_: Hash, words: Words) -> torch.Tensor:
        x, y = hash_(words)
        return _wide(x, y) if width == 64 else x.bitwise_xor_(y).long() & 0xFFFFFFFF

    def write(hash_: Hash, out: torch.Tensor) -> None:
        if whole:
            made = drawn(hash_, keys[1])
        else:
            made = rest(drawn(hash_, keys[0]), span).mul_(_signed(upper))
            made += rest(drawn(hash_, keys[1]), span)
            made = rest(made if width == 64 else made & 0xFFFFFFFF, span)
        out.copy_(made.add_(low))

    return write


def _signed(value: int) -> int:
    """What an int64 holds of a number of 64 bits."""
    return value - (value >> 63 << 64)


def _remainder(x: torch.Tensor, by: int) -> torch.Tensor:
    """The remainders of int64 that stand for numbers of 64 bits without sign."""
    if by >= 1 << 63:
        over = torch.bitwise_xor(x, -1 << 63) >= by - (1 << 63)
        return x - torch.where(over, _signed(by), 0)
    # A quotient of half of it, twice, is at most one too small.
    rest = x - ((x >> 1 & (1 << 63) - 1) // by * 2) * by
    over = (rest < 0) | (rest >= by)
    return rest.sub_(over * by)


# -- tensors of parts -----------------------------------------------------------------------


def _drawn(
    key: torch.Tensor, box: Box, dtype: torch.dtype, device: torch.device,
    write: Callable[[torch.Tensor], Write],
) -> torch.Tensor:  # fmt: skip
    """The part of a draw under one key, or under each of several; `write` is of one key."""
    out = torch.empty((*key.shape[:-1], *box.size), dtype=dtype, device=device)
    for one, part in _by_key(key, out):
        fill(box, part, write(one))
    return out


def _by_key(key: torch.Tensor, out: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Every key with its part of a result; none where there is nothing to draw.

    A key on the host stays there: its words are numbers to a kernel elsewhere.
    """
    if not out.numel():
        return ()
    keys = key if key.device.type == "cpu" else key.to(out.device)
    return zip(keys.reshape(-1, 2), out.flatten(0, key.dim() - 2) if key.dim() > 1 else out[None],
               strict=True)  # fmt: skip


def _place(
    like: torch.Tensor | None, key: torch.Tensor, device: torch.device | None
) -> torch.device:
    return device or (key.device if like is None else like.device)


def _bits_op(
    like: torch.Tensor | None, key: torch.Tensor, shape: Sequence[int], start: Sequence[int],
    size: Sequence[int], *, dtype: torch.dtype, device: torch.device | None = None,
) -> torch.Tensor:  # fmt: skip
    box, signed = Box(tuple(shape), tuple(start), tuple(size)), BITS[dtype]
    on = _place(like, key, device)
    return _drawn(key, box, signed, on, lambda one: _bits(words_of(one), signed)).view(dtype)


def _uniform_op(
    like: torch.Tensor | None, key: torch.Tensor, shape: Sequence[int], start: Sequence[int],
    size: Sequence[int], low: float, high: float, *, dtype: torch.dtype,
    device: torch.device | None = None,
) -> torch.Tensor:  # fmt: skip
    box, on = Box(tuple(shape), tuple(start), tuple(size)), _place(like, key, device)
    return _drawn(key, box, dtype, on, lambda one: _between(words_of(one), dtype, low, high))


def _normal_op(
    like: torch.Tensor | None, key: torch.Tensor, shape: Sequence[int], start: Sequence[int],
    size: Sequence[int], *, dtype: torch.dtype, device: torch.device | None = None,
) -> torch.Tensor:  # fmt: skip
    box, on = Box(tuple(shape), tuple(start), tuple(size)), _place(like, key, device)
    return _drawn(key, box, dtype, on, lambda one: _normal(words_of(one), dtype))


def _randint_op(
    like: torch.Tensor | None, key: torch.Tensor, shape: Sequence[int], start: Sequence[int],
    size: Sequence[int], low: int, last: int, *, dtype: torch.dtype,
    device: torch.device | None = None,
) -> torch.Tensor:  # fmt: skip
    box, on = Box(tuple(shape), tuple(start), tuple(size)), _place(like, key, device)

    def write(one: torch.Tensor) -> Write:
        keys = derived(one, torch.arange(2, device=one.device))
        return _integer([words_of(each) for each in keys], dtype, low, last)

    return _drawn(key, box, dtype, on, write)


def _bernoulli_op(
    like: torch.Tensor | None, key: torch.Tensor, shape: Sequence[int], start: Sequence[int],
    size: Sequence[int], p: float, *, dtype: torch.dtype, device: torch.device | None = None,
) -> torch.Tensor:  # fmt: skip
    box, on = Box(tuple(shape), tuple(start), tuple(size)), _place(like, key, device)
    return _drawn(key, box, dtype, on, lambda one: _true(words_of(one), p))


def _permutation_op(
    like: torch.Tensor | None, key: torch.Tensor, shape: Sequence[int], start: Sequence[int],
    size: Sequence[int], *, dtype: torch.dtype, device: torch.device | None = None,
) -> torch.Tensor:  # fmt: skip
    """Numbers sorted by bits, so often that ties hardly matter; a part is one of the whole."""
    on, (n,) = _place(like, key, device), shape
    turns = math.ceil(3 * math.log(max(n, 1)) / math.log((1 << 32) - 1))
    out = torch.empty((*key.shape[:-1], *size), dtype=dtype, device=on)
    for one, part in _by_key(key, out):
        found = torch.arange(n, dtype=dtype, device=on)
        for _ in range(turns):
            one, sub = derived(one, torch.arange(2, device=one.device))  # noqa: PLW2901
            drawn = _bits_op(found, sub, (n,), (0,), (n,), dtype=torch.int32).long() & 0xFFFFFFFF
            found = found[drawn.sort(stable=True).indices]
        part.copy_(found[start[0] : start[0] + size[0]])
    return out


def _split_op(key: torch.Tensor, count: int) -> torch.Tensor:
    return derived(key.unsqueeze(-2), torch.arange(count, device=key.device))


def _fold_in_op(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    return derived(key, torch.as_tensor(data, device=key.device))


# -- registration ---------------------------------------------------------------------------


def _drawn_shape(
    like: torch.Tensor | None, key: torch.Tensor, shape: Sequence[int], start: Sequence[int],
    size: Sequence[int], *_: Any, dtype: torch.dtype, device: torch.device | None = None,
) -> torch.Tensor:  # fmt: skip
    return torch.empty((*key.shape[:-1], *size), dtype=dtype, device=_place(like, key, device))


def _split_shape(key: torch.Tensor, count: int) -> torch.Tensor:
    return key.new_empty(*key.shape[:-1], count, 2)


def _fold_in_shape(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    shape = data.shape if isinstance(data, torch.Tensor) else ()
    return key.new_empty(*torch.broadcast_shapes(key.shape[:-1], shape), 2)


def _batched_draw(op: Any) -> Callable[..., Any]:
    """Under `torch.vmap` several keys draw as many tensors; one key draws one, for all."""

    def batched(
        info: Any, in_dims: Any, like: torch.Tensor | None, key: torch.Tensor, *rest: Any,
        **made: Any,
    ) -> Any:  # fmt: skip
        like_dim, key_dim = in_dims[:2]
        if key_dim is None:
            like = like if like is None or like_dim is None else like.select(like_dim, 0)
            return op(like, key, *rest, **made), None
        if like is not None:  # of all keys, or the same for all, it has a dim for every one of
            like = like.unsqueeze(0) if like_dim is None else like.movedim(like_dim, 0)
        return op(like, key.movedim(key_dim, 0), *rest, **made), 0

    return batched


def _batched_split(info: Any, in_dims: Any, key: torch.Tensor, count: int) -> Any:
    return OPS.split(key.movedim(in_dims[0], 0), count), 0


def _batched_fold_in(info: Any, in_dims: Any, key: torch.Tensor, data: Any) -> Any:
    # Both have as many dims before the key's two words as the result.
    dim, at = in_dims
    key = key.unsqueeze(0) if dim is None else key.movedim(dim, 0)
    if not isinstance(data, torch.Tensor):
        return OPS.fold_in(key, data), 0
    data = data.unsqueeze(0) if at is None else data.movedim(at, 0)
    more = key.dim() - 1 - data.dim()
    key = key.reshape(key.shape[0], *(1,) * max(-more, 0), *key.shape[1:])
    data = data.reshape(data.shape[0], *(1,) * max(more, 0), *data.shape[1:])
    return OPS.fold_in(key, data), 0


def _register(name: str, schema: str, run: Any, shape: Any, batched: Any) -> None:
    base, _, _ = name.partition(".")
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    # Keys have no gradient, and of what is only followed nothing is computed.
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"fshard::{name}", shape, lib=_LIBRARY)
    packet = getattr(OPS, base)
    made = batched(packet) if batched is _batched_draw else batched
    torch.library.register_vmap(f"fshard::{name}", made, lib=_LIBRARY)


_RUN = {
    "bits": _bits_op, "uniform": _uniform_op, "normal": _normal_op, "randint": _randint_op,
    "bernoulli": _bernoulli_op, "permutation": _permutation_op,
}  # fmt: skip
for _name, _schema in DRAWN.items():
    _register(_name, _schema, _RUN[_name], _drawn_shape, _batched_draw)
_register("split", "(Tensor key, SymInt count) -> Tensor", _split_op, _split_shape, _batched_split)
for _name, _data in (("fold_in", "SymInt"), ("fold_in.Tensor", "Tensor")):
    _register(_name, f"(Tensor key, {_data} data) -> Tensor",
              _fold_in_op, _fold_in_shape, _batched_fold_in)  # fmt: skip
