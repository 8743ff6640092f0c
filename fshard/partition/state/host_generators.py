"""State of Python's and NumPy's random generators, from which a traced function must not draw."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fshard._util.errors import fail

_NUMPY_TYPES = frozenset(("Generator", "RandomState"))


def is_generator(value: Any) -> bool:
    """Return True for a random generator of Python or NumPy.

    >>> is_generator(random.Random(0)), is_generator(random.SystemRandom())
    (True, False)
    """
    kind = type(value)
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)  # which has no state
    return kind.__name__ in _NUMPY_TYPES and kind.__module__.startswith("numpy.random.")


@contextmanager
def refuse_draws(generators: Sequence[Any], where: str) -> Iterator[None]:
    """Raise `ShardingError` after a block that moved the state of a generator.

    Args:
        generators: those to compare beside the global ones of `random` and `numpy.random`.
        where: name of the traced function in errors.
    """
    everything = [("random", random.random.__self__)]  # type: ignore[attr-defined]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        everything.append(("numpy.random", numpy.random.random_sample.__self__))
    everything += [(f"a {type(x).__module__}.{type(x).__name__}", x) for x in generators]
    states = [pickle.dumps(generator) for _, generator in everything]
    yield
    for (name, generator), state in zip(everything, states, strict=True):
        if pickle.dumps(generator) != state:
            fail(where, f"a function that draws from {name}",
                 "draws must be PyTorch's: the function is traced once, and the values that "
                 "others return would be the same in all later calls",
                 "draw with torch.rand(()), under fs.random.keyed for layouts that agree; or draw "
                 "before the call and pass the values as arguments")  # fmt: skip
