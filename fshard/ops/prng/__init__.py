"""Counter-based random generator and its operations.

- `threefry`: Threefry-2x32, for any box of a tensor.
- `draw_ops`: `fshard::uniform` and the other draws, as operations of PyTorch.
- `keyed_block`: blocks of `fs.random.keyed`, for rooms below `random`.
"""
