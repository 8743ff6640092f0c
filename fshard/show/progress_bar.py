"""Bar of the bytes that `fs.state.save` has written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fshard.state.checkpoints.saving import progress_bar_hook


@progress_bar_hook.set
@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on the standard error in the block, if that is a terminal.

    Args:
        total: bytes in all.

    Returns:
        A function of the bytes that were written since its last call.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("saving"), BarColumn(), DownloadColumn(binary_units=True),
               TransferSpeedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("saving", total=total)
        yield lambda count: bar.advance(task, count)
