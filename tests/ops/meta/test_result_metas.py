"""Laws of result shapes: equal to those of PyTorch's meta kernels, or None."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fshard._util.errors import ShardingError
from fshard.ops.core.call import Meta, instances_in, map_call, meta_results
from fshard.ops.core.registry import functional_of, read_arguments
from fshard.ops.meta.result_metas import law_of, result_metas
from tests.helpers.ops.op_database import calls_of, cases, op_db

aten = torch.ops.aten
F32, HALF, LONG = torch.float32, torch.bfloat16, torch.int64
DTYPES = (torch.float64, HALF, LONG)
MAX_UNANSWERED = 12
"""Limit on the percentage of the database's calls for which a law returns None."""


def check_laws(
    infos: Sequence[Any], dtype: torch.dtype, samples: int
) -> tuple[set[Any], float, list[str]]:
    """Compare the laws' results with meta kernels.

    Return the operations checked, the percentage of calls for which the law returns None, and
    the names of their operations.
    """
    checked: set[Any] = set()
    answered, unanswered = 0, []
    for info in infos:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for full, args, kwargs in [
                call for case in cases(info, samples, dtype) for call in calls_of(case)
            ]:
                op, law = functional_of(full), law_of(functional_of(full))
                metas, named = map_call(args, read_arguments(full, kwargs), torch.Tensor, Meta.of)
                if law is None or not instances_in((*metas, *named.values()), Meta):
                    continue
                results = law(op, metas, named)
                if results is not None:
                    assert results == meta_results(op, metas, named), (op, metas, named)
                unanswered += [] if results else [str(op)]
                answered += results is not None
                checked.add(op)
    return checked, 100 * len(unanswered) / (answered + len(unanswered)), unanswered


@pytest.mark.parametrize("dtype", DTYPES)
def test_laws_agree_with_meta_kernels(dtype: torch.dtype) -> None:
    """Check a part of the database."""
    checked, percent, unanswered = check_laws(op_db[DTYPES.index(dtype) :: 29], dtype, 1)
    assert len(checked) > 5
    assert percent <= MAX_UNANSWERED, unanswered


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [*DTYPES, F32, torch.bool, torch.complex64])
def test_laws_agree_with_meta_kernels_on_the_full_database(dtype: torch.dtype) -> None:
    checked, percent, unanswered = check_laws(op_db, dtype, 3)
    assert len(checked) > 60
    assert percent <= MAX_UNANSWERED, unanswered


def meta(*shape: int, dtype: torch.dtype = F32) -> Meta:
    return Meta(shape, dtype)


REFUSED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "no broadcast": (aten.add.Tensor, (meta(4, 3), meta(4, 2))),
    "a loss of other shapes": (aten.mse_loss.default, (meta(4, 3), meta(5, 3))),
    "another normalized shape": (aten.layer_norm.default, (meta(4, 3), [4])),
    "a weight of another shape": (aten.layer_norm.default, (meta(4, 3), [3], meta(4))),
    "matrices that do not fit": (aten.addmm.default, (meta(4), meta(2, 3), meta(4, 4))),
    "a vector for a matrix": (aten.addmm.default, (meta(4), meta(2, 3), meta(3))),
    "a bias that does not broadcast": (aten.addmm.default, (meta(5), meta(2, 3), meta(3, 4))),
    "groups that do not divide": (
        aten.native_group_norm.default, (meta(2, 5, 3), None, None, 2, 5, 3, 2, 1e-5)),
    "classes of another batch": (
        aten.cross_entropy_loss.default, (meta(4, 3), meta(5, dtype=LONG))),
    "no product": (aten.matmul.default, (meta(4, 3), meta(4, 3))),
    "batches that do not broadcast": (aten.matmul.default, (meta(2, 4, 3), meta(3, 3, 4))),
    "vectors of other lengths": (aten.dot.default, (meta(3), meta(4))),
    "a layer of other features": (aten.linear.default, (meta(2, 3), meta(5, 4))),
    "rows of other lengths": (aten.cat.default, ([meta(4, 3), meta(4, 2)], 0)),
    "other shapes": (aten.stack.default, ([meta(4, 3), meta(4, 2)], 0)),
    "a dim that is not there": (aten.stack.default, ([meta(4, 3), meta(4, 3)], 3)),
    "an odd half": (aten.glu.default, (meta(4, 3), 1)),
    "no statistics": (
        aten.instance_norm.default,
        (meta(2, 3, 4), None, None, None, None, False, 0.1, 1e-5, False)),
    "frequencies of another window": (
        aten.istft.default, (meta(7, 4, dtype=torch.complex64), 10)),
    "keys of another width": (
        aten.scaled_dot_product_attention.default, (meta(2, 4, 8), meta(2, 4, 6), meta(2, 4, 8))),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_laws_refuse_invalid_calls(name: str) -> None:
    op, args = REFUSED[name]
    law = law_of(op)
    assert law is not None
    assert law(op, args, {}) is None
    with pytest.raises(ShardingError, match="it must run on tensors of these shapes"):
        result_metas(op, args, {})


LARGE: dict[str, tuple[Any, tuple[Any, ...], list[Meta]]] = {
    "elements": (aten.hardswish.default, (meta(10**6, 10**6),), [meta(10**6, 10**6)]),
    "types": (aten.add.Tensor, (meta(10**9, dtype=HALF), meta()), [meta(10**9, dtype=HALF)]),
    "norm": (
        aten.native_layer_norm.default, (meta(10**6, 10**6), [10**6], None, None, 1e-5),
        [meta(10**6, 10**6), meta(10**6, 1), meta(10**6, 1)]),
    "loss": (
        aten.cross_entropy_loss.default, (meta(10**9, 10), meta(10**9, dtype=LONG)), [meta()]),
    "signal": (
        aten.istft.default, (meta(10**3, 513, 10**6, dtype=torch.complex64), 1024),
        [meta(10**3, 256 * (10**6 - 1))]),
    "joined": (aten.cat.default, ([meta(10**9, 10)] * 3, -1), [meta(10**9, 30)]),
    "variance": (
        aten.var_mean.correction, (meta(10**6, 10**6), [0]), [meta(10**6), meta(10**6)]),
    "all elements": (aten.logsumexp.default, (meta(10**5, 10**5), [0, 1]), [meta()]),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_laws_allocate_nothing_of_full_size(name: str) -> None:
    op, args, expected = LARGE[name]
    law = law_of(op)
    assert law is not None
    results = law(op, args, {})
    assert results is not None
    assert list(results[0]) == expected
