"""Values that notebooks show as HTML, by a function or a table of a higher folder."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from fshard._util.hooks import Hook


@Hook
def mimebundle_hook(value: Any) -> dict[str, str]:
    """Return plain text and HTML of a value; set by `show/notebook.py`."""
    raise NotImplementedError


@singledispatch
def table_of(value: Any, *_options: Any) -> Any:
    """Return the table that explains a value; `show/` registers one for each class."""
    raise NotImplementedError(type(value).__name__)


class NotebookView:
    """Base of values that a notebook shows as HTML, with their `str` beside it.

    >>> import fshard as fs
    >>> sorted(fs.Mesh(x=2)._repr_mimebundle_())
    ['text/html', 'text/plain']
    """

    __slots__ = ()

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return mimebundle_hook.call(self)


class TableView:
    """Base of values that print, and that a notebook shows, as their `table()`."""

    __slots__ = ()

    def table(self) -> Any:
        """Return the table; it prints as text, in `rich` and as HTML."""
        return table_of(self)

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        bundle: dict[str, str] = self.table()._repr_mimebundle_()
        return bundle
