"""PyTorch's operator database through `apply`, on layouts of all kinds; see `op_database`.

By default a ninth of the OpInfos, one sample of each on a layout of every kind, and some of them
in other dtypes; with `-m slow` all of them, two samples each, in every dtype, with the columns of
`tests.benchmarks.bench_ops`.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.ops.core.builders import kind_modes, linear_modes
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import rule
from tests.helpers.ops.op_database import case_of, cases, info_name, op_db, try_layout
from tests.helpers.ops.op_layouts import COLUMNS, layouts

PARTS = 12
UNSUPPORTED = 20
"""Maximum number of OpInfos whose first sample raises on some layout."""

FAST = [place for place, op in enumerate(op_db) if op.name.isidentifier()][::9]


DTYPES = (torch.int64, torch.bool, torch.complex128, torch.float16, torch.bfloat16)


def outcomes(
    op: Any, samples: int, maximum: int, dtype: torch.dtype | None = None
) -> tuple[list[str], bool]:
    """Return the errors of an OpInfo, and True if a layout of its first sample raises."""
    wrong, raises = [], False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases(op, samples, dtype):
            if case.reason:
                continue
            for column in COLUMNS:
                limited = replace(column, limit=min(column.limit, maximum))
                for specs in layouts(case, limited):
                    result = try_layout(case, specs, gradients=column.name.startswith("uneven"))
                    raises = raises or (result.word == "raises" and not case.number)
                    wrong += [result.text] if result.word == "wrong" else []
    return wrong, raises


@pytest.mark.parametrize("part", range(PARTS))
def test_samples_of_the_database_equal_one_device(part: int) -> None:
    """Every accepted layout gives the results and gradients of one device."""
    wrong = [text for i in FAST[part::PARTS] for text in outcomes(op_db[i], 1, 1)[0]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_in_other_dtypes(dtype: torch.dtype) -> None:
    """The same in integers, booleans, complex and half precision."""
    part = FAST[DTYPES.index(dtype) :: 9]
    wrong = [text for i in part for text in outcomes(op_db[i], 1, 1, dtype)[0]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_samples_in_other_dtypes(dtype: torch.dtype) -> None:
    """Four samples of all operations that support the dtype."""
    wrong = [text for op in op_db for text in outcomes(op, 4, 8, dtype)[0]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_samples() -> None:
    """The number of refused operations does not grow either."""
    matches = {info_name(op): outcomes(op, 2, 12) for op in op_db}
    wrong = [text for texts, _ in matches.values() for text in texts]
    assert not wrong, "\n".join(wrong)
    unsupported = sorted(name for name, (_, raises) in matches.items() if raises)
    assert len(unsupported) <= UNSUPPORTED, "\n".join(unsupported)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_sharded_dim_ends(part: int) -> None:
    """No operation decomposes without end, whichever dim of whichever tensor is sharded."""
    mesh = fs.Mesh(x=3)
    for case in (case for op in op_db[part::PARTS] for case in cases(op, 3) if not case.reason):
        for index, tensor in enumerate(case.tensors):
            for dim in range(tensor.ndim):
                partition = fs.P(*[None] * dim, "x")
                specs = [
                    fs.Spec(mesh, partition if i == index else fs.P(), shape=x.shape,
                            dtype=x.dtype, uneven="chunk")
                    for i, x in enumerate(case.tensors)
                ]  # fmt: skip
                assert try_layout(case, specs).word != "wrong"


# -- statistics ---------------------------------------------------------------------------

REDUCED = {
    *(f"nn.functional.{kind}_norm" for kind in ("batch", "group", "instance", "layer", "rms")),
    "native_layer_norm", "native_batch_norm", "_native_batch_norm_legit", "var", "var_mean", "std",
    "std_mean", "softmax", "log_softmax", "nn.functional.cross_entropy",
}  # fmt: skip
SLOW = fs.Topology.of({"x": fs.Link(latency=1e-7, bandwidth=1e6)})
"""Bytes cost more than launches, so that samples are not gathered."""


def check_every_dim(op: Any, samples: int) -> None:
    """Compare values and gradients in float64 with each dim of each tensor sharded unevenly."""
    mesh = fs.Mesh(x=3)
    for case in (case for case in cases(op, samples, torch.float64) if not case.reason):

        def run(*tensors: torch.Tensor, case: Any = case) -> Any:
            both = zip(tensors, case.has_gradient, strict=True)
            return case.function([x.clone() if grad else x.detach().clone() for x, grad in both])

        for index, tensor in enumerate(case.tensors):
            for dim in (dim for dim, size in enumerate(tensor.shape) if size > 1):
                partition = fs.P(*[None] * dim, "x")
                specs = tuple(
                    fs.Spec(mesh, partition if i == index else fs.P(), shape=x.shape,
                            dtype=x.dtype, uneven="chunk")
                    for i, x in enumerate(case.tensors)
                )  # fmt: skip
                part = fs.partition(run, mesh=mesh, in_specs=specs, topology=SLOW)
                pairs = tuple(map(fs.shard, case.tensors, specs))
                fs.testing.assert_like_one_device(part, run, pairs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", sorted(REDUCED))
def test_statistics_over_every_sharded_dim_equal_one_device(name: str) -> None:
    """Norms, variances and softmaxes are decomposed: one sample of each."""
    check_every_dim(next(op for op in op_db if info_name(op) == name), 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(REDUCED))
def test_statistics_of_all_samples(name: str) -> None:
    for op in op_db:
        if op.name == name:
            check_every_dim(op, 12)


# -- the comparison itself ----------------------------------------------------------------


LIBRARY = torch.library.Library("fshard_judged", "DEF")
LIBRARY.define("centered(Tensor x) -> Tensor")
LIBRARY.impl("centered", lambda x: x - x.mean(0, keepdim=True), "CompositeExplicitAutograd")
LIBRARY.define("doubled(Tensor x) -> Tensor")
LIBRARY.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
LIBRARY.define("greatest(Tensor x) -> Tensor")
LIBRARY.impl("greatest", lambda x: x.amax(0), "CompositeImplicitAutograd")

ops = torch.ops.fshard_judged
WRONG = {
    "values": (ops.centered.default, rule("ij->ij"), True),
    "values, sharded elsewhere": (ops.centered.default, rule("ij->ij", unsharded="i"), False),
    "partial sums": (
        ops.centered.default,
        rule("ij->ij", unsharded="ij", modes=linear_modes(0, affine=True)),
        False,
    ),
    "another reduction": (ops.greatest.default, rule("ij->j", reduce="sum"), True),
    "candidates": (ops.greatest.default, rule("ij->j", unsharded="i", modes=linear_modes(0)), True),
    "gradients of ties": (ops.greatest.default, rule("ij->j", reduce="max"), True),
    "ties without gradients": (
        ops.greatest.default,
        rule("ij->j", reduce="max", no_grad="i"),
        False,
    ),
    "another kind": (
        ops.doubled.default,
        rule("ij->ij", modes=kind_modes(0, {"max": "min"})),
        True,
    ),
    "the same kind": (
        ops.doubled.default,
        rule("ij->ij", modes=kind_modes(0, {"max": "max"})),
        False,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_detected(name: str) -> None:
    """Every kind of wrong rule fails on some layout, and right ones on none."""
    op, result, is_wrong = WRONG[name]
    register_rule(op)(lambda _: result)
    x = torch.tensor([[1.0, 5.0, 2.0], [4.0, 5.0, -2.0], [4.0, 0.0, 1.0], [4.0, 5.0, 1.0]]).double()
    case = case_of(name, op, x)
    words = {try_layout(case, specs).word for column in COLUMNS for specs in layouts(case, column)}
    assert ("wrong" in words) == is_wrong
