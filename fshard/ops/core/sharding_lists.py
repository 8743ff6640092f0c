"""Rules from lists of acceptable shardings, for who prefers them to factors.

Each line of such a list says for one mesh axis how all results and operands may lie together, as
PyTorch's `register_sharding` does for a mesh of one dim. A line that shards is a factor, one that
takes unreduced operands is a mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fshard._util.errors import Problem, raise_if
from fshard.layout.partition_spec import REDUCTIONS
from fshard.ops.core.call import OpCall, name_of
from fshard.ops.core.rule import Dims, Mode, Rule

__all__ = ["rule_from_shardings"]

Line = tuple[Sequence[Any], Sequence[Any]]


def rule_from_shardings(call: OpCall, lines: Sequence[Line]) -> Rule:
    """The rule of a call that takes these shardings: pairs of results' and operands' states.

    A state is a dim that is sharded, None for whole, or a reduction; DTensor's placements are
    understood. Whole tensors always are acceptable. Raises `ShardingError` for lines that shard a
    dim with others than another line does, or that shard and take unreduced operands at once.

    >>> import torch
    >>> from fshard.ops.propagate.propagate import call_of
    >>> from fshard.ops.core.call import Meta
    >>> x = Meta((4, 8), torch.float32)
    >>> call = call_of(torch.ops.aten.softmax.int, (x, 1), {})
    >>> print(rule_from_shardings(call, [([0], [0])]))
    s0 ()->s0 ()
    """
    tensors = [*call.operands, *call.results]
    factors: list[list[tuple[str, ...]]] = [[()] * (m.ndim if m else 0) for m in tensors]
    kinds: dict[str, str] = {}
    modes: list[Mode] = []
    problems: list[Problem] = []
    for number, (results, operands) in enumerate(lines):
        states = [_state(each) for each in (*operands, *results)]
        problem = _problem(call, number, states, factors)
        if problem is not None:
            problems.append(problem)
            continue
        mine = states[: len(call.operands)]
        summed = [at for at, each in enumerate(mine) if isinstance(each, str)]
        made = tuple(each if isinstance(each, str) else None for each in states[len(mine) :])
        if summed:
            modes.append(Mode(tuple(summed), str(mine[summed[0]]), made))
        elif any(isinstance(each, int) for each in states):
            name = f"s{number}"
            for each, dims in zip(states, factors, strict=True):
                if isinstance(each, int):
                    dims[each] = (name,)
            kind = next((each for each in made if each is not None), None)
            if kind is not None:
                kinds[name] = kind
    raise_if(f"the rule of {name_of(call.op)}", problems)
    laid: list[Dims] = [tuple(dims) for dims in factors]
    cut = len(call.operands)
    return Rule(
        tuple(laid[:cut]),
        tuple(None if m is None else d for m, d in zip(call.results, laid[cut:], strict=True)),
        tuple(sorted(kinds.items())),
        modes=tuple(modes),
    )


def _state(given: Any) -> int | str | None:
    """A state as a dim, a reduction or None; DTensor's placements know what they are."""
    if hasattr(given, "is_shard"):
        if given.is_shard():
            return int(given.dim)
        return str(given.reduce_op) if given.is_partial() else None
    state: int | str | None = given
    return state


def _problem(
    call: OpCall, number: int, states: Sequence[int | str | None],
    factors: Sequence[Sequence[tuple[str, ...]]],
) -> Problem | None:  # fmt: skip
    given = f"line {number}: {list(states)}"
    counts = len(call.operands), len(call.results)
    if len(states) != sum(counts):
        return Problem(given, f"a line has a state for each of {counts[1]} results and "
                       f"{counts[0]} operands", "([0], [0, None]), say")  # fmt: skip
    wrong = [s for s in states if isinstance(s, str) and s not in REDUCTIONS]
    wrong += [str(s) for s, d in zip(states, factors, strict=True)
              if isinstance(s, int) and not 0 <= s < len(d)]  # fmt: skip
    if wrong:
        return Problem(given, "a state is a dim of its tensor from 0 on, None, or one of "
                       f"{', '.join(REDUCTIONS)}", f"correct {wrong[0]}")  # fmt: skip
    mine = states[: counts[0]]
    if any(isinstance(s, str) for s in mine) and any(isinstance(s, int) for s in states):
        return Problem(given, "a line shards, or takes unreduced operands, not both",
                       "write two lines")  # fmt: skip
    taken = [s for s, d in zip(states, factors, strict=True) if isinstance(s, int) and d[s]]
    if taken:
        return Problem(given, f"dim {taken[0]} of a tensor is sharded by another line, together "
                       "with others",
                       "a dim is sharded by one line: leave one of them out")  # fmt: skip
    return None
