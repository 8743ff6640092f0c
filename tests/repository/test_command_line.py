"""`python -m fshard`: output, errors and exit status."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import fshard as fs
from fshard.__main__ import main

SRC, DST, MESH = "f32[1024@dp,512@tp]", "f32[1024@(dp,tp),512]", "dp=2,tp=4"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def test_prints_layouts_program_cost_and_bound(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, SRC, DST, "--mesh", MESH)
    assert (status, err) == (0, "")
    mesh = fs.Mesh(dp=2, tp=4)
    src, dst = fs.parse(SRC, mesh), fs.parse(DST, mesh)
    values = (fs.visualize(src), fs.visualize(dst), fs.redistribute(src, dst).explain())
    assert out == "".join(f"{value}\n\n" for value in values)
    assert max(map(len, out.splitlines())) <= 80
    assert "bytes received     196,608 B    196,608 B  1.00x" in out
    assert "peak memory        262,144 B    262,144 B  1.00x" in out
    assert "all_to_all(tp, dim 1 -> 0)  f32[1024@(dp,tp),512]  196,608 B" in out
    assert "\x1b" not in out


def test_command_prints_errors_to_stderr() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "fshard", "f32[8@tq]", "f32[8]", "--mesh", "dp=2,tp=4"],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=200,
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == (
        "fs.Spec(P('tq'), shape=(8,))\n"
        "  given: axis 'tq' on Mesh(dp=2, tp=4)\n"
        "  rule:  an axis must be one of dp, tp\n"
        "  fix:   did you mean 'tp'?\n"
    )


def test_topology_option_changes_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    _, node, _ = run(capsys, SRC, DST, "--mesh", MESH)
    arguments = ("--mesh", MESH, "--topology", "cluster", "--node-size", "2")
    _, cluster, _ = run(capsys, SRC, DST, *arguments)
    assert "topology node" in node
    assert "cluster, nodes of 2" in cluster
    prog = fs.redistribute(*(fs.parse(text, fs.Mesh(dp=2, tp=4)) for text in (SRC, DST)))
    for out, topology in ((node, fs.Topology.node()), (cluster, fs.Topology.cluster(2))):
        last_line = out.strip().splitlines()[-1]
        assert last_line.split() == ["time", f"{prog.cost(topology).time * 1e6:.3g}", "µs"]


def test_topologies_of_machines(capsys: pytest.CaptureFixture[str]) -> None:
    specs = [fs.parse(text, fs.Mesh(dp=2, tp=4)) for text in (SRC, DST)]
    for name, topology in [
        ("dgx-a100", fs.Topology.dgx_a100()),
        ("dgx-h100", fs.Topology.dgx_h100()),
        ("gb200-nvl72", fs.Topology.gb200_nvl72()),
        ("cpu-host", fs.Topology.cpu_host()),
    ]:
        status, out, _ = run(capsys, SRC, DST, "--mesh", MESH, "--topology", name)
        assert status == 0
        assert str(fs.redistribute(*specs, topology=topology).explain()) in out
        arguments = ("--topology", name, "--node-size", "4")
        status, _, err = run(capsys, SRC, DST, "--mesh", MESH, *arguments)
        assert (status, "--topology cluster, or leave it out" in err) == (2, True)


def test_topologies_of_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    topology, path = fs.Topology.of({"dp": fs.Link(1e-6, 1e9)}, launch=1e-3), tmp_path / "x.json"
    topology.save(path)
    specs = [fs.parse(text, fs.Mesh(dp=2, tp=4)) for text in (SRC, DST)]
    _, out, _ = run(capsys, SRC, DST, "--mesh", MESH, "--topology", str(path))
    assert str(fs.redistribute(*specs, topology=topology).explain()) in out


def test_objective_and_max_memory_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, SRC, DST, "--mesh", MESH, "--objective", "bytes")[0] == 0
    assert run(capsys, SRC, DST, "--mesh", MESH, "--max-memory", "262144")[0] == 0
    status, out, err = run(capsys, SRC, DST, "--mesh", MESH, "--max-memory", "262143")
    assert (status, out) == (2, "")
    assert "max_memory=262143" in err
    assert "fix:   give max_memory=262144, the least there is" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["f32[8@dp", DST, "--mesh", MESH], "a spec must read dtype[size@axis"),
        (["f32[7@dp]", "f32[7]", "--mesh", MESH], "2 shards must divide the dim; 7 % 2 = 1"),
        (["f32[8]", "f32[9]", "--mesh", MESH], "source and target must have the same global shape"),
        (["f23[8]", "f32[8]", "--mesh", MESH], "did you mean 'f32'?"),
        (["f32[8]", "f32[8]", "--mesh", "dp=2,tp"], "given: 'tp' in 'dp=2,tp'"),
        (["f32[8]", "f32[8]", "--mesh", "dp=2,dp=2"], "each axis once"),
        (["f32[8]", "f32[8]", "--mesh", "dp=0"], "the size of an axis must be an int"),
        (["f32[8]", "f32[8]", "--mesh", "d-p=2"], "an axis name must be a Python identifier"),
        (["f32[8]", "f32[8]", "--mesh", MESH, "--node-size", "4"], "--topology cluster"),
        (["f32[8]", "f32[8]", "--mesh", MESH, "--topology", "cluster", "--node-size", "0"],
         "a node must have at least 1 device"),
        (["f32[8]", "f32[8]", "--mesh", MESH, "--topology", "dgx"], "did you mean 'dgx-"),
        (["f32[8]", "f32[8]", "--mesh", MESH, "--topology", "no.json"], "No such file"),
    ],
)  # fmt: skip
def test_errors_go_to_stderr(
    capsys: pytest.CaptureFixture[str], arguments: Sequence[str], expected: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert expected in err
    assert "Traceback" not in err


def test_usage_names_the_missing_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([SRC, DST])
    assert ended.value.code == 2
    assert "required: --mesh" in capsys.readouterr().err


def test_colours_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    _, out, _ = run(capsys, SRC, DST, "--mesh", MESH)
    assert "\x1b[" in out
    assert "48;2;" in out


def test_output_has_at_most_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, wide, _ = run(capsys, SRC, DST, "--mesh", MESH)
    monkeypatch.setenv("COLUMNS", "60")
    _, narrow, _ = run(capsys, SRC, DST, "--mesh", MESH)
    assert max(map(len, wide.splitlines())) == 80
    assert max(map(len, narrow.splitlines())) <= 60
