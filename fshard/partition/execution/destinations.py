"""Results that are written where they are needed, without memory of their own.

An operation that computes the new value of a written argument writes it into the argument: a
training step needs no second copy of its parameters, and no pass over their memory to copy them.
A product whose unreduced value is reduced with others, as the gradient of a weight is, writes it
into the buffer that is reduced: DDP's `gradient_as_bucket_view` without its views.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from fshard._torch.operators import OpOverload, is_composite, out_overload
from fshard.partition.ir import (
    Buffer,
    LaunchBatch,
    Line,
    Operation,
    Pick,
    Redistribution,
    Ref,
    Write,
    aliases_of,
    map_references,
    operands_of,
)
from fshard.plan.batch.coalesce import is_large_all_reduce
from fshard.program.program import Program
from fshard.program.steps import AllReduce, InvariantToReduced, ReducedToInvariant
from fshard.run.collective import unchanged
from fshard.run.interpreter import stages

DETACH = torch.ops.aten.detach.default
TRANSPOSE = torch.ops.aten.t.default
COPY = torch.ops.aten.copy.default
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.tensordot.default)
NEW_RESULTS = (*PRODUCTS, torch.ops.aten.matmul.default, torch.ops.aten.linear.default)
"""Products whose results have memory of their own."""
CASTS = {InvariantToReduced, ReducedToInvariant}


def written_in_place(lines: Sequence[Line], outputs: Collection[int]) -> list[Line]:
    """Return lines in which operations write into arguments, in the place of a `Write`.

    Such an operation is pointwise: it reads no element that it has written. Nothing else reads its
    result, and it reads no memory that is written before, nor the argument through another view.
    The values that `target.copy_(values)` writes are not copied before.

    Args:
        lines: the lines of a call without gradient, in the order of execution.
        outputs: the value ids of the results.
    """
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


def without_identities(lines: Sequence[Line], outputs: Collection[int]) -> list[Line]:
    """Return lines without those that return what another value is.

    They are `detach`, casts between invariant and reduced, and transposes of transposes, as the
    gradients of `x @ w.t()` are traced.

    Args:
        lines: the lines of a call without gradient, in the order of execution.
        outputs: the value ids of the results.
    """
    same: dict[int, Ref] = {}
    operands: dict[int, Ref] = {}
    result: list[Line] = []
    for line in lines:
        if not same.keys().isdisjoint(operands_of(line)):
            line = map_references(line, lambda ref: same.get(ref.value, ref))  # noqa: PLW2901
        operand: Ref | None = None
        match line:
            case Redistribution() if _changes_nothing(line.program):
                operand = line.source
            case Operation() if line.strategy.call.op is DETACH:
                operand = line.args[0]
            case Operation() if line.strategy.call.op is TRANSPOSE:
                operand = operands.get(line.args[0].value)
                operands[line.out] = line.args[0]
        if operand is not None and line.out not in outputs:  # type: ignore[union-attr]
            same[line.out] = operand  # type: ignore[union-attr]
        else:
            result.append(line)
    used = {*outputs, *(value for line in result for value in operands_of(line))}
    unused = operands.keys() - used
    return [line for line in result if getattr(line, "out", None) not in unused]


def reduced_in_place(
    lines: Sequence[Line], outputs: Collection[int], device: torch.device
) -> list[Line]:
    """Return lines in which operations write what is all-reduced into one buffer for each launch.

    Other values are copied to the buffer, but for large ones: they are reduced alone, in place if
    nothing else has their memory.

    Args:
        lines: the lines of a call without gradient, in the order of execution.
        outputs: the value ids of the results.
        device: the device of the arguments.
    """
    uses = Counter([*outputs, *(value for line in lines for value in operands_of(line))])
    memory = _shared_memory(lines)
    own: dict[int, tuple[int, Operation]] = {
        line.out: (index, line) for index, line in enumerate(lines)
        if isinstance(line, Operation) and uses[line.out] == 1 and line.out not in memory
        and _has_new_result(line)
    }  # fmt: skip
    new_values = itertools.count(1 + max((getattr(x, "out", 0) for x in lines), default=0))
    before: dict[int, list[Line]] = defaultdict(list)
    result = [*lines]
    for index, line in enumerate(lines):
        if not isinstance(line, LaunchBatch) or not all(map(_is_all_reduce, line.programs)):
            continue
        small = [i for i, prog in enumerate(line.programs) if not is_large_all_reduce(prog)]
        owned = [i for i, x in enumerate(line.sources) if x.value in own and i not in small]
        rows = [(own[source.value], i) for i in small if (source := line.sources[i]).value in own]
        products = [(*row, i) for row, i in rows if _is_product(row[1])]
        if not products:
            result[index] = replace(line, owned=frozenset(owned))
            continue
        buffer = Ref(next(new_values))
        specs = tuple(line.programs[i].src for i in small)
        before[min(place for place, _, _ in products)].append(Buffer(buffer.value, specs, device))
        for place, product, i in products:
            part = Ref(next(new_values))
            before[place].append(Pick(part.value, buffer, small.index(i)))
            result[place] = replace(product, into=part)
        result[index] = replace(
            line, owned=frozenset([*owned, *small]), buffered=tuple(small), buffer=buffer
        )
    return [x for index, line in enumerate(result) for x in (*before[index], line)]


def _changes_nothing(prog: Program) -> bool:
    """Return True for a program of casts whose result is the local itself, on every rank."""
    is_cast = {*map(type, prog.steps)} <= CASTS
    return is_cast and all(stage is unchanged for stage in stages(prog, prog.src.mesh.ranks[0]))


def _is_all_reduce(prog: Program) -> bool:
    return prog.forward_dtype is None and [*map(type, prog.steps)] == [AllReduce]


def _is_product(line: Operation) -> bool:
    """Return True for a product of matrices that can write its result into given memory."""
    return line.strategy.call.op in PRODUCTS and line.strategy.rule.local is None


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


def _has_new_result(line: Operation) -> bool:
    """Return True for an operation that returns no operand, which others do in spite of schemas."""
    op = line.strategy.call.op
    is_kernel = isinstance(op, OpOverload) and not is_composite(op)
    return line.strategy.rule.local is None and (is_kernel or op in NEW_RESULTS)


def _is_pointwise(line: Operation) -> bool:
    """Return True for a pointwise operation that can write its result into given memory."""
    op = line.strategy.call.op
    has_out = line.single and line.strategy.rule.local is None and out_overload(op) is not None
    return has_out and torch.Tag.pointwise in op.tags
