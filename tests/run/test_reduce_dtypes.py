"""Reductions of 8-bit floats, which PyTorch stores and hardly computes with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, Spec
from fshard.run.transports.reduce_dtypes import largest, reduced
from tests.helpers.reference import simulate
from tests.helpers.spec_grid import all_specs, global_of, random_locals, sample_pairs

SMALL = [torch.float8_e4m3fn, torch.float8_e5m2]
KINDS = ["sum", "avg", "max", "min", "product"]
MESH = Mesh(x=2, y=2)


def drawn(spec: Spec, seed: int) -> tuple[torch.Tensor, ...]:
    """Return locals of -1, 0, 1 and these times 4, so that all results are exact."""
    wide = random_locals(spec._with(dtype=torch.float32), seed)
    scale = 4 if "avg" in dict(spec.partition.unreduced_kinds).values() else 1
    return tuple((x.clamp(-1, 1) * scale).to(spec.dtype) for x in wide)


def value(spec: Spec, shards: Any) -> torch.Tensor:
    return global_of(spec._with(dtype=torch.float32), [x.float() for x in shards])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_redistribute_in_8_bit_dtypes(dtype: torch.dtype, kind: str) -> None:
    states = ("invariant", "reduced", "unreduced")
    specs = all_specs(MESH, (4, 6), states, kind=kind, dtype=dtype, uneven="chunk")
    specs += [Spec(MESH, P(None, "y", reduced={"x": "avg"}), shape=(4, 6), dtype=dtype)]
    if kind not in ("sum", "avg"):  # they mix with no average
        specs = [spec for spec in specs if not spec.partition.reduced]
    for i, (src, dst) in enumerate(sample_pairs(specs, 150)):
        shards = drawn(src, i)
        prog = fs.redistribute(src, dst)
        moved = prog(shards)
        assert {x.dtype for x in moved} == {dtype}
        assert torch.equal(value(dst, moved), value(src, shards)), prog
        reported = simulate(prog, shards)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(moved, reported, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_neutral_elements_change_nothing(dtype: torch.dtype, kind: str) -> None:
    top = torch.finfo(dtype).max
    x = torch.tensor([top, -top, 0.0, 1.0]).to(dtype)
    if dtype == torch.float8_e5m2:
        x[0], x[1] = torch.inf, -torch.inf
    for spec in all_specs(MESH, (4,), ("invariant", "unreduced"), kind=kind, dtype=dtype):
        assert fs.unshard(fs.shard(x, spec)).tolist() == x.tolist()


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_an_average_is_rounded_once(dtype: torch.dtype) -> None:
    """The sum exceeds the largest value of the dtype."""
    top = torch.finfo(dtype).max
    xs = tuple(torch.tensor([top, 1.0]).to(dtype) for _ in range(4))
    assert reduced(xs, "avg").tolist() == [top, 1.0]
    spec = Spec(MESH, P(unreduced={"x": "avg", "y": "avg"}), shape=(2,), dtype=dtype)
    uneven = Spec(MESH, P("x"), shape=(2,), dtype=dtype, sizes={0: (2, 0)})
    for dst in (spec.replace(partition=P()), spec.replace(partition=P("y")), uneven):
        assert fs.unshard((fs.redistribute(spec, dst)(xs), dst)).tolist() == [top, 1.0]
    results = fs.simulate(Mesh(x=4), lambda: fs.pmean(xs[0], "x", mesh=Mesh(x=4)).tolist())
    assert results == [[top, 1.0]] * 4


def test_largest_is_the_upper_limit() -> None:
    assert [largest(dtype) for dtype in (*SMALL, torch.float16)] == [448.0, torch.inf, torch.inf]


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_gradients_of_averages_and_maxima(dtype: torch.dtype) -> None:
    for kind, expected in (("avg", [0.25] * 4), ("max", [0.0, 0.5, 0.5, 0.0])):
        spec = Spec(MESH, P(unreduced={"x": kind, "y": kind}), shape=(1,), dtype=dtype)
        xs = [torch.tensor([v]).to(dtype).requires_grad_() for v in (1.0, 3.0, 3.0, 2.0)]
        fs.unshard((tuple(xs), spec)).float().sum().backward()
        assert [x.grad.item() for x in xs if x.grad is not None] == expected
