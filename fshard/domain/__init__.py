"""Operations on tensors whose space or sequence is sharded: images, volumes, points, sequences.

- `ring_fold`: a fold over blocks that move around a ring of ranks (`spmd/collectives/ring_fold`).
- `sharded_attention`: attention over a sharded sequence; `ring_attention` on the locals of a rank,
  `block_attention` with one block of keys, `ring_strategy` in partitioned functions.
- `neighbours`: nearest neighbours, and all within a radius.
- `ring_layouts`: layouts of operands that stay and of those that move.
"""

from __future__ import annotations

from fshard.domain import ring_strategy as _ring_strategy  # noqa: F401 - registers a strategy
from fshard.domain.neighbours import knn, radius_search
from fshard.domain.sharded_attention import scaled_dot_product_attention, zigzag_order
from fshard.spmd.collectives.ring_fold import ring_fold

__all__ = [
    "knn", "radius_search", "ring_fold", "scaled_dot_product_attention", "zigzag_order",
]  # fmt: skip
