"""Collectives and mapped functions on gloo, compared with oracles and a simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import Mesh, P, Sharded, ShardingError, Spec
from tests.helpers.gloo.harness import outcomes, run_ranks
from tests.helpers.spec_grid import random_global
from tests.helpers.spmd import lazy_tensors
from tests.helpers.spmd.collective_cases import CASES, axes_of, by_oracle, on_rank
from tests.helpers.spmd.collective_cases import arguments as collective_arguments

MESHES = [
    Mesh(i=2),
    Mesh({"x": 2, "y": 2}, devices=(2, 0, 3, 1)),
    Mesh({"i": 3}, devices=(1, 3, 0)),
]
TWO = MESHES[1]
F64 = torch.float64


def quarters(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_global(shape, F64, seed) / 4


# -- collectives -------------------------------------------------------------------------


Work = tuple[int, tuple[str, ...], list[torch.Tensor], list[torch.Tensor]]


def processes(mesh: Mesh) -> int:
    """Return 2 or 4, so that meshes share warm processes; some may be outside of a mesh."""
    return 2 if mesh.size == 2 else 4


def run_collectives(mesh: Mesh, work: list[Work]) -> list[Any]:
    """Return values and transposes of collectives on this rank, and its index along axes."""
    fs.init(mesh)
    if dist.get_rank() not in mesh:
        return []
    index = list(mesh.ranks).index(dist.get_rank())
    values = [on_rank(CASES[i], mesh, axes, xs[index], cts[index]) for i, axes, xs, cts in work]
    return [values, [int(fs.axis_index(axes, mesh=mesh)) for axes in axes_of(mesh)]]


@pytest.mark.parametrize(
    ("mesh", "every"),
    [*zip(MESHES, (1, 3, 2), strict=True),
     *(pytest.param(mesh, 1, marks=pytest.mark.slow) for mesh in MESHES[1:])],
    ids=str,
)  # fmt: skip
def test_values_and_transposes_equal_the_oracle(mesh: Mesh, every: int) -> None:
    work: list[Work] = []
    expected = []
    for i, case in [*enumerate(CASES)][::every]:
        for axes in axes_of(mesh):
            xs = collective_arguments(case, mesh, axes, F64)
            ys, cts, grads = by_oracle(case, mesh, axes, xs)
            work.append((i, axes, xs, cts))
            expected.append((ys, grads))
    by_rank = run_ranks(processes(mesh), run_collectives, mesh, work)
    for i, (ys, grads) in enumerate(expected):
        name = f"{CASES[work[i][0]].name} along {work[i][1]}"
        for index, rank in enumerate(mesh.ranks):
            y, grad, transposed_twice = by_rank[rank][0][i]
            torch.testing.assert_close(y, ys[index], msg=name)
            torch.testing.assert_close(grad, grads[index], msg=name)
            assert transposed_twice is None or torch.allclose(transposed_twice, ys[index]), name
    for rank in mesh.ranks:
        assert by_rank[rank][1] == [mesh.index(rank, axes) for axes in axes_of(mesh)]


def gather_dtypes(mesh: Mesh) -> list[torch.Tensor]:
    fs.init(mesh)
    results = []
    for dtype in (torch.bool, torch.int8, torch.int16, torch.complex64, torch.bfloat16):
        x = random_global((2, 4), torch.int64, dist.get_rank()).abs().to(dtype).t()
        results += [
            fs.all_gather(x, "i", mesh=mesh), fs.psum(x, "i", mesh=mesh),
            fs.all_to_all(x, "i", 1, 0, mesh=mesh), fs.ppermute(x, "i", [(1, 0)], mesh=mesh),
        ]  # fmt: skip
        if not dtype.is_complex:
            results.append(fs.pmax(x, "i", mesh=mesh))
        if dtype != torch.bool:
            results.append(fs.psum_scatter(x, "i", scatter_dimension=1, mesh=mesh))
    return results


def test_all_dtypes() -> None:
    mesh = Mesh(i=2)
    by_rank = run_ranks(2, gather_dtypes, mesh)
    for rank in (0, 1):
        actual = iter(by_rank[rank])
        for dtype in (torch.bool, torch.int8, torch.int16, torch.complex64, torch.bfloat16):
            xs = [random_global((2, 4), torch.int64, r).abs().to(dtype).t() for r in (0, 1)]
            total = torch.stack(xs).sum(0, dtype=None if dtype == torch.bool else dtype)
            want = [
                torch.stack(xs), total, torch.stack([x[:, rank] for x in xs]),
                torch.zeros_like(xs[0]) if rank else xs[1],
            ]  # fmt: skip
            if not dtype.is_complex:
                want.append(torch.stack(xs).amax(0))
            if dtype != torch.bool:
                want.append(total[:, rank])
            for item in want:
                assert torch.equal(next(actual), item)


# -- mapped functions ---------------------------------------------------------------------


def dense(mesh: Mesh) -> Callable[..., Any]:
    """Rows over x, the hidden dim over y."""

    @fs.shard_map(
        mesh=mesh, in_specs=(P("x"), {"w": P(None, "y"), "v": P("y")}), out_specs=(P("x"), P())
    )
    def body(x: torch.Tensor, params: dict[str, torch.Tensor]) -> Any:
        x = fs.pcast(x, "y", to="varying")
        params = fs.pcast(params, "x", to="varying")
        out = fs.psum(torch.tanh(x @ params["w"]) @ params["v"], "y")
        return out, fs.pmean((out**2).mean(), "x")

    return body  # type: ignore[no-any-return]


def collectives(mesh: Mesh) -> Callable[..., Any]:
    """Call one collective of each kind."""

    @fs.shard_map(mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"))
    def body(v: torch.Tensor) -> torch.Tensor:
        full = fs.all_gather(v, ("y", "x"), tiled=True)
        part = fs.psum_scatter(full.sin(), "y", tiled=True)
        swapped = fs.all_to_all(part, "x", 0, 1, tiled=True)
        last = fs.axis_size(("x", "y")) - 1
        moved = fs.ppermute(swapped, ("x", "y"), [(0, last), (last, 1), (1, 0)])
        mean = fs.pcast(fs.pmean(moved, "x"), "x", to="varying")
        top = fs.pcast(fs.pmax(moved, "y"), "y", to="varying")
        return (mean * moved + top)[: v.shape[0], : v.shape[1]]

    return body  # type: ignore[no-any-return]


def train(mesh: Mesh) -> dict[str, Any]:
    """Return results, gradients and second gradients of plain tensors, equal on every rank."""
    x = quarters(4, 5).requires_grad_()
    params = {
        "w": quarters(5, 12, seed=1).requires_grad_(),
        "v": quarters(12, 3, seed=2).requires_grad_(),
    }
    leaves = (x, params["w"], params["v"])
    out, loss = dense(mesh)(x, params)
    first = torch.autograd.grad(loss + out.sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), leaves)
    y = quarters(12, 12, seed=3).requires_grad_()
    mixed = collectives(mesh)(y)
    (grad,) = torch.autograd.grad((mixed**2).sum(), y)

    spec = Spec(mesh, P("y"), shape=(7, 3), dtype=F64, uneven="chunk")
    pair = fs.shard(quarters(7, 3, seed=4).requires_grad_(), spec)
    move = fs.local_map(
        lambda v: v.cos(), in_specs=P(None, "x"), out_specs=P(None, "x"), redistribute_inputs=True
    )
    moved = fs.unshard(move(fs.reshard(pair, P(("x", "y")))))
    return {
        "out": out, "loss": loss, "first": first, "second": second, "mixed": mixed, "grad": grad,
        "moved": moved,
    }  # fmt: skip


def train_on_rank(mesh: Mesh) -> dict[str, Any]:
    fs.init(mesh)
    if dist.get_rank() not in mesh:
        return {}
    results = train(mesh)
    out = dense(mesh)(
        fs.shard(quarters(4, 5), Spec(mesh, P("x"), shape=(4, 5), dtype=F64)),
        {"w": quarters(5, 12, seed=1), "v": quarters(12, 3, seed=2)},
    )[0]
    assert isinstance(out, Sharded)
    assert out.spec == Spec(mesh, P("x"), shape=(4, 3), dtype=F64)
    torch.testing.assert_close(fs.unshard(out), results["out"])
    return {
        key: [v.detach() for v in value] if isinstance(value, tuple) else value.detach()
        for key, value in results.items()
    }


@pytest.mark.parametrize("mesh", [TWO, Mesh({"x": 1, "y": 3}, devices=(1, 3, 0))], ids=str)
def test_mapped_functions_equal_simulation_and_one_device(mesh: Mesh) -> None:
    by_rank = run_ranks(processes(mesh), train_on_rank, mesh)
    want = train(mesh)
    x = quarters(4, 5).requires_grad_()
    w, v = quarters(5, 12, seed=1).requires_grad_(), quarters(12, 3, seed=2).requires_grad_()
    single = torch.tanh(x @ w) @ v
    torch.testing.assert_close(want["out"], single)
    loss = (single**2).mean() + single.sum()
    torch.testing.assert_close(want["first"], torch.autograd.grad(loss, (x, w, v)))
    for rank in mesh.ranks:
        for key, value in want.items():
            expected = list(value) if isinstance(value, tuple) else value
            torch.testing.assert_close(
                by_rank[rank][key], expected, msg=lambda text, k=key: f"{k}: {text}"
            )


def uneven_result() -> Any:
    """Return a result whose uneven shard sizes are those of an argument."""
    fs.init(TWO)
    spec = Spec(TWO, P("x"), shape=(5, 2), sizes={0: (1, 4)}, dtype=F64)
    pair = fs.shard(quarters(5, 2), spec)
    doubled = fs.shard_map(lambda v: 2 * v, mesh=TWO, in_specs=P("x"), out_specs=P("x"))(pair)
    assert doubled.spec == spec
    return fs.unshard(doubled)


def test_uneven_shard_sizes_come_from_arguments() -> None:
    for out in run_ranks(4, uneven_result):
        assert torch.equal(out, 2 * quarters(5, 2))


def fail_in_body(what: str) -> None:
    fs.init(TWO)
    x = torch.ones(4, 4)
    spec = Spec(TWO, P("x"), shape=(4, 4))
    bodies: dict[str, Callable[[], Any]] = {
        "spec": lambda: fs.shard_map(torch.sin, mesh=TWO, in_specs=P("q"), out_specs=P())(x),
        "divide": lambda: fs.shard_map(torch.sin, mesh=TWO, in_specs=P("x"), out_specs=P())(x[:3]),
        "pair": lambda: fs.local_map(torch.sin, in_specs=P("y"), out_specs=P("y"))(
            fs.shard(x, spec)
        ),
        "local": lambda: fs.local_map(torch.sin, in_specs=P("x"), out_specs=P("x"))((x, spec)),
        "axis": lambda: fs.shard_map(
            lambda v: fs.psum(v, "q"), mesh=TWO, in_specs=P("x"), out_specs=P()
        )(x),
        "unbound": lambda: fs.psum(x, "x"),
    }
    bodies[what]()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("spec", "axis 'q' on Mesh(x=2, y=2, devices=[2, 0, 3, 1])"),
        ("divide", "3 % 2 = 1"),
        ("pair", "in_specs require f32[4@y,4]"),
        ("local", "a local of shape (4, 4) and torch.float32"),
        ("axis", "axis 'q'"),
        ("unbound", "an unbound axis name: 'x'"),
    ],
)
def test_errors_are_raised_on_all_ranks(what: str, text: str) -> None:
    for item in outcomes(4, fail_in_body, what):
        assert isinstance(item.error, ShardingError), item.traceback
        assert text in str(item.error)


def test_lazy_conjugates_signs_and_strides_are_sent_as_values() -> None:
    expected = fs.simulate(MESHES[0], lazy_tensors.results)
    for one, other in zip(run_ranks(2, lazy_tensors.on_rank), expected, strict=True):
        for name, values in other.items():
            torch.testing.assert_close(one[name], values, msg=name)
