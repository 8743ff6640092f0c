"""Arguments and results of mapped functions that are instances of classes, and `None` in trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from tests.helpers.spmd.model_output import Attributes, Carry, CausalLMOutput, Unregistered

MESH = fs.Mesh(x=2)


def nested(tree: dict[str, Any]) -> dict[str, Any]:
    output = CausalLMOutput(logits=2 * tree["carry"].state)
    return {"out": output, "none": None, "attributes": Attributes(q=tree["a"].w)}


@pytest.mark.parametrize("as_pairs", [False, True])
def test_results_of_registered_classes_have_their_class(as_pairs: bool) -> None:
    x = torch.arange(4.0, requires_grad=True)
    value: Any = fs.shard(x, MESH, P("x")) if as_pairs else x
    mapped = fs.shard_map(nested, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    for _ in range(2):  # planned, then cached
        result = mapped({"carry": Carry(value), "a": Attributes(w=value), "none": None})
        out, q = result["out"], result["attributes"].q
        assert type(out) is CausalLMOutput
        assert (out.loss, result["none"], list(out)) == (None, None, ["logits"])
        logits = fs.unshard(out.logits) if as_pairs else out.logits
        torch.testing.assert_close(logits, 2 * x)
        torch.testing.assert_close(fs.unshard(q) if as_pairs else q, x)
        (grad,) = torch.autograd.grad(logits.sum(), x)
        torch.testing.assert_close(grad, torch.full((4,), 2.0))


def test_out_specs_of_a_registered_class() -> None:
    specs = CausalLMOutput(loss=P(), logits=P("x"))
    mapped = fs.shard_map(
        lambda x: CausalLMOutput(loss=fs.psum(x.sum(), "x"), logits=x),
        mesh=MESH, in_specs=P("x"), out_specs=specs,
    )  # fmt: skip
    result = mapped(torch.arange(4.0))
    assert (result.loss.item(), result.logits.tolist()) == (6.0, [0.0, 1.0, 2.0, 3.0])
    nothing = fs.shard_map(
        lambda x: CausalLMOutput(logits=x), mesh=MESH, in_specs=P("x"), out_specs=specs
    )
    with pytest.raises(
        fs.ShardingError, match=r"out_specs has the keys .*, the value \['logits'\]"
    ):
        nothing(torch.arange(4.0))


def test_unregistered_dataclasses_are_refused() -> None:
    def error_of(fn: Any, value: Any) -> str:
        with pytest.raises(fs.ShardingError) as caught:
            fs.shard_map(fn, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(value)
        return str(caught.value)

    rest = (
        "an Unregistered, with tensors in it\n"
        "  rule:  tensors must be in tuples, lists, dicts, and instances of registered classes to "
        "be found\n"
        "  fix:   torch.export.register_dataclass(Unregistered), once, before the call"
    )
    x = torch.ones(2)
    assert error_of(Unregistered, x) == f"shard_map(Unregistered)\n  given: result is {rest}"
    given = f"c: with P('x') a value that is {rest}"
    assert error_of(lambda c: c.state, Unregistered(x)) == f"shard_map(<lambda>)\n  given: {given}"


def test_none_is_an_empty_tree() -> None:
    x = torch.arange(4.0)
    value = {"w": x, "b": None, "items": [None, x]}
    specs: Any
    for specs in (P("x"), {"w": P("x"), "b": P(None, "x"), "items": [P(), P("x")]}):
        mapped = fs.shard_map(lambda t: t, mesh=MESH, in_specs=(specs,), out_specs=specs)
        result = mapped(value)
        assert result["b"] is result["items"][0] is None
        torch.testing.assert_close((result["w"], result["items"][1]), (x, x))
    summed = fs.shard_map(lambda t: fs.psum(t, "x"), mesh=MESH, in_specs=P("x"), out_specs=P())
    assert summed(value)["b"] is None
    by_dims = fs.smap(lambda t: t, mesh=MESH, axis_name="x", in_axes=0, out_axes=0)
    assert by_dims(value)["items"][0] is None
    with pytest.raises(fs.ShardingError, match=r"is a dict where the value is a NoneType"):
        fs.shard_map(lambda t: t, mesh=MESH, in_specs=({"w": P("x")},), out_specs=P())(None)


def test_keyword_only_arguments_have_specs_by_name_or_position() -> None:
    def affine(x: Any, *, scale: Any = 1.0, bias: Any = None) -> Any:
        return x * scale if bias is None else x * scale + bias

    x, by_name = torch.ones(2), {"x": P("x"), "scale": P(), "bias": P("x")}
    for specs in (by_name, tuple(by_name.values())):
        f = fs.shard_map(affine, mesh=MESH, in_specs=specs, out_specs=P("x"))
        assert f(x).tolist() == f(x, bias=None).tolist() == [1.0, 1.0]
        assert f(x, scale=torch.tensor(3.0)).tolist() == [3.0, 3.0]
        assert f(x, bias=torch.arange(2.0), scale=2).tolist() == [2.0, 3.0]


def test_trees_of_registered_classes_are_redistributed() -> None:
    src = fs.Spec(MESH, P("x"), shape=(4,))
    dst = src.replace(partition=P())
    trees = [
        {"c": Carry(spec), "none": None, "out": CausalLMOutput(logits=spec)} for spec in (src, dst)
    ]
    batch = fs.redistribute(*trees)
    assert "['c'].state and 1 more  f32[4@x] -> f32[4]" in str(batch)
    local = torch.ones(2), torch.zeros(2)
    result = batch({"c": Carry(local), "none": None, "out": CausalLMOutput(logits=local)})
    assert (type(result["c"]), type(result["out"]), result["none"]) == (Carry, CausalLMOutput, None)
    assert result["out"].logits[1].tolist() == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(fs.ShardingError, match=r"dst has the keys .state, .step, src .state"):
        fs.redistribute(Carry(src), Carry(dst, dst))
