"""Collectives that are replayed do what they did when they came first, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import Mesh
from fshard.spmd import plans
from tests.distributed.harness import run_ranks
from tests.helpers import random_global
from tests.test_collectives import CASES, axes_of, by_oracle, on_rank
from tests.test_collectives import arguments as collective_arguments

MESHES = [Mesh(i=2), Mesh({"x": 2, "y": 2}, devices=(2, 0, 3, 1))]
F64 = torch.float64
Work = list[tuple[int, tuple[str, ...], list[torch.Tensor], list[torch.Tensor]]]


def run_often(mesh: Mesh, work: Work) -> list[Any]:
    """Every case four times: the first two are not replayed; then of other strides, twice."""
    fs.init(mesh)
    plans._SEEN.clear()
    plans._LAUNCHERS.clear()
    place = list(mesh.ranks).index(dist.get_rank())
    found = []
    for at, axes, xs, cts in work:
        x, ct = xs[place], cts[place]
        other = x.mT.contiguous().mT if x.ndim > 1 else x
        given = [(x, ct)] * 3 + [(other, ct.mT.contiguous().mT if ct.ndim > 1 else ct)] * 3
        found.append([on_rank(CASES[at], mesh, axes, *each) for each in given])
    assert sum(launcher is not None for launcher in plans._LAUNCHERS.values()) > len(work)
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_replayed_collectives(mesh: Mesh) -> None:
    work: Work = []
    want = []
    for at, each in enumerate(CASES):
        for axes in axes_of(mesh)[-1:]:
            xs = collective_arguments(each, mesh, axes, F64)
            ys, cts, grads = by_oracle(each, mesh, axes, xs)
            work.append((at, axes, xs, cts))
            want.append((ys, grads))
    by_rank = run_ranks(mesh.size, run_often, mesh, work, timeout=100)
    for at, (ys, grads) in enumerate(want):
        name = f"{CASES[work[at][0]].name} along {work[at][1]}"
        for place, rank in enumerate(mesh.ranks):
            for y, grad, again in by_rank[rank][at]:
                torch.testing.assert_close(y, ys[place], msg=name)
                torch.testing.assert_close(grad, grads[place], msg=name)
                assert again is None or torch.allclose(again, ys[place]), name


def run_around() -> list[Any]:
    """What surrounds a replayed collective: observers, writes in place, dtypes, no grad."""
    mesh = Mesh(i=2)
    fs.init(mesh)
    rank = float(dist.get_rank())
    found: list[Any] = []
    for _ in range(3):
        x = torch.tensor([rank, 1.0], requires_grad=True)
        y = fs.all_gather(x, "i", mesh=mesh)
        y.mul_(2.0)
        (grad,) = torch.autograd.grad(y.sum(), x)
        with fs.comm_log() as log:
            fs.psum(x, "i", mesh=mesh).sum().backward()
            fs.all_gather(x, "i", mesh=mesh).sum().backward()
        with torch.no_grad():
            plain = fs.psum(x, "i", mesh=mesh)
        means = [fs.pmean(torch.tensor([1, 2]), "i", mesh=mesh).dtype]
        torch.set_default_dtype(F64)
        means.append(fs.pmean(torch.tensor([1, 2]), "i", mesh=mesh).dtype)
        torch.set_default_dtype(torch.float32)
        found.append((y.detach(), grad, str(log), plain.requires_grad, plain.tolist(), means))
    return found


def test_around_a_replay() -> None:
    for first, *others in run_ranks(2, run_around):
        assert first[0].tolist() == [[0.0, 2.0], [2.0, 2.0]]
        assert first[1].tolist() == [4.0, 4.0]
        assert first[3:] == (False, [1.0, 2.0], [torch.float32, F64])
        for each in others:
            assert [*map(str, each)] == [*map(str, first)]


def run_changing() -> list[int]:
    """A shape that comes once is not recorded, and what is recorded is bounded."""
    mesh = Mesh(i=2)
    fs.init(mesh)
    plans._SEEN.clear()
    plans._LAUNCHERS.clear()
    counts = []
    for _ in range(2):
        for n in range(1, 4):
            fs.psum(random_global((n,), F64), "i", mesh=mesh)
        counts.append(len(plans._LAUNCHERS))
    return counts


def test_what_comes_once_is_not_recorded() -> None:
    assert run_ranks(2, run_changing) == [[0, 3]] * 2
