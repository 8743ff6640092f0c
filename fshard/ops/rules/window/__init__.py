"""Rules of operations whose elements read windows of a dim.

- `convolution`: conv1d to conv3d, transposed convolutions;
- `pooling`: average, maximum and fractional pooling;
- `adaptive_pooling`: pooling to a result of a given size;
- `interpolation`: nearest, linear, bilinear, bicubic and trilinear;
- `padding`: constants, reflection, repetition, periodic;
- `unfolding`: im2col and col2im;
- `shifts`: roll, flip, and unfold along a dim;
- `grids`: grid_sample, affine_grid;
- `stencils`: finite differences and integrals, as shifts;
- `neighborhoods`: neighborhood attention, an operation of fshard;
- `neighborhood_blocks`: its computation on one rank;
- `window_dims`: factors, windows and local spans of spatial dims;
- `taps`: local weighted sums of a few elements along a dim.
"""
