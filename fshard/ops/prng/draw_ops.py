"""Random draws as operations of PyTorch: `fshard::uniform` and others, of any box of a tensor.

An operation draws the box of `size` elements at `start` of a tensor of `shape`; so a rank draws
its shard alone, and a graph has one node. `like` is a tensor whose layout and device the draw
follows; its values are not read. Stacked keys draw as many stacked tensors.

Random bits become numbers as in `jax.random`, with the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fshard.ops.prng.threefry import (
    Box,
    HashBlock,
    KeyWords,
    derive_keys,
    fill_box,
    key_words,
    word_tensor,
)

FLOAT_BITS: dict[torch.dtype, tuple[int, int]] = {
    torch.float16: (16, 10), torch.bfloat16: (8, 7), torch.float32: (32, 23),
    torch.float64: (64, 52),
}  # fmt: skip
"""Bits drawn for each dtype, and bits of its mantissa, which are filled with them."""
INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
SIGNED_DTYPES: dict[torch.dtype, torch.dtype] = {
    torch.uint8: torch.int8, torch.uint16: torch.int16, torch.uint32: torch.int32,
    torch.uint64: torch.int64,
} | {dtype: dtype for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)}  # fmt: skip
"""Dtypes of `fs.random.bits`, each with the signed dtype of the same width."""
MANTISSAS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}

BOX_ARGS = "Tensor? like, Tensor key, SymInt[] shape, SymInt[] start, SymInt[] size"
FACTORY_ARGS = "ScalarType dtype, Device? device=None"
DRAW_SCHEMAS = {
    "bits": f"({BOX_ARGS}, *, {FACTORY_ARGS}) -> Tensor",
    "uniform": f"({BOX_ARGS}, float low, float high, *, {FACTORY_ARGS}) -> Tensor",
    "normal": f"({BOX_ARGS}, *, {FACTORY_ARGS}) -> Tensor",
    "randint": f"({BOX_ARGS}, int low, int last, *, {FACTORY_ARGS}) -> Tensor",
    "bernoulli": f"({BOX_ARGS}, float p, *, {FACTORY_ARGS}) -> Tensor",
    "permutation": f"({BOX_ARGS}, *, {FACTORY_ARGS}) -> Tensor",
}
"""Schemas of the draw operations by name."""

_LIBRARY = torch.library.Library("fshard", "FRAGMENT")
DRAW_OPS = torch.ops.fshard

WriteBlock = Callable[[HashBlock, torch.Tensor], None]
"""Writes a block of a result from the hashed words of its elements."""


# -- words to numbers -----------------------------------------------------------------------


def _write_bits(key: torch.Tensor, dtype: torch.dtype) -> WriteBlock:
    """Return the function that writes both words, xored below 64 bits, into a block."""
    words, signed = key_words(key), SIGNED_DTYPES[dtype]

    def write(hash_: HashBlock, out: torch.Tensor) -> None:
        x, y = hash_(words)
        out.view(signed).copy_(_int64(x, y) if dtype.itemsize == 8 else x.bitwise_xor_(y))

    return write


def _int64(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return two 32-bit words as one int64."""
    return (x.long() << 32).bitwise_or_(y.long() & 0xFFFFFFFF)


def _write_unit(key: torch.Tensor, dtype: torch.dtype) -> WriteBlock:
    """Return the function that writes uniform numbers in [0, 1) into a block.

    Bits become the mantissa of numbers in [1, 2), minus 1.
    """
    words = key_words(key)
    width, mantissa = FLOAT_BITS[dtype]
    one = (1 << (dtype.itemsize * 8 - 2)) - (1 << mantissa)

    def write(hash_: HashBlock, out: torch.Tensor) -> None:
        x, y = hash_(words)
        if width == 64:
            pattern = (_int64(x, y) >> 12).bitwise_and_((1 << 52) - 1).bitwise_or_(one)
        else:
            x.bitwise_xor_(y).bitwise_right_shift_(word_tensor(width - mantissa))
            x.bitwise_and_(word_tensor((1 << mantissa) - 1)).bitwise_or_(word_tensor(one))
            pattern = x.to(MANTISSAS[dtype])
        torch.sub(pattern.view(dtype), 1.0, out=out)

    return write


