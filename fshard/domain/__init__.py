"""Operations on tensors whose space or sequence is sharded: images, volumes, points, sequences.

- `ring_fold`: a fold over blocks that move around a ring of ranks (`spmd/collectives/ring_fold`).
"""

from __future__ import annotations

from fshard.spmd.collectives.ring_fold import ring_fold

__all__ = ["ring_fold"]
