"""`apply`: pairs in, pairs out; plain tensors as operands, modes, trees of results, and gloo."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import Sharded, Spec
from fshard.ops.propagate.propagate import propagate
from fshard.partition.apply import apply

MESH = Mesh(x=2, y=2)
aten = torch.ops.aten


def lay(x: torch.Tensor, *entries: Any, mesh: Mesh = MESH, **kinds: Any) -> Sharded:
    return fs.shard(
        x, Spec(mesh, P(*entries, **kinds), shape=x.shape, dtype=x.dtype, uneven="chunk")
    )


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def said(make: Callable[[], object]) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(ShardingError) as caught:
        make()
    return str(caught.value)


# -- values -------------------------------------------------------------------------------


def test_slices_of_a_cut_dim_send_nothing() -> None:
    x = draw(8, 3)
    made = apply(aten.slice.Tensor, lay(x, ("x", "y")), 0, 3, 8)
    assert str(made.spec) == "f64[5@(x,y):0+1+2+2,3]"
    assert torch.equal(fs.unshard(made), x[3:8])
    one, other = apply(torch.split, lay(x, ("x", "y")), 5)
    assert (str(one.spec), str(other.spec)) == ("f64[5@(x,y):2+2+1+0,3]", "f64[3@(x,y):0+0+1+2,3]")
    padded = apply(aten.constant_pad_nd.default, lay(x, ("x", "y")), [0, 0, 1, 2])
    assert str(padded.spec) == "f64[11@(x,y):3+2+2+4,3]"
    assert torch.equal(fs.unshard(padded), torch.nn.functional.pad(x, (0, 0, 1, 2)))


def test_what_is_shifted_is_sent_at_the_borders_alone() -> None:
    x = draw(12, 3)
    after, before = (apply(aten.slice.Tensor, lay(x, "x"), 0, at, 11 + at) for at in (1, 0))
    step = propagate(torch.sub, after.spec, before.spec)
    assert step.cost.bytes_received == 3 * 8
    assert torch.equal(fs.unshard(apply(torch.sub, after, before, mode="auto")), x[1:] - x[:-1])


def test_plain_tensors_are_whole_on_every_rank() -> None:
    x, w = draw(4, 6), draw(6, 2, seed=1)
    made = apply(torch.mm, lay(x, "x"), w)
    assert str(made.spec) == "f64[4@x,2]"
    assert torch.equal(fs.unshard(made), torch.cat([x[:2] @ w, x[2:] @ w]))
    torch.testing.assert_close(fs.unshard(apply(torch.sub, w, lay(w, "x"))), w - w)


def test_arguments_by_name_and_in_lists() -> None:
    x, y = draw(4, 6), draw(4, 2, seed=1)
    made = apply(aten.cat.default, [lay(x, "x"), lay(y, "x")], dim=1)
    assert torch.equal(fs.unshard(made), torch.cat([x, y], 1))
    assert str(made.spec) == "f64[4@x,8]"
    added = apply(torch.add, lay(x, "x"), other=lay(x, "x"), alpha=2)
    torch.testing.assert_close(fs.unshard(added), 3 * x)


def test_results_come_in_the_tree_of_the_operation() -> None:
    x = draw(4, 6)
    made = apply(aten.max.dim, lay(x, "x"), 1)
    assert isinstance(made, tuple)
    assert [torch.equal(fs.unshard(each), want) for each, want in zip(made, x.max(1), strict=True)]
    parts = apply(aten.split.Tensor, lay(x, "x"), 2, 1)
    assert isinstance(parts, list | tuple)
    assert [str(each.spec) for each in parts] == ["f64[4@x,2]"] * 3


def test_variants_that_write_return_and_write_nothing() -> None:
    x = lay(draw(4, 6), "x")
    before = [each.clone() for each in x.local]
    added = apply(aten.add_.Tensor, x, 1.0)
    out = lay(torch.zeros(4, 6, dtype=torch.float64), "x")
    more = apply(aten.add.out, x, x, out=out)
    assert all(map(torch.equal, x.local, before))
    assert not any(each.any() for each in out.local)
    torch.testing.assert_close(fs.unshard(added), draw(4, 6) + 1)
    torch.testing.assert_close(fs.unshard(more), 2 * draw(4, 6))


def test_operands_are_not_written() -> None:
    x = lay(draw(5, 3), None, "y")
    before = [each.clone() for each in x.local]
    apply(torch.softmax, x, 1, mode="auto")
    assert all(map(torch.equal, x.local, before))


def test_gradients_come_through_moved_operands() -> None:
    x, w = draw(4, 6).requires_grad_(), draw(6, 5, seed=1).requires_grad_()
    made = apply(torch.mm, lay(x, None, "x"), lay(w, None, "x"), mode="auto")
    fs.unshard(made).square().sum().backward()
    right = torch.autograd.grad((x @ w).square().sum(), (x, w))
    torch.testing.assert_close((x.grad, w.grad), right)


def test_candidates_are_not_made_addends_nor_of_what_has_a_gradient() -> None:
    x, y = draw(4, 6), draw(4, 6, seed=1)
    least = lay(x, unreduced={"x": "min"})
    made = apply(torch.add, least, lay(y, unreduced={"x"}), mode="auto")
    torch.testing.assert_close(fs.unshard(made), x + y)
    y.requires_grad_()
    made = apply(torch.cat, [least, lay(y, "x")], 1, mode="auto")
    (grad,) = torch.autograd.grad(fs.unshard(made).sum(), y)
    torch.testing.assert_close(grad, torch.ones(4, 6, dtype=torch.float64))


def test_the_negative_of_the_least_integer_is_no_candidate() -> None:
    x = torch.tensor([1, -2, 0, 3])
    for kind in ("max", "min"):
        made = apply(torch.neg, lay(x, unreduced={"x": kind}), mode="auto")
        assert torch.equal(fs.unshard(made), -x)


def test_second_derivatives() -> None:
    x = draw(4, 3).requires_grad_()
    cube = lambda pair: apply(torch.mul, apply(torch.mul, pair, pair), pair)  # noqa: E731
    (first,) = torch.autograd.grad(fs.unshard(cube(lay(x, "x"))).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach())


def test_a_function_of_several_operations() -> None:
    x, w = draw(4, 6), draw(6, 2, seed=1)

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w) + 1

    made = apply(layer, lay(x, "x"), w)
    torch.testing.assert_close(fs.unshard(made), layer(x, w))


def test_functions_that_nobody_holds_are_not_kept() -> None:
    pair = lay(draw(4, 6), "x")
    held = torch.ones(6, dtype=torch.float64)

    class Scale:
        def by(self, x: torch.Tensor) -> torch.Tensor:
            return x * held + 1

    def of_function() -> weakref.ref[Any]:
        add = lambda x: x + held * 2  # noqa: E731
        torch.testing.assert_close(fs.unshard(apply(add, pair)), draw(4, 6) + 2)
        return weakref.ref(add)

    def of_method() -> weakref.ref[Any]:
        scale = Scale()
        for _ in range(2):
            torch.testing.assert_close(fs.unshard(apply(scale.by, pair)), draw(4, 6) + 1)
        return weakref.ref(scale)

    found = [of_function(), of_method()]
    gc.collect()
    assert [each() for each in found] == [None, None]


def test_a_function_is_traced_once() -> None:
    pair, traced = lay(draw(4, 6), "x"), []

    class Scale:
        def by(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            traced.append(factor)
            return x * factor + 1

    def function(x: torch.Tensor, factor: float) -> torch.Tensor:
        traced.append(factor)
        return x * factor + 1

    scale = Scale()
    for op in (lambda: scale.by, lambda: function):
        traced.clear()
        for factor in (2, 2.0, 2, 2.0):
            torch.testing.assert_close(fs.unshard(apply(op(), pair, factor)), draw(4, 6) * 2 + 1)
        assert len(traced) == 2


def test_pairs_without_names_and_in_lists_are_pairs() -> None:
    x = draw(4, 6)
    local, spec = lay(x, "x")
    for pairs in ([(local, spec), x], [Sharded(local, spec), (local, spec)]):
        made = apply(aten.cat.default, pairs, 1)
        assert torch.equal(fs.unshard(made), torch.cat([x, x], 1))


# -- modes --------------------------------------------------------------------------------


def test_explicit_mode_takes_a_dearer_way_that_sends_nothing() -> None:
    made = apply(torch.mm, lay(draw(4, 6), None, "x"), lay(draw(6, 2, seed=1), "x"))
    assert dict(made.spec.partition.unreduced_kinds) == {"x": "sum"}


def test_explicit_mode_shows_the_choices() -> None:
    pair = lay(draw(4, 6), "x", mesh=Mesh(x=2))
    other = lay(draw(4, 6), None, "x", mesh=Mesh(x=2))
    text = said(lambda: apply(torch.add, pair, other))
    lines = text.splitlines()
    assert lines[0] == "fs.apply(add.Tensor)"
    assert lines[1] == "  given: f64[4@x,6], f64[4,6@x]"
    assert lines[2] == "  rule:  all ways need communication (by time, later reducing included):"
    assert len([line for line in lines if " received, " in line]) >= 2
    assert lines[-1] == (
        '  fix:   mode="auto" runs the first; fs.reshard(pair, spec) before for another'
    )
    auto = apply(torch.add, pair, other, mode="auto")
    torch.testing.assert_close(fs.unshard(auto), 2 * draw(4, 6))


def test_a_mode_that_there_is_not() -> None:
    assert said(lambda: apply(torch.neg, lay(draw(4), "x"), mode="implicit")) == (
        "fs.apply\n  given: mode='implicit'\n  rule:  mode is 'explicit' or 'auto'\n"
        "  fix:   mode='auto'"
    )


def test_no_pairs() -> None:
    assert said(lambda: apply(torch.neg, draw(4))) == (
        "fs.apply(neg)\n  given: no pairs\n"
        "  rule:  at least one argument is a pair (local, spec)\n"
        "  fix:   fs.shard(tensor, spec) makes one"
    )


def test_locals_of_one_rank_and_of_all() -> None:
    pair = lay(draw(4), "x")
    one = Sharded(pair.local[0], pair.spec)
    assert said(lambda: apply(torch.add, pair, one)) == (
        "fs.apply(add)\n  given: locals of one rank and of all ranks\n"
        "  rule:  all pairs hold one rank's local, or all hold the tuple of all shards\n"
        "  fix:   make them the same way"
    )


# -- rank-local code ----------------------------------------------------------------------


def body(size: int) -> list[Any]:
    """Calls of `apply` on one rank's locals; what they give, whole."""
    mesh = Mesh(x=size)
    x, w = draw(5, 6).requires_grad_(), draw(6, 4, seed=1).requires_grad_()
    rows = apply(torch.mm, lay(x, "x", mesh=mesh), lay(w, mesh=mesh))
    sums = apply(torch.mm, lay(x, None, "x", mesh=mesh), lay(w, "x", mesh=mesh))
    moved = apply(torch.add, sums, rows, mode="auto")
    whole = fs.unshard(moved)
    whole.square().sum().backward()
    return [whole.detach(), x.grad, w.grad]


