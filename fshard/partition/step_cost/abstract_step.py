"""Run of one rank's step on tensors without values, which records what runs and what is held.

The lines run as they run on the rank, one by one, and the backward pass is autograd's. So the
record has PyTorch's own derivatives, the operations that checkpoints and `remat` run again, and the
order in which collectives are launched and awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fshard._torch.fake_tensors import FakeTensorMode, without_fake_tensor_logs
from fshard.layout.tree import tensors_in
from fshard.partition.execution.recomputation import RematerializedLines
from fshard.partition.execution.remat_plan import RematPlan
from fshard.partition.execution.saved_bytes import (
    STAND_INS,
    AbstractCall,
    ShapesOfRegion,
    moved_arguments,
    named_errors,
)
from fshard.partition.execution.segments import RankLines
from fshard.partition.ir import (
    CheckpointedLines,
    ClosureTensor,
    CustomGradient,
    Factory,
    LaunchBatch,
    Line,
    Operation,
    Redistribution,
    RegionCall,
    WaitBatch,
    Write,
    flattened,
    operands_of,
    specs_text,
)
from fshard.partition.step_cost.roofline import BACKWARD
from fshard.partition.step_cost.step_record import RecordedLine, StepRecord, StepRecorder
from fshard.partition.step_cost.step_transport import GlooStepTransport, StepTransport
from fshard.program.program import Program
from fshard.run.transports.base import as_rank, unobserved


def record_step(
    call: AbstractCall, plan: RematPlan, names: Sequence[str], rank: int, *,
    num_params: int, grad: bool,
) -> StepRecord:  # fmt: skip
    """Return the record of a rank's step, with a backward pass if `grad`.

    Args:
        call: the lines, and the tensors that they run on.
        plan: the values that the backward pass recomputes.
        names: the paths of the arguments.
        grad: True if some result has a gradient.
        rank: the rank.
        num_params: number of the first arguments, which are parameters, as all with gradients are.

    Raises:
        ShardingError: for an operation that does not run without values.
    """
    record = StepRecord(call.mesh, rank)
    recorder = StepRecorder(record)
    run = _MarkedLines(call, plan, recorder, rank)
    transport = GlooStepTransport if call.device.type == "cpu" else StepTransport
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.set_grad_enabled(grad),
        as_rank(transport(rank, call.mesh, recorder=recorder)),
        unobserved(),
        without_fake_tensor_logs(),
        named_errors(call.where),
    ):
        locals_: list[Any] = [
            torch.empty(spec.local_shape(rank), dtype=spec.dtype, device=call.device)
            .requires_grad_(requires_grad)
            for spec, requires_grad in zip(call.in_specs, call.requires_grad, strict=True)
        ]  # fmt: skip
        for i, (x, name) in enumerate(zip(locals_, names, strict=False)):
            category = "parameters" if x.requires_grad or i < num_params else "arguments"
            with recorder.at(RecordedLine(None, name)):
                recorder.allocate(x, category)
        record.arguments = len(record.entries)
        numbers = [STAND_INS[kind] for kind in call.numbers]
        with recorder:
            with saved_tensors_hooks(recorder.saved, lambda x: x):
                results, recomputation = run.lines.run([*locals_, *numbers])
            _run_backward(recorder, locals_, results, grad=grad)
        recorder.close()
        del results, recomputation, locals_
    return record


def _run_backward(
    recorder: StepRecorder, locals_: Sequence[torch.Tensor], results: Sequence[Any], *, grad: bool
) -> None:
    """Run the backward pass of all results, and mark the memory of the arguments' gradients."""
    outputs = [x for x in tensors_in(results) if x.requires_grad] if grad else []
    if not outputs:
        return
    recorder.outside = BACKWARD
    with recorder.at(RecordedLine(None, "gradient of results")):
        cotangents = [torch.ones_like(x) for x in outputs]
    torch.autograd.backward(outputs, cotangents)
    for x in locals_:
        if x.grad is not None:
            recorder.set_category(x.grad, "gradients")


