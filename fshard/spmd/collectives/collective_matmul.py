"""Products that overlap with the gather of an operand, or with the reduction of the result.

`all_gather_matmul` multiplies one block of its operand at a time, while the next one arrives: a
`ring_fold` whose results are blocks. In `matmul_reduce_scatter` partial sums move around the ring
in the place of blocks. Each is the other's transpose: the gradient of a gathered factor is a ring
of partial sums, the gradient of a scattered product a fold over the blocks of the cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard._torch.functorch import is_transformed
from fshard._torch.legacy_vmap import map_batch_elements
from fshard._util.errors import Problem, fail, raise_if
from fshard._util.tracebacks import hiding_frames
from fshard.layout.mesh import Axes, Mesh
from fshard.run.autograd.linear_function import Tensors, is_differentiated
from fshard.run.autograd.saved_values import saved_tensors
from fshard.run.transports.base import backward_phase, labelled
from fshard.run.transports.divergence_report import backward_label
from fshard.spmd.axis_env import resolve_axes
from fshard.spmd.collectives.collective_plan import check_dim
from fshard.spmd.collectives.ring import Ring, ring_index, ring_of, sizes_along
from fshard.spmd.collectives.ring_fold import Send, fold_on, gradients_of, run_typed

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
    keep_gathered: bool = True,
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
        keep_gathered: keep the gathered blocks for the gradients of the weights, as a gather does.
            False sends them again in the backward pass: a rank never holds more than three.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tensor of shape (..., gathered rows, columns), or a tuple of them; varying along the axes.

    Raises:
        ShardingError: shapes that cannot be multiplied, sizes that are not those of the blocks.

    A rank sends n - 1 blocks, and as many of the gradient of `x`. Transpose:
    `matmul_reduce_scatter` with the transposed weight. After collective matmul (Wang et al., ASPLOS
    2023), PyTorch's `fused_all_gather_matmul`.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x, w: fs.all_gather_matmul(x, w, "i"), mesh=fs.Mesh(i=2),
    ...                  in_specs=(fs.P("i"), fs.P(None, "i")), out_specs=fs.P(None, "i"))
    >>> x, w = torch.randn(4, 3), torch.randn(3, 6)
    >>> torch.allclose(f(x, w), x @ w, atol=1e-5)
    True
    """
    owner, axes = resolve_axes(axis_name, mesh, GATHER)
    ws = (weights,) if isinstance(weights, Tensor) else tuple(weights)
    _check_factors(GATHER, x, ws)
    dim = check_dim(axis, x.ndim, GATHER, "axis")
    numbers = sizes_along(GATHER, "sizes", sizes, owner, axes, x, x.shape[dim])
    _check_contracted(GATHER, x, ws, sum(numbers) if dim == x.ndim - 1 else x.shape[-1])
    ring = ring_of(GATHER, owner, axes, (x,), dim, numbers if len({*numbers}) > 1 else None)
    product = _GatheredProduct(ring, dim, numbers, x.requires_grad)
    results = run_typed(GATHER, axes, product.saved if keep_gathered else product.run, (x, *ws))
    return results[0] if isinstance(weights, Tensor) else results