def test_rank_local_code_in_a_simulation() -> None:
    x, w = draw(5, 6).requires_grad_(), draw(6, 4, seed=1).requires_grad_()
    made = 2 * (x @ w)
    right = [made.detach(), *torch.autograd.grad(made.square().sum(), (x, w))]
    for rank in fs.simulate(Mesh(x=2), body, 2):
        torch.testing.assert_close(rank, right)


def test_functions_that_take_a_number_for_a_list() -> None:
    mesh = fs.Mesh(x=2)
    x = torch.arange(12.0).reshape(4, 3)
    pair = fs.shard(x, fs.Spec(mesh, fs.P("x"), shape=(4, 3)))
    torch.testing.assert_close(fs.unshard(fs.apply(torch.roll, pair, 1, 1)), torch.roll(x, 1, 1))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        *((op, (dim,)) for op in (torch.var, torch.std, torch.Tensor.var) for dim in (0, 1)),
        (torch.std_mean, (1,)), (torch.var, (1, True)), (torch.var, (False,)),
        (torch.Tensor.view, (24,)), (torch.Tensor.view, (2, -1)),
        (torch.Tensor.view, (torch.int64,)), (torch.Tensor.sum, (0,)),
        (torch.Tensor.to, (torch.float32,)), (torch.cumsum, (0,)),
    ],
)  # fmt: skip
def test_a_number_is_no_flag_and_no_dtype(op: Callable[..., Any], args: tuple[Any, ...]) -> None:
    x = draw(4, 6)
    found, wanted = apply(op, lay(x, "x"), *args, mode="auto"), op(x, *args)
    if isinstance(wanted, torch.Tensor):
        found, wanted = (found,), (wanted,)
    for pair, each in zip(found, wanted, strict=True):
        torch.testing.assert_close(fs.unshard(pair), each)


