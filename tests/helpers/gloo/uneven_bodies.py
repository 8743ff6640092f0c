"""Bodies over uneven shards that leave the sizes of shards out, beside one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fshard as fs
from fshard import Mesh, P, Spec
from tests.helpers.gloo.dense_neighbours import dense_knn

MESH = Mesh(h=4)
SHAPE = (9, 3)
SPEC = Spec(MESH, P("h"), shape=SHAPE, dtype=torch.float64, sizes={0: (4, 0, 2, 3)})
attention: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention


def differences(x: torch.Tensor) -> torch.Tensor:
    extended = fs.domain.halo_exchange(x, {0: (1, 1)}, axis_name={0: "h"})
    result: torch.Tensor = extended[2:] * extended[:-2]
    return result


def dense_differences(x: torch.Tensor) -> torch.Tensor:
    extended = torch.nn.functional.pad(x, (0, 0, 1, 1))
    return extended[2:] * extended[:-2]


def ring(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = fs.domain.scaled_dot_product_attention(
        x, x, x, is_causal=True, axis_name="h"
    )
    return result


def nearest(x: torch.Tensor) -> torch.Tensor:
    distances: torch.Tensor = fs.domain.knn(x, x, 3, axis_name="h")[1]
    return distances


def potential(y: torch.Tensor, index: int, x: torch.Tensor) -> torch.Tensor:
    return (x[:, None] - y).square().sum((1, 2))


def fold(x: torch.Tensor) -> torch.Tensor:
    zeros = x.new_zeros(len(x))
    total = fs.domain.ring_fold(zeros, potential, torch.add, x, "h", operands=(x,))
    return total[:, None].expand(-1, 3)


BODIES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "halo exchange": (differences, dense_differences),
    "attention": (ring, lambda x: attention(x, x, x, is_causal=True)),
    "knn": (nearest, lambda x: dense_knn(x, x, 3)[1]),
    "ring_fold": (fold, lambda x: potential(x, 0, x)[:, None].expand(-1, 3)),
}


def check_bodies(check: Any) -> None:
    """Compare values and gradients of all bodies with one device."""
    for body, dense in BODIES.values():
        mapped = fs.shard_map(body, mesh=MESH, in_specs=SPEC, out_specs=SPEC, check=check)
        x = fs.shard(fs.random.normal(fs.random.key(0), SHAPE, dtype=torch.float64), SPEC)
        fs.testing.assert_like_one_device(mapped, dense, (x,), rtol=1e-10, atol=1e-10)
