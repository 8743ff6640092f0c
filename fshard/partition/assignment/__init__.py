"""From a traced graph to lines with layouts.

- `fastest_assignment`: the layouts of a call, and of its results.
- `assign_layouts`: the pass over a graph.
- `operand_layouts`: the fastest strategy of one operation, and the axes that it keeps.
- `gradient_reductions`: places of the casts whose transposes reduce gradients.
- `overlapped_products`: products beside the gathers and scatters around them.
- `created_tensors`: tensors that depend on no argument, created in the layouts of their uses.
- `tensor_versions`: tensors with all their layouts, and the programs between them.
- `layout_hints`: layouts that are requested later in a graph.
"""
