"""Global tensors to locals and back: shard, scatter, unshard, from_local, reshard."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from fshard._torch.dynamo import skip_frames_below
from fshard._torch.memory import unaliased
from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import LINEAR, PartitionSpec
from fshard.layout.spec import DTYPE_NAMES, Sharded, Spec
from fshard.layout.tree import is_pair
from fshard.plan.redistribute import redistribute
from fshard.program.program import Program
from fshard.program.steps import AllSlice, InvariantToReduced, ReplicatedToUnreduced, Step
from fshard.run.autograd.replicate import common, spread
from fshard.run.execute import check_shards, check_tuple, run_typed_hook
from fshard.run.transports.base import (
    Label,
    Transport,
    backward_phase,
    current_transport,
    labelled,
    notify,
    stacked,
    warn_alone,
)
from fshard.run.transports.divergence_report import rank_text
from fshard.run.transports.reduce_dtypes import neutral_like, over

__all__ = [
    "check_sharding", "from_local", "lay_out", "reshard", "scatter", "shard", "unshard",
]  # fmt: skip

T = TypeVar("T")
PLANS = "it plans with the sizes of its spec: call it outside of what torch.compile traces"


def _absent(spec: Spec, rank: int) -> str | None:
    """The reduction for which a rank holds its neutral element, or None where it has the value."""
    for axis, kind in spec.partition.unreduced_kinds:
        if kind != "avg" and spec.mesh.index(rank, (axis,)) > 0:
            return kind
    return None


def _typed(
    where: str, x: torch.Tensor, src: Spec, dst: Spec, run: Callable[[torch.Tensor], T]
) -> T:
    """`run(x)`, told to whoever tracks types: the local `x` lies as `src`, the result as `dst`."""
    result: T = run_typed_hook.call(where, x, src, dst, run)
    return result


# -- the public functions -------------------------------------------------------------


@lru_cache(maxsize=4096)
def replicated(spec: Spec) -> Spec:
    """The spec of the same tensor, whole and invariant on every rank."""
    return Spec(spec.mesh, PartitionSpec(), shape=spec.shape, dtype=spec.dtype)


@lru_cache(maxsize=4096)
def _laying_out(spec: Spec) -> Program:
    """The local steps that make of a whole tensor one rank's part, addends on coordinate 0.

    Written down, not planned: there are other ways to cut a tensor into addends.
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


@lru_cache(maxsize=4096)
def _putting_together(spec: Spec) -> Program:
    return redistribute(spec, replicated(spec))


def _read_pair(pair: object, where: str) -> tuple[Any, Spec]:
    if not isinstance(pair, tuple) or not is_pair(pair):
        fail(where, f"a {type(pair).__name__}", "a pair is (local, spec)",
             "fs.shard makes one of a global tensor, fs.from_local of locals")  # fmt: skip
    local, spec = pair
    return local, spec


def _check_global(x: object, spec: Spec, where: str) -> None:
    if not isinstance(spec, Spec):
        fail(where, f"{spec!r} as the spec", "a spec has a mesh, a shape and a dtype too",
             "fs.Spec(mesh, P(...), shape=x.shape, dtype=x.dtype)")  # fmt: skip
    if not isinstance(x, torch.Tensor):
        fail(where, f"a {type(x).__name__}", "a global tensor is a torch.Tensor",
             "torch.as_tensor(value)")  # fmt: skip
    if tuple(x.shape) != spec.shape or x.dtype != spec.dtype:
        fail(where, f"a tensor of shape {tuple(x.shape)} and {x.dtype} for {spec}",
             f"the spec says shape {spec.shape} and {spec.dtype}",
             f"fs.Spec(mesh, {spec.partition!r}, shape={tuple(x.shape)}, "
             f"dtype={x.dtype})")  # fmt: skip


def _check_linear(spec: Spec, where: str) -> None:
    kinds = [kind for _, kind in spec.partition.unreduced_kinds if kind not in LINEAR]
    if kinds:
        fail(where, f"a tensor that requires grad, as {spec}",
             f"a tensor that is unreduced by {kinds[0]} has no gradient of its own, only sums and "
             "averages are linear", "detach() it, or shard it as P() and reduce later")  # fmt: skip


