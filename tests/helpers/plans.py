"""Specs and checks that tests of plans share."""

from __future__ import annotations

import functools

import torch
from hypothesis import strategies as st

from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.plan.redistribute import redistribute
from fshard.program.lower_bound import lower_bound
from fshard.program.program import Program
from fshard.program.steps import CollectivePermute, Exchange
from tests.helpers import reference, spec_grid, strategies
from tests.helpers.reference import check

SMALL = Mesh(x=2, y=3)
LARGE = Mesh(x=2, y=2, z=3)
SMALL_SHAPE, LARGE_SHAPE = (6, 12), (12, 24)
Shards = tuple[torch.Tensor, ...]


@functools.lru_cache(maxsize=1024)
def locals_of(spec: Spec, seed: int) -> Shards:
    """Return random integer shards: free values on unreduced axes, equal replicas elsewhere."""
    return spec_grid.random_locals(spec, seed)


@functools.lru_cache(maxsize=1024)
def value_of(spec: Spec, seed: int) -> torch.Tensor:
    return spec_grid.global_of(spec, locals_of(spec, seed))


def assert_simulated(prog: Program, x: Shards, want: Shards) -> None:
    """Check a run on simulated ranks against the reference interpreter."""
    outputs = prog(x)
    if any(isinstance(step, CollectivePermute) for step in prog.steps):
        # Only the value is defined, not which of several copies a rank gets.
        outputs, want = ((reference.global_value(y, prog.dst),) for y in (outputs, want))
    assert all(map(torch.equal, outputs, want))


def assert_right(prog: Program, src: Spec, dst: Spec) -> None:
    """Check that the program leads to `dst`, keeps the global value, and has its adjoint."""
    assert (prog.src, prog.dst) == (src, dst)
    check(prog)
    x, want = locals_of(src, 1), value_of(src, 1)
    outputs = reference.simulate(prog, x)
    assert torch.equal(reference.global_value(outputs, dst), want)
    assert_simulated(prog, x, outputs)
    if not dst.partition.unreduced and "avg" not in dst.partition.reduced.values():
        for rank, shard in zip(dst.mesh.ranks, outputs, strict=True):
            assert torch.equal(shard, want[dst.index(rank)])
    adjoint = prog.T
    check(adjoint)
    assert (adjoint.src, adjoint.dst) == (dst.dual, src.dual)
    assert prog == adjoint.T
    y = locals_of(dst.dual, 2)
    back = reference.simulate(adjoint, y)
    assert_simulated(adjoint, y, back)
    assert spec_grid.pairing(dst, outputs, y) == spec_grid.pairing(src, x, back)


def assert_planned(src: Spec, dst: Spec) -> None:
    """Check a plan, and that it communicates exactly if the lower bound does."""
    prog = redistribute(src, dst)
    assert_right(prog, src, dst)
    bound, cost = lower_bound(src, dst), prog.cost()
    assert prog.is_local == (bound.bytes_received == 0) == (cost.launches == 0)
    assert (cost.bytes_sent == 0) == (cost.bytes_received == 0) == prog.is_local
    assert cost.bytes_received >= bound.bytes_received
    assert cost.peak_memory >= bound.peak_memory


SMALL_SPECS = spec_grid.all_specs(SMALL, SMALL_SHAPE)


LARGE_SPECS = spec_grid.all_specs(LARGE, LARGE_SHAPE)


MESHES = strategies.meshes(max_axes=2, max_devices=8, permuted=True)


@st.composite
def any_pair(draw: st.DrawFn) -> tuple[Spec, Spec]:
    """Two specs of 0 to 4 dims of any size, sharded in any way, on up to two axes."""
    shape = draw(strategies.shapes(max_dims=4, max_size=7))
    return draw(strategies.spec_pairs(draw(MESHES), shape))


# -- choices of steps ----------------------------------------------------------------------


def step_names(prog: Program) -> list[str]:
    return [step.name for step in prog.steps]


def exchange(src: Spec, dst: Spec) -> Program:
    """Return the program of one exchange."""
    mesh = None if src.mesh == dst.mesh else dst.mesh
    return Program(src, (Exchange(dst.partition, dst.sizes, mesh),), dst)
