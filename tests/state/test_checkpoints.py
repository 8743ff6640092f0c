"""Checkpoints load in every layout, survive crashes, and refuse what is not theirs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

import fshard as fs
from fshard import Mesh, P, Spec
from fshard.layout.tree import flatten
from fshard.state.checkpoints import saving, shard_files, shard_reader
from fshard.state.checkpoints.checkpoint_index import CheckpointIndex, index_checksum
from fshard.state.checkpoints.shard_reader import ShardReader
from tests.helpers.gloo.harness import RankDied, Ranks, run_ranks
from tests.helpers.spec_grid import message
from tests.helpers.strategies import specs

safetensors = pytest.importorskip("safetensors")

MESH = Mesh(dp=2, tp=4)
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8,
    torch.bool, torch.uint16, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
)  # fmt: skip


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).view(shape) % 13).to(dtype)


def state() -> dict[str, Any]:
    """Return a tree of pairs, tensors and values on a 2x4 mesh."""
    return {
        "params": {
            "w": fs.shard(values((8, 12)), MESH, P("dp", "tp")),
            "b": fs.shard(values((7,)), MESH, P("tp")),
            "scale": fs.shard(values(()), MESH, P()),
        },
        "moments": [fs.shard(values((4, 6), torch.bfloat16), MESH, P(None, ("tp", "dp")))],
        "step": 3,
        "rate": 0.1,
        "name": "run",
        "none": None,
        "mask": torch.tensor([True, False]),
    }


def same(a: Any, b: Any) -> bool:
    """Return True for equal trees; pairs count as their global tensors."""
    a, b = (fs.state.tree_unshard(x) for x in (a, b))
    left, right = flatten(a), flatten(b)
    return left[1] == right[1] and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(left[0], right[0], strict=True)
    )


def test_every_leaf_loads_in_other_layouts_and_meshes(tmp_path: Path) -> None:
    tree = state()
    fs.state.save(tmp_path, tree)
    assert same(fs.state.load(tmp_path), tree)
    other = Mesh(x=3)
    loaded = fs.state.load(
        tmp_path,
        {"params": P("x"), "moments": [P(None, "x")], "step": None, "rate": None, "name": None,
         "none": None, "mask": None} | {"params": {"w": P("x"), "b": P("x"), "scale": P()}},
        mesh=other,
    )  # fmt: skip
    assert same(loaded, tree)
    assert str(loaded["params"]["w"].spec) == "f32[8@x:chunk,12]"
    fs.state.verify(tmp_path)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_any_layout_loads_as_any_other(tmp_path_factory: Any, data: Any) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    linear = specs().filter(lambda spec: not spec.partition.unreduced_kinds)
    src = data.draw(linear)
    x = values(src.shape, src.dtype)
    fs.state.save(directory, [fs.shard(x, src)])
    mesh = data.draw(st.sampled_from([Mesh(a=1), Mesh(a=3), Mesh(a=2, b=2)]))
    dims = data.draw(st.permutations([*mesh.axes, *[None] * src.ndim]))[: src.ndim]
    (loaded,) = fs.state.load(directory, [P(*dims)], mesh=mesh)
    assert torch.equal(fs.unshard(loaded), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    x = values((4, 6), dtype)
    fs.state.save(tmp_path, {"x": fs.shard(x, MESH, P("tp", "dp"))})
    y = fs.state.load(tmp_path, P(None, "a"), mesh=Mesh(a=2))["x"]
    assert y.dtype == dtype
    assert torch.equal(torch.cat(y.local, 1).view(torch.uint8), x.view(torch.uint8))


def test_specs_cast_and_name_containers(tmp_path: Path) -> None:
    Moments = namedtuple("Moments", "mean square")
    tree = {"opt": Moments(torch.ones(4), torch.zeros(4)), "o": OrderedDict(a=torch.ones(2))}
    fs.state.save(tmp_path, tree)
    loaded = fs.state.load(tmp_path)
    assert isinstance(loaded["opt"], tuple)
    spec = Spec(Mesh(x=2), P("x"), shape=(4,), dtype=torch.float64)
    moments = fs.state.load(tmp_path, {"opt": Moments(spec, None), "o": {"a": None}})["opt"]
    assert isinstance(moments, Moments)
    assert moments.mean.dtype == torch.float64


@dataclass
class Layer:
    """Registered class."""

    w: torch.Tensor
    options: dict[str, Any]


torch.export.register_dataclass(Layer)


@pytest.mark.parametrize("tree", [
    ({}, {"w": 1}), {}, (), [[]], {"a": (), "b": [{}, ()], "c": None}, [deque([1, 2]), deque()],
], ids=repr)  # fmt: skip
def test_empty_containers_are_kept(tree: Any, tmp_path: Path) -> None:
    expected = [[1, 2], []] if isinstance(tree, list) and len(tree) == 2 else tree
    fs.state.save(tmp_path, tree)
    assert fs.state.load(tmp_path) == expected
    fs.state.save(tmp_path, {"x": tree, "w": torch.ones(2)})
    loaded = fs.state.load(tmp_path, P("x"), mesh=Mesh(x=2))
    assert loaded["x"] == expected
    assert loaded["w"].spec.partition == P("x")


def test_registered_classes_are_dicts_of_their_fields(tmp_path: Path) -> None:
    fs.state.save(tmp_path, [Layer(torch.ones(2), {}), Layer(torch.zeros(2), {"k": 1})])
    loaded = fs.state.load(tmp_path, [(r"\d\.w", P("x")), (".*", None)], mesh=Mesh(x=2))
    assert [sorted(layer) for layer in loaded] == [["options", "w"]] * 2
    assert [layer["options"] for layer in loaded] == [{}, {"k": 1}]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_blocks_of_a_file_have_the_elements_of_a_box(tmp_path_factory: Any, data: Any) -> None:
    """Boxes are read into contiguous tensors and into views, by rows, blocks and single parts."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    box = tuple(slice(*pair) for pair in bounds)
    x = values(shape, data.draw(st.sampled_from([torch.float32, torch.complex128, torch.int8])))
    directory = tmp_path_factory.mktemp("blocks")
    fs.state.save(directory, {"x": x})
    index = CheckpointIndex.read(directory, "here")
    strided = torch.zeros([2 * n for n in x[box].shape], dtype=x.dtype)
    target = strided[tuple(slice(0, 2 * n, 2) for n in x[box].shape)]
    targets = [torch.zeros_like(x[box]), target, torch.zeros_like(x[box].mT) if x.ndim > 1 else x]
    with pytest.MonkeyPatch.context() as patch, ShardReader(directory, "here") as reader:
        patch.setattr(shard_reader, "MAX_GAP", data.draw(st.sampled_from([-1, 0, 20, 2**13])))
        patch.setattr(shard_reader, "MAX_STAGED", data.draw(st.sampled_from([16, 64, 2**22])))
        for out in [*targets[:2], targets[2].mT] if x.ndim > 1 else targets[:2]:
            reader.read(index.tensors[0], index.tensors[0].shards[0], bounds, out)
            assert torch.equal(out, x[box])


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, opened = values((16, 2)), []

    class Recorded(FileIO):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            opened.append(self)
            assert sum(not file.closed for file in opened) <= 3

    monkeypatch.setattr(shard_reader, "FileIO", Recorded)
    monkeypatch.setattr(shard_reader, "MAX_OPEN", 3)
    fs.state.save(tmp_path, {"a": fs.shard(x, MESH, P(("dp", "tp"))), "b": fs.shard(x, MESH, P())})
    assert torch.equal(fs.unshard(fs.state.load(tmp_path, P(), mesh=MESH)["a"]), x)
    assert len(opened) >= MESH.size
    assert all(file.closed for file in opened)


