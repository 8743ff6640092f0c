"""`fs.testing.assert_like_one_device`: faults in values, gradients and second order are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs

MESH = fs.Mesh(dp=2, tp=2)
X = fs.shard(torch.linspace(-1, 2, 32, dtype=torch.float64).view(4, 8), MESH, fs.P("dp", "tp"))
W = fs.shard(torch.linspace(-2, 1, 32, dtype=torch.float64).view(8, 4), MESH, fs.P("tp"))


def mlp(x: Any, w: Any) -> Any:
    return torch.tanh(x @ w)


def sharded_mlp(x: Any, w: Any) -> Any:
    return fs.apply(torch.tanh, fs.apply(torch.matmul, x, w), mode="auto")


def mapped_mlp(scale: float = 1.0) -> Callable[..., Any]:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(scale * fs.psum(x @ w, "tp"))

    return fs.shard_map(
        body, mesh=MESH, in_specs=(fs.P("dp", "tp"), fs.P("tp")), out_specs=fs.P("dp")
    )


class WrongBackward(torch.autograd.Function):
    """tanh whose gradient is that of the identity, and whose values are right."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


@pytest.mark.parametrize("function", [sharded_mlp, mapped_mlp()], ids=["pairs", "map"])
def test_equal_functions_pass_to_second_order(function: Callable[..., Any]) -> None:
    fs.testing.assert_like_one_device(function, mlp, (X, W), second_order=True)


def test_trees_results_of_other_dtypes_and_other_leaves() -> None:
    fs.testing.assert_like_one_device(
        lambda tree, n: {
            "y": fs.apply(torch.mul, tree["x"], n),
            "best": fs.apply(torch.argmax, X, mode="auto"),
        },
        lambda tree, n: {"y": tree["x"] * n, "best": torch.argmax(fs.unshard(X))},
        ({"x": X}, 3),
    )


def test_wrong_values_fail_with_layouts() -> None:
    with pytest.raises(AssertionError) as caught:
        fs.testing.assert_like_one_device(mapped_mlp(1.5), mlp, (X, W))
    text = str(caught.value)
    for part in (
        "result: ",
        "gradient of args[1]: ",
        "args[0]: f64[4@dp,8@tp] on Mesh(dp=2, tp=2)",
    ):
        assert part in text


def test_wrong_gradients_fail_alone() -> None:
    def wrong(x: Any, w: Any) -> Any:
        return WrongBackward.apply(x @ w)

    with pytest.raises(AssertionError) as caught:
        fs.testing.assert_like_one_device(sharded_mlp, wrong, (X, W))
    assert "gradient of args[0]" in str(caught.value)
    assert "result" not in str(caught.value)
    fs.testing.assert_like_one_device(sharded_mlp, wrong, (X, W), gradients=False)


def test_tolerances_are_options() -> None:
    def near(x: Any, w: Any) -> Any:
        return mlp(x, w) * (1 + 1e-4)

    fs.testing.assert_like_one_device(sharded_mlp, near, (X, W), rtol=1e-3, atol=1e-3)
    with pytest.raises(AssertionError):
        fs.testing.assert_like_one_device(sharded_mlp, near, (X, W))


def test_other_structure_of_results_fails() -> None:
    with pytest.raises(AssertionError, match="result\\[0\\]"):
        fs.testing.assert_like_one_device(sharded_mlp, lambda x, w: (mlp(x, w),), (X, W))


def test_args_must_be_a_tuple() -> None:
    with pytest.raises(fs.ShardingError, match="args is a Sharded"):
        fs.testing.assert_like_one_device(sharded_mlp, mlp, X)  # type: ignore[arg-type]


def test_tolerances_come_together() -> None:
    with pytest.raises(fs.ShardingError, match="rtol and atol must be given together"):
        fs.testing.assert_like_one_device(sharded_mlp, mlp, (X, W), atol=1e-3)
