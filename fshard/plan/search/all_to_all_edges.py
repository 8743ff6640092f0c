"""Choices of an all-to-all: axes to take from each dim, and the dims that get them."""

from __future__ import annotations

import itertools

from fshard.plan.search.problem import SearchProblem
from fshard.plan.search.search_layout import Axes
from fshard.program.single_step import common_order
from fshard.program.steps import Exchange

MAX_SPLIT_AXES = 3
"""Most axes of one dim that are split over all other dims; more move to one dim, or their goals."""

Run = tuple[Axes, int, int]
"""Axes, the dim that they leave, and the dim that gets them."""
Pairs = tuple[Run, ...]


class AxisRuns:
    """Runs of axes that an all-to-all may move, with memo tables of one search."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.num_fixed = problem.num_fixed
        self.ordered: dict[Pairs, Pairs] = {}
        self.choices: dict[tuple[int, Axes], list[list[Run]]] = {}

    def in_goal_order(self, pairs: Pairs) -> Pairs:
        """Return the runs in the order of their axes in the goal, if the source allows it."""
        ordered = self.ordered.get(pairs)
        if ordered is None:
            ordered = self.ordered[pairs] = self._in_goal_order(pairs)
        return ordered

    def _in_goal_order(self, pairs: Pairs) -> Pairs:
        goal = self.problem.goal.dims
        ends = {axis: (dim, to) for taken, dim, to in pairs for axis in taken}
        chains = [tuple(axis for axis in ends if ends[axis][0] == dim) for dim in range(len(goal))]
        after = []
        for to, axes in enumerate(goal):
            first = tuple(axis for axis in axes if axis in ends and ends[axis][1] == to)
            chains.append(first)
            # Axes that do not stay on the dim are minor: a gather can remove them.
            after += [(*first, axis) for axis in ends if ends[axis][1] == to and axis not in first]
        order = common_order(chains + after) or common_order(chains)
        if order is None:
            return pairs
        runs = itertools.groupby(order, ends.__getitem__)
        return tuple([(tuple(run), *dims) for dims, run in runs])

    def of(self, dim: int, axes: Axes) -> list[list[Run]]:
        """Return the choices for a dim's axes: none, a minor run to one dim, each axis to its goal.

        If exchanges are excluded, each axis may also move to any dim: an exchange would do that in
        one launch.
        """
        choices = self.choices.get((dim, axes))
        if choices is not None:
            return choices
        others = [to for to in range(len(self.num_fixed)) if to != dim]
        choices = [[]]
        for start in range(self.num_fixed[dim], len(axes)):
            taken = axes[start:]
            destinations = [(to,) * len(taken) for to in others]
            if Exchange in self.problem.exclude and len(taken) <= MAX_SPLIT_AXES:
                # An axis may return to the dim that others leave, or to one that others enter.
                dims = range(len(self.num_fixed))
                destinations = list(itertools.product(dims, repeat=len(taken)))
            else:
                goals = tuple(self.problem.goals[axis] for axis in taken)
                ends = tuple(
                    to for state, to in goals if state == "sharded" and isinstance(to, int)
                )
                if len(ends) == len(taken) and dim not in ends and len(set(ends)) > 1:
                    destinations.append(ends)
            for tos in destinations:
                runs = itertools.groupby(zip(taken, tos, strict=True), lambda pair: pair[1])
                choices.append([(tuple(axis for axis, _ in run), dim, to) for to, run in runs])
        self.choices[dim, axes] = choices
        return choices
