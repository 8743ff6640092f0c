"""What types refuse, in the words they refuse it; what `strict` and `values` add."""

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
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.spec_grid import message
from tests.spmd.tracking.test_tracking import add, fill

MESH = Mesh(x=2)
Body = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def call(body: Body, check: bool | str = True, out: Any = None) -> Any:
    """The body on a tensor that varies, an invariant one and one that is unreduced."""
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    w = torch.tensor([7.0, 8.0], requires_grad=True)
    u = torch.tensor([1.0, 1.0])

    def mapped(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> Any:
        made = body(x, w, u)
        return None if out is None else made

    specs = (P("x"), P(), P(unreduced={"x"}))
    return fs.shard_map(mapped, mesh=MESH, in_specs=specs, out_specs=out, check=check)(x, w, u)


def sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    SCRIPT = torch.jit.script(sine)
    MODULE = torch.jit.script(torch.nn.Tanh())


def here(body: Body) -> str:
    """The file and line of a body that is one line."""
    code = body.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


NOT_LINEAR = (
    "operands unreduced along x must enter linear operations: the sum over the axis is still to be taken, and "
    "the operation is not linear"
)
JOINTLY = (
    "the operands of a linear operation must all be unreduced along x by one reduction, or none: "
    "another is added once on every rank"
)
PRODUCT = (
    "operands unreduced along x must enter linear operations: a product of two sums is not the sum of "
    "the products"
)
SUM_FIRST = "fs.psum(operand, 'x') before"
OUTSIDE = (
    "a mapped function returns what it computes: arguments and closed-over tensors belong to all "
    "ranks"
)
CLONE = (
    "write into its clone(), and return that; of a module that keeps statistics: eval(), or "
    "track_running_stats=False"
)
U = "f32[2]{unreduced: x}"

# The body, the operation named, what was given, the rule, the fix.
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
        "its gradient is to be summed from here on, but not for what it was before",
        "compute a new tensor: add(x, ...) in place of add_",
    ),
    (
        lambda x, w, u: checkpoint(torch.sin, x, use_reentrant=True),
        "torch.utils.checkpoint", "use_reentrant=True",
        "what is computed again in backward is part of the graph that is typed",
        "use_reentrant=False",
    ),
    (
        lambda x, w, u: SCRIPT(x),
        "sine", "a function that TorchScript runs",
        "what runs in Python is typed; what a script computes is not seen",
        "the Python function that was scripted, or check=False",
    ),
    (
        lambda x, w, u: MODULE(x),
        "forward", "a function that TorchScript runs",
        "what runs in Python is typed; what a script computes is not seen",
        "the Python function that was scripted, or check=False",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "op", "given", "rule", "fix"), REFUSED)
def test_refused(body: Body, op: str, given: str, rule: str, fix: str) -> None:
    text = message(f"shard_map(mapped): {op} at {here(body)}", given, rule, fix)
    where = re.compile(re.escape(text).replace(re.escape(here(body)), r"[^ \n]*:\d+"))
    for check in (True, "values"):
        with pytest.raises(ShardingError) as error:
            call(body, check)
        assert where.fullmatch(str(error.value)), str(error.value)


def test_a_write_is_refused_before_it_is_done() -> None:
    w = torch.ones(2)

    def body(x: torch.Tensor) -> None:
        w.add_(x[0])

    f = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=None)
    with pytest.raises(ShardingError, match="a write into a tensor of shape"):
        f(torch.ones(2, 2))
    assert torch.equal(w, torch.ones(2))


def test_types_of_unreduced_pass_what_is_linear() -> None:
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


def test_strict_names_the_line_and_the_cast() -> None:
    body: Body = lambda x, w, u: w * x  # noqa: E731
    with pytest.raises(ShardingError) as error:
        call(body, "strict")
    assert str(error.value) == message(
        f"shard_map(mapped): mul at {here(body)}",
        "an operand f32[2] that requires grad, where the others are varying along x",
        "the operands agree along every axis; the gradient of this one is a sum over x, which "
        "check='strict' wants to see written",
        "fs.pcast(operand, 'x', to='varying'), or check=True, which inserts it",
    )
    call(lambda x, w, u: fs.pcast(w, "x", to="varying") * x, "strict")
    call(lambda x, w, u: w.detach() * x, "strict")


