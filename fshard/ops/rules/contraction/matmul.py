"""Rules of sums of products and of distances.

mm, bmm, addmm, linear, bilinear, einsum, tensordot, outer, inner, kron, multi_dot, vecdot, cross,
cdist, pdist, _grouped_mm.
Every factor may be sharded; a factor that the result lacks leaves it unreduced, and each operand
may be unreduced itself. An operand that is added to the product is counted once.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch

from fshard.ops.core.builders import wrap_dim
from fshard.ops.core.call import OpCall, base_name
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.letters import (
    contraction_rule,
    drop_broadcast,
    letters,
    no_factors,
    text_dims,
    trailing_dims,
)
from fshard.ops.rules.shard_call import ExpandArgument, SetArgument, ShardCall
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

aten = torch.ops.aten


@register_rule(
    aten.matmul, aten.linalg_matmul, aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten._int_mm,
)  # fmt: skip
def matmul(call: OpCall) -> Rule:
    """Rule `bik,bkj->bij` of products of vectors, matrices and batches of them, which broadcast."""
    a, b = call.operands
    batch = letters(max(a.ndim, b.ndim, 2) - 2, "ijk")
    rows, columns = ("i" if a.ndim > 1 else ""), ("j" if b.ndim > 1 else "")
    return contraction_rule(
        call,
        (trailing_dims(batch + rows + "k", a.ndim), trailing_dims(f"{batch}k{columns}", b.ndim)),
        text_dims(batch + rows + columns),
    )


SUMS = {"addmm": ("ij", "ik", "kj"), "addbmm": ("ij", "bik", "bkj"),
        "baddbmm": ("bij", "bik", "bkj"), "addmv": ("i", "ik", "k"),
        "addr": ("ij", "i", "j")}  # fmt: skip


@register_rule(*(getattr(aten, name) for name in SUMS))
def matmul_add(call: OpCall) -> Rule:
    """Rule `j,ik,kj->ij` of `beta * input + alpha * (a @ b)`; the input is counted once."""
    result, a, b = SUMS[base_name(call.op).rstrip("_")]
    dims = (trailing_dims(result, call.operands[0].ndim), text_dims(a), text_dims(b))
    # For an empty product with a vector PyTorch returns the input's shape, not the sum's.
    changes = (ExpandArgument("self"),) if base_name(call.op).rstrip("_") == "addmv" else ()
    return contraction_rule(call, dims, text_dims(result), bias=0,
                            local=ShardCall((0,), changes, skip_empty=False))  # fmt: skip


@register_rule(aten._addmm_activation)
def addmm_activation(call: OpCall) -> Rule:
    """Rule of an activation of a sum with a product: the contracted dim stays unsharded."""
    dims = (trailing_dims("ij", call.operands[0].ndim), text_dims("ik"), text_dims("kj"))
    return Rule(drop_broadcast(dims, call.operands), (text_dims("ij"),), unsharded=frozenset("k"))


@register_rule(aten.linear)
def linear_layer(call: OpCall) -> Rule:
    """Rule `bk,jk,j->bj` of `x @ weight.T + bias`; the bias is counted once."""
    x, weight = call.operands[:2]
    batch = letters(x.ndim - 1, "jk")
    result = batch + ("j" if weight.ndim == 2 else "")
    operands = [text_dims(batch + "k"), trailing_dims("jk", weight.ndim)]
    operands += [trailing_dims("j", bias.ndim) for bias in call.operands[2:]]
    return contraction_rule(call, operands, text_dims(result), bias=call.operand_index("bias"))


@register_rule(aten.bilinear)
def bilinear(call: OpCall) -> Rule:
    """Rule `bi,bj,oij,o->bo` of `x1 @ weight[o] @ x2 + bias` for every output `o`."""
    batch = letters(call.operands[0].ndim - 1, "ijo")
    operands = [text_dims(batch + "i"), text_dims(batch + "j"), text_dims("oij")]
    operands += [text_dims("o") for _ in call.operands[3:]]
    bias = call.operand_index("bias")
    return contraction_rule(call, operands, text_dims(batch + "o"), bias=bias,
                            local=ShardCall(once=() if bias is None else (bias,)))  # fmt: skip


@register_rule(aten._trilinear)
def trilinear(call: OpCall) -> Rule:
    """Rule of three tensors, unsqueezed at the `expand` dims, multiplied, summed over `sumdim`."""
    ndim = call.operands[0].ndim + len(call.get("expand1"))
    names = letters(ndim)
    operands = []
    for n in (1, 2, 3):
        expanded = {wrap_dim(dim, ndim) for dim in call.get(f"expand{n}")}
        operands.append(text_dims("".join(names[d] for d in range(ndim) if d not in expanded)))
    summed = {wrap_dim(dim, ndim) for dim in call.get("sumdim")}
    result = "".join(names[d] for d in range(ndim) if d not in summed)
    return contraction_rule(call, operands, text_dims(result))


@register_rule(aten.outer, aten.ger)
def outer(call: OpCall) -> Rule:
    """Rule `i,j->ij`."""
    return contraction_rule(call, (text_dims("i"), text_dims("j")), text_dims("ij"))


@register_rule(aten.inner)
def inner(call: OpCall) -> Rule:
    """Rule `bk,ck->bc` of products summed over the last dims; with a scalar, of a scaling."""
    a, b = call.operands
    if not (a.ndim and b.ndim):
        dims = text_dims(letters(a.ndim + b.ndim))
        return contraction_rule(call, (dims[: a.ndim], dims[: b.ndim]), dims)
    free = letters(a.ndim + b.ndim - 2, "k")
    left_letters, right_letters = free[: a.ndim - 1], free[a.ndim - 1 :]
    operands = text_dims(left_letters + "k"), text_dims(right_letters + "k")
    return contraction_rule(call, operands, text_dims(free))


@register_rule(aten.tensordot)
def tensordot(call: OpCall) -> Rule:
    """Rule of products summed over pairs of dims."""
    a, b = call.operands
    left_dims = [wrap_dim(dim, a.ndim) for dim in call.get("dims_self")]
    pairs = {wrap_dim(dim, b.ndim): i for i, dim in enumerate(call.get("dims_other"))}
    names = letters(a.ndim + b.ndim)
    left_letters, right_letters = names[: a.ndim], names[a.ndim :]
    right_text = "".join(
        left_letters[left_dims[pairs[i]]] if i in pairs else right_letters[i] for i in range(b.ndim)
    )
    result = [left_letters[i] for i in range(a.ndim) if i not in left_dims]
    result += [right_text[i] for i in range(b.ndim) if i not in pairs]
    operands = text_dims(left_letters), text_dims(right_text)
    return contraction_rule(call, operands, text_dims("".join(result)))


@register_rule(aten.kron)
def kron(call: OpCall) -> Rule:
    """Rule `ab,cd->(ac)(bd)`: every result dim is a product of one dim of each operand."""
    a, b = call.operands
    names = letters(a.ndim + b.ndim)
    left_dims, right_dims = text_dims(names[: a.ndim]), text_dims(names[a.ndim :])
    ndim = max(a.ndim, b.ndim)
    padded = [((),) * (ndim - len(dims)) + dims for dims in (left_dims, right_dims)]
    result = tuple((*x, *y) for x, y in zip(*padded, strict=True))
    return contraction_rule(call, (left_dims, right_dims), result, local=_kron_of_contiguous)


def _kron_of_contiguous(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    """Run `kron`, which raises for some strides of its operands."""
    out: torch.Tensor = op(*(x.contiguous() for x in args), **kwargs)
    return out


@register_rule(aten.linalg_multi_dot, aten.chain_matmul)
def chain(call: OpCall) -> Rule:
    """Rule of a product of many matrices; the first and the last may be vectors."""
    names = letters(len(call.operands) + 1)
    last = len(call.operands) - 1
    operands = []
    for i, meta in enumerate(call.operands):
        text = names[i : i + 2]
        operands.append(text if meta.ndim == 2 else text[1] if i == 0 and last else text[0])
    result = "".join(text[end] for text, end, meta in (
        (operands[0], 0, call.operands[0]), (operands[last], -1, call.operands[last])
    ) if meta.ndim == 2) if last else operands[0]  # fmt: skip
    return contraction_rule(call, [text_dims(text) for text in operands], text_dims(result))


# -- einsum ---------------------------------------------------------------------------------


@register_rule(aten.einsum)
def einsum(call: OpCall) -> Rule:
    """Rule of the equation; letters repeated within one operand stay unsharded."""
    operand_text, arrow, result_text = call.get("equation").replace(" ", "").partition("->")
    texts = operand_text.split(",")
    max_ellipsis = max(
        meta.ndim - len(text.replace("...", ""))
        for text, meta in zip(texts, call.operands, strict=True)
    )
    used = [x for x in dict.fromkeys(operand_text + result_text) if x.isalpha()]
    free = letters(max_ellipsis, used)
    if not arrow:
        unique = sorted(x for x in used if operand_text.count(x) == 1)
        result_text = "..." + "".join(unique)
    full = [
        _spelled(text, free, meta.ndim) for text, meta in zip(texts, call.operands, strict=True)
    ]
    repeated = {letter for text in full for letter in text if text.count(letter) > 1}
    return contraction_rule(call, [_hidden(text, repeated) for text in full],
                            _hidden(_spelled(result_text, free, None), repeated))  # fmt: skip


def _hidden(text: str, hidden: Container[str]) -> Dims:
    """Return the factors of einsum letters; those in `hidden` give dims without a factor."""
    return tuple(() if x in hidden else (x,) for x in text)


def _spelled(text: str, free: str, ndim: int | None) -> str:
    """Return an operand's letters with its ellipsis replaced by the last of `free`."""
    count = len(free) if ndim is None else ndim - len(text.replace("...", ""))
    return text.replace("...", free[len(free) - count :] if count else "")


