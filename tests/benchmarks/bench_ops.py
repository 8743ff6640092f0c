"""Every OpInfo of PyTorch on layouts, beside DTensor: right, raising or wrong.

`python -m tests.benchmarks.bench_ops [--ops add,softmax] [--dtensor] [--refused] [--details]`

A row is a kind of layouts. A number counts the OpInfos whose samples are, on all layouts tried,
right (`ok`), partly raising (`mixed`), always raising, wrong on some, or not exercised (no layout
of that kind, random or undefined results, nothing to run). The `unsupported` OpInfos of both
libraries are mixed or raising somewhere. Gradients are compared for fshard only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fshard.ops.core.registry import rows
from tests.helpers.ops.op_database import Case, calls_of, cases, info_name, op_db, try_layout
from tests.helpers.ops.op_layouts import COLUMNS, layouts
from tests.helpers.ops.refused_layouts import refused_layouts_of, works

WORDS = ("ok", "mixed", "raising", "wrong", "not exercised")


@dataclass
class Report:
    """Report on one OpInfo: outcomes of its layouts by library and column, texts, and rules."""

    name: str
    words: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    texts: list[tuple[str, str, str]] = field(default_factory=list)
    rules: dict[str, bool] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def word(self, library: str, column: str) -> str:
        """Return the outcome of a column: one of `WORDS`."""
        seen = self.words.get((library, column), Counter())
        if seen["wrong"]:
            return "wrong"
        if seen["raises"]:
            return "mixed" if seen["ok"] else "raising"
        return "ok" if seen["ok"] else "not exercised"


@dataclass(frozen=True)
class Options:
    """Command-line options."""

    samples: int
    partition: bool
    dtensor: bool
    refused: bool
    seconds: float
    dtype: torch.dtype | None = None

    @property
    def libraries(self) -> list[str]:
        """Names of the libraries to compare."""
        extra = {"fs.partition": self.partition, "DTensor": self.dtensor}
        return ["fshard", *(name for name, requested in extra.items() if requested)]


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` if the block takes longer."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def report(place: int, options: Options) -> Report:
    """Return the report on one OpInfo of the database."""
    start, result = time.perf_counter(), Report(info_name(op_db[place]))
    try:
        with limited(options.seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for case in cases(op_db[place], options.samples, options.dtype):
                if case.reason:
                    result.reasons.append(case.reason)
                else:
                    _judge(case, result, options)
    except TimeoutError as error:
        result.texts.append(("fshard", "time", f"{result.name}: {error}"))
    except Exception as error:
        raise RuntimeError(f"the report on {result.name}") from error
    result.seconds = time.perf_counter() - start
    return result


def _judge(case: Case, result: Report, options: Options) -> None:
    tries: dict[str, Any] = {"fshard": try_layout}
    if options.partition:
        tries["fs.partition"] = partial(try_layout, at_once=True)
    if options.dtensor:
        from tests.helpers.ops.dtensor_database import try_dtensor

        tries["DTensor"] = try_dtensor
    for column in COLUMNS:
        for library, attempt in tries.items():
            if library == "DTensor" and column.foreign:
                continue
            for specs in layouts(case, column):
                outcome = attempt(case, specs)
                result.words.setdefault((library, column.name), Counter())[outcome.word] += 1
                if outcome.word != "ok":
                    result.texts.append((library, outcome.word, outcome.text))
    for op, args, kwargs in calls_of(case):
        try:
            result.rules[str(op)] = works(op, args, kwargs) or result.rules.get(str(op), False)
            if options.refused:
                result.refused += [f"{op}: {x}" for x in refused_layouts_of(op, args, kwargs)]
        except TimeoutError:
            raise
        except Exception:
            continue


def run(places: Sequence[int], options: Options, processes: int) -> list[Report]:
    """Return the reports on OpInfos by index, computed by several processes."""
    rows()
    jobs = [(place, options) for place in places]
    with multiprocessing.get_context("fork").Pool(processes, _quiet) as pool:
        return pool.starmap(report, jobs, chunksize=1)


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


# -- output -------------------------------------------------------------------------------


def show(reports: Sequence[Report], options: Options, *, details: bool) -> None:
    """Print the tables."""
    libraries = options.libraries
    print(f"{len(reports)} OpInfos, up to {options.samples} samples of each")
    for library in libraries:
        print(f"\n{library:26}" + "".join(f"{word:>15}" for word in WORDS))
        for column in COLUMNS:
            matches = Counter(x.word(library, column.name) for x in reports)
            if matches["not exercised"] < len(reports):
                print(f"{column.name:26}" + "".join(f"{matches[word]:>15}" for word in WORDS))
    print()
    for library in libraries:
        print(f"{library}: unsupported {len(unsupported(reports, library))}, "
              f"wrong {len(wrong(reports, library))}")  # fmt: skip
    _show_rules(reports, options)
    for library in libraries:
        for x in wrong(reports, library):
            text = next(t for lib, word, t in x.texts if (lib, word) == (library, "wrong"))
            print(f"{library} is wrong: {text[:300]}")
    if details:
        _show_causes(reports, libraries)


def unsupported(reports: Sequence[Report], library: str) -> list[Report]:
    """Return the OpInfos that raise on some layout."""
    return _with_word(reports, library, "raises")


def wrong(reports: Sequence[Report], library: str) -> list[Report]:
    """Return the OpInfos that are wrong on some layout."""
    return _with_word(reports, library, "wrong")


def _with_word(reports: Sequence[Report], library: str, word: str) -> list[Report]:
    return [
        x
        for x in reports
        if any(seen[word] for (lib, _), seen in x.words.items() if lib == library)
    ]


def _show_rules(reports: Sequence[Report], options: Options) -> None:
    rules = {op for x in reports for op in x.rules}
    idle = sorted(rules - {op for x in reports for op, cuts in x.rules.items() if cuts})
    print(f"\n{len(rows())} operations have a rule, {len(rules)} of them are in the samples; "
          f"{len(idle)} always replicated: {', '.join(idle) or 'none'}")  # fmt: skip
    if options.refused:
        matches = sorted({text for x in reports for text in x.refused})
        print(f"{len(matches)} layouts are right and refused, "
              f"of {len({text.split(':')[0] for text in matches})} operations")  # fmt: skip
        for text in matches:
            print(f"    {text}")


def _show_causes(reports: Sequence[Report], libraries: Sequence[str]) -> None:
    for library in libraries:
        causes: dict[str, set[str]] = {}
        for x in reports:
            for lib, word, text in x.texts:
                if lib == library and word != "wrong":
                    cause = re.sub(r"0x[0-9a-f]+", "", text.split("]: ", 1)[-1])[:120]
                    causes.setdefault(cause, set()).add(x.name)
        print(f"\nwhy {library} raises, with the OpInfos:")
        for cause, names in sorted(causes.items(), key=lambda item: -len(item[1])):
            print(f"    {cause}\n        {', '.join(sorted(names))[:300]}")
    slowest = sorted(reports, key=lambda x: -x.seconds)[:10]
    print("\nslowest:", ", ".join(f"{x.name} {x.seconds:.1f} s" for x in slowest))


def main() -> None:
    """Read the options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--ops", help="names of OpInfos, with commas; all if absent")
    parser.add_argument("--samples", type=int, default=2, help="samples of each OpInfo")
    parser.add_argument("--dtype", help="int64, bool, complex128, ...; float64 if absent")
    parser.add_argument("--partition", action="store_true", help="fs.partition too")
    parser.add_argument("--dtensor", action="store_true", help="DTensor too, on the same layouts")
    parser.add_argument("--refused", action="store_true", help="right layouts that rules refuse")
    parser.add_argument("--details", action="store_true", help="why layouts raise")
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit for one OpInfo")
    parser.add_argument("-n", type=int, default=2, help="processes")
    parsed = parser.parse_args()
    names = parsed.ops.split(",") if parsed.ops else None
    places = [
        i for i, op in enumerate(op_db) if names is None or {op.name, info_name(op)} & {*names}
    ]
    if not places:
        sys.exit(f"no OpInfo is called {parsed.ops}")
    dtype = getattr(torch, parsed.dtype) if parsed.dtype else None
    requested = parsed.partition, parsed.dtensor, parsed.refused
    options = Options(parsed.samples, *requested, parsed.seconds, dtype)
    start = time.perf_counter()
    show(run(places, options, parsed.n), options, details=parsed.details)
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
