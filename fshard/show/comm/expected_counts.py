"""Comparison of the launches that ran with expected ones, as a table that shows both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fshard._util.errors import fail
from fshard._util.text import bytes_text
from fshard.show.comm.phase import Key, Phase
from fshard.show.table import Column, Row, Table

Counts = Mapping[str | Key, int]
"""Launches by operation, `{"all_reduce": 1}`, or by operation and axes."""
COLUMNS = (
    Column("pass"), Column("operation"), Column("axes", wrap=True),
    Column("expected", right=True), Column("ran", right=True), Column("bytes", right=True),
    Column(""),
)  # fmt: skip
DIFFERS = "differs"


def compare_counts(where: str, phases: Iterable[tuple[str, Phase, Counts, int | None]]) -> None:
    """Raise if the launches or bytes of a phase are not the expected ones."""
    rows = [
        row for name, phase, counts, nbytes in phases
        for row in _rows(name, phase, _by_key(where, counts), nbytes)
    ]  # fmt: skip
    if any(row[-1] for row in rows):
        title = f"{where}: collectives that ran"
        raise AssertionError(str(Table(title, COLUMNS, tuple(rows))))


def _by_key(where: str, counts: Counts) -> Counts:
    """Return counts by the keys of a phase, in which one axis is a string; raise for others."""
    keyed: dict[str | Key, int] = {}
    for key, count in counts.items() if isinstance(counts, Mapping) else [(None, None)]:
        if type(count) is not int or not (isinstance(key, str) or _is_key(key)):
            fail(where, f"counts {counts!r}", "counts must map operations, or operations and axes, "
                 "to numbers of launches", '{"all_reduce": 1}, say')  # fmt: skip
        single = isinstance(key, tuple) and len(key[1]) == 1
        keyed[(key[0], key[1][0]) if single else key] = count
    return keyed


def _is_key(key: object) -> bool:
    """Return True for an operation with an axis or axes."""
    return isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], str | tuple)


def _rows(name: str, phase: Phase, counts: Counts, nbytes: int | None) -> Iterator[Row]:
    """Yield a row for each operation that is expected or ran; its last cell marks a difference."""
    ran, sent = phase.counts, phase.bytes
    groups: dict[str | Key, list[Key]] = {group: [] for group in counts}
    for key in ran:
        groups.setdefault(key[0] if key[0] in counts else key, []).append(key)
    for group, keys in groups.items():
        expected, count = counts.get(group, 0), sum(ran[key] for key in keys)
        operation, axes = (group, "") if isinstance(group, str) else group
        text = axes if isinstance(axes, str) else ", ".join(axes)
        total = bytes_text(sum(sent[key] for key in keys)) if keys else "-"
        mark = "" if expected == count else DIFFERS
        yield name, operation, text, f"{expected:,}", f"{count:,}", total, mark
    if nbytes is not None:
        count = phase.total_bytes
        mark = "" if count == nbytes else DIFFERS
        yield name, "bytes", "", f"{nbytes:,}", f"{count:,}", bytes_text(count), mark
