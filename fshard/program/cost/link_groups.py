"""Effective link of a collective over mesh axes: of their groups on a switch or on a torus.

A collective is costed by one latency and one bandwidth. On a switch these are a link's. On a torus
they depend on the collective: gathers and reductions run along several dims and in both directions
at once, an all-to-all crosses every link between its ends. Formulas are those of Chan et al. 2007
for bidirectional rings, and of "How to Scale Your Model" (Austin et al. 2025, part 3).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, NoReturn

from fshard._util.errors import fail
from fshard.layout.mesh import Mesh
from fshard.program.cost.links import Link, Partners, Torus, slowest
from fshard.program.cost.traffic import gather_rounds


class Extent(NamedTuple):
    """Part of a torus dim that a group of ranks takes: every `stride`-th of some devices in a row.

    Attributes:
        ranks: how many ranks of the group are along the dim.
        stride: distance of two of them.
        ring: True if they are a ring.
    """

    ranks: int
    stride: int
    ring: bool


# -- switches -----------------------------------------------------------------------------


def switch_link(
    inner: Link, outer: Link, node_size: int | None, mesh: Mesh, axes: tuple[str, ...],
    exchange: bool,
) -> Link:  # fmt: skip
    """Return the effective link of nodes with a switch inside, along `axes` of several devices."""
    inside = {stays_inside(mesh, axis, node_size) for axis in axes}
    link = slowest([inner if flag else outer for flag in inside])
    if exchange or node_size is None or inside == {True}:
        return link
    cards = ranks_per_node(mesh, axes, node_size)
    return Link(link.latency, min(inner.bandwidth, cards * outer.bandwidth)) if cards > 1 else link


def stays_inside(mesh: Mesh, axis: str, node_size: int | None) -> bool:
    """Return True if every group along `axis` is inside a node."""
    if node_size is None or mesh.shape[axis] == 1:
        return True
    if not isinstance(mesh.devices, range):
        return all(len({rank // node_size for rank in group}) == 1 for group in mesh.groups(axis))
    # Row-major ranks: the groups of an axis fill blocks of `span` ranks in a row, and a group
    # leaves its node exactly where its block does. Where blocks begin repeats.
    span = math.prod(mesh.sizes[mesh.axes.index(axis) :])
    blocks = min(mesh.size // span, node_size // math.gcd(span, node_size))
    starts = (mesh.devices.start + block * span for block in range(blocks))
    return span <= node_size and all(start % node_size + span <= node_size for start in starts)


def ranks_per_node(mesh: Mesh, axes: tuple[str, ...], node_size: int) -> int:
    """Return how many ranks of a group along `axes` share a node: 1 unless all have as many.

    They reach other nodes over as many network cards, as the rings of NCCL do.
    """
    strides = device_strides(mesh)
    if strides is None or mesh.ranks[0] % min(node_size, mesh.size):
        return 1
    inside = 1
    for axis in axes:
        stride, count = strides[axis], mesh.shape[axis]
        if stride >= node_size:
            continue
        if node_size % stride or max(stride * count, node_size) % min(stride * count, node_size):
            return 1
        inside *= min(count, node_size // stride)
    return inside


# -- tori ---------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def device_strides(mesh: Mesh) -> dict[str, int] | None:
    """Return the difference of ranks one apart along each axis, None if it is not constant."""
    strides, devices, step = {}, mesh.devices, 1
    for axis, size in zip(reversed(mesh.axes), reversed(mesh.sizes), strict=True):
        strides[axis] = abs(devices[step] - devices[0]) if size > 1 else 1
        step *= size
    if isinstance(devices, range):
        return strides
    expected = [min(devices)]
    for axis, size in mesh.shape.items():
        expected = [start + strides[axis] * i for start in expected for i in range(size)]
    return strides if expected == list(devices) else None


def torus_extents(torus: Torus, mesh: Mesh, axes: tuple[str, ...]) -> list[Extent]:
    """Return the parts of the dims of a torus that each group along `axes` takes.

    Raises `ShardingError` if an axis does not fill complete parts of dims.
    """
    strides = device_strides(mesh)
    counts, steps, unit = [1] * len(torus.sizes), list(torus.sizes), torus.size
    for axis in axes:
        if strides is None:
            _fail_misfit(torus, mesh, axis)
        low, end = strides[axis], 1
        high = low * mesh.shape[axis]
        for dim in reversed(range(len(torus.sizes))):
            start, end = end, end * torus.sizes[dim]
            below, above = max(low, start), min(high, end)
            if below >= above:
                continue
            if below % start or above % below or end % above:
                _fail_misfit(torus, mesh, axis)
            counts[dim] *= above // below
            steps[dim] = min(steps[dim], below // start)
        if low < unit < high and high % unit:
            _fail_misfit(torus, mesh, axis)
    assert isinstance(torus.wraps, tuple)
    rows = zip(counts, steps, torus.sizes, torus.wraps, strict=True)
    return [
        Extent(count, step, wraps and count > 2 and count * step == size)
        for count, step, size, wraps in rows
        if count > 1
    ]


def _fail_misfit(torus: Torus, mesh: Mesh, axis: str) -> NoReturn:
    grid = " x ".join(map(str, torus.sizes))
    fail("fs.Topology.link", f"axis {axis!r} of {mesh} on a torus of {grid} devices",
         "an axis must fill complete dims of the torus, or an equal part of one, from the last dim "
         "to the first",
         f"axes of the sizes {grid}, in this order, or devices= in the torus's order")  # fmt: skip


def torus_link(
    torus: Torus, outer: Link, mesh: Mesh, axes: tuple[str, ...], exchange: bool,
    partners: Partners | None,
) -> Link:  # fmt: skip
    """Return the effective link of nodes that are tori, along `axes`."""
    extents = torus_extents(torus, mesh, axes)
    if partners is not None:
        own = [extent for axis in axes for extent in torus_extents(torus, mesh, (axis,))]
        if len(extents) == len(own) and [e.ranks for e in own] == [mesh.shape[a] for a in axes]:
            return shift_link(torus.link, own, partners)
    effective = exchange_link if exchange else gather_link
    links = [effective(torus.link, extents)] if extents else []
    if not all(stays_inside(mesh, axis, torus.size) for axis in axes):
        cards = 1 if exchange else math.prod(extent.ranks for extent in extents)
        links.append(Link(outer.latency, cards * outer.bandwidth))
    if not links:
        return torus.link
    return Link(sum(link.latency for link in links), min(link.bandwidth for link in links))


def gather_link(link: Link, extents: list[Extent]) -> Link:
    """Return the effective link of gathers and reductions over parts of a torus.

    All dims are used at once, rings in both directions: bandwidths add up. Values from the
    farthest rank cross the links between.

    >>> gather_link(Link(1e-6, 45e9), [Extent(16, 1, True), Extent(4, 1, False)])
    Link(latency=1.8333333333333333e-06, bandwidth=135000000000.0)
    """
    n = math.prod(extent.ranks for extent in extents)
    bandwidth = sum((2 if e.ring else 1) * link.bandwidth / e.stride for e in extents)
    return Link(_farthest(extents) * link.latency / gather_rounds(n)[1], bandwidth)


def exchange_link(link: Link, extents: list[Extent]) -> Link:
    """Return the effective link of an all-to-all over parts of a torus.

    A message crosses ranks / 4 links of a ring on average, and the middle of a row carries half of
    the messages of half of its ranks; an odd number n counts as n - 1 / n. The dim with the most
    crossings decides.

    >>> exchange_link(Link(1e-6, 45e9), [Extent(16, 1, True)])
    Link(latency=8e-06, bandwidth=21093750000.0)
    """
    n = math.prod(extent.ranks for extent in extents)
    pace = min(
        (8 if e.ring else 4) * link.bandwidth / ((e.ranks - e.ranks % 2 / e.ranks) * e.stride)
        for e in extents
    )
    return Link(_farthest(extents) * link.latency, pace * (n - 1) / n)


def shift_link(link: Link, extents: Sequence[Extent], partners: Partners) -> Link:
    """Return the effective link of messages to few ranks along dims of a torus, one for each axis.

    All ranks send as far at once, dim by dim, so that the links of a direction carry every message
    as often as it crosses links there. In a row without a ring a message to the other end crosses
    all links, against the others.

    Args:
        link: the link between neighbours.
        extents: the part of a dim that each axis takes.
        partners: the messages of a rank.

    >>> ring = Extent(16, 1, True)
    >>> shift_link(Link(1e-6, 45e9), [ring], Partners((((1,), 8),), (((15,), 8),)))
    Link(latency=1e-06, bandwidth=45000000000.0)
    """
    sends, receives = partners
    backward = [(tuple(-x for x in distances), size) for distances, size in receives]
    loads: defaultdict[tuple[int, bool], dict[tuple[int, ...], int]] = defaultdict(dict)
    farthest = 0
    for index, (distances, size) in enumerate((*sends, *backward)):
        near = tuple((x + e.ranks // 2) % e.ranks - e.ranks // 2
                     for x, e in zip(distances, extents, strict=True))  # fmt: skip
        rows = [*zip(near, distances, extents, strict=True)]
        farthest = max(farthest, sum(abs(x if e.ring else far) * e.stride for x, far, e in rows))
        for dim, (x, far, extent) in enumerate(rows):
            load = abs(x) * extent.stride * size
            if index < len(sends) or not sends:
                loads[dim, x > 0][near] = load
            if x != far and not extent.ring:
                loads[dim, x < 0][distances] = load
    moved = max(sum(size for _, size in messages) for messages in partners)
    busiest = max(sum(load.values()) for load in loads.values())
    return Link(farthest * link.latency, link.bandwidth * moved / busiest)


def _farthest(extents: list[Extent]) -> int:
    """Return the links between the two ranks that are farthest apart."""
    return sum((e.ranks // 2 if e.ring else e.ranks - 1) * e.stride for e in extents)
