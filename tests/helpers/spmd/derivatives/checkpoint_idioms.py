"""Idioms of PyTorch's own tests and pages of `torch.utils.checkpoint`, of one function of x and w.

Each takes the function `f(x, w) = tanh(x @ w)` in one of its forms, and returns what the form must
share with the function on one device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tests.helpers.spmd.transform_cases import W, X

Fn = Callable[[Tensor, Tensor], Tensor]
again: Any = partial(checkpoint, use_reentrant=False)


def inputs() -> tuple[Tensor, Tensor]:
    return X.clone().requires_grad_(), W.clone().requires_grad_()


def gradients(run: Callable[[Tensor, Tensor], Tensor], order: int = 1) -> list[Tensor]:
    """Return a result and its gradients, of the first order and of those above."""
    xs, results = inputs(), list[Tensor]()
    y = run(*xs)
    for _ in range(order):
        results.append(y)
        grads = torch.autograd.grad(y.exp().sum(), xs, create_graph=True)
        results += grads
        y = torch.stack([g.sin().sum() for g in grads])
    return results


class Layer(nn.Module):
    """A layer with a parameter of its own."""

    def __init__(self, f: Fn) -> None:
        super().__init__()
        self.f, self.w = f, nn.Parameter(W.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x, self.w) @ self.w.T


def nested(f: Fn) -> Any:
    inner = lambda x, w: again(f, x.sin(), w)  # noqa: E731
    middle = lambda x, w: again(inner, x, w).cos() + again(f, x, w)  # noqa: E731
    return gradients(lambda x, w: again(middle, x, w), 2)


def keywords_and_other_arguments(f: Fn) -> Any:
    def run(x: Tensor, scale: float, *, ws: dict[str, Any], mode: str) -> tuple[Any, ...]:
        return f(x, ws["w"][0]) * scale, mode, {"none": None, "y": f(x, ws["w"][0]).sin()}

    def call(x: Tensor, w: Tensor) -> Tensor:
        y, _, others = again(run, x, 3.0, ws={"w": [w]}, mode="fast")
        total: Tensor = y * others["y"]
        return total

    return gradients(call, 2)


def modules_in_a_sequence(f: Fn) -> Any:
    layers = nn.Sequential(*[Layer(f) for _ in range(5)])
    x = X.clone().requires_grad_()
    checkpoint_sequential(layers, 2, x, use_reentrant=False).sum().backward()
    return x.grad, [p.grad for p in layers.parameters()]


def reentrant(f: Fn) -> Any:
    x, w = inputs()
    checkpoint(lambda x, w: f(f(x.sin(), w) @ w.T, w), x, w, use_reentrant=True).sum().backward()
    return x.grad, w.grad


def accumulated(f: Fn) -> Any:
    x, w = inputs()
    y = again(f, x, w).exp().sum()
    for _ in range(3):
        y.backward(retain_graph=True)
    return x.grad, w.grad


def parts_of_a_backward(f: Fn) -> Any:
    x, w = inputs()
    y = again(lambda x, w: f(x.sin(), w.cos()), x, w).exp()
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return first, torch.autograd.grad(y[0].sum(), w)


def without_early_stop(f: Fn) -> Any:
    def call(x: Tensor, w: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            out: Tensor = again(lambda x, w: f(x, w).sin() + 1, x, w)
        return out

    return gradients(call, 2)


def backward_within(f: Fn) -> Any:
    def run(x: Tensor, w: Tensor) -> Tensor:
        y = f(x, w)
        (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return y.sum() * gradient.exp()

    return gradients(lambda x, w: again(run, x, w), 2)


def detached_within(f: Fn) -> Any:
    return gradients(lambda x, w: again(lambda x, w: f(x, w).detach() * f(x.sin(), w), x, w))


def some_without_gradients(f: Fn) -> Any:
    x, w = inputs()
    y = again(lambda x, w: f(x, w) * x.sum(), x.detach(), w)
    return torch.autograd.grad(y.sum(), w), again(f, x.detach(), w.detach()).requires_grad


def in_no_grad(f: Fn) -> Any:
    with torch.no_grad():
        return gradients_of_constant(again(f, *inputs()))


def gradients_of_constant(y: Tensor) -> tuple[Tensor, bool]:
    return y, y.requires_grad


def random_draws(f: Fn) -> Any:
    torch.manual_seed(3)
    draw = lambda x, w: f(nn.functional.dropout(x, 0.5), w) * torch.rand_like(x[:, :1])  # noqa: E731
    return gradients(lambda x, w: again(draw, x, w))


def selective(f: Fn) -> Any:
    policy = lambda ctx, op, *_, **__: (  # noqa: E731
        CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.tanh.default
        else CheckpointPolicy.PREFER_RECOMPUTE
    )  # fmt: skip
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return gradients(lambda x, w: again(lambda x, w: f(f(x, w), w).sin(), x @ w, w[:2],
                                        context_fn=contexts))  # fmt: skip


def contexts(f: Fn) -> Any:
    entered: list[str] = []

    @contextmanager
    def context(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    both = lambda: (context("forward"), context("again"))  # noqa: E731
    results = gradients(lambda x, w: again(f, x, w, context_fn=both))
    return results, entered.count("forward"), entered.count("again")


def saved_on_cpu_within(f: Fn) -> Any:
    def run(x: Tensor, w: Tensor) -> Tensor:
        with graph.save_on_cpu():
            return f(x.sin(), w).exp()

    return gradients(lambda x, w: again(run, x, w), 2)


def hooks_of_results(f: Fn) -> Any:
    seen: list[Tensor] = []

    def run(x: Tensor, w: Tensor) -> Tensor:
        y = f(x, w)
        y.register_hook(lambda g: 2 * g)
        return y.sin()

    def call(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = again(run, x, w)
        y.register_hook(seen.append)
        return y

    return gradients(call), seen


def written_after(f: Fn) -> Any:
    def run(x: Tensor, w: Tensor) -> Tensor:
        y = 1 * f(x, w)
        y.mul_(2)
        y[0] = 1
        return y.cos()

    return gradients(lambda x, w: again(run, x, w).mul_(3), 2)


def differing_runs(f: Fn) -> Any:
    """Return whether a function raises that saves other tensors in its second run."""
    runs: list[None] = []

    def run(x: Tensor, w: Tensor) -> Tensor:
        runs.append(None)
        return f(x[: len(x) // len(runs)], w).sin()

    try:
        gradients(lambda x, w: again(run, x, w))
    except CheckpointError:
        return True
    return False


def dropped_results(f: Fn) -> Any:
    """Return whether what is computed within lives after it."""
    kept: list[weakref.ref[Tensor]] = []

    def run(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        z = f(y, w)
        kept.extend(map(weakref.ref, (y, z)))
        return z.sin()

    y = again(run, *inputs())
    after_forward = [ref() is None for ref in kept]
    y.sum().backward()
    return after_forward, [ref() is None for ref in kept]


IDIOMS: dict[str, Callable[[Fn], Any]] = {
    fn.__name__: fn
    for fn in (
        nested, keywords_and_other_arguments, modules_in_a_sequence, reentrant, accumulated,
        parts_of_a_backward, without_early_stop, backward_within, detached_within,
        some_without_gradients, in_no_grad, random_draws, selective, contexts,
        saved_on_cpu_within, hooks_of_results, written_after, differing_runs, dropped_results,
    )
}  # fmt: skip
