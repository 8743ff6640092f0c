"""`Batch`: the programs of a tree of specs as one value.

It extends the gradient bucketing of PyTorch DDP (Li et al., arXiv 2006.15704) to every kind of
collective; `coalesce.py` decides which collectives are one launch.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from fshard._torch.dynamo import skip_frames_below
from fshard._util.errors import Problem, ShardingError, raise_if
from fshard._util.hooks import Hook
from fshard._util.notebook_view import NotebookView, table_of
from fshard._util.text import below, columns, folded, plural
from fshard._util.tracebacks import hide_frames
from fshard.layout.mesh import Mesh
from fshard.layout.tree import TreeDef, flatten, paths, unflatten
from fshard.plan.batch.coalesce import (
    Launch,
    Leaves,
    TypedStep,
    buckets,
    cost_ranks,
    launches,
    typed_step,
)
from fshard.program.cost.model import Cost, collective_time, copied_bytes, step_link
from fshard.program.cost.rank_loads import Load, add_vectors, busiest_bytes, step_load
from fshard.program.cost.rank_overlap import Ranks, Vector, local_bytes
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import traffic
from fshard.program.program import Program, wire_specs
from fshard.program.program_arguments import as_topology

BUCKET_BYTES = 2**23
"""Default of the most bytes in one launch: 8 MiB.

