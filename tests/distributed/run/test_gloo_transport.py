"""Programs on real gloo processes: results and gradients of every rank equal the simulator's.

Many programs go through one call of `run_ranks`: `Case` is what travels, `check_cases` runs
it in a simulation here and on real ranks there, and compares results, gradients, second
gradients and what each rank sent.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import Mesh, P, Program, Spec
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    CollectivePermute,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.gloo.program_cases import (
    Case,
    assert_same,
    case,
    check_cases,
    run_case,
    run_here,
)
from tests.helpers.spec_grid import all_specs, random_locals, sample_pairs

MESHES = [
    Mesh(x=2),
    Mesh(x=2, y=2),
    Mesh({"x": 2, "y": 2}, devices=(2, 0, 3, 1)),
    Mesh(x=1, y=3),
]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.complex64)
DTYPES = (*FLOATS, torch.int64, torch.bool)


# -- cases -----------------------------------------------------------------------------


# -- every step ------------------------------------------------------------------------


def catalogue(mesh: Mesh, dtype: torch.dtype) -> list[Program]:
    """Return a program of every step type along one axis and along several in either order."""
    programs: list[Program] = []

    def add(partition: fs.PartitionSpec, *steps: Step) -> None:
        try:
            programs.append(Program(Spec(mesh, partition, shape=(12, 12, 2), dtype=dtype), steps))
        except fs.ShardingError as error:
            # Averages of integers, sums of booleans: not values of the algebra.
            assert str(dtype).removeprefix("torch.") in str(error) or "dtype" in str(error), error

    orders = [("x",)] if mesh.axes == ("x",) else [("x",), ("y",), ("x", "y"), ("y", "x")]
    for axes in orders:
        for dim in (0, 1):
            i = (None,) * dim
            add(P(*i, axes), AllGather(axes, dim))
            add(P(*i, axes), AllGather(axes, dim, "reduced"))
            add(P(*i, axes), AllGather(axes, dim, "reduced", "avg"))
            add(P(), AllSlice(axes, dim))
            add(P(reduced=set(axes)), AllSlice(axes, dim))
            add(P(unreduced=set(axes)), ReduceScatter(axes, dim))
            add(P(unreduced=dict.fromkeys(axes, "avg")), ReduceScatter(axes, dim))
            add(P(*i, axes), AllToAll(axes, dim, 1 - dim))
            add(P(*i, axes), ShardedToUnreduced(axes, dim))
            add(P(*i, axes), ShardedToUnreduced(axes, dim, "avg"))
        add(P(None, axes), AllToAll(axes, 1, 0), AllGather(axes[-1:], 0, "reduced"))
        for kind in ("sum", "avg"):
            add(P(unreduced=dict.fromkeys(axes, kind)), AllReduce(axes))
            add(P(unreduced=dict.fromkeys(axes, kind)), AllReduce(axes, "reduced", kind))
            add(P(), InvariantToReduced(axes, kind))
            add(P(reduced=dict.fromkeys(axes, kind)), ReducedToInvariant(axes))
            add(P(), ReplicatedToUnreduced(axes, kind))
            add(P(reduced=dict.fromkeys(axes, kind)), ReplicatedToUnreduced(axes, kind))
    if len(mesh.axes) == 2:
        add(P(("x", "y")), CollectivePermute(P(("y", "x"), None, None)))
        add(P(None, ("y", "x")), CollectivePermute(P(None, ("x", "y"), None)))
        add(P("x", unreduced={"y"}), AllReduce("y"), AllToAll("x", 0, 1))
        add(P("y", reduced={"x"}), ReplicatedToUnreduced("x"), AllGather("y", 0))
        if mesh.shape["x"] == mesh.shape["y"]:
            add(P("x", "y"), CollectivePermute(P("y", "x", None)))
            add(P("x"), CollectivePermute(P("y", None, None)))
            add(P("x", unreduced={"y"}), CollectivePermute(P("y", None, None, unreduced={"x"})))
    if dtype.is_floating_point:
        add(P("x"), Cast(torch.float64), AllGather("x", 0), Cast(torch.float32))
    return programs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_step_in_every_dtype(mesh: Mesh) -> None:
    cases = []
    least = {torch.int64: 21, torch.bool: 6}
    for i, dtype in enumerate(DTYPES):
        programs = catalogue(mesh, dtype)
        assert len(programs) >= len(mesh.axes) * least.get(dtype, 33)
        if dtype != torch.float64:
            programs = programs[i :: 4 * len(mesh.axes) - 2]
        orders = {torch.float64: 2, torch.float32: 1, torch.bfloat16: 1, torch.complex64: 1}
        cases += [case(prog, orders.get(dtype, 0)) for prog in programs]
    check_cases(mesh, cases)


@pytest.mark.parametrize("mesh", MESHES[2:4], ids=str)
def test_reductions_of_every_kind_and_dtype(mesh: Mesh) -> None:
    cases = []
    kinds = ("sum", "avg", "max", "min", "product")
    layouts: list[Any] = [
        ((12, 2), P(), None),
        ((12, 2), P(("y", "x")), None),
        ((5, 2), P("y"), "chunk"),
        ((2, 5), P(None, "x"), "chunk"),
    ]
    rows = enumerate(itertools.product(DTYPES, kinds), MESHES.index(mesh))
    # Half of the layouts on this mesh, the others on the other one.
    of_mesh = [(*row, layout) for at, row in rows for layout in layouts[at % 2 :: 2]]
    for dtype, kind, (shape, to, uneven) in of_mesh:
        try:
            src = Spec(mesh, P(unreduced={"x": kind, "y": kind}), shape=shape, dtype=dtype)
        except fs.ShardingError:
            assert (dtype, kind) in {
                (torch.bool, "sum"), (torch.bool, "avg"), (torch.int64, "avg"),
                (torch.complex64, "max"), (torch.complex64, "min"),
            }  # fmt: skip
            continue
        dst = Spec(mesh, to, shape=shape, dtype=dtype, uneven=uneven)
        differentiable = dtype in FLOATS and kind != "product"
        cases.append(case(fs.redistribute(src, dst), int(differentiable)))
    assert len(cases) == 2 * (5 * 6 - 5)
    mixed = Spec(mesh, P("x", unreduced={"y": "max"}), shape=(4, 3))
    cases.append(case(fs.redistribute(mixed, mixed.replace(partition=P())), 1))
    check_cases(mesh, cases)


# -- what the planner makes ------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
def test_planned_programs(mesh: Mesh) -> None:
    """Check a sample of all pairs of specs: integers forward, floats with one gradient."""
    pairs = sample_pairs(all_specs(mesh, (12, 12), dtype=torch.int64), 60)
    cases = [case(fs.redistribute(a, b)) for a, b in pairs]
    pairs = sample_pairs(all_specs(mesh, (12, 12), dtype=torch.float64), 40, seed=1)
    cases += [case(fs.redistribute(a, b), 1) for a, b in pairs]
    check_cases(mesh, cases)


def uneven_specs(mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> list[Spec]:
    """Return all layouts of one tensor, chunked, and some with other sizes."""
    specs = all_specs(mesh, shape, ("invariant", "unreduced"), dtype=dtype, uneven="chunk")
    n, rows = mesh.size, shape[0]
    owner = (0, rows, *(0,) * (n - 2))
    ragged = (1, *(0,) * (n - 3), rows // 2, rows - 1 - rows // 2)
    for sizes in (owner, ragged):
        for axes in (("x", "y"), ("y", "x")):
            specs.append(Spec(mesh, P(axes), shape=shape, dtype=dtype, sizes={0: sizes}))
    return specs


@pytest.mark.parametrize("mesh", [MESHES[2], MESHES[3]], ids=str)
def test_uneven_and_empty_shards(mesh: Mesh) -> None:
    cases = []
    for i, shape in enumerate(((7, 5), (5, 1), (1, 4), (9, 7))):
        specs = uneven_specs(mesh, shape, torch.float64)
        pairs = sample_pairs(specs, 30, seed=i)
        cases += [case(fs.redistribute(a, b), 1) for a, b in pairs]
    check_cases(mesh, cases)


def test_sizes_with_an_empty_shard_and_an_owner() -> None:
    mesh = Mesh(x=2, y=2)
    specs = [
        Spec(mesh, P(axes), shape=(16, 3), sizes={0: sizes}, dtype=dtype)
        for dtype in (torch.float32, torch.bool)
        for axes in (("x", "y"), ("y", "x"))
        for sizes in ((3, 5, 0, 8), (16, 0, 0, 0), (4, 4, 4, 4))
    ]
    pairs = [(a, b) for a, b in itertools.permutations(specs, 2) if a.dtype == b.dtype]
    check_cases(mesh, [case(fs.redistribute(a, b), int(a.dtype != torch.bool)) for a, b in pairs])


# -- inputs of every form --------------------------------------------------------------


def test_memory_formats_do_not_change_values() -> None:
    """Check transposed, strided and offset locals."""
    for mesh in (Mesh(x=2), Mesh(x=2, y=2)):
        programs = catalogue(mesh, torch.float32)
        formats = itertools.cycle(("transposed", "strided", "offset"))
        check_cases(
            mesh, [case(prog, 1, memory) for prog, memory in zip(programs, formats, strict=False)]
        )


def test_scalars_and_tensors_without_elements() -> None:
    mesh = Mesh(x=2, y=2)
    states = ("invariant", "reduced", "unreduced")
    cases = []
    for dtype in (torch.float64, torch.int64):
        scalars = all_specs(mesh, (), states, dtype=dtype)
        cases += [
            case(fs.redistribute(a, b), int(dtype.is_floating_point))
            for a, b in itertools.permutations(scalars, 2)
        ]
        for shape in ((0, 4), (4, 0), (0,)):
            pairs = sample_pairs(all_specs(mesh, shape, states, dtype=dtype), 12, seed=3)
            cases += [case(fs.redistribute(a, b), int(dtype.is_floating_point)) for a, b in pairs]
    check_cases(mesh, cases)


def run_quietly(mesh: Mesh, cases: Sequence[Case]) -> list[Any]:
    """Call `run_all` on a transport that refuses every collective."""
    from fshard.run.transports import base as transport

    fs.init(mesh)
    world = transport.current_transport()
    transport.set_world(_Silent(world.rank))  # type: ignore[union-attr,arg-type]
    try:
        return run_here(mesh, cases)
    finally:
        transport.set_world(world)


class _Silent:
    """Transport with a rank alone: any collective raises AttributeError."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def accepts(self, device: torch.device) -> bool:
        return True


