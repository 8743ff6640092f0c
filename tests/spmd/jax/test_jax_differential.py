"""Bodies run by JAX and by this library on the same inputs: results, gradients, errors.

Needs the extra `jax` (`pip install 'fshard[jax]'`); skipped without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from fshard import P, ShardingError
from tests.helpers.jax.jax_bodies import Case, expected
from tests.helpers.jax.jax_bodies import numbers as ours
from tests.helpers.jax.jax_cases import CASES
from tests.helpers.jax.jax_programs import Program, case_of, programs, run

jax = pytest.importorskip("jax", reason="the extra `jax` is not installed")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

JP = jax.sharding.PartitionSpec
F64 = torch.float64
STATES = {"invariant": "invarying"}


class Jax:
    """Operations of a body in JAX."""

    sin, tanh, where, concat = map(staticmethod, (jnp.sin, jnp.tanh, jnp.where, jnp.concatenate))
    psum, pmean, pmax, pmin, axis_index, axis_size = map(
        staticmethod, (lax.psum, lax.pmean, lax.pmax, lax.pmin, lax.axis_index, lax.axis_size)
    )
    psum_scatter, all_to_all, ppermute, pshuffle, pswapaxes = map(
        staticmethod,
        (lax.psum_scatter, lax.all_to_all, lax.ppermute, lax.pshuffle, lax.pswapaxes),
    )
    checkpoint, vmap, stop = map(staticmethod, (jax.checkpoint, jax.vmap, lax.stop_gradient))

    @staticmethod
    def nest(fn: Callable[..., Any], ins: Any, outs: Any, axes: set[str]) -> Any:
        return jax.shard_map(fn, in_specs=specs_of(ins), out_specs=specs_of(outs), axis_names=axes)

    @staticmethod
    def smap(fn: Callable[..., Any], in_axes: Any, out_axes: Any, axis: str) -> Any:
        return jax.smap(fn, in_axes=in_axes, out_axes=out_axes, axis_name=axis)

    @staticmethod
    def all_gather(x: Any, axes: Any, *, to: str = "varying", **options: Any) -> Any:
        return lax.all_gather(x, axes, to=STATES.get(to, to), **options)

    @staticmethod
    def pcast(x: Any, axes: Any, *, to: str, src: str | None = None) -> Any:
        return lax.pcast(x, axes, to=to)

    @staticmethod
    def states(x: Any) -> tuple[set[str], ...]:
        kind = jax.typeof(x).mat
        return set(kind.varying), set(kind.reduced), set(kind.unreduced)

    @staticmethod
    def grad(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *xs: jax.grad(lambda item: fn(*item))(xs)

    @staticmethod
    def custom(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
        local = jax.custom_vjp(forward)
        local.defvjp(lambda x: (local(x), x), lambda x, g: (backward(x, g),))
        return local  # type: ignore[no-any-return]


def spec_of(p: P) -> Any:
    return JP(*p.partitions, reduced=set(p.reduced), unreduced=set(p.unreduced))


def mesh_of(case: Case) -> Any:
    word = "Explicit" if case.explicit else "Auto"
    mesh = case.mesh
    return jax.make_mesh(
        tuple(mesh.shape.values()), mesh.axes, devices=jax.devices()[: mesh.size],
        axis_types=(getattr(jax.sharding.AxisType, word),) * len(mesh.axes),
    )  # fmt: skip


def specs_of(tree: Any) -> Any:
    return jax.tree.map(spec_of, tree, is_leaf=lambda item: isinstance(item, P))


def loss(leaves: list[Any]) -> Any:
    return sum(
        (leaf**2 * jnp.arange(1.0, leaf.size + 1).reshape(leaf.shape)).sum() for leaf in leaves
    )


def numbers(case: Case) -> dict[str, Any]:
    """Return JAX's results and gradients of a case."""
    mesh, in_specs = mesh_of(case), specs_of(case.in_specs)

    def mapped(*xs: Any) -> Any:
        if case.axes is None:
            return case.body(Jax, *xs)
        sharded = len(xs) - case.closed
        value, closed = xs[:sharded], xs[sharded:]
        specs = in_specs if isinstance(in_specs, tuple) else (in_specs,) * sharded
        if case.explicit:
            value = [jax.sharding.reshard(x, p) for x, p in zip(value, specs, strict=True)]
        return jax.shard_map(
            lambda *own: case.body(Jax, *own, *closed), mesh=mesh, in_specs=in_specs,
            out_specs=specs_of(case.out_specs), check_vma=case.vma, axis_names=set(case.axes),
        )(*value)  # fmt: skip

    def results(*xs: Any) -> list[Any]:
        """Return the mapped function of global values."""
        leaves = jax.tree.leaves(mapped(*xs))
        return [jax.sharding.reshard(x, JP()) for x in leaves] if case.explicit else leaves

    def weighed(*xs: Any) -> Any:
        return loss(results(*xs))

    def squares(*xs: Any) -> Any:
        return sum((g**2).sum() for g in jax.grad(weighed, tuple(range(len(xs))))(*xs))

    @jax.jit
    def everything(*xs: Any) -> dict[str, Any]:
        outputs = {"out": results(*xs)}
        if case.grad:
            places = tuple(range(len(xs)))
            outputs["grads"] = list(jax.grad(weighed, places)(*xs))
            if case.second:
                outputs["second"] = list(jax.grad(squares, places)(*xs))
        return outputs

    with jax.set_mesh(mesh):
        args = [jnp.asarray(x.numpy()) for x in case.args]
        return jax.tree.map(lambda x: jax.device_get(x).tolist(), everything(*args))  # type: ignore[no-any-return]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_recorded_values_are_jaxs(name: str) -> None:
    outputs, want = numbers(CASES[name]), expected()[name]
    assert outputs.keys() == want.keys()
    for key, value in want.items():
        for actual, item in zip(outputs[key], value, strict=True):
            torch.testing.assert_close(torch.tensor(actual), torch.tensor(item))


