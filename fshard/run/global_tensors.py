"""Conversion of global tensors to pairs and back: shard, scatter, unshard, from_local, reshard."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TypeVar, overload

import torch
from torch.autograd.function import once_differentiable

from fshard._torch.memory import unaliased
from fshard._torch.symbolic_numbers import has_symbolic_sizes
from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import fail
from fshard._util.signatures import explain_binding
from fshard._util.text import type_name
from fshard.layout.mesh import Mesh, as_mesh
from fshard.layout.partition_spec import LINEAR, PartitionSpec
from fshard.layout.sharded import Pair, Sharded
from fshard.layout.spec import Spec, is_placements, partition_of
from fshard.layout.tree import is_pair
from fshard.layout.validation import check_plain_tensor
from fshard.plan.redistribute import redistribute
from fshard.program.program import Program
from fshard.program.steps import AllSlice, InvariantToReduced, ReplicatedToUnreduced, Step
from fshard.run.autograd.linear_function import ProgramGroup, apply_programs
from fshard.run.autograd.replicate import shard_value, unshard_value
from fshard.run.compared_values import check_same_values
from fshard.run.execute import Pending, check_shards, run_typed_hook
from fshard.run.from_local import Header, sent_header
from fshard.run.graphs.graph_node import graph_node
from fshard.run.transports.base import (
    Label,
    Transport,
    backward_phase,
    current_transport,
    labelled,
    warn_alone,
)
from fshard.run.transports.observed_calls import notify_collective
from fshard.run.transports.reduce_dtypes import neutral_like, over

T = TypeVar("T")
TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


def _neutral_kind(spec: Spec, rank: int) -> str | None:
    """Return the reduction whose neutral element a rank holds; None if it holds the value."""
    for axis, kind in spec.partition.unreduced_kinds:
        if kind != "avg" and spec.mesh.index(rank, (axis,)) > 0:
            return kind
    return None


def _typed(
    where: str, x: torch.Tensor, src: Spec, dst: Spec, run: Callable[[torch.Tensor], T]
) -> T:
    """Return `run(x)`, its types tracked: `x` has the layout `src`, the result the layout `dst`."""
    result: T = run_typed_hook.call(where, x, src, dst, run)
    return result


# -- the public functions -------------------------------------------------------------


@lru_cache(maxsize=CACHE_SIZE)
def replicated(spec: Spec) -> Spec:
    """Return the spec of the same tensor, unsharded and invariant."""
    return Spec(spec.mesh, PartitionSpec(), shape=spec.shape, dtype=spec.dtype)


@lru_cache(maxsize=CACHE_SIZE)
def shard_program(spec: Spec) -> Program:
    """Return the local steps from a global tensor to a rank's local.

    They are listed here, not planned, so that an unreduced value is on coordinate 0 in all cases.
    """
    p = spec.partition
    steps: list[Step] = [
        AllSlice(axes, dim, spec.sizes[dim]) for dim, axes in enumerate(p.dims) if axes
    ]
    for make, kinds in (
        (InvariantToReduced, p.reduced_kinds),
        (ReplicatedToUnreduced, p.unreduced_kinds),
    ):
        steps += [
            make(tuple(axis for axis, each in kinds if each == kind), kind)
            for kind in dict.fromkeys(kind for _, kind in kinds)
        ]
    return Program(replicated(spec), steps, spec)


@lru_cache(maxsize=CACHE_SIZE)
def _unshard_program(spec: Spec) -> Program:
    return redistribute(spec, replicated(spec))


def _read_pair(pair: Pair, where: str) -> Sharded:
    if isinstance(pair, Sharded):
        return pair
    if not is_pair(pair):
        fail(where, f"a {type(pair).__name__}", "a pair must be (local, spec)",
             "fs.shard makes one from a global tensor, fs.from_local from locals")  # fmt: skip
    return Sharded(*pair)


def _check_global(x: Any, spec: Spec, where: str) -> None:
    if not isinstance(spec, Spec):
        fail(where, f"{spec!r} as the spec",
             "a spec must be a fs.Spec, with a mesh, shape and dtype",
             "fs.Spec(mesh, P(...), shape=x.shape, dtype=x.dtype)")  # fmt: skip
    if type(x) not in TENSOR_TYPES or x.layout is not torch.strided:
        check_plain_tensor(x, where)
    if tuple(x.shape) != spec.shape or x.dtype != spec.dtype:
        fail(where, f"a tensor of shape {tuple(x.shape)} and {x.dtype} for {spec}",
             f"the tensor must have the spec's shape {spec.shape} and {spec.dtype}",
             f"fs.Spec(mesh, {spec.partition!r}, shape={tuple(x.shape)}, "
             f"dtype={x.dtype})")  # fmt: skip


def _check_linear(spec: Spec, where: str) -> None:
    kinds = [kind for _, kind in spec.partition.unreduced_kinds if kind not in LINEAR]
    if kinds:
        fail(where, f"a tensor that requires grad, as {spec}",
             f"the reduction of a tensor with a gradient must be sum or avg, which are linear; it "
             f"is {kinds[0]}", "detach() it, or shard it as P() and reduce later")  # fmt: skip


@lru_cache(maxsize=CACHE_SIZE)
def _spec_on(mesh: Mesh, p: PartitionSpec, shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
    return Spec(mesh, p, shape=shape, dtype=dtype, uneven="chunk")


def _check_layout(layout: object, partition: object, where: str) -> None:
    """Raise `ShardingError` unless the arguments are a `Spec`, or a `Mesh` and a `P`."""
    if isinstance(layout, Spec) and partition is None:
        return
    is_mesh = isinstance(layout, Mesh) or hasattr(layout, "mesh_dim_names")
    if is_mesh and (isinstance(partition, PartitionSpec) or is_placements(partition)):
        return
    types = [type_name(value) for value in (layout, partition) if value is not None]
    entries = partition if isinstance(partition, tuple) else (partition,)
    named = is_mesh and all(isinstance(entry, str | None) for entry in entries)
    dims = ", ".join(map(repr, entries)) if named and partition else "..."
    fail(where, f"a layout of {' and '.join(types) or 'None'}",
         "the layout must be a fs.Spec, or a fs.Mesh and a P",
         f"mesh, P({dims}); or fs.Spec(mesh, P({dims}), shape=x.shape)")  # fmt: skip


def _layout_of(x: Any, layout: Any, partition: Any, where: str) -> Spec:
    """Return the spec of a global tensor in a layout that `_check_layout` accepts."""
    _check_layout(layout, partition, where)
    if isinstance(layout, Spec):
        return layout
    check_plain_tensor(x, where)
    mesh = as_mesh(layout, where)
    return _spec_on(mesh, partition_of(mesh, partition, x.ndim), tuple(x.shape), x.dtype)


@graph_node
def shard(
    global_tensor: torch.Tensor, spec: Spec | Mesh, partition: PartitionSpec | None = None, /
) -> Sharded:
    """Shard a global tensor that every process holds, without communication.

    An unreduced axis gets the value on coordinate 0 and the neutral element elsewhere. The
    gradient is the global tensor's, gathered on every rank. A graph of `torch.compile` ends before
    a tensor whose sizes are symbols (see `fs.shard_map`).

    Args:
        global_tensor: the tensor, of the spec's shape and dtype.
        spec: the layout, or the mesh of `partition`.
        partition: the layout on the mesh, a `P` or DTensor's placements; dims that it does not
            divide are chunked as `torch.chunk` does.

    Returns:
        The pair. Its local is this rank's slice, in memory of its own; in a simulation the tuple of
        all ranks' slices.

    Raises:
        ShardingError: the tensor is not of the spec, or it requires grad and is to be unreduced by
            another reduction than `sum` or `avg`; on a process, the first tensor of a layout and
            line has other values than on the process that came first.

    >>> import torch
    >>> import fshard as fs
    >>> spec = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))
    >>> fs.shard(torch.arange(4.0), spec).local
    (tensor([0., 1.]), tensor([2., 3.]))
    >>> fs.shard(torch.arange(3.0), fs.Mesh(x=2), fs.P("x")).spec
    f32[3@x:chunk]
    """
    if partition is not None or not isinstance(spec, Spec):
        spec = _layout_of(global_tensor, spec, partition, "fs.shard")
    if current_transport() is None:
        return Sharded(shards_of(global_tensor, spec), spec)
    check_sharding(global_tensor, spec)
    check_same_values("fs.shard", global_tensor, spec, at_line=True)
    to_pair = lambda x: Sharded(unaliased(shard_program(spec)(x), [x]), spec)  # noqa: E731
    return _typed("fs.shard", global_tensor, replicated(spec), spec, to_pair)


def check_sharding(x: torch.Tensor, spec: Spec) -> None:
    """Raise `ShardingError` unless `x` is a global tensor of `spec`, differentiable if needed.

    A tensor with symbols as sizes is one of blocks of the spec.
    """
    if not (isinstance(x, torch.Tensor) and has_symbolic_sizes(x)):
        _check_global(x, spec, "fs.shard")
    if x.requires_grad and torch.is_grad_enabled():
        _check_linear(spec, "fs.shard")


def shards_of(x: torch.Tensor, spec: Spec, *, copied: bool = True) -> tuple[torch.Tensor, ...]:
    """Return the shards of a global tensor for all ranks of a simulated mesh.

    Args:
        x: the global tensor.
        spec: its layout.
        copied: whether shards have memory of their own; else they are in that of `x` if possible.
    """
    warn_alone()
    check_sharding(x, spec)
    if spec.mesh.size == 1:
        return (unaliased(x, [x]),) if copied else (x,)
    return shard_value(x, shard_program(spec), copied=copied)


def shard_blocks(x: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Return this rank's local of a global tensor with symbols as sizes.

    The spec has the shape that `block_shape` returns for `x`.
    """
    return _run_blocks(shard_program(spec), x)


