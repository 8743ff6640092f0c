"""State of a training script: pure functions on pytrees of pairs.

- `factories`: `fs.zeros`, `fs.full`, `fs.arange`, `fs.eye` and others, created in a layout.
- `checkpoints`: `fs.state.save` and `load`.
- `parameters`: `fs.state.match_rules`, `init`, `tree_shard`, `tree_unshard`, `tree_reshard`.
- `modules`: `functional`, `distribute_module`, parallel styles, `sync_module`, rules of models.
- `gradients`: `value_and_grad`, `accumulate`, `clip_by_global_norm`.
- `optimizers`: `sgd`, `adamw`, `adafactor`, `muon`; `zero_specs` and `zero_table`.
- `local_updates`: computation on the locals of pairs.
"""

from fshard.state.checkpoints.loading import load, verify
from fshard.state.checkpoints.saving import Saving, save
from fshard.state.gradients import accumulate, clip_by_global_norm, value_and_grad
from fshard.state.modules.broadcast import sync_module
from fshard.state.modules.distributed_module import DistributedModule, distribute_module
from fshard.state.modules.functional import Functional, functional
from fshard.state.modules.model_rules import model_rules
from fshard.state.modules.parallel_styles import (
    Style,
    colwise,
    loss_parallel,
    prepare_input,
    prepare_output,
    rowwise,
    sequence,
)
from fshard.state.optimizers.adafactor import adafactor
from fshard.state.optimizers.elementwise import adamw, sgd
from fshard.state.optimizers.muon import muon
from fshard.state.optimizers.optimizer import Optimizer
from fshard.state.optimizers.zero import ZeroStage, ZeroTable, zero_specs, zero_table
from fshard.state.parameters import (
    init,
    match_rules,
    shapes_of,
    tree_reshard,
    tree_shard,
    tree_unshard,
)

__all__ = [
    "DistributedModule", "Functional", "Optimizer", "Saving", "Style", "ZeroStage", "ZeroTable",
    "accumulate", "adafactor", "adamw", "clip_by_global_norm", "colwise", "distribute_module",
    "functional", "init", "load", "loss_parallel", "match_rules", "model_rules", "muon",
    "prepare_input", "prepare_output", "rowwise", "save", "sequence", "sgd", "shapes_of",
    "sync_module", "tree_reshard", "tree_shard", "tree_unshard", "value_and_grad", "verify",
    "zero_specs", "zero_table",
]  # fmt: skip
