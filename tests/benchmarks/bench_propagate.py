"""Times of propagation, cold and warm, and of DTensor in the same process.

`python -m tests.benchmarks.bench_propagate` prints milliseconds of one cold and microseconds of
one warm propagation, for a few operations on meshes of one to four axes, and of the first call of
every operation that PyTorch's operator database has samples of. Cold means
that the caches of calls, layouts, plans and costs are empty; the rules are loaded. DTensor's
propagator is called past its cache, warm through it, and the caches of its plans are cleared before
each cold run. The fastest of some runs counts. Times are CPU times, which other work on the same
machine still makes longer.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _redistribute as dtensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils import _pytree as pytree

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.call import instances_in, map_call
from fshard.ops.core.registry import rows
from fshard.ops.propagate.propagate import propagate
from tests.helpers.dtensor_plans import as_dtensor, device_mesh
from tests.helpers.ops.op_database import calls_of, cases, op_db

MESHES = (Mesh(a=8), Mesh(a=4, b=4), Mesh(a=4, b=4, c=4), Mesh(a=4, b=4, c=4, d=4))
REPEATS, WARM = 3, 2000
PATIENCE = 20.0
"""Seconds after which no other run of a cold propagation begins."""
aten = torch.ops.aten


def calls(mesh: Mesh) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return operations and arguments by name; the mesh axes shard the dims of `x` in turn."""
    dims = [tuple(mesh.axes[place::2]) for place in range(2)]
    x = Spec(mesh, PartitionSpec(*dims), shape=(4096, 4096))
    rows_ = Spec(mesh, PartitionSpec(dims[0]), shape=(4096, 4096))
    full = Spec(mesh, PartitionSpec(), shape=(4096, 4096))
    row = Spec(mesh, PartitionSpec(), shape=(4096,))
    return {
        "add": (aten.add.Tensor, (x, x)),
        "add, moving": (aten.add.Tensor, (x, rows_)),
        "mm": (aten.mm.default, (x, full)),
        "_foreach_add of 20": (aten._foreach_add.List, ([x] * 20, [x] * 20)),
        "view": (aten.view.default, (rows_, [4096, 64, 64])),
        "_softmax": (aten._softmax.default, (x, -1, False)),
        "native_layer_norm": (aten.native_layer_norm.default, (rows_, [4096], row, row, 1e-5)),
    }