def test_strict_wants_the_source_of_a_cast_that_is_not_from_invariant() -> None:
    def body(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return fs.pcast(fs.all_gather(x, "x", to="reduced"), "x", to="varying")

    line = f"{body.__code__.co_filename}:{body.__code__.co_firstlineno + 1}"
    with pytest.raises(ShardingError) as error:
        call(body, "strict")
    assert str(error.value) == message(
        f"shard_map(mapped): fs.pcast at {line}",
        "an operand f32[2,1,2]{reduced: x} and no src",
        "what is not tracked is taken to be invariant, and its gradient summed: check='strict' "
        "passes what is the same with check=False",
        "fs.pcast(x, 'x', to='varying', src='reduced')",
    )
    call(body)


# -- values ------------------------------------------------------------------------------------


def parted(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2) if x[0, 0] > 1 else torch.ones(2)


def test_what_the_host_learns_is_compared() -> None:
    line = f"bool() at {parted.__code__.co_filename}:{parted.__code__.co_firstlineno + 1}"
    with pytest.raises(ShardingError) as error:
        call(parted, True, P())
    assert str(error.value) == message(
        "shard_map(mapped)",
        "result: element (0,) is 1.0 on rank 0 and 0.0 on rank 1",
        "what a spec leaves x out of is one value along it",
        "fs.psum or fs.pbroadcast over x, or name it in the spec; the ranks may have parted where "
        f"the host learnt of what varies: {line}",
    )
    # Where the ranks agree, the promise holds.
    same = call(lambda x, w, u: w * 1 if x[0, 0] > 0 else w, True, P())
    assert torch.equal(same, torch.tensor([7.0, 8.0]))


def test_arguments_that_differ_are_made_equal_before_the_call() -> None:
    mesh = Mesh(x=2, y=2)
    spec = fs.Spec(mesh, P("x"), shape=(2,))
    mapped = fs.shard_map(lambda v: v, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check="values")
    with pytest.raises(ShardingError) as error:
        mapped((tuple(torch.tensor([n]) for n in (1.0, 1.0, 2.0, 3.0)), spec))
    assert str(error.value) == message(
        "shard_map(<lambda>)",
        "v: element (0,) is 2.0 on rank 2 and 3.0 on rank 3",
        "what a spec leaves y out of is one value along it",
        "the same seed, or fs.pbroadcast(x, 'y', 0, mesh=mesh) before the call, or name it in the "
        "spec",
    )


# -- PyTorch -----------------------------------------------------------------------------------


def test_what_is_replaced_in_a_body_is_put_back() -> None:
    owners = [Function, torch.autograd, torch.nn.Parameter, torch.Tensor, torch.jit.ScriptFunction]
    before = [dict(vars(each)) for each in owners]
    inside: list[bool] = []

    def body(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> None:
        inside.extend(dict(vars(each)) != one for each, one in zip(owners, before, strict=True))
        raise KeyError

    with pytest.raises(KeyError):
        call(body)
    assert inside == [True] * len(owners)
    assert [dict(vars(each)) for each in owners] == before


class _Twice(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach() * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


def test_threads_that_map_at_once_share_what_is_replaced() -> None:
    before, wrong = Function.__dict__["apply"], []

    def body(x: torch.Tensor) -> torch.Tensor:
        if Function.__dict__["apply"] is before:
            wrong.append("a body that is not told of custom functions")
        made: torch.Tensor = _Twice.apply(x)  # type: ignore[no-untyped-call]
        return made

    f = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))

    def work() -> None:
        try:
            for _ in range(60):
                f(torch.ones(2))
        except AttributeError as error:
            wrong.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert Function.__dict__["apply"] is before
