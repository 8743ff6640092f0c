"""`PartitionSpec` and `Spec`: canonical forms, shards, duals, equivalence, errors."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard._util.errors import Problem, ShardingError, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.partition_spec import chunk_sizes
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from tests.helpers.spec_grid import (
    all_partitions,
    all_specs,
    global_of,
    pairing,
    peak_memory_below,
    random_locals,
    sample_pairs,
)
from tests.helpers.strategies import meshes, partitions, specs

ALL_KINDS = ("sum", "avg", "max", "min", "product")
LINEAR_KINDS = ("sum", "avg")


# -- PartitionSpec ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (P(("x",)), P("x")),
        (P(()), P(None)),
        (P([]), P(None)),
        (P(["x", "y"]), P(("x", "y"))),
        (P(unreduced={"x"}), P(unreduced={"x": "sum"})),
        (P(unreduced="x"), P(unreduced=["x"])),
        (P(unreduced={"x", "y"}), P(unreduced=("y", "x"))),
        (P(reduced={"y": "sum", "x": "avg"}), P(reduced={"x": "avg", "y": "sum"})),
        (P(unreduced=()), P()),
    ],
)
def test_equal_partitions(one: P, other: P) -> None:
    assert one == other
    assert hash(one) == hash(other)


def test_different_partitions() -> None:
    partitions_ = [
        P("x"), P("x", None), P(None, "x"), P(("x", "y")), P(("y", "x")), P("x", "y"),
        P(unreduced={"x"}), P(reduced={"x"}), P(unreduced={"x": "max"}), P(reduced={"x": "avg"}),
    ]  # fmt: skip
    assert len(set(partitions_)) == len(partitions_)
    assert P("x") != ("x",)


@given(partitions(("x", "y", "z"), 2, kinds=ALL_KINDS))
def test_repr_and_pickle_restore_equal_partitions(partition: P) -> None:
    assert eval(repr(partition), {"P": P}) == partition
    loaded = pickle.loads(pickle.dumps(partition))
    assert loaded == partition
    assert hash(loaded) == hash(partition)
    assert P(*partition, unreduced=partition.unreduced, reduced=partition.reduced) == partition
    assert len(partition) == 2
    assert [partition[dim] for dim in range(2)] == list(partition)
    assert sorted(partition.axes) == sorted(set(partition.axes))


def test_partition_is_frozen() -> None:
    partition: Any = P("x", unreduced={"y"})
    with pytest.raises(AttributeError):
        partition.dims = ()
    with pytest.raises(TypeError):
        partition.unreduced["y"] = "max"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: P("x", "x"), r"axis 'x' 2 times in P\('x', 'x'\)\n  rule:  .*at most once"),
        (lambda: P(("x", "x")), "axis 'x' 2 times"),
        (lambda: P("x", unreduced={"x"}), r"axis 'x' 2 times in P\('x'\), unreduced="),
        (lambda: P(unreduced={"x"}, reduced={"x"}), "axis 'x' 2 times"),
        (lambda: P((("x", "y"), "z")), r"entry 0 is .*\n  rule:  an entry must be None, an"),
        (lambda: P("x", 3), "partition entry 1 is 3"),
        (lambda: P({"x": "y"}), "partition entry 0 is {'x': 'y'}"),
        (lambda: P(unreduced={"x": "summ"}), r"(?s)unreduced={'x': 'summ'}.*did you mean 'sum'"),
        (lambda: P(unreduced={"x": None}), r"unreduced={'x': None}"),
        (lambda: P(reduced={"x": "max"}), r"reduced={'x': 'max'}\n  rule:  .* one of sum, avg"),
        (lambda: P(unreduced={"x": "bor"}), "'max' is the same reduction of booleans"),
        (lambda: P(unreduced={3}), "unreduced axis 3"),
        (lambda: P(unreduced={3: "sum", "x": "sum"}), "unreduced axis 3"),
        (lambda: P(3, "x", "x", unreduced={"y": "zz"}), r"(?s)entry 0 is 3.*'zz'.*'x' 2 times"),
    ],
)
def test_partition_errors(make: Any, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        make()


# -- sizes --------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.lists(st.integers(1, 4), max_size=3))
def test_chunk_sizes_are_those_of_nested_torch_chunk(size: int, axes: list[int]) -> None:
    tensors = [torch.arange(size)]
    for shards in axes:
        chunks = []
        for tensor in tensors:
            parts = list(tensor.chunk(shards)) if len(tensor) else []
            chunks += [*parts, *(tensor[:0] for _ in range(shards - len(parts)))]
        tensors = chunks
    assert chunk_sizes(size, axes) == tuple(map(len, tensors))
    assert torch.equal(torch.cat(tensors), torch.arange(size))


# -- shards cover the tensor ---------------------------------------------------------------------


def assert_covers(spec: Spec) -> None:
    """Assert that the shard table agrees with the sizes and covers each element once."""
    for dim in range(spec.ndim):
        assert sum(spec.shard_sizes(dim)) == spec.shape[dim]
        assert len(spec.shard_sizes(dim)) == spec.dim_shards(dim)
    covered = torch.zeros(spec.shape, dtype=torch.int64)
    seen = set()
    for row in spec.table:
        assert row.coords == spec.mesh.coords(row.rank)
        assert (row.index, row.shape) == (spec.index(row.rank), spec.local_shape(row.rank))
        offsets = spec.offsets(row.rank)
        assert [(s.start, s.stop) for s in row.index] == [
            (o, o + n) for o, n in zip(offsets, row.shape, strict=True)
        ]
        for dim, axes in enumerate(spec.partition.dims):
            index = spec.mesh.index(row.rank, axes)
            assert row.shape[dim] == spec.shard_sizes(dim)[index]
            assert offsets[dim] == sum(spec.shard_sizes(dim)[:index])
        assert tuple(covered[row.index].shape) == row.shape
        assert spec.local_nbytes(row.rank) == math.prod(row.shape) * spec.dtype.itemsize
        key = tuple(spec.mesh.index(row.rank, axes) for axes in spec.partition.dims)
        if key not in seen:
            covered[row.index] += 1
        seen.add(key)
    assert len(seen) == spec.num_shards
    assert bool((covered == 1).all())
    assert [row.rank for row in spec.table] == sorted(spec.mesh.devices)
    assert spec.nbytes == covered.numel() * spec.dtype.itemsize


@given(specs(kinds=ALL_KINDS))
def test_shards_cover_each_element_once(spec: Spec) -> None:
    assert_covers(spec)


@given(meshes(permuted=True).flatmap(specs))
def test_shards_on_permuted_devices_cover_each_element_once(spec: Spec) -> None:
    assert_covers(spec)
    global_of(spec, random_locals(spec))


@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (2, 3), (2, 1, 2)])
@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7])
def test_chunked_shards_cover_each_element_once(sizes: tuple[int, ...], rows: int) -> None:
    mesh = Mesh(dict(zip("xyz", sizes, strict=False)))
    for spec in all_specs(mesh, (rows, 5), ("invariant",), uneven="chunk"):
        assert_covers(spec)


def test_shards_of_given_sizes() -> None:
    spec = Spec(Mesh(x=2, y=2), P(("y", "x"), None), shape=(16, 3), sizes={0: (3, 5, 0, 8)})
    assert [spec.offsets(rank)[0] for rank in range(4)] == [0, 8, 3, 8]
    assert [spec.local_shape(rank) for rank in range(4)] == [(3, 3), (0, 3), (5, 3), (8, 3)]
    assert not spec.is_even
    assert_covers(spec)
    owner = Spec(Mesh(x=4), P("x"), shape=(7,), sizes={0: (7, 0, 0, 0)})
    assert_covers(owner)
    assert [owner.local_shape(rank) for rank in range(4)] == [(7,), (0,), (0,), (0,)]


def test_spec_of_a_scalar() -> None:
    spec = Spec(Mesh(x=2), P(unreduced={"x"}), shape=())
    assert (spec.local_shape(1), spec.index(1), spec.nbytes, spec.num_shards) == ((), (), 4, 1)
    assert_covers(spec)


def test_shards_over_axes_of_size_one() -> None:
    spec = Spec(Mesh(x=1, y=2), P(("x", "y")), shape=(4,))
    assert spec.shard_sizes(0) == (2, 2)
    assert_covers(spec)
    assert_covers(Spec(Mesh(), P(), shape=(3,)))


# -- canonical form -----------------------------------------------------------------------------

XY = Mesh(x=2, y=2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Spec(XY, P("x"), shape=(4, 4)), Spec(XY, P("x", None), shape=(4, 4))),
        (Spec(XY, P(("x",)), shape=[4]), Spec(XY, P("x"), shape=torch.Size([4]))),
        (Spec(XY, P("x"), shape=(4,), sizes={0: (2, 2)}), Spec(XY, P("x"), shape=(4,))),
        (Spec(XY, P("x"), shape=(4,), sizes={-1: [1, 3]}),
         Spec(XY, P("x"), shape=(4,), sizes={0: (1, 3)})),
        (Spec(XY, P("x"), shape=(4,), uneven="chunk"), Spec(XY, P("x"), shape=(4,))),
        (Spec(XY, P("x"), shape=(4,), sizes={0: None}), Spec(XY, P("x"), shape=(4,))),
        (Spec(XY, P("x"), shape=(5,), uneven="chunk"),
         Spec(XY, P("x"), shape=(5,), sizes={0: (3, 2)})),
        (Spec(XY, P(), shape=(5,), sizes={0: (5,)}), Spec(XY, P(), shape=(5,))),
        (Spec(XY, P("x"), shape=(0,), sizes={0: (0, 0)}), Spec(XY, P("x"), shape=(0,))),
        (Spec(Mesh({"x": 2}, devices=(0, 1)), P("x"), shape=(4,)),
         Spec(Mesh(x=2), P("x"), shape=(4,))),
    ],
)  # fmt: skip
def test_equal_specs(one: Spec, other: Spec) -> None:
    assert one == other
    assert hash(one) == hash(other)
    assert str(one) == str(other)
    assert one.is_equivalent(other)


def test_different_partitions_make_different_specs() -> None:
    """The specs and their texts are distinct."""
    mesh = Mesh(x=2, y=2, z=3)
    assert len(all_partitions("xy", 2)) == 27
    assert len(all_partitions("xyz", 2)) == 159
    assert len(all_partitions("xy", 2, ("invariant", "unreduced"))) == 18
    assert len(all_partitions("xyz", 2, ("invariant", "unreduced"))) == 92
    all_ = all_specs(mesh, (12, 12))
    assert len(set(all_)) == len(set(map(str, all_))) == 159
    assert Spec(mesh, P(), shape=(4,)) != "i64[4]"


@given(specs(kinds=ALL_KINDS))
def test_pickle_and_constructor_restore_equal_specs(spec: Spec) -> None:
    loaded = pickle.loads(pickle.dumps(spec))
    assert loaded == spec
    assert hash(loaded) == hash(spec)
    sizes = {dim: spec.shard_sizes(dim) for dim in range(spec.ndim)}
    rebuilt = Spec(spec.mesh, spec.partition, shape=spec.shape, dtype=spec.dtype, sizes=sizes)
    assert rebuilt == spec
    assert spec.replace() == spec


def test_spec_is_frozen() -> None:
    spec: Any = Spec(XY, P("x"), shape=(4,))
    with pytest.raises(AttributeError):
        spec.shape = (5,)


def test_replace_keeps_sizes_of_unchanged_dims() -> None:
    spec = Spec(XY, P("x", "y"), shape=(5, 4), sizes={0: (1, 4)})
    assert spec.replace(partition=P("x")).shard_sizes(0) == (1, 4)
    assert spec.replace(dtype=torch.bfloat16).shard_sizes(0) == (1, 4)
    assert spec.replace(shape=(6, 4)).shard_sizes(0) == (3, 3)
    assert spec.replace(sizes={0: (5, 0)}).shard_sizes(0) == (5, 0)
    assert spec.replace(sizes={0: None}, uneven="chunk").shard_sizes(0) == (3, 2)
    assert spec.replace(sizes={-2: (5, 0)}).shard_sizes(0) == (5, 0)
    assert spec.replace(partition=P(None, "x")).shard_sizes(0) == (5,)
    assert spec.replace(mesh=Mesh(x=2, y=4)).shard_sizes(1) == (1, 1, 1, 1)
    with pytest.raises(ShardingError, match=r"5 % 2 = 1"):
        spec.replace(partition=P("y", "x"))
    with pytest.raises(ShardingError, match=r"axis 'z'"):
        spec.replace(partition=P("z"))


# -- duals --------------------------------------------------------------------------------------


@given(specs(kinds=LINEAR_KINDS))
def test_dual_is_an_involution(spec: Spec) -> None:
    assert spec.dual.dual == spec
    assert spec.dual.partition.dims == spec.partition.dims
    assert spec.dual.sizes == spec.sizes
    assert dict(spec.dual.partition.reduced) == dict(spec.partition.unreduced)
    assert dict(spec.dual.partition.unreduced) == dict(spec.partition.reduced)


@pytest.mark.parametrize("kind", ["sum", "avg"])
def test_dual_preserves_the_inner_product(kind: str) -> None:
    """The sum of the ranks' inner products is the inner product of the global values."""
    for spec in all_specs(Mesh(x=2, y=3), (6, 6), kind=kind, dtype=torch.float64):
        x, y = random_locals(spec, 1), random_locals(spec.dual, 2)
        product = (global_of(spec, x) * global_of(spec.dual, y)).sum()
        torch.testing.assert_close(pairing(spec, x, y), product)


