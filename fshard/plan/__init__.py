"""Planning: the cheapest program of collectives between two specs, or two trees of specs.

- `redistribute`: the public function; `plan_options` holds its options
- `cast_layouts`: layouts in which the dtype may change
- `cross_mesh`: programs between two meshes
- `split_axes`: programs along parts of axes, such as one part inside of nodes
- `search/`: A* on one mesh
- `batch/`: programs of a tree of specs, with coalesced launches
"""
