"""Folds over the blocks of a sharded operand that move around a ring of ranks.

Every rank holds one block. In step k each rank has the block that began k places before it, and
sends it on while it computes. No rank holds more than three blocks, and each sends n - 1 of them.

The gradient is a second ring in the reverse direction: blocks move again, and the gradient of a
block follows it, one step behind, until it is home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch

from fshard._torch.autograd_state import unviewed
from fshard._torch.functorch import is_transformed
from fshard._torch.legacy_vmap import map_batch_elements
from fshard._torch.modes import DispatchMode
from fshard._util.dtypes import is_inexact
from fshard._util.errors import fail
from fshard._util.tracebacks import hiding_frames
from fshard.layout.mesh import Axes, Mesh
from fshard.layout.tree import TreeDef, flatten, unflatten
from fshard.run.autograd.linear_function import Tensors, is_differentiated
from fshard.run.autograd.saved_values import saved_tensors
from fshard.run.transports.base import backward_phase, labelled
from fshard.run.transports.divergence_report import backward_label
from fshard.spmd.axis_env import current_tracker, resolve_axes
from fshard.spmd.collectives.ring import Leaves, Ring, ring_of, sizes_along
from fshard.spmd.tracking.insert_casts import join_operands, replace_tensors
from fshard.spmd.tracking.torch_effects import Action, OpEffect
from fshard.spmd.types import States, TypeRule

NAME = "fs.domain.ring_fold"
Acc = TypeVar("Acc")
Block = Any
Step = Callable[..., Any]
Merge = Callable[[Any, Any], Any]
Pull = Callable[..., tuple[Any, Any]]
Send = Callable[[Tensors, int, int], Callable[[], Tensors]]


def ring_fold(
    init: Acc,
    step: Step,
    merge: Merge,
    blocks: Block,
    axis_name: Axes,
    *,
    operands: tuple[Any, ...] = (),
    pull: Pull | None = None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    mesh: Mesh | None = None,
) -> Acc:
    """Fold over the blocks of all ranks along axes, which move around a ring.

    Every rank returns `merge(... merge(init, step(b, j, *operands)) ..., ...)` over the blocks `b`
    of all indices `j`, in the order own, previous, ..., next. If `merge` is associative and
    commutative with neutral element `init`, the order changes rounding alone.

    Args:
        init: neutral element of `merge`, a tree of tensors; a constant.
        step: function `(block, index, *operands)` to a tree like `init`, or None if the block adds
            nothing. It computes on locals alone: it must not call collectives.
        merge: function of two such trees to one.
        blocks: this rank's block, a tree of tensors.
        axis_name: the axis, or a tuple of axes.
        operands: trees of tensors that stay on their rank. A tensor that requires grad must be here
            or in `blocks`, not in a closure.
        pull: function `(grads, result, block, index, *operands)` to the gradients of the block and
            of the operands, the latter a tuple; None stands for zeros. `grads` are the cotangents
            of `result`, the fold over all blocks. Without it, `step` and `merge` are
            differentiated, for which the n values between merges are saved.
        dim: the dim of the tensors of `blocks` whose sizes differ between ranks.
        sizes: its size on each index along the axes, zeros included. If they are left out, and an
            argument of the mapped function is uneven along the axes, the ranks exchange them.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree like `init`, on every rank its own.

    Raises:
        ShardingError: sizes that are not one for each rank or not those of the blocks, and a
            tensor in the closure of `step` that requires grad.

    A rank sends n - 1 blocks, the next one while `step` computes, and holds at most three.
    Gradient: a second ring, which sends n - 1 blocks and n - 1 gradients; blocks are not saved.
    Second order differentiates the ring itself, and saves all blocks. After ring attention (arXiv
    2310.01889).

    >>> import torch
    >>> import fshard as fs
    >>> @fs.shard_map(mesh=fs.Mesh(i=3), in_specs=fs.P("i"), out_specs=fs.P("i"))
    ... def distances(x):                     # sum over all y of |x - y|, memory n / p
    ...     step = lambda y, index, x: (x[:, None] - y).abs().sum(1)
    ...     return fs.domain.ring_fold(torch.zeros_like(x), step, torch.add, x, "i", operands=(x,))
    >>> distances(torch.tensor([0.0, 1.0, 3.0, 4.0, 6.0, 10.0]))
    tensor([24., 20., 16., 16., 20., 36.])
    """
    owner, axes = resolve_axes(axis_name, mesh, NAME)
    for tensor in flatten((init, blocks, operands))[0]:
        if not isinstance(tensor, torch.Tensor):
            fail(NAME, f"a leaf of type {type(tensor).__name__}",
                 "the leaves of init, blocks and operands must be tensors",
                 "close over other values: lambda block, index: ...")  # fmt: skip
    block = flatten(blocks)[0]
    if sizes is None and block and -block[0].dim() <= dim < block[0].dim():
        lengths = sizes_along(NAME, "sizes", None, owner, axes, block[0], block[0].shape[dim])
        sizes = lengths if len({*lengths}) > 1 else None
    ring = ring_of(NAME, owner, axes, block, dim, sizes)
    fold, xs = _fold_of(ring, init, step, merge, blocks, operands, pull, True, True)
    results = run_typed(NAME, axes, fold.run, xs)
    return unflatten(fold.init_tree, results)  # type: ignore[no-any-return]


def fold_on(
    ring: Ring, init: Acc, step: Step, merge: Merge, blocks: Block, operands: tuple[Any, ...],
    pull: Pull | None = None, *, reads_result: bool = False, starts_with_part: bool = False,
) -> Acc:  # fmt: skip
    """Fold over the blocks of a ring, without types and checks of closures.

    Arguments are those of `ring_fold`; the result is saved only if `pull` reads it. With a `pull`,
    a fold may start with its first part, which is not merged with `init`.
    """
    reads_result |= pull is None
    fold, xs = _fold_of(ring, init, step, merge, blocks, operands, pull, reads_result, False,
                        starts_with_part)  # fmt: skip
    return unflatten(fold.init_tree, fold.run(xs))  # type: ignore[no-any-return]


def _fold_of(
    ring: Ring, init: Any, step: Step, merge: Merge, blocks: Block, operands: tuple[Any, ...],
    pull: Pull | None, reads_result: bool, checks_closure: bool, starts_with_part: bool = False,
) -> tuple[RingFold, Tensors]:  # fmt: skip
    """Return a fold, and the leaves of its arguments."""
    (first, init_tree), (second, block_tree), (others, operand_tree) = map(
        flatten, (init, blocks, operands)
    )
    counts = len(first), len(second)
    fold = RingFold(ring, step, merge, pull, init_tree, block_tree, operand_tree, counts,
                    reads_result, checks_closure, starts_with_part)  # fmt: skip
    return fold, (*(x.detach() for x in first), *second, *others)


def run_typed(
    name: str, axes: tuple[str, ...], run: Callable[[Tensors], Tensors], xs: Tensors
) -> Tensors:
    """Return the results of a function of locals, which vary along axes, and track their types."""
    tracker = current_tracker()
    if tracker is None:
        return run(xs)
    effect = OpEffect(name, Action.OP, TypeRule.OTHER)
    states, casts = join_operands(tracker, effect, xs, {}, also=(States.varying(axes),))
    with tracker.pause():
        results = run(replace_tensors(xs, casts))
    for result in results:
        tracker.record(result, states)
    return results


@dataclass(frozen=True, slots=True, eq=False)
class RingFold:
    """One fold: its ring, its functions, and the trees of its arguments.

    `counts` are how many leaves `init` and a block have; the operands' leaves follow.
    """

    ring: Ring
    step: Step
    merge: Merge
    pull: Pull | None
    init_tree: TreeDef
    block_tree: TreeDef
    operand_tree: TreeDef
    counts: tuple[int, int]
    reads_result: bool
    checks_closure: bool
    starts_with_part: bool

    def split(self, xs: Sequence[Any]) -> tuple[Tensors, Tensors, Tensors]:
        """Return the leaves of `init`, of the block and of the operands."""
        first, second = self.counts
        xs = tuple(xs)
        return xs[:first], xs[first : first + second], xs[first + second :]

    def run(self, xs: Tensors) -> Tensors:
        """Return the leaves of the result."""
        if is_transformed():
            return self.differentiable(xs)
        if is_differentiated(*xs):
            with labelled(self.ring.label):
                results: Tensors = _FoldFunction.apply(self, *xs)  # type: ignore[no-untyped-call]
            return results
        return self.fold(xs, self.ring.launch)

    def guarded(self) -> RingFold:
        """Return the fold, its first step checked for tensors in its closure if need be."""
        if not self.checks_closure:
            return self

        def step(block: Any, index: int, *operands: Any) -> Any:
            if index != self.ring.index:
                return self.step(block, index, *operands)
            with _RefuseClosures():  # type: ignore[no-untyped-call]
                return self.step(block, index, *operands)

        return replace(self, step=step)

    def differentiable(self, xs: Tensors) -> Tensors:
        """Return the fold as operations that are differentiated one by one.

        Results depend on everything that moves: ranks on which a step adds nothing take part in the
        backward pass's collectives, too.
        """
        moved = list(xs[self.counts[0] :])

        def send(block: Tensors, by: int, age: int) -> Callable[[], Tensors]:
            arrived = self.ring.send(block, by, age)()
            moved.extend(arrived)
            return lambda: arrived

        return _attached(self.fold(xs, send), moved)

    def fold(self, xs: Tensors, send: Send, saved: list[Any] | None = None) -> Tensors:
        """Return the fold; append to `saved` what is merged with the part of each step."""
        init, block, operands = self.split(xs)
        acc, ring = None if self.starts_with_part else init, self.ring
        for k in range(ring.n):
            finish = send(block, 1, k) if k + 1 < ring.n else None
            merged = self.merged(acc, block, k, operands)
            if saved is not None:
                saved.append(None if merged is None else acc)
            acc = acc if merged is None else merged
            block = block if finish is None else finish()
        return init if acc is None else acc

    def merged(
        self, acc: Tensors | None, block: Tensors, k: int, operands: Tensors
    ) -> Tensors | None:
        """Return `acc` merged with the part of the block of step k, None if that adds nothing."""
        index = (self.ring.index - k) % self.ring.n
        part = self.step(
            unflatten(self.block_tree, block), index, *unflatten(self.operand_tree, operands)
        )
        if part is None:
            return None
        merged = part if acc is None else self.merge(unflatten(self.init_tree, acc), part)
        leaves, treedef = flatten(merged)
        if treedef != self.init_tree:
            fail(NAME, f"merge returned {treedef}", f"it must return a tree like init, "
                 f"{self.init_tree}", "the same structure from merge and in init")  # fmt: skip
        return tuple(leaves)

    def gradients(
        self, xs: Tensors, result: Tensors, saved: Sequence[Any], grads: Tensors,
        needed: Sequence[int],
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """Return the gradients of all inputs, by a ring in the reverse direction.

        `needed` are the leaves of the block whose gradients are requested.
        """
        ring, (init, block, operands) = self.ring, self.split(xs)
        total: list[torch.Tensor | None] = [None] * len(operands)
        cotangents = grads

        def contribution(k: int, block: Tensors) -> Tensors:
            """Add to the operands' gradients, and return the needed ones of the block of step k."""
            nonlocal cotangents
            if self.pull is None:
                cotangents, of_block, of_operands = self.derived(
                    saved[k], block, k, operands, cotangents
                )
            else:
                of_block, of_operands = self.pulled(result, block, k, operands, grads)
            for i, g in enumerate(of_operands):
                if g is not None:
                    total[i] = g if total[i] is None else total[i] + g
            return tuple(
                torch.zeros_like(block[i]) if of_block[i] is None else of_block[i] for i in needed
            )

        moving = ring.launch(block, -1, 0) if ring.n > 1 else None
        returning: Callable[[], Leaves] | None = None
        # The order of the forward pass, reversed, ends with this rank's own block.
        for k in range(ring.n - 1, 0, -1):
            assert moving is not None
            arrived = moving()
            moving = ring.launch(arrived, -1, k) if k > 1 else None
            mine = contribution(k, arrived)
            if returning is not None:  # the sum that arrived belongs to this rank alone
                mine = returning().add_(mine)
            returning = ring.launch(mine, -1, k, needed)
            del arrived, mine
        own = contribution(0, block)
        if returning is not None:
            own = tuple(map(torch.add, returning(), own))
        of_blocks: list[torch.Tensor | None] = [None] * len(block)
        for i, g in zip(needed, own, strict=True):
            of_blocks[i] = g
        return [*[None] * len(init), *of_blocks, *total]

    def pulled(
        self, result: Tensors, block: Tensors, k: int, operands: Tensors, grads: Tensors
    ) -> tuple[list[Any], list[Any]]:
        """Return the gradients of a block and of the operands by `pull`."""
        assert self.pull is not None
        index = (self.ring.index - k) % self.ring.n
        of_block, of_operands = self.pull(
            unflatten(self.init_tree, grads),
            unflatten(self.init_tree, result) if self.reads_result else None,
            unflatten(self.block_tree, block), index, *unflatten(self.operand_tree, operands),
        )  # fmt: skip
        return _leaves(of_block, self.block_tree), _leaves(of_operands, self.operand_tree)

    def derived(
        self, acc: Tensors | None, block: Tensors, k: int, operands: Tensors, grads: Tensors
    ) -> tuple[Tensors, Sequence[Any], Sequence[Any]]:
        """Return the gradients of `acc`, a block and the operands by derivatives of the step."""
        if acc is None:
            return grads, [None] * len(block), [None] * len(operands)
        with torch.enable_grad():
            groups = [tuple(_as_leaf(x) for x in group) for group in (acc, block, operands)]
            merged = self.merged(groups[0], groups[1], k, groups[2])
            assert merged is not None
            inputs = [x for group in groups for x in group]
            taken = iter(_grads(merged, [x for x in inputs if x.requires_grad], grads))
        found = [next(taken) if x.requires_grad else None for x in inputs]
        m, n = len(acc), len(acc) + len(block)
        of_acc = tuple(
            torch.zeros_like(x) if g is None else g for x, g in zip(acc, found[:m], strict=True)
        )
        return of_acc, found[m:n], found[n:]


