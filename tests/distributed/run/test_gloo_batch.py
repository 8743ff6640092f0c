"""Batches on real processes agree with the simulation in values, gradients and launches."""

from __future__ import annotations

from typing import Any

import torch

import fshard as fs
from fshard import Batch, Mesh, P, Program, Spec
from fshard.layout.tree import flatten, unflatten
from tests.helpers.batches import ends, gathered_parameters, only, owned_matrices
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spec_grid import random_locals
from tests.helpers.spmd.collective_cases import this_rank

F64 = torch.float64
MESH = Mesh({"x": 2, "y": 2}, devices=(2, 0, 3, 1))
SMALL, LARGE = Mesh(a=3), Mesh({"b": 2}, devices=(3, 1))


def mixed() -> Batch:
    """Return programs of all layouts, several dtypes and meshes, and between meshes."""
    p, q = P("x", "y"), P(("y", "x"))
    pairs = [
        (P("x"), P()), (P(None, "y"), P()), (P(unreduced={"x"}), P("x")), (p, q), (q, p),
        (P(unreduced={"x", "y"}), P()), (P("x", unreduced={"y": "avg"}), P("x")),
        (P(), P("y")), (P(reduced={"x"}), P("x")), (P("y", "x"), P("x", "y")),
    ]  # fmt: skip
    shapes = [(4, 8), (7, 5)]
    progs: list[Program | None] = [
        fs.redistribute(
            Spec(MESH, a, shape=shape, dtype=dtype, uneven="chunk"),
            Spec(MESH, b, shape=shape, dtype=dtype, uneven="chunk"),
        )
        for a, b in pairs
        for shape in shapes
        for dtype in (F64, torch.float32)
    ]
    for (m, a), (n, b) in [
        ((SMALL, P("a")), (LARGE, P("b"))), ((LARGE, P(None, "b")), (SMALL, P())),
        ((SMALL, P()), (MESH, P("x", "y"))), ((MESH, P("y")), (MESH, P(None, "x"))),
    ]:  # fmt: skip
        src = Spec(m, a, shape=(6, 4), dtype=F64)
        dst = Spec(n, b, shape=(6, 4), dtype=F64)
        progs.append(Program(src, (fs.Exchange(dst.partition, dst.sizes, dst.mesh),), dst))
    return Batch([*progs, None], bucket_bytes=512)


def batches() -> dict[str, Batch]:
    parameters = fs.redistribute(*gathered_parameters(6))
    return {
        "mixed": mixed(),
        "parameters": parameters,
        "muon": fs.redistribute(*ends(owned_matrices(Mesh(x=4), 50))),
        "sent in less": fs.redistribute(
            *gathered_parameters(2), forward_dtype=torch.bfloat16, backward_dtype=torch.float64
        ),
        "ahead": parameters,
    }


def leaves_of(batch: Batch, rank: int) -> list[Any]:
    """Return this rank's locals, every third of which requires no gradient."""
    locals_: list[Any] = []
    for i, leaf in enumerate(batch.leaves):
        if leaf is None:
            locals_.append(None)
            continue
        ranks = list(leaf.src.mesh.ranks)
        x = torch.empty(0, dtype=leaf.src.dtype)
        if rank in ranks:
            x = random_locals(leaf.src, i)[ranks.index(rank)]
        locals_.append(x.requires_grad_(i % 3 != 2))
    return locals_


def results(rank: int) -> dict[str, Any]:
    """Return values, first and second gradients of each batch on this rank, and its launches."""
    values: dict[str, Any] = {}
    for name, batch in batches().items():
        xs = leaves_of(batch, rank)
        tree = unflatten(batch.structure, xs)
        inputs = [x for x in xs if x is not None and x.requires_grad]
        with fs.comm_log() as log:
            out = batch(tree, async_op=True).wait() if name == "ahead" else batch(tree)
            ys = [y for y in flatten(out)[0] if y is not None]
            total = sum(((y + 1) ** 2).sum() for y in ys if y.requires_grad)
            grads = torch.autograd.grad(total, inputs, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in grads), inputs)
        numbers = [[item.detach() for item in tensors] for tensors in (ys, grads, second)]
        expected = only(batch, [x is not None and x.requires_grad for x in xs])
        said = len(batch.launches), len(expected.T.launches)
        ran = log.forward.counts.total(), log.backward.counts.total()
        values[name] = numbers, said, ran
    return values


WORLD = Mesh(world=4)


def on_rank() -> dict[str, Any]:
    fs.init(WORLD)
    return results(this_rank(WORLD))


def test_batches_agree_with_the_simulation() -> None:
    by_rank = run_ranks(4, on_rank)
    simulated = fs.simulate(WORLD, lambda: results(this_rank(WORLD)))
    for want, actual in zip(simulated, by_rank, strict=True):
        for name, (numbers, said, ran) in actual.items():
            torch.testing.assert_close(numbers, want[name][0], msg=lambda m, n=name: f"{n}: {m}")
            # Between meshes a rank takes no part in what it neither sends nor receives.
            assert said == ran if name != "mixed" else all(map(int.__ge__, said, ran)), name
    assert by_rank[0]["muon"][1] == (1, 1)
