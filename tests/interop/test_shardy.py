"""Shardy's text of meshes and shardings; where JAX is installed its parser reads and prints it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

import fshard as fs
from fshard import Mesh, P, Spec
from fshard.interop.shardy import DTYPES
from tests.helpers.spec_grid import all_specs
from tests.helpers.strategies import specs

MESH = Mesh(dp=2, tp=3)
SHAPE = (12, 18)
SPECS = all_specs(MESH, SHAPE, ("invariant", "unreduced"))


def read(text: str, mesh: Mesh | None = MESH, **options: Any) -> Any:
    return fs.interop.from_shardy(text, mesh=mesh, **options)


def test_every_layout_round_trips() -> None:
    for spec in SPECS:
        text = fs.interop.to_shardy(spec)
        assert read(text, shape=spec.shape, dtype=spec.dtype) == spec


@given(specs(mesh=MESH))
def test_any_spec_round_trips_or_is_refused(spec: Spec) -> None:
    try:
        text = fs.interop.to_shardy(spec)
    except fs.ShardingError as error:
        kinds = {kind for _, kind in spec.partition.unreduced_kinds}
        assert kinds - {"sum"} or spec.partition.reduced_kinds or any(spec.sizes)
        assert all(problem.fix for problem in error.problems)
    else:
        assert read(text, shape=spec.shape, dtype=spec.dtype) == spec


@pytest.mark.parametrize(
    "mesh", [Mesh(x=1), Mesh(dp=2, tp=4), Mesh(a=2, b=2, devices=[3, 1, 2, 0])], ids=str
)
def test_meshes_round_trip(mesh: Mesh) -> None:
    text = fs.interop.to_shardy(mesh, mesh_name="grid")
    assert text.startswith("sdy.mesh @grid = <[")
    assert fs.interop.from_shardy(text) == mesh
    assert fs.interop.from_shardy(text.replace("sdy.mesh @grid = ", "#sdy.mesh")) == mesh


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('#sdy.sharding<@mesh, [{"dp"}, {"tp"}]>', "f32[12@dp,9@tp]"),
        ('<@mesh, [{"tp", "dp"}, {}]>', "f32[12@(tp,dp),9]"),
        ('#sdy.sharding<@mesh, [{}, {}], replicated={"dp"}, unreduced={"tp"}>',
         "f32[12,9]{unreduced: tp}"),
        ('#sdy.sharding<mesh<["dp"=2, "tp"=3]>, [{"dp"}, {}]>', "f32[12@dp,9]"),
        ('%arg0: tensor<12x9xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"dp"}, {}]>}',
         "bf16[12@dp,9]"),
        ('%1 = sdy.sharding_constraint %0 <@mesh, [{}, {"tp"}]> : tensor<12x9xcomplex<f32>>',
         "c64[12,9@tp]"),
    ],
)  # fmt: skip
def test_texts_of_programs(text: str, expected: str) -> None:
    options = {} if "tensor" in text else {"shape": (12, 9)}
    assert str(read(text, **options)) == expected


def test_padded_dims_have_the_sizes_of_shardy() -> None:
    spec = read('#sdy.sharding<@mesh, [{"dp", "tp"}]>', shape=(7,))
    assert spec.shard_sizes(0) == (2, 2, 2, 1, 0, 0)
    assert str(read('#sdy.sharding<mesh<["x"=2]>, [{"x"}]>', None, shape=(3,))) == "f32[3@x:chunk]"


def test_scalars_and_every_dtype() -> None:
    for name, dtype in DTYPES.items():
        assert read(f"tensor<{name}> {{sdy.sharding = #sdy.sharding<@mesh, []>}}") == Spec(
            MESH, P(), shape=(), dtype=dtype
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('#sdy.sharding<@mesh, [{"dp"}, {?}]>', "an open dim, {?}"),
        ('#sdy.sharding<@mesh, [{"dp", ?}, {}]>', "an open dim, {?}"),
        ('#sdy.sharding<@mesh, [{"dp"}p1, {}]>', "the priority p1"),
        ('#sdy.sharding<@mesh, [{"tp":(1)3}, {}]>', "the part :(1)3 of axis 'tp'"),
        (
            '#sdy.sharding<@mesh, [{"dp"}, {}], other={"tp"}>',
            "axes must be replicated or unreduced",
        ),
        ('#sdy.sharding<@mesh, [{"dp"}]>', "a sharding must have a dim for each of the 2"),
        ('#sdy.sharding<@mesh, [{"dp"}, {]>', "the text must have"),
        ('#sdy.sharding<@mesh, [{"dp"}, {"dp"}]>', "an axis must be named at most once"),
        ('#sdy.sharding<@mesh, [{"xx"}, {}]>', "'xx'"),
        ('#sdy.sharding<mesh<["dp"=4]>, [{"dp"}, {}]>', "be that of the text if the text has one"),
        ("sdy.mesh @m = <[], device_ids=[3]>", "a mesh must have axes"),
        ('sdy.mesh @m = <["x"=]>', "an integer"),
        ("f32[8@dp]", "a text with 0 shardings"),
        ('<@a, [{}]> <@a, [{"x"}]>', "a text with 2 shardings"),
        ("", "a text with 0 shardings"),
    ],
)
def test_what_fshard_lacks_is_refused(text: str, message: str) -> None:
    with pytest.raises(fs.ShardingError) as caught:
        read(text, shape=SHAPE)
    assert message in str(caught.value)


def test_what_shardy_lacks_is_refused() -> None:
    spec = Spec(Mesh(x=2, y=2), P("x", reduced={"y"}), shape=(5, 2), sizes={0: (1, 4)})
    with pytest.raises(fs.ShardingError) as caught:
        fs.interop.to_shardy(spec)
    assert "'y' reduced" in str(caught.value)
    assert "must be (3, 2) in Shardy" in str(caught.value)
    with pytest.raises(fs.ShardingError, match="unreduced by sum"):
        fs.interop.to_shardy(Spec(MESH, P(unreduced={"dp": "max"}), shape=(2,)))
    with pytest.raises(fs.ShardingError, match=r"the devices must be 0\.\.1"):
        fs.interop.to_shardy(Mesh(x=2, devices=[4, 5]))
    with pytest.raises(fs.ShardingError, match="must be a Mesh or a Spec"):
        fs.interop.to_shardy(P("x"))  # type: ignore[arg-type]
    with pytest.raises(fs.ShardingError, match="the global shape must be given"):
        read("#sdy.sharding<@mesh, [{}]>")
    with pytest.raises(fs.ShardingError, match="the mesh must be given"):
        read("#sdy.sharding<@mesh, [{}]>", None, shape=(2,))


def test_shardys_parser_reads_and_prints_the_texts() -> None:
    pytest.importorskip("jax", reason="the extra `jax` is not installed")
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    with ir.Context() as context:
        sdy.register_dialect(context)
        for spec in SPECS:
            text = fs.interop.to_shardy(spec)
            assert str(ir.Attribute.parse(text)) == text
        for mesh in (MESH, Mesh(a=2, b=2, devices=[3, 1, 2, 0])):
            text = fs.interop.to_shardy(mesh)
            assert text in str(ir.Module.parse(text))


def test_dtypes_are_those_of_torch() -> None:
    assert all(isinstance(dtype, torch.dtype) for dtype in DTYPES.values())


def test_unknown_element_types_are_refused() -> None:
    text = 'tensor<8x16xi4> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}'
    with pytest.raises(fs.ShardingError, match="the element type i4"):
        fs.interop.from_shardy(text, mesh=fs.Mesh(x=2))
