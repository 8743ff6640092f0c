"""Devices other than the CPU: threads of their backward passes, default devices, lazy copies.

The meta device stands for a GPU where only the device counts.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import fshard as fs
from fshard import Mesh, P, Spec
from fshard._torch.legacy_vmap import batch_level, map_batch_dims, map_batch_elements
from fshard.run.transports.base import own_transport
from fshard.run.transports.simulator import own_result
from tests.helpers.gloo.harness import run_ranks

MESH = Mesh(x=2)
X = torch.arange(24.0).view(2, 3, 4)


def batched() -> torch.Tensor:
    """Return two nested batches of vectors, as `is_grads_batched=True` passes them."""
    return torch._add_batch_dim(torch._add_batch_dim(X, 0, 1), 0, 2)


def unbatched(x: torch.Tensor) -> torch.Tensor:
    return torch._remove_batch_dim(torch._remove_batch_dim(x, 2, 3, 0), 1, 2, 1)


def test_batches_are_found_in_threads_without_their_vmap() -> None:
    def backward() -> list[torch.Tensor]:
        x = batched()
        assert (batch_level([x]), batch_level([X, X])) == (2, 0)
        (dims,) = map_batch_dims(lambda xs: [xs[0] * 2], [x])
        (elements,) = map_batch_elements(lambda xs: [xs[0] * 2], [x])
        assert elements is not None
        return [unbatched(dims), unbatched(elements)]

    with ThreadPoolExecutor(1) as pool:
        for result in pool.submit(backward).result():
            torch.testing.assert_close(result, 2 * X.transpose(0, 1))


def test_programs_take_batches_in_threads_without_their_vmap() -> None:
    spec = Spec(MESH, P("x"), shape=(8,))
    prog = fs.redistribute(spec, Spec(MESH, P(), shape=(8,)))

    def backward() -> list[torch.Tensor]:
        return [unbatched(y) for y in prog((batched(), batched()))]

    with ThreadPoolExecutor(1) as pool:
        for result in pool.submit(backward).result():
            torch.testing.assert_close(result, torch.cat([X, X], -1).transpose(0, 1))


def test_equal_results_are_lazy_copies_on_the_cpu_alone() -> None:
    """Kernels of foreach and fused operations on GPUs write to lazy copies without copying."""
    for device, is_lazy in (("cpu", True), ("meta", False)):
        x = torch.ones(2, device=device)
        first, last = (own_result(results, rank, "all_reduce")
                       for results in [{0: x, 1: x}] for rank in (0, 1))  # fmt: skip
        assert torch._C._is_cow_tensor(first) == is_lazy
        assert last is x


def test_traces_have_no_operations_of_cudnn() -> None:
    """Its batch norm writes statistics that no schema names."""
    enabled: list[bool] = []

    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            enabled.append(torch.backends.cudnn.enabled)
            return x * 2

    before = torch.backends.cudnn.enabled
    fs.partition(Reads(), mesh=MESH, in_specs=P("x")).trace({}, torch.ones(4))
    assert enabled == [False]
    assert torch.backends.cudnn.enabled == before


# -- the device of the backend ------------------------------------------------------------------

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
