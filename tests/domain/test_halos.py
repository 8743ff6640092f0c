"""Halo exchanges on pairs and in bodies: values, transposes, boundaries, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec
from tests.helpers.strategies import shard_sizes

F64 = torch.float64
MODES = {"zeros": "constant", "circular": "circular", "reflect": "reflect",
         "replicate": "replicate"}  # fmt: skip


def padded(x: torch.Tensor, widths: dict[int, tuple[int, int]], boundary: str) -> torch.Tensor:
    """Return a global tensor of two dims with the elements beyond its ends."""
    pads = [*widths.get(1, (0, 0)), *widths.get(0, (0, 0))]
    return F.pad(x[None, None], pads, mode=MODES[boundary])[0, 0]


@st.composite
def exchanges(draw: Any) -> tuple[Spec, dict[int, tuple[int, int]], str]:
    """Draw a layout of two dims, sharded or not, widths and a boundary."""
    mesh = Mesh(h=draw(st.integers(1, 3)), w=draw(st.integers(1, 3)))
    shape = draw(st.integers(2, 6)), draw(st.integers(2, 6))
    partition = draw(st.sampled_from([P("h"), P("h", "w"), P(("w", "h")), P(None, "w")]))
    sizes = {
        dim: draw(shard_sizes(shape[dim], mesh.axis_size(axes)))
        for dim, axes in enumerate(partition.dims) if axes
    }  # fmt: skip
    spec = Spec(mesh, partition, shape=shape, dtype=F64, sizes=sizes)
    dims = draw(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=2, unique=True))
    boundary = draw(st.sampled_from([*MODES]))
    most = min(shape) - 1 if boundary == "reflect" else min(shape)
    pair = st.tuples(st.integers(0, most), st.integers(0, most))
    return spec, {dim: draw(pair) for dim in dims}, boundary


@given(exchanges())
def test_extended_shards_and_transposes(drawn: Any) -> None:
    """Every shard has the padded tensor's elements around it; the reduction is the transpose."""
    spec, widths, boundary = drawn
    x = fs.random.normal(fs.random.key(0), spec.shape, dtype=F64).requires_grad_()
    full = padded(x, widths, boundary)
    y = fs.domain.halo_exchange(fs.shard(x, spec), widths, boundary)
    for rank, local in zip(spec.mesh.ranks, y.local, strict=True):
        assert local.shape == y.spec.local_shape(rank)
        own = spec.local_shape(rank)
        index = tuple(
            slice(start, start + n + sum(widths.get(dim, (0, 0))) if n else start)
            for dim, (start, n) in enumerate(zip(spec.offsets(rank), own, strict=True))
        )
        torch.testing.assert_close(local, full[index])
    cotangent = fs.random.normal(fs.random.key(1), y.spec.shape, dtype=F64)
    (gradient,) = torch.autograd.grad((fs.unshard(y) * cotangent).sum(), x)
    back = fs.domain.halo_reduce(fs.shard(cotangent, y.spec), widths, boundary)
    torch.testing.assert_close(fs.unshard(back), gradient)
    assert back.spec.is_equivalent(spec)


@pytest.mark.parametrize("boundary", [*MODES])
def test_body_of_a_mapped_function(boundary: str) -> None:
    """A stencil in a body, with uneven shards, equals one device, and so does its gradient."""
    mesh, sizes = Mesh(h=3), (3, 1, 4)
    spec = Spec(mesh, P("h"), shape=(8, 2), dtype=F64, sizes={0: sizes})
    x = fs.random.normal(fs.random.key(0), (8, 2), dtype=F64).requires_grad_()

    def stencil(x: torch.Tensor) -> torch.Tensor:
        e = fs.domain.halo_exchange(x, {0: (2, 1)}, boundary, axis_name={0: "h"}, sizes={0: sizes})
        result: torch.Tensor = e[:-3] * 2 + e[2:-1].square() - e[3:]
        return result

    y = fs.unshard(fs.local_map(stencil, out_specs=spec)(fs.shard(x, spec)))
    e = padded(x, {0: (2, 1)}, boundary)
    expected = e[:-3] * 2 + e[2:-1].square() - e[3:]
    torch.testing.assert_close(y, expected)
    weight = fs.random.normal(fs.random.key(1), (8, 2), dtype=F64)
    grads = [torch.autograd.grad((z * weight).sum(), x)[0] for z in (y, expected)]
    torch.testing.assert_close(*grads)


PAIR = fs.shard(torch.ones(6, 4), Mesh(h=2), P("h"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fs.domain.halo_exchange(PAIR, {2: (1, 1)}), r"a dim must be in -2\.\.1"),
        (lambda: fs.domain.halo_exchange(PAIR, {0: (-1, 1)}), "numbers of at least 0"),
        (lambda: fs.domain.halo_exchange(PAIR, 1), "widths must map dims"),  # type: ignore[arg-type]
        (lambda: fs.domain.halo_exchange(PAIR, {0: (1, 1)}, "mirror"), "boundary must be one of"),
        (lambda: fs.domain.halo_exchange(PAIR, {0: (6, 1)}, "reflect"), "shorter than the dim"),
        (lambda: fs.domain.halo_reduce(PAIR, {0: (2, 2)}), "must have 2 \\+ 2 elements"),
        (lambda: fs.domain.halo_exchange(torch.ones(3), {0: (1, 1)}), "must be a pair, or"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        call()


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        ([1.0], {"axis_name": {0: "h"}}, "operand of type list"),
        (None, {"axis_name": {3: "h"}}, "axis_name must map dims"),
        (None, {"axis_name": {0: "h"}, "sizes": (2, 2)}, "sizes must map dims"),
    ],
)
def test_arguments_in_a_body_that_do_not_fit_are_refused(
    x: Any, options: Any, message: str
) -> None:
    @fs.shard_map(mesh=Mesh(h=2), in_specs=P("h"), out_specs=P("h"))
    def extend(y: torch.Tensor) -> Any:
        return fs.domain.halo_exchange(y if x is None else x, {0: (1, 1)}, **options)

    with pytest.raises(ShardingError, match=message):
        extend(torch.ones(4))
