"""An alpha-beta model of the wires between devices: latency and bandwidth per mesh axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from fshard.errors import Problem, raise_if
from fshard.mesh import Axes, Mesh, as_axes

__all__ = ["Link", "Topology"]


@dataclass(frozen=True, slots=True)
class Link:
    """One hop: `latency` in seconds, `bandwidth` in bytes per second and direction."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise_if(
                "fs.Link",
                [
                    Problem(
                        f"{self!r}",
                        "latency is at least 0, bandwidth above 0",
                        "Link(latency=1e-6, bandwidth=100e9)",
                    )
                ],
            )


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
    if isinstance(mesh.devices, range) and mesh.devices.start % nodes == 0:
        # Row-major ranks: the axis spans stride * size of them, known without a table.
        place = mesh.axes.index(axis)
        span = 1
        for size in mesh.sizes[place:]:
            span *= size
        inside = nodes % span == 0
    else:
        inside = all(len({rank // nodes for rank in group}) == 1 for group in mesh.groups(axis))
    return topology.inner if inside else topology.outer