Sending them takes 23 µs over NVLink and 190 µs over InfiniBand, which hides the 6 µs of the next
launch. More would save nothing, and costs memory and copies.
"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Batch(NotebookView):
    """Programs of the leaves of a tree, run as one: collectives of one kind are one launch.

    `fs.redistribute` of two trees of specs returns one. `batch(tree)` runs it on a tree of locals:
    for each leaf a tensor under `torchrun`, a tuple of all shards in a simulation, and `None` where
    the tree of specs has `None`. It is differentiable as one operation, whose backward runs
    `batch.T`. Leaves that do not require grad are not sent back; a leaf requires grad on every rank
    or on none, even if it is an empty tensor because the rank is outside of its source's mesh.

    Leaves of one kind share buckets. A rank sends or receives at most `bucket_bytes` in one launch
    of a bucket. A leaf is never split: a larger one has its own bucket, or shares it with leaves
    that are large on other ranks, of which a rank has at most twice the largest. At most two
    buckets are in flight, each with inputs, buffers and outputs: beside the locals of all leaves
    before and after, a rank holds at most 6 times `bucket_bytes`, or 6 times its bytes of larger
    leaves.

    Args:
        programs: A tree of `Program`s and `None`.
        bucket_bytes: Most bytes of one launch; 8 MiB by default, `None` for no limit.

    Raises:
        ShardingError: If a leaf is not a `Program`, or `bucket_bytes` is not positive.

    >>> import fshard as fs
    >>> import torch
    >>> mesh = fs.Mesh(dp=2)
    >>> src = {name: fs.Spec(mesh, fs.P("dp"), shape=(n,)) for name, n in (("b", 4), ("w", 8))}
    >>> dst = {name: spec.replace(partition=fs.P()) for name, spec in src.items()}
    >>> batch = fs.redistribute(src, dst)
    >>> print(batch)
    2 leaves on Mesh(dp=2), 1 launch, 24 B sent
      ['b']  f32[4@dp] -> f32[4]  all_gather(dp, dim 0)
      ['w']  f32[8@dp] -> f32[8]  all_gather(dp, dim 0)
      in one launch: all_gather of 2 over dp
    >>> batch({"b": (torch.ones(2),) * 2, "w": (torch.ones(4),) * 2})["b"]
    (tensor([1., 1., 1., 1.]), tensor([1., 1., 1., 1.]))
    """

    leaves: Leaves
    structure: TreeDef
    bucket_bytes: int | None
    _hash: int = field(compare=False)

    def __init__(self, programs: Any, *, bucket_bytes: int | None = BUCKET_BYTES) -> None:
        leaves, structure = flatten(programs)
        problems = [
            Problem(
                f"{path} is a {type(leaf).__name__}",
                "every leaf must be a Program or None",
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

    # -- programs and specs -----------------------------------------------------------

    @property
    def programs(self) -> Any:
        """The tree of programs."""
        return unflatten(self.structure, self.leaves)

    @property
    def src(self) -> Any:
        """The tree of source specs."""
        return unflatten(self.structure, [leaf and leaf.src for leaf in self.leaves])

    @property
    def dst(self) -> Any:
        """The tree of target specs."""
        return unflatten(self.structure, [leaf and leaf.dst for leaf in self.leaves])

    @property
    def topology(self) -> Topology | None:
        """Topology that the programs were planned on: the first that one of them remembers."""
        return next((leaf.topology for leaf in self.leaves if leaf and leaf.topology), None)

    @property
    def T(self) -> Batch:  # noqa: N802 - the mathematical name
        """The adjoint of every leaf, as a batch: the backward pass of this one."""
        return _transpose(self, self.topology)

    @property
    def is_linear(self) -> bool:
        """True if every leaf has a transpose."""
        return all(leaf.is_linear for leaf in self.leaves if leaf is not None)

    @property
    def is_local(self) -> bool:
        """True if it runs without communication."""
        return not self.launches

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes of the specs, each once."""
        progs = (leaf for leaf in self.leaves if leaf is not None)
        return tuple(dict.fromkeys(spec.mesh for prog in progs for spec in prog.specs))

    # -- launches ---------------------------------------------------------------------

    @property
    def buckets(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the leaves that are in flight together, in the order in which they start."""
        return buckets(self.leaves, self.bucket_bytes)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Every launch, in order."""
        return launches(self.leaves, self.bucket_bytes)

    def bytes_sent_in(self, launch: Launch) -> int:
        """Return the bytes that the busiest rank sends in one of the launches."""
        ranks = cost_ranks(self.leaves)
        loads = [step_load(*typed_step(self.leaves, *step), ranks) for step in launch.steps]
        return max(add_vectors((step.sent for step in loads), ranks))

    def cost(self, topology: Topology | None = None) -> Cost:
        """Return the estimated time, bytes and memory of a run.

        Args:
            topology: The machine; by default the topology that the batch was planned on, and a
                single node if it has none.

        Returns:
            A `Cost`. A launch and its latency count once for all its leaves. Bytes and memory are
            added up for each rank, and are the busiest rank's. The memory is that of the locals
            of all leaves, each in its largest layout while its bucket is in flight.

        >>> import fshard as fs
        >>> src = [fs.Spec(fs.Mesh(x=4), fs.P("x"), shape=(n,)) for n in (8, 8, 4)]
        >>> batch = fs.redistribute(src, [spec.replace(partition=fs.P()) for spec in src])
        >>> print(batch.cost())
        7.05 µs, 60 B sent, 60 B received, 80 B peak, 1 launch, 3 messages
        """
        return _cost(self, as_topology("Batch.cost", topology, self.topology, self.meshes))

    # -- running ----------------------------------------------------------------------

    @skip_frames_below("a batch is not a node of a graph: its programs are")
    def __call__(self, locals: Any, *, async_op: bool = False) -> Any:  # noqa: A002
        """Run on the locals that this process holds, and return those of the target specs.

        Args:
            locals: A tree like `src`, with a local for each leaf.
            async_op: Launch every collective that does not wait for another, and return a
                `Pending`, whose `wait()` launches the rest and returns the result.

        Returns:
            A tree like `dst` of locals. They may share memory with `locals` if no step changes
            them, and leaves of one launch with each other, but never the same elements.

        Raises:
            ShardingError: If locals do not fit their specs; it names every such leaf.
        """
        try:
            return run_batch_hook.call(self, locals, async_op=async_op)
        except Exception as error:
            hide_frames(error)
            raise

    # -- text -------------------------------------------------------------------------

    def __str__(self) -> str:
        launches, meshes = self.launches, self.meshes
        count = plural(sum(leaf is not None for leaf in self.leaves), "leaf", "leaves")
        on = f" on {meshes[0]}" if len(meshes) == 1 else ""
        sent = f"{self.cost().bytes_sent:,} B sent"
        head = f"{count}{on}, {plural(len(launches), 'launch')}, {sent}"
        rows = [
            (path, prog.ends if meshes[1:] else f"{prog.src} -> {prog.dst}",
             "; ".join(map(str, prog.steps)) or "nothing to do")
            for path, prog in self.distinct_programs()
        ]  # fmt: skip
        shared = _launch_lines(launches, bool(meshes[1:]))
        return "\n".join([*folded(head), *(columns(rows) or below(rows)), *shared])

    __repr__ = __str__

    def distinct_programs(self) -> Iterator[tuple[str, Program]]:
        """Yield each distinct program with the path of its first leaf and the number of others."""
        names = paths(self.programs, "")
        counts = Counter(self.leaves)
        for name, leaf in zip(names, self.leaves, strict=True):
            if leaf is not None and counts[leaf]:
                yield _and_more(name or "leaf", counts[leaf]), leaf
                counts[leaf] = 0

    def explain(self, topology: Topology | None = None) -> Any:
        """Return tables of the leaves and of the launches.

        Args:
            topology: The machine; by default the topology that the batch was planned on, and a
                single node if it has none.

        Returns:
            A `BatchExplanation`, which prints as text, in `rich` and as HTML in a notebook.
        """
        return table_of(self, as_topology("Batch.explain", topology, self.topology, self.meshes))


def _launch_lines(launches: Sequence[Launch], several_meshes: bool) -> list[str]:
    """Return one line for each different text of a launch of several leaves."""
    texts = Counter(
        f"{launch.name} of {len(launch.steps)} {launch.scope(with_mesh=several_meshes)}"
        for launch in launches
        if len(launch.steps) > 1
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


def batch_from_leaves(
    leaves: Iterable[Program | None], structure: TreeDef, bucket_bytes: int | None
) -> Batch:
    """Return a batch of programs, without checking that they are some."""
    batch = object.__new__(Batch)
    _fill(batch, tuple(leaves), structure, bucket_bytes)
    return batch


def _rebuild(programs: Any, bucket_bytes: int | None) -> Batch:
    return Batch(programs, bucket_bytes=bucket_bytes)


@lru_cache(maxsize=256)
def _transpose(batch: Batch, topology: Topology | None) -> Batch:
    transposed = [leaf and leaf.T for leaf in batch.leaves]
    return batch_from_leaves(transposed, batch.structure, batch.bucket_bytes)


# -- problems of leaves ----------------------------------------------------------------


def map_leaves(where: str, names: Sequence[str], calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return the result of each call; raise one `ShardingError` with the problems of all.

    `names` are the paths of the leaves that the calls belong to.
    """
    results: list[T] = []
    problems: dict[Problem, list[str]] = {}
    for call, name in zip(calls, names, strict=True):
        try:
            results.append(call())
        except ShardingError as error:
            if not error.problems:
                raise
            for problem in error.problems:
                problems.setdefault(problem, []).append(name)
    raise_if(where, [_at_leaves(problem, paths) for problem, paths in problems.items()])
    return results


def _at_leaves(problem: Problem, names: Sequence[str]) -> Problem:
    """Return the problem with the paths of its leaves."""
    if not names[0]:
        return problem
    return replace(problem, given=f"at {_and_more(names[0], len(names))}: {problem.given}")


def _and_more(name: str, n: int) -> str:
    return name if n == 1 else f"{name} and {n - 1} more"


def bucket_problems(bucket_bytes: object) -> list[Problem]:
    """Return the problems of an option `bucket_bytes`."""
    is_int = isinstance(bucket_bytes, int) and not isinstance(bucket_bytes, bool)
    if bucket_bytes is None or (is_int and bucket_bytes > 0):  # type: ignore[operator]
        return []
    rule = "bucket_bytes must be an int of at least 1, or None"
    return [Problem(f"bucket_bytes={bucket_bytes!r}", rule, "bucket_bytes=2**23, or None")]


# -- cost -----------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _cost(batch: Batch, topology: Topology) -> Cost:
    leaves, ranks = batch.leaves, cost_ranks(batch.leaves)
    launches = [[typed_step(leaves, *step) for step in launch.steps] for launch in batch.launches]
    overheads = [[_overhead(step, topology) for step in dict.fromkeys(steps)] for steps in launches]
    steps = _typed_steps(leaves)
    sent, received = busiest_bytes(steps, ranks)
    copied = add_vectors((step_load(*step, ranks).copied for step in steps), ranks)
    starts = sum(nbytes > 0 for step in steps for nbytes in copied_bytes(*step))
    return Cost(
        time=sum(max(time for time, _ in steps) for steps in overheads)
        + sum(_wire_time(steps, ranks, topology) for steps in launches)
        + max(copied, default=0) / topology.memory
        + starts * topology.kernel,
        bytes_sent=sent,
        bytes_received=received,
        peak_memory=_peak_memory(batch, ranks),
        launches=len(launches),
        messages=sum(max(messages for _, messages in steps) for steps in overheads),
    )


def busiest_bytes_of(leaves: Leaves) -> tuple[int, int]:
    """Return the most bytes that one rank sends in all programs, and that one receives."""
    return busiest_bytes(_typed_steps(leaves), cost_ranks(leaves))


def _typed_steps(leaves: Leaves) -> list[TypedStep]:
    """Return every step of every leaf, local steps included."""
    return [typed_step(leaves, i, step) for i, leaf in enumerate(leaves)
            for step in range(len(leaf.steps) if leaf is not None else 0)]  # fmt: skip


def _overhead(step: TypedStep, topology: Topology) -> tuple[float, int]:
    """Return the seconds of a step without its bytes, and its messages."""
    moved = traffic(*step)
    no_bytes = moved._replace(sent=0, received=0)
    return collective_time(topology, step_link(topology, *step), no_bytes), moved.messages


def _wire_time(steps: Sequence[TypedStep], ranks: Ranks, topology: Topology) -> float:
    """Return the seconds for which the bytes of one launch are on the wire."""
    by_bandwidth: dict[float, list[Load]] = {}
    for step in steps:
        bandwidth = step_link(topology, *step).bandwidth
        by_bandwidth.setdefault(bandwidth, []).append(step_load(*step, ranks))
    return sum(
        max(max(add_vectors(nbytes, ranks)) for nbytes in list(zip(*loads, strict=True))[:2])
        / bandwidth
        for bandwidth, loads in by_bandwidth.items()
    )


def _peak_memory(batch: Batch, ranks: Ranks) -> int:
    """Return the most bytes that the locals of all leaves have on a rank, bucket by bucket."""
    leaves = [leaf for leaf in batch.leaves if leaf is not None]
    now = add_vectors((local_bytes(leaf.src, ranks) for leaf in leaves), ranks)
    most = max(now, default=0)
    for bucket in batch.buckets:
        progs = [leaf for leaf in map(batch.leaves.__getitem__, bucket) if leaf is not None]
        before, after = (
            add_vectors((local_bytes(spec, ranks) for spec in specs), ranks)
            for specs in zip(*((prog.src, prog.dst) for prog in progs), strict=True)
        )
        during = add_vectors((_largest_local(prog, ranks) for prog in progs), ranks)
        most = max(most, *map(sum, zip(now, map(operator.neg, before), during, strict=True)))
        now = tuple(map(sum, zip(now, map(operator.neg, before), after, strict=True)))
    return most


@lru_cache(maxsize=4096)
def _largest_local(prog: Program, ranks: Ranks) -> Vector:
    """Return the bytes of each rank's largest local of a leaf at any time."""
    specs = (prog.src, *wire_specs(prog), prog.dst)
    return tuple(map(max, zip(*(local_bytes(spec, ranks) for spec in specs), strict=True)))


@Hook
def run_batch_hook(batch: Batch, tree: Any, *, async_op: bool) -> Any:
    """`Batch.__call__`; set by `run/execute_batch.py`."""
    raise NotImplementedError