def _attached(ys: Tensors, xs: Sequence[torch.Tensor]) -> Tensors:
    """Return `ys` plus zeros that depend on all `xs`, as their derivatives of every order do.

    That holds for NaN and infinities, too: of `xs` zeros are selected.
    """
    selected = [torch.where(x.new_zeros((), dtype=torch.bool), x, 0).sum()
                for x in xs if is_inexact(x)]  # fmt: skip
    if not selected:
        return ys
    total = torch.stack([(x.real if x.is_complex() else x).double() for x in selected]).sum()
    return tuple(y + torch.expm1(total).to(y.dtype) if is_inexact(y) else y for y in ys)


def _leaves(tree: Any, treedef: TreeDef) -> list[Any]:
    """Return the leaves of gradients in the structure of `treedef`; None stands for a subtree."""
    if tree is None:
        return [None] * treedef.num_leaves
    children = treedef.children()
    if not children:
        return [tree] * treedef.num_leaves
    parts = tree.values() if isinstance(tree, dict) else tree
    return [x for part, child in zip(parts, children, strict=True) for x in _leaves(part, child)]


def _as_leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_(is_inexact(x))


def _grads(
    ys: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor],
    *, create_graph: bool = False,
) -> Sequence[torch.Tensor | None]:  # fmt: skip
    """Return the gradients of `inputs`, None for those that no output depends on."""
    tied = [(y, g) for y, g in zip(ys, grads, strict=True) if y.requires_grad]
    if not tied or not inputs:
        return [None] * len(inputs)
    outputs, cotangents = zip(*tied, strict=True)
    return torch.autograd.grad(
        outputs, inputs, cotangents, allow_unused=True, create_graph=create_graph
    )


