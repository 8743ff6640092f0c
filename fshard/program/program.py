"""`Program`: a source spec, typed steps and a target spec, as a value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, get_args

import torch

from fshard._util.errors import Problem, ShardingError, fail, raise_if
from fshard._util.hooks import Hook
from fshard._util.text import below, columns, folded
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import LINEAR
from fshard.layout.spec import DTYPE_NAMES, Spec, mimebundle_hook
from fshard.program.cost.model import Cost, step_time
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes, traffic
from fshard.program.infer import infer, way_back
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Exchange,
    ReduceScatter,
    Step,
)
from fshard.program.transpose import is_linear, transpose

__all__ = [
    "Program", "as_topology", "as_types", "carries", "check", "endpoint_problems",
    "exclude_problems", "wire_problems", "wire_specs", "with_topology",
]  # fmt: skip

STEPS: tuple[type, ...] = get_args(Step)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Program:
    """Steps from one spec to another; it is type-checked at birth or does not exist.

    `prog(local)` runs it: a tensor under `torchrun` (or in rank-local code), a tuple of all
    shards in a simulation; the result is differentiable, its backward runs `prog.T`.
    `forward_dtype` is what a run sends (the result comes back in the target's dtype),
    `backward_dtype` what the transpose sends.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2), P("x"), shape=(4,))
    >>> prog = Program(src, (AllGather("x", 0),))
    >>> print(prog)
    f32[4@x] -> f32[4] on Mesh(x=2)
      all_gather(x, dim 0)  f32[4]  8 B
    >>> print(prog.T)
    f32[4] -> f32[4@x] on Mesh(x=2)
      all_slice(x, dim 0)  f32[4@x]  0 B
    >>> prog.T.T == prog
    True
    """

    src: Spec
    steps: tuple[Step, ...]
    dst: Spec
    forward_dtype: torch.dtype | None
    backward_dtype: torch.dtype | None
    topology: Topology | None = field(compare=False)
    specs: tuple[Spec, ...] = field(compare=False)
    _hash: int = field(compare=False)

    def __init__(
        self,
        src: Spec,
        steps: tuple[Step, ...] | list[Step],
        dst: Spec | None = None,
        *,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        topology: Topology | None = None,
    ) -> None:
        raise_if("Program", _type_problems(src, steps))
        raise_if("Program", wire_problems(src, (forward_dtype, backward_dtype)))
        specs = [src]
        canonical: list[Step] = []
        for step in steps:
            specs.append(infer(step, specs[-1]))
            canonical.append(_canonical(step, *specs[-2:]))
        if specs[-1].dtype != src.dtype:
            raise_if("Program", wire_problems(specs[-1], (forward_dtype, backward_dtype)))
        if dst is not None and specs[-1] != dst:
            end, target = _told_apart(specs[-1], dst)
            fail(
                "Program",
                f"steps that lead from {src} to {end}",
                f"they must lead to the target, {target}",
                "leave dst out, or plan with fs.redistribute",
            )
        set_ = object.__setattr__
        set_(self, "src", src)
        set_(self, "steps", tuple(canonical))
        set_(self, "dst", specs[-1])
        # An option that changes nothing is dropped, so that equal programs are equal values.
        plain = {src.dtype, specs[-1].dtype}
        set_(self, "forward_dtype", None if plain == {forward_dtype} else forward_dtype)
        set_(self, "backward_dtype", None if plain == {backward_dtype} else backward_dtype)
        set_(self, "topology", None if topology is None else as_topology("Program", topology))
        set_(self, "specs", tuple(specs))
        set_(self, "_hash", hash((src, self.steps, self.forward_dtype, self.backward_dtype)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        options = (self.forward_dtype, self.backward_dtype, self.topology)
        return _rebuild, (self.src, self.steps, *options)

    # -- algebra ----------------------------------------------------------------------

    @property
    def T(self) -> Program:  # noqa: N802 - the mathematical name
        """The adjoint, `dual(dst) -> dual(src)`: the backward pass of this program."""
        return _transpose(self, self.topology)

    @property
    def is_linear(self) -> bool:
        """Whether a transpose exists: reductions are sums or averages, casts are linear.

        No spec on the way is unreduced by another reduction, not even along an axis of size 1,
        none is of reduced booleans, whose gradient would be their sum, and no cast makes integers
        or booleans of other numbers.
        """
        kinds = {kind for spec in self.specs for _, kind in spec.partition.unreduced_kinds}
        dual = not any(s.dtype == torch.bool and s.partition.reduced_kinds for s in self.specs)
        return dual and kinds <= set(LINEAR) and all(map(is_linear, self.steps, self.specs))

    @property
    def is_local(self) -> bool:
        """Whether it runs without communication."""
        return not any(map(_launches, self.steps, self.specs, self.specs[1:]))

    def then(self, other: Program) -> Program:
        """Run this program, then `other`, as one program; also written `>>`.

        The result remembers the topology of the first program that has steps and a topology:
        where the two differ, the topology of this one. Pass another to `cost` or `explain`.

        Args:
            other: A program whose `src` equals this program's `dst`, and which sends the same
                dtypes.

        Returns:
            The program from `self.src` to `other.dst`.

        Raises:
            ShardingError: If the specs do not meet, or the dtypes that are sent differ.

        >>> import fshard as fs
        >>> a = fs.Spec(fs.Mesh(x=2, y=2), fs.P("x", "y"), shape=(4, 4))
        >>> b, c = a.replace(partition=fs.P(None, "y")), a.replace(partition=fs.P())
        >>> print(fs.redistribute(a, b) >> fs.redistribute(b, c))
        f32[4@x,4@y] -> f32[4,4] on Mesh(x=2, y=2)
          all_gather(x, dim 0)  f32[4,4@y]  16 B
          all_gather(y, dim 1)  f32[4,4]    32 B
        """
        if self.dst != other.src:
            end, start = _told_apart(self.dst, other.src)
            fail(
                "Program.then",
                f"a program to {end}, then one from {start}",
                "the second must begin with the spec that the first ends with",
                f"fs.redistribute({end}, {start}) between them",
            )
        mine, theirs = ((each.forward_dtype, each.backward_dtype) for each in (self, other))
        if mine != theirs and self.steps and other.steps:
            fail(
                "Program.then",
                "; then ".join(", ".join(each._wires) or "its own dtype" for each in (self, other)),
                "both must send the same dtypes",
                "run one after the other",
            )
        options, rest = (self, other) if self.steps else (other, self)
        return Program(
            self.src,
            self.steps + other.steps,
            forward_dtype=options.forward_dtype,
            backward_dtype=options.backward_dtype,
            topology=options.topology or rest.topology,
        )

    def __rshift__(self, other: Program) -> Program:
        return self.then(other)

    def simplify(
        self, topology: Topology | None = None, *, exclude: type | Iterable[type] = ()
    ) -> Program:
        """An equal or cheaper program of the same ends and values, by local rewrites.

        Inverse steps cancel, neighbours fuse, slices go ahead and gathers behind, casts to the
        side where fewer bytes move; by the laws in `program/simplify.py`. The time on the topology
        falls, or steps get fewer; neither it, nor the time with that of the transpose, nor the
        peak memory rises, and `forward_dtype` and `backward_dtype` stay. The default is a
        single node, also for a program planned on another topology: pass the same one.
        `exclude` names step types not to bring in; those of them that the program has may stay.
        Where floating numbers are added, their order may change, and averages may round less
        often; addends of an unreduced target may be others of the same sum.

        Rewrites start from what the program does; `fs.redistribute(prog.src, prog.dst)` plans
        anew. After Rink et al., arXiv 2112.01075, and the identities of Shardy's collectives.

        >>> from fshard.layout.mesh import Mesh
        >>> from fshard.layout.partition_spec import PartitionSpec as P
        >>> src = Spec(Mesh(x=2, y=2), P("y", unreduced={"x"}), shape=(4096, 4096))
        >>> prog = Program(src, (AllReduce("x"), AllGather("y", 0), AllSlice("x", 1)))
        >>> print(prog.simplify())
        f32[4096@y,4096]{unreduced: x} -> f32[4096,4096@x] on Mesh(x=2, y=2)
          reduce_scatter(x, dim 1)  f32[4096@y,4096@x]  16,777,216 B
          all_gather(y, dim 0)      f32[4096,4096@x]    16,777,216 B
        """
        on = as_topology("Program.simplify", topology, self.topology)
        simple: Program = simplify_hook.call(self, on, as_types(exclude))
        return with_topology(simple, topology or self.topology)

    # -- cost -------------------------------------------------------------------------

    def cost(self, topology: Topology | None = None) -> Cost:
        """Return the estimated time, bytes and memory of a run.

        Args:
            topology: The machine; by default the topology that the program was planned on, and a
                single node if it has none.

        Returns:
            A `Cost`: seconds, bytes of the busiest rank, launches and messages.

        >>> import fshard as fs
        >>> src = fs.Spec(fs.Mesh(x=16), fs.P("x"), shape=(1024, 1024))
        >>> dst = src.replace(partition=fs.P())
        >>> prog = fs.Program(src, (fs.AllGather("x", 0),), topology=fs.Topology.cluster())
        >>> print(prog.cost())
        98.3 µs, 3.75 MiB sent, 3.75 MiB received, 4.00 MiB peak, 1 launch, 15 messages
        >>> print(prog.cost(fs.Topology.node()))
        19.8 µs, 3.75 MiB sent, 3.75 MiB received, 4.00 MiB peak, 1 launch, 15 messages
        """
        return _cost(self, as_topology("Program.cost", topology, self.topology))

    # -- running ----------------------------------------------------------------------

    def __call__(self, local: Any, *, async_op: bool = False) -> Any:
        """Run on what this process holds of a tensor of spec `src`; a local of spec `dst`.

        The result may share memory with `local` where no step changes it. With `async_op`
        the last collective is only launched, and `.wait()` on the `Pending` gives the result.
        """
        return run_program_hook.call(self, local, async_op=async_op)

    # -- text -------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = folded(f"{self.ends}{''.join(', ' + each for each in self._wires)}")
        rows = [
            (str(step), str(after), f"{sent:,} B")
            for step, after, sent in zip(self.steps, self.specs[1:], self.step_bytes, strict=True)
        ]
        lines += columns(rows, right={2}) or below([(a, f"{b}  {c}") for a, b, c in rows])
        return "\n".join(lines if rows else [*lines, "  (nothing to do)"])

    __repr__ = __str__

    @property
    def _wires(self) -> tuple[str, ...]:
        """What it sends in other dtypes, if it does."""
        wires = ("sends", self.forward_dtype), ("backward", self.backward_dtype)
        return tuple(
            f"{word} in {DTYPE_NAMES[dtype]}" for word, dtype in wires if dtype is not None
        )

    @property
    def ends(self) -> str:
        """Both specs with their mesh, or their meshes: the first line of the text."""
        start, _ = _told_apart(self.src, self.dst)
        return f"{start} -> {self.dst} on {self.dst.mesh}"

    @property
    def step_bytes(self) -> tuple[int, ...]:
        """Bytes that the busiest rank sends in each step."""
        wire = wire_specs(self)
        return tuple(map(_sent, self.steps, wire, wire[1:]))

    def explain(self, topology: Topology | None = None) -> Any:
        """Return a table of the steps with specs, bytes, time and peak memory.

        Args:
            topology: The machine; by default the topology that the program was planned on, and a
                single node if it has none.

        Returns:
            A table that prints as text, in `rich` and as HTML in a notebook.
        """
        on = as_topology("Program.explain", topology, self.topology)
        return explain_program_hook.call(self, on)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return mimebundle_hook.call(self)


def _told_apart(one: Spec, other: object) -> tuple[str, str]:
    """The texts of two specs, with their meshes where those differ."""
    if not isinstance(other, Spec) or one.mesh == other.mesh:
        return str(one), str(other)
    return f"{one} on {one.mesh}", f"{other} on {other.mesh}"


def as_topology(where: str, topology: Topology | None, default: Topology | None = None) -> Topology:
    """Return `topology`, else `default`, else a single node; raise if it is not a `Topology`."""
    if topology is not None and not isinstance(topology, Topology):
        fail(
            where,
            f"topology {topology!r}",
            "topology must be a Topology",
            "fs.Topology.node(), fs.Topology.cluster(8) or fs.Topology.of({...})",
        )
    return topology or default or Topology.node()


def _type_problems(src: object, steps: object) -> list[Problem]:
    if not isinstance(src, Spec):
        return [Problem(f"Program({src!r}, ...)", "src must be a Spec", "give its spec")]
    fix = "fs.AllGather('x', 0), say, in a tuple; or plan with fs.redistribute"
    if not isinstance(steps, list | tuple):
        return [Problem(f"steps {steps!r}", "steps must be a tuple of steps", fix)]
    return [
        Problem(f"step {place}, {step!r}", "every step must be an instance of fshard's step types", fix)
        for place, step in enumerate(steps)
        if not isinstance(step, Step)
    ]


def carries(wire: object, dtype: torch.dtype) -> bool:
    """Whether a tensor of `dtype` may be sent in `wire`: one kind of numbers, booleans in integers.

    >>> carries(torch.bfloat16, torch.float32), carries(torch.bfloat16, torch.int64)
    (True, False)
    """
    if not isinstance(wire, torch.dtype):
        return False
    return _numbers(wire) == _numbers(dtype) or (
        dtype == torch.bool and _numbers(wire) == "integer"
    )


def _numbers(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "boolean"
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"


def wire_problems(src: Spec, wires: Iterable[torch.dtype | None]) -> list[Problem]:
    """What is wrong with sending a tensor of `src` in other dtypes."""
    return [
        Problem(
            f"{src} sent in {wire!r}",
            "the dtype that is sent must be of the same kind: floating for floating, integer for integer",
            "torch.bfloat16 for floating dtypes, or leave it out",
        )
        for wire in wires
        if wire is not None and not carries(wire, src.dtype)
    ]


def as_types(exclude: object) -> tuple[Any, ...]:
    """Canonical form of one step type or several: always a tuple, of whatever was given.

    >>> as_types(AllGather) == as_types([AllGather])
    True
    """
    if isinstance(exclude, str | type) or not isinstance(exclude, Iterable):
        return (exclude,)
    return tuple(exclude)


def exclude_problems(exclude: Iterable[object]) -> list[Problem]:
    """What of `exclude` is no step type."""
    unknown = [each for each in exclude if each not in STEPS]
    if not unknown:
        return []
    meant = [_type_meant(each) for each in unknown]
    known = [f"fs.{name}" for name in dict.fromkeys(meant) if name is not None]
    fix = known[0] if len(known) == 1 else f"({', '.join(known)})"
    given = ", ".join(str(each) if isinstance(each, Step) else repr(each) for each in unknown)
    return [
        Problem(
            f"exclude={given}",
            "exclude must consist of step types",
            f"exclude={'(fs.AllGather, fs.AllToAll), say' if None in meant else fix}",
        )
    ]


def _type_meant(given: object) -> str | None:
    """The step type that a step, or a name, stands for."""
    word = given.replace("_", "").lower() if isinstance(given, str) else type(given).__name__
    names = (each.__name__ for each in STEPS)
    return next((name for name in names if word in (name, name.lower())), None)


def endpoint_problems(
    where: str,
    src: object,
    dst: object,
    fix: str = "spec.replace(partition=P(...)) makes the target",
) -> list[Problem]:
    """What keeps two values from being the ends of a change of layout: types, shapes."""
    if not isinstance(src, Spec) or not isinstance(dst, Spec):
        return [
            Problem(
                f"{where}({type(src).__name__}, {type(dst).__name__})",
                "both must be Specs",
                fix,
            )
        ]
    problems = []
    if src.shape != dst.shape:
        works = _works(lambda: dst.replace(shape=src.shape))
        problems.append(
            Problem(
                f"{src} -> {dst}",
                f"source and target must have the same global shape: {src.shape} is not {dst.shape}",
                f"reshape first; {'dst.replace(shape=src.shape)' if works else 'src.replace(...)'}"
                " keeps it",
            )
        )
    return problems


def _works(make: Callable[[], Spec]) -> bool:
    try:
        make()
    except ShardingError:
        return False
    return True


def check(prog: Program) -> None:
    """Fold `infer` over a program's steps anew; raises `ShardingError` where it does not hold."""
    Program(prog.src, prog.steps, prog.dst)


