"""Check of one model in one layout: values, gradients and buffers of one device, and its traffic.

Models run in float64, in training mode, with their dropout drawn from a key. Functions that name
float32 (norms that compute in it, say) compute in float64, on one device too, so that both must
agree to rounding.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fshard as fs
from fshard import P
from fshard.layout.tree import is_pair

TOLERANCE = 1e-10
NARROW = {torch.float32: torch.float64, torch.complex64: torch.complex128}
LAYOUTS = ("data", "fsdp", "tensor", "hybrid")


class Model(NamedTuple):
    """Module, its arguments by name, and the layouts of arguments whose dim 0 is not the batch.

    `columns` and `rows` are patterns of parameters that tensor parallelism shards by outputs and
    by inputs; without them the layouts `tensor` and `hybrid` have no meaning.
    """

    module: nn.Module
    inputs: Mapping[str, Any]
    columns: str = ""
    rows: str = ""
    specs: Mapping[str, fs.PartitionSpec] = {}


@dataclass(frozen=True)
class Traffic:
    """Launches and bytes sent by the busiest rank, forward and backward."""

    forward: int
    backward: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward} {self.nbytes:,} B"


@dataclass(frozen=True)
class Outcome:
    """Result of one check: `works`, `wrong`, `refused` by fshard, or `raises` another error."""

    status: str
    reason: str = ""
    error: float = 0.0
    traffic: Traffic = field(default_factory=lambda: Traffic(0, 0, 0))
    peer: Traffic = field(default_factory=lambda: Traffic(0, 0, 0))
    seconds: float = 0.0


class InFloat64(TorchFunctionMode):
    """Function mode in which functions that name float32 compute in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args = tuple(_widened(arg) for arg in args)
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs) if func is not Tensor.float else args[0].double()


def _widened(value: Any) -> Any:
    return NARROW.get(value, value) if isinstance(value, torch.dtype) else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a model's output, whatever its class."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        yield from tensors_in(vars(value))


