"""Numbers as short text: bytes, times, rates, ratios, counts."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bytes_text", "plural", "rate_text", "ratio_text", "time_text"]

Units = Sequence[tuple[str, float]]

_BINARY: Units = (("MiB", 2**-20), ("GiB", 2**-30), ("TiB", 2**-40), ("PiB", 2**-50))
_DECIMAL: Units = (("MB/s", 1e-6), ("GB/s", 1e-9), ("TB/s", 1e-12))
_SECONDS: Units = (("µs", 1e6), ("ms", 1e3), ("s", 1.0))


def bytes_text(count: int) -> str:
    """Bytes as people read them: exact below 1 MiB, three digits and a unit from there on.

    >>> bytes_text(196608), bytes_text(8 << 20), bytes_text(3 << 30)
    ('196,608 B', '8.00 MiB', '3.00 GiB')
    """
    if count < 1 << 20:
        return f"{count:,} B"
    return _scaled(count, _BINARY)


def time_text(seconds: float) -> str:
    """Seconds with three digits and a unit.

    >>> time_text(8.4e-6), time_text(0.0123), time_text(0.0)
    ('8.40 µs', '12.3 ms', '0 µs')
    """
    return "0 µs" if seconds == 0 else _scaled(seconds, _SECONDS)


def rate_text(bandwidth: float) -> str:
    """Bytes per second with three digits and a decimal unit, as vendors write them.

    >>> rate_text(360e9), rate_text(2.68e12), rate_text(24e6)
    ('360 GB/s', '2.68 TB/s', '24.0 MB/s')
    """
    return _scaled(bandwidth, _DECIMAL)


def _scaled(value: float, units: Units) -> str:
    """In the first of growing units that makes fewer than 1,000 of it, or the last."""
    fits = (each for each in units if value * each[1] < 999.5)
    unit, scale = next(fits, units[-1])
    number = value * scale
    return f"{number:,.{max(0, 3 - len(str(int(number))))}f} {unit}"


def ratio_text(value: float, bound: float) -> str:
    """How far a value is above its lower bound.

    >>> ratio_text(3, 2), ratio_text(0, 0), ratio_text(5, 0)
    ('1.50x', '1.00x', '')
    """
    if bound == 0:
        return "1.00x" if value == 0 else ""
    return f"{value / bound:.2f}x"


def plural(count: int, noun: str) -> str:
    """A count and its noun.

    >>> plural(1, "launch"), plural(2, "launch"), plural(1024, "rank")
    ('1 launch', '2 launches', '1,024 ranks')
    """
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "x", "s")) else "s"
    return f"{count:,} {noun}{ending}"
