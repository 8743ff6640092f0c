"""Replacements of PyTorch's random functions that draw with keys instead of a generator.

A replacement takes a function that returns the next key, then the arguments of PyTorch's function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fshard._torch.functorch import is_wrapped
from fshard._torch.modes import current_dispatch_mode
from fshard._util.errors import Problem, fail, raise_if
from fshard.random.sampling import (
    bernoulli,
    dropout_scale,
    exponential,
    normal,
    permutation,
    randint,
    uniform,
)  # fmt: skip
from fshard.run.transports.base import current_transport

Tensor = torch.Tensor
NextKey = Callable[[], Tensor]
F = TypeVar("F", bound=Callable[..., Any])
REPLACEMENTS: dict[str, Callable[..., Any]] = {}
"""Replacement of each function of PyTorch, by the function's name."""


def _replaces(name: str) -> Callable[[F], F]:
    def register(replacement: F) -> F:
        REPLACEMENTS[name] = replacement
        return replacement

    return register


# -- dropout --------------------------------------------------------------------------------


def _element_mask(next_key: NextKey, x: Tensor, p: float) -> Tensor:
    mask: Tensor = bernoulli(next_key(), x, 1.0 - p)
    return mask


def _channel_mask(next_key: NextKey, x: Tensor, p: float) -> Tensor:
    """Draw one boolean for each channel of each example."""
    shape = (*x.shape[:2], *(1,) * (x.dim() - 2))
    mask: Tensor = bernoulli(next_key(), shape, 1.0 - p, device=x.device)
    return mask


NEGATIVE_SELU_LIMIT = 1.7580993408473766
"""Minus the limit of a SELU at minus infinity."""


def _register_dropout(prefix: str, draw_mask: Callable[[NextKey, Tensor, float], Tensor]) -> None:
    """Register `dropout` and `alpha_dropout` with this prefix and mask."""

    def dropout(next_key: NextKey, x: Tensor, p: float, train: bool) -> Tensor:
        # Backward saves the boolean mask, one byte for each element, as PyTorch's kernel does.
        return x * draw_mask(next_key, x, p) * dropout_scale(p)

    def alpha_dropout(next_key: NextKey, x: Tensor, p: float, train: bool) -> Tensor:
        """Set dropped elements to the SELU limit, and keep mean and variance (1706.02515)."""
        limit, mask = NEGATIVE_SELU_LIMIT, draw_mask(next_key, x, p)
        a = 1.0 / math.sqrt((limit * limit * p + 1) * (1 - p)) if p < 1 else 0.0
        return torch.where(mask, x, -limit) * a + limit * a * p

    _replaces(f"{prefix}dropout")(dropout)
    _replaces(f"{prefix}alpha_dropout")(alpha_dropout)


_register_dropout("", _element_mask)
_register_dropout("feature_", _channel_mask)


