"""Random numbers by key: `fs.random`. The same on one device, and on every layout and mesh.

A key is a small tensor, made of a seed; a draw is a function of the key and of where an element
is in the whole tensor, and of nothing else: no generator is asked or changed. What is to be drawn
independently takes another key: `split`, or `fold_in` of a number. The design and the generator,
Threefry-2x32, are those of `jax.random`, and so are the numbers.

Code that draws by itself, as `torch.nn.Dropout` does, draws by a key in `with keyed(key):`.

>>> import fshard as fs
>>> mesh = fs.Mesh(dp=2, tp=2)
>>> weights, noise = split(key(0))
>>> w = normal(weights, fs.Spec(mesh, fs.P(None, "tp"), shape=(4, 6)))
>>> torch.equal(fs.unshard(w), normal(weights, (4, 6)))
True
"""

from __future__ import annotations

import torch  # noqa: F401 - the example draws with it

from fshard.random.keyed import keyed
from fshard.random.sampling import (
    bernoulli,
    bits,
    dropout_mask,
    exponential,
    fold_in,
    key,
    normal,
    permutation,
    randint,
    split,
    uniform,
)

__all__ = [
    "bernoulli", "bits", "dropout_mask", "exponential", "fold_in", "key", "keyed",
    "normal", "permutation", "randint", "split", "uniform",
]  # fmt: skip