def _write_uniform(key: torch.Tensor, dtype: torch.dtype, low: float, high: float) -> WriteBlock:
    """Return the function that writes uniform numbers in [low, high) into a block."""
    unit = _write_unit(key, dtype)
    if (low, high) == (0.0, 1.0):
        return unit
    rounded_low, rounded_high = (torch.tensor(x, dtype=dtype, device="cpu") for x in (low, high))
    span, start = (rounded_high - rounded_low).item(), rounded_low.item()
    exact = math.frexp(span)[0] == 0.5  # products with a power of two are exact

    def write(hash_: HashBlock, out: torch.Tensor) -> None:
        unit(hash_, out)
        # XLA rounds a product and a sum once; in half precision twice, if the CPU lacks it.
        if exact or dtype.itemsize == 2:
            out.mul_(span).add_(start)
        elif dtype == torch.float32:
            out.copy_(out.double().mul_(span).add_(start))
        else:
            out.copy_(_fused_multiply_add(out, span, start))
        out.clamp_(min=start)

    return write


def _fused_multiply_add(x: torch.Tensor, factor: float, term: float) -> torch.Tensor:
    """Return `x * factor + term`, rounded once, of a tensor of float64.

    The product and the sum are each a number and its exact error (Dekker, 1971); the errors are
    added with rounding to odd, so that the last sum rounds correctly (Boldo and Melquiond, 2008).
    """
    b, c = (torch.tensor(value, dtype=torch.float64, device=x.device) for value in (factor, term))
    (x_high, x_low), (b_high, b_low) = _halves(x), _halves(b)
    product = x * b
    error = x_high * b_high - product + x_high * b_low + x_low * b_high + x_low * b_low
    total, carry = _exact_sum(product, c)
    rest, lost = _exact_sum(carry, error)
    bits = rest.view(torch.int64)
    to_odd = (lost != 0) & (bits % 2 == 0)
    bits = bits + torch.where((lost > 0) == (rest > 0), 1, -1) * to_odd
    return total + bits.view(torch.float64)


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two numbers of half the bits whose sum is `x`."""
    scaled = x * (2.0**27 + 1)
    high = scaled - (scaled - x)
    return high, x - high


def _exact_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded sum and its error."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _write_normal(key: torch.Tensor, dtype: torch.dtype) -> WriteBlock:
    """Return the function that writes sqrt(2) * erfinv(u) into a block, u uniform in (-1, 1)."""
    ends = torch.tensor([-1.0, 0.0, math.sqrt(2)], dtype=dtype, device="cpu")
    uniform = _write_uniform(key, dtype, torch.nextafter(ends[0], ends[1]).item(), 1.0)
    scale = ends[2].item()

    def write(hash_: HashBlock, out: torch.Tensor) -> None:
        uniform(hash_, out)
        torch.erfinv(out, out=out)
        out.mul_(scale)

    return write


def _write_bernoulli(key: torch.Tensor, dtype: torch.dtype, p: float) -> WriteBlock:
    """Return the function that writes if a float32 number, uniform in [0, 1), is less than `p`."""
    unit = _write_unit(key, torch.float32)
    threshold = torch.tensor(p, dtype=torch.float32, device="cpu").item()

    def write(hash_: HashBlock, out: torch.Tensor) -> None:
        numbers = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        unit(hash_, numbers)
        torch.lt(numbers, threshold, out=out)

    return write


def _write_integers(key: torch.Tensor, dtype: torch.dtype, low: int, last: int) -> WriteBlock:
    """Return the function that writes integers in [low, last] into a block.

    They are remainders of 64 or 128 random bits by the span. The arithmetic is modulo 2**32 or
    2**64, as in JAX.
    """
    keys = derive_keys(key, torch.arange(2, device=key.device))
    upper_words, lower_words = map(key_words, keys)
    width = 64 if dtype.itemsize == 8 else 32
    span = last - low + 1
    full_range = span == 1 << width
    half = (1 << width // 2) % span
    upper = (half * half & (1 << width) - 1) % span
    remainder = _unsigned_remainder if width == 64 else torch.fmod  # 32 bits fit int64

    def bits(hash_: HashBlock, words: KeyWords) -> torch.Tensor:
        x, y = hash_(words)
        return _int64(x, y) if width == 64 else x.bitwise_xor_(y).long() & 0xFFFFFFFF

    def write(hash_: HashBlock, out: torch.Tensor) -> None:
        if full_range:
            values = bits(hash_, lower_words)
        else:
            values = remainder(bits(hash_, upper_words), span).mul_(_as_int64(upper))
            values += remainder(bits(hash_, lower_words), span)
            values = remainder(values if width == 64 else values & 0xFFFFFFFF, span)
        out.copy_(values.add_(low))

    return write


def _as_int64(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit integer."""
    return value - (value >> 63 << 64)


