"""PyTorch's operator database through `apply`, on layouts of all kinds; see `tests.ops_database`.

In every run the OpInfos of a part of the names, one sample of each on few layouts; with
`-m slow` all of them, two samples each, with the columns of `tests.benchmarks.bench_ops`.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops_database import COLUMNS, cases, layouts, named, op_db, try_layout

PARTS = 12
UNSUPPORTED = 260
"""OpInfos of all that raise on some layout: never more."""

FAST = [place for place, op in enumerate(op_db) if op.name.isidentifier()][::2]


def outcomes(op: Any, samples: int, most: int) -> tuple[list[str], bool]:
    """What is wrong with an OpInfo, and whether some layout of it raises."""
    wrong, raises = [], False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases(op, samples):
            if case.reason:
                continue
            for column in COLUMNS:
                few = replace(column, limit=min(column.limit, most))
                for specs in layouts(case, few):
                    made = try_layout(case, specs, gradients=column.name.startswith("uneven"))
                    raises = raises or made.word == "raises"
                    wrong += [made.text] if made.word == "wrong" else []
    return wrong, raises


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_wrong(part: int) -> None:
    """No layout that is accepted gives anything but what one device gives."""
    torch.set_num_threads(1)
    wrong = [text for at in FAST[part::PARTS] for text in outcomes(op_db[at], 1, 2)[0]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_wrong_in_the_whole_database() -> None:
    """And no more operations than before are refused."""
    torch.set_num_threads(1)
    found = {named(op): outcomes(op, 2, 12) for op in op_db}
    wrong = [text for texts, _ in found.values() for text in texts]
    assert not wrong, "\n".join(wrong)
    unsupported = sorted(name for name, (_, raises) in found.items() if raises)
    assert len(unsupported) <= UNSUPPORTED, "\n".join(unsupported)
