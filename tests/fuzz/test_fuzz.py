"""The fuzzer runs cases of every kind and reports failures with the command that repeats them."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests.fuzz import __main__ as command_line
from tests.fuzz import cases
from tests.fuzz.mapped_bodies import LOCAL, MappedCase


@pytest.mark.parametrize("kind", sorted(cases.KINDS))
def test_cases_agree_with_one_device(kind: str) -> None:
    failures = [cases.failure_of(kind, 0, number) for number in range(12)]
    assert failures == [None] * 12


def test_wrong_results_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(self: MappedCase, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [y + 1e-3 for y in MappedCase.dense(self, xs)]

    monkeypatch.setattr(MappedCase, "mapped", wrong)
    assert command_line.main(["--kind", "mapped", "--cases", "2", "--seed", "5"]) == 1
    out = capsys.readouterr().out
    assert "python -m tests.fuzz --kind mapped --seed 5 --first 1 --cases 1" in out
    assert "Tensor-likes are not close" in out
    assert out.endswith("2 cases (2 mapped), 2 failed\n")


def test_mapped_cases_use_every_operation() -> None:
    rows = [row.name for number in range(400) for row in MappedCase(Random(number)).rows]
    collectives = {"psum", "pmean", "pmax", "pmin", "all_gather", "all_gather_tiled",
                   "psum_scatter", "all_to_all", "ppermute", "pshuffle", "pbroadcast",
                   "axis_index"}  # fmt: skip
    assert set(rows) == collectives | {*LOCAL}
