"""Factories of pairs: `fs.zeros`, `fs.full`, `fs.arange`, `fs.eye` and others.

Each rank creates its shard, without communication and without the global tensor. All layouts have
the same values. Along an unreduced axis, coordinate 0 holds the values, as with `fs.shard`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fshard._util.dtypes import is_inexact
from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.sharded import Pair, Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair
from fshard.ops.trace.trace import check_untraced
from fshard.run.creation import Offsets, Shape, create_pair, default_device

Device = torch.device | str | None


def zeros(spec: Spec, /, *, device: Device = None, requires_grad: bool = False) -> Sharded:
    """Create a tensor of zeros in a layout.

    Args:
        spec: layout, global shape and dtype of the result.
        device: device of the locals; by default PyTorch's or, if that is the CPU, the one of
            `fs.init`'s backend.
        requires_grad: whether autograd records operations on the locals, which are leaves.

    Returns:
        The pair; in a simulation its local is the tuple of all shards.

    Raises:
        ShardingError: `spec` is not a spec, the rank is not in its mesh, or a gradient is requested
            of a dtype without one.

    >>> import fshard as fs
    >>> fs.zeros(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))).local
    (tensor([0., 0.]), tensor([0., 0.]))
    """
    return _filled("fs.zeros", spec, 0, device, requires_grad)


def ones(spec: Spec, /, *, device: Device = None, requires_grad: bool = False) -> Sharded:
    """Create a tensor of ones in a layout.

    Args:
        spec: layout, global shape and dtype of the result.
        device: as for `zeros`.
        requires_grad: as for `zeros`.

    Returns:
        The pair; in a simulation its local is the tuple of all shards.

    Raises:
        ShardingError: `spec` is not a spec, the rank is not in its mesh, or a gradient is requested
            of a dtype without one.

    >>> import fshard as fs
    >>> fs.ones(fs.Spec(fs.Mesh(x=2), fs.P(unreduced={"x"}), shape=(2,))).local
    (tensor([1., 1.]), tensor([0., 0.]))
    """
    return _filled("fs.ones", spec, 1, device, requires_grad)


def full(
    spec: Spec, fill_value: complex, /, *, device: Device = None, requires_grad: bool = False
) -> Sharded:
    """Create a tensor of one value in a layout.

    Args:
        spec: layout, global shape and dtype of the result.
        fill_value: the value of all elements, a number.
        device: as for `zeros`.
        requires_grad: as for `zeros`.

    Returns:
        The pair; in a simulation its local is the tuple of all shards.

    Raises:
        ShardingError: `spec` is not a spec, `fill_value` is not a number, the rank is not in the
            mesh, or a gradient is requested of a dtype without one.

    >>> import fshard as fs
    >>> fs.full(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,)), 2.5).local
    (tensor([2.5000, 2.5000]), tensor([2.5000, 2.5000]))
    """
    if not isinstance(fill_value, bool | int | float | complex):
        fail("fs.full", f"a {type(fill_value).__name__} as the value",
             "fill_value must be a number, the same on every rank",
             "fs.full(spec, 0.5), say; fs.shard(tensor, spec) of a tensor")  # fmt: skip
    return _filled("fs.full", spec, fill_value, device, requires_grad)


def empty(spec: Spec, /, *, device: Device = None, requires_grad: bool = False) -> Sharded:
    """Create a tensor in a layout, whose values are arbitrary until they are written.

    Args:
        spec: layout, global shape and dtype of the result. Replicas, too, have arbitrary values:
            write the same to all of them.
        device: as for `zeros`.
        requires_grad: as for `zeros`.

    Returns:
        The pair; in a simulation its local is the tuple of all shards.

    Raises:
        ShardingError: `spec` is not a spec, the rank is not in its mesh, or a gradient is requested
            of a dtype without one.

    >>> import fshard as fs
    >>> fs.empty(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4, 8))).local[1].shape
    torch.Size([2, 8])
    """
    _check_target("fs.empty", spec, requires_grad)
    return _create(
        "fs.empty", spec, device, requires_grad,
        lambda _, shape, device: torch.empty(shape, dtype=spec.dtype, device=device),
    )  # fmt: skip


def arange(
    spec: Spec,
    start: float = 0,
    step: float = 1,
    /,
    *,
    device: Device = None,
    requires_grad: bool = False,
) -> Sharded:
    """Create `start, start + step, ...` in a layout of one dim.

    Element i is `start + i * step`, computed in int64 if both are integers, else in float64, and
    rounded once to the dtype of the spec.

    Args:
        spec: layout, size and dtype of the result; it has one dim.
        start: the first element.
        step: the difference of neighbours.
        device: as for `zeros`.
        requires_grad: as for `zeros`.

    Returns:
        The pair; in a simulation its local is the tuple of all shards.

    Raises:
        ShardingError: `spec` is not a spec of one dim, `start` or `step` is not a finite number,
            the rank is not in the mesh, or a gradient is requested of a dtype without one.

    >>> import fshard as fs
    >>> fs.arange(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,)), 1, 0.5).local
    (tensor([1.0000, 1.5000]), tensor([2.0000, 2.5000]))
    """
    where = "fs.arange"
    _check_target(where, spec, requires_grad)
    problems = [
        Problem(f"{name}={value!r}", f"{name} must be a finite number", f"{name}=1, say")
        for name, value in (("start", start), ("step", step))
        if not isinstance(value, int | float) or not math.isfinite(value)
    ]
    if spec.ndim != 1:
        problems.append(Problem(f"{spec} of {spec.ndim} dims", "the spec must have one dim",
                                "fs.Spec(mesh, P('x'), shape=(n,))"))  # fmt: skip
    raise_if(where, problems)
    exact = torch.int64 if isinstance(start, int) and isinstance(step, int) else torch.float64

    def create(offsets: Offsets, shape: Shape, device: Device) -> torch.Tensor:
        first = offsets[0]
        index = torch.arange(first, first + shape[0], dtype=exact, device=device)
        return index.mul_(step).add_(start).to(spec.dtype)

    return _create(where, spec, device, requires_grad, create)


def eye(spec: Spec, /, *, device: Device = None, requires_grad: bool = False) -> Sharded:
    """Create a matrix of ones on the diagonal and zeros elsewhere, in a layout.

    Args:
        spec: layout, shape and dtype of the result, `(rows, columns)`. Dims before these two are
            batch dims.
        device: as for `zeros`.
        requires_grad: as for `zeros`.

    Returns:
        The pair; in a simulation its local is the tuple of all shards.

    Raises:
        ShardingError: `spec` is not a spec of at least two dims, the rank is not in its mesh, or a
            gradient is requested of a dtype without one.

    >>> import fshard as fs
    >>> fs.eye(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(2, 3))).local
    (tensor([[1., 0., 0.]]), tensor([[0., 1., 0.]]))
    """

    def create(offset: int, ones: torch.Tensor) -> torch.Tensor:
        return ones.tril_(offset).triu_(offset)

    return _triangle("fs.eye", spec, 0, create, device, requires_grad)


def tril(
    spec: Spec, diagonal: int = 0, /, *, device: Device = None, requires_grad: bool = False
) -> Sharded:
    """Create a mask of the lower triangle in a layout: one on and below a diagonal, else zero.

    `fs.tril(spec)` of a bool spec is the causal mask of attention, queries by keys.

    Args:
        spec: layout, shape and dtype of the result, `(rows, columns)`. Dims before these two are
            batch dims.
        diagonal: the diagonal, 0 for the main one, positive above it.
        device: as for `zeros`.
        requires_grad: as for `zeros`.

    Returns:
        The pair; in a simulation its local is the tuple of all shards.

    Raises:
        ShardingError: `spec` is not a spec of at least two dims, `diagonal` is not an int, the rank
            is not in the mesh, or a gradient is requested of a dtype without one.

    >>> import torch
    >>> import fshard as fs
    >>> spec = fs.Spec(fs.Mesh(x=2), fs.P(None, "x"), shape=(2, 2), dtype=torch.bool)
    >>> fs.unshard(fs.tril(spec))
    tensor([[ True, False],
            [ True,  True]])
    """
    return _triangle("fs.tril", spec, diagonal, lambda k, ones: ones.tril_(k), device,
                     requires_grad)  # fmt: skip


def triu(
    spec: Spec, diagonal: int = 0, /, *, device: Device = None, requires_grad: bool = False
) -> Sharded:
    """Create a mask of the upper triangle in a layout: one on and above a diagonal, else zero.

    Args:
        spec: layout, shape and dtype of the result, `(rows, columns)`. Dims before these two are
            batch dims.
        diagonal: the diagonal, 0 for the main one, positive above it.
        device: as for `zeros`.
        requires_grad: as for `zeros`.

    Returns:
        The pair; in a simulation its local is the tuple of all shards.

    Raises:
        ShardingError: `spec` is not a spec of at least two dims, `diagonal` is not an int, the rank
            is not in the mesh, or a gradient is requested of a dtype without one.

    >>> import fshard as fs
    >>> fs.unshard(fs.triu(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(2, 2)), 1))
    tensor([[0., 1.],
            [0., 0.]])
    """
    return _triangle("fs.triu", spec, diagonal, lambda k, ones: ones.triu_(k), device,
                     requires_grad)  # fmt: skip


# -- of the layout of another pair ------------------------------------------------------------


def zeros_like(
    pair: Pair, /, *, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> Sharded:
    """Create zeros in the layout of a pair, on its device.

    Args:
        pair: `(local, spec)`, whose values are not read.
        dtype: dtype of the result; by default the dtype of the pair.
        requires_grad: whether autograd records operations on the locals, which are leaves.

    Returns:
        The pair.

    Raises:
        ShardingError: the argument is not a pair.

    >>> import fshard as fs
    >>> x = fs.ones(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,)))
    >>> fs.zeros_like(x).local
    (tensor([0., 0.]), tensor([0., 0.]))
    """
    spec, device = _layout_of("fs.zeros_like", pair, dtype)
    return zeros(spec, device=device, requires_grad=requires_grad)


def ones_like(
    pair: Pair, /, *, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> Sharded:
    """Create ones in the layout of a pair, on its device.

    Args:
        pair: `(local, spec)`, whose values are not read.
        dtype: dtype of the result; by default the dtype of the pair.
        requires_grad: whether autograd records operations on the locals, which are leaves.

    Returns:
        The pair.

    Raises:
        ShardingError: the argument is not a pair.

    >>> import fshard as fs
    >>> x = fs.zeros(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,)))
    >>> fs.ones_like(x).spec
    f32[4@x]
    """
    spec, device = _layout_of("fs.ones_like", pair, dtype)
    return ones(spec, device=device, requires_grad=requires_grad)


def full_like(
    pair: Pair,
    fill_value: complex,
    /,
    *,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> Sharded:
    """Create a tensor of one value in the layout of a pair, on its device.

    Args:
        pair: `(local, spec)`, whose values are not read.
        fill_value: the value of all elements, a number.
        dtype: dtype of the result; by default the dtype of the pair.
        requires_grad: whether autograd records operations on the locals, which are leaves.

    Returns:
        The pair.

    Raises:
        ShardingError: the argument is not a pair, or `fill_value` is not a number.

    >>> import fshard as fs
    >>> x = fs.zeros(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(2,)))
    >>> fs.full_like(x, 3.0).local
    (tensor([3.]), tensor([3.]))
    """
    spec, device = _layout_of("fs.full_like", pair, dtype)
    return full(spec, fill_value, device=device, requires_grad=requires_grad)


def empty_like(
    pair: Pair, /, *, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> Sharded:
    """Create a tensor in the layout of a pair, on its device; its values are arbitrary.

    Args:
        pair: `(local, spec)`, whose values are not read.
        dtype: dtype of the result; by default the dtype of the pair.
        requires_grad: whether autograd records operations on the locals, which are leaves.

    Returns:
        The pair.

    Raises:
        ShardingError: the argument is not a pair.

    >>> import torch
    >>> import fshard as fs
    >>> x = fs.zeros(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(2,)))
    >>> fs.empty_like(x, dtype=torch.int64).spec
    i64[2@x]
    """
    spec, device = _layout_of("fs.empty_like", pair, dtype)
    return empty(spec, device=device, requires_grad=requires_grad)


# -- shared -----------------------------------------------------------------------------------

CreateLocal = Callable[[Offsets, Shape, Device], torch.Tensor]
"""Function of a shard's offsets, shape and device to the shard."""


