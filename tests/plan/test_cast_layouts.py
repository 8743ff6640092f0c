"""Order of a cast and the other steps of a redistribution: the cheapest one of all layouts."""

from __future__ import annotations

import itertools

import pytest
import torch

from fshard import Mesh, Program, ShardingError, Spec, redistribute
from fshard.layout.parsing import parse
from fshard.program.steps import Cast, Step
from tests.helpers import reference, spec_grid

F32, BF16 = torch.float32, torch.bfloat16
LINE, GRID = Mesh(x=4), Mesh(x=2, y=2)
STATES = ("invariant", "reduced", "unreduced")


def steps_between(src: Spec, dst: Spec) -> tuple[Step, ...]:
    return redistribute(src, dst).steps


def least_time(src: Spec, dst: Spec, layouts: list[Spec]) -> float:
    """Return the time of the cheapest program with the cast in any of the layouts."""
    times = []
    for layout in layouts:
        if layout.partition.unreduced and dst.dtype == BF16:
            continue  # a sum of rounded values is not the rounded sum
        before, after = layout._with(dtype=src.dtype), layout._with(dtype=dst.dtype)
        steps = *steps_between(src, before), Cast(dst.dtype), *steps_between(after, dst)
        times.append(Program(src, steps, dst).cost().time)
    return min(times)


def check(src: Spec, dst: Spec, layouts: list[Spec]) -> None:
    prog = redistribute(src, dst)
    assert prog.cost().time <= least_time(src, dst, layouts) * (1 + 1e-9), prog


@pytest.mark.parametrize("dtypes", [(F32, BF16), (BF16, F32)], ids=["narrower", "wider"])
def test_programs_with_a_cast_are_the_cheapest_of_all_layouts(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    old, new = dtypes
    for mesh, count in ((LINE, 25), (GRID, 20)):
        layouts = spec_grid.all_specs(mesh, (1024, 512), STATES, dtype=F32)
        for a, b in spec_grid.sample_pairs(layouts, count):
            check(a._with(dtype=old), b._with(dtype=new), layouts)


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ("f32[1024@x,8]", "bf16[1024,8]", "cast gather"),
        ("bf16[1024@x,8]", "f32[1024,8]", "gather cast"),
        ("f32[1024,8]", "bf16[1024@x,8]", "slice cast"),
        ("bf16[1024,8]", "f32[1024@x,8]", "slice cast"),
        ("f32[8192,1024]{unreduced: x}", "bf16[8192,1024]", "scatter cast gather"),
    ],
)
def test_order_of_a_cast_and_other_steps(src: str, dst: str, steps: str) -> None:
    prog = redistribute(parse(src, LINE), parse(dst, LINE))
    names = [type(step).__name__.lower() for step in prog.steps]
    words = steps.split()
    assert len(names) == len(words), prog
    assert all(name.endswith(word) for name, word in zip(names, words, strict=True)), prog
    if prog.is_linear:
        reverse = [type(step).__name__ for step in prog.T.steps].index("Cast")
        assert reverse == len(words) - 1 - words.index("cast")


def test_values_of_programs_with_a_cast_are_the_cast_values() -> None:
    layouts = spec_grid.all_specs(GRID, (4, 4), STATES, dtype=F32)
    for a, b in spec_grid.sample_pairs(layouts, 20, seed=1):
        for old, new in itertools.permutations((torch.float64, F32)):
            prog = redistribute(a._with(dtype=old), b._with(dtype=new))
            x = spec_grid.random_locals(prog.src)
            want = reference.global_value(x, prog.src).to(new)
            y = reference.global_value(reference.simulate(prog, x), prog.dst)
            assert torch.equal(y, want), prog


def test_programs_with_a_cast_keep_the_memory_limit() -> None:
    src, dst = parse("f32[1024@x,8]", LINE), parse("bf16[1024,8]", LINE)
    least = redistribute(src, dst).cost().peak_memory
    assert redistribute(src, dst, max_memory=least).cost().peak_memory == least
    with pytest.raises(ShardingError, match=f"max_memory={least - 1}"):
        redistribute(src, dst, max_memory=least - 1)
