"""`shard_map` and `local_map`: specs, arguments, results and gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, Sharded, ShardingError, Spec
from tests.helpers.spec_grid import random_global

MESH = Mesh(x=2, y=3)
PERMUTED = Mesh({"x": 2, "y": 3}, devices=(4, 1, 5, 0, 2, 3))
F64 = torch.float64


def ints(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_global(shape, F64, seed)


def pair_of(x: torch.Tensor, p: fs.PartitionSpec, mesh: Mesh = MESH, **options: Any) -> Sharded:
    return fs.shard(x, Spec(mesh, p, shape=x.shape, dtype=x.dtype, **options))


# -- values ----------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [MESH, PERMUTED], ids=str)
def test_ranks_get_their_slices(mesh: Mesh) -> None:
    x = ints(6, 6)
    for p in (P("x"), P("y", "x"), P(("x", "y")), P(("y", "x")), P(None, ("y", "x")), P()):
        seen: list[torch.Tensor] = []
        spec = Spec(mesh, p, shape=(6, 6), dtype=F64)

        def body(v: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen.append(v)
            return v

        out = fs.shard_map(body, mesh=mesh, in_specs=p, out_specs=p)(x)
        assert torch.equal(out, x)
        for rank, mine in zip(mesh.ranks, seen, strict=True):
            assert torch.equal(mine, x[spec.index(rank)])


def test_decorator_and_call_forms_keep_the_name() -> None:
    @fs.shard_map(mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x"))
    def scale(v: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Its docstring."""
        return v * factor

    assert (scale.__name__, scale.__doc__) == ("scale", "Its docstring.")
    x = ints(4, 2)
    assert torch.equal(scale(x, torch.tensor(3.0)), 3 * x)
    again = fs.shard_map(lambda v: v + 1, mesh=MESH, in_specs=P("y"), out_specs=P("y"))
    assert torch.equal(again(ints(3)), ints(3) + 1)


def test_dict_specs_match_keyword_arguments_and_defaults() -> None:
    def body(v: torch.Tensor, w: torch.Tensor, *, factor: float = 2.0, bias: Any = None) -> Any:
        out = (v + w) * factor
        return out if bias is None else out + bias

    x, w = ints(4, seed=1), ints(4, seed=2)
    by_name = {"v": P("x"), "w": P("x"), "factor": None, "bias": P("x")}
    mapped = fs.shard_map(body, mesh=MESH, in_specs=by_name, out_specs=P("x"))
    assert torch.equal(mapped(x, w), 2 * (x + w))
    assert torch.equal(mapped(w=w, v=x), 2 * (x + w))
    assert torch.equal(mapped(x, w=w, factor=3.0, bias=x), 3 * (x + w) + x)
    by_place = fs.shard_map(body, mesh=MESH, in_specs=(P("x"), P("x")), out_specs=P("x"))
    assert torch.equal(by_place(x, w=w), 2 * (x + w))
    assert torch.equal(by_place(w=w, v=x), 2 * (x + w))
    with pytest.raises(TypeError, match="missing a required argument: 'w'"):
        mapped(x)
    with pytest.raises(ShardingError, match=re.escape("in_specs={..., 'bias': P()}")):
        fs.shard_map(body, mesh=MESH, in_specs={"v": P("x"), "w": P("x")}, out_specs=P("x"))(
            x, w, bias=x
        )


def test_specs_are_tree_prefixes() -> None:
    tree = {"b": (ints(4, seed=1), [ints(2, 6, seed=2)]), "a": ints(6, seed=3)}
    flat: list[Any] = [
        P("x"),
        (P("x"),),
        ({"a": P("x"), "b": P("x")},),
        ({"a": P("x"), "b": (P("x"), P("x"))},),
        ({"a": P("x"), "b": (P("x"), [P("x")])},),
    ]
    for in_specs in flat:
        out_specs = in_specs[0] if isinstance(in_specs, tuple) else in_specs
        mapped = fs.shard_map(lambda t: t, mesh=MESH, in_specs=in_specs, out_specs=out_specs)
        out = mapped(tree)
        assert list(out) == ["b", "a"]
        assert torch.equal(out["b"][0], tree["b"][0])
        assert torch.equal(out["b"][1][0], tree["b"][1][0])
        assert torch.equal(out["a"], tree["a"])


