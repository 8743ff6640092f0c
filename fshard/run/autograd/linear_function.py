"""The one autograd rule: the backward of a linear operation runs its transpose.

A linear operation works on this rank's local over a transport, or on all shards of a
simulation. Backward runs the transpose through the same rule, so every order of derivative
exists. Maxima and minima are not linear: their rule is that of `torch.amax`, ties share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Protocol, cast

import torch
from torch.autograd import forward_ad

from fshard._torch.function_apply import applied
from fshard._torch.legacy_vmap import around, held, is_batched
from fshard._util.errors import fail
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.plan.batch.coalesce import buckets, rounds
from fshard.program.program import Program
from fshard.run.autograd.max_min_gradient import extreme_gradient, linear_parts
from fshard.run.bucketing import launch_all
from fshard.run.interpreter import collectives, launch, ranks_of
from fshard.run.transports.base import (
    LABEL,
    Label,
    Transport,
    backward_phase,
    check_ranks,
    current_rank,
    is_simulated,
    labelled,
    unobserved,
)
from fshard.run.transports.divergence_report import backward_label
from fshard.run.transports.reduce_dtypes import as_number
from fshard.run.transports.shape_only import is_abstract, shapes_of
from fshard.run.transports.simulator import run_ranks, run_together

__all__ = [
    "Everywhere", "FinishAll", "Linear", "Run", "Shards", "apply_linear", "apply_program",
    "apply_run", "is_differentiated", "is_transformed", "start_linear",
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

    Those of their collectives that agree go out in one launch, in buckets of `bucket_bytes`. The
    locals are those of the ranks `among`, by default of all that take part.
    """

    progs: tuple[Program, ...]
    among: Mesh | None = None
    bucket_bytes: int | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh of the ranks."""
        return self.among or ranks_of(*self.progs)

    @property
    def T(self) -> Run:  # noqa: N802
        """The transposed programs."""
        return self.of([prog.T for prog in self.progs])

    def wider(self, n: int) -> Run:
        """The programs with one more dim, which no step touches."""
        return self.of([_wider(prog, n) for prog in self.progs])

    def of(self, progs: Iterable[Program]) -> Run:
        """Other programs in the same way."""
        return Run(tuple(progs), self.among, self.bucket_bytes)

    def launch(self, transport: Transport, xs: Shards) -> FinishAll:
        """Start the programs on this rank's locals."""
        if len(self.progs) > 1:
            return launch_all(self.progs, self.bucket_bytes, transport, xs)
        only = launch(self.progs[0], transport, xs[0])
        return lambda: (only(),)

    def everywhere(self, xs: Shards) -> Shards:
        """Run the programs on all shards of a simulation."""
        n = self.mesh.size
        values = [xs[place::n] for place in range(n)]
        outs: list[Any]
        if _waits(self.progs, self.bucket_bytes):
            outs = run_ranks(self.mesh, lambda rank, own: self.launch(rank, own)(), values)
        else:  # nobody waits before all is launched: no threads are needed
            outs = run_together(self.mesh, cast(Any, self.launch), values)
        return tuple(y for ys in zip(*outs, strict=True) for y in ys)


@lru_cache(maxsize=1024)
def _waits(progs: tuple[Program, ...], limit: int | None) -> bool:
    """Whether a rank waits for something before it has launched all."""
    if len(progs) == 1:
        return collectives(progs[0]) > 1
    found = buckets(progs, limit)
    return len(found) > 1 or len(rounds(progs, found[0])) > 1


@lru_cache(maxsize=1024)
def _wider(prog: Program, n: int) -> Program:
    src, p = prog.src, prog.src.partition
    sides = PartitionSpec._of((*p.dims, ()), p.unreduced_kinds, p.reduced_kinds)
    whole = Spec._of(src.mesh, sides, (*src.shape, n), src.dtype, (*src.sizes, None))
    dtypes = prog.forward_dtype, prog.backward_dtype
    return Program(whole, prog.steps, forward_dtype=dtypes[0], backward_dtype=dtypes[1])


def start_linear(op: Linear, xs: Shards, where: str) -> FinishAll:
    """Start `op` on locals of this rank; on abstract ones nothing is sent.

    Under `torch.no_grad()` where one requires grad: `apply_linear` adds the gradient.

    Raises `ShardingError` where there is no rank, naming `where`.
    """
    if is_abstract(xs[0]):
        with unobserved():
            return op.launch(shapes_of(op.mesh), xs)
    mesh = op.mesh
    transport = current_rank(mesh, where)
    if forward_ad._current_level >= 0 and is_simulated():
        label = LABEL.get()
        fail(
            where if label is None else label.name,
            "a simulated rank in forward mode: torch.func.jvp, jacfwd, or a dual_level",
            "PyTorch has one level of forward mode for the process; ranks in turn would share it",
            "torch.func.vjp or jacrev; forward mode is for ranks that are processes, by torchrun",
        )
    if transport.rank not in mesh:
        check_ranks(mesh, transport, where)
        return lambda: tuple(x.new_empty(0) for x in xs)
    if LABEL.get() is not None:
        return op.launch(transport, xs)
    with labelled(Label(where, mesh)):
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
        ys = apply_linear(op.wider(n), _batched_last(xs, dims, n), everywhere)
        return _outside_too(ys, n), (-1,) * len(ys)


