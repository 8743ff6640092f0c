"""`StepMemory`: the bytes that one rank holds in the course of a step, by category.

Memory counts from the operation that allocates it until nothing refers to it, as PyTorch frees it:
autograd drops what it saved as the backward pass goes on. Allocators round sizes up and keep freed
blocks, which is not counted; nor are workspaces inside an operation or a backend. Tensors on the
CPU are sent by gloo, whose exchanges have other buffers than NCCL's; there the memory of buckets of
gradients is kept for the next step (`run/bucketing.py`), which the first step does not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fshard._util.notebook_view import TableView
from fshard._util.text import bytes_text, time_text

CATEGORIES = (
    "parameters", "arguments", "optimizer", "gradients", "activations", "gathered",
    "communication", "temporary",
)  # fmt: skip
"""Categories of memory.

Arguments that require gradients are parameters; tensors that the function closes over count as
arguments. Activations are computed values that autograd saves, gathered ones are arguments in other
layouts. Communication has the buffers of collectives, temporary all other values.
"""


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Bytes that a rank holds from a moment on.

    Attributes:
        time: seconds from the beginning of the step, as of the step's `Roofline`.
        event: the index of the event of the `Roofline` that runs then, or the next one.
        phase: "forward", "backward" or "recompute".
        held: bytes by category, in the order of `CATEGORIES`.
    """

    time: float
    event: int
    phase: str
    held: tuple[int, ...]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.held)


@dataclass(frozen=True, slots=True)
class HeldValue:
    """Memory of one value at the peak.

    Attributes:
        name: the operation that allocated it, or the path of an argument.
        category: one of `CATEGORIES`.
        nbytes: its bytes.
        phase: the phase that allocated it.
        place: the user's source line as `file:line`, "" if it is unknown.
    """

    name: str
    category: str
    nbytes: int
    phase: str = "forward"
    place: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class StepMemory(TableView):
    """Memory of a step of one rank over time, as `call.memory()` returns it.

    Attributes:
        title: the mesh and the rank.
        timeline: the bytes before the first operation and after every change, in the order of time.
        values: the memory that is held at the peak, the largest first.
        peak_name: the operation that runs at the peak.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(dp=2)
    >>> f = fs.partition(lambda w, x: (x @ w).relu(), mesh=mesh, in_specs=(fs.P(), fs.P("dp")))
    >>> memory = f.trace(torch.ones(64, 64), torch.ones(128, 64)).memory()
    >>> memory.peak, memory.at_peak["temporary"] == 2 * 64 * 64 * 4
    (65536, True)
    """

    title: str
    timeline: tuple[MemoryPoint, ...]
    values: tuple[HeldValue, ...] = ()
    peak_name: str = ""

    @property
    def peak(self) -> int:
        """The most bytes that are held at once."""
        return self.peak_point.total

    @property
    def peak_point(self) -> MemoryPoint:
        """The first moment at which the most bytes are held."""
        return max(self.timeline, key=lambda point: point.total)

    @property
    def at_peak(self) -> Mapping[str, int]:
        """Bytes by category at the peak."""
        return dict(zip(CATEGORIES, self.peak_point.held, strict=True))

    @property
    def places(self) -> dict[str, int]:
        """Bytes at the peak by the user's source line, the most first."""
        places: dict[str, int] = {}
        for value in self.values:
            name = value.place or value.name
            places[name] = places.get(name, 0) + value.nbytes
        return dict(sorted(places.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """Return the peak and the timeline as a dict of plain values, for JSON."""
        return {
            "title": self.title,
            "peak": self.peak,
            "peak_name": self.peak_name,
            "at_peak": dict(self.at_peak),
            "categories": list(CATEGORIES),
            "timeline": [asdict(point) for point in self.timeline],
            "values": [asdict(value) for value in self.values],
        }


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """Plan that was tried for a limit of memory.

    Attributes:
        limit: bytes that a rank may hold.
        text: the recomputation, and the layouts of parameters if they stay sharded.
        peak: bytes that a rank holds at most in a step.
        time: modelled seconds of a step.
        others: the plans that were tried beside it.
    """

    limit: int
    text: str
    peak: int
    time: float
    others: tuple[MemoryChoice, ...] = ()

    def __str__(self) -> str:
        return f"{self.text}: {bytes_text(self.peak)}, {time_text(self.time)} a step"
