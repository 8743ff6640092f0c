"""Functions of one device on layouts: `fs.partition`, `fs.apply`, `fs.on_pairs` and `fs.auto`.

- `partition`: the public transform; one assignment per kind of call.
- `function_traces`: one traced graph per kind of arguments and state of Python.
- `state/`: the state of Python that a function reads beside its arguments.
- `recent_calls`: the plans of the last calls, found without their keys.
- `apply`: one operation on pairs; `repeated_calls`: its plans, by the layouts of operands.
- `auto`: the choice of layouts for all arguments; `layout_search/`: its search and its proof.
- `assignment/`: from a graph to lines with layouts.
- `ir`: the lines of a partitioned call; `execution/`: their order, and how they run.
- `number_variants`: plans by the values of ints and floats, and plans for any value.
- `partitioned_call`: one partitioned call, its cost and graph.
- `arguments`: the specs of a call's arguments, and the key it is cached by.
- `training_time`: the modelled time of a training step; `step_cost/`: time and memory of each
  operation.

To see why an operation gathers, call `fs.propagate(op, *specs)` with the specs that `explain()`
shows above its row, and read `.alternatives`; `ops/propagate/select.py` makes the choice.
"""
