"""Checks and checkpoints of mapped functions in mapped functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.spec_grid import message, random_global

MESH = Mesh(x=2, y=3)
F64 = torch.float64


def ints(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_global(shape, F64, seed)


def weights(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [(ints(*shape, seed=index) / 4).requires_grad_() for index, shape in enumerate(shapes)]


CHECKS: list[Any] = [True, False, "strict", "values", "collectives"]


def both_checked(outer: Any, inner: Any) -> Callable[..., torch.Tensor]:
    """Map, in a body, an argument and a closure that vary along the outer axis."""

    def body(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = fs.pcast(w, "x", to="varying")

        def part(u: torch.Tensor) -> torch.Tensor:
            stored = fs.pcast(w, "y", to="varying", src="invariant")
            return fs.psum(u * u * fs.axis_index("x") * stored, "y")

        inside = fs.shard_map(part, axis_names={"y"}, in_specs=P("y"), out_specs=P(), check=inner)
        return inside(a)

    return fs.shard_map(  # type: ignore[no-any-return]
        body, mesh=MESH, axis_names={"x"}, in_specs=(P("x"), P()), out_specs=P("x"), check=outer
    )


@pytest.mark.parametrize("outer", CHECKS, ids=str)
@pytest.mark.parametrize("inner", CHECKS, ids=str)
def test_check_of_the_outermost_map_holds_in_inner_ones(outer: Any, inner: Any) -> None:
    """Gradients are those of one device for every combination of checks."""
    a, w = weights((6,), ())
    mapped = both_checked(outer, inner)
    if inner in ("strict", "values") and inner != outer:
        with pytest.raises(ShardingError) as caught:
            mapped(a, w)
        assert str(caught.value) == message(
            "shard_map(part)",
            f"check={inner!r} in the body of a call without it",
            "the check of the outermost shard_map must include it",
            f"check={inner!r} there, or omit it here",
        )
        return
    out = mapped(a, w)
    expected = torch.stack([0 * a[:3].sum(), (a[3:] ** 2).sum() * w])
    torch.testing.assert_close(out, expected)
    outputs, wanted = (torch.autograd.grad(y.sum(), (a, w)) for y in (out, expected))
    torch.testing.assert_close(outputs, wanted)


@pytest.mark.parametrize("check", [True, "strict", "values"])
def test_checkpoint_of_a_checked_inner_map(check: Any) -> None:
    """The backward pass recomputes the inner map without tracking types."""

    def body(v: torch.Tensor) -> torch.Tensor:
        inside = fs.shard_map(
            lambda u: fs.psum(torch.sin(u), "y"),
            axis_names={"y"}, in_specs=P("y"), out_specs=P(), check=check,
        )  # fmt: skip
        block = lambda v: torch.sin(inside(v))  # noqa: E731
        return checkpoint(block, v, use_reentrant=False)  # type: ignore[no-any-return]

    (a,) = weights((6,))
    mapped = fs.shard_map(
        body, mesh=MESH, axis_names={"x"}, in_specs=P("x"), out_specs=P("x"), check=check
    )
    (grad,) = torch.autograd.grad(mapped(a).sum(), a)
    sums = torch.sin(a.detach()).view(2, 3).sum(1)
    expected = torch.cos(a.detach()) * torch.cos(sums).repeat_interleave(3)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("check", [False, True, "strict"])
def test_checkpoint_around_an_inner_map(check: Any) -> None:
    """The backward pass recomputes the inner call with the outer axes bound."""

    def outer(v: torch.Tensor) -> torch.Tensor:
        inner = fs.shard_map(lambda u: fs.psum(u.sin(), "y"), in_specs=P("y"), out_specs=P())
        out = checkpoint(inner, v, use_reentrant=False)
        return out * fs.pcast(fs.psum(out, "x"), "x", to="varying")

    mapped = fs.shard_map(
        outer, mesh=MESH, axis_names={"x"}, in_specs=P("x"), out_specs=P("x"), check=check
    )
    x = ints(12).requires_grad_()
    rows = x.sin().reshape(2, 3, 2).sum(1)
    want = (rows * rows.sum(0)).sum()
    actual = mapped(x).sum()
    torch.testing.assert_close(actual, want)
    first = [torch.autograd.grad(item, x, create_graph=True)[0] for item in (actual, want)]
    torch.testing.assert_close(*first)
