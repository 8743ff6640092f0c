"""`Table`: rows of text that print in 80 columns, in rich and in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fshard._util.errors import fail
from fshard._util.text import WIDTH, words, wrap

Row = tuple[str, ...]
NARROWEST = 20
"""Fewest columns of a text."""

_MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12.5px"
# Grey at half strength is a line on white and on black.
_RULE = "rgba(128,128,128,.55)"


@dataclass(frozen=True, slots=True)
class Column:
    """Heading of a column; `right` aligns numbers, `wrap` allows line breaks."""

    name: str
    right: bool = False
    wrap: bool = False


class TextAndHtml:
    """Base of values that print as `text()`, and that a notebook shows as `html()`."""

    __slots__ = ()

    def text(self, width: int = WIDTH) -> str:
        """Return plain text of at most `width` columns.

        Raises:
            ShardingError: If `width` is not an int of at least 20.
        """
        if isinstance(width, bool) or not isinstance(width, int) or width < NARROWEST:
            rule = f"width must be an int of at least {NARROWEST} columns"
            fail(f"{type(self).__name__}.text", f"width={width!r}", rule, f"width={WIDTH}")
        return self._text(width)

    def _text(self, width: int) -> str:
        raise NotImplementedError

    def html(self) -> str:
        """Return self-contained HTML, readable on light and dark pages."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self.html()}


