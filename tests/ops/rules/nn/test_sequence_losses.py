"""`ctc_loss` in one call and in partitioned functions, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fshard as fs
from fshard import P
from tests.helpers.ops.op_checks import check_call
from tests.helpers.ops.samples import Draws

aten = torch.ops.aten
DRAWS = Draws()
real, below = DRAWS.real, DRAWS.below
MESH = fs.Mesh(dp=2)
TIMES, LENGTHS = (6, 6, 5, 2), (2, 2, 1, 3)
"""Lengths of four sequences, of which the last is shorter than its target."""


@pytest.mark.parametrize("reduction", range(3), ids=["none", "mean", "sum"])
def test_connectionist_classification(reduction: int) -> None:
    """Sequences may be sharded, with lengths as numbers or as tensors."""
    x, labels = real(6, 3, 5).log_softmax(-1), below(4, 3, 2) + 1
    listed, stored = ([6, 6, 5], [2, 2, 1]), (torch.tensor([6, 6, 5]), torch.tensor([2, 2, 1]))
    assert check_call(aten.ctc_loss.IntList, x, labels, *listed, 0, reduction) == []
    assert check_call(aten.ctc_loss.Tensor, x, labels, *stored, 0, reduction) == []
    in_a_row = labels.flatten()[:5]
    assert check_call(aten.ctc_loss.IntList, x, in_a_row, *listed, 0, reduction) == []


def tensors(x: Tensor, y: Tensor, times: Tensor, lengths: Tensor, reduction: str) -> Tensor:
    return F.ctc_loss(x, y, times, lengths, zero_infinity=True, reduction=reduction)


def tuples(x: Tensor, y: Tensor, times: Tensor, lengths: Tensor, reduction: str) -> Tensor:
    listed: Any = F.ctc_loss  # declared for tensors only
    return listed(x, y, TIMES, LENGTHS, zero_infinity=True, reduction=reduction)  # type: ignore[no-any-return]


def module(x: Tensor, y: Tensor, times: Tensor, lengths: Tensor, reduction: str) -> Tensor:
    loss = torch.nn.CTCLoss(0, reduction, zero_infinity=True)
    return loss(x, y, times.int(), lengths.int())  # type: ignore[no-any-return]


def positional(x: Tensor, y: Tensor, times: Tensor, lengths: Tensor, reduction: str) -> Tensor:
    number = ("none", "mean", "sum").index(reduction)
    return torch.ctc_loss(x, y, times, lengths, 0, number, True)


def of_one_sequence(x: Tensor, y: Tensor, times: Tensor, lengths: Tensor, reduction: str) -> Tensor:
    rows = x.sum(1).log_softmax(-1), y[3], times[0], lengths[3]
    return F.ctc_loss(*rows, reduction=reduction)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("fn", [tensors, tuples, module, positional, of_one_sequence])
def test_partitioned_losses(fn: Callable[..., Tensor], reduction: str) -> None:
    x, labels = real(6, 4, 5).log_softmax(-1).requires_grad_(), below(4, 4, 3) + 1
    args: Any = x, labels, torch.tensor(TIMES), torch.tensor(LENGTHS), reduction
    part = fs.partition(fn, mesh=MESH, in_specs=(P(None, "dp"), P("dp"), P("dp"), P("dp"), None))
    results = []
    for f in (part, fn):
        loss = f(*args)
        results.append([loss, *torch.autograd.grad(loss.exp().sum(), x)])
    torch.testing.assert_close(*results)


def test_gradients_within_a_function_need_local_work_only() -> None:
    def fn(x: Tensor, y: Tensor, times: Tensor, lengths: Tensor) -> Tensor:
        frames = x.log_softmax(-1)
        return torch.autograd.grad(tensors(frames, y, times, lengths, "sum"), x)[0]

    x, labels = real(6, 4, 5).requires_grad_(), below(4, 4, 3) + 1
    args = x, labels, torch.tensor(TIMES), torch.tensor(LENGTHS)
    specs = P(None, "dp"), P("dp"), P("dp"), P("dp")
    part = fs.partition(fn, mesh=MESH, in_specs=specs, out_specs=P(None, "dp"))
    with fs.comm_log() as log:
        pair = part(*(fs.shard(arg, MESH, p) for arg, p in zip(args, specs, strict=True)))
    assert not log.counts
    torch.testing.assert_close(fs.unshard(pair), fn(*args))