def test_nothing_is_launched_along_axes_of_size_one_or_without_elements() -> None:
    mesh = Mesh(x=1, y=2, z=1)
    ones = ("x", "z")
    shape = (4, 2)
    specs = [
        Spec(mesh, P(*dims, unreduced=dict.fromkeys(left, kind)), shape=shape, dtype=torch.float64)
        for dims, left in [
            ((), ones), ((("x", "z"),), ()), (("z", "x"), ()), ((None, ("z", "x")), ()),
            ((), ()), (("x",), ("z",)),
        ]
        for kind in ("sum", "avg")
    ]  # fmt: skip
    programs = [fs.redistribute(a, b) for a, b in itertools.permutations(specs, 2)]
    empty = all_specs(mesh, (0, 2), ("invariant", "unreduced"), dtype=torch.float64)
    programs += [fs.redistribute(a, b) for a, b in sample_pairs(empty, 20)]
    by_rank = run_ranks(2, run_quietly, mesh, tuple(case(prog, 1) for prog in programs))
    assert all(events == [] for rows in by_rank for _, events in rows)
    for i, prog in enumerate(programs):
        want, _ = run_case(case(prog, 1), range(2), simulated=True)
        for rank in (0, 1):
            for local, everyone in zip(by_rank[rank][i][0], want, strict=True):
                assert_same(local[0], everyone[rank])


