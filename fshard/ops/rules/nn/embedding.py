"""Rules of embeddings: rows (the vocabulary), width and indices may all be cut.

Of cut rows every rank looks up those that it holds, and gives zeros for the others: an unreduced
sum, as Megatron-LM's vocabulary-parallel embedding (arXiv 1909.08053). What falls elsewhere is
known from the indices alone, so that one weight serves in as many places as one likes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Never

import torch

from fshard._torch.operators import schema_of
from fshard._util.errors import fail
from fshard.ops.core.builders import dim_factors, linear_modes
from fshard.ops.core.call import OpCall, argument
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.rules.index.local_indices import filled, locate, padded, part_of, selecting
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext, with_argument

__all__: list[str] = []

MAX = 2


def _embedded(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Rows of a weight that is cut, the padding's row only where it is held."""
    part, padding = part_of(ctx, 0, 0), argument(op, args, kwargs, "padding_idx")
    held = part.begin <= padding < part.end
    _, args, kwargs = with_argument(
        op, args, kwargs, "padding_idx", padding - part.begin if held else -1
    )
    index = argument(op, args, kwargs, "indices")
    mine, there = locate(index, part)
    if part.is_empty:
        return argument(op, args, kwargs, "weight").new_zeros(ctx.shape())
    _, args, kwargs = with_argument(op, args, kwargs, "indices", mine)
    out = op(*args, **kwargs)
    return out if part.is_whole else out.masked_fill(~there.unsqueeze(-1), 0)


def _embedding(call: OpCall) -> Rule:
    """Rows are summed, width and indices pass."""
    index = dim_factors(call.operands[1].ndim, "i")
    made = Rule(((("v",), ("d",)), index), ((*index, ("d",)),), (("v", "sum"),),
                modes=selecting(0), local=_embedded)  # fmt: skip
    return _as_asked(call, made)


def _as_asked(call: OpCall, made: Rule) -> Rule:
    """What can be cut with a gradient.

    One scaled by frequency counts all indices, and a sparse one is no tensor to cut or sum.
    """
    if call.get("sparse"):
        return replace(made, no_grad=frozenset(made.factors))
    if call.get("scale_grad_by_freq"):
        return replace(made, no_grad=frozenset(made.factors) - {"d"})
    return made


def _renorm(call: OpCall) -> Never:
    fail(f"fs.propagate({call.op})", f"max_norm={call.get('max_norm')}",
         "it writes into the weight, and nothing is written in place here",
         "scale its rows before the lookup: torch.renorm(weight, 2, 0, max_norm)")  # fmt: skip


# -- its gradient -----------------------------------------------------------------------------


def _gradient(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Rows of the weight's gradient that a rank holds; what falls elsewhere is dropped."""
    rows, begin = ctx.shape()[0], ctx.result_offset(0)
    given, made = argument(op, args, kwargs, schema_of(op).arguments[0].name), ctx.results[0]
    assert made is not None
    if not given.numel():
        return given.new_zeros(ctx.shape())
    if rows == made.shape[0]:
        return op(*args, **kwargs)
    index, padding = (
        argument(op, args, kwargs, "indices"),
        argument(op, args, kwargs, "padding_idx"),
    )
    there = (index >= begin) & (index < begin + rows)
    # The row before the first is the padding's as well: it takes what falls elsewhere.
    held = there & (index != padding)
    changed = {"indices": torch.where(held, index - (begin - 1), 0), "num_weights": rows + 1,
               "padding_idx": 0}  # fmt: skip
    for name, value in changed.items():
        _, args, kwargs = with_argument(op, args, kwargs, name, value)
    return op(*args, **kwargs)[1:]


def _dense_backward(call: OpCall) -> Rule | None:
    """Rows and width pass; indices are summed, unless their frequencies count."""
    if call.has("sparse") and call.get("sparse"):
        return None
    index = dim_factors(call.operands[1].ndim, "i")
    counted = bool(call.get("scale_grad_by_freq"))
    reductions = () if counted else tuple((f, "sum") for (f,) in index)
    return Rule(((*index, ("d",)), index), ((("v",), ("d",)),), reductions, modes=linear_modes(0),
                local=_gradient)  # fmt: skip


# -- bags -------------------------------------------------------------------------------------


def _bagged(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Sums and averages over bags of rows of a weight that is cut."""
    part = part_of(ctx, 0, 0)
    if part.is_whole:
        return op(*args, **kwargs)
    index = argument(op, args, kwargs, "indices")
    placed = filled(index, part)
    padding = _padding(op, args, kwargs, part.size)
    # Two rows of zeros: that of the padding, which no bag counts, and that of the other parts.
    weight = padded(padded(argument(op, args, kwargs, "weight"), 0), 0)
    changed: dict[str, Any] = {
        "weight": weight,
        "indices": torch.where(placed < 0, placed, placed + 1),
    }
    if padding is not None:
        changed["indices"] = changed["indices"].masked_fill(index == padding, 0)
        changed["padding_idx"] = 0
    for name, value in changed.items():
        _, args, kwargs = with_argument(op, args, kwargs, name, value)
    return op(*args, **kwargs)


def _padding(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int) -> int | None:
    if not any(each.name == "padding_idx" for each in schema_of(op).arguments):
        return None
    given: int | None = argument(op, args, kwargs, "padding_idx")
    if given is None or (given < 0 and schema_of(op).name != "aten::embedding_bag"):
        return None
    return given % max(rows, 1)


def _bag(call: OpCall) -> Rule:
    """Width passes, rows are summed but for maxima; only the bags themselves are results.

    What else the operation returns is for its own backward, and of other shapes on other devices.
    """
    largest = call.get("mode") == MAX
    others = tuple(((),) * each.ndim for each in call.operands[1:])
    first, nothing = (((), ("d",)),), (None,) * (len(call.results) - 1)
    scale = call.operand_index("per_sample_weights")
    linear_in = () if largest else (0,) if scale is None else (0, scale)
    made = Rule(((("v",), ("d",)), *others), (*first, *nothing), () if largest else (("v", "sum"),),
                modes=linear_modes(*linear_in, results=len(call.results)),
                local=_bagged)  # fmt: skip
    return _as_asked(call, made)


register_rule("embedding")(_embedding)
register_rule("embedding_renorm")(_renorm)
register_rule("embedding_dense_backward", "embedding_backward")(_dense_backward)
register_rule("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")(_bag)


# -- one-hot codes ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalOneHot:
    """A rank's classes of a one-hot code, and one more, first, for those of other ranks."""

    classes: int

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        last = len(ctx.shape()) - 1
        count, begin = ctx.shape()[last], ctx.result_offset(last)
        if count == self.classes:
            return op(*args, **kwargs)
        x = argument(op, args, kwargs, "self")
        there = x >= begin
        if begin + count < self.classes:
            there = there & (x < begin + count)
        moved = torch.where(there, x - (begin - 1), x.clamp(max=0))
        _, args, kwargs = with_argument(op, args, kwargs, "self", moved)
        _, args, kwargs = with_argument(op, args, kwargs, "num_classes", count + 1)
        return op(*args, **kwargs).narrow(-1, 1, count)


def _one_hot(call: OpCall) -> Rule:
    """All dims pass, and the classes of the code may be cut."""
    x = call.operands[0]
    dims = dim_factors(x.ndim)
    return Rule((dims,), ((*dims, ("c",)),), local=_LocalOneHot(call.get("num_classes")))


register_rule("one_hot")(_one_hot)
