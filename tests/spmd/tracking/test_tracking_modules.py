"""PyTorch's modules and modes in the bodies of mapped functions, compared with one device.

Rows lie along the axis that is mapped, parameters are closed over: they are invariant, and their
gradients are the sums that one device would have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fshard as fs
from fshard import Mesh, P
from tests.helpers.spec_grid import random_global
from tests.spmd.tracking.test_tracking import I, V

MESH = Mesh(x=2)
F64 = torch.float64
Total = Callable[[torch.Tensor], torch.Tensor]
Body = Callable[[torch.Tensor, Any, Total], torch.Tensor]
"""What is computed of rows with a module; the last argument sums over all rows."""


def built(module: nn.Module, dtype: torch.dtype = F64) -> nn.Module:
    """A module whose numbers are the same in every run."""
    with torch.no_grad():
        for at, each in enumerate(module.parameters()):
            each.copy_(random_global(tuple(each.shape), F64, at) / 8)
    return module.to(dtype)


def mlp(dtype: torch.dtype = F64) -> nn.Module:
    return built(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), dtype)


def encoder(**options: Any) -> nn.Module:
    return built(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options))


def rows(dtype: torch.dtype = F64) -> torch.Tensor:
    return (random_global((4, 3, 8), F64, 7) / 8).to(dtype)


def mapped(body: Body, module: nn.Module, out: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return fs.shard_map(  # type: ignore[no-any-return]
        lambda x: body(x, module, lambda y: fs.psum(y, "x")),
        mesh=MESH, in_specs=P("x"), out_specs=out,
    )  # fmt: skip


def trained(f: Callable[[torch.Tensor], torch.Tensor], module: nn.Module) -> list[torch.Tensor]:
    """The result of rows, and the gradients of the rows and of all parameters."""
    dtype = next(module.parameters()).dtype
    x = rows(dtype).requires_grad_()
    y = f(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


# -- values and gradients ----------------------------------------------------------------------


def packed(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    given = rnn.pack_padded_sequence(x, torch.tensor([3] * len(x)), batch_first=True)
    return rnn.pad_packed_sequence(m(given)[0], batch_first=True)[0]


def masked(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=F64)
    made: torch.Tensor = m(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    return made


def meta_made(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    """A module made without memory, and loaded with the numbers of another."""
    with torch.device("meta"):
        other = nn.Linear(8, 16, dtype=F64).to_empty(device="cpu")
    other.load_state_dict(m[0].state_dict())
    made: torch.Tensor = m(x) + total(F.linear(x, other.weight, other.bias).sum())
    return made


def on_device(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    with torch.device("cpu"):
        made: torch.Tensor = m(x) + torch.arange(8.0) * torch.ones(8, dtype=F64)
        return made


def scaled(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    """With other parameters, made of those of the module."""
    given = {name: 2 * each for name, each in m.named_parameters()}
    made: torch.Tensor = torch.func.functional_call(m, given, (x,))
    return made


def ensemble(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    """Twice the module, under `vmap`; a gradient goes through the parameters that it maps."""
    stacked = {name: torch.stack([p, 2 * p]) for name, p in m.named_parameters()}
    made: torch.Tensor = torch.vmap(lambda ps: torch.func.functional_call(m, ps, (x,)))(stacked)
    return made.sum(0)


def attends(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    made: torch.Tensor = m(x, x, x)[0]
    return made


CASES: dict[str, tuple[Callable[[], nn.Module], Body]] = {
    "lstm": (
        lambda: built(nn.LSTM(8, 5, 2, batch_first=True)),
        lambda x, m, total: m(x)[0],
    ),
    "lstm_packed": (lambda: built(nn.LSTM(8, 5, batch_first=True)), packed),
    "gru": (
        lambda: built(nn.GRU(8, 5, batch_first=True, bidirectional=True)),
        lambda x, m, total: m(x)[0],
    ),
    "attention": (lambda: built(nn.MultiheadAttention(8, 2, batch_first=True)), attends),
    "attention_masked": (lambda: built(nn.MultiheadAttention(8, 2, batch_first=True)), masked),
    "encoder": (lambda: encoder(dropout=0.0), lambda x, m, total: m(x)),
    "encoder_eval": (lambda: encoder(dropout=0.3).eval(), lambda x, m, total: m(x)),
    "weight_norm": (
        lambda: parametrizations.weight_norm(built(nn.Linear(8, 4))),
        lambda x, m, total: m(x),
    ),
    "functional_call": (mlp, scaled),
    "ensemble": (mlp, ensemble),
    "default_device": (mlp, on_device),
    "meta_device": (mlp, meta_made),
}


@pytest.mark.parametrize("name", CASES)
def test_modules_are_as_on_one_device(name: str) -> None:
    make, body = CASES[name]
    module = make()
    got = trained(mapped(body, module, P("x")), module)
    for one, other in zip(
        got, trained(lambda x: body(x, module, lambda y: y), module), strict=True
    ):
        torch.testing.assert_close(one, other)


def with_a_sum(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    """A collective in what is computed again."""
    made: torch.Tensor = m(x)
    return made * total(made.sum())


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
def test_what_is_computed_again_is_as_on_one_device(selective: bool) -> None:
    again = partial(checkpoint, use_reentrant=False)
    if selective:
        again = partial(again, context_fn=partial(create_selective_checkpoint_contexts, policy))
    module = mlp()
    got = trained(mapped(partial(again, with_a_sum), module, P("x")), module)
    want = trained(lambda x: with_a_sum(x, module, lambda y: y), module)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_is_as_on_one_device() -> None:
    """Of numbers that bfloat16 holds exactly, but for the sums of gradients."""
    module = mlp(torch.float32)

    def body(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = m(m(x))  # the second call uses what is cast already
            assert y.dtype is torch.bfloat16
            return y

    got = trained(mapped(body, module, P("x")), module)
    want = trained(lambda x: body(x, module, lambda y: y), module)
    assert torch.equal(got[0], want[0])
    for one, other in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


# -- without gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    """Eval without gradients takes another path in PyTorch: one fused function."""
    module = encoder().eval()

    def body(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
        with mode():
            y: torch.Tensor = m(x)
            y.add_(1)
            return y

    def typed(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
        y = body(x, m, total)
        with mode():
            z = torch.zeros(8, dtype=F64)
            assert str(fs.typeof(z).states) == I
            z[:4].copy_(y[0, 0, 4:])
        assert str(fs.typeof(z).states) == str(fs.typeof(y).states) == V
        return y

    got = mapped(typed, module, P("x"))(rows())
    torch.testing.assert_close(got, body(rows(), module, lambda y: y))


# -- modules that the body makes ---------------------------------------------------------------


def steps(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    """A copy of the module is trained, with gradients that are clipped both ways."""
    mine = copy.deepcopy(m)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        total(mine(x).square().sum()).backward()
        norm = nn.utils.clip_grad_norm_(mine.parameters(), 0.1)
        nn.utils.clip_grad_value_(mine.parameters(), 0.01)
        optimizer.step()
    return torch.cat([norm[None], nn.utils.parameters_to_vector(mine.parameters()).detach()])


def test_a_copy_is_trained_as_on_one_device() -> None:
    module = mlp()
    got = mapped(steps, module, P())(rows())
    torch.testing.assert_close(got, steps(rows(), module, lambda y: y))


def test_functional_gradients_in_the_body_are_as_on_one_device() -> None:
    def body(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
        given = {name: each.detach() for name, each in m.named_parameters()}

        def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
            return total(torch.func.functional_call(m, params, (x,)).square().sum())

        return nn.utils.parameters_to_vector(torch.func.grad(loss)(given).values())

    module = mlp()
    torch.testing.assert_close(mapped(body, module, P())(rows()), body(rows(), module, lambda y: y))


def test_statistics_from_outside_are_not_written() -> None:
    """In training the power iteration writes its vectors; in eval it does not."""
    module = parametrizations.spectral_norm(built(nn.Linear(8, 4)))
    body: Body = lambda x, m, total: m(x)  # noqa: E731
    with pytest.raises(fs.ShardingError, match="a write into a tensor of shape"):
        mapped(body, module, P("x"))(rows())
    module.eval()
    torch.testing.assert_close(mapped(body, module, P("x"))(rows()), module(rows()))


# -- maps in the body --------------------------------------------------------------------------


def test_types_of_an_inner_map() -> None:
    """Along the axes of the outer map the states stay what they were."""
    mesh, ones, seen = Mesh(x=2, y=2), torch.ones(2), []
    cut = fs.shard_map(mesh=mesh, axis_names={"y"}, in_specs=P("y"), out_specs=P("y"))

    def types(*xs: torch.Tensor) -> list[str]:
        return [str(fs.typeof(x).states) for x in xs]

    def outer(x: torch.Tensor) -> None:
        w = ones * 1

        def inner(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(types(a, b, a * b, w * 1, ones, torch.zeros(2)))
            return a * b, fs.psum(a * b, "y")

        specs = ((P(None, "y"), P("y")), (P(None, "y"), P()))
        both = fs.shard_map(
            inner, mesh=mesh, axis_names={"y"}, in_specs=specs[0], out_specs=specs[1]
        )
        part = fs.pcast(x, "x", to="unreduced")
        seen.append(types(*both(x, ones), cut(lambda b: b * 1)(ones), cut(lambda b: b * 1)(part)))

    fs.shard_map(outer, mesh=mesh, axis_names={"x"}, in_specs=P("x"), out_specs=None)(
        torch.ones(4, 2)
    )
    inside = ["{varying: x, y}", "{varying: y}", "{varying: x, y}", I, I, I]
    assert [each for each in seen if len(each) == 6] == [inside] * 4
    assert [each for each in seen if len(each) == 4] == [[V, V, I, "{unreduced: x}"]] * (
        len(seen) - 4
    )


def test_local_map_in_a_body_is_as_on_one_device() -> None:
    module = mlp()

    def body(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
        double = fs.local_map(m, in_specs=P("x"), out_specs=P("x"))
        out: torch.Tensor = double(fs.from_local(x, MESH, P("x"))).local
        assert str(fs.typeof(out).states) == V
        return out

    got = trained(mapped(body, module, P("x")), module)
    for one, other in zip(got, trained(module, module), strict=True):
        torch.testing.assert_close(one, other)
