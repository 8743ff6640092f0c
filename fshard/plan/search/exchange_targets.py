"""Layouts to move to in one exchange or permutation: the goal, and what is one step from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fshard.layout.spec import mixed_kinds
from fshard.plan.search.problem import Axes, LayoutState, SearchProblem, add_kinds, subsets

__all__ = ["all_targets", "direct_targets", "swapped_inside"]

MOST_FREE = 3
"""With more axes that shard nothing in the goal, one dim is tried for all of them."""


def direct_targets(problem: SearchProblem) -> list[LayoutState]:
    """The goal, and the goal with its addends as shards of one dim, each dim in turn."""
    goal = problem.goal
    axes = tuple(axis for axis, _ in goal.unreduced if problem.size[axis] > 1)
    less = goal._replace(unreduced=tuple(each for each in goal.unreduced if each[0] not in axes))
    found = (problem.append_axes(less, dim, axes) for dim in range(len(goal.dims)) if axes)
    return [goal, *filter(problem.is_divisible, found)]


def all_targets(problem: SearchProblem) -> list[LayoutState]:
    """The goal, and what one more step, gathers of several dims or one node make the goal of."""
    found = [problem.goal, *_gathered(problem), *_moved(problem), *_stood_in(problem)]
    for goal in (problem.goal, *swapped_inside(problem, problem.goal)):
        found += _spread(problem, goal)
    return list(dict.fromkeys(filter(problem.is_divisible, found)))


def _gathered(problem: SearchProblem) -> list[LayoutState]:
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
        # Gathers take the minor axis first: between nodes before inside of them, or after.
        orders = (axes, axes[::-1]) if problem.slow_axes and len(axes) > 1 else (axes,)
        for dims in itertools.product(range(len(goal.dims)), repeat=len(axes)):
            if len(set(dims)) > 1 and len(free) > MOST_FREE:
                continue
            found += [_placed(problem, less, order, dims) for order in orders]
    return found


def _placed(
    problem: SearchProblem, state: LayoutState, axes: Axes, dims: tuple[int, ...]
) -> LayoutState:
    """The state with each of the axes at the minor end of its dim, one after the other."""
    for axis, dim in zip(axes, dims, strict=True):
        state = problem.append_axes(state, dim, (axis,))
    return state


def _moved(problem: SearchProblem) -> list[LayoutState]:
    """What a slice, an all-to-all or a reduce-scatter makes the goal of."""
    goal, fixed = problem.goal, problem.num_fixed
    kinds = sorted({kind for _, kind in problem.start.unreduced})
    found, others = [], range(len(goal.dims))
    for dim, axes in enumerate(goal.dims):
        for at in range(fixed[dim], len(axes)):
            taken = axes[at:]
            less = problem.remove_axes(goal, dim, taken)
            found.append(less)
            found += [problem.append_axes(less, to, taken) for to in others if to != dim]
            for kind in kinds:
                unreduced = add_kinds(less.unreduced, taken, kind)
                if not mixed_kinds(unreduced, less.reduced):
                    found.append(less._replace(unreduced=unreduced))
        # Axes out of the middle of a dim: behind what crosses nodes, shards are spread inside them.
        for at in range(fixed[dim], len(axes) - 1) if goal.sizes[dim] is None else ():
            dims = (*goal.dims[:dim], axes[:at] + axes[at + 1 :], *goal.dims[dim + 1 :])
            less = goal._replace(dims=dims)
            found += [
                problem.append_axes(less, to, axes[at : at + 1]) for to in others if to != dim
            ]
    return found


def _stood_in(problem: SearchProblem) -> list[LayoutState]:
    """What makes the goal of it by a reduced axis that takes the place of one that adds up.

    And what a gather makes that of.
    """
    goal, size, found = problem.goal, problem.size, list[LayoutState]()
    for dim, axes in enumerate(goal.dims):
        for at, by in enumerate(axes):
            for axis, kind in goal.unreduced if by in problem.replacement_axes else ():
                if size[axis] != size[by]:
                    continue
                dims = (
                    *goal.dims[:dim],
                    (*axes[:at], axis, *axes[at + 1 :]),
                    *goal.dims[dim + 1 :],
                )
                rest = tuple([each for each in goal.unreduced if each[0] != axis])
                less = goal._replace(dims=dims, unreduced=rest)
                reduced = add_kinds(goal.reduced, (by,), kind)
                found.append(less._replace(reduced=reduced))
                found += [problem.append_axes(less, to, (by,)) for to in range(len(goal.dims))]
    return found


def swapped_inside(problem: SearchProblem, state: LayoutState) -> Iterator[LayoutState]:
    """The same shards with two axes inside of nodes in each other's places, on several nodes."""
    fast = [axis for axis in itertools.chain(*state.dims) if axis not in problem.slow_axes]
    for a, b in itertools.combinations(fast, 2) if problem.slow_axes else ():
        if problem.size[a] == problem.size[b]:
            swap = {a: b, b: a}
            dims = tuple([tuple([swap.get(c, c) for c in axes]) for axes in state.dims])
            yield state._replace(dims=dims)


def _spread(problem: SearchProblem, goal: LayoutState) -> list[LayoutState]:
    """All layouts in which what crosses nodes in the goal stays there, or shards nothing in it.

    Links inside of nodes make the goal of them, and gathers: few bytes cross to other nodes.
    """
    busy = set(itertools.chain(*goal.dims)) | problem.goal_unreduced | problem.unit_axes
    free = [axis for axis in problem.size if axis not in busy]
    less = goal
    for dim, axes in enumerate(goal.dims):
        inside = tuple(
            itertools.takewhile(lambda axis: axis not in problem.slow_axes, reversed(axes))
        )
        if inside:
            less = problem.remove_axes(less, dim, inside[::-1])
            free += inside
    if not problem.slow_axes or len(free) > MOST_FREE:
        return []
    found = []
    for axes in itertools.chain([()], subsets(free)):
        kept = tuple([each for each in goal.reduced if each[0] not in free])
        start = less._replace(reduced=kept)
        ways = itertools.product(range(len(goal.dims)), repeat=len(axes))
        for order, dims in itertools.product(itertools.permutations(axes), ways):
            found.append(_placed(problem, start, order, dims))
    return found
