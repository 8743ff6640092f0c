"""What PyTorch's functions that draw are with keys: of every one what it does, with the next key.

Each gets where its keys come from, and then the arguments of the function.
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
    exponential,
    kept_scale,
    normal,
    permutation,
    randint,
    uniform,
)  # fmt: skip
from fshard.run.transports.base import current_transport

__all__ = ["INSTEAD"]

Tensor = torch.Tensor
Keys = Callable[[], Tensor]
F = TypeVar("F", bound=Callable[..., Any])
INSTEAD: dict[str, Callable[..., Any]] = {}
"""By the name of a function what is done in its place."""


def _instead(*names: str) -> Callable[[F], F]:
    def keep(run: F) -> F:
        INSTEAD.update(dict.fromkeys(names, run))
        return run

    return keep


# -- dropout --------------------------------------------------------------------------------


@_instead("dropout")
def _dropout(keys: Keys, x: Tensor, p: float, train: bool) -> Tensor:
    # For the gradient a mask of booleans is kept, as PyTorch's kernel does: a byte an element.
    kept: Tensor = bernoulli(keys(), x, 1.0 - p)
    return x * kept * kept_scale(p)


@_instead("dropout_")
def _dropout_in_place(keys: Keys, x: Tensor, p: float, train: bool) -> Tensor:
    return x.mul_(bernoulli(keys(), x, 1.0 - p)).mul_(kept_scale(p))


@_instead("native_dropout")
def _native_dropout(keys: Keys, x: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
    kept: Tensor = bernoulli(keys(), x, 1.0 - p)
    return x * kept * kept_scale(p), kept


def _kept_features(keys: Keys, x: Tensor, p: float) -> Tensor:
    """One draw for each channel of each example."""
    shape = (*x.shape[:2], *(1,) * (x.dim() - 2))
    kept: Tensor = bernoulli(keys(), shape, 1.0 - p, device=x.device)
    return kept


@_instead("feature_dropout")
def _feature_dropout(keys: Keys, x: Tensor, p: float, train: bool) -> Tensor:
    return x * _kept_features(keys, x, p) * kept_scale(p)


@_instead("feature_dropout_")
def _feature_dropout_in_place(keys: Keys, x: Tensor, p: float, train: bool) -> Tensor:
    return x.mul_(_kept_features(keys, x, p)).mul_(kept_scale(p))


SATURATED = 1.7580993408473766
"""Minus the value that a SELU goes to, far below zero."""


def _alpha(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """What is dropped is where a SELU saturates; mean and variance stay (arXiv 1706.02515)."""
    a = 1.0 / math.sqrt((SATURATED * SATURATED * p + 1) * (1 - p)) if p < 1 else 0.0
    return torch.where(kept, x, -SATURATED) * a + SATURATED * a * p


@_instead("alpha_dropout")
def _alpha_dropout(keys: Keys, x: Tensor, p: float, train: bool) -> Tensor:
    return _alpha(x, bernoulli(keys(), x, 1.0 - p), p)


@_instead("alpha_dropout_")
def _alpha_dropout_in_place(keys: Keys, x: Tensor, p: float, train: bool) -> Tensor:
    return x.copy_(_alpha_dropout(keys, x, p, train))


@_instead("feature_alpha_dropout")
def _feature_alpha_dropout(keys: Keys, x: Tensor, p: float, train: bool) -> Tensor:
    return _alpha(x, _kept_features(keys, x, p), p)


@_instead("feature_alpha_dropout_")
def _feature_alpha_in_place(keys: Keys, x: Tensor, p: float, train: bool) -> Tensor:
    return x.copy_(_feature_alpha_dropout(keys, x, p, train))


@_instead("scaled_dot_product_attention")
def _attention(
    keys: Keys, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:  # fmt: skip
    # Rules are imported where one is asked for: they take a second.
    from fshard.ops.rules.nn.attention import attention_by_products

    def drop(weights: Tensor) -> Tensor:
        return _dropout(keys, weights, dropout_p, True)

    return attention_by_products(query, key, value, attn_mask, 0.0, is_causal, scale=scale,
                       enable_gqa=enable_gqa, drop=drop)  # fmt: skip


# -- tensors that are made ------------------------------------------------------------------


def _shape(size: tuple[Any, ...], named: Sequence[int] | None) -> tuple[int, ...]:
    if named is not None:
        return tuple(named)
    listed = len(size) == 1 and isinstance(size[0], list | tuple)
    return tuple(size[0]) if listed else size


def _made(dtype: torch.dtype | None, device: Any, default: torch.dtype) -> dict[str, Any]:
    place = torch.get_default_device() if device is None else device
    return {"dtype": dtype or default, "device": place}


@_instead("rand")
def _rand(
    keys: Keys, *shape: Any, size: Any = None, dtype: torch.dtype | None = None, device: Any = None
) -> Any:
    made = _made(dtype, device, torch.get_default_dtype())
    return uniform(keys(), _shape(shape, size), **made)


@_instead("randn")
def _randn(
    keys: Keys, *shape: Any, size: Any = None, dtype: torch.dtype | None = None, device: Any = None
) -> Any:
    made = _made(dtype, device, torch.get_default_dtype())
    return normal(keys(), _shape(shape, size), **made)


def _range(given: tuple[Any, ...], low: int | None, high: int | None) -> tuple[int, int]:
    """Two limits, of which the first may be left out."""
    if high is None:
        *before, high = given
    else:
        before = list(given)
    first = before[0] if before else 0 if low is None else low
    return first, high


def _integers(
    key: Tensor, to: Any, low: int, high: int, dtype: torch.dtype, device: Any = None
) -> Any:
    """`randint` in all dtypes: those of no integers hold what is drawn in int64."""
    if not dtype.is_floating_point and dtype != torch.bool:
        return randint(key, to, low, high, dtype=dtype, device=device)
    made = randint(key, to, low, high, dtype=torch.int64, device=device)
    most = 1 if dtype == torch.bool else int(torch.finfo(dtype).max)
    least = 0 if dtype == torch.bool else -most
    if low < least or high - 1 > most:
        fail("fs.random.keyed", f"numbers from {low} to {high} in {dtype}",
             f"it holds those from {least} to {most}", "dtype=torch.int64")  # fmt: skip
    return made.to(dtype)


@_instead("randint")
def _randint(
    keys: Keys, *given: Any, low: int | None = None, high: int | None = None, size: Any = None,
    dtype: torch.dtype | None = None, device: Any = None,
) -> Any:  # fmt: skip
    if size is None:
        *given, size = given  # type: ignore[assignment]
    limits = _range(tuple(given), low, high)
    made = _made(dtype, device, torch.int64)
    return _integers(keys(), tuple(size), *limits, made["dtype"], made["device"])


@_instead("randperm")
def _randperm(keys: Keys, n: int, *, dtype: torch.dtype | None = None, device: Any = None) -> Any:
    return permutation(keys(), n, **_made(dtype, device, torch.int64))


@_instead("rand_like")
def _rand_like(keys: Keys, x: Tensor, *, dtype: Any = None, device: Any = None) -> Any:
    return uniform(keys(), x, dtype=dtype, device=device)


@_instead("randn_like")
def _randn_like(keys: Keys, x: Tensor, *, dtype: Any = None, device: Any = None) -> Any:
    return normal(keys(), x, dtype=dtype, device=device)


@_instead("randint_like")
def _randint_like(
    keys: Keys, x: Tensor, *given: Any, low: int | None = None, high: int | None = None,
    dtype: torch.dtype | None = None, device: Any = None,
) -> Any:  # fmt: skip
    return _integers(keys(), x, *_range(given, low, high), dtype or x.dtype, device)


def _positive(where: str, name: str, value: Any, *, or_zero: bool = False) -> None:
    """Refuse a scale below zero, and zero itself where a scale of it says nothing."""
    if isinstance(value, int | float) and not (value > 0 or (or_zero and value == 0)):
        rule = f"{name} is above zero" + " or zero" * or_zero
        fail("fs.random.keyed", f"{where} with {name}={value}", rule, f"{name}=1.0, say")


@_instead("normal")
def _normal(
    keys: Keys, mean: Any = 0.0, std: Any = 1.0, size: Any = None, *, dtype: Any = None,
    device: Any = None,
) -> Any:  # fmt: skip
    _positive("torch.normal", "std", std, or_zero=True)
    if size is not None:
        return _randn(keys, size=size, dtype=dtype, device=device) * std + mean
    like = mean + std if isinstance(mean, Tensor) and isinstance(std, Tensor) else (
        mean if isinstance(mean, Tensor) else std)  # fmt: skip
    return mean + std * normal(keys(), like)


# -- tensors that are written ---------------------------------------------------------------


def _wide(x: Tensor) -> torch.dtype:
    """What thresholds and tails are drawn in: half precision draws 128 numbers, or 1024."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype


