"""`NotebookView`: values that notebooks show as HTML, by a function of a higher folder."""

from __future__ import annotations

from typing import Any

from fshard._util.hooks import Hook


@Hook
def mimebundle_hook(value: Any) -> dict[str, str]:
    """Return plain text and HTML of a value; set by `show/notebook.py`."""
    raise NotImplementedError


class NotebookView:
    """Base of values that a notebook shows as HTML, with their `str` beside it.

    >>> import fshard as fs
    >>> sorted(fs.Mesh(x=2)._repr_mimebundle_())
    ['text/html', 'text/plain']
    """

    __slots__ = ()

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return mimebundle_hook.call(self)
