"""Modules and modes of PyTorch in mapped functions, compared with one device.

Rows are sharded along the mapped axis. Parameters are closures: they are invariant, and their
gradients are summed over the ranks.
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
from tests.helpers.spmd.tracked_bodies import I, V

MESH = Mesh(x=2)
F64 = torch.float64
Total = Callable[[torch.Tensor], torch.Tensor]
Body = Callable[[torch.Tensor, Any, Total], torch.Tensor]
"""Function of rows and a module; the last argument sums over all rows."""


def built(module: nn.Module, dtype: torch.dtype = F64) -> nn.Module:
    """Set the parameters of a module to the same values in every run."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(random_global(tuple(parameter.shape), F64, i) / 8)
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
    """Return the result for rows, and the gradients of the rows and of all parameters."""
    dtype = next(module.parameters()).dtype
    x = rows(dtype).requires_grad_()
    y = f(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


# -- values and gradients ----------------------------------------------------------------------


def packed(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    sequence = rnn.pack_padded_sequence(x, torch.tensor([3] * len(x)), batch_first=True)
    return rnn.pad_packed_sequence(m(sequence)[0], batch_first=True)[0]


def masked(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=F64)
    output: torch.Tensor = m(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    return output


def from_meta(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    """Create a module on the meta device and load the state of another."""
    with torch.device("meta"):
        other = nn.Linear(8, 16, dtype=F64).to_empty(device="cpu")
    other.load_state_dict(m[0].state_dict())
    output: torch.Tensor = m(x) + total(F.linear(x, other.weight, other.bias).sum())
    return output


def on_device(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    with torch.device("cpu"):
        output: torch.Tensor = m(x) + torch.arange(8.0) * torch.ones(8, dtype=F64)
        return output


def scaled(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    """Call the module with parameters computed from its own."""
    parameters = {name: 2 * parameter for name, parameter in m.named_parameters()}
    output: torch.Tensor = torch.func.functional_call(m, parameters, (x,))
    return output


def ensemble(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    """Call the module twice under `vmap`, with gradients through the mapped parameters."""
    stacked = {name: torch.stack([p, 2 * p]) for name, p in m.named_parameters()}
    output: torch.Tensor = torch.vmap(lambda ps: torch.func.functional_call(m, ps, (x,)))(stacked)
    return output.sum(0)


def attends(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    output: torch.Tensor = m(x, x, x)[0]
    return output


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
    "meta_device": (mlp, from_meta),
}


@pytest.mark.parametrize("name", CASES)
def test_modules_match_one_device(name: str) -> None:
    make, body = CASES[name]
    module = make()
    result = trained(mapped(body, module, P("x")), module)
    expected = trained(lambda x: body(x, module, lambda y: y), module)
    for actual, reference in zip(result, expected, strict=True):
        torch.testing.assert_close(actual, reference)


def with_a_sum(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    """Run a collective within the checkpoint."""
    output: torch.Tensor = m(x)
    return output * total(output.sum())


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved_ops = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in saved_ops else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
def test_checkpoints_match_one_device(selective: bool) -> None:
    checkpointed = partial(checkpoint, use_reentrant=False)
    if selective:
        checkpointed = partial(
            checkpointed, context_fn=partial(create_selective_checkpoint_contexts, policy)
        )
    module = mlp()
    result = trained(mapped(partial(checkpointed, with_a_sum), module, P("x")), module)
    expected = trained(lambda x: with_a_sum(x, module, lambda y: y), module)
    for actual, reference in zip(result, expected, strict=True):
        torch.testing.assert_close(actual, reference)


def test_autocast_matches_one_device() -> None:
    """Values are exact in bfloat16; sums of gradients are not."""
    module = mlp(torch.float32)

    def body(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = m(m(x))  # the second call uses cached casts
            assert y.dtype is torch.bfloat16
            return y

    result = trained(mapped(body, module, P("x")), module)
    expected = trained(lambda x: body(x, module, lambda y: y), module)
    assert torch.equal(result[0], expected[0])
    for x, y in zip(result[1:], expected[1:], strict=True):
        torch.testing.assert_close(x, y, rtol=0.05, atol=0.05)


# -- without gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(mode: Callable[[], Any]) -> None:
    """Eval without gradients calls a fused function of PyTorch."""
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

    result = mapped(typed, module, P("x"))(rows())
    torch.testing.assert_close(result, body(rows(), module, lambda y: y))


# -- modules created in the body ---------------------------------------------------------------


def steps(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
    """Train a copy of the module, with gradients clipped by norm and by value."""
    model = copy.deepcopy(m)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        total(model(x).square().sum()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return torch.cat([norm[None], nn.utils.parameters_to_vector(model.parameters()).detach()])


def test_training_a_copy_matches_one_device() -> None:
    module = mlp()
    result = mapped(steps, module, P())(rows())
    torch.testing.assert_close(result, steps(rows(), module, lambda y: y))


def test_functional_gradients_match_one_device() -> None:
    def body(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
        parameters = {name: item.detach() for name, item in m.named_parameters()}

        def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
            return total(torch.func.functional_call(m, params, (x,)).square().sum())

        return nn.utils.parameters_to_vector(torch.func.grad(loss)(parameters).values())

    module = mlp()
    torch.testing.assert_close(mapped(body, module, P())(rows()), body(rows(), module, lambda y: y))


def test_writes_into_outside_statistics_are_refused() -> None:
    """In training the power iteration would write its vectors; in eval it does not."""
    module = parametrizations.spectral_norm(built(nn.Linear(8, 4)))
    body: Body = lambda x, m, total: m(x)  # noqa: E731
    with pytest.raises(fs.ShardingError, match="a write into a tensor of shape"):
        mapped(body, module, P("x"))(rows())
    module.eval()
    torch.testing.assert_close(mapped(body, module, P("x"))(rows()), module(rows()))


# -- maps in the body --------------------------------------------------------------------------


def test_types_of_an_inner_map() -> None:
    """States along the axes of the outer map are unchanged."""
    mesh, ones, seen = Mesh(x=2, y=2), torch.ones(2), []
    over_y = fs.shard_map(mesh=mesh, axis_names={"y"}, in_specs=P("y"), out_specs=P("y"))

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
        seen.append(
            types(*both(x, ones), over_y(lambda b: b * 1)(ones), over_y(lambda b: b * 1)(part))
        )

    fs.shard_map(outer, mesh=mesh, axis_names={"x"}, in_specs=P("x"), out_specs=None)(
        torch.ones(4, 2)
    )
    inside = ["{varying: x, y}", "{varying: y}", "{varying: x, y}", I, I, I]
    assert [item for item in seen if len(item) == 6] == [inside] * 4
    assert [item for item in seen if len(item) == 4] == [[V, V, I, "{unreduced: x}"]] * (
        len(seen) - 4
    )


def test_local_map_in_a_body_matches_one_device() -> None:
    module = mlp()

    def body(x: torch.Tensor, m: Any, total: Total) -> torch.Tensor:
        double = fs.local_map(m, in_specs=P("x"), out_specs=P("x"))
        out: torch.Tensor = double(fs.from_local(x, MESH, P("x"))).local
        assert str(fs.typeof(out).states) == V
        return out

    result = trained(mapped(body, module, P("x")), module)
    for x, y in zip(result, trained(module, module), strict=True):
        torch.testing.assert_close(x, y)