def test_a_number_in_the_place_of_a_flag_is_told() -> None:
    spec = Spec(MESH, P("x"), shape=(4, 6))
    assert said(lambda: propagate(torch.var, spec, 0)) == (
        "fs.propagate(aten.var)\n"
        "  given: 0, which aten.var.default takes for its unbiased\n"
        "  rule:  of functions of torch a number is no flag and no dtype\n"
        "  fix:   a list of one in its place, or the argument by name, dim=0 say"
    )
    assert str(propagate(torch.var, spec, dim=0).out_specs[0]) == "f32[6]"


def test_a_rank_outside_of_the_mesh_is_told() -> None:
    elsewhere = fs.Mesh({"x": 2}, devices=(4, 5))
    pair = (torch.ones(2), fs.Spec(elsewhere, fs.P("x"), shape=(4,)))
    for run in (
        lambda: fs.apply(torch.relu, pair),
        lambda: fs.partition(torch.relu, mesh=elsewhere)(pair),
    ):
        with pytest.raises(fs.ShardingError, match=r"rank 0\n  rule:  the operation runs on Mesh"):
            fs.simulate(fs.Mesh(x=2), run)


@pytest.mark.parametrize(
    ("op", "args"),
    [(torch.Tensor.view, (24,)), (torch.std, (0,)), (torch.var, (1,)), (torch.Tensor.std, (0,)),
     (sum, ()), (torch.Tensor.to, (torch.float64,)), (torch.Tensor.reshape, (6, 4))],
    ids=lambda each: getattr(each, "__name__", ""),
)  # fmt: skip
def test_numbers_are_read_as_python_reads_them(op: Any, args: tuple[Any, ...]) -> None:
    """Schemas take a number for a flag or a dtype, and know a `sum` that is not Python's."""
    x = torch.arange(24.0).reshape(4, 6)
    made = fs.apply(op, fs.shard(x, fs.Spec(Mesh(x=2), P("x"), shape=(4, 6))), *args, mode="auto")
    torch.testing.assert_close(fs.unshard(made), op(x, *args))