@skip_frames_below(PLANS)
def shard(global_tensor: torch.Tensor, spec: Spec, /) -> Sharded:
    """A global tensor that this process holds whole, as a pair: slices, no traffic.

    In a simulation the local is the tuple of all shards, each in its own memory. Unreduced
    axes get the value on coordinate 0 and the neutral element elsewhere. Differentiable.

    >>> from fshard.layout.mesh import Mesh
    >>> spec = Spec(Mesh(x=2), PartitionSpec("x"), shape=(4,))
    >>> shard(torch.arange(4.0), spec).local
    (tensor([0., 1.]), tensor([2., 3.]))
    """
    if current_transport() is None:
        return Sharded(lay_out(global_tensor, spec), spec)
    check_sharding(global_tensor, spec)
    cut = lambda x: Sharded(unaliased(_laying_out(spec)(x), [x]), spec)  # noqa: E731
    return _typed("fs.shard", global_tensor, replicated(spec), spec, cut)


def check_sharding(x: torch.Tensor, spec: Spec) -> None:
    """Raise `ShardingError` unless `x` is a whole tensor of `spec`, with a gradient if it wants."""
    _check_global(x, spec, "fs.shard")
    if x.requires_grad and torch.is_grad_enabled():
        _check_linear(spec, "fs.shard")


def lay_out(x: torch.Tensor, spec: Spec) -> tuple[torch.Tensor, ...]:
    """The shards of a global tensor on all ranks of a simulated mesh, in this process."""
    warn_alone()
    check_sharding(x, spec)
    shards = _laying_out(spec)(spread(x, spec.mesh.size))
    return tuple(unaliased(each, [x]) for each in shards)


@skip_frames_below(PLANS)
def unshard(pair: tuple[Any, Spec], /) -> torch.Tensor:
    """The global tensor of a pair, on every rank: gathers and reduces. Differentiable.

    >>> from fshard.layout.mesh import Mesh
    >>> spec = Spec(Mesh(x=2), PartitionSpec(unreduced={"x"}), shape=(2,))
    >>> unshard(((torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])), spec))
    tensor([11., 22.])
    """
    local, spec = _read_pair(pair, "fs.unshard")
    prog = _putting_together(spec)
    if isinstance(local, torch.Tensor):
        gather = lambda x: unaliased(prog(x), [x])  # noqa: E731
        return _typed("fs.unshard", local, spec, prog.dst, gather)
    shards = check_shards(local, spec, "fs.unshard")
    whole = common(prog(shards))
    return unaliased(whole, shards)


@skip_frames_below(PLANS)
def reshard(pair: tuple[Any, Spec], to: Spec | PartitionSpec, /, **options: Any) -> Sharded:
    """A pair in another layout: plans with `fs.redistribute` (its options) and runs.

    A dim that the new partition does not divide is chunked; give a `Spec` for other sizes, or
    on another mesh: what ranks outside of one of the two give and get is what programs say.
    """
    local, spec = _read_pair(pair, "fs.reshard")
    if not isinstance(to, Spec | PartitionSpec):
        fail("fs.reshard", f"{to!r}", "the target is a Spec or a P", "fs.P('x'), say")  # fmt: skip
    target = to if isinstance(to, Spec) else spec.replace(partition=to, uneven="chunk")
    prog = redistribute(spec, target, **options)
    if local is None:
        return Sharded(prog(local), target)
    if isinstance(local, torch.Tensor):
        move = lambda x: Sharded(unaliased(prog(x), [x]), target)  # noqa: E731
        return _typed("fs.reshard", local, spec, target, move)
    return Sharded(tuple(unaliased(y, local) for y in prog(local)), target)


# -- scatter --------------------------------------------------------------------------


