"""Sharding rules of PyTorch's operations, loaded when the first rule is looked up.

A rule states which loops ("factors") of one call may be sharded over a mesh axis and which
operands may be unreduced; see `fshard.ops.core.rule`. Each module lists its operations.

- `elementwise`: pointwise operations, quantization, tensor creation and queries, random draws;
- `view`: reshape, permute, slice, split, expand, repeat, diagonals, cat, stack, pad_sequence;
- `contraction`: matmul, einsum, linear, cdist; linear algebra; Fourier transforms;
- `index`: gather, index_select, take; scatter, index_add, index_put;
- `reduce`: sums, means, extremes, variances, norms, softmax, cumsum, sort, topk, searchsorted;
- `window`: convolution, pooling, interpolation, padding, unfold and fold, roll;
- `nn`: attention, normalization, embedding, losses, recurrent layers;
- `backward`: gradient operations that PyTorch names by themselves.

`letters` and `shard_call` are shared by all of them.

A text such as `ik,kj->ij` in a docstring is the rule for typical operands: `1` is a dim that stays
unsharded, `(ab)` a product of factors. `print(fs.propagate(op, ...).rule)` shows it for any others.
"""
