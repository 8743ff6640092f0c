"""Exact labelling of a graph of variables by eliminating them one after the other.

Every variable has a few labels, with a weight for each label and for each pair of labels of two
variables; a labelling of least total weight is found. The variable with the fewest neighbours is
eliminated first: its least weight becomes a table over the neighbours (Bertele and Brioschi,
Nonserial Dynamic Programming, 1972). On a chain this is the Viterbi algorithm; on the graphs of
neural networks, which are nearly chains, the tables stay small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

MAX_CELLS = 4_000_000
"""Cells of the largest table; a graph that needs a larger one raises `MemoryError`."""

Table = tuple[tuple[int, ...], torch.Tensor]


@dataclass(slots=True)
class Labelling:
    """Variables with weights, and pairs of them with weights, to be labelled by `solve`.

    >>> chain = Labelling()
    >>> a, b = chain.variable([0.0, 1.0]), chain.variable([5.0, 0.0])
    >>> chain.pair(a, b, [[0.0, 9.0], [9.0, 0.0]])
    >>> chain.solve()
    ([1, 1], 1.0)
    """

    tables: list[Table] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def variable(self, weights: Sequence[float]) -> int:
        """Add a variable with a weight for each of its labels, and return its number."""
        self.labels.append(len(weights))
        self.tables.append(((len(self.labels) - 1,), torch.tensor(weights, dtype=torch.float64)))
        return len(self.labels) - 1

    def pair(self, first: int, second: int, weights: Sequence[Sequence[float]]) -> None:
        """Add weights for pairs of two variables' labels; the rows are the labels of `first`."""
        table = torch.tensor(weights, dtype=torch.float64)
        if first == second:
            self.tables.append(((first,), table.diagonal()))
        elif first < second:
            self.tables.append(((first, second), table))
        else:
            self.tables.append(((second, first), table.T))

    def solve(self) -> tuple[list[int], float]:
        """Return the labels of least total weight, the first of equals, and the weight."""
        tables = list(self.tables)
        remaining, steps = set(range(len(self.labels))), []
        while remaining:
            variable = min(remaining, key=lambda v: (self._width(v, tables), v))
            touching = [table for table in tables if variable in table[0]]
            tables = [table for table in tables if variable not in table[0]]
            scope = tuple(sorted({v for variables, _ in touching for v in variables}))
            joint = self._joined(scope, touching)
            dim = scope.index(variable)
            tables.append((scope[:dim] + scope[dim + 1 :], joint.min(dim=dim).values))
            steps.append((variable, scope, joint))
            remaining.remove(variable)
        chosen: dict[int, int] = {}
        for variable, scope, joint in reversed(steps):
            row = joint[tuple(slice(None) if v == variable else chosen[v] for v in scope)]
            chosen[variable] = int(row.argmin())
        total = sum(float(table) for _, table in tables)
        return [chosen[v] for v in range(len(self.labels))], total

    def _width(self, variable: int, tables: Sequence[Table]) -> int:
        scope = {v for variables, _ in tables if variable in variables for v in variables}
        return math.prod(self.labels[v] for v in scope)

    def _joined(self, scope: Sequence[int], tables: Sequence[Table]) -> torch.Tensor:
        cells = math.prod(self.labels[v] for v in scope)
        if cells > MAX_CELLS:
            raise MemoryError(f"a table of {cells} cells")
        joint = torch.zeros([self.labels[v] for v in scope], dtype=torch.float64)
        for variables, table in tables:
            shape = [self.labels[v] if v in variables else 1 for v in scope]
            joint += table.reshape(shape)
        return joint
