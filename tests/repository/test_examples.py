"""The examples run as the README says, simulated and on four processes, with equal losses.

The processes have torchrun's environment; slow tests start all examples by torchrun itself. Those
whose four ranks need many seconds are simulated alone by default.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

import fshard as fs
from tests.helpers.gloo.example_runs import run_all
from tests.helpers.gloo.harness import Ranks

ROOT = Path(__file__).parent.parent.parent
TRAIN_LM = ROOT / "examples" / "train_lm.py"
DATA_PARALLEL = ROOT / "examples" / "data_parallel.py"
PARTITION_GPT = ROOT / "examples" / "partition_gpt.py"
STATE = ("fsdp", "zero_adamw", "muon")
"""Examples whose `main` trains beside one device and prints bytes beside their formula."""
RINGS = {"ring_attention": (4, 64), "point_cloud_knn": (3, 80)}
"""Examples of rings, and the arguments of their `main`."""
HEAT_EQUATION = ROOT / "examples" / "heat_equation.py"
SHARDED_UNET = ROOT / "examples" / "sharded_unet.py"
UNET_PICTURE = Path(tempfile.gettempdir()) / f"sharded_unet_{os.getpid()}.png"
HAS_PHOTOGRAPHS = all(importlib.util.find_spec(name) for name in ("sklearn", "PIL"))
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
PARTITION_LLAMA = ROOT / "examples" / "partition_llama.py"
TINY = ["--steps", "3", "--batch", "4", "--length", "8", "--width", "16"]
GRACE_SECONDS = 40
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--no-python"]
COMMANDS = {
    "train_lm": [str(TRAIN_LM), *TINY],
    "data_parallel": [str(DATA_PARALLEL), "50"],
    "partition_gpt": [str(PARTITION_GPT), "10"],
    **{name: [str(ROOT / "examples" / f"{name}.py"), "3"] for name in STATE},
    **{
        name: [str(ROOT / "examples" / f"{name}.py"), *map(str, args)]
        for name, args in RINGS.items()
    },
    "heat_equation": [str(HEAT_EQUATION), "20"],
}
if HAS_PHOTOGRAPHS:
    COMMANDS["sharded_unet"] = [str(SHARDED_UNET), "2", "8", str(UNET_PICTURE)]
if HAS_TRANSFORMERS:
    COMMANDS["partition_llama"] = [str(PARTITION_LLAMA), "10"]
SLOW = {"zero_adamw", "muon", "sharded_unet", "partition_llama"}
"""Examples that run on processes in slow tests alone."""
UNDER_TORCHRUN = pytest.mark.parametrize(
    "torchrun", [False, pytest.param(True, marks=pytest.mark.slow)]
)
RUN_ALL = """
import os
from tests.helpers.gloo.example_runs import run_all
outputs = run_all(COMMANDS)
if os.environ["RANK"] == "0":
    for name, text in outputs.items():
        print(f"[{name}]", text, sep=chr(10), end="")
