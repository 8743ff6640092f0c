"""Mapped functions that JAX and this library both run, and JAX's results for them.

A body is written once against a *world*: the operations under `jax.lax`'s and `torch`'s names.
`TorchWorld` is the one of this library; JAX's is in `test_jax_differential.py`, which compares both
and checks that `jax_expected.json` has the installed JAX's results. With that file, results are
compared where JAX is not installed. The cases are those of JAX's own tests of `shard_map`.

The loss of a case weights the squares of its results by 1, 2, 3, ...; the file has the results,
the loss' gradient for every argument, and the gradient of the sum of its squares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh

__all__ = ["Case", "TorchWorld", "assert_same", "expected", "numbers", "ramp"]

F64 = torch.float64
EXPECTED = Path(__file__).with_name("jax_expected.json")


def expected() -> dict[str, Any]:
    """Return JAX's results by case."""
    results: dict[str, Any] = json.loads(EXPECTED.read_text())
    return results


def ramp(*shape: int, start: int = 0) -> torch.Tensor:
    """Return start, start + 1, ... in a shape, all elements different."""
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=F64).reshape(shape)


class TorchWorld:
    """Operations of a body in this library, for maps over `mesh` with `check`."""

    def __init__(self, mesh: Mesh, check: Any) -> None:
        self.mesh, self.check = mesh, check

    def nest(self, fn: Callable[..., Any], ins: Any, outs: Any, axes: Set[str]) -> Any:
        """Return a map for the body of another."""
        return fs.shard_map(fn, in_specs=ins, out_specs=outs, axis_names=axes, check=self.check)

    def smap(self, fn: Callable[..., Any], in_axes: Any, out_axes: Any, axis: str) -> Any:
        return fs.smap(
            fn, in_axes=in_axes, out_axes=out_axes, axis_name=axis, mesh=self.mesh,
            check=self.check,
        )  # fmt: skip

    sin, tanh, where, concat = map(staticmethod, (torch.sin, torch.tanh, torch.where, torch.cat))
    psum, pmean, pmax, pmin, axis_index, axis_size = map(
        staticmethod, (fs.psum, fs.pmean, fs.pmax, fs.pmin, fs.axis_index, fs.axis_size)
    )
    psum_scatter, all_gather, all_to_all = map(
        staticmethod, (fs.psum_scatter, fs.all_gather, fs.all_to_all)
    )
    ppermute, pshuffle, pswapaxes, pcast = map(
        staticmethod, (fs.ppermute, fs.pshuffle, fs.pswapaxes, fs.pcast)
    )

    @staticmethod
    def grad(fn: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return the gradients of `fn` for its arguments, differentiable where these are."""

        def gradients(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            higher = any(x.requires_grad for x in xs)
            with torch.enable_grad():
                local = [
                    x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in xs
                ]
                loss = fn(*local)
                if not loss.requires_grad:
                    return tuple(torch.zeros_like(x) for x in xs)
                results = torch.autograd.grad(loss, local, create_graph=higher, allow_unused=True)
            return tuple(
                torch.zeros_like(x) if g is None else g for x, g in zip(xs, results, strict=True)
            )

        return gradients

    @staticmethod
    def states(x: torch.Tensor) -> tuple[set[str], ...]:
        """Return the axes along which a value is varying, reduced and unreduced."""
        kind = fs.typeof(x)
        return set(kind.varying), set(kind.reduced), set(kind.unreduced)

    @staticmethod
    def stop(x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *xs: checkpoint(fn, *xs, use_reentrant=False)

    @staticmethod
    def vmap(fn: Callable[..., Any], in_dims: Any = 0) -> Callable[..., Any]:
        return torch.vmap(fn, in_dims)

    @staticmethod
    def custom(
        forward: Callable[..., Any], backward: Callable[..., Any]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function of one tensor with a custom gradient."""

        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return forward(x)  # type: ignore[no-any-return]

            @staticmethod
            def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
                return backward(*ctx.saved_tensors, g)  # type: ignore[no-any-return]

        return Own.apply  # type: ignore[no-any-return]


Body = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One mapped function of float64 tensors, mapped over `axes` (all if empty).

    With `axes=None` the body maps itself. The last `closed` arguments are closed over. With
    `casts` the body casts by hand, and so gives the same with and without types tracked.
    `grad=False`: JAX has no gradient for it. `vma=False`: JAX runs it only unchecked.
    `explicit=False`: JAX's mesh may not have types of its own.
    """

    name: str
    mesh: Mesh
    in_specs: Any
    out_specs: Any
    args: tuple[torch.Tensor, ...]
    body: Body
    casts: bool = True
    grad: bool = True
    second: bool = True
    vma: bool = True
    explicit: bool = True
    axes: Set[str] | None = frozenset()
    closed: int = 0


def world_loss(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the squares of all results, weighted by 1, 2, 3, ... in order."""
    return torch.stack([(leaf**2 * ramp(*leaf.shape, start=1)).sum() for leaf in leaves]).sum()


def mapped(case: Case, check: Any) -> Callable[..., Any]:
    """Return the mapped function of a case, of global values."""
    world = TorchWorld(case.mesh, check)
    if case.axes is None:
        return lambda *xs: case.body(world, *xs)

    def run(*xs: torch.Tensor) -> Any:
        sharded = len(xs) - case.closed
        value, closed = xs[:sharded], xs[sharded:]

        def body(*own: torch.Tensor) -> Any:
            return case.body(world, *own, *closed)

        names = {"axis_names": case.axes} if case.axes else {}
        return fs.shard_map(
            body, mesh=case.mesh, in_specs=case.in_specs, out_specs=case.out_specs, check=check,
            **names,
        )(*value)  # fmt: skip

    return run


def numbers(case: Case, check: Any) -> dict[str, Any]:
    """Return this library's results and gradients of a case."""
    args = tuple(x.clone().requires_grad_(case.grad) for x in case.args)
    leaves = torch.utils._pytree.tree_leaves(mapped(case, check)(*args))
    results: dict[str, Any] = {"out": [leaf.tolist() for leaf in leaves]}
    if case.grad:
        grads = gradients_of(world_loss(leaves), args, again=case.second)
        results["grads"] = [g.tolist() for g in grads]
    if case.grad and case.second:
        second = gradients_of(sum((g**2).sum() for g in grads), args, again=False)
        results["second"] = [g.tolist() for g in second]
    return results


def gradients_of(loss: Any, args: Sequence[torch.Tensor], again: bool) -> list[torch.Tensor]:
    """Return the gradients of a scalar for `args`, zeros where it does not depend on one."""
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in args]
    results = torch.autograd.grad(loss, args, create_graph=again, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(args, results, strict=True)]


def assert_same(results: dict[str, Any], want: dict[str, Any], name: str) -> None:
    """Assert that results, gradients and second derivatives are the expected ones."""
    assert results.keys() == want.keys()
    for key, leaves in want.items():
        for actual, item in zip(results[key], leaves, strict=True):
            torch.testing.assert_close(
                torch.tensor(actual, dtype=torch.float64),
                torch.tensor(item, dtype=torch.float64),
                msg=lambda text, key=key: f"{key} of {name}: {text}",
            )
