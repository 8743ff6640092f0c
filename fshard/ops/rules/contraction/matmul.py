"""Rules of products: matrices, vectors, batches of them, einsum, and what adds to a product.

All are sums of products of their operands: every factor can be cut, those that the result lacks
leave it unreduced, and every operand may be unreduced. What is added to a product is counted once.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from fshard.ops.core.builders import wrap_dim
from fshard.ops.core.call import Meta, OpCall, base_name
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.einsum_letters import (
    contraction_rule,
    drop_broadcast,
    letters,
    text_dims,
    trailing_dims,
    unsharded_dims,
)
from fshard.ops.rules.shard_call import ExpandArgument, SetArgument, ShardCall

__all__: list[str] = []

aten = torch.ops.aten


@register_rule(
    aten.matmul, aten.linalg_matmul, aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten._int_mm,
)  # fmt: skip
def matmul(call: OpCall) -> Rule:
    """Products of vectors, matrices and batches of these, which broadcast: `bik,bkj->bij`."""
    a, b = call.operands
    batch = letters(max(a.ndim, b.ndim, 2) - 2, "ijk")
    left, right = ("i" if a.ndim > 1 else ""), ("j" if b.ndim > 1 else "")
    return contraction_rule(
        call,
        (trailing_dims(batch + left + "k", a.ndim), trailing_dims(f"{batch}k{right}", b.ndim)),
        text_dims(batch + left + right),
    )


SUMS = {
    "addmm": ("ij", "ik", "kj"),
    "addbmm": ("ij", "bik", "bkj"),
    "baddbmm": ("bij", "bik", "bkj"),
    "addmv": ("i", "ik", "k"),
    "addr": ("ij", "i", "j"),
}


@register_rule(*(getattr(aten, name) for name in SUMS))
def product_added(call: OpCall) -> Rule:
    """`beta * input + alpha * (a @ b)`, where the input may broadcast and is counted once."""
    made, a, b = SUMS[base_name(call.op).rstrip("_")]
    dims = (trailing_dims(made, call.operands[0].ndim), text_dims(a), text_dims(b))
    # Of an empty product with a vector PyTorch returns the input's shape, not the sum's.
    changes = (ExpandArgument("self"),) if base_name(call.op).rstrip("_") == "addmv" else ()
    return contraction_rule(call, dims, text_dims(made), addend=0,
                      local=ShardCall((0,), changes, zeros=False))  # fmt: skip


@register_rule(aten._addmm_activation)
def activated(call: OpCall) -> Rule:
    """A product with something added, and a function of that: the contraction is needed whole."""
    dims = (trailing_dims("ij", call.operands[0].ndim), text_dims("ik"), text_dims("kj"))
    return Rule(drop_broadcast(dims, call.operands), (text_dims("ij"),), unsharded=frozenset("k"))


@register_rule(aten.linear)
def linear_layer(call: OpCall) -> Rule:
    """`x @ weight.T + bias`: the bias is counted once."""
    x, weight = call.operands[:2]
    batch = letters(x.ndim - 1, "jk")
    made = batch + ("j" if weight.ndim == 2 else "")
    operands = [text_dims(batch + "k"), trailing_dims("jk", weight.ndim)]
    operands += [trailing_dims("j", bias.ndim) for bias in call.operands[2:]]
    return contraction_rule(call, operands, text_dims(made), addend=call.operand_index("bias"))


@register_rule(aten.bilinear)
def bilinear(call: OpCall) -> Rule:
    """`x1 @ weight[o] @ x2 + bias`, for every output."""
    batch = letters(call.operands[0].ndim - 1, "ijo")
    operands = [text_dims(batch + "i"), text_dims(batch + "j"), text_dims("oij")]
    operands += [text_dims("o") for _ in call.operands[3:]]
    bias = call.operand_index("bias")
    return contraction_rule(call, operands, text_dims(batch + "o"), addend=bias,
                      local=ShardCall(once=() if bias is None else (bias,)))  # fmt: skip


@register_rule(aten._trilinear)
def trilinear(call: OpCall) -> Rule:
    """Three tensors, unsqueezed at the `expand` dims, multiplied and summed over `sumdim`."""
    total = call.operands[0].ndim + len(call.get("expand1"))
    every = letters(total)
    operands = []
    for at in (1, 2, 3):
        expanded = {wrap_dim(dim, total) for dim in call.get(f"expand{at}")}
        operands.append(text_dims("".join(every[d] for d in range(total) if d not in expanded)))
    summed = {wrap_dim(dim, total) for dim in call.get("sumdim")}
    result = "".join(every[d] for d in range(total) if d not in summed)
    return contraction_rule(call, operands, text_dims(result))


@register_rule(aten.outer, aten.ger)
def outer(call: OpCall) -> Rule:
    """Every product of two vectors' elements."""
    return contraction_rule(call, (text_dims("i"), text_dims("j")), text_dims("ij"))


