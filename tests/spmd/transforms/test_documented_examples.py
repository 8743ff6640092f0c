"""Examples of PyTorch's documentation: the compiler, checkpoints, custom operations, saved tensors.

Each runs in mapped and partitioned functions, and is right there or refused by name.
"""

from __future__ import annotations

import functools
import os
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fshard as fs
from fshard import Mesh, P
from tests.helpers.spmd.transform_cases import W, X, close

MESH = Mesh(x=2)
aten = torch.ops.aten
Fn = Callable[[Tensor, Tensor], Any]


class MyModule(nn.Module):
    """Module of the tutorial of `torch.compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.lin(x))


def foo(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x) @ torch.cos(y)


torch.manual_seed(0)
MODULE, WRAPPED = MyModule().double(), MyModule().double()
COMPILED_MODULE = torch.compile(MODULE, backend="eager")
COMPILED = torch.compile(foo, backend="eager")
CHECKPOINTED = wrappers.checkpoint_wrapper(WRAPPED)
OFFLOADED = wrappers.offload_wrapper(WRAPPED)


def block(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).sin() @ w


def policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def every_other(calls: list[bool], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Policy with a count of calls, of the first run and of the second one."""
    calls.append(ctx.is_recompute)
    return calls.count(ctx.is_recompute) % 2 == 1


def checkpointed(x: Tensor, w: Tensor, policy: Any = None, fn: Fn = block) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    options: dict[str, Any] = {} if policy is None else {"context_fn": contexts}
    return checkpoint(fn, x, w, use_reentrant=False, **options)


class SelfDeletingTempFile:
    """File of the tutorial of hooks for saved tensors."""

    def __init__(self) -> None:
        self.name = os.path.join(tempfile.gettempdir(), str(uuid.uuid4()))

    def __del__(self) -> None:
        os.remove(self.name)


def save_to_disk(x: Tensor) -> Any:
    if x.numel() <= 2:
        return x
    file = SelfDeletingTempFile()
    torch.save(x, file.name)
    return file


def load_from_disk(x: Any) -> Tensor:
    loaded: Tensor = x if isinstance(x, Tensor) else torch.load(x.name)
    return loaded


def on_disk(x: Tensor, w: Tensor) -> Tensor:
    with graph.saved_tensors_hooks(save_to_disk, load_from_disk):
        return block(x, w)


def without_hooks(x: Tensor, w: Tensor) -> Tensor:
    with graph.disable_saved_tensors_hooks("not here"):
        return block(x, w)


@torch.library.custom_op("fshard_docs::numpy_sin", mutates_args={"output"})
def numpy_sin(x: Tensor, output: Tensor) -> None:
    output.copy_(torch.from_numpy(x.numpy()).sin())


@torch.library.custom_op("fshard_docs::numpy_mul", mutates_args=())
def numpy_mul(x: Tensor, y: Tensor) -> Tensor:
    return torch.tensor(x.numpy() * y.numpy())