@dataclass(frozen=True, slots=True)
class _GatheredProduct:
    """Products of blocks by weights; `sizes` are those of the blocks along the gathered dim."""

    ring: Ring
    dim: int
    sizes: tuple[int, ...]
    needs_block: bool

    def contracts(self, x: Tensor) -> bool:
        """Return True if the gathered dim is contracted: each block has rows of the weights."""
        return self.dim == x.ndim - 1

    def run(self, xs: Tensors) -> Tensors:
        """Return the products of the first factor's blocks by the weights, the others of `xs`."""
        return self.folded(xs, self.step)

    def saved(self, xs: Tensors) -> Tensors:
        """Return the products, after which the blocks are there for the weights' gradients."""
        needs_blocks = is_differentiated(*xs[1:]) and not is_transformed()
        if not needs_blocks:
            return self.run(xs)
        with labelled(self.ring.label):
            results: Tensors = _GatherFunction.apply(self, *xs)  # type: ignore[no-untyped-call]
        return results

    def folded(self, xs: Tensors, step: Callable[..., Parts]) -> Tensors:
        """Return the products by a fold with a step."""
        x, *ws = xs
        shapes = [[*x.shape[:-1], w.shape[1]] for w in ws]
        if self.contracts(x):
            zeros = tuple(_no_values(x, shape) for shape in shapes)
            operands = tuple(w.split(self.sizes) for w in ws)
            return fold_on(self.ring, ((), zeros), step, _merge, x, operands, self.pull)[1]
        init: Results = tuple(
            tuple(_no_values(x, _with_size(shape, self.dim, size)) for size in self.sizes)
            for shape in shapes
        ), ()  # fmt: skip
        joined = fold_on(self.ring, init, step, _merge, x, tuple(ws), self.pull)[0]
        return tuple(torch.cat(blocks, self.dim) for blocks in joined)

    def step(self, block: Tensor, index: int, *weights: Any) -> Parts:
        """Return the products of the block of an index."""
        if self.contracts(block):
            return index, (), tuple(block @ rows[index] for rows in weights)
        return index, tuple(block @ w for w in weights), ()

    def pull(
        self, grads: Results, result: None, block: Tensor, index: int, *weights: Any
    ) -> tuple[Tensor | None, tuple[Any, ...]]:
        """Return the gradients of the block of an index, and of the weights."""
        contracts, of_weights = self.contracts(block), []
        of_block: Tensor | None = None
        for i, weight in enumerate(weights):
            g, w = (grads[1][i], weight[index]) if contracts else (grads[0][i][index], weight)
            if self.needs_block:
                part = g @ w.mH
                of_block = part if of_block is None else of_block.add_(part)
            of_w: Any = _outer(block, g) if w.requires_grad else None
            if contracts:
                of_w = tuple(of_w if j == index else None for j in range(len(weight)))
            of_weights.append(of_w)
        return of_block, tuple(of_weights)

    def block_gradient(self, grads: Sequence[Tensor], ws: Tensors, ndim: int) -> Tensor:
        """Return the gradient of this rank's block, a ring of partial sums."""
        if self.dim == ndim - 1:
            pieces = [w.split(self.sizes) for w in ws]
            part = lambda i: sum(g @ w[i].mH for g, w in zip(grads, pieces, strict=True))  # noqa: E731
        else:
            rows = [g.split(self.sizes, self.dim) for g in grads]
            part = lambda i: sum(g[i] @ w.mH for g, w in zip(rows, ws, strict=True))  # noqa: E731
        return _reduced(self.ring, part, self.ring.launch)


