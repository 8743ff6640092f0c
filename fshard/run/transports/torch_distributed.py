"""Transport over `torch.distributed` (gloo, NCCL), by its functional collectives; and `fs.init`.

Only plain tensors and `torch.ops._c10d_functional` are used, not `AsyncCollectiveTensor`. Process
groups are created on demand by the ranks of a step, and by no others.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fshard._torch.fake_tensors import is_recording_below_autograd
from fshard._torch.process_groups import (
    TCPStore,
    call_below_autograd,
    create_group,
    default_group,
    default_store,
    leak_groups,
    pending_works,
    register_meta_kernels,
    resolve_group,
)
from fshard._util.errors import fail
from fshard.layout.mesh import Mesh, as_mesh
from fshard.run.transports.base import (
    LABEL,
    Finish,
    Group,
    Label,
    Parts,
    check_device,
    check_group,
    own_transport,
    set_world,
    stacked,
)
from fshard.run.transports.collective_batches import register_batch_rules
from fshard.run.transports.divergence_report import lost
from fshard.run.transports.process_end import Listener
from fshard.run.transports.rank_threads import WAITING, start_waiting
from fshard.run.transports.reduce_dtypes import (
    NATIVE,
    REDUCE,
    as_bytes,
    as_number,
    merge_leading,
    over,
    reduce_into,
    wire_item,
)

T = TypeVar("T")
OPS: Any = torch.ops._c10d_functional
INIT_TIMEOUT = timedelta(minutes=30)
"""Time that `fs.init` waits for other ranks by default, as PyTorch does."""
DEFAULT_TIMEOUT = timedelta(minutes=10)
"""Time that checks wait for other ranks if `fs.init` has none."""
EXIT_SECONDS = 1.0
"""Time for abandoned collectives to end before the process does."""

# Gloo's all-to-all has one round and copies straight from memory to memory. Its reduce-scatter is
# an all-reduce of a copy, its gathers and all-reduces are rings, whose rounds cost more than bytes
# for few bytes. Below these numbers of bytes of all ranks together they run as all-to-alls. A ring
# needs no memory for what it reduces in place.
GATHER_BYTES = 4 * 2**20
REDUCE_BYTES = 2**19

BLOCKING: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar(
    "fshard_blocking", default=None
)
"""Function that runs what waits for other ranks, or None to run it directly."""
AVERAGING = {"nccl", "fake"}
"""Backends that average floats themselves; for others a sum is divided."""


@dataclass(slots=True, eq=False)
class ProcessWorld:
    """Transport of this process, a rank of `torch.distributed`, while the group `main` exists.

    Attributes:
        process_rank: this process's rank.
        device: the device of its tensors by default.
        timeout: of new process groups.
        main: the group of all ranks, held weakly: the destructor of a group joins its threads, and
            one that frees a tensor after Python has begun to exit aborts the process.
        start_count: the number of `fs.init` calls on new process groups of one store, equal on all
            ranks. A store and its keys outlive process groups.
        names: the names of the process groups, by their ranks.
        listener: the socket that other ranks watch.
        backends: the backend of each device type.
        device_meshes: DeviceMeshes made of meshes and device types.
        only_gloo: whether all of them are gloo.
        remark: returns what the last mapped body adds to errors of lost ranks.
        init_count: the number of `fs.init` calls on these process groups, equal on all ranks.
    """

    process_rank: int
    device: torch.device
    timeout: timedelta | None
    main: weakref.ref[Any]
    start_count: int
    listener: Listener
    names: dict[Group, str] = field(default_factory=dict)
    backends: dict[str, str] = field(default_factory=dict)
    device_meshes: dict[tuple[Mesh, str], Any] = field(default_factory=dict)
    only_gloo: bool = field(init=False)
    remark: Callable[[], str] = str
    init_count: int = 1

    def __post_init__(self) -> None:
        self.only_gloo = {*self.backends.values()} == {"gloo"}
        register_batch_rules()

    @property
    def rank(self) -> int:
        """This process's rank; raises `ShardingError` if its process groups were replaced."""
        if not self.is_current:
            fail("fshard", "other process groups than those of fs.init",
                 "the process groups must be those that existed at fs.init",
                 "call fs.init(mesh) again after dist.init_process_group")  # fmt: skip
        return self.process_rank

    @property
    def is_current(self) -> bool:
        """True if the group of all ranks is the one at `fs.init`."""
        main = self.main()
        return main is not None and main is default_group()

    @property
    def all_ranks(self) -> range:
        """The ranks of all processes."""
        return range(dist.get_world_size())

    def accepts(self, device: torch.device) -> bool:
        """Return True if tensors on `device` can be sent."""
        return device.type in self.backends

    def _check_device(self, x: torch.Tensor, op: str) -> None:
        if not x.is_meta:  # those are recorded
            label = LABEL.get()
            check_device(x.device, self, label.name if label else op)

    def all_gather(self, x: torch.Tensor, group: Group) -> Callable[[], Parts]:
        """Gather `x` of all ranks of `group`."""
        self._check_device(x, "all_gather")
        n, gloo = len(group), self._is_gloo()
        if gloo and n == 2:
            other, is_first = self._swap(x, group, "all_gather"), group[0] == self.process_rank
            return lambda: [x, other()] if is_first else [other(), x]
        if gloo and n * x.nbytes <= GATHER_BYTES:
            sizes = [x.numel()] * n
            return self._all_to_all(x.reshape(-1).repeat(n), sizes, sizes, group, "all_gather")
        flat, restore = as_bytes(merge_leading(x, 0) if x.dtype in NATIVE else x.reshape(-1))
        name, order = self._group(group, "all_gather")
        label = LABEL.get()
        out = call_below_autograd(OPS.all_gather_into_tensor, flat, n, name)

        def finish() -> Parts:
            gathered = restore(_wait(out, label, "all_gather", group))
            if order is None:
                return gathered
            rows = gathered.view(n, *x.shape)
            return [rows[i] for i in order]

        return finish

    def all_reduce(
        self, x: torch.Tensor, reduction: str, group: Group, *, owned: bool = False
    ) -> Finish:
        """Reduce `x` over the ranks of `group`, with `owned` in place if it is contiguous."""
        self._check_device(x, "all_reduce")
        if reduction == "avg" and not self._averages(x.dtype):
            value, narrow = as_number(x, reduction)
            total = self.all_reduce(value, "sum", group, owned=owned)
            return lambda: narrow(over(total(), len(group)))
        if x.dtype.is_complex and reduction == "product":
            gathered = self.all_gather(x, group)
            return lambda: stacked(gathered(), x.shape).prod(0)
        n, gloo = len(group), self._is_gloo()
        if gloo and n == 2 and x.nbytes <= (REDUCE_BYTES if owned else GATHER_BYTES):
            other = self._swap(x, group, "all_reduce")
            if owned and x.is_contiguous():
                return lambda: reduce_into(x, other(), reduction)
            return lambda: reduce_into(other(), x, reduction)
        if gloo and n > 2 and n * x.nbytes <= REDUCE_BYTES:
            sizes = [x.numel()] * n
            moved = self._all_to_all(x.reshape(-1).repeat(n), sizes, sizes, group, "all_reduce")
            return lambda: REDUCE[reduction](moved().view(n, *x.shape))
        wire, restore = as_number(x, reduction)
        label = LABEL.get()
        name = self._group(group, "all_reduce")[0]
        if owned and wire is x and x.is_contiguous():
            out = call_below_autograd(OPS.all_reduce_, x, reduction, name)
        else:
            out = call_below_autograd(OPS.all_reduce, wire.contiguous(), reduction, name)
        return lambda: restore(_wait(out, label, "all_reduce", group))

    def reduce_scatter(self, x: torch.Tensor, reduction: str, group: Group) -> Finish:
        """Reduce row i of `x` over `group`, for the rank at index i."""
        self._check_device(x, "reduce_scatter")
        if reduction == "avg" and not self._averages(x.dtype):
            value, narrow = as_number(x, reduction)
            total = self.reduce_scatter(value, "sum", group)
            return lambda: narrow(over(total(), len(group)))
        if x.dtype.is_complex and reduction == "product":
            total, index = self.all_reduce(x, reduction, group), group.index(self.process_rank)
            return lambda: total()[index]
        n, gloo = len(group), self._is_gloo()
        if gloo and n == 2:
            index = group.index(self.process_rank)
            own, other = x[index], self._swap(x[1 - index], group, "reduce_scatter")
            return lambda: reduce_into(other(), own, reduction)
        if gloo:
            sizes = [x[0].numel()] * n
            moved = self._all_to_all(x.reshape(-1), sizes, sizes, group, "reduce_scatter")
            return lambda: REDUCE[reduction](moved().view(x.shape))
        name, order = self._group(group, "reduce_scatter")
        wire, restore = as_number(x, reduction)
        if order is not None:
            wire = torch.stack([wire[i] for i in _inverse(order)])
        flat = merge_leading(wire, 1).contiguous()
        label = LABEL.get()
        out = call_below_autograd(OPS.reduce_scatter_tensor, flat, reduction, n, name)
        shape = x.shape[1:]
        return lambda: restore(_wait(out, label, "reduce_scatter", group)).reshape(shape)

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        """Send pieces of `x` to the ranks of `group`."""
        return self._all_to_all(x, send, receive, group, "all_to_all")

    def _all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group, op: str
    ) -> Finish:
        """Launch an all-to-all, which may stand for another collective `op` in errors."""
        self._check_device(x, op)
        name, order = self._group(group, op)
        if order is not None:
            # The process group is in rank order: pieces are put in that order, results back.
            places = _inverse(order)
            pieces = x.split(list(send))
            x = torch.cat([pieces[i] for i in places])
            send, receive = [send[i] for i in places], [receive[i] for i in places]
        wire, restore = as_bytes(x.contiguous())
        item = wire.numel() // x.numel() if x.numel() else wire_item(x.dtype)
        receive_sizes = list(receive)
        label = LABEL.get()
        sizes = [n * item for n in receive_sizes], [n * item for n in send]
        out = call_below_autograd(OPS.all_to_all_single, wire, *sizes, name)

        def finish() -> torch.Tensor:
            received = restore(_wait(out, label, op, group))
            if order is None:
                return received
            pieces = received.split(receive_sizes)
            return torch.cat([pieces[i] for i in order])

        return finish

    def _swap(self, x: torch.Tensor, group: Group, op: str) -> Finish:
        """Send a tensor to the other rank of a group of two; return the one that it sends."""
        low, high = sorted(group)
        sizes = [0, x.numel()] if self.process_rank == low else [x.numel(), 0]
        moved = self._all_to_all(x.reshape(-1), sizes, sizes, (low, high), op)
        return lambda: moved().view(x.shape)

    def _is_gloo(self) -> bool:
        """Return True if all backends are gloo; meta tensors that are recorded have no device."""
        if torch.compiler.is_compiling() or is_recording_below_autograd():
            return False  # PyTorch's passes over graphs match its own collectives
        return self.only_gloo

    def _averages(self, dtype: torch.dtype) -> bool:
        """Return True if all backends average values of a dtype."""
        is_native = dtype in NATIVE and dtype.is_floating_point
        return is_native and AVERAGING.issuperset(self.backends.values())

    def process_group(self, ranks: Group) -> Any:
        """Return the process group of ranks, which all of them call."""
        return resolve_group(self._group(ranks, "new_group")[0])

    def _group(self, ranks: Group, op: str) -> tuple[str, list[int] | None]:
        """Return the name of a process group, and the ranks' places in it if they are not sorted.

        The ranks create it on first use, for `op`: one that does not come is reported here.
        """
        ordered = tuple(sorted(ranks))
        name = self.names.get(ordered)
        if name is None:
            if ordered == tuple(range(dist.get_world_size())):
                name = dist.group.WORLD.group_name  # type: ignore[union-attr]
            else:
                check_group(ordered, self)
                prefix = f"fshard_{self.start_count}"
                try:
                    name = _blocking(
                        lambda: create_group(ordered, self.process_rank, prefix, self.timeout)
                    )
                except RuntimeError as error:
                    raise lost(error, LABEL.get(), op, ranks) from error
            self.names[ordered] = name
        return name, None if ordered == ranks else [ordered.index(rank) for rank in ranks]


