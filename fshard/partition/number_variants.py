"""`NumberVariants`: the plans of calls that differ in the values of ints and floats alone.

The first call is planned for its values. Numbers that differ in a later call become symbols, so
that other values need no new plan. A number whose value the plan needs, as of a shape, a branch or
an operation with a rule that reads it, keeps one plan for each value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fshard._util.cache import BoundedDict
from fshard.layout.spec import Spec
from fshard.ops.core.cache_keys import freeze
from fshard.partition.partitioned_call import PartitionedCall

Plan = tuple[PartitionedCall, Sequence[Spec | None]]
MAX_PLANS = 64
"""Plans of one kind that are kept: each holds a graph. A plan with symbols, too, may hold for a
single value."""


class NumberVariants:
    """Plans by the values of numbers, and plans with symbols for some of them."""

    def __init__(self) -> None:
        self.by_value: dict[Any, Plan] = BoundedDict(MAX_PLANS)
        self.symbolic: list[tuple[dict[int, Any], Plan]] = []
        self.first: dict[int, Any] = {}
        self.varying: set[int] = set()
        self.needed: set[int] = set()

    def __len__(self) -> int:
        return len(self.by_value) + len(self.symbolic)

    def find(
        self, numbers: Mapping[int, int | float], compute: Callable[[tuple[int, ...]], Plan]
    ) -> Plan:
        """Return the plan of a call.

        Args:
            numbers: the ints and floats among the leaves of the arguments, by index.
            compute: return a plan in which the leaves of these indices are symbols.
        """
        key = {index: freeze(value) for index, value in numbers.items()}
        values = tuple(key.values())
        plan = self.by_value.get(values)
        if plan is not None:
            return plan
        for constants, plan in self.symbolic:
            accepts = plan[0].accepts
            if constants.items() <= key.items() and accepts is not None and accepts(
                [numbers[index] for index in plan[0].numbers]
            ):  # fmt: skip
                return plan
        self.first = self.first or key
        self.varying |= {index for index, value in key.items() if self.first[index] != value}
        symbols = tuple(sorted(self.varying - self.needed))
        plan = self._symbolic(symbols, compute) if symbols else None
        if plan is not None:
            symbols = plan[0].numbers
            constants = {index: value for index, value in key.items() if index not in symbols}
            self.symbolic = [*self.symbolic[1 - MAX_PLANS :], (constants, plan)]
        else:
            plan = self.by_value[values] = compute(())
        return plan

    def _symbolic(
        self, symbols: tuple[int, ...], compute: Callable[[tuple[int, ...]], Plan]
    ) -> Plan | None:
        """Return a plan with symbols for those of `symbols` whose values it does not need.

        Returns:
            None if it needs the values of all.
        """
        try:
            plan = compute(symbols)
        except Exception:  # noqa: BLE001 - of a function that takes numbers alone, or NeedsValue
            plan = None
        if plan is not None and plan[0].accepts is not None:
            return plan
        if len(symbols) == 1:
            self.needed.update(symbols)
            return None
        plans = [self._symbolic((symbol,), compute) for symbol in symbols]
        single = [plan for plan in plans if plan is not None]
        others = tuple(symbol for symbol in symbols if symbol not in self.needed)
        if 1 < len(others) < len(symbols):
            return self._symbolic(others, compute)
        self.needed.update(others[1:])
        return single[0] if single else None
