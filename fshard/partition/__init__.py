"""Functions of one device on layouts: `fs.partition`, `fs.apply`, `fs.on_pairs` and `fs.auto`.

- `partition`: the public transform; one traced graph and one assignment per kind of call.
- `apply`: one operation on pairs.
- `auto`, `label_graph`, `variable_elimination`: the choice of layouts for all arguments.
- `assign_layouts`, `layout_hints`: from a graph to lines with layouts.
- `ir`, `run_lines`: the lines of a partitioned call, and how they run.
- `partitioned_call`: one partitioned call, its cost and graph.
- `call_signature`, `arg_specs`: the key of a call, and the specs of its arguments.
- `step_time`: the modelled time of a step.
"""
