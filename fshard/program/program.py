"""`Program`: a source spec, typed steps and a target spec, as a value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch

from fshard._torch.dynamo import run_uncompiled
from fshard._util.errors import Problem, ShardingError, fail, raise_if
from fshard._util.hooks import Hook
from fshard._util.notebook_view import NotebookView, table_of
from fshard._util.text import below, columns, folded
from fshard._util.tracebacks import hide_frames
from fshard.layout.partition_spec import LINEAR
from fshard.layout.spec import DTYPE_NAMES, Spec
from fshard.program.cost.model import Cost, step_time
from fshard.program.cost.rank_loads import busiest_bytes, union_ranks
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes, traffic
from fshard.program.infer import infer, reverse_all_to_all
from fshard.program.program_arguments import as_topology, as_types, wire_problems
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

OPTIONS = ("forward_dtype", "backward_dtype", "topology")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Program(NotebookView):
    """Sequence of steps from one spec to another, type-checked when it is built.

    `prog(local)` runs it and is differentiable: its backward pass runs `prog.T`.
    `fs.redistribute` plans the cheapest one; write one by hand to choose the steps.

    Args:
        src: The spec of the input.
        steps: The steps, each applicable to the spec that the one before results in.
        dst: The spec of the output, if it is to be checked.
        forward_dtype: The dtype that a run sends; the result has the dtype of `dst`.
        backward_dtype: The dtype that the transpose sends.
        topology: The machine that `cost`, `explain` and `simplify` assume by default, and that
            `fs.redistribute` planned on; None is a single node. Programs that differ in it alone
            are equal.

    Raises:
        ShardingError: If a step does not apply, or the steps do not lead to `dst`.

    Attributes:
        specs: The specs between the steps, `len(steps) + 1` of them.

    >>> import fshard as fs
    >>> src = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))
    >>> prog = fs.Program(src, (fs.AllGather("x", 0),))
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
            end, target = _spec_texts(specs[-1], dst)
            fail("Program", f"steps that lead from {src} to {end}",
                 f"they must lead to the target, {target}",
                 "leave dst out, or plan with fs.redistribute")  # fmt: skip
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
        options = {name: getattr(self, name) for name in OPTIONS}
        return partial(Program, **options), (self.src, self.steps)

    # -- algebra ----------------------------------------------------------------------

    @property
    def T(self) -> Program:  # noqa: N802 - the mathematical name
        """Adjoint program from `dst.dual` to `src.dual`: the backward pass of this one.

        It remembers the same topology, and `forward_dtype` and `backward_dtype` trade places.

        Raises:
            ShardingError: If a step is not linear; `is_linear` is False then.

        >>> import fshard as fs
        >>> src = fs.Spec(fs.Mesh(x=2), fs.P(unreduced={"x"}), shape=(4,))
        >>> print(fs.Program(src, (fs.ReduceScatter("x", 0),)).T)
        f32[4@x] -> f32[4]{reduced: x} on Mesh(x=2)
          all_gather(x, dim 0) to reduced  f32[4]{reduced: x}  8 B
        """
        return _transpose(self, self.topology)

    @property
    def is_linear(self) -> bool:
        """True if a transpose exists: reductions are sums or averages, and casts are linear.

        False if a spec is unreduced by another reduction, even along an axis of size 1, if one is
        of reduced booleans, whose gradient would be a sum, or if a cast converts between integers
        or booleans and other kinds of dtype.
        """
        kinds = {kind for spec in self.specs for _, kind in spec.partition.unreduced_kinds}
        dual = not any(s.dtype == torch.bool and s.partition.reduced_kinds for s in self.specs)
        return dual and kinds <= set(LINEAR) and all(map(is_linear, self.steps, self.specs))

    @property
    def is_local(self) -> bool:
        """True if it runs without communication."""
        return not num_launches(self)

    def then(self, other: Program) -> Program:
        """Compose this program with `other`, which runs after it; also written `>>`.

        If the topologies differ, the result remembers that of this program, or of `other` if this
        one has no steps or no topology. Pass one to `cost`, `explain` or `simplify` to override.

        Args:
            other: A program whose `src` equals this program's `dst`, and which sends the same
                dtypes.

        Returns:
            The program from `self.src` to `other.dst`.

        Raises:
            ShardingError: If the specs do not meet, or if the dtypes that are sent differ.

        >>> import fshard as fs
        >>> a = fs.Spec(fs.Mesh(x=2, y=2), fs.P("x", "y"), shape=(4, 4))
        >>> b, c = a.replace(partition=fs.P(None, "y")), a.replace(partition=fs.P())
        >>> print(fs.redistribute(a, b) >> fs.redistribute(b, c))
        f32[4@x,4@y] -> f32[4,4] on Mesh(x=2, y=2)
          all_gather(x, dim 0)  f32[4,4@y]  16 B
          all_gather(y, dim 1)  f32[4,4]    32 B
        """
        if self.dst != other.src:
            end, start = _spec_texts(self.dst, other.src)
            fail("Program.then", f"a program to {end}, then one from {start}",
                 "the second must begin with the spec that the first ends with",
                 f"fs.redistribute({end}, {start}) between them")  # fmt: skip
        first, second = ((prog.forward_dtype, prog.backward_dtype) for prog in (self, other))
        if first != second and self.steps and other.steps:
            fail("Program.then",
                 "; then ".join(", ".join(p._wire_texts) or "its own dtype" for p in (self, other)),
                 "both must send the same dtypes", "run one after the other")  # fmt: skip
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
        """Return an equal or cheaper program with the same source, target and value.

        Local rewrites (`program/simplify.py`) cancel inverse steps, fuse neighbours, do slices
        early and gathers late, and cast on the side where fewer bytes are sent. The time or the
        number of steps decreases; the time, the time including the transpose, and the peak memory
        never increase. `fs.redistribute(prog.src, prog.dst)` plans from scratch instead.

        Floating-point sums may be taken in another order, averages may round less often, and the
        partial sums of an unreduced target may be others of the same sum.

        Args:
            topology: The machine; by default the topology that the program was planned on, and a
                single node if it has none. The result remembers it.
            exclude: Step type or types not to introduce; those in the program may stay.

        Returns:
            The program, with the same `forward_dtype` and `backward_dtype`.

        Raises:
            ShardingError: If `topology` or `exclude` is of another type.

        After Rink et al., arXiv 2112.01075, and the identities of Shardy's collectives.

        >>> import fshard as fs
        >>> src = fs.Spec(fs.Mesh(x=2, y=2), fs.P("y", unreduced={"x"}), shape=(4096, 4096))
        >>> steps = (fs.AllReduce("x"), fs.AllGather("y", 0), fs.AllSlice("x", 1))
        >>> print(fs.Program(src, steps).simplify())
        f32[4096@y,4096]{unreduced: x} -> f32[4096,4096@x] on Mesh(x=2, y=2)
          reduce_scatter(x, dim 1)  f32[4096@y,4096@x]  16,777,216 B
          all_gather(y, dim 0)      f32[4096,4096@x]    16,777,216 B
        """
        on = as_topology(
            "Program.simplify", topology, self.topology, (self.src.mesh, self.dst.mesh)
        )
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

        Raises:
            ShardingError: If `topology` is of another type.

        >>> import fshard as fs
        >>> src = fs.Spec(fs.Mesh(x=16), fs.P("x"), shape=(1024, 1024))
        >>> prog = fs.Program(src, (fs.AllGather("x", 0),), topology=fs.Topology.cluster())
        >>> print(prog.cost())
        21.9 µs, 3.75 MiB sent, 3.75 MiB received, 4.00 MiB peak, 1 launch, 15 messages
        >>> print(prog.cost(fs.Topology.node()))
        19.8 µs, 3.75 MiB sent, 3.75 MiB received, 4.00 MiB peak, 1 launch, 15 messages
        """
        return _cost(
            self,
            as_topology("Program.cost", topology, self.topology, (self.src.mesh, self.dst.mesh)),
        )

    # -- running ----------------------------------------------------------------------

    @run_uncompiled
    def __call__(self, local: Any, *, async_op: bool = False) -> Any:
        """Run the program on a local of spec `src`; differentiable unless `async_op`.

        Args:
            local: The local shard: a tensor under `torchrun` and in rank-local code, a tuple of the
                shards of all ranks, in rank order, in a simulation. Its shapes and dtype are those
                of `src`.
            async_op: Launch the last collective and return without waiting for it.

        Returns:
            The local of spec `dst`, of the same type, or with `async_op` a `Pending` whose
            `.wait()` returns it. It may share memory with `local` if no step changes it.

        Raises:
            ShardingError: If `local` does not fit `src`.

        >>> import fshard as fs
        >>> import torch
        >>> src = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))
        >>> fs.Program(src, (fs.AllGather("x", 0),))((torch.zeros(2), torch.ones(2)))
        (tensor([0., 0., 1., 1.]), tensor([0., 0., 1., 1.]))
        """
        try:
            return run_program_hook.call(self, local, async_op=async_op)
        except Exception as error:
            hide_frames(error)
            raise

    # -- text -------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = folded(", ".join((self.ends, *self._wire_texts)))
        rows = [
            (str(step), str(after), f"{sent:,} B")
            for step, after, sent in zip(self.steps, self.specs[1:], self.step_bytes, strict=True)
        ]
        lines += columns(rows, right={2}) or below([(a, f"{b}  {c}") for a, b, c in rows])
        return "\n".join(lines if rows else [*lines, "  (nothing to do)"])

    __repr__ = __str__

    @property
    def _wire_texts(self) -> tuple[str, ...]:
        """Texts of the dtypes that are sent, if they are not the specs' own."""
        wires = ("sends", self.forward_dtype), ("backward", self.backward_dtype)
        return tuple(
            f"{word} in {DTYPE_NAMES[dtype]}" for word, dtype in wires if dtype is not None
        )

    @property
    def ends(self) -> str:
        """Text of both specs and their mesh or meshes, the first line of `str`."""
        start, _ = _spec_texts(self.src, self.dst)
        return f"{start} -> {self.dst} on {self.dst.mesh}"

    @property
    def step_bytes(self) -> tuple[int, ...]:
        """Bytes that the busiest rank sends in each step."""
        wire = wire_specs(self)
        return tuple(moved.sent for moved in map(traffic, self.steps, wire, wire[1:]))

    def explain(self, topology: Topology | None = None, *, only: str | None = None) -> Any:
        """Return tables of the steps: specs, bytes, time and its parts, memory, lower bounds.

        Args:
            topology: The machine; by default the topology that the program was planned on, and a
                single node if it has none.
            only: "communication" for the steps that communicate, "compute" for the local ones;
                None shows all. Totals are those of all.

        Returns:
            Tables that print as text, in `rich` and as HTML in a notebook.

        Raises:
            ShardingError: If `topology` is of another type, or for another `only`.

        >>> import fshard as fs
        >>> src = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))
        >>> print(fs.Program(src, (fs.AllGather("x", 0),)).explain().steps)
        f32[4@x] -> f32[4] on Mesh(x=2), topology node
        step                  spec after  sent     time  memory
        ───────────────────────────────────────────────────────
        (start)               f32[4@x]                      8 B
        all_gather(x, dim 0)  f32[4]       8 B  6.75 µs    16 B
        """
        on = as_topology("Program.explain", topology, self.topology, (self.src.mesh, self.dst.mesh))
        if only not in (None, "communication", "compute"):
            rule = "only must be 'communication', 'compute' or None"
            fail("Program.explain", f"only={only!r}", rule, "only='communication'")
        return table_of(self, on, only)


