"""Collectives inside `shard_map`, by axis name; names and results are those of `jax.lax`.

A collective is a planning function (`psum`, ...) under `@collective` (`collective_plan`), which
runs plan -> transfer of each leaf -> one launch per dtype -> `run/autograd/linear_function`.

- `collective_plan`: the decorator, transfers and launches of trees.
- `psum`: sums, means, extremes, products.
- `gather_scatter`: `all_gather`, `psum_scatter`, `all_to_all`, `pswapaxes`.
- `permutations`: `ppermute`, `pshuffle`, `pbroadcast`.
- `ragged_all_to_all`: an exchange of different numbers of rows.
- `ring_fold`, `ring`: folds over blocks that move around a ring of ranks.
- `collective_matmul`: `all_gather_matmul`, `matmul_reduce_scatter` on such a ring.
- `pcast`: casts between states; `axis_index`, `axis_size`.
- `start`: `fs.start`, asynchronous launches.
- `axis_index_groups`, `wire_dtypes`: options of several collectives.
- `argument_key`: cache keys of arguments.
- `compile_node`: a collective as one node under `torch.compile`.
"""
