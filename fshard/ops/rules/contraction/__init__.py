"""Rules of sums of products and of operations on unsharded matrices.

- `matmul`: mm, bmm, addmm, linear, einsum, tensordot, kron, cross, cdist, pdist;
- `linalg`: factorizations, inverses, determinants and solvers of batches of matrices;
- `fft`: Fourier transforms, stft, istft.
"""
