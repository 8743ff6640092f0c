"""Machine model: links between devices, per mesh axis, and what one device computes and holds.

Presets of GPUs assume that collectives achieve about 80 % of the promised bandwidth on NVLink and
of memory, and 90 % on networks, which have less protocol overhead, and that products achieve 70 %
of the promised rate. Latencies and launch times are NCCL's own (`src/graph/tuning.cc`, ring, LL:
0.6 us a hop on NVLink, 2.7 us on a network, 6.6 us at the start). An operation of a GPU starts
0.9 us after the one before it (3.8 us for kernels of 2.9 us in a stream, "Getting Started with
CUDA Graphs", NVIDIA 2019); on a TPU all operations are one program. Presets of TPUs have the
figures of "How to Scale Your Model" (Austin et al. 2025, part 2). `fs.calibrate` measures one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import torch

from fshard._torch.dynamo import graph_constant
from fshard._util.errors import Problem, raise_if
from fshard._util.notebook_view import NotebookView
from fshard._util.text import rate_text, time_text
from fshard.layout.mesh import Axes, Mesh, as_mesh
from fshard.program.cost import machines
from fshard.program.cost.link_groups import switch_link, torus_link
from fshard.program.cost.links import (
    Link,
    Partners,
    Torus,
    is_number,
    joint_name,
    own_link,
    read_links,
    slowest,
)
from fshard.program.cost.topology_files import as_path, read_topology, topology_json


@graph_constant
@dataclass(frozen=True, slots=True, weakref_slot=True)
class Topology(NotebookView):
    """Machine that programs are planned and costed for: seconds per byte, message and launch.

    Nodes of devices are joined by a network. Inside a node every device reaches every other one
    over a switch, or its neighbours over a torus. Devices are numbered node by node. Each has a
    card of its own on the network: gathers and reductions over several nodes run through all cards
    of a node at once, as NCCL's rings do, and exchanges at the speed of the slowest link. To use
    both links, plans may split axes where nodes end (`fs.Remesh`): `x_0` is the part of an axis
    `x` between nodes, `x_1` the part inside.

    Args:
        name: The title in printed tables.
        inner: The link between any two devices of a node, or the `Torus` of its devices.
        outer: The link from a device to the network between nodes. An oversubscribed network is
            one of less bandwidth.
        node_size: Devices of a node; None is a single node of any size, or of the torus's size.
        links: From mesh axis to its own link, a mapping or pairs. The name `"x,y"` is that of
            collectives over both axes at once; without one they have the slowest of their links.
        launch: Seconds to start a collective.
        memory: Bandwidth of local copies, in bytes per second.
        message: Seconds to post one of several messages that are sent together.
        flops: Floating-point operations per second of one device by dtype, as a mapping from
            names such as `"bfloat16"`. Other dtypes have the rate of the least of them.
        capacity: Bytes of memory of one device; None is unknown.
        kernel: Seconds to start one operation on a device.
        overlap: Share of a collective's time in which a device computes on; 0 if cores do both.

    Raises:
        ShardingError: If a value is out of range or of another type.

    >>> import fshard as fs
    >>> print(fs.Topology.dgx_h100())
    DGX H100, nodes of 8
      inner    0.60 µs, 360 GB/s
      outer    2.70 µs, 45.0 GB/s
      launch   6.60 µs
      message  0.15 µs
      kernel   0.90 µs
      memory   2.68 TB/s, 80,000,000,000 B
      compute  46.9 TFLOP/s in float64
      compute  346 TFLOP/s in float32
      compute  692 TFLOP/s in bfloat16, float16
      compute  1.39 PFLOP/s in float8_e4m3fn, int8
    """

    name: str = "custom"
    inner: Link | Torus = machines.NVLINK
    outer: Link = machines.INFINIBAND
    node_size: int | None = None
    links: tuple[tuple[str, Link], ...] = ()
    launch: float = 6e-6
    memory: float = 2e12
    message: float = 0.15e-6
    flops: tuple[tuple[str, float], ...] = (("bfloat16", 400e12), ("float32", 400e12))
    capacity: int | None = None
    kernel: float = machines.KERNEL
    overlap: float = 1.0

    def __post_init__(self) -> None:
        size = self.node_size
        links, problems = read_links(self.links, inner=self.inner, outer=self.outer)
        if isinstance(self.inner, Torus) and size is None:
            size = self.inner.size
            object.__setattr__(self, "node_size", size)
        if not isinstance(self.name, str):
            problems.append(Problem(f"name={self.name!r}", "name must be a str", "name='ours'"))
        is_int = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not (is_int and size >= 1):
            rule = "a node must have at least 1 device"
            fix = "Topology.cluster(8), or Topology.node() for a single node"
            problems.append(Problem(f"node_size={size!r}", rule, fix))
        elif isinstance(self.inner, Torus) and size != self.inner.size:
            rule = f"a node must have the {self.inner.size} devices of its torus"
            problems.append(Problem(f"node_size={size!r}", rule, f"node_size={self.inner.size}"))
        problems += [
            Problem(f"{name}={value!r}", f"{name} must be at least 0 seconds", fix)
            for name, value, fix in (
                ("launch", self.launch, "launch=6e-6"),
                ("message", self.message, "message=1.5e-7"),
                ("kernel", self.kernel, "kernel=1e-6"),
            )
            if not (is_number(value) and value >= 0)
        ]
        if not (is_number(self.memory) and self.memory > 0):
            rule = "memory must be above 0 bytes per second"
            problems.append(Problem(f"memory={self.memory!r}", rule, "memory=2e12"))
        problems += self._device_problems()
        raise_if("fs.Topology", problems)
        object.__setattr__(self, "links", links)
        object.__setattr__(self, "flops", tuple(sorted(dict(self.flops).items())))

    def _device_problems(self) -> list[Problem]:
        """Return problems of `flops` and `capacity`."""
        problems, capacity = [], self.capacity
        try:
            rates = dict(self.flops)
        except (TypeError, ValueError):
            rates = {}
        named = all(isinstance(getattr(torch, str(name), None), torch.dtype) for name in rates)
        if not rates or not named or not all(is_number(r) and r > 0 for r in rates.values()):
            problems.append(Problem(
                f"flops={self.flops!r}", "flops must map names of dtypes to rates above 0",
                'flops={"bfloat16": 400e12}'))  # fmt: skip
        if not (is_number(self.overlap) and 0 <= self.overlap <= 1):
            rule = "overlap must be a share in 0..1"
            problems.append(Problem(f"overlap={self.overlap!r}", rule, "overlap=1.0"))
        if capacity is not None and (type(capacity) is not int or capacity < 1):
            rule = "capacity must be at least 1 byte, or None"
            problems.append(Problem(f"capacity={capacity!r}", rule, "capacity=80 * 10**9"))
        return problems

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
        pairs = tuple(links.items()) if isinstance(links, Mapping) else links
        return Topology("custom", links=pairs, launch=launch, memory=memory, message=message)

    # -- public machines --------------------------------------------------------------

    @staticmethod
    def dgx_a100() -> Topology:
        """Return DGX A100s: nodes of 8 A100 SXM (80 GB), with InfiniBand HDR between them.

        From NVIDIA's data sheet: NVLink 3 with 600 GB/s per GPU (300 each way), a ConnectX-6 with
        200 Gb/s per GPU, 2,039 GB/s of HBM2e, 312 TFLOP/s in bfloat16. `machines` has measurements.

        >>> import fshard as fs
        >>> fs.Topology.dgx_a100().title
        'DGX A100, nodes of 8'
        """
        return Topology(**machines.gpu_fields(
            "DGX A100", 8, nvlink=300, network=200, memory=2039, capacity=80,
            tflops={"bfloat16": 312, "float16": 312, "float32": 156, "int8": 624,
                    "float64": 19.5},
        ))  # fmt: skip

    @staticmethod
    def dgx_h100() -> Topology:
        """Return DGX H100s: nodes of 8 H100 SXM, with InfiniBand NDR between them.

        From NVIDIA's data sheet: NVLink 4 with 900 GB/s per GPU (450 each way), a ConnectX-7 with
        400 Gb/s per GPU, 3.35 TB/s of HBM3, 989 TFLOP/s in bfloat16. `machines` has measurements.

        >>> import fshard as fs
        >>> fs.Topology.dgx_h100().link(fs.Mesh(dp=4, tp=8), "tp")
        Link(latency=6e-07, bandwidth=360000000000.0)
        """
        return Topology(**machines.gpu_fields(
            "DGX H100", 8, nvlink=450, network=400, memory=3350, capacity=80,
            tflops={"bfloat16": 989, "float16": 989, "float32": 494, "int8": 1979,
                    "float8_e4m3fn": 1979, "float64": 67},
        ))  # fmt: skip

    @staticmethod
    def gb200_nvl72() -> Topology:
        """Return GB200 NVL72 racks: 72 GPUs on one NVLink fabric, InfiniBand NDR between racks.

        From NVIDIA's data sheet: NVLink 5 with 1.8 TB/s per GPU (900 GB/s each way), a ConnectX-7
        with 400 Gb/s per GPU, 576 TB/s of HBM3e per rack (8 per GPU), 180 PFLOP/s in bfloat16.

        >>> import fshard as fs
        >>> fs.Topology.gb200_nvl72().title
        'GB200 NVL72, nodes of 72'
        """
        return Topology(**machines.gpu_fields(
            "GB200 NVL72", 72, nvlink=900, network=400, memory=8000, capacity=186,
            tflops={"bfloat16": 2500, "float16": 2500, "float32": 1250, "int8": 5000,
                    "float8_e4m3fn": 5000, "float64": 40},
        ))  # fmt: skip

    @staticmethod
    def tpu_v4(sizes: tuple[int, int, int] = (4, 4, 4)) -> Topology:
        """Return a slice of TPU v4: a 3-D torus, with a ring along every dim of full cubes of 4.

        Args:
            sizes: Devices along each dim.

        >>> import fshard as fs
        >>> pod = fs.Topology.tpu_v4((4, 4, 4))
        >>> pod.link(fs.Mesh(x=4, y=4, z=4), "x").bandwidth, pod.capacity
        (90000000000.0, 32000000000)
        """
        rates = {"bfloat16": 275, "int8": 275}
        return Topology(**machines.tpu_fields("TPU v4", sizes, 4.5e10, 1.2e12, 32, rates, host=4))

    @staticmethod
    def tpu_v5p(sizes: tuple[int, int, int] = (4, 4, 4)) -> Topology:
        """Return a slice of TPU v5p: a 3-D torus, with a ring along every dim of full cubes of 4.

        Args:
            sizes: Devices along each dim.

        >>> import fshard as fs
        >>> fs.Topology.tpu_v5p((16, 20, 28)).title
        'TPU v5p, torus 16x20x28'
        """
        rates = {"bfloat16": 459, "int8": 918}
        return Topology(**machines.tpu_fields("TPU v5p", sizes, 9e10, 2.8e12, 96, rates, host=4))

    @staticmethod
    def tpu_v5e(sizes: tuple[int, int] = (16, 16)) -> Topology:
        """Return a slice of TPU v5e: a 2-D grid, with a ring along dims of 16 devices alone.

        Args:
            sizes: Devices along each dim.

        >>> import fshard as fs
        >>> fs.Topology.tpu_v5e((8, 4)).title
        'TPU v5e, grid 8x4, no ring along dim 0, 1'
        """
        rates = {"bfloat16": 197, "int8": 394}
        return Topology(**machines.tpu_fields("TPU v5e", sizes, 4.5e10, 8.1e11, 16, rates, host=8))

    @staticmethod
    def tpu_v6e(sizes: tuple[int, int] = (16, 16)) -> Topology:
        """Return a slice of TPU v6e (Trillium): a 2-D grid, rings along dims of 16 devices alone.

        Args:
            sizes: Devices along each dim.

        >>> import fshard as fs
        >>> fs.Topology.tpu_v6e().link(fs.Mesh(x=16, y=16), ("x", "y")).bandwidth
        360000000000.0
        """
        rates = {"bfloat16": 920, "int8": 1840}
        return Topology(**machines.tpu_fields("TPU v6e", sizes, 9e10, 1.6e12, 32, rates, host=8))

    @staticmethod
    def cpu_host(processes: int = 8) -> Topology:
        """Return hosts that run gloo, over loopback inside and 25 Gb Ethernet between them.

        Processes share the Ethernet (IEEE 802.3by), and each has one channel of DDR4-3200 (JEDEC
        JESD79-4: 25.6 GB/s) and one core, 50 GFLOP/s in float32, which also communicates. Loopback
        and latencies are the order of magnitude that TCP achieves between two processes on a
        server; measure with `fs.calibrate` where they matter.

        Args:
            processes: Processes on a host, at least 1.

        >>> import fshard as fs
        >>> fs.Topology.cpu_host(4).title
        'CPU host, nodes of 4'
        """
        return Topology(**machines.cpu_fields(processes))

    # -- text -------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """Name and node size, such as `DGX H100, nodes of 8`."""
        if isinstance(self.inner, Torus):
            return f"{self.name}, {self.inner}"
        return self.name if self.node_size is None else f"{self.name}, nodes of {self.node_size}"

    def __str__(self) -> str:
        links = [("inner", self.inner_link)]
        links += [("outer", self.outer)] if self.node_size is not None else []
        rows = [(name, str(link)) for name, link in (*links, *self.links)]
        rows += [(x, time_text(getattr(self, x))) for x in ("launch", "message", "kernel")]
        capacity = f", {self.capacity:,} B" if self.capacity else ""
        rows += [("memory", f"{rate_text(self.memory)}{capacity}")]
        by_rate: dict[float, list[str]] = {}
        for name, rate in self.flops:
            by_rate.setdefault(rate, []).append(name)
        rows += [("compute", f"{rate_text(rate, 'FLOP/s')} in {', '.join(names)}")
                 for rate, names in sorted(by_rate.items())]  # fmt: skip
        rows += [("overlap", f"{100 * self.overlap:.0f} %")] if self.overlap < 1 else []
        width = max(len(name) for name, _ in rows)
        return "\n".join([self.title, *(f"  {name:<{width}}  {text}" for name, text in rows)])

    # -- links ------------------------------------------------------------------------

    @property
    def inner_link(self) -> Link:
        """The link between two devices of a node that are neighbours."""
        return self.inner.link if isinstance(self.inner, Torus) else self.inner

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """Return the floating-point operations per second of one device in `dtype`.

        Args:
            dtype: The dtype of the operands. A complex one has the rate of its real numbers; one
                without a rate of its own has the least rate.

        >>> import fshard as fs
        >>> import torch
        >>> fs.Topology.tpu_v5e().flops_per_second(torch.bfloat16)
        197000000000000.0
        """
        rates = dict(self.flops)
        return rates.get(str(dtype.to_real()).removeprefix("torch."), min(rates.values()))

    def link(
        self, mesh: Mesh, axes: Axes, *, exchange: bool = False, partners: Partners | None = None
    ) -> Link:
        """Return the effective link of a collective over `axes`.

        Args:
            mesh: The mesh, whose devices are numbered node by node, row-major over a torus.
            axes: Mesh axis or axes. Parts of a split axis, `x_0` and `x_1`, have the link of `x`
                unless they have one of their own.
            exchange: False for gathers and reductions, True for exchanges and permutations.
            partners: Messages of each rank along `axes`; None is as many to all of its group.

        Returns:
            The latency of a round, and the bytes per second that a rank receives.

        Raises:
            ShardingError: If an axis is unknown, or does not fill equal parts of a torus's dims.

        >>> import fshard as fs
        >>> mesh, cluster = fs.Mesh(dp=4, tp=8), fs.Topology.cluster()
        >>> [cluster.link(mesh, axes).bandwidth / 1e9 for axes in ("tp", "dp", ("dp", "tp"))]
        [360.0, 45.0, 360.0]
        >>> cluster.link(mesh, ("dp", "tp"), exchange=True) == cluster.outer
        True
        """
        where = "fs.Topology.link"
        mesh = as_mesh(mesh, where)
        return _link(self, mesh, mesh.check_axes(axes, where), exchange, partners)

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
        Path(as_path("fs.Topology.save", path)).write_text(topology_json(self) + "\n")

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
        return read_topology(path, Topology, (field.name for field in fields(Topology)))


@lru_cache(maxsize=4096)
def _link(
    topology: Topology, mesh: Mesh, axes: tuple[str, ...], exchange: bool,
    partners: Partners | None = None,
) -> Link:  # fmt: skip
    links, inner, outer = dict(topology.links), topology.inner, topology.outer
    if exchange:
        links = {axis: link.of_exchanges() for axis, link in links.items()}
        outer = outer.of_exchanges()
        inner = inner.of_exchanges() if isinstance(inner, Link) else inner
    if (joint := links.get(joint_name(axes))) is not None:
        return joint
    own = [link for axis in axes if (link := own_link(links, axis)) is not None]
    rest = tuple(axis for axis in axes if own_link(links, axis) is None)
    if rest:
        if isinstance(inner, Torus):
            few = partners if rest == axes else None
            own.append(torus_link(inner, outer, mesh, rest, exchange, few))
        else:
            own.append(switch_link(inner, outer, topology.node_size, mesh, rest, exchange))
    return slowest(own) if own else topology.inner_link


@lru_cache(maxsize=1024)
def _between(topology: Topology, mesh: Mesh, other: Mesh) -> Link:
    links = [
        _link(topology, side, tuple(axis for axis, size in side.shape.items() if size > 1), True)
        for side in (mesh, other)
    ]
    if topology.node_size is not None:
        ends = [rank for side in (mesh, other) for rank in (side.ranks[0], side.ranks[-1])]
        inside = len({rank // topology.node_size for rank in ends}) == 1
        links.append(topology.inner_link if inside else topology.outer)
    return slowest(links)
