"""Random bodies of mapped functions, and the same bodies on one device.

On one device a value is the stack of all ranks' locals, with one leading dim per mesh axis; a
collective is a reduction or a permutation of leading dims. Gradients are those of the stack.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

import fshard as fs
from fshard import Mesh, P

__all__ = ["MappedCase"]

Axes = tuple[str, ...]
F64 = torch.float64
MESHES = (
    Mesh(x=2), Mesh(x=3), Mesh(x=4), Mesh(x=2, y=2), Mesh(x=2, y=3), Mesh(x=1, y=2),
    Mesh({"x": 3, "y": 2}, devices=(4, 1, 5, 0, 2, 3)), Mesh(x=2, y=2, z=2),
)  # fmt: skip


@dataclass(frozen=True)
class Value:
    """Local shape of a value and the axes along which it varies."""

    shape: tuple[int, ...]
    varying: frozenset[str]


@dataclass(frozen=True)
class Row:
    """One instruction: an operation, the indices of its operands, its axes and its options."""

    name: str
    operands: tuple[int, ...]
    axes: Axes = ()
    options: tuple[Any, ...] = ()


# -- local operations -------------------------------------------------------------------------


def scaled_unrecorded(a: torch.Tensor) -> torch.Tensor:
    """Return `a * a.cos()`, where the cosine is a constant for gradients and not for tangents."""
    with torch.no_grad():
        scale = a.cos()
    return a * scale


LOCAL: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - 0.5 * b,
    "mul": lambda a, b: a * b,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "concat": lambda a, b: torch.cat([a, b], -1),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "sin": torch.sin,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "scale": lambda a: 1.5 * a + 0.25,
    "cumsum": lambda a: a.cumsum(-1),
    "softmax": lambda a: torch.softmax(a, -1),
    "norm": lambda a: a / (1 + a.square().sum(-1, keepdim=True)).sqrt(),
    "flip": lambda a: a.flip(-1),
    "amax": lambda a: a.amax(-1, keepdim=True) - a,
    "sort": lambda a: a.sort(-1).values,
    "detached": lambda a: a * a.detach().cos(),
    "unrecorded": scaled_unrecorded,
    "written": lambda a: a.clone().mul_(2).add_(1),
    "transpose": lambda a: a.transpose(-1, -2),
    "matmul": lambda a, b: a @ b,
    "sum": lambda a: a.sum(-1),
    "head": lambda a: a[..., : a.shape[-1] - a.shape[-1] // 2],
}
"""Operations on the last dims of a local, and so also on stacks of locals."""

SAME_SHAPES = ("add", "sub", "mul", "where", "concat", "lerp")
UNARY = ("sin", "tanh", "gelu", "scale", "cumsum", "softmax", "norm", "flip", "amax", "sort",
         "detached", "unrecorded", "written")  # fmt: skip


def local_rows(r: Random, values: Sequence[Value]) -> tuple[Row, Value] | None:
    """Return a random local operation on `values` and its result, None if it does not fit."""
    index = r.randrange(len(values))
    a = values[index]
    name = r.choice([*SAME_SHAPES, *UNARY, "matmul", "transpose", "sum", "head"])
    if name in UNARY and a.shape:
        return Row(name, (index,)), a
    if name == "transpose" and len(a.shape) > 1:
        return Row(name, (index,)), Value((*a.shape[:-2], a.shape[-1], a.shape[-2]), a.varying)
    if name in ("sum", "head") and a.shape and a.shape[-1] > 1:
        last = () if name == "sum" else (a.shape[-1] - a.shape[-1] // 2,)
        return Row(name, (index,)), Value((*a.shape[:-1], *last), a.varying)
    if name == "matmul":
        fits = [i for i, b in enumerate(values) if len(a.shape) == len(b.shape) == 2
                and a.shape[1] == b.shape[0]]  # fmt: skip
        shape_of: Callable[[Value], tuple[int, ...]] = lambda b: (a.shape[0], b.shape[1])  # noqa: E731
    elif name in SAME_SHAPES and a.shape:
        fits = [i for i, b in enumerate(values) if a.shape == b.shape]
        doubled = 2 if name == "concat" else 1
        shape_of = lambda b: (*a.shape[:-1], doubled * a.shape[-1])  # noqa: E731
    else:
        return None
    if not fits:
        return None
    other = r.choice(fits)
    b = values[other]
    return Row(name, (index, other)), Value(shape_of(b), a.varying | b.varying)


# -- collectives ------------------------------------------------------------------------------


def collective_rows(r: Random, mesh: Mesh, values: Sequence[Value]) -> tuple[Row, Value] | None:
    """Return a random collective on `values` and its result, None if it does not fit."""
    index = r.randrange(len(values))
    x = values[index]
    axes = tuple(r.sample(mesh.axes, r.randint(1, len(mesh.axes))))
    n, dim = mesh.axis_size(axes), r.randrange(len(x.shape)) if x.shape else None
    left, joined = x.varying - {*axes}, x.varying | {*axes}
    name = r.choice(["psum", "pmean", "pmax", "pmin", "all_gather", "all_gather_tiled",
                     "psum_scatter", "all_to_all", "ppermute", "pshuffle", "pbroadcast",
                     "axis_index"])  # fmt: skip
    if name in ("psum", "pmean", "pmax", "pmin"):
        return Row(name, (index,), axes), Value(x.shape, left)
    if name == "axis_index":
        return Row(name, (index,), axes), Value(x.shape, joined)
    if name in ("ppermute", "pshuffle"):
        order = tuple(r.sample(range(n), n))
        pairs = tuple(enumerate(order))[: n - (name == "ppermute" and r.random() < 0.3)]
        options = (pairs,) if name == "ppermute" else (order,)
        return Row(name, (index,), axes, options), Value(x.shape, joined)
    if name == "pbroadcast":
        return Row(name, (index,), axes, (r.randrange(n),)), Value(x.shape, joined)
    if name == "all_gather":
        place, to = r.randint(0, len(x.shape)), r.choice(["varying", "invariant"])
        shape = (*x.shape[:place], n, *x.shape[place:])
        varying = left if to == "invariant" else joined
        return Row(name, (index,), axes, (place, to)), Value(shape, varying)
    if dim is None:
        return None
    size = x.shape[dim]
    if name == "all_gather_tiled":
        shape = (*x.shape[:dim], n * size, *x.shape[dim + 1 :])
        return Row(name, (index,), axes, (dim,)), Value(shape, joined)
    if size % n:
        return None
    shape = (*x.shape[:dim], size // n, *x.shape[dim + 1 :])
    if name == "psum_scatter":
        return Row(name, (index,), axes, (dim,)), Value(shape, joined)
    to_dim = r.randrange(len(shape))
    shape = (*shape[:to_dim], n * shape[to_dim], *shape[to_dim + 1 :])
    return Row(name, (index,), axes, (dim, to_dim)), Value(shape, joined)


def run_row(row: Row, x: torch.Tensor) -> torch.Tensor:
    """Run one collective on this rank's local."""
    axes, options = row.axes, row.options
    match row.name:
        case "psum" | "pmean" | "pmax" | "pmin":
            reduced: torch.Tensor = getattr(fs, row.name)(x, axes)
            return reduced
        case "all_gather":
            return fs.all_gather(x, axes, axis=options[0], to=options[1])
        case "all_gather_tiled":
            return fs.all_gather(x, axes, axis=options[0], tiled=True)
        case "psum_scatter":
            return fs.psum_scatter(x, axes, scatter_dimension=options[0], tiled=True)
        case "all_to_all":
            return fs.all_to_all(x, axes, *options, tiled=True)
        case "axis_index":
            return x * (fs.axis_index(axes) + 1.0)
        case name:
            permuted: torch.Tensor = getattr(fs, name)(x, axes, options[0])
            return permuted


