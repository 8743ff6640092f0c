"""Check of HTML pages: well-formed and self-contained."""

from __future__ import annotations

from html.parser import HTMLParser


class WellFormed(HTMLParser):
    """Parser that raises if tags do not match, and keeps the text."""

    VOID = ("br",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.said: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "style", "link", "img"), "self-contained, inline styles only"
        self.open += [] if tag in self.VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def html_text(page: str) -> str:
    """Return the text of well-formed HTML."""
    parser = WellFormed()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return " ".join(parser.said)
