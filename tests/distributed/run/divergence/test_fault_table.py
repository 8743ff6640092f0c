"""Faults of one rank on real processes: survivors end in time, and under the check name it."""

from __future__ import annotations

import os
import time
from contextlib import closing

import pytest

import fshard as fs
from fshard import ShardingError
from tests.helpers.gloo.fault_cases import LIMIT, Case, cases, free_port, run_case
from tests.helpers.gloo.harness import Ranks

SMALL = list(cases(small=True))


def assert_ends(case: Case) -> None:
    """Assert that survivors end in time, under the check with errors that name the rank."""
    row = run_case(case)
    if case.check:
        assert row.named, row.texts
        assert row.seconds < LIMIT, row
    else:
        assert row.seconds < case.timeout + LIMIT, row


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_survivors_name_the_fault(case: Case) -> None:
    assert_ends(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in cases(small=False) if c not in SMALL], ids=str)
def test_survivors_name_every_fault(case: Case) -> None:
    assert_ends(case)


# -- fs.init ---------------------------------------------------------------------------------


def init_without(missing: int, port: int | None) -> str:
    """Return the error of fs.init without a rank; rank 0 keeps a store at `port`, unless None."""
    if port is not None:
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if int(os.environ["RANK"]) == missing:
        time.sleep(1.5)
        return ""
    with pytest.raises(ShardingError) as caught:
        fs.init(fs.Mesh(x=2), timeout=1)
    return str(caught.value)


def test_init_names_missing_ranks() -> None:
    rule = "every process of the world must call fs.init within the timeout"
    longer = "fs.init(mesh, timeout=seconds) waits longer"
    port = free_port()
    with closing(Ranks(2, init=False)) as ranks:
        for missing in (0, 1):
            errors = ranks.run(init_without, missing, None)
            assert errors[1 - missing] == (
                f"fs.init\n  given: no rank {missing} of 0..1 within 1 s\n  rule:  {rule}\n"
                f"  fix:   look at the output of rank {missing}; {longer}"
            )
        errors = ranks.run(init_without, 0, port)
        assert errors[1] == (
            f"fs.init\n  given: no answer of rank 0 at 127.0.0.1:{port} within 1 s\n"
            f"  rule:  {rule}\n  fix:   look at the output of rank 0; {longer}"
        )
