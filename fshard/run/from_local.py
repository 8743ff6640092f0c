"""Pairs from locals that have their layout already: `fs.from_local`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard._util.text import ranks_text
from fshard.layout.mesh import Mesh, as_mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import DTYPE_NAMES, Spec, partition_of
from fshard.layout.validation import check_plain_tensor
from fshard.run.compared_values import value_digest
from fshard.run.execute import check_tuple, run_typed_hook
from fshard.run.transports.base import (
    TRACE_DEPTH,
    Label,
    Transport,
    current_rank,
    current_transport,
    labelled,
    refuse_traced,
    stacked,
)
from fshard.run.transports.divergence_report import rank_text

# -- headers: shape and dtype of a local as a tensor of int64 ---------------------------

_DTYPES = list(DTYPE_NAMES)
_MAX_DIMS = 64  # PyTorch's own


def header_of(x: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return shape, dtype and requires_grad as int64 values, -1 for None."""
    if x is None:
        fields = [-1] * (_MAX_DIMS + 3)
    else:
        code = _DTYPES.index(x.dtype) if x.dtype in _DTYPES else -1
        dims = [*x.shape, *[0] * (_MAX_DIMS - x.ndim)]
        fields = [x.ndim, code, int(x.requires_grad), *dims]
    return torch.tensor(fields, dtype=torch.int64, device=device)


class Header(NamedTuple):
    """Shape and dtype of a tensor, None without one, and whether it requires grad."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    requires_grad: bool


def read_header(header: torch.Tensor) -> Header:
    """Return what a header says."""
    ndim, code, grad, *dims = header.tolist()
    if ndim < 0:
        return Header(None, None, False)
    return Header(tuple(dims[:ndim]), _DTYPES[code] if code >= 0 else None, bool(grad))


def sent_header(
    x: torch.Tensor | None, mesh: Mesh, src: int, transport: Transport, device: torch.device
) -> Header:
    """Send the header of the tensor of rank `src` to all ranks; return what `read_header` reads.

    `x` is None on other ranks, and on rank `src` if it holds no tensor.
    """
    header = header_of(x, device)
    received = transport.all_to_all(
        header.repeat(mesh.size) if transport.rank == src else header[:0],
        [len(header) if transport.rank == src else 0] * mesh.size,
        [len(header) if rank == src else 0 for rank in mesh.ranks],
        tuple(mesh.ranks),
    )()
    return read_header(received)


def from_local(
    local: Any,
    mesh: Mesh,
    partition: PartitionSpec,
    /,
    *,
    sizes: str | Mapping[int, Sequence[int]] = "infer",
    shape: Sequence[int] | None = None,
    check: bool | str = True,
) -> Sharded:
    """Make a pair from locals that have the layout `partition` already; nothing is copied.

    The gradient of a local is that of the pair's local.

    Args:
        local: this rank's tensor, or in a simulation the tuple of all shards.
        mesh: the mesh.
        partition: the layout on the mesh, a `P` or DTensor's placements.
        sizes: the shard sizes of the sharded dims. "infer" gathers every rank's shape; "chunk"
            chunks the global `shape`, which it requires, as `torch.chunk` does; a dict has them by
            dim, for dims that are uneven.
        shape: the global shape, which is computed from the locals if it is not given.
        check: True compares every rank's shape and dtype with the spec, by communication. "values"
            also compares the values of replicas, by digests of a few bytes. "broadcast" replaces
            replicas by the first one's values, as DTensor's `run_check`; they are new leaves for
            autograd. False checks nothing.

    Returns:
        The pair.

    Raises:
        ShardingError: the same on every rank, naming the ranks whose locals do not fit, or with
            `check="values"` whose replicas differ.

    >>> import torch
    >>> import fshard as fs
    >>> fs.from_local((torch.ones(3), torch.ones(1)), fs.Mesh(x=2), fs.P("x")).spec
    f32[4@x:3+1]
    >>> replicas = torch.ones(2), torch.zeros(2)
    >>> fs.from_local(replicas, fs.Mesh(x=2), fs.P(), check="broadcast").local[1]
    tensor([1., 1.])
    """
    mesh, partition = _layout_of(local, mesh, partition, check)
    facts, dtype = _gather_facts(local, mesh, communicate=bool(check) or sizes == "infer")
    shapes = {rank: rank_shape for rank, (rank_shape, _) in facts.items()}
    problems = _dtype_problems(facts) if check else []
    raise_if("fs.from_local", problems)
    if isinstance(local, torch.Tensor) and not facts:
        # A rank outside of the mesh does not receive the shape.
        full_shape = shape or (0,) * max(local.ndim, len(partition))
        shards = None if shape is None or isinstance(sizes, str) else sizes
        spec = Spec(mesh, partition, shape=full_shape, dtype=dtype, sizes=shards, uneven="chunk")
        return Sharded(local.new_empty((0,)), spec)
    spec = _spec_of(shapes, mesh, partition, dtype, sizes, shape)
    if check:
        _check_shapes(shapes, spec, sizes)
    if check == "values":
        _check_replicas(local, spec)
    elif check == "broadcast":
        local = _broadcast_replicas(local, spec)
    if not isinstance(local, torch.Tensor):
        return Sharded(tuple(local), spec)
    result: Sharded = run_typed_hook.call(
        "fs.from_local", local, spec, spec, lambda x: Sharded(x, spec)
    )
    return result


def _layout_of(
    local: Any, mesh: Mesh, partition: PartitionSpec, check: bool | str
) -> tuple[Mesh, PartitionSpec]:
    """Return the mesh and the partition that were given, or raise for the arguments."""
    mesh = as_mesh(mesh, "fs.from_local")
    first = local[0] if isinstance(local, tuple | list) and local else local
    ndim = first.ndim if isinstance(first, torch.Tensor) else None
    partition = partition_of(mesh, partition, ndim)
    if not isinstance(partition, PartitionSpec):
        fail("fs.from_local", f"{mesh!r} and {partition!r}",
             "the arguments must be a local, a Mesh and a P",
             "fs.from_local(local, fs.Mesh(x=2), fs.P('x')), say")  # fmt: skip
    if not isinstance(check, bool) and check not in CHECKS:
        fail(
            "fs.from_local",
            f"check={check!r}",
            'check must be True, False, "values" or "broadcast"',
            'check="values"',
        )
    mesh.check_axes(partition.axes, "fs.from_local")
    return mesh, partition


def _check_shapes(
    shapes: Mapping[int, tuple[int, ...]], spec: Spec, sizes: str | Mapping[int, Sequence[int]]
) -> None:
    """Raise if a rank's local does not have the shape that it has by the spec."""
    fix = (
        "check the mesh or the partition: ranks of one shard must have one shape"
        if sizes == "infer"
        else 'sizes="infer" takes the sizes from the locals'
    )
    raise_if("fs.from_local", [
        Problem(f"{rank_text(spec.mesh, rank)} holds shape {shape}",
                f"for {spec} it must be {spec.local_shape(rank)}",
                fix)
        for rank, shape in shapes.items() if shape != spec.local_shape(rank)
    ])  # fmt: skip


