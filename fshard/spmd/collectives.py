"""Collectives by axis name, for code that runs as one rank; names and values are `jax.lax`'s.

Inside `fs.shard_map` the axis names are bound; in other rank-local code give `mesh=`. Each is
one typed step on a spec that the axis names make of the local, so that its gradient is the
step's transpose: there is no second autograd rule. All but the index functions take pytrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from fshard.errors import Problem, fail, raise_if
from fshard.mesh import Axes, Mesh, as_axes
from fshard.partition import PartitionSpec
from fshard.program.program import Program
from fshard.program.steps import AllGather, AllReduce, AllToAll, InvariantToReduced, ReduceScatter
from fshard.run.autograd import apply_linear, apply_program
from fshard.run.transport import Finish, Transport, current_rank, notify
from fshard.spec import Spec
from fshard.spmd.axes import resolve
from fshard.tree import Tree, map_leaves

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
]


# -- one step as a program on the local -------------------------------------------------


@lru_cache(maxsize=4096)
def _reduction(
    mesh: Mesh, axes: tuple[str, ...], kind: str, shape: torch.Size, dtype: torch.dtype
) -> Program:
    src = Spec(mesh, PartitionSpec(unreduced=dict.fromkeys(axes, kind)), shape=shape, dtype=dtype)
    return Program(src, (AllReduce(axes),))


@lru_cache(maxsize=4096)
def _gathering(
    mesh: Mesh, axes: tuple[str, ...], dim: int, to: str, shape: torch.Size, dtype: torch.dtype
) -> Program:
    src = _sharded(mesh, axes, dim, shape, dtype)
    return Program(src, (AllGather(axes, dim, "invariant" if to == "invariant" else "reduced"),))


@lru_cache(maxsize=4096)
def _scattering(
    mesh: Mesh, axes: tuple[str, ...], dim: int, shape: torch.Size, dtype: torch.dtype
) -> Program:
    src = Spec(mesh, PartitionSpec(unreduced=set(axes)), shape=shape, dtype=dtype)
    return Program(src, (ReduceScatter(axes, dim),))


@lru_cache(maxsize=4096)
def _exchanging(
    mesh: Mesh,
    axes: tuple[str, ...],
    split: int,
    concat: int,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Program:
    src = _sharded(mesh, axes, concat, shape, dtype)
    return Program(src, (AllToAll(axes, concat, split),))


@lru_cache(maxsize=4096)
def _using(mesh: Mesh, axes: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Program:
    return Program(
        Spec(mesh, PartitionSpec(), shape=shape, dtype=dtype), (InvariantToReduced(axes),)
    )


def _sharded(
    mesh: Mesh, axes: tuple[str, ...], dim: int, shape: torch.Size, dtype: torch.dtype
) -> Spec:
    """The spec of a local of `shape` whose global tensor is cut along `dim`."""
    whole = list(shape)
    whole[dim] *= mesh.axis_size(axes)
    entries = [axes if at == dim else None for at in range(len(whole))]
    return Spec(mesh, PartitionSpec(*entries), shape=whole, dtype=dtype)


def _run(prog: Program, x: torch.Tensor) -> torch.Tensor:
    return apply_program(prog, (x,), everywhere=False)[0]


def _dim(dim: int, ndim: int, where: str, word: str) -> int:
    if not -ndim <= dim < ndim:
        fail(
            where,
            f"{word}={dim} of a tensor of {ndim} dims",
            f"a dim is in {-ndim}..{ndim - 1}" if ndim else "a 0-dim tensor has no dims",
            "name a dim it has",
        )
    return dim % ndim


# -- reductions -------------------------------------------------------------------------


def psum(x: Tree, axis_name: Axes, *, mesh: Mesh | None = None) -> Tree:
    """The sum over the ranks along the axes: varying (or unreduced) to invariant.

    PyTorch's `all_reduce`. Booleans are summed as int64, Python numbers are multiplied by the
    number of ranks. Transpose: `pcast(..., to="varying")`. Raises `ShardingError` for an
    unbound or unknown axis.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: psum(x, "i"), mesh=fs.Mesh(i=2), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([1.0, 2.0]))
    tensor([3.])
    """
    where, axes = _bound("fs.psum", axis_name, mesh)

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value * where.axis_size(axes)
        summand = value.to(torch.int64) if value.dtype == torch.bool else value
        return _run(_reduction(where, axes, "sum", summand.shape, summand.dtype), summand)

    return map_leaves(leaf, x)


def pmean(x: Tree, axis_name: Axes, *, mesh: Mesh | None = None) -> Tree:
    """The mean over the ranks along the axes; integers become the default float."""
    where, axes = _bound("fs.pmean", axis_name, mesh)

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        inexact = value.dtype.is_floating_point or value.dtype.is_complex
        term = value if inexact else value.to(torch.get_default_dtype())
        return _run(_reduction(where, axes, "avg", term.shape, term.dtype), term)

    return map_leaves(leaf, x)


def pmax(x: Tree, axis_name: Axes, *, mesh: Mesh | None = None) -> Tree:
    """The elementwise maximum over the ranks along the axes; ties share the gradient."""
    return _extreme("max", "fs.pmax", x, axis_name, mesh)


def pmin(x: Tree, axis_name: Axes, *, mesh: Mesh | None = None) -> Tree:
    """The elementwise minimum over the ranks along the axes; ties share the gradient."""
    return _extreme("min", "fs.pmin", x, axis_name, mesh)


def _extreme(kind: str, name: str, x: Tree, axis_name: Axes, mesh: Mesh | None) -> Tree:
    where, axes = _bound(name, axis_name, mesh)

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return _run(_reduction(where, axes, kind, value.shape, value.dtype), value)

    return map_leaves(leaf, x)


# -- movements ----------------------------------------------------------------------------


def all_gather(
    x: Tree,
    axis_name: Axes,
    *,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    mesh: Mesh | None = None,
) -> Tree:
    """Everyone's `x`, stacked along a new dim `axis`, or with `tiled` concatenated along it.

    PyTorch's `all_gather_into_tensor`. Several axes are gathered in the order given, the first
    one major. `to` is the state of the result: "varying" or "reduced" (transpose:
    `psum_scatter`), or "invariant" (transpose: a slice).

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: all_gather(x, "i", tiled=True, to="invariant"),
    ...                  mesh=fs.Mesh(i=2), in_specs=fs.P("i"), out_specs=fs.P())
    >>> f(torch.arange(4))
    tensor([0, 1, 2, 3])
    """
    where, axes = _bound("fs.all_gather", axis_name, mesh)
    if to not in ("varying", "invariant", "reduced"):
        fail("fs.all_gather", f"to={to!r}", "to is varying, invariant or reduced", 'to="varying"')

    def leaf(value: torch.Tensor) -> torch.Tensor:
        dim = _dim(axis, value.ndim + (not tiled), "fs.all_gather", "axis")
        piece = value if tiled else value.unsqueeze(dim)
        return _run(_gathering(where, axes, dim, to, piece.shape, piece.dtype), piece)

    return map_leaves(leaf, x)


def psum_scatter(
    x: Tree,
    axis_name: Axes,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    mesh: Mesh | None = None,
) -> Tree:
    """The sum over the ranks along the axes, each rank keeping one slice of it.

    PyTorch's `reduce_scatter_tensor`. With `tiled` the dim is divided by the number of ranks;
    without, it has that size and is removed. Transpose: `all_gather`.
    """
    where, axes = _bound("fs.psum_scatter", axis_name, mesh)
    n = where.axis_size(axes)

    def leaf(value: torch.Tensor) -> torch.Tensor:
        dim = _dim(scatter_dimension, value.ndim, "fs.psum_scatter", "scatter_dimension")
        _check_split("fs.psum_scatter", "scatter_dimension", value, dim, n, tiled)
        out = _run(_scattering(where, axes, dim, value.shape, value.dtype), value)
        return out if tiled else out.squeeze(dim)

    return map_leaves(leaf, x)


def all_to_all(
    x: Tree,
    axis_name: Axes,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    mesh: Mesh | None = None,
) -> Tree:
    """Piece i of `x` along `split_axis` to rank i; the pieces received along `concat_axis`.

    PyTorch's `all_to_all_single`. With `tiled` one dim is divided and the other multiplied by
    the number of ranks; without, the split dim has that size and moves to `concat_axis`.
    Transpose: itself, dims swapped.
    """
    where, axes = _bound("fs.all_to_all", axis_name, mesh)
    n = where.axis_size(axes)

    def leaf(value: torch.Tensor) -> torch.Tensor:
        split = _dim(split_axis, value.ndim, "fs.all_to_all", "split_axis")
        concat = _dim(concat_axis, value.ndim, "fs.all_to_all", "concat_axis")
        _check_split("fs.all_to_all", "split_axis", value, split, n, tiled)
        if tiled and split != concat:
            prog = _exchanging(where, axes, split, concat, value.shape, value.dtype)
            return _run(prog, value)
        # One dim on both sides: as pieces along a dim of their own, which then joins it again.
        pieces = value.unflatten(split, (n, value.shape[split] // n)) if tiled else value
        fresh = pieces.unsqueeze(0)
        prog = _exchanging(where, axes, split + 1, 0, fresh.shape, fresh.dtype)
        moved = _run(prog, fresh).squeeze(split + 1).movedim(0, concat)
        return moved.flatten(concat, concat + 1) if tiled else moved

    return map_leaves(leaf, x)


def _check_split(where: str, word: str, x: torch.Tensor, dim: int, n: int, tiled: bool) -> None:
    size = x.shape[dim]
    if tiled and size % n:
        fail(
            where,
            f"{word}={dim} of size {size}",
            f"the {n} ranks along the axes divide the dim; {size} % {n} = {size % n}",
            f"pad it to {-(-size // n) * n}",
        )
    if not tiled and size != n:
        fail(
            where,
            f"{word}={dim} of size {size}",
            f"without tiled=True the dim has one entry for each of the {n} ranks",
            "tiled=True cuts a longer dim",
        )


@dataclass(frozen=True, slots=True)
class _Permute:
    """Each rank's value to another rank of its group; zeros where nothing arrives."""

    mesh: Mesh
    axes: tuple[str, ...]
    perm: tuple[tuple[int, int], ...]

    @property
    def T(self) -> _Permute:  # noqa: N802 - the mathematical name
        return _Permute(self.mesh, self.axes, tuple((dst, src) for src, dst in self.perm))

    def launch(self, transport: Transport, x: torch.Tensor) -> Finish:
        group = self.mesh.group(transport.rank, self.axes)
        here = group.index(transport.rank)
        goes = dict(self.perm).get(here)
        comes = dict(self.T.perm).get(here)
        send = [x.numel() if at == goes else 0 for at in range(len(group))]
        receive = [x.numel() if at == comes else 0 for at in range(len(group))]
        notify("ppermute", self.axes, 0 if goes in (None, here) else x.nbytes, transport.rank)
        flat = x.reshape(-1)
        moved = transport.all_to_all(flat if goes is not None else flat[:0], send, receive, group)
        if comes is None:

            def nothing() -> torch.Tensor:
                moved()
                return torch.zeros_like(x, memory_format=torch.contiguous_format)

            return nothing
        return lambda: moved().reshape(x.shape)


