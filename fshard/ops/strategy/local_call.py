"""The operation on one rank: what changes there beside the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard._util.errors import fail
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.ops.core.call import map_instances, schema_arguments
from fshard.ops.strategy.strategy import Strategy
from fshard.run.transports.base import current_rank

__all__ = ["LocalRewrite", "RankContext", "rank_on_mesh", "run_local", "with_local_shape"]


@dataclass(frozen=True, slots=True)
class RankContext:
    """Where a local call runs: a rank, and the layouts that the operation has there."""

    rank: int
    operands: tuple[Spec, ...]
    results: tuple[Spec | None, ...]

    def shape(self, result: int = 0) -> tuple[int, ...]:
        """The shape of a result's local on this rank."""
        spec = self.results[result]
        assert spec is not None
        return spec.local_shape(self.rank)

    def offset(self, operand: int, dim: int) -> int:
        """Where the local of an operand begins in the whole, along a dim."""
        return self.operands[operand].offsets(self.rank)[dim]

    def end(self, operand: int, dim: int) -> int:
        """Where the local of an operand ends in the whole, along a dim."""
        spec = self.operands[operand]
        return spec.offsets(self.rank)[dim] + spec.local_shape(self.rank)[dim]

    def result_offset(self, dim: int, result: int = 0) -> int:
        """Where the local of a result begins in the whole, along a dim."""
        spec = self.results[result]
        assert spec is not None
        return spec.offsets(self.rank)[dim]

    @property
    def has_empty(self) -> bool:
        """Whether a rank, which may be another one, holds nothing of an operand."""
        return any(sizes is not None and 0 in sizes for s in self.operands for sizes in s.sizes)

    def is_unsharded(self, operand: int, dim: int) -> bool:
        """Whether an operand is not cut along a dim."""
        return not self.operands[operand].partition.dims[dim]


LocalCall = tuple[Any, tuple[Any, ...], dict[str, Any]]


def with_argument(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, value: Any
) -> LocalCall:
    """A call with another value of the argument called `name`."""
    for at, each in enumerate(schema_arguments(op)):
        if each.name == name and name not in kwargs and at < len(args):
            return op, (*args[:at], value, *args[at + 1 :]), dict(kwargs)
    return op, tuple(args), {**kwargs, name: value}


@dataclass(frozen=True, slots=True)
class LocalRewrite:
    """A local call that is one call of PyTorch's, which does not depend on what is in the tensors.

    It is written down once for every rank, and nothing of fshard runs when it is called.
    """

    def call(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext
    ) -> LocalCall | None:
        """The operation that runs on the rank, and its arguments; None where more runs there."""
        raise NotImplementedError

    def __call__(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext
    ) -> Any:
        """What the call returns."""
        found = self.call(op, args, kwargs, here)
        assert found is not None
        run, placed, named = found
        return run(*placed, **named)


@dataclass(frozen=True, slots=True)
class _Resized(LocalRewrite):
    """A local call with a result's local shape in the place of an argument."""

    name: str
    result: int = 0
    op: Any = None

    def call(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext
    ) -> LocalCall:
        """The call with the shape that the rank makes."""
        shape = list(here.shape(self.result))
        _, placed, named = with_argument(op, args, kwargs, self.name, shape)
        return self.op or op, placed, named


def with_local_shape(name: str, *, result: int = 0, op: Any = None) -> Callable[..., Any]:
    """A rule's `local`: the argument `name`, a shape, becomes that of the result on the rank.

    `op` runs in the place of the operation: a `reshape` for a `view`, whose local may lie in
    memory otherwise than the whole tensor.
    """
    return _Resized(name, result, op)


def rank_on_mesh(mesh: Mesh, where: str) -> int:
    """The rank that this code runs as; raises `ShardingError` where it is none of the mesh."""
    rank = current_rank(mesh, where).rank
    if rank not in mesh:
        fail(where, f"rank {rank}", f"the operation runs on {mesh}, whose ranks are "
             f"{', '.join(map(str, mesh.ranks[:8]))}{', ...' if mesh.size > 8 else ''}",
             "call it on these ranks alone, or fs.reshard to a mesh with all")  # fmt: skip
    return rank


def run_local(
    strategy: Strategy, rank: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor | None]:
    """The operation on one rank's locals; its tensors in order, None where it returns none."""
    call, local = strategy.call, strategy.rule.local
    if local is None:
        out = call.op(*args, **kwargs)
    else:
        here = RankContext(rank, strategy.in_specs, strategy.out_specs)
        out = local(call.op, tuple(args), dict(kwargs), here)
        if here.has_empty:
            out = tracked(out, (*args, *kwargs.values()))
    found = flat(out)
    _check(strategy, rank, found)
    return found


class _Tracked(torch.autograd.Function):
    """A result as one of the operands' too; what has no gradient of its own gives them zeros."""

    generate_vmap_rule = True

    @staticmethod
    def forward(made: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        return made.view_as(made)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        made, *operands = inputs
        ctx.own = made.requires_grad
        ctx.like = [] if ctx.own else [(x.shape, x.dtype, x.device) for x in operands]
        ctx.count = len(operands)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.own:
            return grad, *[None] * ctx.count
        return None, *(torch.zeros(s, dtype=d, device=e) for s, d, e in ctx.like)


def tracked(out: Any, operands: Sequence[Any]) -> Any:
    """What a rank made, with gradients that go to all operands.

    A rank that holds nothing may have made its result of nothing. Without a gradient there, its
    backward pass would leave out the collectives that the other ranks wait in.
    """
    wanted = [x for x in flat(list(operands)) if x is not None and x.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return out

    def attach(x: torch.Tensor) -> Any:
        if not (x.dtype.is_floating_point or x.dtype.is_complex):
            return x
        return _Tracked.apply(x, *wanted)  # type: ignore[no-untyped-call]

    return map_instances(out, torch.Tensor, attach)


def flat(out: Any) -> list[torch.Tensor | None]:
    """The tensors that an operation returned, in order."""
    if isinstance(out, torch.Tensor) or out is None:
        return [out]
    if isinstance(out, list | tuple):
        return [tensor for each in out for tensor in flat(each)]
    return []


def _check(strategy: Strategy, rank: int, found: Sequence[torch.Tensor | None]) -> None:
    for at, (spec, tensor) in enumerate(zip(strategy.out_specs, found, strict=False)):
        if spec is None or tensor is None:
            continue
        if tensor.shape != spec.local_shape(rank) or tensor.dtype != spec.dtype:
            fail(f"fs.apply({strategy.op})",
                 f"result {at} of shape {tuple(tensor.shape)} and {tensor.dtype} on rank {rank}",
                 f"the rule {strategy.rule} makes it {spec}: {spec.local_shape(rank)} there",
                 "correct the rule, or give it a local= that runs on parts")  # fmt: skip
