"""The one autograd rule: the backward of a linear operation runs its transpose.

A linear operation works on this rank's local over a transport, or on all shards of a
simulation. Backward runs the transpose through the same rule, so every order of derivative
exists. Maxima and minima are not linear: their rule is that of `torch.amax`, ties share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, cast

import torch
from torch.autograd import forward_ad

from fshard.errors import fail
from fshard.mesh import Mesh
from fshard.partition import PartitionSpec
from fshard.program.program import Program
from fshard.run.abstract import is_abstract, shapes_of
from fshard.run.batch import join, joined, part
from fshard.run.extremes import extreme_gradient, linear_parts
from fshard.run.fingerprint import backward_label
from fshard.run.interpreter import collectives, launch, ranks_of
from fshard.run.simulate import run_ranks, run_together
from fshard.run.transport import (
    LABEL,
    Label,
    Transport,
    backward_phase,
    current_rank,
    is_simulated,
    labelled,
    unobserved,
)
from fshard.spec import Spec

is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor

__all__ = [
    "Everywhere", "FinishAll", "Linear", "Run", "Shards", "apply_linear", "apply_program",
    "apply_programs", "is_differentiated", "is_transformed", "start_linear",
]  # fmt: skip

Shards = tuple[torch.Tensor, ...]
FinishAll = Callable[[], Shards]


class Linear(Protocol):
    """A linear operation of one rank among others, and its transpose."""

    @property
    def mesh(self) -> Mesh:
        """The mesh whose ranks take part."""
        ...

    @property
    def T(self) -> Linear:  # noqa: N802 - the mathematical name
        """The transpose."""
        ...

    def wider(self, n: int) -> Linear:
        """The same of tensors with one more dim, the last, of size n."""
        ...

    def launch(self, transport: Transport, xs: Shards) -> FinishAll:
        """Start it on locals of this rank, as many as come out."""
        ...


class Everywhere(Linear, Protocol):
    """One that also runs on all shards of a simulation, from outside of its ranks."""

    def everywhere(self, xs: Shards) -> Shards:
        """Run it on the locals of all ranks: of each in turn the shards in rank order."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Linear programs as such an operation: one for each of a rank's locals.

    Several do the same and differ only in the dims from `keep` on, which no step touches:
    they communicate in one launch.
    """

    progs: tuple[Program, ...]
    keep: int = 0

    @property
    def mesh(self) -> Mesh:
        """The mesh of the programs' ranks."""
        return ranks_of(self.progs[0])

    @property
    def T(self) -> Run:  # noqa: N802
        """The transposed programs."""
        return Run(tuple(prog.T for prog in self.progs), self.keep)

    def wider(self, n: int) -> Run:
        """The programs with one more dim, which no step touches."""
        return Run(tuple(_wider(prog, n) for prog in self.progs), self.keep)

    def launch(self, transport: Transport, xs: Shards) -> FinishAll:
        """Start the programs on this rank's locals."""
        progs, rank = self.progs, transport.rank
        if len(progs) == 1:
            only = launch(progs[0], transport, xs[0])
            return lambda: (only(),)
        if rank not in self.mesh or _is_local(progs[0]):
            each = [launch(prog, transport, x) for prog, x in zip(progs, xs, strict=True)]
            return lambda: tuple(finish() for finish in each)
        moved = launch(joined(progs, self.keep), transport, join(xs, self.keep))
        shapes = [prog.dst.local_shape(rank) for prog in progs]
        return lambda: part(moved(), shapes, self.keep)

    def everywhere(self, xs: Shards) -> Shards:
        """Run the program, one, on all shards of a simulation."""
        (prog,) = self.progs
        if collectives(prog) < 2:
            # Nobody waits before the one collective is launched: no threads are needed.
            return tuple(run_together(self.mesh, lambda rank, x: launch(prog, rank, x), xs))
        return tuple(run_ranks(self.mesh, lambda rank, x: launch(prog, rank, x)(), xs))


@lru_cache(maxsize=1024)
def _wider(prog: Program, n: int) -> Program:
    src, p = prog.src, prog.src.partition
    sides = PartitionSpec._of((*p.dims, ()), p.unreduced_kinds, p.reduced_kinds)
    whole = Spec._of(src.mesh, sides, (*src.shape, n), src.dtype, (*src.sizes, None))
    dtypes = prog.forward_dtype, prog.backward_dtype
    return Program(whole, prog.steps, forward_dtype=dtypes[0], backward_dtype=dtypes[1])


@lru_cache(maxsize=4096)
def _is_local(prog: Program) -> bool:
    return prog.is_local


