"""Rules of operations whose elements read windows of spatial dims.

- `convolution`: conv1d to conv3d, transposed convolutions;
- `pooling`: pooling, interpolation, padding, im2col, grid_sample, affine_grid.
"""
