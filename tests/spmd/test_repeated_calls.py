"""Repeated calls of one mapped function give what the first call of a new one would."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, Sharded, ShardingError, Spec
from fshard.layout.tree import flatten, map_leaves
from fshard.spmd.mapped_function import MappedFunction
from tests.helpers.spec_grid import message, random_global

MESH = Mesh(x=2, y=2)
F64 = torch.float64


class Point(NamedTuple):
    a: Any
    b: Any


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_global(shape, F64, seed)


def pair_of(x: torch.Tensor, *dims: Any, **options: Any) -> Sharded:
    p = P(*dims or "x")
    spec = Spec(Mesh(x=2, y=2), p, shape=x.shape, dtype=x.dtype, **options)
    return fs.shard(x, spec)


def with_bad_shard(pair: Sharded) -> Sharded:
    """Return the pair with a last shard that is too long."""
    return Sharded((*pair.local[:-1], torch.ones(9, 3, dtype=F64)), pair.spec)


ARGUMENTS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: integers(4, 3),
    "other shape": lambda: integers(8, 3),
    "other dtype": lambda: integers(4, 3).float(),
    "does not divide": lambda: integers(5, 3),
    "requires grad": lambda: integers(4, 3).requires_grad_(),
    "pair": lambda: pair_of(integers(4, 3)),
    "pair, a tuple": lambda: tuple(pair_of(integers(4, 3))),
    "pair of a list": lambda: Sharded(
        list(pair_of(integers(4, 3)).local), pair_of(integers(4, 3)).spec
    ),
    "pair along y": lambda: pair_of(integers(4, 3), "y"),
    "uneven pair": lambda: pair_of(integers(5, 3), sizes={0: (3, 2)}),
    "uneven the other way": lambda: pair_of(integers(5, 3), sizes={0: (2, 3)}),
    "not of its spec": lambda: with_bad_shard(pair_of(integers(4, 3))),
    "too few shards": lambda: Sharded(
        pair_of(integers(4, 3)).local[:3], pair_of(integers(4, 3)).spec
    ),
    "no local": lambda: Sharded(None, pair_of(integers(4, 3)).spec),
    "dict": lambda: {"b": integers(4), "a": pair_of(integers(4, 3))},
    "dict in order": lambda: {"a": pair_of(integers(4, 3)), "b": integers(4)},
    "ordered dict": lambda: OrderedDict(b=integers(4), a=integers(4, 3)),
    "keys that are numbers": lambda: {2: integers(4), 1: integers(4, 3)},
    "list": lambda: [integers(4), [integers(4, 3)]],
    "tuple": lambda: (integers(4), integers(4, 3)),
    "named tuple": lambda: Point(integers(4), pair_of(integers(4, 3))),
    "empty": lambda: {"a": [], "b": {}, "c": ()},
    "a number": lambda: 3,
}


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result or error of a call as comparable values."""
    try:
        return comparable(call())
    except ShardingError as error:
        return str(error)