def _backends() -> dict[str, str]:
    """Return the backend of each device type."""
    return dict(item.split(":") for item in dist.get_backend_config().split(","))


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]


def _blocking(wait: Callable[[], T]) -> T:
    """Return `wait()`, a call that other ranks must make too."""
    watched = BLOCKING.get()
    return wait() if watched is None else watched(wait)


def _wait(out: torch.Tensor, label: Label | None, op: str, group: Group) -> torch.Tensor:
    try:
        result: torch.Tensor = _blocking(lambda: call_below_autograd(OPS.wait_tensor, out))
        return result
    except RuntimeError as error:
        raise lost(error, label, op, group) from error


def init(
    mesh: Mesh, /, *, backend: str | None = None, timeout: float | timedelta | None = None
) -> None:
    """Make this process a rank under `torchrun`: from here on, locals are single tensors.

    Every process must call it, and again if it has replaced the process groups. It starts
    `torch.distributed` if that is not done; a process outside of `mesh` gets empty results and
    takes part in nothing. The process listens on one port of the interface towards `MASTER_ADDR`,
    without reading from it: ranks under `check="collectives"` see by it that this one has ended.

    Args:
        mesh: a mesh whose ranks exist; others may be used later.
        backend: "nccl" or "gloo"; by default NCCL with CUDA, else gloo. For other backends along
            some axes pass a mesh of `init_device_mesh(..., backend_override={"dp": "gloo"})`.
        timeout: seconds that this call and collectives wait for other ranks. None keeps that of an
            earlier call. Process groups that exist already keep their own.

    Raises:
        ShardingError: the environment of `torchrun` is missing, or the mesh has ranks that do not
            exist, or processes do not call it within the timeout.

    >>> import fshard as fs
    >>> def main():  # torchrun --nproc-per-node 2 script.py
    ...     fs.init(fs.Mesh(x=2), timeout=60)
    """
    mesh = as_mesh(mesh, "fs.init")
    if backend is not None and not isinstance(backend, str):
        fail("fs.init", f"backend={backend!r}", "the backend must be a string, that of all axes",
             'init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"), '
             'backend_override={"dp": "gloo"}) as the mesh')  # fmt: skip
    register_meta_kernels()
    if not dist.is_initialized():
        required = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in required if name not in os.environ]
        if missing:
            fail("fs.init", f"no {', '.join(missing)} in the environment",
                 "fs.init must run in a process that torchrun starts",
                 f"torchrun --nproc-per-node {mesh.size} script.py; without fs.init the mesh is "
                 "simulated in this process")  # fmt: skip
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if max(mesh.ranks, default=0) >= world:
        fix = f"torchrun --nproc-per-node {max(mesh.ranks) + 1}, or a mesh of at most {world}"
        fail("fs.init", f"{mesh} with ranks up to {max(mesh.ranks)}",
             f"ranks must be among the {world} processes of the world, 0..{world - 1}",
             fix)  # fmt: skip
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    listener: Listener | None = None
    if not dist.is_initialized():
        use_cuda = torch.cuda.is_available() if backend is None else "nccl" in backend
        if use_cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # Its functions have the group of all ranks as a default: imported after the start, as
        # `torch.optim` and dispatch modes do, they would keep it alive until Python exits.
        importlib.import_module("torch.distributed.nn.functional")
        chosen = backend or ("nccl" if use_cuda else "gloo")
        rank = int(os.environ["RANK"])
        store, listener = _meet(rank, world, limit or INIT_TIMEOUT)
        dist.init_process_group(chosen, store=store, rank=rank, world_size=world, timeout=limit)
        atexit.register(_end_process_groups)  # only those that were started here
    nccl = "nccl" in str(dist.get_backend())
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    current = own_transport()
    if isinstance(current, ProcessWorld) and current.is_current:
        current.timeout = limit or current.timeout
        current.init_count += 1
    else:
        rank, main = dist.get_rank(), weakref.ref(default_group())
        count = _count_start(rank)
        key = f"fshard address {count} of {{}}"
        listener = listener or Listener(_own_connection(default_store()), key, rank)
        set_world(ProcessWorld(rank, device, limit, main, count, listener, backends=_backends()))


