"""Operations on tensors whose space or sequence is sharded: images, volumes, points, sequences.

- `windowed_ops`: convolutions, pooling, interpolation, padding on pairs, as in
  `torch.nn.functional`.
- `halos`: shards extended by their neighbours' elements, and the transpose.
- `window_plans`: the elements of a dim that each rank needs for its part of a windowed operation.
- `ring_fold`: a fold over blocks that move around a ring of ranks (`spmd/collectives/ring_fold`).
- `sharded_attention`: attention over a sharded sequence; `ring_attention` on the locals of a rank,
  `block_attention` with one block of keys, `ring_strategy` in partitioned functions.
- `context_parallel`: attention of a function or module as rings, in a body.
- `neighborhood_attention`: attention to the neighborhood of each query.
- `neighbours`: nearest neighbours, and all within a radius.
- `load_balance`: shard sizes of equal weight; `weighted_moments`: weighted mean and variance.
- `ring_layouts`: layouts of operands that stay and of those that move.

Windowed operations of PyTorch that gather sharded spatial dims, on pairs and in `fs.partition`:

| operation                              | why                                                |
|----------------------------------------|----------------------------------------------------|
| `max_unpool1d`, `2d`, `3d`             | indices may name any position of a plane           |
| `fractional_max_pool2d`, `3d`          | the places of windows are drawn                    |
| `grid_sample`                          | the positions that are read are values             |
| `torch.istft`                          | PyTorch checks the sums of its windows by value    |
| `avg_pool1d`, `2d`, `3d` of integers   | rounded averages cannot be corrected at the ends   |

Batch and channels of their operands may be sharded.
"""

from __future__ import annotations

from fshard.domain import ring_strategy as _ring_strategy  # noqa: F401 - registers a strategy
from fshard.domain.context_parallel import context_parallel
from fshard.domain.halos import halo_exchange, halo_reduce
from fshard.domain.load_balance import balance
from fshard.domain.neighborhood_attention import na1d, na2d, na3d
from fshard.domain.neighbours import knn, radius_search
from fshard.domain.sharded_attention import scaled_dot_product_attention, zigzag_order
from fshard.domain.weighted_moments import weighted_mean, weighted_var_mean
from fshard.domain.window_plans import RankWindow, WindowPlan, window_plan
from fshard.domain.windowed_ops import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
    fold,
    interpolate,
    max_pool1d,
    max_pool2d,
    max_pool3d,
    pad,
    unfold,
)
from fshard.spmd.collectives.ring_fold import ring_fold

__all__ = [
    "RankWindow", "WindowPlan", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "balance", "context_parallel", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "fold", "halo_exchange",
    "halo_reduce", "interpolate", "knn", "max_pool1d", "max_pool2d", "max_pool3d", "na1d",
    "na2d", "na3d", "pad", "radius_search", "ring_fold", "scaled_dot_product_attention", "unfold",
    "weighted_mean", "weighted_var_mean", "window_plan", "zigzag_order",
]  # fmt: skip
