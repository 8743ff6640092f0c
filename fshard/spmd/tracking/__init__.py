"""Type tracking of plain tensors in the body of a `shard_map`.

Each tensor has a state along every mesh axis (varying, invariant, reduced, unreduced), as in JAX.

- `tracker`: the table of states of one rank's tensors; `fs.typeof`.
- `function_mode`: infers the states of each call's result.
- `torch_effects`: which functions write, draw, read values, or are linear.
- `insert_casts`: casts of operands that disagree.
- `control_casts`: casts of values that depend on what the host has read.
- `inner_autograd`: gradients taken in the body.
- `read_agreement`: which ranks have read values, so that only these are compared.
- `gradient_sums`: collectives of backward passes, compared between ranks that may have diverged.
- `out_spec_check`: results against their out specs.
- `typed_body`: types of arguments and results of a mapped function.
"""