def dense_row(row: Row, mesh: Mesh, x: torch.Tensor) -> torch.Tensor:
    """Run one collective on the stack of all locals, `(*mesh.shape, *local)`."""
    rest = tuple(axis for axis in mesh.axes if axis not in row.axes)
    order = [mesh.axes.index(axis) for axis in (*row.axes, *rest)]
    n, leading, options = mesh.axis_size(row.axes), len(mesh.axes), row.options
    tail = list(range(leading, x.ndim))
    stack = x.permute(*order, *tail).flatten(0, len(row.axes) - 1)  # (n, *rest, *local)
    first = 1 + len(rest)  # the first dim of a local
    match row.name:
        case "psum" | "pmean":
            result = getattr(stack, row.name[1:])(0, keepdim=True).expand_as(stack)
        case "pmax" | "pmin":
            result = getattr(torch, f"a{row.name[1:]}")(stack, 0, keepdim=True).expand_as(stack)
        case "all_gather":
            gathered = stack.movedim(0, len(rest) + options[0])
            result = gathered.unsqueeze(0).expand(n, *gathered.shape)
        case "all_gather_tiled":
            gathered = torch.cat(list(stack), len(rest) + options[0])
            result = gathered.unsqueeze(0).expand(n, *gathered.shape)
        case "psum_scatter":
            result = torch.stack(stack.sum(0).chunk(n, len(rest) + options[0]))
        case "all_to_all":
            split, join = options
            pieces = stack.chunk(n, first + split)  # a piece for each receiver
            result = torch.stack([torch.cat(list(piece), len(rest) + join) for piece in pieces])
        case "axis_index":
            index = torch.arange(1.0, n + 1, dtype=x.dtype)
            result = stack * index.view(n, *[1] * (stack.ndim - 1))
        case "ppermute":
            source = {dst: src for src, dst in options[0]}
            zero = torch.zeros_like(stack[0])
            result = torch.stack([stack[source[i]] if i in source else zero for i in range(n)])
        case "pshuffle":
            result = stack[list(options[0])]
        case _:
            result = stack[options[0]].unsqueeze(0).expand_as(stack)
    result = result.unflatten(0, [mesh.shape[axis] for axis in row.axes])
    inverse = [order.index(i) for i in range(leading)]
    return result.permute(*inverse, *range(leading, result.ndim))


