"""Collectives under `torch.func` in mapped functions, compared with loops and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap

import fshard as fs
from fshard import Mesh, P
from fshard._torch.functorch import forward_ad_level

I4 = Mesh(i=4)
GROUPS = [[0, 1], [2, 3]]
F32 = torch.float32

Body = Callable[[torch.Tensor], Any]


def weight_by_rank(y: torch.Tensor) -> torch.Tensor:
    """Multiply a reduced value by a weight that differs by rank."""
    return y * (1 + fs.axis_index("i"))


def of_tree(v: torch.Tensor) -> torch.Tensor:
    total, rest = fs.psum((v, {"a": 2 * v.sum()[None], "b": v * v}), "i")
    return total * rest["a"] + rest["b"]


def of_extremes(v: torch.Tensor) -> torch.Tensor:
    first, other = fs.pmax((v, v[:1] * v[1:2]), "i")
    return first * other


def ragged(v: torch.Tensor) -> torch.Tensor:
    """Send row j of rank i to row i of rank j."""
    index, ones = fs.axis_index("i").expand(4), [1] * 4
    return fs.ragged_all_to_all(v, 0 * v, [0, 1, 2, 3], ones, index, ones, axis_name="i")


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "psum": lambda v: fs.psum(v, "i"),
    "psum in groups": lambda v: fs.psum(v, "i", axis_index_groups=GROUPS),
    "psum in float32": lambda v: fs.psum(v, "i", forward_dtype=F32, backward_dtype=F32),
    "psum of a tree": of_tree,
    "psum over no axis": lambda v: fs.psum(v, ()),
    "psum, started": lambda v: fs.start(fs.psum, v, "i").wait(),
    "pmean": lambda v: fs.pmean(v, "i"),
    "pmax": lambda v: fs.pmax(v, "i"),
    "pmax of a tree": of_extremes,
    "pmin in groups": lambda v: fs.pmin(v, "i", axis_index_groups=GROUPS),
    "pprod": lambda v: fs.pprod(v, "i"),
    "pprod in groups": lambda v: fs.pprod(v, "i", axis_index_groups=GROUPS),
    "all_gather": lambda v: fs.all_gather(v, "i", axis=1),
    "all_gather to invariant": lambda v: fs.all_gather(v, "i", to="invariant", tiled=True),
    "all_gather to reduced": lambda v: weight_by_rank(fs.all_gather(v, "i", to="reduced")),
    "all_gather in float32": lambda v: fs.all_gather(v, "i", axis=-1, forward_dtype=F32),
    "all_gather in groups": lambda v: fs.all_gather(v, "i", axis_index_groups=GROUPS),
    "psum_scatter": lambda v: fs.psum_scatter(v, "i", scatter_dimension=1),
    "psum_scatter, tiled": lambda v: fs.psum_scatter(v, "i", scatter_dimension=-1, tiled=True),
    "all_to_all": lambda v: fs.all_to_all(v, "i", 0, 1),
    "all_to_all, tiled": lambda v: fs.all_to_all(v, "i", 1, 0, tiled=True, backward_dtype=F32),
    "pswapaxes": lambda v: fs.pswapaxes(v, "i", 1),
    "ppermute": lambda v: fs.ppermute(v, "i", [(0, 1), (1, 2), (3, 0)]),
    "ppermute in float32": lambda v: fs.ppermute(v, "i", [(0, 1)], forward_dtype=F32),
    "pshuffle": lambda v: fs.pshuffle(v, "i", [2, 0, 3, 1]),
    "pbroadcast": lambda v: fs.pbroadcast(v, "i", 1),
    "ragged_all_to_all": ragged,
    "axis_index": weight_by_rank,
    "pcast of one value": lambda v: weight_by_rank(fs.pcast(v, "i", to="varying")),
    "pcast to reduced": lambda v: weight_by_rank(fs.pcast(v, "i", to="reduced")),
    "pcast of a tree": lambda v: weight_by_rank(fs.pcast([v, v.sum()], "i", to="varying")[0]),
    "pcast to addends": lambda v: fs.psum(fs.pcast(weight_by_rank(v), "i", to="unreduced"), "i"),
}  # fmt: skip


def loss_of(op: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the sum of an operation's result on a polynomial, weighted by element."""

    def number(v: torch.Tensor) -> torch.Tensor:
        y = op(v * v / 2 + v)
        return (y * torch.arange(1, 1 + y.numel(), dtype=y.dtype).reshape(y.shape)).sum()

    return number


