"""Neighborhood attention equals attention under a mask, on tensors and on uneven shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec
from fshard.ops.core.windows import Window
from tests.helpers.strategies import shard_sizes

F64 = torch.float64
FUNCTIONS: dict[int, Callable[..., Any]] = {1: fs.domain.na1d, 2: fs.domain.na2d, 3: fs.domain.na3d}


def neighborhood(size: int, kernel: int, dilation: int, causal: bool, query: int) -> list[int]:
    """Return the keys of a query by the definition of NATTEN."""
    same = range(query % dilation, size, dilation)
    place = query // dilation
    if causal:
        return list(same[max(place - kernel + 1, 0) : place + 1])
    start = min(max(place - kernel // 2, 0), len(same) - kernel)
    return list(same[start : start + kernel])


def masked_attention(
    options: Sequence[tuple[int, int, bool]], *xs: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Return the attention of all queries to all keys under the mask of neighborhoods."""
    sizes, mask = xs[0].shape[1:-2], torch.ones(1, 1, dtype=torch.bool)
    for size, (kernel, dilation, causal) in zip(sizes, options, strict=True):
        one = torch.zeros(size, size, dtype=torch.bool)
        for query in range(size):
            one[query, neighborhood(size, kernel, dilation, causal, query)] = True
        mask = (mask[:, None, :, None] & one[None, :, None, :]).reshape(
            len(mask) * size, len(mask) * size
        )
    q, k, v = (x.flatten(1, -3).transpose(1, 2) for x in xs)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    out = scores.masked_fill(mask.logical_not(), -math.inf).softmax(-1) @ v
    result: torch.Tensor = out.transpose(1, 2).unflatten(1, sizes)
    return result


@st.composite
def calls(draw: Any) -> tuple[Spec, list[tuple[int, int, bool]]]:
    """Draw a layout of queries with one to three sharded spatial dims, and options."""
    n = draw(st.sampled_from([1, 1, 2, 2, 3]))
    options, sizes = [], []
    for _ in range(n):
        kernel, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        most = max(kernel * dilation, {1: 14, 2: 7, 3: 5}[n])
        sizes.append(draw(st.integers(kernel * dilation, most)))
        options.append((kernel, dilation, draw(st.booleans())))
    axes = "xyz"[: draw(st.integers(1, n))]
    mesh = Mesh({axis: draw(st.integers(1, 3 if len(axes) > 1 else 4)) for axis in axes})
    shape = (2, *sizes, 2, 3)
    shards = {1 + i: draw(shard_sizes(sizes[i], mesh.shape[a])) for i, a in enumerate(axes)}
    return Spec(mesh, P(None, *axes), shape=shape, dtype=F64, sizes=shards), options


