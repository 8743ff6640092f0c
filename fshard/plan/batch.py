"""`Batch`: the programs of a whole tree as one value, and when which of them communicate.

Leaves go in rounds: whoever comes to a collective waits until those that will come to the same
one have come as well, and they are launched as one. Which leaves that are follows from specs
alone, so that every rank finds the same. After the bucketing of gradients in PyTorch's DDP
(Li et al., arXiv 2006.15704), for every kind of collective instead of the all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from fshard import hooks
from fshard.errors import Problem, ShardingError, raise_if
from fshard.mesh import Mesh
from fshard.program.cost import Cost, max_local_nbytes, step_axes, traffic
from fshard.program.infer import unreduced_kind
from fshard.program.program import Program, as_topology, endpoint_problems, wire_specs
from fshard.program.steps import AllGather, AllReduce, ReduceScatter, Step
from fshard.program.topology import Topology
from fshard.spec import Spec
from fshard.tree import TreeDef, flatten, matching, paths, unflatten

__all__ = ["BUCKET", "Batch", "Launch", "plan_batch"]

BUCKET = 2**25
"""Most bytes of one launch, if nothing else is said: 32 MiB.

They take 0.1 ms over NVLink and 0.7 ms over InfiniBand, a launch some microseconds: more would
save next to nothing, and costs memory and a copy.
"""

Plan = Callable[[Spec, Spec, Topology | str], Program]
Steps = tuple[tuple[int, int], ...]
"""Steps of several leaves: the leaf, and the place of the step in its program."""


class Launch(NamedTuple):
    """Collectives of several leaves that go out as one.

    `op` is what runs on the wire: all that is uneven or moves from rank to rank is one
    "all_to_all", else all-gathers, all-reduces and reduce-scatters.
    """

    op: str
    axes: tuple[str, ...]
    steps: Steps


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Batch:
    """Programs of the leaves of a tree, run as one: collectives of one kind are one launch.

    `batch(tree)` runs it on a tree of locals: of each leaf a tensor under `torchrun`, a tuple of
    all shards in a simulation, and `None` where the tree of specs has `None`. The result is
    differentiable as one operation, whose backward runs `batch.T`: a leaf requires grad on every
    rank or on none, and what requires none is not sent back.

    Leaves of one kind go in buckets. What a bucket sends or receives on the busiest rank in a
    round of launches is at most `bucket_bytes` (32 MiB by default, `None` for all in one); a leaf
    is not cut, a larger one goes alone. At most two buckets are under way at a time: beside the
    locals that go in and those that come out, a rank holds at most 6 `bucket_bytes`.

    >>> from fshard.mesh import Mesh
    >>> from fshard.partition import PartitionSpec as P
    >>> from fshard.plan.redistribute import redistribute
    >>> mesh = Mesh(dp=2)
    >>> src = {name: Spec(mesh, P("dp"), shape=(n,)) for name, n in (("b", 4), ("w", 8))}
    >>> dst = {name: spec.replace(partition=P()) for name, spec in src.items()}
    >>> batch = redistribute(src, dst)
    >>> print(batch)
    2 leaves, 1 launch, 24 B sent
      ['b']  f32[4@dp] -> f32[4]  all_gather(dp, dim 0)
      ['w']  f32[8@dp] -> f32[8]  all_gather(dp, dim 0)
      in one launch: all_gather of 2 over dp
    >>> import torch
    >>> batch({"b": (torch.ones(2),) * 2, "w": (torch.ones(4),) * 2})["b"]
    (tensor([1., 1., 1., 1.]), tensor([1., 1., 1., 1.]))
    """

    leaves: tuple[Program | None, ...]
    structure: TreeDef
    bucket_bytes: int | None
    _hash: int = field(compare=False)

    def __init__(self, programs: Any, *, bucket_bytes: int | None = BUCKET) -> None:
        leaves, structure = flatten(programs)
        problems = [
            Problem(
                f"{path} is a {type(leaf).__name__}",
                "the leaves of the tree are Programs, or None",
                "fs.redistribute(tree_of_specs, tree_of_specs) plans them",
            )
            for path, leaf in zip(paths(programs, "programs"), leaves, strict=True)
            if leaf is not None and not isinstance(leaf, Program)
        ]
        raise_if("fs.Batch", [*problems, *_bucket_problems(bucket_bytes)])
        _fill(self, tuple(leaves), structure, bucket_bytes)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.programs, self.bucket_bytes)

    # -- what it is -------------------------------------------------------------------

    @property
    def programs(self) -> Any:
        """The tree of programs."""
        return unflatten(self.structure, self.leaves)

    @property
    def src(self) -> Any:
        """The tree of the specs that go in."""
        return unflatten(self.structure, [leaf and leaf.src for leaf in self.leaves])

    @property
    def dst(self) -> Any:
        """The tree of the specs that come out."""
        return unflatten(self.structure, [leaf and leaf.dst for leaf in self.leaves])

    @property
    def T(self) -> Batch:  # noqa: N802 - the mathematical name
        """The adjoint, leaf by leaf: the backward pass of this batch."""
        return _transpose(self)

    @property
    def is_linear(self) -> bool:
        """Whether a transpose exists: that of every leaf does."""
        return all(leaf.is_linear for leaf in self.leaves if leaf is not None)

    @property
    def is_local(self) -> bool:
        """Whether it runs without communication."""
        return not self.launches

    def only(self, wanted: Sequence[bool]) -> Batch:
        """The batch of a tuple of some of the leaves, those of which it is `wanted`."""
        return _only(self, tuple(wanted))

    # -- when what goes ---------------------------------------------------------------

    @property
    def buckets(self) -> tuple[tuple[int, ...], ...]:
        """The leaves that are under way together, by number, in the order in which they start."""
        return _buckets(self)

    def rounds(self, bucket: tuple[int, ...]) -> tuple[Steps, ...]:
        """In each round the collectives of a bucket that are launched in it."""
        return _rounds(tuple(_kinds(self.leaves[at]) for at in bucket), bucket)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Everything that is launched, in order."""
        return _launches(self)

    def cost(self, topology: Topology | None = None, /) -> Cost:
        """Time, bytes and memory on a topology, a single node by default.

        A launch and its latency count once for all that goes in it. Bytes are the sums of what
        each leaf's busiest rank sends and receives: no rank has more, owners that take turns
        have less. The memory is that of the locals of all leaves, in the largest layout of
        those that are under way.
        """
        return _cost(self, as_topology("Batch.cost", topology))

    # -- running ----------------------------------------------------------------------

    def __call__(self, locals: Any, *, async_op: bool = False) -> Any:  # noqa: A002
        """Run on a tree of what this process holds of tensors of `src`: a tree of locals of `dst`.

        Results may share memory with `locals` where no step changes them, and parts of one
        launch with each other's memory, never the same elements. With `async_op` everything is
        launched, and what can only be launched after it is when `.wait()` on the `Pending`
        gives the result.
        """
        return hooks.call("run_batch", self, locals, async_op=async_op)

    # -- text -------------------------------------------------------------------------

    def __str__(self) -> str:
        launches = self.launches
        sent = f"{self.cost().bytes_sent:,} B sent"
        head = [_count(len(self.leaves), "leaf", "leaves"), _count(len(launches), "launch"), sent]
        rows = [
            (path, f"{prog.src} -> {prog.dst}", "; ".join(map(str, prog.steps)) or "nothing to do")
            for path, prog in self._rows()
        ]
        widths = [max((len(row[c]) for row in rows), default=0) for c in range(2)]
        lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
        lines += [
            f"  in one launch: {each.op} of {len(each.steps)} over {', '.join(each.axes)}"
            for each in launches
        ]
        return "\n".join([", ".join(head), *lines])

    __repr__ = __str__

    def _rows(self) -> Iterator[tuple[str, Program]]:
        """Where each program is, by the first leaf that has it, and how many more."""
        names = paths(self.programs, "")
        seen = Counter(self.leaves)
        for at, leaf in enumerate(self.leaves):
            if leaf is not None and seen[leaf]:
                yield _among_others(names[at] or "leaf", seen[leaf]), leaf
                seen[leaf] = 0

    def explain(self, topology: Topology | None = None) -> Any:
        """Tables of the leaves and of the launches on a topology; prints anywhere."""
        return hooks.call("explain_batch", self, as_topology("Batch.explain", topology))

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        bundle: dict[str, str] = hooks.call("mimebundle", self)
        return bundle


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 'es'}"


