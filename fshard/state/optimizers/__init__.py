"""Optimizers as pure functions on trees of pairs.

- `optimizer`: `Optimizer`, redistribution to the layout of the state and back.
- `zero`: `zero_specs` and `zero_table`: ZeRO as choices of layouts.
- `option_checks`: limits of their arguments.
- `elementwise`: `sgd` and `adamw`, the kernels of `torch.optim` on locals.
- `adafactor`: factored second moments, whose sums over sharded dims are one batch of programs.
- `muon`: whole matrices on owner ranks, by one exchange there and one back.
"""
