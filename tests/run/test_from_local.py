"""Pairs from locals that have a layout already."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec
from tests.helpers.spec_grid import even_and_uneven_specs, message, random_locals

MESH = Mesh(x=2, y=3)


def test_from_local_infers_sizes() -> None:
    more = [
        Spec(MESH, P(("y", "x")), shape=(9, 2), sizes={0: (3, 0, 1, 5, 0, 0)}, dtype=torch.float64),
        Spec(MESH, P("y", "x"), shape=(9, 2), sizes={0: (0, 0, 9)}, dtype=torch.float64),
    ]
    for spec in (*even_and_uneven_specs(MESH), *more):
        locals_ = random_locals(spec)
        assert fs.from_local(locals_, MESH, spec.partition).spec == spec
        assert fs.from_local(list(locals_), MESH, spec.partition, shape=spec.shape).spec == spec
        value = {dim - 2: sharded for dim, sharded in enumerate(spec.sizes) if sharded is not None}
        assert fs.from_local(locals_, MESH, spec.partition, sizes=value).spec == spec


def test_from_local_in_chunks() -> None:
    mesh = Mesh(x=4)
    spec = Spec(mesh, P("x"), shape=(5,), uneven="chunk")
    locals_ = random_locals(spec)
    assert fs.from_local(locals_, mesh, P("x"), sizes="chunk", shape=(5,)).spec == spec
    with pytest.raises(ShardingError, match=r"rank 3 \(x=3\) holds shape \(0,\)") as caught:
        fs.from_local(locals_, mesh, P("x"), sizes="chunk", shape=(8,))
    for rank, size in ((0, 2), (1, 2), (2, 1)):
        named = f"rank {rank} (x={rank}) holds shape ({size},)" in str(caught.value)
        assert named == (size != 2)


MATRIX = torch.zeros(2, 3)
WRONG_LOCALS: list[tuple[Any, fs.PartitionSpec, dict[str, Any], str]] = [
    ((MATRIX,) * 5, P("x"), {}, "5 shards for Mesh(x=2, y=3)"),
    (MATRIX, P("x"), {}, "in a process that is not a rank of it"),
    ([MATRIX] * 5 + [3], P("x"), {}, "a local of type list"),
    (None, P("x"), {}, "a local of type NoneType"),
    ((*(MATRIX,) * 5, MATRIX.long()), P("x"), {}, "rank 5 holds 2 dims of torch.int64, rank 0 2"),
    ((*(MATRIX,) * 5, MATRIX[0]), P("x"), {}, "rank 5 holds 1 dims of torch.float32, rank 0 2"),
    ((*(MATRIX,) * 5, MATRIX.to("meta")), P("x"), {}, "shards on cpu, meta"),
    ((*(MATRIX,) * 5, MATRIX[:, :2]), P("x"), {}, "rank 5 (x=1, y=2) holds shape (2, 2)"),
    ((*(MATRIX,) * 5, MATRIX[:1]), P("x"), {}, "rank 5 (x=1, y=2) holds shape (1, 3)"),
    ((MATRIX,) * 6, P("x", None, None), {}, "at most 2 entries"),
    ((MATRIX,) * 6, P("q"), {}, "axis 'q' on Mesh(x=2, y=3)"),
    ((MATRIX,) * 6, P("x"), {"shape": (2, 3)}, "the shape of these locals is (4, 3)"),
    ((MATRIX,) * 6, P("x"), {"sizes": "chunk"}, 'sizes="chunk" without shape='),
    ((MATRIX,) * 6, P("x"), {"sizes": "even"}, "sizes='even'"),
    ((MATRIX,) * 6, P("x"), {"sizes": {0: (1, 3)}}, "rank 0 (x=0, y=0) holds shape (2, 3)"),
    ((MATRIX,) * 6, P("x"), {"sizes": {0: (1, 2, 3)}}, "2 sizes of at least 0"),
    ((MATRIX,) * 6, P("x"), {"sizes": {2: (2, 2)}}, "a dim must be in -2..1"),
    ((MATRIX.bool(),) * 6, P("x", unreduced={"y"}), {}, "booleans have no sum"),
    ((MATRIX.long(),) * 6, P(unreduced={"y": "avg"}), {}, "an average of integers"),
]


@pytest.mark.parametrize(("locals_", "partition", "options", "text"), WRONG_LOCALS)
def test_from_local_refuses_wrong_locals(
    locals_: Any, partition: fs.PartitionSpec, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ShardingError, match=re.escape(text)):
        fs.from_local(locals_, MESH, partition, **options)


def test_from_local_needs_a_mesh_and_a_partition() -> None:
    with pytest.raises(ShardingError, match="the arguments must be a local, a Mesh and a P"):
        fs.from_local((MATRIX,) * 2, Mesh(x=2), "x")  # type: ignore[arg-type]


def test_from_local_names_every_wrong_rank_unless_unchecked() -> None:
    locals_ = tuple(torch.zeros(2, 3 + (rank in (1, 4))) for rank in range(6))
    with pytest.raises(ShardingError) as caught:
        fs.from_local(locals_, MESH, P("x"))
    assert re.findall(r"rank (\d) \(", str(caught.value)) == ["1", "4"]
    assert fs.from_local(locals_, MESH, P("x"), check=False).spec.shape == (4, 3)


# -- values of replicas -----------------------------------------------------------------

SQUARE = Mesh(x=2, y=2)
DIFFERING = tuple(torch.full((2,), float(rank)) for rank in range(4))
NAN = tuple(torch.tensor([torch.nan, 0.0]) * (-1) ** rank for rank in range(4))


def test_from_local_compares_the_values_of_replicas() -> None:
    assert fs.from_local(DIFFERING, SQUARE, P("x")).local == DIFFERING
    with pytest.raises(ShardingError) as caught:
        fs.from_local(DIFFERING, SQUARE, P("x"), check="values")
    assert str(caught.value).splitlines()[1:3] == [
        "  given: values on rank 1 that differ from those on rank 0",
        "  rule:  for f32[4@x] ranks 0-1 must hold equal values",
    ]
    assert "values on rank 3 that differ from those on rank 2" in str(caught.value)
    for partition in (P(("x", "y")), P("x", unreduced={"y"})):
        fs.from_local(DIFFERING, SQUARE, partition, check="values")
    fs.from_local(NAN, SQUARE, P("x", reduced={"y"}), check="values")


def test_from_local_broadcasts_the_first_replica() -> None:
    locals_ = tuple(local.clone().requires_grad_() for local in DIFFERING)
    pair = fs.from_local(locals_, SQUARE, P("y"), check="broadcast")
    assert [shard.tolist() for shard in pair.local] == [[0, 0], [1, 1], [0, 0], [1, 1]]
    assert all(shard.is_leaf and shard.requires_grad for shard in pair.local)
    assert pair.local[0] is locals_[0]
    assert len({shard.data_ptr() for shard in pair.local}) == 4


def test_from_local_refuses_unknown_checks() -> None:
    with pytest.raises(ShardingError, match='check must be True, False, "values" or "broadcast"'):
        fs.from_local(DIFFERING, SQUARE, P("x"), check="value")


def test_replicas_of_ranks_are_compared_and_broadcast() -> None:
    def broadcast() -> list[float]:
        rank = SQUARE.rank(x=0, y=0) + fs.axis_index("x", mesh=SQUARE) * 2
        local = torch.full((2,), float(rank + fs.axis_index("y", mesh=SQUARE)))
        with pytest.raises(ShardingError, match="values on rank 1 that differ"):
            fs.from_local(local, SQUARE, P("x"), check="values")
        values: list[float] = fs.from_local(local, SQUARE, P(), check="broadcast").local.tolist()
        return values

    assert fs.simulate(SQUARE, broadcast) == [[0.0, 0.0]] * 4


@pytest.mark.parametrize("check", [True, False])
def test_from_local_of_sparse_locals_is_refused(check: bool) -> None:
    locals_ = [torch.eye(2), torch.eye(2).to_sparse()]
    for shards in (locals_, locals_[::-1]):
        with pytest.raises(ShardingError) as error:
            fs.from_local(shards, Mesh(x=2), P("x"), check=check)
        assert str(error.value) == message(
            "fs.from_local",
            "a tensor of torch.sparse_coo",
            "a tensor that is sharded must be dense",
            "x.to_dense()",
        )
    dense = [x.to_dense() for x in locals_]
    assert fs.from_local(dense, Mesh(x=2), P("x"), check=check).spec.shape == (4, 2)
