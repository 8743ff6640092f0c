"""Classes of `torch.optim` in partitioned functions and on plain locals, against one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import optim

import fshard as fs
from fshard.partition.ir import Operation

Tensors = list[torch.Tensor]
MESH = fs.Mesh(dp=2, tp=2)
LAYOUTS = (fs.P("dp", "tp"), fs.P(("dp", "tp")), fs.P())
SHAPES = ((6, 4), (10,), ())
LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}

ELEMENTWISE: dict[str, tuple[Callable[..., optim.Optimizer], dict[str, Any], list[dict[str, Any]]]]
ELEMENTWISE = {
    "SGD": (optim.SGD, {"lr": 0.1}, [LOOP, FOREACH, FUSED]),
    "SGD with momentum": (
        optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        [LOOP, FOREACH, FUSED]),
    "Adam": (optim.Adam, {"lr": 0.1}, [LOOP, FOREACH, FUSED]),
    "Adam with amsgrad": (
        optim.Adam, {"lr": 0.1, "amsgrad": True, "maximize": True}, [LOOP, FOREACH, FUSED]),
    "AdamW": (optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}, [LOOP, FOREACH, FUSED]),
    "AdamW with a tensor as rate": (
        lambda params, lr, **kw: optim.AdamW(params, lr=torch.tensor(lr), **kw), {"lr": 0.1},
        [FUSED]),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}, [LOOP, FOREACH, FUSED]),
    "Adadelta": (optim.Adadelta, {"lr": 0.5}, [LOOP, FOREACH]),
    "Adamax": (optim.Adamax, {"lr": 0.1}, [LOOP, FOREACH]),
    "ASGD": (optim.ASGD, {"lr": 0.1, "t0": 0}, [LOOP, FOREACH]),
    "NAdam": (optim.NAdam, {"lr": 0.1}, [LOOP, FOREACH]),
    "RAdam": (optim.RAdam, {"lr": 0.1}, [LOOP, FOREACH]),
    "RMSprop": (optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}, [LOOP, FOREACH]),
    "Rprop": (optim.Rprop, {"lr": 0.1}, [LOOP, FOREACH]),
}  # fmt: skip
"""Optimizers that treat every element alone, with their forms."""
OF_MATRICES: dict[str, tuple[Callable[..., optim.Optimizer], dict[str, Any], list[dict[str, Any]]]]
OF_MATRICES = {
    "Adafactor": (optim.Adafactor, {"lr": 0.1}, [LOOP]),
    "Muon": (optim.Muon, {"lr": 0.1}, [{}]),
}
"""Optimizers whose updates depend on all elements of a matrix."""
READING = ("Adafactor",)
"""Optimizers that read values of tensors, norms of parameters, and so cannot be traced."""


def cases(*tables: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(name, form, id=f"{name} {next(iter(form), 'loop')} {[*form.values()]}")
        for table in tables for name, (_, _, forms) in table.items() for form in forms
    ]  # fmt: skip


def values(seed: int, shapes: Sequence[tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def steps(name: str, form: dict[str, Any]) -> Callable[[Tensors, Tensors], Tensors]:
    create, options, _ = {**ELEMENTWISE, **OF_MATRICES}[name]

    def run(params: Tensors, grads: Tensors) -> Tensors:
        params = [x.clone() for x in params]
        optimizer = create(params, **options, **form)
        for scale in (1.0, -0.5):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad * scale
            optimizer.step()
        return params

    return run


def cases_of_partitions() -> list[Any]:
    """Every optimizer in its last form, the fastest one; loops over parameters are slow tests."""
    table = {**ELEMENTWISE, **OF_MATRICES}
    rows = {name: row for name, row in table.items() if name not in READING}
    last = {name: (*row[:2], row[2][-1:]) for name, row in rows.items()}
    others = {name: (*row[:2], row[2][:-1]) for name, row in rows.items()}
    slow = [
        pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) for case in cases(others)
    ]
    return cases(last) + slow


@pytest.mark.parametrize(("name", "form"), cases_of_partitions())
def test_steps_in_a_partitioned_function(name: str, form: dict[str, Any]) -> None:
    # Muon takes matrices alone; Rprop indexes a tensor without dims by its value.
    count = {"Muon": 1, "Rprop": 2}.get(name, 3)
    shapes, layouts = SHAPES[:count], LAYOUTS[:count]
    params, grads = values(0, shapes), values(1, shapes)
    run = steps(name, form)
    expected = run(params, grads)
    pairs = fs.state.tree_shard(params, list(layouts), mesh=MESH)
    unreduced = fs.state.tree_shard(grads, fs.P(unreduced={"dp"}), mesh=MESH)
    part = fs.partition(run, mesh=MESH, out_specs=list(layouts))
    with torch.no_grad():
        results = part(pairs, unreduced)
    # Muon iterates in bfloat16, where products of shards are rounded otherwise.
    close = {"rtol": 1e-2, "atol": 1e-2} if name == "Muon" else {"rtol": 1e-12, "atol": 1e-12}
    for pair, value, layout in zip(results, expected, layouts, strict=True):
        torch.testing.assert_close(fs.unshard(pair), value, **close)
        fs.testing.assert_layout(pair, layout)


@pytest.mark.parametrize(("name", "form"), cases(ELEMENTWISE))
def test_steps_on_plain_locals(name: str, form: dict[str, Any]) -> None:
    params, grads = values(0, SHAPES), values(1, SHAPES)
    run = steps(name, form)
    layouts = list(LAYOUTS)
    pairs = fs.state.tree_shard(params, layouts, mesh=MESH)
    gradients = fs.state.tree_shard(grads, layouts, mesh=MESH)
    locals_ = [
        run([pair.local[rank] for pair in pairs], [pair.local[rank] for pair in gradients])
        for rank in range(MESH.size)
    ]
    expected = run(params, grads)
    for pair, value, shards in zip(pairs, expected, zip(*locals_, strict=True), strict=True):
        updated = fs.unshard(fs.Sharded(shards, pair.spec))
        torch.testing.assert_close(updated, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("create", [optim.AdamW, optim.SGD, optim.Adagrad])
def test_fused_steps_scale_gradients_and_skip_overflows(create: Any) -> None:
    def run(params: Tensors, grads: Tensors, scale: torch.Tensor, inf: torch.Tensor) -> Any:
        params = [x.clone() for x in params]
        optimizer = create(params, lr=0.1, fused=True)
        optimizer.grad_scale, optimizer.found_inf = scale, inf
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        return params, [param.grad for param in params]

    shapes = [(6, 4), (4,)]
    params, grads = ([x.float() for x in values(seed, shapes)] for seed in (0, 1))
    part = fs.partition(run, mesh=MESH, in_specs=(fs.P("dp"), fs.P(), fs.P(), fs.P()))
    for inf in (0.0, 1.0):
        arguments = params, grads, torch.tensor(8.0), torch.tensor(inf)
        with torch.no_grad():
            updated, unscaled = part(*arguments)
        expected, _ = run(*arguments)
        for x, y, grad, scaled in zip(updated, expected, unscaled, grads, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(grad, scaled / 8, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("overflow", [1.0, torch.inf, torch.nan])
@pytest.mark.parametrize("interval", [1, 3])
def test_gradient_scalers(overflow: float, interval: int) -> None:
    """Unscaling, and the next scale."""

    def run(grads: Tensors, scale: torch.Tensor, steps: torch.Tensor) -> Any:
        found, grads = torch.zeros(1), [x.clone() for x in grads]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, 1 / scale)
        torch._amp_update_scale_(scale, steps, found, 2.0, 0.5, interval)
        return grads, found

    part = fs.partition(run, mesh=MESH, in_specs=(fs.P("dp"), fs.P(), fs.P()))
    grads = [x.float() for x in values(0, [(6, 4), (4,), (0, 4), (2, 2)])]
    grads[1][3] *= overflow
    results = []
    for fn in (part, run):
        states = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
        results.append((fn(grads, *states), states))
    torch.testing.assert_close(*results, equal_nan=True)


def test_a_fused_step_is_one_local_operation_for_each_parameter() -> None:
    params, grads = values(0, SHAPES), values(1, SHAPES)
    part = fs.partition(steps("AdamW", FUSED), mesh=MESH)
    specs = [
        [fs.Spec(MESH, p, shape=x.shape, dtype=x.dtype, uneven="chunk")
         for p, x in zip(LAYOUTS, tensors, strict=True)] for tensors in (params, grads)
    ]  # fmt: skip
    with torch.no_grad():
        call = part.trace(*specs)
    assert all(program.is_local for program in call.programs)
    names = [line.name for line in call.lines if isinstance(line, Operation)]
    assert sum("fused_update" in name for name in names) == 2 * len(SHAPES)


@pytest.mark.parametrize("name", READING)
def test_optimizers_that_read_values_are_refused(name: str) -> None:
    part = fs.partition(steps(name, LOOP), mesh=MESH)
    with pytest.raises(fs.ShardingError, match="reads a tensor's values"), torch.no_grad():
        part(values(0, SHAPES), values(1, SHAPES))


@pytest.mark.parametrize("create", [optim.Adam, optim.RMSprop, optim.NAdam])
def test_capturable_requires_an_accelerator_as_on_one_device(create: Any) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        optimizer = create([x], lr=0.1, capturable=True)
        x.grad = x.clone()
        optimizer.step()
        return x

    with pytest.raises(AssertionError, match="capturable=True"):
        run(torch.ones(4))
    with pytest.raises(fs.ShardingError, match="capturable=True"), torch.no_grad():
        fs.partition(run, mesh=MESH)(torch.ones(4))


def test_schedulers_and_averages_of_plain_locals() -> None:
    """A learning rate schedule and an exponential average of weights, on every rank."""
    params, grads = values(0, SHAPES), values(1, SHAPES)

    def train(params: Tensors, grads: Tensors) -> Tensors:
        params = [x.clone() for x in params]
        averages = [x.clone() for x in params]
        optimizer = optim.AdamW(params, lr=0.1)
        schedule = optim.lr_scheduler.SequentialLR(optimizer, [
            optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)], [2])  # fmt: skip
        average = optim.swa_utils.get_ema_multi_avg_fn(0.9)
        for number in range(4):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad * (number - 1)
            optimizer.step()
            schedule.step()
            average(averages, params, number)
        return averages

    pairs, gradients = (
        fs.state.tree_shard(tree, [*LAYOUTS], mesh=MESH) for tree in (params, grads)
    )
    ranks = [
        train([pair.local[rank] for pair in pairs], [pair.local[rank] for pair in gradients])
        for rank in range(MESH.size)
    ]
    for i, expected in enumerate(train(params, grads)):
        averaged = fs.Sharded(tuple(tensors[i] for tensors in ranks), pairs[i].spec)
        torch.testing.assert_close(fs.unshard(averaged), expected, rtol=1e-12, atol=1e-12)
