"""Replayed collectives and programs do what the general path does, on real processes."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx

import fshard as fs
from fshard import Mesh, P, Program, Sharded, ShardingError, Spec
from fshard.run import execute
from fshard.run.capture import Recordings
from fshard.spmd.collectives import collective_plan
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spec_grid import one_in, random_global
from tests.helpers.spmd.collective_cases import CASES, axes_of, by_oracle, on_rank
from tests.helpers.spmd.collective_cases import arguments as collective_arguments

MESHES = [Mesh(i=2), Mesh({"x": 2, "y": 2}, devices=(2, 0, 3, 1))]
F64 = torch.float64
Work = list[tuple[int, tuple[str, ...], list[torch.Tensor], list[torch.Tensor]]]


def run_often(mesh: Mesh, work: Work) -> list[Any]:
    """Run every case three times on each of two strides; later runs are replayed."""
    fs.init(mesh)
    collective_plan._RECORDINGS.clear()
    place = list(mesh.ranks).index(dist.get_rank())
    outputs = []
    for k, axes, xs, cts in work:
        x, ct = xs[place], cts[place]
        other = x.mT.contiguous().mT if x.ndim > 1 else x
        value = [(x, ct)] * 3 + [(other, ct.mT.contiguous().mT if ct.ndim > 1 else ct)] * 3
        outputs.append([on_rank(CASES[k], mesh, axes, *item) for item in value])
    assert len(collective_plan._RECORDINGS) > len(work)
    return outputs


@one_in(5)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_replayed_collectives_agree_with_the_reference(mesh: Mesh, every: int) -> None:
    work: Work = []
    want = []
    for k, item in [*enumerate(CASES)][::every]:
        for axes in axes_of(mesh)[-1:]:
            xs = collective_arguments(item, mesh, axes, F64)
            ys, cts, grads = by_oracle(item, mesh, axes, xs)
            work.append((k, axes, xs, cts))
            want.append((ys, grads))
    by_rank = run_ranks(mesh.size, run_often, mesh, work)
    for k, (ys, grads) in enumerate(want):
        name = f"{CASES[work[k][0]].name} along {work[k][1]}"
        for place, rank in enumerate(mesh.ranks):
            for y, grad, again in by_rank[rank][k]:
                torch.testing.assert_close(y, ys[place], msg=name)
                torch.testing.assert_close(grad, grads[place], msg=name)
                assert again is None or torch.allclose(again, ys[place]), name


def run_around() -> list[Any]:
    """Run a replayed collective with observers, in-place writes, dtypes and no_grad around it."""
    mesh = Mesh(i=2)
    fs.init(mesh)
    rank = float(dist.get_rank())
    outputs: list[Any] = []
    for _ in range(3):
        x = torch.tensor([rank, 1.0], requires_grad=True)
        y = fs.all_gather(x, "i", mesh=mesh)
        y.mul_(2.0)
        (grad,) = torch.autograd.grad(y.sum(), x)
        with fs.comm_log() as log:
            fs.psum(x, "i", mesh=mesh).sum().backward()
            fs.all_gather(x, "i", mesh=mesh).sum().backward()
        with torch.no_grad():
            plain = fs.psum(x, "i", mesh=mesh)
        means = [fs.pmean(torch.tensor([1, 2]), "i", mesh=mesh).dtype]
        torch.set_default_dtype(F64)
        means.append(fs.pmean(torch.tensor([1, 2]), "i", mesh=mesh).dtype)
        torch.set_default_dtype(torch.float32)
        outputs.append((y.detach(), grad, str(log), plain.requires_grad, plain.tolist(), means))
    return outputs


def test_replays_keep_observers_writes_and_dtypes() -> None:
    for first, *rest in run_ranks(2, run_around):
        assert first[0].tolist() == [[0.0, 2.0], [2.0, 2.0]]
        assert first[1].tolist() == [4.0, 4.0]
        assert first[3:] == (False, [1.0, 2.0], [torch.float32, F64])
        for item in rest:
            assert [*map(str, item)] == [*map(str, first)]


def run_changing() -> list[int]:
    """Return the number of recordings after one and after two calls of three shapes."""
    mesh = Mesh(i=2)
    fs.init(mesh)
    collective_plan._RECORDINGS.clear()
    counts = []
    for _ in range(2):
        for n in range(1, 4):
            fs.psum(random_global((n,), F64), "i", mesh=mesh)
        counts.append(len(collective_plan._RECORDINGS))
    return counts


def test_first_call_of_a_shape_is_not_recorded() -> None:
    assert run_ranks(2, run_changing) == [[0, 3]] * 2


# -- keys ------------------------------------------------------------------------------


def run_mutable() -> list[Any]:
    """Change arguments in place between calls."""
    mesh = Mesh(i=2)
    fs.init(mesh)
    x = torch.arange(2.0)
    outputs: list[Any] = []
    order: Any = torch.tensor([0, 1])
    rows = [[0, 1]]
    mapped = fs.shard_map(
        lambda v: fs.pshuffle(v, "i", order), mesh=mesh, in_specs=P("i"), out_specs=P("i")
    )
    for k in range(8):
        if k == 4:
            order.copy_(torch.tensor([1, 0]))
            rows[0][:] = [1, 0]
        leaf = torch.full((1,), float(dist.get_rank()), requires_grad=True)
        y = fs.all_gather(leaf, "i", mesh=mesh, axis_index_groups=rows)
        (grad,) = torch.autograd.grad(y, leaf, torch.tensor([[1.0], [2.0]]))
        direct = fs.pshuffle(leaf.detach(), "i", order, mesh=mesh)
        outputs.append((mapped(x).tolist(), direct.tolist(), y.tolist(), grad.tolist()))
    saved, order = weakref.ref(order), [0, 1]
    gc.collect()
    return [outputs, saved() is None]


def test_arguments_changed_in_place_count_as_they_are_at_the_call() -> None:
    for rank, (outputs, is_gone) in enumerate(run_ranks(2, run_mutable)):
        for k, (mapped, direct, y, grad) in enumerate(outputs):
            turned = k >= 4
            assert mapped == ([1.0, 0.0] if turned else [0.0, 1.0])
            assert direct == [float(rank != turned)]
            assert y == ([[1.0], [0.0]] if turned else [[0.0], [1.0]])
            assert grad == [2.0 * (1 + (rank != turned))]
        assert is_gone


def run_equal_numbers() -> list[Any]:
    """Call with equal values of different types, before and after the valid one."""
    mesh = Mesh(i=2)
    fs.init(mesh)
    outputs: list[Any] = []
    for k in range(4):
        for axis in (0.0, 0):
            x = torch.zeros(k // 2 + 1)
            try:
                outputs.append(fs.all_gather(x, "i", axis=axis, mesh=mesh).shape)  # type: ignore[arg-type]
            except ShardingError as error:
                outputs.append(str(error).splitlines()[1])
    return outputs


def test_equal_numbers_of_other_types_are_refused() -> None:
    for outputs in run_ranks(2, run_equal_numbers):
        assert outputs == [
            item
            for n in (1, 1, 2, 2)
            for item in ("  given: axis=0.0 of a result of 2 dims", torch.Size([2, n]))
        ]


def test_cache_cleared_by_another_thread() -> None:
    recordings = Recordings()

    class Key:
        """Key whose comparison clears the cache, as another thread may at that moment."""

        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            recordings.clear()
            return True

    for _ in range(4):
        assert recordings.get_or_record(Key(), lambda: None) is None


# -- what else looks at operations ------------------------------------------------------------

LINEAR: dict[str, Callable[[torch.Tensor, Mesh], torch.Tensor]] = {
    "psum": lambda x, mesh: fs.psum(x, "i", mesh=mesh),
    "all_gather": lambda x, mesh: fs.all_gather(x, "i", axis=1, mesh=mesh),
    "psum_scatter": lambda x, mesh: fs.psum_scatter(x, "i", mesh=mesh),
    "program": lambda x, mesh: fs.redistribute(
        Spec(mesh, P("i"), shape=(4, 3)), Spec(mesh, P(), shape=(4, 3))
    )(x),
}


def dual_of(x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():  # of PyTorch's own, when it is first called
        warnings.simplefilter("ignore", DeprecationWarning)
        dual: torch.Tensor = forward_ad.make_dual(x, tangent)
        return dual


def run_tangents(name: str) -> list[Any]:
    """Return values and tangents in a level of forward mode, with and without reverse mode."""
    mesh = Mesh(i=2)
    fs.init(mesh)
    outputs = []
    for k in range(8):
        x = torch.full((2, 3), 1.0 + dist.get_rank(), requires_grad=k >= 4)
        with forward_ad.dual_level():
            dual = dual_of(x, 3 * x.detach())
            y = forward_ad.unpack_dual(LINEAR[name](dual * dual, mesh))
            outputs.append((y.primal.detach(), y.tangent.detach()))
    return outputs


@pytest.mark.parametrize("name", LINEAR)
def test_tangents_in_forward_mode(name: str) -> None:
    for outputs in run_ranks(2, run_tangents, name):
        for primal, tangent in outputs:
            assert torch.equal(tangent, 6 * primal)
            assert torch.equal(primal, outputs[0][0])


def run_mixed_tangents() -> list[bool]:
    """Check a tree of a leaf with a tangent and one with a gradient, and a maximum."""
    mesh = Mesh(i=2)
    fs.init(mesh)
    x, w = torch.ones(2), torch.ones(3, requires_grad=True)
    with forward_ad.dual_level():
        y, v = fs.psum((dual_of(x, x), w), "i", mesh=mesh)
        (grad,) = torch.autograd.grad(v.sum(), w)
        assert forward_ad.unpack_dual(y).tangent.tolist() == [2.0, 2.0]
        assert grad.tolist() == [1.0] * 3
        largest = forward_ad.unpack_dual(fs.pmax(dual_of(x, x), "i", mesh=mesh))
        assert largest.tangent.tolist() == [1.0, 1.0]
    return [True]


def test_tangents_and_gradients_in_one_tree() -> None:
    assert run_ranks(2, run_mixed_tangents) == [[True]] * 2


def run_observed(name: str) -> list[Any]:
    """Return the counts of `CommDebugMode` and the graphs of `make_fx` for every call."""
    mesh = Mesh(i=2)
    fs.init(mesh)
    counts, graphs = [], []
    for k in range(4):
        x = torch.ones(2, 3, requires_grad=True)
        with CommDebugMode() as counter:
            LINEAR[name](x, mesh).sum().backward()
        counts.append(counter.get_total_counts())
        traced = make_fx(lambda x: 2 * LINEAR[name](x, mesh))(torch.ones(2, 3) + k)
        graphs.append([str(node.target) for node in traced.graph.nodes])
    return [counts, graphs]


@pytest.mark.parametrize("name", LINEAR)
def test_dispatch_modes_see_every_collective_once(name: str) -> None:
    for counts, graphs in run_ranks(2, run_observed, name):
        assert counts == [1 if name in ("psum", "program") else 2] * 4
        for graph in graphs:
            assert sum("_c10d_functional" in item for item in graph) == 2  # one, and its wait
            assert not any("empty" in item for item in graph)


def run_batched(work: Work) -> list[Any]:
    """Compare gradients of several cotangents in one pass with those one by one."""
    mesh = Mesh(i=2)
    fs.init(mesh)
    collective_plan._RECORDINGS.clear()
    place, outputs = dist.get_rank(), []
    for k, axes, xs, cts in work:
        batch = torch.stack([cts[place] * n for n in (1, -2, 3)])
        for _ in range(4):
            x = xs[place].clone().requires_grad_()
            y = CASES[k].run(x, axes, mesh=mesh)
            want = [torch.autograd.grad(y, x, ct, retain_graph=True)[0] for ct in batch]
            (together,) = torch.autograd.grad(y, x, batch, is_grads_batched=True)
            outputs.append(torch.allclose(together, torch.stack(want)))
    return outputs


def test_batched_gradients_equal_single_ones() -> None:
    mesh, work = Mesh(i=2), []
    for k, item in enumerate(CASES):
        xs = collective_arguments(item, mesh, ("i",), F64)
        _, cts, _ = by_oracle(item, mesh, ("i",), xs)
        work.append((k, ("i",), xs, cts))
    for outputs in run_ranks(2, run_batched, work):
        assert [CASES[k // 4].name for k, is_right in enumerate(outputs) if not is_right] == []


# -- programs ---------------------------------------------------------------------------------

LAYOUTS = [
    P(), P("x"), P(None, "y"), P("y", "x"), P(("y", "x")), P(unreduced={"x"}), P(reduced={"x"}),
    P("y", unreduced={"x": "avg"}), P(unreduced={"x": "max"}),
]  # fmt: skip
PROGRAM_MESHES = [Mesh(x=2, y=1), MESHES[1]]


def programs(mesh: Mesh) -> list[Program]:
    """Return programs between layouts of an even and an uneven tensor, one of them sent in bf16."""
    results = []
    for shape in ((4, 8), (5, 6)):
        specs = [Spec(mesh, p, shape=shape, dtype=F64, uneven="chunk") for p in LAYOUTS]
        for src in specs:
            kinds = set(src.partition.unreduced.values())
            results += [
                fs.redistribute(src, dst)
                for dst in specs
                if not kinds or set(dst.partition.unreduced.values()) in (set(), kinds)
            ]
    unsharded = Spec(mesh, P(), shape=(4, 8))
    sharded = unsharded.replace(partition=P("x"))
    return [
        *results,
        fs.redistribute(
            sharded, unsharded, forward_dtype=torch.bfloat16, backward_dtype=torch.bfloat16
        ),
    ]


def in_order(x: torch.Tensor, transposed: bool) -> torch.Tensor:
    return x.mT.contiguous().mT if transposed else x.contiguous()


def once(prog: Program, x: torch.Tensor, ct: torch.Tensor) -> list[torch.Tensor]:
    """Return the result, and for a linear program its first and second gradient."""
    plain = prog(x)
    if not prog.is_linear:
        return [plain]
    x, ct = x.detach().requires_grad_(), ct.detach().requires_grad_()
    y = prog(x)
    (first,) = torch.autograd.grad(y, x, ct, create_graph=True)
    (second,) = torch.autograd.grad(first, ct, x.detach())
    return [plain, y.detach(), first.detach(), second]


def run_programs_often(progs: list[Program], work: list[Any]) -> list[Any]:
    """Run every program four times, of which two are replayed, then on other strides."""
    fs.init(progs[0].src.mesh)
    execute._RECORDINGS.clear()
    results = []
    for prog, (xs, cts) in zip(progs, work, strict=True):
        x, ct = xs[dist.get_rank()], cts[dist.get_rank()]
        results.append(
            [
                once(prog, in_order(x, transposed), in_order(ct, transposed))
                for transposed in [False] * 4 + [True] * 3
            ]
        )
    assert len(execute._RECORDINGS) > 2 * len(progs)
    return results


@one_in(11)
@pytest.mark.parametrize("mesh", PROGRAM_MESHES, ids=str)
def test_replayed_programs_agree_with_the_simulation(mesh: Mesh, every: int) -> None:
    progs, work, expected = programs(mesh)[::every], [], []
    for i, prog in enumerate(progs):
        sides = [
            [
                random_global(spec.local_shape(rank), spec.dtype, 7 * i + rank + len(name))
                for rank in mesh.ranks
            ]
            for name, spec in (("x", prog.src), ("ct", prog.dst))
        ]
        work.append(sides)
        xs, cts = sides
        ys = prog(tuple(xs))
        grads = prog.T(tuple(cts)) if prog.is_linear else None
        expected.append((ys, grads))
    by_rank = run_ranks(mesh.size, run_programs_often, progs, work)
    for i, (ys, grads) in enumerate(expected):
        for rank in mesh.ranks:
            for plain, *rest in by_rank[rank][i]:
                torch.testing.assert_close(plain, ys[rank], msg=str(progs[i]))
                if grads is not None:
                    for result, want in zip(rest, (ys, grads, ys), strict=True):
                        torch.testing.assert_close(result, want[rank], msg=str(progs[i]))


def run_together(mesh: Mesh) -> None:
    """Compare programs of one call, of which the first ones are not recorded, with single ones."""
    fs.init(mesh)
    x = Spec(mesh, P("x"), shape=(4, 3), dtype=F64)
    full, partial_ = x.replace(partition=P()), x.replace(partition=P(unreduced={"x"}))
    ends = (x, full), (full, full.replace(partition=P(reduced={"x"}))), (partial_, x), (x, full)
    progs = [*(fs.redistribute(*pair) for pair in ends), None]
    like = [*(prog.src if prog else full for prog in progs)]
    for _ in range(4):
        xs = [
            random_global(spec.local_shape(dist.get_rank()), F64, dist.get_rank() + i)
            for i, spec in enumerate(like)
        ]
        for i, value in enumerate(xs):
            value.requires_grad_(i != 3)
        ys = execute.run_programs(progs, xs)
        right = [prog(value) if prog else value for prog, value in zip(progs, xs, strict=True)]
        torch.testing.assert_close(ys, right)
        assert [y.requires_grad for y in ys] == [True, True, True, False, True]
        first, second = (
            torch.autograd.grad(sum((y**3).sum() for y in some), xs[:3], create_graph=True)
            for some in (ys, right)
        )
        torch.testing.assert_close(first, second)
        higher = [
            torch.autograd.grad(sum((g**2).sum() for g in grads), xs[:3])
            for grads in (first, second)
        ]
        torch.testing.assert_close(*higher)
        (unused,) = torch.autograd.grad(ys[0].sum(), xs[1:2], allow_unused=True)
        assert unused is None


def test_programs_of_one_call_have_the_values_and_gradients_of_single_ones() -> None:
    run_ranks(2, run_together, Mesh(x=2))


def share_nothing(mesh: Mesh) -> None:
    """Run mapped functions and conversions repeatedly, writing into their arguments and results."""
    fs.init(mesh)
    x = random_global((4, 6), F64)
    for p in (P(), P("x"), P(None, "y"), P(("x", "y"))):

        def body(v: torch.Tensor) -> torch.Tensor:
            return v.mul_(2)

        mapped = fs.shard_map(body, mesh=mesh, in_specs=p, out_specs=p, check=False)
        for _ in range(4):
            value = x.clone()
            out = mapped(value)
            assert torch.equal(out, 2 * x)
            out.zero_()
            assert torch.equal(value, x)
            pair = fs.shard(value, Spec(mesh, p, shape=(4, 6), dtype=F64))
            full = fs.unshard(pair)
            full.zero_()
            pair.local.mul_(3)
            assert torch.equal(value, x)
            assert torch.equal(fs.unshard(Sharded(pair.local, pair.spec)), 3 * x)


def test_results_of_repeated_calls_share_no_memory() -> None:
    mesh = MESHES[1]
    run_ranks(mesh.size, share_nothing, mesh)


def log_calls(mesh: Mesh) -> list[Any]:
    """Return the logs of a mapped call, the first and later ones."""
    fs.init(mesh)
    x = random_global((4, 6), F64).requires_grad_()
    mapped = fs.shard_map(
        lambda v: fs.psum(v, "x"), mesh=mesh, in_specs=P("x", "y"), out_specs=P(None, "y")
    )
    logs = []
    for k in range(6):
        if k % 2:
            with fs.comm_log() as log:
                torch.autograd.grad(mapped(x).sum(), x)
            logs.append(log.to_dict())
        else:
            torch.autograd.grad(mapped(x).sum(), x)
    return logs


def test_comm_log_counts_collectives_that_would_be_replayed() -> None:
    mesh = MESHES[1]
    for logs in run_ranks(mesh.size, log_calls, mesh):
        assert all(log == logs[0] for log in logs)
        assert {item["op"] for item in logs[0]["forward"]} == {"all_reduce", "all_gather"}
