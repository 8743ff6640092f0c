"""Maps along some of the axes, and maps in the bodies of others."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P, Sharded, ShardingError, Spec
from fshard.spmd import axis_env
from tests.helpers.spec_grid import message, random_global

MESH = Mesh(x=2, y=3)
MESHES = [MESH, Mesh({"x": 2, "y": 3}, devices=(4, 1, 5, 0, 2, 3))]
CUBE = Mesh({"x": 2, "y": 2, "z": 2}, devices=(3, 1, 4, 0, 5, 7, 2, 6))
F64 = torch.float64


def ints(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_global(shape, F64, seed)


def weights(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [(ints(*shape, seed=index) / 4).requires_grad_() for index, shape in enumerate(shapes)]


# -- a subset of the axes ----------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("names", [{"x"}, frozenset({"x"}), ("x",)], ids=str)
def test_only_named_axes_are_mapped(mesh: Mesh, names: Any) -> None:
    seen: list[torch.Tensor] = []

    @fs.shard_map(mesh=mesh, axis_names=names, in_specs=P("x"), out_specs=P("x"))
    def body(v: torch.Tensor) -> torch.Tensor:
        seen.append(v)
        return v * fs.psum(v, "x").sum()

    x = ints(4, 3).requires_grad_()
    torch.testing.assert_close(body(x), x * x.sum())
    for rank, mine in zip(mesh.ranks, seen, strict=True):
        assert torch.equal(mine, x[2 * mesh.coords(rank)["x"] :][:2])


@pytest.mark.parametrize("names", [(), frozenset()], ids=str)
def test_empty_axis_names_map_all_axes(names: Any) -> None:
    mapped = fs.shard_map(
        lambda v: fs.psum(v, ("y", "x")), mesh=MESH, axis_names=names, in_specs=P(("x", "y")),
        out_specs=P(),
    )  # fmt: skip
    assert torch.equal(mapped(ints(6)), ints(6).sum()[None])


def test_unmapped_axes_are_not_bound() -> None:
    mapped = fs.shard_map(
        lambda v: fs.psum(v, "y"), mesh=MESH, axis_names={"x"}, in_specs=P("x"), out_specs=P()
    )
    with pytest.raises(ShardingError) as caught:
        mapped(ints(4))
    assert str(caught.value) == (
        "fs.psum\n"
        "  given: an unbound axis name: 'y' of Mesh(x=2, y=3)\n"
        "  rule:  the axes that the running shard_map maps are x\n"
        "  fix:   name it in axis_names=, or map over it in the body: "
        "fs.shard_map(..., axis_names={'y'})"
    )


def test_pairs_must_be_sharded_along_mapped_axes() -> None:
    x = ints(4, 6)
    double = fs.shard_map(
        lambda v: 2 * v, mesh=MESH, axis_names={"x"}, in_specs=P("x"), out_specs=P("x")
    )
    out = double(fs.shard(x, Spec(MESH, P("x"), shape=(4, 6), dtype=F64)))
    assert out.spec == Spec(MESH, P("x"), shape=(4, 6), dtype=F64)
    assert torch.equal(fs.unshard(out), 2 * x)
    for p, state in (
        (P("x", "y"), "f64[4@x,6@y]"),
        (P("x", unreduced={"y"}), "f64[4@x,6]{unreduced: y}"),
        (P("x", reduced={"y"}), "f64[4@x,6]{reduced: y}"),
    ):
        with pytest.raises(ShardingError) as caught:
            double(fs.shard(x, Spec(MESH, p, shape=(4, 6), dtype=F64)))
        assert str(caught.value) == (
            "shard_map(<lambda>)\n"
            f"  given: v: a pair of {state}, along 'y'\n"
            "  rule:  the axes of a pair must be mapped here; mapped are x\n"
            "  fix:   axis_names={'x', 'y'}, or fs.reshard(pair, spec) without 'y'"
        )


# -- maps in maps ------------------------------------------------------------------------


def two_level(mesh: Mesh | None, inner_mesh: Mesh | None) -> Callable[..., Any]:
    """tanh(x @ w) @ v: rows along x in the outer map, the hidden dim along y in the inner one."""

    def outer(a: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        w, v = (fs.pcast(item, "x", to="varying") for item in (w, v))

        @fs.shard_map(
            mesh=inner_mesh, axis_names={"y"}, in_specs=(P(), P(None, "y"), P("y")), out_specs=P()
        )
        def inner(a: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            assert w.shape[1] == 2
            a = fs.pcast(a, "y", to="varying")
            return fs.psum(torch.tanh(a @ w) @ v, "y")

        return torch.tanh(inner(a, w, v))

    return fs.shard_map(  # type: ignore[no-any-return]
        outer, mesh=mesh, axis_names={"x"}, in_specs=(P("x"), P(), P()), out_specs=P("x")
    )


def one_device(a: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(a @ w) @ v)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["mesh", "None"])
def test_nested_gradients_to_second_order(mesh: Mesh, given: bool) -> None:
    args = weights((4, 5), (5, 6), (6, 3))
    results = []
    for f in (one_device, two_level(mesh, mesh if given else None)):
        out = f(*args)
        first = torch.autograd.grad((out**2).sum(), args, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), args)
        results.append((out, first, second))
    torch.testing.assert_close(results[1], results[0])


def test_inner_maps_with_every_layout() -> None:
    """Values that are unsharded on an outer rank are sharded along the inner axes alone."""
    x = ints(4, 6, 2)
    for p in (P("y"), P(None, "y"), P(None, None, "y"), P(), P(None, ("z", "y")), P("z", "y")):
        shapes: list[tuple[int, ...]] = []

        def outer(v: torch.Tensor, p: Any = p, shapes: Any = shapes) -> torch.Tensor:
            def inner(u: torch.Tensor) -> torch.Tensor:
                shapes.append(tuple(u.shape))
                return u * (1 + fs.axis_index("x"))

            return fs.shard_map(inner, axis_names={"y", "z"}, in_specs=p, out_specs=p)(v)

        mesh = Mesh({"x": 2, "y": 2, "z": 3}, devices=range(12))
        full = x if p != P("z", "y") else ints(6, 6, 2)
        full = full if p != P(None, ("z", "y")) else ints(4, 6, 2)
        out = fs.shard_map(outer, mesh=mesh, axis_names={"x"}, in_specs=P("x"), out_specs=P("x"))
        if p == P("z", "y"):
            scale = torch.tensor([1.0, 2.0], dtype=F64).repeat_interleave(3)
        else:
            scale = torch.tensor([1.0, 2.0], dtype=F64).repeat_interleave(2)
        assert torch.equal(out(full), full * scale[:, None, None])
        rows = full.shape[0] // 2
        spec = Spec(mesh.submesh("y", "z"), p, shape=(rows, *full.shape[1:]))
        assert set(shapes) == {spec.local_shape(0)}


def test_inner_bodies_name_outer_axes() -> None:
    def outer(v: torch.Tensor) -> torch.Tensor:
        def inner(u: torch.Tensor) -> torch.Tensor:
            assert fs.axis_size(("x", "y")) == 6
            return fs.psum(u, ("y", "x"))

        total = fs.shard_map(inner, in_specs=P("y"), out_specs=P())(v)
        with pytest.raises(ShardingError, match="an unbound axis name: 'y'"):
            fs.psum(v, "y")
        return total

    mapped = fs.shard_map(outer, mesh=MESH, axis_names={"x"}, in_specs=P("x"), out_specs=P())
    x = ints(6, 2).requires_grad_()
    out = mapped(x)
    assert torch.equal(out, x.sum(0, keepdim=True))
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(6, 2, dtype=F64))  # type: ignore[arg-type]


def test_three_levels() -> None:
    def map_along(axis: str, fn: Callable[..., Any], mesh: Mesh | None = None) -> Any:
        return fs.shard_map(fn, mesh=mesh, axis_names={axis}, in_specs=P(axis), out_specs=P(axis))

    def innermost(v: torch.Tensor) -> torch.Tensor:
        index = fs.axis_index(("x", "y", "z"))
        return v.sin() * (1 + index) + fs.pcast(fs.psum(v, ("x", "y", "z")), ("x", "y", "z"),
                                                to="varying")  # fmt: skip

    nested = map_along("x", map_along("y", map_along("z", innermost)), CUBE)
    flat = fs.shard_map(
        innermost, mesh=CUBE, in_specs=P(("x", "y", "z")), out_specs=P(("x", "y", "z"))
    )
    x = (ints(8) / 4).requires_grad_()
    torch.testing.assert_close(nested(x), flat(x))
    torch.autograd.gradcheck(nested, (x,))
    torch.autograd.gradgradcheck(nested, (x,))


def test_autograd_grad_in_the_outer_body() -> None:
    """`torch.autograd.grad` in the outer body differentiates the inner map, to second order."""

    def inner(w: torch.Tensor) -> torch.Tensor:
        return fs.psum((w**3).sum(), "y")

    def outer(v: torch.Tensor) -> torch.Tensor:
        leaf = v.detach().requires_grad_()
        loss = fs.shard_map(inner, in_specs=P("y"), out_specs=P())(leaf)
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), leaf)
        return torch.stack([first.detach(), second], 1)

    mapped = fs.shard_map(outer, mesh=MESH, axis_names={"x"}, in_specs=P("x"), out_specs=P("x"))
    x = ints(6)
    torch.testing.assert_close(mapped(x), torch.stack([3 * x**2, 6 * x], 1))


def test_checkpoints_in_bodies_keep_axes_bound() -> None:
    """Axes are bound again for parts that the backward pass recomputes."""

    def block(v: torch.Tensor) -> torch.Tensor:
        return v * fs.pcast(fs.psum(v.sin(), ("x", "y")), ("x", "y"), to="varying")

    def inner(v: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, v, use_reentrant=False)  # type: ignore[no-any-return]

    def outer(v: torch.Tensor) -> torch.Tensor:
        return fs.shard_map(inner, in_specs=P("y"), out_specs=P("y"))(v.cos())  # type: ignore[no-any-return]

    mapped = fs.shard_map(outer, mesh=MESH, axis_names={"x"}, in_specs=P("x"), out_specs=P("x"))
    x = (ints(6, 2) / 4).requires_grad_()
    want = x.cos() * x.cos().sin().sum(0)
    torch.testing.assert_close(mapped(x), want)
    torch.testing.assert_close(
        torch.autograd.grad((mapped(x) ** 2).sum(), x), torch.autograd.grad((want**2).sum(), x)
    )
    with pytest.raises(ShardingError, match="an unbound axis name: 'x'"):
        fs.axis_size("x")


# -- pairs in bodies ---------------------------------------------------------------------


def test_pairs_on_the_submesh_of_unmapped_axes() -> None:
    """Pairs of the inner map are on the submesh at this rank's coordinates."""
    specs: list[Spec] = []

    def outer(v: torch.Tensor) -> torch.Tensor:
        double = fs.shard_map(lambda u: 2 * u, in_specs=P("y"), out_specs=P("y"))
        coords = {"x": int(fs.axis_index("x"))}
        part = MESH.submesh("y", **coords)
        output = fs.shard(v, Spec(part, P("y"), shape=v.shape, dtype=F64))
        out = double(output)
        total = fs.psum(v, "x")  # equal along x, as a pair of the full mesh must be
        full = double(fs.shard(total, Spec(MESH, P("y"), shape=v.shape, dtype=F64)))
        assert isinstance(out, Sharded)
        assert out.spec == full.spec == output.spec
        specs.append(out.spec)
        return fs.unshard(out) + fs.pcast(fs.unshard(full), "x", to="varying")

    mapped = fs.shard_map(
        outer, mesh=MESH, axis_names={"x"}, in_specs=P("x"), out_specs=P("x"), check=False
    )
    x = ints(6, 2).requires_grad_()
    out = mapped(x)
    assert torch.equal(out, 2 * x + 2 * (x[:3] + x[3:]).repeat(2, 1))
    assert {spec.mesh for spec in specs} == {MESH.submesh("y", x=0), MESH.submesh("y", x=1)}
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((6, 2), 6.0, dtype=F64))  # type: ignore[arg-type]


