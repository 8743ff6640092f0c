"""Costs of steps and programs.

- `links`: `Link` and `Torus`, the connections of devices.
- `link_groups`: the effective link of a collective over mesh axes, on a switch or a torus.
- `machines`: figures of public machines.
- `topology`: `Topology`, the machine: links, launch and message times, rates of computation.
- `topology_files`: files of topologies.
- `shard_overlap`: elements that the worst-placed rank needs, holds and lacks; defines these words.
- `dim_overlap`: one dim's factors, at many coordinates.
- `rank_overlap`: the same for each rank.
- `traffic`: bytes, messages and rounds of the busiest rank in a step.
- `rank_loads`: bytes of each rank in a step, to be added up over a batch.
- `model`: seconds of a step, and `Cost`.

The time of an all-to-all, for example, is that of `all_to_all_traffic` in `traffic` on the links of
`topology`, by `collective_time` in `model`.
"""
