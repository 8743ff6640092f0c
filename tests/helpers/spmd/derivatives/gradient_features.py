"""Functions of x, sharded by rows, and w, with gradients of their own, hooks and forward mode.

Each is row by row, so that the same function is one on one device, a body and a partitioned one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad, graph
from torch.autograd.function import once_differentiable
from torch.func import grad, hessian, jvp, vmap

import fshard as fs
from fshard import Mesh, P
from tests.helpers.custom_functions import SavesInputs
from tests.helpers.spmd.transform_cases import BATCH, W, X

MESH = Mesh(x=2)
Fn = Callable[[Tensor, Tensor], Tensor]


def scaled(y: Tensor, factor: float) -> Tensor:
    """Return `y`, with its gradient times a factor."""
    return factor * y + ((1 - factor) * y).detach()


# -- functions and operations with a gradient of their own; the factor shows that it is used ------


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.k = k
        return x.sin() * k

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grads[0] * x.cos() * ctx.k, None


class WithVmap(torch.autograd.Function):
    """Function with every static method; it saves its output."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0] * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return 2 * tangents[0] * ctx.saved_tensors[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return WithVmap.apply(x), in_dims[0]


class Generated(SavesInputs):
    """Function whose rule for `vmap` is generated; it saves its input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0] ** 2

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0] * ctx.saved_tensors[0] ** 2


class Unmaterialized(torch.autograd.Function):
    """Function of two results whose gradient depends on which of them are used."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 1, x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        first, second = grads
        if second is None:
            return 5 * first
        return 7 * second if first is None else first + 2 * second


