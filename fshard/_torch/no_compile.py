"""Functions that `torch.compile` leaves out of its graphs: what they do is decided by values.

They plan with sizes as keys of caches. A graph ends before them and another begins after them; in
between nothing is compiled, and sizes that a graph holds as symbols are the numbers that they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["uncompiled"]

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(why: str) -> Callable[[F], F]:
    """Leave a function and all that it calls out of compiled graphs; `why` is told where one ends.

    What `torch.compiler.disable` does, whose import takes a second; the function stays as it is.
    """

    def mark(fn: F) -> F:
        fn._torchdynamo_disable = True  # type: ignore[attr-defined]
        fn._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(fn.__code__, frames._FrameExecStrategy(skip, skip))
        return fn

    return mark
