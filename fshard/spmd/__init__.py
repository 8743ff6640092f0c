"""Per-device functions: `shard_map`, `local_map`, `smap`, and collectives by axis name.

A call goes `shard_map` -> `mapped_function` -> `in_specs` (a spec for each argument) -> `boundary`
(arguments to locals) -> the body on each rank -> `boundary` (locals to results).

- `shard_map`, `smap`: the public transforms.
- `mapped_function`: calls of a mapped function, planned once per kind of call.
- `graph_call`: calls that are a part of a graph of `torch.compile`.
- `in_specs`: arguments matched with `in_specs`.
- `boundary`: arguments to locals, locals to global tensors or pairs.
- `closure_inputs`: tensors that the function closes over, as differentiable inputs.
- `simulated_map`: the body on every simulated rank, as one differentiable operation.
- `rank_calls`, `derived_calls`: recorded calls of all ranks, and functions derived from them.
- `mesh_scope`, `axis_env`: the mesh axes that a call maps, and the axis names bound in its body.
- `collectives`: `fs.psum` and the others.
- `types`: types of a rank's tensors along the mesh axes, and their rules.
- `tracking`: the types of plain tensors while the body runs.
"""