"""


def run(command: Sequence[str], timeout: float) -> tuple[str, str]:
    """Return stdout and stderr of a command that must succeed within `timeout` seconds."""
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
    """Terminate a process; only SIGTERM lets torchrun end its ranks, which have own sessions."""
    process.terminate()
    try:
        process.communicate(timeout=GRACE_SECONDS)
    finally:
        process.kill()
        process.communicate()


def losses(out: str) -> list[float]:
    """Return the printed losses of the steps."""
    return [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)", out, re.MULTILINE)]


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import an example as a module, in an environment without torchrun."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.syspath_prepend(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@cache
def on_ranks() -> dict[str, str]:
    """Return the outputs of rank 0 of the fast examples, from one start of four processes."""
    commands = {name: argv for name, argv in COMMANDS.items() if name not in SLOW}
    with closing(Ranks(4, init=False)) as ranks:
        outputs: dict[str, str] = ranks.run(run_all, commands, timeout=280)[0]
    return outputs


@cache
def launched() -> dict[str, str]:
    """Return the outputs of all examples under torchrun, launched once."""
    code = f"COMMANDS = {COMMANDS!r}\n{RUN_ALL}"
    out, err = run([sys.executable, *TORCHRUN, sys.executable, "-W", "error", "-c", code], 280)
    assert err == ""
    _, *parts = re.split(r"^\[(\w+)\]$", out, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def on_processes(name: str) -> str:
    """Return the output of an example on four processes."""
    return launched()[name] if name in SLOW else on_ranks()[name]


@pytest.mark.timeout(300)
def test_train_lm_simulated_agrees_with_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert command(monkeypatch, load(TRAIN_LM, monkeypatch), "--steps", "20") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.endswith("The same as on one device, to within 1e-09.\n")
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert "Mesh(dp=2, sp=2, tp=2)   one device" in out
    values = losses(out)
    assert len(values) == 11
    assert values[-1] < 3.3 < 4.7 < values[0]
    (of_losses,), (of_params,) = (
        re.findall(rf"of {kind} +(\S+)", out) for kind in ("losses", "parameters")
    )
    assert float(of_losses) < 1e-9
    assert float(of_params) < 1e-9


@pytest.mark.timeout(300)
def test_train_lm_on_processes_agrees_with_simulation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = on_processes("train_lm")
    module = load(TRAIN_LM, monkeypatch)
    assert command(monkeypatch, module, *TINY, "--mesh", "sp=2,tp=2") == 0
    assert "Mesh(dp=1, sp=2, tp=2)   one device" in out
    assert out.endswith("The same as on one device, to within 1e-09.\n")
    assert len(losses(out)) == 3
    assert losses(out) == pytest.approx(losses(capsys.readouterr().out), rel=0, abs=2e-10)


@pytest.mark.timeout(300)
def test_data_parallel_agrees_with_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(DATA_PARALLEL, monkeypatch).main(50) == 0
    simulated, out = capsys.readouterr().out, on_processes("data_parallel")
    assert max(map(len, simulated.splitlines())) <= 80
    first, last = losses(simulated)
    assert last < 0.9 < 1.09 < first
    assert "2 collectives, 4,664 B sent by the busiest rank" in simulated
    assert losses(out) == pytest.approx([first, last], rel=0, abs=2e-10)
    for text in (out, simulated):
        (difference,) = re.findall(r"^Losses differ by at most (\S+)\.$", text, re.MULTILINE)
        assert float(difference) < 1e-12


@pytest.mark.timeout(300)
def test_partition_gpt_agrees_with_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(PARTITION_GPT, monkeypatch).main(10) == 0
    simulated, out = capsys.readouterr().out, on_processes("partition_gpt")
    assert max(map(len, simulated.splitlines())) <= 80
    first, last = losses(simulated)
    assert last < 2.7 < 3.3 < first
    assert losses(out) == pytest.approx([first, last], rel=0, abs=2e-10)
    for text in (out, simulated):
        # Forward: two per block, the word count and the loss. Backward: two per block, and the
        # parameters' gradients in one bucket over dp.
        assert re.search(r"^total +6 .* B +5 ", text, re.MULTILINE)
        (difference,) = re.findall(r"^Losses differ by at most (\S+)\.$", text, re.MULTILINE)
        assert float(difference) < 1e-12


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RINGS)
def test_rings_agree_with_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert load(ROOT / "examples" / f"{name}.py", monkeypatch).main(*RINGS[name]) == 0
    simulated, out = capsys.readouterr().out, on_processes(name)
    assert max(map(len, simulated.splitlines())) <= 80
    assert losses(out) == pytest.approx(losses(simulated), rel=0, abs=2e-10)
    values = losses(simulated)
    assert values[-1] < values[0] or len(values) == 1
    for text in (simulated, out):
        (difference,) = re.findall(r"^Losses differ by at most (\S+)\.$", text, re.MULTILINE)
        assert float(difference) < 1e-9


@pytest.mark.timeout(300)
def test_heat_equation_agrees_with_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(HEAT_EQUATION, monkeypatch).main(20) == 0
    simulated, out = capsys.readouterr().out, on_processes("heat_equation")
    assert max(map(len, simulated.splitlines())) <= 80
    assert "f64[14@rows:9+5,26@columns:16+10,8]" in simulated
    assert re.search(r"halo_exchange +rows, columns +20 ", simulated)
    # The field, and its picture, are the same; processes count their own bytes alone.
    for line in ("heat ", "  "):
        assert [x for x in simulated.splitlines() if x.startswith(line)] == [
            x for x in out.splitlines() if x.startswith(line)
        ]


@pytest.mark.skipif(not HAS_PHOTOGRAPHS, reason="the extra `examples` is not installed")
@pytest.mark.timeout(300)
@UNDER_TORCHRUN
def test_sharded_unet_agrees_with_one_device(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    torchrun: bool,
) -> None:
    picture = tmp_path / "unet.png"
    assert load(SHARDED_UNET, monkeypatch).main(2, 8, str(picture)) == 0
    simulated = capsys.readouterr().out
    out = on_processes("sharded_unet") if torchrun else simulated
    for text in (simulated, out):
        assert max(map(len, text.replace(str(picture), "").splitlines())) <= 100
        (difference,) = re.findall(r"^Losses differ by at most (\S+)\.$", text, re.MULTILINE)
        assert float(difference) < 1e-10
    assert "f64[2,3,53@h:29+24,80@w:26+54]" in simulated
    assert "all_gather" not in simulated
    assert losses(out) == pytest.approx(losses(simulated), rel=0, abs=2e-10)
    assert len(losses(out)) == 2
    assert picture.stat().st_size
    if torchrun:
        assert picture.read_bytes() == UNET_PICTURE.read_bytes()
        UNET_PICTURE.unlink()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "torchrun"),
    [("fsdp", True), ("zero_adamw", False), ("muon", False),
     *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("zero_adamw", "muon"))],
)  # fmt: skip
def test_layouts_of_state_agree_with_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, torchrun: bool
) -> None:
    steps = 21 if name == "muon" else 16
    assert load(ROOT / "examples" / f"{name}.py", monkeypatch).main(steps) == 0
    simulated = capsys.readouterr().out
    out = on_processes(name) if torchrun else simulated
    for text in (simulated, out):
        assert max(map(len, text.splitlines())) <= 80
        (difference,) = re.findall(r"^Losses differ by at most (\S+)\.$", text, re.MULTILINE)
        assert float(difference) < 1e-9
        rows = re.findall(r"([\d,]+) +8 x [\d,]+ / \d+ +([\d,]+)", text)
        assert len(rows) == {"fsdp": 3, "zero_adamw": 12, "muon": 4}[name]
        assert all(held == formula for held, formula in rows)
    first, *_, last = losses_of_example(simulated)
    assert last < first - 1
    assert losses_of_example(out)[0] == pytest.approx(first, rel=0, abs=2e-10)


def losses_of_example(out: str) -> list[float]:
    """Return the printed losses on the mesh."""
    return [float(loss) for loss in re.findall(r"(?:  loss|->) (\d\S+)", out)]


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=r'transformers: pip install -e "\.\[models\]"'):
        load(PARTITION_LLAMA, monkeypatch)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="the extra `models` is not installed")
@pytest.mark.timeout(300)
@UNDER_TORCHRUN
def test_partition_llama_agrees_with_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], torchrun: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that transformers imports
        assert load(PARTITION_LLAMA, monkeypatch).main(10) == 0
    simulated = capsys.readouterr().out
    on_ranks = on_processes("partition_llama") if torchrun else simulated
    first, last = losses(simulated)
    assert last < 2.7 < 3.1 < first
    assert losses(on_ranks) == pytest.approx([first, last], rel=0, abs=1e-5)
    for text in (on_ranks, simulated):
        # Megatron-LM's: one for attention and one for the MLP of each of two layers.
        assert re.search(r"^all_reduce +tp +4 .* B +4 ", text, re.MULTILINE)
        (difference,) = re.findall(r"^Losses differ by at most (\S+)\.$", text, re.MULTILINE)
        assert float(difference) < 1e-5


# -- in this process -------------------------------------------------------------------------


@pytest.fixture
def train_lm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the example `train_lm` as a module."""
    return load(TRAIN_LM, monkeypatch)


