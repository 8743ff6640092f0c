"""Places of operations in traces and errors: the user's lines, not those of modes around them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import Mesh, P
from fshard.partition.ir import Operation

MESH = Mesh(x=2)


class Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


MODES = [Functions, Operations]


def two_lines(x: Tensor) -> Tensor:
    y = x.sin()
    return y * x.sum()


def reads_a_value(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def line(fn: Callable[..., Any], number: int) -> str:
    """Return `file:line` of a line of a function, which counts from its `def`."""
    return f"{__file__}:{fn.__code__.co_firstlineno + number}"


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_places_are_those_of_the_calls_that_modes_override(mode: Any, within: bool) -> None:
    def part_of(fn: Callable[[Tensor], Tensor]) -> Any:
        def in_mode(x: Tensor) -> Tensor:
            with mode() if within else nullcontext():
                return fn(x)

        return fs.partition(in_mode, mesh=MESH, in_specs=P("x"))

    with nullcontext() if within else mode():
        made = part_of(two_lines).trace(torch.ones(4))
        with pytest.raises(fs.ShardingError) as caught:
            part_of(reads_a_value)(torch.ones(4))
    places = {node.place for node in made.lines if isinstance(node, Operation)}
    assert places == {line(two_lines, 1), line(two_lines, 2)}
    assert f" at {line(reads_a_value, 1)}\n" in str(caught.value)


class Fails(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise ValueError("not counted")


def test_error_of_a_mode_has_its_own_line() -> None:
    def fn(x: Tensor) -> Tensor:
        with Fails():
            return x.sin()

    with pytest.raises(fs.ShardingError) as caught:
        fs.partition(fn, mesh=MESH)(torch.ones(4))
    raised = line(Fails.__torch_function__, 3)
    assert f" at {raised}\n  given: ValueError: not counted" in str(caught.value)