# -- products along a dim, and distances ----------------------------------------------------


@register_rule(aten.linalg_vecdot)
def vecdot(call: OpCall) -> Rule:
    """Rule `bc,bc->b` of products summed along one dim of two tensors that broadcast."""
    a, b = call.operands
    ndim = max(a.ndim, b.ndim)
    names, dim = letters(ndim), wrap_dim(call.get("dim"), ndim)
    return contraction_rule(call, (trailing_dims(names, a.ndim), trailing_dims(names, b.ndim)),
                            text_dims(names[:dim] + names[dim + 1 :]))  # fmt: skip


@register_rule(aten.cross, aten.linalg_cross)
def cross(call: OpCall) -> Rule:
    """Rule `b1,b1->b1` of cross products along a dim of size 3."""
    a, b = call.operands
    ndim, dim = max(a.ndim, b.ndim), call.get("dim")
    if dim is None:
        # The first operand's first dim of global size 3; a shard may have another one before it.
        dim = ndim - a.ndim + a.shape.index(3)
    names = letters(ndim)
    dims = [() if i == wrap_dim(dim, ndim) else (names[i],) for i in range(ndim)]
    local = ShardCall(rewrites=(SetArgument("dim", dim),), skip_empty=False)
    operands = [tuple(dims[ndim - meta.ndim :]) for meta in (a, b)]
    return contraction_rule(call, operands, tuple(dims), local=local)


