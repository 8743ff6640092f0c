"""Loggers of plans and collectives, switched on by `FSHARD_LOGS`."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

import fshard as fs
from fshard.run.transports.base import observe
from fshard.run.transports.running_modules import as_in_module
from fshard.show.comm import comm_logging
from fshard.show.comm.comm_logging import configure_logs

SCRIPT = """
import sys, torch, fshard as fs
from fshard.show.comm.comm_logging import configure_logs
x = fs.shard(torch.ones(4), fs.Mesh(x=2), fs.P("x"))
fs.reshard(x, fs.P())
print("both", file=sys.stderr)
configure_logs("plan,comm")
fs.reshard(x, fs.P())
"""


def test_variable_prints_plans_and_collectives() -> None:
    done = subprocess.run(  # noqa: PLW1510 - errors are in the text
        [sys.executable, "-c", SCRIPT], env={**os.environ, "FSHARD_LOGS": "plan"},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    plans, _, both = done.stderr.partition("both\n")
    assert "fshard.plan: f32[4@x] -> f32[4] on Mesh(x=2)\n  all_gather(x, dim 0)" in plans
    assert "fshard.comm" not in plans
    assert "fshard.comm: rank 0: all_gather over x, 8 B sent, forward, the program to" in both


def test_unknown_logs_are_refused() -> None:
    with pytest.raises(fs.ShardingError, match=r"names must be among plan, comm(.|\n)*'comm'"):
        configure_logs("com")


def test_plans_are_logged_where_their_logger_is_enabled(caplog: pytest.LogCaptureFixture) -> None:
    src = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(1994,))
    with caplog.at_level(logging.DEBUG, logger="fshard.plan"):
        fs.redistribute(src, src.replace(partition=fs.P()))
        fs.redistribute(src, src.replace(partition=fs.P()))  # from the cache
    assert len(caplog.records) == 1
    assert "f32[1994@x] -> f32[1994]" in caplog.records[0].getMessage()


def test_collectives_are_logged_with_their_modules(caplog: pytest.LogCaptureFixture) -> None:
    pair = fs.shard(torch.ones(4), fs.Mesh(x=2), fs.P("x"))
    with caplog.at_level(logging.DEBUG, logger="fshard.comm"), observe(comm_logging._log):
        as_in_module("Net.up", fs.reshard, pair, fs.P())
    assert ", all_gather(x, dim 0)) in Net.up at " in caplog.records[0].getMessage()
