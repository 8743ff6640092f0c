"""Layouts to move to in one exchange or permutation: the goal, and what is one step from it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fshard.plan.state import Problem, State, subsets, with_kinds
from fshard.spec import mixed_kinds

__all__ = ["all_targets", "direct_targets"]

MOST_FREE = 3
"""With more axes that shard nothing in the goal, one dim is tried for all of them."""


def direct_targets(problem: Problem, _: Sequence[int]) -> list[State]:
    """The goal, and the goal with its addends as shards of one dim, each dim in turn."""
    goal = problem.goal
    axes = tuple(axis for axis, _ in goal.unreduced if problem.size[axis] > 1)
    less = goal._replace(unreduced=tuple(each for each in goal.unreduced if each[0] not in axes))
    found = (problem.put(less, dim, axes) for dim in range(len(goal.dims)) if axes)
    return [goal, *filter(problem.is_possible, found)]


def all_targets(problem: Problem, fixed: Sequence[int]) -> list[State]:
    """The goal, and what one more step, or gathers of several dims, make the goal of."""
    found = (*_gathered(problem), *_moved(problem, fixed))
    return [problem.goal, *filter(problem.is_possible, found)]


def _gathered(problem: Problem) -> list[State]:
    """What gathers and embeddings along axes that shard nothing in the goal make the goal of."""
    goal, goals = problem.goal, problem.goals
    free = [axis for axis, n in problem.size.items() if n > 1 and goals[axis][0] != "sharded"]
    # Those that become addends are major: gathers take the minor ones off them.
    free.sort(key=lambda axis: goals[axis][0] != "unreduced")
    found = []
    for axes in subsets(free):
        less = goal._replace(
            unreduced=tuple(each for each in goal.unreduced if each[0] not in axes),
            reduced=tuple(each for each in goal.reduced if each[0] not in axes),
        )
        for dims in itertools.product(range(len(goal.dims)), repeat=len(axes)):
            if len(set(dims)) > 1 and len(free) > MOST_FREE:
                continue
            target = less
            for dim in sorted(set(dims)):
                mine = tuple(a for a, d in zip(axes, dims, strict=True) if d == dim)
                target = problem.put(target, dim, mine)
            found.append(target)
    return found


def _moved(problem: Problem, fixed: Sequence[int]) -> list[State]:
    """What a slice, an all-to-all or a reduce-scatter makes the goal of."""
    goal = problem.goal
    kinds = sorted({kind for _, kind in problem.start.unreduced})
    found, others = [], range(len(goal.dims))
    for dim, axes in enumerate(goal.dims):
        for at in range(fixed[dim], len(axes)):
            taken = axes[at:]
            less = problem.take(goal, dim, taken)
            found.append(less)
            found += [problem.put(less, to, taken) for to in others if to != dim]
            for kind in kinds:
                unreduced = with_kinds(less.unreduced, taken, kind)
                if not mixed_kinds(unreduced, less.reduced):
                    found.append(less._replace(unreduced=unreduced))
        # Axes out of the middle of a dim: behind what crosses nodes, shards are spread inside them.
        for at in range(fixed[dim], len(axes) - 1) if goal.sizes[dim] is None else ():
            dims = (*goal.dims[:dim], axes[:at] + axes[at + 1 :], *goal.dims[dim + 1 :])
            less = goal._replace(dims=dims)
            found += [problem.put(less, to, axes[at : at + 1]) for to in others if to != dim]
    return found