CHECKS = ("values", "broadcast")


def _replica_groups(spec: Spec) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that must hold the same values."""
    p = spec.partition
    distinct = {axis for axes in p.dims for axis in axes} | dict(p.unreduced_kinds).keys()
    return spec.mesh.groups(tuple(axis for axis in spec.mesh.axes if axis not in distinct))


def _check_replicas(local: Any, spec: Spec) -> None:
    """Raise `ShardingError`, the same on every rank, if values of replicas differ."""
    ranks = tuple(spec.mesh.ranks)
    if isinstance(local, torch.Tensor):
        digest, transport = value_digest(local), current_rank(spec.mesh, "fs.from_local")
        with labelled(Label("fs.from_local", spec.mesh)):
            rows = stacked(transport.all_gather(digest, ranks)(), digest.shape).tolist()
    else:
        rows = [value_digest(shard).tolist() for shard in local]
    digests = dict(zip(ranks, rows, strict=True))
    problems = []
    for first, *others in _replica_groups(spec):
        differing = [rank for rank in others if digests[rank] != digests[first]]
        if differing:
            names = ranks_text(sorted(differing))
            problems.append(
                Problem(
                    f"values on {names} that differ from those on rank {first}",
                    f"for {spec} {ranks_text(sorted((first, *others)))} must hold equal values",
                    f'check="broadcast" takes those of rank {first}; a partition that names the '
                    "axis along which they differ keeps them",
                )
            )
    raise_if("fs.from_local", problems, same_on_all_ranks=True)


def _broadcast_replicas(local: Any, spec: Spec) -> Any:
    """Return the local, or all of them, with the values of the first rank of each group."""
    groups = _replica_groups(spec)
    if not isinstance(local, torch.Tensor):
        shards = dict(zip(spec.mesh.ranks, local, strict=True))
        for first, *others in groups:
            for rank in others:
                shards[rank] = _leaf_like(shards[rank], shards[first].detach().clone())
        return tuple(shards.values())
    transport = current_rank(spec.mesh, "fs.from_local")
    group = next(group for group in groups if transport.rank in group)
    count, is_first = local.numel(), transport.rank == group[0]
    send = [count if is_first and rank != transport.rank else 0 for rank in group]
    receive = [count if rank == group[0] and not is_first else 0 for rank in group]
    flat = local.detach().reshape(-1).repeat(len(group) - 1) if is_first else local.new_empty(0)
    with torch.no_grad(), labelled(Label("fs.from_local", spec.mesh)):
        received = transport.all_to_all(flat, send, receive, group)()
    return local if is_first else _leaf_like(local, received.view(local.shape))


def _leaf_like(local: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value as a leaf that requires grad if a local does."""
    return value.requires_grad_(local.requires_grad)


Facts = dict[int, tuple[tuple[int, ...], torch.dtype | None]]


