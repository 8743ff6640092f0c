"""Random programs on random layouts, compared with the same program on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

import fshard as fs
from fshard import Mesh, P, Sharded, Spec
from fshard.layout.partition_spec import LINEAR, chunk_sizes
from tests.helpers.ops.programs import program, random_tensor

MESHES = (Mesh(x=2), Mesh(x=3), Mesh(x=2, y=2), Mesh(x=2, y=3), Mesh(x=3, y=2), Mesh(x=1, y=2),
          Mesh(x=2, y=1), Mesh(x=1))  # fmt: skip
Tensors = Sequence[torch.Tensor]
Results = tuple[list[torch.Tensor], list[torch.Tensor]]

# -- layouts --------------------------------------------------------------------------------


def random_sizes(r: Random, size: int, parts: int) -> tuple[int, ...]:
    """Return shard sizes of a dim, some of them 0."""
    edges = sorted(r.randint(0, size) for _ in range(parts - 1))
    return tuple(b - a for a, b in zip([0, *edges], [*edges, size], strict=True))


def random_spec(r: Random, mesh: Mesh, x: torch.Tensor, *, linear: bool) -> Spec:
    """Return a spec of a tensor; with `linear` one that gradients can pass."""
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
            sizes[dim] = random_sizes(r, x.shape[dim], mesh.axis_size(axes))
        elif x.shape[dim] % mesh.axis_size(axes):
            sizes[dim] = chunk_sizes(x.shape[dim], [mesh.shape[axis] for axis in axes])
    p = P(*map(tuple, dims), unreduced=unreduced, reduced=reduced)
    return Spec(mesh, p, shape=x.shape, dtype=x.dtype, sizes=sizes)


def random_pair(r: Random, x: torch.Tensor, spec: Spec) -> Sharded:
    """Return the pair of a tensor with random unreduced values; differentiable."""
    pair = fs.shard(x, spec)
    linear = [axis for axis, kind in spec.partition.unreduced_kinds if kind in LINEAR]
    if not linear:
        return pair
    axis = r.choice(linear)
    real = torch.float64 if x.is_complex() else x.dtype
    parts = [random_tensor(r, x.shape, real).to(x.dtype) for _ in range(spec.mesh.shape[axis] - 1)]
    parts.append(-sum(parts, torch.zeros_like(x)).detach())
    local = tuple(
        shard + parts[spec.mesh.index(rank, (axis,))][spec.index(rank)]
        for rank, shard in zip(spec.mesh.ranks, pair.local, strict=True)
    )
    return Sharded(local, spec)


# -- a program on layouts -------------------------------------------------------------------


def keeps_half(op: Any, *args: Any, **kwargs: Any) -> bool:
    """Policy that keeps the results of operations with an even number of letters."""
    return len(str(op)) % 2 == 0


class RandomCase:
    """Program with layouts of its inputs and outputs, and its results on one device."""

    def __init__(self, r: Random, meshes: Sequence[Mesh] = MESHES, most: int = 8) -> None:
        self.program, self.mesh = program(r, most), r.choice(meshes)
        self.specs = [
            random_spec(r, self.mesh, x, linear=x.requires_grad) for x in self.program.inputs
        ]
        inputs = self.inputs()
        outputs = self.program.run(inputs)
        self.expected = [x.detach() for x in outputs], gradients(outputs, inputs)
        self.out_specs = [
            random_spec(r, self.mesh, x, linear=True) if r.random() < 0.4 else None for x in outputs
        ]
        self.seed = r.randrange(1000)
        self.remat = r.choice([None, None, "gathers", "all", keeps_half])
        self.part = fs.partition(
            lambda *xs: self.program.run(xs), mesh=self.mesh, in_specs=tuple(self.specs),
            out_specs=self.out_specs, remat=self.remat,
        )  # fmt: skip

    def inputs(self) -> list[torch.Tensor]:
        return [x.detach().clone().requires_grad_(x.requires_grad) for x in self.program.inputs]

    def pairs(self, inputs: Tensors) -> list[Sharded]:
        r = Random(self.seed)
        return [random_pair(r, x, spec) for x, spec in zip(inputs, self.specs, strict=True)]

    def check(self, run: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        """Compare the outputs of `run`, and the gradients of its inputs, with one device."""
        inputs = self.inputs()
        outputs = run(inputs)
        self.compare(([x.detach() for x in outputs], gradients(outputs, inputs)))

    def compare(self, results: Results) -> None:
        """Compare outputs and gradients with those of one device."""
        text = str(self.program)
        # Integers become 32-bit floats.
        loose = 2e-3 if any(name in text for name in ("float32", "int", "bool")) else 1e-8
        for kind, actual, expected in zip(
            ("value", "gradient"), results, self.expected, strict=True
        ):
            for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
                message = lambda text, i=i, kind=kind: f"{kind} {i}: {text}\n{self}"  # noqa: E731
                tolerance = loose if y.dtype.is_floating_point else 0
                torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=message)

    def on_pairs(self) -> None:
        self.check(lambda inputs: [*map(fs.unshard, self.part(*self.pairs(inputs)))])

    def on_tensors(self) -> None:
        self.check(lambda inputs: self.part(*inputs))

    def op_by_op(self) -> None:
        """Run every operation by `fs.apply`, on the layouts of its operands' results."""
        caller = lambda op, *args, **kwargs: fs.on_pairs(op, mode="auto")(*args, **kwargs)  # noqa: E731
        self.check(lambda inputs: [
            fs.unshard(pair) for pair in self.program.run(self.pairs(inputs), caller)
        ])  # fmt: skip

    def of_rank(self) -> Results:
        """Return outputs and gradients of one rank's code."""
        inputs = self.inputs()
        pairs = [fs.shard(x, spec) for x, spec in zip(inputs, self.specs, strict=True)]
        outputs = [fs.unshard(pair) for pair in self.part(*pairs)]
        return [x.detach() for x in outputs], gradients(outputs, inputs)

    def on_ranks(self) -> None:
        for results in fs.simulate(self.mesh, self.of_rank):
            self.compare(results)

    def __str__(self) -> str:
        inputs = ", ".join(map(str, self.specs))
        outputs = [*map(str, self.out_specs)]
        return f"{self.program}\non {self.mesh} in {inputs} out {outputs} remat {self.remat}"

    __repr__ = __str__


def gradients(outputs: Tensors, inputs: Tensors) -> list[torch.Tensor]:
    """Return the gradients of a weighted sum of all outputs, zeros where there is none."""
    tracked = [x for x in inputs if x.requires_grad]
    losses = []
    for index, x in enumerate(outputs):
        if x.requires_grad:
            weights = torch.rand(x.shape, generator=torch.Generator().manual_seed(index)) + 0.5
            losses.append((x.double() * weights).sum())
    if not losses:
        return [torch.zeros_like(x) for x in tracked]
    grads = torch.autograd.grad(sum(losses), tracked, allow_unused=True)  # type: ignore[arg-type]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(tracked, grads, strict=True)]