def _fill(
    batch: Batch, leaves: tuple[Program | None, ...], structure: TreeDef, bucket_bytes: int | None
) -> None:
    set_ = object.__setattr__
    set_(batch, "leaves", leaves)
    set_(batch, "structure", structure)
    set_(batch, "bucket_bytes", bucket_bytes)
    set_(batch, "_hash", hash((leaves, structure, bucket_bytes)))


def _like(batch: Batch, leaves: Sequence[Program | None], structure: TreeDef) -> Batch:
    made = object.__new__(Batch)
    _fill(made, tuple(leaves), structure, batch.bucket_bytes)
    return made


def _rebuild(programs: Any, bucket_bytes: int | None) -> Batch:
    return Batch(programs, bucket_bytes=bucket_bytes)


@lru_cache(maxsize=256)
def _transpose(batch: Batch) -> Batch:
    return _like(batch, [leaf and leaf.T for leaf in batch.leaves], batch.structure)


@lru_cache(maxsize=1024)
def _only(batch: Batch, wanted: tuple[bool, ...]) -> Batch:
    leaves = tuple(leaf for leaf, keep in zip(batch.leaves, wanted, strict=True) if keep)
    return _like(batch, leaves, flatten(leaves)[1])


# -- planning -------------------------------------------------------------------------


