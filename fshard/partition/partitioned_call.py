"""`PartitionedCall`: one call planned by `fs.partition`, its cost and execution."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import fx

from fshard._torch.fake_tensors import FakeTensor, FunctionalTensor
from fshard._torch.functorch import forward_ad_level, is_transformed
from fshard._torch.memory import data_address
from fshard._torch.modes import current_dispatch_mode
from fshard._torch.operators import has_registered_gradient
from fshard._torch.symbolic_numbers import Accepts
from fshard._util.errors import fail
from fshard._util.notebook_view import table_of
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import TreeDef
from fshard.ops.core.call import instances_in
from fshard.partition import ir
from fshard.partition.execution import run_lines
from fshard.partition.execution.destinations import (
    reduced_in_place,
    without_identities,
    written_in_place,
)
from fshard.partition.execution.recomputation import RematerializedLines
from fshard.partition.execution.remat_plan import PlannedRemat, RematPlan
from fshard.partition.execution.saved_bytes import AbstractCall, SavedBytes
from fshard.partition.execution.schedule import schedule
from fshard.partition.execution.segments import Compiled, RankLines
from fshard.partition.ir import Line, Operation, Redistribution
from fshard.partition.step_cost.abstract_step import record_step
from fshard.partition.step_cost.memory_timeline import MemoryChoice, StepMemory
from fshard.partition.step_cost.roofline import Roofline
from fshard.partition.step_cost.step_record import StepRecord
from fshard.partition.step_cost.timing import memory_of, optimizer_bytes, roofline_of
from fshard.plan.batch.batch import Batch, busiest_bytes_of
from fshard.program.cost.model import Cost
from fshard.program.cost.topology import Topology
from fshard.program.program import Program
from fshard.program.program_arguments import as_topology
from fshard.run.compared_values import check_same_values
from fshard.run.creation import rank_on_mesh
from fshard.run.execute import compare_layouts
from fshard.run.global_tensors import unshard
from fshard.run.transports.base import is_observed, label_of
from fshard.run.transports.shape_only import RecordedCollective

WHERE = "a partitioned function"
CPU = torch.device("cpu")
Simulation = Callable[[Sequence[Any], Sequence[int | float]], list[Any]]
"""Function of all ranks' locals and the symbolic numbers, to the leaves of the results."""


