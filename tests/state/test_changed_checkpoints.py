"""Checkpoints with bytes that were changed, cut or moved load the saved values or are refused."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from fshard.layout.tree import flatten

pytest.importorskip("safetensors")
CASES = 150


def saved(kind: str, directory: Path) -> Any:
    """Save a tree as a kind of checkpoint, and return it as it loads."""
    tree = {
        "a": {"w": fs.shard(torch.arange(24.0).view(6, 4), Mesh(x=2), P("x"))},
        "l": [torch.arange(5, dtype=torch.bfloat16), 3],
        "n": "name",
    }
    if kind == "dcp":
        fs.interop.save_dcp(directory, tree)
    else:
        fs.state.save(directory, tree)
    return fs.state.load(directory)


def changed(content: bytearray, rng: random.Random) -> bytearray:
    """Return bytes with one change."""
    i, j = rng.randrange(len(content)), rng.randrange(len(content))
    match rng.choice(["flip", "cut", "insert", "swap"]):
        case "flip":
            content[i] ^= 1 << rng.randrange(8)
        case "cut":
            del content[i:]
        case "insert":
            content[i:i] = bytes([rng.randrange(256)])
        case "swap":
            content[i], content[j] = content[j], content[i]
    return content


def same(a: Any, b: Any) -> bool:
    left, right = flatten(a), flatten(b)
    return left[1] == right[1] and all(
        torch.equal(x, y)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
        else type(x) is type(y) and x == y
        for x, y in zip(left[0], right[0], strict=True)
    )


@pytest.mark.parametrize("kind", ["fshard", "dcp"])
def test_changed_files_are_refused(kind: str, tmp_path: Path) -> None:
    expected = saved(kind, tmp_path / "saved")
    rng, outcomes = random.Random(0), Counter[str]()
    for case in range(CASES):
        directory = tmp_path / str(case)
        shutil.copytree(tmp_path / "saved", directory)
        path = rng.choice(sorted(directory.iterdir()))
        path.write_bytes(changed(bytearray(path.read_bytes()), rng))
        try:
            loaded = fs.state.load(directory)
        except fs.ShardingError:
            outcomes["refused"] += 1
        else:
            outcomes["equal" if same(loaded, expected) else "other"] += 1
    assert outcomes["refused"] > CASES / 2
    # The format of DCP has no checksums: changed values of its tensors are not noticed.
    assert outcomes["other"] <= (0 if kind == "fshard" else CASES / 20)
