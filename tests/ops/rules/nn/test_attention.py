"""Rules of attention: correctness for every role, texts, refusals, the decomposition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard._util.errors import ShardingError
from fshard.ops.core.call import Meta
from fshard.ops.propagate.propagate import call_and_tree, rule_of
from fshard.ops.rules.nn.attention import attention_by_products
from fshard.program.cost.links import Link
from fshard.program.cost.topology import Topology
from tests.helpers.ops.samples import (
    Sample,
    rand,
    rule_errors,
    rule_factors,
    rule_text,
    split_sample,
)

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention
CPU = aten._scaled_dot_product_flash_attention_for_cpu


def query_key_value(heads: int = 3, wide: int = 3, lead: int = 2) -> tuple[torch.Tensor, ...]:
    """Return queries of length 5 and keys and values of length 6, values of another width."""
    batch = (2,) * (lead - 1)
    return (rand(*batch, heads, 5, 4), rand(*batch, 3, 6, 4, seed=1),
            rand(*batch, 3, 6, wide, seed=2))  # fmt: skip


def mask(*shape: int) -> torch.Tensor:
    return rand(*shape) > -0.5


COMPOSITE: dict[str, Sample] = {
    "plain": lambda: (SDPA, *query_key_value()),
    "causal": lambda: (SDPA, *query_key_value(), {"is_causal": True}),
    "added mask": lambda: (SDPA, *query_key_value(), rand(2, 1, 5, 6)),
    "mask": lambda: (SDPA, *query_key_value(), mask(5, 6), {"scale": 0.3}),
    "mask by heads": lambda: (SDPA, *query_key_value(), mask(2, 3, 1, 6)),
    "without batch": lambda: (SDPA, *query_key_value(lead=1)),
    "grouped": lambda: (SDPA, *query_key_value(6), {"enable_gqa": True}),
    "grouped, masked": lambda: (SDPA, *query_key_value(6), rand(2, 6, 5, 6), {"enable_gqa": True}),
    "of one key's head": lambda: (SDPA, rand(2, 6, 5, 4), rand(2, 1, 6, 4), rand(2, 1, 6, 3),
                                  {"enable_gqa": True, "is_causal": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSITE)
def test_attention_equals_one_device(name: str) -> None:
    assert rule_errors(COMPOSITE[name]) == []


FUSED: dict[str, Sample] = {
    "cpu": lambda: (CPU, *query_key_value(wide=4)),
    "cpu causal": lambda: (CPU, *query_key_value(wide=4), 0.0, True),
    "math": lambda: (aten._scaled_dot_product_attention_math, *query_key_value()),
    "math grouped": lambda: (aten._scaled_dot_product_attention_math, *query_key_value(6),
                             {"enable_gqa": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_fused_attention_equals_one_device(name: str) -> None:
    assert rule_errors(FUSED[name]) == []


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_attention(causal: bool) -> None:
    q, k, v = query_key_value(wide=4)
    out, sums = CPU(q, k, v, 0.0, causal)
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    assert rule_errors(lambda: (op, rand(2, 3, 5, 4, seed=3), q, k, v, out, sums, 0.0, causal),
                 grad=False) == []  # fmt: skip


@pytest.mark.parametrize("name", COMPOSITE)
def test_attention_by_products(name: str) -> None:
    """The decomposition gives the operation's results, also for rows without keys."""
    op, args, kwargs = split_sample(COMPOSITE[name])
    torch.testing.assert_close(attention_by_products(*args, **kwargs), op(*args, **kwargs))


def test_rows_without_allowed_keys_are_zero() -> None:
    nothing = torch.zeros(5, 6, dtype=torch.bool)
    nothing[1] = True
    result = attention_by_products(*query_key_value(), nothing)
    torch.testing.assert_close(result, F.scaled_dot_product_attention(*query_key_value(), nothing))
    assert result[:, :, 0].eq(0).all()


