"""Gradients of programs and collectives, of every order and under `torch.func`.

- `linear_function`: linear operations; backward runs the transpose.
- `max_min_gradient`: programs behind the gradient of a maximum or minimum.
- `replicate`: one invariant tensor to a tuple with one per rank and back.
"""
