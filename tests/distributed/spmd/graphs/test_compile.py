"""`torch.compile(fullgraph=True)` of bodies with collectives, compared with uncompiled ones."""

from __future__ import annotations

import importlib
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd

import fshard as fs
from fshard import Mesh, P, Sharded, Spec
from fshard.spmd.collectives.collective_plan import COLLECTIVE_PLANS
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spec_grid import random_global
from tests.helpers.spmd.collective_cases import CASES, by_oracle
from tests.helpers.spmd.collective_cases import arguments as collective_arguments

MESH = Mesh(i=2)
F64 = torch.float64
Work = list[tuple[int, torch.Tensor, torch.Tensor]]
BACKENDS = ["aot_eager", "inductor"] if shutil.which("g++") else ["aot_eager"]


def compiled(
    body: Callable[..., Any], backend: Any = "aot_eager", dynamic: bool | None = None
) -> Callable[..., Any]:
    torch._dynamo.reset()  # graphs of this body only
    if backend == "inductor":
        with warnings.catch_warnings():  # raised by its import
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("torch._inductor.compile_fx")
    done: Callable[..., Any] = torch.compile(body, fullgraph=True, backend=backend, dynamic=dynamic)
    return done


# -- every collective --------------------------------------------------------------------


def run_cases(
    work: Work, backend: str, dynamic: bool | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the values and gradients of collectives that are all in one graph."""
    fs.init(MESH)
    cases, xs, cts = zip(*work, strict=True)

    def body(*xs: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(cases, xs, strict=True)
        return [CASES[at].run(x, ("i",), mesh=MESH) for at, x in pairs]

    leaves = [x.clone().requires_grad_() for x in xs]
    ys = compiled(body, backend, dynamic)(*leaves)
    grads = torch.autograd.grad(ys, leaves, cts)
    return [(y.detach(), grad) for y, grad in zip(ys, grads, strict=True)]


def words(name: str) -> tuple[str, ...]:
    """Return the words of a case's name: the collective and its options without dims."""
    return tuple(re.findall(r"[A-Za-z_]+", name))


KINDS: dict[tuple[str, ...], list[int]] = {}
for place, item in enumerate(CASES):
    KINDS.setdefault(words(item.name), []).append(place)
# Compiling takes seconds: one case of every kind, the middle one, most of them in slow tests.
CHOSEN = [places[len(places) // 2] for places in KINDS.values()]
FIRST = [*{words(CASES[at].name)[0]: at for at in CHOSEN}.values()]
"""One case of every collective."""
PARTS: list[Any] = [("aot_eager", None, FIRST[at::2]) for at in range(2)]
PARTS += [(backend, None, FIRST[:1]) for backend in BACKENDS[1:]]
PARTS += [("aot_eager", True, FIRST[1::6])]
PARTS += [pytest.param("aot_eager", None, CHOSEN[at::5], marks=pytest.mark.slow) for at in range(5)]
PARTS += [pytest.param("aot_eager", True, CHOSEN[at::5], marks=pytest.mark.slow) for at in range(5)]


def test_chosen_cases_include_every_collective() -> None:
    chosen = {words(CASES[at].name) for at in CHOSEN}
    names = {plan.__name__ for plan in COLLECTIVE_PLANS.values()}
    assert {kind[0] for kind in chosen} == {words(CASES[at].name)[0] for at in FIRST} == names
    states = {kind[-1] for kind in chosen if kind[0] == "all_gather"}
    assert states > {"varying", "invariant", "reduced"}


@pytest.mark.parametrize(("backend", "dynamic", "chosen"), PARTS)
def test_compiled_collectives_equal_the_oracle(
    backend: str, dynamic: bool | None, chosen: list[int]
) -> None:
    work: list[Work] = [[], []]
    expected = []
    for at in chosen:
        xs = collective_arguments(CASES[at], MESH, ("i",), F64)
        ys, cts, grads = by_oracle(CASES[at], MESH, ("i",), xs)
        for rank in MESH.ranks:
            work[rank].append((at, xs[rank], cts[rank]))
        expected.append((ys, grads))
    by_rank = run_ranks(2, run_my_cases, work, backend, dynamic)
    for place, at in enumerate(chosen):
        for rank in MESH.ranks:
            y, grad = by_rank[rank][place]
            torch.testing.assert_close(y, expected[place][0][rank], msg=CASES[at].name)
            torch.testing.assert_close(grad, expected[place][1][rank], msg=CASES[at].name)


def run_my_cases(
    work: list[Work], backend: str, dynamic: bool | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return run_cases(work[dist.get_rank()], backend, dynamic)


# -- bodies ------------------------------------------------------------------------------


def tree(x: torch.Tensor) -> torch.Tensor:
    sums: Any = fs.psum({"a": x, "b": (x[0] * 2, None), "n": 3}, "i")
    total: torch.Tensor = sums["a"] * sums["n"] + sums["b"][0]
    return total


def places(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + fs.axis_index("i")) * fs.axis_size("i")


def extremes(x: torch.Tensor) -> torch.Tensor:
    return x * (fs.pargmax(x.detach(), "i") + 2 * fs.pargmin(x.detach(), "i"))


def ragged(x: torch.Tensor) -> torch.Tensor:
    i: Any = fs.axis_index("i")
    out = fs.ragged_all_to_all(x, 2 * x[:2], [0, 1], [1, 1], [i, i], [1, 1], axis_name="i")
    return out * out


def several(x: torch.Tensor) -> torch.Tensor:
    w = fs.pcast(x.sum(), "i", to="varying")
    return fs.pmean((w * fs.all_gather(x, "i", tiled=True)).sin(), ("i",))


def started(x: torch.Tensor) -> torch.Tensor:
    total = fs.start(fs.psum, (x, None, x.sum()), "i")
    everyone = fs.start(fs.all_gather, x, "i", tiled=True)
    square = x * x
    first, _, second = total.wait()
    out: torch.Tensor = square * second + first + everyone.wait().sum()
    return out


BODIES = [tree, places, extremes, ragged, several, started]


def run_bodies(at: int, backends: Sequence[str]) -> list[Any]:
    fs.init(MESH)
    x = random_global((4, 3), F64, dist.get_rank()) / 4
    results = []
    for backend in (None, *backends):
        output = BODIES[at] if backend is None else compiled(BODIES[at], backend)
        f = fs.shard_map(output, mesh=MESH, in_specs=P("i"), out_specs=P("i"), check=False)
        leaf = x.clone().requires_grad_()
        y = f(Sharded(leaf, Spec(MESH, P("i"), shape=(8, 3), dtype=F64))).local
        results.append((y.detach(), torch.autograd.grad(y, leaf, y.detach().cos())[0]))
    return results


@pytest.mark.parametrize(
    "backends", [BACKENDS[:1], pytest.param(BACKENDS[1:], marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("at", range(len(BODIES)), ids=lambda at: BODIES[at].__name__)
def test_compiled_bodies_in_a_shard_map(at: int, backends: list[str]) -> None:
    for eager, *rest in run_ranks(2, run_bodies, at, backends):
        for item in rest:
            torch.testing.assert_close(item, eager)


def counted(targets: list[str]) -> Any:
    """Return a backend that records the collectives of its graphs."""

    def note(graph: Any, _: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        targets.extend(name.split(".")[1] for name in names if "c10d_functional" in name)
        from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=note, bw_compiler=note)


def run_counted() -> list[str]:
    fs.init(MESH)
    targets: list[str] = []
    body = compiled(
        lambda x: fs.all_gather(fs.psum(x, "i", mesh=MESH), "i", mesh=MESH), counted(targets)
    )
    body(torch.ones(2, requires_grad=True)).sum().backward()
    return targets


def test_graphs_have_functional_collectives() -> None:
    forward = ["all_reduce", "wait_tensor", "all_gather_into_tensor", "wait_tensor"]
    for results in run_ranks(2, run_counted):
        assert results == [*forward, "reduce_scatter_tensor", "wait_tensor"]


def run_two_meshes() -> list[torch.Tensor]:
    body = compiled(lambda x: fs.all_gather(x, "i", tiled=True))
    results = []
    for mesh in (MESH, Mesh({"i": 2}, devices=(1, 0)), MESH):
        fs.init(mesh)
        f = fs.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check=False)
        mine = torch.tensor([float(dist.get_rank())])
        results.append(f(Sharded(mine, Spec(mesh, P("i"), shape=(2,)))).local)
    return results


def test_graphs_depend_on_the_mesh() -> None:
    for results in run_ranks(2, run_two_meshes):
        assert [item.tolist() for item in results] == [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]


def run_refused() -> list[str]:
    fs.init(MESH)
    x = torch.ones(2)

    def twice(x: torch.Tensor) -> torch.Tensor:
        total = fs.start(fs.psum, x, "i", mesh=MESH)
        out: torch.Tensor = total.wait() + total.wait()
        return out

    texts = []
    for body in (twice, lambda x: fs.start(torch.sin, x).wait()):
        with pytest.raises(Exception, match=r"given") as caught:
            compiled(body)(x)
        texts.append(str(caught.value))
    return texts


def test_errors_of_calls_that_graphs_cannot_have() -> None:
    for twice, no_collective in run_ranks(2, run_refused):
        assert "a pending result must be waited for once" in twice
        assert "the first argument must be a collective: all_gather, " in no_collective


def test_graphs_end_before_collectives_without_ranks() -> None:
    body = compiled(lambda x: fs.psum(x, "i", mesh=MESH))
    with pytest.raises(Exception, match="a graph has the work of one rank"):
        body(torch.ones(2))


def test_fake_tensors_outside_of_graphs_do_not_communicate() -> None:
    with torch._subclasses.FakeTensorMode():
        f = fs.shard_map(
            lambda x: fs.psum(x, "i"), mesh=MESH, in_specs=P("i"), out_specs=P(), check=False
        )
        assert f(torch.ones(4, 3)).shape == (2, 3)
