"""Random compositions of the transforms of `torch.func` around random mapped bodies.

A function takes one of the body's inputs and returns a tensor of at most `WIDTH` elements. Every
transform makes another such function of it, so that they compose to any depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)

from fshard import Mesh, ShardingError
from tests.fuzz.mapped_bodies import MappedCase

__all__ = ["TRANSFORMS", "TransformedCase"]

Fn = Callable[[Tensor], Tensor]
WIDTH = 4


def narrowed(y: Tensor) -> Tensor:
    """Return at most `WIDTH` elements that depend on all: sums of every `WIDTH`-th one."""
    flat = y.reshape(-1).tanh()
    full = torch.nn.functional.pad(flat, (0, -flat.shape[0] % WIDTH))
    return full.reshape(-1, WIDTH).sum(0) if flat.shape[0] > WIDTH else flat


def number(f: Fn) -> Fn:
    return lambda x: f(x).sin().sum()


class Held(torch.nn.Module):
    """Module that calls a function on its parameter."""

    def __init__(self, f: Fn, w: Tensor) -> None:
        super().__init__()
        self.f, self.w = f, torch.nn.Parameter(torch.zeros_like(w))

    def forward(self, scale: Tensor) -> Tensor:
        return self.f(self.w) * scale


def _value_and_gradient(f: Fn, x: Tensor) -> Tensor:
    gradient, value = grad_and_value(number(f))(x)
    return torch.cat([gradient.reshape(-1), value[None]])


def _vjp(f: Fn, x: Tensor) -> Tensor:
    y, back = vjp(f, x)[:2]
    result: Tensor = back(y.cos())[0]
    return result


def _jvp(f: Fn, x: Tensor) -> Tensor:
    y, tangent = jvp(f, (x,), (x.sin(),))[:2]
    return y * tangent


def _constant_cotangent(f: Fn, x: Tensor) -> Tensor:
    y, back = vjp(f, x)[:2]
    result: Tensor = back(torch.ones(y.shape, dtype=y.dtype))[0]
    return result


def _other_cotangent(f: Fn, x: Tensor) -> Tensor:
    y, back = vjp(f, x.detach())[:2]
    result: Tensor = back(torch.ones(y.shape, dtype=y.dtype) * x.sum())[0]
    return result


TRANSFORMS: dict[str, Callable[[Fn, Tensor], Tensor]] = {
    "grad": lambda f, x: grad(number(f))(x),
    "grad_and_value": _value_and_gradient,
    "vjp": _vjp,
    "jvp": _jvp,
    "vjp of a constant": _constant_cotangent,
    "vjp of a multiple": _other_cotangent,
    "vmap": lambda f, x: vmap(f)(torch.stack([x, x.cos()])),
    "jacrev": lambda f, x: jacrev(f)(x).sum(0),
    "jacfwd": lambda f, x: jacfwd(f)(x).sum(0),
    "hessian": lambda f, x: hessian(number(f))(x).reshape(x.numel(), -1) @ x.reshape(-1),
    "functional_call": lambda f, x: functional_call(Held(f, x.detach()), {"w": x}, (x.sum(),)),
}


BATCHES, MAX_BATCHES = {"hessian": 2, "jacrev": 1, "jacfwd": 1}, 3
"""Batches of all inputs in a transform, and the most of them nested: four take PyTorch hours."""
MAX_COPIES = 2**14
"""Most copies of the input in nested batches: with 200 elements in two they took 20 GB."""


class TransformedCase(MappedCase):
    """Random body under up to three transforms, mapped and on one device."""

    meshes = (Mesh(x=2, y=2), Mesh(x=3))
    max_numel = 24
    # Not differentiable everywhere, or in place, where PyTorch's `vmap` refuses some compositions
    # of forward mode.
    excluded = frozenset({"where", "sort", "amax", "pmax", "pmin", "written"})

    def __init__(self, r: Random) -> None:
        super().__init__(r)
        self.transforms = [r.choice([*TRANSFORMS]) for _ in range(r.randint(1, 3))]
        while sum(BATCHES.get(name, 0) for name in self.transforms) > MAX_BATCHES:
            self.transforms.remove("hessian")
        self.index = r.randrange(self.num_inputs)
        numel = self.inputs()[self.index].numel()
        while numel ** sum(BATCHES.get(name, 0) for name in self.transforms) > MAX_COPIES:
            self.transforms.remove(next(name for name in self.transforms if name in BATCHES))

    def transformed(self, run: Callable[[Sequence[Tensor]], list[Tensor]]) -> Tensor:
        """Return the result of the transforms around a run of the body."""
        xs = [x.detach() for x in self.inputs()]

        def fn(x: Tensor) -> Tensor:
            ys = run([*xs[: self.index], x, *xs[self.index + 1 :]])
            return narrowed(torch.cat([y.reshape(-1) for y in ys]))

        for name in self.transforms:
            fn = self.applied(TRANSFORMS[name], fn)
        return fn(xs[self.index])

    @staticmethod
    def applied(transform: Callable[[Fn, Tensor], Tensor], f: Fn) -> Fn:
        return lambda x: narrowed(transform(f, x))

    def run(self) -> None:
        """Compare with one device."""
        expected = self.transformed(self.dense)
        try:
            actual = self.transformed(self.mapped)
        except ShardingError as error:  # refused by name, for operations like softmax
            if "a gradient of a tangent of a mapped function" not in str(error):
                raise
            return
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)

    def __str__(self) -> str:
        composed = " of ".join(reversed(self.transforms))
        return f"{composed} for v{self.index}; {super().__str__()}"
