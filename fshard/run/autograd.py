"""The one autograd rule: the backward of a linear operation runs its transpose.

A linear operation works on this rank's local over a transport, or on all shards of a
simulation. Backward runs the transpose through the same rule, so every order of derivative
exists. Maxima and minima are not linear: their rule is that of `torch.amax`, ties share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from fshard.errors import fail
from fshard.mesh import Mesh
from fshard.partition import LINEAR, PartitionSpec
from fshard.program.infer import unreduced_kind
from fshard.program.program import Program
from fshard.program.steps import AllGather, AllReduce, ReduceScatter
from fshard.program.transpose import is_linear
from fshard.run.interpreter import launch
from fshard.run.simulate import run_ranks
from fshard.run.transport import Finish, Transport, backward_phase, current_rank
from fshard.spec import Spec

__all__ = ["Linear", "Run", "apply_linear", "apply_program"]

Shards = tuple[torch.Tensor, ...]


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

    def launch(self, transport: Transport, x: torch.Tensor) -> Finish:
        """Start it on this rank's local."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """A linear program as such an operation."""

    prog: Program

    @property
    def mesh(self) -> Mesh:
        """The mesh of the program."""
        return self.prog.src.mesh

    @property
    def T(self) -> Run:  # noqa: N802
        """The transposed program."""
        return Run(self.prog.T)

    def launch(self, transport: Transport, x: torch.Tensor) -> Finish:
        """Start the program on this rank's local."""
        return launch(self.prog, transport, x)


def _execute(op: Linear, xs: Shards, everywhere: bool, launched: Finish | None) -> Shards:
    if everywhere:
        return tuple(run_ranks(op.mesh, lambda transport, x: op.launch(transport, x)(), xs))
    if launched is not None:
        return (launched(),)
    return (op.launch(current_rank(op.mesh, "backward of a collective"), xs[0])(),)


