"""Devices: the backend's is the default, and only what communicates must be on it.

The meta device stands for a GPU: fshard has no other way to tell a backend's device from the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fshard as fs
from fshard import Mesh, P, Spec
from fshard.run.transports.base import own_transport
from tests.helpers.gloo.harness import run_ranks

MESH = Mesh(x=2)
SPEC = Spec(MESH, P("x"), shape=(4, 3))


def created(path: str) -> list[str]:
    """Return the devices of what is created while the backend's device is the meta device."""
    fs.init(MESH)
    fs.state.save(path, {"w": fs.ones(SPEC)})
    params = {"w": fs.ones(SPEC)}
    world: Any = own_transport()
    before, world.device = world.device, torch.device("meta")
    try:
        locals_ = [
            fs.zeros(SPEC).local,
            fs.zeros(SPEC, device="cpu").local,
            fs.random.normal(fs.random.key(0), SPEC).local,
            fs.random.normal(fs.random.key(0), (3,)),
            fs.state.load(path)["w"],
            fs.state.load(path, {"w": P("x")}, mesh=MESH)["w"].local,
            fs.state.adamw(0.1).init(params)["mean"]["w"].local,
            fs.state.adamw(0.1).init({"w": SPEC})["mean"]["w"].local,
        ]
    finally:
        world.device = before
    return [x.device.type for x in locals_]


def test_default_device_is_that_of_the_backend(tmp_path: Path) -> None:
    expected = ["meta", "cpu", "meta", "meta", "meta", "meta", "cpu", "meta"]
    assert run_ranks(2, created, str(tmp_path / "saved")) == [expected] * 2


def sent() -> str:
    """Return the error of a collective of a tensor on a device without a backend."""
    fs.init(MESH)
    x = torch.ones(4, 3, device="meta")
    pair = fs.shard(x, SPEC)  # nothing is sent
    assert pair.local.shape == (2, 3)
    try:
        fs.unshard(pair)
    except fs.ShardingError as error:
        return str(error)
    return "no error"


def test_only_what_is_sent_must_be_on_the_device_of_a_backend() -> None:
    for error in run_ranks(2, sent):
        assert "a local on meta" in error
        assert "a process group has a backend for" in error
