"""Pictures of layouts.

- `layout_picture`: `fs.visualize`
- `picture_grid`, `picture_html`: the cells of a picture as text and as HTML
- `shard_owners`: the ranks that hold each shard
"""
