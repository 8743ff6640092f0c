"""Errors of fs.partition: functions, layouts, arguments and constraints that are refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from fshard.partition.partition import Partition
from tests.helpers.custom_functions import SavesInputs
from tests.helpers.ops.block_cases import (
    MESH,
    sample,
)

VALUES = (
    "the function is traced once on tensors without values, of the global shapes",
    ("torch.where instead of masks and branches on values, counts by one_hot; checks before the "
     "call, and numbers as arguments, int(n.max()); buffers and constants that it reads closed "
     "over; no random branches, as encoder_layerdrop=0.0; validate_args=False of a distribution "
     "with a covariance"),
)  # fmt: skip


def branches(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def selects(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].sum()


def multiplies(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(3, 3)


@pytest.mark.parametrize(
    ("fn", "cause", "rule", "fix"),
    [
        (branches, "__bool__ reads a tensor's values, which depend on args[0]", *VALUES),
        (selects, "aten.nonzero.default returns a shape that depends on a tensor's values",
         VALUES[0], ("fs.nonzero(x, size=n); in place of x[mask] fs.masked_select(x, mask, "
         "size=n); or fs.shard_map within the function, whose body runs on locals; "
         "fs.apply(op, pair, mode=\"auto\") runs one on unsharded values")),
        (multiplies, "RuntimeError: a and b must have same reduction dim, but got [2, 2] X [3, 3].",
         "the function is traced once on tensors of the global shapes",
         "check that it runs on global tensors, and calls no numpy() on them"),
    ],
)  # fmt: skip
def test_trace_error_names_the_line(
    fn: Any, cause: str, rule: str, fix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(fs.ShardingError) as error:
        fs.partition(fn, mesh=MESH)(torch.ones(2, 2))
    line = f"{__file__}:{fn.__code__.co_firstlineno + 1}"
    assert str(error.value) == (
        f"fs.partition({fn.__name__}) at {line}\n  given: {cause}\n  rule:  {rule}\n  fix:   {fix}"
    )
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


def test_calls_that_do_not_match_the_signature() -> None:
    x, net = torch.ones(4, 4), torch.nn.Linear(4, 4)
    params, scaled = dict(net.named_parameters()), lambda x, w, *, scale=1.0: scale * x @ w
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any], str, str]] = [
        (scaled, (x,), {}, "missing a required argument: 'w'", "change the call"),
        (scaled, (x, x, x), {}, "too many positional arguments", "change the call"),
        (scaled, (x, x), {"scal": 2.0}, "unexpected keyword argument 'scal'", "'scale'"),
        (net, (x,), {}, "missing a required argument: 'input'", "part(dict(module.named_param"),
        (net, (params, x, x), {}, "too many positional", "part(dict(module.named_parameters()"),
    ]
    for fn, args, kwargs, given, fix in cases:
        with pytest.raises(TypeError, match=rf"given: .*{given}(.|\n)*fix: .*{re.escape(fix)}"):
            fs.partition(fn, mesh=MESH)(*args, **kwargs)
    for arguments in ([x], [params], [params, x, x]):
        with pytest.raises(fs.ShardingError, match=r"\(params, input\)\n.*fs.auto\(module, mesh"):
            fs.auto(net, MESH, arguments)


def test_refused_functions_and_layouts() -> None:
    part = fs.partition(lambda x: x.sum().item(), mesh=MESH)
    with pytest.raises(fs.ShardingError, match="traced once on tensors without values"):
        part(torch.ones(2))
    part = fs.partition(lambda x: x + torch.rand(2), mesh=MESH)
    with pytest.raises(fs.ShardingError, match=r"at .*errors.py:\d+\n(.*\n)+.*draws must be keyed"):
        part(torch.ones(2))
    part = fs.partition(lambda x: x + 1, mesh=MESH, in_specs=(P("dp"),))
    pair = fs.shard(torch.ones(4), fs.Spec(MESH, P("tp"), shape=(4,)))
    with pytest.raises(fs.ShardingError, match="the function requires"):
        part(pair)


def test_sharded_arrays_are_refused() -> None:
    array = np.ones((4, 2), dtype=np.float32)
    scale = fs.partition(
        lambda x, y: x * torch.as_tensor(y), mesh=MESH, in_specs=(P("dp"), P("dp"))
    )
    with pytest.raises(
        fs.ShardingError, match=r"args\[1\]: a value of type ndarray with P\('dp'\)"
    ):
        scale(torch.ones(4, 2), array)
    scale = fs.partition(lambda x, y: x * torch.as_tensor(y), mesh=MESH, in_specs=(P("dp"), None))
    assert torch.equal(scale(torch.ones(4, 2), array * 3), torch.full((4, 2), 3.0))
    with pytest.raises(fs.ShardingError, match="arguments of the types ndarray"):
        fs.partition(torch.relu, mesh=MESH)(array)


@dataclass
class Result:
    loss: torch.Tensor


CACHE: list[torch.Tensor] = []


def collects(x: torch.Tensor) -> torch.Tensor:
    CACHE.append(x * 2)
    return x.sum()


class Box:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


@pytest.mark.searches_heap
def test_tensors_in_objects_and_leaked_tensors_are_refused() -> None:
    part = fs.partition(lambda x: Result(x.sum()), mesh=MESH)
    rule = (
        "\n  rule:  tensors must be in tuples, lists, dicts, and instances of registered classes "
        "to be found"
    )
    rest = f"{rule}\n  fix:   torch.export.register_dataclass(Result), once, before the call"
    head = "fs.partition(<lambda>)\n  given: "
    assert error_of(part, torch.ones(2)) == f"{head}result is a Result, with tensors in it{rest}"
    part = fs.partition(lambda x, y: x * y["a"].loss, mesh=MESH)
    keywords = torch.ones(2), {"a": Result(torch.ones(2))}
    assert error_of(part, *keywords) == f"{head}args[1]['a'] is a Result, with tensors in it{rest}"
    assert error_of(fs.partition(lambda x: Box(x.sum()), mesh=MESH), torch.ones(2)) == (
        f"{head}result is a Box, with tensors in it{rule}"
        "\n  fix:   a dict of them: vars(...) of an object"
    )
    assert error_of(fs.partition(collects, mesh=MESH), torch.ones(2)) == (
        "fs.partition(collects)\n"
        "  given: a result of mul is kept outside of the function\n"
        "  rule:  the function is traced once on tensors without values, which are of no use "
        "after it\n"
        "  fix:   return it; a value that a module or a cache keeps is removed there, and computed "
        "before by a call on global tensors"
    )
    CACHE.clear()
    rule = "an argument's container must keep its tensors: a copy of it is traced"
    part = fs.partition(lambda d: d.update(a=d["a"] * 2, b=d["a"]), mesh=MESH)
    assert error_of(part, {"a": torch.ones(2)}) == (
        "fs.partition(<lambda>)\n"
        "  given: args[0]['a'], which the function replaces by another tensor\n"
        f"  rule:  {rule}\n"
        "  fix:   args[0]['a'].copy_(new), which writes in place, or return the new tensor\n\n"
        "  given: args[0]['b'], a tensor that the function adds\n"
        f"  rule:  {rule}\n"
        "  fix:   return the new tensor"
    )


def error_of(part: Partition, *args: Any) -> str:
    """Return the text of the error that a call raises."""
    with pytest.raises(fs.ShardingError) as caught:
        part(*args)
    return str(caught.value)


def test_errors_name_the_argument_or_result() -> None:
    x = torch.ones(3, 4)
    part = fs.partition(lambda *xs: xs, mesh=MESH, in_specs=(P("dp"), P("zz"), P()))
    assert error_of(part, x, x, x) == (
        "fs.partition(<lambda>)\n"
        "  given: args[0]: P('dp'), dim 0 of size 3 over dp=2\n"
        "  rule:  2 shards must divide the dim; 3 % 2 = 1\n"
        "  fix:   a Spec in in_specs with uneven='chunk' (shards of (2, 1)), sizes={0: (...)}, "
        "or pad the dim to 4\n\n"
        "  given: args[1]: P('zz'), axis 'zz' on Mesh(dp=2, tp=2)\n"
        "  rule:  an axis must be one of dp, tp\n"
        "  fix:   use one of dp, tp"
    )
    part = fs.partition(lambda x: (x, x * 2), mesh=MESH, out_specs=(P(), P("zz")))
    assert error_of(part, x) == (
        "fs.partition(<lambda>): out_specs\n"
        "  given: result 1: P('zz'), axis 'zz' on Mesh(dp=2, tp=2)\n"
        "  rule:  an axis must be one of dp, tp\n"
        "  fix:   use one of dp, tp"
    )
    for result in (2, "a"):
        part = fs.partition(lambda x, y=result: (x, y), mesh=MESH, out_specs=P("dp"))
        assert error_of(part, x.T) == (
            "fs.partition(<lambda>): out_specs\n"
            f"  given: result 1: a {type(result).__name__} with the out spec P('dp')\n"
            "  rule:  only tensors can be sharded, and only tensors and numbers have P()\n"
            "  fix:   None, or P() for a number"
        )
    pair = fs.shard(torch.ones(4), fs.Spec(Mesh(a=2), P("a"), shape=(4,)))
    assert error_of(fs.partition(lambda x: x, mesh=MESH), pair) == (
        "fs.partition(<lambda>)\n"
        "  given: args[0]: f32[4@a] on Mesh(a=2)\n"
        "  rule:  the function runs on Mesh(dp=2, tp=2)\n"
        "  fix:   fs.reshard(pair, spec) with a spec on that mesh"
    )
    assert error_of(fs.partition(torch.nn.Linear(4, 4), mesh=MESH), x, x) == (
        "fs.partition(Linear)\n"
        "  given: a first argument that is not a dict\n"
        "  rule:  a module must be called with a dict of its parameters first\n"
        "  fix:   part(dict(module.named_parameters()), *args)"
    )


def test_invalid_constraints_name_their_line() -> None:
    def axis(x: torch.Tensor) -> torch.Tensor:
        return fs.constrain(x * 2, P("zz")) + 1

    def dims(x: torch.Tensor) -> torch.Tensor:
        return fs.constrain(x * 2, P(None, "dp")) + 1

    line = f"fs.constrain at {__file__}:{axis.__code__.co_firstlineno + 1}"
    assert error_of(fs.partition(axis, mesh=MESH), torch.ones(4)) == (
        f"{line}\n"
        "  given: axis 'zz' on Mesh(dp=2, tp=2)\n"
        "  rule:  an axis must be one of dp, tp\n"
        "  fix:   use one of dp, tp"
    )
    line = f"fs.constrain at {__file__}:{dims.__code__.co_firstlineno + 1}"
    assert error_of(fs.partition(dims, mesh=MESH), torch.ones(4)) == (
        f"{line}\n"
        "  given: P(None, 'dp') for f32[4]: P(None, 'dp') with 2 entries for shape (4,)\n"
        "  rule:  a tensor of 1 dims must have at most 1 entries\n"
        "  fix:   drop 1 of them, trailing None too"
    )


def test_constraint_chunks_a_dim_it_does_not_divide() -> None:
    x = sample(5, 3).detach()
    part = fs.partition(lambda x: fs.constrain(x * 2, P("dp")) + 1, mesh=MESH)
    result = part(fs.shard(x, fs.Spec(MESH, P(), shape=x.shape, dtype=x.dtype)))
    assert str(result.spec) == "f64[5@dp:chunk,3]"
    torch.testing.assert_close(fs.unshard(result), x * 2 + 1)


def test_sparse_tensors_are_passed_along_alone() -> None:
    mask, x = torch.eye(4).to_sparse(), torch.ones(4, 4)
    part = fs.partition(lambda p, x: p["w"] * x, mesh=MESH, in_specs=(P(), P("dp")))
    for unused in (mask, torch.eye(2).to_sparse()):
        torch.testing.assert_close(part({"w": torch.ones(4), "mask": unused}, x), x)
    rule = (
        "  rule:  the tensors of a partitioned function must be dense\n"
        "  fix:   x.to_dense() before the call; or fs.shard_map, whose function runs on locals"
    )
    given = "fs.partition\n  given: {} with a tensor of torch.sparse_coo\n" + rule
    fns: dict[str, Any] = {
        "mm": lambda m, x: m @ x,
        "_to_sparse": lambda m, x: x.to_sparse().to_dense(),
        "return": lambda m, x: (m, x),
    }
    for name, fn in fns.items():
        assert error_of(fs.partition(fn, mesh=MESH), mask, x) == given.format(name)
    mapped = fs.shard_map(lambda x: mask @ x, mesh=MESH, in_specs=P(None, "dp"),
                          out_specs=P(None, "dp"))  # fmt: skip
    torch.testing.assert_close(mapped(x), x)
    assert error_of(fs.partition(lambda m, x: x, mesh=MESH, in_specs=P("dp")), mask, x) == (
        "fs.partition(<lambda>)\n"
        "  given: args[0]: P('dp') for a tensor of torch.sparse_coo\n"
        "  rule:  a tensor that is sharded must be dense\n"
        "  fix:   x.to_dense(), or None in its place"
    )


def test_sparse_operands_of_single_calls_are_refused() -> None:
    mask, x = torch.eye(4).to_sparse(), fs.shard(torch.ones(4, 4), MESH, P("dp"))
    for call in (lambda: fs.shard(mask, x.spec), lambda: fs.apply(torch.mm, mask, x)):
        with pytest.raises(fs.ShardingError, match="a tensor that is sharded must be dense"):
            call()


class _Averages(torch.nn.Module):
    """Module that assigns a buffer, or writes it."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = 0.9 * self.mean + 0.1 * x.mean(0)
        if self.writes:
            self.mean.copy_(new)
        else:
            self.mean = new
        return (x - self.mean).square().sum()


