"""Agreement of processes on which of them have read varying values.

Where all have, they may have diverged, and are compared by collectives. A rank that has read alone,
to print a loss for example, must not wait there for ranks that have not: it goes on as if it had
not read. The types after its read say that ranks may differ; its gradients are those of ranks that
agree.
"""

from __future__ import annotations

from zlib import crc32

import torch

from fshard.layout.mesh import Mesh
from fshard.run.transports.base import Label, current_transport, is_simulated, labelled
from fshard.spmd.collectives.gather_scatter import all_gather
from fshard.spmd.tracking.tracker import Tracker


def all_have_read(tracker: Tracker, kind: str, *, last: bool = False) -> bool:
    """Return True if every rank has read varying values, the same on those that have.

    Every rank calls it at each comparison, of gradients, say, which is its `kind`; `last` is that
    of the results. Ranks that have read make a roll call each time, as they may have branched. If
    their first reads differ, their gradients are those without reads.
    """
    axes = tracker.read_states.axes("varying")
    if not axes or is_simulated():
        tracker.roll_calls.pass_by(last=last)
        return bool(axes)
    come = tracker.roll_calls.have_all_come(kind, last=last)
    if not tracker.reads_compared:
        tracker.reads_compared = come
        if not come:
            tracker.reads_agree = False
        else:
            with tracker.pause():
                text = f"{tracker.reads_agree} {tracker.first_read}"
                digests = gathered_digests(tracker.mesh, text, "the check of reads")
            tracker.reads_agree = len(set(digests)) == 1
    if not tracker.reads_agree:
        tracker.agreed.axes |= frozenset(axes)
    tracker.all_have_read = come
    return come


def gathered_digests(mesh: Mesh, text: str, name: str) -> list[int]:
    """Return the digests of every rank's text, in the mesh's order; every rank takes part."""
    with torch.no_grad(), labelled(Label(name, mesh)):
        device = getattr(current_transport(), "device", torch.device("cpu"))  # of the collective
        local = torch.tensor([crc32(text.encode())], device=device)
        digests: list[int] = all_gather(local, mesh.axes, mesh=mesh).flatten().tolist()
    return digests
