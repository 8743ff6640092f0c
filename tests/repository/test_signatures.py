"""Calls that do not match a signature: the error names the rule and the intended option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from fshard._util.signatures import SignatureError, public_name

LINE = Mesh(x=2)
SPEC = fs.Spec(LINE, P("x"), shape=(4,))
X = torch.ones(4)


def functions() -> list[Callable[..., Any]]:
    """Return public functions and constructors with options and no further arguments."""
    values = [getattr(fs, name) for name in fs.__all__ if name != "ShardingError"]
    values += [getattr(fs.domain, name) for name in fs.domain.__all__]
    values += [getattr(fs.random, name) for name in fs.random.__all__]
    kinds = {
        value: [p.kind for p in inspect.signature(value).parameters.values()]
        for value in values if inspect.isfunction(value) or isinstance(value, type)
    }  # fmt: skip
    more, option = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.KEYWORD_ONLY
    return [value for value in kinds if option in kinds[value] and more not in kinds[value]]


@pytest.mark.parametrize("function", functions(), ids=lambda function: function.__name__)
def test_options_passed_by_position_are_named(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    args = [X] * (len(parameters) - len(options) + 1)
    with pytest.raises(
        SignatureError, match=rf"^fs\.[\w.]+\n  given: .*\n.*{options[0]}="
    ) as caught:
        function(*args)
    assert isinstance(caught.value, TypeError)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: fs.shard_map(abs, LINE, P("x"), P()),
            ("fs.shard_map\n"
            "  given: 4 positional arguments: <built-in function abs>, Mesh(x=2), P('x'), P()\n"
            "  rule:  only fn can be positional; options must be named: in_specs=, out_specs=, "
            "mesh=, axis_names=, redistribute_inputs=, check=\n"
            "  fix:   mesh=Mesh(x=2), in_specs=P('x'), out_specs=P()"),
        ),
        (
            lambda: fs.Spec(LINE, P(), (4,)),
            ("fs.Spec\n"
            "  given: 3 positional arguments: Mesh(x=2), P(), (4,)\n"
            "  rule:  only mesh, partition can be positional; options must be named: shape=, "
            "dtype=, sizes=, uneven=\n"
            "  fix:   shape=(4,)"),
        ),
        (
            lambda: fs.psum(torch.ones(1), "x", LINE),
            ("fs.psum\n"
            "  given: 3 positional arguments: tensor([1.]), 'x', Mesh(x=2)\n"
            "  rule:  only x, axis_name can be positional; options must be named: "
            "axis_index_groups=, forward_dtype=, backward_dtype=, mesh=\n"
            "  fix:   mesh=Mesh(x=2)"),
        ),
        (
            lambda: SPEC.replace(P()),
            ("fs.Spec.replace\n"
            "  given: 1 positional argument: P()\n"
            "  rule:  no argument can be positional; options must be named: partition=, shape=, "
            "dtype=, sizes=, uneven=, mesh=\n"
            "  fix:   partition=P()"),
        ),
        (
            lambda: fs.Spec(LINE, P(), shp=(4,)),
            ("fs.Spec\n"
            "  given: shp=(4,)\n"
            "  rule:  an option must be one of shape, dtype, sizes, uneven\n"
            "  fix:   did you mean 'shape'?\n\n"
            "  given: no shape\n"
            "  rule:  shape must be given\n"
            "  fix:   shape=..."),
        ),
        (
            lambda: fs.psum(axis_name="x"),
            ("fs.psum\n"
            "  given: no x\n"
            "  rule:  x must be given\n"
            "  fix:   x as argument 1"),
        ),
        (
            lambda: fs.unshard(X, 1),
            ("fs.unshard\n"
            f"  given: 2 positional arguments: {X!r}, 1\n"
            "  rule:  only pair can be positional\n"
            "  fix:   leave the last ones out"),
        ),
        (
            lambda: fs.shard(X),
            ("fs.shard\n"
            "  given: no spec\n"
            "  rule:  spec must be given\n"
            "  fix:   spec as argument 2"),
        ),
    ],
)  # fmt: skip
def test_text_of_a_call_that_does_not_match(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(SignatureError) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "call",
    [
        lambda: fs.Link(1e-6, 1e9, exchang=1e9),
        lambda: fs.Topology("two", fs.Link(1e-6, 1e9), node_sise=8),
        lambda: fs.AllGather(("x",), 0, too="reduced"),
    ],
)
def test_options_of_dataclasses_are_spelled(call: Callable[[], Any]) -> None:
    with pytest.raises(SignatureError, match=r"^fs\.\w+\n.*\n  rule:  an option must be .*"
                                             r"\n  fix:   did you mean '(\w+)'"):  # fmt: skip
        call()


@pytest.mark.parametrize(("option", "name"), [("topolgy", "topology"), ("async_opp", "async_op")])
def test_options_of_inner_functions_are_those_of_the_outer_one(option: str, name: str) -> None:
    options: Any = {option: None}
    with pytest.raises(SignatureError) as caught:
        fs.reshard(fs.shard(X, SPEC), P(), **options)
    assert str(caught.value) == (
        f"fs.reshard\n  given: {option}=None\n  rule:  an option must be one of async_op, "
        "topology, objective, max_memory, exclude, forward_dtype, backward_dtype, bucket_bytes\n"
        f"  fix:   did you mean '{name}'?"
    )


def test_functions_of_packages_are_named_with_them() -> None:
    names = ["psum", "zeros", "Spec.replace", "state.adamw", "testing.run_ranks", "random.normal"]
    assert [public_name(attrgetter(name)(fs)) for name in names] == [f"fs.{x}" for x in names]


def test_dims_of_pytorch_are_axes_of_jax() -> None:
    with pytest.raises(SignatureError, match=r"fix:   axis=1$"):
        fs.all_gather(X, "x", dim=1, mesh=LINE)  # type: ignore[call-arg]


def test_type_errors_of_the_users_function_are_kept() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine") as caught:
        fs.simulate(LINE, fn, X)
    assert not isinstance(caught.value, SignatureError)


@pytest.mark.parametrize(
    "cls", [fs.Auto, fs.CommLog, fs.LocalType, fs.Partition, fs.Pending, fs.Strategy]
)
def test_constructors_of_results_show_no_arguments(cls: Any) -> None:
    assert str(inspect.signature(cls)) == "(*_)"
    assert cls.__init__.__doc__.startswith("Call `fs.")
