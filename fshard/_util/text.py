"""Plain text that fits a terminal: lines, columns, units, lists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence

WIDTH = 80
"""Columns of a terminal; no plain text is wider."""

_BREAKS = re.compile(
    r"(?<=[\s,+;])(?=[^\s,+;])"  # after commas, pluses and spaces
    r"|(?<=\S)(?=\{)"  # before the states of a spec
    r"|(?<=[A-Za-z_]\.)(?=\w)|(?<=\d\.)(?=[A-Za-z_])|(?<=\])(?=\[)"  # between keys of a tree
)
_WORDS = re.compile(r"(?<=\s)(?=\S)|(?<=\S)(?=\{)")
"""Places between words: a name or a shape is one."""
_CLAUSES = re.compile(r" (?=(?:->|on) )")


def type_name(value: object) -> str:
    """Return the name of a value's type, after its package unless it is Python's, torch's or ours.

    >>> import datetime
    >>> type_name(3), type_name(datetime.date(2026, 1, 1))
    ('int', 'datetime.date')
    """
    package = type(value).__module__.partition(".")[0]
    prefix = "" if package in ("builtins", "torch", "fshard") else f"{package}."
    return f"{prefix}{type(value).__name__}"


def words(text: str) -> list[str]:
    """Split a text between words; names and shapes are words, their states are others.

    >>> words("f32[8,4]{unreduced: ep} on Mesh(ep=2)")
    ['f32[8,4]', '{unreduced: ', 'ep} ', 'on ', 'Mesh(ep=2)']
    """
    return _WORDS.split(text)


def parts(text: str) -> list[str]:
    """Split a long word where a line may break: after commas, between keys of a tree.

    >>> parts("f32[8,4]{unreduced: ep}"), parts("['attn.out']['w']")
    (['f32[8,', '4]', '{unreduced: ', 'ep}'], ["['attn.", "out']", "['w']"])
    """
    return _BREAKS.split(text)


def wrap(text: str, width: int, max_lines: int = 4) -> list[str]:
    """Return a text as lines of at most `width` columns, broken between words, the rest cut off.

    A word that is wider than a line breaks between its `parts`.

    >>> wrap("f32[1024@(dp,tp),512]{unreduced: ep}", 22)
    ['f32[1024@(dp,tp),512]', '{unreduced: ep}']
    """
    text = text[: width * (max_lines + 1)]  # no more is shown of a text without end
    lines = [""]
    pieces = [[word] if len(word.rstrip()) <= width else parts(word) for word in words(text)]
    for part in itertools.chain(*pieces):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    lines = [line.rstrip() for line in lines]
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], f"{lines[max_lines - 1][: width - 1]}…"]
    return lines


def folded(text: str, margin: int = 0, width: int = WIDTH) -> list[str]:
    r"""Return a text as few lines, indented by `margin`, and by 4 more from the second line on.

    Lines break before `->` and `on`, and between `parts` if that is not enough.

    >>> print(*folded("f32[8@x] -> f32[8@y] on Mesh(x=2, y=2)", width=24), sep="\n")
    f32[8@x] -> f32[8@y]
        on Mesh(x=2, y=2)
    """
    lines: list[str] = []
    for clause in _CLAUSES.split(text):
        if lines and len(lines[-1]) + 1 + len(clause) <= width:
            lines[-1] += f" {clause}"
            continue
        indent = margin + 4 * bool(lines)
        fits = indent + len(clause) <= width
        for line in [clause] if fits else wrap(clause, width - margin - 4):
            lines.append(" " * (margin + 4 * bool(lines)) + line)
    return lines


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    r"""Return rows as aligned lines, indented by 2; an empty list if one is wider than a terminal.

    Columns whose index is in `right` are aligned to the right.

    >>> print(*columns([("all_reduce(x)", "8 B"), ("cast(f32)", "16 B")], {1}), sep="\n")
      all_reduce(x)   8 B
      cast(f32)      16 B
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    if 2 + sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        return []
    return [
        "  " + "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]  # fmt: skip


def below(rows: Sequence[Sequence[str]]) -> list[str]:
    r"""Return rows that are too wide for columns with their cells on lines of their own.

    >>> print(*below([("['w']", "f32[8@x] -> f32[8]", "all_gather(x, dim 0)")]), sep="\n")
      ['w']
        f32[8@x] -> f32[8]
        all_gather(x, dim 0)
    """
    return [
        line
        for row in rows
        for column, cell in enumerate(row)
        for line in folded(cell, 2 + 2 * bool(column))
    ]


def axes_text(axes: Sequence[str]) -> str:
    """Return one axis, or several in parentheses, as in the text of a spec.

    >>> axes_text(("x",)), axes_text(("x", "y"))
    ('x', '(x,y)')
    """
    return axes[0] if len(axes) == 1 else f"({','.join(axes)})"


def one_line(error: BaseException) -> str:
    r"""Return the type of an error and the first line of its text.

    >>> one_line(ValueError("wrong\nreally"))
    'ValueError: wrong'
    """
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


Units = Sequence[tuple[str, float]]

_BINARY: Units = (("MiB", 2**-20), ("GiB", 2**-30), ("TiB", 2**-40), ("PiB", 2**-50))
_DECIMAL: Units = (("M", 1e-6), ("G", 1e-9), ("T", 1e-12), ("P", 1e-15))
_SECONDS: Units = (("µs", 1e6), ("ms", 1e3), ("s", 1.0))


def bytes_text(count: int) -> str:
    """Return bytes as text, exact below 1 MiB, with three digits and a unit from there on.

    >>> bytes_text(196608), bytes_text(8 << 20), bytes_text(3 << 30)
    ('196,608 B', '8.00 MiB', '3.00 GiB')
    """
    if count < 1 << 20:
        return f"{count:,} B"
    return _scaled(count, _BINARY)


def time_text(seconds: float) -> str:
    """Return seconds as text with three digits and a unit.

    >>> time_text(8.4e-6), time_text(0.0123), time_text(0.0)
    ('8.40 µs', '12.3 ms', '0 µs')
    """
    return "0 µs" if seconds == 0 else _scaled(seconds, _SECONDS)


def rate_text(rate: float, unit: str = "B/s") -> str:
    """Return a rate as text with three digits and a decimal prefix of its unit.

    >>> rate_text(360e9), rate_text(2.68e12), rate_text(24e6), rate_text(1e15, "FLOP/s")
    ('360 GB/s', '2.68 TB/s', '24.0 MB/s', '1.00 PFLOP/s')
    """
    return _scaled(rate, _DECIMAL) + unit


def _scaled(value: float, units: Units) -> str:
    """Return a value in the first unit in which it is below 1,000, or in the last one."""
    unit, scale = next((unit for unit in units if value * unit[1] < 999.5), units[-1])
    number = value * scale
    return f"{number:,.{max(0, 3 - len(str(int(number))))}f} {unit}"


def count_text(count: int) -> str:
    """Return a count as text, exact below a million, with three digits and a prefix from there on.

    >>> count_text(131072), count_text(275 * 10**9)
    ('131,072', '275 G')
    """
    return f"{count:,}" if count < 10**6 else _scaled(count, _DECIMAL)


def ratio_text(value: float, bound: float) -> str:
    """Return the ratio of a value to its lower bound as text.

    >>> ratio_text(3, 2), ratio_text(0, 0), ratio_text(5, 0)
    ('1.50x', '1.00x', '')
    """
    if bound == 0:
        return "1.00x" if value == 0 else ""
    return f"{value / bound:.2f}x"


def percent_text(value: float, total: float) -> str:
    """Return the share of a total as text.

    >>> percent_text(1, 3), percent_text(0, 0)
    ('33 %', '0 %')
    """
    return f"{100 * value / total if total else 0.0:.0f} %"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return a count and its noun; `nouns` is an irregular plural.

    >>> plural(1, "launch"), plural(2, "launch"), plural(2, "leaf", "leaves"), plural(1024, "rank")
    ('1 launch', '2 launches', '2 leaves', '1,024 ranks')
    """
    regular = f"{noun}es" if noun.endswith(("ch", "x", "s")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else nouns or regular}"


def listing(items: Iterable[object], count: int, last: object, max_items: int = 8) -> str:
    """Return items separated by commas; of many the first three, the last one and the count.

    >>> listing(range(4), 4, 3), listing(range(64), 64, 63)
    ('0, 1, 2, 3', '0, 1, 2, … 63 (64 in all)')
    """
    if count <= max_items:
        return ", ".join(map(str, items))
    first = [str(item) for _, item in zip(range(3), items, strict=False)]
    return f"{', '.join(first)}, … {last} ({count:,} in all)"


def ranks_text(numbers: Sequence[int]) -> str:
    """Return ascending ranks as text, consecutive ones as ranges.

    >>> ranks_text([3]), ranks_text([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    texts = ["-".join(map(str, ends)) for ends in ranges]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"
