"""Laws of what operations return: everywhere what PyTorch's meta form says, or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fshard._util.errors import ShardingError
from fshard.ops.core.call import Meta, instances_in, map_call, meta_results
from fshard.ops.core.registry import functional_of, read_arguments
from fshard.ops.meta.result_metas import law_of, results_of
from tests.helpers.ops.op_database import calls_of, cases, op_db

aten = torch.ops.aten
F32, HALF, LONG = torch.float32, torch.bfloat16, torch.int64
DTYPES = (torch.float64, HALF, LONG)
MOST_SILENT = 12
"""Percent of the database's calls of which a law says nothing."""


def unlike(
    infos: Sequence[Any], dtype: torch.dtype, samples: int
) -> tuple[set[Any], float, list[str]]:
    """Operations with a law that were called, and the calls of which theirs says nothing.

    Between them, of all calls the percentage that these are.
    """
    seen: set[Any] = set()
    told_of, silent = 0, []
    for info in infos:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for full, args, kwargs in [
                call for case in cases(info, samples, dtype) for call in calls_of(case)
            ]:
                op, law = functional_of(full), law_of(functional_of(full))
                given, named = map_call(args, read_arguments(full, kwargs), torch.Tensor, Meta.of)
                if law is None or not instances_in((*given, *named.values()), Meta):
                    continue
                told = law(op, given, named)
                assert told is None or told == meta_results(op, given, named), (op, given, named)
                silent += [] if told else [str(op)]
                told_of += told is not None
                seen.add(op)
    return seen, 100 * len(silent) / (told_of + len(silent)), silent


@pytest.mark.parametrize("dtype", DTYPES)
def test_laws_say_what_meta_tensors_say(dtype: torch.dtype) -> None:
    """Shapes, dtypes and trees of a sixth of the database."""
    seen, percent, silent = unlike(op_db[DTYPES.index(dtype) :: 6], dtype, 1)
    assert len(seen) > 20
    assert percent <= MOST_SILENT, silent


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [*DTYPES, F32, torch.bool, torch.complex64])
def test_laws_say_what_meta_tensors_say_of_the_whole_database(dtype: torch.dtype) -> None:
    seen, percent, silent = unlike(op_db, dtype, 3)
    assert len(seen) > 60
    assert percent <= MOST_SILENT, silent


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
    "a weight of other features": (
        aten.bilinear.default, (meta(2, 3), meta(2, 4), meta(5, 4, 3))),
    "a layer of other features": (aten.linear.default, (meta(2, 3), meta(5, 4))),
    "no Hermitian matrix": (aten.linalg_pinv.default, (meta(4, 3), 1e-9, True)),
    "no square": (aten.linalg_matrix_power.default, (meta(4, 3), 2)),
    "a power of one": (aten.linalg_vander.default, (meta(1),)),
    "a diagonal on one dim": (aten.diag_embed.default, (meta(4), 0, 1, -1)),
    "rows of other lengths": (aten.cat.default, ([meta(4, 3), meta(4, 2)], 0)),
    "other shapes": (aten.stack.default, ([meta(4, 3), meta(4, 2)], 0)),
    "a dim that is not there": (aten.stack.default, ([meta(4, 3), meta(4, 3)], 3)),
    "too few for a gradient": (aten.gradient.scalarint, (meta(4, 1),)),
    "an odd half": (aten.glu.default, (meta(4, 3), 1)),
    "a source of another length": (
        aten.index_copy.default, (meta(4, 3), 0, meta(2, dtype=LONG), meta(3, 3))),
    "a norm of no name": (aten.fft_fft.default, (meta(4, 3), None, -1, "other")),
    "the same dim twice": (aten.fft_fft2.default, (meta(4, 3), None, [1, -1])),
    "frequencies of another window": (
        aten.istft.default, (meta(7, 4, dtype=torch.complex64), 10)),
    "no statistics": (
        aten.instance_norm.default,
        (meta(2, 3, 4), None, None, None, None, False, 0.1, 1e-5, False)),
    "keys of another width": (
        aten.scaled_dot_product_attention.default, (meta(2, 4, 8), meta(2, 4, 6), meta(2, 4, 8))),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_operation_refuses_no_law_accepts(name: str) -> None:
    op, args = REFUSED[name]
    law = law_of(op)
    assert law is not None
    assert law(op, args, {}) is None
    with pytest.raises(ShardingError, match="it must run on tensors of these shapes"):
        results_of(op, args, {})


LARGE: dict[str, tuple[Any, tuple[Any, ...], list[Meta]]] = {
    "elements": (aten.hardswish.default, (meta(10**6, 10**6),), [meta(10**6, 10**6)]),
    "types": (aten.add.Tensor, (meta(10**9, dtype=HALF), meta()), [meta(10**9, dtype=HALF)]),
    "norm": (
        aten.native_layer_norm.default, (meta(10**6, 10**6), [10**6], None, None, 1e-5),
        [meta(10**6, 10**6), meta(10**6, 1), meta(10**6, 1)]),
    "loss": (
        aten.cross_entropy_loss.default, (meta(10**9, 10), meta(10**9, dtype=LONG)), [meta()]),
    "product": (aten.kron.default, (meta(10**5, 10**5), meta(10**3)), [meta(10**5, 10**8)]),
    "signal": (
        aten.istft.default, (meta(10**3, 513, 10**6, dtype=torch.complex64), 1024),
        [meta(10**3, 256 * (10**6 - 1))]),
    "real numbers": (
        aten.fft_irfftn.default, (meta(10**6, 5, 10**6, dtype=torch.complex64), [4, 9], [1, 2]),
        [meta(10**6, 4, 9)]),
    "joined": (aten.cat.default, ([meta(10**9, 10)] * 3, -1), [meta(10**9, 30)]),
    "slopes": (aten.gradient.scalarint, (meta(10**6, 10**6),), [meta(10**6, 10**6)] * 2),
    "variance": (
        aten.var_mean.correction, (meta(10**6, 10**6), [0]), [meta(10**6), meta(10**6)]),
    "all elements": (aten.logsumexp.default, (meta(10**5, 10**5), [0, 1]), [meta()]),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_nothing_of_the_whole_size_is_made(name: str) -> None:
    op, args, right = LARGE[name]
    law = law_of(op)
    assert law is not None
    told = law(op, args, {})
    assert told is not None
    assert list(told[0]) == right
