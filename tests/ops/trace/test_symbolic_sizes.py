"""Symbolic sizes of a surrounding trace are read as ints, guarded, and never cached."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fshard as fs
from fshard import Mesh, P
from fshard.ops.core.cache_keys import concrete_number, freeze

MESH = Mesh(dp=2)


def spec_of(x: Tensor, partition: P = P("dp")) -> fs.Spec:  # noqa: B008 - a value
    return fs.Spec(MESH, partition, shape=x.shape, dtype=x.dtype)


def propagated(x: Tensor) -> Tensor:
    strategy = fs.propagate(torch.matmul, spec_of(x), spec_of(x.t(), P()))
    assert strategy.out_specs[0] is not None
    return x * strategy.out_specs[0].local_shape(0)[0]


def reshaped(x: Tensor) -> Tensor:
    pair = fs.shard(x, spec_of(x))
    result = fs.apply(torch.reshape, pair, [x.shape[0], 3, x.shape[1] // 3])
    return fs.unshard(fs.apply(torch.mul, result, result)).sum(1)


PART = fs.partition(
    lambda x, n: torch.softmax(x @ x.t(), -1).reshape(n, -1).sum(0),
    mesh=MESH,
    in_specs=(P("dp"), None),
)


def partitioned(x: Tensor) -> Tensor:
    result: Tensor = PART(x, x.shape[0])
    return result + 1


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "propagate": (propagated, lambda x: x * (x.shape[0] // 2)),
    "apply": (reshaped, lambda x: x.reshape(x.shape[0], 3, -1).square().sum(1)),
    "partition": (partitioned, lambda x: torch.softmax(x @ x.t(), -1).sum(0) + 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_symbolic_trace_is_guarded_by_the_size(name: str) -> None:
    fn, expected = FUNCTIONS[name]
    for rows in (4, 8):
        x = torch.randn(rows, 6)
        graph = make_fx(fn, tracing_mode="symbolic")(x)
        torch.testing.assert_close(graph(x), expected(x))
        guards = {str(guard.expr) for guard in graph.shape_env.guards}
        assert any(guard.endswith(f", {rows})") for guard in guards), guards
        # No shape computation of fshard itself is in the graph.
        targets = {str(node.target) for node in graph.graph.nodes}
        assert not any(x.startswith(("aten.empty", "aten.zeros")) for x in targets), targets


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dynamic", [True, None, False])
def test_compiled_code_is_correct_for_every_size(name: str, dynamic: bool | None) -> None:
    fn, expected = FUNCTIONS[name]
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(lambda x: fn(x.sin()).cos(), backend="eager", dynamic=dynamic)
        for rows in (4, 6, 4, 10, 2, 6):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(compiled(x), expected(x.sin()).cos())


def test_export_refuses_a_dynamic_size_of_a_layout() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return propagated(x)

    rows = torch.export.Dim("rows", min=2, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch._dynamo.exc.UserError, match="specialized it to be a constant"):
            torch.export.export(
                Module(), (torch.ones(4, 6),), dynamic_shapes=({0: rows},), strict=False
            )


def test_symbols_freeze_to_their_values() -> None:
    keys: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        n = x.shape[0]
        assert isinstance(n, torch.SymInt)
        for value in (n, n * 0.5, n > 3, [n, (n,)]):
            keys.append(freeze(value))
            hash(keys[-1])
        keys.append(concrete_number(n))
        return x * 1

    make_fx(fn, tracing_mode="symbolic")(torch.ones(4, 6))
    assert keys == [freeze(4), freeze(2.0), freeze(True), freeze([4, (4,)]), 4]
    assert type(keys[-1]) is int
    fs.apply(torch.neg, fs.shard(torch.ones(4), spec_of(torch.ones(4))))


def test_modes_of_the_caller_do_not_see_shape_computations() -> None:
    """Shape computations of fshard run outside of the modes of the caller."""
    seen: list[str] = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = spec_of(torch.ones(14, 22))
    with Mode(), torch.device("meta"):
        fs.propagate(torch.ops.aten.hardswish.default, x)
        fs.propagate(torch.mm, x, fs.Spec(MESH, P(), shape=(22, 5)))
    assert not seen