def test_dual_of_a_maximum_raises() -> None:
    spec = Spec(XY, P(unreduced={"x": "max", "y": "max"}), shape=(3,))
    with pytest.raises(
        ShardingError, match=r"must be sum or avg, not x=max, y=max\n  fix:   reduce"
    ):
        _ = spec.dual


@pytest.mark.parametrize(
    ("unreduced", "reduced"),
    [({"x": "max", "y": "sum"}, {}), ({"x": "product", "y": "max"}, {}),
     ({"x": "product"}, {"y": "avg"})],
)  # fmt: skip
def test_mixed_reductions_raise(unreduced: dict[str, str], reduced: dict[str, str]) -> None:
    with pytest.raises(ShardingError, match="several reductions must be sum and avg"):
        Spec(XY, P(unreduced=unreduced, reduced=reduced), shape=(3,))
    # A tensor reduced by a sum has its values, which mix with any reduction.
    Spec(XY, P(unreduced={"x": "max"}, reduced={"y"}), shape=(3,))
    Spec(XY, P(unreduced={"x": "sum", "y": "avg"}), shape=(3,))


# -- equivalence --------------------------------------------------------------------------------


@given(meshes(max_devices=12), st.data())
def test_equivalent_specs_have_equal_indices(mesh: Mesh, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), max_size=2))
    one, other = (data.draw(specs(mesh, shape, dtype=torch.int64)) for _ in range(2))
    assert one.is_equivalent(one)
    assert one.is_equivalent(other) == other.is_equivalent(one)
    if one.is_equivalent(other):
        assert all(one.index(rank) == other.index(rank) for rank in mesh.ranks)
        locals_ = random_locals(one)
        assert torch.equal(global_of(one, locals_), global_of(other, locals_))