@dataclass(frozen=True, slots=True)
class NonTensor:
    """Result that is not a tensor."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PartitionedCall:
    """Local program of a function for one kind of arguments, as `Partition.trace` returns it.

    Attributes:
        mesh: the mesh that it runs on.
        lines: local operations and programs, in order.
        in_specs: the specs of the arguments' tensors.
        out_specs: the specs of the results' leaves, None for a result that is not a tensor.
        written: indices of the arguments' tensors that the function writes.
        grad: True if some result has a gradient.
        source: the traced graph, before layouts.
        names: the paths of the arguments' tensors, then of their symbolic numbers.
        numbers: indices of the arguments' leaves that are numbers of any value.
        accepts: the values of those numbers that the trace holds for.
        requires_grad: for every tensor of the arguments, if its gradient is requested.
        number_types: the types of the symbolic numbers.
        device: the device of the arguments' tensors.
        remat: the policy by which the backward pass recomputes values.
        memory_choice: the plan that was chosen for a limit of memory, None without a limit.
        num_params: number of the first tensors of the arguments, which have layouts by `params=`.
    """

    mesh: Mesh
    lines: tuple[Line, ...]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec | None, ...]
    _inputs: tuple[int, ...]
    _outputs: tuple[Any, ...]
    written: tuple[int, ...]
    _tree: TreeDef
    _topology: Topology
    grad: bool
    source: fx.GraphModule
    names: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    accepts: Accepts | None = None
    requires_grad: tuple[bool, ...] = ()
    number_types: tuple[type, ...] = ()
    device: torch.device = CPU
    remat: PlannedRemat = None
    memory_choice: MemoryChoice | None = None
    num_params: int = 0
    _schedule: list[Line] = field(default_factory=list)
    _in_place: list[Line] = field(default_factory=list)
    _graphs: dict[tuple[int, bool], fx.GraphModule] = field(default_factory=dict)
    _functions: dict[tuple[int, bool, bool], Callable[..., tuple[Any, ...]]] = field(
        default_factory=dict
    )
    _simulation: list[Simulation] = field(default_factory=list)
    _derived: dict[object, Any] = field(default_factory=dict)
    _compiled: Compiled | None = None

    def __reduce__(self) -> NoReturn:
        fail("pickle", "a PartitionedCall",
             "a plan must be made in the process that runs it",
             "pickle the Partition, and call trace(...) of its copy")  # fmt: skip

    @property
    def programs(self) -> tuple[Program, ...]:
        """All programs of the call, in order."""
        return tuple(line.program for line in self.lines if isinstance(line, Redistribution))

    @property
    def schedule(self) -> Sequence[Line]:
        """The lines in the order of execution, with coalesced redistributions."""
        if not self._schedule:
            outputs = [out for out in self._outputs if type(out) is int]
            lines = self.lines if self.grad else ir.without_grad_modes(self.lines)
            self._schedule[:] = schedule(lines, self._inputs, outputs, self._topology)
        return self._schedule

    @property
    def _rank_lines(self) -> Sequence[Line]:
        """The lines that a rank runs, whose results are written where they are needed."""
        # With the grad mode on, PyTorch writes no result into memory that is there.
        if self.grad or any(isinstance(line, ir.GradMode) for line in ir.flattened(self.schedule)):
            return self.schedule
        if not self._in_place:
            outputs = [out for out in self._outputs if type(out) is int]
            lines = without_identities(self.schedule, outputs)
            lines = written_in_place(lines, outputs)
            self._in_place[:] = reduced_in_place(lines, outputs, self.device)
        return self._in_place

    def cost(self, topology: Topology | None = None, *, backward: bool = False) -> Cost:
        """Return the cost of all launches, one after the other, without computation.

        Bytes are those of the rank that sends, or receives, most in the whole pass. Collectives in
        mapped functions count as the first rank launches them on zeros.

        Args:
            topology: the topology to cost them on; None is the one they were planned on.
            backward: return the cost of what runs backward instead: transposes, and what
                checkpointed calls and `remat` run again.
        """
        on = topology or self._topology
        plans_of = ir.backward_plans if backward else ir.forward_plans
        plans = [plan for line in self.schedule for plan in plans_of(line)]
        if backward and self.remat is not None:
            plans += [plan for line in self.remat_plan.lines for plan in ir.forward_plans(line)]
        leaves = (plan.leaves if isinstance(plan, Batch) else (plan,) for plan in plans)
        progs = tuple(x for x in itertools.chain(*leaves) if isinstance(x, Program))
        bodies = [plan.traffic for plan in plans if isinstance(plan, RecordedCollective)]
        sent, received = busiest_bytes_of(progs)
        return replace(
            Cost.in_turn(plan.cost(on) for plan in plans),
            bytes_sent=sent + sum(x.sent for x in bodies),
            bytes_received=received + sum(x.received for x in bodies),
        )

    @property
    def _abstract(self) -> AbstractCall:
        return AbstractCall(
            self.mesh, self._rank_lines, self._inputs,
            [out for out in self._outputs if type(out) is int], self.in_specs,
            self.requires_grad, self.number_types, self.device, WHERE, self._compiled,
        )  # fmt: skip

    @property
    def remat_plan(self) -> RematPlan:
        """The lines that the backward pass runs again, by the policy `remat`."""
        if "plan" not in self._derived:
            self._derived["plan"] = self._abstract.remat_plan(self.remat if self.grad else None)
        plan: RematPlan = self._derived["plan"]
        return plan

    def saved_bytes(self, rank: int | None = None) -> SavedBytes:
        """Return the bytes that a rank keeps for the backward pass.

        PyTorch's derivatives run once on tensors without values.

        Args:
            rank: the rank; None is the first of the mesh.

        >>> import torch
        >>> from fshard import Mesh, P, partition
        >>> part = partition(lambda w, x: (x @ w).tanh(), mesh=Mesh(x=2), in_specs=P("x"))
        >>> call = part.trace(torch.ones(4, 8, requires_grad=True), torch.ones(2, 4))
        >>> call.saved_bytes().total, call.saved_bytes().gathered  # x is an argument
        (32, 0)
        """
        rank = self.mesh.ranks[0] if rank is None else rank
        if not self.grad:
            return SavedBytes({}, 0)
        if rank not in self._derived:
            self._derived[rank] = self._abstract.saved_bytes(self.remat_plan, rank)
        saved: SavedBytes = self._derived[rank]
        return saved

    def step_record(self, rank: int | None = None) -> StepRecord:
        """Return what a rank runs and holds in a step, by a run on tensors without values.

        Args:
            rank: the rank; None is the first of the mesh.
        """
        rank = self.mesh.ranks[0] if rank is None else rank
        if ("step", rank) not in self._derived:
            self._derived["step", rank] = record_step(
                self._abstract,
                self.remat_plan,
                self.names,
                rank,
                num_params=self.num_params,
                grad=self.grad,
            )
        record: StepRecord = self._derived["step", rank]
        return record

    def roofline(self, topology: Topology | None = None, *, rank: int | None = None) -> Roofline:
        """Return the operations and collectives of a step, forward and backward, with their times.

        Args:
            topology: the machine; None is the topology that the layouts were planned on.
            rank: the rank; None is the first of the mesh.

        Raises:
            ShardingError: for an operation that does not run on tensors without values.

        >>> import torch
        >>> from fshard import Mesh, P, partition
        >>> part = partition(lambda w, x: x @ w, mesh=Mesh(x=2), params=P(), in_specs=P("x"))
        >>> call = part.trace(torch.ones(4, 8, requires_grad=True), torch.ones(2, 4))
        >>> call.roofline().flops  # 2 * 1 * 4 * 8 forward; x needs no gradient
        128
        """
        on = as_topology("roofline", topology, self._topology, (self.mesh,))
        return roofline_of(self.step_record(rank), on)

    def memory(
        self, *, optimizer: Any = 0, topology: Topology | None = None, rank: int | None = None
    ) -> StepMemory:
        """Return the bytes that a rank holds over a step, forward and backward.

        Args:
            optimizer: the state of an optimizer, which is held all the time: a multiple of the
                bytes of the parameters (2 for Adam), a tree of specs or pairs, or an optimizer of
                `fs.state`.
            topology: the machine whose times the timeline has; None is that of the layouts.
            rank: the rank; None is the first of the mesh.

        Raises:
            ShardingError: for an operation that does not run on tensors without values.

        >>> import torch
        >>> from fshard import Mesh, P, partition
        >>> part = partition(lambda w, x: x @ w, mesh=Mesh(x=2), params=P(), in_specs=P("x"))
        >>> call = part.trace(torch.ones(4, 8, requires_grad=True), torch.ones(2, 4))
        >>> {name: n for name, n in call.memory(optimizer=2).at_peak.items() if n}
        {'parameters': 128, 'arguments': 16, 'optimizer': 256, 'gradients': 128, 'temporary': 192}
        """
        record = self.step_record(rank)
        params = [s for s, grad in zip(self.in_specs, self.requires_grad, strict=True) if grad]
        state_bytes = optimizer_bytes(optimizer, params, record.rank)
        return memory_of(record, self.roofline(topology, rank=rank), state_bytes)

    def graph(self, rank: int = 0) -> fx.GraphModule:
        """Return the FX graph of local operations and programs that a rank runs."""
        return self._graph(rank, in_place=False)

    def _graph(self, rank: int, *, in_place: bool) -> fx.GraphModule:
        """Return the graph of a rank; those `in_place` write results where they are needed."""
        key = rank, in_place
        if key not in self._graphs:
            outputs = [value if type(value) is int else None for value in self._outputs]
            lines = self._rank_lines if in_place else self.schedule
            self._graphs[key] = run_lines.rank_graph(lines, rank, self._inputs, outputs)
        return self._graphs[key]

    def explain(self, topology: Topology | None = None, *, only: str | None = None) -> Any:
        """Return tables of every operation's layout and bytes, and of its FLOPs and time.

        They print as text, in color in a terminal, and as HTML in a notebook. The bytes of a row
        are those of its busiest rank, "sent" is that of the rank that sends most in the whole pass.

        Args:
            topology: the topology to cost the step on; None is the one it was planned on.
            only: "layouts", "compute" or "communication" for a table of these alone, or "modules"
                for the times of every `torch.nn.Module` whose forward runs.

        Raises:
            ShardingError: for another `only`.
        """
        on = as_topology("explain", topology, self._topology, (self.mesh,))
        return table_of(self, on, only)

    def __str__(self) -> str:
        return str(self.explain())

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        bundle: dict[str, str] = self.explain()._repr_mimebundle_()
        return bundle

    def run(self, locals_: Sequence[Any], numbers: Sequence[int | float] = ()) -> list[Any]:
        """Run the function on the locals of its tensors.

        Args:
            locals_: for every tensor of the arguments its local on this rank, or the tuple of the
                locals of all ranks.
            numbers: the values of the symbolic numbers.

        Returns:
            The leaves of the results, locals in the same form.
        """
        # No result has a gradient, as of a training step: nothing is saved for a backward pass.
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            return self._run(locals_, numbers)

    def _run(self, locals_: Sequence[Any], numbers: Sequence[int | float]) -> list[Any]:
        outputs = self._outputs
        if is_transformed() and forward_ad_level() >= 0:
            self._check_forward_mode()
        if self._recomputes(locals_):
            return self._run_rematerialized(locals_, numbers)
        for local in locals_:
            if not isinstance(local, torch.Tensor):
                break
        else:
            results = self._function(rank_on_mesh(self.mesh, WHERE))(*locals_, *numbers)
            return [result if type(out) is int else out.value
                    for out, result in zip(outputs, results, strict=True)]  # fmt: skip
        if not self._simulation:
            self._simulation.append(self._all_ranks())
        return self._simulation[0](locals_, numbers)

    def _check_forward_mode(self) -> None:
        """Raise `ShardingError` for operations that PyTorch gives no tangent."""
        calls = [line.strategy.call for line in self.lines if isinstance(line, Operation)]
        for call in calls:
            # Functions with tangents run in the place of fshard's own operations.
            if has_registered_gradient(call.op) and call.op.namespace != "fshard":
                fail(WHERE, f"the torch.library operation {call.op} in forward mode",
                     "register_autograd registers a gradient and no tangent, for which PyTorch "
                     "takes zero", "reverse mode, by torch.autograd.grad")  # fmt: skip

    def _recomputes(self, locals_: Sequence[Any]) -> bool:
        """Return True if a call has a backward pass that recomputes values.

        Transforms of `torch.func` and graphs that are recorded keep what autograd keeps.
        """
        if self.remat is None or not torch.is_grad_enabled() or is_transformed():
            return False
        tensors = instances_in(locals_, torch.Tensor)
        plain = not any(isinstance(x, FakeTensor | FunctionalTensor) or x.is_meta for x in tensors)
        return plain and bool(self.remat_plan.units)

    def _run_rematerialized(
        self, locals_: Sequence[Any], numbers: Sequence[int | float]
    ) -> list[Any]:
        """Run the lines under hooks that recompute what the policy does not keep."""
        on_rank = all(isinstance(local, torch.Tensor) for local in locals_)
        rank = rank_on_mesh(self.mesh, WHERE) if on_rank else None
        key = "code", rank, is_observed()
        if key not in self._derived:
            if rank is not None:
                self._compare_ranks(rank)
            abstract = self._abstract
            self._derived[key] = RematerializedLines(
                self.remat_plan, abstract.lines, abstract.inputs, abstract.outputs, self.names,
                RankLines(self.mesh, rank, observed=key[2]),
            )  # fmt: skip
        repeated = numbers if on_rank else [(number,) * self.mesh.size for number in numbers]
        results = iter(self._derived[key].run([*locals_, *repeated])[0])
        leaves: list[Any] = []
        for out, spec in zip(self._outputs, self.out_specs, strict=True):
            value = out.value if type(out) is not int else next(results)
            is_number = not on_rank and type(out) is int and spec is None
            leaves.append(value[0] if is_number else value)
        return leaves

    def _function(self, rank: int) -> Callable[..., tuple[Any, ...]]:
        """Return the code of a rank, a function of its locals and the numbers."""
        # Transforms, and tracers of graphs, have no rules for results that are written into memory.
        plain = current_dispatch_mode() is None and not is_transformed()
        key = rank, is_observed(), plain and not torch.compiler.is_compiling()
        if key not in self._functions:
            self._compare_ranks(rank)
            graph = self._graph(rank, in_place=key[2])
            self._functions[key] = run_lines.compile_graph(graph, key[1])
        return self._functions[key]

    def _compare_ranks(self, rank: int) -> None:
        """Raise `ShardingError` if ranks close over other values, or call it on other layouts."""
        for x in self.closures:
            spec = Spec(self.mesh, PartitionSpec(), shape=x.shape, dtype=x.dtype)
            check_same_values(f"{WHERE}, closed over", x, spec)
        if self.programs:
            call = f"{WHERE} of {', '.join(map(str, self.in_specs))}"
            compare_layouts(label_of(WHERE, self.mesh), self.programs, rank, call)

    def _all_ranks(self) -> Simulation:
        """Return the function of all ranks' locals: of one rank alone its code."""
        outputs = [*zip(self._outputs, self.out_specs, strict=True)]
        if self.mesh.size == 1 and all(isinstance(x, run_lines.LOCAL_LINES) for x in self.lines):
            function = self._function(self.mesh.ranks[0])

            def run_one(locals_: Sequence[Any], numbers: Sequence[int | float]) -> list[Any]:
                results = function(*[x for (x,) in locals_], *numbers)
                return [out.value if type(out) is not int else (result,) if spec else result
                        for (out, spec), result in zip(outputs, results, strict=True)]  # fmt: skip

            return run_one
        ids = {out for out, _ in outputs if type(out) is int}
        prepared = run_lines.prepare_lines(self.schedule, self.mesh, ids)

        def run_all(locals_: Sequence[Any], numbers: Sequence[int | float]) -> list[Any]:
            replicated = [(number,) * self.mesh.size for number in numbers]
            env = dict(zip(self._inputs, [*locals_, *replicated], strict=True))
            run_lines.run_on_all_ranks(prepared, self.mesh, env)
            return [out.value if type(out) is not int else env[out] if spec else env[out][0]
                    for out, spec in outputs]  # fmt: skip

        return run_all

    @property
    def closures(self) -> list[torch.Tensor]:
        """Tensors that the function closes over."""
        if "closures" not in self._derived:
            lines = (line for line in self.lines if isinstance(line, ir.ClosureTensor))
            self._derived["closures"] = [line.tensor for line in lines]
        closures: list[torch.Tensor] = self._derived["closures"]
        return closures

    def check_closures(self, where: str) -> None:
        """Raise `ShardingError` if a tensor that the function closes over requires grad."""
        if any(x.requires_grad for x in self.closures):
            fail(where, "a closure that requires grad, in a graph of torch.compile",
                 "tensors that the function closes over are constants of a graph",
                 "pass it as an argument")  # fmt: skip

    def check_disjoint(self, tensors: Sequence[Any], where: str) -> None:
        """Raise `ShardingError` if a written tensor shares memory with another or a closure."""
        closures = set(map(data_address, self.closures)) - {0}
        owners: dict[int, int] = {}
        for index in sorted(range(len(tensors)), key=lambda index: index not in self.written):
            for local in instances_in(tensors[index], torch.Tensor):
                address = data_address(local)
                if address in closures and index in self.written:
                    fail(where, f"{self.names[index]}, which is written, in the memory of a tensor "
                         "that the function closes over",
                         "the function was traced for tensors that share no memory",
                         "use the argument alone: torch.func.functional_call(module, params, args) "
                         "in place of module(*args)")  # fmt: skip
                owner = owners.setdefault(address, index) if address else index
                if owner != index and owner in self.written:
                    fail(where, f"{self.names[index]} in the memory of "
                         f"{self.names[owner]}, which is written",
                         "the function was traced for tensors that share no memory",
                         "give it a clone() of one of them")  # fmt: skip

    def write_global_tensors(self, tensors: Sequence[Any], locals_: Sequence[Any]) -> None:
        """Copy what the function wrote to the locals of plain tensors back into the tensors."""
        for index in self.written:
            if not isinstance(tensors[index], Sharded):
                pair = Sharded(locals_[index], self.in_specs[index])
                ir.write_value(tensors[index], unshard(pair))
