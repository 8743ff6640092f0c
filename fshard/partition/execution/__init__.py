"""Order and execution of the lines of a partitioned call.

- `schedule`: order of execution, with redistributions coalesced and launched ahead.
- `destinations`: results that are written into arguments and into the buffers of all-reduces.
- `run_lines`: execution on one rank, and on all ranks of a simulation.
- `remat_plan`: the values that the backward pass recomputes, by a policy; `recomputation`: their
  execution under hooks of saved tensors, with `segments` of lines and `recipes` for values.
- `saved_bytes`: the memory that the backward pass keeps, predicted without values.
"""