def test_equivalence_ignores_axis_names_and_size_one_axes() -> None:
    mesh = Mesh(x=2, one=1, y=3)
    spec = Spec(mesh, P(("x", "y")), shape=(6,))
    assert spec.is_equivalent(Spec(mesh, P(("x", "one", "y")), shape=(6,)))
    assert spec.is_equivalent(Spec(mesh, P(("x", "y"), reduced={"one"}), shape=(6,)))
    assert spec.is_equivalent(Spec(Mesh(z=6), P("z"), shape=(6,)))
    assert not spec.is_equivalent(Spec(mesh, P(("y", "x")), shape=(6,)))
    assert not spec.is_equivalent(spec.replace(dtype=torch.int32))
    assert not spec.is_equivalent(Spec(mesh, P(), shape=(6,)))
    assert not spec.is_equivalent(Spec(Mesh({"z": 6}, devices=range(1, 7)), P("z"), shape=(6,)))
    unreduced = Spec(mesh, P(unreduced={"x"}), shape=(6,))
    assert not unreduced.is_equivalent(Spec(mesh, P(unreduced={"y"}), shape=(6,)))
    assert not unreduced.is_equivalent(Spec(mesh, P(unreduced={"x": "max"}), shape=(6,)))
    assert not unreduced.is_equivalent(Spec(mesh, P(reduced={"x"}), shape=(6,)))
    assert not unreduced.is_equivalent(Spec(mesh, P(), shape=(6,)))
    both = Spec(mesh, P(unreduced={"x", "y"}), shape=(6,))
    assert both.is_equivalent(Spec(Mesh(z=6), P(unreduced={"z"}), shape=(6,)))
    # Equal shards on each rank, by another grid of permuted devices.
    transposed = Mesh({"y": 3, "x": 2}, devices=(0, 3, 1, 4, 2, 5))
    assert spec.is_equivalent(Spec(transposed, P(("x", "y")), shape=(6,)))