def plan_batch(
    src: Any, dst: Any, plan: Plan, cost: Topology | str, bucket_bytes: int | None
) -> Batch:
    """The batch from a tree of specs to another: each leaf planned with its share of a launch.

    `plan` makes the program of one leaf. Where launches cost time, two batches are planned, one
    in which leaves think of launches as shared by all that move, one in which each pays for
    its own; the cheaper one is the answer, so that a batch never costs more than its leaves.

    Raises `ShardingError` where the trees are of different structures, and all that `plan`
    raises, with the path of the leaf.
    """
    where = "fs.redistribute"
    raise_if(where, _bucket_problems(bucket_bytes))
    sources, structure = flatten(src)
    targets = matching(src, dst, ("src", "dst"), where)
    pairs = list(zip(sources, targets, strict=True))
    names = paths(src, "")
    moving = sum(a != b for a, b in pairs)

    def planned(cost: Topology | str) -> Batch:
        leaves = _plan_leaves(pairs, names, lambda a, b: plan(a, b, cost))
        made = object.__new__(Batch)
        _fill(made, leaves, structure, bucket_bytes)
        return made

    alone = planned(cost)
    if isinstance(cost, str) or moving < 2:
        return alone
    shared = planned(replace(cost, launch=cost.launch / moving))
    return min(alone, shared, key=lambda batch: batch.cost(cost).time)


def _plan_leaves(
    pairs: Sequence[tuple[Any, Any]], names: Sequence[str], plan: Callable[[Any, Any], Program]
) -> tuple[Program | None, ...]:
    """The programs of all leaves; every leaf that has none is named."""
    leaves: list[Program | None] = []
    problems: dict[Problem, list[str]] = {}
    for (a, b), name in zip(pairs, names, strict=True):
        found: Sequence[Problem] = ()
        if a is None and b is None:
            leaves.append(None)
        elif not isinstance(a, Spec) or not isinstance(b, Spec):
            found = endpoint_problems("redistribute", a, b)
        else:
            try:
                leaves.append(plan(a, b))
            except ShardingError as error:
                found = error.problems
        for each in found:
            problems.setdefault(each, []).append(name)
    raise_if("fs.redistribute", [_at(names, each) for each, names in problems.items()])
    return tuple(leaves)


