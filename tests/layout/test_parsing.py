"""`parse` as the inverse of `str(spec)`, and its errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import DTYPE_NAMES, Spec
from tests.helpers.spec_grid import all_specs
from tests.helpers.strategies import meshes, specs

MESH = Mesh(dp=2, tp=4)


@given(meshes(permuted=True).flatmap(lambda m: specs(m, kinds=("sum", "avg", "max", "product"))))
def test_parse_inverts_str(spec: Spec) -> None:
    assert parse(str(spec), spec.mesh) == spec
    assert str(parse(str(spec), spec.mesh)) == str(spec)


def test_parse_inverts_str_of_all_partitions() -> None:
    for spec in all_specs(Mesh(x=2, y=2, z=3), (5, 7), uneven="chunk"):
        assert parse(str(spec), spec.mesh) == spec


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.values())
def test_text_of_dtypes(dtype: torch.dtype) -> None:
    spec = Spec(MESH, P("dp"), shape=(8, 16), dtype=dtype)
    assert str(spec) == f"{DTYPE_NAMES[dtype]}[8@dp,16]"
    assert parse(str(spec), MESH) == spec


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Spec(MESH, P("dp"), shape=(8, 16)), "f32[8@dp,16]"),
        (Spec(MESH, P(("dp", "tp")), shape=(8, 16)), "f32[8@(dp,tp),16]"),
        (Spec(MESH, P(("tp", "dp")), shape=(8, 16)), "f32[8@(tp,dp),16]"),
        (Spec(MESH, P("dp", unreduced={"tp"}), shape=(8, 16)), "f32[8@dp,16]{unreduced: tp}"),
        (Spec(MESH, P(unreduced={"tp": "max"}, reduced={"dp"}), shape=(8,)),
         "f32[8]{unreduced: tp=max; reduced: dp}"),
        (Spec(MESH, P(unreduced={"tp": "avg", "dp": "sum"}), shape=()),
         "f32[]{unreduced: dp, tp=avg}"),
        (Spec(MESH, P(reduced={"tp": "avg"}), shape=(0,)), "f32[0]{reduced: tp=avg}"),
        (Spec(MESH, P("tp"), shape=(5,), uneven="chunk"), "f32[5@tp:chunk]"),
        (Spec(MESH, P("tp"), shape=(16,), sizes={0: (3, 5, 0, 8)}), "f32[16@tp:3+5+0+8]"),
        (Spec(MESH, P(("tp", "dp"), None), shape=(9, 2), uneven="chunk", dtype=torch.bool),
         "bool[9@(tp,dp):chunk,2]"),
    ],
)  # fmt: skip
def test_text_of_specs(spec: Spec, text: str) -> None:
    assert str(spec) == repr(spec) == text
    assert parse(text, MESH) == spec


@pytest.mark.parametrize(
    ("loose", "text"),
    [
        ("  f32 [ 8@dp , 16 ]  ", "f32[8@dp,16]"),
        ("f32[8@( dp , tp ),16]", "f32[8@(dp,tp),16]"),
        ("f32[8@(dp),16@()]", "f32[8@dp,16]"),
        ("f32[16@tp:3 + 5 + 0 + 8]", "f32[16@tp:3+5+0+8]"),
        ("f32[8@dp:chunk]", "f32[8@dp]"),
        ("f32[8@dp:4+4]", "f32[8@dp]"),
        ("f32[8]{reduced:dp;unreduced:tp = sum}", "f32[8]{unreduced: tp; reduced: dp}"),
        ("f32[8]{}", "f32[8]"),
        ("f32[ ]", "f32[]"),
    ],
)
def test_parse_ignores_spaces_and_redundant_parts(loose: str, text: str) -> None:
    assert str(parse(loose, MESH)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f32(8)", r"fs.parse\n  given: 'f32\(8\)'\n  rule:  a spec must read dtype\[size@axis"),
        ("", "a spec must read"),
        (5, "given: 5\n  rule:  a spec must read"),
        ("f32[8]{unreduced: tp} tail", "a spec must read"),
        ("f33[8]", r"dtype 'f33' in .*\n  rule:  a dtype must be one of f64, f32"),
        ("float[8]", "dtype 'float'"),
        ("f33[8]", "did you mean"),
        ("f32[8@dp,x]", r"given: f32\[8@dp,x\]\n {18}\^\n  rule:  a dim must read size, size@axis"),
        ("f32[8@dp,]", "a dim must read"),
        ("f32[8@dp:some]", "a dim must read"),
        ("f32[8@dp:4++4]", "a dim must read"),
        ("f32[8@dp:4 4]", "a dim must read"),
        ("f32[8@dp:+]", "a dim must read"),
        ("f32[-8]", "a dim must read"),
        ("f32[8@(dp,tp]", "a dim must read"),
        ("f32[8:4+4]", "a dim must read"),
        ("f32[8]{partial: tp}", "a state must read 'unreduced: axes' or 'reduced: axes'"),
        ("f32[8]{tp}", "a state must read"),
        ("f32[8]{unreduced: tp=mex}", "an axis must read axis or axis=one of sum, avg, max"),
        ("f32[8]{unreduced: }", "an axis must read"),
        ("f32[8]{unreduced: tp=}", "an axis must read"),
        ("f32[8]{unreduced: tp=max, tp=min}", "an axis must be named once"),
        ("f32[8]{unreduced: tp; reduced: tp}", "axis 'tp' 2 times"),
        ("f32[8]{reduced: tp=max}", r"reduced={'tp': 'max'}"),
        ("f32[8@dq]", "axis 'dq' on .*\n.*\n.*did you mean 'dp'"),
        ("f32[8@dp,8@dp]", "axis 'dp' 2 times"),
        ("f32[7@dp]", r"7 % 2 = 1"),
        ("f32[7@dp,5@tp:chunk]", r"dim 0 of size 7 over dp=2"),
        ("f32[8@tp:3+5]", "4 sizes of at least 0 that sum to 8, not 2 that sum to 8"),
        ("i64[8]{unreduced: dp=avg}", "an average of integers"),
    ],
)
def test_parse_errors(text: str, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        parse(text, MESH)
