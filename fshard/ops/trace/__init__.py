"""Tracing of functions to FX graphs of operations without writes.

- `trace`: the graph of a function or of a decomposition; `fs.constrain`.
- `functionalize`: writes in place become new values.
- `inner_gradients`: functions that take gradients or use `torch.func` themselves.
- `grad_modes`: operations without gradients, and tensors that autograd has saved.
- `custom_functions`: the backward of a custom `autograd.Function` as a graph.
- `mapped_regions`: calls of mapped functions as operations that run on locals.
- `checkpoints`: calls of `torch.utils.checkpoint` as marks around their operations.
- `passes`: hidden writes, layouts of draws, dims that reshapes merge.
- `refused_functions`: errors of functions that cannot be traced.
- `kept_tensors`: tensors without values that a function keeps outside, and those of failed traces.
- `constants`: values that depend on no argument, which a function may read.
- `traced_positions`: `x[i]` for a position `i` that the function computes.
- `unread_values`: `torch.cov`, `torch.corrcoef` and distributions without reads of values.
- `source_places`: the user's source line of every operation.
- `fused_updates`: fused optimizer steps as operations without writes.
"""
