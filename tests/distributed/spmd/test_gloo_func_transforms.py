"""Transforms of `torch.func` on gloo: of collectives, and of mapped functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spec_grid import message

MESH = Mesh(i=2)
X = torch.tensor([[0.5, -1.0], [2.0, 3.0]], dtype=torch.float64)

OPS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]] = {
    "sum": (lambda v: fs.psum(v**3, "i", mesh=MESH), lambda x: (x**3).sum(0)),
    "gather": (
        lambda v: fs.all_gather(v**3, "i", mesh=MESH, tiled=True), lambda x: (x**3).flatten(),
    ),
    "product": (lambda v: fs.pprod(v**3, "i", mesh=MESH), lambda x: (x**3).prod(0)),
    "exchange": (
        lambda v: fs.all_to_all(v**3, "i", 0, 0, mesh=MESH, tiled=True).cumsum(0),
        lambda x: (x**3).mT.cumsum(1),
    ),
}  # fmt: skip


def of_ops(name: str) -> list[torch.Tensor]:
    """Return each rank's transforms of its own row; three times, as calls may be captured."""
    fs.init(MESH)
    op, v = OPS[name][0], X[dist.get_rank()].clone()
    results: list[torch.Tensor] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
        for _ in range(3):
            results = [
                op(v),
                jvp(op, (v,), (v + 1,))[1],
                vmap(op)(torch.stack([v, v + 1])),
                grad(lambda v: op(v).sum())(v),
                vjp(op, v)[1](op(v))[0],
                vmap(grad(lambda v: op(v).sum()))(torch.stack([v, v + 1])),
                vjp(lambda v: jvp(op, (v,), (v,))[1], v)[1](op(v))[0],
            ]
            q = v.clone().requires_grad_()
            (back,) = torch.autograd.grad(op(q), q, op(v))
            assert torch.equal(results[4], back)
    return results


@pytest.mark.parametrize("name", OPS)
def test_transforms_of_collectives(name: str) -> None:
    by_rank = run_ranks(2, of_ops, name)
    full = OPS[name][1]

    def part(y: torch.Tensor, index: int) -> torch.Tensor:
        return y[index] if name == "exchange" else y

    def total(x: torch.Tensor) -> torch.Tensor:
        counts = 2 if name == "gather" else 1  # varying values differ by rank
        return torch.sum(full(x)) * counts

    tangent = torch.autograd.functional.jvp(full, X, X + 1)[1]
    gradient, other = grad(total)(X), grad(total)(X + 1)
    for index, results in enumerate(by_rank):
        torch.testing.assert_close(results[0], part(full(X), index))
        torch.testing.assert_close(results[1], part(tangent, index))
        both = torch.stack([part(full(X), index), part(full(X + 1), index)])
        torch.testing.assert_close(results[2], both)
        torch.testing.assert_close(results[3], gradient[index])
        torch.testing.assert_close(results[5], torch.stack([gradient[index], other[index]]))


def over_mapped(check: bool) -> list[torch.Tensor]:
    fs.init(MESH)
    x = torch.arange(4.0, dtype=torch.float64)
    mapped = fs.shard_map(
        lambda v: fs.psum(v**3, "i"), mesh=MESH, in_specs=P("i"), out_specs=P(), check=check
    )  # fmt: skip
    results: list[torch.Tensor] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
        for _ in range(3):
            results = [
                grad(lambda x: mapped(x).sum())(x),
                vjp(mapped, x)[1](x[:2])[0],
                vmap(mapped)(torch.stack([x, x + 1])),
                jacrev(mapped)(x),
                jacfwd(mapped)(x),
                hessian(lambda x: mapped(x).sum())(x),
            ]
    return results


@pytest.mark.parametrize("check", [False, True])
def test_transforms_of_a_mapped_function(check: bool) -> None:
    def whole(x: torch.Tensor) -> torch.Tensor:
        return x[:2] ** 3 + x[2:] ** 3

    x = torch.arange(4.0, dtype=torch.float64)
    expected = [
        grad(lambda x: whole(x).sum())(x),
        vjp(whole, x)[1](x[:2])[0],
        torch.stack([whole(x), whole(x + 1)]),
        jacrev(whole)(x),
        jacrev(whole)(x),
        torch.diag(6 * x),
    ]
    for results in run_ranks(2, over_mapped, check):
        for actual, item in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, item)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a set": (
        lambda v: fs.psum(v, {"i"}, mesh=MESH),  # type: ignore[arg-type]
        message("fs.psum", "the set {'i'} as axes",
             "axes must be a name or a tuple or list of names, major to minor", "'i', say"),
    ),
    "a frozen set": (
        lambda v: fs.all_gather(v, axis_name=frozenset({"i"}), mesh=MESH),  # type: ignore[arg-type]
        message("fs.all_gather", "the set {'i'} as axes",
             "axes must be a name or a tuple or list of names, major to minor", "'i', say"),
    ),
    "a list of places": (
        lambda v: fs.pshuffle(v, "i", [0, 0], mesh=MESH),
        message("fs.pshuffle", "perm=[0, 0]", "perm must have every index 0..1 along i once",
             "fs.ppermute(x, axis, [(src, dst), ...]) leaves indices out"),
    ),
    "lists of groups": (
        lambda v: fs.psum(v, "i", axis_index_groups=[[0], [0]], mesh=MESH),
        message("fs.psum", "axis_index_groups=[[0], [0]] along i",
             "the groups must be lists of one size and have every index 0..1 once",
             "axis_index_groups=[[0], [1]], say"),
    ),
}  # fmt: skip


def refused_often(name: str) -> set[str]:
    fs.init(MESH)
    texts = set()
    for _ in range(4):
        with pytest.raises(ShardingError) as caught:
            REFUSED[name][0](X)
        texts.add(str(caught.value))
    return texts


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_the_same_in_repeated_calls(name: str) -> None:
    """Repeated calls are captured; refused ones are not, and raise the same text."""
    assert run_ranks(2, refused_often, name) == [{REFUSED[name][1]}] * 2


def over_no_axis() -> list[torch.Tensor]:
    fs.init(MESH)
    x = X.clone().requires_grad_()
    results = [fs.psum(x * x, (), mesh=MESH) for _ in range(4)]
    (gradient,) = torch.autograd.grad(results[-1].sum(), x)
    return [*(item.detach() for item in results), gradient]


def test_psum_over_no_axes() -> None:
    for *results, gradient in run_ranks(2, over_no_axis):
        assert all(torch.equal(item, X * X) for item in results)
        assert torch.equal(gradient, 2 * X)
