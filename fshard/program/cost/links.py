"""Links between devices, as values: one link, and a torus of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fshard._util.errors import Problem, raise_if
from fshard._util.text import rate_text, time_text

EXAMPLE = "Link(latency=1e-6, bandwidth=100e9)"
JOIN = ","
"""Text between the axes of a link of several axes at once."""


@dataclass(frozen=True, slots=True, repr=False)
class Link:
    """Link between two devices.

    Args:
        latency: Seconds, at least 0.
        bandwidth: Bytes per second in each direction, above 0.
        exchange: Bytes per second of exchanges and permutations, None for `bandwidth`. Libraries
            run them by other algorithms than gathers and reductions.

    Raises:
        ShardingError: If a value is out of range or not a number.

    >>> import fshard as fs
    >>> fs.Link(latency=1e-6, bandwidth=100e9)
    Link(latency=1e-06, bandwidth=100000000000.0)
    """

    latency: float
    bandwidth: float
    exchange: float | None = None

    def __post_init__(self) -> None:
        problems = []
        if not (is_number(self.latency) and self.latency >= 0):
            rule = "latency must be a number of at least 0 seconds"
            problems.append(Problem(f"latency={self.latency!r}", rule, EXAMPLE))
        if not (is_number(self.bandwidth) and self.bandwidth > 0):
            rule = "bandwidth must be a number above 0 bytes per second"
            problems.append(Problem(f"bandwidth={self.bandwidth!r}", rule, EXAMPLE))
        if self.exchange is not None and not (is_number(self.exchange) and self.exchange > 0):
            rule = "exchange must be None or a number above 0 bytes per second"
            problems.append(Problem(f"exchange={self.exchange!r}", rule,
                                    "leave it out, exchanges have the bandwidth then"))  # fmt: skip
        raise_if("fs.Link", problems)

    def __repr__(self) -> str:
        more = "" if self.exchange is None else f", exchange={self.exchange!r}"
        return f"Link(latency={self.latency!r}, bandwidth={self.bandwidth!r}{more})"

    def __str__(self) -> str:
        swaps = "" if self.exchange is None else f", {rate_text(self.exchange)} in exchanges"
        return f"{time_text(self.latency)}, {rate_text(self.bandwidth)}{swaps}"

    def of_exchanges(self) -> Link:
        """Return the link as exchanges and permutations have it.

        >>> Link(1e-6, 80e9, exchange=50e9).of_exchanges()
        Link(latency=1e-06, bandwidth=50000000000.0)
        """
        return self if self.exchange is None else Link(self.latency, self.exchange)


@dataclass(frozen=True, slots=True)
class Torus:
    """Grid of devices with a link to each neighbour; a dim that wraps is a ring.

    Devices are numbered row-major over the grid. Mesh axes take dims of the grid, or parts of one,
    from the last to the first, so `devices=` of a `Mesh` decides which.

    Args:
        sizes: Devices along each dim, at least 1.
        link: The link between two neighbours.
        wraps: Whether the ends of each dim are linked; one bool stands for all dims.

    Raises:
        ShardingError: If a value is out of range or of another type.

    >>> import fshard as fs
    >>> fs.Torus((4, 4, 4), fs.Link(latency=1e-6, bandwidth=45e9)).size
    64
    """

    sizes: tuple[int, ...]
    link: Link
    wraps: tuple[bool, ...] | bool = True

    def __post_init__(self) -> None:
        problems = []
        sizes = tuple(self.sizes) if isinstance(self.sizes, tuple | list) else ()
        if not sizes or not all(type(size) is int and size >= 1 for size in sizes):
            rule = "a torus must have dims of at least 1 device"
            problems.append(Problem(f"sizes={self.sizes!r}", rule, "sizes=(16, 16)"))
        if not isinstance(self.link, Link):
            problems.append(Problem(f"link {self.link!r}", "a connection must be a Link", EXAMPLE))
        wraps = self.wraps
        wraps = (wraps,) * len(sizes) if isinstance(wraps, bool) else wraps
        listed = isinstance(wraps, tuple | list) and all(type(wrap) is bool for wrap in wraps)
        if sizes and not (listed and len(wraps) == len(sizes)):
            rule = f"wraps must be one bool, or one for each of {len(sizes)} dims"
            problems.append(Problem(f"wraps={self.wraps!r}", rule, "wraps=True"))
        raise_if("fs.Torus", problems)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "wraps", tuple(wraps))

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        assert isinstance(self.wraps, tuple)
        sizes = "x".join(map(str, self.sizes))
        if all(self.wraps):
            return f"torus {sizes}"
        open_dims = [str(dim) for dim, wrap in enumerate(self.wraps) if not wrap]
        return f"grid {sizes}, no ring along dim {', '.join(open_dims)}"


class Partners(NamedTuple):
    """Messages between a rank and few others, with the distance of the other rank along each axis.

    Attributes:
        sends: the distances, 1 for the next rank, and the size of each message that it sends.
        receives: the distances and sizes of the messages that it receives.
    """

    sends: tuple[tuple[tuple[int, ...], int], ...]
    receives: tuple[tuple[tuple[int, ...], int], ...]


def is_number(value: object) -> bool:
    """Return True for a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def slowest(links: Iterable[Link]) -> Link:
    """Return the largest latency and the least bandwidths of some links."""
    links = tuple(links)
    if len(links) == 1:
        return links[0]
    latency, bandwidth = max(x.latency for x in links), min(x.bandwidth for x in links)
    exchange = min(x.of_exchanges().bandwidth for x in links)
    differs = any(x.exchange is not None for x in links)
    return Link(latency, bandwidth, exchange if differs else None)


