"""`AllToAll` of several pairs of dims in one launch."""

from __future__ import annotations

import pickle
from dataclasses import replace

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fshard.layout.spec import Spec
from fshard.program.program import Program
from fshard.program.steps import (
    AllToAll,
    Exchange,
)
from tests.helpers import spec_grid, strategies
from tests.helpers.reference import simulate


@st.composite
def all_to_alls(draw: st.DrawFn) -> tuple[AllToAll, Spec]:
    """Draw an all-to-all of several pairs of dims, of any sizes, and its source."""
    mesh = draw(strategies.meshes(min_axes=1, permuted=True))
    shape = draw(strategies.shapes(min_dims=2))
    states = ("sharded", "sharded", "invariant")
    spec = draw(strategies.specs(mesh, shape, dtype=torch.int64, states=states))
    moves: list[tuple[str, int]] = []
    now: dict[int, list[int]] = {}
    for dim in draw(st.permutations(range(len(shape)))):
        axes, sizes = spec.partition.dims[dim], spec.shard_sizes(dim)
        moving = axes[draw(st.integers(0, len(axes))) :]
        n = mesh.axis_size(moving)
        now[dim] = [sum(sizes[index : index + n]) for index in range(0, len(sizes), n)]
        moves += [(axis, dim) for axis in moving]
    pairs = []
    for axis, dim in moves:
        to = draw(st.sampled_from([other for other in range(len(shape)) if other != dim]))
        cuts = [draw(strategies.shard_sizes(size, mesh.shape[axis])) for size in now[to]]
        now[to] = [part for sharded in cuts for part in sharded]
        pairs.append(AllToAll((axis,), dim, to, tuple(now[to])))
    assume(pairs)
    return replace(pairs[0], also=tuple(pairs[1:])), spec


@given(all_to_alls())
def test_all_to_all_of_several_pairs(drawn: tuple[AllToAll, Spec]) -> None:
    step, src = drawn
    prog = Program(src, (step,))
    x = spec_grid.random_locals(src)
    outputs = simulate(prog, x)
    assert torch.equal(spec_grid.global_of(prog.dst, outputs), spec_grid.global_of(src, x))
    y = spec_grid.random_locals(prog.dst, seed=1)
    gradients = simulate(prog.T, y)
    assert spec_grid.pairing(prog.dst, outputs, y) == spec_grid.pairing(src, x, gradients)
    assert prog == prog.T.T
    assert prog.T.dst == src
    assert pickle.loads(pickle.dumps(prog)) == prog
    (gradients,) = prog.T.steps
    assert isinstance(gradients, AllToAll)
    assert [pair.axes for pair in gradients.pairs] == [pair.axes for pair in step.pairs]
    # An exchange to the same layout moves the same elements.
    same = Program(src, (Exchange(prog.dst.partition, prog.dst.sizes),))
    assert all(map(torch.equal, simulate(same, x), outputs))


def test_pairs_of_an_all_to_all() -> None:
    one, other = AllToAll("x", 0, 1, (1, 2)), AllToAll("y", 1, 0)
    both = replace(one, also=(other,))
    assert both.pairs == (one, other)
    assert one.pairs == (one,)
    assert AllToAll("x", 0, 1, also=[other]) == AllToAll("x", 0, 1, also=(other,))  # type: ignore[arg-type]
