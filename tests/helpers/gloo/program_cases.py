"""Programs that are run in a simulation and on gloo ranks, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import fshard as fs
from fshard import Mesh, Program
from fshard.run.transports.base import Event, observe
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spec_grid import random_locals

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A program, its locals and their memory format, and the number of derivatives to take."""

    prog: Program
    locals_: Tensors
    orders: int = 0
    memory: str = "plain"
    cotangents: tuple[Tensors, Tensors] = ((), ())


def case(prog: Program, orders: int = 0, memory: str = "plain", seed: int = 1) -> Case:
    """Return a case of random small integers; replicated locals are equal."""
    cotangents: tuple[Tensors, Tensors] = ((), ())
    if orders:
        cotangents = random_locals(prog.dst.dual, seed + 1), random_locals(prog.src, seed + 2)
    return Case(prog, random_locals(prog.src, seed), orders, memory, cotangents)


def with_memory_format(x: torch.Tensor, memory: str) -> torch.Tensor:
    """Return an equal tensor with another memory format."""
    match memory:
        case "transposed":
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        case "strided":
            wide = torch.stack([x, x + x], dim=-1)
            return wide[..., 0]
        case "offset":
            return torch.cat([x[:1], x])[1:] if x.ndim else x
        case _:
            return x.clone()


def run_case(case: Case, places: Sequence[int], simulated: bool) -> tuple[list[Tensors], Any]:
    """Return results, first and second gradients of the ranks at `places`, and the events."""
    events: list[Event] = []
    xs = [with_memory_format(case.locals_[place], case.memory) for place in places]
    want = case.orders > 0
    xs = [x.requires_grad_(want) for x in xs]

    def run(prog: Program, each: Sequence[torch.Tensor]) -> Tensors:
        return prog(tuple(each)) if simulated else (prog(each[0]),)

    with observe(lambda call: events.extend(call.events)):
        ys = run(case.prog, xs)
        results = [tuple(y.detach() for y in ys)]
        if case.orders:
            first, second = ([each[place] for place in places] for each in case.cotangents)
            first = [g.requires_grad_(case.orders > 1) for g in first]
            grads = torch.autograd.grad(ys, xs, first, create_graph=case.orders > 1)
            results.append(tuple(g.detach() for g in grads))
            if case.orders > 1:
                results.append(torch.autograd.grad(grads, first, second))
    return results, sorted((e.rank, e.op, e.axes, e.nbytes, e.phase) for e in events)


def run_all(mesh: Mesh, cases: Sequence[Case]) -> list[Any]:
    """Run every case on this rank's locals."""
    fs.init(mesh)
    return run_here(mesh, cases)


def run_here(mesh: Mesh, cases: Sequence[Case]) -> list[Any]:
    place = list(mesh.ranks).index(dist.get_rank())
    return [run_case(item, (place,), simulated=False) for item in cases]


def assert_same(actual: torch.Tensor, want: torch.Tensor) -> None:
    assert (actual.shape, actual.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(actual, want, rtol=1e-6, atol=0, equal_nan=True)


def check_cases(mesh: Mesh, cases: Sequence[Case]) -> None:
    """Assert that results, gradients and events of real ranks equal the simulator's."""
    by_rank = run_ranks(mesh.size, run_all, mesh, tuple(cases))
    for i, each in enumerate(cases):
        want, events = run_case(each, range(mesh.size), simulated=True)
        sent = []
        for place, rank in enumerate(mesh.ranks):
            actual, some = by_rank[rank][i]
            sent += some
            for order, (local, everyone) in enumerate(zip(actual, want, strict=True)):
                try:
                    assert_same(local[0], everyone[place])
                except AssertionError as error:
                    raise AssertionError(
                        f"rank {rank}, derivative {order}, {each.memory}:\n{each.prog}"
                    ) from error
        assert sorted(sent) == events, each.prog
