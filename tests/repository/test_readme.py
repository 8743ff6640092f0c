"""README: its code runs and prints what is shown, its commands and its reference are complete.

`python -m tests.repository.test_readme` stores the current printed blocks and reference.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import fshard as fs

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REFERENCE = re.compile(r"(?<=<!-- reference -->\n).*(?=<!-- end of reference -->)", re.DOTALL)
STORE = "run python -m tests.repository.test_readme"
GROUPS = {
    "Layouts": "Mesh P PartitionSpec Spec Sharded parse visualize Picture",
    "Global tensors and pairs": "shard unshard scatter from_local reshard zeros ones full empty "
    "arange eye tril triu zeros_like ones_like full_like empty_like from_dtensor to_dtensor",
    "Programs": "redistribute Program Batch Pending lower_bound Bound Cost Topology Link Torus "
    "calibrate",
    "Steps": "Step AllGather AllReduce AllSlice AllToAll Cast CollectivePermute Exchange "
    "HaloExchange HaloReduce InvariantToReduced ReducedToInvariant ReduceScatter Remesh "
    "ReplicatedToUnreduced ShardedToUnreduced",
    "Per-device functions": "shard_map local_map smap typeof LocalType simulate init",
    "Collectives": "psum pmean pmax pmin pprod pargmax pargmin all_gather psum_scatter all_to_all "
    "pswapaxes ragged_all_to_all ppermute pshuffle pbroadcast pcast axis_index axis_size "
    "all_gather_matmul matmul_reduce_scatter start",
    "Operations and functions for one device": "apply on_pairs propagate Strategy partition "
    "Partition Roofline StepMemory auto Auto constrain rule Rule Mode register_rule "
    "register_decomposition",
    "Operations with results of a stated size": "nonzero masked_select unique bincount",
    "Space, other systems, random numbers, state, tests, logs and errors": "domain interop random "
    "state testing comm_log "
    "CommLog ShardingError",
}


def printed_blocks() -> list[tuple[str, str]]:
    """Return the stored text block after each python block and the text that the code prints.

    The blocks run from top to bottom and share their names.
    """
    namespace: dict[str, object] = {"__name__": "readme"}
    pairs: list[tuple[str, str]] = []
    printed = ""
    for kind, body in BLOCK.findall(README.read_text()):
        if kind == "text":
            pairs.append((body, printed))
            printed = ""
            continue
        assert printed == "", "README.md shows the output of each python block that prints"
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(body, "script.py", "exec"), namespace)
        printed = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
    assert printed == ""
    return pairs


def reference() -> str:
    """Return all public names by group, each group a paragraph."""
    paragraphs = []
    for title, names in GROUPS.items():
        listed = ", ".join(f"`{name}`" for name in names.split())
        paragraphs.append(textwrap.fill(f"**{title}**: {listed}", 110, break_on_hyphens=False))
    return "\n" + "\n\n".join(paragraphs) + "\n\n"


def command(name: str) -> str:
    """Return the shell command that README.md marks with `name`."""
    text = README.read_text()
    (line,) = re.findall(rf"^<!-- command: {name} -->\n```bash\n(.*)\n```$", text, re.MULTILINE)
    return str(line)


def test_python_blocks_print_the_text_blocks() -> None:
    pairs = printed_blocks()
    assert len(pairs) >= 3
    for stored, printed in pairs:
        assert stored == printed, STORE


def test_reference_lists_every_public_name() -> None:
    names = " ".join(GROUPS.values()).split()
    assert sorted(names) == sorted(fs.__all__)
    (stored,) = REFERENCE.findall(README.read_text())
    assert stored == reference(), STORE


def test_linked_files_exist() -> None:
    text = README.read_text()
    files = re.findall(r"\]\((\w+/\w+\.ipynb)\)", text) + re.findall(r"`(examples/\w+\.py)`", text)
    files += re.findall(r"`(fshard/\w+)`", text)
    benchmarks = {path.stem for path in (ROOT / "tests" / "benchmarks").glob("bench_*.py")}
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert benchmarks == {*re.findall(r"`(bench_\w+)`", text)}


@pytest.mark.parametrize("name", ["main", "tests"])
def test_commands_install_everything(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (package for package in project["dependencies"] if package.startswith("torch"))
    lowest = re.findall(r">=(\d+\.\d+)", torch)[0]
    text = command(name)
    assert text.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert f" torch=={lowest}.0 " in text, "README.md must install pyproject.toml's lower bound"


def test_commands_name_existing_files() -> None:
    assert "-m pytest" in command("tests")
    (script,) = re.findall(r"\S+\.py", command("main"))
    assert (ROOT / script).is_file()


def test_ci_runs_the_readme_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "command: tests" in script
    assert not re.search(r"^[^#]*\b(pip|pytest|venv)\b", script, re.MULTILINE)


def store() -> None:
    """Write the current printed blocks and reference into README.md."""
    blocks = iter(printed_blocks())

    def fresh(match: re.Match[str]) -> str:
        return f"```text\n{next(blocks)[1]}```" if match[1] == "text" else match[0]

    text = BLOCK.sub(fresh, README.read_text())
    README.write_text(REFERENCE.sub(lambda _: reference(), text))
    sys.stdout.write("stored README.md\n")


if __name__ == "__main__":
    store()
