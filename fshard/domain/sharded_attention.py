"""`fs.domain.scaled_dot_product_attention`: attention over a sharded sequence, by a ring.

On pairs the layouts say everything; in the body of a `shard_map` the axis and the sizes are
arguments. Both run `ring_attention` on the locals of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fshard._torch.dynamo import skip_frames_below
from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import Problem, fail, raise_if
from fshard.domain.block_attention import Attention, Drop, Interval
from fshard.domain.ring_attention import Intervals, RingAttention, contiguous, zigzag
from fshard.domain.ring_layouts import pairs_on_one_mesh, sliced, varying
from fshard.layout.mesh import Axes, Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair
from fshard.layout.validation import as_ints
from fshard.ops.prng.draw_ops import DRAW_OPS
from fshard.ops.prng.keyed_block import keyed_block_hook
from fshard.ops.rules.reduce.moments import wide
from fshard.partition.apply import on_pairs
from fshard.random.keys import fold_in
from fshard.random.sampling import dropout_scale
from fshard.run.global_tensors import reshard
from fshard.run.transports.base import current_rank
from fshard.spmd.axis_env import resolve_axes
from fshard.spmd.collectives.pcast import axis_index
from fshard.spmd.collectives.ring import sizes_along
from fshard.spmd.shard_map import local_map

WHERE = "fs.domain.scaled_dot_product_attention"
ORDERS = ("contiguous", "zigzag")
NAMES = ("query", "key", "value", "attn_mask")
SEQUENCE = -2
"""Dim of queries, keys and values that is the sequence."""


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    order: str = "contiguous",
    axis_name: Axes | None = None,
    query_sizes: Sequence[int] | None = None,
    key_sizes: Sequence[int] | None = None,
) -> Any:
    """Attend to keys and values whose sequence is sharded, by blocks that move around a ring.

    On pairs, or on the tensors of a `shard_map`'s body with `axis_name`. A rank holds its queries
    and a block of keys at a time: its memory and work grow with its share of the sequence.

    Args:
        query: shape (..., heads, queries, width). A pair may be sharded over batch, heads and
            queries; along axes that shard keys and not queries it is sliced.
        key: shape (..., heads, keys, width), batch and heads sharded as the query's.
        value: shape (..., heads, keys, value width), sharded as `key`.
        attn_mask: mask that broadcasts to (..., queries, keys), True where a query attends to a
            key, or added to the scores. In a body it has this rank's queries and all keys.
        dropout_p: probability to drop a weight, in a block of `fs.random.keyed`, which drops the
            same weights as on one device.
        is_causal: attend to keys at the query's position and before. A rank skips the blocks
            after its queries.
        scale: factor of the scores; None is `1 / sqrt(width)`.
        enable_gqa: let groups of query heads share a head of keys and values.
        order: "contiguous", or "zigzag" for tensors whose sequence is in the order
            `fs.domain.zigzag_order`, in which a causal mask gives all ranks equal work.
        axis_name: in a body, the axes along which keys are sharded.
        query_sizes: in a body, the number of queries on each index along the axes, on every rank
            the same. If they are left out, and an argument of the mapped function is uneven along
            the axes, the ranks exchange them.
        key_sizes: in a body, the number of keys on each index, as `query_sizes`.

    Returns:
        A pair sharded as the sliced query, or this rank's tensor, of shape (..., queries, value
        width).

    Raises:
        ShardingError: layouts of key, value and query that do not match, a sharded width, unreduced
            operands, sizes that are not those of the order, dropout without a key.

    Each rank sends (p - 1) / p of the keys and values forward; backward it sends them again with
    their gradients, which use saved log-sum-exps. Derivatives of second order hold the
    scores of all blocks. Semantics of `torch.nn.functional.scaled_dot_product_attention`; ring
    attention (arXiv 2310.01889), zigzag order (arXiv 2311.09431).

    >>> import torch
    >>> import fshard as fs
    >>> sequence = fs.Spec(fs.Mesh(cp=4), fs.P(None, "cp"), shape=(2, 12, 8))
    >>> q, k, v = (fs.shard(torch.randn(2, 12, 8), sequence) for _ in range(3))
    >>> y = fs.domain.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> full = torch.nn.functional.scaled_dot_product_attention(*map(fs.unshard, (q, k, v)),
    ...                                                          is_causal=True)
    >>> y.spec, torch.allclose(fs.unshard(y), full, atol=1e-5)
    (f32[2,12@cp,8], True)
    """
    if order not in ORDERS:
        fail(WHERE, f"order={order!r}", "order must be 'contiguous' or 'zigzag'",
             "order='contiguous'")  # fmt: skip
    if not isinstance(dropout_p, int | float) or not 0 <= dropout_p <= 1:
        fail(WHERE, f"dropout_p={dropout_p!r}", "dropout_p must be in 0..1", "dropout_p=0.1"
             )  # fmt: skip
    if scale is not None and not isinstance(scale, int | float):
        fail(WHERE, f"scale={scale!r}", "scale must be a number or None", "scale=None")
    if attn_mask is not None and is_causal:
        fail(WHERE, "attn_mask and is_causal=True", "one of them must be left out, as in PyTorch",
             "attn_mask with False, or -inf, after the query")  # fmt: skip
    for name, x in zip(NAMES, (query, key, value), strict=False):
        if x is None:
            fail(WHERE, f"{name}=None", f"{name} must be a pair or a tensor",
                 f"fs.shard({name}, spec)")  # fmt: skip
    operands = [x for x in (query, key, value, attn_mask) if x is not None]
    options = AttentionOptions(dropout_p, is_causal, scale, enable_gqa, order)
    if any(map(is_pair, operands)):
        return _on_pairs(operands, options)
    if axis_name is None:
        fail(WHERE, "tensors without axis_name=", "operands must be pairs, or the tensors of a "
             "body, in which the axis has a name", 'axis_name="cp" in fs.shard_map')  # fmt: skip
    return _in_body(operands, options, axis_name, query_sizes, key_sizes)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of an attention, as for `scaled_dot_product_attention`."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    order: str = "contiguous"

    def drop_key(self) -> Tensor | None:
        """Return the key of the next draw of the running block; None if nothing is dropped."""
        if not self.dropout_p:
            return None
        block = keyed_block_hook.call()
        if block is None:
            fail(WHERE, f"dropout_p={self.dropout_p}", "weights must be dropped by a key",
                 "with fs.random.keyed(key): around the call, in the body if it is in one; or "
                 "dropout_p=0.0")  # fmt: skip
        block.count += 1
        return fold_in(block.key, block.first + block.count - 1)

    def intervals(
        self, sizes: Sequence[int], axes: tuple[str, ...], name: str
    ) -> tuple[Intervals, ...]:
        """Return the intervals of the global sequence on each index, whose shards have `sizes`.

        Raises:
            ShardingError: sizes that are not those of the zigzag order.
        """
        if self.order == "contiguous":
            return contiguous(sizes)
        intervals = zigzag(sum(sizes), len(sizes))
        expected = tuple(sum(last - first for first, last in row) for row in intervals)
        if tuple(sizes) != expected:
            fail(WHERE, f"{name} of sizes {tuple(sizes)} along {', '.join(axes)}",
                 f"the zigzag order of {sum(sizes)} positions must have the sizes {expected}",
                 f"sizes={{dim: {expected}}} in its spec, or order='contiguous'")  # fmt: skip
        return intervals


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one rank within the global ones, for dropout: the dims before the sequences."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def drop(self, key: Tensor, p: float, like: Tensor) -> Drop:
        """Return the dropout of weights with probability `p` by a key."""
        scale = dropout_scale(p)

        def draw(rows: Interval, columns: Interval) -> Tensor:
            start = [*self.offsets, rows[0], columns[0]]
            size = [*self.sizes, rows[1] - rows[0], columns[1] - columns[0]]
            kept = DRAW_OPS.bernoulli(
                like, key, list(self.shape), start, size, 1.0 - p, dtype=torch.bool, device=None
            )
            return _as_four_dims(kept, self.sizes[:-1]).to(like.dtype) * scale

        return draw


def attend(
    tensors: Sequence[Tensor], options: AttentionOptions, mesh: Mesh, axes: tuple[str, ...],
    queries: Intervals, keys: tuple[Intervals, ...], scores: Scores, drop_key: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the attention of a rank's queries; its dims before the sequence broadcast.

    Args:
        tensors: query, key, value and, if there is one, the mask.
        options: the options.
        mesh: the mesh of the axes.
        axes: the axes along which keys are sharded.
        queries: the intervals of this rank's queries.
        keys: the intervals of the keys on each index.
        scores: this rank's part of the scores.
        drop_key: key of the dropout, or None.
    """
    lead = _broadcast(x.shape[:-3] for x in tensors[:3])
    q, k, v, *masks = (_as_four_dims(x, lead) for x in tensors)
    (batch,) = _broadcast(x.shape[:1] for x in (q, k, v))
    if q.shape[0] != batch or q.shape[1] == 1:
        q = q.expand(batch, k.shape[1] if q.shape[1] == 1 else -1, -1, -1)
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if options.scale is None else options.scale
    drop = None if drop_key is None else scores.drop(drop_key, options.dropout_p, wide(q.detach()))
    ring = RingAttention(mesh, axes, queries, keys, options.is_causal, Attention(scale, drop))
    out = ring(q, k, v, masks[0] if masks else None)
    heads = max((x.shape[-3] for x in tensors[:3] if x.dim() > 2), default=None)
    shape = (*lead, *(() if heads is None else (heads,)), *out.shape[-2:])
    return out if out.shape == shape else out.reshape(shape)


