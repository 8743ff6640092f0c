"""Gradients of programs and collectives, of every order and under `torch.func`.

- `linear_function`: linear operations; backward runs the transpose.
- `max_min_gradient`: programs behind the gradient of a maximum or minimum.
- `overlapped`: linear programs launched ahead of the wait for them, forward and backward.
- `planned_gradient`: values whose backward runs a planned function.
- `replay`: recordings that are run, with their gradients and their events.
- `replicate`: one invariant tensor to a tuple with one per rank and back.
- `saved_values`: tensors that calls save for the backward pass.
"""
