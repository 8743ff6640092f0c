"""Random operations of `fs.apply` in a block of `fs.random.keyed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard import P, ShardingError
from tests.helpers.spec_grid import message

KEY, MESH = fs.random.key(7), fs.Mesh(dp=2, tp=2)
X = torch.arange(1.0, 25.0).reshape(4, 6) / 25
LAYOUTS = P(), P("dp", "tp"), P(("tp", "dp")), P(None, "tp")
aten = torch.ops.aten
DRAWING: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a function": (F.dropout, (0.3,)),
    "a module": (nn.Dropout(0.3), ()),
    "an operation": (torch.bernoulli, ()),
    "an operation that is like its operand": (torch.rand_like, ()),
    "an overload": (aten.native_dropout.default, (0.3, True)),
    "several results": (aten.native_dropout, (0.3, True)),
    "rows": (torch.multinomial, (2,)),
    "two draws": (lambda x: F.dropout(F.dropout(x) + torch.rand(6)), ()),
    "a shape that depends on draws": (lambda x: x[torch.rand_like(x) > 0.5], ()),
    "no draw": (torch.dropout, (0.3, False)),
}


@pytest.mark.parametrize("name", DRAWING)
def test_draws_equal_those_of_one_device(name: str) -> None:
    """Operations, and the draws after them, are bit for bit those on the global tensor."""
    op, args = DRAWING[name]
    with fs.random.keyed(KEY):
        before, expected, after = torch.rand(2), op(X.clone(), *args), torch.rand(2)
    for p in LAYOUTS:
        pair = fs.shard(X, fs.Spec(MESH, p, shape=X.shape, uneven="chunk"))
        with fs.random.keyed(KEY):
            torch.testing.assert_close(torch.rand(2), before, rtol=0, atol=0)
            out = fs.on_pairs(op, mode="auto")(pair, *args)
            torch.testing.assert_close(torch.rand(2), after, rtol=0, atol=0)
        pairs = out if type(out) is tuple else (out,)
        results = [fs.unshard(y) for y in pairs]
        wanted = expected if isinstance(expected, tuple) else (expected,)
        assert all(map(torch.equal, results, wanted))


def test_gradients_are_those_of_the_draws() -> None:
    x = X.clone().requires_grad_()
    with fs.random.keyed(KEY):
        fs.unshard(fs.apply(F.dropout, fs.shard(x, MESH, P("dp")))).sum().backward()
    mask = fs.random.dropout_mask(fs.random.fold_in(KEY, 0), X, 0.5)
    assert torch.equal(x.grad, mask)


def test_a_second_call_draws_other_values_of_one_plan() -> None:
    pair = fs.shard(X, MESH, P("dp"))
    traces = []

    def drop(x: torch.Tensor) -> torch.Tensor:
        traces.append(x.shape)
        return F.dropout(x)

    with fs.random.keyed(KEY):
        first, second = fs.apply(drop, pair), fs.apply(drop, pair)
    assert not torch.equal(fs.unshard(first), fs.unshard(second))
    assert len(traces) == 1


def test_draws_without_a_key_of_a_shape_that_depends_on_them_are_refused() -> None:
    with pytest.raises(ShardingError) as error:
        fs.apply(lambda x: x[torch.rand_like(x) > 0.5], fs.shard(X, MESH, P()))
    assert str(error.value) == message(
        "fs.apply(<lambda>)",
        "aten.rand_like.default, which draws random values",
        "draws must be keyed: every rank's generator draws other values",
        "with fs.random.keyed(key): around the call",
    )


def test_block_around_a_mapped_function_is_refused() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        local: torch.Tensor = fs.apply(F.dropout, (x, fs.Spec(MESH, P("dp"), shape=(4, 6)))).local
        return local

    mapped = fs.shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"), check=False)
    with (
        pytest.raises(ShardingError, match="a block around a traced function"),
        fs.random.keyed(KEY),
    ):
        mapped(X)
