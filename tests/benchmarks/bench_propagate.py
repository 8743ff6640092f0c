"""Times of propagation, cold and warm, beside DTensor's in the same process.

`python -m tests.benchmarks.bench_propagate` prints milliseconds of one cold and microseconds of
one warm propagation, for a few operations on meshes of one to four axes. Cold means that nothing
is remembered of any call, layout, plan or cost; the rules are loaded. DTensor's propagator is
asked past its cache, warm through it, with the caches of its plans cleared before each cold run.
The fastest of some runs counts. Times are the processor's: a busy machine does not change them.
"""

from __future__ import annotations

import argparse
import gc
import logging
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

from fshard.mesh import Mesh
from fshard.ops.propagate import propagate
from fshard.ops.registry import rows
from fshard.partition_spec import PartitionSpec
from fshard.spec import Spec
from tests.dtensor_plans import as_dtensor, device_mesh

MESHES = (Mesh(a=8), Mesh(a=4, b=4), Mesh(a=4, b=4, c=4), Mesh(a=4, b=4, c=4, d=4))
REPEATS, WARM = 3, 2000
PATIENCE = 20.0
"""Seconds after which no other run of a cold propagation begins."""
aten = torch.ops.aten


def calls(mesh: Mesh) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """By name the operation and its arguments: the axes of `x` cut its dims in turn."""
    dims = [tuple(mesh.axes[place::2]) for place in range(2)]
    x = Spec(mesh, PartitionSpec(*dims), shape=(4096, 4096))
    rows_ = Spec(mesh, PartitionSpec(dims[0]), shape=(4096, 4096))
    whole = Spec(mesh, PartitionSpec(), shape=(4096, 4096))
    row = Spec(mesh, PartitionSpec(), shape=(4096,))
    return {
        "add": (aten.add.Tensor, (x, x)),
        "add, moving": (aten.add.Tensor, (x, rows_)),
        "mm": (aten.mm.default, (x, whole)),
        "_foreach_add of 20": (aten._foreach_add.List, ([x] * 20, [x] * 20)),
        "view": (aten.view.default, (rows_, [4096, 64, 64])),
        "_softmax": (aten._softmax.default, (x, -1, False)),
        "native_layer_norm": (aten.native_layer_norm.default, (rows_, [4096], row, row, 1e-5)),
    }


def theirs(op: Any, args: Any, mesh: Mesh) -> tuple[Callable[[], object], Callable[[], object]]:
    """DTensor's propagation of a call, past its cache and through it."""
    on = device_mesh(mesh)
    change = lambda each: as_dtensor(each, on) if isinstance(each, Spec) else each  # noqa: E731
    placed = pytree.tree_map(change, args, is_leaf=lambda each: isinstance(each, Spec))
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op)
    schema = OpSchema(op, tuple(placed), {}, schema_info=info)
    schema._recompute_comparison_key()
    return (
        lambda: propagator.propagate_op_sharding_non_cached(schema),
        lambda: propagator.propagate_op_sharding(schema),
    )


def forget() -> None:
    """Drop what both libraries remember of calls, plans and costs."""
    for name, module in list(sys.modules.items()):
        ours = name.startswith(("fshard.ops", "fshard.plan", "fshard.program", "fshard.subaxes"))
        if (ours and not name.endswith(("registry", "trace"))) or module is dtensor:
            for value in list(vars(module).values()):
                if callable(drop := getattr(value, "cache_clear", None)):
                    drop()


def cold(run: Callable[[], object]) -> float:
    """Milliseconds of the fastest of a few cold runs."""
    found: list[float] = []
    end = time.perf_counter() + PATIENCE
    while len(found) < REPEATS and (not found or time.perf_counter() < end):
        forget()
        start = time.thread_time()
        run()
        found.append(time.thread_time() - start)
    return min(found) * 1e3


def warm(run: Callable[[], object]) -> float:
    """Microseconds of one of very many runs."""
    run()
    start = time.thread_time()
    for _ in range(WARM):
        run()
    return (time.thread_time() - start) / WARM * 1e6


def times(op: Any, args: Sequence[Any], mesh: Mesh, most: int) -> list[str]:
    """The cells of a call on a mesh; DTensor's to `most` axes."""
    ours = lambda: propagate(op, *args)  # noqa: E731
    cells = [f"{cold(ours):,.2f}", f"{warm(ours):,.1f}"]
    if len(mesh.axes) > most:
        return [*cells, "-", "-"]
    past, through = theirs(op, args, mesh)
    try:
        return [*cells, f"{cold(past):,.2f}", f"{warm(through):,.1f}"]
    except Exception as error:
        return [*cells, type(error).__name__, "-"]


def main() -> None:
    """Measure every call on every mesh and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axes", type=int, default=4, help="the most axes of a mesh")
    parser.add_argument("--dtensor", type=int, default=3, help="the most that DTensor is given")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    rows()
    table = Table(title="one propagation: cold in ms, warm in microseconds")
    for head in ("call", "axes", "fshard cold", "warm", "DTensor cold", "warm"):
        table.add_column(head, justify="left" if head == "call" else "right")
    for name in calls(MESHES[0]):
        for mesh in MESHES[: given.axes]:
            op, args = calls(mesh)[name]
            propagate(op, *args)
            gc.collect()
            gc.disable()
            table.add_row(name, str(len(mesh.axes)), *times(op, args, mesh, given.dtensor))
            gc.enable()
        table.add_section()
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
