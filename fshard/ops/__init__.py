"""Operations on layouts: their rules, the choice of a strategy, and graphs of functions.

- `core`: `Rule`, the registry of rules, and the description of one call.
- `rules`: the rules of PyTorch's operations, by family.
- `meta`: shapes and dtypes of results.
- `prng`: random draws by key, each rank its shard.
- `strategy`: one choice of layouts for one call, and the call on one rank.
- `propagate`: `fs.propagate`, the search for the fastest strategy.
- `sized`: operations whose results have a stated size.
- `trace`: functions as graphs of operations without writes.
"""