@register_rule(aten.inner)
def inner(call: OpCall) -> Rule:
    """Products over the last dims; with a number, a product by it."""
    a, b = call.operands
    if not (a.ndim and b.ndim):
        made = text_dims(letters(a.ndim + b.ndim))
        return contraction_rule(call, (made[: a.ndim], made[: b.ndim]), made)
    free = letters(a.ndim + b.ndim - 2, "k")
    left, right = free[: a.ndim - 1], free[a.ndim - 1 :]
    operands = text_dims(left + "k"), text_dims(right + "k")
    return contraction_rule(call, operands, text_dims(free))


@register_rule(aten.tensordot)
def tensordot(call: OpCall) -> Rule:
    """Products summed over pairs of dims."""
    a, b = call.operands
    over = [wrap_dim(dim, a.ndim) for dim in call.get("dims_self")]
    pairs = {wrap_dim(dim, b.ndim): at for at, dim in enumerate(call.get("dims_other"))}
    every = letters(a.ndim + b.ndim)
    left, rest = every[: a.ndim], every[a.ndim :]
    right = "".join(left[over[pairs[at]]] if at in pairs else rest[at] for at in range(b.ndim))
    made = [left[at] for at in range(a.ndim) if at not in over]
    made += [right[at] for at in range(b.ndim) if at not in pairs]
    return contraction_rule(call, (text_dims(left), text_dims(right)), text_dims("".join(made)))


@register_rule(aten.kron)
def kron(call: OpCall) -> Rule:
    """Every dim of the result is a product of one of each operand: `ab,cd->(ac)(bd)`."""
    a, b = call.operands
    every = letters(a.ndim + b.ndim)
    left, right = text_dims(every[: a.ndim]), text_dims(every[a.ndim :])
    ndim = max(a.ndim, b.ndim)
    padded = [((),) * (ndim - len(each)) + each for each in (left, right)]
    made = tuple((*one, *other) for one, other in zip(*padded, strict=True))
    return contraction_rule(call, (left, right), made)


@register_rule(aten.linalg_multi_dot, aten.chain_matmul)
def chain(call: OpCall) -> Rule:
    """A product of many matrices, of which the first and the last may be vectors."""
    every = letters(len(call.operands) + 1)
    last = len(call.operands) - 1
    operands = []
    for at, meta in enumerate(call.operands):
        own = every[at : at + 2]
        operands.append(own if meta.ndim == 2 else own[1] if at == 0 and last else own[0])
    made = "".join(text[place] for text, place, meta in (
        (operands[0], 0, call.operands[0]), (operands[last], -1, call.operands[last])
    ) if meta.ndim == 2) if last else operands[0]  # fmt: skip
    return contraction_rule(call, [text_dims(text) for text in operands], text_dims(made))


# -- einsum ---------------------------------------------------------------------------------


@register_rule(aten.einsum)
def einsum(call: OpCall) -> Rule:
    """Factors are the letters of the equation; those twice in one operand are needed whole."""
    left, arrow, right = call.get("equation").replace(" ", "").partition("->")
    texts = left.split(",")
    most = max(
        meta.ndim - len(text.replace("...", ""))
        for text, meta in zip(texts, call.operands, strict=True)
    )
    named = [each for each in dict.fromkeys(left + right) if each.isalpha()]
    free = letters(most, named)
    if not arrow:
        once = sorted(each for each in named if left.count(each) == 1)
        right = "..." + "".join(once)
    full = [
        _spelled(text, free, meta.ndim) for text, meta in zip(texts, call.operands, strict=True)
    ]
    twice = {letter for text in full for letter in text if text.count(letter) > 1}
    return contraction_rule(call, [_hidden(text, twice) for text in full],
                      _hidden(_spelled(right, free, None), twice))  # fmt: skip


