"""Custom gradients, hooks and forward mode in mapped and partitioned functions, simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import graph
from torch.func import jvp

import fshard as fs
from fshard import Mesh, P
from tests.helpers.spmd.derivatives.gradient_features import (
    FEATURES,
    MESH,
    SEEN,
    cube_operation,
    differing,
    mapped,
    partitioned,
    product_operation,
    scaled,
)  # fmt: skip
from tests.helpers.spmd.transform_cases import W, X, close

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
M22 = Mesh(dp=2, tp=2)


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_right_or_refused_in_mapped_functions(name: str) -> None:
    fn = FEATURES[name].fn
    assert differing("simulated", name, mapped(fn, True)) == []
    assert differing("simulated", name, mapped(fn, False)) == []


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_right_or_refused_in_partitioned_functions(name: str) -> None:
    assert differing("partition", name, partitioned(FEATURES[name].fn)) == []


def test_multi_grad_hooks_see_the_gradients_of_each_rank() -> None:
    SEEN.clear()
    results = []
    for f in (FEATURES["multi-grad hook"].fn, mapped(FEATURES["multi-grad hook"].fn, True)):
        x = X.clone().requires_grad_()
        f(x, W.clone().requires_grad_()).sin().sum().backward()
        results.append([torch.cat(column) for column in zip(*SEEN, strict=True)])
        SEEN.clear()
    close(*results)


# -- operations of torch.library ------------------------------------------------------------------


cube, product = cube_operation("cube_with_rule"), product_operation("product_with_rule")
fs.register_rule(torch.ops.fshard_tests.cube_with_rule.default)("ij->ij")
fs.register_rule(torch.ops.fshard_tests.product_with_rule.default)("ik,kj->ij")
LAYOUTS = [(P("dp"), P(None, "tp")), (P(None, "dp"), P("dp")), (P("tp", "dp"), P("dp", "tp"))]


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_gradients_of_library_operations_need_no_rule_of_their_own(
    layouts: tuple[P, P],
) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = product(cube(x, 0.5), w)
        return y.tanh()

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return (scaled(0.5 * x**3, 4 / 3) @ w).tanh()

    results = []
    for f in (fs.partition(fn, mesh=M22, in_specs=layouts), plain):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        y = f(x, w)
        first = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
        second = torch.autograd.grad(first[0].sin().sum() + first[1].sum(), (x, w))
        results.append((y, *first, *second))
    close(*results)


def test_library_operations_have_no_tangent_in_partitioned_functions() -> None:
    part = fs.partition(lambda x: cube(x, 0.5), mesh=MESH, in_specs=P("x"))
    with pytest.raises(fs.ShardingError, match=r"cube_with_rule\.default in forward mode"):
        jvp(part, (X,), (X,))
    x = X.clone().requires_grad_()
    close(torch.autograd.grad(part(x).sum(), x)[0], 2 * X**2)


def test_library_operations_on_pairs_have_their_gradient() -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    pair = fs.apply(product, fs.shard(x, M22, P("dp", "tp")), fs.shard(w, M22, P("tp")))
    assert [*pair.spec.partition.unreduced] == ["tp"]
    y = fs.unshard(fs.apply(torch.sin, fs.reshard(pair, P("dp"))))
    grads = torch.autograd.grad(y.sum(), (x, w))
    close(grads, torch.autograd.grad((x @ w).sin().sum(), (x, w)))


# -- around the call ------------------------------------------------------------------------------


def dense(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh() ** 2


def by_apply(x: Tensor, w: Tensor) -> Tensor:
    y = fs.apply(torch.matmul, fs.shard(x, MESH, P("x")), fs.shard(w, MESH, P()))
    return fs.unshard(fs.apply(torch.square, fs.apply(torch.tanh, y)))


PLACES = {
    "mapped": mapped(dense, True),
    "unchecked": mapped(dense, False),
    "partition": partitioned(dense),
    "apply": by_apply,
}


class Calls(torch.nn.Module):
    """Module that calls a function on its parameter."""

    def __init__(self, fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fn, self.w = fn, torch.nn.Parameter(W.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x, self.w)


def with_tensor_hooks(f: Any, x: Tensor, w: Tensor) -> Any:
    x.register_hook(lambda g: 3 * g)
    y = f(x, w)
    y.register_hook(lambda g: g.clamp(max=1))
    y.grad_fn.register_prehook(lambda go: (2 * go[0],))
    return torch.autograd.grad(y.exp().sum(), (x, w))


def with_multi_grad_hook(f: Any, x: Tensor, w: Tensor) -> Any:
    seen: list[Any] = []
    y = f(x, w)
    with graph.register_multi_grad_hook((x, w, y), seen.append):
        y.exp().sum().backward()
    return seen


def with_accumulate_hooks(f: Any, x: Tensor, w: Tensor) -> Any:
    seen = []
    w.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad))
    f(x, w).exp().sum().backward()
    return seen


def with_module_hooks(f: Any, x: Tensor, w: Tensor) -> Any:
    module = Calls(f).double()
    module.register_forward_hook(lambda m, args, out: 2 * out)
    module.register_full_backward_pre_hook(lambda m, go: (go[0] + 1,))
    module.register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))
    module(x).exp().sum().backward()
    return x.grad, module.w.grad


def with_saved_tensor_hooks(f: Any, x: Tensor, w: Tensor) -> Any:
    packed: list[Tensor] = []

    def pack(t: Tensor) -> int:
        packed.append(t.detach().clone())
        return len(packed) - 1

    with graph.saved_tensors_hooks(pack, packed.__getitem__):
        y = f(x, w).exp().sum()
    assert packed
    return torch.autograd.grad(y, (x, w))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "run",
    [
        with_tensor_hooks,
        with_multi_grad_hook,
        with_accumulate_hooks,
        with_module_hooks,
        with_saved_tensor_hooks,
    ],
)
def test_hooks_around_a_call_see_global_gradients(run: Any, place: str) -> None:
    results = [
        run(f, X.clone().requires_grad_(), W.clone().requires_grad_())
        for f in (PLACES[place], dense)
    ]
    close(*results)
