"""Numbers drawn by a key: `fs.random`'s functions, on layouts and on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Sharded, Spec
from fshard.layout.validation import as_ints
from fshard.ops.prng.draw_ops import DRAW_OPS, FLOAT_BITS, INTEGER_DTYPES, SIGNED_DTYPES
from fshard.ops.strategy.local_call import rank_on_mesh
from fshard.ops.trace.trace import trace_depth
from fshard.program.program import Program
from fshard.program.steps import AllSlice, Step
from fshard.run.execute import run_typed_hook
from fshard.run.global_tensors import _laying_out
from fshard.run.transports.base import current_transport

__all__ = [
    "Target", "bernoulli", "bits", "dropout_mask", "exponential", "fold_in", "kept_scale", "key",
    "normal", "permutation", "randint", "split", "uniform",
]  # fmt: skip

Target = Spec | torch.Tensor | Sequence[int] | int
"""What is drawn: a layout, a tensor of one's own shape, dtype and layout, or a shape."""
Draw = Callable[[Sequence[int], Sequence[int]], torch.Tensor]
"""Draws a part of a tensor: from where on, and of which size."""


# -- keys -----------------------------------------------------------------------------------


def key(seed: int, /, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """A key from a seed of 64 bits: an int64 tensor of two words of 32 bits.

    The words of `jax.random.key(seed)`, with `jax_enable_x64` for seeds that need more than 32
    bits. It is best left on the host, where the keys that follow take no kernel; a draw has a
    `device` of its own. Raises `ShardingError` for a seed of more bits.

    >>> key(42)
    tensor([ 0, 42])
    """
    if type(seed) is not int or not -(1 << 63) <= seed < 1 << 64:
        fail("fs.random.key", f"{seed!r}", "a seed is a whole number of 64 bits",
             "fs.random.key(0), say; fs.random.fold_in(key, number) takes a tensor")  # fmt: skip
    return torch.tensor([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], device=device)


def split(key: torch.Tensor, num: int = 2, /) -> torch.Tensor:
    """`num` keys that follow from one, each a row: `(num, 2)`. `jax.random.split`.

    >>> first, second = split(key(42))
    >>> first
    tensor([1832780943,  270669613])
    """
    problems = _key_problems(key)
    if type(num) is not int or num < 0:
        problems.append(Problem(f"num={num!r}", "it is a number of keys", "num=2, say"))
    raise_if("fs.random.split", problems)
    return DRAW_OPS.split(key, num)  # type: ignore[no-any-return]


def fold_in(key: torch.Tensor, data: int | torch.Tensor, /) -> torch.Tensor:
    """The key that follows from a key and a number of 32 bits. `jax.random.fold_in`.

    A tensor of whole numbers makes as many keys, the words in the last dim. In a `shard_map`
    `fold_in(key, fs.axis_index("dp"))` is another key on every rank along `dp`.

    >>> fold_in(key(42), 7)
    tensor([2547012911, 1371500959])
    """
    problems = _key_problems(key)
    if isinstance(data, torch.Tensor):
        if data.dtype.is_floating_point or data.dtype.is_complex or data.dtype == torch.bool:
            problems.append(Problem(f"data of {data.dtype}", "it is of whole numbers",
                                    "data.long()"))  # fmt: skip
    elif type(data) is not int or not 0 <= data < 1 << 32:
        problems.append(Problem(f"data={data!r}", "it is a whole number from 0 to 4294967295",
                                "fold in its 32 lower bits, and then the others"))  # fmt: skip
    raise_if("fs.random.fold_in", problems)
    return DRAW_OPS.fold_in(key, data)  # type: ignore[no-any-return]


def _key_problems(key: object) -> list[Problem]:
    rule = "a key is an int64 tensor of two words of 32 bits"
    if not isinstance(key, torch.Tensor):
        return [Problem(f"a key that is {type(key).__name__}", rule, "fs.random.key(0)")]
    if key.dtype != torch.int64:
        return [Problem(f"a key of {key.dtype}", rule, "key.long() & 0xFFFFFFFF")]
    if key.shape != (2,):
        many = key.ndim > 1 and key.shape[-1] == 2
        fix = "torch.vmap over the keys, or one of them: keys[0]" if many else "fs.random.key(0)"
        return [Problem(f"a key of shape {tuple(key.shape)}", rule, fix)]
    return []


# -- numbers --------------------------------------------------------------------------------


def uniform(
    key: torch.Tensor,
    spec: Target,
    /,
    *,
    minval: float = 0.0,
    maxval: float = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Numbers from `minval` to `maxval`, which is not one of them: of a spec a pair, else a tensor.

    Every element follows from the key and its place in the whole tensor: a rank draws its part
    alone, and `fs.unshard(uniform(key, spec))` is `uniform(key, spec.shape)` to the bit, on every
    layout. Along unreduced axes coordinate 0 holds the numbers, as with `fs.shard`. In the place
    of the spec a shape draws on one device; a tensor gives its shape, dtype, device, and in
    `fs.partition` its layout. `dtype` is one of float16, bfloat16, float32 and float64, PyTorch's
    default if nothing says otherwise; `device` is by default PyTorch's, or that of a key which is
    not on the host.

    The numbers are `jax.random.uniform`'s; float64 to rounding where the limits are given.
    Raises `ShardingError` for what is no key and for other dtypes.

    >>> import fshard as fs
    >>> spec = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))
    >>> uniform(key(42), spec).local
    (tensor([0.4887, 0.6798]), tensor([0.6163, 0.5610]))
    >>> uniform(key(42), (4,))
    tensor([0.4887, 0.6798, 0.6163, 0.5610])
    """
    where, to = "fs.random.uniform", _To(spec, dtype, device, FLOAT_BITS, torch.get_default_dtype())
    problems, limits = to.problems(key), {"minval": minval, "maxval": maxval}
    many = {name: getattr(each, "shape", ()) for name, each in limits.items()}
    if any(many.values()):
        given = ", ".join(f"{name} of shape {tuple(size)}" for name, size in many.items() if size)
        fix = "minval + (maxval - minval) * fs.random.uniform(key, spec)"
        problems.append(Problem(given, "limits are numbers, the same for all elements", fix))
    elif not math.isfinite(maxval - minval):
        problems.append(Problem(f"minval={minval}, maxval={maxval}", "they are finite numbers",
                                "minval=0.0, maxval=1.0"))  # fmt: skip
    raise_if(where, problems)
    return to.drawn(where, key, DRAW_OPS.uniform, float(minval), float(maxval))


def normal(
    key: torch.Tensor,
    spec: Target,
    /,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Numbers of the normal distribution, mean 0 and variance 1; arguments as of `uniform`.

    `jax.random.normal`'s to some units in the last place: they are of the same uniform numbers,
    by PyTorch's inverse of the error function.

    >>> normal(key(42), (3,))
    tensor([-0.0283,  0.4671,  0.2957])
    """
    where, to = "fs.random.normal", _To(spec, dtype, device, FLOAT_BITS, torch.get_default_dtype())
    raise_if(where, to.problems(key))
    return to.drawn(where, key, DRAW_OPS.normal)


