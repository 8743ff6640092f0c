"""`Batch`: the programs of a whole tree as one value.

After the bucketing of gradients in PyTorch's DDP (Li et al., arXiv 2006.15704), for every kind of
collective and not the all-reduce alone; see `rounds` for which of them go out as one.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from fshard._util.errors import Problem, ShardingError, raise_if
from fshard._util.hooks import Hook
from fshard._util.text import below, columns, folded
from fshard.layout.mesh import Mesh
from fshard.layout.spec import mimebundle_hook
from fshard.layout.tree import TreeDef, flatten, paths, unflatten
from fshard.plan.batch.coalesce import (
    Launch,
    Leaves,
    Row,
    Steps,
    buckets,
    launches,
    ranks_of,
    rounds,
    row_of,
)
from fshard.program.cost.model import Cost, seconds, step_link, traffic
from fshard.program.cost.rank_loads import Load, Ranks, Vector, added, held, load
from fshard.program.cost.topology import Topology
from fshard.program.program import Program, as_topology, wire_specs

__all__ = ["BUCKET", "Batch", "batch_of", "bucket_problems", "of_leaves"]

BUCKET = 2**23
"""Most bytes of one launch, if nothing else is said: 8 MiB.

They take 23 µs over NVLink and 190 µs over InfiniBand, behind which the 6 µs of the next launch
hide. More would save nothing, and costs memory, and the copies of what goes side by side.
"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Batch:
    """Programs of the leaves of a tree, run as one: collectives of one kind are one launch.

    `batch(tree)` runs it on a tree of locals: of each leaf a tensor under `torchrun`, a tuple of
    all shards in a simulation, and `None` where the tree of specs has `None`. The result is
    differentiable as one operation, whose backward runs `batch.T`. What requires no grad is not
    sent back: a leaf requires grad on every rank or on none, also where it is an empty tensor
    because the rank is outside of its source's mesh.

    Leaves of one kind go in buckets. What a rank sends or receives of a bucket in a round of
    launches is at most `bucket_bytes` (8 MiB by default, `None` for all in one). A leaf is not
    cut: a larger one goes alone, or with others that are large on other ranks, of which a rank
    has at most twice the largest. At most two buckets are under way at a time, each with what
    goes in, what travels and what comes out: beside the locals of all leaves, before and after,
    a rank holds at most 6 `bucket_bytes`, or 6 times what it has of larger leaves.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> from fshard.plan.redistribute import redistribute
    >>> from fshard.layout.spec import Spec
    >>> mesh = Mesh(dp=2)
    >>> src = {name: Spec(mesh, P("dp"), shape=(n,)) for name, n in (("b", 4), ("w", 8))}
    >>> dst = {name: spec.replace(partition=P()) for name, spec in src.items()}
    >>> batch = redistribute(src, dst)
    >>> print(batch)
    2 leaves on Mesh(dp=2), 1 launch, 24 B sent
      ['b']  f32[4@dp] -> f32[4]  all_gather(dp, dim 0)
      ['w']  f32[8@dp] -> f32[8]  all_gather(dp, dim 0)
      in one launch: all_gather of 2 over dp
    >>> import torch
    >>> batch({"b": (torch.ones(2),) * 2, "w": (torch.ones(4),) * 2})["b"]
    (tensor([1., 1., 1., 1.]), tensor([1., 1., 1., 1.]))
    """

    leaves: Leaves
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
        raise_if("fs.Batch", [*problems, *bucket_problems(bucket_bytes)])
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

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes of the specs, each once."""
        there = (leaf for leaf in self.leaves if leaf is not None)
        return tuple(dict.fromkeys(spec.mesh for leaf in there for spec in leaf.specs))

    # -- when what goes ---------------------------------------------------------------

    @property
    def buckets(self) -> tuple[tuple[int, ...], ...]:
        """The leaves that are under way together, by number, in the order in which they start."""
        return buckets(self.leaves, self.bucket_bytes)

    def rounds(self, bucket: tuple[int, ...]) -> tuple[Steps, ...]:
        """In each round the collectives of a bucket that are launched in it."""
        return rounds(self.leaves, bucket)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Everything that is launched, in order."""
        return launches(self.leaves, self.bucket_bytes)

    def bytes_sent_in(self, launch: Launch) -> int:
        """Bytes that the busiest rank sends in one of the launches."""
        ranks = ranks_of(self.leaves)
        loads = [load(*row_of(self.leaves, *step), ranks) for step in launch.steps]
        return max(added((each.sent for each in loads), ranks))

    def cost(self, topology: Topology | None = None, /) -> Cost:
        """Time, bytes and memory on a topology, a single node by default.

        A launch and its latency count once for all that goes in it. Bytes and memory are added
        up for each rank, and are those of the busiest one: owners that take turns share the
        work. The memory is that of the locals of all leaves, in the largest layout of those
        that are under way.
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
        return run_batch_hook.call(self, locals, async_op=async_op)

    # -- text -------------------------------------------------------------------------

    def __str__(self) -> str:
        launches, meshes = self.launches, self.meshes
        count = _count(sum(leaf is not None for leaf in self.leaves), "leaf", "leaves")
        on = f" on {meshes[0]}" if len(meshes) == 1 else ""
        head = f"{count}{on}, {_count(len(launches), 'launch')}, {self.cost().bytes_sent:,} B sent"
        rows = [
            (path, prog.ends if meshes[1:] else f"{prog.src} -> {prog.dst}",
             "; ".join(map(str, prog.steps)) or "nothing to do")
            for path, prog in self.distinct()
        ]  # fmt: skip
        shared = _shared(launches, bool(meshes[1:]))
        return "\n".join([*folded(head), *(columns(rows) or below(rows)), *shared])

    __repr__ = __str__

    def distinct(self) -> Iterator[tuple[str, Program]]:
        """Each program once, with the path of its first leaf and how many more have it."""
        names = paths(self.programs, "")
        seen = Counter(self.leaves)
        for at, leaf in enumerate(self.leaves):
            if leaf is not None and seen[leaf]:
                yield _among_others(names[at] or "leaf", seen[leaf]), leaf
                seen[leaf] = 0

    def explain(self, topology: Topology | None = None) -> Any:
        """Tables of the leaves and of the launches on a topology; prints anywhere."""
        return explain_batch_hook.call(self, as_topology("Batch.explain", topology))

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return mimebundle_hook.call(self)


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 'es'}"


def _shared(launches: Sequence[Launch], several_meshes: bool) -> list[str]:
    """What goes out together, those launches that read alike in one line."""
    texts = Counter(
        f"{each.name} of {len(each.steps)} {each.where(named=several_meshes)}"
        for each in launches
        if len(each.steps) > 1
    )
    return [
        line
        for text, n in texts.items()
        for line in folded(f"in {'one launch' if n == 1 else f'each of {n} launches'}: {text}", 2)
    ]


def _fill(batch: Batch, leaves: Leaves, structure: TreeDef, bucket_bytes: int | None) -> None:
    set_ = object.__setattr__
    set_(batch, "leaves", leaves)
    set_(batch, "structure", structure)
    set_(batch, "bucket_bytes", bucket_bytes)
    set_(batch, "_hash", hash((leaves, structure, bucket_bytes)))


def batch_of(
    leaves: Iterable[Program | None], structure: TreeDef, bucket_bytes: int | None
) -> Batch:
    """A batch of what is known to be programs."""
    made = object.__new__(Batch)
    _fill(made, tuple(leaves), structure, bucket_bytes)
    return made


def _rebuild(programs: Any, bucket_bytes: int | None) -> Batch:
    return Batch(programs, bucket_bytes=bucket_bytes)


@lru_cache(maxsize=256)
def _transpose(batch: Batch) -> Batch:
    transposed = [leaf and leaf.T for leaf in batch.leaves]
    return batch_of(transposed, batch.structure, batch.bucket_bytes)


# -- problems of leaves ----------------------------------------------------------------


def of_leaves(where: str, names: Sequence[str], make: Sequence[Callable[[], T]]) -> list[T]:
    """What each `make()` returns; raises one `ShardingError` with all their problems.

    `names` are the paths of the leaves that they are about.
    """
    made: list[T] = []
    problems: dict[Problem, list[str]] = {}
    for each, name in zip(make, names, strict=True):
        try:
            made.append(each())
        except ShardingError as error:
            if not error.problems:
                raise
            for problem in error.problems:
                problems.setdefault(problem, []).append(name)
    raise_if(where, [_at(at, problem) for problem, at in problems.items()])
    return made


def _at(names: Sequence[str], problem: Problem) -> Problem:
    """A problem of the leaves of these paths."""
    if not names[0]:
        return problem
    return replace(problem, given=f"at {_among_others(names[0], len(names))}: {problem.given}")


def _among_others(name: str, n: int) -> str:
    return name if n == 1 else f"{name} and {n - 1} more"


def bucket_problems(bucket_bytes: object) -> list[Problem]:
    """What is wrong with the most bytes of a launch."""
    whole = isinstance(bucket_bytes, int) and not isinstance(bucket_bytes, bool)
    if bucket_bytes is None or (whole and bucket_bytes > 0):  # type: ignore[operator]
        return []
    return [
        Problem(
            f"bucket_bytes={bucket_bytes!r}",
            "a bucket has at least 1 byte, or no bound",
            "bucket_bytes=2**23, or None",
        )
    ]


# -- cost -----------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _cost(batch: Batch, topology: Topology) -> Cost:
    leaves, ranks = batch.leaves, ranks_of(batch.leaves)
    rows = [[row_of(leaves, *step) for step in each.steps] for each in batch.launches]
    overheads = [[_overhead(row, topology) for row in dict.fromkeys(of)] for of in rows]
    moved = [load(*row, ranks) for of in rows for row in of]
    copied = added((each.copied for each in _loads(leaves, ranks)), ranks)
    return Cost(
        time=sum(max(time for time, _ in of) for of in overheads)
        + sum(_wire_time(of, ranks, topology) for of in rows)
        + max(copied, default=0) / topology.memory,
        bytes_sent=max(added((each.sent for each in moved), ranks), default=0),
        bytes_received=max(added((each.received for each in moved), ranks), default=0),
        peak_memory=_peak(batch, ranks),
        launches=len(rows),
        messages=sum(max(messages for _, messages in of) for of in overheads),
    )


def _overhead(row: Row, topology: Topology) -> tuple[float, int]:
    """Seconds that one step takes without its bytes, and its messages."""
    moved = traffic(*row)
    alone = moved._replace(sent=0, received=0)
    return seconds(topology, step_link(topology, *row), alone, 0), moved.messages


def _wire_time(rows: Sequence[Row], ranks: Ranks, topology: Topology) -> float:
    """Seconds for which the bytes of one launch are on the wire."""
    by_link: dict[float, list[Load]] = {}
    for row in rows:
        bandwidth = step_link(topology, *row).bandwidth
        by_link.setdefault(bandwidth, []).append(load(*row, ranks))
    return sum(
        max(max(added(each, ranks)) for each in list(zip(*loads, strict=True))[:2]) / bandwidth
        for bandwidth, loads in by_link.items()
    )


def _loads(leaves: Leaves, ranks: Ranks) -> Iterator[Load]:
    """What every step of every leaf moves, local ones too."""
    for at, leaf in enumerate(leaves):
        for place in range(len(leaf.steps) if leaf is not None else 0):
            yield load(*row_of(leaves, at, place), ranks)


def _peak(batch: Batch, ranks: Ranks) -> int:
    """Bytes of the locals of all leaves where they are most: buckets pass one after the other."""
    leaves = [leaf for leaf in batch.leaves if leaf is not None]
    now = added((held(leaf.src, ranks) for leaf in leaves), ranks)
    most = max(now, default=0)
    for bucket in batch.buckets:
        progs = [leaf for leaf in map(batch.leaves.__getitem__, bucket) if leaf is not None]
        before, after = (
            added((held(spec, ranks) for spec in specs), ranks)
            for specs in zip(*((prog.src, prog.dst) for prog in progs), strict=True)
        )
        during = added((_on_the_way(prog, ranks) for prog in progs), ranks)
        most = max(most, *map(sum, zip(now, map(operator.neg, before), during, strict=True)))
        now = tuple(map(sum, zip(now, map(operator.neg, before), after, strict=True)))
    return most


@lru_cache(maxsize=4096)
def _on_the_way(prog: Program, ranks: Ranks) -> Vector:
    """The largest local that each rank has of a leaf at any time."""
    specs = (prog.src, *wire_specs(prog), prog.dst)
    return tuple(map(max, zip(*(held(spec, ranks) for spec in specs), strict=True)))


@Hook
def run_batch_hook(batch: Batch, tree: Any, *, async_op: bool) -> Any:
    """`Batch.__call__`; set by `run/execute_batch.py`."""
    raise NotImplementedError


@Hook
def explain_batch_hook(batch: Batch, topology: Topology) -> Any:
    """`Batch.explain`; set by `show/batch_table.py`."""
    raise NotImplementedError
