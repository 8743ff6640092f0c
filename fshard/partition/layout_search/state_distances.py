"""Least modelled time between any two layouts of a tensor, for bounds on the time of a step.

A joint state is the state of a tensor on every axis of a mesh. The least time from one to another
is a shortest path (Floyd, 1962) over steps: reductions along any axes, and exchanges, which
receive at least what the worst-placed rank lacks, in as few messages as it has sources. Orders of
axes within a dim and evenness of shards are left out, so that no program takes less time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from fshard._util.cache import CACHE_SIZE
from fshard.layout.mesh import Mesh
from fshard.ops.strategy.axis_roles import AxisState
from fshard.plan.split_axes import node_refinement
from fshard.program.cost.link_groups import torus_extents
from fshard.program.cost.links import Link, Torus
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import MAX_DIRECT, gather_rounds

INVARIANT_CODE, REDUCED_CODE, UNREDUCED_CODE, FIRST_DIM = 0, 1, 2, 3
"""Codes of the states on one axis; sharded on dim d is `FIRST_DIM + d`."""
ANY_CODE = -1
MAX_REFINED = 3
"""Most axes between whose states there are distances, if axes are divided."""
VALUE_CODES = 2
"""Codes before those of dims where reduced counts as invariant: invariant and unreduced."""


def state_code(state: AxisState) -> int:
    """Return the code of a state on one axis."""
    match state.name:
        case "sharded":
            return FIRST_DIM + state.dim
        case "any":
            return ANY_CODE
        case name:
            return {"invariant": INVARIANT_CODE, "reduced": REDUCED_CODE}.get(name, UNREDUCED_CODE)


def joint_indices(codes: torch.Tensor, ndim: int) -> torch.Tensor:
    """Return the indices of joint states, given their codes in rows; `any` on an axis is the last.

    The last index, beyond all states, is one of which nothing is required.
    """
    base = FIRST_DIM + ndim
    index = torch.zeros(len(codes), dtype=torch.long)
    for column in codes.T:
        index = index * base + column
    return torch.where((codes == ANY_CODE).any(1), base ** codes.shape[1], index)


@dataclass(frozen=True, slots=True)
class AxisTuple:
    """Axes of a mesh whose sizes are above 1, and the links of every subset of them.

    Along axes that are left out a tensor may have any state, at no cost: it is taken to be sharded
    over all of them, and their links, if faster, to be used with those of the others.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[tuple[Link, Link], ...]
    """For the subset of every bit mask the links of reductions and of exchanges."""
    left_out: int
    """Devices along the axes that are left out."""

    @property
    def device_count(self) -> int:
        """Devices along all axes."""
        return math.prod(self.sizes) * self.left_out

    @staticmethod
    def of(mesh: Mesh, topology: Topology, axes: Sequence[str] | None = None) -> AxisTuple:
        """Return the axes of a mesh, or those of `axes` alone.

        An axis that leaves a node with part of its length has the link inside of nodes: programs
        may run along parts of it. `refined` has these parts as axes. So have axes of which two
        share a dim of a torus: values that are replicated along one come from the nearest rank.
        """
        every = tuple(axis for axis in mesh.axes if mesh.shape[axis] > 1)
        names = every if axes is None else tuple(axis for axis in every if axis in axes)
        left_out = mesh.axis_size(every) // mesh.axis_size(names)
        subsets = [
            tuple(axis for bit, axis in enumerate(names) if mask >> bit & 1)
            for mask in range(2 ** len(names))
        ]
        shared = _share_dims(mesh, topology, every)
        straddling = {axis for axis in names if shared or _straddles(mesh, topology, axis)}
        links = []
        for subset in subsets:
            if not subset or left_out > 1 or straddling & {*subset}:
                links.append((_fastest(topology, mesh, every),) * 2)
            else:
                links.append((topology.link(mesh, subset),
                              topology.link(mesh, subset, exchange=True)))  # fmt: skip
        sizes = tuple(mesh.shape[axis] for axis in names)
        return AxisTuple(names, sizes, tuple(links), left_out)

    @staticmethod
    def refined(mesh: Mesh, topology: Topology) -> tuple[AxisTuple, list[int]]:
        """Return the axes of a mesh, and the index of the mesh's axis that each is a part of.

        An axis that leaves a node with part of its length is divided into a part between nodes and
        one inside, with links of their own, unless there are more than `MAX_REFINED` axes then.
        """
        fine, axes = node_refinement(mesh, topology, False), AxisTuple.of(mesh, topology)
        if fine is not None:
            refined = AxisTuple.of(fine.mesh, topology)
            owner = {part: axis for axis, names in fine.parts[0] for part in names}
            if len(refined.names) <= MAX_REFINED:
                return refined, [axes.names.index(owner[part]) for part in refined.names]
        return axes, [*range(len(axes.names))]


