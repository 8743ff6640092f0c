"""The notebooks run, and print what is stored in them.

`python -m tests.repository.test_notebooks` runs them and stores what they print now.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@contextmanager
def kernel() -> Iterator[KernelManager]:
    """Start a kernel that runs one notebook after another: it imports PyTorch once."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=environment, cwd=str(ROOT / "notebooks"))
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


def execute(notebook: Any, manager: KernelManager) -> None:
    """Run a notebook in a new session of a kernel; raise the error of a cell."""
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=100)
        client.execute_interactive("get_ipython().reset(new_session=True)", store_history=False,
                                   timeout=100)  # fmt: skip
    finally:
        client.stop_channels()
    run = NotebookClient(notebook, manager, timeout=300, record_timing=False,
                         coalesce_streams=True)  # fmt: skip
    try:
        run.execute()
    finally:
        run.kc.stop_channels()


def executed(path: Path, manager: KernelManager) -> Any:
    """Return the notebook of a file with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    execute(notebook, manager)
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def outputs(notebook: Any) -> list[dict[str, str]]:
    """Return the outputs of each code cell by mime type; printed text is `stdout` or `stderr`."""
    shown = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        result: dict[str, str] = {"source": cell.source}
        for output in cell.outputs:
            if output.output_type == "stream":
                result[output.name] = result.get(output.name, "") + output.text
            else:
                result |= dict(output.data)
        shown.append(result)
    return shown


@pytest.fixture(scope="module")
def manager() -> Iterator[KernelManager]:
    with kernel() as started:
        yield started


def test_there_are_notebooks() -> None:
    names = [path.name for path in NOTEBOOKS]
    assert names == [
        "01_layouts_and_programs.ipynb",
        "02_shard_map.ipynb",
        "03_changes_of_layout.ipynb",
        "04_operations_on_layouts.ipynb",
        "05_what_it_costs.ipynb",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_fresh(path: Path, manager: KernelManager) -> None:
    stored = nbformat.read(path, as_version=4)
    fresh = executed(path, manager)
    for was, now in zip(outputs(stored), outputs(fresh), strict=True):
        assert was == now, "python -m tests.repository.test_notebooks stores what is printed now"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_form(path: Path) -> None:
    """Clean metadata, every cell executed in order, no warnings, no ANSI codes, no paths."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert dict(notebook.metadata) == METADATA
    assert 15 <= len(notebook.cells) <= 30
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(dict(cell.metadata) == {} for cell in notebook.cells)
    for shown in outputs(notebook):
        assert "stderr" not in shown
        text = "\n".join(value for key, value in shown.items() if key != "source")
        assert "\x1b" not in text
        assert str(ROOT) not in text
        lines = (shown.get("stdout", "") + "\n" + shown.get("text/plain", "")).splitlines()
        assert all(len(line) <= 100 for line in lines)


WRONG = """\
import torch, fshard as fs
w = torch.ones(2, requires_grad=True)
def f(x):
    return x * w
mapped = fs.shard_map(f, mesh=fs.Mesh(x=2), in_specs=fs.P("x"), out_specs=fs.P("x"), check="strict")
try:
    mapped(torch.ones(4))
except fs.ShardingError as error:
    print(str(error).partition("\\n")[0])
"""


def test_errors_name_the_line_of_what_is_typed() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-"], input=WRONG, env=environment, timeout=100,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout == "shard_map(f): mul at <stdin>:4\n", done.stderr


def test_errors_name_the_line_of_a_cell(manager: KernelManager) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(WRONG)])
    execute(notebook, manager)
    assert outputs(notebook)[0]["stdout"] == "shard_map(f): mul at Cell In[1], line 4\n"


def store() -> None:
    with kernel() as manager:
        for path in NOTEBOOKS:
            nbformat.write(executed(path, manager), path)
            sys.stdout.write(f"stored {path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    store()