def test_rule_texts() -> None:
    assert rule_text(SDPA, *query_key_value()) == (
        "bhqe,bhke,bhkv->bhqv  {e unsharded; k unsharded; unreduced 2 sum; unreduced 2 avg}"
    )
    assert rule_factors(SDPA, *query_key_value(), is_causal=True) == "bhqe,bhke,bhkv->bhqv"
    assert rule_factors(SDPA, *query_key_value(6), rand(2, 6, 5, 6), enable_gqa=True) == (
        "b(hg)qe,bhke,bhkv,b(hg)qk->b(hg)qv"
    )


def on_cuda(name: str, *args: object) -> str:
    """Return the rule of a CUDA kernel from shapes alone."""
    return str(rule_of(call_and_tree(getattr(aten, name).default, args, {})[0]))


def test_rules_of_cuda_kernels() -> None:
    heads = Meta((2, 4, 64, 32), torch.float16)
    wide = Meta((2, 4, 64, 64), torch.float16)
    sums = Meta((2, 4, 64), torch.float32)
    count, seed = Meta((3,), torch.int32), Meta((), torch.int64)
    assert on_cuda("_scaled_dot_product_flash_attention", heads, heads, heads) == (
        "bhq1,bh11,bh11->bhq1,bhq,none,none,1,,1  {b max; h max; q max}"
    )
    efficient = "_scaled_dot_product_efficient_attention"
    assert on_cuda(efficient, heads, heads, heads, wide, True) == (
        "bh11,bh11,bh11,bh11->bh11,bh1,,  {b max; h max}"
    )
    assert on_cuda(
        "_scaled_dot_product_flash_attention_backward", heads, heads, heads, heads, heads, sums,
        count, count, 64, 64, 0.0, False, seed, seed,
    ) == (
        "bhq1,bhq1,bh11,bh11,bhq1,bhq,1,1,,->bhq1,bh11,bh11  "
        "{q sum; unreduced 0 sum; unreduced 0 avg}"
    )  # fmt: skip
    assert on_cuda(
        f"{efficient}_backward", heads, heads, heads, heads, wide, heads, sums, seed, seed, 0.0,
        [True, True, True, False],
    ) == (
        "bh11,bh11,bh11,bh11,bh11,bh11,bh1,,->bh11,bh11,bh11,none  "
        "{unreduced 0 sum; unreduced 0 avg}"
    )  # fmt: skip


@pytest.mark.parametrize("cut", [2, 3])
def test_half_precision_loses_no_more_than_on_one_device(cut: int) -> None:
    """Values and gradients over sharded keys and over a sharded width."""
    heads = [3 * rand(2, 4, 12, 8, seed=i) for i in range(3)]
    weights = rand(2, 4, 12, 8, seed=3)

    def gradients(fn: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in heads]
        result = fn(*inputs)
        return [result, *torch.autograd.grad((result * weights).sum(), inputs)]

    mesh = fs.Mesh(x=4)
    spec = fs.Spec(mesh, fs.P(*[None] * cut, "x"), shape=(2, 4, 12, 8), dtype=torch.bfloat16)
    slow = Topology(inner=Link(latency=1e-7, bandwidth=1e8), launch=1e-7)
    attend = F.scaled_dot_product_attention
    part = fs.partition(attend, mesh=mesh, in_specs=(spec,) * 3, topology=slow)
    right = gradients(attend, torch.float64)
    actual, local = gradients(attend, torch.bfloat16), gradients(part, torch.bfloat16)
    for item, expected, exact in zip(actual, local, right, strict=True):
        assert expected.dtype == torch.bfloat16
        assert (expected - exact).abs().max() <= 2 * (item - exact).abs().max()


def test_dropout_is_refused() -> None:
    spec = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(2, 3, 5, 4))
    with pytest.raises(ShardingError) as error:
        fs.propagate(F.scaled_dot_product_attention, spec, spec, spec, dropout_p=0.5)
    assert str(error.value) == (
        "fs.propagate(aten.scaled_dot_product_attention.default)\n"
        "  given: dropout_p=0.5\n"
        "  rule:  draws must be keyed: a rank's generator does not draw the values of the global "
        "tensor\n"
        "  fix:   with fs.random.keyed(key): around fs.apply, or in a function for fs.partition, "
        "draws by the key; "
        "dropout_p=0.0 drops nothing"
    )