def by_autograd(f: Callable[[torch.Tensor], torch.Tensor], v: torch.Tensor) -> torch.Tensor:
    q = v.detach().requires_grad_()
    return torch.autograd.grad(f(q), q)[0]


def batch(v: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.stack([v, v * 2 + 1, 1 - v], dim)


Pair = tuple[torch.Tensor, torch.Tensor]


def of_grad(op: Any, v: torch.Tensor) -> Pair:
    return grad(loss_of(op))(v), by_autograd(loss_of(op), v)


def of_vjp(op: Any, v: torch.Tensor) -> Pair:
    ct = torch.ones_like(op(v).detach()).cumsum(0)
    q = v.detach().requires_grad_()
    return vjp(op, v)[1](ct)[0], torch.autograd.grad(op(q), q, ct)[0]


def of_jacrev(op: Any, v: torch.Tensor) -> Pair:
    q = v.detach().requires_grad_()
    y = op(q)
    basis = torch.eye(y.numel(), dtype=y.dtype).reshape(-1, *y.shape)
    rows = [torch.autograd.grad(y, q, item, retain_graph=True)[0] for item in basis]
    return jacrev(op)(v), torch.stack(rows).reshape(y.shape + v.shape)


def of_vmap(index: int, to: int) -> Callable[[Any, torch.Tensor], Pair]:
    def run(op: Any, v: torch.Tensor) -> Pair:
        results = vmap(op, in_dims=index, out_dims=to)(batch(v, index))
        return results, torch.stack([op(item) for item in batch(v, index).unbind(index)], to)

    return run


def of_vmap_of_grad(op: Any, v: torch.Tensor) -> Pair:
    expected = [by_autograd(loss_of(op), item) for item in batch(v, 1).unbind(1)]
    return vmap(grad(loss_of(op)), in_dims=1)(batch(v, 1)), torch.stack(expected)


def of_grad_of_vmap(op: Any, v: torch.Tensor) -> Pair:
    expected = [by_autograd(loss_of(op), item) for item in batch(v, 0)]
    return grad(lambda b: vmap(loss_of(op))(b).sum())(batch(v, 0)), torch.stack(expected)


def of_vmap_of_vmap(op: Any, v: torch.Tensor) -> Pair:
    full = torch.stack([batch(v, 0), batch(-v, 0)], 1)
    expected = [torch.stack([op(item) for item in row]) for row in full.unbind(1)]
    return vmap(vmap(op), in_dims=1)(full), torch.stack(expected)


def of_grad_of_grad(op: Any, v: torch.Tensor) -> Pair:
    q = v.detach().requires_grad_()
    (first,) = torch.autograd.grad(loss_of(op)(q), q, create_graph=True)
    return grad(lambda v: (grad(loss_of(op))(v) ** 2).sum())(v), by_autograd_of(first, q)


def by_autograd_of(y: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad((y**2).sum(), q)[0]


def of_autograd_of_vmap(op: Any, v: torch.Tensor) -> Pair:
    expected = by_autograd(lambda q: sum((op(e) ** 2).sum() for e in batch(q, 0)), v)
    return by_autograd(lambda q: (vmap(op)(batch(q, 0)) ** 2).sum(), v), expected


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Pair]] = {
    "grad": of_grad,
    "vjp": of_vjp,
    "jacrev": of_jacrev,
    "vmap": of_vmap(0, 0),
    "vmap from inside": of_vmap(1, -1),
    "vmap from the end": of_vmap(-1, 1),
    "vmap of grad": of_vmap_of_grad,
    "grad of vmap": of_grad_of_vmap,
    "vmap of vmap": of_vmap_of_vmap,
    "grad of grad": of_grad_of_grad,
    "autograd of vmap": of_autograd_of_vmap,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_transforms_of_collectives_equal_loops(name: str, check: bool) -> None:
    x = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    op, one = CASES[name], name.startswith("pcast") and "addends" not in name
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4} if "32" in name or "tiled" in name else {}
    for transform, run in TRANSFORMS.items():
        results: list[Pair] = []

        def body(v: torch.Tensor) -> None:
            results.append(run(op, v))  # noqa: B023 - called at once

        value = P() if one else P("i")
        fs.shard_map(body, mesh=I4, in_specs=value, out_specs=None, check=check)(
            x[:4] if one else x
        )
        assert len(results) == I4.size
        for actual, expected in results:
            torch.testing.assert_close(actual, expected, msg=lambda t: f"{transform}: {t}", **close)  # noqa: B023