def test_tensors_put_into_an_argument_are_refused() -> None:
    """They would be lost: the containers of arguments are copied for the trace."""

    def partitioned(*, writes: bool) -> fs.Partition:
        module = _Averages(writes=writes)
        return fs.partition(lambda p, x: torch.func.functional_call(module, p, (x,)), mesh=MESH)

    buffers, x = {"mean": torch.zeros(4)}, torch.ones(4, 4)
    with pytest.raises(fs.ShardingError) as error:
        partitioned(writes=False)(buffers, x)
    assert "given: args[0]['mean'], which the function replaces" in str(error.value)
    partitioned(writes=True)(buffers, x)  # the fix
    torch.testing.assert_close(buffers["mean"], torch.full((4,), 0.1))


PROGRAM = fs.redistribute(*(fs.Spec(Mesh(x=2), p, shape=(4,)) for p in (P(unreduced={"x"}), P())))


@pytest.mark.parametrize(
    "collective",
    [lambda x: fs.psum(x, "x", mesh=Mesh(x=2)), lambda x: fs.all_gather(x, "x", mesh=Mesh(x=2)),
     lambda x: x + fs.axis_index("x", mesh=Mesh(x=2)),
     lambda x: fs.from_local(x, Mesh(x=2), P("x")).local,
     PROGRAM],
    ids=["psum", "all_gather", "axis_index", "from_local", "program"],
)  # fmt: skip
@pytest.mark.parametrize("requires_grad", [False, True])
def test_collectives_in_a_traced_function_are_refused(collective: Any, requires_grad: bool) -> None:
    part = fs.partition(lambda x: collective(x * 2), mesh=Mesh(x=2))
    with pytest.raises(fs.ShardingError, match=r"of Mesh\(x=2\) in a function that is traced"):
        fs.simulate(Mesh(x=2), part, torch.ones(4, requires_grad=requires_grad))


