"""Transforms of `torch.func` around simulated mapped functions, compared with dense functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vjp, vmap

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.custom_functions import SavesInputs
from tests.helpers.spec_grid import one_in
from tests.helpers.spmd.transform_cases import (
    BATCH,
    CASES,
    GRID,
    GRID_CASES,
    GRID_SPECS,
    MESH,
    TRANSFORMS,
    WEIGHTS,
    W,
    X,
    close,
    varying,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr"
)  # torch.func.linearize


def some_transforms(name: str, every: int) -> list[tuple[str, Callable[[Any], Any]]]:
    """Return every n-th transform, from a first one that the name decides."""
    return [*TRANSFORMS.items()][len(name) % every :: every]


@one_in(3)
@pytest.mark.parametrize(("name", "check"), [*((name, True) for name in CASES), ("pmean", False)])
def test_transforms_of_a_mapped_function_are_those_of_the_dense_one(
    name: str, check: bool, every: int
) -> None:
    body, out, dense = CASES[name]
    mapped = fs.shard_map(body, mesh=MESH, in_specs=(P("x"), P()), out_specs=out, check=check)
    for transform, run in some_transforms(name, every):
        try:
            close(run(mapped), run(dense))
        except BaseException as error:
            error.add_note(f"in the transform {transform!r}")
            raise


@one_in(5)
@pytest.mark.parametrize("name", GRID_CASES)
def test_transforms_on_a_mesh_of_two_axes(name: str, every: int) -> None:
    body, out, dense = GRID_CASES[name]
    mapped = fs.shard_map(body, mesh=GRID, in_specs=GRID_SPECS, out_specs=out)
    for _, run in some_transforms(name, every):
        close(run(mapped), run(dense))


@one_in(3)
@pytest.mark.parametrize("check", [True, False])
def test_closures_under_transforms(check: bool, every: int) -> None:
    def mapped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        stored = {"deep": [w * 2]}

        @fs.shard_map(mesh=MESH, in_specs=P("x"), out_specs=P("x"), check=check)
        def rows(v: torch.Tensor) -> torch.Tensor:
            a, b = fs.pcast((w, stored["deep"][0]), "x", to="varying")
            return torch.tanh(v @ a) @ torch.add(b, 0 * a)

        result: torch.Tensor = rows(x)
        return result

    def dense(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w) @ w * 2

    for _, run in some_transforms("closures" if check else "unchecked", every):
        close(run(mapped), run(dense))


def test_unreachable_closures_are_refused_under_transforms() -> None:
    class Holder:
        w: torch.Tensor

    holder = Holder()
    mapped = fs.shard_map(
        lambda v: v * holder.w.sum(), mesh=MESH, in_specs=P("x"), out_specs=P("x")
    )

    def run(w: torch.Tensor) -> torch.Tensor:
        holder.w = w
        return torch.sum(mapped(X))

    leaf = W.clone().requires_grad_()
    for transform in (
        lambda: grad(run)(W),
        lambda: vmap(run)(WEIGHTS),
        lambda: vmap(lambda _: run(leaf))(W),
    ):
        with pytest.raises(ShardingError, match="pass it as an argument"):
            transform()


def test_collectives_of_batches_and_of_constants_together() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        total, constant = fs.psum((x @ w, x.detach()), "x")
        return total.sum() * constant.sum()

    mapped = fs.shard_map(body, mesh=MESH, in_specs=(P("x"), P()), out_specs=P())
    want = hessian(lambda w: (X @ w.exp()).sum() * X.sum())(W)
    close(hessian(lambda w: mapped(X, w.exp()))(W), want)


def test_local_map_of_pairs_under_transforms() -> None:
    body, _, dense = CASES["psum"]
    spec = fs.Spec(MESH, P("x"), shape=X.shape, dtype=X.dtype)
    mapped = fs.local_map(body, in_specs=(P("x"), P()), out_specs=P())

    def of_pairs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        unsharded = fs.Spec(MESH, P(), shape=w.shape, dtype=w.dtype)
        return fs.unshard(mapped(fs.shard(x, spec), fs.shard(w, unsharded)))

    for run in TRANSFORMS.values():
        close(run(of_pairs), run(dense))


@one_in(3)
def test_nested_maps_under_transforms(every: int) -> None:
    mesh = Mesh(x=2, y=2)
    inner = fs.shard_map(
        lambda v, w: fs.psum((v**2).sum() * w.sum(), "y") * w,
        in_specs=(P("y"), P()), out_specs=P(), axis_names={"y"},
    )  # fmt: skip
    mapped = fs.shard_map(
        lambda x, w: fs.psum(inner(x, varying(w)), "x"),
        mesh=mesh, in_specs=(P("x"), P()), out_specs=P(), axis_names={"x"},
    )  # fmt: skip
    for _, run in some_transforms("nested", every):
        close(run(mapped), run(lambda x, w: (x**2).sum() * w.sum() * w))


def test_modules_by_functional_call() -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)
    ).double()
    params = dict(net.named_parameters())

    @fs.shard_map(mesh=MESH, in_specs=(P(), P("x")), out_specs=P("x"))
    def rows(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(net, fs.pcast(params, "x", to="varying"), (x,))  # type: ignore[no-any-return]

    def losses(call: Any) -> Any:
        per_sample = vmap(grad(lambda p, x: (call(p, x) ** 2).sum()), (None, 0))
        return grad(lambda p: (call(p, X) ** 2).sum())(params), per_sample(params, BATCH)

    close(losses(rows), losses(lambda p, x: functional_call(net, p, (x,))))


def test_randomness_of_vmap_is_that_of_the_body() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(2)

    mapped = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check=False)
    same, different = (vmap(mapped, randomness=r)(torch.zeros(3, 4)) for r in ("same", "different"))
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(mapped)(torch.zeros(3, 4))


def test_higher_orders_replay_the_recorded_call() -> None:
    factor, calls = [2.0], []

    def body(v: torch.Tensor) -> torch.Tensor:
        calls.append(factor[0])
        return v**3 * factor[0]

    mapped = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    y = mapped(x)
    factor[0] = 100.0
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    assert (first.tolist(), second.tolist(), third.tolist()) == ([6.0] * 2, [12.0] * 2, [12.0] * 2)
    assert calls == [2.0, 2.0]


def test_transforms_replay_the_recorded_call() -> None:
    """Python state that changes between the call and its derivatives is not read again."""
    factor = [2.0]
    mapped = fs.shard_map(lambda v: v**3 * factor[0], mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    x, ones = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    _, back = vjp(mapped, x)
    _, back_of_tangent = vjp(lambda x: jvp(mapped, (x,), (ones,))[1], x)
    _, back_of_gradient = vjp(grad(lambda x: mapped(x).sum()), x)
    factor[0] = 100.0
    assert back(ones)[0].tolist() == [6.0] * 2
    assert back_of_tangent(ones)[0].tolist() == [12.0] * 2
    assert back_of_gradient(ones)[0].tolist() == [12.0] * 2
    assert vmap(back)(torch.stack([ones, 2 * ones]))[0].tolist() == [[6.0] * 2, [12.0] * 2]


def test_operations_without_a_second_derivative_raise() -> None:
    def losses(x: torch.Tensor) -> torch.Tensor:
        targets = torch.zeros(len(x), dtype=torch.int64)
        return torch.nn.functional.multi_margin_loss(x, targets, reduction="none")

    mapped = fs.shard_map(losses, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(mapped(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="multi_margin_loss_backward"):
        torch.autograd.grad(first.sum(), x)
    with pytest.raises(RuntimeError, match="multi_margin_loss_backward"):
        grad(lambda x: grad(lambda x: mapped(x).sum())(x).sum())(X)


def test_values_that_differ_are_refused_under_transforms() -> None:
    mapped = fs.shard_map(
        lambda v: v * torch.tensor(float(fs.axis_index("x"))),
        mesh=MESH, in_specs=P(), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ShardingError, match="values must be equal"):
        vmap(mapped)(torch.ones(2, 2))
    unequal = fs.shard_map(
        lambda v, w: v * w, mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x"), check=False
    )
    with pytest.raises(ShardingError, match="gradients that differ on ranks 0 and 1"):
        vmap(grad(lambda w, v: unequal(v, w).sum()), (None, 0))(torch.ones(1), BATCH[:, :, 0])


# -- forward mode over gradients ------------------------------------------------------------------


def scaled_by_square(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x * x
    return scale * x


def scaled_by_maximum(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = fs.pmax(x.sin(), "x")
    return scale * x**2


def scaled_by_constant(x: Tensor) -> Tensor:
    return x.detach() * x**3


def cubed_if_differentiated(x: Tensor) -> Tensor:
    return x**3 if x.requires_grad else x


def hooked(x: Tensor) -> Tensor:
    y = x * x
    y.register_hook(lambda g: 3 * g)
    return y * x


def scaled_by_dense_maximum(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.sin().reshape(2, 2).amax(0).repeat(2)
    return scale * x**2


def hessian_vector_product(f: Any, x: Tensor) -> Tensor:
    tangent: Tensor = jvp(grad(lambda x: f(x).sum()), (x,), (x.cos(),))[1]
    return tangent


OVER_GRADIENTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jvp of grad": hessian_vector_product,
    "hessian": lambda f, x: hessian(lambda x: f(x).sum())(x),
    "jacfwd of hessian": lambda f, x: jacfwd(hessian(lambda x: f(x).sum()))(x),
    "jvp of grad of grad": lambda f, x: hessian_vector_product(
        lambda x: grad(lambda x: f(x).sum())(x) ** 2, x
    ),
    "jvp of jvp of grad": lambda f, x: jvp(lambda x: hessian_vector_product(f, x), (x,), (x,)),
    "grad of jvp of grad": lambda f, x: grad(lambda x: hessian_vector_product(f, x).sum())(x),
    "jvp of vmap of grad": lambda f, x: jvp(
        vmap(grad(lambda x: f(x).sum())), (torch.stack([x, x * x]),), (torch.stack([x, -x]),)
    ),
    "jvp of one cotangent": lambda f, x: jvp(
        lambda u: grad(lambda x: grad(lambda x: (u * f(x)).sum())(x).sum())(x), (x,), (x,)
    ),
}
"""Transforms with tangents of gradients, which PyTorch gives to values under `no_grad`, too."""


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("transform", OVER_GRADIENTS)
def test_constants_of_gradients_have_tangents(transform: str, check: bool) -> None:
    x, run = torch.linspace(0.5, 2.0, 4, dtype=torch.float64), OVER_GRADIENTS[transform]
    for body, dense in {
        scaled_by_square: scaled_by_square,
        scaled_by_maximum: scaled_by_dense_maximum,
        scaled_by_constant: scaled_by_constant,
        cubed_if_differentiated: cubed_if_differentiated,
    }.items():
        mapped = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check=check)
        close(run(mapped, x), run(dense, x))


def rows_of(x: Tensor) -> Tensor:
    return torch.stack([x, x.sin(), x * x], -1)


def normalized(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(rows_of(x), (3,)).prod(-1)


def determinant(x: Tensor) -> Tensor:
    rows = rows_of(x)
    return torch.linalg.slogdet(rows[:, :, None] * rows[:, None] + torch.eye(3, dtype=x.dtype))[1]


class Unsymmetric(SavesInputs):
    """Function whose gradient is not that of any function."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        return 3 * grads[0] * y, 2 * grads[0] * x

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, y = ctx.saved_tensors
        return 3 * tangents[0] * y + 2 * tangents[1] * x


