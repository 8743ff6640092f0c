"""Custom gradients, hooks and forward mode in mapped and partitioned functions, simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, graph
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import fshard as fs
from fshard import Mesh, P
from tests.helpers.spmd.derivatives.gradient_features import (
    BACKWARD_HOOKED,
    FEATURES,
    MESH,
    PRE_HOOKED,
    SEEN,
    Generated,
    WithVmap,
    cube_operation,
    differing,
    mapped,
    partitioned,
    product_operation,
    scaled,
)  # fmt: skip
from tests.helpers.spmd.transform_cases import W, X, close

pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing",
    "ignore:There is a performance drop",  # PyTorch 2.14's, of an operation in a vmap
)
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


# -- several levels of torch.func -----------------------------------------------------------------


def with_tensor_hook(x: Tensor) -> Tensor:
    y = x * x
    if y.requires_grad:
        y.register_hook(lambda g: 3 * g)
    return y * x


def with_argument_hook(x: Tensor) -> Tensor:
    x.register_hook(lambda g: 3 * g)
    return x**3


def with_node_hook(x: Tensor) -> Tensor:
    y = x * x
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda go: (3 * go[0],))
    return y * x


def with_retained_gradient(x: Tensor) -> Tensor:
    y = x * x
    if y.requires_grad:
        y.retain_grad()
    return y * x


def with_observer(x: Tensor) -> Tensor:
    y = x * x
    if y.requires_grad:
        graph.register_multi_grad_hook((y,), lambda _: None)
    return y * x


HOOKED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "tensor": (with_tensor_hook, r"x.register_hook\(...\) in a body"),
    "argument": (with_argument_hook, r"x.register_hook\(...\) in a body"),
    "node": (with_node_hook, "x.grad_fn in a body"),
    "retain_grad": (with_retained_gradient, r"x.retain_grad\(\) in a body"),
    "observer": (with_observer, "x.grad_fn in a body"),
    "module": (lambda x: BACKWARD_HOOKED(x * x) * x, "a module's full backward hooks in a body"),
    "pre-hook": (lambda x: PRE_HOOKED(x * x) * x, "a module's full backward hooks in a body"),
}
"""Functions with a hook, and how an error names it."""


def twice_graded(f: Any, x: Tensor) -> Tensor:
    second: Tensor = grad(lambda x: grad(lambda x: f(x).sum())(x).sum())(x)
    return second


def graded_in_autograd(f: Any, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(grad(lambda x: f(x).sum())(leaf).sum(), leaf)[0]


def twice_pulled_back(f: Any, x: Tensor) -> Tensor:
    second: Tensor = vjp(lambda y: vjp(f, y)[1](y)[0], x)[1](x)[0]
    return second


NESTED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "grad of grad": twice_graded,
    "jacrev of grad": lambda f, x: jacrev(grad(lambda x: f(x).sum()))(x),
    "autograd of grad": graded_in_autograd,
    "vjp of vjp": twice_pulled_back,
    "outer level": lambda f, x: grad(lambda x: grad(lambda y: (f(x) * y).sum())(x).sum())(x),
}
"""Gradients at several levels, of which PyTorch calls a hook at the innermost alone."""


def rowwise(fn: Callable[..., Tensor], check: bool = True) -> Any:
    return fs.shard_map(fn, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check=check)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_are_refused_for_gradients_of_outer_levels(name: str, check: bool) -> None:
    fn, written = HOOKED[name]
    for run in NESTED.values():
        with pytest.raises(fs.ShardingError, match=written):
            run(rowwise(fn, check), X)


@pytest.mark.parametrize("name", ["tensor", "argument", "node", "observer"])
def test_hooks_are_called_at_their_level(name: str) -> None:
    fn, _ = HOOKED[name]
    outer = X.clone().requires_grad_()  # of a level at which no gradient is taken
    for f in (rowwise(fn), rowwise(fn, False)):
        close(grad(lambda x: f(x * outer).sum())(X), grad(lambda x: fn(x * outer).sum())(X))  # noqa: B023


@pytest.mark.parametrize("run", NESTED)
def test_hooks_between_mapped_functions_are_called_at_the_innermost_level(run: str) -> None:
    square, times = rowwise(torch.square), rowwise(torch.mul)

    def parts(x: Tensor) -> Tensor:
        y = square(x)
        if y.requires_grad:
            y.register_hook(lambda g: 3 * g)
        return times(y, x)

    close(NESTED[run](parts, X), NESTED[run](with_tensor_hook, X))


@pytest.mark.parametrize("name", ["tensor", "node"])
def test_hooks_are_refused_for_tangents_of_gradients_in_a_dual_level(name: str) -> None:
    fn, written = HOOKED[name]
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, X.cos())
        with pytest.raises(fs.ShardingError, match=written):
            grad(lambda x: rowwise(fn)(x).sum())(x)


class Tripled(torch.autograd.Function):
    """Function that keeps values, with gradients and tangents times 3."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 3 * grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return 3 * tangents[0]


