"""Pictures of layouts.

- `visualize`: `fs.visualize`
- `layout_picture`: the picture of a layout, with `picture_grid` and `picture_html`
- `local_values`: values of locals in its cells
- `shard_owners`: the ranks that hold each shard
- `axis_marks`: colours and marks of mesh axes
- `drawing`: lines of coloured text
"""
