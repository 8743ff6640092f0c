"""Removal of dims that a reshape merges, and other reshapes split in the same way.

`view(linear(view(x, [a * b, k])), [a, b, n])` computes `linear(x)`, and below autograd the product
of two `(batch, head, m, k)` tensors is a `bmm` of tensors whose first dim is `batch * head`. A
merged dim has shards of its major dim alone: with the minor dim sharded, the heads say, all rows
would be exchanged. Without the merge each of the two dims has its own layout.

A *place* is one dim of one value. The places that operations keep as one dim, in operands and
results, are a component. Its dim is separated if only reshapes merge and split it, all into the
same sizes; values and gradients of the results do not change.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from fshard._torch.operators import OpOverload

aten = torch.ops.aten
Place = tuple[fx.Node, int]
Sizes = tuple[int, ...]

_RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
_SAME_SHAPE = {
    aten.clone.default, aten.detach.default, aten.alias.default, aten.contiguous.default,
    aten.expand.default, aten._to_copy.default,
}  # fmt: skip
_ALONG_DIM = {
    aten._softmax.default: 1, aten._log_softmax.default: 1, aten._safe_softmax.default: 1,
    aten.softmax.int: 1, aten.log_softmax.int: 1,
    aten._softmax_backward_data.default: 2, aten._log_softmax_backward_data.default: 2,
}  # fmt: skip
"""Operations along one dim that keep the shape of all tensors, with the dim's argument."""
_SUMS = {aten.sum.dim_IntList, aten.mean.dim, aten.logsumexp.default}
_PERMUTATIONS = {aten.t.default, aten.transpose.int, aten.permute.default}
_PRODUCTS = {aten.mm.default, aten.matmul.default, aten.addmm.default, aten.linear.default}
_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


def separate_merged_dims(graph: fx.GraphModule) -> None:
    """Keep dims of a graph apart that reshapes merge and split in the same way."""
    places = _Places()
    for node in graph.graph.nodes:
        places.add(node)
    sizes = places.separable()
    if sizes:
        _Separation(sizes).run(graph)


@dataclass(slots=True, eq=False)
class _Places:
    """Components of places, by union-find.

    `merges` are the sizes into which reshapes split a place, or from which they merge it. Fixed
    places are of other uses, which need the dim as it is.
    """

    parents: dict[Place, Place] = field(default_factory=dict)
    merges: dict[Place, set[Sizes]] = field(default_factory=lambda: defaultdict(set))
    fixed: set[Place] = field(default_factory=set)

    def root(self, place: Place) -> Place:
        """Return the place that stands for the component."""
        while (parent := self.parents.get(place, place)) != place:
            self.parents[place] = self.parents.get(parent, parent)
            place = parent
        return place

    def add(self, node: fx.Node) -> None:
        """Add the places of a node's operands and result, and the relations between them."""
        seen = set[Place]()
        for merged, sizes in _merges(node):
            seen.add(merged)
            self.merges[merged].add(sizes)
        for first, *others in _same_dims(node):
            seen.update((first, *others))
            for other in others:
                self.parents[self.root(other)] = self.root(first)
        for x in (node, *node.all_input_nodes):
            self.fixed |= {(x, i) for i in range(len(shape_of(x)))} - seen

    def separable(self) -> dict[Place, Sizes]:
        """Return the sizes of each dim that is to be separated."""
        fixed = {self.root(place) for place in self.fixed}
        sizes: dict[Place, set[Sizes]] = defaultdict(set)
        for place, merges in self.merges.items():
            sizes[self.root(place)] |= merges
        known = {*self.parents, *self.parents.values(), *self.merges}
        return {
            place: next(iter(sizes[root]))
            for place in known
            if (root := self.root(place)) not in fixed and len(sizes[root]) == 1
        }


def _merges(node: fx.Node) -> Iterator[tuple[Place, Sizes]]:
    """Yield the dims that a reshape merges or splits, each with the sizes of the separate dims."""
    operand: Any = node.args[0] if node.target in _RESHAPES else None
    for before, after in _groups(shape_of(operand), shape_of(node)):
        if len(before) == 1 < len(after):
            yield (operand, before[0]), tuple(shape_of(node)[i] for i in after)
        elif len(after) == 1 < len(before):
            yield (node, after[0]), tuple(shape_of(operand)[i] for i in before)