def unsymmetric(x: Tensor) -> Tensor:
    y: Tensor = Unsymmetric.apply(x * x, x.sin())
    return y


TWO_TANGENTS = "jacfwd of hessian", "jvp of jvp of grad"


@pytest.mark.parametrize("transform", OVER_GRADIENTS)
def test_tangents_of_gradients_are_derivatives_of_the_backward_pass(transform: str) -> None:
    """The gradient of a tangent is another one here, in PyTorch too."""
    x, run = torch.linspace(0.5, 2.0, 4, dtype=torch.float64), OVER_GRADIENTS[transform]
    for body in (normalized, determinant, unsymmetric):
        mapped = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
        if transform in TWO_TANGENTS:
            with pytest.raises(ShardingError, match="the same function in elementary operations"):
                run(mapped, x)
        else:
            close(run(mapped, x), run(body, x))


def normalized_by_hand(x: Tensor) -> Tensor:
    centred = rows_of(x) - rows_of(x).mean(-1, keepdim=True)
    return (centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()).prod(-1)


def probabilities(x: Tensor) -> Tensor:
    return rows_of(x).softmax(-1).prod(-1)


def tangent_by_gradients(f: Any, x: Tensor, t: Tensor) -> Tensor:
    tangent: Tensor = grad(lambda x: (grad(lambda x: f(x).sum())(x) * t).sum())(x)
    return tangent


