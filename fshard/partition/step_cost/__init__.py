"""Time and memory of a step of one rank, from a run on tensors without values.

- `roofline`: `Roofline`, the operations and collectives of a step with their modelled times.
- `memory_timeline`: `StepMemory`, the bytes that the rank holds, by category.
- `abstract_step`: the run; `step_record`: the record of what runs and what is held.
- `operation_costs`: FLOPs and bytes of an operation.
- `timing`: times of a record on a machine.
"""
