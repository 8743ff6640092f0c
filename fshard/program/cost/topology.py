"""Machine model: latency and bandwidth of the links between devices, per mesh axis.

Presets assume that collectives achieve about 80 % of the promised bandwidth on NVLink and of
memory, and 90 % on networks, which have less protocol overhead. Latencies and launch times are
NCCL's own (`src/graph/tuning.cc`, ring, LL: 0.6 us a hop on NVLink, 2.7 us on a network, 6.6 us at
the start). `fs.calibrate` measures a machine instead.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from fshard._torch.dynamo import graph_constant
from fshard._util.errors import Problem, ShardingError, fail, raise_if
from fshard._util.text import rate_text, time_text
from fshard.layout.mesh import Axes, Mesh, as_axes, as_mesh


@dataclass(frozen=True, slots=True)
class Link:
    """Link between two devices.

    Args:
        latency: Seconds, at least 0.
        bandwidth: Bytes per second in each direction, above 0.

    Raises:
        ShardingError: If a value is out of range or not a number.

    >>> import fshard as fs
    >>> fs.Link(latency=1e-6, bandwidth=100e9)
    Link(latency=1e-06, bandwidth=100000000000.0)
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        valid = _is_number(self.latency) and _is_number(self.bandwidth)
        if not (valid and self.latency >= 0 and self.bandwidth > 0):
            fail("fs.Link", f"{self!r}", "latency must be at least 0 and bandwidth above 0",
                 "Link(latency=1e-6, bandwidth=100e9)")  # fmt: skip


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


NVLINK = Link(latency=0.6e-6, bandwidth=360e9)
INFINIBAND = Link(latency=2.7e-6, bandwidth=45e9)


