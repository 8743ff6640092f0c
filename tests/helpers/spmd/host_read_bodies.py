"""Bodies that take gradients, in which the host may read a varying value, or branch on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fshard as fs
from fshard import Mesh, P

MASK = torch.tensor([1.0, 3.0])

Read = Callable[[torch.Tensor], Any]
Body = Callable[[Read, torch.Tensor, torch.Tensor], Any]


def invariant_loss(read: Read, w: torch.Tensor, x: torch.Tensor) -> Any:
    read(x)
    return torch.autograd.grad((w * w).sum(), w)


def closed_over(read: Read, w: torch.Tensor, x: torch.Tensor) -> Any:
    read(x)
    return torch.autograd.grad((w * w * MASK).sum(), w)


def reduced_loss(read: Read, w: torch.Tensor, x: torch.Tensor) -> Any:
    read(x)
    return torch.autograd.grad(fs.psum((w * x).square().sum(), "x") + (w * w).sum(), w)


def varying_loss(read: Read, w: torch.Tensor, x: torch.Tensor) -> Any:
    read(x)
    return torch.autograd.grad((w * w * x).sum(), w)


def explicit_cast(read: Read, w: torch.Tensor, x: torch.Tensor) -> Any:
    read(x)
    v = w * 2
    return torch.autograd.grad((fs.pcast(v, "x", to="varying") * x).sum(), w)


def training_loop(read: Read, w: torch.Tensor, x: torch.Tensor) -> Any:
    for _ in range(3):
        local = (w * x).square().mean()
        read(local)
        (g,) = torch.autograd.grad(fs.pmean(local, "x") + w.square().sum(), w)
        w = w - 0.1 * g
    return (w,)


def leaf_of_body(read: Read, w: torch.Tensor, x: torch.Tensor) -> Any:
    read(x)
    leaf = w.detach().clone().requires_grad_()
    (fs.psum((leaf * x).sum(), "x") * leaf.sum()).backward()
    return (leaf.grad,)


def cotangent(read: Read, w: torch.Tensor, x: torch.Tensor) -> Any:
    read(x)
    y = fs.psum(w * x, "x")
    return torch.autograd.grad(y, w, torch.ones_like(y))


def func_grad(read: Read, w: torch.Tensor, x: torch.Tensor) -> Any:
    read(x)
    grad = torch.func.grad(lambda v: fs.psum((v * x).square().sum(), "x") + v.square().sum())
    return (grad(w),)


def func_vjp(read: Read, w: torch.Tensor, x: torch.Tensor) -> Any:
    """Take the gradient of a `vjp`, whose level has ended, and of a `hessian`."""
    read(x)
    loss = lambda v: fs.psum((v * x).square().sum(), "x") + (v**3).sum()  # noqa: E731
    y, vjp = torch.func.vjp(loss, w)
    return (vjp(torch.ones_like(y))[0] + torch.func.hessian(loss)(w).sum(0),)


def second(read: Read, w: torch.Tensor, x: torch.Tensor) -> Any:
    read(x)
    loss = fs.psum((w**3 * x).sum(), "x") + (w**3).sum()
    (g,) = torch.autograd.grad(loss, w, create_graph=True)
    return torch.autograd.grad((g * g).sum(), w, create_graph=True)


def before_and_after(read: Read, w: torch.Tensor, x: torch.Tensor) -> Any:
    """Cast `w` before the read, and use it again after it."""
    before = fs.psum((w**3 * x).sum(), "x")
    read(x)
    return torch.autograd.grad(before + (w**3).sum(), w, create_graph=True)


BODIES: list[Body] = [
    invariant_loss, closed_over, reduced_loss, varying_loss, explicit_cast, training_loop,
    leaf_of_body, cotangent, func_grad, func_vjp, second, before_and_after,
]  # fmt: skip


def sharded_results(read: Read, mesh: Mesh, w: torch.Tensor) -> torch.Tensor:
    """Return a function of `w` that sums over both axes at once what it computes after a read."""
    x = torch.arange(1.0, 2 * mesh.size + 1, dtype=torch.float64)

    def body(w: torch.Tensor, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        read(part)
        return (w * MASK + 1) * x * part.sum()

    specs = P(), P(mesh.axes), P(mesh.axes[0])
    mapped = fs.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(mesh.axes))
    return mapped(w, x, torch.arange(4.0, dtype=torch.float64)).sin().sum()


def sharded_gradients(mesh: Mesh, read: Read) -> list[torch.Tensor]:
    """Return gradients through and around a body with sharded results, three times."""
    grads = []
    for _ in range(3):
        w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        grads += torch.autograd.grad(sharded_results(read, mesh, w), w)
        grads.append(torch.func.grad(lambda w: sharded_results(read, mesh, w))(w.detach()))
    return grads


def gradients(mesh: Mesh, body: Body, read: Read) -> list[torch.Tensor]:
    """Return the body's inner gradient, and the outer gradient through it where there is one."""
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    x = torch.arange(1.0, 2 * mesh.size + 1, dtype=torch.float64)
    mapped = fs.shard_map(
        lambda w, x: body(read, w, x)[0], mesh=mesh, in_specs=(P(), P("x")), out_specs=P()
    )
    y = mapped(w, x)
    inner: torch.Tensor = y.detach()
    return [inner, torch.autograd.grad(y.sum(), w)[0]] if y.requires_grad else [inner]