def device_of(pair: Any) -> torch.device | None:
    """Return the device of a pair's locals, None if it has none."""
    local, _ = pair
    first = local if isinstance(local, torch.Tensor) else next(iter(local or ()), None)
    return None if first is None else first.device


def _layout_of(
    where: str, pair: Any, dtype: torch.dtype | None
) -> tuple[Spec, torch.device | None]:
    """Return the spec of a pair in a dtype, and the device of its locals."""
    if not is_pair(pair):
        fail(where, f"a {type(pair).__name__}", "the argument must be a pair (local, spec)",
             f"fs.{where[3:-5]}(spec) of a Spec")  # fmt: skip
    _, spec = pair
    return (spec if dtype is None else spec.replace(dtype=dtype), device_of(pair))


def _check_target(where: str, spec: object, requires_grad: bool) -> None:
    """Raise `ShardingError` unless pairs of `spec` can be created, with a gradient if requested."""
    if not isinstance(spec, Spec):
        fail(where, f"a {type(spec).__name__} as the layout", "the layout must be a fs.Spec",
             "fs.Spec(mesh, P(...), shape=(8, 16), dtype=torch.float32)")  # fmt: skip
    name = where.removeprefix("fs.")
    check_untraced(where, spec, f"torch.{name} of the global shape")
    if requires_grad and not is_inexact(spec):
        fail(where, f"requires_grad=True for {spec}",
             "a tensor with a gradient must be of a floating or complex dtype",
             "spec.replace(dtype=torch.float32)")  # fmt: skip


