"""Blocks in several layouts with recomputed values, and the memory that their calls keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import fshard as fs
from fshard import Mesh, P
from fshard.partition.execution import schedule as scheduling
from fshard.run.transports.base import Event, observe
from tests.helpers.spec_grid import random_global

F64 = torch.float64
LAYERS, WIDTH, ROWS = 4, 16, 2048
SHAPES = {
    "gain": (WIDTH,), "shift": (WIDTH,), "up": (4 * WIDTH, WIDTH), "bias": (4 * WIDTH,),
    "down": (4 * WIDTH, WIDTH),
}  # fmt: skip
TENSOR_PARALLEL = {"gain": P(), "shift": P(), "up": P("x"), "bias": P("x"), "down": P("x")}
HYBRID = {"gain": P("y"), "shift": P("y"), "up": P("x", "y"), "bias": P("x"), "down": P("x", "y")}
Params = list[dict[str, Tensor]]


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.layer_norm(x, x.shape[-1:], p["gain"], p["shift"])
    return x + F.gelu(F.linear(h, p["up"], p["bias"])) @ p["down"]


def loss(params: Params, x: Tensor) -> Tensor:
    """Mean square of four blocks."""
    for p in params:
        x = block(p, x)
    return x.square().mean()


def checkpointed_loss(params: Params, x: Tensor) -> Tensor:
    """Mean square of four blocks, each of them checkpointed."""
    for p in params:
        x = checkpoint(block, p, x, use_reentrant=False)
    return x.square().mean()


def arguments(rows: int = ROWS) -> tuple[Params, Tensor]:
    """Return global parameters, with gradients, and inputs."""
    params = [
        {k: (random_global(s, F64, 9 * i + j) / 16).requires_grad_()
         for j, (k, s) in enumerate(SHAPES.items())}
        for i in range(LAYERS)
    ]  # fmt: skip
    return params, random_global((rows, WIDTH), F64, 99) / 8


def keeps_products(op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of matrix products, as `jax.checkpoint_policies.dots_saveable` does."""
    is_product = op in (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


CASES: dict[str, tuple[Any, Any, Any, Callable[..., Tensor]]] = {
    "data parallel": (P(), P(("x", "y")), None, loss),
    "FSDP": (P(("x", "y")), P(("x", "y")), None, loss),
    "FSDP, gathered again": (P(("x", "y")), P(("x", "y")), "gathers", loss),
    "FSDP, checkpointed": (P(("x", "y")), P(("x", "y")), None, checkpointed_loss),
    "FSDP, checkpointed and gathered again": (
        P(("x", "y")), P(("x", "y")), "gathers", checkpointed_loss),
    "FSDP, nothing kept": (P(("x", "y")), P(("x", "y")), "all", loss),
    "FSDP, products kept": (P(("x", "y")), P(("x", "y")), keeps_products, loss),
    "tensor parallel": (TENSOR_PARALLEL, P("y"), None, loss),
    "tensor parallel, nothing kept": (TENSOR_PARALLEL, P("y"), "all", loss),
    "hybrid": (HYBRID, P("y"), None, loss),
    "hybrid, gathered again": (HYBRID, P("y"), "gathers", loss),
}  # fmt: skip
"""Layouts of the parameters and of the inputs, the policy, and the function."""


def locals_in(pairs: Iterable[fs.Sharded]) -> Iterator[Tensor]:
    for pair in pairs:
        yield from [pair.local] if isinstance(pair.local, Tensor) else pair.local


@contextmanager
def saved_storages(arguments: Iterable[Tensor]) -> Iterator[dict[int, Tensor]]:
    """Yield the tensors that autograd saves in the block by storage, without the arguments'."""
    saved: dict[int, Tensor] = {}
    known = {x.untyped_storage()._cdata for x in arguments}

    def pack(x: Tensor) -> Tensor:
        address = x.untyped_storage()._cdata
        if address not in known:
            saved[address] = x.detach()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield saved


def nbytes(saved: dict[int, Tensor]) -> int:
    return sum(x.untyped_storage().nbytes() for x in saved.values())


def call_on_pairs(
    mesh: Mesh, params_spec: Any, rows_spec: Any, remat: Any, fn: Callable[..., Tensor],
    rows: int = ROWS, **options: Any,
) -> tuple[fs.Partition, list[dict[str, fs.Sharded]], fs.Sharded]:  # fmt: skip
    """Return a partitioned function, and pairs of parameters with gradients and of inputs."""
    params, x = arguments(rows)
    specs = params_spec if isinstance(params_spec, dict) else dict.fromkeys(SHAPES, params_spec)

    def leaf(value: Tensor, p: Any) -> fs.Sharded:
        pair = fs.shard(value.detach(), mesh, p)
        copies = [x.clone().requires_grad_() for x in locals_in([pair])]
        return fs.Sharded(copies[0] if isinstance(pair.local, Tensor) else tuple(copies), pair.spec)

    pairs = [{k: leaf(value, specs[k]) for k, value in p.items()} for p in params]
    part = fs.partition(
        fn, mesh=mesh, params=[specs] * LAYERS, in_specs=rows_spec, remat=remat, **options
    )
    return part, pairs, fs.shard(x, mesh, rows_spec)


def measured(mesh: Mesh, name: str) -> dict[str, Any]:
    """Return the loss of a case, its gradients, and its saved bytes: predicted and measured."""
    part, pairs, x = call_on_pairs(mesh, *CASES[name])
    leaves = [pair for p in pairs for pair in p.values()]
    with fs.comm_log() as log, saved_storages(locals_in([*leaves, x])) as saved:
        out = part(pairs, x)
        locals_ = [*locals_in([out])]
        weight = 1 if out.spec.partition.unreduced else 1 / mesh.size
        local_loss = sum(locals_) * weight
        assert isinstance(local_loss, Tensor)
        grads = torch.autograd.grad(local_loss, [*locals_in(leaves)])
    call, n = part.trace(pairs, x), mesh.size if isinstance(out.local, tuple) else 1
    parts = [grads[i * n : (i + 1) * n] for i in range(len(leaves))]
    pairs_of_grads = [
        fs.Sharded(part if n > 1 else part[0], leaf.spec.dual)
        for part, leaf in zip(parts, leaves, strict=True)
    ]
    return {
        "loss": fs.unshard(out).detach(), "grads": [fs.unshard(g) for g in pairs_of_grads],
        "measured": nbytes(saved), "predicted": call.saved_bytes(),
        "backward": dict(log.backward.counts), "launches": call.cost(backward=True).launches,
        "all ranks": sum(call.saved_bytes(rank).total for rank in mesh.ranks),
    }  # fmt: skip


def one_device() -> tuple[Tensor, Sequence[Tensor]]:
    """Return the loss and the gradients on one device."""
    params, x = arguments()
    value = loss(params, x)
    return value.detach(), torch.autograd.grad(value, [w for p in params for w in p.values()])


@contextmanager
def bucket_bytes(nbytes: int) -> Iterator[None]:
    """Schedule launches of at most some bytes in the block."""
    before = scheduling.BUCKET_BYTES
    scheduling.BUCKET_BYTES = nbytes
    try:
        yield
    finally:
        scheduling.BUCKET_BYTES = before


def launch_order(mesh: Mesh, remat: Any = "gathers") -> list[tuple[str, str]]:
    """Return phase and name of all launches of FSDP's step, with one bucket for each layer."""
    axes = mesh.axes
    with bucket_bytes(20_000):
        part, pairs, x = call_on_pairs(mesh, P(axes), P(axes), remat, loss)
        leaves = [*locals_in(pair for p in pairs for pair in p.values())]
        events: list[Event] = []
        with observe(lambda call: events.extend(call.events)):
            total = sum(locals_in([part(pairs, x)]))
            assert isinstance(total, Tensor)
            torch.autograd.grad(total, leaves)
    first = events[0].rank
    return [(event.phase, event.op) for event in events if event.rank == first]


KEY = fs.random.key(3)


def dropped(w: Tensor, x: Tensor) -> Tensor:
    """Dropout by a key, and draws."""
    with fs.random.keyed(KEY):
        h = F.dropout(torch.tanh(x @ w), 0.5) * torch.rand(x.shape[0], w.shape[1], dtype=x.dtype)
        return F.dropout(h @ w.T, 0.3).square().sum()