def comparable(value: Any) -> Any:
    if isinstance(value, Sharded):
        return "pair", str(value.spec), comparable(value.local)
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.dtype, value.requires_grad
    if isinstance(value, dict):
        return type(value), [(key, comparable(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [comparable(item) for item in value]
    return value


def doubled(tree: Any) -> Any:
    """Double every leaf, and return the number of elements."""
    leaves = flatten(tree)[0]
    twice = map_leaves(lambda x: 2 * x, tree)
    return twice, sum(x.numel() for x in leaves if isinstance(x, torch.Tensor))


def map_doubled(**options: Any) -> Callable[[Any], Any]:
    value: dict[str, Any] = {"mesh": MESH, "in_specs": P("x"), "out_specs": (P("x"), None)}
    mapped: Callable[[Any], Any] = fs.shard_map(doubled, **(value | options))
    return mapped


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("redistribute", [True, False])
def test_calls_do_not_depend_on_earlier_calls(check: bool, redistribute: bool) -> None:
    options: dict[str, Any] = {"check": check, "redistribute_inputs": redistribute}
    used = map_doubled(**options)
    fresh = {
        name: outcome(lambda n=name: map_doubled(**options)(ARGUMENTS[n]())) for name in ARGUMENTS
    }  # type: ignore[misc]
    assert sum(isinstance(item, str) for item in fresh.values()) >= 4
    for name in (*ARGUMENTS, *reversed(ARGUMENTS)):
        assert outcome(lambda n=name: used(ARGUMENTS[n]())) == fresh[name], name  # type: ignore[misc]


def test_one_function_called_in_many_contexts() -> None:
    """Call it in this process, on ranks of several meshes, in bodies, with and without grad."""
    x = integers(4, 3).requires_grad_()
    used = map_doubled(mesh=None, axis_names={"x"}, check=False)

    def whole() -> Any:
        return map_doubled(check=False)(x)

    def inside(mesh: Mesh, f: Callable[[Any], Any]) -> Any:
        outer = fs.shard_map(
            lambda v: f(v)[0], mesh=mesh, axis_names={"y"}, in_specs=P(None, "y"),
            out_specs=P(None, "y"), check=False,
        )  # fmt: skip
        return outer(integers(4, 6).requires_grad_())

    meshes = [MESH, Mesh(x=4, y=3), Mesh({"y": 2, "x": 2}, devices=(3, 0, 1, 2))]
    fresh = map_doubled(mesh=None, axis_names={"x"}, check=False)
    wanted = [comparable(inside(mesh, fresh)) for mesh in meshes]
    for index, mesh in itertools.chain(enumerate(meshes), reversed(list(enumerate(meshes)))):
        assert comparable(inside(mesh, used)) == wanted[index]
        with torch.no_grad():
            assert comparable(inside(mesh, used))[0] == wanted[index][0]
    mapped = map_doubled(check=False)
    assert comparable(mapped(x)) == comparable(whole())
    on_ranks = fs.simulate(MESH, lambda: mapped(x)[0])
    assert all(torch.equal(item, 2 * x) for item in on_ranks)
    assert comparable(mapped(x)) == comparable(whole())


def test_missing_gradients_are_refused_after_calls_without_grad() -> None:
    p = P(unreduced={"x": "max"})
    mapped = fs.shard_map(torch.clone, mesh=MESH, in_specs=p, out_specs=p, check=False)
    x = integers(3)
    assert torch.equal(mapped(x), x)
    with torch.no_grad():
        assert torch.equal(mapped(x.requires_grad_()), x)
    with pytest.raises(ShardingError, match="must be sum or avg, which are linear; it is max"):
        mapped(x)


def test_structures_of_ranks_that_end_out_of_order() -> None:
    """The last rank to reach a collective is the first to go on."""

    def body(v: torch.Tensor) -> Any:
        total = fs.psum(v, "x")
        return (total,) if fs.axis_index("x") == 0 else total

    mapped = fs.shard_map(body, mesh=Mesh(x=2), in_specs=P("x"), out_specs=P(), check=False)
    with pytest.raises(ShardingError) as caught:
        mapped(integers(2))
    assert str(caught.value) == message(
        "shard_map(body)",
        "rank 0 returned PyTreeSpec((*,), NoneIsLeaf), rank 1 PyTreeSpec(*, NoneIsLeaf)",
        "every rank must return the same structure",
        "return the same tree on every rank",
    )


def test_uneven_results_of_ranks_that_end_out_of_order() -> None:
    """The ranks' shapes are read in every call."""
    spec = Spec(Mesh(x=2), P("x"), shape=(3,), dtype=F64, sizes={0: (1, 2)})

    def body(v: torch.Tensor, flip: bool) -> torch.Tensor:
        v = v + fs.psum(v[:0], "x").sum()
        return v.new_ones(3 - len(v)) if flip else v

    mapped = fs.shard_map(body, mesh=Mesh(x=2), in_specs=(spec, None), out_specs=spec, check=False)
    x = integers(3)
    assert torch.equal(mapped(x, flip=False), x)
    with pytest.raises(ShardingError, match=r"result: rank 0 returned shape \(2,\)"):
        mapped(x, flip=True)
    assert torch.equal(mapped(x, flip=False), x)


def test_arguments_and_results_share_no_memory() -> None:
    """Bodies that return their argument or a part of it return copies, in every call."""
    mapped = fs.shard_map(
        lambda v: (v, v[:1], v.detach(), v + 1), mesh=MESH, in_specs=P("x"), out_specs=P("x"),
        check=False,
    )  # fmt: skip
    for _ in range(3):
        pair = pair_of(integers(4, 3))
        for out in mapped(pair):
            for y in out.local:
                y.zero_()
        assert torch.equal(fs.unshard(pair), integers(4, 3))


def test_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many shapes of arguments and results keep every cache within its bound."""
    monkeypatch.setattr("fshard._util.cache.CACHE_SIZE", 4)
    sizes: list[int] = []

    def body(x: torch.Tensor) -> Any:
        return [x[:1].expand(sizes[-1] + index) for index in range(sizes[-1])]

    function = MappedFunction(
        body, "fs.shard_map", MESH, P("x"), P("x"), frozenset(),
        redistribute_inputs=False, check=False,
    )  # fmt: skip
    for length in (2, 4, 6, 8, 10, 12):
        for size in range(1, 7):
            sizes.append(size)
            results = function.call((torch.arange(float(length)),), {})
            assert [len(item) for item in results] == [2 * (size + index) for index in range(size)]
    caches = [item for item in vars(function).values() if isinstance(item, dict)]
    assert len(caches) == 5
    assert all(len(item) <= 4 for item in caches)