def _create(
    where: str, spec: Spec, device: Device, requires_grad: bool, create: CreateLocal
) -> Sharded:
    """Return the pair of the shards that `create` returns."""
    seed = torch.empty(0, device=default_device() if device is None else device)

    def create_shard(seed: torch.Tensor, offsets: Offsets, shape: Shape) -> torch.Tensor:
        return create(offsets, shape, seed.device)

    with torch.no_grad():
        pair = create_pair(where, spec, seed, create_shard)
    if requires_grad:
        local = pair.local
        for x in (local,) if isinstance(local, torch.Tensor) else local:
            x.requires_grad_()
    return pair


def _filled(where: str, spec: Spec, value: complex, device: Device, requires_grad: bool) -> Sharded:
    _check_target(where, spec, requires_grad)
    return _create(
        where, spec, device, requires_grad,
        lambda _, shape, device: torch.full(shape, value, dtype=spec.dtype, device=device),
    )  # fmt: skip


def _triangle(
    where: str,
    spec: Spec,
    diagonal: int,
    mask: Callable[[int, torch.Tensor], torch.Tensor],
    device: Device,
    requires_grad: bool,
) -> Sharded:
    """Return the pair of `mask(diagonal of a shard, ones)`, over the last two dims."""
    _check_target(where, spec, requires_grad)
    problems = []
    if spec.ndim < 2:
        problems.append(Problem(f"{spec} of {spec.ndim} dims",
                                "the spec must have at least two dims, rows and columns last",
                                "fs.Spec(mesh, P('x'), shape=(n, m))"))  # fmt: skip
    if not isinstance(diagonal, int):
        problems.append(Problem(f"diagonal={diagonal!r}", "diagonal must be an int", "diagonal=0"))
    raise_if(where, problems)

    def create(offsets: Offsets, shape: Shape, device: Device) -> torch.Tensor:
        ones = torch.ones(shape, dtype=spec.dtype, device=device)
        return mask(offsets[-2] - offsets[-1] + diagonal, ones)

    return _create(where, spec, device, requires_grad, create)