def _unsigned_remainder(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return the remainders of int64 values whose bits are unsigned 64-bit integers."""
    if divisor >= 1 << 63:
        over = torch.bitwise_xor(x, -1 << 63) >= divisor - (1 << 63)
        return x - torch.where(over, _as_int64(divisor), 0)
    # Twice the quotient of half of x is at most one less than the quotient.
    remainder = x - ((x >> 1 & (1 << 63) - 1) // divisor * 2) * divisor
    over = (remainder < 0) | (remainder >= divisor)
    return remainder.sub_(over * divisor)


# -- operations -----------------------------------------------------------------------------


def _empty_draw(
    like: torch.Tensor | None, key: torch.Tensor, shape: Sequence[int], start: Sequence[int],
    size: Sequence[int], *_: Any, dtype: torch.dtype, device: torch.device | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return an uninitialized result of a draw; it is also the fake kernel."""
    device = device or (key.device if like is None else like.device)
    return torch.empty((*key.shape[:-1], *size), dtype=dtype, device=device)


def _by_key(key: torch.Tensor, out: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of a key and its part of the result; none if the result is empty.

    A key on the host stays there: its words become scalar arguments of kernels.
    """
    if not out.numel():
        return ()
    keys = key if key.device.type == "cpu" else key.to(out.device)
    return zip(keys.reshape(-1, 2), out.flatten(0, key.dim() - 2) if key.dim() > 1 else out[None],
               strict=True)  # fmt: skip


def _draw_op(write: Callable[..., WriteBlock]) -> Callable[..., torch.Tensor]:
    """Return the kernel of a draw; `write(key, dtype, *params)` makes the function of blocks."""

    def kernel(
        like: torch.Tensor | None, key: torch.Tensor, shape: Sequence[int], start: Sequence[int],
        size: Sequence[int], *params: Any, **factory: Any,
    ) -> torch.Tensor:  # fmt: skip
        box = Box(tuple(shape), tuple(start), tuple(size))
        out = _empty_draw(like, key, shape, start, size, **factory)
        for single_key, part in _by_key(key, out):
            fill_box(box, part, write(single_key, factory["dtype"], *params))
        return out

    return kernel


def _permutation_op(
    like: torch.Tensor | None, key: torch.Tensor, shape: Sequence[int], start: Sequence[int],
    size: Sequence[int], **factory: Any,
) -> torch.Tensor:  # fmt: skip
    """Sort integers by random bits, often enough that ties hardly matter; return the box."""
    (n,), out = shape, _empty_draw(like, key, shape, start, size, **factory)
    rounds = math.ceil(3 * math.log(max(n, 1)) / math.log((1 << 32) - 1))
    draw_bits = _draw_op(_write_bits)
    for single_key, part in _by_key(key, out):
        order, k = torch.arange(n, dtype=out.dtype, device=out.device), single_key
        for _ in range(rounds):
            k, sub = derive_keys(k, torch.arange(2, device=k.device))
            bits = draw_bits(order, sub, (n,), (0,), (n,), dtype=torch.int32).long() & 0xFFFFFFFF
            order = order[bits.sort(stable=True).indices]
        part.copy_(order[start[0] : start[0] + size[0]])
    return out


def _split_op(key: torch.Tensor, count: int) -> torch.Tensor:
    return derive_keys(key.unsqueeze(-2), torch.arange(count, device=key.device))


def _fold_in_op(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    return derive_keys(key, torch.as_tensor(data, device=key.device))


# -- registration ---------------------------------------------------------------------------


def _split_fake(key: torch.Tensor, count: int) -> torch.Tensor:
    return key.new_empty(*key.shape[:-1], count, 2)


def _fold_in_fake(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    shape = data.shape if isinstance(data, torch.Tensor) else ()
    return key.new_empty(*torch.broadcast_shapes(key.shape[:-1], shape), 2)


def _batched_draw(op: Any) -> Callable[..., Any]:
    """Return the `torch.vmap` rule of a draw: batched keys draw a batch, one key draws once."""

    def batched(
        info: Any, in_dims: Any, like: torch.Tensor | None, key: torch.Tensor, *rest: Any,
        **factory: Any,
    ) -> Any:  # fmt: skip
        like_dim, key_dim = in_dims[:2]
        if key_dim is None:
            like = like if like is None or like_dim is None else like.select(like_dim, 0)
            return op(like, key, *rest, **factory), None
        if like is not None:  # an unbatched `like` is broadcast over the keys
            like = like.unsqueeze(0) if like_dim is None else like.movedim(like_dim, 0)
        return op(like, key.movedim(key_dim, 0), *rest, **factory), 0

    return batched


def _batched_split(info: Any, in_dims: Any, key: torch.Tensor, count: int) -> Any:
    return DRAW_OPS.split(key.movedim(in_dims[0], 0), count), 0


def _batched_fold_in(info: Any, in_dims: Any, key: torch.Tensor, data: Any) -> Any:
    # Align the batch dims of both, which precede the two words of the keys.
    key_dim, data_dim = in_dims
    key = key.unsqueeze(0) if key_dim is None else key.movedim(key_dim, 0)
    if not isinstance(data, torch.Tensor):
        return DRAW_OPS.fold_in(key, data), 0
    data = data.unsqueeze(0) if data_dim is None else data.movedim(data_dim, 0)
    more = key.dim() - 1 - data.dim()
    key = key.reshape(key.shape[0], *(1,) * max(-more, 0), *key.shape[1:])
    data = data.reshape(data.shape[0], *(1,) * max(more, 0), *data.shape[1:])
    return DRAW_OPS.fold_in(key, data), 0


def _register(name: str, schema: str, kernel: Any, fake: Any, batched: Any) -> None:
    base, _, _ = name.partition(".")
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    # Draws have no gradient: keys are integers, and values of `like` are not read.
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"fshard::{name}", fake, lib=_LIBRARY)
    packet = getattr(DRAW_OPS, base)
    vmap_rule = batched(packet) if batched is _batched_draw else batched
    torch.library.register_vmap(f"fshard::{name}", vmap_rule, lib=_LIBRARY)


_KERNELS = {
    "bits": _draw_op(_write_bits), "uniform": _draw_op(_write_uniform),
    "normal": _draw_op(_write_normal), "randint": _draw_op(_write_integers),
    "bernoulli": _draw_op(_write_bernoulli), "permutation": _permutation_op,
}  # fmt: skip
for _name, _schema in DRAW_SCHEMAS.items():
    _register(_name, _schema, _KERNELS[_name], _empty_draw, _batched_draw)
_register("split", "(Tensor key, SymInt count) -> Tensor", _split_op, _split_fake, _batched_split)
for _name, _data in (("fold_in", "SymInt"), ("fold_in.Tensor", "Tensor")):
    _register(_name, f"(Tensor key, {_data} data) -> Tensor",
              _fold_in_op, _fold_in_fake, _batched_fold_in)  # fmt: skip