class _MarkedLines:
    """Lines of a call that run one by one on a rank, each marked in the record."""

    def __init__(
        self, call: AbstractCall, plan: RematPlan, recorder: StepRecorder, rank: int
    ) -> None:
        self.recorder, self.rank = recorder, rank
        self.ranks = RankLines(call.mesh, rank, call.compiled)
        self.gathered = moved_arguments(call.lines, call.inputs[: len(call.in_specs)])
        self.launches = {x.out: x for x in flattened(call.lines) if isinstance(x, LaunchBatch)}
        lines = [self.abstract(line) for line in call.lines]
        self.lines = RematerializedLines(plan, lines, call.inputs, call.outputs, (),
                                         self.ranks, each=True)  # fmt: skip
        self.lines.segments = [
            replace(segment, run=self.marked(segment.run, segment.lines[0], segment.outputs))
            for segment in self.lines.segments
        ]
        self.lines.units = [
            (self.marked(start, unit.lines[0], ()), self.marked(end, unit.lines[0], unit.outputs))
            for unit, (start, end) in zip(plan.units, self.lines.units, strict=True)
        ]

    def marked(
        self, run: Callable[..., Any], line: Line, outputs: Sequence[int]
    ) -> Callable[..., Any]:
        """Return the function of a line, marked in the record, with the categories of outputs."""
        categories = ["gathered" if value in self.gathered else "" for value in outputs]
        named = self.launches[line.source.value] if isinstance(line, WaitBatch) else line
        return self.recorder.marked(run, recorded_line(named), categories)

    def abstract(self, line: Line) -> Line:
        """Return a line that runs without values, and whose inner lines are marked."""
        if isinstance(line, RegionCall):
            return replace(line, region=_RecordedRegion(line, self.rank, self.recorder))  # type: ignore[arg-type]
        if isinstance(line, CheckpointedLines):
            inner = [self.abstract(x) for x in line.lines]
            return replace(line, call=_MarkedCheckpoint(line, inner, self))  # type: ignore[arg-type]
        return line


class _MarkedCheckpoint:
    """Checkpointed call whose lines run one by one, each marked in the record."""

    def __init__(self, line: CheckpointedLines, inner: Sequence[Line], lines: _MarkedLines) -> None:
        self.call, self.operands, self.outputs = line.call, line.operands, line.outputs
        last = {value: i for i, x in enumerate(inner) for value in operands_of(x)}
        self.steps = []
        for index, x in enumerate(inner):
            operands = tuple(dict.fromkeys(operands_of(x)))
            outputs = (x.out,) if hasattr(x, "out") else ()
            run = lines.marked(lines.ranks.compile([x], operands, outputs), x, outputs)
            dead = [v for v in (*operands, *outputs)
                    if last.get(v, -1) <= index and v not in line.outputs]  # fmt: skip
            self.steps.append((run, operands, outputs, dead))

    def run(self, _: Callable[..., Any], *args: Any) -> Any:
        """Run the call on its operands, in place of the function of all lines."""
        return self.call.run(self._lines, *args)

    def _lines(self, *args: Any) -> tuple[Any, ...]:
        env = dict(zip((ref.value for ref in self.operands), args, strict=True))
        for run, operands, outputs, dead in self.steps:
            results = run(*[env[value] for value in operands])
            env.update(zip(outputs, results, strict=True))
            del results
            for value in dead:
                env.pop(value, None)
        return tuple(env[value] for value in self.outputs)


class _RecordedRegion:
    """Mapped function that runs on tensors without values.

    One that reads values is recorded by its collectives alone, and its results.
    """

    def __init__(self, line: RegionCall, rank: int, recorder: StepRecorder) -> None:
        self.line, self.rank, self.recorder = line, rank, recorder
        self.__name__, self.out_specs = line.region.__name__, line.region.out_specs

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the results of the rank."""
        count = len(self.recorder.record.entries)
        try:
            return self.line.region(inputs)
        except Exception:  # noqa: BLE001 - the body is the user's, and may read values
            self.recorder.drop_operations(count)
        for collective in self.line.forward:
            self.recorder.add_collective(collective)
        return ShapesOfRegion(self.line, self.rank)(inputs)


def recorded_line(line: Line) -> RecordedLine:
    """Return the name and the layouts of a line."""
    value = getattr(line, "out", None)
    match line:
        case Operation():
            specs = specs_text(line.strategy.out_specs)
            return RecordedLine(value, line.name, specs, line.place, line.module)
        case Factory():
            return RecordedLine(value, line.name, str(line.spec))
        case Redistribution():
            name, spec = _program_name(line.program), str(line.program.dst)
            return RecordedLine(value, name, spec, module=line.module)
        case LaunchBatch():
            launches = line.batch.launches or line.batch.T.launches
            names = " and ".join(dict.fromkeys(launch.name for launch in launches))
            name = f"buffers of {names}" if names else "copies"
            return RecordedLine(value, name, module=line.module)
        case RegionCall():
            specs = specs_text(line.region.out_specs)
            return RecordedLine(value, line.region.__name__, specs, line.place, line.module)
        case Write():
            return RecordedLine(None, f"write {line.name}")
        case CustomGradient():
            return RecordedLine(value, "custom backward")
        case ClosureTensor():
            return RecordedLine(value, "closed-over tensor")
        case _:
            return RecordedLine(value, type(line).__name__.lower())


def _program_name(program: Program) -> str:
    """Return the name of a program's work on a rank's own memory."""
    sends = zip(program.steps, program.step_bytes, strict=True)
    names = " and ".join(dict.fromkeys(step.name for step, sent in sends if sent))
    return f"buffers of {names}" if names else program.steps[-1].name if program.steps else "copy"