def ppermute(
    x: Tree, axis_name: Axes, perm: Sequence[tuple[int, int]], *, mesh: Mesh | None = None
) -> Tree:
    """Send `x` from rank `src` to rank `dst` of the axes for every `(src, dst)` in `perm`.

    PyTorch's `permute_tensor`. Ranks that receive nothing get zeros. Transpose: the inverse.
    Raises `ShardingError` for places that are repeated or do not exist.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: ppermute(x, "i", [(0, 1), (1, 2)]), mesh=fs.Mesh(i=3),
    ...                  in_specs=fs.P("i"), out_specs=fs.P("i"))
    >>> f(torch.tensor([1.0, 2.0, 3.0]))
    tensor([0., 1., 2.])
    """
    where, axes = _bound("fs.ppermute", axis_name, mesh)
    n = where.axis_size(axes)
    pairs = tuple((int(src), int(dst)) for src, dst in perm)
    problems = [
        Problem(
            f"perm={list(perm)}",
            f"places along {axes} are {-n}..{n - 1}",
            f"({src % n}, {dst % n}), say",
        )
        for src, dst in pairs
        if not (-n <= src < n and -n <= dst < n)
    ]
    pairs = tuple((src % n, dst % n) for src, dst in pairs)
    for word, places in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        twice = sorted({place for place in places if places.count(place) > 1})
        if twice and not problems:
            problems.append(
                Problem(
                    f"perm={list(perm)} with {word} {twice[0]} twice",
                    f"every {word} occurs at most once",
                    "all_gather sends one value to several ranks",
                )
            )
    raise_if("fs.ppermute", problems)
    op = _Permute(where, axes, pairs)
    return map_leaves(lambda value: apply_linear(op, (value,), everywhere=False)[0], x)