def _at(names: Sequence[str], problem: Problem) -> Problem:
    """A problem of the leaves of these paths."""
    if not names[0]:
        return problem
    return replace(problem, given=f"at {_among_others(names[0], len(names))}: {problem.given}")


def _among_others(name: str, n: int) -> str:
    return name if n == 1 else f"{name} and {n - 1} more"


def _bucket_problems(bucket_bytes: object) -> list[Problem]:
    whole = isinstance(bucket_bytes, int) and not isinstance(bucket_bytes, bool)
    if bucket_bytes is None or (whole and bucket_bytes > 0):  # type: ignore[operator]
        return []
    return [
        Problem(
            f"bucket_bytes={bucket_bytes!r}",
            "a bucket has at least 1 byte, or no bound",
            "bucket_bytes=2**25, or None",
        )
    ]


# -- kinds, buckets, rounds -----------------------------------------------------------


class Kind(NamedTuple):
    """What collectives have in common that can go out as one.

    `among` are the groups of ranks: the devices, and size and stride of each axis. `name` and
    `axes` are only told.
    """

    op: str
    among: Hashable
    reduction: str
    dtype: Hashable


@lru_cache(maxsize=16384)
def _kinds(prog: Program | None) -> tuple[tuple[int, Kind], ...]:
    """The steps of a program that communicate, by their place, and their kinds."""
    if prog is None:
        return ()
    specs = wire_specs(prog)
    rows = zip(prog.steps, specs, specs[1:], strict=False)
    return tuple((at, _kind(*row)) for at, row in enumerate(rows) if traffic(*row).launches)


def _kind(step: Step, src: Spec, dst: Spec) -> Kind:
    op, reduction = "all_to_all", ""
    match step:
        case AllGather(axes, dim) if _is_even(src, dim, src.mesh.axis_size(axes)):
            op = "all_gather"
        case AllReduce(axes):
            op, reduction = "all_reduce", unreduced_kind(step, src, axes)
        case ReduceScatter(axes, dim) if _is_even(dst, dim, src.mesh.axis_size(axes)):
            op, reduction = "reduce_scatter", unreduced_kind(step, src, axes)
        case _:
            pass
    among: Hashable = (src.mesh.devices, dst.mesh.devices)
    if src.mesh == dst.mesh:
        among = _among(src.mesh, step_axes(step, src, dst))
    return Kind(op, among, "sum" if reduction == "avg" else reduction, src.dtype)


def _is_even(spec: Spec, dim: int, n: int) -> bool:
    """Whether the shards of a dim are of one size in every group of `n`, those of minor axes."""
    sizes = spec.sizes[dim] or ()
    return all(len({*sizes[at : at + n]}) == 1 for at in range(0, len(sizes), n))


@lru_cache(maxsize=4096)
def _among(mesh: Mesh, axes: tuple[str, ...]) -> Hashable:
    """The groups of ranks along axes, whatever the axes are called."""
    grid: list[tuple[int, int]] = []
    stride = dict(zip(mesh.axes, _strides(mesh.sizes), strict=True))
    for axis in axes:
        size, step = mesh.shape[axis], stride[axis]
        if grid and grid[-1][1] == size * step:
            grid[-1] = grid[-1][0] * size, step
        else:
            grid.append((size, step))
    return mesh.devices, tuple(grid)