def test_local_map_in_a_body_uses_the_pairs_mesh() -> None:
    """Pairs may be on the submesh of unmapped axes, or on the full mesh."""

    def outer(v: torch.Tensor) -> torch.Tensor:
        part = MESH.submesh("y", x=int(fs.axis_index("x")))
        total = fs.local_map(lambda u: fs.psum(u, ("x", "y")), in_specs=P("y"), out_specs=P())
        one = fs.unshard(total(fs.shard(v, Spec(part, P("y"), shape=v.shape, dtype=F64))))
        every = fs.local_map(
            lambda u: fs.psum(u, ("x", "y")), in_specs=P(("x", "y")), out_specs=P()
        )
        local = v[int(fs.axis_index("y", mesh=MESH))][None]
        two = fs.unshard(every(fs.from_local(local, MESH, P(("x", "y")))))
        assert torch.equal(one, two)
        return one

    mapped = fs.shard_map(outer, mesh=MESH, axis_names={"x"}, in_specs=P("x"), out_specs=P())
    x = ints(6, 2)
    assert torch.equal(mapped(x), x.sum(0, keepdim=True))


def test_pair_sharded_along_outer_axes_is_refused() -> None:
    def outer(v: torch.Tensor) -> torch.Tensor:
        pair = fs.from_local(v, MESH, P("x"))
        return fs.shard_map(lambda u: u, in_specs=P("y"), out_specs=P("y"))(pair)  # type: ignore[no-any-return]

    with pytest.raises(ShardingError) as caught:
        fs.shard_map(outer, mesh=MESH, axis_names={"x"}, in_specs=P("x"), out_specs=P("x"))(ints(6))
    assert str(caught.value) == (
        "shard_map(<lambda>)\n"
        "  given: u: a pair of f64[6@x], along 'x'\n"
        "  rule:  the axes of a pair must be mapped here; mapped are y\n"
        "  fix:   fs.local_map, which maps all axes of a pair"
    )


