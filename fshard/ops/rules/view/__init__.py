"""Rules of operations that move elements and compute nothing.

- `reshape`: view, flatten, squeeze, pixel_shuffle, view_as_real, view of another dtype;
- `permute`: permute, transpose, movedim, rot90, channel_shuffle;
- `slicing`: slice, narrow, select, unbind, split, chunk, slice_scatter, select_scatter;
- `expand`: expand, broadcast_to, repeat, tile, repeat_interleave;
- `diagonals`: tril, triu, diagonal, diag, diag_embed, diagonal_scatter;
- `concat`: cat, stack, hstack, block_diag, meshgrid, broadcast_tensors, pad_sequence;
- `view_factors`: common factors of two shapes, shared by the modules above.
"""