class OnceByNumpy(torch.autograd.Function):
    """Function that leaves PyTorch, with a tangent, and a gradient that has none itself."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() ** 3)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.from_numpy(grads[0].numpy() * 3 * ctx.saved_tensors[0].numpy() ** 2)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0] * 3 * ctx.saved_tensors[0] ** 2


def cube_operation(name: str) -> Any:
    """Return an operation `k * x**3` with a gradient and a rule for `vmap`."""

    @torch.library.custom_op(f"fshard_tests::{name}", mutates_args=())
    def cube(x: Tensor, k: float) -> Tensor:
        return x**3 * k

    def save(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.k = inputs[1]

    def backward(ctx: Any, g: Tensor) -> Any:
        return 4 * ctx.k * g * ctx.saved_tensors[0] ** 2, None

    cube.register_fake(lambda x, k: torch.empty_like(x))
    cube.register_autograd(backward, setup_context=save)
    cube.register_vmap(lambda info, in_dims, x, k: (cube(x, k), in_dims[0]))
    return cube


def product_operation(name: str) -> Any:
    """Return a matrix product, whose gradient calls itself and so has all derivatives."""

    @torch.library.custom_op(f"fshard_tests::{name}", mutates_args=())
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    def save(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return product(g, w.mT.contiguous()), product(x.mT.contiguous(), g)

    product.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
    product.register_autograd(backward, setup_context=save)
    return product


cube, product = cube_operation("cube"), product_operation("product")
LIBRARY = torch.library.Library("fshard_tests_old", "DEF")
LIBRARY.define("half(Tensor x) -> Tensor")
torch.library.impl(LIBRARY, "half", "CPU")(lambda x: x * 0.5)
torch.library.impl(LIBRARY, "half", "Meta")(torch.empty_like)


class Half(torch.autograd.Function):
    """Gradient of an operation in the style before `torch.library.custom_op`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            y: Tensor = torch.ops.fshard_tests_old.half(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 1.5


torch.library.impl(LIBRARY, "half", "Autograd")(Half.apply)


# -- hooks: all of them change the gradient -------------------------------------------------------


def network(**hooks: Any) -> torch.nn.Module:
    """Return a module with hooks, by the name of the method that registers them on its layers."""
    layers = torch.nn.Linear(2, 2), torch.nn.Tanh()
    for p, value in zip(layers[0].parameters(), (W, W[0]), strict=True):
        p.data = value.float()
        p.requires_grad_(False)
    for layer in layers:
        for name, hook in hooks.items():
            getattr(layer, name)(hook)
    return torch.nn.Sequential(*layers).double()


FORWARD_HOOKED = network(
    register_forward_hook=lambda m, args, out: out * 2,
    register_forward_pre_hook=lambda m, args: (args[0] + 1,),
)
BACKWARD_HOOKED = network(register_full_backward_hook=lambda m, gi, go: (gi[0] * 3,))
PRE_HOOKED = network(register_full_backward_pre_hook=lambda m, go: (go[0] * 3,))


def with_tensor_hook(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    if y.requires_grad:
        y.register_hook(lambda g: 3 * g)
    return y.sin()


def with_node_hooks(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda go: (3 * go[0],))
        y.grad_fn.register_hook(lambda gi, go: tuple(g if g is None else 2 * g for g in gi))
    return y.sin()


def with_multi_grad_hook(x: Tensor, w: Tensor) -> Tensor:
    y, z = x @ w, x.sin()
    if y.requires_grad and z.requires_grad:
        graph.register_multi_grad_hook((y, z), SEEN.append)
    return y * z


SEEN: list[Any] = []


def with_saved_tensor_hooks(x: Tensor, w: Tensor) -> Tensor:
    with graph.saved_tensors_hooks(lambda t: 2 * t, lambda t: t):
        return (x @ w).sin()


def saved_on_cpu(x: Tensor, w: Tensor) -> Tensor:
    with graph.save_on_cpu():
        return (x @ w).sin()


def in_dual_level(x: Tensor, w: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x @ w, x).sin()
        tangent: Tensor = forward_ad.unpack_dual(dual).tangent
    return tangent


class Feature(NamedTuple):
    """A function of x and w.

    `plain` is the same in operations of PyTorch, the reference for runs in which PyTorch has no
    derivative of `fn`. Those in `without_reference` are left out: PyTorch's `jvp` of custom
    functions loses outer tangents, its transforms refuse hooks of saved tensors, and a tangent
    does not depend on which results are used.
    """

    fn: Fn
    plain: Fn | None = None
    without_reference: tuple[str, ...] = ()


def layers(x: Tensor, around: Callable[[Callable[[Tensor], Tensor]], Any]) -> Tensor:
    """Return the layers of `network`, each changed by a function."""
    weight, bias = W.float().double(), W[0].float().double()
    hidden: Tensor = around(lambda v: v @ weight.T + bias)(x)
    result: Tensor = around(torch.tanh)(hidden)
    return result


def with_saved_doubled(x: Tensor, w: Tensor) -> Tensor:
    """Return `sin(x @ w)` with the gradient of saved tensors that are twice as large.

    A saved tensor that a hook changes keeps the gradient of the tensor that it is for.
    """
    z = x @ w + x @ w.detach() + x.detach() @ w - 2 * (x @ w).detach()
    y = (z + z.detach()).sin()
    return y - y.detach() + z.sin().detach()


FEATURES = {
    "old style": Feature(
        lambda x, w: OldStyle.apply(x @ w, 1.5), lambda x, w: scaled(1.5 * (x @ w).sin(), 2)
    ),
    "every static method": Feature(lambda x, w: WithVmap.apply(x @ w)),
    "generate_vmap_rule": Feature(lambda x, w: Generated.apply(x @ w)),
    "once": Feature(lambda x, w: OnceByNumpy.apply(x @ w), lambda x, w: (x @ w) ** 3),
    "both unmaterialized": Feature(
        lambda x, w: torch.mul(*Unmaterialized.apply(x @ w)), lambda x, w: 2 * (x @ w) ** 2
    ),
    "first unmaterialized": Feature(
        lambda x, w: Unmaterialized.apply(x @ w)[0].sin(),
        lambda x, w: (x @ w).sin(),
        without_reference=("hessian",),
    ),
    "second unmaterialized": Feature(
        lambda x, w: Unmaterialized.apply(x @ w)[1].sin(),
        lambda x, w: (2 * (x @ w)).sin(),
        without_reference=("hessian",),
    ),
    "custom_op": Feature(
        lambda x, w: cube(x @ w, 1.5), lambda x, w: scaled(1.5 * (x @ w) ** 3, 4 / 3)
    ),
    "product": Feature(lambda x, w: product(x.sin(), w), lambda x, w: x.sin() @ w),
    "library": Feature(
        lambda x, w: torch.ops.fshard_tests_old.half(x @ w).sin(),
        lambda x, w: scaled(0.5 * (x @ w), 3).sin(),
    ),
    "forward hooks": Feature(lambda x, w: FORWARD_HOOKED(x @ w)),
    "full backward hooks": Feature(
        lambda x, w: BACKWARD_HOOKED(x @ w),
        lambda x, w: layers(x @ w, lambda layer: lambda v: layer(scaled(v, 3))),
    ),
    "full backward pre-hooks": Feature(
        lambda x, w: PRE_HOOKED(x @ w),
        lambda x, w: layers(x @ w, lambda layer: lambda v: scaled(layer(v), 3)),
    ),
    "tensor hook": Feature(with_tensor_hook),
    "node hooks": Feature(with_node_hooks),
    "multi-grad hook": Feature(with_multi_grad_hook),
    "saved-tensor hooks": Feature(
        with_saved_tensor_hooks, with_saved_doubled, without_reference=("hessian",)
    ),
    "save_on_cpu": Feature(saved_on_cpu, lambda x, w: (x @ w).sin()),
    "dual_level": Feature(in_dual_level, lambda x, w: (x @ w).cos() * x),
    "inner jvp": Feature(
        lambda x, w: jvp(lambda w: Generated.apply(x @ w), (w,), (w.sin(),))[1],
        lambda x, w: (x @ w) ** 2 * (x @ w.sin()),
        without_reference=("jvp", "hessian", "dual_level"),
    ),
    "inner grad": Feature(
        lambda x, w: x @ grad(lambda w: Generated.apply(w @ w).sum())(w),
        lambda x, w: x @ grad(lambda w: (w @ w).pow(3).sum() / 3)(w),
    ),
}


def by_backward(f: Fn) -> Any:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = f(x, w)
    y.square().sum().backward()
    return y.detach(), x.grad, w.grad


def twice(f: Fn) -> Any:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    grads = torch.autograd.grad(f(x, w).square().sum(), (x, w), create_graph=True)
    return torch.autograd.grad(grads[0].square().sum() + grads[1].sin().sum(), (x, w))


def tangent_of(f: Fn) -> Any:
    with forward_ad.dual_level():
        y = f(forward_ad.make_dual(X, 2 * X), W)
        tangent = forward_ad.unpack_dual(y).tangent
    return torch.zeros_like(y) if tangent is None else tangent


RUNS: dict[str, Callable[[Fn], Any]] = {
    "value": lambda f: f(X, W),
    "backward": by_backward,
    "twice": twice,
    "grad": lambda f: grad(lambda w: f(X, w).square().sum())(W),
    "vmap": lambda f: vmap(f, (0, None))(BATCH, W),
    "jvp": lambda f: jvp(f, (X, W), (X.sin(), W + 1)),
    "vmap of grad": lambda f: vmap(grad(lambda w, x: f(x, w).square().sum()), (None, 0))(W, BATCH),
    "hessian": lambda f: hessian(lambda w: f(X, w).square().sum())(W),
    "dual_level": tangent_of,
}
REVERSE = "backward", "twice", "grad", "vmap of grad", "hessian"
ALL = tuple(RUNS)
HOOKS = "hooks would be left out"
REFUSED: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    "simulated": {
        "custom_op": (("jvp", "hessian", "dual_level"), ""),
        "product": (("jvp", "hessian", "dual_level"), ""),
        "library": (("hessian",), "must implement the jvp function"),
        "once": (("twice",), "marked @once_differentiable"),
        "full backward hooks": (("twice", "dual_level"), ""),
        "full backward pre-hooks": (("twice", "dual_level"), ""),
        "tensor hook": (("vmap of grad", "hessian"), "x.register_hook(...) in a body of which"),
        "node hooks": (("vmap of grad", "hessian"), "x.grad_fn in a body of which"),
        "dual_level": (("vmap of grad",), "Batching rule not implemented for aten::_make_dual"),
    },
    "partition": {
        "once": (ALL, ".numpy() is not supported for tensor subclasses"),
        "custom_op": (ALL, "an operation on layouts must have a sharding rule: it has none"),
        "product": (ALL, "an operation on layouts must have a sharding rule: it has none"),
        "library": (ALL, "an operation on layouts must have a sharding rule: it has none"),
        "full backward hooks": (ALL, HOOKS),
        "full backward pre-hooks": (ALL, HOOKS),
        "tensor hook": ((*REVERSE, "jvp", "dual_level"), HOOKS),
        "node hooks": ((*REVERSE, "jvp", "dual_level"), HOOKS),
        # Derivatives with respect to `w` alone: `x.sin()` does not require grad, and has no hook.
        "multi-grad hook": (("backward", "twice", "jvp", "dual_level"), HOOKS),
        "saved-tensor hooks": ((*REVERSE, "jvp", "dual_level"), HOOKS),
        "save_on_cpu": ((*REVERSE, "jvp", "dual_level"), HOOKS),
    },
}
"""By place and feature the runs that are refused, and a part of the reason."""
REFUSED["ranks"] = {}


def mapped(fn: Fn, check: bool, mesh: Mesh = MESH) -> Any:
    body = fn if check else lambda x, w: fn(x, fs.pcast(w, "x", to="varying"))
    return fs.shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check=check)


