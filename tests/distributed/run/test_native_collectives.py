"""Operations of PyTorch around one collective: native averages, and no needless copies."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import Mesh, P, Spec
from fshard.run.transports.base import set_world
from fshard.spmd.collectives import collective_plan
from tests.helpers.gloo.harness import run_ranks


class OpRecorder(TorchDispatchMode):
    """Names of the operations that compute or send, with their reductions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        words = [arg for arg in args[1:2] if isinstance(arg, str)]
        if name in ("all_reduce", "reduce_scatter_tensor", "div", "cat", "stack", "copy_", "clone"):
            self.names.append(" ".join([name, *words]))
        return func(*args, **(kwargs or {}))


def recorded_ops(fn: Any, x: Any) -> list[list[str]]:
    """Return the operations of three calls, the last two of which are replayed."""
    results = []
    for _ in range(3):
        with OpRecorder() as mode:
            fn(x)
        results.append(mode.names)
    return results


def test_averages_are_native_or_a_divided_sum() -> None:
    """Floats are averaged by the backend, where it can; else a sum is divided."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = Mesh(i=2)
        fs.init(mesh)
        src = Spec(mesh, P(None, unreduced={"i": "avg"}), shape=(4,))
        scatter = fs.redistribute(src, Spec(mesh, P("i"), shape=(4,)))
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            x = torch.ones(4, dtype=dtype)
            native = not dtype.is_complex
            want = ["all_reduce avg"] if native else ["all_reduce sum", "div"]
            assert recorded_ops(lambda x: fs.pmean(x, "i", mesh=mesh), x) == [want] * 3
        assert recorded_ops(scatter, torch.ones(4)) == [["reduce_scatter_tensor avg"]] * 3
    finally:
        collective_plan._RECORDINGS.clear()
        set_world(None)
        dist.destroy_process_group()


def run_gathers(mesh: Mesh) -> list[list[list[str]]]:
    fs.init(mesh)
    x, results = torch.ones(2, 2), []
    for p in (P("i"), P(None, "i")):
        src = Spec(mesh, p, shape=(4, 2) if p == P("i") else (2, 4))
        dst = Spec(mesh, P(), shape=src.shape)
        results += [recorded_ops(fs.redistribute(src, dst), x)]
        results += [recorded_ops(fs.redistribute([src] * 2, [dst] * 2), [x, x])]
    return results


def test_two_ranks_gather_with_one_copy() -> None:
    """Two tensors in one launch are concatenated before, and each result is after it."""
    for rank in run_ranks(2, run_gathers, Mesh(i=2)):
        assert rank == [[["cat"]] * 3, [["cat"] * 3] * 3] * 2


def run_gathers_by_name(mesh: Mesh) -> list[list[list[str]]]:
    fs.init(mesh)
    x = torch.ones(2, 2, 2)
    return [
        recorded_ops(
            lambda x, axis=axis, tiled=tiled: fs.all_gather(
                x, "i", axis=axis, tiled=tiled, mesh=mesh
            ),
            x,
        )  # type: ignore[misc]
        for tiled, axes in ((True, (0, 1, -1)), (False, (0, 1, -1)))
        for axis in axes
    ]


def test_two_ranks_gather_with_one_copy_along_any_dim() -> None:
    for results in run_ranks(2, run_gathers_by_name, Mesh(i=2)):
        assert results == [[["cat"]] * 3] * 6
