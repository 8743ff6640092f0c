"""`fs.apply` and `fs.on_pairs`: values, gradients, modes, keywords of operations, errors."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.ops.propagate.propagate import propagate
from fshard.partition.apply import apply
from tests.helpers.ops.apply_cases import MESH, draw, pair_of, rank_local_calls
from tests.helpers.spec_grid import error_text

aten = torch.ops.aten


# -- values -------------------------------------------------------------------------------


def test_slices_of_a_sharded_dim_are_local() -> None:
    x = draw(8, 3)
    result = apply(aten.slice.Tensor, pair_of(x, ("x", "y")), 0, 3, 8)
    assert str(result.spec) == "f64[5@(x,y):0+1+2+2,3]"
    assert torch.equal(fs.unshard(result), x[3:8])
    first, other = apply(torch.split, pair_of(x, ("x", "y")), 5)
    assert str(first.spec) == "f64[5@(x,y):2+2+1+0,3]"
    assert str(other.spec) == "f64[3@(x,y):0+0+1+2,3]"
    padded = apply(aten.constant_pad_nd.default, pair_of(x, ("x", "y")), [0, 0, 1, 2])
    assert str(padded.spec) == "f64[11@(x,y):3+2+2+4,3]"
    assert torch.equal(fs.unshard(padded), torch.nn.functional.pad(x, (0, 0, 1, 2)))


def test_shift_sends_border_rows_only() -> None:
    x = draw(12, 3)
    after, before = (
        apply(aten.slice.Tensor, pair_of(x, "x"), 0, index, 11 + index) for index in (1, 0)
    )
    step = propagate(torch.sub, after.spec, before.spec)
    assert step.cost.bytes_received == 3 * 8
    assert torch.equal(fs.unshard(apply(torch.sub, after, before, mode="auto")), x[1:] - x[:-1])


def test_plain_tensors_are_replicated() -> None:
    x, w = draw(4, 6), draw(6, 2, seed=1)
    result = apply(torch.mm, pair_of(x, "x"), w)
    assert str(result.spec) == "f64[4@x,2]"
    assert torch.equal(fs.unshard(result), torch.cat([x[:2] @ w, x[2:] @ w]))
    torch.testing.assert_close(fs.unshard(apply(torch.sub, w, pair_of(w, "x"))), w - w)


def test_arguments_by_keyword_and_in_lists() -> None:
    x, y = draw(4, 6), draw(4, 2, seed=1)
    result = apply(aten.cat.default, [pair_of(x, "x"), pair_of(y, "x")], dim=1)
    assert torch.equal(fs.unshard(result), torch.cat([x, y], 1))
    assert str(result.spec) == "f64[4@x,8]"
    added = apply(torch.add, pair_of(x, "x"), other=pair_of(x, "x"), alpha=2)
    torch.testing.assert_close(fs.unshard(added), 3 * x)


def test_results_have_the_tree_of_the_operation() -> None:
    x = draw(4, 6)
    result = apply(aten.max.dim, pair_of(x, "x"), 1)
    assert isinstance(result, tuple)
    assert [
        torch.equal(fs.unshard(item), want) for item, want in zip(result, x.max(1), strict=True)
    ]
    parts = apply(aten.split.Tensor, pair_of(x, "x"), 2, 1)
    assert isinstance(parts, list | tuple)
    assert [str(item.spec) for item in parts] == ["f64[4@x,2]"] * 3


def test_operands_stay_unchanged() -> None:
    x = pair_of(draw(5, 3), None, "y")
    before = [item.clone() for item in x.local]
    apply(torch.softmax, x, 1, mode="auto")
    assert all(map(torch.equal, x.local, before))


def test_gradients_of_redistributed_operands() -> None:
    x, w = draw(4, 6).requires_grad_(), draw(6, 5, seed=1).requires_grad_()
    result = apply(torch.mm, pair_of(x, None, "x"), pair_of(w, None, "x"), mode="auto")
    fs.unshard(result).square().sum().backward()
    right = torch.autograd.grad((x @ w).square().sum(), (x, w))
    torch.testing.assert_close((x.grad, w.grad), right)


def test_unreduced_min_does_not_become_unreduced_sum() -> None:
    x, y = draw(4, 6), draw(4, 6, seed=1)
    least = pair_of(x, unreduced={"x": "min"})
    result = apply(torch.add, least, pair_of(y, unreduced={"x"}), mode="auto")
    torch.testing.assert_close(fs.unshard(result), x + y)
    y.requires_grad_()
    result = apply(torch.cat, [least, pair_of(y, "x")], 1, mode="auto")
    (grad,) = torch.autograd.grad(fs.unshard(result).sum(), y)
    torch.testing.assert_close(grad, torch.ones(4, 6, dtype=torch.float64))


def test_negative_of_unreduced_integers_is_reduced_first() -> None:
    x = torch.tensor([1, -2, 0, 3])
    for kind in ("max", "min"):
        result = apply(torch.neg, pair_of(x, unreduced={"x": kind}), mode="auto")
        assert torch.equal(fs.unshard(result), -x)


def test_second_derivatives() -> None:
    x = draw(4, 3).requires_grad_()
    cube = lambda pair: apply(torch.mul, apply(torch.mul, pair, pair), pair)  # noqa: E731
    (first,) = torch.autograd.grad(fs.unshard(cube(pair_of(x, "x"))).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach())


def test_a_function_of_several_operations() -> None:
    x, w = draw(4, 6), draw(6, 2, seed=1)

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w) + 1

    result = apply(layer, pair_of(x, "x"), w)
    torch.testing.assert_close(fs.unshard(result), layer(x, w))


def test_cache_does_not_keep_functions_alive() -> None:
    pair = pair_of(draw(4, 6), "x")
    constant = torch.ones(6, dtype=torch.float64)

    class Scale:
        def by(self, x: torch.Tensor) -> torch.Tensor:
            return x * constant + 1

    def of_function() -> weakref.ref[Any]:
        add = lambda x: x + constant * 2  # noqa: E731
        torch.testing.assert_close(fs.unshard(apply(add, pair)), draw(4, 6) + 2)
        return weakref.ref(add)

    def of_method() -> weakref.ref[Any]:
        scale = Scale()
        for _ in range(2):
            torch.testing.assert_close(fs.unshard(apply(scale.by, pair)), draw(4, 6) + 1)
        return weakref.ref(scale)

    results = [of_function(), of_method()]
    gc.collect()
    assert [item() for item in results] == [None, None]


def test_a_function_is_traced_once() -> None:
    pair, traced = pair_of(draw(4, 6), "x"), []

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


def test_plain_tuples_and_lists_of_pairs() -> None:
    x = draw(4, 6)
    local, spec = pair_of(x, "x")
    for pairs in ([(local, spec), x], [Sharded(local, spec), (local, spec)]):
        result = apply(aten.cat.default, pairs, 1)
        assert torch.equal(fs.unshard(result), torch.cat([x, x], 1))


# -- modes --------------------------------------------------------------------------------


def test_explicit_mode_prefers_a_local_strategy() -> None:
    result = apply(torch.mm, pair_of(draw(4, 6), None, "x"), pair_of(draw(6, 2, seed=1), "x"))
    assert dict(result.spec.partition.unreduced_kinds) == {"x": "sum"}


def test_explicit_mode_lists_the_strategies() -> None:
    pair = pair_of(draw(4, 6), "x", mesh=Mesh(x=2))
    other = pair_of(draw(4, 6), None, "x", mesh=Mesh(x=2))
    text = error_text(lambda: apply(torch.add, pair, other))
    lines = text.splitlines()
    assert lines[0] == "fs.apply(add.Tensor)"
    assert lines[1] == "  given: f64[4@x,6], f64[4,6@x]"
    assert (
        lines[2] == "  rule:  all strategies need communication (by time, later reducing included):"
    )
    assert len([line for line in lines if " received, " in line]) >= 2
    assert lines[-1] == (
        '  fix:   mode="auto" runs the first; fs.reshard(pair, spec) before for another'
    )
    auto = apply(torch.add, pair, other, mode="auto")
    torch.testing.assert_close(fs.unshard(auto), 2 * draw(4, 6))


def test_unknown_mode() -> None:
    assert error_text(lambda: apply(torch.neg, pair_of(draw(4), "x"), mode="implicit")) == (
        "fs.apply\n  given: mode='implicit'\n  rule:  mode must be 'explicit' or 'auto'\n"
        "  fix:   mode='auto'"
    )


def test_no_pairs() -> None:
    assert error_text(lambda: apply(torch.neg, draw(4))) == (
        "fs.apply(neg)\n  given: no pairs\n"
        "  rule:  at least one argument must be a pair (local, spec)\n"
        "  fix:   fs.shard(tensor, spec) makes one"
    )


def test_mixed_locals_of_one_rank_and_of_all() -> None:
    pair = pair_of(draw(4), "x")
    first = Sharded(pair.local[0], pair.spec)
    assert error_text(lambda: apply(torch.add, pair, first)) == (
        "fs.apply(add)\n  given: locals of one rank and of all ranks\n"
        "  rule:  all pairs must hold one rank's local, or all the tuple of all shards\n"
        "  fix:   make them the same way"
    )


# -- rank-local code ----------------------------------------------------------------------


def test_rank_local_code_in_a_simulation() -> None:
    x, w = draw(5, 6).requires_grad_(), draw(6, 4, seed=1).requires_grad_()
    result = 2 * (x @ w)
    right = [result.detach(), *torch.autograd.grad(result.square().sum(), (x, w))]
    for rank in fs.simulate(Mesh(x=2), rank_local_calls, 2):
        torch.testing.assert_close(rank, right)


def test_int_in_the_place_of_a_list() -> None:
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
def test_int_does_not_match_a_flag_or_dtype(op: Callable[..., Any], args: tuple[Any, ...]) -> None:
    x = draw(4, 6)
    results, expected = apply(op, pair_of(x, "x"), *args, mode="auto"), op(x, *args)
    if isinstance(expected, torch.Tensor):
        results, expected = (results,), (expected,)
    for pair, item in zip(results, expected, strict=True):
        torch.testing.assert_close(fs.unshard(pair), item)


def test_int_in_the_place_of_a_flag_is_a_dim() -> None:
    """TorchScript would read 0 as `unbiased`; Python reads it as a dim."""
    spec = Spec(MESH, P("x"), shape=(4, 6))
    for strategy in (propagate(torch.var, spec, 0), propagate(torch.var, spec, dim=0)):
        assert str(strategy.out_specs[0]) == "f32[6]"


def test_rank_outside_of_the_mesh_is_refused() -> None:
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
    ids=lambda item: getattr(item, "__name__", ""),
)  # fmt: skip
def test_ints_mean_dims_and_sizes_as_in_python(op: Any, args: tuple[Any, ...]) -> None:
    """Schemas would match an int with a bool or dtype, and have a `sum` that is not Python's."""
    x = torch.arange(24.0).reshape(4, 6)
    result = fs.apply(op, fs.shard(x, fs.Spec(Mesh(x=2), P("x"), shape=(4, 6))), *args, mode="auto")
    torch.testing.assert_close(fs.unshard(result), op(x, *args))