class _GatherFunction(torch.autograd.Function):
    """Products that keep the gathered blocks; its backward is a ring of partial sums."""

    @staticmethod
    def forward(ctx: Any, product: _GatheredProduct, *xs: Tensor) -> Tensors:
        blocks: dict[int, Tensor] = {}

        def step(block: Tensor, index: int, *weights: Any) -> Parts:
            blocks[index] = block
            return product.step(block, index, *weights)

        ctx.product, ctx.label = product, backward_label()
        results = product.folded(tuple(x.detach() for x in xs), step)
        ctx.save_for_backward(*xs, *(blocks[i] for i in range(product.ring.n)))
        return results

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, *grads: Tensor) -> Any:
        product, needs = ctx.product, ctx.needs_input_grad[1:]
        saved = saved_tensors(ctx)
        xs, blocks = saved[: len(needs)], saved[len(needs) :]

        def gradients(grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
            if torch.is_grad_enabled():
                return gradients_of(product.run, xs, needs, grads)
            of_x = product.block_gradient(grads, xs[1:], xs[0].ndim) if needs[0] else None
            gathered = torch.cat(blocks, product.dim)
            return [of_x, *(_outer(gathered, g) if need else None
                            for g, need in zip(grads, needs[1:], strict=True))]  # fmt: skip

        with backward_phase(ctx.label):
            return None, *map_batch_elements(gradients, grads)


def _reduced(ring: Ring, part: Callable[[int], Any], send: Send) -> Tensor:
    """Return the sum over ranks of their parts for this rank; `part` computes that of an index.

    The sum for an index begins on the rank after it. Each rank adds a part while one arrives.
    """
    arriving: Callable[[], Tensors] | None = None
    for age in range(1, ring.n + 1):
        block: Tensor = part((ring.index - age) % ring.n)
        if arriving is not None:
            block = block + arriving()[0]
        arriving = send((block,), 1, age) if age < ring.n else None
    return block


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
    own = numbers[ring_index(SCATTER, owner, axes, (x,))]
    block = _no_values(x, _with_size(shape, dim, own))
    ring = ring_of(SCATTER, owner, axes, (block,), dim, numbers if len({*numbers}) > 1 else None)
    return run_typed(SCATTER, axes, _ScatteredProduct(ring, dim, numbers).run, (x, weight))[0]


@dataclass(frozen=True, slots=True)
class _ScatteredProduct:
    """Sum over ranks of products of two factors, of which each rank keeps the block of its index.

    `sizes` are those of the blocks along the dim of the product that is split.
    """

    ring: Ring
    dim: int
    sizes: tuple[int, ...]

    def run(self, xs: Tensors) -> Tensors:
        """Return the block of this rank, alone in a tuple."""
        if is_transformed():
            return (self.reduced(xs, self.ring.send),)
        if is_differentiated(*xs):
            with labelled(self.ring.label):
                result: Tensor = _ScatterFunction.apply(self, *xs)  # type: ignore[no-untyped-call]
            return (result,)
        return (self.reduced(xs, self.ring.launch),)

    def reduced(self, xs: Tensors, send: Send) -> Tensor:
        """Return the sum for this rank."""
        x, w = xs
        if self.dim == x.ndim - 1:
            columns = w.split(self.sizes, 1)
            return _reduced(self.ring, lambda index: x @ columns[index], send)
        rows = x.split(self.sizes, self.dim)
        return _reduced(self.ring, lambda index: rows[index] @ w, send)

    def gradients(self, g: Tensor, xs: Tensors, needs: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of the factors, by a fold over the blocks of the cotangent.

        The gradient of the factor that is split is computed a block at a time, the gradient of the
        other by one product with the gathered cotangent.
        """
        x, w = xs
        of_columns = self.dim == x.ndim - 1
        needs_split, needs_other = needs[::-1] if of_columns else needs
        shapes = [_with_size(g.shape, self.dim, size) for size in self.sizes]
        split = [[w.shape[0], n] if of_columns else _with_size(x.shape, self.dim, n)
                 for n in self.sizes]  # fmt: skip

        def step(g: Tensor, index: int, x: Tensor, w: Tensor) -> Parts:
            parts = (_outer(x, g) if of_columns else g @ w.mH,) if needs_split else ()
            return index, (*parts, g) if needs_other else parts, ()

        init = [split] if needs_split else []
        init += [shapes] if needs_other else []
        zeros = tuple(tuple(_no_values(g, shape) for shape in row) for row in init)
        joined = [*fold_on(self.ring, (zeros, ()), step, _merge, g, xs)[0]]
        of_split = torch.cat(joined[0], 1 if of_columns else self.dim) if needs_split else None
        of_other: Tensor | None = None
        if needs_other:
            gathered = torch.cat(joined[-1], self.dim)
            of_other = gathered @ w.mH if of_columns else _outer(x, gathered)
        return [of_other, of_split] if of_columns else [of_split, of_other]


class _ScatterFunction(torch.autograd.Function):
    """Product whose sums move around the ring; its backward is a fold over cotangents."""

    @staticmethod
    def forward(ctx: Any, product: _ScatteredProduct, *xs: Tensor) -> Tensor:
        ctx.product, ctx.label = product, backward_label()
        ctx.save_for_backward(*xs)
        return product.reduced(tuple(x.detach() for x in xs), product.ring.launch)

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, grad: Tensor) -> Any:
        factors, needs = saved_tensors(ctx), ctx.needs_input_grad[1:]
        with backward_phase(ctx.label):
            return None, *map_batch_elements(
                lambda grads: ctx.product.gradients(grads[0], factors, needs), (grad,)
            )


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


def _no_values(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return zeros of a shape, of the kind of `x`, in the memory of one."""
    return x.new_zeros(()).expand(*shape)


def _with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


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
