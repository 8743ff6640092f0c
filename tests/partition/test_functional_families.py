"""Functions of `torch.nn.functional` and `torch.linalg` through `fs.partition`.

The layouts need no communication, and values and gradients are those of one device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard.partition.ir import Operation
from fshard.partition.partition import partition
from tests.helpers.ops.samples import rand

P = fs.P
BOTH, ROWS = P("x", "y"), P("x")
Function = Callable[..., torch.Tensor]
Case = tuple[Function, tuple[tuple[int, ...], ...], tuple[fs.PartitionSpec, ...], str]

IMAGE = (4, 4, 6, 6)
CASES: dict[str, Case] = {
    "linear": (F.linear, ((4, 2, 4), (6, 4), (6,)), (P("x", None, "y"), P(None, "y"), P()),
               "f64[4@x,2,6]{unreduced: y}"),
    "addmm": (torch.addmm, ((6,), (4, 4), (4, 6)), (P(), BOTH, P("y")),
              "f64[4@x,6]{unreduced: y}"),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), ((4, 3, 4), (4, 4, 2)),
               (P("x", None, "y"), BOTH), "f64[4@x,3,2]{unreduced: y}"),
    "kron": (torch.kron, ((4, 2), (2, 3)), (ROWS, P()), "f64[8@x,6]"),
    "cdist": (torch.cdist, ((4, 3), (6, 3)), (ROWS, P("y")), "f64[4@x,6@y]"),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (IMAGE, (6, 4, 3, 3), (6,)),
               (BOTH, P(None, "y"), P()), "f64[4@x,6,6,6]{unreduced: y}"),
    "patches": (lambda x, w, b: F.conv2d(x, w, b, stride=2), ((4, 3, 8, 8), (6, 3, 2, 2), (6,)),
                (P("x", None, "y"), P(), P()), "f64[4@x,6,4@y,4]"),
    "conv2d in groups": (lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2),
                         (IMAGE, (6, 2, 3, 3), (6,)), (BOTH, P("y"), P()), "f64[4@x,6@y,6,6]"),
    "conv_transpose2d": (F.conv_transpose2d, (IMAGE, (4, 2, 3, 3), (2,)), (BOTH, P("y"), P()),
                         "f64[4@x,2,8,8]{unreduced: y}"),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (IMAGE,), (BOTH,), "f64[4@x,4@y,3,3]"),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), (IMAGE,), (BOTH,),
                            "f64[4@x,4@y,1,1]"),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (IMAGE,), (BOTH,),
                    "f64[4@x,4@y,12,12]"),
    "pad": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), (IMAGE,), (BOTH,),
            "f64[4@x,4@y,8,8]"),
    "unfold": (lambda x: F.unfold(x, 2), (IMAGE,), (BOTH,), "f64[4@x,16@y,25]"),
    "fold": (lambda x: F.fold(x, (4, 4), 2), ((4, 8, 9),), (BOTH,), "f64[4@x,2@y,4,4]"),
    "grid_sample": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
                    (IMAGE, (4, 3, 3, 2)), (BOTH, ROWS), "f64[4@x,4@y,3,3]"),
    "rfft": (lambda x: torch.fft.rfft(x, dim=0).abs(), ((4, 4, 6),), (P(None, "x", "y"),),
             "f64[3,4@x,6@y]"),
    "solve": (torch.linalg.solve, ((4, 3, 3), (4, 3, 2)), (ROWS, P("x", None, "y")),
              "f64[4@x,3,2@y]"),
    "svdvals": (torch.linalg.svdvals, ((4, 3, 3),), (P(("x", "y")),), "f64[4@(x,y),3]"),
    "slogdet": (lambda x: torch.linalg.slogdet(x)[1], ((4, 3, 3),), (P(("x", "y")),),
                "f64[4@(x,y)]"),
    "attention by heads": (F.scaled_dot_product_attention, ((2, 4, 8, 4),) * 3, (BOTH,) * 3,
                           "f64[2@x,4@y,8,4]"),
    "causal queries": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                       ((2, 4, 8, 4),) * 3, (P("x", None, "y"), ROWS, ROWS), "f64[2@x,4,8@y,4]"),
    "grouped queries": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                        ((2, 8, 8, 4), (2, 2, 8, 4), (2, 2, 8, 4)), (BOTH,) * 3,
                        "f64[2@x,8@y,8,4]"),
    "queries of one key": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        ((2, 8, 8, 4), (2, 1, 8, 4), (2, 1, 8, 4)), (BOTH, ROWS, ROWS), "f64[2@x,8@y,8,4]"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_families_send_nothing(name: str) -> None:
    function, shapes, parts, layout = CASES[name]
    mesh = fs.Mesh(x=2, y=2)
    xs = [rand(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    part = partition(function, mesh=mesh, in_specs=parts)
    pairs = [
        fs.shard(x, fs.Spec(mesh, p, shape=x.shape, dtype=x.dtype))
        for x, p in zip(xs, parts, strict=True)
    ]
    with fs.comm_log() as log:
        local = part(*pairs)
    assert not log.counts
    assert str(local.spec) == layout
    actual, expected = fs.unshard(local), function(*xs)
    torch.testing.assert_close(actual, expected)
    weights = rand(*expected.shape, seed=9)
    torch.testing.assert_close(
        torch.autograd.grad((actual * weights).sum(), xs),
        torch.autograd.grad((expected * weights).sum(), xs),
    )


def test_fused_projection_is_exchanged_by_heads() -> None:
    """Ranks exchange parts of the projection, and each attends with an equal share of heads."""
    mesh, width, heads = fs.Mesh(tp=4), 64, 8

    def attend(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        by_head = [y.view(*x.shape[:2], heads, -1).transpose(1, 2) for y in (x @ w).chunk(3, -1)]
        attended = F.scaled_dot_product_attention(*by_head, is_causal=True)
        return attended.transpose(1, 2).reshape(x.shape) @ out

    shapes = (2, 32, width), (width, 3 * width), (width, width)
    xs = [rand(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    part = partition(attend, mesh=mesh, in_specs=(P(), P(None, "tp"), P("tp")))
    call = part.trace(*xs)
    (attention,) = [
        line.strategy for line in call.lines
        if isinstance(line, Operation) and "attention" in line.name
    ]  # fmt: skip
    assert {str(spec) for spec in attention.in_specs} == {"f64[2,8@tp,32,8]"}
    # An all-gather would send three quarters of the projection to every rank.
    assert call.cost().bytes_received < 3 * (2 * 32 * width * 8) * 3 // 4 / 2
    torch.testing.assert_close(part(*xs), attend(*xs))
    grads, expected = (torch.autograd.grad(fn(*xs).sin().sum(), xs) for fn in (part, attend))
    torch.testing.assert_close(grads, expected)


UNREAD: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cov": lambda x, w: torch.cov(x),
    "population": lambda x, w: x.cov(correction=0),
    "fweights": lambda x, w: torch.cov(x, fweights=torch.arange(8)),
    "aweights": lambda x, w: torch.cov(x, aweights=w.abs()),
    "both": lambda x, w: torch.cov(x, correction=2, fweights=torch.arange(8), aweights=w.abs()),
    "one variable": lambda x, w: torch.cov(x[0]),
    "integers": lambda x, w: torch.cov((10 * x).int()),
    "corrcoef": lambda x, w: torch.corrcoef(x),
    "corrcoef of one variable": lambda x, w: x[0].corrcoef(),
    "combinations": lambda x, w: torch.combinations(x[0], 3) @ w[:3],
    "repeated": lambda x, w: torch.combinations(w, with_replacement=True) @ x[:2],
    "number of a list": lambda x, w: torch._foreach_add([x, x.cos()], w.sum())[1],
    "corrcoef of complex": lambda x, w: torch.corrcoef(torch.complex(x, x.sin())).abs(),
}


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("layout", [BOTH, ROWS, P(None, "x")], ids=str)
def test_functions_whose_values_are_not_read_equal_one_device(
    name: str, layout: fs.PartitionSpec
) -> None:
    function, mesh = UNREAD[name], fs.Mesh(x=2, y=2)
    x, w = rand(4, 8).requires_grad_(), rand(8, seed=1)
    actual, expected = partition(function, mesh=mesh, in_specs=(layout, P()))(x, w), function(x, w)
    torch.testing.assert_close(actual, expected)
    if actual.requires_grad:
        grads = [torch.autograd.grad(y.sin().sum(), x) for y in (actual, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_are_modules(kind: type[torch.nn.RNNBase]) -> None:
    layer, x = kind(4, 6, 2, batch_first=True).double(), torch.randn(4, 3, 4, dtype=torch.float64)
    params, expected = dict(layer.named_parameters()), layer(x)[0]
    part = fs.partition(layer, mesh=fs.Mesh(dp=2), params=P(), in_specs=P("dp"))
    torch.testing.assert_close(part(params, x)[0], expected)
    assert all(a is b for a, b in zip(layer._flat_weights, params.values(), strict=True))


def test_modules_under_two_names_are_left_as_they_were() -> None:
    layer, x = torch.nn.Linear(4, 4).double(), torch.randn(4, 4, dtype=torch.float64)
    model = torch.nn.Sequential(layer, layer)
    params, expected = dict(model.named_parameters()), model(x)
    part = fs.partition(model, mesh=fs.Mesh(dp=2), params=P("dp"), in_specs=P("dp"))
    torch.testing.assert_close(part(params, x), expected)
    assert all(layer.get_parameter(name[2:]) is y for name, y in params.items())
