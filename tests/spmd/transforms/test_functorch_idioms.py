"""Idioms of PyTorch's tests of `torch.func` and checkpoints, around simulated calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.helpers.spmd.derivatives import checkpoint_idioms, functorch_idioms
from tests.helpers.spmd.derivatives.functorch_idioms import dense
from tests.helpers.spmd.derivatives.gradient_features import mapped, partitioned
from tests.helpers.spmd.transform_cases import MESH

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of linearize


def by_program(x: Tensor, w: Tensor) -> Tensor:
    columns, rows = fs.shard(x, MESH, P(None, "x")), fs.shard(w, MESH, P("x"))
    parts = tuple(a @ b for a, b in zip(columns.local, rows.local, strict=True))
    spec = fs.Spec(MESH, P(unreduced={"x"}), shape=parts[0].shape, dtype=x.dtype)
    program = fs.redistribute(spec, spec.replace(partition=P()))
    return torch.tanh(fs.unshard(fs.Sharded(program(parts), program.dst)))


def by_apply(x: Tensor, w: Tensor) -> Tensor:
    y = fs.apply(torch.matmul, fs.shard(x, MESH, P(None, "x")), fs.shard(w, MESH, P("x")))
    return fs.unshard(fs.apply(torch.tanh, fs.reshard(y, P())))


def by_reshard(x: Tensor, w: Tensor) -> Tensor:
    w = fs.unshard(fs.reshard(fs.shard(w, MESH, P("x")), P()))
    return fs.unshard(fs.reshard(fs.shard(torch.tanh(x @ w), MESH, P(None, "x")), P("x")))


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mapped": mapped(dense, True),
    "mapped, check=False": mapped(dense, False),
    "partitioned": partitioned(dense),
    "program": by_program,
    "apply": by_apply,
    "reshard": by_reshard,
}


@pytest.mark.parametrize("form", FORMS)
def test_idioms_of_transforms_are_those_of_one_device(form: str) -> None:
    assert functorch_idioms.differing(FORMS[form], functorch_idioms.IDIOMS) == {}


@pytest.mark.parametrize("form", FORMS)
def test_idioms_of_checkpoints_are_those_of_one_device(form: str) -> None:
    assert functorch_idioms.differing(FORMS[form], checkpoint_idioms.IDIOMS) == {}
