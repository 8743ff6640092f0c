"""Results that are written where they are needed, without memory of their own.

An operation that computes the new value of a written argument writes it into the argument: a
training step needs no second copy of its parameters, and no pass over their memory to copy them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from fshard._torch.operators import out_overload
from fshard.partition.ir import GradMode, Line, Operation, Ref, Write, aliases_of, operands_of

COPY = torch.ops.aten.copy.default


def written_in_place(lines: Sequence[Line], outputs: Collection[int]) -> list[Line]:
    """Return lines in which operations write into arguments, in the place of a `Write`.

    Such an operation is pointwise: it reads no element that it has written. Nothing else reads its
    result, and it reads no memory that is written before, nor the argument through another view.
    The values that `target.copy_(values)` writes are not copied before.

    Args:
        lines: the lines of a call without gradient, in the order of execution.
        outputs: the value ids of the results.
    """
    if any(isinstance(line, GradMode) for line in lines):
        return [*lines]
    uses = Counter([*outputs, *(value for line in lines for value in operands_of(line))])
    places = {line.out: i for i, line in enumerate(lines) if isinstance(line, Operation)}
    memory, written = _shared_memory(lines), set[int]()
    result: dict[int, Line] = dict(enumerate(lines))

    def operation_of(source: Ref, target: Ref) -> Operation | None:
        """Return the operation of a value that is written, if it may run at the write."""
        line = result.get(places.get(source.value, -1))
        if not isinstance(line, Operation) or uses[line.out] > 1:
            return None
        read = (x for x in operands_of(line) if x != target.value)
        free = written.isdisjoint(y for x in read for y in memory.get(x, (x,)))
        return line if free else None

    for index, line in enumerate(lines):
        if not isinstance(line, Write):
            continue
        source, target = line.source, line.target
        written.add(target.value)
        operation = operation_of(source, target)
        if operation is not None and operation.strategy.call.op is COPY:
            source = operation.args[1]
            result[index] = replace(line, source=source)
            del result[places[operation.out]]
            same = operation.strategy.in_specs[1] == operation.strategy.computed_specs[0]
            operation = operation_of(source, target) if same else None
        if operation is not None and _is_pointwise(operation):
            result[index] = replace(operation, into=target)
            del result[places[operation.out]]
    return [*result.values()]


def _shared_memory(lines: Sequence[Line]) -> dict[int, frozenset[int]]:
    """Return the values whose memory each value may have, for those that may have no own."""
    memory: dict[int, frozenset[int]] = {}
    for line in lines:
        # The result of a collective, too, may be what a rank had.
        views = isinstance(line, Operation)
        shared = [x for _, x in aliases_of(line)] if views else operands_of(line)
        if shared and hasattr(line, "out"):
            memory[line.out] = frozenset(y for x in shared for y in memory.get(x, (x,)))
    return memory


def _is_pointwise(line: Operation) -> bool:
    """Return True for a pointwise operation that can write its result into given memory."""
    op = line.strategy.call.op
    has_out = line.single and line.strategy.rule.local is None and out_overload(op) is not None
    return has_out and torch.Tag.pointwise in op.tags