class _RefuseClosures(DispatchMode):
    """Mode that refuses operands of a step that require grad: they are in its closure."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for x in flatten((args, kwargs))[0]:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                _refuse_closure(x)
        return func(*args, **(kwargs or {}))


def _refuse_closure(x: torch.Tensor) -> NoReturn:
    fail(NAME, f"a tensor of shape {tuple(x.shape)} that requires grad in the closure of step",
         "tensors that are differentiated must be in blocks or operands",
         "operands=(x,), and step=lambda block, index, x: ...")  # fmt: skip


class _FoldFunction(torch.autograd.Function):
    """Fold around the ring; its backward is a ring in the reverse direction."""

    @staticmethod
    def forward(ctx: Any, fold: RingFold, *xs: torch.Tensor) -> Tensors:
        saved: list[Any] | None = None if fold.pull is not None else []
        inputs = tuple(x.detach() for x in xs)
        results = fold.guarded().fold(inputs, fold.ring.launch, saved)
        results = tuple(
            y.view_as(y) if any(y is x for x in inputs) else unviewed(y) for y in results
        )
        ctx.mark_non_differentiable(*(y for y in results if not is_inexact(y)))
        ctx.fold, ctx.label = fold, backward_label()
        ctx.merged = [acc is not None for acc in saved or ()]
        kept = [x for acc in saved or () if acc is not None for x in acc]
        ctx.save_for_backward(*xs, *(results if fold.reads_result else ()), *kept)
        return results

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        fold: RingFold = ctx.fold
        needs = ctx.needs_input_grad[1:]
        first, second = len(needs), fold.counts[0]
        tensors = saved_tensors(ctx)
        last = first + (second if fold.reads_result else 0)
        xs, results, kept = tensors[:first], tensors[first:last], iter(tensors[last:])
        saved = [tuple(next(kept) for _ in grads) if has else None for has in ctx.merged]

        def gradients(grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
            if torch.is_grad_enabled():
                return gradients_of(fold.differentiable, xs, needs, grads)
            blocks = needs[second : second + fold.counts[1]]
            needed = [i for i, need in enumerate(blocks) if need]
            return fold.gradients(xs, results, saved, tuple(grads), needed)

        with backward_phase(ctx.label):
            return None, *map_batch_elements(gradients, grads)


def gradients_of(
    run: Callable[[Tensors], Tensors],
    xs: Tensors,
    needs: Sequence[bool],
    grads: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Return the gradients of the needed arguments of a function, which are differentiable."""
    xs = tuple(x.view_as(x) for x in xs)  # one tensor may be several arguments
    inputs = [x for x, need in zip(xs, needs, strict=True) if need]
    taken = iter(_grads(run(xs), inputs, grads, create_graph=True))
    return [next(taken) if need else None for need in needs]
