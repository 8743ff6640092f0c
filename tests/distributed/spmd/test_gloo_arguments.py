"""Arguments of bodies are the same tensors for autograd on simulated ranks and on processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import Mesh, P, Sharded
from tests.helpers.gloo.harness import run_ranks

MESH = Mesh(x=2)


def branches_on_leaf(x: Tensor) -> Tensor:
    return 2 * x if x.is_leaf else 3 * x


def writes(x: Tensor) -> Tensor:
    x.add_(1)
    return x * x


def writes_row(x: Tensor) -> Tensor:
    x[0].mul_(2)
    x[1] = 0
    return x * x


def transposes(x: Tensor) -> Tensor:
    return x.t_() * x


def freezes(x: Tensor) -> Tensor:
    return x.requires_grad_(False) * x


def optimizes(x: Tensor) -> Tensor:
    torch.optim.SGD([x], lr=0.1)
    return x * x


def hooks(x: Tensor) -> Tensor:
    x.register_hook(lambda g: 3 * g)
    return x * x


def hooks_accumulation(x: Tensor) -> Tensor:
    x.register_post_accumulate_grad_hook(lambda x: None)
    return x * x


def accumulates(x: Tensor) -> Tensor:
    (x * x).sum().backward(retain_graph=True)
    return 3 * x


def accumulates_retained(x: Tensor) -> Tensor:
    x.retain_grad()
    (x * x).sum().backward(retain_graph=True)
    assert x.grad is not None
    return x * x.grad


def creates_parameter(x: Tensor) -> Tensor:
    return torch.nn.Parameter(x.detach()) * x


BODIES = (branches_on_leaf, writes, writes_row, transposes, freezes, optimizes, hooks,
          hooks_accumulation, accumulates, accumulates_retained, creates_parameter)  # fmt: skip


def tensors_of(arg: Any) -> tuple[Tensor, ...]:
    """Return the tensors of an argument that are here: of a pair its local, or all shards."""
    local = arg.local if isinstance(arg, Sharded) else arg
    return local if isinstance(local, tuple) else (local,)


def gradient(x: Tensor, arg: Any) -> Any:
    """Return the gradient of an argument, or of the global tensor that it was made of."""
    grads: Any = tuple(local.grad if local.is_leaf else None for local in tensors_of(arg))
    if not isinstance(arg, Sharded) or grads[0] is None:
        return None if x.grad is None else x.grad.tolist()
    return fs.unshard((grads if len(grads) > 1 else grads[0], arg.spec)).tolist()


def outcome(body: Callable[[Tensor], Tensor], kind: str, p: P) -> Any:
    """Return the result, the argument and its gradient as lists, or the text of the error."""
    x: Tensor = torch.arange(1.0, 17).view(4, 4).requires_grad_()
    arg: Any = x if kind == "leaf" else 1 * x
    if kind == "pair":
        arg = fs.shard(arg, MESH, p)
    elif kind == "pair of leaves":
        arg = fs.shard(x.detach(), MESH, p)
        for local in tensors_of(arg):
            local.requires_grad_()
    f = fs.shard_map(body, mesh=MESH, in_specs=p, out_specs=p, check=False)
    try:
        result = f(arg)
        y = fs.unshard(result) if isinstance(result, Sharded) else result
        if y.requires_grad:
            y.sum().backward()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return y.tolist(), x.tolist(), gradient(x, arg)


KINDS = "leaf", "result", "pair", "pair of leaves"
CASES = [(body, kind, p) for body in BODIES for kind in KINDS for p in (P("x"), P())]


def outcomes() -> list[Any]:
    return [outcome(*case) for case in CASES]


def outcomes_of_rank() -> list[Any]:
    fs.init(MESH)
    return outcomes()


def test_arguments_on_both_transports() -> None:
    """A global tensor, or a computed local, is a result; a pair's leaf is the caller's leaf."""
    simulated = outcomes()
    for rank in run_ranks(2, outcomes_of_rank):
        for case, first, second in zip(CASES, simulated, rank, strict=True):
            assert first == second, case
    by_case = dict(zip(CASES, simulated, strict=True))
    x, p = torch.arange(1.0, 17).view(4, 4), P("x")
    assert by_case[branches_on_leaf, "result", p][0] == (3 * x).tolist()
    assert by_case[branches_on_leaf, "pair of leaves", p][0] == (2 * x).tolist()
    assert by_case[writes, "leaf", p] == (
        ((x + 1) ** 2).tolist(), x.tolist(), (2 * (x + 1)).tolist())  # fmt: skip
    assert by_case[writes, "pair of leaves", p].startswith("a leaf Variable that requires grad")
    assert by_case[accumulates, "pair of leaves", p][2] == (2 * x + 3).tolist()


def cube(x: Tensor) -> Tensor:
    return x**3


def second_derivative(as_pair: bool) -> Any:
    """Write the caller's tensor between two derivatives; return the second, or an error's text."""
    leaf = torch.arange(1.0, 5).requires_grad_()
    x = 1 * leaf
    arg: Any = fs.shard(x, MESH, P("x")) if as_pair else x
    y: Any = fs.shard_map(cube, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(arg)
    y = fs.unshard(y) if as_pair else y
    (grad,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    with torch.no_grad():
        for tensor in tensors_of(arg):
            tensor.mul_(2)
    try:
        return torch.autograd.grad(grad.sum(), leaf)[0].tolist()
    except RuntimeError as error:
        return str(error).partition(":")[0]


class SummedGradient(torch.autograd.Function):
    """The identity, with the gradient of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return fs.psum(grad, "x")


def second_derivative_of_sums() -> Any:
    x, w = torch.arange(1.0, 5), torch.arange(1.0, 3).requires_grad_()
    body = lambda x, w: SummedGradient.apply(w) ** 3 * x  # type: ignore[no-untyped-call]  # noqa: E731
    f = fs.shard_map(body, mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x"), check=False)
    (grad,) = torch.autograd.grad(f(x, w).sum(), w, create_graph=True)
    return torch.autograd.grad(grad.sum(), w)[0].tolist()


def gradients_that_require_grad() -> list[bool]:
    """Return whether they do for a linear and a square result, and for a cotangent that does."""
    x, ct = torch.arange(1.0, 5).requires_grad_(), torch.ones(4).requires_grad_()
    linear, square = (
        fs.shard_map(fn, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(x)
        for fn in (lambda x: fs.psum(x, "x") - x, torch.square)
    )
    grads = [torch.autograd.grad(y, x, c, create_graph=True, retain_graph=True)
             for y, c in ((linear, ct.detach()), (square, ct.detach()), (linear, ct))]  # fmt: skip
    return [grad.requires_grad for (grad,) in grads]


def second_derivatives() -> list[Any]:
    results = [second_derivative(as_pair) for as_pair in (False, True)]
    return [*results, second_derivative_of_sums(), gradients_that_require_grad()]


def second_derivatives_of_rank() -> list[Any]:
    fs.init(MESH)
    return second_derivatives()


def test_second_derivatives_on_both_transports() -> None:
    """Ranks have copies of a global tensor; a pair's local is the caller's."""
    refused = ("one of the variables needed for gradient computation has been modified by an "
               "inplace operation")  # fmt: skip
    expected = [[6.0, 12.0, 18.0, 24.0], refused, [24.0, 72.0], [False, True, True]]
    assert second_derivatives() == expected
    assert run_ranks(2, second_derivatives_of_rank) == [expected] * 2