def _broadcast(shapes: Iterable[torch.Size]) -> torch.Size:
    """Return the shape that shapes broadcast to, at once if they are equal."""
    first, *others = {*shapes}
    return torch.broadcast_shapes(first, *others) if others else first


def _as_four_dims(x: Tensor, lead: Sequence[int]) -> Tensor:
    """Return a tensor (..., heads, rows, columns) with one batch dim, of `lead` or of size 1."""
    if x.dim() == 4 and x.shape[:1] in (lead, (1,)):
        return x
    x = x[(None,) * (3 - x.dim())] if x.dim() < 3 else x
    if x.dim() == 3:
        return x.unsqueeze(0)
    if all(size == 1 for size in x.shape[:-3]):
        return x.reshape(1, *x.shape[-3:])
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])


def check_shapes(shapes: Sequence[Any], options: AttentionOptions) -> torch.Size:
    """Return the shape of the result; raise `ShardingError` for shapes that PyTorch refuses."""
    query, key, value, *masks = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in shapes)
    try:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, masks[0] if masks else None, enable_gqa=options.enable_gqa
        ).shape
    except (RuntimeError, ValueError, IndexError) as error:
        given = ", ".join(f"{n} {tuple(x.shape)}" for n, x in zip(NAMES, shapes, strict=False))
        fail(WHERE, given, f"PyTorch must take the shapes: {str(error).splitlines()[0]}",
             "(..., heads, sequence, width), with enable_gqa=True for fewer heads of keys",
             )  # fmt: skip


