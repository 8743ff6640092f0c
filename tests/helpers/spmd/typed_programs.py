"""Random bodies of mapped functions, as recipes of operations and collectives.

A recipe is a tuple of rows (operation, index, index, number). All tensors of a body are 2x2, so
that every recipe runs; rows that types refuse are left out on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P, ShardingError
from fshard.run.transports.base import current_rank
from fshard.spmd.types import States

__all__ = [
    "OPERATIONS",
    "Program",
    "Recipe",
    "axes_of",
    "inputs_of",
    "partition_of",
    "partitions_of",
]

Typed = tuple[States, torch.Tensor]
Recipe = tuple[tuple[str, int, int, int], ...]
F64 = torch.float64
Two = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
Along = Callable[[torch.Tensor, tuple[str, ...], int], torch.Tensor]


def axes_of(mesh: Mesh, k: int) -> tuple[str, ...]:
    """Return one choice of some axes of a mesh."""
    ways = [
        way for n in range(1, len(mesh.axes) + 1) for way in itertools.permutations(mesh.axes, n)
    ]
    return ways[k % len(ways)]


# -- operations ----------------------------------------------------------------------------


def _written(a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    y = torch.zeros(2, 2, dtype=F64)
    y[k % 2] = a[0]
    y[:, 1:].add_(b[:, :1])
    return y


def _overwritten(a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    y = a.clone()
    v = y.view(4)
    v[k % 4 :].copy_(b.reshape(4)[k % 4 :])
    return y.mul_(2) if k % 3 else y.sub_(b)


def _outs(a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    y = torch.empty(2, 2, dtype=F64)
    with torch.no_grad():
        return torch.sub(a.detach(), b.detach(), out=y)


def _branch(a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    """Branch on a value, to results of one type."""
    return torch.sin(a + b) if (a.sum() > 0.1 * (k % 3)) else a - b


def _counted(a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    return b * float((a > 0).sum())


class _Times(torch.autograd.Function):
    """Product with a backward written by hand."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return g * b, g * a


TWO: dict[str, Two] = {
    "add": lambda a, b, k: a + b,
    "sub": lambda a, b, k: a - 2 * b,
    "mul": lambda a, b, k: a * b,
    "div": lambda a, b, k: a / (2 + b * b),
    "matmul": lambda a, b, k: a @ b.T,
    "linear": lambda a, b, k: F.linear(a, b, b[0]),
    "tanh": lambda a, b, k: torch.tanh(a),
    "sin": lambda a, b, k: torch.sin(a + k),
    "neg": lambda a, b, k: -a,
    "scale": lambda a, b, k: a * (k + 1),
    "sum": lambda a, b, k: a.sum(k % 2, keepdim=True).expand(2, 2),
    "mean": lambda a, b, k: a.mean() + torch.zeros(2, 2, dtype=F64),
    "amax": lambda a, b, k: a.amax(0, keepdim=True) - b,
    "flip": lambda a, b, k: a.T.flip(k % 2),
    "cat": lambda a, b, k: torch.cat([a[:1], b[1:]]),
    "stack": lambda a, b, k: torch.stack([a[0], b[1]], k % 2),
    "where": lambda a, b, k: torch.where(b > 0, a, b),
    "index": lambda a, b, k: a[torch.tensor([k % 2, 0])],
    "index_by": lambda a, b, k: a[(b[0] > 0).long()],
    "mask": lambda a, b, k: a.masked_fill(b > 0, 0.5),
    "einsum": lambda a, b, k: torch.einsum("ij,kj->ik", a, b),
    "softmax": lambda a, b, k: torch.softmax(a, 0) * b,
    "custom": lambda a, b, k: _Times.apply(a, b),  # type: ignore[no-untyped-call]
    "checkpoint": lambda a, b, k: checkpoint(
        lambda u, v: torch.tanh(u) * v, a, b, use_reentrant=False
    ),
    "foreach": lambda a, b, k: torch._foreach_add([a, b], [b, b])[k % 2],
    "constant": lambda a, b, k: torch.eye(2, dtype=F64),
    "like": lambda a, b, k: torch.full_like(a, k),
    "detach": lambda a, b, k: a.detach(),
    "outs": _outs,
    "written": _written,
    "overwritten": _overwritten,
    "branch": _branch,
    "counted": _counted,
}
"""Operations of two tensors and a number."""


def _gathered(to: str) -> Along:
    def gather(x: torch.Tensor, axes: tuple[str, ...], k: int) -> torch.Tensor:
        y = fs.all_gather(x, axes, to=to)
        return y.mean(0) if k % 2 else y[k % y.shape[0]]

    return gather


def _scattered(x: torch.Tensor, axes: tuple[str, ...], k: int) -> torch.Tensor:
    return fs.psum_scatter(torch.cat([x] * fs.axis_size(axes)), axes, tiled=True)


def _exchanged(x: torch.Tensor, axes: tuple[str, ...], k: int) -> torch.Tensor:
    n = fs.axis_size(axes)
    parts = torch.stack([x * (item + 1) for item in range(n)])
    return fs.all_to_all(parts, axes, 0, 0).sum(0)


def _ring(x: torch.Tensor, axes: tuple[str, ...], k: int) -> torch.Tensor:
    n = fs.axis_size(axes)
    pairs = [(item, (item + 1) % n) for item in range(n)]
    return fs.ppermute(x, axes, pairs[: n - k % 2])