def _groups(before: Sizes, after: Sizes) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of dims of a reshape with equal products; dims of 1 are in none."""
    left, right = ([i for i, size in enumerate(x) if size != 1] for x in (before, after))
    while 0 not in before and left and right:
        one, other = [left.pop(0)], [right.pop(0)]
        while (size := math.prod(before[i] for i in one)) != (
            other_size := math.prod(after[i] for i in other)
        ):
            group, dims = (one, left) if size < other_size else (other, right)
            group.append(dims.pop(0))
        yield one, other


def _same_dims(node: fx.Node) -> Iterator[tuple[Place, ...]]:
    """Yield the places that are one dim of the operation of a node."""
    target, operands = node.target, [x for x in node.args if isinstance(x, fx.Node)]
    shape, shapes = shape_of(node), [shape_of(x) for x in operands]
    if not shape or not all(shapes[:1]) or {*operands} != {*node.all_input_nodes}:
        return
    if target in _RESHAPES:
        groups = _groups(shapes[0], shape)
        yield from (((operands[0], x[0]), (node, y[0])) for x, y in groups if len(x) == len(y) == 1)
    elif target in _PERMUTATIONS:
        yield from (((operands[0], dim), (node, i)) for i, dim in enumerate(_order(node)))
    elif target in _ALONG_DIM:
        along = _dim(node, _ALONG_DIM[target])
        yield from _aligned(node, operands, [i for i in range(len(shape)) if i != along])
    elif target in _SUMS:
        yield from _summed(node, operands[0])
    elif _is_batched(node):
        yield (operands[0], 0), (operands[1], 0), (node, 0)
    elif target in _PRODUCTS:
        yield from _multiplied(node)
    elif node.kwargs.get("memory_format") not in _CHANNELS_LAST and (
        target in _SAME_SHAPE or torch.Tag.pointwise in getattr(target, "tags", ())
    ):
        yield from _aligned(node, operands, range(len(shape)))


def _aligned(
    node: fx.Node, operands: Sequence[fx.Node], dims: Sequence[int]
) -> Iterator[tuple[Place, ...]]:
    """Yield the dims of an elementwise operation along which no operand is broadcast."""
    shape = shape_of(node)
    for i in dims:
        places = [(x, i - len(shape) + len(shape_of(x))) for x in operands]
        places = [(x, dim) for x, dim in places if dim >= 0]
        if places and all(shape_of(x)[dim] == shape[i] for x, dim in places):
            yield (node, i), *places


def _summed(node: fx.Node, operand: fx.Node) -> Iterator[tuple[Place, ...]]:
    """Yield the dims of the operand of a sum, each with that of the result if it has one."""
    reduced, i = _reduced(node), 0
    for dim in range(len(shape_of(operand))):
        yield ((operand, dim),) if dim in reduced else ((operand, dim), (node, i))
        i += dim not in reduced or _keeps(node)


def _multiplied(node: fx.Node) -> Iterator[tuple[Place, ...]]:
    """Yield the dims of a product with a matrix that are not those of a bias."""
    a, b = _factors(node)
    rows = len(shape_of(node)) - 1
    if len(shape_of(b)) != 2 or len(shape_of(a)) != rows + 1 or a is b:
        return
    if node.target is aten.addmm.default and (
        node.kwargs or len(node.args) > 3 or len(shape_of(node.args[0])) != 1
    ):
        return
    yield from (((a, i), (node, i)) for i in range(rows))
    if rows == 1 and node.target in (aten.mm.default, aten.matmul.default):
        yield (a, 1), (b, 0)
        yield (b, 1), (node, 1)


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the operands of a matrix product without its bias."""
    operands: Any = node.args[1:3] if node.target is aten.addmm.default else node.args[:2]
    return operands[0], operands[1]


def _is_batched(node: fx.Node) -> bool:
    """Return True for a product of two batches of matrices that are equally many."""
    if node.target not in (aten.bmm.default, aten.matmul.default):
        return False
    a, b = map(shape_of, _factors(node))
    return len(a) == len(b) == 3 and a[0] == b[0]


def _dim(node: fx.Node, index: int) -> int:
    """Return an argument of a node that is a dim of its result."""
    dim: Any = node.args[index]
    return int(dim % len(shape_of(node)))


def _reduced(node: fx.Node) -> set[int]:
    """Return the dims that a sum reduces."""
    count, dims = len(shape_of(node.args[0])), cast("list[int] | None", node.args[1])
    return {int(dim) % count for dim in dims or range(count)}


def _keeps(node: fx.Node) -> bool:
    """Return the argument `keepdim` of a sum."""
    return len(node.args) > 2 and bool(node.args[2])