def test_mixed_specs_in_a_tree() -> None:
    params = {"w": ints(6, 4), "b": ints(4)}

    @fs.shard_map(
        mesh=MESH, in_specs=({"w": P("y", "x"), "b": P("x")}, P(None, "y")), out_specs=P(None, "x")
    )
    def dense(params: dict[str, torch.Tensor], v: torch.Tensor) -> torch.Tensor:
        return fs.psum(v @ params["w"], "y") + params["b"]

    v = ints(5, 6, seed=4)
    assert torch.equal(dense(params, v), v @ params["w"] + params["b"])


def test_arguments_with_spec_none_pass_through() -> None:
    marker = object()

    def body(v: torch.Tensor, config: Any, none: Any) -> tuple[torch.Tensor, Any, Any, int]:
        assert config["marker"] is marker
        return v, config["marker"], none, v.shape[0]

    mapped = fs.shard_map(
        body, mesh=MESH, in_specs=(P("x"), None, None), out_specs=(P("x"), None, None, None)
    )
    out, same, none, rows = mapped(ints(4), {"marker": marker, "n": 3}, None)
    assert torch.equal(out, ints(4))
    assert same is marker
    assert none is None
    assert rows == 2
    full = ints(3)
    saved = fs.shard_map(lambda t: t.shape[0], mesh=MESH, in_specs=None, out_specs=None)
    assert saved(full) == 3


def test_numbers_pass_with_empty_partition() -> None:
    mapped = fs.shard_map(lambda v, n: v * n, mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x"))
    assert torch.equal(mapped(ints(4), 3), 3 * ints(4))


def test_functions_without_tensors() -> None:
    size = fs.shard_map(lambda: fs.axis_size("y"), mesh=MESH, in_specs=(), out_specs=None)
    assert size() == 3
    index = fs.shard_map(
        lambda: fs.axis_index(("y", "x"))[None], mesh=MESH, in_specs=(), out_specs=P(("y", "x"))
    )
    assert index().tolist() == [0, 1, 2, 3, 4, 5]


def test_unreduced_out_spec_keeps_partial_sums() -> None:
    """Partial sums are summed when the global value is read."""
    add = fs.shard_map(
        lambda v: fs.pcast(v.sum(0), "x", to="unreduced"), mesh=MESH, in_specs=P("x"),
        out_specs=P(unreduced={"x"}),
    )  # fmt: skip
    x = ints(4, 3)
    assert torch.equal(add(x), x.sum(0))
    local, spec = add(pair_of(x, P("x")))
    assert spec == Spec(MESH, P(unreduced={"x"}), shape=(3,), dtype=F64)
    assert torch.equal(local[0], x[:2].sum(0))


def test_uneven_shards_keep_their_sizes() -> None:
    x = ints(7, 2)
    spec = Spec(MESH, P("y"), shape=(7, 2), sizes={0: (4, 0, 3)}, dtype=F64)
    mapped = fs.shard_map(lambda v: 2 * v, mesh=MESH, in_specs=P("y"), out_specs=P("y"))
    local, out = mapped(fs.shard(x, spec))
    assert out == spec
    assert torch.equal(fs.unshard((local, out)), 2 * x)
    asked = fs.shard_map(lambda v: 2 * v, mesh=MESH, in_specs=spec, out_specs=spec)
    assert torch.equal(asked(x), 2 * x)
    with pytest.raises(ShardingError, match=r"7 % 3 = 1"):
        mapped(x)


def test_pair_arguments_give_pair_results() -> None:
    x, w = ints(4, 6), ints(6, 2, seed=1)
    mapped = fs.shard_map(
        lambda a, b: {"out": fs.psum(a @ b, "y"), "n": 1},
        mesh=MESH, in_specs=(P("x", "y"), P("y")), out_specs={"out": P("x"), "n": None},
    )  # fmt: skip
    plain = mapped(x, w)
    assert torch.equal(plain["out"], x @ w)
    for value in (
        (pair_of(x, P("x", "y")), w), (x, pair_of(w, P("y"))),
        (tuple(pair_of(x, P("x", "y"))), w),
    ):  # fmt: skip
        out = mapped(*value)
        assert isinstance(out["out"], Sharded)
        assert out["out"].spec == Spec(MESH, P("x"), shape=(4, 2), dtype=F64)
        assert torch.equal(fs.unshard(out["out"]), x @ w)
        assert out["n"] == 1


# -- gradients -------------------------------------------------------------------------


def mlp(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x @ w) @ v)


