"""Checkpoints: one safetensors file a rank and a JSON index.

- `checkpoint_index`: the index: tree, tensors, their shards in files; its JSON, and its checks.
- `shard_files`: files of shards, their dtypes and writing; `shard_reader`: reading of slices.
- `save_plan`: boxes of tensors, and the rank that writes each.
- `dcp_files`: checkpoints of DCP, whose pickle is read without executing it.
- `saving`: `fs.state.save`; `loading`: `fs.state.load` and `verify`.
"""
