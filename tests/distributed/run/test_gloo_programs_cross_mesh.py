"""Programs between meshes and exchanges on real processes, with first and second gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import Mesh, P, Spec
from fshard.program.program import Program
from fshard.program.steps import AllToAll
from fshard.run.interpreter import ranks_of
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.plans import exchange
from tests.helpers.spec_grid import global_of, random_locals

SHAPE = (7, 6)


def spec(mesh: Mesh, partition: P, sizes: dict[int, tuple[int, ...]] | None = None) -> Spec:
    return Spec(mesh, partition, shape=SHAPE, dtype=torch.float64, sizes=sizes, uneven="chunk")


def between(old: Mesh, new: Mesh) -> list[Program]:
    """Return exchanges from each layout of one mesh to each of another, also uneven ones."""
    a, b = old.axes[0], new.axes[0]
    owner = {0: (0,) * (new.shape[b] - 1) + (SHAPE[0],)}
    sources = [
        spec(old, P(a)),
        spec(old, P(None, a)),
        spec(old, P()),
        spec(old, P(unreduced={a})),
        spec(old, P(unreduced={a: "avg"})),
    ]
    targets = [
        spec(new, P(b)),
        spec(new, P(None, b)),
        spec(new, P()),
        spec(new, P(reduced={b})),
        spec(new, P(b), owner),
    ]
    turns = [(i, (i + by) % len(targets)) for by in (0, 2) for i in range(len(sources))]
    return [exchange(sources[i], targets[to]) for i, to in turns]


MESHES = {
    "2 to 3": (Mesh(x=2), Mesh(a=3)),
    "4 to 2": (Mesh(x=4), Mesh({"a": 2}, devices=(2, 1))),
    "2 to 2 others": (Mesh(x=2), Mesh({"a": 2}, devices=(3, 2))),
    "3 to 3, two in both": (Mesh(x=3), Mesh({"a": 3}, devices=(3, 1, 2))),
    "2x2 to 3": (Mesh(x=2, y=2), Mesh({"a": 3}, devices=(3, 0, 1))),
}


def on_mesh() -> list[Program]:
    """Return exchanges on one mesh, whose ranks keep some elements, and all-to-alls of pairs."""
    mesh = Mesh({"x": 2, "y": 2}, devices=(2, 0, 3, 1))
    cuts = {0: (0, 7)}
    layouts = [
        (P("x", "y"), P("y", "x"), None),
        (P(("x", "y")), P(None, ("y", "x")), None),
        (P(None, "x"), P("y"), cuts),
        (P("y", unreduced={"x"}), P("x"), None),
        (P("x", unreduced={"y"}), P(None, "x", unreduced={"y"}), None),
        (P("x", unreduced={"y": "avg"}), P("y", reduced={"x": "avg"}), cuts),
        (P(unreduced={"x", "y"}), P(reduced={"x"}), None),
        (P(("x", "y")), P(None, "x", unreduced={"y"}), None),
        (P("y", reduced={"x": "avg"}), P(("x", "y")), None),
        (P("y", unreduced={"x"}), P("x", unreduced={"y": "avg"}), {0: (5, 2)}),
    ]
    progs = [exchange(spec(mesh, a), spec(mesh, b, sizes)) for a, b, sizes in layouts]
    unsharded = Spec(mesh, P("x", "y"), shape=(6, 6, 6, 6), dtype=torch.float64)
    other = AllToAll("y", 1, 3)
    swaps = [AllToAll("x", 0, dim, also=(other,)) for dim in (1, 2)]
    return [*progs, *(Program(unsharded, (swap,)) for swap in swaps)]


def move(progs: list[Program]) -> list[tuple[Any, Any, Any]]:
    """Return this rank's results of each program: forward, backward, and backward of backward."""
    results = []
    for prog in progs:
        if dist.get_rank() not in ranks_of(prog):
            assert prog(None).shape == (0,)
            results.append((None, None, None))
            continue
        local = [mine_of(prog.src, 1), mine_of(prog.dst.dual, 2), mine_of(prog.src, 3)]
        x, g, h = (item.requires_grad_() for item in local)
        y = prog(x)
        (back,) = torch.autograd.grad(y, x, g, create_graph=True)
        (twice,) = torch.autograd.grad(back, g, h)
        waited = prog(x, async_op=True).wait()
        assert torch.equal(waited, y)
        results.append((y.detach(), back.detach(), twice.detach()))
    return results