def _rebuild(
    src: Spec,
    steps: tuple[Step, ...],
    forward: torch.dtype | None,
    backward: torch.dtype | None,
    topology: Topology | None,
) -> Program:
    """Inverse of `Program.__reduce__`."""
    return Program(src, steps, forward_dtype=forward, backward_dtype=backward, topology=topology)


def with_topology(prog: Program, topology: Topology | None) -> Program:
    """Return `prog` with another remembered topology; its steps are not checked again."""
    if prog.topology == topology:
        return prog
    copy = object.__new__(Program)
    for name in Program.__slots__:  # type: ignore[attr-defined]
        object.__setattr__(copy, name, getattr(prog, name))
    object.__setattr__(copy, "topology", topology)
    return copy


def _canonical(step: Step, before: Spec, after: Spec) -> Step:
    """The step with the sizes its result has, so that equal steps are equal values."""
    match step:
        case AllSlice() | ReduceScatter():
            sizes = after.sizes[step.dim]
            return step if step.sizes == sizes else replace(step, sizes=sizes)
        case AllToAll():
            if after.is_even and not any(pair.sizes for pair in step.pairs):
                return step
            return way_back(way_back(step, before), after)
        case Exchange():
            return Exchange(after.partition, after.sizes, _other(after.mesh, before.mesh))
        case AllGather() | AllReduce() if step.to == "invariant" and step.kind != "sum":
            return replace(step, kind="sum")
        case _:
            return step