def _spec_texts(spec: Spec, other: object) -> tuple[str, str]:
    """Return the texts of two specs, with their meshes if those differ."""
    if not isinstance(other, Spec) or spec.mesh == other.mesh:
        return str(spec), str(other)
    return f"{spec} on {spec.mesh}", f"{other} on {other.mesh}"


def _type_problems(src: object, steps: object) -> list[Problem]:
    if not isinstance(src, Spec):
        return [Problem(f"Program({src!r}, ...)", "src must be a Spec", "give its spec")]
    fix = "fs.AllGather('x', 0), say, in a tuple; or plan with fs.redistribute"
    if not isinstance(steps, list | tuple):
        return [Problem(f"steps {steps!r}", "steps must be a tuple of steps", fix)]
    return [
        Problem(f"step {i}, {step!r}", "every step must be an instance of fshard's step types", fix)
        for i, step in enumerate(steps)
        if not isinstance(step, Step)
    ]


def with_topology(prog: Program, topology: Topology | None) -> Program:
    """Return `prog` with another remembered topology."""
    if prog.topology == topology:
        return prog
    options = {name: getattr(prog, name) for name in OPTIONS}
    return Program(prog.src, prog.steps, **options | {"topology": topology})


def _canonical(step: Step, before: Spec, after: Spec) -> Step:
    """Return the step with the sizes of its result, so that equal steps are equal values."""
    match step:
        case AllSlice() | ReduceScatter():
            sizes = after.sizes[step.dim]
            return step if step.sizes == sizes else replace(step, sizes=sizes)
        case AllToAll():
            if after.is_even and not any(pair.sizes for pair in step.pairs):
                return step
            return reverse_all_to_all(reverse_all_to_all(step, before), after)
        case Exchange():
            mesh = None if after.mesh == before.mesh else after.mesh
            return Exchange(after.partition, after.sizes, mesh)
        case AllGather() | AllReduce() if step.to == "invariant" and step.kind != "sum":
            return replace(step, kind="sum")
        case _:
            return step


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


