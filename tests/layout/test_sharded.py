"""`Sharded` pairs: their values and text, their refusals, and the calls that errors offer."""

from __future__ import annotations

import copy
import io
import operator
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard import Mesh, P, Sharded, Spec
from fshard._torch.dynamo import tree_flatten, tree_unflatten
from fshard.layout.sharded import OPERATORS, REFLECTED, NotATensorError

MESH = Mesh(x=2, y=2)
VALUE = torch.arange(1, 9).reshape(4, 2)
PAIR: Any = fs.shard(VALUE, Spec(MESH, P("x"), shape=(4, 2), dtype=torch.int64))
REAL: Any = fs.shard(VALUE.double(), Spec(MESH, P("x"), shape=(4, 2), dtype=torch.float64))
TENSOR = torch.ones(4, 2, dtype=torch.int64)


def error_of(use: Callable[[Any], Any], pair: Any) -> str:
    """Return the text of the error that a use of a pair raises."""
    with pytest.raises(NotATensorError) as error:
        use(pair)
    return str(error.value)


def fix_of(use: Callable[[Any], Any], pair: Any = PAIR) -> str:
    """Return the fix of the error that a use of a pair raises."""
    return re.search(r"  fix:   (.*)", error_of(use, pair))[1]  # type: ignore[index]


def as_tensor(value: Any) -> Any:
    """Return the global tensor of a pair, any other value unchanged."""
    return fs.unshard(value) if isinstance(value, Sharded) else value


# -- the value --------------------------------------------------------------------------


def test_pair_unpacks_and_has_shape_dtype_and_mesh() -> None:
    local, spec = PAIR
    assert local is PAIR.local
    assert spec is PAIR.spec
    assert (PAIR.shape, PAIR.dtype, PAIR.mesh) == ((4, 2), torch.int64, MESH)


@pytest.mark.parametrize("make", [lambda p: p, lambda p: (p.local, p.spec)], ids=["named", "plain"])
def test_named_and_plain_pairs_are_accepted(make: Any) -> None:
    assert torch.equal(fs.unshard(make(PAIR)), VALUE)
    assert torch.equal(fs.unshard(fs.reshard(make(PAIR), P(None, "y"))), VALUE)
    assert torch.equal(fs.unshard(fs.apply(torch.neg, make(PAIR))), -VALUE)


def test_pairs_are_equal_only_to_themselves() -> None:
    other = Sharded(PAIR.local, PAIR.spec)
    assert len({PAIR, other, PAIR}) == 2
    assert (PAIR == None, PAIR != MESH, PAIR == "a") == (False, True, False)  # noqa: E711
    assert PAIR in [None, PAIR]


