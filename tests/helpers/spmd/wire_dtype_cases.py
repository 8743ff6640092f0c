"""Collectives with wire dtypes, compared on one rank with plain ones of cast tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import fshard as fs
from fshard import Mesh
from tests.helpers.spmd.collective_cases import in_groups, ring, this_rank, turned

MESHES = [Mesh({"i": 2}, devices=(1, 0)), Mesh(x=2, y=1), Mesh(i=1)]
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Sender:
    """Collective of one tensor with n rows, and the directions in which it sends.

    Attributes:
        cotangents: whether backward sends cotangents, and not only counts of ties.
        computes_in: the dtype of the gradient: that of "backward", for a sum; that of the tensor,
            "x", for an extreme; that of "forward", for a product.
    """

    name: str
    run: Callable[..., torch.Tensor]
    forward: bool = True
    backward: bool = True
    cotangents: bool = True
    computes_in: str = "backward"


def ragged(x: torch.Tensor, axes: Any, mesh: Mesh, **o: Any) -> torch.Tensor:
    """Send a row to every rank."""
    n = fs.axis_size(axes, mesh=mesh)
    index = int(fs.axis_index(axes, mesh=mesh))
    return fs.ragged_all_to_all(
        x, torch.zeros_like(x), list(range(n)), [1] * n, [index] * n, [1] * n,
        axis_name=axes, mesh=mesh, **o,
    )  # fmt: skip


def senders() -> Iterator[Sender]:
    size = fs.axis_size
    yield Sender("psum", fs.psum, backward=False)
    yield Sender("pmean", fs.pmean, backward=False)
    for extreme in (fs.pmax, fs.pmin):
        yield Sender(extreme.__name__, extreme, cotangents=False, computes_in="x")
    yield Sender("pprod", fs.pprod, backward=False, computes_in="forward")
    kinds = {"avg": "backward", "max": "x", "min": "x", "product": "forward"}
    for kind, dtype in kinds.items():
        run = lambda x, ax, k=kind, **o: fs.psum_scatter(x, ax, tiled=True, kind=k, **o)  # noqa: E731
        yield Sender(f"psum_scatter by {kind}", run, computes_in=dtype)
    yield Sender("pcast", lambda x, ax, **o: fs.pcast(x, ax, to="varying", **o), forward=False)
    for to in ("varying", "reduced", "invariant"):
        run = lambda x, ax, s=to, **o: fs.all_gather(x, ax, axis=1, to=s, **o)  # noqa: E731
        yield Sender(f"all_gather to {to}", run, backward=to != "invariant")
    yield Sender("psum_scatter", lambda x, ax, **o: fs.psum_scatter(x, ax, tiled=True, **o))
    yield Sender("all_to_all", lambda x, ax, **o: fs.all_to_all(x, ax, 0, 1, **o))
    yield Sender("pswapaxes", lambda x, ax, **o: fs.pswapaxes(x, ax, 0, **o))
    yield Sender(
        "ppermute", lambda x, ax, mesh, **o: fs.ppermute(
            x, ax, ring(size(ax, mesh=mesh)), mesh=mesh, **o
        ),
    )  # fmt: skip
    yield Sender(
        "pshuffle", lambda x, ax, mesh, **o: fs.pshuffle(
            x, ax, turned(size(ax, mesh=mesh), 1), mesh=mesh, **o
        ),
    )  # fmt: skip
    yield Sender("pbroadcast", lambda x, ax, **o: fs.pbroadcast(x, ax, -1, **o))
    yield Sender("ragged_all_to_all", ragged)
    yield Sender(
        "all_gather in groups", lambda x, ax, mesh, **o: fs.all_gather(
            x, ax, axis_index_groups=in_groups(size(ax, mesh=mesh)), mesh=mesh, **o
        ),
    )  # fmt: skip


SENDERS = list(senders())
WIRES = [(F32, BF16, None), (F32, None, BF16), (F32, BF16, F64), (BF16, F32, BF16), (F64, F32, F32)]


def randn(shape: torch.Size, dtype: torch.dtype, seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=F64).to(dtype)


def gradient(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the result, a random cotangent in the dtype of `x`, and the gradient."""
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    ct = randn(y.shape, x.dtype, seed)
    return y.detach(), ct, torch.autograd.grad(y, leaf, ct)[0]


def reference(
    case: Sender, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, ct: torch.Tensor,
    forward: torch.dtype, backward: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the result and the gradient of the plain collective of cast tensors."""
    sent = x.to(forward)
    if case.computes_in == "x":
        leaf = sent.to(x.dtype).requires_grad_()
    else:
        leaf = (x.to(backward) if case.computes_in == "backward" else sent).requires_grad_()
    multiplies = case.computes_in == "forward"
    arrived = ct.to(backward) if case.cotangents and not multiplies else ct
    (grad,) = torch.autograd.grad(run(leaf), leaf, arrived.to(leaf.dtype))
    if multiplies:  # before it sends
        grad = grad.to(x.dtype).to(backward)
    return run(sent).to(x.dtype), grad.to(x.dtype)


def on_rank(mesh: Mesh) -> list[str]:
    """Return a text for each collective and dtypes that are wrong on this rank."""
    axes = mesh.axes
    seed = this_rank(mesh)
    wrong = []
    for item in SENDERS:
        for dtype, forward, backward in WIRES:
            x = randn(torch.Size((mesh.size, 3)), dtype, seed)

            def run(x: torch.Tensor, item: Sender = item, **o: Any) -> torch.Tensor:
                return item.run(x, axes, mesh=mesh, **o)

            wired = partial(run, forward_dtype=forward, backward_dtype=backward)
            y, ct, grad = gradient(wired, x, 100 + seed)
            wires = (item.forward and forward) or dtype, (item.backward and backward) or dtype
            expected, want_grad = reference(item, run, x, ct, *wires)
            name = f"{item.name} of {dtype}, {forward} and {backward}"
            wrong += [f"{name}: {y} is not {expected}"] * (not torch.equal(y, expected))
            wrong += [f"{name}: grad {grad}, not {want_grad}"] * (not torch.equal(grad, want_grad))
            wrong += [name] * (y.dtype != dtype or grad.dtype != dtype)
    return wrong


LINE = MESHES[0]
