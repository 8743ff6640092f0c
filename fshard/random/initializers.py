"""Initial values of parameters: the functions of `torch.nn.init`, drawn with keys.

They have the names and arguments of PyTorch's, without the underscore, and return new tensors. Fans
are those of the global shape, so that all layouts have the same values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.spec import Spec
from fshard.ops.prng.draw_ops import DRAW_OPS
from fshard.ops.trace.trace import check_untraced
from fshard.random.sampling import DrawTarget, Target, float_target
from fshard.run.creation import create_pair

Device = torch.device | str | None


def trunc_normal(
    key: torch.Tensor,
    spec: Target,
    /,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Any:
    """Draw normal numbers within `[a, b]`; see `fs.random.uniform` on layouts.

    Args:
        key: A key, int64 of shape `(2,)`.
        spec: An `fs.Spec`, a tensor, or a shape.
        mean: Mean of the normal distribution before it is truncated.
        std: Its standard deviation, above 0.
        a: Lower limit of the values, not of multiples of `std`.
        b: Upper limit.
        dtype: As for `fs.random.normal`.
        device: As for `fs.random.normal`.

    Returns:
        An `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor.

    Raises:
        ShardingError: If `key` is not a key, `std` is not positive, or no number of the dtype's
            precision is within the limits.

    The distribution of `torch.nn.init.trunc_normal_`; the values are those of
    `jax.random.truncated_normal` up to rounding, the inverse of the distribution function at
    uniform numbers: one draw for each element, without rejections.

    >>> import fshard as fs
    >>> fs.random.trunc_normal(fs.random.key(42), (3,), std=0.02, a=-0.04, b=0.04)
    tensor([-0.0005,  0.0089,  0.0056])
    """
    where, target = "fs.random.trunc_normal", float_target(spec, dtype, device)
    problems = target.problems(key)
    if not (_is_positive(std) and math.isfinite(mean) and a < b):
        problems.append(Problem(f"mean={mean}, std={std}, a={a}, b={b}",
                                "std must be positive, and a below b",
                                "std=0.02, a=-0.04, b=0.04, say"))  # fmt: skip
    raise_if(where, problems)
    low, high = (math.erf((limit - mean) / (std * math.sqrt(2))) for limit in (a, b))
    if high - low <= torch.finfo(target.dtype).eps * max(abs(low), abs(high)):
        fail(where, f"limits from {(a - mean) / std:.3g} to {(b - mean) / std:.3g} standard "
             f"deviations in {target.dtype}", "the limits must include some of the distribution, "
             "to the precision of the dtype", "limits on both sides of the mean, or "
             "dtype=torch.float64")  # fmt: skip

    def truncate(u: torch.Tensor) -> torch.Tensor:
        return u.erfinv().mul_(math.sqrt(2) * std).add_(mean).clamp_(a, b)

    return target.draw(where, key, DRAW_OPS.uniform, low, high, then=truncate)


def xavier_uniform(
    key: torch.Tensor, spec: Target, /, *, gain: float = 1.0, dtype: torch.dtype | None = None,
    device: Device = None,
) -> Any:  # fmt: skip
    """Draw uniform numbers of variance `gain**2 * 2 / (fan_in + fan_out)`.

    Args:
        key: A key, int64 of shape `(2,)`.
        spec: An `fs.Spec`, a tensor, or a shape, `(fan_out, fan_in, *kernel)`.
        gain: Factor of the standard deviation, `torch.nn.init.calculate_gain(nonlinearity)`.
        dtype: As for `fs.random.uniform`.
        device: As for `fs.random.uniform`.

    Returns:
        An `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor.

    Raises:
        ShardingError: If `key` is not a key, or the shape has fewer than two dims.

    The distribution of `torch.nn.init.xavier_uniform_` (Glorot and Bengio, 2010).

    >>> import fshard as fs
    >>> fs.random.xavier_uniform(fs.random.key(42), (2, 3))
    tensor([[-0.0247,  0.3939,  0.2547],
            [ 0.1337, -0.1081,  0.1881]])
    """
    where, target = "fs.random.xavier_uniform", float_target(spec, dtype, device)
    fans = _fans(where, key, target)
    return _draw_uniform(where, key, target, gain * math.sqrt(2.0 / sum(fans)))


def xavier_normal(
    key: torch.Tensor, spec: Target, /, *, gain: float = 1.0, dtype: torch.dtype | None = None,
    device: Device = None,
) -> Any:  # fmt: skip
    """Draw normal numbers of variance `gain**2 * 2 / (fan_in + fan_out)`.

    Args:
        key: A key, int64 of shape `(2,)`.
        spec: An `fs.Spec`, a tensor, or a shape, `(fan_out, fan_in, *kernel)`.
        gain: Factor of the standard deviation, `torch.nn.init.calculate_gain(nonlinearity)`.
        dtype: As for `fs.random.normal`.
        device: As for `fs.random.normal`.

    Returns:
        An `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor.

    Raises:
        ShardingError: If `key` is not a key, or the shape has fewer than two dims.

    The distribution of `torch.nn.init.xavier_normal_` (Glorot and Bengio, 2010).

    >>> import fshard as fs
    >>> fs.random.xavier_normal(fs.random.key(42), (1, 3))
    tensor([[-0.0200,  0.3303,  0.2091]])
    """
    where, target = "fs.random.xavier_normal", float_target(spec, dtype, device)
    fans = _fans(where, key, target)
    return _draw_normal(where, key, target, gain * math.sqrt(2.0 / sum(fans)))


def kaiming_uniform(
    key: torch.Tensor, spec: Target, /, *, a: float = 0, mode: str = "fan_in",
    nonlinearity: str = "leaky_relu", dtype: torch.dtype | None = None, device: Device = None,
) -> Any:  # fmt: skip
    """Draw uniform numbers of variance `gain**2 / fan`.

    Args:
        key: A key, int64 of shape `(2,)`.
        spec: An `fs.Spec`, a tensor, or a shape, `(fan_out, fan_in, *kernel)`.
        a: Negative slope of the leaky rectifier that follows.
        mode: `"fan_in"` keeps the variance of values, `"fan_out"` that of gradients.
        nonlinearity: Name of the function that follows, which determines the gain.
        dtype: As for `fs.random.uniform`.
        device: As for `fs.random.uniform`.

    Returns:
        An `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor.

    Raises:
        ShardingError: If `key` is not a key, the shape has fewer than two dims, or `mode` or
            `nonlinearity` is not one of PyTorch's.

    The distribution of `torch.nn.init.kaiming_uniform_` (He et al., arXiv 1502.01852).

    >>> import math
    >>> import fshard as fs
    >>> fs.random.kaiming_uniform(fs.random.key(42), (1, 3), a=math.sqrt(5))
    tensor([[-0.0130,  0.2076,  0.1343]])
    """
    where, target = "fs.random.kaiming_uniform", float_target(spec, dtype, device)
    std = _kaiming_std(where, key, target, a, mode, nonlinearity)
    return _draw_uniform(where, key, target, std)


def kaiming_normal(
    key: torch.Tensor, spec: Target, /, *, a: float = 0, mode: str = "fan_in",
    nonlinearity: str = "leaky_relu", dtype: torch.dtype | None = None, device: Device = None,
) -> Any:  # fmt: skip
    """Draw normal numbers of variance `gain**2 / fan`.

    Args:
        key: A key, int64 of shape `(2,)`.
        spec: An `fs.Spec`, a tensor, or a shape, `(fan_out, fan_in, *kernel)`.
        a: Negative slope of the leaky rectifier that follows.
        mode: `"fan_in"` keeps the variance of values, `"fan_out"` that of gradients.
        nonlinearity: Name of the function that follows, which determines the gain.
        dtype: As for `fs.random.normal`.
        device: As for `fs.random.normal`.

    Returns:
        An `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor.

    Raises:
        ShardingError: If `key` is not a key, the shape has fewer than two dims, or `mode` or
            `nonlinearity` is not one of PyTorch's.

    The distribution of `torch.nn.init.kaiming_normal_` (He et al., arXiv 1502.01852).

    >>> import fshard as fs
    >>> fs.random.kaiming_normal(fs.random.key(42), (1, 3), nonlinearity="relu")
    tensor([[-0.0231,  0.3814,  0.2414]])
    """
    where, target = "fs.random.kaiming_normal", float_target(spec, dtype, device)
    std = _kaiming_std(where, key, target, a, mode, nonlinearity)
    return _draw_normal(where, key, target, std)


def orthogonal(
    key: torch.Tensor, spec: Target, /, *, gain: float = 1, dtype: torch.dtype | None = None,
    device: Device = None,
) -> Any:  # fmt: skip
    """Draw a matrix with orthonormal rows, or columns if there are more rows, times `gain`.

    Every rank factorizes the global matrix, and keeps its shard: memory and time are those of the
    global matrix.

    Args:
        key: A key, int64 of shape `(2,)`.
        spec: An `fs.Spec`, a tensor, or a shape, `(rows, *columns)`; further dims are flattened.
        gain: Factor of the result.
        dtype: float32 or float64; by default that of the spec or tensor, or
            `torch.get_default_dtype()`.
        device: As for `fs.random.normal`.

    Returns:
        An `fs.Sharded` pair if `spec` is an `fs.Spec`, else a tensor.

    Raises:
        ShardingError: If `key` is not a key, the shape has fewer than two dims, or the dtype is
            not one of those above.

    The distribution of `torch.nn.init.orthogonal_` (Saxe et al., arXiv 1312.6120).

    >>> import torch
    >>> import fshard as fs
    >>> q = fs.random.orthogonal(fs.random.key(42), (2, 4))
    >>> torch.allclose(q @ q.T, torch.eye(2), atol=1e-6)
    True
    """
    where = "fs.random.orthogonal"
    dtypes = (torch.float32, torch.float64)
    target = DrawTarget(spec, dtype, device, dtypes, torch.get_default_dtype())
    _fans(where, key, target)
    rows, columns = target.shape[0], math.prod(target.shape[1:])

    def global_values(key: torch.Tensor) -> torch.Tensor:
        plain = DrawTarget((rows, columns), target.dtype, target.device, dtypes, target.dtype)
        drawn: torch.Tensor = plain.draw(where, key, DRAW_OPS.normal)
        q, r = torch.linalg.qr(drawn if rows >= columns else drawn.T)
        q = q * r.diagonal().sign()  # makes the distribution uniform (arXiv math-ph/0609050)
        values: torch.Tensor = (q if rows >= columns else q.T).mul(gain)
        return values.reshape(target.shape)

    if not isinstance(spec, Spec):
        if isinstance(spec, torch.Tensor) and target.device is None:
            target.device = spec.device
        return global_values(key)
    check_untraced(where, spec, "a shape, or a tensor whose layout to follow")
    cached: list[torch.Tensor] = []  # ranks of a simulation share the factorization

    def shard_values(
        key: torch.Tensor, start: tuple[int, ...], size: tuple[int, ...]
    ) -> torch.Tensor:
        if not cached:
            cached.append(global_values(key))
        box = tuple(slice(begin, begin + n) for begin, n in zip(start, size, strict=True))
        return cached[0][box].clone(memory_format=torch.contiguous_format)

    return create_pair(where, spec, key, shard_values)


# -- shared -----------------------------------------------------------------------------------


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _fans(where: str, key: torch.Tensor, target: DrawTarget) -> tuple[int, int]:
    """Return fan in and fan out of the global shape; raise `ShardingError` for its problems."""
    problems, shape = target.problems(key), target.shape
    if len(shape) < 2:
        problems.append(Problem(f"a shape of {len(shape)} dims",
                                "the shape must have at least 2 dims, (fan_out, fan_in, *kernel)",
                                "fs.random.normal(key, spec), or fs.zeros(spec) for a "
                                "bias"))  # fmt: skip
    raise_if(where, problems)
    kernel = math.prod(shape[2:])
    # A matrix without elements has a fan of 0, and no value depends on it.
    return max(shape[1] * kernel, 1), max(shape[0] * kernel, 1)


def _kaiming_std(
    where: str, key: torch.Tensor, target: DrawTarget, a: float, mode: str, nonlinearity: str
) -> float:
    fans = _fans(where, key, target)
    if mode not in _MODES:
        fail(where, f"mode={mode!r}", f"mode must be one of {', '.join(_MODES)}", 'mode="fan_in"')
    try:
        gain = torch.nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]
    except ValueError as error:
        fail(where, f"nonlinearity={nonlinearity!r}, a={a!r}", str(error),
             'nonlinearity="leaky_relu", a=0')  # fmt: skip
    return gain / math.sqrt(fans[_MODES.index(mode)])


_MODES: Sequence[str] = ("fan_in", "fan_out")


def _draw_uniform(where: str, key: torch.Tensor, target: DrawTarget, std: float) -> Any:
    bound = math.sqrt(3.0) * std
    return target.draw(where, key, DRAW_OPS.uniform, -bound, bound)


def _draw_normal(where: str, key: torch.Tensor, target: DrawTarget, std: float) -> Any:
    return target.draw(where, key, DRAW_OPS.normal, then=lambda drawn: drawn * std)