def _hidden(text: str, letters_: Container[str]) -> Dims:
    """The dims of a text, without factors where the letters are hidden ones."""
    return tuple(() if each in letters_ else (each,) for each in text)


def _spelled(text: str, free: str, ndim: int | None) -> str:
    """An operand's letters with those of the ellipsis, as many as its dims are more."""
    count = len(free) if ndim is None else ndim - len(text.replace("...", ""))
    return text.replace("...", free[len(free) - count :] if count else "")


# -- products along a dim, and distances ----------------------------------------------------


@register_rule(aten.linalg_vecdot)
def vecdot(call: OpCall) -> Rule:
    """Products summed along one dim of two tensors that broadcast."""
    a, b = call.operands
    ndim = max(a.ndim, b.ndim)
    every, dim = letters(ndim), wrap_dim(call.get("dim"), ndim)
    return contraction_rule(call, (trailing_dims(every, a.ndim), trailing_dims(every, b.ndim)),
                      text_dims(every[:dim] + every[dim + 1 :]))  # fmt: skip


@register_rule(aten.cross, aten.linalg_cross)
def cross(call: OpCall) -> Rule:
    """Products of vectors of three along a dim, which is needed whole."""
    a, b = call.operands
    ndim, dim = max(a.ndim, b.ndim), call.get("dim")
    if dim is None:
        # The first of size 3, of the whole tensor: a rank's part may have one before it.
        dim = next(at for at, size in enumerate(_broadcast(a, b)) if size == 3)
    every = letters(ndim)
    dims = [() if at == wrap_dim(dim, ndim) else (every[at],) for at in range(ndim)]
    return contraction_rule(call, [tuple(dims[ndim - each.ndim :]) for each in (a, b)], tuple(dims),
                      local=ShardCall(changes=(SetArgument("dim", dim),), zeros=False))  # fmt: skip


def _broadcast(*metas: Meta) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(each.shape for each in metas)))


@register_rule(aten.cdist, aten._cdist_forward, aten._euclidean_dist)
def cdist(call: OpCall) -> Rule:
    """The distances of all pairs of rows: differences sum up where the power is 1 or 0."""
    a, b = call.operands
    batch = letters(max(a.ndim, b.ndim) - 2, "pqk")
    dims = drop_broadcast(
        (trailing_dims(batch + "pk", a.ndim), trailing_dims(batch + "qk", b.ndim)), (a, b)
    )
    return _distances(call, dims, text_dims(batch + "pq"), "k")


@register_rule(aten.pdist, aten._pdist_forward)
def pdist(call: OpCall) -> Rule:
    """The distances of the pairs of rows of one matrix."""
    return _distances(call, (((), ("k",)),), ((),), "k")


def _distances(call: OpCall, dims: Sequence[Dims], made: Dims, over: str) -> Rule:
    """Sums of differences' powers are cut where the root is none, maxima without gradients."""
    power = float(call.get("p")) if call.has("p") else 2.0
    kind = {0.0: "sum", 1.0: "sum", float("inf"): "max"}.get(power)
    seen = {f for each in dims for dim in each for f in dim}
    factors = tuple(f for f in over if f in seen)
    # Of a maximum whose ties lie on several ranks every one would take a whole gradient.
    grad = frozenset(factors) if kind == "max" else frozenset()
    kinds = tuple((f, kind) for f in factors) if kind else ()
    whole = frozenset() if kind else frozenset(factors)
    return Rule(tuple(dims), (made,), kinds, whole, no_grad=grad, local=ShardCall())


# -- groups of products ---------------------------------------------------------------------


@register_rule(aten._grouped_mm)
def grouped(call: OpCall) -> Rule | None:
    """Products of groups of rows or columns, whose ends `offs` says, or of batches."""
    if call.operand_index("bias") is not None:
        return None
    a, b = call.operands[:2]
    operands, made = {
        (2, 2): (("ix", "xj"), "gij"),
        (2, 3): (("xk", "gkj"), "xj"),
        (3, 2): (("gik", "kx"), "ix"),
        (3, 3): (("gik", "gkj"), "gij"),
    }[a.ndim, b.ndim]
    hidden = "" if (a.ndim, b.ndim) == (3, 3) else "gx"
    dims = [
        *(_hidden(text, hidden) for text in operands),
        *(unsharded_dims(each) for each in call.operands[2:]),
    ]
    return contraction_rule(call, dims, _hidden(made, hidden), linear_in=(0, 1))
