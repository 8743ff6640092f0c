"""Choices of layouts for `fs.auto`, and the proof of how good they are.

- `choice_search`: the search, which plans choices as `fs.partition` does.
- `joint_labels`: a graph in which every operation has its roles on all axes as label; its least
  weight is a lower bound of the time of a step in any layouts. `call_labels`: the labels of one
  call and their seconds. `role_labels`: the roles on all axes that are possible together.
- `decompositions`: the least time of the parts of an operation.
- `variable_elimination`: labels of least weight; equal parts of a graph are solved once.
- `state_distances`: the least time between any two layouts of a tensor, forward and backward.
- `merged_axes`: groups of axes that are labelled as one, on meshes of many axes.
- `argument_layouts`: the arguments' leaves, and their layouts with even shards.
"""
