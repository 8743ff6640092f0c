"""Roll calls of four processes that come early, late, or not at all."""

from __future__ import annotations

import os
import random
import time

import fshard as fs
from fshard import Mesh
from fshard.run.transports.roll_call import RollCalls
from tests.helpers.gloo.harness import run_ranks


def answers(mesh: Mesh) -> list[tuple[bool, bool]]:
    """Return, for each roll call in which this rank takes part, the answer and the right one."""
    fs.init(mesh, timeout=30)
    rank = int(os.environ["RANK"])
    common, own, pairs = random.Random(0), random.Random(rank), []
    for _ in range(60):
        calls = RollCalls(mesh, "f")
        for _ in range(common.randrange(4)):
            takes_part = [common.random() < 0.8 for _ in range(mesh.size)]
            if own.random() < 0.1:
                time.sleep(own.random() * 0.02)
            if takes_part[rank]:
                pairs.append((calls.have_all_come(), all(takes_part)))
            else:
                calls.pass_by()
        calls.end()
    return pairs


def test_answers_do_not_depend_on_time() -> None:
    for pairs in run_ranks(4, answers, Mesh(x=4)):
        assert {right for _, right in pairs} == {True, False}
        assert all(answer == right for answer, right in pairs)
