"""Partitioned functions on a mesh of one device, and on axes of size 1: PyTorch's work alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from tests.helpers.ops.blocks import llama, llama_params

ONE = Mesh(x=1)
LAYOUTS = [P(), P("x"), P(None, "x")]


def node_count(x: torch.Tensor) -> int:
    """Return the number of autograd nodes that a tensor depends on."""
    pending, nodes = [x.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending += [parent for parent, _ in node.next_functions]
    return len(nodes)


def layout_of(x: torch.Tensor, layout: fs.PartitionSpec) -> fs.PartitionSpec:
    return layout if x.ndim >= len(layout.dims) else P()


def llama_loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return llama(params, x).square().sum()


def llama_inputs() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    params = {k: p.detach().double().requires_grad_() for k, p in llama_params().items()}
    x = torch.linspace(-1, 1, 2 * 8 * 32, dtype=torch.float64).reshape(2, 8, 32)
    return params, x


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_device_adds_a_view_and_a_copy_of_the_result(layout: fs.PartitionSpec) -> None:
    params, x = llama_inputs()
    layouts = {k: layout_of(p, layout) for k, p in params.items()}
    part = fs.partition(llama_loss, mesh=ONE, params=layouts, in_specs=layout)
    assert not part.trace(params, x).programs
    loss, expected = part(params, x), llama_loss(params, x)
    assert torch.equal(loss, expected)
    assert node_count(loss) <= node_count(expected) + 2
    leaves = list(params.values())
    for got, want in zip(*(torch.autograd.grad(y, leaves) for y in (loss, expected)), strict=True):
        assert torch.equal(got, want)


def test_axes_of_size_one_add_no_programs() -> None:
    params, x = llama_inputs()

    def programs(mesh: Mesh, p: fs.PartitionSpec) -> list[str]:
        part = fs.partition(llama_loss, mesh=mesh, params=P(), in_specs=p, out_specs=P())
        return [
            " ".join(step.name for step in prog.steps) for prog in part.trace(params, x).programs
        ]

    assert programs(Mesh(x=2, y=1), P(("x", "y"))) == programs(Mesh(x=2), P("x"))


class Reversed(torch.autograd.Function):
    """Identity with a negative gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -grad


def test_custom_gradients_on_one_device() -> None:
    x = torch.ones(4, requires_grad=True)
    part = fs.partition(lambda x: Reversed.apply(x).sum(), mesh=ONE, in_specs=P("x"))
    part(x).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, -torch.ones(4))


def test_mapped_functions_on_one_device() -> None:
    double = fs.shard_map(lambda x: fs.psum(2 * x, "x"), mesh=ONE, in_specs=P("x"), out_specs=P())
    assert torch.equal(
        fs.partition(double, mesh=ONE, in_specs=P("x"))(torch.ones(4)), 2 * torch.ones(4)
    )


def test_results_share_no_memory_with_arguments() -> None:
    x = torch.zeros(4)
    fs.partition(lambda x: x.view(2, 2), mesh=ONE)(x).add_(1)
    assert torch.equal(x, torch.zeros(4))


def test_written_arguments_on_one_device() -> None:
    def count(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum())
        return total * 2

    total = torch.zeros(())
    assert fs.partition(count, mesh=ONE)(total, torch.ones(4)) == 8
    assert total == 4


def test_grad_mode_is_restored_after_an_error() -> None:
    @torch.no_grad()
    def select(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, index)

    part = fs.partition(lambda x, i: x.sum() * select(x, i), mesh=ONE)
    x = torch.ones(2, requires_grad=True)
    part(x, torch.tensor([1]))
    with pytest.raises((IndexError, RuntimeError)):
        part(x, torch.tensor([5]))
    assert torch.is_grad_enabled()
