"""Rules of operations along a dim, and their decompositions for sharded dims.

- `reductions`: sum, mean, prod, amax, argmax, any, var, std, median, quantile, trace;
- `reduction_decompositions`: extremes, positions, variances, logsumexp over sharded dims;
- `moments`: mean and variance over sharded dims with one reduction;
- `exact_moments`: weighted mean and variance over sharded dims with one reduction;
- `vector_norms`: norm, linalg.vector_norm, linalg.matrix_norm, dist, pairwise_distance;
- `softmax`: softmax, log_softmax, and their gradients;
- `scans`: cumsum, cumprod, cummax, logcumsumexp, diff, trapezoid, gradient, segment_reduce;
- `block_scans`: cumsum, cumprod, cummax, cummin, logcumsumexp over sharded dims;
- `sorting`: sort, topk, searchsorted, bucketize, isin, histc, histogram.
"""
