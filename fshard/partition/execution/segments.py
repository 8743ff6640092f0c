"""Lines as functions of locals, of one rank or of all ranks, and their division into segments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard.layout.mesh import Mesh
from fshard.partition.execution import run_lines
from fshard.partition.execution.remat_plan import RecomputedUnit, RematPlan
from fshard.partition.ir import CheckpointedLines, Line, Pick, RegionCall, operands_of

Values = Sequence[Any]
Lines = Callable[..., Values]
"""Function of the operands of some lines that returns their outputs."""
Compiled = dict[object, tuple[Sequence[Line], Lines]]
"""Lines and their function, by the rank, the identities of the lines, operands and outputs."""


class RankLines:
    """Lines as functions of one rank's locals, or of tuples of all ranks' if `rank` is None.

    `compiled` has what was compiled before, with the lines, and gets what is compiled here.
    `observed` is as for `compile_graph`.
    """

    def __init__(
        self, mesh: Mesh, rank: int | None, compiled: Compiled | None = None, *,
        observed: bool = False,
    ) -> None:  # fmt: skip
        self.mesh, self.rank, self.observed = mesh, rank, observed
        self.compiled: Compiled = {} if compiled is None else compiled

    def compile(self, lines: Sequence[Line], operands: Values, outputs: Sequence[int]) -> Lines:
        """Return lines as a function of the values `operands`."""
        if self.rank is not None:
            key = self.rank, *map(id, lines), *operands, None, *outputs
            if key in self.compiled:
                return self.compiled[key][1]
            graph = run_lines.rank_graph(lines, self.rank, operands, outputs)
            run = run_lines.compile_graph(graph, self.observed)
            if not any(isinstance(line, RegionCall | CheckpointedLines) for line in lines):
                self.compiled[key] = lines, run
            return run
        prepared = run_lines.prepare_lines(lines, self.mesh, outputs)

        def run_all(*values: Any) -> Values:
            env = dict(zip(operands, values, strict=True))
            run_lines.run_on_all_ranks(prepared, self.mesh, env)
            return tuple([env[value] for value in outputs])

        return run_all

    def tensors(self, value: Any) -> list[torch.Tensor]:
        """Return the tensors of a value: its local, or those of all ranks."""
        locals_ = value if self.rank is None and isinstance(value, tuple) else (value,)
        return [x for x in locals_ if isinstance(x, torch.Tensor)]

    def each(self, fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
        """Return a value with `fn` of its tensors; numbers are unchanged."""
        if isinstance(value, tuple):
            return tuple([self.each(fn, x) for x in value])
        return fn(value) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True, slots=True)
class LineSegment:
    """Lines that run without interruption.

    Attributes:
        lines: the lines.
        run: their function.
        operands: the values that they read.
        outputs: the values that lines after them read.
        dead: the values that no line after them reads.
        made: the indices of the units some of whose outputs they define.
        unit: the index of the unit that they are, None for others.
    """

    lines: tuple[Line, ...]
    run: Lines
    operands: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]
    made: tuple[tuple[int, int], ...]
    unit: int | None


def segments(
    plan: RematPlan, lines: Sequence[Line], inputs: Collection[int], outputs: Collection[int],
    ranks: RankLines, *, each: bool,
) -> Iterator[LineSegment]:  # fmt: skip
    """Yield the segments of lines.

    One ends where a value is defined that will be recomputed, and where the last line has read a
    value of an earlier segment, which is freed then.
    """
    producers, ends = plan.producers, {id(unit.lines[0]): i for i, unit in enumerate(plan.units)}
    kept, last_line = {*outputs, *plan.bases}, _last_uses([[line] for line in lines])
    groups: list[tuple[list[Line], int | None]] = [([], None)]
    frees = False
    for index, (line, following) in enumerate(itertools.zip_longest(lines, lines[1:])):
        unit = ends.get(id(line))
        if unit is not None:
            groups.append(([], unit))
        group = groups[-1][0]
        group.append(line)
        earlier = {*operands_of(line)} - {getattr(x, "out", None) for x in group} - {*inputs, *kept}
        frees = frees or any(last_line[value] == index for value in earlier)
        picks = isinstance(following, Pick) and not each
        if not picks and (each or frees or groups[-1][1] is not None or _defines(group, producers)):
            groups.append(([], None))
            frees = False
    groups = [group for group in groups if group[0]]
    last = _last_uses([group for group, _ in groups])
    for index, (group, unit) in enumerate(groups):
        defined = [line.out for line in group if hasattr(line, "out")]
        read = dict.fromkeys(v for line in group for v in operands_of(line))
        operands = tuple(v for v in read if v not in defined)
        later = {v for v in defined if last.get(v, -1) > index}
        results = tuple(v for v in defined if v in later or v in kept or v in producers)
        dead = tuple(
            value for value in (*operands, *results)
            if last.get(value, -1) <= index and value not in kept
        )  # fmt: skip
        made = tuple((value, producers[value]) for value in results if value in producers)
        run = ranks.compile(group, operands, results)
        yield LineSegment(tuple(group), run, operands, results, dead, made, unit)


def _last_uses(groups: Sequence[Sequence[Line]]) -> dict[int, int]:
    """Return for each value the index of the last group whose lines read it."""
    return {v: i for i, group in enumerate(groups) for line in group for v in operands_of(line)}


def _defines(lines: Sequence[Line], values: Collection[int]) -> bool:
    return any(getattr(line, "out", None) in values for line in lines)


def compiled_unit(unit: RecomputedUnit, ranks: RankLines) -> tuple[Lines, Lines]:
    """Return two functions: the start of a unit, and its end, which returns the outputs."""
    if unit.launch is None:
        return ranks.compile(unit.lines, unit.operands, unit.outputs), lambda *outputs: outputs
    out = unit.launch.out
    start = ranks.compile(unit.lines[:1], unit.operands, [out])
    return start, ranks.compile(unit.lines[1:], [out], unit.outputs)