def joint_name(axes: Iterable[str]) -> str:
    """Return the name of the link of collectives over all of `axes` at once, in any order.

    >>> joint_name(("y", "x"))
    'x,y'
    """
    return JOIN.join(sorted(axes))


def read_links(
    links: object, inner: object, outer: object
) -> tuple[tuple[tuple[str, Link], ...], list[Problem]]:
    """Return a mapping, or pairs, of names and links as sorted pairs, and problems of all links.

    >>> link = Link(0.0, 1.0)
    >>> read_links({"y,x": link}, link, link)
    ((('x,y', Link(latency=0.0, bandwidth=1.0)),), [])
    """
    items = links.items() if isinstance(links, Mapping) else links
    pairs = [*items] if isinstance(items, Iterable) and not isinstance(items, str) else [items]
    found: dict[str, Link] = {}
    problems = [
        Problem(f"{name} {link!r}", "a connection must be a Link", EXAMPLE)
        for name, link, types in (("inner", inner, Link | Torus), ("outer", outer, Link))
        if not isinstance(link, types)
    ]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            rule = "links must be a mapping from mesh axis to Link, or pairs of them"
            problems.append(Problem(f"links with {pair!r}", rule, f'links={{"x": {EXAMPLE}}}'))
            continue
        name, link = pair
        axes = [axis.strip() for axis in name.split(JOIN)] if isinstance(name, str) else []
        joint = joint_name({axis for axis in axes if axis.isidentifier()})
        if not joint or joint_name(axes) != joint:
            rule = "a link must be named by a mesh axis, or by different ones joined by commas"
            problems.append(Problem(f"a link of {name!r}", rule, repr(joint or "x")))
        elif not isinstance(link, Link):
            problems.append(Problem(f"{name} {link!r}", "a connection must be a Link", EXAMPLE))
        elif found.setdefault(joint, link) != link:
            rule = f"axes must have one link, {name!r} has {found[joint]} already"
            problems.append(Problem(f"a link of {name!r}, {link}", rule, "leave one of them out"))
    return tuple(sorted(found.items())), problems


def own_link(links: Mapping[str, Link], axis: str) -> Link | None:
    """Return the link of an axis, or of the axis that it is a part of, if it has its own."""
    while axis not in links:
        axis, mark, number = axis.rpartition("_")
        if not mark or not number.isdigit():
            return None
    return links[axis]
