"""Target layouts of exchanges and permutations: the goal, and layouts one step from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fshard.layout.partition_spec import remove_kinds
from fshard.layout.validation import has_mixed_reductions
from fshard.plan.search.problem import SearchProblem
from fshard.plan.search.search_layout import Axes, SearchLayout, add_kinds, subsets

MAX_FREE_AXES = 3
"""Most axes that shard nothing in the goal and are tried on different dims."""


def direct_targets(problem: SearchProblem) -> list[SearchLayout]:
    """Return the goal, and with its unreduced axes sharding one dim instead, each dim in turn."""
    goal = problem.goal
    axes = tuple(axis for axis, _ in goal.unreduced if problem.size[axis] > 1)
    base = goal._replace(unreduced=remove_kinds(goal.unreduced, axes))
    sharded = (problem.append_axes(base, dim, axes) for dim in range(len(goal.dims)) if axes)
    return [goal, *filter(problem.is_divisible, sharded)]


def all_targets(problem: SearchProblem) -> list[SearchLayout]:
    """Return the goal, and layouts one step, some gathers, or steps inside of nodes before it."""
    targets = [
        problem.goal,
        *_before_gathers(problem),
        *_before_moves(problem),
        *_before_replacement(problem),
        *_on_joint_links(problem),
    ]
    for goal in (problem.goal, *swapped_inside(problem, problem.goal)):
        targets += _before_fast_steps(problem, goal)
    return list(dict.fromkeys(filter(problem.is_divisible, targets)))


def _before_gathers(problem: SearchProblem) -> list[SearchLayout]:
    """Return the layouts one set of gathers and embeddings before the goal."""
    goal, goals = problem.goal, problem.goals
    free = [axis for axis, n in problem.size.items() if n > 1 and goals[axis][0] != "sharded"]
    # Axes that become unreduced are major: gathers remove the minor axes behind them.
    free.sort(key=lambda axis: goals[axis][0] != "unreduced")
    targets = []
    for axes in subsets(free):
        base = goal._replace(
            unreduced=remove_kinds(goal.unreduced, axes), reduced=remove_kinds(goal.reduced, axes)
        )
        # Gathers remove the minor axis first: between nodes before inside of them, or after.
        orders = (axes, axes[::-1]) if problem.slow_axes and len(axes) > 1 else (axes,)
        for dims in itertools.product(range(len(goal.dims)), repeat=len(axes)):
            if len(set(dims)) > 1 and len(free) > MAX_FREE_AXES:
                continue
            targets += [_append_each(problem, base, order, dims) for order in orders]
    return targets


def _append_each(
    problem: SearchProblem, layout: SearchLayout, axes: Axes, dims: tuple[int, ...]
) -> SearchLayout:
    """Return the layout with each axis appended to its dim, one after the other."""
    for axis, dim in zip(axes, dims, strict=True):
        layout = problem.append_axes(layout, dim, (axis,))
    return layout


def _before_moves(problem: SearchProblem) -> list[SearchLayout]:
    """Return the layouts one slice, all-to-all or reduce-scatter before the goal."""
    goal, num_fixed = problem.goal, problem.num_fixed
    kinds = sorted({kind for _, kind in problem.start.unreduced})
    targets, all_dims = [], range(len(goal.dims))
    for dim, axes in enumerate(goal.dims):
        for start in range(num_fixed[dim], len(axes)):
            run = axes[start:]
            base = problem.remove_axes(goal, dim, run)
            targets.append(base)
            targets += [problem.append_axes(base, to, run) for to in all_dims if to != dim]
            for kind in kinds:
                unreduced = add_kinds(base.unreduced, run, kind)
                if not has_mixed_reductions(unreduced, base.reduced):
                    targets.append(base._replace(unreduced=unreduced))
        # Axes from the middle of a dim: after traffic between nodes, shards spread inside of them.
        for i in range(num_fixed[dim], len(axes) - 1) if goal.sizes[dim] is None else ():
            base = goal.replace_dim(dim, axes[:i] + axes[i + 1 :], None)
            axis = axes[i : i + 1]
            targets += [problem.append_axes(base, to, axis) for to in all_dims if to != dim]
    return targets


def _before_replacement(problem: SearchProblem) -> list[SearchLayout]:
    """Return the layouts before a reduced axis replaces an axis that becomes unreduced.

    The layouts one gather before these are included.
    """
    goal, size, targets = problem.goal, problem.size, list[SearchLayout]()
    for dim, axes in enumerate(goal.dims):
        for i, replacement in enumerate(axes):
            for axis, kind in goal.unreduced if replacement in problem.replacement_axes else ():
                if size[axis] != size[replacement]:
                    continue
                old_axes = (*axes[:i], axis, *axes[i + 1 :])
                base = goal.replace_dim(dim, old_axes, goal.sizes[dim])
                base = base._replace(unreduced=remove_kinds(goal.unreduced, (axis,)))
                reduced = add_kinds(goal.reduced, (replacement,), kind)
                targets.append(base._replace(reduced=reduced))
                for to in range(len(goal.dims)):
                    targets.append(problem.append_axes(base, to, (replacement,)))
    return targets


def _on_joint_links(problem: SearchProblem) -> list[SearchLayout]:
    """Return the goal with several axes sharding one dim, if these have links of their own.

    Then moves over all axes at once may be faster than those over one axis that they replace.
    """
    goal, targets = problem.goal, list[SearchLayout]()
    parallel = [axis for axis, n in problem.size.items() if n > 1]
    if not problem.joint_links or len(parallel) > MAX_FREE_AXES or any(goal.sizes):
        return []
    for axes in subsets(parallel):
        if len(axes) < 2:
            continue
        dims = tuple([tuple([a for a in own if a not in axes]) for own in goal.dims])
        base = goal._replace(
            dims=dims, unreduced=remove_kinds(goal.unreduced, axes),
            reduced=remove_kinds(goal.reduced, axes),
        )  # fmt: skip
        for dim in range(len(dims)):
            targets += [problem.append_axes(base, dim, order) for order in (axes, axes[::-1])]
    return targets


def swapped_inside(problem: SearchProblem, layout: SearchLayout) -> Iterator[SearchLayout]:
    """Yield the layouts with two axes inside of nodes swapped, if there are several nodes."""
    fast = [axis for axis in itertools.chain(*layout.dims) if axis not in problem.slow_axes]
    for a, b in itertools.combinations(fast, 2) if problem.slow_axes else ():
        if problem.size[a] == problem.size[b]:
            swap = {a: b, b: a}
            dims = tuple([tuple([swap.get(c, c) for c in axes]) for axes in layout.dims])
            yield layout._replace(dims=dims)


def _before_fast_steps(problem: SearchProblem, goal: SearchLayout) -> list[SearchLayout]:
    """Return the layouts from which gathers and links inside of nodes lead to the goal.

    Slow axes shard the same dims as in the goal, so that few bytes cross to other nodes.
    """
    if not problem.slow_axes:
        return []
    busy = set(itertools.chain(*goal.dims)) | problem.goal_unreduced | problem.unit_axes
    free = [axis for axis in problem.size if axis not in busy]
    base = goal
    for dim, axes in enumerate(goal.dims):
        fast = tuple(itertools.takewhile(lambda a: a not in problem.slow_axes, reversed(axes)))
        if fast:
            base = problem.remove_axes(base, dim, fast[::-1])
            free += fast
    if len(free) > MAX_FREE_AXES:
        return []
    base, targets = base._replace(reduced=remove_kinds(goal.reduced, free)), []
    for axes in itertools.chain([()], subsets(free)):
        all_dims = itertools.product(range(len(goal.dims)), repeat=len(axes))
        for order, dims in itertools.product(itertools.permutations(axes), all_dims):
            targets.append(_append_each(problem, base, order, dims))
    return targets
