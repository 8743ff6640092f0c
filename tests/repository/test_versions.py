"""Versions of PyTorch that the package declares and imports with."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fshard._torch import SUPPORTED, check_version

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("version", ["2.13.0", "2.14.1+cu130", "2.13.0a0+git1"])
def test_supported_versions_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["2.12.1", "2.15.0+cu130", "2.130.0", "3.0.0"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ImportError, match=rf"given: PyTorch {version.split('+')[0]}[\s\S]*2\.13"):
        check_version(version)


def test_requirement_is_the_supported_versions() -> None:
    major, minor = SUPPORTED[-1].split(".")
    needs = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    assert f"torch>={SUPPORTED[0]},<{major}.{int(minor) + 1}" in needs
