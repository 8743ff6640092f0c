"""Axis names that are bound again for a backward pass."""

from __future__ import annotations

import contextvars

from fshard import Mesh
from fshard.spmd import axis_env


def test_names_of_a_failed_backward_pass_are_not_bound_in_later_ones() -> None:
    def run() -> None:
        bound = axis_env.BoundAxes(Mesh(x=2), frozenset("x"))
        bound.backward_task = 3  # a pass that raised: autograd does not call what ends it
        axis_env._BOUND.set(bound)
        assert axis_env.current_axes() is None
        assert bound.is_over

    contextvars.copy_context().run(run)