def _straddles(mesh: Mesh, topology: Topology, axis: str) -> bool:
    """Return True if some group along an axis has several ranks of one node, and several nodes."""
    size = topology.node_size
    if size is None:
        return False
    return any(
        1 < len({rank // size for rank in group}) < len(group) for group in mesh.groups(axis)
    )


def _share_dims(mesh: Mesh, topology: Topology, axes: Sequence[str]) -> bool:
    """Return True if two axes share a dim of a torus."""
    return isinstance(topology.inner, Torus) and any(
        extent.stride > 1
        for axis in axes for extent in torus_extents(topology.inner, mesh, (axis,))
    )  # fmt: skip


def _fastest(topology: Topology, mesh: Mesh, names: Sequence[str]) -> Link:
    """Return a link of the least latency and the largest bandwidth that any axes have."""
    links = [topology.inner_link, *(
        topology.link(mesh, axes, exchange=exchange)
        for count in range(1, len(names) + 1) for axes in itertools.combinations(names, count)
        for exchange in (False, True)
    )]  # fmt: skip
    return Link(min(x.latency for x in links), max(x.bandwidth for x in links))


@lru_cache(maxsize=CACHE_SIZE)
def distances(axes: AxisTuple, topology: Topology, ndim: int, nbytes: int) -> torch.Tensor:
    """Return the least seconds between joint states without gradient, (n + 1) x (n + 1).

    Args:
        axes: the axes.
        topology: the topology to cost steps on.
        ndim: dims of the tensor.
        nbytes: its bytes, unsharded.
    """
    values = _value_distances(axes, topology, ndim, nbytes)
    as_value = _as_values(len(axes.names), ndim, unreduced=UNREDUCED_CODE)
    return _with_any(values[as_value][:, as_value])


@lru_cache(maxsize=CACHE_SIZE)
def gradient_distances(
    axes: AxisTuple, topology: Topology, ndim: int, nbytes: int
) -> torch.Tensor:  # fmt: skip
    """Return the least seconds to bring the gradients of joint states back, (n + 1) x (n + 1).

    Row and column are those of `distances`; the gradient has the dual states, in reverse.
    """
    values = _value_distances(axes, topology, ndim, nbytes)
    dual = _as_values(len(axes.names), ndim, unreduced=REDUCED_CODE)
    return _with_any(values[dual][:, dual].T)


def _with_any(table: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(table, (0, 1, 0, 1))


def _as_values(count: int, ndim: int, *, unreduced: int) -> torch.Tensor:
    """Return for every joint state the index of its value, or of its gradient's.

    `unreduced` is the code that counts as unreduced; invariant, and the other one, are complete.
    """
    codes = list(range(FIRST_DIM + ndim))
    value = [1 if code == unreduced else max(0, code - 1) if code >= FIRST_DIM else 0
             for code in codes]  # fmt: skip
    index = torch.zeros(1, dtype=torch.long)
    for _ in range(count):
        index = (index[:, None] * (VALUE_CODES + ndim) + torch.tensor(value)).flatten()
    return index


@lru_cache(maxsize=CACHE_SIZE)
def _value_distances(axes: AxisTuple, topology: Topology, ndim: int, nbytes: int) -> torch.Tensor:
    """Return the least seconds between values: invariant, unreduced or sharded on every axis."""
    count = len(axes.names)
    product = itertools.product(range(VALUE_CODES + ndim), repeat=count)
    codes = torch.tensor([*product], dtype=torch.long)
    codes = codes.reshape((VALUE_CODES + ndim) ** count, count)  # one row of none without axes
    table = torch.minimum(_exchanges(axes, topology, codes, ndim, nbytes),
                          _reductions(axes, topology, codes, nbytes))  # fmt: skip
    for via in range(len(codes)):
        table = torch.minimum(table, table[:, via, None] + table[None, via])
    return table


def _local_bytes(axes: AxisTuple, codes: torch.Tensor, nbytes: int) -> torch.Tensor:
    sizes = torch.tensor(axes.sizes, dtype=torch.float64)
    return nbytes / axes.left_out / torch.where(codes >= VALUE_CODES, sizes, 1.0).prod(1)


def _exchanges(
    axes: AxisTuple, topology: Topology, codes: torch.Tensor, ndim: int, nbytes: int
) -> torch.Tensor:  # fmt: skip
    """Return the least seconds of one step between any two values that is not a reduction.

    A value that becomes unreduced may be divided among the ranks that hold partial sums of it.
    Where axes are left out, a step along them too may be a permutation or no copy.
    """
    sizes = torch.tensor(axes.sizes, dtype=torch.float64)
    local = _local_bytes(axes, codes, nbytes)
    src, dst = codes[:, None], codes[None]
    leaves = (src != dst) & (dst != 1)

    def sizes_where(mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, sizes, 1.0)

    moving = leaves & (src != 0)
    held = sizes_where(moving & (src >= VALUE_CODES)).prod(-1)
    added = sizes_where(moving & (src == 1)).prod(-1)
    shared = sizes_where((dst == 1) & (src != 1)).prod(-1)
    lacks = local * (added - 1 / held) / shared
    counts = torch.stack([sizes_where(codes == code).prod(-1)
                          for code in range(1, VALUE_CODES + ndim)], 1)  # fmt: skip
    is_permutation = (counts[:, None] == counts[None]).all(-1)
    is_gather = (~leaves | (src == 0) | (dst == 0)).all(-1) & (added == 1)
    of_dim_0 = (~moving | (src == VALUE_CODES)).all(-1)  # needs no copy
    copied = torch.where(local[:, None] == local[None], 2.0, 1.0) * local
    copied = torch.where(is_gather, torch.where(of_dim_0, 0.0, 2.0) * local, copied)
    copied = torch.where(shared > 1, local, copied).masked_fill(is_permutation, 0.0)
    most = sizes_where(moving).amax(-1) if axes.names else torch.ones_like(lacks)
    messages = torch.where(is_gather | (added > 1), most.log2().ceil(), most - 1)
    messages = messages.clamp(min=1).masked_fill(is_permutation, 1.0)
    mask = (moving * 2 ** torch.arange(len(axes.names))).sum(-1)
    gather, exchange = (
        torch.tensor([(link.latency, link.bandwidth) for link in links], dtype=torch.float64)[mask]
        for links in zip(*axes.links, strict=True)
    )
    latency, bandwidth = torch.where(is_gather[..., None], gather, exchange).unbind(-1)
    sliced = (topology.kernel + 2 * local / topology.memory).expand_as(lacks)
    if axes.left_out > 1:
        messages, copied, sliced = (torch.full_like(lacks, x) for x in (1.0, 0.0, 0.0))
    sent = (topology.launch + latency + messages * topology.message + lacks / bandwidth
            + (copied > 0) * topology.kernel + copied / topology.memory)  # fmt: skip
    return torch.where(mask > 0, sent, sliced).fill_diagonal_(0.0)


def _reductions(
    axes: AxisTuple, topology: Topology, codes: torch.Tensor, nbytes: int
) -> torch.Tensor:
    """Return the seconds of all-reduces and reduce-scatters along every subset of the axes."""
    table = torch.full((len(codes),) * 2, math.inf, dtype=torch.float64)
    local = _local_bytes(axes, codes, nbytes)
    base = int(codes.max()) + 1 if len(codes) > 1 else VALUE_CODES
    strides = [base ** (len(axes.names) - 1 - i) for i in range(len(axes.names))]
    for mask in range(1, 2 ** len(axes.names)):
        subset = [i for i in range(len(axes.names)) if mask >> i & 1]
        rows = (codes[:, subset] == 1).all(1).nonzero().flatten()
        n, link = math.prod(axes.sizes[i] for i in subset), axes.links[mask][0]
        messages, rounds = gather_rounds(n)
        if axes.left_out > 1:
            messages = min(messages, (n - 1).bit_length())  # trees of more ranks send less
        passes = 1 if n <= MAX_DIRECT else 2
        step = sum(strides[i] for i in subset)
        for code in (0, *range(VALUE_CODES, base)):
            copied = 2 * (code > VALUE_CODES and axes.left_out == 1)
            share, times, copies = (2, passes, 0) if code == 0 else (1, 1, copied)
            time = (topology.launch + times * (rounds * link.latency + messages * topology.message)
                    + local[rows] * (share * (n - 1) / n / link.bandwidth
                                     + copies / topology.memory)
                    + bool(copies) * topology.kernel)  # fmt: skip
            table[rows, rows + (code - 1) * step] = time
    return table