def dtensor_calls(
    op: Any, args: Any, mesh: Mesh
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the propagation of a call by DTensor, past its cache and through it."""
    on = device_mesh(mesh)
    change = lambda arg: as_dtensor(arg, on) if isinstance(arg, Spec) else arg  # noqa: E731
    placed = pytree.tree_map(change, args, is_leaf=lambda arg: isinstance(arg, Spec))
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op)
    schema = OpSchema(op, tuple(placed), {}, schema_info=info)
    schema._recompute_comparison_key()
    return (
        lambda: propagator.propagate_op_sharding_non_cached(schema),
        lambda: propagator.propagate_op_sharding(schema),
    )


def clear_caches() -> None:
    """Clear the caches of both libraries of calls, plans and costs."""
    for name, module in list(sys.modules.items()):
        ours = name.startswith(
            ("fshard.ops", "fshard.plan", "fshard.program", "fshard.layout.refinement")
        )
        if (ours and not name.endswith(("registry", "trace"))) or module is dtensor:
            for value in list(vars(module).values()):
                if callable(drop := getattr(value, "cache_clear", None)):
                    drop()


def cold(run: Callable[[], object]) -> float:
    """Return the milliseconds of the fastest of a few cold runs."""
    seconds: list[float] = []
    end = time.perf_counter() + PATIENCE
    while len(seconds) < REPEATS and (not seconds or time.perf_counter() < end):
        clear_caches()
        start = time.thread_time()
        run()
        seconds.append(time.thread_time() - start)
    return min(seconds) * 1e3


def warm(run: Callable[[], object]) -> float:
    """Return the microseconds of one of many runs."""
    run()
    start = time.thread_time()
    for _ in range(WARM):
        run()
    return (time.thread_time() - start) / WARM * 1e6


def times(op: Any, args: Sequence[Any], mesh: Mesh, most: int) -> list[str]:
    """Return the cells of a call on a mesh; DTensor runs on up to `most` axes."""
    ours = lambda: propagate(op, *args)  # noqa: E731
    cells = [f"{cold(ours):,.2f}", f"{warm(ours):,.1f}"]
    if len(mesh.axes) > most:
        return [*cells, "-", "-"]
    past, through = dtensor_calls(op, args, mesh)
    try:
        return [*cells, f"{cold(past):,.2f}", f"{warm(through):,.1f}"]
    except Exception as error:
        return [*cells, type(error).__name__, "-"]


Calls = dict[Any, tuple[tuple[Any, ...], dict[str, Any]]]
GOAL = 1.0
"""Milliseconds."""


def every_call() -> Calls:
    """Return the first call on tensors of every operation in the first samples of the database."""
    calls_: Calls = {}
    for info in op_db:
        for case in cases(info, 1):
            for op, args, kwargs in () if case.reason else calls_of(case):
                if instances_in((*args, *kwargs.values()), torch.Tensor):
                    calls_.setdefault(op, (args, kwargs))
    return calls_


def every_row(calls: Calls, mesh: Mesh) -> tuple[list[tuple[float, str]], int]:
    """Return milliseconds of the first propagation of every call, and the count of refused."""

    def spec_of(x: torch.Tensor) -> Spec:
        n = min(x.ndim, 2)
        p = PartitionSpec(*[tuple(mesh.axes[offset::n]) for offset in range(n)])
        return Spec(mesh, p, shape=x.shape, dtype=x.dtype, uneven="chunk")

    taken, refused = [], 0
    for op, call in calls.items():
        args, kwargs = map_call(*call, torch.Tensor, spec_of)
        run = lambda op=op, args=args, kwargs=kwargs: propagate(op, *args, **kwargs)  # noqa: E731
        try:
            run()
        except ShardingError:
            refused += 1
        else:
            taken.append((cold(run), str(op)))
    return taken, refused


def rows_table(most: int) -> Table:
    """Return a table of first calls by mesh: median, slowest, and how many miss the goal."""
    table = Table(title="every operation of the database, its first call, cold in ms")
    for head in ("axes", "operations", "refused", "median", "p90", "worst", f"above {GOAL}", ""):
        table.add_column(head, justify="left" if not head else "right")
    calls_ = every_call()
    gc.disable()
    for mesh in MESHES[:most]:
        taken, refused = every_row(calls_, mesh)
        order = sorted(time for time, _ in taken)
        slow = sorted((item for item in taken if item[0] > GOAL), reverse=True)
        table.add_row(
            str(len(mesh.axes)), str(len(taken)), str(refused), f"{statistics.median(order):.2f}",
            f"{order[len(order) * 9 // 10]:.2f}", f"{order[-1]:.2f}", str(len(slow)),
            ", ".join(name for _, name in slow[:6]),
        )  # fmt: skip
        gc.collect()
    gc.enable()
    return table


def main() -> None:
    """Measure every call on every mesh and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axes", type=int, default=4, help="the most axes of a mesh")
    parser.add_argument("--dtensor", type=int, default=3, help="the most that DTensor is given")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    rows()
    table = Table(title="one propagation: cold in ms, warm in microseconds")
    for head in ("call", "axes", "fshard cold", "warm", "DTensor cold", "warm"):
        table.add_column(head, justify="left" if head == "call" else "right")
    for name in calls(MESHES[0]):
        for mesh in MESHES[: options.axes]:
            op, args = calls(mesh)[name]
            propagate(op, *args)
            gc.collect()
            gc.disable()
            table.add_row(name, str(len(mesh.axes)), *times(op, args, mesh, options.dtensor))
            gc.enable()
        table.add_section()
    Console(width=100).print(table)
    Console(width=140).print(rows_table(options.axes))


if __name__ == "__main__":
    main()
