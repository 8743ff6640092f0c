"""`Batch`: the programs of a whole tree as one value.

After the bucketing of gradients in PyTorch's DDP (Li et al., arXiv 2006.15704), for every kind of
collective and not the all-reduce alone; see `rounds` for which of them go out as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any, TypeVar

from fshard import hooks
from fshard.errors import Problem, ShardingError, raise_if
from fshard.plan.rounds import Launch, Leaves, Steps, buckets, launches, rounds
from fshard.program.cost import Cost, max_local_nbytes, seconds, step_link, traffic
from fshard.program.program import Program, as_topology, endpoint_problems, wire_specs
from fshard.program.topology import Topology
from fshard.spec import Spec
from fshard.tree import TreeDef, flatten, matching, paths, unflatten

__all__ = ["BUCKET", "Batch", "of_leaves", "plan_batch"]

BUCKET = 2**23
"""Most bytes of one launch, if nothing else is said: 8 MiB.

They take 23 µs over NVLink and 190 µs over InfiniBand, behind which the 6 µs of the next launch
hide. More would save nothing, and costs memory, and the copies of what goes side by side.
"""

SHARED = 8
"""Of how many leaves a launch is thought to be, at most, while one of them is planned.

What is left of its cost is little beside latency and bytes; with less, searches would take long.
"""

T = TypeVar("T")
Plan = Callable[..., Program]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Batch:
    """Programs of the leaves of a tree, run as one: collectives of one kind are one launch.

    `batch(tree)` runs it on a tree of locals: of each leaf a tensor under `torchrun`, a tuple of
    all shards in a simulation, and `None` where the tree of specs has `None`. The result is
    differentiable as one operation, whose backward runs `batch.T`. What requires no grad is not
    sent back: a leaf requires grad on every rank or on none, also where it is an empty tensor
    because the rank is outside of its source's mesh.

    Leaves of one kind go in buckets. What a bucket sends or receives on the busiest rank in a
    round of launches is at most `bucket_bytes` (8 MiB by default, `None` for all in one); a leaf
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
        count = sum(leaf is not None for leaf in self.leaves)
        head = [_count(count, "leaf", "leaves"), _count(len(launches), "launch"), sent]
        rows = [
            (path, f"{prog.src} -> {prog.dst}", "; ".join(map(str, prog.steps)) or "nothing to do")
            for path, prog in self.distinct()
        ]
        widths = [max((len(row[c]) for row in rows), default=0) for c in range(2)]
        lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
        lines += [
            f"  in one launch: {each.op} of {len(each.steps)} {each.where}" for each in launches
        ]
        return "\n".join([", ".join(head), *lines])

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
        return hooks.call("explain_batch", self, as_topology("Batch.explain", topology))

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        bundle: dict[str, str] = hooks.call("mimebundle", self)
        return bundle


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 'es'}"


def _fill(batch: Batch, leaves: Leaves, structure: TreeDef, bucket_bytes: int | None) -> None:
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


# -- planning -------------------------------------------------------------------------


def plan_batch(
    src: Any,
    dst: Any,
    plan: Plan,
    cost: Topology | str,
    options: tuple[Any, ...],
    bucket_bytes: int | None,
) -> Batch:
    """The batch from a tree of specs to another: each leaf planned with its share of a launch.

    `plan(src, dst, cost, *options)` makes the program of one leaf. Where launches cost time, two
    batches are planned, one in which leaves think of launches as shared by all that move, one in
    which each pays for its own; the cheaper one is the answer, so that a batch never costs more
    than its leaves. It is cached by value.

    Raises `ShardingError` where the trees are of different structures, and all that `plan`
    raises, with the path of the leaf.
    """
    raise_if("fs.redistribute", _bucket_problems(bucket_bytes))
    sources, structure = flatten(src)
    targets = matching(src, dst, ("src", "dst"), "fs.redistribute")
    values = all(each is None or isinstance(each, Spec) for each in (*sources, *targets))
    planned = _planned if values else _planned.__wrapped__  # what has no hash is refused there
    return planned(tuple(sources), tuple(targets), structure, plan, cost, options, bucket_bytes)


@lru_cache(maxsize=256)
def _planned(
    sources: tuple[Any, ...],
    targets: tuple[Any, ...],
    structure: TreeDef,
    plan: Plan,
    cost: Topology | str,
    options: tuple[Any, ...],
    bucket_bytes: int | None,
) -> Batch:
    pairs = list(zip(sources, targets, strict=True))
    names = paths(unflatten(structure, sources), "")
    moving = sum(a != b for a, b in pairs)

    def batch(cost: Topology | str) -> Batch:
        one = cache(lambda a, b: plan(a, b, cost, *options))
        make = [partial(_plan_leaf, a, b, one) for a, b in pairs]
        made = object.__new__(Batch)
        _fill(made, tuple(of_leaves("fs.redistribute", names, make)), structure, bucket_bytes)
        return made

    alone = batch(cost)
    if isinstance(cost, str) or moving < 2:
        return alone
    shared = batch(replace(cost, launch=cost.launch / min(moving, SHARED)))
    return min(alone, shared, key=lambda each: each.cost(cost).time)


def _plan_leaf(a: Any, b: Any, plan: Callable[[Spec, Spec], Program]) -> Program | None:
    if a is None and b is None:
        return None
    if not isinstance(a, Spec) or not isinstance(b, Spec):
        raise_if("fs.redistribute", endpoint_problems("redistribute", a, b))
    return plan(a, b)


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


def _bucket_problems(bucket_bytes: object) -> list[Problem]:
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
    leaves = [leaf for leaf in batch.leaves if leaf is not None]
    each = [leaf.cost(topology) for leaf in leaves]
    overheads = [[_overhead(batch, *step, topology) for step in of.steps] for of in batch.launches]
    times = [[time for time, _ in of] for of in overheads]
    return Cost(
        time=sum(cost.time for cost in each) - sum(sum(of) - max(of) for of in times),
        bytes_sent=sum(cost.bytes_sent for cost in each),
        bytes_received=sum(cost.bytes_received for cost in each),
        peak_memory=_peak(batch, topology),
        launches=len(overheads),
        messages=sum(max(messages for _, messages in of) for of in overheads),
    )


def _overhead(batch: Batch, leaf: int, place: int, topology: Topology) -> tuple[float, int]:
    """Seconds that one step takes without its bytes, and its messages."""
    prog = batch.leaves[leaf]
    assert prog is not None
    specs = wire_specs(prog)
    row = prog.steps[place], specs[place], specs[place + 1]
    moved = traffic(*row)
    alone = moved._replace(sent=0, received=0)
    return seconds(topology, step_link(topology, *row), alone, 0), moved.messages


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