def test_pargmax_under_vmap() -> None:
    results = []

    def body(v: torch.Tensor) -> None:
        op = lambda v: fs.pargmax(v, "i") - fs.pargmin(v, "i")  # noqa: E731
        results.append(of_vmap(-1, 0)(op, v))

    x = torch.arange(16.0).roll(5).reshape(4, 4)
    fs.shard_map(body, mesh=I4, in_specs=P("i"), out_specs=None)(x)
    assert len(results) == I4.size
    assert all(torch.equal(*item) for item in results)


@pytest.mark.parametrize("check", [False, True])
def test_mapped_function_in_a_transform_of_an_outer_body(check: bool) -> None:
    mesh = Mesh(x=2, y=2)
    inner = fs.shard_map(
        lambda v: fs.psum(v**3, "y"), in_specs=P("y"), out_specs=P(), axis_names={"y"}, check=check
    )  # fmt: skip

    def of_inner(v: torch.Tensor) -> torch.Tensor:
        return torch.sum(inner(v))

    outer = fs.shard_map(
        grad(of_inner), mesh=mesh, in_specs=P("x"), out_specs=P("x"),
        axis_names={"x"}, check=check,
    )  # fmt: skip
    x = torch.arange(8.0)
    assert torch.equal(outer(x), 3 * x**2)