def test_equivalence_is_equality_without_axes_of_size_one() -> None:
    for one, other in sample_pairs(all_specs(Mesh(x=2, y=3), (6, 6)), 729, fixed=True):
        assert one.is_equivalent(other) == (one == other), (one, other)


# -- many devices -------------------------------------------------------------------------------


def test_a_million_devices_need_little_memory() -> None:
    mesh = Mesh(a=1024, b=1024)
    with peak_memory_below(1 << 20):  # a table of the shards takes 8 MiB and more
        spec = Spec(mesh, P(("b", "a"), None, unreduced=()), shape=(1 << 22, 8))
        assert spec.local_shape(1025) == (4, 8)
        assert spec.index(1025)[0] == slice(4 * 1025, 4 * 1026)
        assert spec.num_shards == 1 << 20
        assert spec.is_even
        assert str(spec) == "f32[4194304@(b,a),8]"
        assert spec.dual == spec
        assert spec.replace(partition=P("a", "b"), shape=(1024, 1024)).local_shape(0) == (1, 1)
        assert spec.is_equivalent(spec.replace())
        assert not spec.is_equivalent(spec.replace(partition=P(("a", "b"))))
        assert len(pickle.dumps(spec)) < 2000
        assert hash(spec) == hash(spec.replace())
    with pytest.raises(ShardingError, match=r"1048576 shards must divide the dim"):
        Spec(mesh, P(("a", "b")), shape=(3,))


