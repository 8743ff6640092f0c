"""An alpha-beta model of the wires between devices: latency and bandwidth per mesh axis.

Of what vendors promise collectives get about 80 % on NVLink and of memory, 90 % on networks, which
have less protocol of their own. Latencies and the launch of the presets are those that NCCL
plans with (`src/graph/tuning.cc`, ring, LL: 0.6 us a hop on NVLink, 2.7 us on a network, 6.6 us at
the start). `fs.calibrate` measures the machine at hand instead.
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

from fshard._util.errors import Problem, ShardingError, fail, raise_if
from fshard._util.text import rate_text, time_text
from fshard.layout.mesh import Axes, Mesh, as_axes

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
                "latency must be at least 0 and bandwidth above 0",
                "Link(latency=1e-6, bandwidth=100e9)",
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


NVLINK = Link(latency=0.6e-6, bandwidth=360e9)
INFINIBAND = Link(latency=2.7e-6, bandwidth=45e9)


@dataclass(frozen=True, slots=True)
class Topology:
    """What a byte and a launch cost: an argument of planning and of `prog.cost`, never ambient.

    `inner` is the link inside a node of `node_size` devices, `outer` the one between nodes;
    `links` gives single axes their own. `launch` is the time in seconds to start one
    collective, `message` that to post a message of those that go out together, `memory` the
    bandwidth of local copies in bytes per second.

    A collective is as slow as the slowest link among its axes, for all of its bytes: one over 2
    nodes of 8 goes at the speed of the network, as if nothing of it stayed inside. NCCL's rings
    cross the network on some hops only, where each GPU has a card of its own, so that such a
    collective may be much faster than modelled, and gain less where it goes by nodes instead.
    For that, programs on a cluster split axes where nodes end (`fs.Remesh`): the parts of an
    axis `x` are `x_0`, the major one, between nodes, and `x_1` inside.

    >>> print(Topology.dgx_h100())
    DGX H100, nodes of 8
      inner    0.60 µs, 360 GB/s
      outer    2.70 µs, 45.0 GB/s
      launch   6.60 µs
      message  0.15 µs
      memory   2.68 TB/s
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
    message: float = 0.15e-6

    def __post_init__(self) -> None:
        size = self.node_size
        problems = [
            Problem(
                f"{what} {link!r}", "a connection must be a Link", "Link(latency=1e-6, bandwidth=100e9)"
            )
            for what, link in (("inner", self.inner), ("outer", self.outer), *self.links)
            if not isinstance(link, Link)
        ]
        if not isinstance(self.name, str):
            problems.append(Problem(f"name={self.name!r}", "name must be a str", "name='ours', say"))
        whole = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not (whole and size >= 1):
            problems.append(
                Problem(
                    f"node_size={size!r}",
                    "a node must have at least 1 device",
                    "Topology.cluster(8), or Topology.node() for a single node",
                )
            )
        problems += [
            Problem(f"{name}={value!r}", "launch and message must be at least 0 seconds", fix)
            for name, value, fix in (
                ("launch", self.launch, "launch=6e-6, say"),
                ("message", self.message, "message=1.5e-7, say"),
            )
            if not (_is_number(value) and value >= 0)
        ]
        if not (_is_number(self.memory) and self.memory > 0):
            rule = "memory must be above 0 bytes per second"
            problems.append(Problem(f"memory={self.memory!r}", rule, "memory=2e12, say"))
        raise_if("fs.Topology", problems)

    @staticmethod
    def node() -> Topology:
        """A single node, of any size: NVLink joins every pair of devices (H100, 360 GB/s achieved).

        Launches and memory are round numbers, 6 us and 2 TB/s, for GPUs of that kind;
        `dgx_h100` has those of one machine, 6.6 us and 2.68 TB/s.
        """
        return Topology("node")

    @staticmethod
    def cluster(node_size: int = 8) -> Topology:
        """Nodes of `node_size` devices: NVLink inside, InfiniBand (45 GB/s a device) between.

        Links are those of `dgx_h100`, launches and memory the round numbers of `node`.
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
        """One's own: a `Link` per mesh axis; axes not named are NVLink."""
        if not isinstance(links, Mapping):
            fail(
                "fs.Topology.of",
                f"links {links!r}",
                "links must be a mapping from mesh axis to Link",
                'Topology.of({"x": Link(latency=1e-6, bandwidth=100e9)})',
            )
        own = tuple(sorted(links.items()))
        return Topology("custom", links=own, launch=launch, memory=memory, message=message)

    # -- public machines --------------------------------------------------------------

    @staticmethod
    def dgx_a100() -> Topology:
        """DGX A100s: nodes of 8 A100 SXM (80 GB), InfiniBand HDR between them.

        NVIDIA's data sheet: NVLink 3 of 600 GB/s per GPU (300 each way), a ConnectX-6 of 200 Gb/s
        per GPU, 2,039 GB/s of HBM2e.
        """
        return _machine("DGX A100", 8, nvlink=300, network=200, memory=2039)

    @staticmethod
    def dgx_h100() -> Topology:
        """DGX H100s: nodes of 8 H100 SXM, InfiniBand NDR between them.

        NVIDIA's data sheet: NVLink 4 of 900 GB/s per GPU (450 each way), a ConnectX-7 of 400 Gb/s
        per GPU, 3.35 TB/s of HBM3.

        >>> Topology.dgx_h100().link(Mesh(dp=4, tp=8), "tp")
        Link(latency=6e-07, bandwidth=360000000000.0)
        """
        return _machine("DGX H100", 8, nvlink=450, network=400, memory=3350)

    @staticmethod
    def gb200_nvl72() -> Topology:
        """GB200 NVL72 racks: 72 GPUs on one NVLink fabric, InfiniBand NDR between racks.

        NVIDIA's data sheet: NVLink 5 of 1.8 TB/s per GPU (900 GB/s each way), a ConnectX-7 of
        400 Gb/s per GPU, 576 TB/s of HBM3e per rack (8 per GPU).
        """
        return _machine("GB200 NVL72", 72, nvlink=900, network=400, memory=8000)

    @staticmethod
    def cpu_host(processes: int = 8) -> Topology:
        """Hosts of so many processes, gloo over loopback inside and 25 Gb Ethernet between.

        Ethernet after IEEE 802.3by, and a process's part of memory is one channel of DDR4-3200
        (JEDEC JESD79-4: 25.6 GB/s). Loopback and latencies are what TCP gives two processes on
        a server, in orders of magnitude: measure with `fs.calibrate` where they matter.
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
        """The name, and how many devices a node has: `DGX H100, nodes of 8`."""
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
        """The link that a collective over `axes` is as slow as.

        The parts of an axis that was split, `x_0`, `x_1`, have the link of `x` unless named.
        """
        return _link(self, mesh, as_axes(axes))

    def between(self, mesh: Mesh, other: Mesh) -> Link:
        """The link that an exchange between the ranks of two meshes is as slow as.

        >>> cluster = Topology.cluster()
        >>> cluster.between(Mesh(x=4), Mesh(y=4, devices=range(4, 8))) == cluster.inner
        True
        >>> cluster.between(Mesh(x=8), Mesh(y=8, devices=range(8, 16))) == cluster.outer
        True
        """
        return _between(self, mesh, other)

    # -- files ------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; `load` reads it."""
        text = json.dumps(
            {**asdict(self), "links": {a: asdict(k) for a, k in self.links}}, indent=2
        )
        Path(_path("fs.Topology.save", path)).write_text(text + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Topology:
        """The topology that `save` has written.

        Raises `ShardingError` where the file is not there or holds something else.

        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     Topology.cluster().save(file.name)
        ...     Topology.load(file.name) == Topology.cluster()
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
            fail(where, file, "the file must hold JSON, as Topology.save writes it", ANEW)
        raise_if(where, problems := _key_problems(read, file))
        own = read["links"] if isinstance(read["links"], dict) else {"links": read["links"]}
        links = tuple(_links_of(own, file, problems).items())
        ends = dict.fromkeys(ENDS, NVLINK)
        ends |= _links_of({name: read[name] for name in ENDS}, file, problems)
        made = _read(f"{file} with", lambda: Topology(**{**read, **ends, "links": links}), problems)
        raise_if(where, problems)
        assert made is not None
        return made


def _machine(name: str, size: int, *, nvlink: float, network: float, memory: float) -> Topology:
    """A preset of what is promised: GB/s each way, Gb/s, and GB/s of memory."""
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
ANEW = "write it anew with topology.save(path)"


def _path(where: str, path: object) -> str | os.PathLike[str]:
    if not isinstance(path, str | os.PathLike):
        fail(where, f"path {path!r}", "a path is a text or a Path", "'topology.json', say")
    return path


def _key_problems(read: Any, file: str) -> list[Problem]:
    """What is missing in a file, and what has no business there."""
    names = {each.name for each in fields(Topology)}
    rule = f"the keys must be {', '.join(sorted(names))}"
    if not isinstance(read, dict):
        return [Problem(f"{file} with no mapping", rule, ANEW)]
    odd = ("without", names - {*read}), ("with", {*read} - names)
    given = " and ".join(f"{word} {', '.join(sorted(keys))}" for word, keys in odd if keys)
    return [Problem(f"{file} {given}", rule, ANEW)] if given else []


def _links_of(read: dict[str, Any], file: str, problems: list[Problem]) -> dict[str, Link]:
    """Those of the links of a file that are some; adds to `problems`."""
    keys = {each.name for each in fields(Link)}
    links = {}
    for name, each in read.items():
        if not isinstance(each, dict) or set(each) != keys:
            rule = "a link must have a latency and a bandwidth"
            problems.append(Problem(f"{file} with {name} {each!r}", rule, ANEW))
        elif (link := _read(f"{file} with {name}", partial(Link, **each), problems)) is not None:
            links[name] = link
    return links


def _read(what: str, make: Callable[[], T], problems: list[Problem]) -> T | None:
    """What is made of a part of a file, if it can be; else adds to `problems` of the file."""
    try:
        return make()
    except ShardingError as error:
        problems += [Problem(f"{what} {p.given}", p.rule, ANEW) for p in error.problems]
    return None


@lru_cache(maxsize=4096)
def _link(topology: Topology, mesh: Mesh, axes: tuple[str, ...]) -> Link:
    own = dict(topology.links)
    each = [_own(own, axis) or _default(topology, mesh, axis) for axis in axes]
    return _slowest(each) if each else topology.inner


def _slowest(links: list[Link]) -> Link:
    if len(links) == 1:
        return links[0]
    return Link(max(link.latency for link in links), min(link.bandwidth for link in links))


def _own(links: Mapping[str, Link], axis: str) -> Link | None:
    """The link of an axis, or of the one that it is a part of."""
    while axis not in links:
        axis, mark, number = axis.rpartition("_")
        if not mark or not number.isdigit():
            return None
    return links[axis]


@lru_cache(maxsize=1024)
def _between(topology: Topology, mesh: Mesh, other: Mesh) -> Link:
    each = [
        _link(topology, side, tuple(axis for axis, size in side.shape.items() if size > 1))
        for side in (mesh, other)
    ]
    if topology.node_size is not None:
        ends = [
            end // topology.node_size for m in (mesh, other) for end in (m.ranks[0], m.ranks[-1])
        ]
        each.append(topology.inner if len(set(ends)) == 1 else topology.outer)
    return _slowest(each)


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