def sharded_mlp(mesh: Mesh) -> Callable[..., Any]:
    """Rows over x, the hidden dim over y."""

    @fs.shard_map(mesh=mesh, in_specs=(P("x"), P(None, "y"), P("y")), out_specs=P("x"))
    def body(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x = fs.pcast(x, "y", to="varying")
        w, v = (fs.pcast(item, "x", to="varying") for item in (w, v))
        return torch.tanh(fs.psum(torch.tanh(x @ w) @ v, "y"))

    return body  # type: ignore[no-any-return]


def weights() -> tuple[torch.Tensor, ...]:
    return tuple(
        (ints(*shape, seed=seed) / 4).requires_grad_()
        for seed, shape in enumerate([(4, 5), (5, 6), (6, 3)])
    )


@pytest.mark.parametrize("mesh", [MESH, PERMUTED], ids=str)
def test_gradients_are_those_of_one_device(mesh: Mesh) -> None:
    args = weights()
    wanted, results = (mlp(*args) ** 2).sum(), (sharded_mlp(mesh)(*args) ** 2).sum()
    torch.testing.assert_close(results, wanted)
    expected = torch.autograd.grad(wanted, args, create_graph=True)
    actual = torch.autograd.grad(results, args, create_graph=True)
    torch.testing.assert_close(actual, expected)
    again = [(g**2).sum() for g in (expected[1], actual[1])]
    second = [torch.autograd.grad(item, args) for item in again]
    torch.testing.assert_close(second[1], second[0])


def test_backward_and_retain_graph() -> None:
    args = weights()
    loss = (sharded_mlp(MESH)(*args) ** 2).sum()
    loss.backward(retain_graph=True)
    first = [a.grad.clone() for a in args if a.grad is not None]
    loss.backward()
    for a, once in zip(args, first, strict=True):
        torch.testing.assert_close(a.grad, 2 * once)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_gradients_through_pairs() -> None:
    x, w, v = weights()
    pair = pair_of(w, P(None, "y"))
    out = sharded_mlp(MESH)(pair_of(x, P("x")), pair, pair_of(v, P("y")))
    (fs.unshard(out) ** 2).sum().backward()
    expected = torch.autograd.grad((mlp(x, w, v) ** 2).sum(), (x, w, v))
    for item, grad in zip((x, w, v), expected, strict=True):
        torch.testing.assert_close(item.grad, grad)
    # Locals that are leaves have the gradients of their shards.
    local = tuple(s.detach().requires_grad_() for s in pair.local)
    out = sharded_mlp(MESH)(x.detach(), (local, pair.spec), v.detach())
    (fs.unshard(out) ** 2).sum().backward()
    for rank, shard in enumerate(local):
        # Along x the weight is invariant: every rank has the full gradient of its shard.
        torch.testing.assert_close(shard.grad, expected[1][pair.spec.index(rank)])


def test_gradcheck_of_every_linear_collective() -> None:
    mesh = Mesh(x=2, y=2)

    @fs.shard_map(mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"))
    def body(v: torch.Tensor) -> torch.Tensor:
        full = fs.all_gather(v, ("y", "x"), tiled=True)
        part = fs.psum_scatter(full.sin(), "y", scatter_dimension=0, tiled=True)
        swapped = fs.all_to_all(part, "x", 0, 1, tiled=True)
        moved = fs.ppermute(swapped, ("x", "y"), [(0, 3), (3, 1), (1, 0)])
        mean = fs.pcast(fs.pmean(moved, "x"), "x", to="varying")
        return (mean * moved)[:1, :1]

    x = (ints(4, 4) / 4).requires_grad_()
    torch.autograd.gradcheck(body, (x,))
    torch.autograd.gradgradcheck(body, (x,))


def test_pmax_gradients_are_those_of_amax() -> None:
    x = torch.tensor([[1.0, 5.0], [4.0, 5.0]], dtype=F64, requires_grad=True)
    mapped = fs.shard_map(lambda v: fs.pmax(v, "x"), mesh=Mesh(x=2), in_specs=P("x"), out_specs=P())
    mapped(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 0.5], [1.0, 0.5]]


@pytest.mark.parametrize("reduce", [fs.pmax, fs.pmin])
def test_pmax_second_derivatives(reduce: Any) -> None:
    """The ranks' uses of a maximum's cotangent are summed in the second derivative."""
    mapped = fs.shard_map(
        lambda v: fs.pcast(reduce(v.sin(), ("y", "x")), ("y", "x"), to="varying") * v,
        mesh=Mesh(x=2, y=2), in_specs=P(("x", "y")), out_specs=P(("x", "y")),
    )  # fmt: skip
    x = torch.tensor([0.3, -0.2, 1.1, 0.5], dtype=F64, requires_grad=True)
    torch.autograd.gradcheck(mapped, (x,))
    torch.autograd.gradgradcheck(mapped, (x,))


def test_results_without_gradient_inputs_do_not_require_grad() -> None:
    x, w = torch.ones(4, requires_grad=True), torch.ones(4)
    mapped = fs.shard_map(
        lambda a, b: (a * b, b + 1, a.detach(), (a > 0)),
        mesh=MESH, in_specs=P("x"), out_specs=P("x"),
    )  # fmt: skip
    outs = mapped(x, w)
    assert [item.requires_grad for item in outs] == [True, False, False, False]
    assert outs[3].dtype == torch.bool
    outs[0].sum().backward()
    assert torch.equal(x.grad, torch.ones(4))  # type: ignore[arg-type]
    with torch.no_grad():
        assert not any(item.requires_grad for item in mapped(x, w))


def test_unused_input_has_no_gradient() -> None:
    x, w = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    mapped = fs.shard_map(lambda a, b: 2 * a, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    grads = torch.autograd.grad(mapped(x, w).sum(), (x, w), allow_unused=True)
    assert torch.equal(grads[0], 2 * torch.ones(4))
    assert grads[1] is None or not grads[1].any()


def test_autograd_grad_in_the_body() -> None:
    """Without a check only the casts in the body sum gradients."""
    x = torch.arange(4.0, dtype=F64)

    def inner(total: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        def body(v: torch.Tensor) -> torch.Tensor:
            leaf = v.detach().requires_grad_()
            loss = (leaf**2).sum()
            return torch.autograd.grad(fs.psum(loss, "i") if total else loss, leaf)[0]

        return body

    for total in (True, False):
        mapped = fs.shard_map(inner(total), mesh=Mesh(i=4), in_specs=P("i"), out_specs=P("i"))
        assert mapped(x).tolist() == [0.0, 2.0, 4.0, 6.0], "JAX's, with check_vma=True"


# -- local_map -------------------------------------------------------------------------


def test_local_map_maps_pairs() -> None:
    x, w = ints(4, 6), ints(6, 2, seed=1)
    mapped = fs.local_map(
        lambda a, b: fs.psum(a @ b, "y"), in_specs=(P("x", "y"), P("y")), out_specs=P("x")
    )
    out = mapped(pair_of(x, P("x", "y")), pair_of(w, P("y")))
    assert out.spec == Spec(MESH, P("x"), shape=(4, 2), dtype=F64)
    assert torch.equal(fs.unshard(out), x @ w)

    @fs.local_map(in_specs=P("x"), out_specs=P("x"))
    def double(v: torch.Tensor) -> torch.Tensor:
        return 2 * v

    assert torch.equal(fs.unshard(double(pair_of(x, P("x")))), 2 * x)
    assert double.__name__ == "double"


def test_local_map_without_in_specs_takes_the_layouts_of_pairs() -> None:
    mesh = Mesh(x=2)
    spec = Spec(mesh, P("x"), shape=(5,), sizes={0: (3, 2)})
    x = torch.arange(5.0, requires_grad=True)
    pair, partial = fs.shard(x, spec), fs.shard(torch.ones(1), mesh, P(unreduced={"x"}))

    def body(x: torch.Tensor, tree: Any, scale: float) -> torch.Tensor:
        return x * fs.psum(tree["w"], "x") * scale

    for in_specs in (None, (P("x"), None, None)):
        mapped = fs.local_map(body, in_specs=in_specs, out_specs=spec)
        y = fs.unshard(mapped(pair, {"w": partial}, 3.0))
        assert y.tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]
        assert torch.autograd.grad(y.sum(), x, retain_graph=True)[0].tolist() == [3.0] * 5


def test_local_map_redistributes_inputs() -> None:
    x = ints(4, 6).requires_grad_()
    value = pair_of(x, P("y", "x"), uneven="chunk")
    strict = fs.local_map(torch.sin, in_specs=P(("y", "x")), out_specs=P(("y", "x")))
    with pytest.raises(ShardingError) as caught:
        strict(value)
    asked = value.spec.replace(partition=P(("y", "x")), uneven="chunk")
    assert str(fs.redistribute(value.spec, asked)).split("\n")[0] in str(caught.value)
    assert "local_map(sin)" in str(caught.value)
    free = fs.local_map(
        torch.sin, in_specs=P(("y", "x")), out_specs=P(("y", "x")), redistribute_inputs=True
    )
    out = free(value)
    assert out.spec == asked
    torch.testing.assert_close(fs.unshard(out), x.sin())
    fs.unshard(out).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_local_map_needs_one_mesh() -> None:
    double = fs.local_map(lambda *v: v[0], in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ShardingError, match="pairs of no pair at all"):
        double(ints(6, 6))
    with pytest.raises(ShardingError, match=r"pairs of Mesh\(x=2, y=3\), Mesh\(x=2\)"):
        double(pair_of(ints(6, 6), P("x")), pair_of(ints(6, 6), P("x"), Mesh(x=2)))
    with pytest.raises(ShardingError, match="the first argument must be a function"):
        fs.local_map(3, in_specs=P(), out_specs=P())  # type: ignore[arg-type]


def test_local_map_of_global_tensors_takes_a_mesh() -> None:
    options: dict[str, Any] = {"in_specs": P("x"), "out_specs": P("x"), "mesh": MESH}
    double = fs.local_map(lambda v: 2 * v, **options)
    assert torch.equal(double(ints(6, 6)), 2 * ints(6, 6))
    assert double(pair_of(ints(6, 6), P("x"))).mesh == MESH
    with pytest.raises(ShardingError, match=r"pairs of Mesh\(x=2, y=3\), Mesh\(x=2\)"):
        double(pair_of(ints(6, 6), P("x"), Mesh(x=2)))


def test_repeated_runs_are_bit_equal() -> None:
    x, w, v = weights()
    outs = [sharded_mlp(MESH)(x, w, v) for _ in range(3)]
    assert all(torch.equal(outs[0], out) for out in outs)