# -- keywords of operations ---------------------------------------------------------------


IMAGE = (2, 4, 6, 6)
KEYWORDS: dict[str, tuple[Callable[..., Any], list[Any], dict[str, Any]]] = {
    "pad": (F.pad, [draw(4, 6, 6), (1, 1)], {"mode": "reflect"}),
    "interpolate": (F.interpolate, [draw(*IMAGE)], {"scale_factor": 2, "mode": "bilinear"}),
    "grid_sample": (F.grid_sample, [draw(*IMAGE), draw(2, 3, 3, 2, seed=1).tanh()],
                    {"mode": "nearest", "align_corners": False}),
    "embedding_bag": (F.embedding_bag, [torch.tensor([[0, 1], [2, 2]]), draw(3, 4, seed=2)],
                      {"mode": "sum"}),
    "quantile": (torch.quantile, [draw(4, 6), 0.3], {"dim": 1, "interpolation": "lower"}),
    "sum": (torch.sum, [draw(4, 6), 1], {"keepdim": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_of_the_operation_belong_to_it(name: str) -> None:
    op, args, kwargs = KEYWORDS[name]
    expected, mesh = op(*args, **kwargs), Mesh(x=2)
    if name == "embedding_bag":
        args = [args[0], pair_of(args[1], None, "x", mesh=mesh)]
    else:
        args = [pair_of(args[0], "x", mesh=mesh), *args[1:]]
    auto = fs.on_pairs(op, mode="auto", topology=fs.Topology.cluster(2))
    for run in (functools.partial(fs.apply, op), fs.on_pairs(op), auto):
        torch.testing.assert_close(fs.unshard(run(*args, **kwargs)), expected)


def test_options_of_apply_where_the_operation_lacks_the_keyword() -> None:
    pair, cluster = pair_of(draw(4, 6), None, "x", mesh=Mesh(x=2)), fs.Topology.cluster(2)
    result = fs.apply(torch.quantile, pair, 0.3, dim=1, mode="auto", topology=cluster)
    torch.testing.assert_close(fs.unshard(result), draw(4, 6).quantile(0.3, dim=1))


def test_any_keyword_of_a_function_belongs_to_it() -> None:
    def scaled(x: torch.Tensor, *, mode: str = "auto", topology: float = 1.0) -> torch.Tensor:
        return x * topology if mode == "auto" else x / topology

    pair = pair_of(draw(4), "x", mesh=Mesh(x=2))
    for kwargs in ({}, {"mode": "explicit"}, {"mode": "explicit", "topology": 2.0}):
        result = fs.apply(scaled, pair, **kwargs)
        torch.testing.assert_close(fs.unshard(result), scaled(draw(4), **kwargs))  # type: ignore[arg-type]


def test_option_of_a_function_of_any_keyword_is_refused() -> None:
    def scaled(x: torch.Tensor, **options: Any) -> torch.Tensor:
        return x * options.get("topology", 1.0)

    pair = pair_of(draw(4), "x", mesh=Mesh(x=2))
    text = error_text(lambda: fs.apply(scaled, pair, topology=2.0))
    assert "rule:  scaled takes any keyword" in text
    result = fs.apply(functools.partial(scaled, topology=2.0), pair)
    torch.testing.assert_close(fs.unshard(result), 2 * draw(4))


def test_option_that_is_a_parameter_of_the_operation_points_to_on_pairs() -> None:
    pair = pair_of(draw(*IMAGE), None, None, "x", mesh=Mesh(x=2))
    text = error_text(lambda: fs.apply(F.pad, pair, (1, 1), mode="auto"))
    assert text == (
        "fs.apply(pad)\n"
        "  given: mode='auto'\n"
        "  rule:  mode is a parameter of pad itself; the option must go to fs.on_pairs\n"
        "  fix:   fs.on_pairs(pad, mode='auto')(...)"
    )
    pads = (0, 0, 1, 1)
    text = error_text(lambda: fs.apply(F.pad, pair, pads, mode="circular"))
    assert text.splitlines()[-1].startswith('  fix:   fs.on_pairs(pad, mode="auto") runs it')
    result = fs.on_pairs(F.pad, mode="auto")(pair, pads, mode="circular")
    torch.testing.assert_close(fs.unshard(result), F.pad(draw(*IMAGE), pads, mode="circular"))


@pytest.mark.parametrize(
    ("call", "keyword", "rule", "fix"),
    [
        (lambda x: apply(torch.neg, x, mod="auto"), "mod", "keywords must be mode and topology",
         "did you mean 'mode'?"),
        (lambda x: apply(torch.neg, x, dims=0), "dims", "or those of the function",
         "leave dims= out"),
        (lambda x: propagate(torch.neg, x.spec, mode="auto"), "mode",
         "keywords must be those of the function that is called", "leave mode= out"),
    ],
)  # fmt: skip
def test_unknown_keywords_are_named(call: Any, keyword: str, rule: str, fix: str) -> None:
    text = error_text(lambda: call(pair_of(draw(8), ("x",))))
    for part in (f"unexpected keyword argument '{keyword}'", rule, fix):
        assert part in text


def test_options_of_on_pairs_are_checked_at_once() -> None:
    assert error_text(lambda: fs.on_pairs(torch.neg, mode="implicit")).startswith("fs.on_pairs\n")
    assert "topology" in error_text(lambda: fs.on_pairs(torch.neg, topology="node"))  # type: ignore[arg-type]


# -- shapes that depend on values ---------------------------------------------------------------


BAGS = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (torch.nonzero, ("mask",)),
        (torch.where, ("mask",)),
        (torch.masked_select, ("x", "mask")),
        (lambda x, mask: x[mask], ("x", "mask")),
        (torch.bincount, ("index",)),
        (lambda index: torch.unique(index, return_inverse=True, return_counts=True), ("index",)),
        (torch.unique_consecutive, ("index",)),
        (torch.repeat_interleave, ("x", "index", 0)),
        (aten._embedding_bag, ("x", *BAGS)),
    ],
)
def test_shapes_that_depend_on_values_run_on_unsharded_values(op: Any, args: Any) -> None:
    """In auto mode; all results are invariant. The explicit mode refuses to communicate."""
    x = draw(6, 4)
    tensors = {"x": x, "mask": x > 0, "index": torch.tensor([3, 1, 1, 0, 2, 2])}
    plain = [tensors[arg] if isinstance(arg, str) else arg for arg in args]
    pairs = [
        pair_of(tensors[arg], "x", mesh=Mesh(x=2)) if isinstance(arg, str) else arg for arg in args
    ]
    actual, expected = fs.on_pairs(op, mode="auto")(*pairs), op(*plain)
    many = isinstance(expected, tuple)
    for pair, tensor in zip(actual if many else [actual], expected if many else [expected],
                            strict=True):  # fmt: skip
        assert pair.spec == pair.spec.replace(partition=P())
        assert torch.equal(fs.unshard(pair), tensor)
    assert "must be unsharded" in error_text(lambda: fs.on_pairs(op)(*pairs))


def test_selection_by_mask_has_the_gradient_of_one_device() -> None:
    x = draw(6, 4)
    mask = x > 0
    pair = pair_of(x, "x", mesh=Mesh(x=2))
    shards = tuple(shard.clone().requires_grad_() for shard in pair.local)
    result = fs.apply(lambda x, mask: x[mask], Sharded(shards, pair.spec), mask, mode="auto")
    fs.unshard(result).square().sum().backward()
    assert torch.equal(torch.cat([shard.grad for shard in shards]), 2 * x * mask)


def test_results_without_a_layout_are_refused_in_partitioned_functions() -> None:
    part = fs.partition(lambda w: torch.embedding_bag(w, *BAGS)[1] + 1, mesh=Mesh(x=2))
    assert "must have a layout" in error_text(
        lambda: part(pair_of(draw(6, 4), "x", mesh=Mesh(x=2)))
    )
