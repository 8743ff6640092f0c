"""State of a training script: pure functions on pytrees of pairs.

- `factories`: `fs.zeros`, `fs.full`, `fs.arange`, `fs.eye` and others, created in a layout.
- `parameters`: `fs.state.match_rules`, `init`, `tree_shard`, `tree_unshard`, `tree_reshard`.
"""

from fshard.state.parameters import (
    init,
    match_rules,
    shapes_of,
    tree_reshard,
    tree_shard,
    tree_unshard,
)

__all__ = ["init", "match_rules", "shapes_of", "tree_reshard", "tree_shard", "tree_unshard"]