# -- errors -------------------------------------------------------------------------------------

MESH = Mesh(data=2, model=4)
INT, CPLX = torch.int64, torch.complex64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Spec(MESH, P("modle"), shape=(4,)),
         (r"fs.Spec\(P\('modle'\), shape=\(4,\)\)\n  given: axis 'modle' on Mesh\(data=2, model=4\)"
         r"\n  rule:  an axis must be one of data, model\n  fix:   did you mean 'model'\?")),
        (lambda: Spec(MESH, P(unreduced={"qq"}), shape=(4,)), "fix:   use one of data, model"),
        (lambda: Spec(Mesh(), P("x"), shape=(4,)), "the mesh has no axes"),
        (lambda: Spec(MESH, P("data", None, None), shape=(4,)),
         r"with 3 entries for shape \(4,\)\n.*at most 1 entries\n  fix:   drop 2 of them"),
        (lambda: Spec(MESH, P("data"), shape=()), r"with 1 entries for shape \(\)"),
        (lambda: Spec(MESH, P(), shape=(-1,)), r"shape \(-1,\)\n  rule:  sizes must be at least 0"),
        (lambda: Spec(MESH, P("model"), shape=(6,)),
         (r"dim 0 of size 6 over model=4\n  rule:  4 shards must divide the dim; 6 % 4 = 2\n"
         r"  fix:   uneven='chunk' \(shards of \(2, 2, 2, 0\)\), sizes={0: .*pad the dim to 8")),
        (lambda: Spec(MESH, P(("data", "model")), shape=(9,)), r"over data=2 x model=4"),
        (lambda: Spec(MESH, P("model"), shape=(6,), sizes={0: (2, 2, 2)}),
         (r"sizes={0: \(2, 2, 2\)}\n  rule:  .* 4 sizes of at least 0 that sum to 6, not 3 that sum"
         r" to 6\n  fix:   sizes={0: \(2, 2, 2, 0\)}")),
        (lambda: Spec(MESH, P("model"), shape=(6,), sizes={0: (2, 2, 2, 1)}), "4 that sum to 7"),
        (lambda: Spec(MESH, P("data"), shape=(6,), sizes={0: (7, -1)}), "at least 0 that sum to 6"),
        (lambda: Spec(MESH, P("data"), shape=(6,), sizes={1: (3, 3)}), r"a dim must be in -1..0"),
        (lambda: Spec(MESH, P("data"), shape=(6,), sizes={0: (3, 3), -1: (2, 4)}),
         "sizes of a dim must be given once"),
        (lambda: Spec(MESH, P(), shape=(6,), sizes={0: (3, 3)}), "over no axes must have 1 sizes"),
        (lambda: Spec(MESH, P("data"), shape=(6,), uneven="pad"),
         r"uneven='pad'\n  rule:  uneven must be None or 'chunk'"),
        (lambda: Spec(MESH, P(unreduced={"data": "avg"}), shape=(4,), dtype=INT),
         r"'data' averaged, dtype torch.int64\n  rule:  an average of integers is not an integer"),
        (lambda: Spec(MESH, P(reduced={"data": "avg"}), shape=(4,), dtype=INT), "'data' averaged"),
        (lambda: Spec(MESH, P(unreduced={"data": "max"}), shape=(4,), dtype=CPLX),
         "complex numbers have no order"),
        (lambda: Spec(MESH, P(unreduced={"data"}), shape=(4,), dtype=torch.bool),
         "booleans have no sum"),
        (lambda: Spec(MESH, ("data",), shape=(4,)),  # type: ignore[arg-type]
         r"Spec\(Mesh, tuple\)\n  rule:  the arguments must be a Mesh and a PartitionSpec"),
        (lambda: Spec(MESH, P("modle", None, unreduced={"data": "avg"}), shape=(-4,), dtype=INT,
                      uneven="pad"),
         r"(?s)axis 'modle'.*with 2 entries.*shape \(-4,\).*uneven='pad'.*'data' averaged"),
        (lambda: Spec(MESH, P("model", "data"), shape=(6, 5)), r"(?s)dim 0 of size 6.*dim 1 of"),
        (lambda: Spec(MESH, P("model", "data"), shape=(6, 4), sizes={1: (1, 1)}),
         r"(?s)dim 0 of size 6.*sizes={1: \(1, 1\)}"),
        (lambda: Spec(MESH, P("data"), shape=(4,)).local_shape(8),
         r"Spec.local_shape\n.*rank 8 on"),
        (lambda: Spec(MESH, P("data"), shape=(4,)).index(-1), r"Spec.index\n.*rank -1 on"),
        (lambda: Spec(MESH, P("data"), shape=(4,)).offsets("a"),  # type: ignore[arg-type]
         r"Spec.offsets\n.*rank 'a' on"),
        (lambda: Spec(MESH, P("data"), shape=(4,)).local_nbytes(8), r"Spec.local_nbytes\n.*rank 8"),
        (lambda: Spec(MESH, P("data"), shape=8),  # type: ignore[arg-type]
         r"shape=8\n  rule:  a shape must be a sequence of ints"),
        (lambda: Spec(MESH, P("data"), shape=(8.9,)), r"shape=\(8.9,\)"),  # type: ignore[arg-type]
        (lambda: Spec(MESH, P("data"), shape="8"), "shape='8'"),  # type: ignore[arg-type]
        (lambda: Spec(MESH, P("data"), shape=(8,)).replace(shape=8),  # type: ignore[arg-type]
         r"Spec.replace\n  given: shape=8"),
        (lambda: Spec(MESH, P(), shape=4, dtype="float32"),  # type: ignore[arg-type]
         r"(?s)shape=4.*dtype='float32'\n  rule:  a dtype must be a torch.dtype"),
        (lambda: Spec(MESH, P("data"), shape=(8,), sizes=[3, 5]),  # type: ignore[arg-type]
         r"sizes=\[3, 5\]\n  rule:  sizes must be a mapping"),
        (lambda: Spec(MESH, P(), shape=(8,)).replace(sizes=[3, 5]),  # type: ignore[arg-type]
         r"sizes=\[3, 5\]\n  rule:  sizes must be a mapping"),
        (lambda: Spec(MESH, P("data"), shape=(8,), sizes={0: (3.5, 4.5)}),  # type: ignore[dict-item]
         "sizes must be ints"),
        (lambda: Spec(MESH, P("data"), shape=(8,), sizes={0: 8}),  # type: ignore[dict-item]
         "sizes must be ints"),
        (lambda: Spec(MESH, P(), shape=(), sizes={0: (8,)}), "a 0-dim tensor has no dims"),
        (lambda: Spec(MESH, P("data"), shape=(8,)).shard_sizes(5),
         r"Spec.shard_sizes\n  given: dim 5 of f32\[8@data\]\n  rule:  a dim must be in -1..0"),
        (lambda: Spec(MESH, P("data"), shape=(8,)).dim_shards("0"),  # type: ignore[arg-type]
         r"Spec.dim_shards\n  given: dim '0'"),
        (lambda: Spec(MESH, P(reduced={"data"}), shape=(4,), dtype=torch.bool).dual,
         r"Spec.dual.*\n.*\n  rule:  booleans have no sum"),
    ],
)  # fmt: skip
def test_spec_errors(make: Any, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        make()


def test_fixes_in_messages_work() -> None:
    assert Spec(MESH, P("model"), shape=(6,), uneven="chunk").shard_sizes(0) == (2, 2, 2, 0)
    assert Spec(MESH, P("model"), shape=(6,), sizes={0: (2, 2, 2, 0)}).shape == (6,)
    assert Spec(MESH, P("model"), shape=(8,)).is_even


def test_sharding_error_is_a_value_error() -> None:
    assert issubclass(ShardingError, ValueError)
    raise_if("nowhere", [])
    with pytest.raises(ValueError, match=r"here\n  given: a\n  rule:  b\n  fix:   c\n\n  given: d"):
        raise_if("here", [Problem("a", "b", "c"), Problem("d", "e", "f")])


def test_sharded_unpacks() -> None:
    local, spec = Sharded(torch.zeros(2), Spec(XY, P("x"), shape=(4,)))
    assert (local.shape, spec.shape) == ((2,), (4,))


def test_reductions_allowed_for_each_dtype() -> None:
    mesh = Mesh(x=2)
    for dtype, kind in itertools.product([INT, torch.float32, CPLX, torch.bool], ALL_KINDS):
        inexact = dtype in (torch.float32, CPLX)
        allowed = {
            "sum": dtype != torch.bool,
            "avg": inexact,
            "max": dtype != CPLX,
            "min": dtype != CPLX,
            "product": True,
        }[kind]
        try:
            Spec(mesh, P(unreduced={"x": kind}), shape=(2,), dtype=dtype)
        except ShardingError:
            assert not allowed, (dtype, kind)
        else:
            assert allowed, (dtype, kind)
