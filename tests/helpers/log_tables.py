"""Rows of the tables of logs."""

from __future__ import annotations

from fshard.show.table import Table


def rows_of(table: Table) -> list[tuple[str, ...]]:
    return list(table.rows)
