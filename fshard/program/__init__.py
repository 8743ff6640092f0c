"""Programs of typed steps as values: typing, transposes, rewrites, costs and bounds.

- `steps`: the step types; `infer` and `infer_exchange` type-check them, `transpose` gives adjoints.
- `program`: `Program`, a checked sequence of steps; `program_arguments`: checks of its options.
- `single_step`: all steps that lead from one spec to another alone.
- `simplify`, `cast_rules`: local rewrites that lower the cost, and the rules for casts in them.
- `halo_steps`: steps that extend shards by parts of their neighbours, and the reverse;
  `halo_boxes`: their typing and boxes.
- `boxes`: products of intervals, one for each dim.
- `exchange_boxes`: the boxes that each rank of an `Exchange` sends and receives.
- `cost/`: machine model, traffic and time of steps.
- `lower_bound`: bytes that any program between two specs receives and holds.
"""
