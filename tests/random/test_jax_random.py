"""`fs.random` gives the numbers of `jax.random`: stored ones, and all where JAX is installed.

`python -m tests.random.test_jax_random`, where it is, writes the stored ones.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.helpers.random_cases import CASES, EXPECTED, Ours, expected

FIRST = 8
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def apart(made: torch.Tensor, wanted: torch.Tensor) -> int:
    """The most units in the last place by which numbers differ; zeros may have any sign."""
    assert made.shape == wanted.shape
    if not made.dtype.is_floating_point:
        return 0 if torch.equal(made.to(wanted.dtype), wanted) else 1 << 60
    whole = INTEGERS[made.dtype.itemsize]
    made, wanted = made + 0.0, wanted.to(made.dtype) + 0.0
    places = [torch.where(x.view(whole) < 0, -(x.abs().view(whole).long()), x.view(whole).long())
              for x in (made, wanted)]  # fmt: skip
    return int((places[0] - places[1]).abs().max()) if made.numel() else 0


@pytest.mark.parametrize("name", CASES)
def test_stored_numbers(name: str) -> None:
    case = CASES[name]
    made = case.draw(Ours).flatten()[:FIRST]
    wide = made.dtype if made.dtype.is_floating_point else None
    stored = expected()[name]
    if wide is None:
        assert [int(x) for x in made.tolist()] == stored
    else:
        assert apart(made, torch.tensor(stored, dtype=wide)) <= case.ulps


def theirs(name: str) -> torch.Tensor:
    """All numbers of a case as JAX gives them."""
    jax = pytest.importorskip("jax", reason="the extra `jax` is not installed")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_threefry_partitionable", True)
    import jax.numpy as jnp
    import numpy as np

    class Jax:
        """The world of a case in JAX: a key is its two words."""

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

    found = np.asarray(CASES[name].draw(Jax))
    if found.dtype == jnp.bfloat16:
        return torch.from_numpy(found.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(found.copy())


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_the_jax_at_hand(name: str) -> None:
    wanted = theirs(name)
    assert apart(CASES[name].draw(Ours), wanted) <= CASES[name].ulps
    assert [x.item() for x in wanted.flatten()[:FIRST]] == expected()[name]


if __name__ == "__main__":
    numbers = {name: [x.item() for x in theirs(name).flatten()[:FIRST]] for name in CASES}
    lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in numbers.items())
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
