"""Operations on the pairs of one rank that were planned before, by the layouts of their operands.

A call is known by its operation, the specs of its pairs, and its other arguments: the strategy, the
programs and the rank follow from them. Only what a call's state decides is left to each call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fshard._torch.functorch import is_transformed
from fshard._util.cache import BoundedDict
from fshard.layout.sharded import Sharded
from fshard.layout.tree import TENSORS
from fshard.ops.core.cache_keys import freeze
from fshard.ops.core.call import map_call
from fshard.ops.core.registry import registry_version
from fshard.ops.strategy.local_call import LocalCall, flat, run_local, static_call
from fshard.ops.strategy.strategy import Strategy
from fshard.program.program import Program
from fshard.run.creation import rank_on_mesh
from fshard.run.execute import run_programs

CONSTANTS = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.memory_format)
)
"""Types of arguments that are part of a key by their values."""
LISTS = (list, tuple)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of the tensor of a number in the arguments of a call."""

    number: int


class RepeatedCall(NamedTuple):
    """Call of an operation on one rank.

    Attributes:
        key: hashable, equal for calls that run alike.
        tensors: the locals of pairs, and plain tensors.
    """

    key: Hashable
    tensors: list[torch.Tensor]

    @staticmethod
    def of(
        options: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> RepeatedCall | None:
        """Return the call, None for pairs of all ranks, lists of tensors and transformed tensors.

        `options` are the operation and what else decides how it runs.
        """
        if is_transformed() or torch.compiler.is_compiling():
            return None
        places: list[Any] = []
        tensors: list[torch.Tensor] = []
        state = registry_version(), torch.get_default_dtype()
        key: Any = [*options, *state, len(args), *kwargs]
        grad = False
        for place, arg in (*enumerate(args), *kwargs.items()):
            kind = type(arg)
            if kind is Sharded:
                tensor = arg.local
                key.append(arg.spec)
            elif kind in TENSORS:
                if arg.layout is not torch.strided:
                    return None
                tensor = arg
            elif kind in CONSTANTS or (kind in LISTS and {*map(type, arg)} <= CONSTANTS):
                key.append(freeze(arg))
                continue
            else:
                return None
            if type(tensor) not in TENSORS:
                return None
            key += (tensor.shape, tensor.dtype)
            places.append(place)
            tensors.append(tensor)
            grad = grad or tensor.requires_grad
        try:
            key = (*key, grad and torch.is_grad_enabled(), *places)
            hash(key)
        except TypeError:  # of the operation
            return None
        return RepeatedCall(key, tensors)


class RepeatedPlan(NamedTuple):
    """Plan of calls with one key.

    Attributes:
        strategy: the strategy.
        programs: the program of each tensor, None for one without steps.
        args: the positional arguments, with a `TensorPlace` for each tensor.
        kwargs: the arguments by name.
        static: for each rank the one call of PyTorch that the operation is there, or None.
    """

    strategy: Strategy
    programs: tuple[Program | None, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: dict[int, LocalCall | None]

    def run(self, call: RepeatedCall) -> Any:
        """Return the pairs of the results."""
        strategy = self.strategy
        rank = rank_on_mesh(strategy.sources[0].mesh, "fs.apply")
        if rank not in self.static:
            self.static[rank] = static_call(strategy, rank, self.args, self.kwargs)
        static = self.static[rank]
        op, placed, named = static or (None, self.args, self.kwargs)
        locals_ = run_programs(self.programs, call.tensors)
        args = [locals_[arg.number] if type(arg) is TensorPlace else arg for arg in placed]
        kwargs = {
            k: locals_[arg.number] if type(arg) is TensorPlace else arg for k, arg in named.items()
        }
        if op is None:
            return as_pairs(strategy, run_local(strategy, rank, args, kwargs))
        return as_pairs(strategy, flat(op(*args, **kwargs)))


PLANS: BoundedDict[Hashable, RepeatedPlan] = BoundedDict()
"""Plans of the calls of this process, by their keys."""


def remember(
    call: RepeatedCall, strategy: Strategy, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Record the strategy of a call, whose tensors are `Sharded` in `args` and `kwargs`."""
    programs = tuple(prog if prog.steps else None for prog in strategy.programs)
    numbers = map(TensorPlace, range(len(call.tensors)))
    placed, named = map_call(args, kwargs, Sharded, lambda _: next(numbers))
    PLANS[call.key] = RepeatedPlan(strategy, programs, tuple(placed), named, {})


def as_pairs(strategy: Strategy, results: Sequence[Any]) -> Any:
    """Return the results of an operation, locals of its layouts, as pairs in its structure."""
    rows = zip(results, strategy.out_specs, strategy.out_halos, strict=True)
    pairs = [
        None if spec is None else Sharded(halo(local) if halo else local, spec)
        for local, spec, halo in rows
    ]
    return strategy.in_tree(pairs)
