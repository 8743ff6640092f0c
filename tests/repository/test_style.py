"""Linting, formatting and type checking, as tests: one command runs them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fshard._torch import SUPPORTED

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "arguments",
    [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]],
    ids=["ruff-check", "ruff-format", "mypy"],
)
def test_tool_is_content(arguments: list[str]) -> None:
    if arguments == ["mypy"] and not torch.__version__.startswith(SUPPORTED[0]):
        pytest.skip(f"annotations of PyTorch {SUPPORTED[0]} are checked")
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=390,
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