def exponential(
    key: torch.Tensor,
    spec: Target,
    /,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Numbers of the exponential distribution of rate 1; arguments as of `uniform`.

    `jax.random.exponential`'s to rounding.

    >>> exponential(key(42), (3,))
    tensor([0.6708, 1.1388, 0.9578])
    """
    where, to = "fs.random.exponential", _To(spec, dtype, device, FLOAT_BITS,
                                             torch.get_default_dtype())  # fmt: skip
    raise_if(where, to.problems(key))
    return to.drawn(where, key, DRAW_OPS.uniform, 0.0, 1.0, then=lambda u: -torch.log1p(-u))


def randint(
    key: torch.Tensor,
    spec: Target,
    low: int,
    high: int,
    /,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Whole numbers from `low` to `high`, which is not one of them; else as `uniform`.

    `jax.random.randint`'s numbers: remainders, of bits enough that small spans are as good as
    even. `dtype` is of integers, int64 if nothing says otherwise. Raises `ShardingError` for an
    empty range, and one that the dtype does not hold.

    >>> randint(key(42), (6,), 0, 10)
    tensor([5, 8, 3, 1, 5, 6])
    """
    where, to = "fs.random.randint", _To(spec, dtype, device, INTEGER_DTYPES, torch.int64)
    problems, limits = to.problems(key), as_ints((low, high))
    if limits is None:
        problems.append(Problem(f"from {low} to {high}", "limits are whole numbers",
                                "randint(key, spec, 0, 2), say"))  # fmt: skip
    elif not problems:
        low, high = limits
        held = torch.iinfo(to.dtype)
        if not held.min <= low < high <= held.max + 1:
            problems.append(Problem(
                f"from {low} to {high} in {to.dtype}",
                f"the range is not empty, and within {held.min} to {held.max + 1}",
                "randint(key, spec, 0, 2), say"))  # fmt: skip
    raise_if(where, problems)
    return to.drawn(where, key, DRAW_OPS.randint, low, high - 1)


def bernoulli(
    key: torch.Tensor,
    spec: Target,
    p: float = 0.5,
    /,
    *,
    device: torch.device | str | None = None,
) -> Any:
    """True with probability `p`, as booleans; else as `uniform`. `jax.random.bernoulli`.

    Where `p` is a tensor, `uniform(key, p.float()) < p`: numbers of half precision are too few.

    >>> bernoulli(key(42), (3,), 0.5)
    tensor([ True, False, False])
    """
    where = "fs.random.bernoulli"
    kept = torch.bool if isinstance(spec, torch.Tensor) else None
    to = _To(spec, kept, device, (torch.bool,), torch.bool)
    raise_if(where, to.problems(key) + _rate_problems(p))
    return to.drawn(where, key, DRAW_OPS.bernoulli, float(p))


def dropout_mask(
    key: torch.Tensor,
    spec: Target,
    p: float,
    /,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """What drops with probability `p`: zeros, and `1 / (1 - p)` in what is kept; else as `uniform`.

    `x * dropout_mask(key, x, p)` is a dropout that drops the same on every layout, as Flax's does
    with this key. A module that drops by itself does so by a key in `fs.random.keyed`.

    >>> dropout_mask(key(42), (4,), 0.5)
    tensor([2., 0., 0., 0.])
    """
    where, to = "fs.random.dropout_mask", _To(spec, dtype, device, FLOAT_BITS,
                                              torch.get_default_dtype())  # fmt: skip
    raise_if(where, to.problems(key) + _rate_problems(p))
    return to.drawn(where, key, DRAW_OPS.bernoulli, 1.0 - p, then=lambda kept: kept * kept_scale(p))


def kept_scale(p: float) -> float:
    """What elements that a dropout keeps are multiplied by, so that the mean stays."""
    return 1.0 / (1.0 - p) if p < 1 else 0.0


def bits(
    key: torch.Tensor,
    spec: Target,
    /,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Random bits, all of an integer's; `dtype` is uint32 if nothing says otherwise.

    `jax.random.bits`, and the same bits in the signed dtypes. Else as `uniform`.

    >>> bits(key(42), (2,), dtype=torch.int32)
    tensor([ 2098992034, -1375260455], dtype=torch.int32)
    """
    where, to = "fs.random.bits", _To(spec, dtype, device, SIGNED_DTYPES, torch.uint32)
    raise_if(where, to.problems(key))
    return to.drawn(where, key, DRAW_OPS.bits)


def permutation(
    key: torch.Tensor,
    spec: Spec | int,
    /,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """The numbers below `n` in another order: of a number `n`, or of a spec of one dim.

    `jax.random.permutation`'s: sorted by random bits. A sort needs all of them, so every rank
    makes the whole, and keeps its part.

    >>> permutation(key(42), 5)
    tensor([4, 2, 3, 0, 1])
    """
    to = _To(spec, dtype, device, (torch.int32, torch.int64), torch.int64)
    problems = to.problems(key)
    if len(to.shape) != 1:
        problems.append(Problem(f"a shape of {len(to.shape)} dims", "numbers stand in one dim",
                                "permutation(key, n), and take rows by it"))  # fmt: skip
    raise_if("fs.random.permutation", problems)
    return to.drawn("fs.random.permutation", key, DRAW_OPS.permutation)


def _rate_problems(p: object) -> list[Problem]:
    if isinstance(p, int | float) and 0 <= p <= 1:
        return []
    rule = "p is a number from 0 to 1"
    if isinstance(p, torch.Tensor):
        fix = "fs.random.uniform(key, p.float()) < p where it is a tensor"
        return [Problem(f"p of shape {tuple(p.shape)}", rule, fix)]
    return [Problem(f"p={p!r}", rule, "p=0.5, say")]


# -- where they lie -------------------------------------------------------------------------


class _To:
    """What is drawn: its shape and dtype, where it lies, and what it is like."""

    def __init__(
        self, target: Target, dtype: torch.dtype | None, device: torch.device | str | None,
        dtypes: Iterable[torch.dtype], default: torch.dtype,
    ) -> None:  # fmt: skip
        self.target, self.asked, self.dtypes = target, dtype, tuple(dtypes)
        self.device = None if device is None else torch.device(device)
        if isinstance(target, Spec | torch.Tensor):
            self.shape: tuple[int, ...] = tuple(target.shape)
            self.dtype = dtype or target.dtype
        else:
            listed = (target,) if isinstance(target, int) else target
            shape = as_ints(listed)
            self.shape, self.dtype = (-1,) if shape is None else shape, dtype or default

    def problems(self, key: object) -> list[Problem]:
        """What is wrong with the arguments that all draws have."""
        found, names = _key_problems(key), [str(each) for each in self.dtypes]
        if isinstance(self.target, Spec) and self.asked not in (None, self.target.dtype):
            found.append(Problem(f"dtype={self.asked} for {self.target}", "a spec has a dtype",
                                 f"spec.replace(dtype={self.asked})"))  # fmt: skip
        if self.dtype not in self.dtypes:
            found.append(Problem(f"{self.dtype}", f"it draws {', '.join(names)}",
                                 f"dtype={names[-1]}, or a spec of it"))  # fmt: skip
        if any(size < 0 for size in self.shape):
            found.append(Problem(f"{self.target!r}", "it draws a spec, a tensor's like, or a shape",
                                 "fs.Spec(mesh, P(...), shape=...), or (8, 16)"))  # fmt: skip
        return found

    def drawn(
        self, where: str, key: torch.Tensor, op: Any, *arguments: Any,
        then: Callable[[torch.Tensor], torch.Tensor] = lambda made: made,
    ) -> Any:  # fmt: skip
        """The draw, changed by `then`: a pair of a spec, a tensor of anything else."""
        shape, like = (
            list(self.shape),
            self.target if isinstance(self.target, torch.Tensor) else None,
        )
        place = self.device
        if place is None and like is None and key.device.type == "cpu":
            # What a mode says is the default is not seen in an operation; of none it is the key's.
            default = torch.empty(0).device
            place = default if default.type != "cpu" else None
        made = {"dtype": self.dtype, "device": place}
        if isinstance(self.target, Spec):
            spec = self.target

            def part(key: torch.Tensor, rank: int) -> torch.Tensor:
                start, size = list(spec.offsets(rank)), list(spec.local_shape(rank))
                return then(op(None, key, shape, start, size, *arguments, **made))

            return _pair(where, key, spec, part)
        return then(op(like, key, shape, [0] * len(shape), shape, *arguments, **made))


def _pair(
    where: str, key: torch.Tensor, spec: Spec, part: Callable[[torch.Tensor, int], torch.Tensor]
) -> Sharded:
    """The parts of the ranks that this process is, as one pair."""
    if trace_depth():
        fail(where, f"{spec} in a function that is traced",
             "it is traced on whole tensors; fs.partition finds how they lie",
             "a tensor that the draw is to lie as, or a shape; fs.constrain(x, P(...)) asks for "
             "a layout")  # fmt: skip
    if current_transport() is None:
        drawn: dict[Any, torch.Tensor] = {}
        shards = []
        for rank in spec.mesh.ranks:
            at = spec.offsets(rank), spec.local_shape(rank)
            shards.append(drawn[at].clone() if at in drawn else part(key, rank))
            drawn.setdefault(at, shards[-1])
        return Sharded(_as_states(spec)(tuple(shards)), spec)
    rank = rank_on_mesh(spec.mesh, where)
    lone = Spec(spec.mesh, PartitionSpec(), shape=(2,), dtype=torch.int64)

    def run(key: torch.Tensor) -> Sharded:
        return Sharded(_as_states(spec)(part(key, rank)), spec)

    result: Sharded = run_typed_hook.call(where, key, lone, spec, run)
    return result


@lru_cache(maxsize=4096)
def _as_states(spec: Spec) -> Program:
    """The local steps from parts that are there on all ranks to addends and what is reduced."""
    steps: list[Step] = [step for step in _laying_out(spec).steps if not isinstance(step, AllSlice)]
    p = spec.partition
    cut = Spec._of(spec.mesh, PartitionSpec._of(p.dims, (), ()), spec.shape, spec.dtype, spec.sizes)
    return Program(cut, steps, spec)
