"""Arguments of a wrong type: device meshes, DTensors, names of operations; forms of layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fshard as fs
from fshard import Mesh, P, Sharded, ShardingError, Spec

MESH = Mesh(x=2)
X = torch.arange(5.0)
SPEC = Spec(MESH, P("x"), shape=(5,), uneven="chunk")
PAIR = fs.shard(X, SPEC)


def identity(x: Any) -> Any:
    return x


@pytest.fixture(scope="module")
def device_mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


MESH_USES: dict[str, Callable[[Any], Any]] = {
    "Spec": lambda mesh: Spec(mesh, P("dp"), shape=(4,)),
    "replace": lambda mesh: Spec(Mesh(dp=2), P("dp"), shape=(4,)).replace(mesh=mesh),
    "from_placements": lambda mesh: Spec.from_placements(mesh, (Shard(0),) * 2, (4,)),
    "parse": lambda mesh: fs.parse("f32[4@dp]", mesh),
    "shard_map": lambda mesh: fs.shard_map(
        lambda: fs.axis_size("dp"), mesh=mesh, in_specs=(), out_specs=None
    )(),
    "smap": lambda mesh: fs.smap(lambda x: x * 2, in_axes=0, out_axes=0, axis_name="dp", mesh=mesh)(
        X[:4]
    ).tolist(),
    "axis_size": lambda mesh: fs.axis_size("dp", mesh=mesh),
    "simulate": lambda mesh: fs.simulate(mesh, lambda: 1),
    "partition": lambda mesh: fs.partition(identity, mesh=mesh)(X).tolist(),
    "link": lambda mesh: fs.Topology.node().link(mesh, "dp"),
    "between": lambda mesh: fs.Topology.node().between(MESH, mesh),
    "shard": lambda mesh: fs.shard(X, mesh, P("dp")).spec,
}


@pytest.mark.parametrize("name", MESH_USES)
def test_device_mesh_is_taken_as_its_mesh(name: str, device_mesh: Any) -> None:
    assert MESH_USES[name](device_mesh) == MESH_USES[name](Mesh(dp=2, tp=2))


def test_mesh_of_another_type_is_refused() -> None:
    with pytest.raises(
        ShardingError, match=r"a mesh of type dict\n  rule:  a mesh must be a fs\.Mesh"
    ):
        Spec({"x": 2}, P("x"), shape=(4,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "use",
    [
        lambda x: fs.shard(x, Spec(MESH, P("x"), shape=(8,))),
        lambda x: fs.shard(x, MESH, P("x")),
        lambda x: fs.scatter(x, MESH, P("x")),
        fs.shard_map(identity, mesh=MESH, in_specs=P("x"), out_specs=P("x")),
        fs.partition(identity, mesh=MESH),
        lambda x: fs.apply(torch.relu, x),
        lambda x: fs.apply(torch.add, PAIR, x),
    ],
    ids=["shard", "mesh and P", "scatter", "shard_map", "partition", "apply", "apply with a pair"],
)
def test_dtensor_is_refused(use: Callable[[Any], Any], device_mesh: Any) -> None:
    x = DTensor.from_local(torch.ones(4), device_mesh, [Shard(0), Shard(0)], run_check=False)
    with pytest.raises(ShardingError, match=r"a DTensor\n(.*\n)*.*x\.full_tensor\(\)"):
        use(x)


@pytest.mark.parametrize(
    "use",
    [
        lambda op: fs.apply(op, PAIR),
        fs.on_pairs,
        lambda op: fs.propagate(op, SPEC),
    ],
    ids=["apply", "on_pairs", "propagate"],
)
def test_operation_must_be_a_function(use: Callable[[Any], Any]) -> None:
    with pytest.raises(ShardingError, match=r"'neg' of type str .*\n.*\n  fix:   torch\.neg$"):
        use("neg")
    with pytest.raises(ShardingError, match=r"3 of type int .*\n.*\n  fix:   torch\.matmul, say$"):
        use(3)
    use(torch.neg)


# -- a mesh and a partition in the place of a spec ----------------------------------------


@pytest.mark.parametrize("convert", [fs.shard, fs.scatter])
def test_mesh_and_partition_make_the_spec(convert: Callable[..., Sharded]) -> None:
    pair = convert(X, MESH, P("x"))
    assert pair.spec == SPEC
    assert torch.equal(fs.unshard(pair), X)


@pytest.mark.parametrize("convert", [fs.shard, fs.scatter])
@pytest.mark.parametrize("layout", [(P("x"),), (MESH,), (SPEC, P("x")), (MESH, "x"), (None,)])
def test_other_layouts_are_refused(convert: Callable[..., Sharded], layout: Any) -> None:
    with pytest.raises(ShardingError, match=r"must be a fs\.Spec, or a fs\.Mesh and a P"):
        convert(X, *layout)


# -- asynchronous reshard -------------------------------------------------------------------


def test_reshard_waits_later() -> None:
    pair = fs.reshard(PAIR, P(), async_op=True).wait()
    assert pair.spec == SPEC.replace(partition=P(), sizes={0: None})
    assert all(torch.equal(shard, X) for shard in pair.local)
    same = fs.reshard(PAIR, P("x"), async_op=True).wait()
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(same.local, PAIR.local, strict=True))
    locals_ = fs.simulate(MESH, lambda p: fs.reshard(p, P(), async_op=True).wait().local, PAIR)
    assert all(torch.equal(local, X) for local in locals_)


@pytest.mark.parametrize("call", [
    lambda: fs.simulate(MESH, MESH),  # type: ignore[arg-type]
    lambda: fs.start([fs.psum], X, "x"),  # type: ignore[arg-type]
], ids=["simulate", "start"])  # fmt: skip
def test_values_in_the_place_of_functions_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ShardingError, match="argument must be a"):
        call()


@pytest.mark.parametrize("check", [True, False])
def test_sparse_results_of_mapped_functions_are_refused(check: bool) -> None:
    body = lambda x, sparse: {"y": x.to_sparse() if sparse else x}  # noqa: E731
    f = fs.shard_map(body, mesh=MESH, in_specs=(P("x"), None), out_specs=P("x"), check=check)
    assert torch.equal(f(torch.eye(4), False)["y"], torch.eye(4))
    with pytest.raises(ShardingError, match="a tensor that is returned must be dense") as raised:
        f(torch.eye(4), True)
    assert "result['y']: a tensor of torch.sparse_coo" in str(raised.value)
