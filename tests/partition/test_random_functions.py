"""Random functions on random layouts: values and gradients are those of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import Mesh, P, Sharded, Spec
from fshard.layout.partition_spec import LINEAR, chunk_sizes
from tests.helpers.ops.programs import numbers, program

MESHES = (Mesh(x=2), Mesh(x=3), Mesh(x=2, y=2), Mesh(x=2, y=3), Mesh(x=3, y=2), Mesh(x=1, y=2),
          Mesh(x=2, y=1), Mesh(x=1))  # fmt: skip
Tensors = Sequence[torch.Tensor]
Found = tuple[list[torch.Tensor], list[torch.Tensor]]
RANDOMS = st.randoms(use_true_random=False)
MANY = settings(suppress_health_check=list(HealthCheck))

# -- layouts --------------------------------------------------------------------------------


def cut(r: Random, size: int, parts: int) -> tuple[int, ...]:
    """Sizes of parts, empty ones too."""
    edges = sorted(r.randint(0, size) for _ in range(parts - 1))
    return tuple(b - a for a, b in zip([0, *edges], [*edges, size], strict=True))


def layout(r: Random, mesh: Mesh, x: torch.Tensor, *, linear: bool) -> Spec:
    """Any spec of a tensor; with `linear` one that every gradient passes."""
    dims: list[list[str]] = [[] for _ in range(x.ndim)]
    kinds = ["sum", *["avg"] * x.is_floating_point(), *["max", "min"] * (not linear)]
    kind = r.choice(kinds)
    unreduced, reduced = {}, {}
    for axis in r.sample(mesh.axes, len(mesh.axes)):
        match r.choice(["sharded", "sharded", "sharded", "invariant", "unreduced", "reduced"]):
            case "sharded" if x.ndim:
                r.choice(dims).append(axis)
            case "unreduced" if x.dtype != torch.bool:
                unreduced[axis] = kind
            case "reduced" if x.is_floating_point():
                reduced[axis] = "sum"
    sizes = {}
    for dim, axes in enumerate(dims):
        if axes and r.random() < 0.2:
            sizes[dim] = cut(r, x.shape[dim], mesh.axis_size(axes))
        elif x.shape[dim] % mesh.axis_size(axes):
            sizes[dim] = chunk_sizes(x.shape[dim], [mesh.shape[axis] for axis in axes])
    p = P(*map(tuple, dims), unreduced=unreduced, reduced=reduced)
    return Spec(mesh, p, shape=x.shape, dtype=x.dtype, sizes=sizes)


def lie(r: Random, x: torch.Tensor, spec: Spec) -> Sharded:
    """The pair of a tensor, its addends random; differentiable."""
    pair = fs.shard(x, spec)
    linear = [axis for axis, kind in spec.partition.unreduced_kinds if kind in LINEAR]
    if not linear:
        return pair
    axis = r.choice(linear)
    parts = [numbers(r, x.shape, x.dtype) for _ in range(spec.mesh.shape[axis] - 1)]
    parts.append(-sum(parts, torch.zeros_like(x)).detach())
    local = tuple(
        mine + parts[spec.mesh.index(rank, (axis,))][spec.index(rank)]
        for rank, mine in zip(spec.mesh.ranks, pair.local, strict=True)
    )
    return Sharded(local, spec)


# -- a program on layouts -------------------------------------------------------------------


class Case:
    """A program with layouts of what goes in and comes out, and what one device gives."""

    def __init__(self, r: Random, meshes: Sequence[Mesh] = MESHES, most: int = 8) -> None:
        self.program, self.mesh = program(r, most), r.choice(meshes)
        self.specs = [layout(r, self.mesh, x, linear=x.requires_grad) for x in self.program.inputs]
        inputs = self.inputs()
        outputs = self.program.run(inputs)
        self.right = [x.detach() for x in outputs], gradients(outputs, inputs)
        self.out_specs = [
            layout(r, self.mesh, x, linear=True) if r.random() < 0.4 else None for x in outputs
        ]
        self.seed = r.randrange(1000)
        self.part = fs.partition(lambda *xs: self.program.run(xs), mesh=self.mesh,
                                 in_specs=tuple(self.specs), out_specs=self.out_specs)  # fmt: skip

    def inputs(self) -> list[torch.Tensor]:
        return [x.detach().clone().requires_grad_(x.requires_grad) for x in self.program.inputs]

    def pairs(self, inputs: Tensors) -> list[Sharded]:
        r = Random(self.seed)
        return [lie(r, x, spec) for x, spec in zip(inputs, self.specs, strict=True)]

    def check(self, run: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        """Compare the outputs that `run` makes of the inputs, and the inputs' gradients."""
        inputs = self.inputs()
        outputs = run(inputs)
        self.compare(([x.detach() for x in outputs], gradients(outputs, inputs)))

    def compare(self, found: Found) -> None:
        text = str(self.program)
        # Whole numbers become numbers of 32 bits.
        loose = 2e-3 if any(each in text for each in ("float32", "int", "bool")) else 1e-8
        for what, made, right in zip(("value", "gradient"), found, self.right, strict=True):
            for at, (one, other) in enumerate(zip(made, right, strict=True)):
                said = lambda text, at=at, what=what: f"{what} {at}: {text}\n{self}"  # noqa: E731
                slack = loose if other.dtype.is_floating_point else 0
                torch.testing.assert_close(one, other, rtol=slack, atol=slack, msg=said)

    def on_pairs(self) -> None:
        self.check(lambda inputs: [*map(fs.unshard, self.part(*self.pairs(inputs)))])

    def on_tensors(self) -> None:
        self.check(lambda inputs: self.part(*inputs))

    def one_by_one(self) -> None:
        """Every operation by `fs.apply`, where results lie as they come."""
        caller = functools.partial(fs.apply, mode="auto")
        self.check(lambda inputs: [
            fs.unshard(pair) for pair in self.program.run(self.pairs(inputs), caller)
        ])  # fmt: skip

    def of_rank(self) -> Found:
        """What one rank gets, in code of its own."""
        inputs = self.inputs()
        pairs = [fs.shard(x, spec) for x, spec in zip(inputs, self.specs, strict=True)]
        outputs = [fs.unshard(pair) for pair in self.part(*pairs)]
        return [x.detach() for x in outputs], gradients(outputs, inputs)

    def on_ranks(self) -> None:
        for found in fs.simulate(self.mesh, self.of_rank):
            self.compare(found)

    def __str__(self) -> str:
        given = ", ".join(map(str, self.specs))
        return f"{self.program}\non {self.mesh} in {given} out {[*map(str, self.out_specs)]}"

    __repr__ = __str__


