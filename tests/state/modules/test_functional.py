"""Modules as pure functions: results, buffers, tied weights, and modules on the meta device."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from tests.state.modules.module_cases import (
    BatchNormNet,
    Counter,
    TiedLanguageModel,
    assert_close,
    noise,
    words,
)


class Shared(nn.Module):
    """Module with one submodule under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Counter()
        self.layers = nn.ModuleList([self.first, nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.first(x) + self.layers[0](x))


CASES: dict[str, tuple[type[nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "tied": (TiedLanguageModel, (words(4, 6),), {"shift": 0.5}),
    "batch norm": (BatchNormNet, (noise(8, 3, 4, 4),), {}),
    "written buffers": (Counter, (), {"x": noise(8, 4)}),
    "two names": (Shared, (noise(8, 4),), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_function_equals_the_module_and_leaves_it_unchanged(case: str) -> None:
    kind, args, kwargs = CASES[case]
    torch.manual_seed(0)
    module = kind().double()
    twin, state = copy.deepcopy(module), copy.deepcopy(module.state_dict())
    fn, params, buffers = fs.state.functional(module)
    output, updated = fn(params, buffers, *args, **kwargs)
    expected = twin(*args, **kwargs)
    leaves = torch.utils._pytree.tree_leaves
    for x, y in zip(leaves(output), leaves(expected), strict=True):
        assert x == y if not isinstance(x, torch.Tensor) else torch.equal(x, y)
    for name, buffer in twin.named_buffers():
        assert_close(updated[name], buffer, name)
    assert all(torch.equal(x, state[name]) for name, x in module.state_dict().items())
    assert not module._forward_hooks


def test_tied_weights_are_one_leaf_under_the_first_name() -> None:
    module = TiedLanguageModel()
    fn, params, buffers = fs.state.functional(module)
    assert "embed.weight" in params
    assert "out.weight" not in params
    assert [*buffers] == ["scale"]  # the state_dict leaves it out
    doubled = {**params, "embed.weight": 2 * params["embed.weight"]}
    text = words(4, 6)
    output, _ = fn(doubled, buffers, text)
    with torch.no_grad():
        module.embed.weight *= 2
    assert torch.equal(output["logits"], module(text)["logits"])


def test_gradients_of_torch_func_are_those_of_backward() -> None:
    module = BatchNormNet().double()
    fn, params, buffers = fs.state.functional(module)

    def loss(params: Any) -> Any:
        return fn(params, buffers, noise(8, 3, 4, 4))[0].sin().sum()

    grads = torch.func.grad(loss)(params)
    module(noise(8, 3, 4, 4)).sin().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert_close(grads[name], parameter.grad, name)


def test_modules_on_the_meta_device_have_shapes() -> None:
    with torch.device("meta"):
        module = TiedLanguageModel()
    _, params, _ = fs.state.functional(module)
    assert params["embed.weight"].shape == (12, 8)
    assert params["embed.weight"].is_meta


def test_signature_is_that_of_forward_after_the_state() -> None:
    fn = fs.state.functional(TiedLanguageModel()).fn
    assert [*inspect.signature(fn).parameters] == ["params", "buffers", "text", "shift"]


class Lazy(nn.Module):
    """Module whose buffers are created by the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)
        self.layer = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones_like(x)
            self.layer.register_buffer("shift", 2 * x.detach())
        y: torch.Tensor = self.mask * x
        return y


def test_buffers_that_a_call_creates_are_refused_and_removed() -> None:
    module = Lazy()
    fn, params, buffers = fs.state.functional(module)
    distributed = fs.state.distribute_module(module, fs.Mesh(x=2), in_specs=fs.P("x"))
    for run in (fn, distributed):
        with pytest.raises(fs.ShardingError, match=r"buffer mask of shape \(4, 2\)") as caught:
            run(params, buffers, torch.ones(4, 2))
        assert "the buffer layer.shift" in str(caught.value)
        assert not dict(module.named_buffers())
    module(torch.ones(4, 2))
    fn, params, buffers = fs.state.functional(module)
    assert [*buffers] == ["mask", "layer.shift"]
    assert torch.equal(fn(params, buffers, torch.ones(4, 2))[0], torch.ones(4, 2))


class LazyParts(nn.Module):
    """Module whose parameters and submodules are created by the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(2))
        if not hasattr(self, "norm"):
            self.norm = nn.BatchNorm1d(2)
            self.register_buffer("shift", torch.zeros(2))
        y: torch.Tensor = self.norm(self.scale * x + self.shift)
        return y


def test_parameters_and_submodules_that_a_call_creates_are_refused_and_removed() -> None:
    module = LazyParts()
    fn, params, buffers = fs.state.functional(module)
    with pytest.raises(fs.ShardingError, match=r"parameter scale of shape \(2,\)") as caught:
        fn(params, buffers, torch.ones(4, 2))
    assert "the submodule norm, a BatchNorm1d" in str(caught.value)
    assert "the buffer shift" in str(caught.value)
    assert [*module.modules()] == [module]
    assert module.scale is None
    assert not hasattr(module, "shift")
    expected = module(noise(4, 2).float())
    fn, params, buffers = fs.state.functional(module)
    assert sorted(params) == ["norm.bias", "norm.weight", "scale"]
    assert torch.equal(fn(params, buffers, noise(4, 2).float())[0], expected)


def test_missing_and_unknown_names_are_refused() -> None:
    fn, params, _ = fs.state.functional(TiedLanguageModel())
    wrong = {"out.weight": params["embed.weight"]}
    wrong |= {name: x for name, x in params.items() if name != "embed.weight"}
    with pytest.raises(fs.ShardingError) as caught:
        fn(wrong, {}, words(4, 6))
    text = str(caught.value)
    assert "params without embed.weight" in text
    assert "params with out.weight" in text
    assert "buffers without scale" in text
