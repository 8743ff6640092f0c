"""`comm_log`: collectives that ran, counted per operation and axes, forward and backward apart."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, Self

from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import did_you_mean, fail
from fshard._util.text import bytes_text, plural
from fshard.run.transports.base import ObservedCall, observe
from fshard.run.transports.raw_collectives import observed_raw_collectives
from fshard.run.transports.running_modules import recorded_modules
from fshard.show.comm.expected_counts import Counts, compare_counts
from fshard.show.comm.origin import origin_of
from fshard.show.comm.phase import FIELDS, Key, Phase
from fshard.show.table import Column, Table, TextAndHtml

FIGURES = (
    Column("forward", right=True), Column("bytes", right=True), Column("backward", right=True),
    Column("bytes", right=True),
)  # fmt: skip
"""Columns after those of the fields."""

TOTAL_NOTE = "each figure is the busiest rank's, so rows need not add up to the total"


class CommLog(TextAndHtml):
    """Collectives that ran in a `with fs.comm_log()` block; it stays readable after the block.

    It prints as a table, in rich and in a notebook.

    Attributes:
        forward: Counts and bytes of forward passes, with the same properties.
        backward: Counts and bytes of backward passes, with the same properties.

    >>> import torch
    >>> import fshard as fs
    >>> src = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))
    >>> with fs.comm_log() as log:
    ...     y = fs.redistribute(src, src.replace(partition=fs.P()))((torch.ones(2),) * 2)
    >>> log.counts["all_gather", "x"], log.total_bytes
    (1, 8)
    """

    __slots__ = ("_all", "_blocks", "_calls", "_limit", "_raw", "backward", "forward")

    def __init__(self, *, raw: bool = False) -> None:
        self._raw, self._blocks = raw, list[ExitStack]()

    def __enter__(self) -> Self:
        self._calls, self._limit = dict[ObservedCall, int](), CACHE_SIZE
        self.forward, self.backward = Phase(self._calls, "forward"), Phase(self._calls, "backward")
        self._all = Phase(self._calls, "forward", "backward")
        stack = ExitStack()
        self._blocks.append(stack)
        stack.enter_context(observe(self._record))
        stack.enter_context(recorded_modules())
        if self._raw:
            stack.enter_context(observed_raw_collectives())
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks.pop().close()

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("forward", "backward", "_all"):
            fail(
                "fs.comm_log()",
                "counts of a log without a block",
                "a log must be of the collectives of a `with` block",
                "with fs.comm_log() as log: ..., then log.counts",
            )
        raise AttributeError(f"CommLog has no attribute {name!r}", name=name, obj=self)

    def _record(self, call: ObservedCall) -> None:
        try:
            self._calls[call] += 1
        except KeyError:
            if len(self._calls) >= self._limit:
                self._merge()
            self._calls[call] = 1

    def _merge(self) -> None:
        """Count equal calls as one: they are several objects where a cache has removed some.

        Other threads may record calls meanwhile.
        """
        first: dict[Any, ObservedCall] = {}
        for call in list(self._calls):
            same = first.setdefault((call.events, origin_of(call)), call)
            if same is not call:
                count = self._calls.pop(call, 0)
                self._calls[same] += count
        self._limit = 2 * len(self._calls) + CACHE_SIZE

    @property
    def counts(self) -> Counter[Key]:
        """Number of launches of each operation: `log.counts["all_reduce", "tp"]`."""
        return self._all.counts

    @property
    def bytes(self) -> Counter[Key]:
        """Bytes that the busiest rank sent in each operation, as for `counts`."""
        return self._all.bytes

    @property
    def total_bytes(self) -> int:
        """Bytes that the busiest rank sent in all operations."""
        return self._all.total_bytes

    def assert_only(self, counts: Counts, *, backward: Counts | None = None) -> None:
        """Assert that these collectives ran and no others.

        Args:
            counts: Launches in forward passes, by operation, `{"all_reduce": 1}`, or by operation
                and axes, `{("all_reduce", "tp"): 1}`.
            backward: The same for backward passes; not compared if None.

        Raises:
            AssertionError: If a count differs; the text is a table of expected and counted ones.

        >>> import fshard as fs
        >>> with fs.comm_log() as log:
        ...     pass
        >>> log.assert_only({}, backward={})
        """
        phases = [("forward", self.forward, counts, None)]
        phases += [("backward", self.backward, backward, None)] if backward is not None else []
        compare_counts("CommLog.assert_only", phases)

    def by(self, *fields: str) -> Table:
        """Return a table with one row for each combination of fields.

        Args:
            fields: Any of "operation", "axes", "dtype", "call" (the call of fshard, and the
                layouts of a program), "redistribution" (a program's source and target layout),
                "module" (the path of the `torch.nn.Module` whose forward runs, or ran, for a
                backward pass) and "line" (the user's source line).

        Returns:
            A table of launches and bytes in both phases, as text, in rich and as HTML.

        Raises:
            ShardingError: If a field is unknown.

        >>> import torch
        >>> import fshard as fs
        >>> x = fs.shard(torch.arange(4.0), fs.Mesh(tp=2), fs.P("tp"))
        >>> with fs.comm_log() as log:
        ...     _ = fs.reshard(x, fs.P())
        >>> print(log.by("call", "dtype"))
        1 collective, 8 B sent by the busiest rank
        call                                    dtype    forward  bytes  backward  bytes
        ────────────────────────────────────────────────────────────────────────────────
        the program to f32[4] (f32[4@tp], all_gather(tp, dim 0))
                                                float32        1    8 B
        ────────────────────────────────────────────────────────────────────────────────
        total                                                  1    8 B
        """
        return self._table(self._fields("CommLog.by", fields))

    def to_dict(self, *fields: str) -> dict[str, Any]:
        """Return the log as lists, strings and ints only, ready for JSON.

        Args:
            fields: Fields that distinguish rows, as for `by`; by default operation and axes.

        >>> import fshard as fs
        >>> with fs.comm_log() as log:
        ...     pass
        >>> log.to_dict()
        {'total_bytes': 0, 'forward': [], 'backward': []}
        """
        names = self._fields("CommLog.to_dict", fields or ("operation", "axes"))
        result: dict[str, Any] = {"total_bytes": self.total_bytes}
        for name, phase in (("forward", self.forward), ("backward", self.backward)):
            counts, sent = phase.grouped(0, names), phase.grouped(1, names)
            result[name] = [
                {**_json_row(names, key), "count": counts[key], "bytes": sent[key]}
                for key in counts
            ]
        return result

    def _fields(self, where: str, fields: Sequence[str]) -> tuple[str, ...]:
        """Return fields; raise `ShardingError` if one is unknown or none is given."""
        unknown = [field for field in fields if field not in FIELDS]
        if unknown or not fields:
            fail(where, f"fields {', '.join(map(repr, unknown)) or '()'}",
                 f"fields must be among {', '.join(FIELDS)}",
                 did_you_mean(str(unknown[0]) if unknown else "", FIELDS, "'line'"))  # fmt: skip
        return tuple(fields)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the log to a file: JSON if its name ends in `.json`, else HTML or text.

        Args:
            path: The file; `.json` has every launch by all fields, `.html` and others the table.

        >>> import fshard as fs
        >>> with fs.comm_log() as log:
        ...     pass
        >>> log.save("/dev/null")
        """
        file = Path(path)
        match file.suffix:
            case ".json":
                text = json.dumps(self.to_dict(*FIELDS), indent=2)
            case ".html":
                text = self.html()
            case _:
                text = str(self)
        file.write_text(f"{text}\n", encoding="utf-8")

    @property
    def table(self) -> Table:
        """One row per operation and axes, and the total of the busiest rank."""
        return self._table(("operation", "axes"))

    def _table(self, fields: Sequence[str]) -> Table:
        """Return the table of launches grouped by fields."""
        phases = (self.forward, self.backward)
        counts, sent = ([phase.grouped(which, fields) for phase in phases] for which in (0, 1))
        rows = []
        for key in self._all.grouped(0, fields):
            cells = [_cell(*item) for item in zip(fields, key, strict=True)]
            for launches, nbytes in zip(counts, sent, strict=True):
                number = launches[key]
                cells += [f"{number:,}", bytes_text(nbytes[key])] if number else ["", ""]
            rows.append(tuple(cells))
        total = ["total", *[""] * (len(fields) - 1)]
        for phase, launches in zip(phases, counts, strict=True):
            number = launches.total()
            total += [f"{number:,}", bytes_text(phase.total_bytes)] if number else ["", ""]
        title = (f"{plural(self.counts.total(), 'collective')}, "
                 f"{bytes_text(self.total_bytes)} sent by the busiest rank")  # fmt: skip
        most = [sum(nbytes.values()) for nbytes in sent]
        notes = () if sum(most) == self.total_bytes else (TOTAL_NOTE,)
        columns = tuple(Column(name, wrap=name != "operation") for name in fields)
        return Table(title, (*columns, *FIGURES), tuple(rows), (tuple(total),), notes)

    def _text(self, width: int) -> str:
        """Return plain text of at most `width` columns."""
        return self.table.text(width) if self.counts else "no collective ran"

    def __rich__(self) -> Any:
        return self.table if self.counts else "no collective ran"

    def html(self) -> str:
        """Return a self-contained HTML table."""
        return self.table.html() if self.counts else "<div>no collective ran</div>"


def _json_row(fields: Sequence[str], key: Sequence[Any]) -> dict[str, Any]:
    """Return the fields of a launch by their names, with lists in the place of tuples."""
    row = dict(zip(fields, key, strict=True))
    if "axes" in row:
        row["axes"] = list(row["axes"])
    return {"op": row.pop("operation"), **row} if "operation" in row else row


def _cell(field: str, value: Any) -> str:
    """Return a field of a launch as text."""
    if field == "axes":
        return ", ".join(value) or "(between meshes)"
    return str(value)


def comm_log(*, raw: bool = False) -> CommLog:
    """Count the collectives that run in a `with` block, on every simulated rank or on this one.

    Blocks may nest: the outer log counts everything that runs in the inner block too. Collectives
    of backward passes are counted apart. Collectives at the boundary of a mapped function have
    the call "the boundary of ..." in `log.by("call")`.

    Args:
        raw: If True, count collectives of this process that fshard did not launch, too: calls of
            `torch.distributed`, functional collectives and DTensor. Their axes are the ranks of
            their group. Every operation in the block then passes a dispatch mode.

    Returns:
        The `CommLog`, which counts while it is entered.

    >>> import torch
    >>> import fshard as fs
    >>> x = fs.shard(torch.arange(4.0), fs.Spec(fs.Mesh(tp=2), fs.P("tp"), shape=(4,)))
    >>> with fs.comm_log() as log:
    ...     _ = fs.reshard(x, fs.P())
    >>> log.counts["all_gather", "tp"], log.bytes["all_gather", "tp"]
    (1, 8)
    >>> print(log)
    1 collective, 8 B sent by the busiest rank
    operation   axes  forward  bytes  backward  bytes
    ─────────────────────────────────────────────────
    all_gather  tp          1    8 B
    ─────────────────────────────────────────────────
    total                   1    8 B
    """
    return CommLog(raw=raw)
