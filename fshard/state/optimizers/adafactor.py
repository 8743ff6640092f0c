"""Adafactor, with second moments factored over the last two dims of the global tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.state.local_updates import map_locals
from fshard.state.optimizers.optimizer import Optimizer, Rate, Slots, invariant_spec, rate_at
from fshard.state.optimizers.option_checks import OptionChecks
from fshard.state.parameters import tree_reshard


def adafactor(
    lr: Rate = 0.01, *, beta2_decay: float = -0.8, eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0, weight_decay: float = 0.0, specs: Any = None,
) -> Optimizer:  # fmt: skip
    """Return Adafactor on trees of pairs.

    Means over sharded dims are sums of partial sums: two batches of reductions a step, of rows,
    columns and scalars.

    Args:
        lr: largest relative step, or a function of the number of the step to it.
        beta2_decay: exponent of the decay of the means of squares.
        eps: the least mean of squares (None is the dtype's epsilon), and the least scale of a
            parameter.
        d: threshold of the root mean square of an update.
        weight_decay: decoupled decay of parameters, times the learning rate.
        specs: layout of the parameters while they are updated, see `fs.state.Optimizer`.

    Returns:
        The optimizer. Its state is `row` and `column`, for parameters of two or more dims, and
        `square` for others.

    Raises:
        ShardingError: an argument is out of range.

    Its values are those of `torch.optim.Adafactor` on one device (arXiv 1804.04235).

    >>> import torch
    >>> import fshard as fs
    >>> params = fs.state.tree_shard([torch.ones(2, 4)], fs.P("x"), mesh=fs.Mesh(x=2))
    >>> optimizer = fs.state.adafactor(0.1)
    >>> state, params = optimizer.update(params, optimizer.init(params), params)
    >>> state["row"][0].spec, state["column"][0].spec
    (f32[2@x,1], f32[1,4])
    """
    checks = OptionChecks("fs.state.adafactor")
    checks.rate(lr)
    if checks.pair("eps", eps, "(None, 1e-3)"):
        if eps[0] is not None:
            checks.at_least("eps[0]", eps[0], 0, "None, or 1e-30, say")
        checks.at_least("eps[1]", eps[1], 0, "1e-3, say")
    if not isinstance(beta2_decay, float | int) or not beta2_decay <= 0:
        checks.add("beta2_decay", beta2_decay, "a number of at most 0", "-0.8, say")
    checks.at_least("d", d, 1)
    checks.at_least("weight_decay", weight_decay, 0)
    checks.end()
    options = _AdafactorOptions(lr, beta2_decay, eps, d, weight_decay)
    return Optimizer("fs.state.adafactor", _slots, partial(_update, options), specs)


@dataclass(frozen=True, slots=True)
class _AdafactorOptions:
    """Arguments of `adafactor`."""

    lr: Rate
    beta2_decay: float
    eps: tuple[float | None, float]
    d: float
    weight_decay: float


def _slots(spec: Spec) -> dict[str, Spec | None]:
    if spec.ndim < 2:
        return {"row": None, "column": None, "square": spec}
    row, column = (_summed(spec, (d,), reduced=True) for d in (-1, -2))
    return {"row": row, "column": column, "square": None}


def _update(
    options: _AdafactorOptions, step: int, grads: list[Sharded], slots: Slots, params: list[Sharded]
) -> None:
    """Write parameters and slots: one batch of sums before the updates, one of their norms."""
    rows, columns, squares = (slots[name] for name in ("row", "column", "square"))
    factored = [i for i, row in enumerate(rows) if row is not None]
    matrices = [grads[i] for i in factored]
    sums = [
        _sums(params, ()),
        _sums(matrices, (-1,)),
        _sums(matrices, (-2,)),
        _sums([rows[i] for i in factored], (-2,), square=False),
        _sums(matrices, (-1, -2)),
    ]
    scales, *factors = _reduced(sums)
    of_matrix = dict(zip(factored, zip(*factors, strict=True), strict=True))
    weight = float(step) ** options.beta2_decay
    updates = []
    for i, (grad, square) in enumerate(zip(grads, squares, strict=True)):
        eps = torch.finfo(grad.dtype).eps if options.eps[0] is None else options.eps[0]
        if square is None:
            scale = partial(_scale_matrix, grad.shape, weight, eps)
            operands = [grad, rows[i], columns[i], *of_matrix[i]]
        else:
            scale, operands = partial(_scale, weight, eps), [grad, square]
        updates.append(Sharded(map_locals(scale, operands)[0], grad.spec))
    (norms,) = _reduced([_sums(updates, ())])
    for pairs in zip(params, updates, scales, norms, strict=True):
        root = math.sqrt(max(1, math.prod(pairs[0].shape)))
        map_locals(partial(_write, options, step, root), pairs)


def _scale(weight: float, eps: float, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Update the mean of squares of a vector, and return its scaled gradient."""
    grad, square = xs
    square.lerp_(grad * grad, weight)
    return [square.clamp(min=eps * eps).rsqrt_().mul_(grad)]


def _scale_matrix(
    shape: tuple[int, ...], weight: float, eps: float, xs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Update the means of squares of rows and columns, and return the scaled gradient.

    Args:
        shape: global shape of the parameter.
        weight: weight of the new means.
        eps: root of the least mean of squares.
        xs: the gradient, both means, and global sums: of squares over columns, over rows, of the
            mean of rows, and of squares over both.
    """
    grad, row, column, row_sum, column_sum, old, total = xs
    r, c = shape[-2:]
    row.lerp_(row_sum / c, weight)
    column.lerp_(column_sum / r, weight)
    mean = (old / r).lerp_(total / (r * c), weight).clamp_(min=eps)
    return [(row @ column).div_(mean).clamp_(min=eps * eps).rsqrt_().mul_(grad)]


def _write(
    options: _AdafactorOptions, step: int, root: float, xs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Subtract an update from a parameter; `root` is that of its number of elements.

    `xs` are the parameter, the update, and their sums of squares.
    """
    param, update, size, norm = xs
    rate = rate_at(options.lr, step)
    alpha = (size.sqrt() / root).clamp(min=options.eps[1]) * min(rate, 1 / math.sqrt(step))
    denominator = (norm.sqrt() / (root * options.d)).clamp(min=1.0)
    param.mul_(1 - rate * options.weight_decay).sub_(update * (alpha / denominator))
    return []


def _summed(spec: Spec, dims: Sequence[int], *, reduced: bool) -> Spec:
    """Return the spec of sums over dims, which keep size 1; over all dims if there are none.

    Unless `reduced`, they are partial sums along the axes that shard these dims.
    """
    if not dims:
        axes = {axis for names in spec.partition.dims for axis in names}
        p = PartitionSpec(unreduced=set() if reduced else axes)
        return Spec(spec.mesh, p, shape=(), dtype=spec.dtype)
    indices = {d % spec.ndim for d in dims}
    axes = {axis for d in indices for axis in spec.partition.dims[d]}
    kept = [() if d in indices else names for d, names in enumerate(spec.partition.dims)]
    return Spec(spec.mesh, PartitionSpec(*kept, unreduced=set() if reduced else axes),
                shape=[1 if d in indices else n for d, n in enumerate(spec.shape)],
                dtype=spec.dtype, sizes={d: s for d, s in enumerate(spec.sizes)
                                         if s is not None and d not in indices})  # fmt: skip


def _sums(pairs: Sequence[Sharded], dims: tuple[int, ...], *, square: bool = True) -> list[Sharded]:
    """Return sums over dims of local squares, or of local values, as unreduced pairs."""

    def add(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        values = [x * x if square else x for x in xs]
        return [x.sum(dims, keepdim=True) if dims else x.sum() for x in values]

    if not pairs:
        return []
    locals_ = map_locals(add, pairs)
    specs = [_summed(pair.spec, dims, reduced=False) for pair in pairs]
    return [Sharded(local, spec) for local, spec in zip(locals_, specs, strict=True)]


def _reduced(groups: Sequence[Sequence[Sharded]]) -> list[list[Sharded]]:
    """Return lists of partial sums reduced, all in one batch."""
    return cast(list[list[Sharded]], tree_reshard(groups, [
        [invariant_spec(pair.spec) for pair in group] for group in groups
    ]))  # fmt: skip