def _outside_too(ys: Shards, n: int) -> Shards:
    """Results with a last dim of size n, also those of ranks that have none: nothing n times."""
    return tuple(y.reshape(0, n) if y.shape == (0,) else y for y in ys)


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
    if any(map(is_batched, xs)):
        return _apply_batched(op, xs, everywhere, around())
    if any(map(is_differentiated, xs)):
        out: Shards = applied(_Apply, op, everywhere, launched, *xs)
        return out
    return _execute(op, xs, everywhere, launched)


def _apply_batched(op: Linear, xs: Shards, everywhere: bool, level: int) -> Shards:
    """Run `op` on what holds a batch of each level: it goes through as one more dim."""
    if level == 0:
        return apply_linear(op, xs, everywhere)
    n, wide = held(xs, level, -1)
    if n == 1:  # or of no batch at this level
        return _apply_batched(op, tuple(x.squeeze(-1) for x in wide), everywhere, level - 1)
    out = _outside_too(_apply_batched(op.wider(n), wide, everywhere, level - 1), n)
    return tuple(torch._add_batch_dim(y, y.ndim - 1, level) for y in out)


def apply_program(
    prog: Program, xs: Shards, everywhere: bool, launched: FinishAll | None = None
) -> Shards:
    """Run a program on one local or on all shards, differentiably."""
    return apply_run(Run((prog,)), xs, everywhere, launched)


def apply_run(op: Run, xs: Shards, everywhere: bool, launched: FinishAll | None = None) -> Shards:
    """Run programs of any kind on a rank's locals or on all shards of each, differentiably."""
    if all(prog.is_linear for prog in op.progs) or not any(map(is_differentiated, xs)):
        return apply_linear(op, xs, everywhere, launched)
    n = op.mesh.size if everywhere else 1
    held = [xs[at : at + n] for at in range(0, len(xs), n)]
    wanted = [any(map(is_differentiated, each)) for each in held]
    for pieces in zip_longest(*map(linear_parts, op.progs)):
        for run, linear in ((apply_linear, True), (_extreme, False)):
            now = [at for at, each in enumerate(pieces) if each and each.is_linear == linear]
            if now:
                some = Run(tuple(pieces[at] for at in now), op.mesh, op.bucket_bytes)
                ys = run(some, tuple(x for at in now for x in held[at]), everywhere)
                for place, at in enumerate(now):
                    held[at] = ys[place * n : (place + 1) * n]
    return tuple(
        y if need else y.detach() for ys, need in zip(held, wanted, strict=True) for y in ys
    )


def _extreme(op: Run, xs: Shards, everywhere: bool) -> Shards:
    """Maxima or minima over ranks; their gradients go to the candidates that reach them."""
    out: Shards = applied(_Extreme, op, everywhere, *xs)
    return out


def _like(xs: Shards, ys: Shards) -> Shards:
    """What is of the shapes of `xs`, also where there is nothing of either."""
    return tuple(y.reshape(x.shape) for x, y in zip(xs, ys, strict=True))


def _shared(g: torch.Tensor, mask: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Each candidate's share of a cotangent."""
    number, restore = as_number(g, "sum")
    return restore(number * mask.to(number.dtype) / total.to(number.dtype))


class _Extreme(torch.autograd.Function):
    """Reductions by maximum or minimum, of one step each."""

    @staticmethod
    def forward(op: Run, everywhere: bool, *xs: torch.Tensor) -> Shards:
        return tuple(map(_result, xs, _execute(op, xs, everywhere, None)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Shards) -> None:
        ctx.op, ctx.everywhere, *xs = inputs
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
    def vmap(info: Any, in_dims: Any, op: Run, everywhere: bool, *xs: Any) -> Any:
        n, dims = info.batch_size, in_dims[2:]
        ys = _extreme(op.wider(n), _batched_last(xs, dims, n), everywhere)
        return _outside_too(ys, n), (-1,) * len(ys)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        xs, ys = ctx.saved_tensors[: ctx.n], ctx.saved_tensors[ctx.n :]
        op, everywhere = ctx.op, ctx.everywhere
        parts = zip(*map(extreme_gradient, op.progs), strict=True)
        count, whole, whole_grad = (Run(each, op.mesh, op.bucket_bytes) for each in parts)
        with backward_phase(ctx.label):
            wholes = apply_linear(whole, tuple(y.detach() for y in ys), everywhere)
            wholes = _like(xs, wholes)
            masks = tuple((x == y).to(x.dtype) for x, y in zip(xs, wholes, strict=True))
            totals = _like(xs, apply_linear(count, masks, everywhere))
            cotangents = _like(xs, apply_linear(whole_grad, grads, everywhere))
        return (None, None, *map(_shared, cotangents, masks, totals))
