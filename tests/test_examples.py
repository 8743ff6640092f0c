"""The examples run as the README says: simulated and under torchrun, with the same numbers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

import fshard as fs

ROOT = Path(__file__).parent.parent
TRAIN_LM = ROOT / "examples" / "train_lm.py"
DATA_PARALLEL = ROOT / "examples" / "data_parallel.py"
PARTITION_GPT = ROOT / "examples" / "partition_gpt.py"
TINY = ["--steps", "3", "--batch", "4", "--length", "8", "--width", "16"]
GRACE_SECONDS = 40
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--no-python"]


def run(command: Sequence[str], timeout: float) -> tuple[str, str]:
    """What a command prints; it must succeed, and is ended if it takes longer."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "FORCE_COLOR")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            end(process)
    assert process.returncode == 0, f"{out}\n{err}"
    return out, err


def end(process: subprocess.Popen[str]) -> None:
    """End a process: torchrun ends its ranks, in sessions of their own, only if it is asked."""
    process.terminate()
    try:
        process.communicate(timeout=GRACE_SECONDS)
    finally:
        process.kill()
        process.communicate()


def losses(out: str) -> list[float]:
    """The losses of the steps, as printed."""
    return [float(each) for each in re.findall(r"^step +\d+  loss (\S+)", out, re.MULTILINE)]


@pytest.mark.timeout(300)
def test_simulated_training_equals_one_device() -> None:
    out, err = run([sys.executable, "-W", "error", str(TRAIN_LM), "--steps", "20"], 240)
    assert err == ""
    assert out.endswith("The same as on one device, to within 1e-09.\n")
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert "Mesh(dp=2, sp=2, tp=2)   one device" in out
    found = losses(out)
    assert len(found) == 11
    assert found[-1] < 3.3 < 4.7 < found[0]
    (apart,), (away,) = (re.findall(rf"of {of} +(\S+)", out) for of in ("losses", "parameters"))
    assert float(apart) < 1e-9
    assert float(away) < 1e-9


@pytest.mark.timeout(300)
def test_torchrun_prints_the_same_losses() -> None:
    script = [sys.executable, "-W", "error", str(TRAIN_LM), *TINY]
    simulated, _ = run(script, 120)
    out, err = run([sys.executable, *TORCHRUN, *script], 240)
    assert err == ""
    assert "Mesh(dp=1, sp=2, tp=2)   one device" in out
    assert out.endswith("The same as on one device, to within 1e-09.\n")
    assert len(losses(out)) == 3
    assert losses(out) == pytest.approx(losses(simulated), rel=0, abs=2e-10)


@pytest.mark.timeout(300)
def test_a_module_is_trained_as_on_one_device() -> None:
    script = [sys.executable, "-W", "error", str(DATA_PARALLEL), "50"]
    simulated, err = run(script, 120)
    assert err == ""
    assert max(map(len, simulated.splitlines())) <= 80
    first, last = losses(simulated)
    assert last < 0.9 < 1.09 < first
    assert "2 collectives, 4,664 B sent by the busiest rank" in simulated  # one each way
    out, err = run([sys.executable, *TORCHRUN, *script], 240)
    assert err == ""
    assert losses(out) == pytest.approx([first, last], rel=0, abs=2e-10)
    for text in (out, simulated):
        (apart,) = re.findall(r"^Losses differ by at most (\S+)\.$", text, re.MULTILINE)
        assert float(apart) < 1e-12


@pytest.mark.timeout(300)
def test_a_gpt_is_partitioned_as_on_one_device() -> None:
    script = [sys.executable, "-W", "error", str(PARTITION_GPT), "10"]
    simulated, err = run(script, 120)
    assert err == ""
    assert max(map(len, simulated.splitlines())) <= 80
    first, last = losses(simulated)
    assert last < 2.7 < 3.3 < first
    out, err = run([sys.executable, *TORCHRUN, *script], 240)
    assert err == ""
    assert losses(out) == pytest.approx([first, last], rel=0, abs=2e-10)
    for text in (out, simulated):
        # Forward two for each block, the count of words and the loss; backward two for each block
        # and one for each parameter.
        assert re.search(r"^total +6 .* B +42 ", text, re.MULTILINE)
        (apart,) = re.findall(r"^Losses differ by at most (\S+)\.$", text, re.MULTILINE)
        assert float(apart) < 1e-12


