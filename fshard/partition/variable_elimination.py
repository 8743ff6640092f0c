"""Least sums of tables of pairs: exact labelling of a graph by eliminating its variables.

Every variable has a few labels, with a weight for each label and for each pair of labels of two
variables. Variables go one after the other, the one with the fewest neighbours first: its least
weight becomes a table over these (Bertele and Brioschi, Nonserial Dynamic Programming, 1972). On a
chain that is Viterbi's; on the graphs of neural networks, whose cuts are narrow, tables stay small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["Labelling"]

MOST_CELLS = 4_000_000
"""A table of more cells is not made: of the variable's neighbours the later ones are fixed."""

Table = tuple[tuple[int, ...], torch.Tensor]


@dataclass(slots=True)
class Labelling:
    """Variables with weights, and pairs of them with weights; `solve` finds the least sum.

    >>> chain = Labelling()
    >>> a, b = chain.variable([0.0, 1.0]), chain.variable([5.0, 0.0])
    >>> chain.pair(a, b, [[0.0, 9.0], [9.0, 0.0]])
    >>> chain.solve()
    ([1, 1], 1.0)
    """

    tables: list[Table] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def variable(self, weights: Sequence[float]) -> int:
        """A new variable with a weight for each of its labels; its number."""
        self.labels.append(len(weights))
        self.tables.append(((len(self.labels) - 1,), torch.tensor(weights, dtype=torch.float64)))
        return len(self.labels) - 1

    def pair(self, one: int, other: int, weights: Sequence[Sequence[float]]) -> None:
        """Weights of two variables' labels together, `one`'s along the rows."""
        table = torch.tensor(weights, dtype=torch.float64)
        if one == other:
            self.tables.append(((one,), table.diagonal()))
        elif one < other:
            self.tables.append(((one, other), table))
        else:
            self.tables.append(((other, one), table.T))

    def solve(self) -> tuple[list[int], float]:
        """The labels of least weight, and the weight; of equals those that come first."""
        tables = list(self.tables)
        left, steps = set(range(len(self.labels))), []
        while left:
            variable = min(left, key=lambda v: (self._width(v, tables), v))
            mine = [each for each in tables if variable in each[0]]
            tables = [each for each in tables if variable not in each[0]]
            scope = tuple(sorted({v for names, _ in mine for v in names}))
            joint = self._joined(scope, mine)
            place = scope.index(variable)
            rest = scope[:place] + scope[place + 1 :]
            tables.append((rest, joint.min(dim=place).values))
            steps.append((variable, scope, joint))
            left.remove(variable)
        chosen: dict[int, int] = {}
        for variable, scope, joint in reversed(steps):
            row = joint[tuple(slice(None) if v == variable else chosen[v] for v in scope)]
            chosen[variable] = int(row.argmin())
        total = sum(float(table) for _, table in tables)
        return [chosen[v] for v in range(len(self.labels))], total

    def _width(self, variable: int, tables: Sequence[Table]) -> int:
        scope = {v for names, _ in tables if variable in names for v in names}
        return math.prod(self.labels[v] for v in scope)

    def _joined(self, scope: Sequence[int], tables: Sequence[Table]) -> torch.Tensor:
        cells = math.prod(self.labels[v] for v in scope)
        if cells > MOST_CELLS:
            raise MemoryError(f"a table of {cells} cells")
        joint = torch.zeros([self.labels[v] for v in scope], dtype=torch.float64)
        for names, table in tables:
            shape = [self.labels[v] if v in names else 1 for v in scope]
            joint += table.reshape(shape)
        return joint
