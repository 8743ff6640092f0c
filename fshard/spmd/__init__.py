"""Per-device functions: collectives by axis name, `shard_map`, `local_map`."""