@pytest.mark.parametrize("check", [True, "strict", "values"])
def test_casts_are_inserted_in_transforms(check: Any) -> None:
    def body(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        if check == "strict":
            return grad(lambda q: (fs.pcast(q, "i", to="varying") * x[0]).sum())(a)  # type: ignore[no-any-return]
        return grad(lambda q: (q * x[0]).sum())(a)  # type: ignore[no-any-return]

    x, a = torch.arange(1.0, 9.0).reshape(4, 2), torch.tensor([5.0, 7.0])
    mapped = fs.shard_map(body, mesh=I4, in_specs=(P("i"), P()), out_specs=P(), check=check)
    assert torch.equal(mapped(x, a), x.sum(0))


def test_cotangents_keep_their_types_in_vjp() -> None:
    def body(v: torch.Tensor) -> torch.Tensor:
        ct = torch.ones_like(v)
        (transposed,) = vjp(lambda v: fs.psum(v, "i"), v)[1](ct)
        q = v.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(fs.psum(q, "i"), q, ct)
        assert fs.typeof(transposed).varying == fs.typeof(gradient).varying == ("i",)
        return ct

    mapped = fs.shard_map(body, mesh=I4, in_specs=P("i"), out_specs=P())
    assert mapped(torch.arange(4.0)).tolist() == [1.0]


def test_batches_of_gradients_of_a_simulated_program() -> None:
    mesh = Mesh(i=2)
    prog = fs.redistribute(fs.Spec(mesh, P("i"), shape=(4, 3)), fs.Spec(mesh, P(), shape=(4, 3)))
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    first, second = prog((x * x, 3 * x))
    cts = torch.arange(60.0).reshape(5, 4, 3)
    for outputs in ((first,), (second,), (first, second)):
        (results,) = torch.autograd.grad(
            outputs, x, (cts,) * len(outputs), is_grads_batched=True, retain_graph=True
        )
        expected = [
            torch.autograd.grad(outputs, x, (ct,) * len(outputs), retain_graph=True)[0]
            for ct in cts
        ]
        assert torch.equal(results, torch.stack(expected))


BATCHED: dict[str, tuple[Body, P]] = {
    "whole": (lambda v: fs.psum(v * v, "i") * scale, P()),
    "cut": (lambda v: v.sin() * fs.psum(v, "i") * scale, P("i")),
    "gathered": (lambda v: fs.all_gather(v * scale, "i", tiled=True, to="invariant").sin(), P()),
    "permuted": (lambda v: fs.ppermute(v * scale, "i", [(0, 1), (3, 2)]), P("i")),
    "largest": (lambda v: fs.pmax(v * scale, "i") * v, P("i")),
    "reduced, scattered": (
        lambda v: fs.psum_scatter(fs.all_gather(v, "i", tiled=True) * scale * v, "i", tiled=True),
        P("i"),
    ),
}
scale = torch.tensor(3.0, requires_grad=True)


@pytest.mark.parametrize("name", BATCHED)
def test_batches_of_gradients_of_a_mapped_function(name: str) -> None:
    body, out_specs = BATCHED[name]
    mapped = fs.shard_map(body, mesh=I4, in_specs=P("i"), out_specs=out_specs)
    x = torch.arange(1.0, 9.0).reshape(4, 2).requires_grad_()
    y = mapped(x)
    cts = torch.arange(3.0 * y.numel()).reshape(3, *y.shape)
    results = torch.autograd.grad(y, (x, scale), cts, is_grads_batched=True, create_graph=True)
    rows = [torch.autograd.grad(y, (x, scale), ct, create_graph=True) for ct in cts]
    wanted = list(map(torch.stack, zip(*rows, strict=True)))
    for a, b in zip(results, wanted, strict=True):
        torch.testing.assert_close(a, b)
    losses = [sum((g * g).sum() for g in gs) for gs in (results, wanted)]
    seconds = [torch.autograd.grad(loss, (x, scale), retain_graph=True) for loss in losses]
    for a, b in zip(*seconds, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_hessian_in_one_batch_of_gradients() -> None:
    def body(v: torch.Tensor) -> torch.Tensor:
        return fs.psum((v * fs.psum(v, "i")).sin().sum(), "i")

    x = torch.arange(4.0)
    mapped = fs.shard_map(body, mesh=I4, in_specs=P("i"), out_specs=P())
    results = torch.autograd.functional.hessian(mapped, x, vectorize=True)
    wanted = torch.autograd.functional.hessian(lambda x: (x * x.sum()).sin().sum(), x)
    torch.testing.assert_close(results, wanted)


def in_dual_level(f: Any, x: torch.Tensor) -> Any:
    """Return the tangent of `f` for a tangent of ones, by a level of forward mode."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


FORWARD: dict[str, tuple[Body, Body]] = {
    "a sum": (lambda v: fs.psum(v * v, "i"), lambda x: (x * x).sum(0, keepdim=True)),
    "a maximum with ties": (lambda v: fs.pmax(v * v, "i"), lambda x: (x * x).amax(0, keepdim=True)),
    "a gather": (
        lambda v: fs.all_gather(v.sin(), "i", tiled=True, to="invariant").prod(0, keepdim=True),
        lambda x: x.sin().prod(0, keepdim=True),
    ),
    "an exchange": (
        lambda v: fs.psum(fs.all_to_all(v * v, "i", 1, 0, tiled=True).prod(), "i")[None],
        lambda x: (x * x).prod(0).sum()[None],
    ),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_in_simulated_bodies(name: str, check: bool) -> None:
    body, dense = FORWARD[name]
    x = torch.tensor([[1.0, 2, 3, 1], [-1, 4, 3, 2], [0, 1, 1, 1], [1, 4, -3, 2]]).double()
    transforms: list[Callable[[Any, torch.Tensor], torch.Tensor]] = [
        in_dual_level,
        lambda f, v: jvp(f, (v,), (torch.ones_like(v),))[1],
        # The second level of this rank begins while other ranks are within theirs.
        lambda f, v: jvp(lambda u: jvp(f, (u,), (torch.ones_like(u),))[1], (v,), (v,))[1],
    ]
    for transform in transforms:

        def twice(v: torch.Tensor) -> torch.Tensor:
            return transform(body, v) + transform(body, 2 * v)  # noqa: B023 - called at once

        mapped = fs.shard_map(twice, mesh=I4, in_specs=P("i"), out_specs=P(), check=check)
        expected = transform(dense, x) + transform(dense, 2 * x)
        torch.testing.assert_close(mapped(x), expected, rtol=1e-10, atol=1e-10)
    assert forward_ad_level() == -1


# -- trees of pairs -------------------------------------------------------------------------

PAIR_MESH = Mesh(dp=2, tp=2)
LAYOUTS = [
    P("tp"), P(), P(reduced={"dp"}), P(None, "tp", reduced={"dp"}), P("tp", unreduced={"dp"}),
]  # fmt: skip


def squares(params: Any) -> torch.Tensor:
    """Return a loss of the global values; the tree keeps the parameters' specs."""
    specs = [leaf.spec for leaf in (params["w"], params["b"])]
    params = torch.utils._pytree.tree_map(lambda x: 2 * x, params)
    assert [leaf.spec for leaf in (params["w"], params["b"])] == specs
    w, b = (fs.unshard(fs.reshard(params[name], P())) for name in ("w", "b"))
    return (w * w).sum() + (w[0] * b).sum()


def squares_densely(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return 4 * ((w * w).sum() + (w[0] * b).sum())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_of_pairs_have_dual_layouts(layout: P) -> None:
    g = torch.Generator().manual_seed(0)
    w, b = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((4, 6), (6,)))
    params = {"w": fs.shard(w, PAIR_MESH, layout), "b": fs.shard(b, PAIR_MESH, P())}
    expected = grad(squares_densely, (0, 1))(w, b)
    value, back = vjp(squares, params)
    for grads in (grad(squares)(params), *back(torch.ones_like(value))):
        assert [grads[name].spec for name in "wb"] == [params[name].spec.dual for name in "wb"]
        found = [fs.unshard(grads[name]) for name in "wb"]
        torch.testing.assert_close(found, list(expected), rtol=1e-10, atol=1e-10)
    # A gradient's gradient is of the pair again: its layout is that of the first one.
    curvature = grad(lambda p: fs.unshard(grad(squares)(p)["w"]).square().sum())(params)
    dense = grad(lambda w: grad(squares_densely)(w, b).square().sum())(w)
    assert curvature["w"].spec == params["w"].spec.dual
    torch.testing.assert_close(fs.unshard(curvature["w"]), dense, rtol=1e-10, atol=1e-10)


def test_cotangents_of_pairs_have_dual_layouts() -> None:
    x = torch.arange(4.0, dtype=torch.float64)
    pair = fs.shard(x, PAIR_MESH, P("tp", reduced={"dp"}))
    target = P("tp", unreduced={"dp"})
    result, back = vjp(lambda p: fs.reshard(p, target), fs.shard(x, PAIR_MESH, P("tp")))
    assert result.spec.partition == target
    (gradient,) = back(fs.Sharded(pair.local, result.spec.dual))
    assert gradient.spec.partition == P("tp")
    torch.testing.assert_close(fs.unshard(gradient), x)
    with pytest.raises(RuntimeError, match="pytree structure of cotangents"):
        back(fs.Sharded(pair.local, result.spec))


class Hidden:
    """Holder of a tensor that no function visibly refers to."""

    __slots__ = ("x",)


@pytest.mark.parametrize("check", [True, False])
def test_hidden_tensors_of_a_transform_are_refused(check: bool) -> None:
    hidden = Hidden()

    def loss(w: torch.Tensor) -> torch.Tensor:
        hidden.x = 2 * w
        body = lambda x: fs.psum((x * hidden.x).sum(), "i")  # noqa: E731
        mapped = fs.shard_map(body, mesh=I4, in_specs=P("i"), out_specs=P(), check=check)
        y: torch.Tensor = mapped(torch.ones(8))
        return y

    with pytest.raises(fs.ShardingError, match=r"under a transform of torch.func"):
        grad(loss)(torch.tensor(3.0))
