"""Time and memory of a step of one rank, from a run on tensors without values.

- `roofline`: `Roofline`, the operations and collectives of a step with their modelled times.
- `memory_timeline`: `StepMemory`, the bytes that the rank holds, by category.
- `abstract_step`: the run; `step_record`: the record of what runs and what is held.
- `step_transport`: the collectives of the run, and their buffers.
- `memory_limit`: plans within a limit of memory.
- `operation_costs`: FLOPs and bytes of an operation.
- `timing`: times of a record on a machine.
"""
