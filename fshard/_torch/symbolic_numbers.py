"""Numbers that are symbols in a trace, and the condition under which the trace holds.

`torch.SymFloat` and `torch.SymInt` have the dtype semantics of Python's numbers. A comparison or a
conversion to a Python number is recorded as a guard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

Accepts = Callable[[Sequence[int | float]], bool]
has_symbolic_sizes: Callable[[torch.Tensor], bool] = attrgetter("_has_symbolic_sizes_strides")
"""Return True if a size or stride of a tensor is a symbol."""


class SymbolicNumbers:
    """Symbols for numbers, in the order of `values`.

    Attributes:
        env: the environment of the symbols, for `FakeTensorMode`.
        symbols: a `SymFloat` for every float, a `SymInt` for every int.
    """

    def __init__(self, values: Sequence[int | float]) -> None:
        # Importing the module takes a second.
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        env: Any = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.env, self.symbols, self.names = env, list[Any](), list[str]()
        for index, value in enumerate(values):
            source = ConstantSource(f"number{index}")
            symbol = env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
            make = env.create_symfloatnode if type(value) is float else env.create_symintnode
            self.symbols.append(make(symbol, hint=value, source=source))
            self.names.append(str(symbol))

    def condition(self) -> Accepts | None:
        """Return the condition that the guards set on other values, None if one is an equation."""
        from torch.utils._sympy.printers import PythonPrinter

        if self.env.replacements:
            return None
        guards = [PythonPrinter().doprint(guard.expr) for guard in self.env.guards]
        text = " and ".join(f"({guard})" for guard in guards) or "True"
        holds = eval(f"lambda {', '.join(self.names)}: {text}", {"math": math, "torch": torch})

        def accepts(numbers: Sequence[int | float]) -> bool:
            try:
                return bool(holds(*numbers))
            except (ArithmeticError, TypeError, ValueError):
                return False

        return accepts
