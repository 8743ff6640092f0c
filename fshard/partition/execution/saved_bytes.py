"""Memory that the backward pass of a call keeps, from a run on tensors without values.

The lines run on fake tensors of one rank's shapes, and hooks see which tensors autograd saves. So
the bytes are those of PyTorch's own derivatives, and which values are recomputed is a plan that is
the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fshard._torch.fake_tensors import FakeTensorMode, without_fake_tensor_logs
from fshard._torch.memory import storage_address
from fshard._util.dtypes import is_inexact
from fshard._util.errors import fail
from fshard._util.text import one_line
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.partition.execution.recomputation import RematerializedLines
from fshard.partition.execution.remat_plan import PlannedRemat, RematPlan, remat_candidates
from fshard.partition.execution.segments import Compiled, LineSegment, RankLines
from fshard.partition.ir import (
    CheckpointedLines,
    ClosureTensor,
    LaunchBatch,
    Line,
    Pick,
    Redistribution,
    RegionCall,
    WaitBatch,
)
from fshard.run.transports.base import as_rank, unobserved
from fshard.run.transports.shape_only import ShapeTransport

NOTHING = RematPlan(())
STAND_INS = {int: 7, float: 1.7}
"""Values of symbolic numbers, of which no simple difference is zero."""


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes that one rank keeps for the backward pass of a call.

    Memory counts once, and that of arguments and of tensors that the function closes over does not
    count: the caller holds it. Nor does memory that the body of a mapped function keeps, or a
    selective policy of `torch.utils.checkpoint` in the function.

    Attributes:
        values: bytes by value id of the line that defines the memory.
        gathered: bytes of arguments in other layouts, as gathered parameters.

    >>> SavedBytes({3: 64, 5: 8}, 64).total, SavedBytes({3: 64, 5: 8}, 64).activations
    (72, 8)
    """

    values: Mapping[int, int]
    gathered: int

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.values.values())

    @property
    def activations(self) -> int:
        """Bytes of computed values."""
        return self.total - self.gathered


@dataclass(frozen=True, slots=True, eq=False)
class AbstractCall:
    """Lines of a call in the order of execution, and the tensors that they run on.

    Attributes:
        mesh: the mesh.
        lines: the lines.
        inputs: the value ids of the arguments.
        outputs: the value ids of the results.
        in_specs: the specs of the first inputs.
        requires_grad: for each of them, if its gradient is requested.
        numbers: the types of the other inputs, which are numbers.
        device: the device of the tensors.
        where: name of the function in errors.
        compiled: functions of lines that other calls of these lines run, too; None for no cache.
    """

    mesh: Mesh
    lines: Sequence[Line]
    inputs: Sequence[int]
    outputs: Sequence[int]
    in_specs: Sequence[Spec]
    requires_grad: Sequence[bool]
    numbers: Sequence[type]
    device: torch.device
    where: str
    compiled: Compiled | None = None

    def remat_plan(self, remat: PlannedRemat) -> RematPlan:
        """Return the units that the backward pass recomputes, on every rank."""
        if remat is None:
            return NOTHING
        tensors = self.inputs[: len(self.in_specs)]
        candidates = remat_candidates(self.lines, tensors, remat, self.where)
        _, run = self._run(candidates, self.mesh.ranks[0])
        return candidates.restricted(run.values, run.internals)

    def saved_bytes(self, plan: RematPlan, rank: int) -> SavedBytes:
        """Return the bytes that a rank keeps if a plan's units are recomputed."""
        log, _ = self._run(plan, rank)
        moved = moved_arguments(self.lines, self.inputs[: len(self.in_specs)])
        gathered = sum(n for value, n in log.nbytes.items() if value in moved)
        return SavedBytes(MappingProxyType(log.nbytes), gathered)

    def _run(self, plan: RematPlan, rank: int) -> tuple[_SavedLog, Any]:
        """Run the lines on fake tensors; return what is saved, and what is recomputed."""
        lines = [_abstract(line, rank) for line in self.lines]
        run = RematerializedLines(plan, lines, self.inputs, self.outputs, (),
                                  RankLines(self.mesh, rank, self.compiled), each=True)  # fmt: skip
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.enable_grad(),
            as_rank(ShapeTransport(rank)),
            unobserved(),
            without_fake_tensor_logs(),
        ):
            locals_: list[Any] = [
                torch.empty(spec.local_shape(rank), dtype=spec.dtype, device=self.device)
                .requires_grad_(grad)
                for spec, grad in zip(self.in_specs, self.requires_grad, strict=True)
            ]  # fmt: skip
            log = _SavedLog(locals_)
            locals_ += [STAND_INS[kind] for kind in self.numbers]
            with saved_tensors_hooks(log.pack, lambda x: x), named_errors(self.where):
                _, recomputation = run.run(locals_, log.after)
        log.finish()
        return log, recomputation