CUSTOM: dict[str, Callable[[Tensor], Tensor]] = {
    "saves nothing": lambda x: Tripled.apply(x * x) * x,
    "saves its input": lambda x: Generated.apply(x * x) * x,
    "saves its output": lambda x: WithVmap.apply(x * x) * x,
}
BATCHED = torch.stack([X, X.sin()])


def batch_of_gradients(f: Any) -> Any:
    return vmap(grad(lambda x: f(x).sum()))


def dual_batch(f: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(vmap(f)(forward_ad.make_dual(BATCHED, BATCHED.cos())))


WITH_BATCHES: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad of vmap": lambda f, x: grad(lambda xs: vmap(f)(xs).sum())(BATCHED),
    "grad of vmap of grad": lambda f, x: grad(lambda xs: batch_of_gradients(f)(xs).sum())(BATCHED),
    "jvp of vmap": lambda f, x: jvp(vmap(f), (BATCHED,), (BATCHED.cos(),)),
    "jvp of vmap of grad": lambda f, x: jvp(batch_of_gradients(f), (BATCHED,), (BATCHED.cos(),)),
    "jvp of vmap of vmap": lambda f, x: jvp(vmap(vmap(f)), (BATCHED[None],), (BATCHED[None],)),
    "grad of jvp of vmap": lambda f, x: grad(
        lambda xs: jvp(batch_of_gradients(f), (xs,), (BATCHED,))[1].sum()
    )(BATCHED),
    "vmap in a dual level": dual_batch,
}


def tangent_of_gradient(f: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), x.cos())
        gradient = torch.autograd.grad(f(dual).square().sum(), dual, create_graph=True)[0]
        return forward_ad.unpack_dual(gradient)


def gradient_of_tangent(f: Any, x: Tensor) -> Any:
    leaves = x.clone().requires_grad_(), x.cos().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(f(forward_ad.make_dual(*leaves)))).tangent
        return torch.autograd.grad(tangent.sin().sum(), leaves)


def gradient_of_tangent_of_gradient(f: Any, x: Tensor) -> Any:
    leaf = x.clone().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf, x.cos())
        gradient = torch.autograd.grad(f(dual).sum(), dual, create_graph=True)[0]
        tangent = forward_ad.unpack_dual(gradient).tangent
        return torch.autograd.grad(tangent.square().sum(), leaf)


IN_DUAL_LEVEL = (tangent_of_gradient, gradient_of_tangent, gradient_of_tangent_of_gradient)


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_functions_have_derivatives_of_several_levels(name: str) -> None:
    fn = CUSTOM[name]
    part = fs.partition(fn, mesh=MESH, in_specs=P("x"))
    for run in (*NESTED.values(), *WITH_BATCHES.values(), *IN_DUAL_LEVEL):
        reference = run(fn, X)
        for f in (part, rowwise(fn), rowwise(fn, False)):
            close(run(f, X), reference)


NESTED_TANGENTS: tuple[Callable[[Any, Tensor], Any], ...] = (
    lambda f, x: jvp(lambda x: jvp(f, (x,), (x.cos(),))[1], (x,), (x.sin(),)),
    lambda f, x: jacfwd(jacfwd(f))(x),
    lambda f, x: jvp(vmap(lambda x: jvp(f, (x,), (x,))[1]), (BATCHED,), (BATCHED.cos(),)),
    lambda f, x: grad(lambda x: jvp(lambda x: jvp(f, (x,), (x,))[1], (x,), (x,))[1].sum())(x),
    lambda f, x: jvp(grad(lambda x: jvp(f, (x,), (x,))[1].sum()), (x,), (x.cos(),)),
)


@pytest.mark.parametrize("name", CUSTOM)
def test_nested_tangents_of_custom_functions_are_those_of_one_device(name: str) -> None:
    fn = CUSTOM[name]
    for run in NESTED_TANGENTS:
        reference = run(fn, X[:2])
        for check in (True, False):
            close(run(rowwise(fn, check), X[:2]), reference)


def scaled_by(x: Tensor, scale: Tensor) -> Tensor:
    class Scaled(Tripled):
        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return scale * grads[0]

    return Scaled.apply(x)


def test_differentiated_tensors_that_a_backward_alone_uses_are_refused() -> None:
    def f(scale: Tensor, x: Tensor) -> Tensor:
        return rowwise(lambda x: scaled_by(x, scale) + scaled_by(x, 2 * x))(x).sum()

    scale, x = torch.tensor(2.0, dtype=X.dtype, requires_grad=True), X.clone().requires_grad_()
    refused = r"which \w*Scaled.backward closes over"
    close(grad(f, 1)(scale.detach(), X), 2 + 2 * X)
    (gradient,) = torch.autograd.grad(f(scale, x), x, create_graph=True)
    with pytest.raises(fs.ShardingError, match=refused):
        gradient.sum().backward()
    for around in (grad, lambda g: lambda scale: jvp(g, (scale,), (scale,))):
        with pytest.raises(fs.ShardingError, match=refused):
            around(lambda scale: grad(f, 1)(scale, X).sum())(scale.detach())
    local = rowwise(lambda x: scaled_by(x, 2 * x))
    close(jacfwd(local)(X), jacfwd(lambda x: scaled_by(x, 2 * x))(X))


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
