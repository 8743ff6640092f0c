"""The level of forward mode, of which PyTorch has one a process, for ranks that take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import forward_ad

_SHARED: list[bool] = []


def share_forward_level() -> Callable[[], None] | None:
    """Keep the running level of forward mode open; return the function that ends the sharing.

    Until then no code enters or leaves a level: simulated ranks in turn use this one. The end
    leaves the level, which was entered by one of the ranks. Return None if it is shared already.
    """
    if _SHARED:
        return None
    enter: Any
    leave: Any
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    level = forward_ad._current_level

    def entered() -> int:
        return level

    def left(*, level: int | None = None) -> None:
        pass

    def end() -> None:
        _SHARED.clear()
        forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter, leave
        leave(level=level)

    _SHARED.append(True)
    forward_ad.enter_dual_level, forward_ad.exit_dual_level = entered, left
    return end