# -- in this process ------------------------------------------------------------------------


@pytest.fixture
def train_lm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, in an environment without torchrun."""
    monkeypatch.delenv("RANK", raising=False)
    spec = importlib.util.spec_from_file_location("train_lm", TRAIN_LM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_lm", module)
    spec.loader.exec_module(module)
    return module


def command(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *arguments: str) -> Any:
    """The exit status of the example with these arguments."""
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *arguments])
    return module.main()


@pytest.mark.parametrize("mesh", ["tp=1", "dp=4", "sp=4", "tp=4", "dp=2,tp=2", "pp=2,sp=2"])
def test_any_mesh(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    train_lm: ModuleType,
    mesh: str,
) -> None:
    assert command(monkeypatch, train_lm, *TINY, "--layers", "1", "--mesh", mesh) == 0
    assert "The same as on one device" in capsys.readouterr().out


def test_single_precision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], train_lm: ModuleType
) -> None:
    assert command(monkeypatch, train_lm, *TINY, "--dtype", "float32") == 0
    assert "The same as on one device, to within 1e-02." in capsys.readouterr().out


def test_what_is_communicated(train_lm: ModuleType) -> None:
    layers = 3
    config = train_lm.Config(steps=1, batch=4, length=8, width=16, layers=layers)
    mesh = fs.Mesh(dp=2, sp=2, tp=2)
    weights = train_lm.initial_weights(train_lm.model_specs(mesh, config), config)
    quiet = Console(quiet=True)
    log = train_lm.train_sharded(mesh, weights, train_lm.read_text(), config, quiet).log
    assert log.forward.counts == {
        ("all_reduce", "tp"): 1 + 2 * layers + 3,  # embedding, two per layer, cross entropy
        ("all_gather", "sp"): layers,  # keys and values in one
        ("all_reduce", ("dp", "sp")): 1,  # the loss
    }
    assert log.backward.counts == {
        ("all_reduce", "tp"): 2 * layers + 1,  # where what is whole is used for own work
        ("reduce_scatter", "sp"): layers,
        ("all_reduce", ("dp", "sp")): 1,  # every gradient, side by side
    }
    doubles = layers * 2 * 2 * 2 * 4 * 4  # [2, b, h, t, d / heads], to the one other rank
    assert log.forward.bytes["all_gather", "sp"] == 8 * doubles
    assert log.backward.bytes["reduce_scatter", "sp"] == 8 * doubles


@pytest.mark.parametrize("broken", ["lr", "nan"])
def test_a_difference_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    train_lm: ModuleType,
    broken: str,
) -> None:
    adamw = train_lm.adamw

    def other(shards: Any, grads: Any, state: Any, step: int, lr: float) -> None:
        adamw(shards, grads, state, step, lr * (1 + 1e-6) if broken == "lr" else torch.nan)

    monkeypatch.setattr(train_lm, "adamw", other)
    assert command(monkeypatch, train_lm, *TINY, "--layers", "1") == 1
    assert "NOT the same as on one device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--mesh", "dp"], "argument --mesh: invalid mesh value: 'dp'"),
        (["--mesh", "tp=0"], "argument --mesh: invalid mesh value: 'tp=0'"),
        (["--mesh", "tp=8"], "dim 2 of size 4 over tp=8"),
        (["--batch", "15"], "dim 0 of size 15 over dp=2"),
        (["--steps", "0"], "steps, batch, length, heads and layers are at least 1"),
        (["--dtype", "int64"], "invalid choice: 'int64'"),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    train_lm: ModuleType,
    arguments: list[str],
    expected: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, train_lm, *arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err


def test_refuses_a_mesh_of_another_size_than_the_world(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], train_lm: ModuleType
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, train_lm, "--mesh", "tp=2")
    assert ended.value.code == 2
    assert "has 2 devices, torchrun started 4 processes" in capsys.readouterr().err