def gradients(outputs: Tensors, inputs: Tensors) -> list[torch.Tensor]:
    """Those of a weighted sum of all outputs, zeros where there is none."""
    wanted = [x for x in inputs if x.requires_grad]
    losses = []
    for at, x in enumerate(outputs):
        if x.requires_grad:
            weights = torch.rand(x.shape, generator=torch.Generator().manual_seed(at)) + 0.5
            losses.append((x.double() * weights).sum())
    if not losses:
        return [torch.zeros_like(x) for x in wanted]
    found = torch.autograd.grad(sum(losses), wanted, allow_unused=True)  # type: ignore[arg-type]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


@given(RANDOMS)
@settings(MANY, max_examples=80)
def test_functions_of_pairs(r: Random) -> None:
    Case(r).on_pairs()


@given(RANDOMS)
@settings(MANY, max_examples=15)
def test_functions_of_tensors(r: Random) -> None:
    Case(r).on_tensors()


@given(RANDOMS)
@settings(MANY, max_examples=40)
def test_operations_one_by_one(r: Random) -> None:
    Case(r, most=5).one_by_one()


@given(RANDOMS)
@settings(MANY, max_examples=20)
def test_rank_local_code(r: Random) -> None:
    Case(r).on_ranks()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(12))
def test_many_functions(seed: int) -> None:
    r = Random(seed)
    for _ in range(100):
        case = Case(r)
        case.on_pairs()
        case.one_by_one()
        case.on_ranks()
