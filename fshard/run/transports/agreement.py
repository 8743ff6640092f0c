"""Comparison of calls between processes, through the store, before their collective.

Backends compare no sizes: gloo aborts a process that receives more bytes than it expects, and
gives memory of others to one that receives fewer. Ranks of a group compare the first call of each
shape. They wait for each other in the store, not in a collective: of ranks of which only some call
with a new shape these wait until the timeout, and name themselves.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch

from fshard._util.cache import CACHE_SIZE
from fshard.layout.mesh import Mesh
from fshard.run.transports.base import CHECKED, Group, Label, is_simulated, own_transport
from fshard.run.transports.divergence_report import Position, diverged, stranded, user_line
from fshard.run.transports.process_end import Listener
from fshard.run.transports.torch_distributed import DEFAULT_TIMEOUT, ProcessWorld

WATCH_SECONDS = 0.25
"""Longest time between two reads of the store, from when on ended processes are noticed."""


@dataclass(slots=True)
class _Compared:
    """Calls that a group has compared, and their number so far, both equal on its ranks."""

    calls: set[str] = field(default_factory=set)
    count: int = 0


_COMPARED: WeakKeyDictionary[Listener, dict[Group, _Compared]] = WeakKeyDictionary()
"""Comparisons of each group, by the listener of this process."""


def comparing_world() -> ProcessWorld | None:
    """Return the transport of this process if the first calls of its ranks must be compared.

    Simulations and `check="collectives"` compare every call themselves.
    """
    world = None if is_simulated() or CHECKED.get() is not None else own_transport()
    return world if isinstance(world, ProcessWorld) else None


def compare_once(world: ProcessWorld, label: Label, group: Group, call: str) -> None:
    """Raise `ShardingError` on all ranks of a group if their calls differ, the first time of each.

    Args:
        world: the `comparing_world`.
        label: the label of the call.
        group: the ranks, all of which call this with a new call at the same time.
        call: the call as text, with all that ranks must agree on.
    """
    if len(group) < 2:
        return
    compared = _COMPARED.setdefault(world.listener, {}).setdefault(group, _Compared())
    if call in compared.calls or max(group) not in world.all_ranks:  # the launch refuses it
        return
    compared.count += 1
    try:
        own = f"{world.rank}\n{user_line(None, label)}\n{call}"
        _compare(world, label.mesh, group, compared.count, own)
    except RuntimeError:  # the store does not answer, or is that of the fake backend
        return
    if len(compared.calls) >= CACHE_SIZE:  # at the same call on every rank
        compared.calls.clear()
    compared.calls.add(call)


def compare_shapes(label: Label, axes: tuple[str, ...], dtype: torch.dtype) -> None:
    """Raise `ShardingError` on all ranks along axes if their calls have other shapes or dtypes."""
    world = comparing_world()
    if world is not None and world.rank in label.mesh:
        group = tuple(sorted(label.mesh.group(world.rank, axes)))  # in every order of the axes
        compare_once(world, label, group, _text(label, axes, dtype))


@lru_cache(maxsize=CACHE_SIZE)
def _text(label: Label, axes: tuple[str, ...], dtype: torch.dtype) -> str:
    shapes = ", ".join(str(tuple(shape)) for shape in label.shapes)
    return f"{label.name}{label.arguments} over {', '.join(axes)}: {dtype} of {shapes}"


def _compare(world: ProcessWorld, mesh: Mesh, group: Group, number: int, own: str) -> None:
    """Compare the text of this rank with that of the rank that comes first."""
    store, watch = world.listener.store, world.listener.watch
    prefix = f"fshard {world.start_count} {group} "
    first_key, count_key, other_key, end_key = _keys(prefix, number)
    first = store.compare_set(first_key, "", own).decode()
    if _call(first) != _call(own):
        store.compare_set(other_key, "", own)
        store.set(end_key, "")
    if store.add(count_key, 1) == len(group):
        store.set(end_key, "")
        for key in _keys(prefix, number - 1):  # all ranks have read them
            store.delete_key(key)
    limit = time.monotonic() + (world.timeout or DEFAULT_TIMEOUT).total_seconds()
    pause = WATCH_SECONDS / 1024
    while not store.check([end_key]):  # `store.wait` would log a warning for each of its timeouts
        has_ended = pause == WATCH_SECONDS and watch.ended(group)
        if has_ended or time.monotonic() > limit:
            count = store.add(count_key, 0)
            head = f"{count} of the ranks {group} have come to a call that is new to them"
            fix = "call it on every rank, with the same shapes: drop or pad the last batch"
            raise stranded(head, mesh, {world.rank: _position(own, group)}, fix)
        time.sleep(pause)
        pause = min(2 * pause, WATCH_SECONDS)
    if store.check([other_key]):
        texts = sorted((first, store.get(other_key).decode()), key=_rank)
        raise diverged(mesh, group, {_rank(text): _position(text) for text in texts})


def _keys(prefix: str, number: int) -> tuple[str, str, str, str]:
    """Return the keys of a comparison: the first text, the count, another text, and the end."""
    first = f"{prefix}{number}"
    return first, f"{first} count", f"{first} other", f"{first} end"


def _rank(text: str) -> int:
    return int(text.split("\n", 2)[0])


def _call(text: str) -> str:
    return text.split("\n", 2)[2]


def _position(text: str, awaits: Group = ()) -> Position:
    _, line, call = text.split("\n", 2)
    return Position(call, line, awaits)
