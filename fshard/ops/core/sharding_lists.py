"""Rules from lists of acceptable shardings, an alternative to factor notation.

Each line of such a list has one state for each result and operand along one mesh axis, as in
PyTorch's `register_sharding` for a mesh of one dim. A line that shards becomes a factor, a line
that takes unreduced operands becomes a mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fshard._util.errors import Problem, raise_if
from fshard.layout.partition_spec import REDUCTIONS
from fshard.ops.core.call import Meta, OpCall, instances_in, name_of
from fshard.ops.core.rule import Dims, Mode, Rule

Line = tuple[Sequence[Any], Sequence[Any]]


def rule_from_shardings(call: OpCall, lines: Sequence[Line]) -> Rule:
    """Return the rule of a call that accepts these lines: pairs of results' and operands' states.

    A state is the sharded dim, None if replicated, or a reduction; a DTensor placement is
    converted. A line may also have None for every argument that is not a tensor, as those of
    DTensor have. All-replicated is always acceptable. Raises `ShardingError` for a line that shards
    a dim of another line, or that both shards and takes unreduced operands.

    >>> import torch
    >>> from fshard.ops.propagate.propagate import call_and_tree
    >>> from fshard.ops.core.call import Meta
    >>> x = Meta((4, 8), torch.float32)
    >>> call, _ = call_and_tree(torch.ops.aten.softmax.int, (x, 1), {})
    >>> print(rule_from_shardings(call, [([0], [0])]))
    s0 ()->s0 ()
    """
    count, metas = len(call.operands), [*call.operands, *call.results]
    factors: list[list[tuple[str, ...]]] = [[()] * (meta.ndim if meta else 0) for meta in metas]
    kinds: dict[str, str] = {}
    modes: list[Mode] = []
    problems: list[Problem] = []
    for number, (results, operands) in enumerate(lines):
        states = [_state(state) for state in (*_of_tensors(call, operands), *results)]
        problem = _problem(call, number, states, factors)
        if problem is not None:
            problems.append(problem)
            continue
        unreduced = [i for i, state in enumerate(states[:count]) if isinstance(state, str)]
        result_kinds = tuple(s if isinstance(s, str) else None for s in states[count:])
        if unreduced:
            modes.append(Mode(tuple(unreduced), str(states[unreduced[0]]), result_kinds))
        elif any(isinstance(state, int) for state in states):
            name = f"s{number}"
            for state, dims in zip(states, factors, strict=True):
                if isinstance(state, int):
                    dims[state] = (name,)
            kind = next((kind for kind in result_kinds if kind is not None), None)
            if kind is not None:
                kinds[name] = kind
    raise_if(f"the rule of {name_of(call.op)}", problems)
    dims_of: list[Dims] = [tuple(dims) for dims in factors]
    results_of = zip(call.results, dims_of[count:], strict=True)
    return Rule(
        tuple(dims_of[:count]),
        tuple(None if meta is None else dims for meta, dims in results_of),
        tuple(sorted(kinds.items())),
        modes=tuple(modes),
    )


def _of_tensors(call: OpCall, states: Sequence[Any]) -> Sequence[Any]:
    """Return the states of the arguments that are tensors, from a line's states of operands."""
    arguments = (*call.args, *call.kwargs.values())
    if len(states) == len(call.operands) or len(states) != len(arguments):
        return states
    return [state for state, arg in zip(states, arguments, strict=True) if instances_in(arg, Meta)]


def _state(placement: Any) -> int | str | None:
    """Return an entry of a list as a dim (sharded), a reduction (unreduced) or None (replicated).

    Placements of DTensor are converted.
    """
    if hasattr(placement, "is_shard"):
        if placement.is_shard():
            return int(placement.dim)
        return str(placement.reduce_op) if placement.is_partial() else None
    state: int | str | None = placement
    return state


def _problem(
    call: OpCall, number: int, states: Sequence[int | str | None],
    factors: Sequence[Sequence[tuple[str, ...]]],
) -> Problem | None:  # fmt: skip
    line = f"line {number}: {list(states)}"
    counts = len(call.operands), len(call.results)
    if len(states) != sum(counts):
        return Problem(line, f"a line must have one state for each of {counts[1]} results and "
                       f"{counts[0]} operands", "([0], [0, None]), say")  # fmt: skip
    invalid = [s for s in states if isinstance(s, str) and s not in REDUCTIONS]
    invalid += [str(s) for s, d in zip(states, factors, strict=True)
              if isinstance(s, int) and not 0 <= s < len(d)]  # fmt: skip
    if invalid:
        return Problem(line, "a state must be a non-negative dim of its tensor, None, or one of "
                       f"{', '.join(REDUCTIONS)}", f"correct {invalid[0]}")  # fmt: skip
    takes_unreduced = any(isinstance(s, str) for s in states[: counts[0]])
    if takes_unreduced and any(isinstance(s, int) for s in states):
        return Problem(line, "a line must either shard or take unreduced operands, not both",
                       "write two lines")  # fmt: skip
    taken = [s for s, d in zip(states, factors, strict=True) if isinstance(s, int) and d[s]]
    if taken:
        return Problem(line, f"dim {taken[0]} of a tensor must be sharded by one line only",
                       "leave out this line or the other one")  # fmt: skip
    return None