def _own_connection(store: Any) -> Any:
    """Return a connection to a store that ranks which create a process group do not lock."""
    try:
        return store.clone()
    except RuntimeError:  # the store of the fake backend has none
        return store


def _meet(rank: int, world: int, limit: timedelta) -> tuple[Any, Listener]:
    """Return the store and this process's listener, once all processes have one; or raise.

    PyTorch waits for all processes too, but its errors do not name those that are missing.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeper = "torchrun" if by_agent else "rank 0"
    rule = "every process of the world must call fs.init within the timeout"
    seconds, longer = limit.total_seconds(), "fs.init(mesh, timeout=seconds) waits longer"
    try:
        store = TCPStore(
            host, port, world, is_master=rank == 0 and not by_agent, timeout=limit,
            multi_tenant=True, wait_for_workers=False,
        )  # fmt: skip
    except dist.DistError:
        fail("fs.init", f"no answer of {keeper} at {host}:{port} within {seconds:g} s", rule,
             f"look at the output of {keeper}; {longer}")  # fmt: skip
    counter = f"fshard meetings of {rank}"
    key = f"fshard meeting {store.add(counter, 1)} of {{}}"
    listener = Listener(_own_connection(store), key, rank, keeper)
    try:
        store.wait([key.format(other) for other in range(world)], limit)
    except dist.DistError:
        missing = [other for other in range(world) if not store.check([key.format(other)])]
        store.delete_key(key.format(rank))  # it may try again
        store.add(counter, -1)
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        fail("fs.init", f"no {ranks} of 0..{world - 1} within {seconds:g} s", rule,
             f"look at the output of {ranks}; {longer}")  # fmt: skip
    return store, listener


def _count_start(rank: int) -> int:
    """Return the number of times this rank has started with the current store."""
    store = default_store()
    try:
        return int(store.add(f"fshard starts of {rank}", 1))
    except RuntimeError:  # the store of the fake backend keeps nothing
        return 0


# -- abandoned collectives and the end of the process ------------------------------------


def wait_in_background(finish: Callable[[], Any]) -> None:
    """Wait for an abandoned collective in a thread, since the other ranks may never come.

    PyTorch keeps the buffers of a collective until it is waited for.
    """
    if not sys.is_finalizing():  # no thread starts while Python exits
        start_waiting(_drain, finish)


def _drain(finish: Callable[[], Any]) -> None:
    """Wait for an abandoned collective and ignore its errors."""
    with suppress(Exception), torch.no_grad():
        finish()


def _end_process_groups() -> None:
    """Destroy the process groups, unless the script has done so.

    That would wait for all launched collectives. If some may never end, the groups are leaked
    instead, so that the other ranks notice the end of this process.
    """
    if not dist.is_initialized():
        return
    deadline = time.monotonic() + EXIT_SECONDS
    for done in tuple(WAITING):
        done.acquire(timeout=max(0.0, deadline - time.monotonic()))
    if pending_works() or WAITING:
        leak_groups()
    else:
        dist.destroy_process_group()
