"""State of a training script: pure functions on pytrees of pairs.

- `factories`: `fs.zeros`, `fs.full`, `fs.arange`, `fs.eye` and others, created in a layout.
- `checkpoints`: `fs.state.save` and `load`.
- `parameters`: `fs.state.match_rules`, `init`, `tree_shard`, `tree_unshard`, `tree_reshard`.
"""

from fshard.state.checkpoints.loading import load, verify
from fshard.state.checkpoints.saving import Saving, save
from fshard.state.parameters import (
    init,
    match_rules,
    shapes_of,
    tree_reshard,
    tree_shard,
    tree_unshard,
)

__all__ = [
    "Saving",
    "init",
    "load",
    "match_rules",
    "save",
    "shapes_of",
    "tree_reshard",
    "tree_shard",
    "tree_unshard",
    "verify",
]
