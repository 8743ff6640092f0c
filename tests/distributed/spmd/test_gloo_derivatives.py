"""Derivatives around and inside mapped and partitioned functions on 2 and 4 gloo ranks.

Many cases share one start of the processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import fshard as fs
from fshard import Mesh
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spmd.derivatives.derivative_programs import PROGRAMS, Wrap
from tests.helpers.spmd.transform_cases import (
    GRID,
    GRID_CASES,
    GRID_SPECS,
    TRANSFORMS,
    calls_of_rank,
    calls_on,
    close,
    dense_call,
)  # fmt: skip

Rows = Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]


def programs(mesh: Mesh, place: Any) -> Rows:
    for name, run in PROGRAMS.items():
        wrapped, dense = Wrap(place, mesh), Wrap("dense", mesh)
        yield f"{name}, {place}", lambda: run(wrapped), lambda: run(dense)  # noqa: B023


FEW = "jvp", "hessian", "vmap of grad", "dual_level"
"""Transforms on four ranks; on two all are tested."""


def transforms() -> Rows:
    for name, (body, out, dense) in GRID_CASES.items():
        mapped = fs.shard_map(body, mesh=GRID, in_specs=GRID_SPECS, out_specs=out)
        for transform in FEW:
            run = TRANSFORMS[transform]
            yield f"{transform} of {name}", lambda: run(mapped), lambda: run(dense)  # noqa: B023


def calls(mesh: Mesh) -> Rows:
    for name, call in {**calls_on(mesh), **calls_of_rank(mesh)}.items():
        for transform in FEW:
            run = TRANSFORMS[transform]
            yield f"{transform} of {name}", lambda: run(call), lambda: run(dense_call)  # noqa: B023


def differing(rows: Rows) -> dict[str, str]:
    warnings.simplefilter("ignore")
    errors = {}
    for name, run, dense in rows:
        try:
            close(run(), dense())
        except AssertionError as error:
            errors[name] = str(error)[:300]
    return errors


def on_two_ranks() -> list[dict[str, str]]:
    mesh = Mesh(x=2)
    fs.init(mesh)
    return [differing(programs(mesh, "mapped")), differing(programs(mesh, "partition"))]


def on_four_ranks() -> list[dict[str, str]]:
    fs.init(GRID)
    line = GRID.flatten(("x", "y"), "x")
    rows = programs(line, "mapped"), transforms(), calls(GRID)
    return list(map(differing, rows))


def test_programs_on_two_processes() -> None:
    assert run_ranks(2, on_two_ranks) == [[{}, {}]] * 2


def test_programs_and_transforms_on_four_processes() -> None:
    assert run_ranks(4, on_four_ranks) == [[{}, {}, {}]] * 4
