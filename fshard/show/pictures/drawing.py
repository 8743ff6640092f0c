"""`Picture`: lines of coloured text, for terminals, rich and notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fshard._util.text import WIDTH, wrap
from fshard.show.table import TextAndHtml

MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"
DARK = "#111111"


class TextSpan(NamedTuple):
    """Text of one style.

    Attributes:
        text: The text.
        fill: Colour of its background as `#rrggbb`, "" for none; the text on it is dark.
        ink: Colour of the text, "" for that of the terminal.
        bold: True for bold text.
    """

    text: str
    fill: str = ""
    ink: str = ""
    bold: bool = False

    @property
    def rich_style(self) -> str:
        """The style in the words of rich."""
        words = ["bold"] * self.bold
        words += [f"{DARK} on {self.fill}"] if self.fill else [self.ink] if self.ink else []
        return " ".join(words)

    @property
    def html(self) -> str:
        """The span as HTML with inline styles."""
        style = [f"background-color:{self.fill};color:{DARK}"] if self.fill else []
        style += [f"color:{self.ink}"] if self.ink and not self.fill else []
        style += ["font-weight:600"] * self.bold
        text = html.escape(self.text)
        return f'<span style="{";".join(style)}">{text}</span>' if style else text


Line = list[TextSpan]


def plain(text: str, width: int, *, bold: bool = False) -> list[Line]:
    """Return a text as lines of at most `width` columns."""
    return [[TextSpan(line, bold=bold)] for line in wrap(text, width)]


def flow(items: Iterable[Sequence[TextSpan]], width: int) -> list[Line]:
    """Return items side by side, on as many lines as they need; an item is not broken.

    >>> [line_text(line) for line in flow([[TextSpan("dp=2")], [TextSpan("tp=4")]], 8)]
    ['dp=2', 'tp=4']
    """
    lines: list[Line] = []
    for item in items:
        size = sum(len(span.text) for span in item)
        if lines and len(line_text(lines[-1])) + 3 + size <= width:
            lines[-1] += [TextSpan("   "), *item]
        else:
            lines.append([*item])
    return lines


def side_by_side(blocks: Sequence[list[Line]], gap: int = 2) -> list[Line]:
    """Return blocks of lines beside each other, their tops aligned.

    >>> lines = side_by_side([[[TextSpan("a")], [TextSpan("bc")]], [[TextSpan("d")]]])
    >>> [line_text(line) for line in lines]
    ['a   d', 'bc']
    """
    widths = [max((len(line_text(line)) for line in block), default=0) for block in blocks]
    lines: list[Line] = []
    for i in range(max(map(len, blocks), default=0)):
        joined: Line = []
        missing = 0
        for block, width in zip(blocks, widths, strict=True):
            line = block[i] if i < len(block) else []
            if line:
                joined += [TextSpan(" " * missing), *line] if missing else line
                missing = 0
            missing += width - len(line_text(line)) + gap
        lines.append(joined)
    return lines


def line_text(line: Line) -> str:
    """Return the text of a line."""
    return "".join(span.text for span in line)


class Picture(TextAndHtml):
    """Picture of a value; `str` is 80 columns wide, rich adds colours, notebooks show HTML.

    Subclasses define `lines` and `plot`.

    >>> import fshard as fs
    >>> print(fs.visualize(fs.Mesh(x=2)))
    Mesh(x=2)
    ● x=2
                x=0                      x=1
     ┌────────────────────────┬────────────────────────┐
     │           0            │           1            │
     └────────────────────────┴────────────────────────┘
    """

    __slots__ = ()

    def lines(self, width: int = WIDTH) -> list[Line]:
        """Return the lines, of at most `width` columns."""
        raise NotImplementedError

    def _text(self, width: int) -> str:
        return "\n".join(line_text(line).rstrip() for line in self.lines(width))

    def html(self) -> str:
        """Return self-contained HTML with inline styles, readable on light and dark pages."""
        lines = "\n".join("".join(span.html for span in line) for line in self.lines(110))
        return (f'<pre style="{MONO};font-size:12.5px;line-height:1.25;margin:4px 0;'
                f'background:transparent;color:inherit">{lines}</pre>')  # fmt: skip

    def plot(self, axes: Any = None) -> Any:
        """Draw the picture with matplotlib, which the extra `notebook` installs.

        Args:
            axes: The `matplotlib.axes.Axes` to draw into; None draws into those of a new `Figure`.

        Returns:
            The `Axes`; `axes.figure.savefig(path)` writes a file.

        Raises:
            ShardingError: If matplotlib is missing.
        """
        raise NotImplementedError

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        output = Text(no_wrap=True, overflow="ignore")
        for line in self.lines(max(40, options.max_width)):
            for span in line:
                output.append(span.text, span.rich_style)
            output.append("\n")
        output.right_crop(1)
        yield output
