"""Time of one role on one mesh axis: state changes, computation and pending reductions.

The search for a strategy looks at many layouts and plans none of them. It costs the state change of
an operand as the one collective that makes it on that axis, with the formulas that programs are
costed by. Only the programs of the chosen strategy are planned, and their cost is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from fshard._util.cache import CACHE_SIZE
from fshard._util.dtypes import multiplication_flops
from fshard.layout.mesh import Axes, Mesh
from fshard.ops.core.call import Meta, OpCall
from fshard.ops.core.rule import Rule
from fshard.ops.strategy.axis_roles import AxisState, Role
from fshard.program.cost.links import Link
from fshard.program.cost.model import collective_time, copy_time
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import (
    Traffic,
    all_gather_traffic,
    all_reduce_traffic,
    all_to_all_traffic,
)


class AxisLinks(NamedTuple):
    """Effective links of mesh axes, by the kind of collective."""

    gather: Link
    exchange: Link


def axis_links(topology: Topology, mesh: Mesh, axes: Axes) -> AxisLinks:
    """Return the links of collectives along `axes`."""
    return AxisLinks(topology.link(mesh, axes), topology.link(mesh, axes, exchange=True))


class ChangeCost(NamedTuple):
    """Cost of a state change.

    Attributes:
        time: seconds forward.
        sends: True if it sends.
        back: seconds of its transpose.
        startup: seconds of `time` that do not depend on the bytes.
    """

    time: float
    sends: bool
    back: float
    startup: float = 0.0


FREE = ChangeCost(0.0, False, 0.0)


@lru_cache(maxsize=CACHE_SIZE)
def change_cost(
    topology: Topology, links: AxisLinks, n: int, src: AxisState, dst: AxisState, local: int,
    item: int,
) -> ChangeCost:  # fmt: skip
    """Return the cost to change one tensor's state on one axis.

    Args:
        topology: the topology that the collectives run on.
        links: the links of the axis.
        n: number of devices on the axis.
        src: the state before.
        dst: the state after.
        local: bytes of the tensor on a rank before the change.
        item: bytes of one element.
    """
    if src == dst or n == 1 or dst.name == "any":
        return FREE

    def time(traffic: Traffic, link: Link = links.gather) -> float:
        return collective_time(topology, link, traffic, local)

    def collective(traffic: Traffic, back: float, link: Link = links.gather) -> ChangeCost:
        startup = collective_time(topology, link, traffic._replace(sent=0, received=0))
        return ChangeCost(time(traffic, link), True, back, startup)

    back = 0.0
    if (src.name, dst.name) == ("invariant", "reduced"):
        back = time(all_reduce_traffic(n, local, item))
    elif (src.name, dst.name) == ("sharded", "reduced"):
        back = time(all_gather_traffic(n, local))
    match src.name, dst.name:
        case "sharded", "sharded":
            traffic = all_to_all_traffic(n, local)
            return collective(traffic, time(traffic, links.exchange), links.exchange)
        case "sharded", "invariant" | "reduced":
            return collective(all_gather_traffic(n, local), back)
        case "unreduced", "sharded":
            return collective(all_to_all_traffic(n, local), 0.0)
        case "unreduced", _:
            return collective(all_reduce_traffic(n, local, item), 0.0)
        case _, "unreduced":
            return ChangeCost(copy_time(topology, local), False, back)
    return ChangeCost(0.0, False, back)


def gather_time(topology: Topology, link: Link, n: int, local: int) -> float:
    """Return the seconds to gather shards of `local` bytes on one axis."""
    return collective_time(topology, link, all_gather_traffic(n, local), local)


def pending_reduction_time(
    topology: Topology, link: Link, n: int, state: AxisState, local: int, item: int, *,
    created: bool,
) -> float:  # fmt: skip
    """Return the seconds to reduce a result later that stays unreduced, 0 for other states.

    If sharding a factor `created` the partial sums, they cost a reduce-scatter, the least that
    any other factor would have cost too. If an operand had them already, they could be reduced now,
    and cost an all-reduce.
    """
    if state.name != "unreduced" or n == 1:
        return 0.0
    traffic = all_to_all_traffic(n, local) if created else all_reduce_traffic(n, local, item)
    return collective_time(topology, link, traffic, local)


def new_sharding_time(
    topology: Topology, links: AxisLinks, n: int, states: Sequence[AxisState], role: Role,
    local: int,
) -> float:  # fmt: skip
    """Return the seconds to leave a sharding later that no operand had before the role.

    An operand that was unreduced is gathered then, one that was sharded elsewhere is sharded there
    again. Otherwise a reduce-scatter would pass for half of an all-reduce. Results that are larger
    than the operands cost no more than these: replicated, they would be larger on every rank.

    Args:
        topology: the topology that the collectives run on.
        links: the links of the axis.
        n: number of devices on the axis.
        states: the states of the operands on the axis as given.
        role: the role of the axis.
        local: bytes on a rank, unsharded on this axis, of all results or of all operands,
            whichever are fewer.
    """
    if role.factor is None or n == 1 or any(
        src.name == "sharded" and src == dst
        for src, dst in zip(states, role.operands, strict=True)
    ):  # fmt: skip
        return 0.0
    if any(state.name == "unreduced" for state in states):
        return collective_time(topology, links.gather, all_gather_traffic(n, local // n), local)
    return collective_time(topology, links.exchange, all_to_all_traffic(n, local // n), local)


class ComputeTime(NamedTuple):
    """Seconds of an unsharded call on one device.

    Attributes:
        products: seconds of its multiplications, 0 if it is not a product.
        tensors: seconds to read every operand, and to write every result.
    """

    products: float
    tensors: tuple[float, ...]

    @property
    def total(self) -> float:
        """The longer of both."""
        return max(self.products, sum(self.tensors))


def compute_time(
    topology: Topology, rule: Rule, call: OpCall, sizes: Mapping[str, int]
) -> ComputeTime:
    """Return the seconds of the unsharded call on one device.

    Every combination of factors is one multiplication, and an addition, where several tensors are
    contracted.
    """
    products = 0.0
    metas = (*call.operands, *call.results)
    tensors = tuple(0.0 if x is None else nbytes(x) / topology.memory for x in metas)
    if contracts(rule, call, sizes):
        # A window and the factor that it reads are one loop, of the shorter one's length.
        loops = dict(sizes)
        for window in rule.windows.values():
            longer = max((window.of, window.name), key=lambda name: sizes.get(name, 0))
            loops.pop(longer, None)
        dtype = next(meta.dtype for meta in call.operands if meta is not None)
        flops = multiplication_flops(dtype) * math.prod(loops.values())
        products = flops / topology.flops_per_second(dtype)
    return ComputeTime(products, tensors)


def contracts(rule: Rule, call: OpCall, factors: Iterable[str]) -> bool:
    """Return True for products: several tensors are contracted over some of the factors."""
    kinds = ("pass-through", "unsharded", "permuted")
    return len(call.operands) > 1 and any(rule.kind(f) not in kinds for f in factors)


def nbytes(meta: Meta) -> int:
    """Return the bytes of an unsharded tensor."""
    return math.prod(meta.shape) * meta.dtype.itemsize