# -- pending results -------------------------------------------------------------------


def run_async(mesh: Mesh, cases: Sequence[Case]) -> list[Any]:
    """Launch all programs, wait for them in reverse order, then differentiate."""
    fs.init(mesh)
    place = list(mesh.ranks).index(dist.get_rank())
    xs = [item.locals_[place].clone().requires_grad_(item.orders > 0) for item in cases]
    pending = [item.prog(x, async_op=True) for item, x in zip(cases, xs, strict=True)]
    assert repr(pending[0]) == "<Pending, under way>"
    ys = [item.wait() for item in reversed(pending)][::-1]
    assert repr(pending[0]) == "<Pending, waited for>"
    refused = []
    for item in pending:
        with pytest.raises(fs.ShardingError, match="must be waited for once") as caught:
            item.wait()
        refused.append(str(caught.value))
    grads = [
        torch.autograd.grad(y, x, item.cotangents[0][place])[0] if item.orders else None
        for item, x, y in zip(cases, xs, ys, strict=True)
    ]
    return list(zip([y.detach() for y in ys], grads, strict=True))


def test_async_results_and_gradients() -> None:
    mesh = Mesh(x=2, y=2)
    pairs = sample_pairs(all_specs(mesh, (4, 4), dtype=torch.float64), 40)
    cases = [case(fs.redistribute(a, b), i % 2) for i, (a, b) in enumerate(pairs)]
    most = Spec(mesh, P(unreduced={"x": "max"}), shape=(4,))
    cases.append(case(fs.redistribute(most, most.replace(partition=P("y")))))
    by_rank = run_ranks(4, run_async, mesh, tuple(cases))
    for i, item in enumerate(cases):
        want, _ = run_case(item, range(4), simulated=True)
        for rank in range(4):
            result, grad = by_rank[rank][i]
            assert_same(result, want[0][rank])
            assert (grad is None) == (len(want) == 1)
            if grad is not None:
                assert_same(grad, want[1][rank])


