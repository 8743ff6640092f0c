"""Operations on lists: every element has the layout it would have alone; values, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

import fshard as fs
from fshard import Mesh, P, Spec
from fshard.ops.core.registry import decomposition_of, functional_of
from fshard.ops.propagate.foreach import element_calls, is_foreach
from fshard.ops.propagate.propagate import propagate
from fshard.partition.apply import apply

A = torch.ops.aten
MESH = Mesh(x=2, y=2)
SHAPES = ((4, 6), (8,), (2, 2))
LAYOUTS = (
    (P("x"), P("y"), P()),
    (P("x", "y"), P(("y", "x")), P(None, "y")),
)


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.rand(shape, dtype=torch.float64, generator=generator) * 0.8 + 0.1 for shape in SHAPES
    ]


def specs(partitions: Sequence[P]) -> list[Spec]:
    pairs = zip(partitions, SHAPES, strict=True)
    return [Spec(MESH, p, shape=shape, dtype=torch.float64) for p, shape in pairs]


def _named(name: str) -> OpOverload[..., Any]:
    base, _, overload = name.partition(".")
    op: OpOverload[..., Any] = getattr(getattr(A, base), overload or "default")
    return op


NO_ELEMENT_OP = {"_foreach_addcmul.Tensor", "_foreach_addcdiv.Tensor", "_foreach_powsum.Scalar"}
ALL = sorted(
    rest
    for name in torch._C._dispatch_get_all_op_names()
    if (rest := name.removeprefix("aten::")).startswith("_foreach_")
    and not rest.endswith("out") and rest.replace("_.", ".") not in NO_ELEMENT_OP
    and rest != "_foreach_mm"
)  # fmt: skip


def arguments(op: OpOverload[..., Any]) -> list[Any]:
    """Return lists of positive tensors, numbers, and lists of numbers, as the schema requires."""
    result: list[Any] = []
    for item in op._schema.arguments:
        if item.kwarg_only or item.has_default_value():
            break
        kind = str(item.type)
        result.append({
            "List[Tensor]": lambda: tensors(len(result)),
            "Tensor": lambda: torch.tensor(2.0).double(),
            "number": lambda: 2, "List[number]": lambda: [1.5, 2.0, 3.0],
        }[kind]())  # fmt: skip
    return result


def as_pairs(args: Sequence[Any], specs_: Sequence[Spec]) -> list[Any]:
    return [
        [fs.shard(x, spec) for x, spec in zip(item, specs_, strict=True)]
        if isinstance(item, list) and isinstance(item[0], torch.Tensor) else item
        for item in args
    ]  # fmt: skip


@pytest.mark.parametrize("partitions", LAYOUTS, ids=["some", "all"])
@pytest.mark.parametrize("name", ALL)
def test_every_operation_on_lists(name: str, partitions: Sequence[P]) -> None:
    op = functional_of(_named(name))
    args = arguments(op)
    actual = apply(op, *as_pairs(args, specs(partitions)), mode="auto")
    expected = op(*args)
    assert len(actual) == len(expected)
    for pair, tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(fs.unshard(pair), tensor)


def test_elements_of_equal_layouts_are_local() -> None:
    operands = specs(LAYOUTS[0])
    strategy = propagate(A._foreach_add.List, operands, operands)
    assert strategy.is_local
    assert strategy.out_specs == tuple(operands)
    assert " ".join(str(strategy).split()) == (
        "_foreach_add.List: f64[4@x,6], f64[8@y], f64[2,2], f64[4@x,6], f64[8@y], f64[2,2] "
        "-> f64[4@x,6], f64[8@y], f64[2,2] "
        "x: d0 / invariant, y: invariant / d0 (nothing is sent)"
    )


def test_element_calls() -> None:
    x, y = tensors(0), tensors(1)
    calls = element_calls(A._foreach_addcmul.ScalarList, (x, y, y, [1, 2, 3]), {})
    assert [call.kwargs for call in calls] == [{"value": 1}, {"value": 2}, {"value": 3}]
    assert [call.operands for call in calls] == [(0, 3, 6), (1, 4, 7), (2, 5, 8)]


def test_unreduced_elements_stay_unreduced() -> None:
    operands = [Spec(MESH, P(unreduced={"x"}), shape=(8,)), Spec(MESH, P("y"), shape=(8,))]
    strategy = propagate(A._foreach_mul.Scalar, operands, 2.0)
    assert strategy.out_specs == tuple(operands)


@pytest.mark.parametrize("partitions", LAYOUTS, ids=["some", "all"])
@pytest.mark.parametrize("name", ["mul", "add", "div"])
def test_gradients_of_a_tensor_that_all_elements_use(name: str, partitions: Sequence[P]) -> None:
    leaves = [x.requires_grad_() for x in tensors(0)]
    shared = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    weights = tensors(1)
    replicated = Spec(MESH, P(), shape=(), dtype=torch.float64)
    op = getattr(A, f"_foreach_{name}").Tensor
    operands = [fs.shard(x, spec) for x, spec in zip(leaves, specs(partitions), strict=True)]
    pairs = apply(op, operands, fs.shard(shared, replicated), mode="auto")
    result = [fs.unshard(pair) for pair in pairs]
    right = [getattr(torch, name)(x, shared) for x in leaves]
    sums = [
        sum((x * w).sum() for x, w in zip(item, weights, strict=True)) for item in (result, right)
    ]
    one, other = (torch.autograd.grad(item, [*leaves, shared]) for item in sums)
    torch.testing.assert_close(one, other)


def test_foreach_mm_shards_elements_along_different_dims() -> None:
    a, b = [torch.rand(4, 6), torch.rand(2, 8)], [torch.rand(6, 2), torch.rand(8, 4)]
    operands = [
        [fs.shard(x, Spec(MESH, p, shape=x.shape)) for x, p in zip(item, partitions, strict=True)]
        for item, partitions in ((a, (P("x", "y"), P(None, "x"))), (b, (P("y"), P("x"))))
    ]
    result = apply(A._foreach_mm.default, *operands)
    assert [str(item.spec) for item in result] == [
        "f32[4@x,2]{unreduced: y}",
        "f32[2,4]{unreduced: x}",
    ]
    for pair, x, y in zip(result, a, b, strict=True):
        torch.testing.assert_close(fs.unshard(pair), x @ y)


def test_partition_of_foreach_operations() -> None:
    def step(params: list[Any], grads: list[Any]) -> list[Any]:
        decayed = torch._foreach_mul(params, 0.9)
        torch._foreach_add_(decayed, grads, alpha=-0.1)
        return list(decayed)

    operands = [
        [fs.shard(x, spec) for x, spec in zip(tensors(seed), specs(LAYOUTS[1]), strict=True)]
        for seed in (0, 1)
    ]
    partitions = [list(LAYOUTS[1])] * 2
    result = fs.partition(step, mesh=MESH, in_specs=tuple(partitions))(*operands)
    for pair, expected in zip(result, step(tensors(0), tensors(1)), strict=True):
        torch.testing.assert_close(fs.unshard(pair), expected)


def test_atleast_2d_of_a_sequence() -> None:
    result = propagate(A.atleast_2d.Sequence, specs(LAYOUTS[1]))
    assert [str(item) for item in result.out_specs] == [
        "f64[4@x,6@y]",
        "f64[1,8@(y,x)]",
        "f64[2,2@y]",
    ]


@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_scalars_in_a_tensor_are_decomposed(name: str) -> None:
    op = getattr(A, f"_foreach_{name}").Tensor
    assert not is_foreach(op)
    decomposition = decomposition_of(op)
    assert decomposition is not None
    x, a, b, scalars = tensors(0), tensors(1), tensors(2), torch.tensor([1.0, 2.0, 3.0]).double()
    torch.testing.assert_close(decomposition(x, a, b, scalars), op(x, a, b, scalars))


def test_lists_are_decomposed_element_by_element() -> None:
    decomposition = decomposition_of(A._foreach_lerp.ScalarList)
    assert decomposition is not None
    operands = (tensors(0), tensors(1), [0.1, 0.2, 0.3])
    torch.testing.assert_close(decomposition(*operands), A._foreach_lerp.ScalarList(*operands))
