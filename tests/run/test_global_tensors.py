"""Conversion of global tensors in a simulation, its gradients, and all wrong arguments."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec
from fshard.run.transports import base as transport
from tests.helpers.reference import simulate
from tests.helpers.spec_grid import (
    all_specs,
    even_and_uneven_specs,
    global_of,
    pairing,
    random_global,
    random_locals,
)

MESH = Mesh(x=2, y=3)
PERMUTED = Mesh({"x": 2, "y": 3}, devices=(4, 1, 5, 0, 2, 3))
KINDS = ("sum", "avg", "max", "min", "product")


# -- shard and unshard -----------------------------------------------------------------


@pytest.mark.parametrize("mesh", [MESH, PERMUTED], ids=str)
def test_unshard_inverts_shard(mesh: Mesh) -> None:
    for spec in even_and_uneven_specs(mesh):
        x = random_global(spec.shape, spec.dtype)
        local, of = fs.shard(x, spec)
        assert of is spec
        assert torch.equal(global_of(spec, local), x)
        assert torch.equal(fs.unshard((local, spec)), x)
        for rank, shard in zip(mesh.ranks, local, strict=True):
            first = all(mesh.coords(rank)[axis] == 0 for axis in spec.partition.unreduced)
            assert torch.equal(shard, x[spec.index(rank)] * first)
            assert shard.is_contiguous()
            assert shard.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        pointers = {shard.data_ptr() for shard in local if shard.numel()}
        assert len(pointers) == sum(shard.numel() > 0 for shard in local)


@pytest.mark.parametrize("kind", KINDS)
def test_unshard_reduces_unreduced_values(kind: str) -> None:
    for spec in all_specs(
        MESH, (6, 12), ("invariant", "unreduced"), kind=kind, dtype=torch.float64
    ):
        locals_ = random_locals(spec)
        torch.testing.assert_close(fs.unshard((locals_, spec)), global_of(spec, locals_))
        x = random_global(spec.shape, spec.dtype)
        assert torch.equal(fs.unshard(fs.shard(x, spec)), x), "neutral elements change nothing"


def test_shard_as_reduced_average() -> None:
    spec = Spec(MESH, P("x", reduced={"y": "avg"}), shape=(2, 3), dtype=torch.float64)
    x = random_global((2, 3), torch.float64)
    local, _ = fs.shard(x, spec)
    torch.testing.assert_close(local[4], x[1:] / 3)
    torch.testing.assert_close(fs.unshard((local, spec)), x)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.complex64, torch.int8, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = random_global((6, 4)).abs().to(torch.float32).to(dtype)
    for partition in (P("x"), P(("y", "x")), P(None, "x"), P()):
        spec = Spec(MESH, partition, shape=(6, 4), dtype=dtype)
        back = fs.unshard(fs.shard(x.t().contiguous().t(), spec))
        assert back.dtype == dtype
        assert torch.equal(back.to(torch.complex64), x.to(torch.complex64))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 0)], ids=str)
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    x = random_global(shape, torch.float64)
    for spec in all_specs(MESH, shape, dtype=torch.float64, uneven="chunk"):
        leaf = x.clone().requires_grad_()
        pair = fs.shard(leaf, spec)
        assert len(pair.local) == 6
        assert torch.equal(fs.unshard(pair), x)
        fs.unshard(pair).sum().backward()
        assert torch.equal(leaf.grad, torch.ones(shape, dtype=torch.float64))  # type: ignore[arg-type]


def test_views_of_the_global_tensor() -> None:
    """Check a transposed and an expanded tensor."""
    base = random_global((4, 6), torch.float64)
    spec = Spec(MESH, P("y", "x"), shape=(6, 4), dtype=torch.float64)
    assert torch.equal(fs.unshard(fs.shard(base.t(), spec)), base.t())
    wide = base[:1, :1].expand(6, 4)
    assert torch.equal(fs.unshard(fs.shard(wide, spec)), wide)


# -- gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [MESH, PERMUTED], ids=str)
def test_shard_and_unshard_are_adjoint_to_themselves(mesh: Mesh) -> None:
    """Check <shard x, g> = <x, shard^T g> with the pairing of duals, and so for unshard."""
    for i, spec in enumerate(even_and_uneven_specs(mesh)):
        x = random_global(spec.shape, spec.dtype, i).requires_grad_()
        local = fs.shard(x, spec).local
        cotangents = random_locals(spec.dual, i + 1)
        (grad,) = torch.autograd.grad(local, x, cotangents)
        want = pairing(spec, [item.detach() for item in local], cotangents)
        assert (x.detach() * grad).sum() == want, spec

        shards = tuple(item.requires_grad_() for item in random_locals(spec, i + 2))
        unsharded = fs.unshard((shards, spec))
        cotangent = random_global(spec.shape, spec.dtype, i + 3)
        grads = torch.autograd.grad(unsharded, shards, cotangent)
        results = pairing(spec, [item.detach() for item in shards], grads)
        assert (unsharded.detach() * cotangent).sum() == results, spec
        assert torch.equal(global_of(spec.dual, grads), cotangent), "a gradient of the dual spec"


def test_gradients_of_any_order() -> None:
    for partition in (P("x", "y"), P(("y", "x")), P(unreduced={"x"}), P("y", reduced={"x"})):
        spec = Spec(MESH, partition, shape=(2, 3), dtype=torch.float64, uneven="chunk")

        def through(x: torch.Tensor, spec: Spec = spec) -> torch.Tensor:
            pair = fs.shard(x.sin(), spec)
            return fs.unshard(fs.reshard(pair, P(None, "y"))) ** 3

        x = random_global((2, 3), torch.float64).requires_grad_()
        torch.autograd.gradcheck(through, (x,))
        torch.autograd.gradgradcheck(through, (x,))


def test_scatter_and_from_local_differentiate() -> None:
    x = random_global((6, 3), torch.float64).requires_grad_()
    spec = Spec(MESH, P("x", None), shape=(6, 3), dtype=torch.float64)
    (fs.unshard(fs.scatter(x, spec, src=4)) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
    shards = tuple(item.requires_grad_() for item in random_locals(spec))
    pair = fs.from_local(shards, MESH, P("x", None))
    assert pair.spec == spec
    assert all(a is b for a, b in zip(pair.local, shards, strict=True)), "tensors are not copied"
    weights = torch.arange(18.0, dtype=torch.float64).reshape(6, 3)
    (fs.unshard(pair) * weights).sum().backward()
    for rank, shard in enumerate(shards):
        assert torch.equal(shard.grad, weights[spec.index(rank)])  # type: ignore[arg-type]


@pytest.mark.parametrize("wide", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("to", [P(), P("x"), P(None, ("y", "x"))], ids=str)
def test_gradients_of_a_cast_to_complex(to: fs.PartitionSpec, wide: torch.dtype) -> None:
    """They are the real parts, as on one device, without a warning of PyTorch."""
    src = Spec(MESH, P("y"), shape=(6, 12), dtype=torch.float32)
    dst = Spec(MESH, to, shape=(6, 12), dtype=wide)
    x = random_global((6, 12), torch.float32).requires_grad_()
    weights = torch.complex(random_global((6, 12), torch.float32, 1), torch.ones(6, 12)).to(wide)

    def gradient(unsharded: torch.Tensor) -> torch.Tensor:
        loss = (unsharded * unsharded * weights).real.sum()
        (results,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(results.sum(), x)
        return torch.stack([results.detach(), second])

    local = gradient(fs.unshard(fs.reshard(fs.shard(x, src), dst)))
    assert torch.equal(local, gradient(x.to(wide)))


def test_cast_to_real_takes_the_real_part() -> None:
    src = Spec(Mesh(x=2), P("x"), shape=(4,), dtype=torch.complex64)
    prog = fs.Program(src, (fs.Cast(torch.float32), fs.AllGather("x", 0)))
    x = torch.tensor([1 + 2j, 3, 4j, -1])
    local = fs.shard(x, src).local
    for output in (prog(local), simulate(prog, local)):
        assert torch.equal(output[1], x.real)
    own = fs.Program(src, (fs.Cast(torch.float32),))(local)
    own[0].zero_()
    assert torch.equal(fs.unshard((local, src)), x), "in memory of its own"


def test_gradient_of_a_maximum_goes_to_the_largest() -> None:
    spec = Spec(Mesh(x=3), P(unreduced={"x": "max"}), shape=(2,))
    locals_ = tuple(
        torch.tensor(values, requires_grad=True) for values in ([1.0, 5.0], [2.0, 5.0], [2.0, 3.0])
    )
    fs.unshard((locals_, spec)).sum().backward()
    grads = [item.grad.tolist() for item in locals_ if item.grad is not None]
    assert grads == [[0.0, 0.5], [0.5, 0.5], [0.5, 0.0]]


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize(
    ("p", "to"),
    [
        (P(unreduced={"x"}), P()),
        (P(unreduced={"x"}), P(reduced={"x"})),
        (P(unreduced={"x"}), P("x")),
        (P("y", unreduced={"x"}), P("x")),
        (P(unreduced={"x", "y"}), P(("y", "x"))),
    ],
)
def test_second_derivatives_of_maxima(p: fs.PartitionSpec, to: fs.PartitionSpec, kind: str) -> None:
    """Differentiate programs as functions of the unreduced values, one per coordinate."""
    mesh, shape = Mesh(x=2, y=2), (3,)
    axes = tuple(p.unreduced)
    p = P(*p.partitions, unreduced=dict.fromkeys(axes, kind))
    src = Spec(mesh, p, shape=shape, dtype=torch.float64, uneven="chunk")
    stacked = Spec(mesh, P(axes, *p.partitions), shape=(mesh.axis_size(axes), *shape),
                   dtype=torch.float64, uneven="chunk")  # fmt: skip
    prog = fs.redistribute(src, Spec(mesh, to, shape=shape, dtype=src.dtype, uneven="chunk"))

    def through(addends: torch.Tensor) -> torch.Tensor:
        local = tuple(x.squeeze(0) for x in fs.shard(addends, stacked).local)
        return fs.unshard((prog(local), prog.dst)).sin()

    generator = torch.Generator().manual_seed(0)
    addends = torch.rand(stacked.shape, dtype=torch.float64, generator=generator)
    torch.autograd.gradcheck(through, (addends.requires_grad_(),))
    torch.autograd.gradgradcheck(through, (addends,))


def test_tensor_unreduced_by_max_requires_no_grad() -> None:
    spec = Spec(Mesh(x=2), P(unreduced={"x": "max"}), shape=(2,))
    x = torch.ones(2, requires_grad=True)
    for place in (fs.shard, fs.scatter):
        with pytest.raises(ShardingError, match="which are linear; it is max"):
            place(x, spec)
        assert torch.equal(fs.unshard(place(x.detach(), spec)), torch.ones(2))


def test_results_of_detached_locals_do_not_require_grad() -> None:
    spec = Spec(Mesh(x=2), P("x"), shape=(4,), dtype=torch.int64)
    pair = fs.shard(torch.arange(4), spec)
    assert not any(item.requires_grad for item in pair.local)
    x = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        pair = fs.shard(x, spec.replace(dtype=torch.float32))
    assert not any(item.requires_grad for item in pair.local)
    product = Spec(Mesh(x=2), P(unreduced={"x": "product"}), shape=(2,))
    assert torch.equal(fs.unshard(((torch.ones(2), 3 * torch.ones(2)), product)), 3 * torch.ones(2))


# -- what does not fit -----------------------------------------------------------------


SPEC = Spec(MESH, P("x", "y"), shape=(4, 6))
SHARDS = fs.shard(torch.zeros(4, 6), SPEC).local


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.zeros(4, 5), "the tensor must have the spec's shape (4, 6) and torch.float32"),
        (torch.zeros(4, 6).double(), "a tensor of shape (4, 6) and torch.float64"),
        ([[0.0] * 6] * 4, "a global tensor must be a torch.Tensor"),
        (None, "a NoneType"),
        (torch.nn.Linear(2, 2), "fix:   fs.state.distribute_module(module, mesh)"),
        ({"w": torch.zeros(4, 6)}, "fix:   fs.state.tree_shard(tree, P(...), mesh=mesh)"),
        (fs.Sharded(SHARDS, SPEC), "fix:   fs.reshard(pair, P(...))"),
    ],
)
@pytest.mark.parametrize("function", [fs.shard, fs.scatter])
def test_tensor_of_another_spec_is_refused(function: Any, x: Any, text: str) -> None:
    with pytest.raises(ShardingError, match=re.escape(text)):
        function(x, SPEC)


def test_shard_requires_a_spec() -> None:
    rule = r"the layout must be a fs\.Spec, or a fs\.Mesh and a P"
    with pytest.raises(ShardingError, match=rule):
        fs.shard(torch.zeros(4, 6), P("x"))  # type: ignore[arg-type]


def test_fix_in_the_error_of_shard_works() -> None:
    x = torch.zeros(6, 6, dtype=torch.float64)
    with pytest.raises(ShardingError) as caught:
        fs.shard(x, SPEC)
    fix = str(caught.value).split("fix:")[1].strip()
    spec = eval(fix, {"fs": fs, "mesh": MESH, "P": P, "torch": torch})
    assert torch.equal(fs.unshard(fs.shard(x, spec)), x)


@pytest.mark.parametrize(
    ("locals_", "text"),
    [
        (SHARDS[:5], "5 shards for Mesh(x=2, y=3)"),
        ((), "0 shards"),
        ((*SHARDS[:5], torch.zeros(2, 3)), "on rank 5 (x=1, y=2) a local of shape (2, 3)"),
        ((*SHARDS[:5], SHARDS[5].double()), "torch.float64"),
        ((*SHARDS[:5], SHARDS[5].long()), "torch.int64"),
        ((*SHARDS[:5], SHARDS[5].to("meta")), "shards on cpu, meta"),
        (torch.zeros(2, 2), "in a process that is not a rank of it"),
        ("shards", "a local of type str"),
        (None, "a local of type NoneType"),
        ((*SHARDS[:5], None), "a local of type tuple"),
    ],
)
def test_locals_of_another_spec_are_refused(locals_: Any, text: str) -> None:
    prog = fs.redistribute(SPEC, SPEC.replace(partition=P("x")))
    for run in (
        lambda: prog(locals_),
        lambda: prog(locals_, async_op=True),
        lambda: fs.unshard((locals_, SPEC)),
        lambda: fs.reshard((locals_, SPEC), P("x")),
    ):
        with pytest.raises(ShardingError, match=re.escape(text)):
            run()


def test_every_wrong_shard_is_named() -> None:
    prog = fs.redistribute(SPEC, SPEC.replace(partition=P("x")))
    wrong = [torch.zeros(2, 2 + (rank in (0, 3))) for rank in range(6)]
    with pytest.raises(ShardingError) as caught:
        prog(wrong)
    assert "on ranks 0, 3 a local of shape (2, 3)" in str(caught.value)


def test_program_refuses_shards_of_another_layout() -> None:
    prog = fs.redistribute(SPEC, SPEC.replace(partition=P("x")))
    with pytest.raises(
        ShardingError, match=r"with f32\[4@x,6@y\] on Mesh\(x=2, y=3\) it must have shape"
    ):
        prog(prog(SHARDS))


@pytest.mark.parametrize("function", [fs.unshard, lambda pair: fs.reshard(pair, P("x"))])
@pytest.mark.parametrize("pair", [torch.zeros(2, 2), SHARDS, (SHARDS, P("x")), None, SPEC])
def test_arguments_that_are_not_pairs(function: Any, pair: Any) -> None:
    with pytest.raises(ShardingError, match=r"a pair must be \(local, spec\)"):
        function(pair)


def test_reshard_returns_a_pair_of_the_requested_layout() -> None:
    x = random_global((4, 6), torch.float32)
    pair = fs.shard(x, SPEC)
    for target in (P(("y", "x")), P(), SPEC.replace(partition=P(None, "x"))):
        local, spec = fs.reshard(pair, target)
        assert torch.equal(fs.unshard((local, spec)), x)
    assert fs.reshard(pair, P(("y", "x"))).spec.shard_sizes(0) == (1, 1, 1, 1, 0, 0)
    with pytest.raises(ShardingError, match="the target must be a Spec or a P"):
        fs.reshard(pair, "x")  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="axis 'q'"):
        fs.reshard(pair, P("q"))


def test_scatter_requires_an_existing_src() -> None:
    with pytest.raises(ShardingError, match=r"src must be one of \[0, 1, 2, 3, 4, 5\]"):
        fs.scatter(torch.zeros(4, 6), SPEC, src=6)


def test_simulation_of_meta_tensors() -> None:
    """Check shapes and types where all shards are on the meta device."""
    pair = fs.shard(torch.zeros(4, 6, device="meta"), SPEC)
    moved = fs.reshard(pair, P(("y", "x")))
    for rank, shard in enumerate(moved.local):
        assert shard.is_meta
        assert tuple(shard.shape) == moved.spec.local_shape(rank)
    assert fs.unshard(moved).shape == (4, 6)


def test_async_program_in_a_simulation() -> None:
    prog = fs.redistribute(SPEC, SPEC.replace(partition=P()))
    pending = prog(SHARDS, async_op=True)
    assert len(pending.wait()) == 6
    with pytest.raises(ShardingError, match="must be waited for once"):
        pending.wait()


# -- fs.init where there is nothing to join --------------------------------------------


def test_init_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ShardingError) as caught:
        fs.init(Mesh(x=2, y=3))
    assert "fs.init\n  given: no RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in str(caught.value)
    assert "torchrun --nproc-per-node 6 script.py" in str(caught.value)
    for name in names[:3]:
        monkeypatch.setenv(name, "1")
    with pytest.raises(ShardingError, match="given: no MASTER_PORT in the environment"):
        fs.init(Mesh(x=2))


def test_init_refuses_a_mesh_larger_than_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(ShardingError, match=r"the 2 processes of the world, 0\.\.1"):
        fs.init(Mesh(x=4))
    with pytest.raises(ShardingError, match="a mesh of at most 2"):
        fs.init(Mesh({"x": 2}, devices=(1, 2)))


def test_rank_local_code_outside_of_ranks() -> None:
    """One tensor in a process that is not a rank raises an error with the fix."""
    prog = fs.redistribute(SPEC, SPEC.replace(partition=P()))
    for run in itertools.chain([lambda: prog(SHARDS[0]), lambda: fs.unshard((SHARDS[0], SPEC))]):
        with pytest.raises(ShardingError, match=r"or after fs\.init\(mesh\)"):
            run()


def test_mesh_of_missing_ranks_is_refused() -> None:
    elsewhere = Mesh({"x": 2}, devices=(4, 5))
    spec = Spec(elsewhere, P("x"), shape=(4,))
    pair = (torch.ones(2), spec)
    runs = (
        lambda: fs.unshard(pair),
        lambda: fs.reshard(pair, P()),
        lambda: fs.shard(torch.ones(4), spec),
        lambda: fs.redistribute(spec, spec.replace(partition=P()))(torch.ones(2)),
    )
    for run in runs:
        with pytest.raises(ShardingError) as caught:
            fs.simulate(Mesh(x=2), run)
        assert str(caught.value).partition("\n")[2] == (
            f"  given: {elsewhere}, on rank 0\n"
            "  rule:  the ranks of a mesh must be among those that run, 0, 1\n"
            "  fix:   fs.simulate(mesh, fn) with a mesh of all ranks, or under torchrun as many "
            "processes; or a mesh of these ranks"
        )


def test_rank_outside_of_the_mesh_gets_empty_tensors() -> None:
    part = Mesh({"x": 2}, devices=(3, 1))
    spec = Spec(part, P("x"), shape=(4,))
    results = fs.simulate(Mesh(x=4), lambda: fs.unshard(fs.shard(torch.arange(4.0), spec)))
    assert [item.tolist() for item in results] == [[], [0.0, 1, 2, 3], [], [0.0, 1, 2, 3]]


def test_warning_in_processes_without_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    transport.warn_alone.cache_clear()
    spec = Spec(Mesh(x=2), P("x"), shape=(4,))
    text = (
        "torchrun started 4 processes, and each of them simulates all ranks: fs.init(mesh) makes "
        "this one a rank"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        fs.shard(torch.ones(4), spec)
    fs.shard(torch.ones(4), spec)  # said once