class _Apply(torch.autograd.Function):
    """Forward runs an operation, backward its transpose."""

    @staticmethod
    def forward(
        ctx: Any, op: Linear, everywhere: bool, launched: Finish | None, *xs: torch.Tensor
    ) -> Shards:
        ctx.op, ctx.everywhere = op, everywhere
        ctx.shapes = [(x.shape, x.dtype) for x in xs]
        out = _execute(op, xs, everywhere, launched)
        # What an operation hands on unchanged must not be taken for an input by autograd.
        return tuple(y.view_as(y) if y is x else y for x, y in zip(xs, out, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with backward_phase():
            back = apply_linear(ctx.op.T, grads, ctx.everywhere)
        kept = (
            g if g.shape == s else g.new_zeros(s)
            for g, (s, _) in zip(back, ctx.shapes, strict=True)
        )
        return (None, None, None, *kept)


def apply_linear(
    op: Linear, xs: Shards, everywhere: bool, launched: Finish | None = None
) -> Shards:
    """Run `op` on one local or on all shards, differentiably; `launched` is its own start."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        out: Shards = _Apply.apply(op, everywhere, launched, *xs)  # type: ignore[no-untyped-call]
        return out
    return _execute(op, xs, everywhere, launched)


def apply_program(
    prog: Program, xs: Shards, everywhere: bool, launched: Finish | None = None
) -> Shards:
    """Run a program on one local or on all shards, differentiably."""
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
    if not wanted or prog.is_linear:
        return apply_linear(Run(prog), xs, everywhere, launched)
    for part in _parts(prog):
        if part.is_linear:
            xs = apply_linear(Run(part), xs, everywhere)
        else:
            xs = _extreme(part, xs, everywhere)
    return xs


@lru_cache(maxsize=1024)
def _parts(prog: Program) -> tuple[Program, ...]:
    """The program cut at its non-linear steps.

    In the linear parts candidates of a maximum are passengers: their reduction is none of
    these steps' business, and their gradients are addends, so they are typed as a sum's.
    """
    parts: list[Program] = []
    run: list[Any] = []
    start = prog.src
    for step, src, dst in zip(prog.steps, prog.specs, prog.specs[1:], strict=False):
        if is_linear(step, src):
            run.append(step)
            continue
        if (
            not isinstance(step, AllReduce | ReduceScatter)
            or unreduced_kind(step, src, step.axes) == "product"
        ):
            fail(
                f"running {prog.src} -> {prog.dst}",
                f"{step} on a tensor that requires grad",
                "sums, averages, maxima and minima have a gradient, this step has none",
                "detach() the local, or reduce by another reduction",
            )
        if run:
            parts.append(Program(_as_addends(start), run))
        parts.append(Program(src, (step,)))
        run, start = [], dst
    return (*parts, Program(_as_addends(start), run)) if run else tuple(parts)


def _as_addends(spec: Spec) -> Spec:
    p = spec.partition
    kinds = tuple((axis, kind if kind in LINEAR else "sum") for axis, kind in p.unreduced_kinds)
    return spec._with(partition=PartitionSpec._of(p.dims, kinds, p.reduced_kinds))


def _extreme(prog: Program, xs: Shards, everywhere: bool) -> Shards:
    """A maximum or minimum over ranks; its gradient goes to the candidates that reach it."""
    out: Shards = _Extreme.apply(prog, everywhere, *xs)  # type: ignore[no-untyped-call]
    return out


class _Extreme(torch.autograd.Function):
    """One all-reduce or reduce-scatter by maximum or minimum."""

    @staticmethod
    def forward(ctx: Any, prog: Program, everywhere: bool, *xs: torch.Tensor) -> Shards:
        ctx.prog, ctx.everywhere, ctx.n = prog, everywhere, len(xs)
        ys = _execute(Run(prog), xs, everywhere, None)
        ctx.save_for_backward(*xs, *ys)
        return tuple(y.view_as(y) if y is x else y for x, y in zip(xs, ys, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        xs, ys = ctx.saved_tensors[: ctx.n], ctx.saved_tensors[ctx.n :]
        count, whole, whole_grad = _extreme_gradient(ctx.prog)
        run: Callable[[Program, Shards], Shards]
        run = lambda prog, each: apply_linear(Run(prog), each, ctx.everywhere)  # noqa: E731
        with backward_phase():
            masks = tuple(
                (x == y).to(x.dtype)
                for x, y in zip(xs, run(whole, tuple(y.detach() for y in ys)), strict=True)
            )
            totals = run(count, masks)
            cotangents = run(whole_grad, grads)
        shares = zip(cotangents, masks, totals, strict=True)
        return (None, None, *(g * mask / total for g, mask, total in shares))


@lru_cache(maxsize=1024)
def _extreme_gradient(prog: Program) -> tuple[Program, Program, Program]:
    """Programs that count ties, and that make the result and its cotangent whole on every rank."""
    (step,) = prog.steps
    assert isinstance(step, AllReduce | ReduceScatter)
    count = Program(_as_addends(prog.src), (AllReduce(step.axes),))
    plain = _as_addends(prog.dst)
    if isinstance(step, ReduceScatter):
        gather = (AllGather(step.axes, step.dim),)
        return count, Program(plain, gather), Program(plain, gather)
    bare = _without(plain, step.axes)
    if step.to == "reduced":
        addends = bare.partition.unreduced_kinds + tuple((axis, "sum") for axis in step.axes)
        p = PartitionSpec._of(bare.partition.dims, addends, bare.partition.reduced_kinds)
        return count, Program(bare, ()), Program(bare._with(partition=p), (AllReduce(step.axes),))
    return count, Program(bare, ()), Program(bare, ())


def _without(spec: Spec, axes: tuple[str, ...]) -> Spec:
    p = spec.partition
    reduced = tuple(each for each in p.reduced_kinds if each[0] not in axes)
    return spec._with(partition=PartitionSpec._of(p.dims, p.unreduced_kinds, reduced))
