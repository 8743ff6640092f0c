"""Tracebacks of errors: no frames of the library, the user's line last."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec
from fshard._util.tracebacks import hide_frames

MESH = Mesh(dp=2, tp=2)
X = torch.ones(4, 4)
SPEC = Spec(MESH, P("dp"), shape=(4, 4))
PAIR = fs.shard(X, SPEC)
PROG = fs.redistribute(SPEC, SPEC.replace(partition=P()))
BATCH = fs.redistribute([SPEC], [SPEC.replace(partition=P())])


def typo(x: torch.Tensor) -> torch.Tensor:
    return fs.psum(x, "tq")


def divide(x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError(x.shape)


def mapped(body: Callable[..., Any], value: Any = X, **options: Any) -> Any:
    return fs.shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"), **options)(value)


def error_of(call: Callable[[], Any]) -> Exception:
    """Return the error of a call."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any error
        call()
    return caught.value


def functions(error: BaseException) -> list[str]:
    """Return the functions in the traceback of an error, below the call in `error_of`."""
    frames = traceback.extract_tb(error.__traceback__)
    assert {frame.filename for frame in frames} == {__file__}
    names = [frame.name for frame in frames]
    assert names[0] == "error_of"
    return names[1:]


ERRORS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "body": (lambda: mapped(typo), ["<lambda>", "mapped", "typo"]),
    "unchecked body": (lambda: mapped(typo, check=False), ["<lambda>", "mapped", "typo"]),
    "body on pairs": (lambda: mapped(typo, PAIR), ["<lambda>", "mapped", "typo"]),
    "argument": (lambda: mapped(typo, torch.ones(3)), ["<lambda>", "mapped"]),
    "nested": (lambda: mapped(lambda x: mapped(typo, x)),
               ["<lambda>", "mapped", "<lambda>", "mapped"]),
    "backward": (lambda: mapped(lambda x: x.requires_grad_()[0].backward(X)),
                 ["<lambda>", "mapped", "<lambda>"]),
    "simulate": (lambda: fs.simulate(MESH, lambda: fs.psum(X, "tq", mesh=MESH)),
                 ["<lambda>", "<lambda>"]),
    "shard_map": (lambda: fs.shard_map(typo, mesh=3, in_specs=P(), out_specs=P()), ["<lambda>"]),
    "collective": (lambda: fs.psum(X, "dp"), ["<lambda>"]),
    "axis_index": (lambda: fs.axis_index("dp"), ["<lambda>"]),
    "shard": (lambda: fs.shard(X[:3], SPEC), ["<lambda>"]),
    "unshard": (lambda: fs.unshard(((X, X), SPEC)), ["<lambda>"]),
    "reshard": (lambda: fs.reshard(PAIR, P("tq")), ["<lambda>"]),
    "from_local": (lambda: fs.from_local((X, X), MESH, P("dp")), ["<lambda>"]),
    "apply": (lambda: fs.apply(torch.softmax, PAIR, 0), ["<lambda>"]),
    "on_pairs": (lambda: fs.on_pairs(torch.softmax)(PAIR, 0), ["<lambda>"]),
    "partition": (lambda: fs.partition(typo, mesh=MESH)(X), ["<lambda>", "typo"]),
    "redistribute": (lambda: fs.redistribute(SPEC, SPEC.replace(shape=(8, 4))), ["<lambda>"]),
    "program": (lambda: PROG((X, X)), ["<lambda>"]),
    "batch": (lambda: BATCH([(X, X)]), ["<lambda>"]),
    "parse": (lambda: fs.parse("f32[8@q]", MESH), ["<lambda>"]),
    "random": (lambda: fs.random.uniform(3, SPEC), ["<lambda>"]),
    "operator": (lambda: PAIR + 1, ["<lambda>"]),
    "method": (lambda: PAIR.sum(0), ["<lambda>"]),
    "no argument": (lambda: fs.rule(linear=()), ["<lambda>"]),  # type: ignore[call-arg]
    "no argument of the body": (lambda: mapped(lambda: X), ["<lambda>", "mapped"]),
    "no axis": (lambda: mapped(lambda x: fs.psum(x, to=3)),  # type: ignore[call-arg]
                ["<lambda>", "mapped", "<lambda>"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_traceback_ends_at_the_users_line(name: str) -> None:
    call, expected = ERRORS[name]
    assert functions(error_of(call)) == expected


@pytest.mark.parametrize(
    "call",
    [lambda: mapped(divide), lambda: fs.simulate(MESH, divide, X)],
    ids=["shard_map", "simulate"],
)
def test_users_own_error_loses_the_librarys_frames_alone(call: Callable[[], Any]) -> None:
    error = error_of(call)
    assert type(error) is ZeroDivisionError
    assert functions(error)[-1] == "divide"


def test_users_error_in_a_traced_function_is_the_cause() -> None:
    for call in (lambda: fs.partition(divide, mesh=MESH)(X), lambda: fs.apply(divide, PAIR)):
        error = error_of(call)
        assert functions(error) == ["<lambda>"]
        assert isinstance(error.__context__, ZeroDivisionError)
        assert [f.name for f in traceback.extract_tb(error.__context__.__traceback__)] == ["divide"]


@pytest.mark.parametrize("check", [True, False])
def test_errors_of_torch_end_in_the_users_operation(check: bool) -> None:
    for function in (lambda x: x @ torch.ones(3, 2), torch.nn.Linear(3, 3)):
        error = error_of(lambda function=function: mapped(function, check=check))
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        assert all(file == __file__ or "/torch/nn/" in file for file in files)


def test_environment_variable_shows_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSHARD_TRACEBACK", "full")
    files = [
        frame.filename for frame in traceback.extract_tb(error_of(ERRORS["body"][0]).__traceback__)
    ]
    assert files[-1].endswith("_util/errors.py")


def test_causes_of_the_user_are_kept() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        try:
            return typo(x)
        except ShardingError as error:
            raise KeyError("name") from error

    error = error_of(lambda: mapped(body))
    assert functions(error) == ["<lambda>", "mapped", "body"]
    assert isinstance(error.__cause__, ShardingError)
    frames = traceback.extract_tb(error.__cause__.__traceback__)
    assert [frame.name for frame in frames] == ["body", "typo"]


def test_errors_that_the_library_translates_are_not_shown() -> None:
    error = error_of(lambda: fs.shard_map(typo, mesh=MESH, in_specs={"x": [P()]}, out_specs=P())(X))
    assert error.__context__ is not None
    assert error.__suppress_context__
    try:
        divide(X)
    except ZeroDivisionError:
        error = error_of(lambda: fs.psum(X, "dp"))
    assert isinstance(error.__context__, ZeroDivisionError)
    assert not error.__suppress_context__


def test_bugs_of_the_library_keep_their_frames() -> None:
    scope: dict[str, Any] = {"__name__": "fshard.example"}
    exec("def bug():\n    raise IndexError", scope)
    error = error_of(scope["bug"])
    hide_frames(error)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "bug"