class _Scatter(torch.autograd.Function):
    """One rank's tensor to everyone's shards; `anchor` ties all ranks into the graph."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, x: torch.Tensor | None, spec: Spec, src: int,
        transport: Transport, device: torch.device,
    ) -> torch.Tensor:  # fmt: skip
        ctx.spec, ctx.given = spec, None if x is None else x.device
        return _send_shards(x, spec, src, transport, device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # Every rank helps to assemble the gradient; only the source has a use for it, so
        # that the others would not come to a second derivative.
        dual = ctx.spec.dual
        with backward_phase():
            whole = redistribute(dual, replicated(dual))(grad)
        return None, None if ctx.given is None else whole.to(ctx.given), None, None, None, None


def _send_shards(
    x: torch.Tensor | None, spec: Spec, src: int, transport: Transport, device: torch.device
) -> torch.Tensor:
    """Send each rank the shard it holds, and those that hold a neutral element nothing."""
    group = tuple(spec.mesh.ranks)
    shape = spec.local_shape(transport.rank)
    wanted = [0 if _absent(spec, rank) else math.prod(spec.local_shape(rank)) for rank in group]
    here = group.index(transport.rank)
    receive = [wanted[here] if rank == src else 0 for rank in group]
    if x is None:
        flat, send = torch.empty(0, dtype=spec.dtype, device=device), [0] * len(group)
    else:
        parts = [x[spec.index(rank)].reshape(-1)[:n] for rank, n in zip(group, wanted, strict=True)]
        flat, send = torch.cat(parts).to(device), wanted
    sent = sum(n for at, n in enumerate(send) if at != here) * spec.dtype.itemsize
    notify("scatter", spec.mesh.axes, sent, transport.rank)
    with labelled(Label("fs.scatter", spec.mesh)):
        got = transport.all_to_all(flat, send, receive, group)()
    kind = _absent(spec, transport.rank)
    if kind is not None:
        return neutral_like(got, kind, shape)
    shares = math.prod(spec.mesh.shape[a] for a, k in spec.partition.reduced_kinds if k == "avg")
    return over(got.view(shape), shares)


def scatter(tensor: torch.Tensor | None, spec: Spec, /, *, src: int = 0) -> Sharded:
    """A global tensor that only rank `src` holds, as a pair: each rank is sent only its shard.

    Other ranks give `None` (what they give is not looked at). In a simulation the one process
    is every rank, and has the tensor. Differentiable: the gradient is on rank `src`, which
    alone has one, so that under `torchrun` there is no second derivative.

    Raises `ShardingError`, on every rank, where the tensor of rank `src` is not of `spec`.
    """
    if src not in spec.mesh:
        fail("fs.scatter", f"src={src} on {spec.mesh}", f"src is one of {list(spec.mesh.ranks)}",
             f"src={spec.mesh.ranks[0]}")  # fmt: skip
    transport = current_transport()
    if transport is None:
        _check_global(tensor, spec, "fs.scatter")
        return shard(tensor, spec)  # type: ignore[arg-type]
    device = getattr(transport, "device", torch.device("cpu"))
    if transport.rank not in spec.mesh:
        return Sharded(torch.empty(0, dtype=spec.dtype, device=device), spec)
    mine = tensor if transport.rank == src and isinstance(tensor, torch.Tensor) else None
    facts = _header(mine, device)
    with labelled(Label("fs.scatter", spec.mesh)):
        told = transport.all_to_all(
            facts.repeat(spec.mesh.size) if transport.rank == src else facts[:0],
            [len(facts) if transport.rank == src else 0] * spec.mesh.size,
            [len(facts) if rank == src else 0 for rank in spec.mesh.ranks],
            tuple(spec.mesh.ranks),
        )()
    shape, dtype, wants_grad = _read_header(told)
    if shape != spec.shape or dtype != spec.dtype:
        given = "no tensor" if shape is None else f"a tensor of shape {shape} and {dtype}"
        fail("fs.scatter", f"on rank {src} {given}", f"{spec} has shape {spec.shape} and "
             f"{spec.dtype}", "give rank src the whole tensor of the spec")  # fmt: skip
    if wants_grad and torch.is_grad_enabled():
        _check_linear(spec, "fs.scatter")
    anchor = torch.zeros((), requires_grad=wants_grad and torch.is_grad_enabled())
    one = Spec(spec.mesh, PartitionSpec(), shape=(), dtype=anchor.dtype)

    def send(anchor: torch.Tensor) -> Sharded:
        local = _Scatter.apply(anchor, mine, spec, src, transport, device)  # type: ignore[no-untyped-call]
        return Sharded(local, spec)

    return _typed("fs.scatter", anchor, one, spec, send)


# -- headers: shape and dtype of a local, as numbers that travel ------------------------

_DTYPES = list(DTYPE_NAMES)
_MAX_DIMS = 64  # PyTorch's own


def _header(x: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if x is None:
        numbers = [-1] * (_MAX_DIMS + 3)
    else:
        code = _DTYPES.index(x.dtype) if x.dtype in _DTYPES else -1
        dims = [*x.shape, *[0] * (_MAX_DIMS - x.ndim)]
        numbers = [x.ndim, code, int(x.requires_grad), *dims]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _read_header(
    header: torch.Tensor,
) -> tuple[tuple[int, ...] | None, torch.dtype | None, bool]:
    ndim, code, grad, *dims = header.tolist()
    if ndim < 0:
        return None, None, False
    return tuple(dims[:ndim]), _DTYPES[code] if code >= 0 else None, bool(grad)


# -- from_local -----------------------------------------------------------------------


def from_local(
    local: Any,
    mesh: Mesh,
    partition: PartitionSpec,
    /,
    *,
    sizes: str | Mapping[int, Sequence[int]] = "infer",
    shape: Sequence[int] | None = None,
    check: bool = True,
) -> Sharded:
    """A pair from locals that already lie as `partition` says; the tensors are not copied.

    `sizes="infer"` asks every rank for its shape over the transport; `"chunk"` cuts the global
    `shape` (which it needs) as `torch.chunk` does; a mapping gives the shard sizes of the
    uneven dims. `check` compares every rank's shape and dtype with the result.

    Raises `ShardingError`, the same on every rank and with the ranks named, for locals that do
    not fit.

    >>> from fshard.layout.mesh import Mesh
    >>> from_local((torch.ones(3), torch.ones(1)), Mesh(x=2), PartitionSpec("x")).spec
    f32[4@x:3+1]
    """
    if not isinstance(mesh, Mesh) or not isinstance(partition, PartitionSpec):
        fail("fs.from_local", f"{mesh!r} and {partition!r}", "a mesh and a P come after the local",
             "fs.from_local(local, fs.Mesh(x=2), fs.P('x')), say")  # fmt: skip
    mesh.check_axes(partition.axes, "fs.from_local")
    everyone, dtype = _everyone(local, mesh, communicate=check or sizes == "infer")
    ranks = list(everyone)
    shapes = {rank: each[0] for rank, each in everyone.items()}
    problems = _unlike(everyone) if check else []
    raise_if("fs.from_local", problems)
    if isinstance(local, torch.Tensor) and not ranks:
        # Outside of the mesh nobody tells the shape.
        empty = (0,) * max(local.ndim, len(partition))
        whole = shape or empty
        cut = None if shape is None or isinstance(sizes, str) else sizes
        spec = Spec(mesh, partition, shape=whole, dtype=dtype, sizes=cut, uneven="chunk")
        return Sharded(local.new_empty((0,)), spec)
    spec = _spec_of(shapes, mesh, partition, dtype, sizes, shape)
    if check:
        fix = ("the ranks of one shard hold one shape: check the mesh, or the partition"
               if sizes == "infer" else 'sizes="infer" reads the sizes off the locals')  # fmt: skip
        raise_if("fs.from_local", [
            Problem(f"{rank_text(mesh, rank)} holds shape {shapes[rank]}",
                    f"{spec} has there shape {spec.local_shape(rank)}",
                    fix)
            for rank in ranks if shapes[rank] != spec.local_shape(rank)
        ])  # fmt: skip
    if not isinstance(local, torch.Tensor):
        return Sharded(tuple(local), spec)
    return _typed("fs.from_local", local, spec, spec, lambda x: Sharded(x, spec))


Facts = dict[int, tuple[tuple[int, ...], torch.dtype | None]]


def _everyone(local: Any, mesh: Mesh, communicate: bool) -> tuple[Facts, torch.dtype]:
    """Shape and dtype of every rank's local, as far as they are known."""
    if not isinstance(local, torch.Tensor):
        check_tuple(local, mesh, "fs.from_local")
        facts = {r: (tuple(x.shape), x.dtype) for r, x in zip(mesh.ranks, local, strict=True)}
        return dict(facts), local[0].dtype
    transport = current_transport()
    if transport is None:
        fail("fs.from_local", f"one tensor for {mesh}, in a process that is no rank of it",
             f"outside of ranks a local is the tuple of {mesh.size} shards",
             "give the tuple, or call fs.init(mesh) under torchrun")  # fmt: skip
    if transport.rank not in mesh:
        return {}, local.dtype
    if not communicate or mesh.size == 1:
        return {transport.rank: (tuple(local.shape), local.dtype)}, local.dtype
    header = _header(local, local.device)
    with labelled(Label("fs.from_local", mesh)):
        rows = stacked(transport.all_gather(header, tuple(mesh.ranks))(), header.shape)
    read = [_read_header(row) for row in rows.cpu()]
    return {r: (s or (), d) for r, (s, d, _) in zip(mesh.ranks, read, strict=True)}, local.dtype


