"""Operations of the tests of ShardTensor (PhysicsNeMo, `test/domain_parallel`), in its layouts.

Among them are those that it marks as failing or refuses: even kernels, strides that are not the
kernel, odd kernels of transposed convolutions, gradients on 2-d meshes, indices sharded on another
dim than the rows, and rows of a 2-d mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard import Mesh, P, Spec

F64 = torch.float64
LINE, PLANE = Mesh(x=4), Mesh(x=2, y=2)
Row = tuple[Callable[..., Any], list[torch.Tensor], list[P]]


def rand(*shape: int) -> torch.Tensor:
    values: torch.Tensor = fs.random.normal(fs.random.key(sum(shape)), shape, dtype=F64)
    return values


def positions(*shape: int, size: int = 19) -> torch.Tensor:
    return (
        torch.arange(int(torch.tensor(shape).prod())).mul(7).remainder(2 * size).view(shape) - size
    )


ROWS, ROWS_AND_COLUMNS = P("x"), P(None, None, "x", "y")
CASES: dict[str, Row] = {
    "cross": (torch.linalg.cross, [rand(19, 3), rand(19, 3).cos()], [ROWS, ROWS]),
    "cross with one vector": (torch.linalg.cross, [rand(19, 3), rand(1, 3)], [ROWS, P()]),
    "cross with a replicated operand": (torch.linalg.cross, [rand(8, 3), rand(8, 3)], [ROWS, P()]),
    "cross along the sharded dim": (
        lambda x, y: torch.linalg.cross(x, y, dim=0), [rand(3, 16), rand(3, 16).sin()], [ROWS, ROWS]
    ),
    "cross of the first dim of 3": (torch.cross, [rand(1, 4, 3), rand(3, 4, 3)], [P(), P()]),
    "rows at sharded positions": (lambda x, i: x[i], [rand(19, 4), positions(7, 3)], [ROWS, ROWS]),
    "rows at replicated positions": (
        lambda x, i: x[i], [rand(19, 4), positions(7, 3)], [ROWS, P()]
    ),
    "rows at positions sharded on dim 1": (
        lambda x, i: x[i], [rand(19, 4), positions(7, 6)], [ROWS, P(None, "x")]
    ),
    "index_select": (
        lambda x, i: x.index_select(0, i % 19), [rand(19, 4), positions(9)], [ROWS, ROWS]
    ),
    "an element, a slice and dots": (
        lambda x: (x[3], x[10:15], x[:, 1:3], x[..., 0]), [rand(19, 4)], [ROWS]
    ),
    "select of the sharded dim": (lambda x: x.select(0, -2), [rand(19, 4)], [ROWS]),
    "unbind of another dim": (lambda x: x.unbind(1), [rand(19, 3)], [ROWS]),
    "unbind of the sharded dim": (lambda x: x.unbind(0), [rand(5, 3)], [ROWS]),
    "heads merged": (lambda x: x.view(2, 13, 12), [rand(2, 13, 3, 4)], [P(None, "x")]),
    "heads split": (lambda x: x.view(2, 13, 3, -1), [rand(2, 13, 12)], [P(None, "x")]),
    "a sharded dim flattened": (lambda x: x.view(2, -1), [rand(2, 13, 4)], [P(None, "x")]),
    "a sharded dim split": (lambda x: x.view(2, 3, 1), [rand(6)], [ROWS]),
    "sums of all and of some dims": (
        lambda x: (x.sum(), x.sum((0, 1)), x.mean(0), x.mean(), x.amax(0)), [rand(9, 3, 4)], [ROWS]
    ),
    "layer norm of tokens": (lambda x: F.layer_norm(x, (8,)), [rand(2, 13, 8)], [P(None, "x")]),
    "group norm of a line": (lambda x: F.group_norm(x, 2), [rand(2, 4, 13)], [P(None, None, "x")]),
    "attention": (
        F.scaled_dot_product_attention, [rand(2, 2, 13, 4).mul(i) for i in (1, 2, 3)],
        [P(None, None, "x")] * 3,
    ),
    "attention to replicated keys": (
        F.scaled_dot_product_attention, [rand(2, 2, 13, 4), rand(2, 2, 6, 4), rand(2, 2, 6, 4)],
        [P(None, None, "x"), P(), P()],
    ),
    "attention of replicated queries": (
        F.scaled_dot_product_attention, [rand(2, 2, 6, 4), rand(2, 2, 13, 4), rand(2, 2, 13, 4)],
        [P(), P(None, None, "x"), P(None, None, "x")],
    ),
    "gradient of the detached": (lambda x: x.detach() * x, [rand(19, 3)], [ROWS]),
    **{
        f"{name}, kernel {kernel}, stride {stride}": (
            partial(getattr(F, name), stride=stride),
            [rand(2, 3, 12, 9), rand(3, 3, kernel, kernel)], [ROWS_AND_COLUMNS, P()],
        )
        for name in ("conv2d", "conv_transpose2d")
        for kernel in (2, 3)
        for stride in (1, 2)
    },
}  # fmt: skip
"""The function, its tensors, and their partitions."""


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_one_device(name: str) -> None:
    function, tensors, partitions = CASES[name]
    mesh = PLANE if any("y" in p.axes for p in partitions) else LINE
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
    pairs = [
        fs.shard(x, Spec(mesh, p, shape=x.shape, dtype=x.dtype, uneven="chunk"))
        for x, p in zip(leaves, partitions, strict=True)
    ]
    actual, expected = fs.partition(function, mesh=mesh)(*pairs), function(*leaves)
    several = isinstance(expected, tuple)
    ys = [fs.unshard(y) for y in (actual if several else [actual])]
    right = list(expected) if several else [expected]
    torch.testing.assert_close(ys, right, rtol=1e-10, atol=1e-10)
    inexact = [x for x in leaves if x.requires_grad]
    totals = [sum((y * y.cos()).sum() for y in zs) for zs in (ys, right)]
    grads = [torch.autograd.grad(total, inexact) for total in totals]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)
