"""Reads of varying values by the host: they change no gradient, and evade no promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.spmd.host_read_bodies import BODIES, Body, gradients

MESH = Mesh(x=3)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_read_whose_value_is_not_used_changes_no_gradient(body: Body) -> None:
    expected = gradients(MESH, body, lambda x: None)
    actual = gradients(MESH, body, lambda x: float(x.detach().sum()))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def read_loss(w: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.autograd.grad((w * float(x.sum())).sum(), w)


def test_ends_of_a_gradient_that_differ_after_a_read_are_refused() -> None:
    w, x = torch.ones(2, requires_grad=True), torch.arange(3.0)
    options: dict[str, Any] = {"mesh": MESH, "in_specs": (P(), P("x")), "out_specs": P()}
    with pytest.raises(ShardingError) as error:
        fs.shard_map(read_loss, **options)(w, x)
    line = (
        "the ranks may have diverged where the host read varying values: "
        f"float() at {__file__}:{read_loss.__code__.co_firstlineno + 1}"
    )
    assert str(error.value).splitlines() == [
        "shard_map(read_loss)",
        "  given: an output of a gradient: element () is 0.0 on rank 0 and 2.0 on rank 1",
        "  rule:  along x, where all operands are invariant, values must be equal",
        f"  fix:   fs.pcast(x, 'x', to='varying') of a value that differs; {line}",
    ]

    def fixed(w: torch.Tensor, x: torch.Tensor) -> Any:
        loss = fs.pcast((w * float(x.sum())).sum(), "x", to="varying")
        return torch.autograd.grad(loss, w)

    (g,) = fs.shard_map(fixed, **options)(w, x)
    assert g.tolist() == [3.0, 3.0]


def test_results_that_may_vary_are_not_compared_after_a_read() -> None:
    def doubled_first(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if fs.axis_index("x") == 0 else x

    mapped = fs.shard_map(doubled_first, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    x = fs.shard(torch.arange(3.0) + 1, fs.Spec(MESH, P("x"), shape=(3,)))
    with fs.comm_log() as log:
        y = mapped(x)
    assert log.total_bytes == 0
    assert not log.counts
    assert fs.unshard(y).tolist() == [2.0, 2.0, 3.0]