def unshard_blocks(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Return the global tensor of a local with symbols as sizes; see `shard_blocks`."""
    return _run_blocks(_unshard_program(spec), local)


def _run_blocks(prog: Program, x: torch.Tensor) -> torch.Tensor:
    return unaliased(apply_programs(ProgramGroup((prog,)), (x,), False)[0], [x])


def local_of(x: torch.Tensor, spec: Spec, where: str, *, copied: bool = True) -> Any:
    """Return the local of a plain argument of `where`, `copied` or in the memory of `x`."""
    if current_transport() is None:
        return shards_of(x, spec, copied=copied)
    check_sharding(x, spec)
    check_same_values(where, x, spec)
    local = _typed("fs.shard", x, replicated(spec), spec, shard_program(spec))
    return unaliased(local, [x]) if copied else local


@graph_node
def unshard(pair: Pair, /) -> torch.Tensor:
    """Return the global tensor of a pair on every rank, by gathers and reductions.

    The gradient is sharded as `spec.dual` says: slices, without communication. Where ranks use the
    tensor for different work, so that its gradient is a sum over them, `fs.reshard(pair,
    fs.P(reduced=axes)).local` is the tensor to use, as DTensor's `full_tensor(grad_placements=)`.

    Args:
        pair: `(local, spec)`; the local is this rank's tensor, or in a simulation all shards.

    Returns:
        The global tensor, in memory of its own.

    Raises:
        ShardingError: `pair` is not a pair, or its local is not of its spec.

    >>> import torch
    >>> import fshard as fs
    >>> spec = fs.Spec(fs.Mesh(x=2), fs.P(unreduced={"x"}), shape=(2,))
    >>> fs.unshard(((torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])), spec))
    tensor([11., 22.])
    """
    pair = _read_pair(pair, "fs.unshard")
    local, spec = pair.local, pair.spec
    prog = _unshard_program(spec)
    if isinstance(local, torch.Tensor):
        gather = lambda x: unaliased(prog(x), [x])  # noqa: E731
        return _typed("fs.unshard", local, spec, prog.dst, gather)
    shards = check_shards(local, spec, "fs.unshard")
    return unaliased(unshard_value(shards, prog), shards)


@overload
def reshard(
    pair: Pair, to: Spec | PartitionSpec, /, *, async_op: Literal[False] = ..., **options: Any
) -> Sharded: ...
@overload
def reshard(
    pair: Pair, to: Spec | PartitionSpec, /, *, async_op: Literal[True], **options: Any
) -> Pending: ...
@graph_node
def reshard(
    pair: Pair, to: Spec | PartitionSpec, /, *, async_op: bool = False, **options: Any
) -> Any:
    """Redistribute a pair to another layout: plan with `fs.redistribute` and run the program.

    The gradient is redistributed back, by the transposed program.

    Args:
        pair: `(local, spec)`; the local is this rank's tensor, or in a simulation all shards. A
            rank outside of the spec's mesh passes None as its local.
        to: the target; a `P`, or DTensor's placements, keep the mesh, and dims that they do not
            divide are chunked as `torch.chunk` does.
        async_op: launch the last collective and return without waiting for it; without a gradient.
        **options: options of `fs.redistribute`.

    Returns:
        The pair in the target layout, a `Sharded`; with `async_op` a `Pending` whose `.wait()`
        returns it. A rank outside of the target's mesh gets an empty tensor.

    Raises:
        ShardingError: the arguments are not a pair and a target, the local is not of its spec, or
            no program exists.

    >>> import torch
    >>> import fshard as fs
    >>> pair = fs.shard(torch.arange(4.0), fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,)))
    >>> fs.reshard(pair, fs.P()).local[1]
    tensor([0., 1., 2., 3.])
    """
    pair = _read_pair(pair, "fs.reshard")
    local, spec = pair.local, pair.spec
    to = partition_of(spec.mesh, to, spec.ndim)
    if not isinstance(to, Spec | PartitionSpec):
        fail("fs.reshard", f"{to!r} of type {type_name(to)}", "the target must be a Spec or a P",
             "fs.P('x'), say")  # fmt: skip
    target = to if isinstance(to, Spec) else spec.replace(partition=to, uneven="chunk")
    try:
        prog = redistribute(spec, target, **options)
    except TypeError as error:
        explain_binding(error, reshard, (pair, to), options, redistribute)
        raise
    if async_op:
        return _start_reshard(prog, local)
    if local is None:
        return Sharded(prog(local), target)
    if isinstance(local, torch.Tensor):
        to_pair = lambda x: Sharded(unaliased(prog(x), [x]), target)  # noqa: E731
        return _typed("fs.reshard", local, spec, target, to_pair)
    return Sharded(tuple(unaliased(y, local) for y in prog(local)), target)


def _start_reshard(prog: Program, local: Any) -> Pending:
    """Launch a program on a local, and return the pending pair."""
    if not isinstance(local, torch.Tensor):
        pending = prog(local, async_op=True)
        sources = local or ()

        def wait() -> Sharded:
            shards = pending.wait()
            if isinstance(shards, torch.Tensor):
                return Sharded(shards, prog.dst)
            return Sharded(tuple(unaliased(y, sources) for y in shards), prog.dst)

        return Pending(wait)

    def launch(x: torch.Tensor) -> Pending:
        pending = prog(x, async_op=True)
        return Pending(lambda: Sharded(unaliased(pending.wait(), [x]), prog.dst))

    return _typed("fs.reshard", local, prog.src, prog.dst, launch)


# -- scatter --------------------------------------------------------------------------


class _Scatter(torch.autograd.Function):
    """Scatter one rank's tensor; `anchor` makes the results of all ranks require grad."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, x: torch.Tensor | None, spec: Spec, src: int,
        transport: Transport, device: torch.device,
    ) -> torch.Tensor:  # fmt: skip
        ctx.spec, ctx.x_device = spec, None if x is None else x.device
        return _send_shards(x, spec, src, transport, device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # All ranks take part in gathering the gradient, but only the source uses it: in a second
        # derivative the others would not call the collectives.
        dual = ctx.spec.dual
        with backward_phase():
            gradient = redistribute(dual, replicated(dual))(grad)
        x_grad = None if ctx.x_device is None else gradient.to(ctx.x_device)
        return None, x_grad, None, None, None, None


def _send_shards(
    x: torch.Tensor | None, spec: Spec, src: int, transport: Transport, device: torch.device
) -> torch.Tensor:
    """Send each rank its shard; nothing to those that hold a neutral element."""
    group = tuple(spec.mesh.ranks)
    shape = spec.local_shape(transport.rank)
    sizes = [
        0 if _neutral_kind(spec, rank) else math.prod(spec.local_shape(rank)) for rank in group
    ]
    index = group.index(transport.rank)
    receive = [sizes[index] if rank == src else 0 for rank in group]
    if x is None:
        flat, send = torch.empty(0, dtype=spec.dtype, device=device), [0] * len(group)
    else:
        parts = [x[spec.index(rank)].reshape(-1)[:n] for rank, n in zip(group, sizes, strict=True)]
        flat, send = torch.cat(parts).to(device), sizes
    sent = (sum(send) - send[index]) * spec.dtype.itemsize
    with labelled(Label("fs.scatter", spec.mesh, arguments=f"({spec}, src={src})")):
        notify_collective("scatter", spec.mesh.axes, sent, transport.rank, spec.dtype)
        received = transport.all_to_all(flat, send, receive, group)()
    kind = _neutral_kind(spec, transport.rank)
    if kind is not None:
        return neutral_like(received, kind, shape)
    divisor = math.prod(spec.mesh.shape[a] for a, k in spec.partition.reduced_kinds if k == "avg")
    return over(received.view(shape), divisor)


def scatter(
    tensor: torch.Tensor | None, spec: Spec | Mesh, partition: PartitionSpec | None = None, /, *,
    src: int = 0,
) -> Sharded:  # fmt: skip
    """Shard a global tensor that one rank holds; every rank is sent its shard alone.

    The gradient is gathered on rank `src`; under `torchrun` it has no second derivative.

    Args:
        tensor: the tensor on rank `src`; ignored on other ranks, which may pass None. In a
            simulation it is the tensor.
        spec: the layout, or the mesh of `partition` where only rank `src` has the shape.
        partition: the layout on the mesh; dims that it does not divide are chunked as
            `torch.chunk` does.
        src: the rank that holds the tensor, a rank of the spec's mesh.

    Returns:
        The pair. A rank outside of the mesh gets an empty tensor.

    Raises:
        ShardingError: on every rank, if the tensor of rank `src` is not of the spec.

    >>> import torch
    >>> import fshard as fs
    >>> spec = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))
    >>> fs.scatter(torch.arange(4.0), spec).local
    (tensor([0., 1.]), tensor([2., 3.]))
    """
    _check_layout(spec, partition, "fs.scatter")
    layout = spec if isinstance(spec, Spec) else as_mesh(spec, "fs.scatter")
    mesh = layout.mesh if isinstance(layout, Spec) else layout
    if src not in mesh:
        fail("fs.scatter", f"src={src} on {mesh}", f"src must be one of {list(mesh.ranks)}",
             f"src={mesh.ranks[0]}")  # fmt: skip
    transport = current_transport()
    if transport is None:
        spec = _layout_of(tensor, spec, partition, "fs.scatter")
        _check_global(tensor, spec, "fs.scatter")
        return shard(tensor, spec)  # type: ignore[arg-type]
    device = getattr(transport, "device", torch.device("cpu"))
    if transport.rank not in mesh:
        if not isinstance(spec, Spec):  # the shape is not sent to this rank
            p = partition if isinstance(partition, PartitionSpec) else PartitionSpec()
            spec = Spec(mesh, p, shape=(0,) * len(p))
        return Sharded(torch.empty(0, dtype=spec.dtype, device=device), spec)
    x = tensor if transport.rank == src and isinstance(tensor, torch.Tensor) else None
    with labelled(Label("fs.scatter", mesh, arguments=f"({spec}, src={src})")):
        header = sent_header(x, mesh, src, transport, device)
    spec = _sent_layout(header, layout, partition, src)
    requires_grad = header.requires_grad and torch.is_grad_enabled()
    if requires_grad:
        _check_linear(spec, "fs.scatter")
    anchor = torch.zeros((), requires_grad=requires_grad)
    anchor_spec = _spec_on(mesh, PartitionSpec(), (), anchor.dtype)

    def send(anchor: torch.Tensor) -> Sharded:
        local = _Scatter.apply(anchor, x, spec, src, transport, device)  # type: ignore[no-untyped-call]
        return Sharded(local, spec)

    return _typed("fs.scatter", anchor, anchor_spec, spec, send)


def _sent_layout(header: Header, layout: Spec | Mesh, p: PartitionSpec | None, src: int) -> Spec:
    """Return the spec of the tensor that rank `src` sends, or raise if it is not of the layout."""
    shape, dtype, _ = header
    rule = "rank src must hold a tensor"
    if not isinstance(layout, Spec) and shape is not None and dtype is not None:
        layout = _spec_on(layout, partition_of(layout, p, len(shape)), shape, dtype)
    if isinstance(layout, Spec):
        if (shape, dtype) == (layout.shape, layout.dtype):
            return layout
        rule = f"for {layout} it must have shape {layout.shape} and {layout.dtype}"
    given = "no tensor" if shape is None else f"a tensor of shape {shape} and {dtype}"
    fail("fs.scatter", f"on rank {src} {given}", rule, "pass the global tensor on rank src")