def test_the_fixes_of_refused_tangents_of_gradients_are_right() -> None:
    x = torch.linspace(0.5, 2.0, 4, dtype=torch.float64)
    first, second = (
        fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
        for body in (probabilities, normalized_by_hand)
    )
    close(OVER_GRADIENTS["hessian"](first, x), OVER_GRADIENTS["hessian"](probabilities, x))
    run = OVER_GRADIENTS["grad of jvp of grad"]
    with pytest.raises(ShardingError, match="the tangent of the gradient as a gradient"):
        run(first, x)
    third = grad(lambda x: tangent_by_gradients(first, x, x.cos()).sum())(x)
    close(third, run(probabilities, x))
    for transform in TWO_TANGENTS:
        run = OVER_GRADIENTS[transform]
        close(run(second, x), run(normalized_by_hand, x))


def test_gradients_of_transforms_without_grad_mode_are_refused() -> None:
    """PyTorch differentiates the arguments there, and takes what is computed of them as constant.

    The derivative for the cotangent needs none of it.
    """
    mapped = fs.shard_map(torch.sin, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    x = torch.linspace(0.5, 2.0, 4, dtype=torch.float64).requires_grad_()
    ct = x.detach().cos().requires_grad_()
    for f in (mapped, torch.sin):
        with torch.no_grad():
            _, pullback = vjp(f, x)
        (gradient,) = pullback(ct)
        close(gradient.detach(), (x.cos() * ct).detach())
        close(torch.autograd.grad(gradient.sum(), ct, retain_graph=True)[0], x.cos().detach())
    with torch.no_grad():
        _, pullback = vjp(mapped, x)
    with pytest.raises(ShardingError, match=r"torch.func.vjp outside of no_grad\(\)"):
        torch.autograd.grad(pullback(ct)[0].sum(), x)
    _, pullback = vjp(mapped, x)
    close(torch.autograd.grad(pullback(ct)[0].sum(), x)[0], (-x.sin() * ct).detach())


def test_hooks_of_gradients_with_tangents_are_refused() -> None:
    x = torch.linspace(0.5, 2.0, 4, dtype=torch.float64)
    mapped = fs.shard_map(hooked, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    for transform in ("jvp of grad", "hessian"):
        with pytest.raises(ShardingError, match="forward mode goes around gradients"):
            OVER_GRADIENTS[transform](mapped, x)


@pytest.mark.parametrize("busy", range(3))
def test_ranks_whose_threads_have_counted_other_nodes_agree_on_an_order(busy: int) -> None:
    """Autograd numbers nodes per thread; results in forward mode are views, nodes of their own."""
    mesh = fs.Mesh(x=3)

    def add_nodes() -> None:
        x = torch.ones(1, requires_grad=True)
        for _ in range(500 * (int(fs.axis_index("x", mesh=mesh)) == busy)):
            x = x * 1

    def permuted(x: torch.Tensor) -> torch.Tensor:
        return fs.ppermute(x, "x", [(i, i) for i in range(3)]).tanh()

    def third_order(f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        total = lambda x: torch.func.vmap(f)(torch.stack([x, x.cos()])).tanh().sum()  # noqa: E731
        product = lambda x: (torch.func.hessian(total)(x) @ x).tanh().sum()  # noqa: E731
        result: torch.Tensor = torch.func.grad(product)(torch.arange(1.0, 4, dtype=torch.float64))
        return result

    fs.simulate(mesh, add_nodes)
    mapped = fs.shard_map(permuted, mesh=mesh, in_specs=P(), out_specs=P("x"))
    expected = third_order(lambda x: torch.cat([x.tanh()] * 3))
    torch.testing.assert_close(third_order(mapped), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("outer", ["tangent", "value"])
@pytest.mark.parametrize("batched", [False, True])
def test_constants_of_reverse_mode_have_tangents_at_two_levels(outer: str, batched: bool) -> None:
    """The value of an inner `jvp` has outer tangents too, of what `no_grad` makes a constant."""

    def body(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.cos() * y
        return x * scale

    def derivative(f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        def gradient(x: Tensor) -> Tensor:
            y, back = vjp(f, x, x.sin())
            return torch.stack(back(y.square())).sum(0)

        def second(x: Tensor) -> Tensor:
            both = vmap(gradient)(torch.stack([x, x + 1])).sum(0) if batched else gradient(x)
            return vjp(lambda z: z * gradient(z), x)[1](both)[0]

        def inner(x: Tensor) -> Tensor:
            return jvp(second, (x,), (x.cos(),))[outer == "tangent"]

        x = torch.linspace(-1, 1, 4, dtype=torch.float64)
        return jvp(inner, (x,), (x.exp(),))[1]

    mapped = fs.shard_map(body, mesh=MESH, in_specs=P(*MESH.axes[:1]), out_specs=P(*MESH.axes[:1]))
    torch.testing.assert_close(derivative(mapped), derivative(body), rtol=1e-10, atol=1e-10)
