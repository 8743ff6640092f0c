"""Kinds of random cases; each case is determined by its kind, a seed and its number."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from random import Random
from typing import Any

import torch

import fshard as fs
from fshard import Mesh, Spec
from tests.fuzz.mapped_bodies import MappedCase
from tests.fuzz.transformed_bodies import TransformedCase
from tests.helpers.ops.random_functions import RandomCase, random_pair, random_spec

__all__ = ["KINDS", "failure_of"]

STEPS = (fs.AllGather, fs.AllReduce, fs.AllSlice, fs.AllToAll, fs.CollectivePermute, fs.Exchange,
         fs.ReduceScatter)  # fmt: skip
DTYPES = (torch.float64, torch.float64, torch.float32, torch.complex128, torch.int64)


def random_mesh(r: Random) -> Mesh:
    """Return a mesh of up to three axes and 12 devices in any order."""
    sizes = [r.choice([1, 2, 2, 3, 4]) for _ in range(r.randint(1, 3))]
    while math.prod(sizes) > 12:
        sizes.pop()
    ranks = list(range(math.prod(sizes)))
    if r.random() < 0.4:
        r.shuffle(ranks)
    return Mesh(dict(zip("xyz", sizes, strict=False)), devices=tuple(ranks))


class RedistributeCase:
    """Program between random layouts: it keeps the global value, its transpose the cotangent."""

    def __init__(self, r: Random) -> None:
        mesh, dtype = random_mesh(r), r.choice(DTYPES)
        shape = tuple(r.choice([0, 1, 2, 3, 4, 6, 8, 12, 13]) for _ in range(r.randint(0, 3)))
        generator = torch.Generator().manual_seed(r.randrange(2**31))
        self.x = torch.randint(-9, 9, shape, generator=generator).to(dtype)
        self.linear = dtype.is_floating_point or dtype.is_complex
        self.specs = [self.random_spec(r, mesh) for _ in range(2)]
        self.options: dict[str, Any] = {"objective": r.choice(["time", "bytes"])}
        if r.random() < 0.3:
            self.options["exclude"] = tuple(r.sample(STEPS, r.randint(1, 3)))
        self.random = Random(r.randrange(2**31))

    def random_spec(self, r: Random, mesh: Mesh) -> Spec:
        spec = random_spec(r, mesh, self.x, linear=True)
        if not self.linear:  # averages of integers are not integers
            kept = spec.partition
            spec = spec.replace(partition=fs.P(*kept.dims), sizes=dict(enumerate(spec.sizes)))
        return spec

    def run(self) -> None:
        """Compare the result and its gradient with the global tensor."""
        src, dst = self.specs
        try:
            prog = fs.redistribute(src, dst, **self.options)
        except fs.ShardingError as error:
            if "no program meets the restrictions" in str(error):
                return
            raise
        bound = fs.lower_bound(src, dst)
        assert prog.cost().bytes_received >= bound.bytes_received
        x = self.x.clone().requires_grad_(self.linear)
        pair = random_pair(self.random, x, src)
        output = fs.unshard((prog(pair.local), dst))
        torch.testing.assert_close(output, self.x)
        if self.linear:
            weights = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
            (grad,) = torch.autograd.grad(output, x, weights)
            torch.testing.assert_close(grad, weights)

    def __str__(self) -> str:
        src, dst = self.specs
        return f"{src} -> {dst} on {src.mesh}, {self.options}"


class PartitionCase:
    """Random function on random layouts, partitioned or run operation by operation."""

    def __init__(self, r: Random) -> None:
        self.how = r.choice(["on_pairs", "on_pairs", "op_by_op", "on_ranks", "on_tensors"])
        self.case = RandomCase(r, most=5 if self.how == "op_by_op" else 8)

    def run(self) -> None:
        """Compare values and gradients with one device."""
        getattr(self.case, self.how)()

    def __str__(self) -> str:
        return f"{self.how}: {self.case}"


KINDS: dict[str, Callable[[Random], Any]] = {
    "mapped": MappedCase,
    "partition": PartitionCase,
    "redistribute": RedistributeCase,
    "transformed": TransformedCase,
}


def failure_of(kind: str, seed: int, number: int) -> str | None:
    """Run one case; return the text of its failure, None if it agrees with one device."""
    text = f"{kind} case {number} of seed {seed}"
    try:
        case = KINDS[kind](Random(f"{kind} {seed} {number}"))
        text = str(case)
        case.run()
    except Exception:
        return f"{text}\n{traceback.format_exc(limit=-4)}"
    return None
