"""`ShardingError` and the builders of its messages.

Every message names the place (function and argument), the given value, the rule with concrete
sizes, and a fix; it lists all failures at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn


class ShardingError(ValueError):
    """Request that the rules of fshard forbid; the text names the rule and a fix.

    Attributes:
        problems: the single failures, where the text is a list of them.
        same_on_all_ranks: True if all ranks have the same failure; no rank is named then.

    >>> import fshard as fs
    >>> try:
    ...     fs.Mesh(x=0)
    ... except fs.ShardingError as error:
    ...     print(error)
    fs.Mesh
      given: axis 'x' of size 0
      rule:  the size of an axis must be an int of at least 1
      fix:   Mesh(x=1) or leave the axis out
    """

    problems: tuple[Problem, ...] = ()
    same_on_all_ranks: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """One failure: the given value, the rule it breaks, and a fix that works."""

    given: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"  given: {self.given}\n  rule:  {self.rule}\n  fix:   {self.fix}"


def raise_if(
    where: str,
    problems: Sequence[Problem],
    *,
    same_on_all_ranks: bool = False,
    kind: type[ShardingError] = ShardingError,
) -> None:
    """Raise one error of a kind that lists all `problems`, or return if there are none."""
    if problems:
        body = "\n\n".join(str(problem) for problem in problems)
        error = kind(f"{where}\n{body}")
        error.problems, error.same_on_all_ranks = tuple(problems), same_on_all_ranks
        raise error


def fail(
    where: str, given: str, rule: str, fix: str, kind: type[ShardingError] = ShardingError
) -> NoReturn:
    """Raise an error of a kind with a single problem."""
    raise_if(where, [Problem(given, rule, fix)], kind=kind)
    raise AssertionError("unreachable")


def add_place(error: ShardingError, place: str) -> None:
    """Add `file:line` to the first line of an error's text that has no place."""
    head, _, problems = str(error).partition("\n")
    if place and " at " not in head:
        error.args = (f"{head} at {place}\n{problems}",)


MAX_SUGGESTIONS = 3


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a fix that names the known words closest to `name`, or `otherwise` if none is close.

    >>> did_you_mean("tq", ["dp", "tp"], "use one of dp, tp")
    "did you mean 'tp'?"
    >>> did_you_mean("TP", ["dp", "tp"], "use one of dp, tp")
    "did you mean 'tp'?"
    >>> did_you_mean("pd", ["dp", "tp"], "use one of dp, tp")
    "did you mean 'dp' or 'tp'?"
    """
    matcher = difflib.SequenceMatcher(b=name.lower())
    ratios: dict[str, float] = {}
    for word in known:
        matcher.set_seq1(word.lower())
        ratios[word] = matcher.ratio()
    best = max(ratios.values(), default=0.0)
    if best < 0.5:
        return otherwise
    closest = [repr(word) for word, ratio in ratios.items() if ratio == best]
    return f"did you mean {' or '.join(closest[:MAX_SUGGESTIONS])}?"
