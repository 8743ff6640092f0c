"""Operations on tensors whose space or sequence is sharded: images, volumes, points, sequences.

- `ring_fold`: a fold over blocks that move around a ring of ranks (`spmd/collectives/ring_fold`).
- `sharded_attention`: attention over a sharded sequence; `ring_attention` on the locals of a rank,
  `block_attention` with one block of keys, `ring_strategy` in partitioned functions.
- `context_parallel`: attention of a function or module as rings, in a body.
- `neighbours`: nearest neighbours, and all within a radius.
- `load_balance`: shard sizes of equal weight; `weighted_moments`: weighted mean and variance.
- `ring_layouts`: layouts of operands that stay and of those that move.
"""

from __future__ import annotations

from fshard.domain import ring_strategy as _ring_strategy  # noqa: F401 - registers a strategy
from fshard.domain.context_parallel import context_parallel
from fshard.domain.load_balance import balance
from fshard.domain.neighbours import knn, radius_search
from fshard.domain.sharded_attention import scaled_dot_product_attention, zigzag_order
from fshard.domain.weighted_moments import weighted_mean, weighted_var_mean
from fshard.spmd.collectives.ring_fold import ring_fold

__all__ = [
    "balance", "context_parallel", "knn", "radius_search", "ring_fold",
    "scaled_dot_product_attention", "weighted_mean", "weighted_var_mean", "zigzag_order",
]  # fmt: skip
