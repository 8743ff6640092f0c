"""Pictures of layouts, meshes and programs.

- `visualize`: `fs.visualize`
- `layout_picture`: the picture of a layout, with `picture_grid` and `picture_html`
- `local_values`: values of locals in its cells
- `shard_owners`: the ranks that hold each shard
- `mesh_picture`: a mesh on its machine
- `program_picture`: a program, with `rank_transfers`: bytes that ranks send to each other
- `step_picture`, `memory_picture`: a partitioned step: computation, links, and memory over time
- `tree_picture`: the layouts of a tree of tensors by path
- `timeline`: bars on a time axis
- `plots`: pictures drawn with matplotlib
- `axis_marks`: colours and marks of mesh axes
- `drawing`: lines of coloured text
"""
