"""Labelling of a graph of variables by eliminating them one after the other.

Every variable has a few labels, with a weight for each label and for each pair of labels of two
variables; a labelling of least total weight is found. The variable with the fewest neighbours is
eliminated first: its least weight becomes a table over the neighbours (Bertele and Brioschi,
Nonserial Dynamic Programming, 1972). On a chain this is the Viterbi algorithm; on the graphs of
neural networks, which are nearly chains, the tables stay small.

Equal tables are one object, and what was computed from the same objects is reused: of equal layers
one is solved. If tables may be too large, labels that another replaces at no more weight are left
out first, which loses nothing (dead-end elimination: Goldstein, Biophysical Journal 66, 1994). If
one still is, the tables that touch the variable are divided, and each group takes its own minimum
(mini-buckets, Dechter and Rish, 2003), after weights were moved between groups so that their minima
agree (moment matching: Ihler, Flerova, Dechter and Otten, arXiv 1210.4878). The total is then a
lower bound of the least weight, and the labels are good ones.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

MAX_CELLS = 16_000_000
"""Cells of the largest table."""
MAX_DOMINATORS = 8
"""Labels of a variable that may dominate others."""

Table = tuple[tuple[int, ...], torch.Tensor]


@dataclass(slots=True)
class EqualTables:
    """Cache of tables by their values, and of what was computed from them.

    Several labellings may share one.
    """

    tables: dict[tuple[torch.Size, bytes], torch.Tensor] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    """Identities of `tables`."""
    minima: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)
    labels: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)

    def unique(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the table of these values that was first given."""
        if id(weights) in self.known:
            return weights
        digest = hashlib.blake2b(weights.contiguous().numpy().tobytes(), digest_size=16).digest()
        first = self.tables.setdefault((weights.shape, digest), weights)
        self.known.add(id(first))
        return first

    def scaled(self, table: torch.Tensor, factor: float) -> torch.Tensor:
        """Return a multiple of a table."""
        key = id(self.unique(table)), factor
        if key not in self.minima:
            self.minima[key] = self.unique(factor * table)
        return self.minima[key]

    def least(self, tables: Sequence[Table], variables: Collection[int]) -> Table:
        """Return the least sum of tables by the labels of some variables, over those of others."""
        scope = sorted(_neighbours(tables))
        places = {v: place for place, v in enumerate(scope)}
        over = tuple(places[v] for v in scope if v not in variables)
        key = (over, len(scope), *(
            (tuple(places[v] for v in variables), id(table)) for variables, table in tables
        ))  # fmt: skip
        if key not in self.minima:
            joint = joined(scope, tables)
            self.minima[key] = self.unique(joint.amin(over) if over else joint)
        return tuple(v for v in scope if v in variables), self.minima[key]

    def undominated(self, tables: Sequence[Table], variable: int) -> torch.Tensor:
        """Return the labels of a variable that none of a few others replaces at no more weight.

        The others are those of the least weights, whatever the labels of other variables are.
        """
        key = tuple((variables.index(variable), id(table)) for variables, table in tables)
        if key not in self.labels:
            rows = [table.movedim(variables.index(variable), 0).flatten(1) if table.ndim > 1
                    else table[:, None] for variables, table in tables]  # fmt: skip
            least = sum((row.amin(1) for row in rows[1:]), rows[0].amin(1))
            others = least.argsort()[:MAX_DOMINATORS]
            excess = torch.zeros(len(least), len(others), dtype=torch.float64)
            for row in rows:
                excess += (row[:, None] - row[others][None]).amin(-1)
            keeps = torch.ones(len(least), dtype=torch.bool)
            for other, dominated in zip(others.tolist(), excess.T >= 0, strict=True):
                if keeps[other]:
                    keeps &= ~dominated
                    keeps[other] = True
            self.labels[key] = keeps.nonzero().flatten()
        return self.labels[key]

    def rows(self, table: torch.Tensor, kept: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the part of a table with some labels of each of its variables."""
        key = id(table), *map(id, kept)
        if key not in self.minima:
            self.minima[key] = self.unique(table[torch.meshgrid(*kept, indexing="ij")])
        return self.minima[key]

    def matched(self, groups: Sequence[list[Table]]) -> Sequence[list[Table]]:
        """Return groups of tables of the same total whose least sums agree by common variables."""
        common = set.intersection(*map(_neighbours, groups))
        sums = [self.least(group, common) for group in groups]
        mean = torch.stack([table for _, table in sums]).mean(0)
        shifts = [self.unique(torch.where(mean.isfinite(), mean - table, 0.0)) for _, table in sums]
        return [[*group, (sums[0][0], shift)] for group, shift in zip(groups, shifts, strict=True)]


def joined(scope: Sequence[int], tables: Iterable[Table]) -> torch.Tensor:
    """Return the sum of tables as one over the variables of `scope`, in increasing order."""
    total: torch.Tensor | None = None
    for variables, table in tables:
        sizes = dict(zip(variables, table.shape, strict=True))
        part = table.reshape([sizes.get(v, 1) for v in scope])
        total = part if total is None else total + part
    return torch.zeros([1] * len(scope), dtype=torch.float64) if total is None else total


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
    equal: EqualTables = field(default_factory=EqualTables)

    def variable(self, weights: Sequence[float] | torch.Tensor) -> int:
        """Add a variable with a weight for each of its labels, and return its number."""
        self.labels.append(len(weights))
        self.weigh(len(self.labels) - 1, weights)
        return len(self.labels) - 1

    def weigh(self, variable: int, weights: Sequence[float] | torch.Tensor) -> None:
        """Add weights for the labels of a variable."""
        self._add((variable,), torch.as_tensor(weights, dtype=torch.float64))

    def pair(
        self, first: int, second: int, weights: Sequence[Sequence[float]] | torch.Tensor
    ) -> None:
        """Add weights for pairs of two variables' labels; the rows are the labels of `first`."""
        table = torch.as_tensor(weights, dtype=torch.float64)
        if first == second:
            self._add((first,), table.diagonal())
        elif first < second:
            self._add((first, second), table)
        else:
            self._add((second, first), table.T)

    def _add(self, variables: tuple[int, ...], table: torch.Tensor) -> None:
        self.tables.append((variables, self.equal.unique(table)))

    def solve(self) -> tuple[list[int], float]:
        """Return labels of least total weight, and the weight, or a lower bound of it.

        It is the least weight, and the labels are the first of that weight, unless a table would
        have over `MAX_CELLS` cells.
        """
        if max(self.labels, default=0) ** 3 > MAX_CELLS:
            kept = self._kept()
            labels, total = self._part(kept)._eliminated()
            return [int(x[label]) for x, label in zip(kept, labels, strict=True)], total
        return self._eliminated()

    def _kept(self) -> list[torch.Tensor]:
        """Return the undominated labels of every variable."""
        return [self.equal.undominated(tables, v) for v, tables in enumerate(self.touching())]

    def _part(self, kept: Sequence[torch.Tensor]) -> Labelling:
        """Return the labelling with some labels of every variable."""
        tables = [(variables, self.equal.rows(table, [kept[v] for v in variables]))
                  for variables, table in self.tables]  # fmt: skip
        return Labelling(tables, [len(x) for x in kept], self.equal)

    def touching(self) -> list[list[Table]]:
        """Return the tables of every variable."""
        touching: list[list[Table]] = [[] for _ in self.labels]
        for table in self.tables:
            for variable in table[0]:
                touching[variable].append(table)
        return touching

    def _eliminated(self) -> tuple[list[int], float]:
        """Return labels and weight as `solve` does, by the elimination of all variables."""
        touching = self.touching()
        heap = [(self._width(v, touching[v]), v) for v in range(len(self.labels))]
        heapq.heapify(heap)
        steps: list[tuple[int, list[Table]]] = []
        remaining, total = set(range(len(self.labels))), 0.0
        while heap:
            width, variable = heapq.heappop(heap)
            if variable not in remaining or width != self._width(variable, touching[variable]):
                continue  # an entry from before a change
            remaining.remove(variable)
            tables = touching[variable]
            steps.append((variable, tables))
            changed = _neighbours(tables) - {variable}
            for v in changed:
                touching[v] = [table for table in touching[v] if variable not in table[0]]
            groups = self._groups(tables)
            for group in self.equal.matched(groups) if len(groups) > 1 else groups:
                scope, result = self.equal.least(group, _neighbours(group) - {variable})
                for v in scope:
                    touching[v].append((scope, result))
                total += 0.0 if scope else float(result)
            for v in changed:
                heapq.heappush(heap, (self._width(v, touching[v]), v))
        return self._decoded(steps), total

    def _decoded(self, steps: Sequence[tuple[int, list[Table]]]) -> list[int]:
        """Return the label of every variable, the last eliminated first."""
        chosen: dict[int, int] = {}
        for variable, tables in reversed(steps):
            row = torch.zeros(self.labels[variable], dtype=torch.float64)
            for variables, table in tables:
                row = row + table[tuple(chosen.get(v, slice(None)) for v in variables)]
            chosen[variable] = int(row.argmin())
        return [chosen[v] for v in range(len(self.labels))]

    def _width(self, variable: int, tables: Sequence[Table]) -> int:
        return math.prod(self.labels[v] for v in {variable, *_neighbours(tables)})

    def _groups(self, tables: Sequence[Table]) -> list[list[Table]]:
        """Return the tables in groups whose sums have at most `MAX_CELLS` cells."""
        groups: list[tuple[set[int], list[Table]]] = []
        for table in tables:
            for scope, group in groups:
                if math.prod(self.labels[v] for v in {*scope, *table[0]}) <= MAX_CELLS:
                    scope.update(table[0])
                    group.append(table)
                    break
            else:
                groups.append(({*table[0]}, [table]))
        return [group for _, group in groups]


def _neighbours(tables: Iterable[Table]) -> set[int]:
    return {v for variables, _ in tables for v in variables}