def test_replicas_are_written_once_and_shared_out(tmp_path: Path) -> None:
    tree = {str(i): fs.shard(values((64,)), MESH, P()) for i in range(8)}
    fs.state.save(tmp_path, tree)
    index = json.loads((tmp_path / "index.json").read_text())
    assert len(index["files"]) == 8
    assert sum(index["files"].values()) < 8 * 64 * 4 + 8 * 400


def test_checksums_are_those_of_zlib(tmp_path: Path) -> None:
    """Files are the same with and without the package isal, and as earlier versions wrote them."""
    content = bytes(values((1000,), torch.int8).tolist())
    assert shard_files.crc32(content) == zlib.crc32(content)
    assert shard_files.crc32(content, 7) == zlib.crc32(content, 7)
    fs.state.save(tmp_path, {"x": torch.arange(4.0)})
    shard = index_of(tmp_path)[1]["tensors"]["x"]["shards"][0]
    assert shard["crc32"] == 627055499


def test_loaded_tensors_do_not_share_memory_with_files(tmp_path: Path) -> None:
    fs.state.save(tmp_path, {"x": torch.ones(4)})
    x = fs.state.load(tmp_path)["x"]
    shard_file(tmp_path).write_bytes(b"")
    assert x.add_(1).tolist() == [2, 2, 2, 2]


