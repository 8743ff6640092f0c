"""Calls after calls of one mapped function: each is what the first call of another would be."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, Sharded, ShardingError, Spec
from fshard.spmd.mapped_function import MappedFunction
from tests.helpers.spec_grid import message, random_global

MESH = Mesh(x=2, y=2)
F64 = torch.float64


class Point(NamedTuple):
    a: Any
    b: Any


def ints(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_global(shape, F64, seed)


def pair_of(x: torch.Tensor, *dims: Any, **options: Any) -> Sharded:
    p = P(*dims or "x")
    spec = Spec(Mesh(x=2, y=2), p, shape=x.shape, dtype=x.dtype, **options)
    return fs.shard(x, spec)


def wrong(pair: Sharded) -> Sharded:
    """Its last shard is too long."""
    return Sharded((*pair.local[:-1], torch.ones(9, 3, dtype=F64)), pair.spec)


ARGUMENTS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: ints(4, 3),
    "other shape": lambda: ints(8, 3),
    "other dtype": lambda: ints(4, 3).float(),
    "does not divide": lambda: ints(5, 3),
    "requires grad": lambda: ints(4, 3).requires_grad_(),
    "pair": lambda: pair_of(ints(4, 3)),
    "pair, a tuple": lambda: tuple(pair_of(ints(4, 3))),
    "pair of a list": lambda: Sharded(list(pair_of(ints(4, 3)).local), pair_of(ints(4, 3)).spec),
    "pair along y": lambda: pair_of(ints(4, 3), "y"),
    "uneven pair": lambda: pair_of(ints(5, 3), sizes={0: (3, 2)}),
    "uneven the other way": lambda: pair_of(ints(5, 3), sizes={0: (2, 3)}),
    "not of its spec": lambda: wrong(pair_of(ints(4, 3))),
    "too few shards": lambda: Sharded(pair_of(ints(4, 3)).local[:3], pair_of(ints(4, 3)).spec),
    "no local": lambda: Sharded(None, pair_of(ints(4, 3)).spec),
    "dict": lambda: {"b": ints(4), "a": pair_of(ints(4, 3))},
    "dict in order": lambda: {"a": pair_of(ints(4, 3)), "b": ints(4)},
    "ordered dict": lambda: OrderedDict(b=ints(4), a=ints(4, 3)),
    "keys that are numbers": lambda: {2: ints(4), 1: ints(4, 3)},
    "list": lambda: [ints(4), [ints(4, 3)]],
    "tuple": lambda: (ints(4), ints(4, 3)),
    "named tuple": lambda: Point(ints(4), pair_of(ints(4, 3))),
    "empty": lambda: {"a": [], "b": {}, "c": ()},
    "a number": lambda: 3,
}


def outcome(call: Callable[[], Any]) -> Any:
    """What comes of a call, as values that can be compared."""
    try:
        return written(call())
    except ShardingError as error:
        return str(error)


def written(value: Any) -> Any:
    if isinstance(value, Sharded):
        return "pair", str(value.spec), written(value.local)
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.dtype, value.requires_grad
    if isinstance(value, dict):
        return type(value), [(key, written(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [written(each) for each in value]
    return value


def doubled(tree: Any) -> Any:
    """The same structure, with a number that tells how many elements there are."""
    leaves = fs.tree.flatten(tree)[0]
    twice = fs.tree.map_leaves(lambda x: 2 * x, tree)
    return twice, sum(x.numel() for x in leaves if isinstance(x, torch.Tensor))


def make(**options: Any) -> Callable[[Any], Any]:
    given: dict[str, Any] = {"mesh": MESH, "in_specs": P("x"), "out_specs": (P("x"), None)}
    mapped: Callable[[Any], Any] = fs.shard_map(doubled, **(given | options))
    return mapped


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("redistribute", [True, False])
def test_a_call_does_not_depend_on_those_before(check: bool, redistribute: bool) -> None:
    options: dict[str, Any] = {"check": check, "redistribute_inputs": redistribute}
    used = make(**options)
    fresh = {name: outcome(lambda n=name: make(**options)(ARGUMENTS[n]())) for name in ARGUMENTS}  # type: ignore[misc]
    assert sum(isinstance(each, str) for each in fresh.values()) >= 4
    for name in (*ARGUMENTS, *reversed(ARGUMENTS)):
        assert outcome(lambda n=name: used(ARGUMENTS[n]())) == fresh[name], name  # type: ignore[misc]


def test_one_function_where_calls_are_made() -> None:
    """In this process, on ranks of several meshes, in bodies, with gradients and without."""
    x = ints(4, 3).requires_grad_()
    used = make(mesh=None, axis_names={"x"}, check=False)

    def whole() -> Any:
        return make(check=False)(x)

    def inside(mesh: Mesh, f: Callable[[Any], Any]) -> Any:
        outer = fs.shard_map(
            lambda v: f(v)[0], mesh=mesh, axis_names={"y"}, in_specs=P(None, "y"),
            out_specs=P(None, "y"), check=False,
        )  # fmt: skip
        return outer(ints(4, 6).requires_grad_())

    meshes = [MESH, Mesh(x=4, y=3), Mesh({"y": 2, "x": 2}, devices=(3, 0, 1, 2))]
    fresh = make(mesh=None, axis_names={"x"}, check=False)
    wanted = [written(inside(mesh, fresh)) for mesh in meshes]
    for at, mesh in itertools.chain(enumerate(meshes), reversed(list(enumerate(meshes)))):
        assert written(inside(mesh, used)) == wanted[at]
        with torch.no_grad():
            assert written(inside(mesh, used))[0] == wanted[at][0]
    mapped = make(check=False)
    assert written(mapped(x)) == written(whole())
    on_ranks = fs.simulate(MESH, lambda: mapped(x)[0])
    assert all(torch.equal(each, 2 * x) for each in on_ranks)
    assert written(mapped(x)) == written(whole())


def test_gradients_that_are_not_there_are_seen_in_later_calls() -> None:
    p = P(unreduced={"x": "max"})
    mapped = fs.shard_map(torch.clone, mesh=MESH, in_specs=p, out_specs=p, check=False)
    x = ints(3)
    assert torch.equal(mapped(x), x)
    with torch.no_grad():
        assert torch.equal(mapped(x.requires_grad_()), x)
    with pytest.raises(ShardingError, match="is unreduced by max has no gradient of its own"):
        mapped(x)


def test_ranks_that_end_out_of_order_are_told_apart() -> None:
    """The last to come to a collective is the first to go on."""

    def body(v: torch.Tensor) -> Any:
        total = fs.psum(v, "x")
        return (total,) if fs.axis_index("x") == 0 else total

    mapped = fs.shard_map(body, mesh=Mesh(x=2), in_specs=P("x"), out_specs=P(), check=False)
    with pytest.raises(ShardingError) as caught:
        mapped(ints(2))
    assert str(caught.value) == message(
        "shard_map(body)",
        "rank 0 returned PyTreeSpec((*,), NoneIsLeaf), rank 1 PyTreeSpec(*, NoneIsLeaf)",
        "every rank must return the same structure",
        "return the same tree on every rank",
    )


def test_uneven_results_of_ranks_that_end_out_of_order() -> None:
    """Which rank has which shape is seen anew in every call."""
    spec = Spec(Mesh(x=2), P("x"), shape=(3,), dtype=F64, sizes={0: (1, 2)})

    def body(v: torch.Tensor, flip: bool) -> torch.Tensor:
        v = v + fs.psum(v[:0], "x").sum()
        return v.new_ones(3 - len(v)) if flip else v

    mapped = fs.shard_map(body, mesh=Mesh(x=2), in_specs=(spec, None), out_specs=spec, check=False)
    x = ints(3)
    assert torch.equal(mapped(x, flip=False), x)
    with pytest.raises(ShardingError, match=r"result: rank 0 returned shape \(2,\)"):
        mapped(x, flip=True)
    assert torch.equal(mapped(x, flip=False), x)


def test_arguments_and_results_share_no_memory() -> None:
    """Not with a body that hands on what it was given, or a part of it, in any call."""
    mapped = fs.shard_map(
        lambda v: (v, v[:1], v.detach(), v + 1), mesh=MESH, in_specs=P("x"), out_specs=P("x"),
        check=False,
    )  # fmt: skip
    for _ in range(3):
        pair = pair_of(ints(4, 3))
        for out in mapped(pair):
            for y in out.local:
                y.zero_()
        assert torch.equal(fs.unshard(pair), ints(4, 3))


def test_what_is_kept_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many shapes of arguments, and of results for each: one bound for either, not for both."""
    monkeypatch.setattr("fshard._util.cache.CACHE_SIZE", 4)
    sizes: list[int] = []

    def body(x: torch.Tensor) -> Any:
        return [x[:1].expand(sizes[-1] + at) for at in range(sizes[-1])]

    function = MappedFunction(
        body, "fs.shard_map", MESH, P("x"), P("x"), frozenset(),
        redistribute_inputs=False, check=False,
    )  # fmt: skip
    for length in (2, 4, 6, 8, 10, 12):
        for size in range(1, 7):
            sizes.append(size)
            found = function.call((torch.arange(float(length)),), {})
            assert [len(each) for each in found] == [2 * (size + at) for at in range(size)]
    kept = [each for each in vars(function).values() if isinstance(each, dict)]
    assert len(kept) == 6
    assert all(len(each) <= 4 for each in kept)
