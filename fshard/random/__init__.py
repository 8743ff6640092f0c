"""Random numbers from keys, as in `jax.random`: the same values on every layout and mesh.

A key is a small tensor made from a seed. A draw is a function of the key and of each element's
index in the global tensor; no generator is used or changed. Independent draws need different keys,
from `split` or `fold_in`. The design, the generator (Threefry-2x32) and the values are those of
`jax.random`.

PyTorch's own random functions, in `torch.nn.Dropout` say, draw with a key in `with keyed(key):`.

- `keys`: keys, and keys derived from them.
- `sampling`: draws.
- `initializers`: initial values of parameters, as for `torch.nn.init`.
- `keyed`: the context manager.
- `torch_replacements`: the functions that it replaces.

>>> import torch
>>> import fshard as fs
>>> mesh = fs.Mesh(dp=2, tp=2)
>>> weight_key, noise_key = fs.random.split(fs.random.key(0))
>>> w = fs.random.normal(weight_key, fs.Spec(mesh, fs.P(None, "tp"), shape=(4, 6)))
>>> torch.equal(fs.unshard(w), fs.random.normal(weight_key, (4, 6)))
True
"""

from __future__ import annotations

from fshard.random.initializers import (
    kaiming_normal,
    kaiming_uniform,
    orthogonal,
    trunc_normal,
    xavier_normal,
    xavier_uniform,
)
from fshard.random.keyed import keyed
from fshard.random.keys import fold_in, key, split
from fshard.random.sampling import (
    bernoulli,
    bits,
    dropout_mask,
    exponential,
    normal,
    permutation,
    randint,
    uniform,
)

__all__ = [
    "bernoulli", "bits", "dropout_mask", "exponential", "fold_in", "kaiming_normal",
    "kaiming_uniform", "key", "keyed", "normal", "orthogonal", "permutation", "randint", "split",
    "trunc_normal", "uniform", "xavier_normal", "xavier_uniform",
]  # fmt: skip