# -- types and places -----------------------------------------------------------------------

CASTS = {
    ("invariant", "varying"),
    ("invariant", "reduced"),
    ("varying", "unreduced"),
    ("reduced", "varying"),
}


def pcast(
    x: Tree, axis_name: Axes, *, to: str, src: str | None = None, mesh: Mesh | None = None
) -> Tree:
    """The same values in another state; nothing moves now, the transpose may.

    From invariant to "varying" or "reduced" the transpose is a sum over the ranks; from
    varying to "unreduced" and from reduced to "varying" it is nothing. `src` is the state that
    `x` has; it is taken to be varying for `to="unreduced"`, else invariant.

    >>> import fshard as fs
    >>> w, x = torch.tensor(2.0, requires_grad=True), torch.tensor([1.0, 10.0])
    >>> f = fs.shard_map(lambda w, x: pcast(w, "i", to="varying") * x, mesh=fs.Mesh(i=2),
    ...                  in_specs=(fs.P(), fs.P("i")), out_specs=fs.P("i"))
    >>> f(w, x).sum().backward()
    >>> w.grad
    tensor(11.)
    """
    where, axes = _bound("fs.pcast", axis_name, mesh)
    state = src or ("varying" if to == "unreduced" else "invariant")
    if (state, to) not in CASTS:
        fail(
            "fs.pcast",
            f"a cast from {state} to {to!r}",
            "casts are " + ", ".join(f"{a} to {b}" for a, b in sorted(CASTS)),
            "psum goes from varying or unreduced to invariant",
        )
    if state != "invariant":
        return x

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        return _run(_using(where, axes, value.shape, value.dtype), value)

    return map_leaves(leaf, x)


def axis_index(axis_name: Axes, *, mesh: Mesh | None = None) -> torch.Tensor:
    """This rank's index along the axes, row-major in the order given, as a 0-dim int64 tensor."""
    where, axes = _bound("fs.axis_index", axis_name, mesh)
    rank = current_rank(where, "fs.axis_index").rank
    return torch.tensor(where.index(rank, axes))


def axis_size(axis_name: Axes, *, mesh: Mesh | None = None) -> int:
    """How many ranks there are along the axes."""
    where, axes = _bound("fs.axis_size", axis_name, mesh)
    return where.axis_size(axes)


def _bound(where: str, axes: Axes, mesh: Mesh | None) -> tuple[Mesh, tuple[str, ...]]:
    return resolve(as_axes(axes), mesh, where)
