"""Programs that are replayed do what they did when they ran first, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import Mesh, P, Program, Sharded, Spec
from fshard.run import execute
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spec_grid import random_global

F64, BF16 = torch.float64, torch.bfloat16
MESHES = [Mesh(x=2, y=1), Mesh({"x": 2, "y": 2}, devices=(2, 0, 3, 1))]
LAYOUTS = [
    P(), P("x"), P(None, "y"), P("y", "x"), P(("y", "x")), P(unreduced={"x"}), P(reduced={"x"}),
    P("y", unreduced={"x": "avg"}), P(unreduced={"x": "max"}),
]  # fmt: skip


def programs(mesh: Mesh) -> list[Program]:
    """Between layouts of an even and an uneven tensor, and over wires of less precision."""
    found = []
    for shape in ((4, 8), (5, 6)):
        specs = [Spec(mesh, p, shape=shape, dtype=F64, uneven="chunk") for p in LAYOUTS]
        for src in specs:
            kinds = set(src.partition.unreduced.values())
            found += [
                fs.redistribute(src, dst)
                for dst in specs
                if not kinds or set(dst.partition.unreduced.values()) in (set(), kinds)
            ]
    whole = Spec(mesh, P(), shape=(4, 8))
    part = whole.replace(partition=P("x"))
    return [*found, fs.redistribute(part, whole, forward_dtype=BF16, backward_dtype=BF16)]


def in_order(x: torch.Tensor, transposed: bool) -> torch.Tensor:
    return x.mT.contiguous().mT if transposed else x.contiguous()


def once(prog: Program, x: torch.Tensor, ct: torch.Tensor) -> list[torch.Tensor]:
    """A result, and its gradients of two orders; without one, a result alone."""
    plain = prog(x)
    if not prog.is_linear:
        return [plain]
    x, ct = x.detach().requires_grad_(), ct.detach().requires_grad_()
    y = prog(x)
    (first,) = torch.autograd.grad(y, x, ct, create_graph=True)
    (second,) = torch.autograd.grad(first, ct, x.detach())
    return [plain, y.detach(), first.detach(), second]


def run_often(progs: list[Program], work: list[Any]) -> list[Any]:
    """Every program four times, the first two are not replayed; then of other strides."""
    fs.init(progs[0].src.mesh)
    execute._LAUNCHERS.clear()
    found = []
    for prog, (xs, cts) in zip(progs, work, strict=True):
        x, ct = xs[dist.get_rank()], cts[dist.get_rank()]
        found.append(
            [once(prog, in_order(x, odd), in_order(ct, odd)) for odd in [False] * 4 + [True] * 3]
        )
    assert len(execute._LAUNCHERS) > 2 * len(progs)
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_replayed_programs(mesh: Mesh) -> None:
    progs, work, wanted = programs(mesh), [], []
    for at, prog in enumerate(progs):
        sides = [
            [
                random_global(spec.local_shape(rank), spec.dtype, 7 * at + rank + len(name))
                for rank in mesh.ranks
            ]
            for name, spec in (("x", prog.src), ("ct", prog.dst))
        ]
        work.append(sides)
        xs, cts = sides
        ys = prog(tuple(xs))
        grads = prog.T(tuple(cts)) if prog.is_linear else None
        wanted.append((ys, grads))
    by_rank = run_ranks(mesh.size, run_often, progs, work, timeout=100)
    for at, (ys, grads) in enumerate(wanted):
        for rank in mesh.ranks:
            for plain, *rest in by_rank[rank][at]:
                torch.testing.assert_close(plain, ys[rank], msg=str(progs[at]))
                if grads is not None:
                    for found, want in zip(rest, (ys, grads, ys), strict=True):
                        torch.testing.assert_close(found, want[rank], msg=str(progs[at]))


def share_nothing(mesh: Mesh) -> None:
    """Time and again, with bodies that write to what they are given."""
    fs.init(mesh)
    x = random_global((4, 6), F64)
    for p in (P(), P("x"), P(None, "y"), P(("x", "y"))):

        def body(v: torch.Tensor) -> torch.Tensor:
            return v.mul_(2)

        mapped = fs.shard_map(body, mesh=mesh, in_specs=p, out_specs=p, check=False)
        for _ in range(4):
            given = x.clone()
            out = mapped(given)
            assert torch.equal(out, 2 * x)
            out.zero_()
            assert torch.equal(given, x)
            pair = fs.shard(given, Spec(mesh, p, shape=(4, 6), dtype=F64))
            whole = fs.unshard(pair)
            whole.zero_()
            pair.local.mul_(3)
            assert torch.equal(given, x)
            assert torch.equal(fs.unshard(Sharded(pair.local, pair.spec)), 3 * x)


def test_what_is_replayed_shares_no_memory() -> None:
    mesh = MESHES[1]
    run_ranks(mesh.size, share_nothing, mesh, timeout=100)


def counted(mesh: Mesh) -> list[Any]:
    """The log of a mapped call, first and later."""
    fs.init(mesh)
    x = random_global((4, 6), F64).requires_grad_()
    mapped = fs.shard_map(
        lambda v: fs.psum(v, "x"), mesh=mesh, in_specs=P("x", "y"), out_specs=P(None, "y")
    )
    logs = []
    for at in range(6):
        if at % 2:
            with fs.comm_log() as log:
                torch.autograd.grad(mapped(x).sum(), x)
            logs.append(log.to_dict())
        else:
            torch.autograd.grad(mapped(x).sum(), x)
    return logs


def test_a_log_sees_what_would_be_replayed() -> None:
    mesh = MESHES[1]
    for logs in run_ranks(mesh.size, counted, mesh, timeout=100):
        assert all(log == logs[0] for log in logs)
        assert {each["op"] for each in logs[0]["forward"]} == {"all_reduce", "all_gather"}