@register_rule(aten.cdist, aten._cdist_forward, aten._euclidean_dist)
def cdist(call: OpCall) -> Rule:
    """Rule `bpk,bqk->bpq` of distances between pairs of rows; `k` summed for powers 0 and 1."""
    a, b = call.operands
    batch = letters(max(a.ndim, b.ndim) - 2, "pqk")
    dims = drop_broadcast(
        (trailing_dims(batch + "pk", a.ndim), trailing_dims(batch + "qk", b.ndim)), (a, b)
    )
    return _distances(call, dims, text_dims(batch + "pq"))


@register_rule(aten.pdist, aten._pdist_forward)
def pdist(call: OpCall) -> Rule:
    """Rule `1k->1` of distances between all pairs of rows of one matrix."""
    return _distances(call, (((), ("k",)),), ((),))


def _distances(call: OpCall, dims: Sequence[Dims], result: Dims) -> Rule:
    """Return a rule that shards the width `k` for sums and, without gradients, for maxima."""
    power = float(call.get("p")) if call.has("p") else 2.0
    kind = {0.0: "sum", 1.0: "sum", float("inf"): "max"}.get(power)
    factors = ("k",) if any(("k",) in operand for operand in dims) else ()
    # Ties of a maximum on several ranks would each get the full gradient.
    grad = frozenset(factors) if kind == "max" else frozenset()
    kinds = tuple((f, kind) for f in factors) if kind else ()
    unsharded = frozenset() if kind else frozenset(factors)
    return Rule(tuple(dims), (result,), kinds, unsharded, no_grad=grad, local=ShardCall())


# -- groups of products ---------------------------------------------------------------------


@register_rule(aten._grouped_mm)
def grouped(call: OpCall) -> Rule | None:
    """Rule of products of batches, or of groups of rows or columns that end at `offs`."""
    if call.operand_index("bias") is not None:
        return None
    a, b = call.operands[:2]
    operands, result = {
        (2, 2): (("ix", "xj"), "gij"),
        (2, 3): (("xk", "gkj"), "xj"),
        (3, 2): (("gik", "kx"), "ix"),
        (3, 3): (("gik", "gkj"), "gij"),
    }[a.ndim, b.ndim]
    hidden = "" if (a.ndim, b.ndim) == (3, 3) else "gx"
    dims = [*(_hidden(text, hidden) for text in operands),
            *(no_factors(meta) for meta in call.operands[2:])]  # fmt: skip
    return contraction_rule(call, dims, _hidden(result, hidden), linear_in=(0, 1))
