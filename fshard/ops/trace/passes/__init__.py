"""Passes over the graph of a traced function.

- `hidden_writes`: gradients of values that are written under `no_grad` or through `detach()`.
- `draw_layouts`: random draws take the layout of a tensor they are combined with.
- `merged_dims`: dims stay apart that reshapes merge and split again, as batch and heads.
"""