# -- in a body --------------------------------------------------------------------------------


def _in_body(
    tensors: Sequence[Tensor], options: AttentionOptions, axis_name: Axes,
    query_sizes: Sequence[int] | None, key_sizes: Sequence[int] | None,
) -> Tensor:  # fmt: skip
    """Return the attention of this rank of a mapped function."""
    mesh, axes = resolve_axes(axis_name, None, WHERE)
    index = int(axis_index(axes))
    sizes = [
        sizes_along(WHERE, name, given, mesh, axes, x, x.shape[SEQUENCE])
        for given, name, x in (
            (query_sizes, "query_sizes", tensors[0]), (key_sizes, "key_sizes", tensors[1])
        )
    ]  # fmt: skip
    query, key, value, *masks = tensors
    # Masks have all keys; for the shapes the keys of all ranks stand in the place of this block.
    globals_ = [query, *(_with_keys(x, sum(sizes[1])) for x in (key, value)), *masks]
    shape = check_shapes(globals_, options)
    queries, keys = (
        options.intervals(s, axes, name) for s, name in zip(sizes, NAMES[:2], strict=True)
    )
    before = tuple(shape[:-2])
    scores = Scores((*before, sum(sizes[0]), sum(sizes[1])), (0,) * len(before), before)
    return attend(tensors, options, mesh, axes, queries[index], keys, scores, options.drop_key())


def _with_keys(x: Tensor, size: int) -> Tensor:
    return torch.empty((*x.shape[:SEQUENCE], size, x.shape[-1]), dtype=x.dtype, device="meta")


