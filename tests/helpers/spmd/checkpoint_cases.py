"""Checkpoints in and around mapped functions, partitioned functions and programs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import fshard as fs
from fshard import Mesh, P
from tests.helpers.spec_grid import random_global

Function = Callable[..., torch.Tensor]
F64 = torch.float64
SHAPES = (4, 6), (6, 8), (8, 6)


def keep_products(_: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Keep the results of matrix products, as `jax.checkpoint_policies.dots_saveable` does."""
    is_product = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy: Any) -> dict[str, Any]:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return {"use_reentrant": False, "context_fn": contexts}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "policy": selective(keep_products),
    "kept operations": selective([torch.ops.aten.mm.default, torch.ops.aten.tanh.default]),
    "no generator state": {"use_reentrant": False, "preserve_rng_state": False},
    "no early stop": {"use_reentrant": False, "early_stop": False},
    "reentrant, no generator state": {"use_reentrant": True, "preserve_rng_state": False},
}


def layer(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w) @ v


def varying(x: torch.Tensor, *ws: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return rows and weights, cast as strict checks require."""
    return fs.pcast(x, "y", to="varying"), *(fs.pcast(w, "x", to="varying") for w in ws)


def mapped_layer(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Multiply by columns of w and rows of v."""
    return fs.psum(layer(*varying(x, w, v)), "y")


def twice(fn: Function, options: dict[str, Any], form: str) -> Function:
    """Return two calls of `fn`, checkpointed one by one, as a sequence, or one in another."""
    run = partial(checkpoint, fn, **options)

    def call(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if form == "sequence":
            parts = [lambda x: fn(x, w, v)] * 2
            out: torch.Tensor = checkpoint_sequential(parts, 2, x, **options)
        elif form == "nested":
            out = checkpoint(lambda x, w, v: fn(run(x, w, v), w, v), x, w, v, **options)
        else:
            out = run(run(x, w, v), w, v)
        return out

    return call


def functions(mesh: Mesh, options: dict[str, Any], form: str) -> dict[str, Function]:
    """Return the function `layer`, twice, on a mesh; checkpoints are in a function or around it."""
    specs: dict[str, Any] = {"mesh": mesh, "in_specs": (P("x"), P(None, "y"), P("y"))}
    rows = fs.Spec(mesh, P("x"), shape=(4, 6), dtype=F64)
    gather = fs.redistribute(rows, rows.replace(partition=P()))

    def gathered(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return layer(fs.unshard((gather(fs.shard(x, rows).local), gather.dst)), w, v)

    mapped = {
        check: fs.shard_map(mapped_layer, out_specs=P("x"), check=check, **specs)
        for check in (True, False)
    }
    return {
        **{
            f"in a body, check={check}": fs.shard_map(
                twice(mapped_layer, options, form), out_specs=P("x"), check=check, **specs
            )
            for check in (True, "strict", "values", False)
        },
        **{f"around a body, check={check}": twice(f, options, form) for check, f in mapped.items()},
        "in a partition": fs.partition(twice(layer, options, form), **specs),
        "around a partition": twice(fs.partition(layer, **specs), options, form),
        "around a program": twice(gathered, options, form),
    }


def differentiated(fn: Function) -> list[torch.Tensor]:
    """Return the result of a function, and its gradients by `backward()`."""
    args = [(random_global(s, F64, i) / 8).requires_grad_() for i, s in enumerate(SHAPES)]
    out = fn(*args)
    (out**2).sum().backward()
    return [out.detach(), *(x.grad for x in args if x.grad is not None)]


def results(mesh: Mesh, name: str, form: str) -> dict[str, list[torch.Tensor]]:
    """Return the results of all functions with the options of a name."""
    options = {
        key: value
        for key, value in OPTIONS[name].items()
        if form != "sequence" or key in ("use_reentrant", "preserve_rng_state")
    }
    return {key: differentiated(fn) for key, fn in functions(mesh, options, form).items()}


def without_early_stop(fn: Function) -> Function:
    """Return a checkpointed function whose second run comes to its end."""

    def call(*args: torch.Tensor) -> torch.Tensor:
        with set_checkpoint_early_stop(False):
            out: torch.Tensor = checkpoint(fn, *args, use_reentrant=False)
        return out

    return call


def checkpointed(fn: Function, **options: Any) -> Function:
    return partial(checkpoint, fn, **{"use_reentrant": False, **options})


AROUND: dict[str, Callable[[Function], Function]] = {
    "nothing": lambda fn: fn,
    "checkpoint": checkpointed,
    "nested": lambda fn: checkpointed(checkpointed(fn)),
    "no early stop": without_early_stop,
    "policy": lambda fn: checkpointed(fn, **selective([torch.ops.aten.sin.default])),
}
"""Functions around a checkpointed one."""


def kept_gradients() -> list[torch.Tensor]:
    """Return the gradients of the function of `kept_by_call` on one device."""
    args = [(random_global(s, F64, i) / 8).requires_grad_() for i, s in enumerate(SHAPES)]
    out = layer(*(x.sin() for x in args)).sin()
    return list(torch.autograd.grad(out.sum(), args))


class KeptByCall(NamedTuple):
    """Tensors that live after a call of a mapped function, and runs of its body.

    Attributes:
        kept: arguments, intermediate values and results of bodies that live after the forward pass.
        runs: bodies that have run on the ranks of this process, after each of the two passes.
        gradients: of the arguments.
    """

    kept: int
    runs: tuple[int, int]
    gradients: list[torch.Tensor]


def kept_by_call(mesh: Mesh, around: Callable[[Function], Function], check: bool) -> KeptByCall:
    """Return what `around(f)` keeps of a mapped layer `f` between two other functions."""
    references: list[weakref.ref[torch.Tensor]] = []

    def body(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x, w, v = varying(x, w, v)
        y = x @ w
        h = torch.tanh(y)
        z = h @ v
        references.extend(map(weakref.ref, (x, w, y, h, z)))
        return fs.psum(z, "y")

    mapped = fs.shard_map(
        body, mesh=mesh, in_specs=(P("x"), P(None, "y"), P("y")), out_specs=P("x"), check=check
    )
    args = [(random_global(s, F64, i) / 8).requires_grad_() for i, s in enumerate(SHAPES)]
    out = around(lambda x, w, v: mapped(x.sin(), w.sin(), v.sin()).sin())(*args)
    end = time.monotonic() + 1  # the thread of a process group drops its references a bit later
    while any(x() is not None for x in references) and time.monotonic() < end:
        time.sleep(0.01)
    kept, runs = sum(x() is not None for x in references), len(references) // 5
    gradients = torch.autograd.grad(out.sum(), args)
    return KeptByCall(kept, (runs, len(references) // 5), list(gradients))
