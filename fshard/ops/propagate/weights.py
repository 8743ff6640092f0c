"""What a role costs on one axis: the closed forms of single collectives, local work, leftovers.

Choosing looks at many layouts and plans none of them: an operand's way into a role is weighed as
the one collective that changes its state on that axis, by the same formulas as programs are. The
programs of what is chosen are planned once, and their cost is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from fshard.ops.core.call import Meta, OpCall
from fshard.ops.core.rule import Rule
from fshard.ops.strategy.axis_roles import Role, AxisState
from fshard.program.cost.model import Traffic, all_reduced, gathered, seconds, swapped
from fshard.program.cost.topology import Link, Topology

__all__ = ["Weight", "compute_time", "leftover", "moving", "nbytes", "undone"]


class Weight(NamedTuple):
    """Seconds forward, whether anything is sent, and seconds of the gradient's way back."""

    time: float
    sends: bool
    back: float


FREE = Weight(0.0, False, 0.0)


@lru_cache(maxsize=65536)
def moving(
    topology: Topology, link: Link, n: int, src: AxisState, dst: AxisState, local: int, item: int
) -> Weight:
    """The change of one tensor's state on an axis of `n`, of which a rank holds `local` bytes."""
    if src == dst or n == 1 or dst.name == "any":
        return FREE

    def way(moved: Traffic) -> float:
        return seconds(topology, link, moved, local)

    def reducing(size: int) -> float:
        return way(all_reduced(n, size, item))

    back = 0.0
    if (src.name, dst.name) == ("invariant", "reduced"):
        back = reducing(local)
    elif src.name == "sharded" and dst.name in ("reduced", "sharded"):
        back = way(gathered(n, local) if dst.name == "reduced" else swapped(n, local))
    match src.name, dst.name:
        case "sharded", "sharded":
            return Weight(way(swapped(n, local)), True, back)
        case "sharded", "invariant" | "reduced":
            return Weight(way(gathered(n, local)), True, back)
        case "unreduced", "sharded":
            return Weight(way(swapped(n, local)), True, 0.0)
        case "unreduced", _:
            return Weight(reducing(local), True, 0.0)
        case _, "unreduced":
            return Weight(local / topology.memory, False, back)
    return Weight(0.0, False, back)


def leftover(
    topology: Topology, link: Link, n: int, state: AxisState, local: int, item: int, *, made: bool
) -> float:
    """What it takes later to reduce a result that stays unreduced.

    One that a cut factor has `made` so takes a reduce-scatter at the least, and would take as
    much had another factor been cut; one that was unreduced before could be reduced now, and is
    weighed as that.
    """
    if state.name != "unreduced" or n == 1:
        return 0.0
    moved = swapped(n, local) if made else all_reduced(n, local, item)
    return seconds(topology, link, moved, local)


def undone(
    topology: Topology, link: Link, n: int, here: Sequence[AxisState], role: Role, local: int
) -> float:
    """What it takes later to leave a cut that no operand had: it is paid for where it is made.

    What was unreduced is gathered then, and what was cut elsewhere is cut there again: a
    reduce-scatter is not taken for half of an all-reduce.
    """
    if role.factor is None or n == 1 or any(
        src.name == "sharded" and src == dst
        for src, dst in zip(here, role.operands, strict=True)
    ):  # fmt: skip
        return 0.0
    unreduced = any(state.name == "unreduced" for state in here)
    moved = gathered(n, local // n) if unreduced else swapped(n, local // n)
    return seconds(topology, link, moved, local)


FLOPS = 400e12
"""Of one device, in products of bfloat16 or float32 on tensor cores: an H100's, as achieved."""


def compute_time(topology: Topology, rule: Rule, call: OpCall, sizes: Mapping[str, int]) -> float:
    """Seconds of the whole call on one device: memory's, or multiplications' where there are more.

    Every combination of factors is one multiplication where several tensors are contracted.
    """
    touched = sum(nbytes(each) for each in (*call.operands, *call.results) if each is not None)
    time = touched / topology.memory
    contracts = len(call.operands) > 1 and any(
        rule.kind(f) not in ("pass-through", "unsharded", "permuted") for f in sizes
    )
    if contracts:
        time = max(time, 2 * math.prod(sizes.values()) / FLOPS)
    return time


def nbytes(meta: Meta) -> int:
    """Bytes of a whole tensor."""
    return math.prod(meta.shape) * meta.dtype.itemsize