def tensors(shape: Sequence[int], *widths: int) -> list[torch.Tensor]:
    keys = fs.random.split(fs.random.key(0), len(widths))
    return [
        fs.random.normal(key, (*shape[:-1], width), dtype=F64).requires_grad_()
        for key, width in zip(keys, widths, strict=True)
    ]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def check(spec: Spec, options: list[tuple[int, int, bool]]) -> None:
    """Compare values and gradients of tensors, of pairs and in a partitioned function."""
    xs = tensors(spec.shape, 3, 3, 2, 2)
    *qkv, cotangent = xs
    na, arguments = FUNCTIONS[len(options)], [list(x) for x in zip(*options, strict=True)]
    expected = masked_attention(options, *qkv)
    gradients = torch.autograd.grad(expected, qkv, cotangent)

    def step(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = na(*xs[:3], *arguments)
        return (y, *torch.autograd.grad(y, xs[:3], xs[3]))

    close(step(*xs), (expected, *gradients))
    specs = [spec.replace(shape=x.shape) for x in xs]
    y = fs.unshard(na(*map(fs.shard, qkv, specs), *arguments))
    close((y, *torch.autograd.grad(y, qkv, cotangent)), (expected, *gradients))
    close(fs.partition(step, mesh=spec.mesh, in_specs=tuple(specs))(*xs), (expected, *gradients))


@settings(max_examples=10)
@given(drawn=calls())
def test_equals_masked_attention(drawn: tuple[Spec, list[tuple[int, int, bool]]]) -> None:
    check(*drawn)


@pytest.mark.slow
@settings(max_examples=300)
@given(drawn=calls())
def test_equals_masked_attention_in_many_cases(drawn: Any) -> None:
    check(*drawn)


def test_only_halos_are_sent() -> None:
    mesh = Mesh(h=4)
    spec = Spec(mesh, P(None, "h"), shape=(1, 32, 6, 2, 4), dtype=F64)
    pairs = [fs.shard(x, spec) for x in tensors(spec.shape, 4, 4, 4)]
    with fs.comm_log() as log:
        y = fs.domain.na2d(*pairs, (5, 3))
    row = 6 * 2 * 4 * 8
    assert dict(log.bytes) == {("halo_exchange", "h"): 2 * 4 * row}  # k and v, 2 rows each way
    assert str(y.spec) == "f64[1,32@h,6,2,4]"
    with fs.comm_log() as log:
        fs.unshard(y).square().sum().backward()
    assert log.backward.bytes["halo_reduce", "h"] == 2 * 4 * row


@given(data=st.data())
def test_windows_have_the_keys_of_their_queries(data: st.DataObject) -> None:
    kernel, dilation = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    size = data.draw(st.integers(kernel * dilation, 20))
    low = -(kernel // 2) * dilation
    window = Window("q", "k", size, size, 1, low, low + (kernel - 1) * dilation, anchor=0,
                    boundary="shifted", period=kernel * dilation)  # fmt: skip
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    keys = [k for q in range(start, stop) for k in neighborhood(size, kernel, dilation, False, q)]
    reach = window.reach(start, stop)
    assert reach.start <= min(keys)
    assert max(keys) < reach.stop
    if dilation <= stop - start:
        assert (reach.start, reach.stop) == (min(keys), max(keys) + 1)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # unfold_backward under vmap
@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # of torch.func.jvp
def test_derivatives_of_second_order_and_transforms() -> None:
    spec = Spec(Mesh(h=2), P(None, "h"), shape=(2, 5, 4, 1, 2), dtype=F64, sizes={1: (4, 1)})
    xs, options = tensors(spec.shape, 2, 2, 2), [(3, 1, False), (2, 2, True)]
    arguments = [list(x) for x in zip(*options, strict=True)]

    def norms(na: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def second(*xs: torch.Tensor) -> Any:
            grads = torch.autograd.grad(na(*xs).pow(3).sum(), xs, create_graph=True)
            return torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), xs)

        return second

    def plain(*xs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = fs.domain.na2d(*xs, *arguments)
        return result

    expected = norms(partial(masked_attention, options))(*xs)
    close(norms(plain)(*xs), expected)
    close(fs.partition(norms(plain), mesh=spec.mesh, in_specs=spec)(*xs), expected)
    batches = [torch.stack([x, 2 * x]).detach() for x in xs]
    by_batch = torch.func.vmap(torch.func.grad(lambda *xs: plain(*xs).square().sum()))(*batches)
    looped = [torch.func.grad(lambda *xs: plain(*xs).square().sum())(*[b[i] for b in batches])
              for i in range(2)]  # fmt: skip
    close(by_batch, torch.stack(looped))
    directions = tuple(x.detach().cos() for x in xs)
    primals = tuple(x.detach() for x in xs)
    tangents = [
        torch.func.jvp(f, primals, directions)
        for f in (plain, partial(masked_attention, options),
                  lambda *xs: fs.unshard(fs.domain.na2d(*[fs.shard(x, spec) for x in xs],
                                                        *arguments)))
    ]  # fmt: skip
    close(tangents, tangents[1:2] * 3)
    hessians = [
        torch.func.hessian(lambda x, f=f: f(x, *primals[1:]).square().sum())(primals[0])
        for f in (plain, partial(masked_attention, options))
    ]
    close(*hessians)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel_size": 5}, "kernel_size 5 and dilation 1 of a dim of 4"),
        ({"kernel_size": 2, "dilation": (1, 3)}, "their product must be at most 4"),
        ({"kernel_size": 0}, "kernel_size must be an int of at least 1, or 2 of them"),
        ({"kernel_size": (3, 3, 3)}, "kernel_size must be an int of at least 1, or 2 of them"),
        ({"dilation": "1"}, "dilation must be an int of at least 1"),
        ({"is_causal": (True,)}, "is_causal must be a bool, or 2 of them"),
        ({"is_causal": None}, "is_causal must be a bool, or 2 of them"),
        ({"scale": "1"}, "scale must be a number or None"),
        ({"key": torch.ones(1, 6, 4, 2, 3)}, r"they must have shape \(batch, y, x, heads, width\)"),
        ({"value": torch.ones(1, 6, 4, 1, 2)}, "the same but for the width of the value"),
        ({"value": torch.ones(1, 6, 4, 2, 2).double()}, "the same floating dtype"),
        ({"query": [1.0]}, "query, key and value must be pairs or tensors"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    pair = fs.shard(torch.ones(1, 6, 4, 2, 2), Mesh(h=2), P(None, "h"))
    call: dict[str, Any] = {"query": pair, "key": pair, "value": pair, "kernel_size": 3} | change
    with fs.comm_log() as log, pytest.raises(ShardingError, match=message):
        fs.domain.na2d(**call)
    assert not log.counts


def test_low_precision_and_scale() -> None:
    q, k, v = (x.detach().bfloat16() for x in tensors((1, 40, 2, 8), 8, 8, 8))
    exact = masked_attention([(7, 1, False)], q.double(), k.double(), v.double(), scale=0.5)
    y = fs.domain.na1d(q, k, v, 7, scale=0.5)
    assert y.dtype == torch.bfloat16
    assert float((y.double() - exact).abs().max()) < 2**-6 * math.ceil(float(exact.abs().max()))
