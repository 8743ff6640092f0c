"""Sharding rules of operations: their notation, their registry, and the calls they describe.

- `call`: `OpCall`, one call of an operation on shapes and dtypes.
- `windows`: `Window`, factors whose elements read intervals of other factors.
- `rule`: `Rule` and `fs.rule`, the factor notation `"ik,kj->ij"`.
- `registry`: one row for each operation; `fs.register_rule`, `fs.register_decomposition`.
- `builders`: factors, dims and modes that rule generators share.
- `sharding_lists`: rules from lists of acceptable shardings, as DTensor has them.
- `cache_keys`: arguments as hashable keys.
- `window_arguments`: problems of the arguments of windowed functions that are refused.
"""
