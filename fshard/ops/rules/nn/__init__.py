"""Rules of neural-network layers and losses.

- `attention`: scaled_dot_product_attention and its fused kernels;
- `embedding`: embedding, embedding_bag, one_hot;
- `normalization`: layer_norm, rms_norm, group_norm, batch_norm, weight_norm, renorm;
- `normalization_decompositions`: the same over sharded dims;
- `normalize`: the operation that normalizes by given moments;
- `losses`: losses of elements and of feature rows;
- `class_losses`: nll_loss, cross_entropy_loss, multi_margin_loss;
- `sequence_losses`: ctc_loss;
- `recurrent`: lstm, gru, rnn layers and cells.
"""
