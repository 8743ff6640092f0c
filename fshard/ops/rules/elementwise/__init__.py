"""Rules of operations without structure between elements.

- `pointwise`: arithmetic, comparisons, activations, casts, where, masked_fill;
- `pointwise_modes`: unreduced operands that pointwise operations accept;
- `quantize`: fake_quantize_per_tensor_affine, fake_quantize_per_channel_affine;
- `creation_ops`: zeros_like, new_full, linspace; sizes, dtypes and other queries; item, equal;
- `optimizer_steps`: fused steps of Adam, AdamW, SGD and Adagrad;
- `random_ops`: dropout, bernoulli, rand_like, and the keyed draws of `fs.random`.
"""
