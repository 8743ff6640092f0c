"""Operators that take functions: `cond`, `while_loop`, `map`, `scan`, `flex_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_rows
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

import fshard as fs
from fshard import Mesh, P

MESH = Mesh(dp=2, tp=2)
Function = Callable[[Tensor, Tensor], Any]


def branch(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(torch.eye(2).sum() > 1, lambda x: x * w, lambda x: x - w, (x,))


def loop(x: Tensor, w: Tensor) -> Tensor:
    start = torch.tensor(0), {"x": x}
    return while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, {"x": (y["x"] * w).sin()}), start)[
        1
    ]["x"]


def loop_without_iteration(x: Tensor, w: Tensor) -> Tensor:
    def body(i: Tensor, _: Any) -> Any:
        raise AssertionError("the body of a loop without an iteration ran")

    start = torch.tensor(9), {"x": x * w}
    return while_loop(lambda i, _: i < 3, body, start)[1]["x"]


def rows(x: Tensor, w: Tensor) -> Tensor:
    return map_rows(lambda row, w: {"y": row.cos() * w}, x, w)["y"]


def recurrence(x: Tensor, w: Tensor) -> Tensor:
    def step(carry: dict[str, Tensor], row: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {"h": carry["h"] * 0.5 + row * w.sum()}, carry["h"].sin()

    carry, ys = scan(step, {"h": x[:, 0] * 0}, x, dim=1, reverse=True)
    return ys + carry["h"][:, None]


def products(x: Tensor, w: Tensor) -> Tensor:
    return associative_scan(torch.mul, x * w, dim=1, combine_mode="generic")


def recurrence_by_hand(x: Tensor, w: Tensor) -> Tensor:
    h, ys = x[:, 0] * 0, []
    for column in x.unbind(1)[::-1]:
        ys.append(h.sin())
        h = h * 0.5 + column * w.sum()
    return torch.stack(ys[::-1], 1) + h[:, None]


CASES: dict[Function, Function] = {
    branch: lambda x, w: x * w,
    loop: lambda x, w: (((x * w).sin() * w).sin() * w).sin(),
    loop_without_iteration: lambda x, w: x * w,
    rows: lambda x, w: x.cos() * w,
    recurrence: recurrence_by_hand,
    products: lambda x, w: (x * w).cumprod(1),
}
ROWS, REPLICATED = P("dp"), P()


def gradients(fn: Function, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = fn(x, w)
    weights = torch.arange(y.numel(), dtype=y.dtype).view(y.shape)
    return y, *torch.autograd.grad((y * weights).sum(), (x, w))


@pytest.fixture
def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((4, 6), (6,))
    )  # type: ignore[return-value]


@pytest.mark.parametrize("fn", CASES)
@pytest.mark.parametrize("transform", [fs.shard_map, fs.partition])
def test_gradients_equal_one_device(
    transform: Any, fn: Function, operands: tuple[Tensor, Tensor]
) -> None:
    # The functions close over `w` as PyTorch's own operators allow; its gradient is summed.
    specs = {"in_specs": (ROWS, REPLICATED), "out_specs": ROWS}
    results = gradients(transform(fn, mesh=MESH, **specs), *operands)
    torch.testing.assert_close(results, gradients(CASES[fn], *operands))


@pytest.mark.parametrize("fn", CASES)
def test_gradients_within_the_function(fn: Function, operands: tuple[Tensor, Tensor]) -> None:
    part = fs.partition(
        lambda x, w: gradients(fn, x, w), mesh=MESH, in_specs=(P("dp", "tp"), REPLICATED)
    )
    torch.testing.assert_close(part(*operands), gradients(CASES[fn], *operands))


@pytest.mark.parametrize("fn", [loop, rows, recurrence])
def test_closed_over_tensor_varies(fn: Function, operands: tuple[Tensor, Tensor]) -> None:
    # `w` differs between ranks, the other operand does not.
    body = fs.shard_map(fn, mesh=MESH, in_specs=(REPLICATED, P("dp")), out_specs=REPLICATED)
    with pytest.raises(fs.ShardingError, match=r"varying: dp} with the out spec P\(\)"):
        body(operands[0], torch.cat(2 * [operands[1]]))


def test_branch_on_an_argument_is_refused(operands: tuple[Tensor, Tensor]) -> None:
    part = fs.partition(
        lambda x, w: torch.cond(w.sum() > 0, torch.sin, torch.cos, (x,)),
        mesh=MESH, in_specs=(ROWS, REPLICATED),
    )  # fmt: skip
    with pytest.raises(
        fs.ShardingError, match=r"reads a tensor's values, which.*\n.*\n  fix:   torch.where"
    ):
        part(*operands)


SIZE = 16


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


MASK = create_block_mask(causal, None, None, SIZE, SIZE, device="cpu")
BIAS = torch.randn(2 * SIZE - 1, generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.arange(4)[:, None] + torch.arange(SIZE) // 5
DOCUMENT_MASK = create_block_mask(
    lambda b, h, i, j: (i >= j) & (DOCUMENTS[b, i] == DOCUMENTS[b, j]), 4, None, SIZE, SIZE,
    device="cpu",
)  # fmt: skip
SCORES: dict[str, tuple[Any, BlockMask | None]] = {
    "scores": (None, None),
    "relative bias": (lambda s, b, h, i, j: s + BIAS[i - j + SIZE - 1], None),
    "alibi": (lambda s, b, h, i, j: s + (h + 1) * (j - i), MASK),
    "soft cap": (lambda s, b, h, i, j: 20 * torch.tanh(s / 20), MASK),
    "documents": (None, DOCUMENT_MASK),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", SCORES)
def test_flex_attention_of_sharded_batch_and_heads_is_local(name: str) -> None:
    score_mod, mask = SCORES[name]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, n, SIZE, 8, generator=generator) for n in (4, 2, 2))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, extra = flex_attention(
            q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return out, extra.lse

    part = fs.partition(attention, mesh=MESH, in_specs=P("dp", "tp"), out_specs=P("dp", "tp"))
    torch.testing.assert_close(part(q, k, v), attention(q, k, v))
    assert all(program.is_local for program in part.trace(q, k, v).programs)
