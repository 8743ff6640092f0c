"""Random programs of a few operations, each checked to run on global tensors.

A program is drawn from a `random.Random`, which Hypothesis can shrink, and runs with any `Caller`:
PyTorch's own call, or `fs.apply`. Values stay small, and away from discontinuities of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

import fshard as fs
from fshard import P

__all__ = ["RandomProgram", "program", "random_tensor"]

Caller = Callable[..., Any]
Run = Callable[..., Any]
SIZES = (1, 2, 2, 3, 4, 4, 5, 6)
MAX_VALUE = 600.0
MIN_GAP = 1e-4
"""Least difference of values that an operation compares, with each other or with 0."""


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operation of PyTorch."""
    return op(*args, **kwargs)


@dataclass(slots=True)
class ProgramStep:
    """One operation on values by their numbers."""

    text: str
    run: Run
    operands: tuple[int, ...]


@dataclass(slots=True)
class RandomProgram:
    """Inputs, steps on earlier values, and the numbers of the returned values."""

    inputs: list[torch.Tensor]
    steps: list[ProgramStep] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def run(self, inputs: Sequence[Any], caller: Caller = call) -> list[Any]:
        """Return the outputs of the program on these inputs."""
        values = list(inputs)
        for step in self.steps:
            values.append(step.run(caller, *(values[arg] for arg in step.operands)))
        return [values[arg] for arg in self.outputs]

    def __str__(self) -> str:
        count = len(self.inputs)
        lines = [f"v{arg} = {str(x.dtype)[6:]}{list(x.shape)}{' grad' if x.requires_grad else ''}"
                 for arg, x in enumerate(self.inputs)]  # fmt: skip
        lines += [f"v{count + arg} = {s.text}({', '.join(f'v{p}' for p in s.operands)})"
                  for arg, s in enumerate(self.steps)]  # fmt: skip
        return "\n".join([*lines, f"return {', '.join(f'v{arg}' for arg in self.outputs)}"])