# -- on pairs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RingLayouts:
    """Layouts in which an attention runs as a ring.

    Attributes:
        axes: the axes along which keys are sharded.
        operands: the layouts of query, key, value and, if there is one, the mask.
        result: the layout of the result.
    """

    axes: tuple[str, ...]
    operands: tuple[Spec, ...]
    result: Spec

    def body(
        self, options: AttentionOptions, drop_key: Tensor | None = None
    ) -> Callable[..., Tensor]:
        """Return the attention on the locals of a rank, after checks of the order.

        Raises:
            ShardingError: sizes that are not those of the order.
        """
        mesh, query, key = self.result.mesh, self.operands[0], self.operands[1]
        dim = key.ndim + SEQUENCE
        keys = options.intervals(key.shard_sizes(dim), self.axes, "a key")
        rows = query.ndim + SEQUENCE
        queries = options.intervals(query.shard_sizes(rows), query.partition.dims[rows], "a query")
        split = query.partition.dims[rows]
        used = [axis for spec in self.operands for dim in spec.partition.dims for axis in dim]

        def ring_attention(*tensors: Tensor) -> Tensor:
            rank = current_rank(mesh, WHERE).rank
            group = mesh.group(rank, split) if split else (rank,)
            shape, offsets = self.result.local_shape(rank), self.result.offsets(rank)
            scores = Scores((*self.result.shape[:-1], key.shape[-2]), offsets[:-2], shape[:-2])
            xs = [varying(x, spec, used) for x, spec in zip(tensors, self.operands, strict=True)]
            return attend(
                xs, options, mesh, self.axes, queries[group.index(rank)], keys, scores, drop_key
            )

        return ring_attention


def ring_layouts(specs: Sequence[Spec], shape: Sequence[int]) -> RingLayouts | None:
    """Return the layouts of a ring for operands of these, None if keys are not sharded.

    Args:
        specs: the layouts of query, key, value and, if there is one, the mask.
        shape: the shape of the result.

    Raises:
        ShardingError: layouts of query, key and value that do not match, a sharded width, and
            unreduced operands.
    """
    raise_if(WHERE, _layout_problems(specs))
    query, key, value, *masks = specs
    axes = key.partition.dims[SEQUENCE]
    if not axes:
        return None
    query = sliced(query, query.ndim + SEQUENCE, axes)
    rows = query.partition.dims[SEQUENCE]
    dims = (*query.partition.dims[:-2], rows, ())
    lead = (None,) * (len(shape) - len(dims))
    partition = PartitionSpec(*lead, *(dim or None for dim in dims))
    sizes = {i - len(dims) + len(shape): s for i, s in enumerate(query.sizes[:-1]) if s is not None}
    result = Spec(query.mesh, partition, shape=shape, dtype=query.dtype, sizes=sizes)
    masks = [_mask_layout(mask, result) for mask in masks]
    return RingLayouts(axes, (query, key, value, *masks), result)


def _layout_problems(specs: Sequence[Spec]) -> list[Problem]:
    """Return the problems of layouts of query, key, value and mask."""
    query, key, value = specs[:3]
    problems = []
    for name, spec in zip(NAMES, specs, strict=False):
        p = spec.partition
        if p.unreduced_kinds:
            problems.append(Problem(f"{name} of {spec}", "operands must not be unreduced",
                                    f"fs.reshard({name}, fs.P(...)) adds the partial sums")
                            )  # fmt: skip
        if name != "attn_mask" and p.dims[-1]:
            problems.append(Problem(f"{name} of {spec}", "the last dim must be unsharded",
                                    f"fs.reshard({name}, fs.P(...)) that shards other dims")
                            )  # fmt: skip
    if key.partition.dims[:-1] != value.partition.dims[:-1] or key.sizes[:-1] != value.sizes[:-1]:
        problems.append(Problem(f"key of {key}, value of {value}",
                                "key and value must be sharded alike",
                                f"fs.reshard(value, {_like(key, value)!r})"))  # fmt: skip
    if any(key.partition.dims[: max(key.ndim - query.ndim, 0)]):
        problems.append(Problem(f"query of {query}, key of {key}",
                                "a batch dim that the query lacks must be unsharded",
                                "fs.reshard(key, fs.P(...)) that shards other dims"))  # fmt: skip
    for i in range(3, 1 + min(query.ndim, key.ndim)):
        axes = query.partition.dims[-i], key.partition.dims[-i]
        shards = (1,) if 0 in (query.shape[-i], key.shape[-i]) else (
            _shares(query, -i), _shares(key, -i))  # fmt: skip
        if axes[0] != axes[1] or len(set(shards)) > 1:
            problems.append(Problem(f"query of {query}, key of {key}",
                                    f"dim {-i}, of batch or heads, must be sharded alike",
                                    f"fs.reshard(query, {_like(key, query)!r})"))  # fmt: skip
    return problems


