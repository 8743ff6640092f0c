"""`Roofline`: operations and collectives of one rank's step, with FLOPs, bytes and modelled times.

The time of an operation is that of the roofline model (Williams, Waterman and Patterson, 2009): the
larger of FLOPs by the device's rate and of bytes by its memory's, and the start of the operation.
Collectives have the times of `program/cost`. They run one after the other beside the computation,
from their launch on; computation waits where it needs a result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fshard._util.notebook_view import TableView, table_of
from fshard._util.text import percent_text, rate_text, time_text
from fshard.program.cost.topology import Topology

COMPUTE, COMMUNICATION, MODULES = "compute", "communication", "modules"
FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"
BOUNDS = ("compute", "memory", "start of operations", "communication")


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Operation or collective of one rank in a step, with its place in the modelled time.

    Attributes:
        name: the operation's name in the function, or the collective with its axes.
        kind: "compute" or "communication".
        phase: "forward", "backward", or "recompute" for what runs again in the backward pass.
        value: the value id of the line that it belongs to, None for sums of gradients.
        start: seconds from the beginning of the step.
        end: seconds from the beginning of the step.
        flops: floating-point operations.
        nbytes: bytes read and written in the device's memory; of a collective, bytes sent.
        bound: the limit of an operation: "compute", "memory" or "start"; of a collective: "link"
            or "start".
        startup: seconds of the duration that do not depend on sizes.
        waited: seconds that the computation waits for a collective.
        spec: the layouts of the results as text.
        place: the user's source line as `file:line`, "" if it is unknown.
        is_product: True for products, convolutions and attention.
        module: the path of the `torch.nn.Module` whose forward ran it, or its operation; "" if none
            did.
    """

    name: str
    kind: str
    phase: str
    value: int | None
    start: float
    end: float
    flops: int = 0
    nbytes: int = 0
    bound: str = ""
    startup: float = 0.0
    waited: float = 0.0
    spec: str = ""
    place: str = ""
    is_product: bool = False
    module: str = ""

    @property
    def time(self) -> float:
        """The duration in seconds."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, repr=False)
class Roofline(TableView):
    """Modelled time of a step of one rank, operation by operation, as `call.roofline()` returns it.

    Attributes:
        title: the mesh and the rank.
        topology: the machine.
        events: the operations and collectives in the order in which they start.
        dtype: the dtype of most FLOPs.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.partition(lambda w, x: x @ w, mesh=fs.Mesh(tp=2), in_specs=(fs.P("tp"), fs.P()))
    >>> w, x = (torch.empty(1024, 1024, device="meta") for _ in range(2))
    >>> f.trace(w, x).roofline(fs.Topology.tpu_v5e((2, 2))).flops == 2 * 1024**3 // 2
    True
    """

    title: str
    topology: Topology
    events: tuple[StepEvent, ...]
    dtype: torch.dtype = torch.float32

    def of(self, kind: str | None = None, phase: str | None = None) -> tuple[StepEvent, ...]:
        """Return the events of a kind and a phase.

        Args:
            kind: "compute" or "communication", None for both.
            phase: "forward", "backward" or "recompute", None for all.
        """
        return tuple(
            event for event in self.events
            if kind in (None, event.kind) and phase in (None, event.phase)
        )  # fmt: skip

    @property
    def flops(self) -> int:
        """Floating-point operations of the rank."""
        return sum(event.flops for event in self.of(COMPUTE))

    @property
    def product_flops(self) -> int:
        """FLOPs of products, convolutions and attention, as `torch.utils.flop_counter` counts."""
        return sum(event.flops for event in self.events if event.is_product)

    @property
    def nbytes(self) -> int:
        """Bytes that the operations read and write in the device's memory."""
        return sum(event.nbytes for event in self.of(COMPUTE))

    @property
    def compute(self) -> float:
        """Seconds of all operations."""
        return _seconds(self.of(COMPUTE))

    @property
    def communication(self) -> float:
        """Seconds of all collectives, one after the other."""
        return _seconds(self.of(COMMUNICATION))

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits for collectives."""
        return sum(event.waited for event in self.events)

    @property
    def hidden(self) -> float:
        """Seconds of collectives that run while the device computes."""
        return max(0.0, self.communication - self.exposed)

    @property
    def time(self) -> float:
        """Seconds of the step, with collectives that run beside the computation."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def passes(self) -> tuple[float, float]:
        """Seconds of the forward pass and of the rest, whose sum is `time`."""
        events = self.of(phase=FORWARD)
        forward = sum(x.time if x.kind == COMPUTE else x.waited for x in events)
        return min(forward, self.time), max(0.0, self.time - forward)

    @property
    def time_in_turn(self) -> float:
        """Seconds of the step without overlap."""
        return self.compute + self.communication

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs for each byte read or written."""
        return self.flops / self.nbytes if self.nbytes else 0.0

    @property
    def machine_intensity(self) -> float:
        """FLOPs for each byte at which the device computes as long as its memory is read."""
        return self.topology.flops_per_second(self.dtype) / self.topology.memory

    @property
    def shares(self) -> dict[str, float]:
        """Seconds of the step by their limit, one of `BOUNDS`; the sum is `time`."""
        shares = dict.fromkeys(BOUNDS, 0.0)
        for event in self.of(COMPUTE):
            limit = "compute" if event.bound == "compute" else "memory"
            shares[limit] += event.time - event.startup
            shares["start of operations"] += event.startup
        shares["communication"] = max(0.0, self.time - sum(shares.values()))
        return shares

    @property
    def bound(self) -> str:
        """The limit of most of the step's time, one of `BOUNDS`."""
        shares = self.shares
        return max(shares, key=lambda limit: shares[limit])

    @property
    def bound_text(self) -> str:
        """The limit with the numbers that show it, as a sentence."""
        name = str(self.dtype).removeprefix("torch.")
        share = percent_text(self.shares[self.bound], self.time)
        rate = rate_text(self.flops / self.time if self.time else 0.0, "FLOP/s")
        peak = rate_text(self.topology.flops_per_second(self.dtype), "FLOP/s")
        return (
            f"bound by {self.bound}: {share} of {time_text(self.time)}; "
            f"{self.intensity:.3g} FLOP/B, machine {self.machine_intensity:.3g} in {name}; "
            f"{rate} of {peak}"
        )

    def overlapped(self, event: StepEvent) -> tuple[StepEvent, ...]:
        """Return the events of the other kind that run at the same time as an event."""
        others = (other for other in self.events if other.kind != event.kind)
        return tuple(x for x in others if min(x.end, event.end) > max(x.start, event.start))

    def to_dict(self) -> dict[str, Any]:
        """Return the totals and the events as a dict of plain values, for JSON."""
        names = (
            "flops", "product_flops", "nbytes", "compute", "communication", "exposed", "hidden",
            "time", "time_in_turn", "intensity", "machine_intensity", "shares", "bound",
        )  # fmt: skip
        return {
            "title": self.title,
            "topology": self.topology.title,
            "dtype": str(self.dtype).removeprefix("torch."),
            **{name: getattr(self, name) for name in names},
            "events": [asdict(event) for event in self.events],
        }

    def table(self, only: str | None = None) -> Any:
        """Return a table of the events, equal layers folded; it prints as text, rich and HTML.

        Args:
            only: "compute" or "communication"; None shows both, "modules" both by module.
        """
        return table_of(self, only)


def _seconds(events: Iterable[StepEvent]) -> float:
    return sum(event.time for event in events)
