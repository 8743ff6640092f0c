"""Ring attention: PyTorch's values and gradients over layouts, masks, heads and sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import fshard as fs
from fshard import Mesh, P, PartitionSpec, ShardingError, Spec

F64 = torch.float64
TOLERANCE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
ring: Callable[..., Any] = fs.domain.scaled_dot_product_attention
fused: Callable[..., torch.Tensor] = F.scaled_dot_product_attention


def dense(*args: Any, **options: Any) -> torch.Tensor:
    """Return the attention of one device, twice differentiable."""
    with sdpa_kernel(SDPBackend.MATH):
        return fused(*args, **options)


def tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    values: torch.Tensor = fs.random.normal(fs.random.key(seed), shape, dtype=F64)
    return values


@st.composite
def attentions(draw: Any) -> tuple[list[Any], dict[str, Any]]:
    """Draw pairs and options: one or two sharded axes, uneven and empty shards, masks, heads."""
    n = draw(st.integers(1, 4))
    sizes = [draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for _ in range(2)]
    keys = [*sizes[1][:-1], sizes[1][-1] + 1]
    queries = draw(st.sampled_from([sizes[0], keys, None]))
    rows = sum(queries) if queries is not None else draw(st.integers(0, 5))
    heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    mesh = Mesh(dp=draw(st.sampled_from([1, 2])), cp=n)
    batch = P("dp", None, "cp")

    def spec(shape: tuple[int, ...], along: list[int] | None, dtype: Any = F64) -> Spec:
        partition = batch if along is not None else P("dp")
        sizes = None if along is None else {2: along}
        return Spec(mesh, partition, shape=shape, dtype=dtype, sizes=sizes)

    specs = [
        spec((2, heads * groups, rows, 4), queries),
        spec((2, heads, sum(keys), 4), keys),
        spec((2, heads, sum(keys), 3), keys),
    ]
    pairs: list[Any] = [fs.shard(tensor(s.shape, i), s) for i, s in enumerate(specs)]
    options: dict[str, Any] = {"enable_gqa": groups > 1, "scale": draw(st.sampled_from([None, 2]))}
    mask = draw(st.sampled_from(["causal", "bool", "additive", "padding", None]))
    if mask == "causal":
        options["is_causal"] = True
    elif mask == "padding":
        pairs.append(tensor((2, 1, 1, sum(keys)), 5) > 0)
    elif mask is not None:
        values = tensor((rows, sum(keys)), 4)
        values = values > 0 if mask == "bool" else values
        pairs.append(values if draw(st.booleans()) else fs.shard(values, mesh, P()))
    return pairs, options


@settings(max_examples=40, deadline=None)
@given(case=attentions(), second_order=st.sampled_from([False, False, True]))
def test_ring_equals_one_device(case: tuple[list[Any], dict[str, Any]], second_order: bool) -> None:
    pairs, options = case
    fs.testing.assert_like_one_device(
        lambda *xs: ring(*xs, **options), lambda *xs: dense(*xs, **options), pairs,
        second_order=second_order, **TOLERANCE,
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(case=attentions(), second_order=st.booleans())
def test_ring_equals_one_device_in_many_cases(
    case: tuple[list[Any], dict[str, Any]], second_order: bool
) -> None:
    test_ring_equals_one_device.hypothesis.inner_test(case, second_order)  # type: ignore[attr-defined]


def test_causal_ring_attention() -> None:
    """ShardTensor refuses a causal mask with a sharded sequence; uneven shards, and both orders."""
    mesh = Mesh(cp=3)
    even = Spec(mesh, P(None, None, "cp"), shape=(1, 2, 12, 4), dtype=F64)
    uneven = even.replace(sizes={2: (7, 0, 5)})
    order = fs.domain.zigzag_order(12, 3)
    for spec, options in ((even, {}), (uneven, {}), (even, {"order": "zigzag"})):
        index = order if options else torch.arange(12)

        def plain(*xs: torch.Tensor, index: torch.Tensor = index) -> torch.Tensor:
            out = dense(*(x[:, :, index.argsort()] for x in xs), is_causal=True)
            return out[:, :, index]

        def sharded(*xs: Any, options: dict[str, Any] = options) -> Any:
            return ring(*xs, is_causal=True, **options)

        pairs = [fs.shard(tensor(spec.shape, i), spec) for i in range(3)]
        fs.testing.assert_like_one_device(sharded, plain, pairs, second_order=True, **TOLERANCE)


LAYOUTS = {
    "both": (P(None, None, "x"), P(None, None, "x")),
    "axes swapped": (P(None, None, ("y", "x")), P(None, None, ("x", "y"))),
    "other axes": (P(None, None, "y"), P(None, None, "x")),
    "keys alone": (P(), P(None, None, "x")),
    "queries alone": (P(None, None, "x"), P()),
    "more axes for keys": (P(None, None, "x"), P(None, None, ("x", "y"))),
    "heads too": (P(None, "y", "x"), P(None, "y", "x")),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_queries_and_keys_sharded_differently(name: str, causal: bool) -> None:
    mesh = Mesh(x=2, y=2)
    partitions = LAYOUTS[name][0], LAYOUTS[name][1], LAYOUTS[name][1]
    pairs = [
        fs.shard(
            tensor((1, 2, 6, 4), i), Spec(mesh, p, shape=(1, 2, 6, 4), dtype=F64, uneven="chunk")
        )
        for i, p in enumerate(partitions)
    ]
    fs.testing.assert_like_one_device(
        lambda *xs: ring(*xs, is_causal=causal), lambda *xs: dense(*xs, is_causal=causal), pairs,
        **TOLERANCE,
    )  # fmt: skip


@pytest.mark.parametrize(
    "partition", [P(None, None, "cp"), P("dp", None, "cp"), P(None, "dp", "cp")]
)
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_dropout_drops_the_weights_of_one_device(partition: PartitionSpec, order: str) -> None:
    mesh, key = Mesh(dp=2, cp=2), fs.random.key(3)
    spec = Spec(mesh, partition, shape=(2, 2, 8, 4), dtype=F64)
    index = fs.domain.zigzag_order(8, 2) if order == "zigzag" else torch.arange(8)

    def sharded(*xs: Any) -> Any:
        with fs.random.keyed(key):
            first = ring(*xs, dropout_p=0.4, is_causal=True, order=order)
            return first, ring(*xs, dropout_p=0.4, is_causal=True, order=order)

    def plain(*xs: torch.Tensor) -> Any:
        xs = tuple(x[:, :, index.argsort()] for x in xs)
        with fs.random.keyed(key):
            outs = [fused(*xs, dropout_p=0.4, is_causal=True) for _ in range(2)]
        return tuple(out[:, :, index] for out in outs)

    pairs = [fs.shard(tensor(spec.shape, i), spec) for i in range(3)]
    fs.testing.assert_like_one_device(sharded, plain, pairs, **TOLERANCE)


@pytest.mark.parametrize("shape", [(6, 4), (2, 6, 4), (2, 1, 2, 6, 4)])
def test_dims_before_the_sequence_are_free(shape: tuple[int, ...]) -> None:
    mesh = Mesh(cp=2)
    spec = Spec(mesh, P(*[None] * (len(shape) - 2), "cp"), shape=shape, dtype=F64)
    pairs = [fs.shard(tensor(shape, i), spec) for i in range(3)]
    fs.testing.assert_like_one_device(ring, dense, pairs, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_close_as_one_device(dtype: torch.dtype) -> None:
    spec = Spec(Mesh(cp=4), P(None, None, "cp"), shape=(1, 2, 32, 8), dtype=dtype)
    xs = [tensor(spec.shape, i) for i in range(3)]
    exact = dense(*xs, is_causal=True)
    low = [x.to(dtype) for x in xs]
    y = fs.unshard(ring(*(fs.shard(x, spec) for x in low), is_causal=True))
    one = fused(*low, is_causal=True)
    assert y.dtype == dtype
    assert (y - exact).abs().max() <= 4 * (one - exact).abs().max()


def test_body_of_a_mapped_function() -> None:
    """The same attention with types tracked, uneven sizes, a mask of all keys, and dropout."""
    mesh, sizes = Mesh(cp=3), (3, 0, 5)
    spec = Spec(mesh, P(None, None, "cp"), shape=(1, 2, 8, 4), dtype=F64, sizes={2: sizes})
    rows = Spec(mesh, P("cp"), shape=(8, 8), dtype=F64, sizes={0: sizes})
    key = fs.random.key(1)

    def body(q: Any, k: Any, v: Any, mask: Any) -> Any:
        with fs.random.keyed(key):
            return ring(q, k, v, mask, 0.3, axis_name="cp", query_sizes=sizes, key_sizes=sizes)

    def plain(q: Any, k: Any, v: Any, mask: Any) -> Any:
        with fs.random.keyed(key):
            return fused(q, k, v, mask, 0.3)

    mapped = fs.shard_map(body, mesh=mesh, in_specs=(spec, spec, spec, rows), out_specs=spec)
    pairs = [fs.shard(tensor(spec.shape, i), spec) for i in range(3)]
    pairs.append(fs.shard(tensor((8, 8), 4), rows))
    fs.testing.assert_like_one_device(mapped, plain, pairs, **TOLERANCE)


def test_ring_sends_its_share_of_keys_and_values() -> None:
    """Forward (p - 1) / p of keys and values; backward these and as much of their gradients."""
    spec = Spec(Mesh(cp=4), P(None, None, "cp"), shape=(1, 2, 16, 4), dtype=F64)
    xs = [tensor(spec.shape, i).requires_grad_() for i in range(3)]
    with fs.comm_log() as log:
        out = ring(*(fs.shard(x, spec) for x in xs), is_causal=True)
        total = sum(shard.sum() for shard in out.local)
        torch.autograd.grad(total, xs)
    share = 2 * xs[1].nbytes * 3 // 4
    assert dict(log.forward.bytes) == {("ppermute", "cp"): share}
    assert log.backward.bytes["ppermute", "cp"] == 2 * share


def text_of(*args: Any, **options: Any) -> str:
    with pytest.raises(ShardingError) as error:
        ring(*args, **options)
    return str(error.value)


def test_errors_come_before_communication() -> None:
    mesh = Mesh(dp=2, cp=2)

    def pair(p: PartitionSpec, shape: tuple[int, ...] = (2, 2, 8, 4)) -> Any:
        return fs.shard(torch.zeros(shape), mesh, p)

    rows, heads = pair(P(None, None, "cp")), pair(P(None, "cp"))
    with fs.comm_log() as log:
        assert "key and value must be sharded alike" in text_of(rows, rows, heads)
        assert "dim -3, of batch or heads, must be sharded alike" in text_of(heads, rows, rows)
        width = pair(P(None, None, "cp", "dp"))
        assert "the last dim must be unsharded" in text_of(width, rows, rows)
        text = text_of(rows, pair(P(None, None, "cp"), (2, 2, 8, 6)), rows)
        assert "PyTorch must take the shapes" in text
        assert "one of them must be left out" in text_of(rows, rows, rows, heads, is_causal=True)
        assert "weights must be dropped by a key" in text_of(rows, rows, rows, dropout_p=0.5)
        assert "order must be 'contiguous' or 'zigzag'" in text_of(rows, rows, rows, order="ring")
        uneven = Spec(mesh, P(None, None, "cp"), shape=(2, 2, 8, 4), sizes={2: (3, 5)})
        odd = fs.shard(torch.zeros(uneven.shape), uneven)
        text = text_of(odd, odd, odd, order="zigzag")
        assert "the zigzag order of 8 positions must have the sizes (4, 4)" in text
        other = fs.shard(torch.zeros(2, 2, 8, 4), Mesh(cp=2), P(None, None, "cp"))
        assert "operands must be on one mesh" in text_of(rows, other, other)
        assert "operands must be pairs" in text_of(*[torch.zeros(2, 2, 8, 4)] * 3)
    assert not log.counts


def test_sharded_batch_dim_that_the_query_lacks_is_refused() -> None:
    mesh = Mesh(dp=2, cp=2)
    q, k = tensor((2, 4, 3), 0), tensor((2, 2, 4, 3), 1)
    query = fs.shard(q, Spec(mesh, P(None, "cp"), shape=q.shape, dtype=F64))
    key = fs.shard(k, Spec(mesh, P("dp", None, "cp"), shape=k.shape, dtype=F64))
    with pytest.raises(ShardingError, match="a batch dim that the query lacks must be unsharded"):
        ring(query, key, key)
