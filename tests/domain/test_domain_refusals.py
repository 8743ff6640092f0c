"""Bad input of `fs.domain`: errors that name the argument, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec

MESH = Mesh(x=2)
SPEC = Spec(MESH, P("x"), shape=(4,))
VALUES = fs.shard(torch.ones(4, 2), MESH, P("x"))
SUMS = fs.Sharded((torch.ones(4, 2),) * 2, Spec(MESH, P(unreduced={"x"}), shape=(4, 2)))
KEYS = fs.shard(torch.ones(1, 4, 2), MESH, P(None, "x"))
IMAGE, WEIGHT = fs.shard(torch.ones(1, 2, 8, 8), MESH, P(None, None, "x")), torch.ones(6, 2, 3, 3)
conv: Any = fs.domain.conv2d
transposed: Any = fs.domain.conv_transpose2d
pool: Any = fs.domain.max_pool2d
interpolate: Any = fs.domain.interpolate
halo: Any = fs.domain.halo_exchange
attention: Any = fs.domain.scaled_dot_product_attention
plan: Any = fs.domain.window_plan
balance: Any = fs.domain.balance
mean: Any = fs.domain.weighted_mean
variance: Any = fs.domain.weighted_var_mean
knn: Any = fs.domain.knn
radius_search: Any = fs.domain.radius_search

CALLS: dict[str, tuple[Any, str]] = {
    "balance None": (lambda: balance(SPEC, None), "weights None for dim 0"),
    "balance text": (lambda: balance(SPEC, "abcd"), "weights 'abcd' for dim 0"),
    "balance ragged": (lambda: balance(SPEC, [[1], [1, 2]]), "must be 4 finite numbers"),
    "balance complex": (lambda: balance(SPEC, torch.ones(4) * 1j), "weights torch.complex64"),
    "balance NaN": (lambda: balance(SPEC, [1, 1, 1, float("nan")]), "4 finite numbers"),
    "balance 2-d": (lambda: balance(SPEC, torch.ones(4, 4)), r"of shape \(4, 4\)"),
    "mean, other weights": (lambda: mean(VALUES, torch.ones(3, 2)), "must broadcast to the values"),
    "mean, more dims": (lambda: mean(VALUES, torch.ones(1, 4, 2)), "must broadcast to the values"),
    "variance": (lambda: variance(VALUES, torch.ones(4)), r"weights of shape \(4,\) for values"),
    "variance, tensors": (lambda: variance(torch.ones(2), torch.ones(3)), "must broadcast"),
    "plan stride": (lambda: plan(8, 3, 0, sizes_in=(4, 4)), "stride must be an int of at least 1"),
    "plan dilation": (lambda: plan(8, 3, 1, 1.5, sizes_in=(8,)), "dilation must be an int"),
    "plan size": (lambda: plan(None, 3, sizes_in=(8,)), "size must be an int of at least 0"),
    "plan padding": (lambda: plan(8, 3, padding="same", sizes_in=(8,)), "int or a pair of ints"),
    "plan shards": (lambda: plan(8, 3, sizes_in=()), "sizes_in must be sizes of at least 0"),
    "plan negative": (lambda: plan(8, 3, sizes_in=(9, -1)), "sizes_in must be sizes of at least"),
    "knn dims": (lambda: knn(KEYS, KEYS, 1), r"both must have shape \(number, width\)"),
    "knn sums": (lambda: knn(SUMS, VALUES, 1), "it must not be unreduced"),
    "knn bool": (lambda: knn(VALUES, VALUES, True), "k must be an int of at least 1"),
    "radius text": (lambda: radius_search(VALUES, VALUES, "1"), "must be a number of at least 0"),
    "radius NaN": (lambda: radius_search(VALUES, VALUES, float("nan")), "a number of at least 0"),
    "radius size": (lambda: radius_search(VALUES, VALUES, 1.0, size=0.5), "size must be an int"),
    "radius tensors": (lambda: radius_search(torch.ones(1, 1), torch.ones(1, 1), 1.0), "be pairs"),
    "dropout": (lambda: attention(KEYS, KEYS, KEYS, dropout_p=1.5), r"must be in 0\.\.1"),
    "dropout text": (lambda: attention(KEYS, KEYS, KEYS, dropout_p="a"), r"must be in 0\.\.1"),
    "scale": (lambda: attention(KEYS, KEYS, KEYS, scale="a"), "scale must be a number or None"),
    "no key": (lambda: attention(KEYS, None, KEYS), "key must be a pair or a tensor"),
    "stride": (lambda: conv(IMAGE, WEIGHT, stride=0), "stride must be an int of at least 1"),
    "channels": (lambda: conv(IMAGE, WEIGHT, groups=2), r"shape \(out, in / groups"),
    "kernel": (lambda: conv(IMAGE, torch.ones(6, 2, 9, 3)), "longer than the padded dim of 8"),
    "pool padding": (lambda: pool(IMAGE, 2, padding=2), "at most half of a window"),
    "pool kernel": (lambda: pool(IMAGE, 0), "kernel_size must be an int of at least 1"),
    "output padding": (lambda: transposed(IMAGE, WEIGHT[:2], output_padding=1), "must be less"),
    "mode": (lambda: interpolate(IMAGE, 4, mode="cubic"), "mode must be one of nearest"),
    "strides": (lambda: conv(IMAGE, WEIGHT, stride=(1, 1, 1)), "at least 1, or 2 of them"),
    "padding": (lambda: conv(IMAGE, WEIGHT, padding=-1), "padding must be an int of at least 0"),
    "dilation": (lambda: conv(IMAGE, WEIGHT, dilation=0), "dilation must be an int of at least 1"),
    "weight": (lambda: conv(IMAGE, WEIGHT.double()), "both must have one dtype"),
    "bias": (lambda: conv(IMAGE, WEIGHT, torch.ones(5)), "one element for each channel"),
    "flag": (lambda: pool(IMAGE, 2, ceil_mode="a"), "ceil_mode must be True or False"),
    "option": (lambda: fs.domain.avg_pool1d(IMAGE, 2, divisor=3), "an option must be one of input"),
    "scale of interpolation": (lambda: interpolate(IMAGE, scale_factor=0.01), "leave an element"),
    "halo dims": (lambda: halo(IMAGE, {2: (1, 1), -2: (1, 1)}), "a dim must be listed once"),
    "halo axis": (lambda: halo(IMAGE, {2: (1, 1)}, axis_name={2: "x"}), "both must be left out"),
    "halo sizes": (lambda: halo(IMAGE, {2: (1, 1)}, sizes={2: (4, 4)}), "both must be left out"),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_input_is_refused_before_communication(name: str) -> None:
    call, message = CALLS[name]
    with fs.comm_log() as log, pytest.raises(ShardingError, match=message):
        call()
    assert not log.counts


SIZES: dict[str, Any] = {
    "halo": lambda x: fs.domain.halo_exchange(
        x, {0: (1, 1)}, axis_name={0: "x"}, sizes={0: (1, 2)}
    ),
    "knn": lambda x: knn(x, x, 1, axis_name="x", point_sizes=(4, 4, 4))[1],
    "attention": lambda x: attention(x, x, x, axis_name="x", key_sizes=(3, 1)),
    "fold": lambda x: fs.domain.ring_fold(x, lambda y, i: y, torch.add, x, "x", sizes=(3, -1)),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_in_a_body_that_do_not_fit_are_refused(name: str) -> None:
    with fs.comm_log() as log, pytest.raises(ShardingError, match=r"sizes"):
        fs.shard_map(SIZES[name], mesh=MESH, in_specs=P("x"), out_specs=P("x"))(torch.ones(4, 2))
    assert not log.counts


COLUMNS = fs.shard(torch.ones(1, 18, 64), MESH, P(None, None, "x"))
WINDOWS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "same": ("conv2d", (IMAGE, WEIGHT), {"padding": "same", "stride": 2}, "stride must be 1"),
    "word": ("conv2d", (IMAGE, WEIGHT), {"padding": "full"}, "same or valid"),
    "long": ("conv2d", (IMAGE, WEIGHT), {"dilation": 9}, "longer than the padded dim of 8"),
    "bias": ("conv2d", (IMAGE, WEIGHT), {"bias": WEIGHT}, r"must be None, or have shape \(6,\)"),
    "cropped": ("conv_transpose2d", (IMAGE, WEIGHT[:2]), {"padding": 9}, "leave an element"),
    "negative": ("conv_transpose2d", (IMAGE, WEIGHT[:2]), {"output_padding": -1}, "at least 0"),
    "divisor": ("avg_pool2d", (IMAGE, 2), {"divisor_override": 0}, "an int other than 0"),
    "adaptive": ("adaptive_avg_pool2d", (IMAGE,), {"output_size": -1}, "an int of at least 0"),
    "lengths": ("adaptive_max_pool2d", (IMAGE,), {"output_size": (1, 2, 3)}, "or 2 of them"),
    "no size": ("interpolate", (IMAGE,), {"size": None}, "one of size and scale_factor"),
    "scale": ("interpolate", (IMAGE,), {"scale_factor": "a"}, "must be a number above 0"),
    "dims": ("interpolate", (IMAGE, 4), {"mode": "linear"}, "2 dims and 1 spatial ones"),
    "corners": ("interpolate", (IMAGE, 4), {"align_corners": True}, "must be None"),
    "odd pad": ("pad", (IMAGE,), {"pad": (1, 2, 3)}, "pad must be pairs of ints"),
    "dims of pad": ("pad", (IMAGE,), {"pad": (1, 1), "mode": "reflect"}, "must have 4 ints"),
    "reflected": ("pad", (IMAGE,), {"pad": (8, 0, 0, 0), "mode": "reflect"}, "at most 7 elements"),
    "one number": ("unfold", (IMAGE,), {"kernel_size": (3,)}, "or 2 of them"),
    "columns": ("fold", (COLUMNS, 9, 3), {"padding": 1}, r"channels \* 9, 9 \* 9 windows"),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_arguments_of_windows_are_explained_alike_everywhere(name: str) -> None:
    function, args, options, rule = WINDOWS[name]
    op = getattr(torch.nn.functional, function)
    forms: list[Any] = [
        lambda **options: getattr(fs.domain, function)(*args, **options),
        lambda **options: fs.on_pairs(op, mode="auto")(*args, **options),
        lambda **options: fs.partition(lambda x: op(x, *args[1:], **options), mesh=MESH)(args[0]),
    ]
    for form in forms:
        with fs.comm_log() as log, pytest.raises(ShardingError, match=rule) as raised:
            form(**options)
        assert not log.counts
        (problem,) = raised.value.problems
        if "=" in problem.fix:
            form(**{**options, **eval(f"dict({problem.fix})")})
