"""The transport over `torch.distributed`: gloo and NCCL, through the functional collectives.

Only plain tensors and `torch.ops._c10d_functional`: no `AsyncCollectiveTensor`. Process
groups are made on demand for whatever ranks a step names; only their members take part.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import importlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fshard._torch.process_groups import create_group, default_store, leak_groups, pending_works
from fshard._util.errors import fail
from fshard.layout.mesh import Mesh
from fshard.run.transports.base import (
    LABEL,
    Finish,
    Group,
    Label,
    Parts,
    own_transport,
    set_world,
    stacked,
)
from fshard.run.transports.divergence_report import lost
from fshard.run.transports.reduce_dtypes import NATIVE, REDUCE, as_number, over, reduced

__all__ = ["wait_in_background", "init"]

OPS: Any = torch.ops._c10d_functional
GRACE = 1.0  # seconds in which what nobody waits for may still end, before this process does

# Gloo's all-to-all goes straight from memory to memory, in one round. Its reduce-scatter is an
# all-reduce of a copy, its gathers and all-reduces are rings whose rounds cost more than bytes
# where these are few: then, in bytes at all ranks, they go by all-to-all too. Two ranks need no
# more than what the other one has.
GATHERED = 4 * 2**20
REDUCED = 2**19

AVERAGING = {"nccl", "fake"}
"""Backends that average floats themselves; elsewhere a sum is divided."""


@dataclass(slots=True, eq=False)
class World:
    """This process as a rank of `torch.distributed`, as long as it has the group `main`.

    `life` counts the starts of process groups on one store: the same number on every rank, since
    every rank calls `fs.init` after each. A store outlives process groups, and so do its keys.
    `main` is held weakly: process groups join their threads when the last reference goes, and one
    that lets go of a tensor after Python has begun to end ends the process with an abort.
    """

    place: int
    device: torch.device
    timeout: timedelta | None
    main: weakref.ref[Any]
    life: int
    names: dict[Group, str] = field(default_factory=dict)
    backends: dict[str, str] = field(default_factory=dict)  # by type of device

    @property
    def rank(self) -> int:
        """This process's rank; raises `ShardingError` where its process groups were replaced."""
        if not self.is_current:
            fail("fshard", "other process groups than those of fs.init",
                 "ranks are those of the process groups that were there at fs.init",
                 "call fs.init(mesh) again after dist.init_process_group")  # fmt: skip
        return self.place

    @property
    def is_current(self) -> bool:
        main = self.main()
        return main is not None and main is dist.group.WORLD

    @property
    def all_ranks(self) -> range:
        """The ranks of all processes."""
        return range(dist.get_world_size())

    def moves(self, device: torch.device) -> bool:
        return device.type in self.backends

    def all_gather(self, x: torch.Tensor, group: Group) -> Callable[[], Parts]:
        n, gloo = len(group), self._is_gloo()
        if gloo and n == 2:
            return self._swapped(x, x, group, "all_gather")
        if gloo and n * x.nbytes <= GATHERED:
            each = [x.numel()] * n
            moved = self._all_to_all(x.reshape(-1).repeat(n), each, each, group, "all_gather")
            return lambda: moved().view(n, *x.shape)
        flat, restore = _as_bytes(_as_long(x, 0) if x.dtype in NATIVE else x.reshape(-1))
        name, order = self._group(group, "all_gather")
        label = LABEL.get()
        out = OPS.all_gather_into_tensor(flat, len(group), name)
        shape = (len(group), *x.shape)
        wait = functools.partial(_wait, out, label, "all_gather", group)
        return lambda: _unpermute(restore(wait()).view(shape), order)

    def all_reduce(self, x: torch.Tensor, op: str, group: Group) -> Finish:
        if op == "avg" and not self._averages(x.dtype):
            addends, narrow = as_number(x, op)
            total = self.all_reduce(addends, "sum", group)
            return lambda: narrow(over(total(), len(group)))
        if x.dtype.is_complex and op == "product":
            gathered = self.all_gather(x, group)
            return lambda: stacked(gathered()).prod(0)
        n, gloo = len(group), self._is_gloo()
        if gloo and n == 2 and x.nbytes <= GATHERED:
            both = self._swapped(x, x, group, "all_reduce")
            return lambda: reduced(both(), op)
        if gloo and n > 2 and n * x.nbytes <= REDUCED:
            each = [x.numel()] * n
            moved = self._all_to_all(x.reshape(-1).repeat(n), each, each, group, "all_reduce")
            return lambda: REDUCE[op](moved().view(n, *x.shape))
        wire, restore = as_number(x, op)
        label = LABEL.get()
        out = OPS.all_reduce(wire.contiguous(), op, self._group(group, "all_reduce")[0])
        return lambda: restore(_wait(out, label, "all_reduce", group))

    def reduce_scatter(self, x: torch.Tensor, op: str, group: Group) -> Finish:
        if op == "avg" and not self._averages(x.dtype):
            addends, narrow = as_number(x, op)
            total = self.reduce_scatter(addends, "sum", group)
            return lambda: narrow(over(total(), len(group)))
        if x.dtype.is_complex and op == "product":
            total, here = self.all_reduce(x, op, group), group.index(self.place)
            return lambda: total()[here]
        n, gloo = len(group), self._is_gloo()
        if gloo and n == 2:
            here = group.index(self.place)
            both = self._swapped(x[here], x[1 - here], group, "reduce_scatter")
            return lambda: reduced(both(), op)
        if gloo:
            each = [x[0].numel()] * n
            moved = self._all_to_all(x.reshape(-1), each, each, group, "reduce_scatter")
            return lambda: REDUCE[op](moved().view(x.shape))
        name, order = self._group(group, "reduce_scatter")
        wire, restore = as_number(x, op)
        if order is not None:
            wire = torch.stack([wire[order.index(place)] for place in range(len(order))])
        flat = _as_long(wire, 1).contiguous()
        label = LABEL.get()
        out = OPS.reduce_scatter_tensor(flat, op, len(group), name)
        shape = x.shape[1:]
        return lambda: restore(_wait(out, label, "reduce_scatter", group)).reshape(shape)

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        return self._all_to_all(x, send, receive, group, "all_to_all")

    def _all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group, op: str
    ) -> Finish:
        """An all-to-all as a collective, or as the way that another one, `op`, goes."""
        name, order = self._group(group, op)
        if order is not None:
            # The process group is in rank order: put the pieces so, and the results back.
            place = [order.index(at) for at in range(len(order))]
            pieces = x.split(list(send))
            x = torch.cat([pieces[at] for at in place])
            send = [send[at] for at in place]
            theirs = [receive[at] for at in place]
        else:
            theirs = list(receive)
        wire, restore = _as_bytes(x.contiguous())
        item = wire.numel() // x.numel() if x.numel() else _wire_item(x.dtype)
        sizes = [n * item for n in theirs], [n * item for n in send]
        label = LABEL.get()
        out = OPS.all_to_all_single(wire, *sizes, name)

        def finish() -> torch.Tensor:
            got = restore(_wait(out, label, op, group))
            if order is None:
                return got
            pieces = got.split(theirs)
            return torch.cat([pieces[at] for at in order])

        return finish

    def _swapped(
        self, kept: torch.Tensor, sent: torch.Tensor, group: Group, op: str
    ) -> Callable[[], list[torch.Tensor]]:
        """Of a group of two what this rank keeps and what the other one has sent, in its order."""
        low, high = sorted(group)
        sizes = [0, sent.numel()] if self.place == low else [sent.numel(), 0]
        moved = self._all_to_all(sent.reshape(-1), sizes, sizes, (low, high), op)
        if group[0] == self.place:
            return lambda: [kept, moved().view(kept.shape)]
        return lambda: [moved().view(kept.shape), kept]

    def _is_gloo(self) -> bool:
        """Whether all goes over gloo: the same for what is recorded, which has no device yet."""
        if torch.compiler.is_compiling():
            return False  # graphs have the collectives that PyTorch's passes over graphs know
        return {*self.backends.values()} == {"gloo"}

    def _averages(self, dtype: torch.dtype) -> bool:
        """Whether all backends average numbers of a dtype: the same for what has no device yet."""
        natively = dtype in NATIVE and dtype.is_floating_point
        return natively and AVERAGING.issuperset(self.backends.values())

    def _group(self, ranks: Group, op: str) -> tuple[str, list[int] | None]:
        """The process group of `ranks`, and their places in it where they are not in order.

        They make it when they first come to it, for `op`: one that does not come is missed here.
        """
        ordered = tuple(sorted(ranks))
        name = self.names.get(ordered)
        if name is None:
            if ordered == tuple(range(dist.get_world_size())):
                name = dist.group.WORLD.group_name  # type: ignore[union-attr]
            else:
                try:
                    name = create_group(ordered, self.place, f"fshard_{self.life}", self.timeout)
                except RuntimeError as error:
                    raise lost(error, LABEL.get(), op, ranks) from error
            self.names[ordered] = name
        return name, None if ordered == ranks else [ordered.index(rank) for rank in ranks]


