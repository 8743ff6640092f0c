"""Execution of a call whose backward pass recomputes values.

The lines run under hooks of saved tensors. Where autograd saves a tensor in the memory of a value
that is not kept, the hook returns a recipe in its place: the value, and the tensor's place in it.
In the backward pass the recipe runs the lines that are needed, under `no_grad`. A tensor that an
operation makes for its gradient alone, as a mask, is found by running the operation again with
gradients, as `torch.utils.checkpoint` does.

When a launch runs again, the one before it is started too, since the backward pass needs it next.
All ranks have the same plan and graph, so their launches have one order. Hooks that were active
around the call get the tensors that are kept; so do the hooks of a checkpoint around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fshard._torch.memory import storage_address
from fshard._torch.saved_tensors import StorageWeakRef, innermost_hooks
from fshard.partition.execution.recipes import Internal, Kept, Packed, Place, Recipe
from fshard.partition.execution.remat_plan import RematPlan
from fshard.partition.execution.segments import (
    LineSegment,
    RankLines,
    Values,
    compiled_unit,
    segments,
)
from fshard.partition.ir import Line
from fshard.run.transports.base import backward_phase


class RematerializedLines:
    """Lines of a call that recomputes values in its backward pass, for one executor.

    Args:
        plan: the values that are recomputed.
        lines: the lines in the order of execution.
        inputs: the value ids of the arguments.
        outputs: the value ids of the results.
        names: the paths of the arguments.
        run: the ranks whose locals the lines run on.
        each: make every line a segment of its own.
    """

    def __init__(
        self, plan: RematPlan, lines: Sequence[Line], inputs: Sequence[int],
        outputs: Sequence[int], names: Sequence[str], run: RankLines, *, each: bool = False,
    ) -> None:  # fmt: skip
        self.plan, self.inputs, self.outputs, self.names = plan, inputs, outputs, names
        self.ranks, self.producers, self.bases = run, plan.producers, plan.bases
        self.segments = [*segments(plan, lines, inputs, outputs, run, each=each)]
        self.units = [compiled_unit(unit, run) for unit in plan.units]
        self.previous = _previous_launches(plan)

    def run(
        self, locals_: Values, after: Callable[[LineSegment, Mapping[int, Any]], None] | None = None
    ) -> tuple[list[Any], Recomputation]:
        """Run the lines; return the outputs, and what is recomputed for them.

        Args:
            locals_: the values of the arguments.
            after: called after every segment, with the values then.
        """
        env = dict(zip(self.inputs, locals_, strict=True))
        recomputation = Recomputation(self, env)
        with saved_tensors_hooks(recomputation.pack, recomputation.unpack):
            for segment in self.segments:
                recomputation.begin(segment, env)
                results = segment.run(*[env[value] for value in segment.operands])
                env.update(zip(segment.outputs, results, strict=True))
                del results
                recomputation.end(segment, env)
                if after is not None:
                    after(segment, env)
                for value in segment.dead:
                    del env[value]
        recomputation.hold(env)
        return [env[value] for value in self.outputs], recomputation


def _previous_launches(plan: RematPlan) -> dict[int, int]:
    """Return for launches the one before that needs nothing else to be recomputed."""
    bases = plan.bases
    ready = [i for i, x in enumerate(plan.units) if x.launch and bases.issuperset(x.operands)]
    return dict(zip(ready[1:], ready, strict=False))


class Recomputation:
    """Values that one call recomputes: recipes while it runs, values in the backward pass.

    Attributes:
        values: how often the backward pass reads every recomputed value.
        internals: the same for tensors that the operation of a unit saved.
    """

    def __init__(self, lines: RematerializedLines, env: Mapping[int, Any]) -> None:
        self.lines, self.ranks = lines, lines.ranks
        self.values: Counter[int] = Counter()
        self.internals: Counter[int] = Counter()
        self.outer = innermost_hooks()
        self._fixed = self._addresses(env, lines.inputs)
        self._places: dict[int, tuple[StorageWeakRef, int, list[tuple[int, int, Place]]]] = {}
        self._segment: LineSegment | None = None
        self._count = 0
        self._operands: frozenset[int] = frozenset()
        self._tracked: dict[int, list[bool]] = {}
        self._held: dict[int, Any] = {}
        self._readers: Counter[int] = Counter()
        self._unpacked: dict[int, tuple[Any, int]] = {}
        self._reads: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._cached: dict[int, Any] = {}
        self._saved: dict[int, dict[int, torch.Tensor]] = {}
        self._started: dict[int, Values] = {}

    # -- the forward pass ------------------------------------------------------------------

    def begin(self, segment: LineSegment, env: Mapping[int, Any]) -> None:
        """Begin a segment."""
        self._segment, self._count = segment, 0
        if segment.unit is not None:
            unit = self.lines.plan.units[segment.unit]
            self._operands = self._addresses(env, unit.operands)
            tensors = [x for value in unit.operands for x in self.ranks.tensors(env[value])]
            self._tracked[segment.unit] = [x.requires_grad for x in tensors]

    def end(self, segment: LineSegment, env: Mapping[int, Any]) -> None:
        """Record the storages of values that will be recomputed, unless an argument has them."""
        self._segment = None
        for value, unit in segment.made:
            shared = self._fixed | self._addresses(env, segment.operands)
            for rank, x in enumerate(self.ranks.tensors(env[value])):
                address = storage_address(x)
                entry = self._places.get(address)
                if entry is None and address not in shared:
                    reference = StorageWeakRef(x.untyped_storage())
                    entry = self._places[address] = (reference, unit, [])
                if entry is not None and entry[1] == unit:
                    entry[2].append((value, rank, Place.of(x)))

    def _addresses(self, env: Mapping[int, Any], values: Sequence[int]) -> frozenset[int]:
        tensors = (x for v in values if v in env for x in self.ranks.tensors(env[v]))
        return frozenset(map(storage_address, tensors))

    def pack(self, x: torch.Tensor) -> Any:
        """Return the object that autograd keeps in the place of a tensor."""
        index, self._count = self._count, self._count + 1
        if x.layout is torch.strided and not (x.is_conj() or x.is_neg()):
            address = storage_address(x)
            entry = self._places.get(address)
            if entry is not None:
                place = Place.of(x)
                for value, rank, base in entry[2]:
                    if base.holds(place):
                        self.values[value] += 1
                        return Recipe(entry[1], value, rank, base, place)
            elif self._is_internal(address):
                assert self._segment is not None
                assert self._segment.unit is not None
                self.internals[self._segment.unit] += 1
                return Internal(self._segment.unit, index)
        return self._keep(x)

    def _is_internal(self, address: int) -> bool:
        """Return True for memory that the operation of a unit allocated."""
        unit = None if self._segment is None else self._segment.unit
        if unit is None or not self.lines.plan.units[unit].internals:
            return False
        return address not in self._operands

    def _keep(self, x: torch.Tensor, name: str = "") -> Kept | Packed:
        if self.outer is None:
            return Kept.of(x, name)
        pack, unpack = self.outer
        return Packed(pack(x), unpack)

    def hold(self, env: Mapping[int, Any]) -> None:
        """Hold the values that others will be recomputed from; count who reads each."""
        self._places.clear()
        producers, units = self.lines.producers, self.lines.plan.units
        read = Counter(self.internals)
        for value, count in self.values.items():
            read[producers[value]] += count
        names = dict(zip(self.lines.inputs, self.lines.names, strict=False))
        for index in reversed(range(len(units))):
            for value in units[index].operands if read[index] else ():
                if value in producers:
                    read[producers[value]] += 1
                    continue
                self._readers[value] += 1
                if value not in self._held:
                    keep = partial(self._keep, name=names.get(value, ""))
                    self._held[value] = self.ranks.each(keep, env[value])
        self._reads = {index: count for index, count in read.items() if count}

    # -- the backward pass -----------------------------------------------------------------

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return a tensor that autograd saved."""
        match packed:
            case Recipe():
                self._require(packed.unit)
                x = self._cached[packed.unit][packed.value]
                part = packed.part(x if self.ranks.rank is not None else x[packed.rank])
            case Internal():
                self._require(packed.unit)
                part = self._saved[packed.unit][packed.index]
            case _:
                kept: torch.Tensor = packed.value()
                return kept
        self._release(packed.unit)
        return part

    def _require(self, index: int) -> None:
        """Recompute a unit, and first the units that it needs."""
        needed, todo = set(), [index]
        while todo:
            unit = todo.pop()
            if unit not in self._cached and unit not in needed:
                needed.add(unit)
                operands = self.lines.plan.units[unit].operands
                todo += [self.lines.producers[v] for v in operands if v in self.lines.producers]
        for unit in sorted(needed):
            self._recompute(unit)

    def _recompute(self, index: int) -> None:
        """Run a unit; a launch after the launch before it is started as well."""
        unit = self.lines.plan.units[index]
        started = self._started.pop(index, None)
        if started is None:
            started = self._start(index)
        before = self.lines.previous.get(index)
        if before in self._reads and before not in self._cached and before not in self._started:
            self._started[before] = self._start(before)
        with self._detached():
            outputs = self.lines.units[index][1](*started)
        values = [self.ranks.each(torch.Tensor.detach, value) for value in outputs]
        self._cached[index] = dict(zip(unit.outputs, values, strict=True))
        self._left[index] = self._reads[index]
        for value in unit.operands:
            if value in self.lines.producers:
                self._release(self.lines.producers[value])

    def _start(self, index: int) -> Values:
        """Start a unit on its operands, and record what its operation saves if that is needed."""
        operands = [self._operand(value) for value in self.lines.plan.units[index].operands]
        start = self.lines.units[index][0]
        if not self.internals[index]:
            with self._detached():
                return start(*operands)
        tracked = iter(self._tracked[index])
        again = [
            self.ranks.each(lambda x: x.detach().requires_grad_(next(tracked)), value)
            for value in operands
        ]
        saved: dict[int, torch.Tensor] = {}
        with torch.enable_grad(), saved_tensors_hooks(partial(_record, saved), saved.__getitem__):
            outputs = start(*again)
        self._saved[index] = saved
        return outputs

    @contextmanager
    def _detached(self) -> Iterator[None]:
        with torch.no_grad(), backward_phase(None):
            yield

    def _operand(self, value: int) -> Any:
        """Return a value that a unit is recomputed from.

        Hooks around the call unpack it once in a backward pass: some refuse a second time.
        """
        producer = self.lines.producers.get(value)
        if producer is not None:
            self._require(producer)  # freed, if an earlier backward pass read only parts
            return self._cached[producer][value]
        if self.outer is None:
            return _unpacked(self._held[value])
        operand, left = self._unpacked.pop(value, (None, 0))
        if not left:
            operand, left = _unpacked(self._held[value]), self._readers[value]
        if left > 1:
            self._unpacked[value] = operand, left - 1
        return operand

    def _release(self, index: int) -> None:
        """Count one use of a recomputed unit, whose values are freed after the last."""
        if index not in self._left:  # freed: an earlier pass had read some of it
            return
        self._left[index] -= 1
        if not self._left[index]:
            del self._cached[index], self._left[index]
            self._saved.pop(index, None)


def _record(saved: dict[int, torch.Tensor], x: torch.Tensor) -> int:
    """Record a tensor that an operation saves under its number."""
    saved[len(saved)] = x.detach()
    return len(saved) - 1


def _unpacked(held: Any) -> Any:
    """Return a held value: tensors of all ranks, one tensor, or a number."""
    if isinstance(held, tuple):
        return tuple(map(_unpacked, held))
    return held.value() if isinstance(held, Kept | Packed) else held