def _strides(sizes: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return strides[::-1]


@lru_cache(maxsize=16384)
def _weight(prog: Program) -> int:
    """Most bytes that the busiest rank gives to a launch of this program, or gets from one."""
    specs = wire_specs(prog)
    return max(
        (max(map(max_local_nbytes, specs[at : at + 2])) for at, _ in _kinds(prog)), default=0
    )


@lru_cache(maxsize=256)
def _buckets(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """Leaves of the same kinds side by side, filled in order."""
    alike: dict[Hashable, list[int]] = {}
    for at, leaf in enumerate(batch.leaves):
        if leaf is not None:
            alike.setdefault(tuple(kind for _, kind in _kinds(leaf)), []).append(at)
    limit = batch.bucket_bytes
    buckets: list[list[int]] = []
    room = 0
    for at in (at for places in alike.values() for at in places):
        leaf = batch.leaves[at]
        assert leaf is not None
        weight = _weight(leaf)
        if not buckets or (limit is not None and weight > room):
            buckets.append([])
            room = limit or 0
        buckets[-1].append(at)
        room = max(0, room - weight)
    return tuple(map(tuple, buckets))


@lru_cache(maxsize=1024)
def _rounds(
    kinds: tuple[tuple[tuple[int, Kind], ...], ...], bucket: tuple[int, ...]
) -> tuple[Steps, ...]:
    """Each round, the leaves whose next collective no other leaf will come to later.

    Where every one is waited for by another, the one that most leaves have come to goes.
    """
    todo = {at: list(own) for at, own in zip(bucket, kinds, strict=True) if own}
    rounds: list[Steps] = []
    while todo:
        first = Counter(own[0][1] for own in todo.values())
        later = {kind for own in todo.values() for _, kind in own[1:]}
        ready = first.keys() - later or {first.most_common(1)[0][0]}
        going = [at for at, own in todo.items() if own[0][1] in ready]
        rounds.append(tuple((at, todo[at].pop(0)[0]) for at in going))
        todo = {at: own for at, own in todo.items() if own}
    return tuple(rounds)


@lru_cache(maxsize=256)
def _launches(batch: Batch) -> tuple[Launch, ...]:
    launches: list[Launch] = []
    for bucket in batch.buckets:
        for going in batch.rounds(bucket):
            by_kind: dict[Kind, list[tuple[int, int]]] = {}
            for at, place in going:
                by_kind.setdefault(dict(_kinds(batch.leaves[at]))[place], []).append((at, place))
            for kind, steps in by_kind.items():
                leaf = batch.leaves[steps[0][0]]
                assert leaf is not None
                launches.append(Launch(kind.op, _axes(leaf, steps[0][1]), tuple(steps)))
    return tuple(launches)


def _axes(prog: Program, place: int) -> tuple[str, ...]:
    return step_axes(prog.steps[place], prog.specs[place], prog.specs[place + 1])


# -- cost -----------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _cost(batch: Batch, topology: Topology) -> Cost:
    leaves = [leaf for leaf in batch.leaves if leaf is not None]
    each = [leaf.cost(topology) for leaf in leaves]
    return Cost(
        time=sum(cost.time for cost in each) - _shared(batch, topology),
        bytes_sent=sum(cost.bytes_sent for cost in each),
        bytes_received=sum(cost.bytes_received for cost in each),
        peak_memory=_peak(batch, topology),
        launches=len(batch.launches),
    )


def _shared(batch: Batch, topology: Topology) -> float:
    """Seconds that all but one of a launch do not pay: the launch and its latency."""
    saved = 0.0
    for launch in batch.launches:
        waits = []
        for leaf, place in launch.steps:
            prog = batch.leaves[leaf]
            assert prog is not None
            specs = wire_specs(prog)
            waits.append(_wait(topology, prog.steps[place], specs[place], specs[place + 1]))
        saved += topology.launch * (len(waits) - 1) + sum(waits) - max(waits)
    return saved


def _wait(topology: Topology, step: Step, src: Spec, dst: Spec) -> float:
    """Seconds that the messages of one step take in a row, without their bytes."""
    return traffic(step, src, dst).hops * topology.link(src.mesh, step_axes(step, src, dst)).latency


def _peak(batch: Batch, topology: Topology) -> int:
    """Bytes of the locals of all leaves where they are most: buckets pass one after the other."""
    leaves = batch.leaves
    held = sum(max_local_nbytes(leaf.src) for leaf in leaves if leaf is not None)
    most = held
    for bucket in batch.buckets:
        progs = [leaf for leaf in map(leaves.__getitem__, bucket) if leaf is not None]
        before, after = (
            sum(map(max_local_nbytes, specs))
            for specs in zip(*((prog.src, prog.dst) for prog in progs), strict=True)
        )
        during = sum(prog.cost(topology).peak_memory for prog in progs)
        most = max(most, held - before + during)
        held += after - before
    return most
