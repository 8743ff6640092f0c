"""Type tracking of plain tensors in the body of a `shard_map`."""
