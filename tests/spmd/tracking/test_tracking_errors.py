"""Error texts of type tracking, and the checks that `"strict"` and `"values"` add."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import Function

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.spec_grid import message
from tests.helpers.spmd.tracked_bodies import MESH, add, fill

Body = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def call(body: Body, check: bool | str = True, out: Any = None) -> Any:
    """Run a body on a varying, an invariant and an unreduced tensor."""
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    w = torch.tensor([7.0, 8.0], requires_grad=True)
    u = torch.tensor([1.0, 1.0])

    def mapped(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> Any:
        result = body(x, w, u)
        return None if out is None else result

    specs = (P("x"), P(), P(unreduced={"x"}))
    return fs.shard_map(mapped, mesh=MESH, in_specs=specs, out_specs=out, check=check)(x, w, u)


def sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    SCRIPT = torch.jit.script(sine)
    MODULE = torch.jit.script(torch.nn.Tanh())


def here(body: Body) -> str:
    """Return file and line of a one-line body."""
    code = body.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


NOT_LINEAR = (
    "operands unreduced along x must enter linear operations: the sum over the axis is still to be "
    "taken, and the operation is not linear"
)
JOINTLY = (
    "the operands of a linear operation must all be unreduced along x by one reduction, or none: "
    "another is added once on every rank"
)
PRODUCT = (
    "operands unreduced along x must enter linear operations: a product of two sums is not the "
    "sum of the products"
)
SUM_FIRST = "fs.psum(operand, 'x') before"
OUTSIDE = "a body must not write into its arguments and closures, which all ranks share"
CLONE = (
    "write into its clone(), and return that; for a module with running statistics, eval() or "
    "track_running_stats=False"
)
U = "f32[2]{unreduced: x}"

# Body, operation, and the given, rule and fix of the error.
REFUSED: list[tuple[Body, str, str, str, str]] = [
    (lambda x, w, u: torch.sin(u), "sin", U, NOT_LINEAR, SUM_FIRST),
    (lambda x, w, u: u + w, "add", f"{U} and f32[2]", JOINTLY, SUM_FIRST),
    (lambda x, w, u: u + 1.0, "add", f"{U} and a number", JOINTLY, SUM_FIRST),
    (lambda x, w, u: torch.add(u, other=1.0), "add", f"{U} and a number", JOINTLY, SUM_FIRST),
    (lambda x, w, u: u.clone().subtract_(1), "subtract_", f"{U} and a number", JOINTLY, SUM_FIRST),
    (
        lambda x, w, u: u + np.float32(1),  # type: ignore[operator]
        "add", f"{U} and a number", JOINTLY, SUM_FIRST,
    ),
    (lambda x, w, u: torch.div(2.0, u), "div", U, NOT_LINEAR, SUM_FIRST),
    (
        lambda x, w, u: torch.divide(1.0, u),  # type: ignore[call-overload]
        "divide", U, NOT_LINEAR, SUM_FIRST,
    ),
    (lambda x, w, u: torch.true_divide(1.0, u), "true_divide", U, NOT_LINEAR, SUM_FIRST),
    (
        lambda x, w, u: torch.div(other=u, input=w),
        "div", f"f32[2] and {U}", JOINTLY, SUM_FIRST,
    ),
    (
        lambda x, w, u: torch.where(input=u, condition=w > 7, other=w),
        "where", f"bool[2] and {U} and f32[2]", JOINTLY, SUM_FIRST,
    ),
    (
        lambda x, w, u: u.type(torch.LongTensor),  # type: ignore[call-overload]
        "type", U, NOT_LINEAR, SUM_FIRST,
    ),
    (lambda x, w, u: u.type("torch.LongTensor"), "type", U, NOT_LINEAR, SUM_FIRST),
    (lambda x, w, u: u.type(torch.int64), "type", U, NOT_LINEAR, SUM_FIRST),
    (
        lambda x, w, u: torch.zeros(2, dtype=torch.int64).copy_(u),
        "copy_", U, NOT_LINEAR, SUM_FIRST,
    ),
    (lambda x, w, u: add(u, u), "add", f"{U} and {U}", NOT_LINEAR, SUM_FIRST),
    (
        lambda x, w, u: fill(x.detach()[0], w.detach()),
        "fill", "a write into a tensor of shape (2,) from outside of the body", OUTSIDE, CLONE,
    ),
    (lambda x, w, u: u * u, "mul", f"{U} and {U}", PRODUCT, SUM_FIRST),
    (lambda x, w, u: torch.div(u, 2.0, rounding_mode="floor"), "div", U, NOT_LINEAR, SUM_FIRST),
    (
        lambda x, w, u: torch.nn.functional.linear(u, w.expand(2, 2), w),
        "linear", f"{U} and f32[2,2] and f32[2]", NOT_LINEAR, SUM_FIRST,
    ),
    (lambda x, w, u: u.to(torch.int64), "to", U, NOT_LINEAR, SUM_FIRST),
    (lambda x, w, u: u.view(torch.int32), "view", U, NOT_LINEAR, SUM_FIRST),
    (
        lambda x, w, u: x.detach().add_(1),
        "add_", "a write into a tensor of shape (1, 2) from outside of the body", OUTSIDE,
        CLONE,
    ),
    (
        lambda x, w, u: torch.add(w.detach(), 1, out=w.detach()),
        "add", "a write into a tensor of shape (2,) from outside of the body", OUTSIDE,
        CLONE,
    ),
    (
        lambda x, w, u: (w * 1).copy_(w)[:1].add_(x[0, :1]),
        "add_", "a write of {varying: x} into f32[1], which requires grad",
        "a write must keep its target's states: the gradient would be summed from here on only",
        "compute a new tensor: add(x, ...) instead of add_",
    ),
    (
        lambda x, w, u: SCRIPT(x),
        "sine", "a TorchScript function",
        "a body must call Python functions, whose types can be tracked",
        "the Python function that was scripted, or check=False",
    ),
    (
        lambda x, w, u: MODULE(x),
        "forward", "a TorchScript function",
        "a body must call Python functions, whose types can be tracked",
        "the Python function that was scripted, or check=False",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "op", "given", "rule", "fix"), REFUSED)
def test_refused_bodies_name_operation_and_line(
    body: Body, op: str, given: str, rule: str, fix: str
) -> None:
    text = message(f"shard_map(mapped): {op} at {here(body)}", given, rule, fix)
    where = re.compile(re.escape(text).replace(re.escape(here(body)), r"[^ \n]*:\d+"))
    for check in (True, "values"):
        with pytest.raises(ShardingError) as error:
            call(body, check)
        assert where.fullmatch(str(error.value)), str(error.value)


def test_refused_write_changes_nothing() -> None:
    w = torch.ones(2)

    def body(x: torch.Tensor) -> None:
        w.add_(x[0])

    f = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=None)
    with pytest.raises(ShardingError, match="a write into a tensor of shape"):
        f(torch.ones(2, 2))
    assert torch.equal(w, torch.ones(2))


def test_linear_operations_keep_unreduced_states() -> None:
    def body(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> None:
        for y in (
            u + u, 2 * u, u @ w, -u, u.sum(), u[0], u.view(2, 1), torch.cat([u, u]), u / w,
            torch.nn.functional.linear(u, w.expand(2, 2)), u.to(torch.float64), u[[0, 0]],
            torch.where(w > 7, u, 0.0), u.type(torch.DoubleTensor),  # type: ignore[call-overload]
             torch.div(other=w, input=u),
            u.type("torch.DoubleTensor"), torch.zeros(2).copy_(u), u.clone().div_(2.0),
        ):  # fmt: skip
            assert fs.typeof(y).unreduced == ("x",)

    call(body)


# -- strict ------------------------------------------------------------------------------------


def test_strict_requires_explicit_casts() -> None:
    body: Body = lambda x, w, u: w * x  # noqa: E731
    with pytest.raises(ShardingError) as error:
        call(body, "strict")
    assert str(error.value) == message(
        f"shard_map(mapped): mul at {here(body)}",
        "an operand f32[2] that requires grad, while the others are varying along x",
        "the operands must agree along every axis; check='strict' requires a written cast, which "
        "sums the gradient over x",
        "fs.pcast(operand, 'x', to='varying'), or check=True, which inserts it",
    )
    call(lambda x, w, u: fs.pcast(w, "x", to="varying") * x, "strict")
    call(lambda x, w, u: w.detach() * x, "strict")


def test_strict_requires_src_of_casts_from_reduced() -> None:
    def body(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return fs.pcast(fs.all_gather(x, "x", to="reduced"), "x", to="varying")

    line = f"{body.__code__.co_filename}:{body.__code__.co_firstlineno + 1}"
    with pytest.raises(ShardingError) as error:
        call(body, "strict")
    assert str(error.value) == message(
        f"shard_map(mapped): fs.pcast at {line}",
        "an operand f32[2,1,2]{reduced: x} and no src",
        "src must be given: check=False assumes an invariant operand, sums the gradient, and must "
        "give the same result as check='strict'",
        "fs.pcast(x, 'x', to='varying', src='reduced')",
    )
    call(body)


# -- values ------------------------------------------------------------------------------------


def diverged(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2) if x[0, 0] > 1 else torch.ones(2)


def test_results_are_compared_after_the_host_read_varying_values() -> None:
    line = f"bool() at {diverged.__code__.co_filename}:{diverged.__code__.co_firstlineno + 1}"
    with pytest.raises(ShardingError) as error:
        call(diverged, True, P())
    assert str(error.value) == message(
        "shard_map(mapped)",
        "result: element (0,) is 1.0 on rank 0 and 0.0 on rank 1",
        "along x, which the spec omits, values must be equal",
        "fs.psum or fs.pbroadcast over x, or name it in the spec; the ranks may have diverged "
        f"where the host read varying values: {line}",
    )
    # Ranks that agree pass the comparison.
    result = call(lambda x, w, u: w * 1 if x[0, 0] > 0 else w, True, P())
    assert torch.equal(result, torch.tensor([7.0, 8.0]))


def test_check_values_compares_arguments() -> None:
    mesh = Mesh(x=2, y=2)
    spec = fs.Spec(mesh, P("x"), shape=(2,))
    mapped = fs.shard_map(lambda v: v, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check="values")
    with pytest.raises(ShardingError) as error:
        mapped((tuple(torch.tensor([n]) for n in (1.0, 1.0, 2.0, 3.0)), spec))
    assert str(error.value) == message(
        "shard_map(<lambda>)",
        "v: element (0,) is 2.0 on rank 2 and 3.0 on rank 3",
        "along y, which the spec omits, values must be equal",
        "the same seed, or fs.pbroadcast(x, 'y', 0, mesh=mesh) before the call, or name it in the "
        "spec",
    )


# -- PyTorch -----------------------------------------------------------------------------------


def test_patches_of_a_body_are_undone() -> None:
    owners = [Function, torch.autograd, torch.nn.Parameter, torch.Tensor, torch.jit.ScriptFunction]
    before = [dict(vars(owner)) for owner in owners]
    inside: list[bool] = []

    def body(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> None:
        inside.extend(
            dict(vars(owner)) != names for owner, names in zip(owners, before, strict=True)
        )
        raise KeyError

    with pytest.raises(KeyError):
        call(body)
    assert inside == [True] * len(owners)
    assert [dict(vars(owner)) for owner in owners] == before


class _Twice(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach() * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


def test_concurrent_bodies_share_patches() -> None:
    before, errors = Function.__dict__["apply"], []

    def body(x: torch.Tensor) -> torch.Tensor:
        if Function.__dict__["apply"] is before:
            errors.append("custom functions are not patched")
        doubled: torch.Tensor = _Twice.apply(x)  # type: ignore[no-untyped-call]
        return doubled

    f = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))

    def work() -> None:
        try:
            for _ in range(60):
                f(torch.ones(2))
        except AttributeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert Function.__dict__["apply"] is before
