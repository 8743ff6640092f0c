"""`smap`: maps along one axis, with dims instead of specs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, ShardingError
from tests.helpers.spec_grid import message, random_global

MESH = Mesh(x=2, y=3)


def ints(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_global(shape, torch.float64, seed)


@pytest.mark.parametrize("dim", range(-3, 3))
def test_smap_shards_any_dim(dim: int) -> None:
    x = ints(6, 6, 6)
    shapes: list[tuple[int, ...]] = []

    @fs.smap(mesh=MESH, axis_name="y", in_axes=dim, out_axes=dim)
    def body(v: torch.Tensor) -> torch.Tensor:
        """Its docstring."""
        shapes.append(tuple(v.shape))
        return v * fs.axis_size("y")

    assert (body.__name__, body.__doc__) == ("body", "Its docstring.")
    assert torch.equal(body(x), 3 * x)
    assert set(shapes) == {tuple(2 if index == dim % 3 else 6 for index in range(3))}


def test_smap_axes_are_tree_prefixes() -> None:
    tree = {"a": ints(6, 4), "b": [ints(3, 9, seed=1), ints(9)]}
    w = ints(5)
    for in_axes in ((0, None), ({"a": 0, "b": 0}, None), ({"a": 0, "b": [0, -1]}, None)):
        mapped = fs.smap(
            lambda t, w: (t, w), mesh=MESH, axis_name="y", in_axes=in_axes, out_axes=in_axes
        )
        out, same = mapped(tree, w)
        assert torch.equal(out["a"], tree["a"])
        assert all(map(torch.equal, out["b"], tree["b"]))
        assert torch.equal(same, w)
    by_name = fs.smap(
        lambda v, n, w=None: v * n + w, mesh=MESH, axis_name="x",
        in_axes={"v": 1, "n": None, "w": -1}, out_axes=1,
    )  # fmt: skip
    x = ints(3, 4)
    assert torch.equal(by_name(x, 2, w=x), 3 * x)


def test_smap_nests_along_several_axes() -> None:
    x, w = ((ints(*shape) / 4).requires_grad_() for shape in ((4, 5), (5, 6)))

    def row(v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = fs.pcast(w, "x", to="varying")
        column = fs.smap(
            lambda v, w: (fs.pcast(v, "y", to="varying") @ w).tanh(), axis_name="y",
            in_axes=(None, -1), out_axes=-1,
        )  # fmt: skip
        return column(v, w)  # type: ignore[no-any-return]

    mapped = fs.smap(row, mesh=MESH, axis_name="x", in_axes=(0, None), out_axes=0)
    torch.testing.assert_close(mapped(x, w), (x @ w).tanh())
    expected = torch.autograd.grad(((x @ w).tanh() ** 2).sum(), (x, w))
    torch.testing.assert_close(torch.autograd.grad((mapped(x, w) ** 2).sum(), (x, w)), expected)


SMAP: list[tuple[dict[str, Any], Any, str]] = [
    (
        {"in_axes": 2},
        ints(6, 6),
        message(
            "smap(sin)",
            "args[0]: in_axes 2 for a tensor of 2 dims",
            "a dim must be in -2..1",
            "name a dim it has",
        ),
    ),
    (
        {"in_axes": -3},
        ints(6, 6),
        message(
            "smap(sin)",
            "args[0]: in_axes -3 for a tensor of 2 dims",
            "a dim must be in -2..1",
            "name a dim it has",
        ),
    ),
    (
        {"in_axes": None, "out_axes": -1},
        ints(6, 6).sum(),
        message(
            "smap(sin)",
            "result: out_axes -1 for a tensor of 0 dims",
            "a 0-dim tensor has no dims",
            "x[None], or out_axes None",
        ),
    ),
    (
        {"in_axes": 0.5},
        ints(6),
        message(
            "fs.smap",
            "in_axes of type float",
            "in_axes must be an int, None, a tuple by position, or a dict by name",
            "in_axes=(0, None)",
        ),
    ),
    (
        {"out_axes": (0, "x")},
        ints(6),
        message(
            "fs.smap",
            "out_axes[1]: 'x'",
            "a leaf of out_axes must be an int or None",
            "out_axes=0, or None",
        ),
    ),
    (
        {"axis_name": ("x", "y")},
        ints(6),
        message(
            "fs.smap",
            "axis_name=('x', 'y')",
            "axis_name must be a string: smap maps one axis",
            "axis_name='x', or fs.shard_map for several",
        ),
    ),
    (
        {"check": "all"},
        ints(6),
        message(
            "fs.smap",
            "check='all'",
            "check must be True, False, 'strict', 'values' or 'collectives'",
            "leave it out: True",
        ),
    ),
    (
        {},
        3,
        message(
            "smap(sin)",
            "args[0]: a value of type int with in_axes 0",
            "only tensors and pairs can be sharded",
            "torch.as_tensor(x) of an array; None, or P() for a number",
        ),
    ),
    (
        {},
        torch.ones(5),
        message(
            "smap(sin)",
            "args[0]: dim 0 of size 5 over x=2",
            "2 shards must divide the dim; 5 % 2 = 1",
            "fs.shard_map and a Spec with uneven='chunk' (shards of (3, 2)), sizes={0: (...)}, or "
            "pad the dim to 6",
        ),
    ),
]


@pytest.mark.parametrize("at", range(len(SMAP)))
def test_smap_errors(at: int) -> None:
    options, x, text = SMAP[at]
    value: dict[str, Any] = {"mesh": MESH, "axis_name": "x", "in_axes": 0, "out_axes": 0}
    with pytest.raises(ShardingError, match=re.escape(text) + "$"):
        fs.smap(torch.sin, **(value | options))(x)
