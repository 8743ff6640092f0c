"""`fs.domain.halo_exchange` and `halo_reduce`: shards extended by their neighbours' elements.

Both are a halo step of a program and local padding, on pairs, and in the body of a `shard_map`,
where the axes and sizes of the dims are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Axes
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair
from fshard.layout.validation import as_ints
from fshard.ops.core.windows import BOUNDARIES, Window, clamped, reflected
from fshard.ops.rules.window.taps import Tap, gather_taps, scatter_taps
from fshard.ops.rules.window.window_dims import Span
from fshard.program.halo_boxes import reversed_halo
from fshard.program.halo_steps import HaloExchange, Windows
from fshard.program.program import Program
from fshard.run.creation import rank_on_mesh
from fshard.run.graphs.graph_node import graph_node
from fshard.spmd.axis_env import current_tracker, resolve_axes
from fshard.spmd.collectives.ring import sizes_along
from fshard.spmd.tracking.insert_casts import join_operands, replace_tensors
from fshard.spmd.tracking.torch_effects import Action, OpEffect
from fshard.spmd.types import States, TypeRule

Widths = Mapping[int, tuple[int, int]]
"""For each extended dim the elements before each shard and after it."""


def halo_exchange(
    x: Any,
    widths: Widths,
    boundary: str = "zeros",
    *,
    axis_name: Mapping[int, Axes] | None = None,
    sizes: Mapping[int, Sequence[int]] | None = None,
) -> Any:
    """Extend each shard along dims by the elements before it and after it, corners included.

    On a pair, or on a tensor of a `shard_map`'s body with `axis_name`. Every rank receives what it
    lacks and no more, in one launch, from as many ranks as it takes. Empty shards stay empty.

    Args:
        x: a pair, or in a body this rank's tensor.
        widths: for each dim to extend the numbers of elements before and after; the dim need not
            be sharded.
        boundary: the elements beyond the ends of a dim: "zeros", "circular" (from the other end),
            "reflect" (mirrored at the first and last element) or "replicate" (these repeated).
        axis_name: in a body, the axes along which each of these dims is sharded.
        sizes: in a body, the sizes of the shards of these dims, on every rank the same. Sizes that
            are left out are equal, or exchanged by the ranks if an argument of the mapped function
            is uneven along the axes.

    Returns:
        A pair whose layout has the extended shards, `f32[12@h]` for `f32[8@h]` extended by one on
        two ranks, or this rank's extended tensor.

    Raises:
        ShardingError: dims or widths out of range, an unknown boundary, a reflection that is wider
            than the dim less one, elements of an empty dim.

    The transpose, and gradient, is `fs.domain.halo_reduce`. The exchange is `fs.HaloExchange`.

    >>> import torch
    >>> import fshard as fs
    >>> x = fs.shard(torch.arange(1.0, 7), fs.Spec(fs.Mesh(h=2), fs.P("h"), shape=(6,)))
    >>> y = fs.domain.halo_exchange(x, {0: (1, 1)}, boundary="circular")
    >>> y.spec, y.local[0]
    (f32[10@h], tensor([6., 1., 2., 3., 4.]))
    """
    return _run("fs.domain.halo_exchange", x, widths, boundary, axis_name, sizes, reverse=False)


def halo_reduce(
    x: Any,
    widths: Widths,
    boundary: str = "zeros",
    *,
    axis_name: Mapping[int, Axes] | None = None,
    sizes: Mapping[int, Sequence[int]] | None = None,
) -> Any:
    """Add the elements around extended shards to the shards that have them: the transpose.

    Args:
        x: a pair with the layout that `fs.domain.halo_exchange` returns, or in a body this rank's
            extended tensor.
        widths: for each extended dim how many elements were added before and after.
        boundary: the meaning of the elements beyond the ends of a dim, as of
            `fs.domain.halo_exchange`; with "zeros" they are dropped.
        axis_name: in a body, the axes along which each of these dims is sharded.
        sizes: in a body, the sizes that the shards had before they were extended, and that those
            of the result have: as for `fs.domain.halo_exchange`.

    Returns:
        A pair with the shards before they were extended, or this rank's tensor.

    Raises:
        ShardingError: as `fs.domain.halo_exchange`, and shards that are shorter than the widths.

    The transpose, and gradient, is `fs.domain.halo_exchange`.

    >>> import torch
    >>> import fshard as fs
    >>> x = fs.shard(torch.ones(6), fs.Spec(fs.Mesh(h=2), fs.P("h"), shape=(6,)))
    >>> extended = fs.domain.halo_exchange(x, {0: (1, 1)})
    >>> fs.unshard(fs.domain.halo_reduce(extended, {0: (1, 1)}))
    tensor([1., 1., 2., 2., 1., 1.])
    """
    return _run("fs.domain.halo_reduce", x, widths, boundary, axis_name, sizes, reverse=True)


@dataclass(frozen=True, slots=True)
class _Halo:
    """Exchange of one layout: the program, and the windows of the extended dims.

    Attributes:
        spec: the layout of the shards.
        extended: the layout of the extended shards.
        program: the halo exchange, None if every window is the own shard.
        windows: the window of each extended dim.
    """

    spec: Spec
    extended: Spec
    program: Program | None
    windows: dict[int, Window]

    @staticmethod
    def of(spec: Spec, widths: Widths, boundary: str) -> _Halo:
        """Return the exchange from a layout of shards."""
        windows, rows = dict[int, Window](), list[Windows | None]([None] * spec.ndim)
        shape, sizes = list(spec.shape), dict[int, Sequence[int]]()
        for dim, (before, after) in widths.items():
            size, shards = spec.shape[dim], spec.shard_sizes(dim)
            window = Window("o", "i", size, size, 1, -before, after, anchor=0,
                            boundary="padded" if boundary == "zeros" else boundary)  # fmt: skip
            windows[dim], rows[dim] = window, window.windows(shards)
            sizes[dim] = [size + before + after if size else 0 for size in shards]
            shape[dim] = sum(sizes[dim])
        filled = "zeros" if boundary == "zeros" else "circular"
        program = Program(spec, (HaloExchange(tuple(rows), filled),)) if windows else None
        others = {d: s for d, s in enumerate(spec.sizes) if s is not None and d not in sizes}
        extended = Spec(spec.mesh, spec.partition, shape=shape, dtype=spec.dtype,
                        sizes={**others, **sizes})  # fmt: skip
        return _Halo(spec, extended, program, windows)

    def parts(self, rank: int) -> list[tuple[int, Window, Span]]:
        """Return the extended dims of a rank with their windows and spans."""
        offsets, shape = self.spec.offsets(rank), self.spec.local_shape(rank)
        return [
            (dim, w, Span(offsets[dim], offsets[dim] + shape[dim],
                          w.reach(offsets[dim], offsets[dim] + shape[dim])))
            for dim, w in self.windows.items() if shape[dim]
        ]  # fmt: skip

    def pad(self, x: Tensor, rank: int) -> Tensor:
        """Return the extended shard of a rank from its window."""
        for dim, window, span in self.parts(rank):
            if window.boundary in ("reflect", "replicate"):
                x = gather_taps(x, dim, span, _taps(window, span))
        return x

    def unpad(self, x: Tensor, rank: int) -> Tensor:
        """Return the transpose of `pad`."""
        for dim, window, span in self.parts(rank):
            if window.boundary in ("reflect", "replicate"):
                x = scatter_taps(x, dim, span, _taps(window, span))
        return x


def _taps(window: Window, span: Span) -> list[Tap]:
    """Return the elements that an extended shard has."""
    at = reflected if window.boundary == "reflect" else clamped
    positions = range(span.start + window.low, span.stop + window.high)
    return [([at(position, window.size) for position in positions], None)]


def _run(
    where: str, x: Any, widths: Widths, boundary: str, axis_name: Mapping[int, Axes] | None,
    sizes: Mapping[int, Sequence[int]] | None, *, reverse: bool,
) -> Any:  # fmt: skip
    """Return the exchange of a pair or of the tensor of a body, or the reduction."""
    if is_pair(x):
        if axis_name is not None or sizes is not None:
            fail(where, f"a pair with axis_name={axis_name!r}, sizes={sizes!r}",
                 "both must be left out: the layout of a pair has them",
                 "the pair and the widths alone")  # fmt: skip
        return _run_on_pair(where, x, widths, boundary, reverse)
    if not isinstance(x, Tensor):
        fail(where, f"an operand of type {type(x).__name__}",
             "the operand must be a pair, or a tensor of a body", "fs.shard(x, spec)"
             )  # fmt: skip
    widths = _checked(where, widths, boundary, x.ndim)
    if not isinstance(axis_name, Mapping) or not axis_name:
        fail(where, f"a tensor with axis_name={axis_name!r}",
             "the operand must be a pair, or a tensor of a body, in which the axes have names",
             'axis_name={0: "h"} in fs.shard_map')  # fmt: skip
    spec = _body_spec(where, x, widths, axis_name, sizes or {}, reverse=reverse)
    move = partial(_moved, where, spec=spec, widths=widths, boundary=boundary, reverse=reverse)
    tracker = current_tracker()
    if tracker is None:
        return move(Sharded(x, spec))[0]
    axes = tuple(axis for dim in spec.partition.dims for axis in dim)
    effect = OpEffect(where, Action.OP, TypeRule.OTHER)
    states, casts = join_operands(tracker, effect, (x,), {}, also=(States.varying(axes),))
    with tracker.pause():
        (local,) = replace_tensors((x,), casts)
        result = move(Sharded(local, spec))[0]
    tracker.record(result, states)
    return result


@graph_node
def _run_on_pair(where: str, pair: Any, widths: Widths, boundary: str, reverse: bool) -> Sharded:
    """Return the exchange of a pair, or the reduction."""
    local, spec = pair
    widths = _checked(where, widths, boundary, spec.ndim)
    shards = _shards(where, spec, widths) if reverse else spec
    moved = _moved(where, Sharded(local, spec), shards, widths, boundary, reverse=reverse)
    return Sharded(*moved)


def _moved(
    where: str, pair: Sharded, spec: Spec, widths: Widths, boundary: str, *, reverse: bool
) -> tuple[Any, Spec]:
    """Return the local and the layout of an exchange from `spec`, or of a reduction to it."""
    for dim, pair_of in widths.items():
        _check_room(where, spec, dim, pair_of, boundary)
    halo = _Halo.of(spec, widths, boundary)
    if halo.program is None:
        return pair.local, spec
    local = pair.local
    if reverse:
        (step,) = halo.program.steps
        assert isinstance(step, HaloExchange)
        back = Program(halo.program.dst, (reversed_halo(step, spec),))
        return back(_on_ranks(where, local, halo.unpad, spec)), spec
    return _on_ranks(where, halo.program(local), halo.pad, spec), halo.extended


def _on_ranks(where: str, local: Any, function: Callable[[Tensor, int], Tensor], spec: Spec) -> Any:
    """Return a function of the local of this rank, or of those of all ranks."""
    if isinstance(local, Tensor):
        return function(local, rank_on_mesh(spec.mesh, where))
    return tuple(function(x, rank) for x, rank in zip(local, spec.mesh.ranks, strict=True))


# -- layouts and checks -----------------------------------------------------------------------


def _checked(where: str, widths: Any, boundary: str, ndim: int) -> dict[int, tuple[int, int]]:
    """Return widths by non-negative dims.

    Raises:
        ShardingError: dims or widths out of range, and an unknown boundary.
    """
    fix = "{0: (1, 1)}, say"
    if not isinstance(widths, Mapping):
        fail(where, f"widths={widths!r}", "widths must map dims to pairs of numbers", fix)
    problems = [
        Problem(f"widths[{dim!r}]={pair!r}", f"a dim must be in {-ndim}..{ndim - 1}, and have "
                "numbers of at least 0 before and after", fix)
        for dim, pair in widths.items()
        if type(dim) is not int or not -ndim <= dim < ndim or as_ints(pair) is None
        or len(pair) != 2 or min(pair) < 0
    ]  # fmt: skip
    if boundary not in BOUNDARIES:
        problems.append(Problem(f"boundary={boundary!r}", f"boundary must be one of "
                                f"{', '.join(BOUNDARIES)}", 'boundary="zeros"'))  # fmt: skip
    raise_if(where, problems)
    if len({dim % ndim for dim in widths}) < len(widths):
        fail(where, f"widths={widths!r}", "a dim must be listed once", fix)
    return {dim % ndim: (int(a), int(b)) for dim, (a, b) in widths.items()}


def _check_room(where: str, spec: Spec, dim: int, widths: tuple[int, int], boundary: str) -> None:
    """Raise if a boundary needs elements that a dim does not have."""
    size = spec.shape[dim]
    if boundary == "reflect" and max(widths) >= max(size, 1):
        fail(where, f"widths {widths} of dim {dim}", f"a reflection must be shorter than the dim, "
             f"of {size}", f"at most {max(size - 1, 0)} elements")  # fmt: skip


def _shards(where: str, spec: Spec, widths: Widths) -> Spec:
    """Return the layout of the shards that were extended to `spec`."""
    sizes = {d: s for d, s in enumerate(spec.sizes) if s is not None}
    shape = list(spec.shape)
    for dim, (before, after) in widths.items():
        rows = [n - before - after if n else 0 for n in spec.shard_sizes(dim)]
        if min(rows) < 0:
            fail(where, f"shards of {spec.shard_sizes(dim)} in dim {dim}",
                 f"extended shards must have {before} + {after} elements, or none",
                 "the result of fs.domain.halo_exchange with these widths")  # fmt: skip
        sizes[dim], shape[dim] = tuple(rows), sum(rows)
    return Spec(spec.mesh, spec.partition, shape=shape, dtype=spec.dtype, sizes=sizes)


def _body_spec(
    where: str, x: Tensor, widths: Widths, axis_name: Mapping[int, Axes],
    given: Mapping[int, Sequence[int]], *, reverse: bool,
) -> Spec:  # fmt: skip
    """Return the layout of the shards of which a rank of a mapped function has one."""
    dims, shape = list[Any]([None] * x.ndim), list(x.shape)
    for name, by_dim in (("axis_name", axis_name), ("sizes", given)):
        if not isinstance(by_dim, Mapping) or not all(
            type(dim) is int and -x.ndim <= dim < x.ndim for dim in by_dim
        ):  # fmt: skip
            fail(where, f"{name}={by_dim!r}", f"{name} must map dims in {-x.ndim}..{x.ndim - 1}",
                 'axis_name={0: "h"}' if name == "axis_name" else "sizes={0: (3, 2)}"
                 )  # fmt: skip
    axes_of = {dim % x.ndim: axes for dim, axes in axis_name.items()}
    sizes = {dim % x.ndim: rows for dim, rows in given.items()}
    mesh, _ = resolve_axes(next(iter(axes_of.values()), ()), None, where)
    found: dict[int, Sequence[int]] = {}
    for dim, (before, after) in widths.items():
        own = x.shape[dim]
        own = own - before - after if reverse and own else own
        shape[dim] = own
        if dim in axes_of:
            _, axes = resolve_axes(axes_of[dim], None, where)
            rows = sizes_along(where, f"sizes[{dim}]", sizes.get(dim), mesh, axes, x, own)
            dims[dim], shape[dim], found[dim] = axes, sum(rows), rows
    return Spec(mesh, PartitionSpec(*dims), shape=shape, dtype=x.dtype, sizes=found)
