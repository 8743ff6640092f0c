"""Functions of x and w, and the graphs that `make_fx` records of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import fshard as fs
from fshard import Mesh, P, Spec
from tests.helpers.spec_grid import random_global

MESH = Mesh(i=2)
F64 = torch.float64
X, W, OTHER = (random_global((4, 4), F64, seed) / 4 for seed in range(3))
LONG = random_global((8, 4), F64, 3) / 4
SRC = Spec(MESH, P("i"), shape=(4, 4), dtype=F64)
PROGRAM = fs.redistribute(SRC, SRC.replace(partition=P(None, "i")))
MODES = "real", "fake", "symbolic"
Fn = Callable[[Tensor, Tensor], Any]


class Recorded(NamedTuple):
    """A function; whether its graph holds for other sizes; its collectives."""

    fn: Fn
    any_size: bool
    collectives: tuple[str, ...]


def body(x: Tensor, w: Tensor) -> Tensor:
    return fs.psum(torch.tanh(x @ fs.pcast(w, "i", to="varying")), "i")


def mapped(check: bool) -> Fn:
    f: Fn = fs.shard_map(body, mesh=MESH, in_specs=(P("i"), P()), out_specs=P(), check=check)
    return f


def loss(f: Fn, x: Tensor, w: Tensor) -> Tensor:
    total: Tensor = f(x, w).square().sum()
    return total


def by_autograd(x: Tensor, w: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss(mapped(True), x, w), x)[0]


def ragged(x: Tensor, w: Tensor) -> Tensor:
    i: Any = fs.axis_index("i", mesh=MESH)
    options: Any = {"axis_name": "i", "mesh": MESH}
    return fs.ragged_all_to_all(x @ w, 2 * x[:2], [0, 1], [1, 1], [i, i], [1, 1], **options)


def on_pairs(x: Tensor, w: Tensor) -> Tensor:
    pair = fs.apply(torch.matmul, fs.shard(x, MESH, P("i")), fs.shard(w, MESH, P()))
    return fs.unshard(fs.reshard(pair, P(None, "i")))


def partitioned(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = fs.partition(lambda x, w: torch.tanh(x @ w), mesh=MESH, in_specs=(P("i"), P()))(
        x, w
    )
    return y


SUM, GATHER, EXCHANGE = "all_reduce", "all_gather_into_tensor", "all_to_all_single"
ON_RANKS = {
    "collectives": Recorded(
        lambda x, w: fs.all_gather(fs.psum(x @ w, "i", mesh=MESH), "i", mesh=MESH),
        True, (SUM, GATHER),
    ),
    "maximum": Recorded(
        lambda x, w: grad(lambda x: loss(lambda x, w: fs.pmax(x @ w, "i", mesh=MESH), x, w))(x),
        True, (SUM, SUM),
    ),
    "ragged": Recorded(ragged, True, (GATHER, EXCHANGE)),
    "program": Recorded(lambda x, w: w @ PROGRAM(x[:2]), True, (EXCHANGE,)),
}  # fmt: skip
CASES = {
    "mapped": Recorded(mapped(True), True, (SUM,)),
    "unchecked": Recorded(mapped(False), True, (SUM,)),
    "grad": Recorded(lambda x, w: grad(lambda x: loss(mapped(True), x, w))(x), True, (SUM, GATHER)),
    "grad of w": Recorded(
        lambda x, w: grad(lambda w: loss(mapped(False), x, w))(w), True, (SUM, SUM)
    ),
    "autograd": Recorded(by_autograd, True, (SUM, GATHER)),
    # PyTorch's tangent of a matrix product makes its sizes integers.
    "jvp": Recorded(
        lambda x, w: jvp(lambda x: mapped(True)(x, w), (x,), (x.sin(),))[1], False, (SUM, SUM)
    ),
    "vmap": Recorded(
        lambda x, w: vmap(mapped(True), (0, None))(torch.stack([x, 2 * x]), w), True, (SUM,)
    ),
    "pairs": Recorded(on_pairs, False, (EXCHANGE, GATHER)),
    "partition": Recorded(partitioned, False, (GATHER,)),
    "grad of partition": Recorded(
        lambda x, w: grad(lambda w: loss(partitioned, x, w))(w), False, (GATHER, SUM)
    ),
}


def collectives_of(graph: Any) -> tuple[str, ...]:
    """Return the names of the functional collectives of a graph, without waits."""
    names = [str(node.target).split(".") for node in graph.graph.nodes]
    found = [name[1] for name in names if name[0] == "_c10d_functional"]
    return tuple(name for name in found if name != "wait_tensor")


def largest_difference(a: Any, b: Any) -> float:
    difference: float = (a - b).abs().max().item()
    return difference


def problems(name: str, case: Recorded, *, on_rank: bool) -> list[str]:
    """Return the modes in which a graph is not the function, or has other collectives."""
    warnings.simplefilter("ignore")
    found = []
    fn = case.fn
    for mode in MODES:
        graph = make_fx(lambda x, w: fn(x, w), tracing_mode=mode)(X, W)  # noqa: PLW0108
        args = [(X, W), (OTHER, W)]
        holds = mode == "symbolic" and on_rank and case.any_size and name != "program"
        args += [(LONG, W)] if holds else []
        differences = [largest_difference(graph(*xs), fn(*xs)) for xs in args]
        if max(differences) > 1e-12:
            found.append(f"{name}, {mode}: differs by {differences}")
        if collectives_of(graph) != (case.collectives if on_rank else ()):
            found.append(f"{name}, {mode}: {collectives_of(graph)}")
        if mode == "symbolic" and not holds and name != "program":
            try:
                graph(LONG, W)
                found.append(f"{name}: a graph of 4 rows takes 8")
            except RuntimeError:
                pass
    return found


def linear_problems(name: str, case: Recorded) -> list[str]:
    """Return a text if `torch.func.linearize` of a function is not its derivative, repeatedly."""
    derivative = linear_part(name, case)
    if derivative is None:
        return []
    differences = [
        largest_difference(derivative(t), jvp(lambda x: case.fn(x, W), (X,), (t,))[1])
        for t in (OTHER, X, OTHER)
    ]
    return [f"{name}: differs by {differences}"] if max(differences) > 1e-12 else []


def linear_part(name: str, case: Recorded) -> Callable[[Tensor], Tensor] | None:
    """Return the result of `torch.func.linearize` of a case, None if PyTorch refuses it."""
    warnings.simplefilter("ignore")
    if name in ("autograd", "jvp"):  # `requires_grad_` and nested forward mode
        return None
    derivative: Callable[[Tensor], Tensor] = linearize(lambda x: case.fn(x, W), X)[1]
    return derivative


def derivative_problems(name: str, case: Recorded) -> list[str]:
    """Return a text if derivatives of a linearized function are not those of a linear function."""
    derivative = linear_part(name, case)
    if derivative is None or name == "vmap":  # its graph has batches of meta tensors, refused
        return []
    y, back = vjp(lambda x: case.fn(x, W), X)
    loss = lambda t: (derivative(t) ** 2).sum()  # noqa: E731
    pairs = [
        (vjp(derivative, OTHER)[1](y.cos())[0], back(y.cos())[0]),
        (jvp(derivative, (X,), (OTHER,))[1], derivative(OTHER)),
        (vmap(derivative)(torch.stack([X, OTHER]))[1], derivative(OTHER)),
        (vmap(grad(loss))(torch.stack([X, OTHER]))[1], 2 * back(derivative(OTHER))[0]),
    ]
    differences = [largest_difference(a, b) for a, b in pairs]
    return [f"{name}: differs by {differences}"] if max(differences) > 1e-12 else []