def mine_of(spec: Spec, seed: int) -> torch.Tensor:
    """Return this rank's random local, or the empty tensor of a rank outside of the mesh."""
    locals_ = dict(zip(spec.mesh.ranks, random_locals(spec, seed), strict=True))
    empty = torch.empty(0, dtype=spec.dtype)
    return locals_.get(dist.get_rank(), empty)


def move_on_rank(progs: list[Program], mesh: Mesh) -> list[tuple[Any, Any, Any]]:
    fs.init(mesh)
    return move(progs)


def assert_moved(progs: list[Program], size: int) -> None:
    """Compare the ranks' results with slices of the global tensor."""
    actual = run_ranks(size, move_on_rank, progs, Mesh(all=size))
    for i, prog in enumerate(progs):
        src, dst = prog.src, prog.dst
        ys, back, twice = ([rows[i][which] for rows in actual] for which in range(3))
        for ranks, item in ((dst, ys), (src, back), (dst, twice)):
            outside = set(ranks_of(prog).ranks).difference(ranks.mesh.ranks)
            assert all(item[rank].shape == (0,) for rank in outside)
        unsharded, cotangent = global_of(src, random_locals(src, 1)), random_locals(dst.dual, 2)
        assert global_of(dst, [ys[rank] for rank in dst.mesh.ranks]).equal(unsharded), prog
        assert global_of(src.dual, [back[rank] for rank in src.mesh.ranks]).equal(
            global_of(dst.dual, cotangent)
        ), prog
        again = global_of(dst, [twice[rank] for rank in dst.mesh.ranks])
        assert again.equal(global_of(src, random_locals(src, 3))), prog


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", MESHES)
def test_exchanges_between_meshes(case: str) -> None:
    assert_moved(between(*MESHES[case]), 6)


@pytest.mark.timeout(300)
def test_exchanges_on_one_mesh() -> None:
    assert_moved(on_mesh(), 6)


# -- ranks that hold nothing of the source ------------------------------------------------


def give_nothing(prog: Program) -> list[float]:
    fs.init(Mesh(all=4))
    rank = dist.get_rank()
    x = mine_of(prog.src, 1) if rank in prog.src.mesh else None
    out = prog(x)
    assert not out.requires_grad
    return out.flatten().tolist()


def test_none_is_the_local_outside_of_the_mesh() -> None:
    prog = exchange(spec(Mesh(x=2), P("x")), spec(Mesh({"a": 2}, devices=(1, 3)), P("a")))
    unsharded = global_of(prog.src, random_locals(prog.src, 1)).flatten().tolist()
    assert run_ranks(4, give_nothing, prog) == [[], unsharded[:24], [], unsharded[24:]]


def train(prog: Program) -> float | None:
    """Run one step of a model whose halves are on different ranks."""
    fs.init(Mesh(all=4))
    rank = dist.get_rank()
    x = mine_of(prog.src, 1).requires_grad_() if rank in ranks_of(prog) else None
    y = prog(x)
    if x is None:
        return None
    (y**2).sum().backward()
    assert x.grad is not None
    return float((x.grad - 2 * x.detach()).abs().sum())


def test_gradients_of_a_loss_on_other_ranks() -> None:
    prog = exchange(spec(Mesh(x=2), P("x")), spec(Mesh({"a": 2}, devices=(2, 3)), P(None, "a")))
    assert run_ranks(4, train, prog) == [0.0, 0.0, 0.0, 0.0]