def run_abandoned(mesh: Mesh) -> str:
    """Abandon launches in every way, and wait until PyTorch holds none of them."""
    fs.init(mesh)
    x = torch.ones(4, requires_grad=True)

    def forget(x: torch.Tensor) -> torch.Tensor:
        fs.start(fs.all_gather, x, "x")
        return x

    def fail(x: torch.Tensor) -> torch.Tensor:
        fs.start(fs.psum, x, "x")
        raise KeyError

    for body, error in ((forget, fs.ShardingError), (fail, KeyError)):
        for check in (True, False):
            f = fs.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check=check)
            with pytest.raises(error):
                f(x)
    src = Spec(mesh, P("x"), shape=(8,))
    fs.redistribute(src, src.replace(partition=P()))(x, async_op=True)
    with pytest.warns(RuntimeWarning, match="fs.psum was never waited for") as caught:
        fs.start(fs.psum, x, "x", mesh=mesh)
    while torch._C._distributed_c10d._get_work_registry_size():
        time.sleep(0.01)
    return str(caught[0].message)


def test_abandoned_launches_are_released() -> None:
    results = run_ranks(2, run_abandoned, Mesh(x=2))
    assert results == ["fs.psum was never waited for: pending.wait()"] * 2


def refuse_async_maximum(mesh: Mesh) -> str:
    fs.init(mesh)
    src = Spec(mesh, P(unreduced={"x": "max"}), shape=(4,))
    prog = fs.redistribute(src, src.replace(partition=P()))
    with pytest.raises(fs.ShardingError, match="must be linear to run ahead") as caught:
        prog(torch.ones(4, requires_grad=True), async_op=True)
    return str(caught.value)


