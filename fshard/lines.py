"""Text that fits a terminal: where lines break, columns, and what replaces columns too wide."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

__all__ = ["WIDTH", "below", "columns", "folded", "parts", "wrap"]

WIDTH = 80
"""Columns of a terminal that every plain text fits in."""

_BREAKS = re.compile(
    r"(?<=[\s,+;])(?=[^\s,+;])"  # after commas, pluses and spaces
    r"|(?<=\S)(?=\{)"  # before the states of a spec
    r"|(?<=[A-Za-z_]\.)(?=\w)|(?<=\d\.)(?=[A-Za-z_])|(?<=\])(?=\[)"  # between keys of a tree
)
_CLAUSES = re.compile(r" (?=(?:->|on) )")


def parts(text: str) -> list[str]:
    """What stays on one line: text breaks after commas, before states, between keys of a tree.

    >>> parts("f32[8,4]{unreduced: ep}"), parts("['attn.out']['w']")
    (['f32[8,', '4]', '{unreduced: ', 'ep}'], ["['attn.", "out']", "['w']"])
    """
    return _BREAKS.split(text)


def wrap(text: str, width: int, most: int = 4) -> list[str]:
    """Lines of at most `width`, broken between `parts`; at most `most` lines.

    >>> wrap("f32[1024@(dp,tp),512]{unreduced: ep}", 22)
    ['f32[1024@(dp,tp),512]', '{unreduced: ep}']
    """
    lines = [""]
    for part in parts(text):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    lines = [line.rstrip() for line in lines]
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1][: width - 1]}…"]
    return lines


def folded(text: str, margin: int = 0, width: int = WIDTH) -> list[str]:
    r"""A text `margin` columns in, on as few lines as it takes, all but the first 4 more in.

    It breaks before arrows and before where something is, and only elsewhere if that is not
    enough.

    >>> print(*folded("f32[8@x] -> f32[8@y] on Mesh(x=2, y=2)", width=24), sep="\n")
    f32[8@x] -> f32[8@y]
        on Mesh(x=2, y=2)
    """
    lines: list[str] = []
    for clause in _CLAUSES.split(text):
        if lines and len(lines[-1]) + 1 + len(clause) <= width:
            lines[-1] += f" {clause}"
            continue
        here = margin + 4 * bool(lines)
        fits = here + len(clause) <= width
        for line in [clause] if fits else wrap(clause, width - margin - 4):
            lines.append(" " * (margin + 4 * bool(lines)) + line)
    return lines


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    r"""Rows in columns, 2 columns in, those of `right` flush right; none if a line is too wide.

    >>> print(*columns([("all_reduce(x)", "8 B"), ("cast(f32)", "16 B")], {1}), sep="\n")
      all_reduce(x)   8 B
      cast(f32)      16 B
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    if 2 + sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        return []
    return [
        "  " + "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]  # fmt: skip


def below(rows: Sequence[Sequence[str]]) -> list[str]:
    r"""Rows too wide for columns: of each the cells below each other.

    >>> print(*below([("['w']", "f32[8@x] -> f32[8]", "all_gather(x, dim 0)")]), sep="\n")
      ['w']
        f32[8@x] -> f32[8]
        all_gather(x, dim 0)
    """
    return [
        line
        for row in rows
        for at, cell in enumerate(row)
        for line in folded(cell, 2 + 2 * bool(at))
    ]