def _other(mesh: Mesh, old: Mesh) -> Mesh | None:
    return None if mesh == old else mesh


@lru_cache(maxsize=4096)
def _transpose(prog: Program, topology: Topology | None) -> Program:
    steps = [transpose(*each) for each in zip(prog.steps, prog.specs, strict=False)]
    start, end = prog.dst.dual, prog.src.dual
    try:
        return Program(
            start,
            steps[::-1],
            end,
            forward_dtype=prog.backward_dtype,
            backward_dtype=prog.forward_dtype,
            topology=topology,
        )
    except ShardingError as error:  # pragma: no cover - a bug of the table, not of the user
        raise AssertionError(f"the transpose of\n{prog}\ndoes not check") from error


def _launches(step: Step, src: Spec, dst: Spec) -> bool:
    return traffic(step, src, dst).launches > 0


def _sent(step: Step, src: Spec, dst: Spec) -> int:
    return traffic(step, src, dst).sent


def wire_specs(prog: Program) -> tuple[Spec, ...]:
    """A program's specs with the dtype that is sent."""
    if prog.forward_dtype is None:
        return prog.specs
    return tuple(spec._with(dtype=prog.forward_dtype) for spec in prog.specs)


@lru_cache(maxsize=4096)
def _cost(prog: Program, topology: Topology) -> Cost:
    wire = wire_specs(prog)
    triples = list(zip(prog.steps, wire[:-1], wire[1:], strict=True))
    moved = [traffic(*each) for each in triples]
    return Cost(
        time=sum(step_time(topology, *each) for each in triples),
        bytes_sent=sum(each.sent for each in moved),
        bytes_received=sum(each.received for each in moved),
        peak_memory=max(map(max_local_nbytes, (prog.src, *wire, prog.dst))),
        launches=sum(each.launches for each in moved),
        messages=sum(each.messages for each in moved),
    )


@Hook
def run_program_hook(prog: Program, local: Any, *, async_op: bool) -> Any:
    """`Program.__call__`; set by `run/execute.py`."""
    raise NotImplementedError


@Hook
def simplify_hook(prog: Program, topology: Topology, exclude: tuple[type, ...]) -> Program:
    """`Program.simplify`; set by `program/simplify.py`."""
    raise NotImplementedError


@Hook
def explain_program_hook(prog: Program, topology: Topology) -> Any:
    """`Program.explain`; set by `show/program_table.py`."""
    raise NotImplementedError
