"""Collectives inside `shard_map`, by axis name."""