def _rolled(x: torch.Tensor, axes: tuple[str, ...], k: int) -> torch.Tensor:
    n = fs.axis_size(axes)
    return fs.pshuffle(x, axes, [(item + k) % n for item in range(n)])


ALONG: dict[str, Along] = {
    "psum": lambda x, axes, k: fs.psum(x, axes),
    "pmean": lambda x, axes, k: fs.pmean(x, axes),
    "pmax": lambda x, axes, k: fs.pmax(x, axes),
    "pmin": lambda x, axes, k: fs.pmin(x, axes),
    "gather_varying": _gathered("varying"),
    "gather_invariant": _gathered("invariant"),
    "gather_reduced": _gathered("reduced"),
    "psum_scatter": _scattered,
    "all_to_all": _exchanged,
    "ppermute": _ring,
    "pshuffle": _rolled,
    "pbroadcast": lambda x, axes, k: fs.pbroadcast(x, axes, k % fs.axis_size(axes)),
    "cast_varying": lambda x, axes, k: fs.pcast(x, axes, to="varying"),
    "cast_reduced_varying": lambda x, axes, k: fs.pcast(x, axes, to="varying", src="reduced"),
    "cast_reduced": lambda x, axes, k: fs.pcast(x, axes, to="reduced"),
    "cast_unreduced": lambda x, axes, k: fs.pcast(x, axes, to="unreduced"),
    "index": lambda x, axes, k: x * (1 + fs.axis_index(axes)),
    "started": lambda x, axes, k: fs.start(fs.psum, x, axes).wait(),
}
"""Collectives of a tensor along axes."""

OPERATIONS = (*TWO, *(f"{name}/" for name in ALONG))


class Program:
    """Recipe as a body, from tensors to all tensors that it computes."""

    def __init__(self, mesh: Mesh, recipe: Recipe) -> None:
        self.mesh, self.recipe = mesh, recipe
        self.left_out: frozenset[int] = frozenset()
        """Indices of the rows that types refuse."""
        self.refused: list[ShardingError] = []

    def __repr__(self) -> str:
        return f"Program({self.mesh}, {self.recipe})"

    def body(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        """Return the inputs, and the result of every row that is not left out."""
        pool = list(xs)
        for index, row in enumerate(self.recipe):
            pool.append(pool[0] if index in self.left_out else self._row(row, pool))
        return pool

    def find_types(
        self, args: Sequence[torch.Tensor], specs: Sequence[Any], check: bool | str
    ) -> list[list[Typed]]:
        """Find the refused rows; return types and values of all tensors by rank.

        A real rank returns its own alone.
        """
        left_out, seen = {}, {}

        def body(*xs: torch.Tensor) -> None:
            refused, pool = set(), list(xs)
            for index, row in enumerate(self.recipe):
                try:
                    pool.append(self._row(row, pool))
                except ShardingError as error:
                    self.refused.append(error)
                    refused.add(index)
                    pool.append(pool[0])
            rank = current_rank(self.mesh, "").rank
            left_out[rank] = frozenset(refused)
            states = [fs.typeof(y).states for y in pool]
            with torch._C.DisableTorchFunction():
                seen[rank] = [(s, y.detach().clone()) for s, y in zip(states, pool, strict=True)]

        value = tuple(specs)
        fs.shard_map(body, mesh=self.mesh, in_specs=value, out_specs=None, check=check)(*args)
        (self.left_out,) = set(left_out.values())  # types are the same on every rank
        return [seen[rank] for rank in self.mesh.ranks if rank in seen]

    def _row(self, row: tuple[str, int, int, int], pool: Sequence[torch.Tensor]) -> torch.Tensor:
        name, i, j, k = row
        a, b = pool[i % len(pool)], pool[j % len(pool)]
        if name.endswith("/"):
            return ALONG[name[:-1]](a, axes_of(self.mesh, j), k)
        return TWO[name](a, b, k)


# -- what goes in, and comes out ----------------------------------------------------------------


def partitions_of(mesh: Mesh) -> list[Any]:
    """Return specs of matrices: sharded, replicated, reduced and unreduced."""
    results: list[Any] = [P()]
    for n in range(1, len(mesh.axes) + 1):
        for axes in itertools.permutations(mesh.axes, n):
            results += [P(axes), P(None, axes)]
            if n == 1:
                rest = tuple(axis for axis in mesh.axes if axis not in axes)
                results += [P(reduced=axes), P(unreduced=axes)]
                results += [P(rest, reduced=axes), P(rest, unreduced=axes)] if rest else []
            elif axes[0] < axes[1]:
                results += [P(axes[:1], axes[1:]), P(reduced=axes[:1], unreduced=axes[1:])]
    return results


def inputs_of(mesh: Mesh, specs: Sequence[Any], seed: int) -> list[torch.Tensor]:
    """Return global tensors whose locals are 2x2."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        tuple(2 * mesh.axis_size(p.dims[d]) if len(p.dims) > d and p.dims[d] else 2 for d in (0, 1))
        for p in specs
    ]
    output = [torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]
    return [x.requires_grad_() for x in output]


def partition_of(states: States) -> Any:
    """Return the out spec of a result; varying ones are concatenated along dim 0."""
    return P(
        states.axes("varying"),
        reduced=states.axes("reduced"),
        unreduced=states.axes("unreduced"),
    )
