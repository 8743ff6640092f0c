"""Partitioned functions of registered classes, keyword-only arguments, tied weights and `None`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fshard as fs
from fshard import P
from tests.helpers.spmd.model_output import Attributes, Carry, CausalLMOutput

MESH = fs.Mesh(x=2)


class TiedModel(nn.Module):
    """Embedding whose weight is the weight of the output, as of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 8, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, *, labels: Any = None) -> CausalLMOutput:
        logits = self.head(self.embed(tokens))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return CausalLMOutput(loss=loss, logits=logits)


TOKENS, LABELS = torch.tensor([1, 2, 2, 7]), torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize("as_pairs", [False, True])
def test_results_of_registered_classes_have_their_class(as_pairs: bool) -> None:
    x = torch.arange(4.0, requires_grad=True)
    value: Any = fs.shard(x, MESH, P("x")) if as_pairs else x

    def nested(carry: Carry, a: Attributes) -> dict[str, Any]:
        output = CausalLMOutput(logits=2 * carry.state, hidden_states=(a.w, None))
        return {"out": output, "carry": Carry(a.w.sum()), "none": None}

    part = fs.partition(nested, mesh=MESH, in_specs=P("x"))
    for _ in range(2):  # planned, then cached
        result = part(Carry(value), Attributes(w=value, none=None))
        out = result["out"]
        assert (type(out), type(result["carry"])) == (CausalLMOutput, Carry)
        assert (out.loss, result["none"], out.hidden_states[1]) == (None, None, None)
        logits = fs.unshard(out.logits) if as_pairs else out.logits
        (grad,) = torch.autograd.grad(logits.sum(), x)
        torch.testing.assert_close((logits, grad), (2 * x, torch.full((4,), 2.0)))
    specs = {"out": P(), "carry": Carry(P()), "none": P("x")}
    replicated = fs.partition(nested, mesh=MESH, in_specs=P("x"), out_specs=specs)
    result = replicated(Carry(value), Attributes(w=value))
    torch.testing.assert_close(torch.as_tensor(result["out"]["logits"].shape), torch.tensor([4]))


def test_keyword_only_arguments_have_specs_by_name_or_position() -> None:
    def affine(x: Any, *rest: Any, scale: Any = 1.0, **others: Any) -> Any:
        for value in (*rest, *others.values()):
            x = x if value is None else x + value
        return x * scale

    x = torch.arange(4.0)
    part = fs.partition(affine, mesh=MESH, in_specs=P("x"))
    by_name = {"x": P("x"), "scale": P(), "bias": P("x"), "none": P("x")}
    named = fs.partition(affine, mesh=MESH, in_specs=by_name)
    for keywords in ({}, {"scale": 3.0}, {"bias": x, "scale": torch.tensor(2.0).expand(4)}):
        for f in (part, named):
            torch.testing.assert_close(f(x, none=None, **keywords), affine(x, **keywords))
    torch.testing.assert_close(part(x, x, bias=x), 3 * x)
    assert named.trace(x, bias=x).names == ("args[0]", "kwargs['bias']")
    assert named(fs.shard(x, MESH, P("x")), bias=fs.shard(x, MESH, P("x"))).spec.partition == P("x")
    between = lambda x, first=None, second=1.0: x * second  # noqa: E731
    part = fs.partition(between, mesh=MESH, in_specs={"x": P("x"), "second": None})
    torch.testing.assert_close(part(x, second=3.0), 3 * x)
    with pytest.raises(fs.ShardingError, match="every argument must have a spec; 'shift' has none"):
        named(x, shift=x)


@pytest.mark.parametrize("names", ["named_parameters", "state_dict", "state_dict as pairs"])
def test_tied_weights_have_any_of_their_names(names: str) -> None:
    model = TiedModel()
    p: Any = dict(model.named_parameters() if names == "named_parameters" else model.state_dict())
    assert len(p) == (1 if names == "named_parameters" else 2)
    inputs: list[Any] = [TOKENS, LABELS]
    if names == "state_dict as pairs":
        p = {name: fs.shard(x, MESH, P("x")) for name, x in p.items()}
        inputs = [fs.shard(x, MESH, P()) for x in inputs]
    part = fs.partition(model, mesh=MESH, params=P("x"), out_specs=P())
    result, expected = part(p, inputs[0], labels=inputs[1]), model(TOKENS, labels=LABELS)
    unshard: Any = fs.unshard if "pairs" in names else (lambda x: x)
    torch.testing.assert_close(unshard(result.logits), expected.logits)
    torch.testing.assert_close(unshard(result.loss), expected.loss)
    assert part(p, inputs[0]).loss is None


def test_one_tensor_under_two_names_is_one_value() -> None:
    model = TiedModel()
    p = model.state_dict(keep_vars=True)
    specs = dict.fromkeys(p, P("x"))
    f: Any = lambda p, x, y: functional_call(model, p, (x,), {"labels": y}).loss  # noqa: E731
    part = fs.partition(f, mesh=MESH, in_specs=(specs, P("x"), P("x")))
    loss, expected = part(dict(p), TOKENS, LABELS), f(p, TOKENS, LABELS)
    torch.testing.assert_close(loss, expected)
    weight = model.embed.weight
    torch.testing.assert_close(
        torch.autograd.grad(loss, weight), torch.autograd.grad(expected, weight)
    )
    same = fs.partition(lambda a, b: a + b if a is b else a - b, mesh=MESH, in_specs=P("x"))
    x = torch.arange(2.0)
    assert same(x, x).tolist() == [0.0, 2.0]
    assert same(x, x.clone()).tolist() == [0.0, 0.0]
    differ = fs.partition(lambda a, b: a is b, mesh=MESH, in_specs=(P("x"), P()))
    assert not differ(x, x)


@pytest.mark.parametrize("as_pairs", [False, True])
def test_repeated_calls_see_tensors_that_changed_in_place(as_pairs: bool) -> None:
    def f(x: torch.Tensor, rows: dict[str, torch.Tensor]) -> Any:
        return x * len(x) + rows["b"].sum()

    part = fs.partition(f, mesh=MESH, in_specs=(P(), P("x")))
    x, rows = torch.ones(4), {"b": torch.arange(4.0), "a": torch.ones(2)}

    def check() -> None:
        args: Any = x, rows
        if as_pairs:
            args = fs.shard(x, MESH, P()), {k: fs.shard(v, MESH, P("x")) for k, v in rows.items()}
        for _ in range(2):
            result = fs.unshard(part(*args)) if as_pairs else part(*args)
            torch.testing.assert_close(result, f(x, rows))
            assert result.requires_grad == f(x, rows).requires_grad

    check()
    rows["b"].requires_grad_()
    check()
    with torch.no_grad():
        check()
    x.data = torch.ones(6)
    check()
    x.data = torch.ones(6, dtype=torch.float64)
    check()
    rows["a"] = rows["b"]
    check()
