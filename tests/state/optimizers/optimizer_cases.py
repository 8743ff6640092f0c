"""Optimizers of fshard beside those of `torch.optim`, on the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P

SHAPES = {"w": (6, 5), "wide": (4, 12), "embed": (7, 3), "bias": (5,), "heads": (2, 6, 4)}
MATRICES = {name: shape for name, shape in SHAPES.items() if len(shape) == 2}
OPTIMIZERS: dict[str, tuple[Callable[..., fs.state.Optimizer], Callable[..., Any], dict[str, Any]]]
OPTIMIZERS = {
    "sgd": (fs.state.sgd, torch.optim.SGD, {"lr": 0.1}),
    "momentum": (
        fs.state.sgd,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    ),
    "nesterov": (fs.state.sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (fs.state.adamw, torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.95)}),
    "adamw_fused": (fs.state.adamw, torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "adafactor": (
        fs.state.adafactor,
        torch.optim.Adafactor,
        {"lr": 0.3, "weight_decay": 0.1},
    ),
    "muon": (fs.state.muon, torch.optim.Muon, {"lr": 0.1, "weight_decay": 0.2}),
}
STEPS = 3


def values(name: str, seed: int) -> dict[str, Tensor]:
    """Return random float64 tensors of the shapes that an optimizer accepts."""
    generator = torch.Generator().manual_seed(seed)
    shapes: Mapping[str, tuple[int, ...]] = MATRICES if name.startswith("muon") else SHAPES
    return {
        key: torch.randn(shape, generator=generator, dtype=torch.float64)
        for key, shape in shapes.items()
    }


def expected(name: str) -> dict[str, Tensor]:
    """Return the parameters after `STEPS` steps of `torch.optim` on one device."""
    _, kind, options = OPTIMIZERS[name]
    params = {key: torch.nn.Parameter(x) for key, x in values(name, 0).items()}
    optimizer = kind(params.values(), **options)
    for step in range(STEPS):
        for key, grad in values(name, step + 1).items():
            params[key].grad = grad
        optimizer.step()
    return {key: x.detach() for key, x in params.items()}


def trained(
    name: str, mesh: fs.Mesh, layout: fs.PartitionSpec | str, specs: Any = None, **options: Any
) -> tuple[dict[str, Any], Any]:
    """Return the state and the parameters after `STEPS` steps on a mesh."""
    make, _, settings = OPTIMIZERS[name]
    params = sharded(values(name, 0), mesh, layout)
    specs = fs.state.zero_specs(params, mesh.axes) if specs == "zero" else specs
    optimizer = make(**settings, specs=specs)
    state = optimizer.init(params)
    for step in range(STEPS):
        grads = fs.state.tree_shard(
            values(name, step + 1), {key: pair.spec.dual for key, pair in params.items()}
        )
        state, params = optimizer.update(grads, state, params, **options)
    return state, params


def sharded(tree: dict[str, Tensor], mesh: fs.Mesh, layout: Any) -> dict[str, fs.Sharded]:
    """Return pairs in a layout; `zero` is that of `zero_specs`."""
    specs = layout
    if layout == "zero":
        replicated = {key: fs.Spec(mesh, P(), shape=x.shape, dtype=x.dtype)
                      for key, x in tree.items()}  # fmt: skip
        specs = fs.state.zero_specs(replicated, mesh.axes)
    return fs.state.tree_shard(tree, specs, mesh=mesh)  # type: ignore[no-any-return]


def difference(actual: Mapping[str, Any], reference: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference of parameters."""
    full = fs.state.tree_unshard(actual)
    return max(float((full[key] - x).abs().max()) for key, x in reference.items())


def difference_on_ranks(
    name: str, axes: dict[str, int], layout: Any, specs: Any, donate: bool
) -> float:
    """Return the difference from one device, as one rank of a process group."""
    mesh = fs.Mesh(axes)
    fs.init(mesh)
    _, params = trained(name, mesh, layout, specs, donate=donate)
    return difference(params, expected(name))


def published_muon(steps: int = STEPS) -> dict[str, Tensor]:
    """Return the parameters after steps of Muon as published, in float64 on one device."""
    params, buffers = values("muon", 0), {key: 0 * x for key, x in values("muon", 0).items()}
    for step in range(steps):
        for key, g in values("muon", step + 1).items():
            buffers[key] = 0.95 * buffers[key] + 0.05 * g
            update = 0.05 * g + 0.95 * buffers[key]
            y = update.T if update.shape[0] > update.shape[1] else update
            y = y / y.norm()
            for _ in range(5):
                gram = y @ y.T
                y = 3.4445 * y + (-4.775 * gram + 2.0315 * gram @ gram) @ y
            y = y.T if update.shape[0] > update.shape[1] else y
            rows, columns = update.shape
            params[key] = (1 - 0.1 * 0.2) * params[key] - 0.1 * max(1, rows / columns) ** 0.5 * y
    return params