def test_pairs_are_immutable_and_copy_and_pickle() -> None:
    with pytest.raises(AttributeError):
        PAIR.local = None
    torch.save(PAIR, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for twin in (copy.copy(PAIR), copy.deepcopy(PAIR), pickle.loads(pickle.dumps(PAIR)), loaded):
        assert type(twin) is Sharded
        assert twin.spec == PAIR.spec
        assert torch.equal(fs.unshard(twin), VALUE)


def test_pytrees_of_torch_have_the_locals_as_leaves() -> None:
    leaves, tree = tree_flatten({"a": PAIR})
    assert [id(leaf) for leaf in leaves] == [id(shard) for shard in PAIR.local]
    assert tree_unflatten(leaves, tree)["a"].spec == PAIR.spec


def test_torch_func_differentiates_by_a_pair() -> None:
    loss = torch.func.grad(lambda pair: fs.unshard(pair).square().sum())
    assert torch.equal(fs.unshard(loss(REAL)), 2 * VALUE.double())


def test_match_statement_takes_a_pair_apart() -> None:
    match PAIR:
        case Sharded(local, spec):
            assert (local, spec) == (PAIR.local, PAIR.spec)


# -- text -------------------------------------------------------------------------------


def test_repr_has_each_shard_once_with_its_ranks() -> None:
    spec = Spec(MESH, P("y"), shape=(2,), dtype=torch.int64)
    text = (
        "Sharded i64[2@y] on Mesh(x=2, y=2)\n  ranks 0, 2: tensor([1])\n  ranks 1, 3: tensor([2])"
    )
    assert repr(fs.shard(torch.tensor([1, 2]), spec)) == text


def test_repr_of_a_replicated_value_has_one_shard() -> None:
    pair = fs.reshard(PAIR, P())
    assert repr(pair).startswith(
        "Sharded i64[4,2] on Mesh(x=2, y=2)\n  ranks 0-3: tensor([[1, 2],\n" + " " * 21 + "[3, 4]"
    )
    assert repr(pair).count("tensor") == 1


def test_repr_has_every_partial_sum() -> None:
    pair = fs.shard(torch.ones(1), Spec(MESH, P(unreduced={"x"}), shape=(1,)))
    assert str(pair).splitlines()[1:] == ["  ranks 0-1: tensor([1.])", "  ranks 2-3: tensor([0.])"]


def test_repr_of_many_shards_is_short() -> None:
    spec = Spec(Mesh(x=1024), P("x"), shape=(1024,))
    lines = repr(fs.shard(torch.arange(1024.0), spec)).splitlines()
    assert lines[-2:] == ["  rank 15: tensor([15.])", "  … 1,008 more shards"]


def test_repr_of_one_rank_and_of_what_is_not_a_pair() -> None:
    assert repr(Sharded(torch.ones(1), PAIR.spec)).endswith("\n  local: tensor([1.])")
    assert repr(Sharded(None, None)) == "Sharded(None, None)"  # type: ignore[arg-type]


# -- refusals and their fixes -------------------------------------------------------------

UNARY = ("neg", "pos", "abs", "invert")
USES: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(operator, f"__{name}__") for name in UNARY},
    **{
        f"{name} {side}": use
        for name in OPERATORS
        if name not in (*UNARY, "matmul")
        for op in [getattr(operator, f"__{name}__")]
        for side, use in {
            "pair": lambda x, op=op: op(x, x),
            "number": lambda x, op=op: op(x, 2),
            "reflected": lambda x, op=op: op(2, x),
        }.items()
    },
    "==": lambda x: x == 2,
    "!= pair": lambda x: x != x,
    "in place": lambda x: operator.iadd(x.clone() if isinstance(x, torch.Tensor) else x, 1),
    "x[0]": lambda x: x[0],
    "x[:, 1]": lambda x: x[:, 1],
    "x[..., None, ::2]": lambda x: x[..., None, ::2],
    "torch.sum": lambda x: torch.sum(x, dim=1),
    "torch.add": lambda x: torch.add(x, x, alpha=2),
    "torch.cat": lambda x: torch.cat([x, x], dim=1),
    "relu": F.relu,
    "method": lambda x: x.sum(),
    "x.T": lambda x: x.T,
    "x.ndim": lambda x: x.ndim,
    "x.device": lambda x: x.device,
    "len": len,
    "in": lambda x: 3 in x,
    "aten": torch.ops.aten.neg.default,
    "aten packet": torch.ops.aten.neg,
}


@pytest.mark.parametrize("name", USES)
def test_fix_computes_what_a_tensor_gives(name: str) -> None:
    scope = {"fs": fs, "torch": torch, "pair": PAIR, "args": ()}
    fixed, expected = (
        as_tensor(eval(fix_of(USES[name]).partition("; ")[0], scope)),
        USES[name](VALUE),
    )
    assert torch.equal(fixed, expected) if isinstance(expected, torch.Tensor) else fixed == expected


@pytest.mark.parametrize("name", REFLECTED)
def test_tensor_and_pair_together_are_refused(name: str) -> None:
    op = getattr(operator, f"__{name}__")
    other = torch.arange(1, 17).reshape(4, 4)
    square = fs.shard(other.T, Spec(MESH, P("x"), shape=(4, 4), dtype=torch.int64))
    for use in (lambda x: op(x, other), lambda x: op(other, x)):
        scope = {"fs": fs, "torch": torch, "pair": square, "tensor": other}
        assert torch.allclose(fs.unshard(eval(fix_of(use, square), scope)), use(other.T))


ITERATIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "GradScaler": (torch.amp.GradScaler("cpu").scale, "torch.amp.grad_scaler.GradScaler.scale"),
    "optimizer": (lambda x: torch.optim.SGD(x, lr=0.1), "torch.optim.optimizer.Optimizer"),
    "clipping": (lambda x: torch.nn.utils.clip_grad_norm_(x, 1.0), "clip_grad_norm_"),
}


@pytest.mark.parametrize("name", ITERATIONS)
def test_functions_of_torch_do_not_iterate_over_a_pair(name: str) -> None:
    """Before, `GradScaler.scale(pair)` returned a lazy `map` object."""
    use, where = ITERATIONS[name]
    text = error_of(use, REAL)
    assert where in text
    assert "fix:   fs.unshard(pair), which is differentiable; or the tensors of pair.local" in text
    assert [*map(type, [*zip(REAL, REAL, strict=True)])] == [tuple, tuple]


