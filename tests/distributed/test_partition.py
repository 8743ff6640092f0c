"""Partitioned functions on real processes: the values and gradients of one device."""

from __future__ import annotations

from random import Random

import pytest

import fshard as fs
from fshard import Mesh
from tests.distributed.harness import run_ranks
from tests.ops.test_partition_random import Case, Found

MESH = Mesh(x=2)


def on_rank(seed: int) -> Found:
    fs.init(MESH)
    return Case(Random(seed), [MESH]).of_rank()


@pytest.mark.parametrize("seed", range(6))
def test_random_functions(seed: int) -> None:
    case = Case(Random(seed), [MESH])
    for found in run_ranks(2, on_rank, seed):
        case.compare(found)
