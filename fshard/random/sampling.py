"""Draws of `fs.random`, for layouts and for one device.

Each element is a function of the key and of the element's index in the global tensor. A rank
therefore draws its shard without communication, and the layout changes no value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fshard._util.errors import Problem, raise_if
from fshard.layout.spec import Spec
from fshard.layout.validation import as_ints
from fshard.ops.prng.draw_ops import DRAW_OPS, FLOAT_BITS, INTEGER_DTYPES, SIGNED_DTYPES
from fshard.ops.trace.trace import check_untraced
from fshard.random.keys import key_problems
from fshard.run.creation import create_pair, default_device

Target = Spec | torch.Tensor | Sequence[int] | int
"""Argument of a draw: a spec, a tensor to match in shape, dtype and layout, or a shape."""


# -- draws ----------------------------------------------------------------------------------


def uniform(
    key: torch.Tensor,
    spec: Target,
    /,
    *,
    minval: float = 0.0,
    maxval: float = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Draw uniform numbers in `[minval, maxval)`.

    Each element depends on the key and on its index in the global tensor alone: a rank draws its
    shard without communication, and `fs.unshard(uniform(key, spec))` equals
    `uniform(key, spec.shape)` bit for bit on every layout. Along an unreduced axis, coordinate 0
    holds the values, as with `fs.shard`. Draws have no gradient.

    Args:
        key: A key, int64 of shape `(2,)`, from `fs.random.key`, `split` or `fold_in`.
        spec: An `fs.Spec`, for a pair of that layout; a tensor, for its shape, dtype and device
            (and its layout in `fs.partition`); or a shape, for a tensor on one device.
        minval: Lower limit, included.
        maxval: Upper limit, excluded.
        dtype: float16, bfloat16, float32 or float64; by default that of the spec or tensor, or
            `torch.get_default_dtype()`.
        device: Device of the result; by default PyTorch's default device, or the key's device if
            the key is not on the host.

    Returns:
        An `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor.

    Raises:
        ShardingError: If `key` is not a key, a limit is not a finite number, or the dtype is
            not one of those above, or not that of the spec.

    The values are those of `jax.random.uniform` (Threefry-2x32, Salmon et al., SC 2011), bit for
    bit; float16 values with limits as on CPUs without float16 arithmetic (AVX512-FP16), where XLA
    rounds the product and the sum.

    >>> import fshard as fs
    >>> spec = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))
    >>> fs.random.uniform(fs.random.key(42), spec).local
    (tensor([0.4887, 0.6798]), tensor([0.6163, 0.5610]))
    >>> fs.random.uniform(fs.random.key(42), (4,))
    tensor([0.4887, 0.6798, 0.6163, 0.5610])
    """
    where, target = "fs.random.uniform", float_target(spec, dtype, device)
    problems, limits = target.problems(key), {"minval": minval, "maxval": maxval}
    shapes = {name: getattr(limit, "shape", ()) for name, limit in limits.items()}
    if any(shapes.values()):
        tensors = ", ".join(f"{name} of shape {tuple(s)}" for name, s in shapes.items() if s)
        fix = "minval + (maxval - minval) * fs.random.uniform(key, spec)"
        problems.append(Problem(tensors, "limits must be numbers, the same for all elements", fix))
    elif not math.isfinite(maxval - minval):
        problems.append(Problem(f"minval={minval}, maxval={maxval}", "limits must be finite",
                                "minval=0.0, maxval=1.0"))  # fmt: skip
    raise_if(where, problems)
    return target.draw(where, key, DRAW_OPS.uniform, float(minval), float(maxval))