@torch.library.custom_op("fshard_docs::numpy_cube", mutates_args=())
def numpy_cube(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tensor(x.numpy() ** 3), torch.tensor(3 * x.numpy() ** 2)


def keep_factors(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.x, ctx.y = inputs


def keep_derivative(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.x, ctx.dx = inputs[0], output[1]


numpy_mul.register_fake(lambda x, y: torch.empty_like(x))
numpy_mul.register_autograd(
    lambda ctx, g: (numpy_mul(g, ctx.y), numpy_mul(g, ctx.x)), setup_context=keep_factors
)
numpy_cube.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
numpy_cube.register_autograd(
    lambda ctx, g, h: numpy_mul(g, ctx.dx) + numpy_mul(h, 6 * ctx.x), setup_context=keep_derivative
)
fs.register_rule(torch.ops.fshard_docs.numpy_mul.default)("ij,ij->ij")
fs.register_rule(torch.ops.fshard_docs.numpy_cube.default)("ij->ij,ij")


def written_by_numpy(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    out = torch.empty_like(y)
    numpy_sin(y.detach(), out)
    return out + y


class Sinh(torch.autograd.Function):
    """Function of the tutorial of double backward, which returns what its backward needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        up, down = torch.exp(x), torch.exp(-x)
        ctx.save_for_backward(up, down)
        return (up - down) / 2, up, down

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        g, g_up, g_down = grads
        up, down = ctx.saved_tensors
        return g * (up + down) / 2 + g_up * up - g_down * down


def cond(x: Tensor, w: Tensor) -> Any:
    return torch.cond(w.sum() > 0, lambda x, w: (x @ w).sin(), lambda x, w: x @ w, (x, w))


FUNCTIONS: dict[str, Fn] = {
    "compiled": lambda x, w: COMPILED(COMPILED(x, w), w),
    "compiled module": lambda x, w: COMPILED_MODULE(x) @ w,
    "compiled and checkpointed": lambda x, w: checkpointed(x, w, fn=COMPILED),
    "disabled": torch.compiler.disable(foo),
    "region": torch.compiler.nested_compile_region(foo),
    "policy": lambda x, w: checkpointed(x, w, policy_fn),
    "kept operations": lambda x, w: checkpointed(x, w, [aten.mm.default]),
    "policy with a state": lambda x, w: checkpointed(x, w, functools.partial(every_other, [])),
    "sequence": lambda x, w: checkpoint_sequential(
        [lambda x: block(x, w), torch.tanh, torch.sin], 2, x, use_reentrant=False
    ),
    "wrapper": lambda x, w: CHECKPOINTED(x @ w),
    "offloaded": lambda x, w: OFFLOADED(x @ w),
    "disk": on_disk,
    "without hooks": without_hooks,
    "numpy_mul": lambda x, w: numpy_mul(x @ w, x.sin()),
    "numpy_cube": lambda x, w: numpy_cube(x @ w)[0],
    "numpy_sin": written_by_numpy,
    "sinh": lambda x, w: Sinh.apply(x @ w)[0],
    "cond": cond,
}
ONCE = {"policy", "kept operations", "policy with a state"}
"""Functions that PyTorch differentiates once."""
REFUSED = {
    "offloaded": "save_on_cpu, with gradients",
    "disk": "saved_tensors_hooks, with gradients",
    "numpy_sin": "fshard_docs.numpy_sin.default, an operation of torch.library that writes its",
    "cond": "reads a tensor's values",
}
"""Functions that are not partitioned, and the reason."""


def derivatives(f: Fn, name: str) -> list[Tensor]:
    """Return the value, the gradients, and those of the gradients."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y, twice = f(x, w), name not in ONCE
    first = torch.autograd.grad(y.square().sum(), (x, w), create_graph=twice)
    total = first[0].sin().sum() + first[1].square().sum()
    return [y, *first, *(torch.autograd.grad(total, (x, w)) if twice else ())]


def dense(name: str) -> list[Tensor]:
    if name == "cond":  # PyTorch differentiates it once
        return derivatives(lambda x, w: (x @ w).sin() if w.sum() > 0 else x @ w, name)
    return derivatives(FUNCTIONS[name], name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples_in_mapped_functions(name: str) -> None:
    expected = dense(name)
    f = fs.shard_map(FUNCTIONS[name], mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x"))
    close(derivatives(f, name), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples_in_partitioned_functions(name: str) -> None:
    expected = dense(name)
    part = fs.partition(FUNCTIONS[name], mesh=MESH, in_specs=(P("x"), P()))
    if name in REFUSED:
        with pytest.raises(fs.ShardingError, match=REFUSED[name]):
            derivatives(part, name)
    else:
        close(derivatives(part, name), expected)


def test_a_mapped_function_in_a_partition_may_write_by_custom_operations() -> None:
    specs: dict[str, Any] = {"mesh": MESH, "in_specs": (P("x"), P())}
    f = fs.shard_map(written_by_numpy, out_specs=P("x"), **specs)
    close(fs.partition(lambda x, w: f(x, w).sin(), **specs)(X, W), written_by_numpy(X, W).sin())
