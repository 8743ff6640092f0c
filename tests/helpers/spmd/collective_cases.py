"""Collectives paired with oracles on the list of all ranks' tensors, and checks of one rank.

Gradients of a rank are those of the oracle, differentiated jointly: a result that is invariant
counts once per group, and so does an argument."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fshard as fs
from fshard import Mesh
from tests.helpers.spec_grid import random_global

Tensors = list[torch.Tensor]
MESHES = [
    Mesh(i=4),
    Mesh(x=2, y=3),
    Mesh({"x": 2, "y": 3}, devices=(4, 1, 5, 0, 2, 3)),
    Mesh(x=4, y=2),
]


@dataclass(frozen=True)
class Collective:
    """Collective of one tensor; `oracle` maps a group's tensors to the group's results.

    `shape` maps the number of ranks to an argument's shape; `takes` and `gives` are "varying" or
    "same", for equal values on all ranks.
    """

    name: str
    run: Callable[..., torch.Tensor]
    oracle: Callable[[Tensors], Tensors]
    shape: Callable[[int], tuple[int, ...]] = lambda n: (2, 3)
    takes: str = "varying"
    gives: str = "varying"
    linear: bool = True


def repeat(x: torch.Tensor, n: int) -> Tensors:
    return [x] * n


def gathered(dim: int, tiled: bool) -> Callable[[Tensors], Tensors]:
    join = torch.cat if tiled else torch.stack
    return lambda xs: repeat(join(xs, dim), len(xs))


def scattered(dim: int, tiled: bool) -> Callable[[Tensors], Tensors]:
    def oracle(xs: Tensors) -> Tensors:
        total = torch.stack(xs).sum(0)
        return list(total.chunk(len(xs), dim) if tiled else total.unbind(dim))

    return oracle


def exchanged(split: int, concat: int, tiled: bool) -> Callable[[Tensors], Tensors]:
    def oracle(xs: Tensors) -> Tensors:
        n = len(xs)
        pieces = [x.chunk(n, split) if tiled else x.unbind(split) for x in xs]
        join = torch.cat if tiled else torch.stack
        return [join([piece[place] for piece in pieces], concat) for place in range(n)]

    return oracle


def permuted(perm: Callable[[int], Sequence[tuple[int, int]]]) -> Callable[[Tensors], Tensors]:
    def oracle(xs: Tensors) -> Tensors:
        comes = {dst % len(xs): src % len(xs) for src, dst in perm(len(xs))}
        return [xs[comes[index]] if index in comes else 0 * xs[index] for index in range(len(xs))]

    return oracle


def ring(n: int) -> list[tuple[int, int]]:
    return [(index, (index + 1) % n) for index in range(n)]


def shift(n: int) -> list[tuple[int, int]]:
    return [(index, index + 1) for index in range(n - 1)]


def reductions() -> list[Collective]:
    def everywhere(reduce: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
        return lambda xs: repeat(reduce(torch.stack(xs)), len(xs))

    return [
        Collective("psum", fs.psum, everywhere(lambda x: x.sum(0)), gives="same"),
        Collective("pmean", fs.pmean, everywhere(lambda x: x.mean(0)), gives="same"),
        Collective("pmax", fs.pmax, everywhere(lambda x: x.amax(0)), gives="same", linear=False),
        Collective("pmin", fs.pmin, everywhere(lambda x: x.amin(0)), gives="same", linear=False),
        Collective("pprod", fs.pprod, everywhere(lambda x: x.prod(0)), gives="same", linear=False),
        Collective(
            "pcast", lambda x, ax, **o: fs.pcast(x, ax, to="varying", **o), list, takes="same"
        ),
    ]


def gathers() -> Iterator[Collective]:
    for dim, tiled in itertools.product((0, 1, -1), (False, True)):
        for to in ("varying", "invariant", "reduced"):
            yield Collective(
                f"all_gather({dim}, tiled={tiled}, {to})",
                lambda x, ax, d=dim, t=tiled, s=to, **o: fs.all_gather(
                    x, ax, axis=d, tiled=t, to=s, **o
                ),
                gathered(dim, tiled),
                gives="same" if to == "invariant" else "varying",
            )


def scatters() -> Iterator[Collective]:
    for dim, tiled in itertools.product((0, 1, -1), (False, True)):
        yield Collective(
            f"psum_scatter({dim}, tiled={tiled})",
            lambda x, ax, d=dim, t=tiled, **o: fs.psum_scatter(
                x, ax, scatter_dimension=d, tiled=t, **o
            ),
            scattered(dim, tiled),
            sized(dim, 2, tiled),
        )


def reduced_scatters() -> Iterator[Collective]:
    reductions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "avg": lambda x: x.mean(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0),
        "product": lambda x: x.prod(0),
    }  # fmt: skip
    for kind, reduce in reductions.items():
        yield Collective(
            f"psum_scatter by {kind}",
            lambda x, ax, k=kind, **o: fs.psum_scatter(
                x, ax, scatter_dimension=1, tiled=True, kind=k, **o
            ),
            lambda xs, f=reduce: list(f(torch.stack(xs)).chunk(len(xs), 1)),
            sized(1, 2, True),
            linear=kind == "avg",
        )


def exchanges() -> Iterator[Collective]:
    dims = ((0, 0), (1, 1), (0, 1), (1, 0), (-1, 0), (2, 1), (0, 2))
    for (split, concat), tiled in itertools.product(dims, (False, True)):
        yield Collective(
            f"all_to_all({split}, {concat}, tiled={tiled})",
            lambda x, ax, s=split, c=concat, t=tiled, **o: fs.all_to_all(x, ax, s, c, tiled=t, **o),
            exchanged(split, concat, tiled),
            sized(split, 3, tiled),
        )
    yield Collective(
        "pswapaxes", lambda x, ax, **o: fs.pswapaxes(x, ax, -1, **o), exchanged(2, 2, False),
        sized(2, 3, False),
    )  # fmt: skip


def permutes() -> Iterator[Collective]:
    for perm in (ring, shift, lambda n: [(0, n - 1)], lambda n: [(-1, 0)], lambda n: []):
        yield Collective(
            f"ppermute({perm(4)})",
            lambda x, ax, p=perm, **o: fs.ppermute(x, ax, p(fs.axis_size(ax, **o)), **o),
            permuted(perm),
        )

    for turn in (1, 2):
        yield Collective(
            f"pshuffle({turn})",
            lambda x, ax, t=turn, **o: fs.pshuffle(x, ax, turned(fs.axis_size(ax, **o), t), **o),
            lambda xs, t=turn: [xs[index] for index in turned(len(xs), t)],
        )
    for source in (0, 1, -1):
        yield Collective(
            f"pbroadcast({source})",
            lambda x, ax, s=source, **o: fs.pbroadcast(x, ax, s, **o),
            lambda xs, s=source: repeat(xs[s], len(xs)),
        )


def turned(n: int, by: int) -> list[int]:
    return [(index + by) % n for index in range(n)]


def in_groups(n: int) -> list[list[int]]:
    """Return odd indices, in reverse, and even ones; for odd n groups of one index."""
    return (
        [[index] for index in turned(n, 1)]
        if n % 2
        else [[*range(1, n, 2)][::-1], [*range(0, n, 2)]]
    )


def within(oracle: Callable[[Tensors], Tensors]) -> Callable[[Tensors], Tensors]:
    """Return an oracle that works in every group of `in_groups`."""

    def each_group(xs: Tensors) -> Tensors:
        ys: dict[int, torch.Tensor] = {}
        for group in in_groups(len(xs)):
            ys |= dict(zip(group, oracle([xs[index] for index in group]), strict=True))
        return [ys[index] for index in range(len(xs))]

    return each_group


def grouped() -> Iterator[Collective]:
    """Yield movements within groups."""

    def shape(item: Callable[[int], tuple[int, ...]]) -> Callable[[int], tuple[int, ...]]:
        return lambda n: item(len(in_groups(n)[0]))

    def run(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
        return lambda x, ax, **o: fn(
            x, ax, *args, axis_index_groups=in_groups(fs.axis_size(ax, **o)), **options, **o
        )

    for tiled in (False, True):
        yield Collective(
            f"all_gather in groups, tiled={tiled}",
            run(fs.all_gather, axis=1, tiled=tiled), within(gathered(1, tiled)),
        )  # fmt: skip
        yield Collective(
            f"psum_scatter in groups, tiled={tiled}",
            run(fs.psum_scatter, scatter_dimension=1, tiled=tiled), within(scattered(1, tiled)),
            shape(sized(1, 2, tiled)),
        )  # fmt: skip
        yield Collective(
            f"all_to_all in groups, tiled={tiled}",
            run(fs.all_to_all, 0, 1, tiled=tiled), within(exchanged(0, 1, tiled)),
            shape(sized(0, 2, tiled)),
        )  # fmt: skip
    yield Collective(
        "pswapaxes in groups", run(fs.pswapaxes, 1), within(exchanged(1, 1, False)),
        shape(sized(1, 2, False)),
    )  # fmt: skip


def sized(dim: int, ndim: int, tiled: bool) -> Callable[[int], tuple[int, ...]]:
    """Return a function from n to a shape that n ranks divide along `dim`."""
    return lambda n: tuple(
        ((2 * n) if tiled else n) if index == dim % ndim else 2 + index for index in range(ndim)
    )


CASES = [
    *reductions(), *gathers(), *scatters(), *reduced_scatters(), *exchanges(), *permutes(),
    *grouped(),
]  # fmt: skip


def axes_of(mesh: Mesh) -> list[tuple[str, ...]]:
    """Return every single axis, and all axes in both orders."""
    names = mesh.axes
    return [(name,) for name in names] + ([] if len(names) < 2 else [names, names[::-1]])


def arguments(item: Collective, mesh: Mesh, axes: tuple[str, ...], dtype: torch.dtype) -> Tensors:
    """Return one tensor per rank; equal along the axes if the argument is invariant."""
    n = mesh.axis_size(axes)
    same = item.takes == "same"
    xs = [random_global(item.shape(n), dtype, seed) for seed in mesh.ranks]
    return [xs[list(mesh.ranks).index(mesh.group(r, axes)[0])] if same else x
            for r, x in zip(mesh.ranks, xs, strict=True)]  # fmt: skip


def cotangents(item: Collective, mesh: Mesh, axes: tuple[str, ...], ys: Tensors) -> Tensors:
    seeds = [
        100 + (mesh.group(rank, axes)[0] if item.gives == "same" else rank) for rank in mesh.ranks
    ]
    return [random_global(y.shape, y.dtype, s) for y, s in zip(ys, seeds, strict=True)]


def by_oracle(
    item: Collective, mesh: Mesh, axes: tuple[str, ...], xs: Tensors
) -> tuple[Tensors, Tensors, Tensors]:
    """Return results, cotangents and gradients in rank order."""
    place = {rank: index for index, rank in enumerate(mesh.ranks)}
    leaves = [x.clone().requires_grad_() for x in xs]
    ys: dict[int, torch.Tensor] = {}
    for group in mesh.groups(axes):
        outs = item.oracle([leaves[place[rank]] for rank in group])
        ys |= dict(zip(group, outs, strict=True))
    results = [ys[rank] for rank in mesh.ranks]
    cts = cotangents(item, mesh, axes, results)
    counted = [
        index for index, rank in enumerate(mesh.ranks)
        if item.gives != "same" or rank == mesh.group(rank, axes)[0]
    ]  # fmt: skip
    grads = torch.autograd.grad(
        [results[index] for index in counted],
        leaves,
        [cts[index] for index in counted],
        allow_unused=True,
    )
    full = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, xs, strict=True)]
    if item.takes == "same":
        full = [sum(full[place[r]] for r in mesh.group(rank, axes)) for rank in mesh.ranks]  # type: ignore[misc]
    return [y.detach() for y in results], cts, full


def on_rank(
    item: Collective, mesh: Mesh, axes: tuple[str, ...], x: torch.Tensor, ct: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return one rank's result, gradient and, if linear, the transpose's transpose."""
    leaf = x.clone().requires_grad_()
    y = item.run(leaf, axes, mesh=mesh)
    cotangent = ct.clone().requires_grad_()
    (grad,) = torch.autograd.grad(y, leaf, cotangent, create_graph=True)
    again = torch.autograd.grad(grad, cotangent, x)[0] if item.linear else None
    return y.detach(), grad.detach(), again


def run_on_rank(
    item: Collective, mesh: Mesh, axes: tuple[str, ...], everyone: tuple[Tensors, Tensors]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return `on_rank` of this rank's tensors."""
    place = list(mesh.ranks).index(this_rank(mesh))
    return on_rank(item, mesh, axes, *(tensors[place] for tensors in everyone))


def this_rank(mesh: Mesh) -> int:
    """Return the rank that runs the calling code."""
    return mesh.devices[int(fs.axis_index(mesh.axes, mesh=mesh))]
