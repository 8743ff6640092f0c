"""Search for the cheapest program between two layouts of one mesh: A* over typed steps.

- `problem`: endpoints, light layout values, costs and lower bounds
- `astar`: the search itself
- `collective_edges`, `exchange_edges`: steps out of a layout, with `all_to_all_edges` and
  `exchange_targets` for the choices of one step
- `search_layout`: `SearchLayout`, a layout as a light value
- `size_tables`: values derived from the sizes of many shards
- `reachability`: goals that the allowed steps cannot reach
"""
