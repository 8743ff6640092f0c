"""Conversion between one global tensor and a tuple with one tensor per rank, differentiable.

The cotangents of an invariant value must be equal on all ranks, which `shard_value` can compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard._torch.fake_tensors import is_recording_below_autograd
from fshard._torch.functorch import (
    apply_function,
    is_batched_at_any_level,
    is_transformed,
    is_vectorized,
    with_batch_at,
    without_transforms,
)
from fshard._torch.legacy_vmap import is_legacy_batched, map_batch_dims
from fshard._torch.memory import innermost, unaliased_all
from fshard._torch.modes import without_dispatch_modes
from fshard._util.dtypes import is_inexact
from fshard._util.tracebacks import hiding_frames
from fshard.program.program import Program
from fshard.run.autograd.linear_function import is_differentiated, wider
from fshard.run.transports.base import backward_phase
from fshard.run.transports.divergence_report import backward_label
from fshard.run.transports.shape_only import has_values


def _batches(
    n: int, dims: Sequence[int | None], xs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return batches of n elements, as dim 0, from tensors with a batch dim and without one."""
    return tuple(with_batch_at(x, dim, 0, n) for x, dim in zip(xs, dims, strict=True))


class _Spread(torch.autograd.Function):
    """Copy a tensor to n ranks; the cotangent is invariant, so that of any rank."""

    @staticmethod
    def forward(n: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.detach() for _ in range(n))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.n = inputs[0]

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return replicate_shards(tangent, ctx.n)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], n: int, x: torch.Tensor) -> Any:
        return replicate_shards(x, n), (in_dims[1],) * n

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, replicated_value(grads)