@graph_constant
@dataclass(frozen=True, slots=True, weakref_slot=True)
class Topology:
    """Machine that programs are planned and costed for: seconds per byte, message and launch.

    A collective is as slow as the slowest link among its axes, for all of its bytes: over 2 nodes
    of 8 it runs at the speed of the network. NCCL's rings cross the network on some hops only,
    if each GPU has a network card, so that such a collective may be much faster than modelled, and
    gain less from being split by nodes. To use both links, plans for a cluster split axes where
    nodes end (`fs.Remesh`): `x_0` is the part of an axis `x` between nodes, `x_1` the part inside.

    Args:
        name: The title in printed tables.
        inner: The link inside a node.
        outer: The link between nodes.
        node_size: Devices of a node; None is a single node of any size.
        links: Pairs (mesh axis, link) of axes that have their own.
        launch: Seconds to start a collective.
        memory: Bandwidth of local copies, in bytes per second.
        message: Seconds to post one of several messages that are sent together.

    Raises:
        ShardingError: If a value is out of range or of another type.

    >>> import fshard as fs
    >>> print(fs.Topology.dgx_h100())
    DGX H100, nodes of 8
      inner    0.60 µs, 360 GB/s
      outer    2.70 µs, 45.0 GB/s
      launch   6.60 µs
      message  0.15 µs
      memory   2.68 TB/s
    """

    name: str = "custom"
    inner: Link = NVLINK
    outer: Link = INFINIBAND
    node_size: int | None = None
    links: tuple[tuple[str, Link], ...] = ()
    launch: float = 6e-6
    memory: float = 2e12
    message: float = 0.15e-6

    def __post_init__(self) -> None:
        size = self.node_size
        rule, fix = "a connection must be a Link", "Link(latency=1e-6, bandwidth=100e9)"
        problems = [
            Problem(f"{name} {link!r}", rule, fix)
            for name, link in (("inner", self.inner), ("outer", self.outer), *self.links)
            if not isinstance(link, Link)
        ]
        if not isinstance(self.name, str):
            problems.append(Problem(f"name={self.name!r}", "name must be a str", "name='ours'"))
        is_int = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not (is_int and size >= 1):
            rule = "a node must have at least 1 device"
            fix = "Topology.cluster(8), or Topology.node() for a single node"
            problems.append(Problem(f"node_size={size!r}", rule, fix))
        problems += [
            Problem(f"{name}={value!r}", "launch and message must be at least 0 seconds", fix)
            for name, value, fix in (
                ("launch", self.launch, "launch=6e-6"),
                ("message", self.message, "message=1.5e-7"),
            )
            if not (_is_number(value) and value >= 0)
        ]
        if not (_is_number(self.memory) and self.memory > 0):
            rule = "memory must be above 0 bytes per second"
            problems.append(Problem(f"memory={self.memory!r}", rule, "memory=2e12"))
        raise_if("fs.Topology", problems)

    @staticmethod
    def node() -> Topology:
        """Return a single node of any size, with NVLink between all devices (H100, 360 GB/s).

        Launch time and memory are round values for such GPUs, 6 us and 2 TB/s; `dgx_h100` has
        the values of one machine, 6.6 us and 2.68 TB/s.

        >>> import fshard as fs
        >>> fs.Topology.node().inner.bandwidth
        360000000000.0
        """
        return Topology("node")

    @staticmethod
    def cluster(node_size: int = 8) -> Topology:
        """Return nodes with NVLink inside and InfiniBand (45 GB/s per device) between them.

        Links are those of `dgx_h100`, launch time and memory those of `node`.

        Args:
            node_size: Devices of a node, at least 1.

        >>> import fshard as fs
        >>> mesh = fs.Mesh(dp=4, tp=8)
        >>> [fs.Topology.cluster().link(mesh, axis).bandwidth / 1e9 for axis in mesh.axes]
        [45.0, 360.0]
        """
        return Topology("cluster", node_size=node_size)

    @staticmethod
    def of(
        links: Mapping[str, Link],
        *,
        launch: float = 6e-6,
        memory: float = 2e12,
        message: float = 0.15e-6,
    ) -> Topology:
        """Return a machine with a `Link` for each mesh axis.

        Args:
            links: From mesh axis to its link; the default for other axes is NVLink. A name that is
                no axis of a mesh is an error if the mesh has an axis without a link.
            launch: Seconds to start a collective.
            memory: Bandwidth of local copies, in bytes per second.
            message: Seconds to post one of several messages that are sent together.

        Raises:
            ShardingError: If a value is out of range or of another type.

        >>> import fshard as fs
        >>> slow = fs.Link(latency=20e-6, bandwidth=1e9)
        >>> fs.Topology.of({"dp": slow}).link(fs.Mesh(dp=2, tp=2), "dp") == slow
        True
        """
        if not isinstance(links, Mapping):
            fail("fs.Topology.of", f"links {links!r}",
                 "links must be a mapping from mesh axis to Link",
                 'Topology.of({"x": Link(latency=1e-6, bandwidth=100e9)})')  # fmt: skip
        items = tuple(sorted(links.items()))
        return Topology("custom", links=items, launch=launch, memory=memory, message=message)

    # -- public machines --------------------------------------------------------------

    @staticmethod
    def dgx_a100() -> Topology:
        """Return DGX A100s: nodes of 8 A100 SXM (80 GB), with InfiniBand HDR between them.

        From NVIDIA's data sheet: NVLink 3 with 600 GB/s per GPU (300 each way), a ConnectX-6 with
        200 Gb/s per GPU, 2,039 GB/s of HBM2e.

        >>> import fshard as fs
        >>> fs.Topology.dgx_a100().title
        'DGX A100, nodes of 8'
        """
        return _machine("DGX A100", 8, nvlink=300, network=200, memory=2039)

    @staticmethod
    def dgx_h100() -> Topology:
        """Return DGX H100s: nodes of 8 H100 SXM, with InfiniBand NDR between them.

        From NVIDIA's data sheet: NVLink 4 with 900 GB/s per GPU (450 each way), a ConnectX-7 with
        400 Gb/s per GPU, 3.35 TB/s of HBM3.

        >>> import fshard as fs
        >>> fs.Topology.dgx_h100().link(fs.Mesh(dp=4, tp=8), "tp")
        Link(latency=6e-07, bandwidth=360000000000.0)
        """
        return _machine("DGX H100", 8, nvlink=450, network=400, memory=3350)

    @staticmethod
    def gb200_nvl72() -> Topology:
        """Return GB200 NVL72 racks: 72 GPUs on one NVLink fabric, InfiniBand NDR between racks.

        From NVIDIA's data sheet: NVLink 5 with 1.8 TB/s per GPU (900 GB/s each way), a ConnectX-7
        with 400 Gb/s per GPU, 576 TB/s of HBM3e per rack (8 per GPU).

        >>> import fshard as fs
        >>> fs.Topology.gb200_nvl72().title
        'GB200 NVL72, nodes of 72'
        """
        return _machine("GB200 NVL72", 72, nvlink=900, network=400, memory=8000)

    @staticmethod
    def cpu_host(processes: int = 8) -> Topology:
        """Return hosts that run gloo, over loopback inside and 25 Gb Ethernet between them.

        Ethernet is after IEEE 802.3by, and a process has one channel of DDR4-3200 (JEDEC JESD79-4:
        25.6 GB/s). Loopback and latencies are the order of magnitude that TCP achieves between two
        processes on a server; measure with `fs.calibrate` where they matter.

        Args:
            processes: Processes on a host, at least 1.

        >>> import fshard as fs
        >>> fs.Topology.cpu_host(4).title
        'CPU host, nodes of 4'
        """
        return Topology(
            "CPU host",
            inner=Link(latency=20e-6, bandwidth=2e9),
            outer=Link(latency=50e-6, bandwidth=0.9 * 25e9 / 8),
            node_size=processes,
            launch=50e-6,
            memory=0.8 * 25.6e9,
            message=10e-6,
        )

    # -- text -------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """Name and node size, such as `DGX H100, nodes of 8`."""
        return self.name if self.node_size is None else f"{self.name}, nodes of {self.node_size}"

    def __str__(self) -> str:
        links = [("inner", self.inner)]
        links += [("outer", self.outer)] if self.node_size is not None else []
        rows = [
            (name, f"{time_text(link.latency)}, {rate_text(link.bandwidth)}")
            for name, link in (*links, *self.links)
        ]
        rows += [("launch", time_text(self.launch)), ("message", time_text(self.message))]
        rows += [("memory", rate_text(self.memory))]
        width = max(len(name) for name, _ in rows)
        return "\n".join([self.title, *(f"  {name:<{width}}  {text}" for name, text in rows)])

    # -- links ------------------------------------------------------------------------

    def link(self, mesh: Mesh, axes: Axes) -> Link:
        """Return the link that a collective over `axes` is as slow as.

        Args:
            mesh: The mesh, whose devices are numbered node by node.
            axes: Mesh axis or axes. Parts of a split axis, `x_0` and `x_1`, have the link of `x`
                unless they have one of their own.

        Returns:
            The slowest of the links, by latency and by bandwidth.

        >>> import fshard as fs
        >>> mesh = fs.Mesh(dp=4, tp=8)
        >>> fs.Topology.cluster().link(mesh, ("dp", "tp")) == fs.Topology.cluster().outer
        True
        """
        return _link(self, as_mesh(mesh, "fs.Topology.link"), as_axes(axes))

    def between(self, mesh: Mesh, other: Mesh) -> Link:
        """Return the link that an exchange between the ranks of two meshes is as slow as.

        Args:
            mesh: One mesh.
            other: The other mesh; devices are numbered node by node.

        >>> import fshard as fs
        >>> cluster, mesh = fs.Topology.cluster(), fs.Mesh(x=4)
        >>> cluster.between(mesh, fs.Mesh(y=4, devices=range(4, 8))) == cluster.inner
        True
        >>> cluster.between(mesh, fs.Mesh(y=8, devices=range(8, 16))) == cluster.outer
        True
        """
        where = "fs.Topology.between"
        return _between(self, as_mesh(mesh, where), as_mesh(other, where))

    # -- files ------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the topology as JSON, which `load` reads.

        Args:
            path: The file to write.

        >>> import fshard as fs
        >>> fs.Topology.cluster().save("/dev/null")
        """
        text = json.dumps(
            {**asdict(self), "links": {a: asdict(k) for a, k in self.links}}, indent=2
        )
        Path(_path("fs.Topology.save", path)).write_text(text + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Topology:
        """Read a topology that `save` has written.

        Args:
            path: The file to read.

        Raises:
            ShardingError: If the file cannot be read or holds something else.

        >>> import fshard as fs
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     fs.Topology.cluster().save(file.name)
        ...     fs.Topology.load(file.name) == fs.Topology.cluster()
        True
        """
        where = "fs.Topology.load"
        file = repr(os.fspath(_path(where, path)))
        try:
            read = json.loads(Path(path).read_text())
        except OSError as error:
            fail(where, f"{file}: {error.strerror}", "the file must be readable",
                 "topology.save(path) writes one, fs.calibrate(mesh, save=path) too")  # fmt: skip
        except (ValueError, RecursionError):
            fail(where, file, "the file must hold JSON, as Topology.save writes it", REWRITE)
        raise_if(where, problems := _key_problems(read, file))
        read_links = read["links"] if isinstance(read["links"], dict) else {"links": read["links"]}
        links = tuple(_read_links(read_links, file, problems).items())
        ends = dict.fromkeys(ENDS, NVLINK)
        ends |= _read_links({name: read[name] for name in ENDS}, file, problems)
        values = {**read, **ends, "links": links}
        topology = _build(f"{file} with", lambda: Topology(**values), problems)
        raise_if(where, problems)
        assert topology is not None
        return topology


def _machine(name: str, size: int, *, nvlink: float, network: float, memory: float) -> Topology:
    """Return a preset from promised bandwidths: NVLink in GB/s each way, Gb/s, memory in GB/s."""
    return Topology(
        name,
        inner=Link(NVLINK.latency, 0.8e9 * nvlink),
        outer=Link(INFINIBAND.latency, 0.9e9 * network / 8),
        node_size=size,
        launch=6.6e-6,
        memory=0.8e9 * memory,
    )


T = TypeVar("T")
ENDS = ("inner", "outer")
REWRITE = "write it again with topology.save(path)"


def _path(where: str, path: object) -> str | os.PathLike[str]:
    if not isinstance(path, str | os.PathLike):
        fail(where, f"path {path!r}", "path must be a str or a Path", "'topology.json'")
    return path


def _key_problems(read: Any, file: str) -> list[Problem]:
    """Return a problem if the keys of a file are not those of a topology."""
    names = {field.name for field in fields(Topology)}
    rule = f"the keys must be {', '.join(sorted(names))}"
    if not isinstance(read, dict):
        return [Problem(f"{file} with no mapping", rule, REWRITE)]
    differences = ("without", names - {*read}), ("with", {*read} - names)
    given = " and ".join(f"{word} {', '.join(sorted(keys))}" for word, keys in differences if keys)
    return [Problem(f"{file} {given}", rule, REWRITE)] if given else []


def _read_links(read: dict[str, Any], file: str, problems: list[Problem]) -> dict[str, Link]:
    """Return the links of a file that are valid, and add to `problems` for the others."""
    keys = {field.name for field in fields(Link)}
    links = {}
    for name, value in read.items():
        if not isinstance(value, dict) or set(value) != keys:
            rule = "a link must have a latency and a bandwidth"
            problems.append(Problem(f"{file} with {name} {value!r}", rule, REWRITE))
        elif (link := _build(f"{file} with {name}", partial(Link, **value), problems)) is not None:
            links[name] = link
    return links


def _build(given: str, make: Callable[[], T], problems: list[Problem]) -> T | None:
    """Return `make()`, or add its problems to `problems` and return None."""
    try:
        return make()
    except ShardingError as error:
        problems += [Problem(f"{given} {p.given}", p.rule, REWRITE) for p in error.problems]
    return None


@lru_cache(maxsize=4096)
def _link(topology: Topology, mesh: Mesh, axes: tuple[str, ...]) -> Link:
    links = dict(topology.links)
    slowest = [_own_link(links, axis) or _node_link(topology, mesh, axis) for axis in axes]
    return _slowest(slowest) if slowest else topology.inner


def _slowest(links: list[Link]) -> Link:
    if len(links) == 1:
        return links[0]
    return Link(max(link.latency for link in links), min(link.bandwidth for link in links))


def _own_link(links: Mapping[str, Link], axis: str) -> Link | None:
    """Return the link of an axis, or of the axis that it is a part of, if it has its own."""
    while axis not in links:
        axis, mark, number = axis.rpartition("_")
        if not mark or not number.isdigit():
            return None
    return links[axis]


@lru_cache(maxsize=1024)
def _between(topology: Topology, mesh: Mesh, other: Mesh) -> Link:
    links = [
        _link(topology, side, tuple(axis for axis, size in side.shape.items() if size > 1))
        for side in (mesh, other)
    ]
    if topology.node_size is not None:
        ends = [rank for side in (mesh, other) for rank in (side.ranks[0], side.ranks[-1])]
        inside = len({rank // topology.node_size for rank in ends}) == 1
        links.append(topology.inner if inside else topology.outer)
    return _slowest(links)


def _node_link(topology: Topology, mesh: Mesh, axis: str) -> Link:
    """Return the inner link if every group along `axis` is inside a node, else the outer one."""
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