def normal(
    key: torch.Tensor,
    spec: Target,
    /,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Draw normal numbers of mean 0 and variance 1; see `uniform` on layouts.

    Args:
        key: A key, int64 of shape `(2,)`, from `fs.random.key`, `split` or `fold_in`.
        spec: An `fs.Spec`, a tensor, or a shape; as for `uniform`.
        dtype: As for `uniform`.
        device: As for `uniform`.

    Returns:
        An `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor.

    Raises:
        ShardingError: If `key` is not a key, or the dtype is not one of those of `uniform`.

    The values are those of `jax.random.normal` up to some units in the last place: both apply the
    inverse error function, here PyTorch's, to the same uniform numbers.

    >>> import fshard as fs
    >>> fs.random.normal(fs.random.key(42), (3,))
    tensor([-0.0283,  0.4671,  0.2957])
    """
    where, target = "fs.random.normal", float_target(spec, dtype, device)
    raise_if(where, target.problems(key))
    return target.draw(where, key, DRAW_OPS.normal)


def exponential(
    key: torch.Tensor,
    spec: Target,
    /,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Draw numbers of the exponential distribution of rate 1; see `uniform` on layouts.

    Args:
        key: A key, int64 of shape `(2,)`, from `fs.random.key`, `split` or `fold_in`.
        spec: An `fs.Spec`, a tensor, or a shape; as for `uniform`.
        dtype: As for `uniform`.
        device: As for `uniform`.

    Returns:
        An `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor.

    Raises:
        ShardingError: If `key` is not a key, or the dtype is not one of those of `uniform`.

    The values are those of `jax.random.exponential` up to rounding.

    >>> import fshard as fs
    >>> fs.random.exponential(fs.random.key(42), (3,))
    tensor([0.6708, 1.1388, 0.9578])
    """
    where, target = "fs.random.exponential", float_target(spec, dtype, device)
    raise_if(where, target.problems(key))
    return target.draw(where, key, DRAW_OPS.uniform, 0.0, 1.0, then=lambda u: -torch.log1p(-u))


def randint(
    key: torch.Tensor,
    spec: Target,
    low: int,
    high: int,
    /,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Draw integers in `[low, high)`; see `uniform` on layouts.

    Args:
        key: A key, int64 of shape `(2,)`, from `fs.random.key`, `split` or `fold_in`.
        spec: An `fs.Spec`, a tensor, or a shape; as for `uniform`.
        low: Lower limit, included.
        high: Upper limit, excluded.
        dtype: int8, int16, int32, int64 or uint8; by default that of the spec or tensor, or int64.
        device: As for `uniform`.

    Returns:
        An `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor.

    Raises:
        ShardingError: If `key` is not a key, the range is empty, or the dtype cannot hold it.

    The values are those of `jax.random.randint`: remainders of twice as many bits as the dtype
    has, nearly unbiased for small spans.

    >>> import fshard as fs
    >>> fs.random.randint(fs.random.key(42), (6,), 0, 10)
    tensor([5, 8, 3, 1, 5, 6])
    """
    where = "fs.random.randint"
    target = DrawTarget(spec, dtype, device, INTEGER_DTYPES, torch.int64)
    problems, limits = target.problems(key), as_ints((low, high))
    if limits is None:
        problems.append(Problem(f"from {low} to {high}", "limits must be integers",
                                "randint(key, spec, 0, 2), say"))  # fmt: skip
    elif not problems:
        low, high = limits
        info = torch.iinfo(target.dtype)
        if not info.min <= low < high <= info.max + 1:
            problems.append(Problem(
                f"from {low} to {high} in {target.dtype}",
                f"the range must not be empty, within {info.min} to {info.max + 1}",
                "randint(key, spec, 0, 2), say"))  # fmt: skip
    raise_if(where, problems)
    return target.draw(where, key, DRAW_OPS.randint, low, high - 1)


def bernoulli(
    key: torch.Tensor, spec: Target, p: float = 0.5, /, *, device: torch.device | str | None = None
) -> Any:
    """Draw booleans that are True with probability `p`; see `uniform` on layouts.

    For a tensor of probabilities write `fs.random.uniform(key, p.float()) < p`; half precision
    has too few numbers.

    Args:
        key: A key, int64 of shape `(2,)`, from `fs.random.key`, `split` or `fold_in`.
        spec: An `fs.Spec`, a tensor, or a shape; as for `uniform`.
        p: Probability of True, from 0 to 1.
        device: As for `uniform`.

    Returns:
        Booleans: an `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor.

    Raises:
        ShardingError: If `key` is not a key, or `p` is not a number from 0 to 1.

    The values are those of `jax.random.bernoulli`.

    >>> import fshard as fs
    >>> fs.random.bernoulli(fs.random.key(42), (3,), 0.5)
    tensor([ True, False, False])
    """
    where = "fs.random.bernoulli"
    dtype = torch.bool if isinstance(spec, torch.Tensor) else None
    target = DrawTarget(spec, dtype, device, (torch.bool,), torch.bool)
    raise_if(where, target.problems(key) + _rate_problems(p))
    return target.draw(where, key, DRAW_OPS.bernoulli, float(p))


def dropout_mask(
    key: torch.Tensor,
    spec: Target,
    p: float,
    /,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Draw a dropout mask: 0 with probability `p`, else `1 / (1 - p)`; see `uniform` on layouts.

    `x * dropout_mask(key, x, p)` drops the same elements on every layout. Within
    `fs.random.keyed` modules such as `torch.nn.Dropout` do the same.

    Args:
        key: A key, int64 of shape `(2,)`, from `fs.random.key`, `split` or `fold_in`.
        spec: An `fs.Spec`, a tensor, or a shape; as for `uniform`.
        p: Probability of a zero, from 0 to 1.
        dtype: As for `uniform`.
        device: As for `uniform`.

    Returns:
        An `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor. `x * mask` has the gradient
        `grad * mask`.

    Raises:
        ShardingError: If `key` is not a key, or `p` is not a number from 0 to 1.

    The dropped elements are those of Flax's dropout with the same key.

    >>> import fshard as fs
    >>> fs.random.dropout_mask(fs.random.key(42), (4,), 0.5)
    tensor([2., 0., 0., 0.])
    """
    where, target = "fs.random.dropout_mask", float_target(spec, dtype, device)
    raise_if(where, target.problems(key) + _rate_problems(p))
    scale = dropout_scale(p)
    return target.draw(where, key, DRAW_OPS.bernoulli, 1.0 - p, then=lambda mask: mask * scale)


def dropout_scale(p: float) -> float:
    """Return the factor of the elements that a dropout keeps, which preserves the mean."""
    return 1.0 / (1.0 - p) if p < 1 else 0.0


def bits(
    key: torch.Tensor,
    spec: Target,
    /,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Draw integers of uniformly random bits; see `uniform` on layouts.

    Args:
        key: A key, int64 of shape `(2,)`, from `fs.random.key`, `split` or `fold_in`.
        spec: An `fs.Spec`, a tensor, or a shape; as for `uniform`.
        dtype: A signed or unsigned integer dtype; by default that of the spec or tensor, or uint32.
        device: As for `uniform`.

    Returns:
        An `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor.

    Raises:
        ShardingError: If `key` is not a key, or the dtype is not one of integers.

    The values are those of `jax.random.bits`; signed dtypes have the same bits.

    >>> import torch
    >>> import fshard as fs
    >>> fs.random.bits(fs.random.key(42), (2,), dtype=torch.int32)
    tensor([ 2098992034, -1375260455], dtype=torch.int32)
    """
    where, target = "fs.random.bits", DrawTarget(spec, dtype, device, SIGNED_DTYPES, torch.uint32)
    raise_if(where, target.problems(key))
    return target.draw(where, key, DRAW_OPS.bits)


def permutation(
    key: torch.Tensor,
    spec: Spec | int,
    /,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Draw a permutation of the integers below `n`.

    Every rank sorts all `n` integers by random bits and keeps its shard.

    Args:
        key: A key, int64 of shape `(2,)`, from `fs.random.key`, `split` or `fold_in`.
        spec: An `fs.Spec` of one dim of size `n`, or `n`.
        dtype: int32 or int64; by default that of the spec, or int64.
        device: As for `uniform`.

    Returns:
        An `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor of shape `(n,)`.

    Raises:
        ShardingError: If `key` is not a key, the spec has other than one dim, or the dtype is
            not one of those above.

    The values are those of `jax.random.permutation`.

    >>> import fshard as fs
    >>> fs.random.permutation(fs.random.key(42), 5)
    tensor([4, 2, 3, 0, 1])
    """
    target = DrawTarget(spec, dtype, device, (torch.int32, torch.int64), torch.int64)
    problems = target.problems(key)
    if len(target.shape) != 1:
        problems.append(Problem(f"a shape of {len(target.shape)} dims",
                                "a permutation must have one dim",
                                "permutation(key, n), and index rows with it"))  # fmt: skip
    raise_if("fs.random.permutation", problems)
    return target.draw("fs.random.permutation", key, DRAW_OPS.permutation)


def _rate_problems(p: object) -> list[Problem]:
    if isinstance(p, int | float) and 0 <= p <= 1:
        return []
    rule = "p must be a number from 0 to 1"
    if isinstance(p, torch.Tensor):
        fix = "fs.random.uniform(key, p.float()) < p for a tensor of probabilities"
        return [Problem(f"p of shape {tuple(p.shape)}", rule, fix)]
    return [Problem(f"p={p!r}", rule, "p=0.5, say")]


# -- targets --------------------------------------------------------------------------------


class DrawTarget:
    """Shape, dtype, device and layout of a draw."""

    def __init__(
        self, target: Target, dtype: torch.dtype | None, device: torch.device | str | None,
        dtypes: Iterable[torch.dtype], default: torch.dtype,
    ) -> None:  # fmt: skip
        self.target, self.requested_dtype, self.dtypes = target, dtype, tuple(dtypes)
        self.device = None if device is None else torch.device(device)
        if isinstance(target, Spec | torch.Tensor):
            self.shape: tuple[int, ...] = tuple(target.shape)
            self.dtype = dtype or target.dtype
        else:
            shape = as_ints((target,) if isinstance(target, int) else target)
            self.shape, self.dtype = (-1,) if shape is None else shape, dtype or default

    def problems(self, key: object) -> list[Problem]:
        """Return the problems of the arguments that all draws share."""
        problems, names = key_problems(key), [str(dtype) for dtype in self.dtypes]
        dtype = self.requested_dtype
        if isinstance(self.target, Spec) and dtype not in (None, self.target.dtype):
            problems.append(Problem(f"dtype={dtype} for {self.target}",
                                    "dtype must be that of the spec",
                                    f"spec.replace(dtype={dtype})"))  # fmt: skip
        if self.dtype not in self.dtypes:
            problems.append(Problem(f"{self.dtype}", f"the dtype must be one of {', '.join(names)}",
                                    f"dtype={names[-1]}, or a spec of it"))  # fmt: skip
        if any(size < 0 for size in self.shape):
            rule = "the target of a draw must be a spec, a tensor or a shape"
            problems.append(Problem(f"{self.target!r}", rule,
                                    "fs.Spec(mesh, P(...), shape=...), or (8, 16)"))  # fmt: skip
        return problems

    def draw(
        self, where: str, key: torch.Tensor, op: Any, *params: Any,
        then: Callable[[torch.Tensor], torch.Tensor] = lambda drawn: drawn,
    ) -> Any:  # fmt: skip
        """Return `then` of the draw of `op`: a pair for a spec, else a tensor."""
        shape, like = (
            list(self.shape),
            self.target if isinstance(self.target, torch.Tensor) else None,
        )
        device = self.device
        if device is None and like is None and key.device.type == "cpu":
            # Operations ignore the default device of a mode, and would take the key's device.
            default = default_device()
            device = default if default.type != "cpu" else None
        factory = {"dtype": self.dtype, "device": device}
        if isinstance(self.target, Spec):
            spec = self.target

            def draw_shard(
                key: torch.Tensor, start: tuple[int, ...], size: tuple[int, ...]
            ) -> torch.Tensor:
                return then(op(None, key, shape, list(start), list(size), *params, **factory))

            check_untraced(where, spec, "a shape, or a tensor whose layout to follow")
            return create_pair(where, spec, key, draw_shard)
        return then(op(like, key, shape, [0] * len(shape), shape, *params, **factory))


def float_target(
    spec: Target, dtype: torch.dtype | None, device: torch.device | str | None
) -> DrawTarget:
    """Return what to draw floating-point numbers for."""
    return DrawTarget(spec, dtype, device, FLOAT_BITS, torch.get_default_dtype())