def partitioned(fn: Fn, mesh: Mesh = MESH) -> Any:
    return fs.partition(fn, mesh=mesh, in_specs=(P("x"), P()))


def outcome(run: Callable[[Fn], Any], f: Fn) -> Any:
    """Return the result of a run, or the exception that it raises."""
    try:
        return run(f)
    except Exception as error:
        return error


def differing(place: str, name: str, f: Fn) -> list[str]:
    """Return the runs of a feature whose result is not PyTorch's on one device."""
    fn, plain, unknown = FEATURES[name]
    refused, reason = REFUSED[place].get(name, ((), ""))
    problems = []
    for run_name, run in RUNS.items():
        expected, actual = outcome(run, fn), outcome(run, f)
        text = f"{run_name}: {str(actual)[:300]}"
        if isinstance(actual, Exception):
            by_torch = isinstance(expected, Exception) and str(expected) in str(actual)
            by_name = run_name in refused and reason in str(actual)
            problems += [] if by_torch or by_name else [text]
            continue
        if run_name in refused:
            problems.append(f"{run_name}: not refused")
        if isinstance(expected, Exception):  # a mapped body may have the derivative
            expected = outcome(run, plain or fn)
        if isinstance(expected, Exception):
            problems.append(f"{run_name}: not refused as by PyTorch: {expected}")
        elif run_name not in unknown and not is_close(actual, expected):
            problems.append(f"{run_name}: {actual} is not {expected}")
    return problems


def is_close(actual: Any, expected: Any) -> bool:
    try:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    except AssertionError:
        return False
    return True