def _races(key: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Exponential numbers; in the place of zero, which none is, the middle of what becomes it."""
    drawn: Tensor = exponential(key, x, dtype=dtype)
    return drawn.clamp_(min=torch.finfo(dtype).eps / 2)


def _written(name: str, draw: Callable[..., Any]) -> None:
    """A method that overwrites its tensor with what `draw` makes of it."""

    def write(keys: Keys, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            made = draw(keys(), x.detach(), *args, **kwargs)
        return x.copy_(made)

    INSTEAD[name] = write


def _between(key: Tensor, x: Tensor, a: float = 0.0, b: float = 1.0, **names: float) -> Any:
    a, b = names.get("from", a), names.get("to", b)
    if a > b:
        fail("fs.random.keyed", f"uniform_ from {a} to {b}",
             "the first limit is not above the second", f"uniform_({b}, {a})")  # fmt: skip
    return uniform(key, x, minval=a, maxval=b)


def _whole(key: Tensor, x: Tensor, *given: int | None, **names: int | None) -> Tensor:
    limits = [*given] if len(given) != 1 else [0, *given]
    first = names.get("from", limits[0] if limits else 0)
    last = names.get("to", limits[1] if limits else None)
    if last is None and x.is_floating_point():  # all whole numbers that the dtype has
        last = (1 << round(1 - math.log2(torch.finfo(x.dtype).eps))) + 1
    elif last is None:
        last = 2 if x.dtype == torch.bool else torch.iinfo(x.dtype).max + 1
    made: Tensor = _integers(key, x, first or 0, last, x.dtype)
    return made


def _true(key: Tensor, p: Tensor) -> Tensor:
    drawn: Tensor = uniform(key, p, dtype=_wide(p)) < p
    return drawn


def _bernoulli_in(key: Tensor, x: Tensor, p: float | Tensor = 0.5) -> Tensor:
    if isinstance(p, Tensor):
        return _true(key, p.expand(x.shape))
    made: Tensor = bernoulli(key, x, p)
    return made


def _scaled(key: Tensor, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Any:
    _positive("normal_", "std", std, or_zero=True)
    return normal(key, x) * std + mean


def _log_normal(key: Tensor, x: Tensor, mean: float = 1.0, std: float = 2.0) -> Any:
    _positive("log_normal_", "std", std)
    return (normal(key, x) * std + mean).exp()


def _exponential(key: Tensor, x: Tensor, lambd: float = 1.0) -> Any:
    _positive("exponential_", "lambd", lambd)
    return _races(key, x, _wide(x)) / lambd


def _geometric(key: Tensor, x: Tensor, p: float) -> Any:
    if not 0 < p < 1:
        fail("fs.random.keyed", f"geometric_ with p={p}", "p is above 0 and below 1",
             "x.fill_(1) where p is 1: the first trial succeeds")  # fmt: skip
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (exponential(key, x, dtype=dtype) / -math.log1p(-p)).floor() + 1


def _cauchy(key: Tensor, x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Any:
    _positive("cauchy_", "sigma", sigma)
    dtype = _wide(x)
    drawn = uniform(key, x, minval=torch.finfo(dtype).eps, dtype=dtype) - 0.5
    return drawn.mul(math.pi).tan() * sigma + median


_OVERWRITING: dict[str, Callable[..., Any]] = {
    "uniform_": _between, "normal_": _scaled, "random_": _whole, "bernoulli_": _bernoulli_in,
    "exponential_": _exponential, "log_normal_": _log_normal, "geometric_": _geometric,
    "cauchy_": _cauchy,
}  # fmt: skip
for _name, _draw in _OVERWRITING.items():
    _written(_name, _draw)


# -- what draws by numbers that are given ---------------------------------------------------


@_instead("bernoulli")
def _bernoulli(keys: Keys, x: Tensor, p: float | None = None) -> Tensor:
    made = _true(keys(), x) if p is None else bernoulli(keys(), x, p)
    return made.to(x.dtype)


@_instead("multinomial")
def _multinomial(keys: Keys, x: Tensor, num_samples: int, replacement: bool = False) -> Any:
    """By the first of races: an exponential number over its weight; repeated, by the sums.

    In float64: of many classes the first finish within what float32 tells apart.
    """
    _check_weights(x, num_samples, replacement)
    wide = torch.float64
    if num_samples == 1 or not replacement:
        return (x / _races(keys(), x, wide)).topk(num_samples, -1).indices
    sums = x.cumsum(-1, dtype=wide)
    shape = (*x.shape[:-1], num_samples)
    drawn = uniform(keys(), shape, dtype=wide, device=x.device) * sums[..., -1:]
    return torch.searchsorted(sums, drawn, right=True).clamp_(max=x.shape[-1] - 1)


def _known(x: Tensor) -> bool:
    """Whether the host has the numbers of a tensor that is there once: not traced, or of a rank."""
    if torch.compiler.is_compiling() or current_transport() is not None:
        return False
    plain = type(x) is Tensor and not is_wrapped(x)
    return plain and x.device.type == "cpu" and current_dispatch_mode() is None


def _check_weights(x: Tensor, num_samples: int, replacement: bool) -> None:
    found, classes = [], x.shape[-1] if x.dim() else 0
    if not x.is_floating_point():
        found.append(Problem(f"multinomial of {x.dtype}",
                             "weights are of a dtype of floating point",
                             "weights.float()"))  # fmt: skip
    if num_samples < 1 or (num_samples > classes and not replacement):
        rule = f"without replacement there are from 1 to {classes}, and with it any number above 0"
        found.append(Problem(f"multinomial, {num_samples} of {classes} classes", rule,
                             "replacement=True, or fewer draws"))  # fmt: skip
    if not found and x.numel() and _known(x):
        good = (x >= 0).all(-1) & (x.sum(-1) > 0) & x.isfinite().all(-1)
        if not good.all():
            found.append(Problem(
                f"multinomial of weights from {x.min():g} to {x.max():g}",
                "weights are finite, none is below zero, and of every row one is above it",
                "weights.clamp(min=0), or logits.softmax(-1)"))  # fmt: skip
    raise_if("fs.random.keyed", found)


@_instead("rrelu")
def _rrelu(
    keys: Keys, x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Tensor:
    return torch.where(x > 0, x, x * _slopes(keys, x, lower, upper))


@_instead("rrelu_")
def _rrelu_in_place(
    keys: Keys, x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Tensor:
    return x.copy_(_rrelu(keys, x, lower, upper, training))


def _slopes(keys: Keys, x: Tensor, lower: float, upper: float) -> Tensor:
    drawn: Tensor = uniform(keys(), x, minval=lower, maxval=upper)
    return drawn
