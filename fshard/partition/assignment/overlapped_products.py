"""Products that run while their operand is gathered or their sum scattered: collective matmul.

Pairs of lines, a gather of activations and the products of the result, or a product and the
reduce-scatter of its partial sums, become one call of a mapped function in which blocks move around
a ring (`spmd/collectives/collective_matmul`), where that takes less modelled time. Layouts stay as
they are. After Wang et al. (ASPLOS 2023), XLA's windowed einsum, and PyTorch's asynchronous tensor
parallelism.

A ring has n - 1 launches, and its last product waits for the last block: of the time of a product,
the n-th part hides nothing. So small products, and machines whose devices do not compute while they
communicate, keep gathers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fshard._util.cache import CACHE_SIZE
from fshard.layout.spec import Spec
from fshard.ops.trace.mapped_regions import planned_region
from fshard.partition.assignment.gradient_reductions import SHORTER, ValueTable
from fshard.partition.assignment.tensor_versions import Assignment
from fshard.partition.ir import (
    BeginCheckpoint,
    EndCheckpoint,
    GradMode,
    Line,
    Operation,
    Pick,
    Redistribution,
    Ref,
    RegionCall,
    backward_programs,
    operands_of,
)
from fshard.partition.training_time import FORWARD_AND_BACKWARD, local_compute_time, region_time
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes
from fshard.program.program import program_time
from fshard.spmd.collectives.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from fshard.spmd.collectives.pcast import axis_index, pcast
from fshard.spmd.mapped_function import MappedFunction

aten = torch.ops.aten
FACTORS = {
    aten.mm.default: (0, 1, None), aten.matmul.default: (0, 1, None),
    aten.linear.default: (0, 1, 2), aten.addmm.default: (1, 2, 0),
}  # fmt: skip
"""Operands that are the first factor, the second one and the bias, by operation."""
Kind = tuple[bool, bool, tuple[str, ...]]
"""If a product has a bias, if its weight is transposed, and `Product.bias_axes`."""


@dataclass(frozen=True, slots=True)
class Product:
    """Operation that is a product of activations by a weight.

    Attributes:
        line: the operation.
        values: the values of the first factor, of the weight and, if there is one, of the bias.
        specs: their layouts.
        transposed: True if the weight has the shape (columns, rows).
        bias_axes: axes along which the gradient of the bias has to be added up.
    """

    line: Operation
    values: tuple[int, ...]
    specs: tuple[Spec, ...]
    transposed: bool
    bias_axes: tuple[str, ...] = ()

    @staticmethod
    def of(line: Line) -> Product | None:
        """Return the product of a line, None if it is not one."""
        if not isinstance(line, Operation) or not line.single:
            return None
        call, factors = line.strategy.call, FACTORS.get(line.strategy.op)
        if factors is None:
            return None
        places = [i for i in factors if i is not None and i < len(call.operands)]
        values, specs = operands_of(line), line.strategy.in_specs
        ndims = [specs[i].ndim for i in places]
        scaled = call.op is aten.addmm.default and (call.get("alpha"), call.get("beta")) != (1, 1)
        out = line.strategy.out_specs[0]
        if ndims[0] < 2 or ndims[1:] not in ([2], [2, 1]) or scaled or out is None:
            return None
        if len(values) != len(specs) or len({call.operands[i].dtype for i in places}) > 1:
            return None
        return Product(line, tuple(values[i] for i in places), tuple(specs[i] for i in places),
                       call.op is aten.linear.default)  # fmt: skip

    @property
    def out(self) -> Spec:
        """Layout of the result."""
        spec = self.line.strategy.out_specs[0]
        assert spec is not None
        return spec


@dataclass(frozen=True, slots=True)
class ProductRing:
    """Gather of activations and its products, or a product and the scatter of its partial sums.

    Attributes:
        move: the gather or the scatter.
        products: the products, one if sums are scattered.
        hoisted: redistributions of arguments that run before the first product.
        unused: the values of other lines that are not needed.
        dim: the dim of the activations that is gathered, or of the result that is scattered.
        axes: the axes that shard it.
        scatters: True for a scatter.
    """

    move: Redistribution
    products: tuple[Product, ...]
    hoisted: tuple[Redistribution, ...]
    unused: tuple[int, ...]
    dim: int
    axes: tuple[str, ...]
    scatters: bool

    @property
    def sharded(self) -> Spec:
        """Layout of the activations, or of the result, in blocks."""
        program = self.move.program
        return program.dst if self.scatters else program.src

    @property
    def outs(self) -> tuple[int, ...]:
        """Values of the results."""
        return (self.move.out,) if self.scatters else tuple(x.line.out for x in self.products)

    def call(self, out: int, table: ValueTable) -> RegionCall:
        """Return the call of the mapped function, with the value `out`."""
        first = self.products[0]
        values = [first.values[0] if self.scatters else self.move.source.value]
        specs = [first.specs[0] if self.scatters else self.sharded]
        for product in self.products:
            values += product.values[1:]
            specs += product.specs[1:]
        kinds = tuple((len(x.values) > 2, x.transposed, x.bias_axes) for x in self.products)
        out_specs = tuple([self.sharded] if self.scatters else [x.out for x in self.products])
        function = _ring_function(
            self.scatters, kinds, self.axes, self.dim, self.sharded, out_specs
        )
        grads = tuple(value in table.differentiated for value in values)
        strategies = tuple(x.line.strategy for x in self.products)
        return RegionCall(out, planned_region(function, tuple(specs)), tuple(map(Ref, values)),
                          grads if any(grads) else None, strategies, self.steps, self.step_bytes,
                          first.line.place, first.line.module)  # fmt: skip

    @property
    def steps(self) -> int:
        """Number of blocks."""
        return self.sharded.mesh.axis_size(self.axes)

    @property
    def step_bytes(self) -> int:
        """Bytes that a step reads and writes: a part of two tensors of a product, and the third."""
        total = 0
        for x in self.products:
            first, second, result = map(max_local_nbytes, (*x.specs[:2], x.out))
            if self.dim < x.out.ndim - 1:  # rows
                total += second + (first + result) // self.steps
            elif self.scatters:
                total += first + (second + result) // self.steps
            else:
                total += result + (first + second) // self.steps
        return total

    def may_save(self, topology: Topology) -> bool:
        """Return False if the launches of the ring alone take as long as what it replaces."""
        times = [
            program_time(x, topology) for x in (self.move.program, *backward_programs(self.move))
        ]
        work = self.work(topology)
        return len(times) * (self.steps - 1) * topology.launch < sum(times) + len(times) * work

    def work(self, topology: Topology) -> float:
        """Return the seconds of the products."""
        strategies = (x.line.strategy for x in self.products)
        return sum(local_compute_time(x, self.sharded.mesh, topology) for x in strategies)

    def saves(self, call: RegionCall, topology: Topology) -> bool:
        """Return True if a call takes less modelled time than the lines that it replaces."""
        move, passes = self.move, 1 if call.grads is None else FORWARD_AND_BACKWARD
        time = program_time(move.program, topology) + passes * self.work(topology)
        time += sum(program_time(x, topology) for x in backward_programs(move))
        starts = passes * (self.steps - 1) * len(self.products) * topology.kernel
        copies = self.copied_bytes(call) / topology.memory
        return region_time(call, topology) + starts + copies < SHORTER * time

    def copied_bytes(self, call: RegionCall) -> int:
        """Return the bytes that a rank reads and writes to split, join and add up blocks."""
        block = max_local_nbytes(self.sharded)
        results = sum(max_local_nbytes(x.out) for x in self.products)
        others = max_local_nbytes(self.products[0].specs[0]) if self.scatters else results
        sums = 3 * (self.steps - 1) * block  # of blocks that arrive
        split = 2 * others if self.dim else 0  # rows alone are contiguous
        joined = 2 * self.steps * block  # for the gradients of the weights
        backward = call.grads is not None
        if self.scatters:
            return sums + split + (2 * others + joined if backward else 0)
        is_contracted = self.dim == self.sharded.ndim - 1
        forward = (3 * (self.steps - 1) if is_contracted else 2) * results
        return forward + (sums + split + joined if backward else 0)


def overlap_products(
    assignment: Assignment, inputs: Sequence[tuple[Spec, bool]], outputs: Sequence[Any],
    differentiated: Sequence[bool], topology: Topology,
) -> None:  # fmt: skip
    """Replace gathers with products, and products with scatters, by rings that take less time.

    Arguments are those of `place_gradient_reductions`; the results keep their values.
    """
    if not topology.overlap:
        return
    results = {value for value in outputs if type(value) is int}
    table = ValueTable.of(assignment, inputs, outputs, differentiated)
    first: dict[int, list[Line]] = {}
    removed: set[int] = set()
    for ring in _rings(assignment.lines, results, {*assignment.inputs}):
        outs = {ring.move.out, *(x.line.out for x in ring.products), *ring.unused,
                *(x.out for x in ring.hoisted)}  # fmt: skip
        if not removed.isdisjoint(outs) or not ring.may_save(topology):
            continue
        call = ring.call(assignment.count, table)
        if ring.saves(call, topology):
            assignment.count += 1
            picks = [Pick(out, Ref(call.out), i) for i, out in enumerate(ring.outs)]
            first[ring.products[0].line.out] = [*ring.hoisted, call, *picks]
            removed |= outs
    lines: list[Line] = []
    for line in assignment.lines:
        out = getattr(line, "out", -1)
        lines += first.get(out, [] if out in removed else [line])
    assignment.lines = lines


# -- patterns ----------------------------------------------------------------------------------


def _rings(
    lines: Sequence[Line], results: Collection[int], inputs: Collection[int]
) -> Iterator[ProductRing]:
    """Yield the rings that may replace lines."""
    places = {getattr(line, "out", -1): place for place, line in enumerate(lines)}
    moves = {line.out: line for line in lines if isinstance(line, Redistribution)}
    products = {x.line.out: x for x in map(Product.of, lines) if x is not None}
    uses: dict[int, list[int]] = {value: [-1] for value in results}
    for line in lines:
        for value in operands_of(line):
            uses.setdefault(value, []).append(getattr(line, "out", -1))
    marks = [i for i, line in enumerate(lines)
             if isinstance(line, BeginCheckpoint | EndCheckpoint | GradMode)]  # fmt: skip
    computes = min((i for i, x in enumerate(lines) if isinstance(x, Operation)), default=0)

    def together(begin: int, end: int) -> bool:
        return not any(begin < mark < end for mark in marks)

    for place, move in enumerate(lines):
        if not isinstance(move, Redistribution):
            continue
        source = products.get(move.source.value)
        if source is not None and uses[source.line.out] == [move.out]:
            found, added = _scattered(move), _with_bias_of_all(source, moves)
            if found is not None and added is not None and together(places[added.line.out], place):
                unused = [x for x in source.values[2:] if len(uses[x]) == 1 and x in moves]
                yield ProductRing(move, (added,), (), tuple(unused), *found, True)
            continue
        found = _gathered(move)
        users = [products[out] for out in uses.get(move.out, ()) if out in products]
        if found is None or not users or len(users) != len(uses[move.out]):
            continue
        dim, axes = found
        start, end = places[users[0].line.out], places[users[-1].line.out]
        # A gather of an argument runs beside the operations before its use.
        is_early = move.source.value in inputs and computes < start
        if is_early or not together(place, end) or not all(_fits(move, x, axes) for x in users):
            continue
        hoisted = _hoisted(lines[start:end], [v for x in users for v in x.values[1:]], inputs)
        if hoisted is not None:
            yield ProductRing(move, tuple(users), hoisted, (), dim, axes, False)


def _hoisted(
    lines: Sequence[Line], values: Iterable[int], inputs: Collection[int]
) -> tuple[Redistribution, ...] | None:
    """Return the lines among `lines` that define values, if they redistribute arguments."""
    producers = {getattr(line, "out", -1): line for line in lines}
    needed = [producers[value] for value in dict.fromkeys(values) if value in producers]
    moves = [x for x in needed if isinstance(x, Redistribution) and x.source.value in inputs]
    return tuple(moves) if len(moves) == len(needed) else None


def _gathered(move: Redistribution) -> tuple[int, tuple[str, ...]] | None:
    """Return the dim that a redistribution gathers, and the axes; None if it does more."""
    src, dst = move.program.src, move.program.dst
    found = _one_dim(src, dst)
    if found is None or src.partition.unreduced_kinds or dst.partition.unreduced_kinds:
        return None
    _, axes = found
    reduced = {axis for axis in dst.partition.reduced if axis not in axes}
    # Ranks use what is gathered for different work: its gradients are added up.
    is_shared = {*axes} <= {*dst.partition.reduced} or not move.grad
    return found if is_shared and reduced == {*src.partition.reduced} else None


def _scattered(move: Redistribution) -> tuple[int, tuple[str, ...]] | None:
    """Return the dim that a redistribution of sums scatters, and the axes; None if it does more."""
    src, dst = move.program.src, move.program.dst
    found = _one_dim(dst, src)
    if found is None or src.partition.reduced_kinds != dst.partition.reduced_kinds:
        return None
    _, axes = found
    is_sum = {*src.partition.unreduced_kinds} == {(axis, "sum") for axis in axes}
    return found if is_sum and not dst.partition.unreduced_kinds else None


def _with_bias_of_all(product: Product, moves: Mapping[int, Redistribution]) -> Product | None:
    """Return a product whose bias is not zero on all ranks but one; None if it cannot be.

    Partial sums have the bias once: of one rank. Sums that are scattered have it on every rank.
    """
    if len(product.values) == 2:
        return product
    move, p = moves.get(product.values[2]), product.specs[2].partition
    if move is None or move.program.src.partition.axes:
        return None
    axes = (*(axis for axis, _ in p.unreduced_kinds), *(axis for axis, _ in p.reduced_kinds))
    values, specs = (*product.values[:2], move.source.value), (*product.specs[:2], move.program.src)
    return replace(product, values=values, specs=specs, bias_axes=axes)


def _one_dim(sharded: Spec, gathered: Spec) -> tuple[int, tuple[str, ...]] | None:
    """Return the dim that is sharded over more axes, the most minor ones, and these."""
    if sharded.mesh != gathered.mesh or sharded.dtype != gathered.dtype:
        return None
    pairs = enumerate(zip(sharded.partition.dims, gathered.partition.dims, strict=True))
    changed = [(dim, a, b) for dim, (a, b) in pairs if a != b]
    if len(changed) != 1:
        return None
    dim, more, fewer = changed[0]
    if more[: len(fewer)] != fewer or (fewer and not sharded.is_even):
        return None
    return dim, more[len(fewer) :]


def _fits(move: Redistribution, product: Product, axes: tuple[str, ...]) -> bool:
    """Return True for a product of what is gathered by a weight whose columns the axes shard."""
    columns = product.specs[1].partition.dims[0 if product.transposed else 1]
    is_first = product.values[0] == move.out and move.out not in product.values[1:]
    return is_first and {*axes} <= {*columns} and not product.out.partition.unreduced_kinds


# -- mapped functions --------------------------------------------------------------------------


@lru_cache(maxsize=CACHE_SIZE)
def _ring_function(
    scatters: bool, kinds: tuple[Kind, ...], axes: tuple[str, ...], dim: int, sharded: Spec,
    out_specs: tuple[Spec, ...],
) -> MappedFunction:  # fmt: skip
    """Return the mapped function of a ring.

    Args:
        scatters: True for a product whose sums are scattered.
        kinds: the kinds of the products.
        axes: the axes.
        dim: the dim that is gathered or scattered.
        sharded: the layout of the tensor in blocks.
        out_specs: the layouts of the results.
    """
    sizes = sharded.shard_sizes(dim)
    sizes = sizes[: sharded.mesh.axis_size(axes)]  # of one group: all are even, and equal

    def factors(operands: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, Tensor | None]]:
        remaining = iter(operands)
        for has_bias, transposed, bias_axes in kinds:
            weight, bias = next(remaining), next(remaining) if has_bias else None
            if bias is not None and bias_axes:
                bias = pcast(bias, bias_axes, to="varying")
            yield weight.t() if transposed else weight, bias

    def gather(x: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        weights, biases = zip(*factors(operands), strict=True)
        ys = all_gather_matmul(x, weights, axes, axis=dim, sizes=sizes)
        return tuple(y if b is None else y + b for y, b in zip(ys, biases, strict=True))

    def scatter(x: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        ((weight, bias),) = factors(operands)
        y = matmul_reduce_scatter(x, weight, axes, scatter_dimension=dim, sizes=sizes)
        if bias is not None and dim == y.ndim - 1:
            bias = bias.split(sizes)[int(axis_index(axes))]
        return (y if bias is None else y + bias,)

    function = MappedFunction(
        scatter if scatters else gather, "", None, None, out_specs, None,
        redistribute_inputs=False, check=False,
    )  # fmt: skip
    function.where = "matmul_reduce_scatter" if scatters else "all_gather_matmul"
    return function