def test_rules_are_layouts(tmp_path: Path) -> None:
    fs.state.save(tmp_path, {"a.weight": torch.ones(4, 4), "a.bias": torch.ones(4)})
    rules = [(r".*\.weight", P("x")), (r".*\.bias", P())]
    loaded = fs.state.load(tmp_path, rules, mesh=Mesh(x=2))
    assert str(loaded["a.weight"].spec) == "f32[4@x,4]"


def test_progress_is_shown_in_a_terminal_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"x": fs.shard(values((64, 8)), MESH, P(("dp", "tp")))}
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    saving = fs.state.save(tmp_path, tree, progress=True)
    assert (saving.written, saving.nbytes) == (2048, 2048)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    saving = fs.state.save(tmp_path, tree, progress=True, async_op=True)
    saving.wait()
    out, err = capsys.readouterr()
    assert out == ""
    assert "saving" in err
    assert "2.0/2.0" in err
    assert same(fs.state.load(tmp_path), tree)


def test_an_asynchronous_save_has_the_values_of_its_call(tmp_path: Path) -> None:
    pair, plain, strided = fs.shard(torch.ones(4), Mesh(x=2), P("x")), torch.ones(3), torch.eye(4).T
    tree = {"pair": pair, "plain": plain, "strided": strided, "complex": torch.ones(2) * 1j}
    expected = {key: fs.state.tree_unshard(x).clone() for key, x in tree.items()}
    with written_late() as begin:
        saving = fs.state.save(tmp_path, tree, async_op=True)
        for x in (*pair.local, plain, strided, tree["complex"]):
            x.zero_()
        begin()
    saving.wait()
    assert same(fs.state.load(tmp_path), expected)


def test_saves_to_one_directory_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the end of one removed the files of another, whose index then named none."""
    original, second_ended = saving.write_file, Event()

    def write(path: Path, tensors: Any, advance: Any) -> Any:
        is_first = bool(tensors["x"].any())
        if is_first:
            second_ended.wait(0.2)
        result = original(path, tensors, advance)
        if not is_first:
            second_ended.set()
        return result

    monkeypatch.setattr(saving, "write_file", write)
    savings = [
        fs.state.save(tmp_path, {"x": x}, async_op=True) for x in (torch.ones(4), torch.zeros(4))
    ]
    assert repr(savings[1]).endswith("of 16 B, under way")
    for item in savings:
        item.wait()
    assert repr(savings[1]) == f"Saving({str(tmp_path)!r}), 16 of 16 B, done"
    assert fs.state.load(tmp_path)["x"].tolist() == [0, 0, 0, 0]


@contextmanager
def written_late() -> Iterator[Callable[[], None]]:
    """Hold the writing of files back until the result is called."""
    original, event = saving.write_file, Event()

    def write(*args: Any) -> Any:
        assert event.wait(30)
        return original(*args)

    saving.write_file = write
    try:
        yield event.set
    finally:
        event.set()
        saving.write_file = original


# -- processes -------------------------------------------------------------------------------


def load_on_rank(directory: str) -> list[bool]:
    mesh = Mesh(x=3) if torch.distributed.get_world_size() == 3 else Mesh(a=2, b=2)
    fs.init(mesh)
    axis = mesh.axes[0]
    values_ = dict.fromkeys(("step", "rate", "name", "none", "mask"))
    layouts = {"params": P(), "moments": [P(None, axis)], **values_}
    loaded = fs.state.load(directory, layouts, mesh=mesh)
    saved = f"{directory}/again"
    fs.state.save(saved, loaded, async_op=True).wait()
    again = fs.state.load(saved)
    return [
        torch.equal(fs.unshard(loaded["params"]["w"]), values((8, 12))),
        torch.equal(again["params"]["w"], values((8, 12))),
        again["step"] == 3,
    ]


def test_processes_load_a_simulation_and_save_again(tmp_path: Path) -> None:
    fs.state.save(tmp_path, state())
    assert run_ranks(4, load_on_rank, str(tmp_path)) == [[True, True, True]] * 4


def fail_on_rank(directory: str) -> str:
    """Save a tree whose directory one rank cannot write: all ranks raise."""
    fs.init(Mesh(x=2))
    fs.state.save(directory, {"x": pair()})
    rank = torch.distributed.get_rank()

    def broken(*_: Any) -> int:
        raise OSError("disk full")

    original = saving.write_file
    if rank == 1:
        saving.write_file = broken
    try:
        fs.state.save(directory, {"x": fs.shard(torch.zeros(4), Mesh(x=2), P("x"))}, timeout=10)
    except (fs.ShardingError, OSError) as error:
        return str(error)
    finally:
        saving.write_file = original
    return "saved"


def test_failure_of_one_rank_is_every_ranks_and_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    texts = run_ranks(2, fail_on_rank, str(tmp_path))
    assert all("disk full" in text for text in texts)
    assert fs.state.load(tmp_path)["x"].tolist() == [1, 1, 1, 1]


def save_often_on_rank(directory: str, file: str) -> str:
    """Save without waiting, a tensor that the first rank alone writes; then to a file's path."""
    fs.init(Mesh(x=2))
    savings = [
        fs.state.save(directory, {"x": torch.full((2,), float(i))}, async_op=True, timeout=10)
        for i in range(8)
    ]
    for item in savings:
        item.wait()
    dtensor = fs.to_dtensor(fs.shard(torch.ones(2), Mesh(x=2), P("x")))
    with pytest.raises(fs.ShardingError, match=r"x: a DTensor(.|\n)*fs\.from_dtensor\(x\)"):
        fs.state.save(directory, {"x": dtensor})
    with pytest.raises(fs.ShardingError) as error:
        fs.state.save(file, {"x": torch.ones(2)}, timeout=10)
    return str(error.value)


