"""State of a training script: pure functions on pytrees of pairs.

- `factories`: `fs.zeros`, `fs.full`, `fs.arange`, `fs.eye` and others, created in a layout.
"""
