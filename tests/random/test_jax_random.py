"""`fs.random` draws the values of `jax.random`: stored ones, and all where JAX is installed.

`python -m tests.random.test_jax_random` writes the stored ones, where JAX is installed.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from tests.helpers.draws.draw_cases import CASES, EXPECTED, FshardRandom, expected

FIRST = 8
# Without it the rounding of float16 depends on the CPU.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX2".strip()
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def max_ulps(values: torch.Tensor, reference: torch.Tensor) -> int:
    """Return the largest difference in units in the last place; -0.0 equals 0.0."""
    assert values.shape == reference.shape
    if not values.dtype.is_floating_point:
        return 0 if torch.equal(values.to(reference.dtype), reference) else 1 << 60
    integer = INTEGERS[values.dtype.itemsize]
    values, reference = values + 0.0, reference.to(values.dtype) + 0.0
    ordinals = [
        torch.where(x.view(integer) < 0, -x.abs().view(integer).long(), x.view(integer).long())
        for x in (values, reference)
    ]
    return int((ordinals[0] - ordinals[1]).abs().max()) if values.numel() else 0


@pytest.mark.parametrize("name", CASES)
def test_values_equal_stored_ones(name: str) -> None:
    case = CASES[name]
    values = case.draw(FshardRandom).flatten()[:FIRST]
    dtype = values.dtype if values.dtype.is_floating_point else None
    stored = expected()[name]
    if dtype is None:
        assert [int(x) for x in values.tolist()] == stored
    else:
        assert max_ulps(values, torch.tensor(stored, dtype=dtype)) <= case.ulps


def draw_with_jax(name: str) -> torch.Tensor:
    """Return all values of a case as JAX draws them."""
    jax = pytest.importorskip("jax", reason="the extra `jax` is not installed")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_threefry_partitionable", True)
    import jax.numpy as jnp
    import numpy as np

    class Jax:
        """Backend of a case in JAX; a key is its two words."""

        key, split, fold_in, permutation = map(
            staticmethod,
            (jax.random.PRNGKey, jax.random.split, jax.random.fold_in, jax.random.permutation),
        )
        bits, normal, randint, uniform, exponential = map(
            staticmethod,
            (jax.random.bits, jax.random.normal, jax.random.randint, jax.random.uniform,
             jax.random.exponential),
        )  # fmt: skip

        @staticmethod
        def bernoulli(key: Any, p: float, shape: Any) -> Any:
            return jax.random.bernoulli(key, jnp.float32(p), shape)

    values = np.asarray(CASES[name].draw(Jax))
    if values.dtype == jnp.bfloat16:
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(values.copy())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_values_equal_those_of_installed_jax(name: str) -> None:
    reference = draw_with_jax(name)
    assert max_ulps(CASES[name].draw(FshardRandom), reference) <= CASES[name].ulps
    assert [x.item() for x in reference.flatten()[:FIRST]] == expected()[name]


if __name__ == "__main__":
    numbers = {name: [x.item() for x in draw_with_jax(name).flatten()[:FIRST]] for name in CASES}
    lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in numbers.items())
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
