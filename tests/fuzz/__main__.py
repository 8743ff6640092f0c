"""Command line of the fuzzer: `python -m tests.fuzz --seconds 600 --seed 1`."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence

from tests.fuzz.cases import KINDS, failure_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases until the time or their number is over; return 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="time budget")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kind", choices=sorted(KINDS), action="append")
    options = parser.parse_args(arguments)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", r"(var|std)\(\): degrees of freedom")
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # imported by jvp
    counts: Counter[str] = Counter()
    failures = 0
    end = time.monotonic() + options.seconds
    for number in range(options.first, options.first + options.cases):
        for kind in options.kind or sorted(KINDS):
            if time.monotonic() > end:
                break
            counts[kind] += 1
            text = failure_of(kind, options.seed, number)
            if text is not None:
                failures += 1
                command = f"--kind {kind} --seed {options.seed} --first {number} --cases 1"
                print(f"python -m tests.fuzz {command}\n{text}\n", flush=True)
        if time.monotonic() > end:
            break
    done = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))
    print(f"{sum(counts.values()):,} cases ({done}), {failures} failed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