# -- cases ------------------------------------------------------------------------------------


class MappedCase:
    """Random body with its specs, run mapped and on one device.

    Attributes:
        meshes: meshes that it is drawn from.
        max_numel: largest number of elements of a local.
        excluded: names of operations and collectives that are not drawn.
    """

    meshes: tuple[Mesh, ...] = MESHES
    max_numel = 200
    excluded: frozenset[str] = frozenset()

    def __init__(self, r: Random) -> None:
        self.mesh = r.choice(self.meshes)
        self.seed, self.check = r.randrange(2**31), r.choice([True, True, "strict", False])
        self.in_specs, values = self.draw_inputs(r)
        self.num_inputs = len(values)
        self.rows: list[Row] = []
        for _ in range(r.randint(2, 9)):
            draw = r.choice([local_rows, lambda r, v: collective_rows(r, self.mesh, v)])
            drawn = draw(r, values)
            if not drawn or drawn[0].name in self.excluded:
                continue
            if math.prod(drawn[1].shape) <= self.max_numel:
                self.rows.append(drawn[0])
                values.append(drawn[1])
        self.results = [len(values) - 1, r.randrange(len(values))]
        self.values = values
        if any(value.varying != {*self.mesh.axes} for value in values) and not self.check:
            self.check = True  # without checks no cast is inserted

    def draw_inputs(self, r: Random) -> tuple[list[P], list[Value]]:
        """Return the specs and local types of two or three inputs."""
        specs, values = [], []
        for _ in range(r.randint(2, 3)):
            shape = tuple(r.choice([1, 2, 3, 4, 6]) for _ in range(r.randint(1, 3)))
            dims: list[list[str]] = [[] for _ in shape]
            used = [axis for axis in self.mesh.axes if r.random() < 0.6]
            for axis in r.sample(used, len(used)):
                r.choice(dims).append(axis)
            specs.append(P(*(tuple(axes) or None for axes in dims)))
            values.append(Value(shape, frozenset(used)))
        return specs, values

    def inputs(self) -> list[torch.Tensor]:
        """Return the global inputs."""
        generator = torch.Generator().manual_seed(self.seed)
        outputs = []
        for spec, value in zip(self.in_specs, self.values, strict=False):
            sizes = zip(value.shape, spec.dims, strict=True)
            shape = [size * self.mesh.axis_size(axes) for size, axes in sizes]
            outputs.append(torch.randn(shape, generator=generator, dtype=F64).requires_grad_())
        return outputs

    def body(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        """Run the rows on one rank; the results have a new dim that the varying axes shard."""
        values = list(xs)
        for row in self.rows:
            operands = [self.cast(row, index, values[index]) for index in row.operands]
            run = LOCAL.get(row.name)
            values.append(run(*operands) if run else run_row(row, operands[0]))
        return [values[index][None] for index in self.results]

    def cast(self, row: Row, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return an operand with the casts that are not inserted.

        A collective requires one state along its axes; `check="strict"` requires every cast.
        """
        varying = self.values[index].varying
        joined = frozenset(row.axes).union(*(self.values[i].varying for i in row.operands))
        missing = tuple(axis for axis in self.mesh.axes if axis in joined - varying)
        mixed = bool(row.axes) and not varying.isdisjoint(row.axes)
        if not missing or not (mixed or self.check == "strict"):
            return x
        return fs.pcast(x, missing, to="varying")

    def out_specs(self) -> list[P]:
        """Return specs that shard the first dim over the axes along which a result varies."""
        varying = [self.values[index].varying for index in self.results]
        return [P(tuple(axis for axis in self.mesh.axes if axis in v)) for v in varying]

    def mapped(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the body by `fs.shard_map`."""
        run = fs.shard_map(
            self.body, mesh=self.mesh, in_specs=tuple(self.in_specs),
            out_specs=self.out_specs(), check=self.check,
        )  # fmt: skip
        outputs: list[torch.Tensor] = run(*xs)
        return outputs

    def dense(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the body on stacks of all ranks' locals."""
        values = [self.stacked(x, spec) for x, spec in zip(xs, self.in_specs, strict=True)]
        for row in self.rows:
            operands = [values[index] for index in row.operands]
            if row.name in LOCAL:
                values.append(LOCAL[row.name](*operands))
            else:
                values.append(dense_row(row, self.mesh, operands[0]))
        outputs = []
        for index in self.results:
            varying = self.values[index].varying
            select = tuple(slice(None) if axis in varying else 0 for axis in self.mesh.axes)
            stack = values[index][select]
            outputs.append(stack.reshape(-1, *self.values[index].shape))
        return outputs

    def stacked(self, x: torch.Tensor, spec: P) -> torch.Tensor:
        """Return the locals of a global tensor as one stack."""
        sizes: list[int] = []
        names: list[str | None] = []
        for size, axes in zip(x.shape, spec.dims, strict=True):
            counts = [self.mesh.shape[axis] for axis in axes]
            sizes += [*counts, size // math.prod(counts)]
            names += [*axes, None]
        split = x.reshape(sizes)
        front = [names.index(axis) for axis in self.mesh.axes if axis in names]
        tail = [i for i, name in enumerate(names) if name is None]
        stack = split.permute(*front, *tail)
        for i, axis in enumerate(self.mesh.axes):
            if axis not in names:
                stack = stack.unsqueeze(i)
        local = stack.shape[len(self.mesh.axes) :]
        return stack.expand(*self.mesh.shape.values(), *local)

    def run(self) -> None:
        """Compare values and gradients with one device."""
        results = []
        for run in (self.mapped, self.dense):
            xs = self.inputs()
            outputs = run(xs)
            terms = [(y * (i + 1)).sin().sum() for i, y in enumerate(outputs)]
            loss = sum(terms, torch.zeros((), requires_grad=True))
            grads = torch.autograd.grad(loss, xs, materialize_grads=True, allow_unused=True)
            results.append([*outputs, *grads])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)

    def __str__(self) -> str:
        lines = [f"{self.mesh}, check={self.check!r}, results {self.results}"]
        values = itertools.chain(self.in_specs, self.rows)
        lines += [
            f"v{i} = {item}  {value.shape} varies along {sorted(value.varying)}"
            for i, (item, value) in enumerate(zip(values, self.values, strict=True))
        ]
        return "\n".join(lines)