def _shares(spec: Spec, dim: int) -> tuple[float, ...]:
    """Return the shares of a dim's shards in its size."""
    return tuple(size / spec.shape[dim] for size in spec.shard_sizes(dim % spec.ndim))


def _like(spec: Spec, other: Spec) -> PartitionSpec:
    """Return the partition of `spec` for `other`, whose dims correspond from the last one on."""
    dims = ((),) * max(other.ndim - spec.ndim, 0) + spec.partition.dims[-other.ndim :]
    return PartitionSpec(*(dim or None for dim in dims))


def _mask_layout(mask: Spec, result: Spec) -> Spec:
    """Return the layout of a mask with this rank's queries and all keys."""
    dims: list[Any] = [None] * mask.ndim
    sizes = {}
    for i in range(2, 1 + min(mask.ndim, result.ndim)):
        if mask.shape[-i] > 1:
            dims[-i] = result.partition.dims[-i] or None
            if result.sizes[-i] is not None:
                sizes[mask.ndim - i] = result.sizes[-i]
    return mask.replace(partition=PartitionSpec(*dims), sizes=sizes)


@skip_frames_below(
    "attention on pairs runs uncompiled: ranks skip different blocks of a causal ring"
)
def _on_pairs(operands: Sequence[Any], options: AttentionOptions) -> Sharded:
    """Return the attention on pairs, a ring if the keys are sharded."""
    pairs = pairs_on_one_mesh(WHERE, operands)
    specs = [pair.spec for pair in pairs]
    plan = _ring_plan(options, *specs)
    if plan is None:
        mask = pairs[3] if len(pairs) > 3 else None
        result: Sharded = on_pairs(torch.nn.functional.scaled_dot_product_attention)(
            *pairs[:3], mask, options.dropout_p, options.is_causal, scale=options.scale,
            enable_gqa=options.enable_gqa)  # fmt: skip
        return result
    layouts, run = plan
    if options.dropout_p:
        run = local_map(layouts.body(options, options.drop_key()), out_specs=layouts.result)
    moved = [
        pair if pair.spec == spec else reshard(pair, spec)
        for pair, spec in zip(pairs, layouts.operands, strict=True)
    ]
    ring: Sharded = run(*moved)
    return ring


@lru_cache(maxsize=CACHE_SIZE)
def _ring_plan(
    options: AttentionOptions, *specs: Spec
) -> tuple[RingLayouts, Callable[..., Any]] | None:
    """Return the layouts of a ring and its function on pairs, None if keys are not sharded."""
    layouts = ring_layouts(specs, check_shapes(specs, options))
    if layouts is None:
        return None
    return layouts, local_map(layouts.body(options), out_specs=layouts.result)


def zigzag_order(size: int, n: int, /) -> Tensor:
    """Return the positions of a sequence in zigzag order: rank i of n has chunks i and 2n - 1 - i.

    A causal query attends to all keys before it. In this order all ranks have equal work.

    Args:
        size: the length of the sequence, which is split into 2n chunks.
        n: the number of ranks.

    Returns:
        Indices, int64 of shape (size,): `x[:, order]` is the sequence to shard, and
        `y[:, order.argsort()]` undoes it. If 2n divides the size, shards are even.

    Raises:
        ShardingError: a size or a number of ranks that is not an int of at least 0, and of 1.

    The order of Llama 3's context parallelism (arXiv 2407.21783) and of DTensor's.

    >>> import fshard as fs
    >>> fs.domain.zigzag_order(8, 2)
    tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if as_ints((size, n)) is None or size < 0 or n < 1:
        fail("fs.domain.zigzag_order", f"size={size!r}, n={n!r}",
             "they must be ints, of at least 0 and of at least 1", "zigzag_order(8, 2)"
             )  # fmt: skip
    rows = [torch.arange(*chunk) for row in zigzag(size, n) for chunk in row]
    return torch.cat(rows)
