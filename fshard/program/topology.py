"""An alpha-beta model of the wires between devices: latency and bandwidth per mesh axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from fshard.errors import Problem, fail, raise_if
from fshard.mesh import Axes, Mesh, as_axes

__all__ = ["Link", "Topology"]


@dataclass(frozen=True, slots=True)
class Link:
    """One hop: `latency` in seconds, `bandwidth` in bytes per second and direction."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        numbers = _is_number(self.latency) and _is_number(self.bandwidth)
        if not (numbers and self.latency >= 0 and self.bandwidth > 0):
            fail(
                "fs.Link",
                f"{self!r}",
                "latency is at least 0, bandwidth above 0",
                "Link(latency=1e-6, bandwidth=100e9)",
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


NVLINK = Link(latency=0.6e-6, bandwidth=360e9)
INFINIBAND = Link(latency=2.7e-6, bandwidth=45e9)


@dataclass(frozen=True, slots=True)
class Topology:
    """What a byte and a launch cost: an argument of planning and of `prog.cost`, never ambient.

    `inner` is the link inside a node of `node_size` devices, `outer` the one between nodes;
    `links` gives single axes their own. `launch` is the time in seconds to start one
    collective, `memory` the bandwidth of local copies in bytes per second.

    >>> Topology.cluster().link(Mesh(dp=4, tp=8), "tp") == NVLINK
    True
    >>> Topology.cluster().link(Mesh(dp=4, tp=8), ("dp", "tp")) == INFINIBAND
    True
    """

    name: str = "custom"
    inner: Link = NVLINK
    outer: Link = INFINIBAND
    node_size: int | None = None
    links: tuple[tuple[str, Link], ...] = ()
    launch: float = 6e-6
    memory: float = 2e12

    def __post_init__(self) -> None:
        size = self.node_size
        problems = [
            Problem(
                f"{what} {link!r}", "a connection is a Link", "Link(latency=1e-6, bandwidth=100e9)"
            )
            for what, link in (("inner", self.inner), ("outer", self.outer), *self.links)
            if not isinstance(link, Link)
        ]
        if size is not None and (not isinstance(size, int) or size < 1):
            problems.append(
                Problem(
                    f"node_size={size!r}",
                    "a node has at least 1 device",
                    "Topology.cluster(8), or Topology.node() for a single node",
                )
            )
        numbers = _is_number(self.launch) and _is_number(self.memory)
        if not (numbers and self.launch >= 0 and self.memory > 0):
            problems.append(
                Problem(
                    f"launch={self.launch!r}, memory={self.memory!r}",
                    "a launch takes at least 0 seconds, memory's bandwidth is above 0",
                    "launch=6e-6, memory=2e12",
                )
            )
        raise_if("fs.Topology", problems)

    @staticmethod
    def node() -> Topology:
        """A single node: every pair of devices is joined by NVLink (H100, 360 GB/s achieved)."""
        return Topology("node")

    @staticmethod
    def cluster(node_size: int = 8) -> Topology:
        """Nodes of `node_size` devices: NVLink inside, InfiniBand (45 GB/s a device) between."""
        return Topology("cluster", node_size=node_size)

    @staticmethod
    def of(links: Mapping[str, Link], *, launch: float = 6e-6, memory: float = 2e12) -> Topology:
        """One's own: a `Link` per mesh axis; axes not named are NVLink."""
        if not isinstance(links, Mapping):
            fail(
                "fs.Topology.of",
                f"links {links!r}",
                "links are a mapping from mesh axis to Link",
                'Topology.of({"x": Link(latency=1e-6, bandwidth=100e9)})',
            )
        return Topology("custom", links=tuple(sorted(links.items())), launch=launch, memory=memory)

    def link(self, mesh: Mesh, axes: Axes) -> Link:
        """The link that a collective over `axes` is as slow as."""
        return _link(self, mesh, as_axes(axes))


@lru_cache(maxsize=4096)
def _link(topology: Topology, mesh: Mesh, axes: tuple[str, ...]) -> Link:
    own = dict(topology.links)
    each = [own.get(axis) or _default(topology, mesh, axis) for axis in axes]
    if not each:
        return topology.inner
    return Link(max(link.latency for link in each), min(link.bandwidth for link in each))


def _default(topology: Topology, mesh: Mesh, axis: str) -> Link:
    nodes = topology.node_size
    if nodes is None or mesh.shape[axis] == 1:
        return topology.inner
    if isinstance(mesh.devices, range):
        # Row-major ranks: the groups of an axis fill blocks of `span` ranks in a row, and a
        # group leaves its node exactly where its block does. Where blocks begin repeats.
        span = math.prod(mesh.sizes[mesh.axes.index(axis) :])
        blocks = min(mesh.size // span, nodes // math.gcd(span, nodes))
        starts = (mesh.devices.start + block * span for block in range(blocks))
        inside = span <= nodes and all(start % nodes + span <= nodes for start in starts)
    else:
        inside = all(len({rank // nodes for rank in group}) == 1 for group in mesh.groups(axis))
    return topology.inner if inside else topology.outer
