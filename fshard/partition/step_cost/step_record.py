"""Record of one rank's step: operations, launches, waits, allocations and frees, in order.

A dispatch mode sees every operation that runs, forward and backward, and a transport every
collective. References that do not keep memory alive say when it is freed. Nodes of autograd bear
the line of the operation that created them, so what runs backward belongs to a line as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fshard._torch.autograd_state import current_node, graph_task_id
from fshard._torch.memory import has_one_owner, storage_address
from fshard._torch.modes import DispatchMode
from fshard._torch.operators import schema_or_none
from fshard.layout.mesh import Mesh
from fshard.layout.tree import tensors_in
from fshard.partition.step_cost.operation_costs import operation_cost
from fshard.partition.step_cost.roofline import BACKWARD, FORWARD, RECOMPUTE
from fshard.run.transports.shape_only import RecordedCollective

ADD = torch.ops.aten.add.Tensor
LINE = "fshard_line"
"""Key of a line in the metadata of a node of autograd."""


@dataclass(frozen=True, slots=True)
class RecordedLine:
    """Line of a call in a record: its value id, name, layouts, place in the source and module."""

    value: int | None
    name: str
    spec: str = ""
    place: str = ""
    module: str = ""


UNKNOWN = ("temporary", "communication")
"""Categories of memory that others replace once it is known what it holds."""
NO_LINE = RecordedLine(None, "sum of gradients")


@dataclass(frozen=True, slots=True)
class RanOperation:
    """Operation that ran."""

    line: RecordedLine
    phase: str
    flops: int
    nbytes: int
    dtype: torch.dtype
    is_product: bool


@dataclass(frozen=True, slots=True)
class LaunchedCollective:
    """Collective that was launched, the one of an index."""

    line: RecordedLine
    phase: str
    index: int
    collective: RecordedCollective


@dataclass(frozen=True, slots=True)
class AwaitedCollective:
    """Wait for the collective of an index."""

    index: int


@dataclass(slots=True)
class Block:
    """Memory that was allocated, in one storage or several; its category may become known later."""

    nbytes: int
    line: RecordedLine
    phase: str
    category: str = "temporary"
    owners: int = 1


@dataclass(frozen=True, slots=True)
class AllocatedBlock:
    """Allocation of a block, or with `frees` its end, in a phase."""

    block: Block
    frees: bool
    phase: str


Entry = RanOperation | LaunchedCollective | AwaitedCollective | AllocatedBlock


@dataclass(slots=True)
class StepRecord:
    """Entries of a step in the order in which they ran.

    Attributes:
        mesh: the mesh.
        rank: the rank.
        entries: the entries.
        arguments: number of the first entries, which are the arguments' memory.
    """

    mesh: Mesh
    rank: int
    entries: list[Entry] = field(default_factory=list)
    arguments: int = 0


class StepRecorder(DispatchMode):
    """Mode that records the operations of a block, and the memory of their results."""

    def __init__(self, record: StepRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record, self.lines = record, list[RecordedLine]()
        self.blocks: dict[int, Block] = {}
        self.launched = 0
        self.records_operations, self.outside = True, FORWARD

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named: Mapping[str, Any] = kwargs or {}
        in_place = func is ADD and self._accumulates_in_place(args[0])
        out = func(*args, **named)
        if in_place:
            self._share(args[0], out)
        for x in tensors_in(out):
            self.allocate(x)
        cost = operation_cost(func, args, named, out) if self.records_operations else None
        if cost is not None and not self._is_alias(func, args, named, out):
            self.record.entries.append(RanOperation(self.line, self.phase, *cost))
        return out

    def _is_alias(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Return True if all results are in the memory of operands, which are not written."""
        schema = schema_or_none(func)
        if schema is None or schema.is_mutable:
            return False
        before = {storage_address(x) for x in tensors_in((args, kwargs)) if _has_storage(x)}
        return all(_has_storage(x) and storage_address(x) in before for x in tensors_in(out))

    @staticmethod
    def _accumulates_in_place(x: torch.Tensor) -> bool:
        """Return True for a gradient that autograd adds another one to, and nothing else holds.

        It then adds in place, but not to fake tensors.
        """
        return graph_task_id() != -1 and current_node() is None and has_one_owner(x)

    # -- memory ----------------------------------------------------------------------------

    def allocate(self, x: torch.Tensor, category: str = "temporary") -> None:
        """Record the memory of a tensor if it is new."""
        if not _has_storage(x):
            return
        storage = x.untyped_storage()
        address = storage_address(x)
        block = self.blocks.get(address)
        if block is None and storage.nbytes():
            block = Block(storage.nbytes(), self.line, self.phase, category)
            self.record.entries.append(AllocatedBlock(block, False, self.phase))
            self._own(x, block)

    def _share(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Record that `y` is in the memory of `x`, which is freed after both."""
        block = self.blocks.get(storage_address(x))
        if block is not None:
            block.owners += 1
            self._own(y, block)

    def _own(self, x: torch.Tensor, block: Block) -> None:
        storage, address = x.untyped_storage(), storage_address(x)
        self.blocks[address] = block
        weakref.finalize(storage, self._free, address, block).atexit = False

    def _free(self, address: int, block: Block) -> None:
        if self.blocks.get(address) is not block:
            return
        del self.blocks[address]
        block.owners -= 1
        if not block.owners:
            self.record.entries.append(AllocatedBlock(block, True, self.phase))

    def saved(self, x: torch.Tensor) -> torch.Tensor:
        """Mark the memory of a tensor that autograd saves."""
        self.set_category(x, "activations")
        return x.detach()

    def set_category(self, x: torch.Tensor, category: str) -> None:
        """Set the category of a tensor's memory, unless it has one already."""
        block = self.blocks.get(storage_address(x)) if _has_storage(x) else None
        if block is not None and block.category in UNKNOWN:
            block.category = category

    # -- lines -----------------------------------------------------------------------------

    @property
    def line(self) -> RecordedLine:
        """The line that runs."""
        if self.lines:
            return self.lines[-1]
        node = current_node() if graph_task_id() != -1 else None
        line: RecordedLine = NO_LINE if node is None else node.metadata.get(LINE, NO_LINE)
        return line

    @property
    def phase(self) -> str:
        """The phase that runs."""
        if graph_task_id() == -1:
            return self.outside
        return RECOMPUTE if self.lines else BACKWARD

    @contextmanager
    def without_operations(self) -> Iterator[None]:
        """Record memory alone in a block."""
        self.records_operations = False
        try:
            yield
        finally:
            self.records_operations = True

    @contextmanager
    def at(self, line: RecordedLine) -> Iterator[None]:
        """Run a block as a line."""
        self.lines.append(line)
        try:
            yield
        finally:
            self.lines.pop()

    def marked(
        self, run: Callable[..., Any], line: RecordedLine, categories: Sequence[str]
    ) -> Callable[..., Any]:
        """Return a function as a line, with the categories of its results, "" for the default.

        The nodes of its results bear the line.
        """

        def run_line(*args: Any) -> Any:
            with self.at(line):
                results = run(*args)
            for result, category in zip(results, categories, strict=False):
                for x in tensors_in(result) if category else ():
                    self.set_category(x, category)
            _mark_nodes(results, line)
            return results

        return run_line

    def add_collective(self, collective: RecordedCollective) -> None:
        """Record a launch that is awaited at once."""
        self.launch(collective)
        self.record.entries.append(AwaitedCollective(self.launched))

    def launch(self, collective: RecordedCollective) -> None:
        """Record a launch."""
        self.launched += 1
        self.record.entries.append(
            LaunchedCollective(self.line, self.phase, self.launched, collective)
        )

    def drop_operations(self, start: int) -> None:
        """Drop the operations and collectives that were recorded from an entry on."""
        entries = self.record.entries
        entries[start:] = [x for x in entries[start:] if isinstance(x, AllocatedBlock)]

    def close(self) -> None:
        """Record no more frees: the step has ended."""
        self.blocks.clear()


def _has_storage(x: torch.Tensor) -> bool:
    return x.layout is torch.strided


def _mark_nodes(results: Any, line: RecordedLine) -> None:
    todo = [x.grad_fn for x in tensors_in(results)]
    while todo:
        node: Any = todo.pop()
        if node is None or LINE in node.metadata or hasattr(node, "variable"):
            continue
        node.metadata[LINE] = line
        todo += [following for following, _ in node.next_functions]