def _unlike(everyone: Facts) -> list[Problem]:
    """Locals that differ in dtype or in their number of dims from the first rank's."""
    if not everyone:
        return []
    first, (shape, dtype) = next(iter(everyone.items()))
    return [
        Problem(f"rank {rank} holds {len(s)} dims of {d}, rank {first} {len(shape)} of {dtype}",
                "all locals have one dtype and number of dims", "cast or reshape them alike")
        for rank, (s, d) in everyone.items() if d != dtype or len(s) != len(shape)
    ]  # fmt: skip


def _spec_of(
    shapes: Mapping[int, tuple[int, ...]],
    mesh: Mesh,
    partition: PartitionSpec,
    dtype: torch.dtype,
    sizes: str | Mapping[int, Sequence[int]],
    shape: Sequence[int] | None,
) -> Spec:
    """The spec of locals of the given shapes."""
    if sizes == "chunk":
        if shape is None:
            fail("fs.from_local", 'sizes="chunk" without shape=',
                 "chunks are cut from the global shape, which locals alone do not tell",
                 "shape=(...), or sizes='infer'")  # fmt: skip
        return Spec(mesh, partition, shape=shape, dtype=dtype, uneven="chunk")
    if isinstance(sizes, str) and sizes != "infer":
        fail("fs.from_local", f"sizes={sizes!r}", 'sizes is "infer", "chunk" or {dim: sizes}',
             'sizes="infer"')  # fmt: skip
    given = {} if isinstance(sizes, str) else {d: tuple(n) for d, n in sizes.items()}
    local = next(iter(shapes.values()))
    _check_entries(partition, local)
    odd = [dim for dim in given if not -len(local) <= dim < len(local)]
    if odd:
        fail("fs.from_local", f"sizes of dim {odd[0]} for locals of {len(local)} dims",
             f"a dim must be in {-len(local)}..{len(local) - 1}", "name a dim it has")  # fmt: skip
    found: list[int] = []
    cut: dict[int, tuple[int, ...]] = {}
    for dim, axes in enumerate(partition.dims + ((),) * (len(local) - len(partition.dims))):
        if dim in given or dim - len(local) in given:
            cut[dim] = given.get(dim, given.get(dim - len(local), ()))
            found.append(sum(cut[dim]))
        elif not axes:
            found.append(local[dim])
        elif isinstance(sizes, str):
            seen: dict[int, int] = {}
            for rank, each in shapes.items():
                seen.setdefault(mesh.index(rank, axes), each[dim])
            cut[dim] = tuple(seen[place] for place in sorted(seen))
            found.append(sum(cut[dim]))
        else:
            found.append(local[dim] * mesh.axis_size(axes))
    if shape is not None and tuple(shape) != tuple(found):
        fail("fs.from_local", f"shape={tuple(shape)}", f"the locals make up {tuple(found)}",
             "leave shape out, or check the locals")  # fmt: skip
    return Spec(mesh, partition, shape=found, dtype=dtype, sizes=cut)


def _check_entries(partition: PartitionSpec, local: tuple[int, ...]) -> None:
    if len(partition) > len(local):
        fail("fs.from_local", f"{partition!r} for locals of {len(local)} dims",
             f"a tensor of {len(local)} dims must have at most {len(local)} entries",
             "drop entries, trailing None too")  # fmt: skip