@_replaces("native_dropout")
def _native_dropout(next_key: NextKey, x: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
    mask = _element_mask(next_key, x, p)
    return x * mask * dropout_scale(p), mask


@_replaces("scaled_dot_product_attention")
def _attention(
    next_key: NextKey, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:  # fmt: skip
    # Importing the rules takes a second; only this replacement needs them.
    from fshard.ops.rules.nn.attention import attention_by_products

    def drop(weights: Tensor) -> Tensor:
        return weights * _element_mask(next_key, weights, dropout_p) * dropout_scale(dropout_p)

    return attention_by_products(query, key, value, attn_mask, 0.0, is_causal, scale=scale,
                       enable_gqa=enable_gqa, drop=drop)  # fmt: skip


# -- factories ------------------------------------------------------------------------------


def _shape(sizes: tuple[Any, ...], size: Sequence[int] | None) -> tuple[int, ...]:
    """Return the shape of a factory call: `f(2, 3)`, `f((2, 3))` or `f(size=(2, 3))`."""
    if size is not None:
        return tuple(size)
    listed = len(sizes) == 1 and isinstance(sizes[0], list | tuple)
    return tuple(sizes[0]) if listed else sizes


def _factory(dtype: torch.dtype | None, device: Any, default: torch.dtype) -> dict[str, Any]:
    device = torch.get_default_device() if device is None else device
    return {"dtype": dtype or default, "device": device}


def _register_factory(name: str, draw: Callable[..., Any]) -> None:
    """Register a function that creates a tensor by `draw(key, shape, ...)`."""

    def create(
        next_key: NextKey, *shape: Any, size: Any = None, dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> Any:  # fmt: skip
        factory = _factory(dtype, device, torch.get_default_dtype())
        return draw(next_key(), _shape(shape, size), **factory)

    _replaces(name)(create)


_register_factory("rand", uniform)
_register_factory("randn", normal)


def _limits(positional: tuple[Any, ...], low: int | None, high: int | None) -> tuple[int, int]:
    """Return the limits of `randint`, of which the first may be omitted."""
    if high is None:
        *positional, high = positional  # type: ignore[assignment]
    return positional[0] if positional else 0 if low is None else low, high


def _integers(
    key: Tensor, to: Any, low: int, high: int, dtype: torch.dtype, device: Any = None
) -> Any:
    """Draw `randint` in any dtype; for other than integer dtypes, draw int64 and convert."""
    if not dtype.is_floating_point and dtype != torch.bool:
        return randint(key, to, low, high, dtype=dtype, device=device)
    drawn = randint(key, to, low, high, dtype=torch.int64, device=device)
    largest = 1 if dtype == torch.bool else int(torch.finfo(dtype).max)
    smallest = 0 if dtype == torch.bool else -largest
    if low < smallest or high - 1 > largest:
        fail("fs.random.keyed", f"integers from {low} to {high} in {dtype}",
             f"the limits must be within {smallest} to {largest}", "dtype=torch.int64")  # fmt: skip
    return drawn.to(dtype)


@_replaces("randint")
def _randint(
    next_key: NextKey, *args: Any, low: int | None = None, high: int | None = None,
    size: Any = None, dtype: torch.dtype | None = None, device: Any = None,
) -> Any:  # fmt: skip
    if size is None:
        *args, size = args  # type: ignore[assignment]
    factory = _factory(dtype, device, torch.int64)
    return _integers(next_key(), tuple(size), *_limits(tuple(args), low, high), **factory)


@_replaces("randperm")
def _randperm(
    next_key: NextKey, n: int, *, dtype: torch.dtype | None = None, device: Any = None
) -> Any:
    return permutation(next_key(), n, **_factory(dtype, device, torch.int64))


@_replaces("rand_like")
def _rand_like(next_key: NextKey, x: Tensor, *, dtype: Any = None, device: Any = None) -> Any:
    return uniform(next_key(), x, dtype=dtype, device=device)


@_replaces("randn_like")
def _randn_like(next_key: NextKey, x: Tensor, *, dtype: Any = None, device: Any = None) -> Any:
    return normal(next_key(), x, dtype=dtype, device=device)


@_replaces("randint_like")
def _randint_like(
    next_key: NextKey, x: Tensor, *args: Any, low: int | None = None, high: int | None = None,
    dtype: torch.dtype | None = None, device: Any = None,
) -> Any:  # fmt: skip
    return _integers(next_key(), x, *_limits(args, low, high), dtype or x.dtype, device)


def _positive(where: str, name: str, value: Any, *, or_zero: bool = False) -> None:
    """Raise if a scale is negative (or zero); a tensor is checked if the host has its values."""
    if isinstance(value, Tensor) and value.numel() and _is_readable(value):
        value = value.min().item()
    if isinstance(value, int | float) and not (value > 0 or (or_zero and value == 0)):
        rule = f"{name} must be positive" + " or zero" * or_zero
        fail("fs.random.keyed", f"{where} with {name}={value}", rule, f"{name}=1.0, say")


@_replaces("normal")
def _normal(
    next_key: NextKey, mean: Any = 0.0, std: Any = 1.0, size: Any = None, *, dtype: Any = None,
    device: Any = None,
) -> Any:  # fmt: skip
    _positive("torch.normal", "std", std, or_zero=True)
    if size is not None:
        factory = _factory(dtype, device, torch.get_default_dtype())
        return normal(next_key(), tuple(size), **factory) * std + mean
    like = mean + std if isinstance(mean, Tensor) and isinstance(std, Tensor) else (
        mean if isinstance(mean, Tensor) else std)  # fmt: skip
    return mean + std * normal(next_key(), like)


# -- in-place methods -----------------------------------------------------------------------


def _wide(x: Tensor) -> torch.dtype:
    """Return at least float32: half precision has too few uniform numbers, 128 or 1024."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype


def _positive_exponential(key: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Draw exponential numbers; 0 becomes the middle of the interval that rounds to it."""
    drawn: Tensor = exponential(key, x, dtype=dtype)
    return drawn.clamp_(min=torch.finfo(dtype).eps / 2)


def _register_filling(name: str, draw: Callable[..., Any]) -> None:
    """Register a method that overwrites its tensor with `draw(key, x, ...)`."""

    def fill(next_key: NextKey, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            values = draw(next_key(), x.detach(), *args, **kwargs)
        return x.copy_(values)

    _replaces(name)(fill)


def _fill_uniform(
    key: Tensor, x: Tensor, low: float = 0.0, high: float = 1.0, **limits: float
) -> Any:
    low, high = limits.get("from", low), limits.get("to", high)
    if low > high:
        fail("fs.random.keyed", f"uniform_ from {low} to {high}",
             "the first limit must not exceed the second", f"uniform_({high}, {low})")  # fmt: skip
    return uniform(key, x, minval=low, maxval=high)


def _fill_integers(key: Tensor, x: Tensor, *args: int | None, **limits: int | None) -> Tensor:
    args = args if len(args) != 1 else (0, *args)
    low = limits.get("from", args[0] if args else 0)
    high = limits.get("to", args[1] if args else None)
    if high is None and x.is_floating_point():  # all integers that the dtype represents
        high = (1 << round(1 - math.log2(torch.finfo(x.dtype).eps))) + 1
    elif high is None:
        high = 2 if x.dtype == torch.bool else torch.iinfo(x.dtype).max + 1
    values: Tensor = _integers(key, x, low or 0, high, x.dtype)
    return values


def _bernoulli_of(key: Tensor, p: Tensor) -> Tensor:
    """Draw booleans that are True with the probabilities in `p`."""
    values: Tensor = uniform(key, p, dtype=_wide(p)) < p
    return values


def _fill_bernoulli(key: Tensor, x: Tensor, p: float | Tensor = 0.5) -> Any:
    return _bernoulli_of(key, p.expand(x.shape)) if isinstance(p, Tensor) else bernoulli(key, x, p)


def _fill_normal(key: Tensor, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Any:
    _positive("normal_", "std", std, or_zero=True)
    return normal(key, x) * std + mean


def _fill_log_normal(key: Tensor, x: Tensor, mean: float = 1.0, std: float = 2.0) -> Any:
    _positive("log_normal_", "std", std)
    return (normal(key, x) * std + mean).exp()


def _fill_exponential(key: Tensor, x: Tensor, lambd: float = 1.0) -> Any:
    _positive("exponential_", "lambd", lambd)
    return _positive_exponential(key, x, _wide(x)) / lambd


def _fill_geometric(key: Tensor, x: Tensor, p: float) -> Any:
    if not 0 < p < 1:
        fail("fs.random.keyed", f"geometric_ with p={p}", "p must be above 0 and below 1",
             "x.fill_(1) for p=1: the first trial succeeds")  # fmt: skip
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (exponential(key, x, dtype=dtype) / -math.log1p(-p)).floor() + 1


def _fill_cauchy(key: Tensor, x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Any:
    _positive("cauchy_", "sigma", sigma)
    dtype = _wide(x)
    drawn = uniform(key, x, minval=torch.finfo(dtype).eps, dtype=dtype) - 0.5
    return drawn.mul(math.pi).tan() * sigma + median


_FILLING: dict[str, Callable[..., Any]] = {
    "uniform_": _fill_uniform, "normal_": _fill_normal, "random_": _fill_integers,
    "bernoulli_": _fill_bernoulli, "exponential_": _fill_exponential,
    "log_normal_": _fill_log_normal, "geometric_": _fill_geometric, "cauchy_": _fill_cauchy,
}  # fmt: skip
for _name, _draw in _FILLING.items():
    _register_filling(_name, _draw)


# -- functions of probabilities -------------------------------------------------------------


@_replaces("bernoulli")
def _bernoulli(next_key: NextKey, x: Tensor, p: float | None = None) -> Tensor:
    values = _bernoulli_of(next_key(), x) if p is None else bernoulli(next_key(), x, p)
    return values.to(x.dtype)


@_replaces("multinomial")
def _multinomial(next_key: NextKey, x: Tensor, num_samples: int, replacement: bool = False) -> Any:
    """Draw classes: the smallest exponential numbers over weights; with replacement, by sums.

    float64, because float32 cannot separate the smallest numbers of many classes.
    """
    _check_weights(x, num_samples, replacement)
    wide = torch.float64
    if num_samples == 1 or not replacement:
        return (x / _positive_exponential(next_key(), x, wide)).topk(num_samples, -1).indices
    sums = x.cumsum(-1, dtype=wide)
    shape = (*x.shape[:-1], num_samples)
    thresholds = uniform(next_key(), shape, dtype=wide, device=x.device) * sums[..., -1:]
    return torch.searchsorted(sums, thresholds, right=True).clamp_(max=x.shape[-1] - 1)


def _is_readable(x: Tensor) -> bool:
    """Return True if the host has the values of `x`: it is not traced, wrapped or one rank's."""
    if torch.compiler.is_compiling() or current_transport() is not None:
        return False
    plain = type(x) is Tensor and not is_wrapped(x)
    return plain and x.device.type == "cpu" and current_dispatch_mode() is None


def _check_weights(x: Tensor, num_samples: int, replacement: bool) -> None:
    problems, classes = [], x.shape[-1] if x.dim() else 0
    if not x.is_floating_point():
        problems.append(Problem(f"multinomial of {x.dtype}",
                             "weights must have a floating-point dtype",
                             "weights.float()"))  # fmt: skip
    if num_samples < 1 or (num_samples > classes and not replacement):
        rule = f"the number of draws must be in 1..{classes}, or with replacement at least 1"
        problems.append(Problem(f"multinomial, {num_samples} of {classes} classes", rule,
                             "replacement=True, or fewer draws"))  # fmt: skip
    if not problems and x.numel() and _is_readable(x):
        valid = (x >= 0).all(-1) & (x.sum(-1) > 0) & x.isfinite().all(-1)
        if not valid.all():
            problems.append(Problem(
                f"multinomial of weights from {x.min():g} to {x.max():g}",
                "weights must be finite and not negative, with a positive one in each row",
                "weights.clamp(min=0), or logits.softmax(-1)"))  # fmt: skip
    raise_if("fs.random.keyed", problems)


@_replaces("rrelu")
def _rrelu(
    next_key: NextKey, x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Tensor:
    slopes: Tensor = uniform(next_key(), x, minval=lower, maxval=upper)
    return torch.where(x > 0, x, x * slopes)


def _register_in_place(name: str) -> None:
    """Register the in-place form `name_` of a replacement."""
    replacement = REPLACEMENTS[name]

    def in_place(next_key: NextKey, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(replacement(next_key, x, *args, **kwargs))

    _replaces(f"{name}_")(in_place)


for _name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu"):
    _register_in_place(_name)
