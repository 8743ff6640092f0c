"""Checkpoints: one safetensors file a rank and a JSON index.

- `checkpoint_index`: the index: tree, tensors, their shards in files; its JSON, and its checks.
- `shard_files`: files of shards, of which slices are read; the only module that uses safetensors.
- `saving`: `fs.state.save`; `loading`: `fs.state.load` and `verify`.
"""
