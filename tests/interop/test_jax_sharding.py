"""JAX's meshes and shardings: the devices' slices are equal, and programs print Shardy's text.

Needs the extra `jax` (`pip install 'fshard[jax]'`); skipped without.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given

import fshard as fs
from fshard import Mesh, P, Spec
from tests.helpers.spec_grid import all_partitions, all_specs
from tests.helpers.strategies import specs

jax = pytest.importorskip("jax", reason="the extra `jax` is not installed")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)

from jax.sharding import NamedSharding  # noqa: E402

JP = jax.sharding.PartitionSpec
MESHES = (Mesh(dp=2, tp=3), Mesh(a=2, b=4), Mesh(x=4, devices=[6, 0, 3, 5]))
SHAPE = (24, 48)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_devices_have_the_slices_of_ranks(mesh: Mesh) -> None:
    for spec in all_specs(mesh, SHAPE, ("invariant",)):
        sharding = fs.interop.to_jax(spec)
        slices = sharding.devices_indices_map(SHAPE)
        for device, index in slices.items():
            ours = [range(n)[s] for n, s in zip(SHAPE, spec.index(device.id), strict=True)]
            assert [range(n)[s] for n, s in zip(SHAPE, index, strict=True)] == ours
        assert {device.id for device in slices} == set(mesh.ranks)
        assert fs.interop.from_jax(sharding, shape=SHAPE, dtype=spec.dtype) == spec


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_every_layout_round_trips(mesh: Mesh) -> None:
    assert fs.interop.from_jax(fs.interop.to_jax(mesh)) == mesh
    assert fs.interop.from_jax(fs.interop.to_jax(mesh, abstract=True)) == mesh
    for partition in all_partitions(mesh.axes, 2):
        assert fs.interop.from_jax(fs.interop.to_jax(partition)) == partition
        spec = Spec(mesh, partition, shape=SHAPE)
        for abstract in (False, True):
            sharding = fs.interop.to_jax(spec, abstract=abstract)
            assert fs.interop.from_jax(sharding, shape=SHAPE) == spec


@given(specs(mesh=Mesh(dp=2, tp=2)))
def test_any_spec_round_trips_or_is_refused(spec: Spec) -> None:
    kinds = {kind for _, kind in (*spec.partition.unreduced_kinds, *spec.partition.reduced_kinds)}
    try:
        sharding = fs.interop.to_jax(spec, abstract=True)
    except fs.ShardingError:
        assert kinds - {"sum"} or any(spec.sizes)
    else:
        assert fs.interop.from_jax(sharding, shape=spec.shape, dtype=spec.dtype) == spec


def test_arrays_and_their_structs_have_specs() -> None:
    spec = Spec(MESHES[1], P("b", "a"), shape=(8, 4), dtype=torch.bfloat16)
    sharding = fs.interop.to_jax(spec)
    x = jax.device_put(jax.numpy.ones((8, 4), dtype="bfloat16"), sharding)
    assert fs.interop.from_jax(x) == spec
    assert fs.interop.from_jax(jax.ShapeDtypeStruct((8, 4), "bfloat16", sharding=sharding)) == spec
    locals_ = {shard.device.id: shard.data.shape for shard in x.addressable_shards}
    assert locals_ == {rank: spec.local_shape(rank) for rank in spec.mesh.ranks}


def test_programs_print_the_text_of_shardy() -> None:
    mesh = MESHES[1]
    for spec in all_specs(mesh, SHAPE, ("invariant",), dtype=torch.float64):
        lowered = jax.jit(lambda x: 2 * x, in_shardings=fs.interop.to_jax(spec)).lower(
            jax.ShapeDtypeStruct(SHAPE, "float64")
        )
        text = lowered.as_text()
        assert f"{fs.interop.to_shardy(mesh)} " in text.replace("\n", " ")
        assert fs.interop.to_shardy(spec) in text
        (line,) = re.findall(r"%arg0: tensor<.*?>\s*\{.*?\}\]?>\}", text)
        assert fs.interop.from_shardy(line, mesh=mesh) == spec


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: JP("a", JP.UNCONSTRAINED), "dim 1 of P('a', UNCONSTRAINED)"),
        (lambda: jax.numpy.ones(3), "a SingleDeviceSharding"),
        (lambda: torch.ones(3), "a Tensor"),
        (lambda: NamedSharding(fs.interop.to_jax(MESHES[1]), JP("a")), "without shape="),
        (lambda: jax.ShapeDtypeStruct((2,), "float8_e4m3b11fnuz", sharding=pinned("device")),
         "float8_e4m3b11fnuz"),
        (lambda: jax.ShapeDtypeStruct((2,), "float32", sharding=pinned("pinned_host")),
         "the memory kind 'pinned_host'"),
        (lambda: jax.sharding.AbstractMesh((), ()), "the empty mesh"),
        (lambda: jax.sharding.AbstractMesh((2,), ("x",), axis_types=(
            jax.sharding.AxisType.Manual,)), "axis 'x'"),
    ],
)  # fmt: skip
def test_what_fshard_lacks_is_refused(value: Any, message: str) -> None:
    with pytest.raises(fs.ShardingError) as caught:
        fs.interop.from_jax(value())
    assert message in str(caught.value)


def pinned(kind: str) -> Any:
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    return NamedSharding(mesh, JP("x"), memory_kind=kind)


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (Mesh(x=9), {}, "8 devices of JAX"),
        (MESHES[2], {"abstract": True}, "an abstract mesh must have the devices range(4)"),
        (Spec(Mesh(x=2), P("x"), shape=(3,), uneven="chunk"), {}, "pad dim 0 to a multiple of 2"),
        (P(unreduced={"x": "max"}), {}, "'x' unreduced by max"),
        (P(reduced={"x": "avg"}), {}, "'x' reduced by avg"),
        (torch.ones(2), {}, "the argument must be a Mesh, P or Spec"),
    ],
)
def test_what_jax_lacks_is_refused(value: Any, options: Any, message: str) -> None:
    with pytest.raises(fs.ShardingError) as caught:
        fs.interop.to_jax(value, **options)
    assert message in str(caught.value)