def _gather_facts(local: Any, mesh: Mesh, communicate: bool) -> tuple[Facts, torch.dtype]:
    """Return the known shapes and dtypes by rank, and this rank's dtype."""
    shards = (
        (local,) if isinstance(local, torch.Tensor) else check_tuple(local, mesh, "fs.from_local")
    )
    for shard in shards:
        check_plain_tensor(shard, "fs.from_local")
    if not isinstance(local, torch.Tensor):
        facts = {r: (tuple(x.shape), x.dtype) for r, x in zip(mesh.ranks, local, strict=True)}
        return dict(facts), local[0].dtype
    if TRACE_DEPTH.get():
        refuse_traced(mesh, "fs.from_local")
    transport = current_transport()
    if transport is None:
        fail("fs.from_local", f"one tensor for {mesh}, in a process that is not a rank of it",
             f"outside of ranks a local must be the tuple of {mesh.size} shards",
             "pass the tuple, or call fs.init(mesh) under torchrun")  # fmt: skip
    if transport.rank not in mesh:
        return {}, local.dtype
    if not communicate or mesh.size == 1:
        return {transport.rank: (tuple(local.shape), local.dtype)}, local.dtype
    header = header_of(local, local.device)
    with labelled(Label("fs.from_local", mesh)):
        rows = stacked(transport.all_gather(header, tuple(mesh.ranks))(), header.shape)
    headers = [read_header(row) for row in rows.cpu()]
    return {r: (s or (), d) for r, (s, d, _) in zip(mesh.ranks, headers, strict=True)}, local.dtype


def _dtype_problems(facts: Facts) -> list[Problem]:
    """Return a problem for each local whose dtype or number of dims differs from the first's."""
    if not facts:
        return []
    first, (shape, dtype) = next(iter(facts.items()))
    return [
        Problem(f"rank {rank} holds {len(s)} dims of {d}, rank {first} {len(shape)} of {dtype}",
                "all locals must have one dtype and number of dims", "cast or reshape them alike")
        for rank, (s, d) in facts.items() if d != dtype or len(s) != len(shape)
    ]  # fmt: skip


def _spec_of(
    shapes: Mapping[int, tuple[int, ...]],
    mesh: Mesh,
    partition: PartitionSpec,
    dtype: torch.dtype,
    sizes: str | Mapping[int, Sequence[int]],
    shape: Sequence[int] | None,
) -> Spec:
    """Return the spec of locals with these shapes."""
    if sizes == "chunk":
        if shape is None:
            fail("fs.from_local", 'sizes="chunk" without shape=',
                 "the global shape must be given, since locals alone do not determine it",
                 "shape=(...), or sizes='infer'")  # fmt: skip
        return Spec(mesh, partition, shape=shape, dtype=dtype, uneven="chunk")
    if isinstance(sizes, str) and sizes != "infer":
        fail("fs.from_local", f"sizes={sizes!r}", 'sizes must be "infer", "chunk" or {dim: sizes}',
             'sizes="infer"')  # fmt: skip
    given = {} if isinstance(sizes, str) else {d: tuple(n) for d, n in sizes.items()}
    local = next(iter(shapes.values()))
    _check_entries(partition, local)
    odd = [dim for dim in given if not -len(local) <= dim < len(local)]
    if odd:
        fail("fs.from_local", f"sizes of dim {odd[0]} for locals of {len(local)} dims",
             f"a dim must be in {-len(local)}..{len(local) - 1}", "name a dim it has")  # fmt: skip
    full_shape: list[int] = []
    shards: dict[int, tuple[int, ...]] = {}
    for dim, axes in enumerate(partition.dims + ((),) * (len(local) - len(partition.dims))):
        if dim in given or dim - len(local) in given:
            shards[dim] = given.get(dim, given.get(dim - len(local), ()))
            full_shape.append(sum(shards[dim]))
        elif not axes:
            full_shape.append(local[dim])
        elif isinstance(sizes, str):
            size_of: dict[int, int] = {}
            for rank, rank_shape in shapes.items():
                size_of.setdefault(mesh.index(rank, axes), rank_shape[dim])
            shards[dim] = tuple(size for _, size in sorted(size_of.items()))
            full_shape.append(sum(shards[dim]))
        else:
            full_shape.append(local[dim] * mesh.axis_size(axes))
    if shape is not None and tuple(shape) != tuple(full_shape):
        fail("fs.from_local", f"shape={tuple(shape)}",
             f"the shape of these locals is {tuple(full_shape)}",
             "leave shape out, or check the locals")  # fmt: skip
    return Spec(mesh, partition, shape=full_shape, dtype=dtype, sizes=shards)


def _check_entries(partition: PartitionSpec, local: tuple[int, ...]) -> None:
    if len(partition) > len(local):
        fail("fs.from_local", f"{partition!r} for locals of {len(local)} dims",
             f"a tensor of {len(local)} dims must have at most {len(local)} entries",
             "drop entries, trailing None too")  # fmt: skip
