"""`fs.testing.meshes` and the pytest plugin, simulated; refusals."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs

ROOT = Path(__file__).parent.parent.parent
USERS_TEST = """
import torch
import fshard as fs

@fs.testing.meshes({"x": 2}, {"x": 2, "y": 3})
def test_mesh(mesh):
    assert isinstance(mesh, fs.Mesh)

class TestMethods:
    @fs.testing.meshes({"x": 2}, processes=True)
    def test_method(self, mesh):
        assert mesh.size == 2

def test_log(comm_log):
    x = fs.shard(torch.arange(4.0), fs.Mesh(x=2), fs.P("x"))
    fs.reshard(x, fs.P())
    assert comm_log.counts["all_gather", "x"] == 1

def test_fixture(run_ranks):
    import operator
    assert callable(run_ranks)
"""


@fs.testing.meshes({"x": 2}, fs.Mesh(x=2, y=3))
@pytest.mark.parametrize("rows", [6, 12])
def test_cases_are_meshes(mesh: fs.Mesh, rows: int) -> None:
    pair = fs.shard(torch.arange(float(rows)), mesh, fs.P(mesh.axes))
    assert torch.equal(fs.unshard(pair), torch.arange(float(rows)))


def test_a_mesh_is_required() -> None:
    with pytest.raises(fs.ShardingError, match="at least one mesh"):
        fs.testing.meshes()


def test_the_argument_is_required() -> None:
    def test(devices: Any) -> None: ...

    with pytest.raises(fs.ShardingError, match="the test must have an argument mesh"):
        fs.testing.meshes({"x": 2})(test)


def test_plugin_gives_fixtures(tmp_path: Path) -> None:
    """The plugin is loaded by its module, so that the test does not depend on the installation."""
    (tmp_path / "test_user.py").write_text(USERS_TEST)
    plugin = ["-p", "no:fshard", "-p", "fshard.testing.pytest_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, str(tmp_path)],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "6 passed" in done.stdout, done.stdout + done.stderr
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert entry == {"pytest11": {"fshard": "fshard.testing.pytest_plugin"}}
