"""README: its code runs, and its two commands are what they say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def command(name: str) -> str:
    found = re.findall(rf"^<!-- command: {name} -->\n```bash\n(.*)\n```$", README, re.MULTILINE)
    assert len(found) == 1, f"README.md has one command {name!r}, of one line"
    return str(found[0])


def test_python_blocks_run() -> None:
    """The blocks of the page run from top to bottom, sharing their names."""
    names: dict[str, object] = {"__name__": "readme"}
    for place, block in enumerate(BLOCKS):
        exec(compile(block, f"README.md, python block {place}", "exec"), names)


@pytest.mark.parametrize("name", ["main", "tests"])
def test_commands_do_all_set_up(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (each for each in project["dependencies"] if each.startswith("torch"))
    lowest = re.findall(r">=(\d+\.\d+)", torch)[0]
    text = command(name)
    assert text.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert f" torch=={lowest}.0 " in text, "what is installed is the lower bound of pyproject.toml"


def test_commands_name_files_that_exist() -> None:
    assert "-m pytest" in command("tests")
    (script,) = re.findall(r"\S+\.py", command("main"))
    assert (ROOT / script).is_file()


def test_ci_has_no_command_of_its_own() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "command: tests" in script
    assert not re.search(r"^[^#]*\b(pip|pytest|venv)\b", script, re.MULTILINE)
