"""`fs.testing.assert_layout`: accepted and refused layouts, the texts of failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs

MESH = fs.Mesh(dp=2, tp=2)
UNEVEN = fs.Spec(MESH, fs.P("dp"), shape=(8, 4), sizes={0: (3, 5)})


def pair(partition: fs.PartitionSpec) -> fs.Sharded:
    return fs.shard(torch.arange(32.0).view(8, 4), MESH, partition)


@pytest.mark.parametrize(
    "expected",
    ["f32[8@dp,4]", fs.P("dp"), fs.P("dp", None), fs.Spec(MESH, fs.P("dp"), shape=(8, 4))],
    ids=str,
)
@pytest.mark.parametrize("value", [pair(fs.P("dp")), pair(fs.P("dp")).spec], ids=["pair", "spec"])
def test_equal_layouts_pass(value: Any, expected: Any) -> None:
    fs.testing.assert_layout(value, expected)
    fs.testing.assert_layout([value, {"x": value}], expected)


@pytest.mark.parametrize(
    "expected",
    ["f32[8@tp,4]", "f64[8@dp,4]", "f32[8@dp,4]{unreduced: tp}", "f32[8@dp:3+5,4]", fs.P(), UNEVEN],
    ids=str,
)
def test_other_layouts_fail(expected: Any) -> None:
    with pytest.raises(AssertionError) as caught:
        fs.testing.assert_layout(pair(fs.P("dp")), expected)
    assert "value: layout f32[8@dp,4], expected " in str(caught.value)


def test_uneven_sizes_and_states_are_compared() -> None:
    fs.testing.assert_layout(UNEVEN, "f32[8@dp:3+5,4]")
    fs.testing.assert_layout(UNEVEN, fs.P("dp"))
    with pytest.raises(AssertionError):
        fs.testing.assert_layout(UNEVEN, "f32[8@dp,4]")


def test_every_leaf_that_differs_is_listed_and_two_pictures_drawn() -> None:
    tree = {"w": pair(fs.P("dp")), "b": [pair(fs.P("tp")), pair(fs.P())]}
    with pytest.raises(AssertionError) as caught:
        fs.testing.assert_layout(tree, {"w": "f32[8,4@tp]", "b": fs.P("tp")})
    text = str(caught.value)
    assert "value['w']: layout f32[8@dp,4], expected f32[8,4@tp]" in text
    assert "value['b'][1]: layout f32[8,4], expected f32[8@tp,4]" in text
    assert "value['b'][0]" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert any(line.startswith("layout  ") and "expected" in line for line in text.splitlines())


def test_other_meshes_fail() -> None:
    other = fs.Mesh(dp=2)
    with pytest.raises(AssertionError, match=r"on Mesh\(dp=2\), not on Mesh\(dp=2, tp=2\)"):
        fs.testing.assert_layout(pair(fs.P("dp")), fs.Spec(other, fs.P("dp"), shape=(8, 4)))


@pytest.mark.parametrize(
    ("value", "expected", "message"),
    [
        (torch.ones(2), "f32[2]", "value is a Tensor"),
        (pair(fs.P()), 3, "expected 3 for value"),
        (pair(fs.P()), "f32[8@dq,4]", "dq"),
        ({"w": pair(fs.P())}, {"v": fs.P()}, "expected has the keys"),
    ],
)
def test_malformed_calls_are_refused(value: Any, expected: Any, message: str) -> None:
    with pytest.raises(fs.ShardingError, match=message):
        fs.testing.assert_layout(value, expected)
