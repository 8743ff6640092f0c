"""`assert_layout`: the layouts of pairs and specs, compared with their texts."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from fshard._util.errors import fail
from fshard._util.text import WIDTH
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import broadcast_prefix, flatten, paths, read_placements
from fshard.show.pictures.visualize import visualize

WHERE = "fs.testing.assert_layout"


def assert_layout(value: Any, expected: Any) -> None:
    """Assert that pairs or specs have the expected layouts.

    Args:
        value: a pair, a `Spec`, or a pytree of them.
        expected: the text of a spec as `str(spec)` prints it, a `Spec`, or a `P`, which leaves
            shape and dtype open, or DTensor's placements; or a pytree of these that is a prefix of
            `value`.

    Raises:
        AssertionError: a layout differs; the text has every layout that differs beside the expected
            one, and draws the first two.
        ShardingError: an expected text or tree is malformed, or a leaf has no layout.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(dp=2, tp=2)
    >>> x = fs.shard(torch.ones(8, 4), mesh, fs.P("dp"))
    >>> fs.testing.assert_layout(x, "f32[8@dp,4]")
    >>> fs.testing.assert_layout({"x": x}, {"x": fs.P("dp", None)})
    >>> fs.testing.assert_layout(x, "f32[8,4@tp]")
    Traceback (most recent call last):
    AssertionError: fs.testing.assert_layout
      value: layout f32[8@dp,4], expected f32[8,4@tp]
    <BLANKLINE>
    layout                                    expected
    f32[8@dp,4] on Mesh(dp=2, tp=2)           f32[8,4@tp] on Mesh(dp=2, tp=2)
    ● dp=2 shards dim 0   ▲ tp=2 invariant    ● dp=2 invariant   ▲ tp=2 shards dim 1
    ...
    """
    leaves, _ = flatten(value)
    mesh = next((leaf.mesh for leaf in leaves if isinstance(leaf, Spec | Sharded)), None)
    wanted = broadcast_prefix(read_placements(expected, mesh), value, "expected", WHERE)
    lines, drawn = [], ""
    for leaf, goal, path in zip(leaves, wanted, paths(value, "value"), strict=True):
        spec = _spec(leaf, path)
        target = _expected_spec(goal, spec, path)
        if target is not None and target != spec:
            lines.append(f"  {path}: layout {spec}, expected {_text(goal, target, spec)}")
            drawn = drawn or _side_by_side(spec, target)
    if lines:
        raise AssertionError("\n".join([WHERE, *lines, "", drawn]))


def _spec(leaf: Any, path: str) -> Spec:
    """Return the spec of a leaf."""
    if isinstance(leaf, Spec):
        return leaf
    if isinstance(leaf, Sharded):
        return leaf.spec
    fail(
        WHERE,
        f"{path} is a {type(leaf).__name__}",
        "the value must be a pair, a Spec, or a pytree of them",
        "fs.shard(tensor, spec), or the pair that a function returned",
    )


def _expected_spec(goal: Any, spec: Spec, path: str) -> Spec | None:
    """Return the expected spec, None for a P that the spec already has."""
    if isinstance(goal, Spec):
        return goal
    if isinstance(goal, str):
        return parse(goal, spec.mesh)
    if isinstance(goal, PartitionSpec):
        return spec.replace(partition=goal)
    fail(
        WHERE,
        f"expected {goal!r} for {path}",
        "an expected layout must be the text of a spec, a Spec or a P",
        f'fs.testing.assert_layout(x, "{spec}")',
    )


def _text(goal: Any, target: Spec, spec: Spec) -> str:
    """Return the text of an expected layout; meshes where they differ."""
    mesh = "" if target.mesh == spec.mesh else f" on {target.mesh}, not on {spec.mesh}"
    return f"{target}{mesh}"


def _side_by_side(spec: Spec, target: Spec) -> str:
    """Return the pictures of two layouts beside each other, in 80 columns."""
    half = WIDTH // 2 + 2
    columns = [
        [name, *visualize(value).text(half - 4).splitlines()]
        for name, value in (("layout", spec), ("expected", target))
    ]
    rows = zip_longest(*columns, fillvalue="")
    return "\n".join(f"{left:<{half}}{right}".rstrip() for left, right in rows)
