"""Print a table of models and layouts: outcomes, reasons of refusals, and traffic.

    python -m tests.partition.models.table [PATTERN] [--layouts data,fsdp,tensor,hybrid]

A row has launches forward + backward and the bytes that the busiest rank sends, then the same of
DDP (`data`), of FSDP with one gather per parameter (`fsdp`) and of Megatron-LM (`tensor`). These
are for one launch per parameter or layer. `hybrid` shards over `dp` and `tp` and has no peer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from torch import nn

from tests.partition.models import (  # noqa: F401
    attention,
    generative,
    graphs,
    language,
    structures,
    vision,
)
from tests.partition.models.model_checks import LAYOUTS, Outcome, check
from tests.partition.models.zoo import MODELS

SECONDS = 240
Row = tuple[str, str, str, Outcome]
"""Package, model, layout and outcome."""


def package_of(module: nn.Module) -> str:
    """Return the package of the outermost module that is neither PyTorch's nor the tests'."""
    packages = (type(part).__module__.partition(".")[0] for part in module.modules())
    return next((name for name in packages if name not in ("torch", "tests")), "torch")


def check_models(connection: Connection, cases: Sequence[tuple[str, str]]) -> None:
    """Check models in layouts and send a row for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, layout in cases:
        package = "?"
        try:
            torch.manual_seed(0)
            model = MODELS[name]()
            package = package_of(model.module)
            if layout in ("tensor", "hybrid") and not model.columns:
                outcome = Outcome("no meaning")
            else:
                outcome = check(model, layout)
        except ImportError as error:
            outcome = Outcome("not installed", str(error))
        except Exception as error:
            outcome = Outcome("fails on one device", f"{type(error).__name__}: {error}")
        connection.send((package, name, layout, outcome))


def rows(cases: Sequence[tuple[str, str]]) -> list[Row]:
    """Check models in a process that is replaced if a check takes longer than `SECONDS`."""
    results: list[Row] = []
    context = multiprocessing.get_context("spawn")
    while len(results) < len(cases):
        here, there = context.Pipe()
        process = context.Process(target=check_models, args=(there, cases[len(results) :]))
        process.start()
        there.close()
        try:
            while len(results) < len(cases):
                if not here.poll(SECONDS):
                    raise EOFError
                results.append(here.recv())
                show(results[-1])
        except EOFError:
            results.append(("?", *cases[len(results)], Outcome("hangs or crashes")))
            show(results[-1])
        finally:
            process.kill()
            process.join()
    return results


def show(row: Row) -> None:
    """Print a row, unless it has no meaning."""
    package, name, layout, outcome = row
    if outcome.status == "no meaning":
        return
    line = f"{package[:20]:20} {name:30} {layout:7} {outcome.status:8}"
    if outcome.status in ("works", "wrong"):
        line += f" {outcome.error:.0e}  {outcome.traffic!s:>24}"
        line += f"  {outcome.peer!s:>24}" if outcome.peer.forward else ""
    print(f"{line} {outcome.reason[:300]}".rstrip(), flush=True)


def summary(results: Sequence[Row]) -> str:
    """Return counts of outcomes by layout, and of refusals by reason."""
    lines = []
    for layout in dict.fromkeys(row[2] for row in results):
        counts = Counter(row[3].status for row in results if row[2] == layout)
        lines.append(f"{layout:7} " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    models = {row[1] for row in results if row[3].status == "works"}
    packages = sorted({row[0] for row in results if row[3].status == "works"})
    lines.append(f"{len(models)} models of {len(packages)} packages work: {', '.join(packages)}")
    reasons: dict[str, set[str]] = {}
    for _, name, _, outcome in results:
        if outcome.status in ("refused", "raises", "wrong", "hangs or crashes"):
            reasons.setdefault(f"{outcome.status}: {outcome.reason[:160]}", set()).add(name)
    lines += [f"{reason}\n    {', '.join(sorted(names))}" for reason, names in reasons.items()]
    return "\n".join(lines)


def main() -> int:
    """Print the table; return 1 if a model is wrong, raises, hangs or crashes."""
    parser = argparse.ArgumentParser(description="Models of other packages, partitioned.")
    parser.add_argument("pattern", nargs="?", default="", help="of names of models")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    options = parser.parse_args()
    names = [name for name in MODELS if re.search(options.pattern, name)]
    cases = [(name, layout) for name in names for layout in options.layouts.split(",")]
    results = rows(cases)
    print(summary(results))
    return int(any(r[3].status in ("wrong", "raises", "hangs or crashes") for r in results))


if __name__ == "__main__":
    sys.exit(main())
