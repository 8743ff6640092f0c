"""`assert_like_one_device`: a sharded function beside the same function of global tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard._util.dtypes import is_inexact
from fshard._util.errors import fail
from fshard.layout.sharded import Sharded
from fshard.layout.tree import flatten, is_pair, map_leaves, paths, unflatten
from fshard.run.global_tensors import shard, unshard

WHERE = "fs.testing.assert_like_one_device"
Tensors = list[torch.Tensor]


def assert_like_one_device(
    function: Callable[..., Any],
    dense: Callable[..., Any],
    args: Sequence[Any],
    *,
    gradients: bool = True,
    second_order: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Assert that a sharded function equals a function of global tensors on one device.

    Both have the same values as arguments: `function` the pairs of `args`, `dense` their global
    tensors. Gradients are those of the scalar product of the results and fixed random tensors, with
    respect to the global tensors of all floating arguments; second-order gradients are those of the
    scalar product of the gradients and random tensors. On
    processes every rank must call it, and every rank compares.

    Args:
        function: function of pairs, of tensors that are global values (a `shard_map`), or of both;
            its results are pairs or global tensors.
        dense: the same function of global tensors; the structure of its results is the same.
        args: positional arguments of `function`, a tuple or a list, pytrees among them.
        gradients: compare gradients too.
        second_order: compare gradients of gradients too.
        rtol: relative tolerance; if None, of `torch.testing.assert_close` for the dtype.
        atol: absolute tolerance; given with `rtol` or not at all.

    Raises:
        AssertionError: values or gradients differ; the text has the path of each that does, the
            largest differences, and the layouts.
        ShardingError: `args` is not a tuple or a list.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(tp=2)
    >>> x = fs.shard(torch.randn(4, 8).double(), mesh, fs.P(None, "tp"))
    >>> w = fs.shard(torch.randn(8, 4).double(), mesh, fs.P("tp"))
    >>> matmul = fs.on_pairs(torch.matmul)
    >>> fs.testing.assert_like_one_device(matmul, torch.matmul, (x, w), second_order=True)
    """
    if not isinstance(args, tuple | list):
        fail(
            WHERE,
            f"args is a {type(args).__name__}",
            "args must be a tuple or a list of positional arguments",
            "(x,) for one argument",
        )
    if (rtol is None) != (atol is None):
        fail(WHERE, f"rtol={rtol}, atol={atol}", "rtol and atol must be given together, or neither",
             "rtol=1e-5, atol=1e-6")  # fmt: skip
    leaves, treedef = flatten(tuple(args))
    names = paths(tuple(args), "args")
    values = [unshard(leaf).detach() if isinstance(leaf, Sharded) else leaf for leaf in leaves]
    orders = (2 if second_order else 1) if gradients else 0

    def sharded(*inputs: Any) -> Any:
        pairs = [
            shard(value, leaf.spec) if isinstance(leaf, Sharded) else value
            for value, leaf in zip(inputs, leaves, strict=True)
        ]
        outputs = function(*unflatten(treedef, pairs))
        return map_leaves(lambda leaf: unshard(leaf) if is_pair(leaf) else leaf, outputs)

    def on_one_device(*inputs: Any) -> Any:
        return dense(*unflatten(treedef, inputs))

    actual = _derivatives(sharded, values, names, orders)
    expected = _derivatives(on_one_device, values, names, orders)
    _compare(actual, expected, _layouts(leaves, names), rtol, atol)


def _derivatives(
    function: Callable[..., Any], values: Sequence[Any], names: Sequence[str], orders: int
) -> dict[str, Any]:
    """Return the results of a function of leaves and the gradients up to an order, by name."""
    differentiable = [isinstance(value, torch.Tensor) and is_inexact(value) for value in values]
    inputs = [
        value.clone().requires_grad_(orders > 0) if floats else value
        for value, floats in zip(values, differentiable, strict=True)
    ]
    outputs = function(*inputs)
    results = dict(zip(paths(outputs, "result"), flatten(outputs)[0], strict=True))
    wrt = [value for value, floats in zip(inputs, differentiable, strict=True) if floats]
    wrt_names = [name for name, floats in zip(names, differentiable, strict=True) if floats]
    functions = [value for value in results.values() if isinstance(value, torch.Tensor)]
    for order in range(1, orders + 1):
        functions = _gradients(functions, wrt, create_graph=order < orders)
        kind = "gradient" if order == 1 else "second-order gradient"
        results |= {f"{kind} of {n}": g for n, g in zip(wrt_names, functions, strict=True)}
    return results


def _gradients(outputs: Tensors, inputs: Tensors, *, create_graph: bool) -> Tensors:
    """Return the gradients of the scalar product of outputs with random tensors; zeros for None."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for y in outputs:
        # One that depends on no argument may require grad on one side alone: each has its own.
        if is_inexact(y):
            random = torch.randn(y.shape, generator=generator, dtype=y.dtype)
            pairs += [(y, random.to(y.device))] if y.requires_grad else []
    if not pairs or not inputs:
        return [torch.zeros_like(value) for value in inputs]
    differentiated, cotangents = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(
        differentiated, inputs, cotangents, create_graph=create_graph, allow_unused=True,
        materialize_grads=True,
    )  # fmt: skip
    return list(gradients)


def _compare(
    actual: dict[str, Any], expected: dict[str, Any], layouts: str, rtol: float | None,
    atol: float | None,
) -> None:  # fmt: skip
    """Raise if a value differs, with the difference of each that does."""
    if actual.keys() != expected.keys():
        text = f"the results {list(actual)}, on one device {list(expected)}"
        raise AssertionError(f"{WHERE}\n  {text}\n{layouts}")
    lines = []
    for name, value in actual.items():
        try:
            torch.testing.assert_close(
                value, expected[name], rtol=rtol, atol=atol, equal_nan=True,
                msg=lambda text: text,
            )  # fmt: skip
        except AssertionError as error:
            lines.append(f"  {name}: " + "\n    ".join(filter(None, str(error).splitlines())))
    if lines:
        raise AssertionError("\n".join([WHERE, *lines, layouts]))


def _layouts(leaves: Sequence[Any], names: Sequence[str]) -> str:
    """Return a line for each pair of the arguments."""
    lines = [
        f"  {name}: {leaf.spec} on {leaf.spec.mesh}"
        for name, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, Sharded)
    ]
    return "\n".join(["layouts", *lines]) if lines else "no argument is a pair"