# -- branches that use different tensors of one shape ------------------------------------------


def inner(mesh: Mesh, x: torch.Tensor, ws: list[torch.Tensor]) -> None:
    def body(x: torch.Tensor, *ws: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x * ws[0]).sum() if x.sum() > 0 else (x * ws[1]).sum()
        return torch.autograd.grad(y, ws, materialize_grads=True)

    specs = (P("x"), P(), P())
    fs.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"))(x, *ws)


def inner_func(mesh: Mesh, x: torch.Tensor, ws: list[torch.Tensor]) -> None:
    def body(x: torch.Tensor, *ws: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def loss(*ws: torch.Tensor) -> torch.Tensor:
            return (x * ws[0]).sum() if is_positive else (x * ws[1]).sum()

        is_positive = bool(x.sum() > 0)
        y, vjp = torch.func.vjp(torch.func.grad(loss, (0, 1)), *ws)
        return vjp(y)

    specs = (P("x"), P(), P())
    fs.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"))(x, *ws)


def inner_order(mesh: Mesh, x: torch.Tensor, ws: list[torch.Tensor]) -> None:
    def body(x: torch.Tensor, *ws: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = ws if x.sum() > 0 else ws[::-1]
        y = (x.sin() * first).sum() + (x.cos() * second).sum()
        return torch.autograd.grad(y, ws)

    specs = (P("x"), P(), P())
    fs.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"))(x, *ws)


def of_arguments(mesh: Mesh, x: torch.Tensor, ws: list[torch.Tensor]) -> None:
    body = lambda x, v, w: x * v if x.sum() > 0 else x * w  # noqa: E731
    specs = (P("x"), P(), P())
    y = fs.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"))(x, *ws)
    y.sum().backward()


def of_closures(mesh: Mesh, x: torch.Tensor, ws: list[torch.Tensor]) -> None:
    body = lambda x: x * ws[int(x.sum() > 0)]  # noqa: E731
    fs.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x).sum().backward()


def of_results(mesh: Mesh, x: torch.Tensor, ws: list[torch.Tensor]) -> None:
    def body(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
        total = fs.psum(x * ws[0], "x")
        return total if x.sum() > 0 else x * ws[1]

    specs = (P("x"), P(), P())
    y = fs.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"))(x, *ws)
    y.sum().backward()


def of_func(mesh: Mesh, x: torch.Tensor, ws: list[torch.Tensor]) -> None:
    body = lambda x, v, w: x * v if x.sum() > 0 else x * w  # noqa: E731
    specs = (P("x"), P(), P())
    mapped = fs.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"))
    torch.func.grad(lambda v, w: mapped(x, v, w).sum(), (0, 1))(*ws)


BRANCHES = [inner, inner_func, inner_order, of_arguments, of_closures, of_results, of_func]


def branch_error(mesh: Mesh, case: Callable[[Mesh, torch.Tensor, list[torch.Tensor]], None]) -> str:
    """Return the error of a case as text, "" without one."""
    x = torch.tensor([1.0, 2.0, -3.0, -4.0])
    ws = [torch.tensor([1.0 + i, 2.0], requires_grad=True) for i in range(2)]
    try:
        case(mesh, x, ws)
    except fs.ShardingError as error:
        return str(error)
    return ""
