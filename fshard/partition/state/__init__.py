"""State of Python that a function can read beside its arguments.

- `python_state`: the walk over the state, and its key.
- `state_guard`: the comparison of all that a walk has read.
- `host_generators`: random generators of Python and NumPy, whose draws are refused.
"""
