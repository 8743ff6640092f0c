"""Which axes one all-to-all takes from which dims to which, several runs at once."""

from __future__ import annotations

import itertools

from fshard.plan.search.problem import Axes, SearchProblem
from fshard.program.single_step import one_order
from fshard.program.steps import Exchange

__all__ = ["Runs"]

MOST_APART = 3
"""Axes of one dim that an all-to-all takes to any other dims: more go to one, or to the goal's."""

Run = tuple[Axes, int, int]
Pairs = tuple[Run, ...]


class Runs:
    """The runs of one problem: axes, the dim that they leave and the one that they go to."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.num_fixed = problem.num_fixed
        self.ordered: dict[Pairs, Pairs] = {}
        self.ways: dict[tuple[int, Axes], list[list[Run]]] = {}

    def sorted(self, pairs: Pairs) -> Pairs:
        """In an order that puts axes on a dim as the goal has them, if the source allows it."""
        found = self.ordered.get(pairs)
        if found is None:
            found = self.ordered[pairs] = self._in_order(pairs)
        return found

    def _in_order(self, pairs: Pairs) -> Pairs:
        goal = self.problem.goal.dims
        ends = {axis: (dim, to) for taken, dim, to in pairs for axis in taken}
        chains = [tuple(axis for axis in ends if ends[axis][0] == dim) for dim in range(len(goal))]
        after = []
        for to, axes in enumerate(goal):
            first = tuple(axis for axis in axes if axis in ends and ends[axis][1] == to)
            chains.append(first)
            # What does not stay there comes last, to be gathered from the minor end.
            after += [(*first, axis) for axis in ends if ends[axis][1] == to and axis not in first]
        order = one_order(chains + after) or one_order(chains)
        if order is None:
            return pairs
        runs = itertools.groupby(order, ends.__getitem__)
        return tuple([(tuple(run), *each) for each, run in runs])

    def of(self, dim: int, axes: Axes) -> list[list[Run]]:
        """Ways to take a minor run of a dim: none, to one dim, each axis to its goal's or any dim.

        To any only where exchanges are left out, which else do all that in one launch.
        """
        known = self.ways.get((dim, axes))
        if known is not None:
            return known
        others = [to for to in range(len(self.num_fixed)) if to != dim]
        found: list[list[Run]] = [[]]
        for at in range(self.num_fixed[dim], len(axes)):
            taken = axes[at:]
            ways = [(to,) * len(taken) for to in others]
            if Exchange in self.problem.exclude and len(taken) <= MOST_APART:
                # Some may come back to the dim that others leave, or go to.
                ways = list(itertools.product(range(len(self.num_fixed)), repeat=len(taken)))
            else:
                goals = tuple(self.problem.goals[axis] for axis in taken)
                ends = tuple(to for word, to in goals if word == "sharded" and isinstance(to, int))
                if len(ends) == len(taken) and dim not in ends and len(set(ends)) > 1:
                    ways.append(ends)
            for way in ways:
                both = itertools.groupby(zip(taken, way, strict=True), lambda each: each[1])
                found.append([(tuple(axis for axis, _ in run), dim, to) for to, run in both])
        self.ways[dim, axes] = found
        return found