def start_linear(op: Linear, xs: Shards, where: str) -> FinishAll:
    """Start `op` on locals of this rank; on abstract ones nothing is sent.

    Under `torch.no_grad()` where one requires grad: `apply_linear` adds the gradient.

    Raises `ShardingError` where there is no rank, naming `where`.
    """
    if is_abstract(xs[0]):
        with unobserved():
            return op.launch(shapes_of(op.mesh), xs)
    transport = current_rank(op.mesh, where)
    if forward_ad._current_level >= 0 and is_simulated():
        label = LABEL.get()
        fail(
            where if label is None else label.name,
            "a simulated rank in forward mode: torch.func.jvp, jacfwd, or a dual_level",
            "PyTorch has one level of forward mode for the process; ranks in turn would share it",
            "torch.func.vjp or jacrev; forward mode is for ranks that are processes, by torchrun",
        )
    if transport.rank not in op.mesh:
        return lambda: tuple(x.new_empty(0) for x in xs)
    if LABEL.get() is not None:
        return op.launch(transport, xs)
    with labelled(Label(where, op.mesh)):
        return op.launch(transport, xs)


def _execute(op: Linear, xs: Shards, everywhere: bool, launched: FinishAll | None) -> Shards:
    if launched is not None:
        return launched()
    if everywhere:
        return cast(Everywhere, op).everywhere(xs)
    return start_linear(op, xs, "a collective")()