def test_tuples_of_shards_in_bodies_are_simulated() -> None:
    """A map of a tuple of shards runs a simulation, also inside a rank."""

    def outer(v: torch.Tensor) -> torch.Tensor:
        mesh = Mesh(a=2)
        spec = Spec(mesh, P("a"), shape=(2,), dtype=F64)
        total = fs.shard_map(lambda u: fs.psum(u, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())
        with fs.comm_log():
            out = total(((v[:1], v[1:]), spec))
        return out.local[0]  # type: ignore[no-any-return]

    mapped = fs.shard_map(outer, mesh=MESH, in_specs=P("y"), out_specs=P("y"))
    x = ints(6)
    assert torch.equal(mapped(x), x.view(3, 2).sum(1))


def test_ranks_outside_of_the_mesh_get_empty_results() -> None:
    """Results are empty, in the tree of the out specs."""

    def on_rank() -> Any:
        x = ints(4, 6)
        mesh = Mesh(x=2)
        spec = Spec(mesh, P("x"), shape=(4, 6), dtype=F64)
        both = fs.shard_map(
            lambda v: {"a": v, "b": (v, 3)}, mesh=mesh, in_specs=P("x"),
            out_specs={"a": P("x"), "b": (P("x"), None)},
        )  # fmt: skip
        wide = fs.shard_map(lambda v: v, mesh=mesh, in_specs=P(), out_specs=P(None, "x"))
        last = fs.smap(lambda v: v, mesh=mesh, axis_name="x", in_axes=-1, out_axes=-1)
        cols = fs.reshard(fs.shard(x, spec), P(None, "x"))
        return both(x), both(fs.shard(x, spec)), last(cols), wide(x)

    *inside, (plain, pairs, last, empty) = fs.simulate(Mesh(x=3), on_rank)
    assert all(torch.equal(row[0]["b"][0], ints(4, 6)) for row in inside)
    assert (plain["a"].shape, plain["b"][0].shape, plain["b"][1]) == ((0,), (0,), None)
    assert pairs["b"][0].spec == Spec(Mesh(x=2), P("x"), shape=(0,))
    assert last.spec == Spec(Mesh(x=2), P("x"), shape=(0,))
    assert (empty.shape, inside[0][3].shape) == ((0, 0), (4, 12))
    assert inside[0][2].spec == Spec(Mesh(x=2), P(None, "x"), shape=(4, 6), dtype=F64)


# -- what is refused ---------------------------------------------------------------------


def nested(**options: Any) -> Callable[[], Any]:
    inner = {"in_specs": P("y"), "out_specs": P("y")} | options
    outer = fs.shard_map(
        fs.shard_map(torch.sin, **inner),
        mesh=MESH, axis_names={"x"}, in_specs=P("x"), out_specs=P("x"),
    )  # fmt: skip
    return lambda: outer(ints(6))


def full(v: torch.Tensor) -> Any:
    return fs.shard_map(torch.sin, in_specs=P(), out_specs=P())(v)


NESTED: list[tuple[Callable[[], Any], str]] = [
    (
        nested(mesh=Mesh(y=3)),
        message(
            "shard_map(sin)",
            "mesh=Mesh(y=3) in a running shard_map over Mesh(x=2, y=3)",
            "a shard_map in the body of another must map axes of the same mesh",
            "mesh=None, which takes the enclosing mesh",
        ),
    ),
    (
        nested(axis_names={"x"}),
        message(
            "shard_map(sin)",
            "axis 'x' in axis_names={'x'}",
            "'x' of Mesh(x=2, y=3) is mapped already, by the enclosing shard_map",
            "axis_names={'y'}, or leave axis_names out",
        ),
    ),
    (
        nested(axis_names={"x", "y"}),
        message(
            "shard_map(sin)",
            "axis 'x' in axis_names={'x', 'y'}",
            "'x' of Mesh(x=2, y=3) is mapped already, by the enclosing shard_map",
            "axis_names={'y'}, or leave axis_names out",
        ),
    ),
    (
        nested(in_specs=P("x")),
        message(
            "shard_map(sin)",
            "args[0]: axis 'x' in P('x')",
            "the axes that are mapped here are y",
            "leave 'x' out: each of its ranks maps its own values",
        ),
    ),
    (
        lambda: fs.shard_map(full, mesh=MESH, in_specs=P(), out_specs=P())(ints(6)),
        message(
            "shard_map(sin)",
            "a shard_map in a running one that maps every axis of Mesh(x=2, y=3)",
            "a shard_map in the body of another must map further axes",
            "call the function itself: its collectives may name the mapped axes",
        ),
    ),
    (
        lambda: full(ints(6)),
        message(
            "shard_map(sin)",
            "mesh=None outside of a running shard_map",
            "mesh=None takes the mesh of the enclosing shard_map",
            "mesh=fs.Mesh(x=2)",
        ),
    ),
]


@pytest.mark.parametrize("at", range(len(NESTED)))
def test_refused_nested_maps(at: int) -> None:
    call, text = NESTED[at]
    with pytest.raises(ShardingError) as caught:
        call()
    assert str(caught.value) == text


def test_names_of_a_failed_backward_pass_are_not_bound_in_later_ones() -> None:
    def run() -> None:
        bound = axis_env.BoundAxes(fs.Mesh(x=2), frozenset("x"))
        bound.backward_task = 3  # a pass that raised: autograd does not call what ends it
        axis_env._BOUND.set(bound)
        assert axis_env.current_axes() is None
        assert bound.is_over

    contextvars.copy_context().run(run)
