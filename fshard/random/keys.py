"""Keys of `fs.random`: Threefry-2x32 keys as int64 tensors of two words."""

from __future__ import annotations

import torch

from fshard._util.dtypes import is_inexact
from fshard._util.errors import Problem, fail, raise_if
from fshard.ops.prng.draw_ops import DRAW_OPS


def key(seed: int, /, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """Make a key from a seed.

    Args:
        seed: An integer of up to 64 bits.
        device: Device of the key. Keys on the host are the fastest: derived keys need no kernel,
            and a draw has a `device` of its own.

    Returns:
        An int64 tensor of shape `(2,)` with the two words of 32 bits of
        `jax.random.key(seed)`, under `jax_enable_x64` for seeds of more than 32 bits.

    Raises:
        ShardingError: If the seed is not an integer of 64 bits.

    Keys are those of Threefry-2x32 (Salmon et al., SC 2011) as `jax.random` uses it.

    >>> import fshard as fs
    >>> fs.random.key(42)
    tensor([ 0, 42])
    """
    if type(seed) is not int or not -(1 << 63) <= seed < 1 << 64:
        fail("fs.random.key", f"{seed!r}", "a seed must be an integer of 64 bits",
             "fs.random.key(0), say; fs.random.fold_in(key, number) takes a tensor")  # fmt: skip
    return torch.tensor([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], device=device)


def split(key: torch.Tensor, num: int = 2, /) -> torch.Tensor:
    """Derive `num` independent keys from one, as `jax.random.split` does.

    Args:
        key: A key, int64 of shape `(2,)`.
        num: Number of keys.

    Returns:
        Keys, int64 of shape `(num, 2)`; the same as those of JAX.

    Raises:
        ShardingError: If `key` is not a key or `num` is negative.

    >>> import fshard as fs
    >>> first, second = fs.random.split(fs.random.key(42))
    >>> first
    tensor([1832780943,  270669613])
    """
    problems = key_problems(key)
    if type(num) is not int or num < 0:
        problems.append(Problem(f"num={num!r}", "num must be an integer >= 0", "num=2, say"))
    raise_if("fs.random.split", problems)
    return DRAW_OPS.split(key, num)  # type: ignore[no-any-return]


def fold_in(key: torch.Tensor, data: int | torch.Tensor, /) -> torch.Tensor:
    """Derive a key from a key and an integer of 32 bits, as `jax.random.fold_in` does.

    In a `shard_map`, `fold_in(key, fs.axis_index("dp"))` differs between the ranks along `dp`.

    Args:
        key: A key, int64 of shape `(2,)`.
        data: An integer from 0 to 4294967295, or a tensor of integers.

    Returns:
        A key, int64 of shape `(2,)`; for a tensor `data`, keys of shape `(*data.shape, 2)`.

    Raises:
        ShardingError: If `key` is not a key, or `data` is out of range or not of integers.

    >>> import fshard as fs
    >>> fs.random.fold_in(fs.random.key(42), 7)
    tensor([2547012911, 1371500959])
    """
    problems = key_problems(key)
    if isinstance(data, torch.Tensor):
        if is_inexact(data) or data.dtype == torch.bool:
            problems.append(Problem(f"data of {data.dtype}", "data must be of integers",
                                    "data.long()"))  # fmt: skip
    elif type(data) is not int or not 0 <= data < 1 << 32:
        problems.append(Problem(f"data={data!r}", "data must be an integer from 0 to 4294967295",
                                "fold in its 32 lower bits, and then the others"))  # fmt: skip
    raise_if("fs.random.fold_in", problems)
    return DRAW_OPS.fold_in(key, data)  # type: ignore[no-any-return]


def key_problems(key: object) -> list[Problem]:
    """Return the problems of a value passed as a key."""
    rule = "a key must be an int64 tensor of two words of 32 bits"
    if not isinstance(key, torch.Tensor):
        return [Problem(f"a key that is {type(key).__name__}", rule, "fs.random.key(0)")]
    if key.dtype != torch.int64:
        return [Problem(f"a key of {key.dtype}", rule, "key.long() & 0xFFFFFFFF")]
    if key.shape != (2,):
        many = key.ndim > 1 and key.shape[-1] == 2
        fix = "torch.vmap over the keys, or one of them: keys[0]" if many else "fs.random.key(0)"
        return [Problem(f"a key of shape {tuple(key.shape)}", rule, fix)]
    return []
