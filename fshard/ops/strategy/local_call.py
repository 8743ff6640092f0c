"""The operation on the locals of one rank.

Most operations run there as they are. A rule's `local` replaces the call where more than shapes
differs from rank to rank: an argument that is a global shape, an index into a sharded dim, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from fshard._torch.functorch import set_forward_mode
from fshard._torch.operators import OpOverload, builtin_of
from fshard._util.cache import CACHE_SIZE
from fshard._util.dtypes import is_inexact
from fshard._util.errors import fail
from fshard.layout.spec import Spec
from fshard.ops.core.call import map_instances, schema_arguments
from fshard.ops.strategy.strategy import Strategy


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank, and the specs that the operation has there."""

    rank: int
    operands: tuple[Spec, ...]
    results: tuple[Spec | None, ...]

    def shape(self, result: int = 0) -> tuple[int, ...]:
        """Return the local shape of a result on this rank."""
        return self._result(result).local_shape(self.rank)

    def offset(self, operand: int, dim: int) -> int:
        """Return the global index, along a dim, at which the local of an operand begins."""
        return self.operands[operand].offsets(self.rank)[dim]

    def end(self, operand: int, dim: int) -> int:
        """Return the global index, along a dim, one past the last of an operand's local."""
        return self.offset(operand, dim) + self.operands[operand].local_shape(self.rank)[dim]

    def result_offset(self, dim: int) -> int:
        """Return the global index, along a dim, at which the local of the first result begins."""
        return self.result.offsets(self.rank)[dim]

    @property
    def result(self) -> Spec:
        """The spec of the first result, which must be a tensor."""
        return self._result(0)

    def _result(self, index: int) -> Spec:
        spec = self.results[index]
        assert spec is not None
        return spec

    @property
    def has_empty(self) -> bool:
        """True if some rank, not only this one, has an empty shard of an operand."""
        shards = [sizes for s in self.operands for sizes in (s.shape, *s.sizes)]
        return any(sizes is not None and 0 in sizes for sizes in shards)

    def is_unsharded(self, operand: int, dim: int) -> bool:
        """Return True if no axis shards the dim of an operand."""
        return not self.operands[operand].partition.dims[dim]


Args = Sequence[Any]
Kwargs = Mapping[str, Any]
LocalCall = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A function, its positional and its keyword arguments."""


def with_argument(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, value: Any
) -> LocalCall:
    """Return a call with the argument called `name` replaced by `value`."""
    for index, parameter in enumerate(schema_arguments(op)):
        if parameter.name == name and name not in kwargs and index < len(args):
            return op, (*args[:index], value, *args[index + 1 :]), dict(kwargs)
    return op, tuple(args), {**kwargs, name: value}


@dataclass(frozen=True, slots=True)
class LocalRewrite:
    """A rule's `local` that is one PyTorch call, whatever the values of the tensors are.

    A partitioned function writes that call into the graph of each rank, so that nothing of fshard
    runs when the graph runs.
    """

    def call(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext
    ) -> LocalCall | None:
        """Return the call that runs on the rank, None if it is more than one."""
        raise NotImplementedError

    def __call__(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext
    ) -> Any:
        """Run the call and return its results."""
        rewritten = self.call(op, args, kwargs, here)
        assert rewritten is not None
        function, local_args, local_kwargs = rewritten
        return function(*local_args, **local_kwargs)


@dataclass(frozen=True, slots=True)
class WithLocalShape(LocalRewrite):
    """The call with the local shape of its result in the place of the argument `name`."""

    name: str

    def call(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext
    ) -> LocalCall:
        """Return the call with the shape of this rank."""
        return with_argument(op, args, kwargs, self.name, list(here.shape()))


def run_local(
    strategy: Strategy, rank: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor | None]:
    """Run the operation on the locals of one rank.

    Returns:
        The tensors of the results in order, None where the operation returns no tensor.
    """
    call, local = strategy.call, strategy.rule.local
    if local is None:
        out = call.op(*args, **kwargs)
    else:
        context, has_empty = _context_of(strategy, rank)
        out = local(call.op, args, kwargs, context)
        if has_empty:
            out = attach_to_operands(out, (*args, *kwargs.values()))
    results = flat(out)
    check_results(strategy, rank, results)
    return results


def static_call(
    strategy: Strategy, rank: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> LocalCall | None:
    """Return the one call of PyTorch that the operation is on a rank, whatever tensors hold.

    Tensors are placeholders. None if the rule makes other calls, or attaches results to operands.
    """
    call, local = strategy.call, strategy.rule.local
    if local is None:
        return builtin_of(call.op), tuple(args), dict(kwargs)
    context, has_empty = _context_of(strategy, rank)
    rewritten = None
    if isinstance(local, LocalRewrite) and not has_empty:
        rewritten = local.call(call.op, args, kwargs, context)
    if rewritten is None or not isinstance(rewritten[0], OpOverload):
        return rewritten
    return builtin_of(rewritten[0]), *rewritten[1:]


@lru_cache(maxsize=CACHE_SIZE)
def _context_of(strategy: Strategy, rank: int) -> tuple[RankContext, bool]:
    """Return the context of a rank, and True if some rank has an empty shard."""
    context = RankContext(rank, strategy.in_specs, strategy.computed_specs)
    return context, context.has_empty


class _Attached(torch.autograd.Function):
    """Identity whose gradient reaches all operands, with zeros for a result without gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(result: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        return result.view_as(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        result, *operands = inputs
        ctx.has_grad = result.requires_grad
        ctx.operands = [] if ctx.has_grad else [(x.shape, x.dtype, x.device) for x in operands]
        ctx.count = len(operands)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        with set_forward_mode(True):
            return tangent.view_as(tangent)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.has_grad:
            return grad, *[None] * ctx.count
        zeros = [torch.zeros(s, dtype=d, device=device) for s, d, device in ctx.operands]
        return None, *zeros


def attach_to_operands(out: Any, operands: Sequence[Any]) -> Any:
    """Return the results of one rank with gradients that reach all operands.

    A rank with empty shards can compute its result from none of them. Without a gradient there,
    its backward pass would skip the collectives in which the other ranks wait.
    """
    tracked = [x for x in flat(list(operands)) if x is not None and x.requires_grad]
    if not tracked or not torch.is_grad_enabled():
        return out

    def attach(x: torch.Tensor) -> Any:
        if not is_inexact(x):
            return x
        return _Attached.apply(x, *tracked)  # type: ignore[no-untyped-call]

    return map_instances(out, torch.Tensor, attach)


def flat(out: Any) -> list[torch.Tensor | None]:
    """Return the tensors that an operation returned, in order; None stays None."""
    if isinstance(out, torch.Tensor) or out is None:
        return [out]
    if isinstance(out, list | tuple):
        return [tensor for part in out for tensor in flat(part)]
    return []


def check_results(strategy: Strategy, rank: int, results: Sequence[torch.Tensor | None]) -> None:
    """Raise `ShardingError` if a local result has another shape or dtype than its spec says."""
    for index, (spec, tensor) in enumerate(zip(strategy.computed_specs, results, strict=False)):
        if spec is None or tensor is None:
            continue
        if tensor.shape != spec.local_shape(rank) or tensor.dtype != spec.dtype:
            fail(f"fs.apply({strategy.op})", f"result {index} of shape {tuple(tensor.shape)} and "
                 f"{tensor.dtype} on rank {rank}",
                 f"the rule {strategy.rule} makes it {spec}: {spec.local_shape(rank)} there",
                 "correct the rule, or give it a local= that runs on parts")  # fmt: skip