def wire_specs(prog: Program) -> tuple[Spec, ...]:
    """Return a program's specs with the dtype that is sent."""
    if prog.forward_dtype is None:
        return prog.specs
    return tuple(spec._with(dtype=prog.forward_dtype) for spec in prog.specs)


@lru_cache(maxsize=4096)
def program_time(prog: Program, topology: Topology) -> float:
    """Return the seconds of a program, without the bytes of its busiest rank.

    The bytes take longer: a rank that sends most over several steps is looked for among all ranks.
    """
    return sum(step_time(topology, *triple) for triple in _triples(prog))


def num_launches(prog: Program) -> int:
    """Return the number of collectives of a program."""
    return sum(t.launches for t in map(traffic, prog.steps, prog.specs, prog.specs[1:]))


def peak_memory(prog: Program) -> int:
    """Return the bytes of the largest local between the steps of a program."""
    return max(map(max_local_nbytes, (prog.src, *wire_specs(prog), prog.dst)))


def _triples(prog: Program) -> list[tuple[Step, Spec, Spec]]:
    """Return the steps with the specs before and after them, as they are sent."""
    wire = wire_specs(prog)
    return list(zip(prog.steps, wire[:-1], wire[1:], strict=True))


@lru_cache(maxsize=4096)
def _cost(prog: Program, topology: Topology) -> Cost:
    wire, triples = wire_specs(prog), _triples(prog)
    moved = [traffic(*triple) for triple in triples]
    sent, received = sum(t.sent for t in moved), sum(t.received for t in moved)
    devices = prog.src.mesh.devices
    differ = any(any(spec.sizes) or spec.mesh.devices != devices for spec in wire) or any(
        t.launches and a.mesh != b.mesh for t, (_, a, b) in zip(moved, triples, strict=True)
    )
    if differ and sum(t.launches for t in moved) > 1:  # the busiest ranks of steps may be several
        sent, received = busiest_bytes(triples, union_ranks(spec.mesh for spec in wire))
    return Cost(
        time=program_time(prog, topology),
        bytes_sent=sent,
        bytes_received=received,
        peak_memory=peak_memory(prog),
        launches=sum(t.launches for t in moved),
        messages=sum(t.messages for t in moved),
    )


@Hook
def run_program_hook(prog: Program, local: Any, *, async_op: bool) -> Any:
    """`Program.__call__`; set by `run/execute.py`."""
    raise NotImplementedError


@Hook
def simplify_hook(prog: Program, topology: Topology, exclude: tuple[type, ...]) -> Program:
    """`Program.simplify`; set by `program/simplify.py`."""
    raise NotImplementedError