def command(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *arguments: str) -> Any:
    """Return the exit status of the example with these arguments."""
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


def test_train_lm_collectives(train_lm: ModuleType) -> None:
    layers = 3
    config = train_lm.Config(steps=1, batch=4, length=8, width=16, layers=layers)
    mesh = fs.Mesh(dp=2, sp=2, tp=2)
    weights = train_lm.initial_weights(train_lm.model_specs(mesh, config), config)
    console = Console(quiet=True)
    log = train_lm.train_sharded(mesh, weights, train_lm.read_text(), config, console).log
    assert log.forward.counts == {
        ("all_reduce", "tp"): 1 + 2 * layers + 3,  # embedding, two per layer, cross entropy
        ("all_gather", "sp"): layers,  # keys and values in one
        ("all_reduce", ("dp", "sp")): 1,  # the loss
    }
    assert log.backward.counts == {
        ("all_reduce", "tp"): 2 * layers + 1,  # inputs that are invariant along tp
        ("reduce_scatter", "sp"): layers,
        ("all_reduce", ("dp", "sp")): 1,  # all gradients in one launch
    }
    doubles = layers * 2 * 2 * 2 * 4 * 4  # [2, b, h, t, d / heads], to the one other rank
    assert log.forward.bytes["all_gather", "sp"] == 8 * doubles
    assert log.backward.bytes["reduce_scatter", "sp"] == 8 * doubles


@pytest.mark.parametrize("broken", ["lr", "nan"])
def test_train_lm_reports_a_difference(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    train_lm: ModuleType,
    broken: str,
) -> None:
    adamw = train_lm.adamw

    def broken_adamw(shards: Any, grads: Any, state: Any, step: int, lr: float) -> None:
        adamw(shards, grads, state, step, lr * (1 + 1e-6) if broken == "lr" else torch.nan)

    monkeypatch.setattr(train_lm, "adamw", broken_adamw)
    assert command(monkeypatch, train_lm, *TINY, "--layers", "1") == 1
    assert "NOT the same as on one device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--mesh", "dp"], "argument --mesh: invalid mesh value: 'dp'"),
        (["--mesh", "tp=0"], "argument --mesh: invalid mesh value: 'tp=0'"),
        (["--mesh", "tp=8"], "dim 2 of size 4 over tp=8"),
        (["--batch", "15"], "dim 0 of size 15 over dp=2"),
        (["--steps", "0"], "steps, batch, length, heads and layers must be at least 1"),
        (["--dtype", "int64"], "invalid choice: 'int64'"),
    ],
)
def test_train_lm_refuses_bad_options(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    train_lm: ModuleType,
    arguments: list[str],
    expected: str,
) -> None:
    with pytest.raises(SystemExit) as caught:
        command(monkeypatch, train_lm, *arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err


def test_train_lm_refuses_a_mesh_that_is_not_the_world_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], train_lm: ModuleType
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as caught:
        command(monkeypatch, train_lm, "--mesh", "tp=2")
    assert caught.value.code == 2
    assert "has 2 devices, torchrun started 4 processes" in capsys.readouterr().err