def _backends() -> dict[str, str]:
    """The backend of each type of device."""
    return dict(each.split(":") for each in dist.get_backend_config().split(","))


def _as_long(x: torch.Tensor, dim: int) -> torch.Tensor:
    """`x` with the dims up to the first from `dim` on that is not of size 1 as one dim.

    Most often callers have `x` in that shape, and want the result in the one that follows.
    """
    last = next((at for at, size in enumerate(x.shape) if at >= dim and size != 1), x.ndim - 1)
    return x.flatten(0, last) if x.ndim else x.reshape(1)


def _wait(out: torch.Tensor, label: Label | None, op: str, group: Group) -> torch.Tensor:
    try:
        return OPS.wait_tensor(out)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise lost(error, label, op, group) from error


def _unpermute(rows: torch.Tensor, order: list[int] | None) -> Parts:
    return rows if order is None else [rows[place] for place in order]


def _wire_item(dtype: torch.dtype) -> int:
    return 1 if dtype in NATIVE else dtype.itemsize


def _as_bytes(flat: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A flat tensor as something every backend moves, and the way back."""
    flat = flat.resolve_conj().resolve_neg().contiguous()
    if flat.dtype in NATIVE:
        return flat, lambda out: out
    dtype = flat.dtype
    return flat.view(torch.uint8), lambda out: out.view(dtype)


def init(
    mesh: Mesh, /, *, backend: str | None = None, timeout: float | timedelta | None = None
) -> None:
    """Make this process a rank under `torchrun`: from here on, locals are single tensors.

    Every process calls it, and again after it has ended and started the process groups anew.
    Starts `torch.distributed` where it is not started (NCCL where there is CUDA, else gloo).
    `timeout` is in seconds and stays where a later call gives none; process groups that are made
    already, that of all ranks among them, keep the one that they were made with. A rank outside
    of `mesh` gets empty results and takes part in nothing. Raises `ShardingError` where the
    environment of `torchrun` is missing or the mesh names ranks that do not exist.
    """
    if not dist.is_initialized():
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if name not in os.environ]
        if missing:
            fail("fs.init", f"no {', '.join(missing)} in the environment",
                 "fs.init runs in the processes that torchrun starts",
                 f"torchrun --nproc-per-node {mesh.size} script.py; without fs.init the mesh is "
                 "simulated in this process")  # fmt: skip
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if max(mesh.ranks, default=0) >= world:
        fix = f"torchrun --nproc-per-node {max(mesh.ranks) + 1}, or a mesh of at most {world}"
        fail("fs.init", f"{mesh} with ranks up to {max(mesh.ranks)}",
             f"the world has {world} processes, ranks 0..{world - 1}", fix)  # fmt: skip
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    if not dist.is_initialized():
        use_cuda = torch.cuda.is_available() if backend is None else "nccl" in backend
        if use_cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # Its functions have the group of all ranks as a default: once imported after the start, as
        # `torch.optim` and dispatch modes do, they would keep it to the end of Python.
        importlib.import_module("torch.distributed.nn.functional")
        chosen = backend or ("nccl" if use_cuda else "gloo")
        dist.init_process_group(chosen, timeout=limit)
        atexit.register(_finish)  # what is started here is ended here
    nccl = "nccl" in str(dist.get_backend())
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    known = own_transport()
    if isinstance(known, World) and known.is_current:
        known.timeout = limit or known.timeout
    else:
        rank = dist.get_rank()
        made = World(
            rank, device, limit, weakref.ref(dist.group.WORLD), _life(rank), backends=_backends()
        )
        set_world(made)


def _life(rank: int) -> int:
    """How often this rank has begun with the store that there is."""
    store = default_store()
    try:
        return int(store.add(f"fshard starts of {rank}", 1))
    except RuntimeError:  # the store of the fake backend, which keeps nothing
        return 0


# -- the end ----------------------------------------------------------------------------

_UNWANTED: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def wait_in_background(finish: Callable[[], Any]) -> None:
    """Let a thread wait for what was launched and nobody wants: the other ranks may never come.

    PyTorch holds what was launched until somebody waits. No thread starts while Python ends.
    """
    if not sys.is_finalizing():
        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(_end, finish), daemon=True)
        _UNWANTED.add(thread)
        thread.start()


def _end(finish: Callable[[], Any]) -> None:
    """Wait for what nobody wants; nor does anybody want to know why it failed."""
    with suppress(Exception), torch.no_grad():
        finish()


def _finish() -> None:
    """End the process groups, unless the script has done so.

    That waits for all that was launched. Where it may never end the process groups are left as
    they are, for good: the other ranks have to learn that this process is gone.
    """
    if not dist.is_initialized():
        return
    until = time.monotonic() + GRACE
    for thread in tuple(_UNWANTED):
        thread.join(max(0.0, until - time.monotonic()))
    launched = pending_works()
    if launched or any(thread.is_alive() for thread in _UNWANTED):
        leak_groups()
    else:
        dist.destroy_process_group()