def test_async_maximum_with_gradient_is_refused() -> None:
    first, second = run_ranks(2, refuse_async_maximum, Mesh(x=2))
    assert first == second


# -- what is sent ----------------------------------------------------------------------


def test_wire_dtypes() -> None:
    """Check bytes, values and gradient dtypes of bf16 forward and f32 backward, and reversed."""
    mesh = Mesh(x=2, y=2)
    cases = []
    for dtype, there, back in [
        (torch.float32, torch.bfloat16, None),
        (torch.float32, None, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float64),
        (torch.bfloat16, None, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ]:
        specs = all_specs(mesh, (4, 4), dtype=dtype)
        cases += [
            case(fs.redistribute(a, b, forward_dtype=there, backward_dtype=back), 2)
            for a, b in sample_pairs(specs, 12, seed=5)
        ]
    check_cases(mesh, cases)


@pytest.mark.parametrize(
    ("there", "back", "bytes_there", "bytes_back"),
    [
        (None, None, 32, 32),
        (torch.bfloat16, None, 16, 32),
        (None, torch.bfloat16, 32, 16),
        (torch.bfloat16, torch.float64, 16, 64),
    ],
)
def test_bytes_of_wire_dtypes(
    there: torch.dtype | None, back: torch.dtype | None, bytes_there: int, bytes_back: int
) -> None:
    mesh = Mesh(x=2)
    src = Spec(mesh, P("x", None), shape=(4, 4))
    prog = fs.redistribute(
        src, src.replace(partition=P(None, "x")), forward_dtype=there, backward_dtype=back
    )
    item = case(prog, 1)
    results, events = run_case(item, range(2), simulated=True)
    # Half of a local of 8 numbers leaves each rank.
    assert sorted((phase, nbytes) for *_, nbytes, phase in events) == [
        *[("backward", bytes_back // 2)] * 2, *[("forward", bytes_there // 2)] * 2,
    ]  # fmt: skip
    assert all(x.dtype == torch.float32 for tensors in results for x in tensors)
    check_cases(mesh, [item])


def test_wire_dtype_rounds_the_sent_values() -> None:
    mesh = Mesh(x=2)
    src = Spec(mesh, P("x"), shape=(2,))
    prog = fs.redistribute(src, src.replace(partition=P()), forward_dtype=torch.bfloat16)
    x = torch.tensor([1.0 + 2**-10, 3.0])
    want = x.to(torch.bfloat16).to(torch.float32)
    assert all(torch.equal(y, want) for y in prog(tuple(x.split(1))))


# -- gradients that no transpose gives -------------------------------------------------


def test_maxima_share_gradients_among_ties() -> None:
    mesh = Mesh(x=2, y=2)
    cases = []
    for kind, (to, shape) in itertools.product(
        ("max", "min"), [(P(), (4, 3)), (P(("y", "x")), (4, 3)), (P("y"), (3,)), (P(), ())]
    ):
        src = Spec(mesh, P(unreduced={"x": kind, "y": kind}), shape=shape, dtype=torch.float64)
        dst = Spec(mesh, to, shape=shape, dtype=torch.float64, uneven="chunk")
        prog = fs.redistribute(src, dst)
        tied = tuple(x % 2 for x in random_locals(src, 3))
        cotangents = random_locals(dst.dual, 4), random_locals(src.replace(partition=P()), 5)
        cases.append(Case(prog, tied, 1, "plain", cotangents))
    check_cases(mesh, cases)
    for item in cases:
        (_, grads), _ = run_case(item, range(4), simulated=True)
        pooled = torch.stack(item.locals_).requires_grad_()
        reduce = torch.amax if "max" in str(item.prog.src) else torch.amin
        cotangent = fs.unshard((item.cotangents[0], item.prog.dst))
        (want,) = torch.autograd.grad(reduce(pooled, 0), pooled, cotangent)
        torch.testing.assert_close(torch.stack(grads), want)
