"""Draws that `jax.random` and `fs.random` both make, and the first values that JAX gives.

A case is a function of a backend: `FshardRandom`, or JAX in `test_jax_random.py`, which compares
all values where JAX is installed and checks that `expected.json` is up to date.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fshard as fs

__all__ = ["CASES", "DrawCase", "FshardRandom", "expected"]

EXPECTED = Path(__file__).with_name("expected.json")
SHAPE = (3, 1000)


def expected() -> dict[str, list[Any]]:
    """Return the first values that JAX gave, by case."""
    values: dict[str, list[Any]] = json.loads(EXPECTED.read_text())
    return values


class FshardRandom:
    """Backend of a case in this library."""

    key, split, fold_in, permutation = map(
        staticmethod,
        (fs.random.key, fs.random.split, fs.random.fold_in, fs.random.permutation),
    )

    @staticmethod
    def bits(key: Any, shape: Any, dtype: str) -> torch.Tensor:
        values: torch.Tensor = fs.random.bits(key, shape, dtype=getattr(torch, dtype))
        return values

    @staticmethod
    def uniform(key: Any, shape: Any, dtype: str, low: float = 0.0, high: float = 1.0) -> Any:
        limits = {"minval": low, "maxval": high}
        return fs.random.uniform(key, shape, dtype=getattr(torch, dtype), **limits)

    @staticmethod
    def normal(key: Any, shape: Any, dtype: str) -> Any:
        return fs.random.normal(key, shape, dtype=getattr(torch, dtype))

    @staticmethod
    def exponential(key: Any, shape: Any, dtype: str) -> Any:
        return fs.random.exponential(key, shape, dtype=getattr(torch, dtype))

    @staticmethod
    def randint(key: Any, shape: Any, low: int, high: int, dtype: str) -> Any:
        return fs.random.randint(key, shape, low, high, dtype=getattr(torch, dtype))

    @staticmethod
    def bernoulli(key: Any, p: float, shape: Any) -> Any:
        return fs.random.bernoulli(key, shape, p)


@dataclass(frozen=True)
class DrawCase:
    """Draw with a backend; values may differ by `ulps` units in the last place."""

    draw: Callable[[Any], Any]
    ulps: int = 0


def _cases() -> dict[str, DrawCase]:
    cases = {
        "a key": DrawCase(lambda w: w.key(42)),
        "a key of a long seed": DrawCase(lambda w: w.key((1 << 40) + 5)),
        "a key of a negative seed": DrawCase(lambda w: w.key(-3)),
        "split": DrawCase(lambda w: w.split(w.key(42), 30)),
        "split of what was split": DrawCase(lambda w: w.split(w.split(w.key(1))[1])),
        "fold_in 0": DrawCase(lambda w: w.fold_in(w.key(42), 0)),
        "fold_in 7": DrawCase(lambda w: w.fold_in(w.key(42), 7)),
        "fold_in of all ones": DrawCase(lambda w: w.fold_in(w.key(42), 0xFFFFFFFF)),
        "bernoulli": DrawCase(lambda w: w.bernoulli(w.key(5), 0.3, SHAPE)),
    }
    for n in (0, 1, 2, 10, 5000):
        cases[f"permutation of {n}"] = DrawCase(lambda w, n=n: w.permutation(w.key(4), n))
    for width in (8, 16, 32, 64):
        cases[f"uint{width}"] = DrawCase(lambda w, d=f"uint{width}": w.bits(w.key(42), SHAPE, d))
    for d, ulps in (("bfloat16", 1), ("float16", 1), ("float32", 16), ("float64", 100)):
        cases |= {
            f"uniform {d}": DrawCase(lambda w, d=d: w.uniform(w.key(42), SHAPE, d)),
            f"normal {d}": DrawCase(lambda w, d=d: w.normal(w.key(42), SHAPE, d), ulps),
            f"exponential {d}": DrawCase(
                lambda w, d=d: w.exponential(w.key(1), SHAPE, d), 4 + 2 * ulps
            ),
        }
    for d in ("bfloat16", "float16", "float32", "float64"):
        cases |= {
            f"uniform {d} between": DrawCase(
                lambda w, d=d: w.uniform(w.key(3), SHAPE, d, 0.1, 0.3)
            ),
            f"uniform {d} around 0": DrawCase(
                lambda w, d=d: w.uniform(w.key(3), SHAPE, d, -2.5, 7.0)
            ),
        }
    ranges = {
        "int8": [(0, 10), (-128, 128)], "uint8": [(3, 100), (0, 256)], "int16": [(3, 20000)],
        "int32": [(0, 10), (-(2**31), 2**31), (-(2**31), 2**31 - 1), (5, 100000)],
        "int64": [(0, 10), (0, 3 * 10**9), (-(2**63), 2**63 - 1), (0, 5 * 10**18)],
    }  # fmt: skip
    for d, limits in ranges.items():
        for low, high in limits:
            cases[f"randint {d} {low} {high}"] = DrawCase(
                lambda w, a=low, b=high, d=d: w.randint(w.key(42), SHAPE, a, b, d)
            )
    return cases


CASES = _cases()