@contextmanager
def named_errors(where: str) -> Iterator[None]:
    """Raise `ShardingError` for an operation that does not run without values."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - operations of others run in it
        fail(f"{where}: saved bytes", one_line(error),
             "each operation must run on tensors without values, and on the numbers 7 and 1.7",
             "a tensor in the place of the number; register_fake of an operation")  # fmt: skip


class _SavedLog:
    """Storages that are saved, each with the first line that defines it."""

    def __init__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.owners: dict[int, int | None] = dict.fromkeys(map(storage_address, arguments))
        self.saved: dict[int, torch.Tensor] = {}
        self.internal: list[int] = []
        self.nbytes: dict[int, int] = {}
        self.alive: list[Any] = [*arguments]

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Record a tensor that is saved."""
        if x.layout is torch.strided and self.saved.setdefault(storage_address(x), x) is x:
            self.internal.append(storage_address(x))
        return x

    def after(self, segment: LineSegment, env: Mapping[int, Any]) -> None:
        """Record the memory that a line defined: its results, and tensors that it saved beside."""
        (line,) = segment.lines
        out = getattr(line, "out", None)
        # The values of these belong to the lines that their picks stand for.
        is_packed = isinstance(line, LaunchBatch | WaitBatch | CheckpointedLines)
        value = env.get(out) if out is not None and not is_packed else None
        for x in value if isinstance(value, list | tuple) else (value,):
            if isinstance(x, torch.Tensor):
                self.alive.append(x)
                owner = None if isinstance(line, ClosureTensor) else out
                self.owners.setdefault(storage_address(x), owner)
        for address in self.internal:
            self.owners.setdefault(address, out)
        self.internal.clear()

    def finish(self) -> None:
        """Add the bytes up by owner."""
        for address, x in self.saved.items():
            owner = self.owners.get(address)
            if owner is not None:
                self.nbytes[owner] = self.nbytes.get(owner, 0) + x.untyped_storage().nbytes()


def _abstract(line: Line, rank: int) -> Line:
    """Return a line that runs without values: a mapped function only has the results' shapes."""
    if isinstance(line, RegionCall):
        return replace(line, region=ShapesOfRegion(line, rank))  # type: ignore[arg-type]
    return line


@dataclass(frozen=True, slots=True, eq=False)
class ShapesOfRegion:
    """Mapped region of which only the results' shapes matter."""

    line: RegionCall
    rank: int

    def __call__(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Return tensors of the shapes of one rank's results."""
        grad = self.line.grads is not None
        return [
            inputs[0].new_empty(spec.local_shape(self.rank), dtype=spec.dtype)
            .requires_grad_(grad and is_inexact(spec))
            for spec in self.line.region.out_specs
        ]  # fmt: skip


def moved_arguments(lines: Sequence[Line], tensors: Sequence[int]) -> set[int]:
    """Return the value ids of arguments in other layouts."""
    moved: set[int] = set()
    sources: dict[int, list[int]] = {}
    for line in lines:
        match line:
            case LaunchBatch():
                sources[line.out] = [source.value for source in line.sources]
            case WaitBatch():
                sources[line.out] = sources[line.source.value]
            case Pick() if line.source.value in sources:
                value = sources[line.source.value][line.index]
                moved |= {line.out} if value in moved or value in tensors else set()
            case Redistribution() if line.source.value in moved or line.source.value in tensors:
                moved.add(line.out)
    return moved