def replicate_shards(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    """Return n aliases of `x`, one per rank, differentiably; for one rank `x` itself."""
    if n == 1:
        return (x,)
    return map_batch_dims(lambda xs: apply_function(_Spread, n, *xs), (x,))


class _First(torch.autograd.Function):
    """Take one of n equal tensors; the cotangent goes to every rank."""

    @staticmethod
    def forward(*xs: torch.Tensor) -> torch.Tensor:
        return xs[0].detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.n = len(inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return replicated_value(tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *xs: torch.Tensor) -> Any:
        return replicated_value(_batches(info.batch_size, in_dims, xs)), 0

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return replicate_shards(grad, ctx.n)


def replicated_value(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the value that all ranks hold, differentiably; of one rank its tensor itself."""
    if len(xs) == 1:
        return xs[0]
    return map_batch_dims(lambda xs: (apply_function(_First, *xs),), xs)[0]


Groups = Sequence[Sequence[int]]
Report = Callable[[int, int, torch.Tensor, torch.Tensor], object]
"""Function of two positions and of the values there, which differ; it raises."""


class _Comparison(torch.autograd.Function):
    """Compare tensors within the wrappers of `torch.func`, which itself never branches on them."""

    @staticmethod
    def forward(groups: Groups, report: Report, *xs: torch.Tensor) -> torch.Tensor:
        with without_dispatch_modes():  # tracers forbid what depends on values
            _compare(xs, groups, report)
        return torch.empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.n = len(inputs)

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return (None,) * ctx.n

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], groups: Groups, report: Report, *xs: torch.Tensor
    ) -> Any:
        batches = _batches(info.batch_size, in_dims[2:], xs)
        return apply_function(_Comparison, groups, report, *batches), None


def compare_values(xs: Sequence[torch.Tensor], groups: Groups, report: Report) -> None:
    """Call `report` for tensors of one group of positions that differ beyond rounding."""
    if not is_transformed():
        with without_dispatch_modes() if is_recording_below_autograd() else nullcontext():
            _compare(xs, groups, report)
    elif is_vectorized() and any(map(is_batched_at_any_level, xs)):
        apply_function(_Comparison, groups, report, *xs)
    else:
        with without_transforms(), without_dispatch_modes():  # tracers forbid reads of values
            _compare([innermost(x) for x in xs], groups, report)


def _compare(xs: Sequence[torch.Tensor], groups: Groups, report: Report) -> None:
    for first, *rest in groups if has_values(xs[0]) else ():
        for i in rest:
            if not are_close(xs[first], xs[i]):
                report(first, i, xs[first].detach(), xs[i].detach())


class _Sharding(torch.autograd.Function):
    """Shard a global tensor for all ranks; the cotangent is unsharded, by the transpose."""

    @staticmethod
    def forward(prog: Program, copied: bool, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _shards(x, prog, copied)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.prog = inputs[0]

    @staticmethod
    def jvp(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        return shard_value(args[-1], ctx.prog)

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], prog: Program, copied: bool, x: torch.Tensor
    ) -> Any:
        x = with_batch_at(x, in_dims[-1], -1, info.batch_size)
        ys = shard_value(x, wider(prog, info.batch_size), copied=copied)
        return ys, (-1,) * len(ys)

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, unshard_value(grads, ctx.prog.T)


class _Unsharding(torch.autograd.Function):
    """Unshard the shards of all ranks, by a linear program; the transpose of `_Sharding`."""

    @staticmethod
    def forward(prog: Program, *xs: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = prog(xs)[0]
        return y.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.prog, ctx.label = inputs[0], backward_label()

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> torch.Tensor:
        return unshard_value(tangents, ctx.prog)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], prog: Program, *xs: torch.Tensor) -> Any:
        n = info.batch_size
        batches = [with_batch_at(x, dim, -1, n) for x, dim in zip(xs, in_dims[1:], strict=True)]
        return unshard_value(batches, wider(prog, n)), -1

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with backward_phase(ctx.label):
            return None, *shard_value(grad, ctx.prog.T)


def unshard_value(xs: Sequence[torch.Tensor], prog: Program) -> torch.Tensor:
    """Return the global tensor of the shards of all ranks of a simulation, differentiably.

    Args:
        xs: the shards.
        prog: the program from them to the invariant tensor.
    """
    if prog.is_linear and is_differentiated(*xs) and not any(map(is_legacy_batched, xs)):
        y: torch.Tensor = apply_function(_Unsharding, prog, *xs)
        return y
    return replicated_value(prog(tuple(xs)))


def shard_value(
    x: torch.Tensor, prog: Program, *, copied: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return the shards of a global tensor for all ranks of a simulation, differentiably.

    Args:
        x: the global tensor.
        prog: the local steps from the invariant tensor to its shards.
        copied: whether shards have memory of their own.
    """
    if is_differentiated(x) and not is_legacy_batched(x):
        ys: tuple[torch.Tensor, ...] = apply_function(_Sharding, prog, copied, x)
        return ys
    return _shards(x, prog, copied)


CotangentCheck = Callable[[Sequence[torch.Tensor]], object]
"""Function of the cotangents of all ranks' shards; it raises if they are not of one value."""


@dataclass(frozen=True, slots=True)
class GlobalInput:
    """Input of a function of every simulated rank that is one tensor, of which each has a shard.

    Attributes:
        prog: the local steps from the invariant tensor to its shards.
        check: called with the cotangents of the shards.
        copied: whether shards have memory of their own.
        batch_dims: number of leading dims that batches have added to the tensor and its shards.
    """

    prog: Program
    check: CotangentCheck | None = None
    copied: bool = False
    batch_dims: int = 0

    def batched(self) -> GlobalInput:
        """Return the input with one more batch dim."""
        return replace(self, batch_dims=self.batch_dims + 1)

    def shards(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the shards of a tensor, without a gradient."""
        return self._run(lambda prog, xs: _shards(xs[0], prog, self.copied), (x,))

    def unsharded(self, cotangents: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the cotangent of the tensor, without a gradient."""
        check = self.check
        if check is not None:

            def compare(xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                check(xs)
                return xs

            map_batch_dims(compare, cotangents)
        return self._run(lambda prog, xs: prog.T(xs)[:1], cotangents)[0]

    def _run(
        self,
        function: Callable[[Program, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]],
        xs: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        """Return `function(prog, xs)`, by a program with the batches as its last dim."""
        if self.batch_dims == 0:
            return function(self.prog, xs)
        sizes, last = xs[0].shape[: self.batch_dims], self.batch_dims - 1
        batches = tuple([x.flatten(0, last).movedim(0, -1) for x in xs])
        ys = function(wider(self.prog, sizes.numel()), batches)
        return tuple([y.movedim(-1, 0).unflatten(0, sizes) for y in ys])


def _shards(x: torch.Tensor, prog: Program, copied: bool) -> tuple[torch.Tensor, ...]:
    n = prog.src.mesh.size
    batched = is_legacy_batched(x)
    copies = replicate_shards(x, n) if batched else tuple([x.detach() for _ in range(n)])
    shards: tuple[torch.Tensor, ...] = prog(copies)
    return unaliased_all(shards, (x,)) if copied and not batched else shards


def are_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if tensors of one shape and dtype differ by rounding at most.

    Ranks may add in another order. Sparse tensors are not compared.
    """
    if a is b or a.layout is not torch.strided or a.numel() == 0:
        return True
    a, b = a.detach(), b.detach()
    if a.dtype == torch.float4_e2m1fn_x2:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    elif a.dtype == torch.complex32 or (a.is_floating_point() and a.dtype.itemsize == 1):
        wide = torch.complex64 if a.is_complex() else torch.float32
        a, b = a.to(wide), b.to(wide)
    if torch.equal(a, b):
        return True
    if not is_inexact(a):
        return False
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    scale = float(a.abs().amax())
    limit = tolerance * scale if scale < torch.inf else tolerance
    return torch.allclose(a, b, rtol=tolerance, atol=limit, equal_nan=True)
