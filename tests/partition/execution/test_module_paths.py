"""Modules of the collectives of partitioned functions: in logs, in plans and in tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from fshard.show.table import Table

MESH = fs.Mesh(dp=2, tp=2)


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x).relu())
        return y


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Net(torch.nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


LAYOUTS = {
    f"layers.{i}.mlp.{name}": p
    for i in range(2)
    for name, p in (("up.weight", P("tp")), ("up.bias", P("tp")), ("down.weight", P(None, "tp")))
}
FORWARD = {("Net.layers.0", "all_reduce", "tp"), ("Net.layers.1", "all_reduce", "tp")}
"""Sums of partial sums, where the blocks add them."""


def loss_of(net: torch.nn.Module, params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = functional_call(net, params, (x,))
    return y.square().mean()


def partitioned(fn: Callable[..., Any], **options: Any) -> fs.Partition:
    return fs.partition(fn, mesh=MESH, params=LAYOUTS, in_specs=P("dp"), hold="tp", **options)


def modules_of(log: fs.CommLog, phase: str) -> set[tuple[str, ...]]:
    """Return modules, operations and axes; without the sums of results, which are in no module."""
    rows = log.to_dict("module", "operation", "axes")[phase]
    return {(row["module"], row["op"], *row["axes"]) for row in rows if row["module"]}


@pytest.mark.parametrize("on_rank", [False, True])
def test_collectives_have_the_modules_of_their_operations(on_rank: bool) -> None:
    net = Net()
    part = partitioned(partial(loss_of, net))
    params, x = dict(net.named_parameters()), torch.ones(4, 4)

    def step() -> None:
        part(params, x).backward()

    run = partial(fs.simulate, MESH, step) if on_rank else step
    run()  # it is traced without a log
    net.layers[1].mlp.up = torch.nn.Linear(4, 8)  # it is traced anew
    with fs.comm_log() as log:
        run()
    assert modules_of(log, "forward") == FORWARD
    assert modules_of(log, "backward") == {
        ("Net.layers.1.mlp.up", "all_reduce", "tp"),  # of the cotangent
        ("Net.layers", "all_reduce", "dp"),  # a bucket of all gradients
    }


def test_recomputed_collectives_have_modules() -> None:
    bucket_of_a_block = {("Net.layers.0.mlp", "all_reduce", "dp")}
    for recomputes, remat, expected in ((False, "all", FORWARD), (True, None, bucket_of_a_block)):
        net = Net(recomputes=recomputes)
        part = partitioned(partial(loss_of, net), remat=remat)
        with fs.comm_log() as log:
            part(dict(net.named_parameters()), torch.ones(4, 4)).backward()
        assert modules_of(log, "forward") == FORWARD
        assert modules_of(log, "backward") >= expected


def gradients_by_func(net: torch.nn.Module, params: dict[str, torch.Tensor], x: Any) -> Any:
    return torch.func.grad(partial(loss_of, net))(params, x)


def gradients_by_autograd(net: torch.nn.Module, params: dict[str, torch.Tensor], x: Any) -> Any:
    grads = torch.autograd.grad(loss_of(net, params, x), [*params.values()])
    return dict(zip(params, grads, strict=True))


@pytest.mark.parametrize("gradients", [gradients_by_func, gradients_by_autograd])
def test_gradients_within_the_function_have_modules(gradients: Callable[..., Any]) -> None:
    net = Net()
    part = partitioned(partial(gradients, net), out_specs=LAYOUTS)
    with fs.comm_log() as log:
        part(dict(net.named_parameters()), torch.ones(4, 4))
    assert modules_of(log, "forward") == {
        *FORWARD,
        ("Net.layers.1.mlp.up", "all_reduce", "tp"),
        ("Net.layers", "all_reduce", "dp"),
    }


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sum(0).expand(2, -1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return (g[:1] + ctx.saved_tensors[0].sum()).expand(4, -1)


class CustomSum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Sum.apply(x)  # type: ignore[no-untyped-call]
        return y


class MappedSum(torch.nn.Module):
    @fs.shard_map(mesh=MESH, in_specs=(None, P("tp")), out_specs=P())
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fs.psum(x, "tp")


def test_mapped_functions_and_custom_gradients_have_modules() -> None:
    net = torch.nn.Sequential(CustomSum(), MappedSum())
    part = fs.partition(net, mesh=MESH, params=P(), in_specs=P("dp"))
    with fs.comm_log() as log:
        part({}, torch.ones(4, 4, requires_grad=True)).sum().backward()
    assert ("Sequential.1", "all_reduce", "tp") in modules_of(log, "forward")
    assert ("Sequential.0", "all_reduce", "dp") in modules_of(log, "backward")


def test_traces_call_no_trackers_of_modules() -> None:
    """`CommDebugMode` has a tracker that hooks modules, and gradients, which traces do not have."""
    net = Net()
    with CommDebugMode():
        partitioned(partial(loss_of, net))(dict(net.named_parameters()), torch.ones(4, 4))
    assert not any(module._forward_hooks for module in net.modules())


def test_table_of_modules_has_all_times_and_folds_equal_layers() -> None:
    net = Net()
    call = partitioned(partial(loss_of, net)).trace(dict(net.named_parameters()), torch.ones(4, 4))
    table: Table = call.explain(only="modules")
    assert table.footer == call.roofline().table().footer
    names = [row[0] for row in table.rows]
    assert names[:2] == ["each of 2 layers:", "  Net.layers.*.mlp.up"]
    assert "Net.layers communication" in names
