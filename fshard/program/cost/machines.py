"""Fields of the topologies of public machines, from their promised rates.

Published bus bandwidths of NCCL beside the model's, in GB/s (nccl-tests, large tensors):

- 8 H100, gathers and all-reduces along rings: 370, model 360
- 8 H100, all-reduces in the switch (NVLink SHARP, which the model leaves out): 476, model 360
- 16 H100, gathers along rings: 46 to 48 of each card, 376 in all, model 360
- 16 H100, all-to-all: twice the bandwidth of a card, 94, model 43, as on many nodes
- 8 A100, all-reduces along rings: 240, model 240
- a TPU v5e, 34 MB gathered over 4 chips in a row: 680 us, model 562 (no protocol overhead)

`tests/program/cost/test_published_figures.py` has the sources.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from fshard._util.errors import fail
from fshard.program.cost.links import Link, Torus

NVLINK = Link(latency=0.6e-6, bandwidth=360e9)
INFINIBAND = Link(latency=2.7e-6, bandwidth=45e9)
KERNEL = 0.9e-6
PODS = {"TPU v4": (16, 16, 16), "TPU v5p": (16, 20, 28), "TPU v5e": (16, 16), "TPU v6e": (16, 16)}
"""The most chips along each dim, in any order."""


def gpu_fields(
    name: str, size: int, *, nvlink: float, network: float, memory: float, capacity: int,
    tflops: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of nodes of GPUs.

    Args:
        name: Name of the machine.
        size: GPUs of a node.
        nvlink: GB/s of a GPU in each direction, of which collectives achieve 80 %.
        network: Gb/s of the network card of a GPU, of which they achieve 90 %.
        memory: GB/s of its memory, of which copies achieve 80 %.
        capacity: GB of its memory.
        tflops: TFLOP/s by dtype, of which products achieve 70 %.
    """
    return {
        "name": name,
        "inner": Link(NVLINK.latency, 0.8e9 * nvlink),
        "outer": Link(INFINIBAND.latency, 0.9e9 * network / 8),
        "node_size": size,
        "launch": 6.6e-6,
        "memory": 0.8e9 * memory,
        "flops": tuple((dtype, 0.7e12 * rate) for dtype, rate in tflops.items()),
        "capacity": capacity * 10**9,
    }


def tpu_fields(
    name: str, sizes: tuple[int, ...], bandwidth: float, memory: float, capacity: int,
    tflops: Mapping[str, float], *, host: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of a slice of TPUs, with links of 1 us and no launches.

    Slices of cubes of 4 x 4 x 4 are rings along all dims, flat ones along dims of 16.

    Args:
        name: Name of the machine.
        sizes: Chips along each dim.
        bandwidth: Bytes per second of a link in each direction.
        memory: Bytes per second of a chip's memory.
        capacity: GB of its memory.
        tflops: TFLOP/s by dtype.
        host: Chips that share 25 GB/s of the data-center network.
    """
    if not isinstance(sizes, tuple | list) or not all(isinstance(size, int) for size in sizes):
        fail(f"a slice of {name}", f"sizes={sizes!r}",
             "sizes must be a tuple of the devices along each dim", "sizes=(4, 4)")  # fmt: skip
    sizes = tuple(sizes)
    pod = PODS[name]
    if len(sizes) > len(pod) or any(map(operator.gt, sorted(sizes)[::-1], sorted(pod)[::-1])):
        full = " x ".join(map(str, pod))
        fail(f"a slice of {name}", f"sizes={sizes!r}",
             f"a slice must fit into a pod of {full} devices", f"sizes={pod!r}")  # fmt: skip
    cubes = len(sizes) == 3 and all(size % 4 == 0 for size in sizes)
    wraps = tuple(cubes or (len(sizes) == 2 and size == 16) for size in sizes)
    return {
        "name": name,
        "inner": Torus(sizes, Link(1e-6, bandwidth), wraps),
        "outer": Link(10e-6, 2.5e10 / host),
        "launch": 0.0,
        "memory": memory,
        "message": 0.0,
        "kernel": 0.0,
        "flops": tuple((dtype, 1e12 * rate) for dtype, rate in tflops.items()),
        "capacity": capacity * 10**9,
    }


def cpu_fields(processes: int) -> dict[str, Any]:
    """Return the fields of hosts of processes that run gloo, each on a core of its own."""
    shared = processes if isinstance(processes, int) and processes > 0 else 1  # refused later
    return {
        "name": "CPU host",
        "inner": Link(latency=20e-6, bandwidth=2e9),
        "outer": Link(latency=50e-6, bandwidth=0.9 * 25e9 / 8 / shared),
        "node_size": processes,
        "launch": 50e-6,
        "memory": 0.8 * 25.6e9,
        "message": 10e-6,
        "flops": (("float32", 50e9), ("float64", 25e9)),
        "kernel": 2e-6,
        "overlap": 0.0,
    }