def _result(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`y` as autograd takes it: not for its input, nor for a view of what is nobody else's."""
    if y is x:
        return y.view_as(y)
    if not y._is_view() or y._base is x or y._base is x._base:
        return y
    fresh: torch.Tensor = torch.ops.aten._unsafe_view(y, y.shape)
    return fresh


class _Apply(torch.autograd.Function):
    """Forward runs an operation, backward its transpose."""

    @staticmethod
    def forward(
        op: Linear, everywhere: bool, launched: FinishAll | None, *xs: torch.Tensor
    ) -> Shards:
        return tuple(map(_result, xs, _execute(op, xs, everywhere, launched)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Shards) -> None:
        op, everywhere, _, *xs = inputs
        ctx.op, ctx.everywhere, ctx.label = op, everywhere, backward_label()
        ctx.shapes = [x.shape for x in xs]
        needs = ctx.needs_input_grad[3:]
        if not everywhere and any(needs) and not is_transformed():
            # A rank's locals do not mix: what needs no gradient is not made to need one.
            ctx.mark_non_differentiable(*(y for y, n in zip(output, needs, strict=True) if not n))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with backward_phase(ctx.label):
            back = apply_linear(ctx.op.T, grads, ctx.everywhere)
        kept = (
            g if g.shape == shape else g.new_zeros(shape)
            for g, shape in zip(back, ctx.shapes, strict=True)
        )
        return (None, None, None, *kept)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Shards:
        return apply_linear(ctx.op, tangents[3:], ctx.everywhere)

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: Linear, everywhere: bool, _: None, *xs: Any) -> Any:
        n, dims = info.batch_size, in_dims[3:]
        return apply_linear(op.wider(n), _batched_last(xs, dims, n), everywhere), (-1,) * len(xs)


def _batched_last(xs: Shards, dims: Sequence[int | None], n: int) -> Shards:
    """Tensors with the dim that `vmap` maps as their last, where they have none repeated."""
    return tuple(
        x.unsqueeze(-1).expand(*x.shape, n) if dim is None else x.movedim(dim, -1)
        for x, dim in zip(xs, dims, strict=True)
    )


def is_transformed() -> bool:
    """Whether tensors may be wrappers of `torch.func` now, or have tangents of a `dual_level`."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_differentiated(x: torch.Tensor) -> bool:
    """Whether a gradient may be taken of what is computed from `x` now.

    A wrapper of `torch.vmap` does not know whether what it holds requires grad, and a tangent
    needs no tensor that does.
    """
    return (x.requires_grad and torch.is_grad_enabled()) or is_transformed()


def apply_linear(
    op: Linear, xs: Shards, everywhere: bool, launched: FinishAll | None = None
) -> Shards:
    """Run `op` on a rank's locals or on all shards of one, differentiably.

    `launched` is its own start.
    """
    if any(map(is_legacy_batchedtensor, xs)):
        return _apply_batched(op, xs, everywhere, _legacy_level())
    if any(map(is_differentiated, xs)):
        out: Shards = _Apply.apply(op, everywhere, launched, *xs)  # type: ignore[no-untyped-call]
        return out
    return _execute(op, xs, everywhere, launched)


def _apply_batched(op: Linear, xs: Shards, everywhere: bool, level: int) -> Shards:
    """Run `op` on what `torch.autograd.grad(is_grads_batched=True)` gives to a backward pass.

    Its wrappers, of levels from 1 on, are older than those of `torch.func` and know few
    operations: the batch goes through as one more dim.
    """
    if level == 0:
        return apply_linear(op, xs, everywhere)
    n = max(torch._remove_batch_dim(x, level, 1, 0).shape[0] for x in xs)
    wide = tuple(torch._remove_batch_dim(x, level, n, 0).movedim(0, -1) for x in xs)
    if n == 1:  # or of no batch at this level
        return _apply_batched(op, tuple(x.squeeze(-1) for x in wide), everywhere, level - 1)
    out = _apply_batched(op.wider(n), wide, everywhere, level - 1)
    return tuple(torch._add_batch_dim(y, y.ndim - 1, level) for y in out)


def _legacy_level() -> int:
    """How many of those batches there are around what is running."""
    level: int = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def apply_program(
    prog: Program, xs: Shards, everywhere: bool, launched: FinishAll | None = None
) -> Shards:
    """Run a program on one local or on all shards, differentiably."""
    if prog.is_linear or not any(map(is_differentiated, xs)):
        return apply_linear(Run((prog,)), xs, everywhere, launched)
    for piece in linear_parts(prog):
        run = _run_linear if piece.is_linear else _extreme
        xs = _among(ranks_of(prog), run, piece, everywhere, xs)
    return xs


def _run_linear(prog: Program, everywhere: bool, xs: Shards) -> Shards:
    return apply_linear(Run((prog,)), xs, everywhere)


def _among(
    mesh: Mesh,
    run: Callable[[Program, bool, Shards], Shards],
    prog: Program,
    everywhere: bool,
    xs: Shards,
) -> Shards:
    """Run a program on its ranks' shards among those of all of `mesh`, or on one local."""
    mine = ranks_of(prog).ranks
    if not everywhere or mine == mesh.ranks:
        return run(prog, everywhere, xs)
    held = dict(zip(mesh.ranks, xs, strict=True))
    held |= zip(mine, run(prog, everywhere, tuple(held[rank] for rank in mine)), strict=True)
    return tuple(held.values())


def apply_programs(progs: tuple[Program, ...], keep: int, xs: Shards) -> Shards:
    """Run one program of any kind on each of a rank's locals, differentiably; see `Run`."""
    if len(progs) == 1:
        return apply_program(progs[0], xs, everywhere=False)
    (whole,) = apply_program(joined(progs, keep), (join(xs, keep),), everywhere=False)
    rank = shapes_of(progs[0].src.mesh).rank
    outs = part(whole, [prog.dst.local_shape(rank) for prog in progs], keep)
    return tuple(y if is_differentiated(x) else y.detach() for x, y in zip(xs, outs, strict=True))


def _extreme(prog: Program, everywhere: bool, xs: Shards) -> Shards:
    """A maximum or minimum over ranks; its gradient goes to the candidates that reach it."""
    out: Shards = _Extreme.apply(prog, everywhere, *xs)  # type: ignore[no-untyped-call]
    return out


class _Extreme(torch.autograd.Function):
    """One all-reduce or reduce-scatter by maximum or minimum."""

    @staticmethod
    def forward(prog: Program, everywhere: bool, *xs: torch.Tensor) -> Shards:
        return tuple(map(_result, xs, _execute(Run((prog,)), xs, everywhere, None)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Shards) -> None:
        ctx.prog, ctx.everywhere, *xs = inputs
        ctx.n, ctx.label = len(xs), backward_label()
        ctx.save_for_backward(*xs, *output)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        label = LABEL.get()
        fail(
            "a collective" if label is None else label.name,
            "a maximum or minimum of a tensor with a tangent",
            "in forward mode sums and movements have a derivative, maxima and minima in reverse",
            "torch.func.vjp, or torch.autograd.grad without a dual_level",
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, prog: Program, everywhere: bool, *xs: Any) -> Any:
        n, dims = info.batch_size, in_dims[2:]
        return _extreme(_wider(prog, n), everywhere, _batched_last(xs, dims, n)), (-1,) * len(xs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        xs, ys = ctx.saved_tensors[: ctx.n], ctx.saved_tensors[ctx.n :]
        count, whole, whole_grad = extreme_gradient(ctx.prog)
        run = partial(_among, ranks_of(ctx.prog), _run_linear)
        with backward_phase(ctx.label):
            wholes = run(whole, ctx.everywhere, tuple(y.detach() for y in ys))
            masks = tuple((x == y).to(x.dtype) for x, y in zip(xs, wholes, strict=True))
            totals = run(count, ctx.everywhere, masks)
            cotangents = run(whole_grad, ctx.everywhere, grads)
        shares = zip(cotangents, masks, totals, strict=True)
        return (None, None, *(g * mask / total for g, mask, total in shares))