@dataclass(frozen=True, slots=True, repr=False)
class Table(TextAndHtml):
    """Title, columns, rows, footer rows under a rule, and notes.

    `str` is plain text of at most 80 columns, rich draws it in colour, a notebook as HTML.

    >>> print(Table("ranks", (Column("rank", right=True), Column("place")), (("0", "dp=0"),)))
    ranks
    rank  place
    ───────────
       0  dp=0
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    footer: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()

    def _text(self, width: int) -> str:
        """Return plain text of at most `width` columns.

        Names and shapes are not broken: where the first cell of a row does not fit its column, it
        has a line of its own, and rows whose other cells do not fit have a line for each cell.
        """
        widths = self._widths(width)
        lines = wrap(self.title, width) if self.title else []
        total = sum(widths) + 2 * (len(widths) - 1)
        if total > width:
            return "\n".join([*lines, *self._stacked(width)])
        rule = "─" * total
        lines += [*self._lines(tuple(column.name for column in self.columns), widths, width), rule]
        for row in self.rows:
            lines += self._lines(row, widths, width)
        if self.footer:
            lines.append(rule)
        for row in self.footer:
            lines += self._lines(row, widths, width)
        return "\n".join([*lines, *(line for note in self.notes for line in wrap(note, width))])

    def _stacked(self, width: int) -> list[str]:
        """Return the first cells with the others below them, after the names of their columns."""
        lines = ["─" * width]
        for row in (*self.rows, *self.footer):
            lines += wrap(row[0], width) if row[0] else []
            for column, cell in zip(self.columns[1:], row[1:], strict=True):
                head, *more = wrap(cell, width - 4 - len(column.name)) if cell else [""]
                if cell:
                    indent = " " * (4 + len(column.name))
                    lines += [f"  {column.name}  {head}", *(indent + line for line in more)]
        return [*lines, "─" * width, *(line for note in self.notes for line in wrap(note, width))]

    def _widths(self, width: int) -> list[int]:
        """Return the width of each column; if they are too wide, the widest with `wrap` shrinks.

        A column is as wide as its longest word at least, except for the first one.
        """
        names = tuple(column.name for column in self.columns)
        cells = list(zip(names, *self.rows, *self.footer, strict=True))
        widths = [max(map(len, column)) for column in cells]
        least = [max(map(_longest_word, column)) for column in cells]
        first = [min(least[0], max(8, len(names[0]))), *least[1:]]
        free = [i for i, column in enumerate(self.columns) if column.wrap]
        for bound in (least, first):
            over = sum(widths) + 2 * (len(widths) - 1) - width
            while over > 0 and (wide := [i for i in free if widths[i] > max(8, bound[i])]):
                widths[max(wide, key=lambda i: widths[i])] -= 1
                over -= 1
        return widths

    def _lines(self, row: Row, widths: Sequence[int], width: int) -> list[str]:
        cells = [wrap(cell, size) for cell, size in zip(row, widths, strict=True)]
        own, others = wrap(row[0], width), max(map(len, cells[1:]), default=0)
        is_longer = len(cells[0]) > 1 and len(own) + others <= max(len(cells[0]), others)
        if is_longer or _longest_word(row[0]) > widths[0]:
            return [*own, *self._lines(("", *row[1:]), widths, width)]
        lines = []
        for i in range(max(map(len, cells))):
            parts = [
                f"{cell[i] if i < len(cell) else '':{'>' if column.right else '<'}{size}}"
                for cell, column, size in zip(cells, self.columns, widths, strict=True)
            ]
            lines.append("  ".join(parts).rstrip())
        return lines

    def __rich__(self) -> Any:
        from rich import box
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, header_style="bold cyan", pad_edge=False,
                          show_edge=False, show_footer=False)  # fmt: skip
        for column in self.columns:
            table.add_column(Text(column.name), justify="right" if column.right else "left",
                             overflow="fold", no_wrap=not column.wrap)  # fmt: skip
        for row in self.rows:
            table.add_row(*map(Text, row))
        if self.footer:
            table.add_section()
        for row in self.footer:
            table.add_row(*map(Text, row), style="bold")
        head = [Text(self.title, style="bold")] if self.title else []
        return Group(*head, table, *(Text(note, style="dim") for note in self.notes))

    def html(self) -> str:
        """Return a self-contained, inline-styled HTML table, readable on light and dark pages."""
        head = "".join(
            self._cell("th", column.name, column,
                       f"border-bottom:1.5px solid {_RULE};font-weight:600")
            for column in self.columns
        )  # fmt: skip
        body = [self._html_row(row, "") for row in self.rows]
        line = f"border-top:1.5px solid {_RULE};"
        body += [self._html_row(row, (line if i == 0 else "") + "font-weight:600")
                 for i, row in enumerate(self.footer)]  # fmt: skip
        title = f'<div style="{_MONO};margin:2px 0 6px">{html.escape(self.title)}</div>'
        faint = f"{_MONO};opacity:.75;margin-top:4px;white-space:pre-wrap"
        notes = "".join(f'<div style="{faint}">{html.escape(note)}</div>' for note in self.notes)
        return (
            f'<div style="margin:4px 0">{title if self.title else ""}'
            f'<table style="border-collapse:collapse;{_MONO};color:inherit;margin:0">'
            f'<tr style="background:transparent">{head}</tr>{"".join(body)}</table>{notes}</div>'
        )

    def _html_row(self, row: Row, style: str) -> str:
        cells = zip(row, self.columns, strict=True)
        inner = "".join(self._cell("td", cell, column, style) for cell, column in cells)
        return f'<tr style="background:transparent">{inner}</tr>'

    def _cell(self, tag: str, text: str, column: Column, style: str) -> str:
        align = "right" if column.right else "left"
        space = "pre-wrap" if column.wrap else "pre"  # leading spaces indent rows of layers
        return (
            f'<{tag} style="text-align:{align};white-space:{space};padding:3px 12px 3px 0;'
            f'color:inherit;background:transparent;border:0;{style}">{html.escape(text)}</{tag}>'
        )


class Tables(TextAndHtml):
    """Base of values that print, in rich and in a notebook too, as several tables."""

    __slots__ = ()

    @property
    def tables(self) -> Sequence[Table]:
        """The tables, at least one."""
        raise NotImplementedError

    def _text(self, width: int) -> str:
        return "\n\n".join(table.text(width) for table in self.tables)

    def __rich__(self) -> Any:
        from rich.console import Group

        first, *others = self.tables
        return Group(first, *(part for table in others for part in ("", table)))

    def html(self) -> str:
        """Return self-contained HTML tables."""
        return '<div style="height:10px"></div>'.join(table.html() for table in self.tables)


def _longest_word(text: str) -> int:
    return max(len(word.rstrip()) for word in words(text))
