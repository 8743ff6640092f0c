"""`fs.domain.window_plan`: elements of a sharded dim that a windowed operation needs on each rank.

Rules of windowed operations compute the same intervals (`fshard/ops/core/windows`); a plan is their
value for one dim, to look at and to test against.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fshard._util.errors import Problem, fail, raise_if
from fshard._util.text import columns, plural
from fshard.layout.validation import as_ints
from fshard.ops.core.window_arguments import number_problems
from fshard.ops.core.windows import Window

WHERE = "fs.domain.window_plan"
MAX_DRAWN = 100
"""Elements of the widest dim that is drawn."""


@dataclass(frozen=True, slots=True)
class RankWindow:
    """Part of one rank: intervals `(start, stop)` of a dim and of the result.

    Attributes:
        own: the elements of the dim that the rank has.
        outputs: the elements of the result that it computes.
        window: the elements of the dim that these read.
        padding: numbers of positions that they read before the dim and after it.

    >>> import fshard as fs
    >>> fs.domain.window_plan(16, 3, 2, padding=1, sizes_in=(9, 7)).ranks[0]
    RankWindow(own=(0, 9), outputs=(0, 5), window=(0, 10), padding=(1, 0))
    """

    own: tuple[int, int]
    outputs: tuple[int, int]
    window: tuple[int, int]
    padding: tuple[int, int] = (0, 0)

    @property
    def lacks(self) -> tuple[tuple[int, int], ...]:
        """Intervals of the window that other ranks have."""
        (start, stop), (own_start, own_stop) = self.window, self.own
        parts = (start, min(stop, own_start)), (max(start, own_stop), stop)
        if own_start == own_stop:
            parts = (self.window, (0, 0))
        return tuple((a, b) for a, b in parts if a < b)

    @property
    def lacking(self) -> int:
        """Number of elements of the window that other ranks have."""
        return sum(stop - start for start, stop in self.lacks)


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Windows of a sharded dim, one for each rank, as `fs.domain.window_plan` returns them.

    Laws, for all arguments: the intervals of own elements and of outputs are adjacent, and cover
    the dim and the result. A window has all elements that its outputs read, and the first and last
    of them; with padding its length is `(outputs - 1) * stride + dilation * (kernel - 1) + 1`. An
    operation on the windows without other padding gives the shards of the result. A rank
    receives exactly the elements that it lacks.

    Attributes:
        size: number of elements of the dim.
        length: number of elements of the result.
        kernel: number of elements that one of the result reads.
        stride: distance of the windows of neighbours.
        dilation: distance of the elements that are read.
        ranks: the part of each rank.

    >>> import fshard as fs
    >>> print(fs.domain.window_plan(16, 3, stride=2, padding=1, sizes_in=(9, 7)))
    16 -> 8 elements on 2 ranks, kernel 3, stride 2
    rank  own   outputs  window  padding  lacks
    0     0:9   0:5      0:10    1, 0     9:10
    1     9:16  5:8      9:16    0, 0
    0  _#########+
    1            #######
    """

    size: int
    length: int
    kernel: int
    stride: int
    dilation: int
    ranks: tuple[RankWindow, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of the result on each rank."""
        return tuple(stop - start for start, stop in (rank.outputs for rank in self.ranks))

    def draw(self) -> str:
        """Return one line of text for each rank, with a character for each position of the dim.

        `#` is an own element that is read, `+` one that is received, `.` an own one that is not
        read, and `_` padding.

        >>> import fshard as fs
        >>> print(fs.domain.window_plan(8, 5, sizes_in=(3, 1, 4)).draw())
        0  ###++
        1   ++#++
        2    ++####
        """
        left = max(rank.padding[0] for rank in self.ranks)
        right = max(rank.padding[1] for rank in self.ranks)
        width = len(str(len(self.ranks) - 1))
        rows = []
        for index, rank in enumerate(self.ranks):
            marks = [self._mark(rank, at) for at in range(-left, self.size + right)]
            rows.append(f"{index:<{width}}  {''.join(marks)}".rstrip())
        return "\n".join(rows)

    def _mark(self, rank: RankWindow, at: int) -> str:
        (start, stop), (before, after) = rank.window, rank.padding
        if -before <= at < 0 or self.size <= at < self.size + after:
            return "_"
        own = rank.own[0] <= at < rank.own[1]
        if start <= at < stop:
            return "#" if own else "+"
        return "." if own else " "

    def __str__(self) -> str:
        options = [f"kernel {self.kernel}", f"stride {self.stride}"]
        options += [f"dilation {self.dilation}"] if self.dilation != 1 else []
        title = f"{self.size} -> {self.length} elements on {plural(len(self.ranks), 'rank')}"
        rows = [("rank", "own", "outputs", "window", "padding", "lacks")] + [
            (str(index), *map(_text, (rank.own, rank.outputs, rank.window)),
             f"{rank.padding[0]}, {rank.padding[1]}", ", ".join(map(_text, rank.lacks)))
            for index, rank in enumerate(self.ranks)
        ]  # fmt: skip
        lines = [f"{title}, {', '.join(options)}", *(row.strip() for row in columns(rows) or ())]
        return "\n".join([*lines, self.draw()] if self.size <= MAX_DRAWN else lines)


def _text(interval: tuple[int, int]) -> str:
    return f"{interval[0]}:{interval[1]}"


def window_plan(
    size: int,
    kernel: int,
    stride: int = 1,
    dilation: int = 1,
    padding: int | tuple[int, int] = 0,
    *,
    sizes_in: Sequence[int],
    sizes_out: Sequence[int] | None = None,
) -> WindowPlan:
    """Plan which elements of a sharded dim each rank needs for its part of a windowed operation.

    Args:
        size: number of elements of the dim.
        kernel: number of elements that each element of the result reads.
        stride: distance of the windows of neighbours, in elements.
        dilation: distance of the elements that are read.
        padding: number of positions before the first element and after the last one that are
            read too: one for both ends, or a pair.
        sizes_in: the sizes of the dim's shards, 0 too.
        sizes_out: the sizes of the result's shards; None gives each element of the result to the
            rank that has the middle of its window.

    Returns:
        The plan, which prints as a table and a picture.

    Raises:
        ShardingError: sizes that do not add up, numbers out of range, and a window that is longer
            than the padded dim.

    Rules of convolutions and pooling use the same intervals, whose exchange is `fs.HaloExchange`.
    After the spatial partitioning of GSPMD (arXiv 2105.04663).

    >>> import fshard as fs
    >>> plan = fs.domain.window_plan(5, 3, padding=1, sizes_in=(2, 2, 1, 0))
    >>> plan.sizes, [rank.lacking for rank in plan.ranks]
    ((2, 2, 1, 0), [1, 2, 1, 0])
    """
    pads = as_ints((padding, padding) if isinstance(padding, int) else padding)
    if pads is None:
        fail(WHERE, f"padding={padding!r}", "padding must be an int or a pair of ints", "padding=1")
    shards, out = as_ints(sizes_in), None if sizes_out is None else as_ints(sizes_out)
    raise_if(WHERE, _problems(size, kernel, stride, dilation, pads, shards))
    assert shards is not None
    extent = dilation * (kernel - 1)
    length = (size + sum(pads) - extent - 1) // stride + 1
    if sizes_out is not None and (out is None or sum(out) != length or min(out) < 0
                                  or len(out) != len(shards)):  # fmt: skip
        fail(WHERE, f"sizes_out={sizes_out!r}",
             f"sizes_out must be {plural(len(shards), 'size')} of at least 0 that add up to "
             f"{length}, the size of the result", "leave it out")  # fmt: skip
    window = Window("o", "i", length, size, stride, -pads[0], extent - pads[0])
    out_sizes, ranks = out or window.sizes(shards), []
    ends = list(itertools.accumulate(shards, initial=0))
    for own, (start, stop) in zip(
        itertools.pairwise(ends), itertools.pairwise(itertools.accumulate(out_sizes, initial=0)),
        strict=True,
    ):  # fmt: skip
        reach = window.reach(start, stop)
        interval = (reach.start, reach.stop) if start < stop else (own[0], own[0])
        ranks.append(RankWindow(own, (start, stop), interval, (reach.before, reach.after)))
    return WindowPlan(size, length, kernel, stride, dilation, tuple(ranks))


def _problems(
    size: Any, kernel: Any, stride: Any, dilation: Any, pads: tuple[Any, ...],
    shards: tuple[int, ...] | None,
) -> list[Problem]:  # fmt: skip
    """Return the problems of the arguments of a plan."""
    problems = number_problems(
        1,
        {
            "size": (size, 0),
            "kernel": (kernel, 1),
            "stride": (stride, 1),
            "dilation": (dilation, 1),
        },
    )
    if as_ints(pads) is None or len(pads) != 2 or min(pads) < 0:
        problems.append(Problem(f"padding={pads!r}", "padding must be an int of at least 0, or two",
                                "padding=0"))  # fmt: skip
    if problems:
        return problems
    if not shards or min(shards) < 0 or sum(shards) != size:
        rule = f"sizes_in must be sizes of at least 0 that add up to {size}"
        problems.append(Problem(f"sizes_in={shards!r}", rule, "spec.shard_sizes(dim)"))
    extent = dilation * (kernel - 1) + 1
    if extent > size + sum(pads):
        problems.append(Problem(f"kernel={kernel}, dilation={dilation}: windows of {extent}",
                                f"a window must not be longer than the padded dim of "
                                f"{size + sum(pads)}", f"padding={-(-(extent - size) // 2)}"
                                ))  # fmt: skip
    return problems
