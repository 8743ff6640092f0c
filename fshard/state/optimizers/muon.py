"""Muon: orthogonalised momentum, each matrix on one rank while it is orthogonalised."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch

from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import Problem, raise_if
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.state.local_updates import map_locals
from fshard.state.optimizers.optimizer import Optimizer, Rate, Slots, rate_at
from fshard.state.optimizers.option_checks import OptionChecks
from fshard.state.parameters import tree_reshard


def muon(
    lr: Rate = 1e-3, *, momentum: float = 0.95, nesterov: bool = True, weight_decay: float = 0.1,
    coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315), steps: int = 5,
    eps: float = 1e-7, dtype: torch.dtype | None = torch.bfloat16,
    scale: Callable[[int, int], float] | None = None, specs: Any = None,
) -> Optimizer:  # fmt: skip
    """Return Muon on trees of pairs of two dims.

    Every matrix has an owner rank, such that the work of all ranks is balanced. The update is
    redistributed to the owners by one exchange, orthogonalised by Newton-Schulz iterations on whole
    matrices, and redistributed back by another.

    Args:
        lr: learning rate, or a function of the number of the step to it.
        momentum: decay of the momentum.
        nesterov: True for Nesterov's momentum.
        weight_decay: decoupled decay of parameters, times the learning rate.
        coefficients: coefficients of the Newton-Schulz polynomial, of degrees 1, 3 and 5.
        steps: number of iterations.
        eps: the least Frobenius norm.
        dtype: dtype of the iterations; None is that of the parameter.
        scale: function of rows and columns to a factor of the rate; None is
            `sqrt(max(1, rows / columns))`.
        specs: layout of the momentum, see `fs.state.Optimizer`.

    Returns:
        The optimizer. Its state is `momentum`. Parameters of other than two dims raise
        `ShardingError` in `init`; embeddings and vectors have another optimizer.

    Raises:
        ShardingError: an argument is out of range.

    Its values are those of `torch.optim.Muon` on one device (K. Jordan, 2024).

    >>> import torch
    >>> import fshard as fs
    >>> params = fs.state.tree_shard([torch.eye(4)], fs.P("x"), mesh=fs.Mesh(x=2))
    >>> optimizer = fs.state.muon(0.1)
    >>> state, params = optimizer.update(params, optimizer.init(params), params)
    >>> params[0].spec
    f32[4@x,4]
    """
    checks = OptionChecks("fs.state.muon")
    checks.rate(lr)
    checks.fraction("momentum", momentum, "0.95")
    checks.at_least("weight_decay", weight_decay, 0)
    checks.at_least("eps", eps, 0, "1e-7, say")
    checks.positive_int("steps", steps, "5")
    checks.end()
    factor = scale or (lambda rows, columns: math.sqrt(max(1, rows / columns)))

    def kernel(step: int, grads: list[Sharded], slots: Slots, params: list[Sharded]) -> None:
        rate, buffers = rate_at(lr, step), slots["momentum"]

        def average(xs: list[torch.Tensor]) -> list[torch.Tensor]:
            grad, buffer = xs
            buffer.lerp_(grad, 1 - momentum)
            return [grad.lerp(buffer, momentum) if nesterov else buffer]

        def write(alpha: float, xs: list[torch.Tensor]) -> list[torch.Tensor]:
            xs[0].mul_(1 - rate * weight_decay).add_(xs[1], alpha=-alpha)
            return []

        updates = [Sharded(map_locals(average, pairs)[0], pairs[1].spec)
                   for pairs in zip(grads, buffers, strict=True)]  # fmt: skip
        updates = _by_owners(updates, lambda x: orthogonalize(x, coefficients, steps, eps, dtype))
        for pair in zip(params, updates, strict=True):
            map_locals(partial(write, rate * factor(*pair[0].shape)), pair)

    return Optimizer("fs.state.muon", _slots, kernel, specs)


def _slots(spec: Spec) -> dict[str, Spec | None]:
    raise_if("fs.state.muon", [] if spec.ndim == 2 else [
        Problem(f"a parameter {spec}", "a parameter must have 2 dims",
                "another optimizer for it: fs.state.adamw")])  # fmt: skip
    return {"momentum": spec}


def _by_owners(
    pairs: list[Sharded], function: Callable[[torch.Tensor], torch.Tensor]
) -> list[Sharded]:
    """Return a function of every matrix in its layout, computed by its owner rank alone."""
    layouts = [pair.spec for pair in pairs]
    owned = tree_reshard(pairs, [*_owner_specs(tuple(layouts))])
    results = map_locals(lambda xs: [*map(function, xs)], owned)
    owned = [Sharded(x, pair.spec) for x, pair in zip(results, owned, strict=True)]
    return cast(list[Sharded], tree_reshard(owned, layouts))


@lru_cache(maxsize=CACHE_SIZE)
def _owner_specs(specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
    """Return for every matrix the layout in which one rank has all of its rows.

    The largest work is assigned first, always to the rank with the least.
    """
    owners = [0] * len(specs)
    loads = [(0, index) for index in range(specs[0].mesh.size)]
    work = [math.prod(spec.shape) * min(spec.shape) for spec in specs]
    for i in sorted(range(len(specs)), key=lambda i: -work[i]):
        load, owners[i] = heapq.heappop(loads)
        heapq.heappush(loads, (load + work[i], owners[i]))
    return tuple(
        Spec(spec.mesh, PartitionSpec(spec.mesh.axes), shape=spec.shape, dtype=spec.dtype,
             sizes={0: [spec.shape[0] * (index == owner) for index in range(spec.mesh.size)]})
        for spec, owner in zip(specs, owners, strict=True)
    )  # fmt: skip


def orthogonalize(
    x: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float,
    dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    """Return a matrix with the singular vectors of `x` and singular values near 1.

    Args:
        x: matrix, `[rows, columns]`; an empty one is returned as it is.
        coefficients: `a`, `b`, `c` of the map `a s + b s^3 + c s^5` of singular values.
        steps: number of iterations.
        eps: the least Frobenius norm.
        dtype: dtype of the iterations, None for that of `x`.
    """
    if not x.numel():
        return x
    a, b, c = coefficients
    wide = x.shape[0] <= x.shape[1]
    y = (x if wide else x.T).to(dtype or x.dtype)
    y = y / y.norm().clamp(min=eps)
    for _ in range(steps):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y if wide else y.T).to(x.dtype).contiguous()