def test_ranks_save_often_and_no_rank_waits_for_another_that_failed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments = str(tmp_path / "saved"), str(tmp_path / "file")
    for text in run_ranks(2, save_often_on_rank, *arguments):
        assert "rank 0 must be able to create and write the directory" in text
    assert fs.state.load(tmp_path / "saved")["x"].tolist() == [7, 7]


# -- crashes ---------------------------------------------------------------------------------


def kill_while_saving(directory: str, victim: int, async_op: bool) -> None:
    """Kill a rank before it reports its file: the others wait for it no longer."""
    mesh = Mesh(x=3)
    fs.init(mesh)
    tree = {"x": fs.shard(torch.zeros(6), mesh, P("x"))}
    if torch.distributed.get_rank() == victim:
        vars(saving)["write_file"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    fs.state.save(directory, tree, async_op=async_op).wait()


@pytest.mark.parametrize(("victim", "async_op"), [(0, False), (1, True)])
def test_rank_that_is_killed_while_it_saves_is_named(
    victim: int, async_op: bool, tmp_path: Path
) -> None:
    fs.state.save(tmp_path, {"before": True})
    with closing(Ranks(3)) as ranks:
        done = ranks.outcomes(kill_while_saving, str(tmp_path), victim, async_op)
    assert isinstance(done.pop(victim).error, RankDied)
    expected = message(
        "fs.state.save",
        f"the process of rank {victim} ended before the checkpoint in {tmp_path} was complete; "
        "the one that was there before is unchanged",
        "every rank must run until its save has ended",
        f"look at the output of rank {victim}",
    )
    assert [str(outcome.error) for outcome in done] == [expected] * 2
    assert fs.state.load(tmp_path) == {"before": True}


SAVER = """
import sys, torch, fshard as fs
mesh, n = fs.Mesh(x=2), 0
print("ready", flush=True)
while True:
    n += 1
    x = torch.full((1 << 14,), float(n))
    fs.state.save(sys.argv[1], {"x": fs.shard(x, mesh, fs.P("x")), "n": n})
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """`FSHARD_KILLS` processes are killed while they save, 1 by default."""
    chance = random.Random(5)
    last = 0
    for _ in range(int(os.environ.get("FSHARD_KILLS", "1"))):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2 + chance.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)
        process.stdout.close()
        fs.state.verify(tmp_path)
        loaded = fs.state.load(tmp_path)
        assert torch.equal(loaded["x"], torch.full((1 << 14,), float(loaded["n"])))
        last = loaded["n"]
    assert last > 0
    fs.state.save(tmp_path, {"done": True})
    assert fs.state.load(tmp_path) == {"done": True}
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]


def test_files_of_an_ended_process_on_another_machine_may_be_seen_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch: Any = SimpleNamespace(ended=lambda ranks: ranks, is_local={0: True, 1: False})
    plan: Any = SimpleNamespace(ranks=(0, 1), writers=())
    writer = saving._Writer(tmp_path, "save", plan, (0, 1), {}, 100, watch)
    assert [writer._has_ended(rank) for rank in (0, 1)] == [True, False]
    monkeypatch.setattr(saving, "STALE_SECONDS", 0.0)
    assert writer._has_ended(1)


# -- bad files -------------------------------------------------------------------------------


def index_of(directory: Path) -> tuple[Path, dict[str, Any]]:
    path = directory / "index.json"
    return path, json.loads(path.read_text())


def rewrite(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path, content = index_of(directory)
    change(content)
    path.write_text(json.dumps({**content, "crc32": index_checksum(content)}))


def shard_file(directory: Path) -> Path:
    return min(directory.glob("*.safetensors"))


def flip_last_byte(directory: Path) -> None:
    path = shard_file(directory)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda d: os.truncate(shard_file(d), 40), "the file must have"),
    "missing file": (lambda d: shard_file(d).unlink(), "missing"),
    "changed byte": (flip_last_byte, "the checksum of"),
    "no index": (lambda d: (d / "index.json").unlink() or [p.unlink() for p in d.glob("*s")],
                 "must have index.json"),
    "index cut short": (lambda d: os.truncate(d / "index.json", 30), "an index must be JSON"),
    "foreign index": (lambda d: (d / "index.json").write_text("{}"), "format 'fshard'"),
    "newer version": (lambda d: rewrite(d, lambda c: c.update(version=9)), "version must be 1"),
    "path out of the directory": (
        lambda d: rewrite(d, lambda c: c.update(files={"../secret": 3})), r"'\.\./secret'"),
    "absolute path in a shard": (
        lambda d: rewrite(d, lambda c: c["tensors"]["w"]["shards"][0].update(file="/etc/passwd")),
        "must be a name in the directory"),
    "no dtype": (
        lambda d: rewrite(d, lambda c: c["tensors"]["w"].update(dtype="load")), "is not a dtype"),
    "renamed in the index": (
        lambda d: (d / "index.json").write_text(
            (d / "index.json").read_text().replace('"w"', '"v"')),
        "which was changed after it was written"),
    "missing key": (lambda d: rewrite(d, lambda c: c["tensors"]["w"].pop("shape")), "KeyError"),
    "hole": (lambda d: rewrite(d, lambda c: c["tensors"]["w"]["shards"].pop()),
             "must cover each element once"),
    "foreign key": (
        lambda d: rewrite(d, lambda c: c["tensors"]["w"]["shards"][0].update(key="v")), "no 'v'"),
    "other dtype in the index": (
        lambda d: rewrite(d, lambda c: c["tensors"]["w"].update(dtype="int32")),
        r"must have the shape \(4,\) and torch.int32"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused(damage: str, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    fs.state.save(tmp_path, {"w": fs.shard(values((8,)), Mesh(x=2), P("x"))})
    change(tmp_path)
    with pytest.raises(fs.ShardingError, match=message):
        fs.state.load(tmp_path)


def test_verify_lists_all_damaged_shards(tmp_path: Path) -> None:
    fs.state.save(tmp_path, {"w": fs.shard(values((8,)), Mesh(x=2), P("x"))})
    for path in tmp_path.glob("*.safetensors"):
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 255
        path.write_bytes(damaged)
    with pytest.raises(fs.ShardingError, match=r"fs\.state\.verify") as error:
        fs.state.verify(tmp_path)
    assert len(error.value.problems) == 2


def pair() -> fs.Sharded:
    return fs.shard(torch.ones(4), Mesh(x=2), P("x"))


BAD_SAVES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "object": (lambda d: fs.state.save(d, {"f": print}), "f: a builtin_function_or_method"),
    "int key": (lambda d: fs.state.save(d, {1: pair()}), "the keys of dicts must be strings"),
    "int key, empty": (lambda d: fs.state.save(d, {"a": [{1: {}}]}), r"the key 1 of a\.0\.1"),
    "same names": (lambda d: fs.state.save(d, {"a.b": 1, "a": {"b": 2}}), "two leaves of the name"),
    "unreduced": (
        lambda d: fs.state.save(d, [fs.shard(torch.ones(2), Mesh(x=2), P(unreduced={"x"}))]),
        "must not be unreduced"),
    "dtype": (
        lambda d: fs.state.save(d, {"w": torch.empty(2, dtype=torch.float8_e5m2fnuz)}),
        "w: a tensor of torch.float8_e5m2fnuz"),
    "sparse": (
        lambda d: fs.state.save(d, {"w": torch.eye(2).to_sparse()}), r"w: (.|\n)*x\.to_dense\(\)"),
    "meta": (lambda d: fs.state.save(d, [torch.empty(2, device="meta")]), "must have values"),
    "wrapper of tensors": (
        lambda d: fs.state.save(d, {"w": TwoTensor(torch.ones(2), torch.ones(2))}),
        "w: a TwoTensor on cpu without memory"),
    "module": (lambda d: fs.state.save(d, torch.nn.Linear(2, 2)), r"module\.state_dict\(\)"),
    "simulated rank": (
        lambda d: fs.simulate(Mesh(x=2), lambda: fs.state.save(d, [torch.ones(2)])),
        r"outside of fs\.simulate"),
    "other shape": (
        lambda d: fs.state.load(d, {"x": Spec(Mesh(x=2), P("x"), shape=(6,))}),
        r"its shape must be \(4,\)"),
    "other name": (lambda d: fs.state.load(d, {"y": P("x")}, mesh=Mesh(x=2)), "the spec of y"),
    "no mesh": (lambda d: fs.state.load(d, {"x": P("x")}), "the mesh of every P"),
    "no layout": (lambda d: fs.state.load(d, {"x": "x"}), "a layout must be a P, a Spec or None"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SAVES)
def test_bad_arguments_are_refused_and_change_nothing(case: str, tmp_path: Path) -> None:
    call, message = BAD_SAVES[case]
    fs.state.save(tmp_path, {"x": pair()})
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(fs.ShardingError, match=message):
        call(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


# -- files of others -------------------------------------------------------------------------


def test_files_of_hugging_face_load_by_slices(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    parts = [{"a.weight": values((8, 4))}, {"b.weight": values((6,), torch.bfloat16)}]
    names = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, tmp_path / name)
    weight_map = {key: n for n, part in zip(names, parts, strict=True) for key in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    rules = [("a.*", P("x")), ("b.*", P("x"))]
    loaded = fs.state.load(tmp_path, rules, mesh=Mesh(x=2))
    for part in parts:
        for key, x in part.items():
            assert torch.equal(fs.unshard(loaded[key]), x)
    four_bit = tmp_path / "f4.safetensors"  # packed values, whose shape PyTorch lacks
    header = json.dumps({"w": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}).encode()
    four_bit.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(fs.ShardingError, match=r"w of dtype F4 in .*\n.*must be one of F64"):
        fs.state.load(four_bit)
    single = fs.state.load(tmp_path / names[0])
    assert torch.equal(single["a.weight"], values((8, 4)))
    evil = {"weight_map": {"a": "../x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(evil))
    with pytest.raises(fs.ShardingError, match="must be a name in the directory"):
        fs.state.load(tmp_path)


def test_checksums_are_compared_unless_told_not_to(tmp_path: Path) -> None:
    fs.state.save(tmp_path, {"w": torch.ones(64)})
    (file,) = tmp_path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(fs.ShardingError, match="the checksum of w must be"):
        fs.state.load(tmp_path)
    loaded = fs.state.load(tmp_path, checksums=False)["w"]
    assert torch.equal(loaded[:-1], torch.ones(63))
    assert loaded[-1] != 1


def test_a_layout_that_does_not_fit_names_its_leaf(tmp_path: Path) -> None:
    fs.state.save(tmp_path, {"w": torch.ones(4), "step": torch.tensor(1)})
    with pytest.raises(fs.ShardingError, match=r"given: step: P\('x'\) with 1 entries"):
        fs.state.load(tmp_path, P("x"), mesh=Mesh(x=2))


def test_the_directory_comes_first(tmp_path: Path) -> None:
    tree: Any = {"w": torch.ones(2)}
    calls: list[Callable[[], Any]] = [
        lambda: fs.state.save(tree, tmp_path), lambda: fs.state.load(tree, tmp_path),
        lambda: fs.state.verify(tree),
    ]  # fmt: skip
    for call, name in zip(calls, ("save", "load", "verify"), strict=True):
        with pytest.raises(fs.ShardingError, match=rf"fix:   fs\.state\.{name}\(directory"):
            call()