def _order(node: fx.Node) -> list[int]:
    """Return the operand's dim of every dim of a permuted tensor."""
    count = len(shape_of(node))
    order = list(range(count))
    if node.target is aten.permute.default:
        dims: Any = node.args[1]
        return [dim % count for dim in dims]
    if count > 1:
        i, j = (0, 1) if node.target is aten.t.default else (_dim(node, 1), _dim(node, 2))
        order[i], order[j] = j, i
    return order


def shape_of(node: Any) -> Sizes:
    """Return the shape of a node that is a tensor, of fixed sizes; () for others."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    return shape if all(isinstance(size, int) for size in shape) else ()


# -- rewriting ---------------------------------------------------------------------------------


class _Separation:
    """Rewriting of a graph in which some places become several dims of the given sizes.

    The values in `meta` have the merged dims until all nodes are rewritten.
    """

    def __init__(self, sizes: Mapping[Place, Sizes]) -> None:
        self.sizes = sizes
        self.results = {node for node, _ in sizes}

    def run(self, graph: fx.GraphModule) -> None:
        """Rewrite all nodes with separated dims in operands or results."""
        nodes = [
            node
            for node in graph.graph.nodes
            if not self.results.isdisjoint((node, *node.all_input_nodes))
        ]
        for node in nodes:
            with graph.graph.inserting_before(node):
                self.rewrite(graph.graph, node)
        for node in self.results:
            node.meta["val"] = node.meta["val"].reshape(self.new_shape(node))
        for node in nodes:
            operand: Any = node.args[0]
            if node.target is aten.reshape.default and shape_of(operand) == shape_of(node):
                node.replace_all_uses_with(operand)
                graph.graph.erase_node(node)

    def new_dims(self, node: fx.Node, *dims: int) -> list[int]:
        """Return the dims that some dims of a node become."""
        widths = [len(self.sizes.get((node, i), (0,))) for i in range(len(shape_of(node)))]
        return [j for i in dims for j in range(sum(widths[:i]), sum(widths[: i + 1]))]

    def new_shape(self, node: fx.Node) -> Sizes:
        """Return the shape of a node after the separation."""
        shape = enumerate(shape_of(node))
        return tuple(size for i, n in shape for size in self.sizes.get((node, i), (n,)))

    def rewrite(self, graph: fx.Graph, node: fx.Node) -> None:
        """Replace an operation by that on the separated dims."""
        operand: Any = node.args[0]
        if node.target in _RESHAPES:
            _set(node, aten.reshape.default, operand, [*self.new_shape(node)])
        elif node.target is aten.expand.default:
            _set(node, aten.expand.default, operand, [*self.new_shape(node)])
        elif node.target in _PERMUTATIONS:
            _set(node, aten.permute.default, operand, self.new_dims(operand, *_order(node)))
        elif node.target in _ALONG_DIM:
            index = _ALONG_DIM[node.target]
            node.update_arg(index, *self.new_dims(node, _dim(node, index)))
        elif node.target in _SUMS:
            self.rewrite_sum(graph, node, operand)
        elif _is_batched(node):
            _set(node, aten.matmul.default, *node.args)
        elif node.target is aten.addmm.default:
            a, b = _factors(node)
            weight = graph.call_function(aten.t.default, (b,))
            weight.meta = {**b.meta, "val": b.meta["val"].t()}
            _set(node, aten.linear.default, a, weight, operand)
        elif node.target is aten.mm.default or node.target is aten.matmul.default:
            a, b = _factors(node)
            if (a, 1) in self.sizes or (b, 1) in self.sizes:
                _set(node, aten.tensordot.default, a, b, self.new_dims(a, 1), self.new_dims(b, 0))
            else:
                _set(node, aten.matmul.default, a, b)

    def rewrite_sum(self, graph: fx.Graph, node: fx.Node, operand: fx.Node) -> None:
        """Replace a sum by that over the separated dims, which keeps one dim for all of them."""
        dims = self.new_dims(operand, *sorted(_reduced(node)))
        if not _keeps(node) or len(dims) == len(_reduced(node)):
            node.update_arg(1, dims)
            return
        total = graph.call_function(node.target, (operand, dims, True), node.kwargs)  # type: ignore[arg-type]
        shape = [1 if i in dims else size for i, size in enumerate(self.new_shape(operand))]
        total.meta = {**node.meta, "val": node.meta["val"].reshape(shape)}
        _set(node, aten.reshape.default, total, [*self.new_shape(node)])


def _set(node: fx.Node, target: OpOverload, *args: Any) -> None:
    node.target, node.args, node.kwargs = target, args, {}
