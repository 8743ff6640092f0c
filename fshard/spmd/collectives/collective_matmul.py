"""Products that overlap with the gather of an operand, or with the reduction of the result.

`all_gather_matmul` multiplies one block of its operand at a time, while the next one arrives: a
`ring_fold` whose results are blocks. In `matmul_reduce_scatter` partial sums move around the ring
in the place of blocks; its gradient is a fold over the blocks of the cotangent. Each is the other's
transpose, and neither ever holds the gathered operand or the sums of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard._torch.functorch import is_transformed
from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Axes, Mesh
from fshard.run.autograd.linear_function import Tensors, is_differentiated
from fshard.run.transports.base import backward_phase, labelled
from fshard.run.transports.divergence_report import backward_label
from fshard.spmd.axis_env import resolve_axes
from fshard.spmd.collectives.collective_plan import check_dim
from fshard.spmd.collectives.ring import Ring, ring_index, ring_of, sizes_along
from fshard.spmd.collectives.ring_fold import fold_on, ring_fold, run_typed

GATHER, SCATTER = "fs.all_gather_matmul", "fs.matmul_reduce_scatter"
Parts = tuple[int, Tensors, Tensors]
"""Index of a step, its parts of results that are joined, and of results that are added up."""
Results = tuple[tuple[Tensors, ...], Tensors]
"""For every joined result its blocks by index, and the sums so far."""


def all_gather_matmul(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    axis_name: Axes,
    *,
    axis: int = 0,
    sizes: Sequence[int] | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """Multiply the gathered `x` by weights, a block at a time while the next one arrives.

    The same as `fs.all_gather(x, axis_name, axis=axis, tiled=True) @ w`, in n steps: each rank
    multiplies the block that it has, and sends it on meanwhile. Several weights, as those of
    queries, keys and values, share the blocks.

    Args:
        x: this rank's block of the first factor, shape (..., rows, k).
        weights: this rank's second factor, shape (k, columns), or a tuple of them. If the last dim
            of `x` is gathered, k is the sum of all ranks' sizes.
        axis_name: the axis, or a tuple of axes.
        axis: the dim of `x` that is gathered.
        sizes: its size on each index along the axes, zeros included. If they are left out, and an
            argument of the mapped function is uneven along the axes, the ranks exchange them.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tensor of shape (..., gathered rows, columns), or a tuple of them; varying along the axes.

    Raises:
        ShardingError: shapes that cannot be multiplied, sizes that are not those of the blocks.

    A rank sends n - 1 blocks and holds at most three. Transpose: `matmul_reduce_scatter` with the
    transposed weight. Backward, blocks are sent again for the weights' gradients, beside those of
    `x`. After collective matmul (Wang et al., ASPLOS 2023), PyTorch's `fused_all_gather_matmul`.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x, w: fs.all_gather_matmul(x, w, "i"), mesh=fs.Mesh(i=2),
    ...                  in_specs=(fs.P("i"), fs.P(None, "i")), out_specs=fs.P(None, "i"))
    >>> x, w = torch.randn(4, 3), torch.randn(3, 6)
    >>> torch.allclose(f(x, w), x @ w, atol=1e-5)
    True
    """
    owner, axes = resolve_axes(axis_name, mesh, GATHER)
    several = not isinstance(weights, Tensor)
    ws = tuple(weights)
    if not several:
        ws = (weights,)
    _check_factors(GATHER, x, ws)
    dim = check_dim(axis, x.ndim, GATHER, "axis")
    numbers = sizes_along(GATHER, "sizes", sizes, owner, axes, x, x.shape[dim])
    contracts = dim == x.ndim - 1
    _check_contracted(GATHER, x, ws, sum(numbers) if contracts else x.shape[-1])
    operands: tuple[Any, ...] = ws
    if contracts:
        operands = tuple(w.split(numbers) for w in ws)
    product = _GatheredProduct(contracts, x.requires_grad)
    joined, added = ring_fold(
        _zeros(x, ws, numbers, dim, contracts), product.step, _merge, x, axis_name,
        operands=operands, pull=product.pull, reads_result=False, dim=dim,
        sizes=numbers if len({*numbers}) > 1 else None, mesh=mesh,
    )  # fmt: skip
    results = added if contracts else tuple(torch.cat(blocks, dim) for blocks in joined)
    return results if several else results[0]


@dataclass(frozen=True, slots=True)
class _GatheredProduct:
    """Products of a block by weights, or by the rows of weights that `contracts` it over."""

    contracts: bool
    needs_block: bool

    def step(self, block: Tensor, index: int, *weights: Any) -> Parts:
        """Return the products of the block of an index."""
        parts = tuple(block @ (w[index] if self.contracts else w) for w in weights)
        return (index, (), parts) if self.contracts else (index, parts, ())

    def pull(
        self, grads: Results, result: None, block: Tensor, index: int, *weights: Any
    ) -> tuple[Tensor | None, tuple[Any, ...]]:
        """Return the gradients of the block of an index, and of the weights."""
        joined, added = grads
        of_block: Tensor | None = None
        of_weights = []
        for i, weight in enumerate(weights):
            g, w = (added[i], weight[index]) if self.contracts else (joined[i][index], weight)
            if self.needs_block:
                part = g @ w.mH
                of_block = part if of_block is None else of_block.add_(part)
            of_w: Any = _outer(block, g) if w.requires_grad else None
            if self.contracts:
                of_w = tuple(of_w if j == index else None for j in range(len(weight)))
            of_weights.append(of_w)
        return of_block, tuple(of_weights)


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    axis_name: Axes,
    *,
    scatter_dimension: int = 0,
    sizes: Sequence[int] | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """Multiply, add the products of all ranks, and keep one slice, a block of it at a time.

    The same as `fs.psum_scatter(x @ weight, axis_name, scatter_dimension=..., tiled=True)`, in n
    steps: each rank computes one block of its product while the sum for the block before moves on.

    Args:
        x: this rank's first factor, shape (..., rows, k).
        weight: this rank's second factor, shape (k, columns).
        axis_name: the axis, or a tuple of axes.
        scatter_dimension: the dim of the product that is split among the ranks.
        sizes: its size on each index along the axes, zeros included; None splits evenly.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        This rank's slice of the sum; varying along the axes.

    Raises:
        ShardingError: shapes that cannot be multiplied, a dim that the ranks do not divide without
            `sizes`, and sizes that do not add up to it.

    A rank sends n - 1 blocks. Transpose: `all_gather_matmul` with the transposed weight; backward,
    blocks of the cotangent move once. After collective matmul (Wang et al., ASPLOS 2023), PyTorch's
    `fused_matmul_reduce_scatter`.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x, w: fs.matmul_reduce_scatter(x, w, "i"), mesh=fs.Mesh(i=2),
    ...                  in_specs=(fs.P(None, "i"), fs.P("i")), out_specs=fs.P("i"))
    >>> x, w = torch.randn(4, 6), torch.randn(6, 3)
    >>> torch.allclose(f(x, w), x @ w, atol=1e-5)
    True
    """
    owner, axes = resolve_axes(axis_name, mesh, SCATTER)
    _check_factors(SCATTER, x, (weight,))
    _check_contracted(SCATTER, x, (weight,), x.shape[-1])
    dim = check_dim(scatter_dimension, x.ndim, SCATTER, "scatter_dimension")
    shape = [*x.shape[:-1], weight.shape[-1]]
    numbers = _scattered_sizes(sizes, shape[dim], dim, owner.axis_size(axes))
    of_columns = dim == x.ndim - 1
    pieces = weight.split(numbers, 1) if of_columns else x.split(numbers, dim)

    def run(xs: Tensors) -> Tensors:
        shape[dim] = numbers[ring_index(SCATTER, owner, axes, xs)]
        block = xs[0].new_empty(()).expand(shape)
        ring = ring_of(SCATTER, owner, axes, (block,), dim, numbers)
        return _ScatteredProduct(ring, dim, of_columns).run(xs)

    return run_typed(SCATTER, axes, run, (*pieces, x if of_columns else weight))[0]


@dataclass(frozen=True, slots=True)
class _ScatteredProduct:
    """Sums over ranks of products of which each rank keeps the block of its index.

    Locals are the n pieces of one factor, by index, and the other factor: pieces of columns of the
    second one, else of rows of the first.
    """

    ring: Ring
    dim: int
    of_columns: bool

    def run(self, xs: Tensors) -> Tensors:
        """Return the block of this rank, alone in a tuple."""
        if is_transformed():
            return self.reduced(xs, lambda block, age: self.ring.send((block,), 1, age))
        if is_differentiated(*xs):
            with labelled(self.ring.label):
                result: Tensors = _ScatterFunction.apply(self, *xs)  # type: ignore[no-untyped-call]
            return result
        return self.reduced(xs, lambda block, age: self.ring.launch((block,), 1, age))

    def reduced(self, xs: Tensors, send: Callable[[Tensor, int], Callable[[], Tensors]]) -> Tensors:
        """Return the sum for this rank; the one for an index begins on the rank after it."""
        n, arriving = self.ring.n, None
        for age in range(1, n + 1):
            block = self.product((self.ring.index - age) % n, xs)
            if arriving is not None:
                block = block + arriving()[0]
            arriving = send(block, age) if age < n else None
        return (block,)

    def product(self, index: int, xs: Tensors) -> Tensor:
        """Return this rank's part of the block of an index."""
        piece, other = xs[index], xs[-1]
        return other @ piece if self.of_columns else piece @ other

    def gradients(self, g: Tensor, xs: Tensors, needs: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of the locals, by a fold over the blocks of the cotangent."""
        pieces, other = xs[:-1], xs[-1]
        of_pieces, of_other = any(needs[:-1]), needs[-1]

        def step(g: Tensor, index: int, pieces: Tensors, other: Tensor) -> Parts:
            first, second = (other, pieces[index]) if self.of_columns else (pieces[index], other)
            of_first, of_second = (
                (of_other, of_pieces) if self.of_columns else (of_pieces, of_other)
            )
            grads = [g @ second.mH if of_first else None, _outer(first, g) if of_second else None]
            joined, added = grads[::-1] if self.of_columns else grads
            return index, _if_any(joined), _if_any(added)

        init: Results = (
            (tuple(map(_no_values, pieces)),) if of_pieces else (),
            (_no_values(other),) if of_other else (),
        )
        joined, added = fold_on(self.ring, init, step, _merge, g, (pieces, other))
        return [*(joined[0] if joined else [None] * len(pieces)), *(added or (None,))]


class _ScatterFunction(torch.autograd.Function):
    """Product whose sums move around the ring; its backward is a fold over cotangents."""

    @staticmethod
    def forward(ctx: Any, product: _ScatteredProduct, *xs: Tensor) -> Tensors:
        ctx.product, ctx.label = product, backward_label()
        ctx.save_for_backward(*xs)
        send = lambda block, age: product.ring.launch((block,), 1, age)  # noqa: E731
        return product.reduced(tuple(x.detach() for x in xs), send)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with backward_phase(ctx.label):
            grads = ctx.product.gradients(grad, ctx.saved_tensors, ctx.needs_input_grad[1:])
        return None, *grads


def _if_any(x: Tensor | None) -> Tensors:
    return () if x is None else (x,)


def _merge(results: Results, parts: Parts) -> Results:
    """Return results with the parts of one index: its blocks, and addends."""
    joined, added = results
    index, blocks, addends = parts
    joined = tuple(
        (*row[:index], block, *row[index + 1 :]) for row, block in zip(joined, blocks, strict=True)
    )
    return joined, tuple(a + b for a, b in zip(added, addends, strict=True))


def _outer(x: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of the second factor of a product, of the first and the cotangent."""
    return x.flatten(0, -2).mH @ g.flatten(0, -2)


def _no_values(x: Tensor) -> Tensor:
    """Return zeros of the shape of `x` in the memory of one."""
    return x.new_zeros(()).expand(x.shape)


def _zeros(
    x: Tensor, ws: Sequence[Tensor], sizes: Sequence[int], dim: int, contracts: bool
) -> Results:
    """Return the results before the first step, in the memory of one zero each."""
    shapes = [[*x.shape[:-1], w.shape[1]] for w in ws]
    if contracts:
        return (), tuple(x.new_zeros(()).expand(shape) for shape in shapes)
    return tuple(
        tuple(x.new_zeros(()).expand(*shape[:dim], n, *shape[dim + 1 :]) for n in sizes)
        for shape in shapes
    ), ()


# -- checks -----------------------------------------------------------------------------------


def _check_factors(where: str, x: Any, ws: Sequence[Any]) -> None:
    """Raise `ShardingError` for factors that are not tensors of these numbers of dims."""
    problems = [
        Problem(f"{name} of {_text(value)}", f"{name} must be {rule}", fix)
        for name, value, is_right, rule, fix in (
            ("x", x, isinstance(x, Tensor) and x.ndim > 1,
             "a tensor of at least 2 dims", "x.unsqueeze(0) for a vector"),
            *(("a weight", w, isinstance(w, Tensor) and w.ndim == 2,
               "a tensor of 2 dims", "fs.all_gather and torch.matmul for batches of weights")
              for w in ws),
        ) if not is_right
    ]  # fmt: skip
    if not ws:
        problems.append(Problem("no weights", "there must be at least one", "a tuple of tensors"))
    raise_if(where, problems)


def _text(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _check_contracted(where: str, x: Tensor, ws: Sequence[Tensor], size: int) -> None:
    """Raise `ShardingError` for weights of another number of rows, or of another dtype."""
    for w in ws:
        if w.shape[0] != size or w.dtype != x.dtype:
            fail(where, f"x of shape {tuple(x.shape)}, {x.dtype}, and a weight of shape "
                 f"{tuple(w.shape)}, {w.dtype}",
                 f"the weight must have {size} rows, the dtype of x",
                 "w.t() for the weight of a linear layer, and w.to(x.dtype)")  # fmt: skip


def _scattered_sizes(given: Sequence[int] | None, size: int, dim: int, n: int) -> tuple[int, ...]:
    """Return the sizes of all ranks' slices of a dim."""
    if given is None and size % n == 0:
        return (size // n,) * n
    sizes = () if given is None else tuple(given)
    if len(sizes) != n or sum(sizes) != size or min(sizes) < 0:
        fail(SCATTER, f"dim {dim} of size {size}, sizes={given!r}",
             f"sizes must be {n} numbers of at least 0 that add up to {size}; without them "
             f"{n} ranks must divide the dim",
             "sizes=spec.shard_sizes(dim) of the result")  # fmt: skip
    return sizes