# -- random bodies ---------------------------------------------------------------------------


# Without shrinking, which would compile every attempt and take minutes.
SETTINGS = settings(
    max_examples=20,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


def refusal(run: Callable[[], Any]) -> tuple[dict[str, Any] | None, Exception | None]:
    """Return the result of a call, or the error that it raises."""
    try:
        return run(), None
    except Exception as error:
        return None, error


@pytest.mark.timeout(600)
@SETTINGS
@given(programs())
def test_random_bodies_equal_jax(program: Program) -> None:
    """Results, outer and inner gradients, with inserted casts and with casts written out."""
    want = numbers(case_of(program, casts=False))
    for check, casts in ((True, False), (True, True), ("strict", True), (False, True)):
        outputs = ours(case_of(program, casts), check)
        assert outputs.keys() == want.keys()
        for key, leaves in want.items():
            for actual, item in zip(outputs[key], leaves, strict=True):
                torch.testing.assert_close(
                    torch.tensor(actual, dtype=F64), torch.tensor(item, dtype=F64),
                    msg=lambda text, key=key, check=check: f"{key}, check={check}: {text}",
                )  # fmt: skip


def types_in(program: Program, of: Callable[[Case], Any]) -> list[tuple[set[str], ...]]:
    """Return the states of all values of a program in one system."""
    seen: list[list[tuple[set[str], ...]]] = []

    def body(world: Any, *xs: Any) -> tuple[Any, ...]:
        seen.append([world.states(item) for item in run(world, program, xs, casts=False)])
        return xs[: len(case.in_specs)]

    case = case_of(program, casts=False)
    of(replace(case, out_specs=case.in_specs, body=body, grad=False))
    assert all(item == seen[0] for item in seen)
    return seen[0]


@pytest.mark.timeout(600)
@SETTINGS
@given(programs())
def test_types_of_random_bodies_equal_jaxs(program: Program) -> None:
    assert types_in(program, lambda case: ours(case, True)) == types_in(program, numbers)


@pytest.mark.timeout(600)
@SETTINGS
@given(programs(legal=False))
def test_bodies_that_jax_refuses_are_refused(program: Program) -> None:
    """Replication that cannot be shown, and operands in different states."""
    _, theirs = refusal(lambda: numbers(case_of(program, casts=False)))
    assert (theirs is None) == program.legal, theirs
    _, mine = refusal(lambda: ours(case_of(program, casts=False), True))
    assert (mine is None) == program.legal, mine
    assert mine is None or isinstance(mine, ShardingError), mine
