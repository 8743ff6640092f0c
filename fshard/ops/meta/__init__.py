"""Shapes and dtypes of an operation's results, without running it on full-size tensors.

- `result_metas`: runs on tensors with few elements, extended to the shapes of the call.
- `formulas`: closed forms of common operations.
"""