def test_collectives_of_torch_name_those_of_fshard() -> None:
    def reduced(x: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(x.clone())
        return x

    x, fix = torch.ones(4), r"  fix:   fs.psum\(x, axis\) in the place of torch.distributed"
    with pytest.raises(fs.ShardingError, match=fix):
        fs.partition(reduced, mesh=MESH)(x)
    body = fs.shard_map(reduced, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))
    with pytest.raises(ValueError, match="process group") as error:
        body(x)
    assert any(re.search(fix, note) for note in error.value.__notes__)


@pytest.mark.parametrize("is_argument", [False, True])
def test_backwards_that_close_over_tensors_of_transforms(is_argument: bool) -> None:
    def sine_of(closed: torch.Tensor | None) -> Any:
        class Sine(SavesInputs):
            @staticmethod
            def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                return x.sin()

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                x, w = ctx.saved_tensors
                return grads[0] * x.cos() * (w if closed is None else closed), None

            @staticmethod
            def jvp(ctx: Any, *tangents: Any) -> Any:
                x, w = ctx.saved_tensors
                return tangents[0] * x.cos() * (w if closed is None else closed)

        return Sine

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scale = w.exp()
        y: torch.Tensor = sine_of(None if is_argument else scale).apply(x, scale)
        return y.sum()

    x, w = torch.linspace(0, 1, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    part = fs.partition(torch.func.hessian(loss), mesh=MESH)
    if is_argument:
        want = torch.diag(-x.sin() * w.exp())
        torch.testing.assert_close(part(x, w), want)
    else:
        with pytest.raises(fs.ShardingError, match=r"F.apply\(x, w\)"):
            part(x, w)


def test_forward_mode_that_cannot_be_traced_in_a_vmap_has_a_fix() -> None:
    def curvatures(hessian: Any) -> Any:
        loss = lambda row: (row.sin() ** 2).sum()  # noqa: E731
        return torch.func.vmap(lambda row: hessian(loss)(row) @ row)

    x = torch.linspace(0, 1, 8, dtype=torch.float64).view(4, 2)
    with pytest.raises(fs.ShardingError, match=r"jacrev\(jacfwd\(f\)\) in the place of hessian"):
        fs.partition(curvatures(torch.func.hessian), mesh=MESH)(x)
    fixed = curvatures(lambda f: torch.func.jacrev(torch.func.jacfwd(f)))
    want = curvatures(torch.func.hessian)(x)
    torch.testing.assert_close(fs.partition(fixed, mesh=MESH, in_specs=(P("dp"),))(x), want)


def test_results_of_forward_mode_without_values_have_a_fix() -> None:
    def products(jacobian: Any) -> Any:
        return torch.func.vmap(lambda row: jacobian(lambda x: x * x * row[1:])(row[:1]))

    x = torch.linspace(0, 1, 8, dtype=torch.float64).view(4, 2)
    with pytest.raises(fs.ShardingError, match=r"jacrev\(f\) in the place of jacfwd\(f\)"):
        fs.partition(products(torch.func.jacfwd), mesh=MESH)(x)
    part = fs.partition(products(torch.func.jacrev), mesh=MESH, in_specs=(P("dp"),))
    torch.testing.assert_close(part(x), products(torch.func.jacfwd)(x))