def test_gradients_of_a_pair_name_calls_that_work() -> None:
    pair = fs.shard(torch.ones(4, 2, requires_grad=True), MESH, P("x"))
    loss = fs.apply(torch.sum, pair, mode="auto")
    scope = {"fs": fs, "torch": torch, "pair": pair, "loss": loss}
    first, _, second = fix_of(lambda x: torch.autograd.grad(x, [pair]), loss).partition("; or ")
    assert [x.tolist() for x in eval(first, scope)] == [[[1.0] * 2] * 2] * 4
    fn = lambda x: fs.apply(torch.sum, x, mode="auto")  # noqa: E731
    _, grads = eval(second, scope | {"fn": fn})
    assert torch.equal(fs.unshard(grads), torch.ones(4, 2))
    eval(fix_of(torch.autograd.backward, loss), {**scope, "pair": loss})


PARAMETER = "a parameter is a local, torch.nn.Parameter(pair.local[0])"


@pytest.mark.parametrize(
    ("use", "fix"),
    [
        (bool, "bool(fs.unshard(pair)), or pair is not None"),
        (float, "float(fs.unshard(pair))"),
        (int, "int(fs.unshard(pair))"),
        (lambda x: x.item(), "fs.unshard(pair).item()"),
        (lambda x: x.requires_grad_(), "pair.local[0].requires_grad_(*args)"),
        (lambda x: x.add_(1), "pair = fs.apply(torch.Tensor.add, pair, *args)"),
        (np.asarray, "fs.unshard(pair).numpy()"),
        (lambda x: np.ones(2) * x, "fs.unshard(pair).numpy()"),
        (lambda x: x.view(8), "fs.apply(torch.Tensor.view, pair, *args)"),
        (torch.nn.Linear(2, 3), "fs.apply(torch.nn.functional.linear, pair, tensor, tensor)"),
        (lambda x: x < None, "fs.apply(torch.lt, pair, None)"),
        (torch.tensor, "pair.shape[0]; for its values, fs.unshard(pair)"),
        (torch.nn.Parameter, f"fs.apply(torch.Tensor.detach, pair, *args); {PARAMETER}"),
    ],
    ids=lambda value: value.replace("(*args)", "") if isinstance(value, str) else "",
)
def test_refusal_names_the_call(use: Callable[[Any], Any], fix: str) -> None:
    assert fix_of(use) == fix


def test_error_has_the_call_the_rule_and_the_fix() -> None:
    assert error_of(lambda x: torch.matmul(x, x), PAIR) == (
        "torch.matmul\n"
        "  given: torch.matmul(i64[4@x,2], i64[4@x,2])\n"
        "  rule:  the operands of torch functions must be tensors, and i64[4@x,2] is a pair "
        "(local, spec)\n"
        "  fix:   fs.apply(torch.matmul, pair, pair)"
    )


def test_names_that_tensors_lack_are_unknown() -> None:
    with pytest.raises(AttributeError, match="a Sharded pair has no attribute 'locl'"):
        _ = PAIR.locl
    assert not hasattr(PAIR, "sum")
    assert not hasattr(PAIR, "__array_interface__")


def test_optimizers_and_modules_name_what_updates_pairs() -> None:
    for use in (torch.optim.SGD, lambda pairs: torch.nn.Module().register_parameter("w", *pairs)):
        with pytest.raises(TypeError, match="Sharded: parameters must be tensors"):
            use([PAIR])


def test_errors_are_of_the_types_that_python_raises() -> None:
    assert issubclass(NotATensorError, fs.ShardingError | TypeError | AttributeError)
    assert list(PAIR) == [PAIR.local, PAIR.spec]


def test_many_values_are_one_line_a_shard() -> None:
    pair = fs.shard(torch.arange(1024.0).view(8, 8, 16), fs.Mesh(x=8), fs.P("x"))
    head, *lines = str(pair).splitlines()
    assert head == "Sharded f32[8@x,8,16] on Mesh(x=8)"
    assert lines[0].startswith("  rank 0, 1 x 8 x 16: tensor([[[  0.,   1., ")
    assert len(lines) == 9
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "  all values: print(pair.local), or print(fs.unshard(pair))"