def random_tensor(r: Random, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a random tensor."""
    generator = torch.Generator().manual_seed(r.randrange(1000))
    if not dtype.is_floating_point:
        return torch.randint(0, 3, tuple(shape), generator=generator, dtype=dtype)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


# -- operations -----------------------------------------------------------------------------


def distinct(x: torch.Tensor, dim: int) -> bool:
    """Return True if no two values along a dim are nearly equal, so that the larger is clear."""
    return (
        x.shape[dim] < 2
        or not x.numel()
        or bool(x.sort(dim).values.diff(dim=dim).abs().amin() > MIN_GAP)
    )


def floats(values: Sequence[torch.Tensor]) -> list[int]:
    return [arg for arg, x in enumerate(values) if x.is_floating_point()]


Draw = tuple[str, Run, tuple[int, ...]]
Maker = Callable[[Random, list[torch.Tensor]], Draw | None]
MAKERS: list[Maker] = []


def maker(times: int = 1) -> Callable[[Maker], Maker]:
    def register(maker_: Maker) -> Maker:
        MAKERS.extend([maker_] * times)
        return maker_

    return register


def one(r: Random, values: list[torch.Tensor], dims: int = 0) -> int | None:
    """Return the number of a float of at least `dims` dims; the newest as often as all others."""
    result = [arg for arg in floats(values) if values[arg].ndim >= dims]
    return None if not result else result[-1] if r.random() < 0.5 else r.choice(result)


@maker(2)
def element(r: Random, values: list[torch.Tensor]) -> Draw | None:
    arg = one(r, values)
    op = r.choice([torch.exp, torch.tanh, torch.sin, F.gelu, torch.neg, torch.square, F.silu,
                   torch.sigmoid, torch.abs, F.relu])  # fmt: skip
    if arg is None:
        return None
    x = values[arg]
    if op in (F.relu, torch.abs) and x.numel() and x.abs().amin() < MIN_GAP:
        return None
    return op.__name__, lambda c, x: c(op, x), (arg,)


@maker(3)
def pair(r: Random, values: list[torch.Tensor]) -> Draw | None:
    one, other = r.randrange(len(values)), r.randrange(len(values))
    op = r.choice([torch.add, torch.sub, torch.mul])
    return op.__name__, lambda c, x, y: c(op, x, y), (one, other)


@maker()
def constant(r: Random, values: list[torch.Tensor]) -> Draw | None:
    arg = one(r, values)
    if arg is None:
        return None
    x = values[arg]
    shape = r.choice([(), x.shape[-1:], tuple(x.shape)])
    stored = random_tensor(r, shape, x.dtype)
    op = r.choice([torch.add, torch.mul])
    return f"{op.__name__} a constant{list(shape)}", lambda c, x: c(op, x, stored), (arg,)


@maker()
def scalar(r: Random, values: list[torch.Tensor]) -> Draw | None:
    arg, by = r.randrange(len(values)), r.choice([2, 0.5, -1.0])
    op = r.choice([torch.add, torch.mul])
    return f"{op.__name__} {by}", lambda c, x: c(op, x, by), (arg,)


@maker(3)
def product(r: Random, values: list[torch.Tensor]) -> Draw | None:
    result = [
        (a, b) for a in floats(values) for b in floats(values)
        if values[a].ndim and values[b].ndim and values[a].dtype == values[b].dtype
        and values[a].shape[-1] == values[b].shape[-2 if values[b].ndim > 1 else 0]
    ]  # fmt: skip
    if not result:
        return None
    return "matmul", lambda c, x, y: c(torch.matmul, x, y), r.choice(result)


@maker(2)
def linear(r: Random, values: list[torch.Tensor]) -> Draw | None:
    result = [
        (a, w) for a in floats(values) for w in floats(values)
        if values[a].ndim and values[w].ndim == 2 and values[a].dtype == values[w].dtype
        and values[a].shape[-1] == values[w].shape[1]
    ]  # fmt: skip
    if not result:
        return None
    a, w = r.choice(result)
    biases = [b for b in floats(values)
              if values[b].shape == values[w].shape[:1]
              and values[b].dtype == values[w].dtype]  # fmt: skip
    if biases and r.random() < 0.7:
        return "linear", lambda c, x, w, b: c(F.linear, x, w, b), (a, w, r.choice(biases))
    return "linear", lambda c, x, w: c(F.linear, x, w), (a, w)


@maker(2)
def reduction(r: Random, values: list[torch.Tensor]) -> Draw | None:
    arg = one(r, values, 1)
    if arg is None:
        return None
    x = values[arg]
    dim, keep = r.randrange(-x.ndim, x.ndim), r.random() < 0.5
    op = r.choice([torch.sum, torch.mean, torch.amax, torch.amin, torch.logsumexp, torch.var])
    if x.shape[dim] < 2 or (op in (torch.amax, torch.amin) and not distinct(x, dim)):
        return None
    name = f"{op.__name__} dim={dim} keepdim={keep}"
    return name, lambda c, x: c(op, x, dim=dim, keepdim=keep), (arg,)


@maker()
def whole(r: Random, values: list[torch.Tensor]) -> Draw | None:
    arg, op = r.randrange(len(values)), r.choice([torch.sum, torch.sum, torch.mean])
    if op is torch.mean and not (values[arg].is_floating_point() and values[arg].numel()):
        return None
    return f"{op.__name__} all", lambda c, x: c(op, x), (arg,)


@maker(2)
def along(r: Random, values: list[torch.Tensor]) -> Draw | None:
    arg = one(r, values, 1)
    if arg is None:
        return None
    dim = r.randrange(values[arg].ndim)
    op = r.choice([torch.softmax, torch.log_softmax, torch.cumsum, torch.logcumsumexp,
                   torch.diff, F.normalize])  # fmt: skip
    return f"{op.__name__} {dim}", lambda c, x: c(op, x, dim=dim), (arg,)


@maker()
def norm(r: Random, values: list[torch.Tensor]) -> Draw | None:
    arg = one(r, values, 1)
    if arg is None or values[arg].shape[-1] < 2:
        return None
    size = values[arg].shape[-1]
    scales = [b for b in floats(values)
              if values[b].shape == (size,) and values[b].dtype == values[arg].dtype]  # fmt: skip
    if scales:
        return "layer_norm with a weight", (
            lambda c, x, w: c(F.layer_norm, x, (size,), w)), (arg, r.choice(scales))  # fmt: skip
    return "layer_norm", lambda c, x: c(F.layer_norm, x, (size,)), (arg,)


# -- views ----------------------------------------------------------------------------------


@maker(3)
def view(r: Random, values: list[torch.Tensor]) -> Draw | None:
    arg = r.randrange(len(values))
    x = values[arg]
    if not x.ndim:
        return None
    dim = r.randrange(x.ndim)
    size, kind = x.shape[dim], r.randrange(10)
    match kind:
        case 0 if x.ndim > 1:
            return "flatten", lambda c, x: c(torch.flatten, x), (arg,)
        case 1 if size in (4, 6):
            shape = (*x.shape[:dim], 2, size // 2, *x.shape[dim + 1 :])
            return f"reshape {shape}", lambda c, x: c(torch.reshape, x, shape), (arg,)
        case 2 if x.ndim > 1:
            order = r.sample(range(x.ndim), x.ndim)
            return f"permute {order}", lambda c, x: c(torch.permute, x, order), (arg,)
        case 3:
            return f"unsqueeze {dim}", lambda c, x: c(torch.unsqueeze, x, dim), (arg,)
        case 4:
            return f"flip {dim}", lambda c, x: c(torch.flip, x, [dim]), (arg,)
        case 5 if size > 1:
            start = r.randrange(size)
            length = r.randint(1, size - start)
            name = f"narrow {dim} {start} {length}"
            return name, lambda c, x: c(torch.narrow, x, dim, start, length), (arg,)
        case 6 if size:
            index = r.randrange(size)
            return f"select {dim} {index}", lambda c, x: c(torch.select, x, dim, index), (arg,)
        case 7 if size > 1:
            parts, part = r.choice([2, 3]), r.randrange(2)
            name = f"chunk {dim} {parts} [{part}]"
            return name, lambda c, x: c(torch.chunk, x, parts, dim)[part], (arg,)
        case 8 if size == 1:
            shape = (*x.shape[:dim], 3, *x.shape[dim + 1 :])
            return f"expand {shape}", lambda c, x: c(torch.Tensor.expand, x, shape), (arg,)
        case 9:
            pads = [0, 0] * (x.ndim - 1 - dim) + [r.randrange(3), r.randrange(3)]
            return f"pad {pads}", lambda c, x: c(F.pad, x, pads), (arg,)
    return None


@maker()
def transposed(r: Random, values: list[torch.Tensor]) -> Draw | None:
    arg = one(r, values, 2)
    return None if arg is None else ("mT", lambda c, x: c(torch.transpose, x, -1, -2), (arg,))


@maker(2)
def joined(r: Random, values: list[torch.Tensor]) -> Draw | None:
    arg = one(r, values, 1)
    if arg is None:
        return None
    x, dim, stack = values[arg], r.randrange(values[arg].ndim), r.random() < 0.3

    def fits(y: torch.Tensor) -> bool:
        sizes = enumerate(zip(x.shape, y.shape, strict=False))
        alike = all(a == b or (d == dim and not stack) for d, (a, b) in sizes)
        return alike and y.ndim == x.ndim and y.dtype == x.dtype

    other = r.choice([p for p in floats(values) if fits(values[p])])
    op = torch.stack if stack else torch.cat
    return f"{op.__name__} {dim}", lambda c, x, y: c(op, [x, y], dim), (arg, other)


# -- indices and masks ----------------------------------------------------------------------


@maker(2)
def indexed(r: Random, values: list[torch.Tensor]) -> Draw | None:
    indices = [arg for arg, x in enumerate(values) if x.dtype == torch.int64
               and (not x.numel() or 0 <= x.amin() <= x.amax() <= 2)]  # fmt: skip
    arg = one(r, values, 1)
    if not indices or arg is None:
        return None
    where, x = r.choice(indices), values[arg]
    index, dim = values[where], r.randrange(x.ndim)
    if x.shape[dim] < 3:
        return None
    if index.ndim == 1 and r.random() < 0.6:
        return f"index_select {dim}", lambda c, x, i: c(torch.index_select, x, dim, i), (arg, where)
    if x.ndim == 2 and x.shape[0] >= 3 and r.random() < 0.6:
        return "embedding", lambda c, x, i: c(F.embedding, i, x), (arg, where)
    sizes = enumerate(zip(index.shape, x.shape, strict=False))
    fits = index.ndim == x.ndim and all(a <= b for d, (a, b) in sizes if d != dim)
    return (
        (f"gather {dim}", lambda c, x, i: c(torch.gather, x, dim, i), (arg, where))
        if fits
        else None
    )


@maker()
def masked(r: Random, values: list[torch.Tensor]) -> Draw | None:
    one, other, third = (r.choice(floats(values) or [0]) for _ in range(3))
    x = values[one]
    if x.numel() and x.abs().amin() < MIN_GAP:
        return None
    if r.random() < 0.5:
        fill: Run = lambda c, x, y: c(torch.masked_fill, y, c(torch.gt, x, 0), -0.5)  # noqa: E731
        return "masked_fill where > 0", fill, (one, other)
    pick: Run = lambda c, x, y, z: c(torch.where, c(torch.gt, x, 0), y, z)  # noqa: E731
    return "where > 0", pick, (one, other, third)


@maker()
def cast(r: Random, values: list[torch.Tensor]) -> Draw | None:
    arg = r.randrange(len(values))
    if values[arg].dtype == torch.bool:
        return None
    dtype = r.choice([torch.float32, torch.float64])
    return f"to {dtype}", lambda c, x: c(torch.ops.aten.to.dtype, x, dtype), (arg,)


# -- features of functions only -------------------------------------------------------------


@maker()
def held(r: Random, values: list[torch.Tensor]) -> Draw | None:
    arg = one(r, values)
    if arg is None:
        return None
    if r.random() < 0.5:
        return "detach", lambda c, x: c(torch.detach, x), (arg,)

    def region(c: Caller, x: Any) -> Any:
        with torch.no_grad():
            return c(torch.cos, c(torch.mul, x, 2))

    return "no_grad cos", region, (arg,)


@maker()
def written(r: Random, values: list[torch.Tensor]) -> Draw | None:
    arg, other = one(r, values), r.choice(floats(values) or [0])
    op = r.choice([torch.Tensor.add_, torch.Tensor.mul_])
    if arg is None:
        return None

    def write(c: Caller, x: Any, y: Any) -> Any:
        if c is not call:  # pairs are not written
            return c(torch.add, c(getattr(torch, op.__name__[:-1]), c(torch.mul, x, 2), y), 1)
        new = x * 2
        op(new, y)
        return new.add_(1)

    if values[arg].dtype != torch.promote_types(values[arg].dtype, values[other].dtype):
        return None
    return op.__name__, write, (arg, other)


@maker()
def hinted(r: Random, values: list[torch.Tensor]) -> Draw | None:
    """Constrain a layout on the axis `x`, which every mesh has, of 1 to 3 ranks."""
    arg = one(r, values, 1)
    if arg is None:
        return None
    dims = [d for d, size in enumerate(values[arg].shape) if size % 6 == 0]
    dim = r.choice([*dims, None])
    p = P(*("x" if d == dim else None for d in range(values[arg].ndim)))

    def hint(c: Caller, x: Any) -> Any:
        return fs.constrain(x, p) if c is call else x

    return f"constrain {p}", hint, (arg,)


# -- programs -------------------------------------------------------------------------------


def program(r: Random, most: int = 10) -> RandomProgram:
    """Return a program of up to `most` operations."""
    a, b, c = (r.choice(SIZES) for _ in range(3))
    shapes = [(a, b), (b,), (b, c), (c, b), (a, b, c), (a, 1), (), (c,), (2, a, b), (0, b)]
    dtype = r.choice([torch.float64, torch.float64, torch.float32])
    inputs = []
    for _ in range(r.randint(1, 4)):
        kind = dtype if r.random() < 0.8 else r.choice([torch.float64, torch.int64, torch.int64])
        weights = [4, 2, 3, 2, 3, 1, 1, 1, 1, 0.3]
        x = random_tensor(r, r.choices(shapes, weights)[0], kind)
        inputs.append(x.requires_grad_(kind.is_floating_point and r.random() < 0.8))
    drawn = RandomProgram(inputs)
    values: list[torch.Tensor] = list(inputs)
    for _ in range(r.randint(1, most) * 2):
        step = r.choice(MAKERS)(r, values)
        if step is None or len(drawn.steps) >= most:
            continue
        text, run, operands = step
        try:
            value = run(call, *(values[arg] for arg in operands))
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        if value.numel() > 4000 or (value.numel() and not value.double().abs().amax() < MAX_VALUE):
            continue
        drawn.steps.append(ProgramStep(text, run, operands))
        values.append(value)
    count = len(inputs)
    rest = [arg for arg in range(len(values)) if arg >= count or r.random() < 0.1]
    last = [len(values) - 1]
    drawn.outputs = last + [arg for arg in rest if r.random() < 0.2]
    return drawn
