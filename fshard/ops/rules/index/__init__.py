"""Rules of operations with integer indices.

- `gather`: operations that read: gather, take_along_dim, index_select, take, x[indices];
- `scatter`: operations that write: scatter, index_add, index_copy, index_fill, index_put, put;
- `local_indices`: global indices translated to one rank's shard.
"""