def objective(module: nn.Module, inputs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function `(params, key, *tensors) -> (loss, outputs)` of a model."""
    names = [name for name, value in inputs.items() if isinstance(value, Tensor)]

    def run(params: dict[str, Tensor], key: Tensor, *tensors: Tensor) -> Any:
        arguments = {**inputs, **dict(zip(names, tensors, strict=True))}
        with fs.random.keyed(key), InFloat64():
            result = torch.func.functional_call(module, params, (), arguments)
        outputs = [
            t if t.is_floating_point() else torch.view_as_real(t) for t in tensors_in(result)
        ]
        waves = [(0.7 * t + 0.3 * t.square()).sin().mean() for t in outputs]
        return torch.stack(waves).sum(), outputs

    return run


def layout_of(model: Model, name: str, param: Tensor, layout: str) -> fs.PartitionSpec:
    """Return the layout of a parameter; a dim that does not divide stays unsharded."""
    if not isinstance(param, nn.Parameter):
        return P()
    axes: dict[int, str] = {}
    if layout in ("tensor", "hybrid"):
        if model.columns and re.search(model.columns, name):
            axes[0] = "tp"
        elif model.rows and re.search(model.rows, name) and param.dim() > 1:
            axes[1] = "tp"
    axes = {dim: axis for dim, axis in axes.items() if param.shape[dim] % 2 == 0}
    if layout in ("fsdp", "hybrid"):
        free = [d for d, size in enumerate(param.shape) if d not in axes and size % 2 == 0]
        if free:
            axes[free[0]] = "dp"
    return P(*(axes.get(dim) for dim in range(param.dim())))


def mesh_of(layout: str) -> fs.Mesh:
    """Return the mesh of two devices of a layout, or of four for `hybrid`."""
    axes = {"tensor": {"tp": 2}, "hybrid": {"dp": 2, "tp": 2}}
    return fs.Mesh(axes.get(layout, {"dp": 2}))


def check(model: Model, layout: str) -> Outcome:
    """Compare a model in a layout with one device."""
    start = time.perf_counter()
    torch.manual_seed(0)
    module = model.module.double().train()
    tensors = [_in_double(t) for t in model.inputs.values() if isinstance(t, Tensor)]
    run, key = objective(module, model.inputs), fs.random.key(0)
    params = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    expected = _one_device(run, params, key, tensors)
    peer = _peer(model, layout, params, expected.grads, tensors)

    mesh = mesh_of(layout)
    names = [name for name, value in model.inputs.items() if isinstance(value, Tensor)]
    specs = {n: layout_of(model, n, p, layout) for n, p in params.items()}
    in_specs = [
        model.specs.get(n, P("dp") if t.dim() and t.shape[0] % 2 == 0 else P())
        if layout != "tensor"
        else P()
        for n, t in zip(names, tensors, strict=True)
    ]
    try:
        actual, log = _partitioned(run, mesh, params, key, tensors, specs, in_specs)
    except fs.ShardingError as error:
        return Outcome("refused", _reason(error), peer=peer, seconds=time.perf_counter() - start)
    except Exception as error:
        return Outcome("raises", _reason(error), peer=peer, seconds=time.perf_counter() - start)
    error, where = _difference(actual, expected)
    traffic = Traffic(log.forward.counts.total(), log.backward.counts.total(), log.total_bytes)
    is_right = error <= TOLERANCE or error <= 10 * _rounding(run, params, key, tensors, expected)
    status = "works" if is_right else "wrong"
    return Outcome(
        status,
        where if status == "wrong" else "",
        error,
        traffic,
        peer,
        time.perf_counter() - start,
    )


class Results(NamedTuple):
    """Loss and outputs, gradients by name (of inputs too), and buffers afterwards."""

    values: list[Tensor]
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def _in_double(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128).detach().requires_grad_()
    return tensor.detach().double().requires_grad_() if tensor.is_floating_point() else tensor


def _one_device(
    run: Callable[..., Any], params: Mapping[str, Tensor], key: Tensor, tensors: Sequence[Tensor]
) -> Results:
    leaves = {
        name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in params.items()
    }
    inputs = {f"input {i}": t for i, t in enumerate(tensors) if t.requires_grad}
    loss, outputs = run(leaves, key, *tensors)
    wanted = {**{n: p for n, p in leaves.items() if p.requires_grad}, **inputs}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return Results(
        [loss.detach(), *(t.detach() for t in outputs)],
        {name: g for name, g in zip(wanted, grads, strict=True) if g is not None},
        {name: b for name, b in leaves.items() if not b.requires_grad},
    )


def _partitioned(
    run: Callable[..., Any],
    mesh: fs.Mesh,
    params: Mapping[str, Tensor],
    key: Tensor,
    tensors: Sequence[Tensor],
    specs: Mapping[str, fs.PartitionSpec],
    in_specs: Sequence[fs.PartitionSpec],
) -> tuple[Results, fs.CommLog]:
    """Run a model on pairs, forward and backward; only these passes are logged."""
    pairs = {name: _trainable(p, mesh, specs[name]) for name, p in params.items()}
    inputs = [_trainable(t, mesh, s) for t, s in zip(tensors, in_specs, strict=True)]
    part = fs.partition(run, mesh=mesh, out_specs=(P(), None))
    with fs.comm_log() as log:
        loss, outputs = part(pairs, key, *inputs)
        loss = fs.unshard(loss)  # invariant: sends nothing
        loss.backward()
    grads = {name: _grad(pair) for name, pair in pairs.items()}
    grads |= {f"input {i}": _grad(pair) for i, pair in enumerate(inputs)}
    values = [loss.detach(), *(fs.unshard(y).detach() if is_pair(y) else y for y in outputs)]
    buffers = {n: fs.unshard(pairs[n]) for n, p in params.items() if not p.requires_grad}
    return Results(values, {n: g for n, g in grads.items() if g is not None}, buffers), log


def _trainable(tensor: Tensor, mesh: fs.Mesh, spec: fs.PartitionSpec) -> fs.Sharded:
    pair = fs.shard(tensor.detach(), fs.Spec(mesh, spec, shape=tensor.shape, dtype=tensor.dtype))
    shards = tuple(shard.clone().requires_grad_(tensor.requires_grad) for shard in pair.local)
    return fs.Sharded(shards, pair.spec)


def _grad(pair: fs.Sharded) -> Tensor | None:
    if any(shard.grad is None for shard in pair.local):
        return None
    return fs.unshard((tuple(shard.grad for shard in pair.local), pair.spec.dual))


def _rounding(
    run: Callable[..., Any],
    params: Mapping[str, Tensor],
    key: Tensor,
    tensors: Sequence[Tensor],
    expected: Results,
) -> float:
    """Return the difference that parameters make on one device if their last bits change.

    Norms of few values amplify rounding.
    """
    noise = torch.Generator().manual_seed(0)
    eps = torch.finfo(torch.float64).eps

    def moved(p: Tensor) -> Tensor:
        if not p.is_floating_point():
            return p
        factor = 1 + eps * torch.randn(p.shape, generator=noise, dtype=p.dtype)
        return (p.detach() * factor).requires_grad_(p.requires_grad)

    other = _one_device(run, {name: moved(p) for name, p in params.items()}, key, tensors)
    return _difference(other, expected)[0]


def _difference(actual: Results, expected: Results) -> tuple[float, str]:
    """Return the largest relative difference and where it is.

    A difference is relative to the tensor's largest element, but for values that are rounding
    errors (the gradient of a bias before a norm, the mean of normalized values): to 1e-4, or to
    1e-4 of the largest gradient.
    """
    largest = max((float(g.abs().max()) for g in expected.grads.values() if g.numel()), default=0)
    differences = [(abs(len(actual.values) - len(expected.values)), "number of outputs")]
    for i, (a, b) in enumerate(zip(actual.values, expected.values, strict=False)):
        differences.append((_relative(a, b, 1e-4), f"output {i}"))
    for name in {**expected.grads, **actual.grads}:
        one, other = (grads.get(name) for grads in (actual.grads, expected.grads))
        one = torch.zeros_like(other) if one is None else one
        other = torch.zeros_like(one) if other is None else other
        differences.append((_relative(one, other, 1e-4 * largest), f"gradient of {name}"))
    for name, buffer in expected.buffers.items():
        differences.append((_relative(actual.buffers[name], buffer, 1e-4), f"buffer {name}"))
    return max(differences)


def _relative(actual: Tensor, expected: Tensor, least: float) -> float:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if not actual.numel():
        return 0.0
    if not actual.is_floating_point() and not actual.is_complex():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    finite = torch.isfinite(expected)
    if not torch.equal(actual[~finite].nan_to_num(0.5), expected[~finite].nan_to_num(0.5)):
        return float("inf")
    if not finite.any():
        return 0.0
    a, b = actual[finite], expected[finite]
    return float((a - b).abs().max() / max(float(b.abs().max()), least, 1e-300))


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, fs.ShardingError) else f"{type(error).__name__}: {text}"


# -- what others need -------------------------------------------------------------------------


def _peer(
    model: Model,
    layout: str,
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
) -> Traffic:
    """Return the collectives of DDP, FSDP (gathered once) or Megatron-LM on two devices.

    One launch per parameter, as none of them is in a bucket; and one for the loss.
    """
    used = {n: p for n, p in params.items() if isinstance(p, nn.Parameter) and n in grads}
    sizes = {n: p.numel() * p.element_size() for n, p in used.items()}
    if layout == "data":
        return Traffic(1, len(used), 8 + sum(sizes.values()))
    sharded = [n for n, p in used.items() if any(layout_of(model, n, p, "fsdp").dims)]
    if layout == "fsdp":
        return Traffic(1 + len(sharded), len(used), 8 + sum(sizes.values()))
    if layout == "tensor":
        return _megatron(model, tensors)
    return Traffic(0, 0, 0)


def _megatron(model: Model, tensors: Sequence[Tensor]) -> Traffic:
    """Count an all-reduce per output of row-sharded layers, per input of column-sharded ones."""
    if not (model.columns and model.rows):
        return Traffic(0, 0, 0)
    outputs: list[int] = []
    inputs: dict[int, tuple[Tensor, int]] = {}

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs.append(output.numel() * output.element_size())

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        x = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        inputs[id(x)] = (x, x.numel() * x.element_size())

    twin = copy.deepcopy(model.module)
    for name, layer in twin.named_modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() < 2 or isinstance(layer, nn.Embedding):
            continue
        if re.search(model.columns, f"{name}.weight"):
            layer.register_forward_pre_hook(before, with_kwargs=True)
        elif re.search(model.rows, f"{name}.weight"):
            layer.register_forward_hook(after)
    names = [name for name, value in model.inputs.items() if isinstance(value, Tensor)]
    with InFloat64(), torch.random.fork_rng():
        twin(**{**model.inputs, **dict(zip(names, tensors, strict=True))})
    nbytes = sum(outputs) + sum(size for _, size in inputs.values())
    return Traffic(len(outputs), len(inputs), nbytes)
