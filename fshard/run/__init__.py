"""Running programs: on each rank over a transport, or on all shards of a simulation.

A call goes `execute` (checks of locals) -> `autograd/linear_function` (gradient) -> `interpreter`
(steps of one rank) -> `collective` (`Wire`: pack, launch, unpack) -> `transports`.

- `execute`: `prog(local)`, and `Pending`, the result of an asynchronous call.
- `autograd`: gradients of programs and collectives.
- `interpreter`: each step as a function of one rank's local, or a `Wire`.
- `halo`: halo exchanges and reductions of one rank.
- `collective`: one collective of one rank; `packing`: boxes put in and out of flat tensors.
- `transports`: the collectives of a rank: simulated, by processes, checked, or for shapes alone.
- `execute_batch`, `bucketing`: `batch(tree)`, several programs with coalesced launches.
- `capture`: recordings of programs and collectives on processes; `autograd/replay` runs them.
- `graphs`: programs and collectives in graphs of `torch.compile`.
- `global_tensors`, `from_local`: `fs.shard`, `fs.unshard`, `fs.reshard` and other conversions.
- `creation`: pairs created shard by shard, by draws and factories.
- `compared_values`: values that ranks compare, by digests or by some of a plain tensor.
- `calibrate`: `fs.calibrate`, a measured `Topology`.
"""
