"""Operations on the pairs of one rank that were planned before, by the layouts of their operands.

A call is known by its operation, the specs of its pairs, and its other arguments: the strategy, the
programs and the rank follow from them. Only what a call's state decides is left to each call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fshard._torch.functorch import is_transformed
from fshard._util.cache import BoundedDict
from fshard.layout.sharded import Sharded
from fshard.layout.tree import TENSORS
from fshard.ops.core.cache_keys import freeze
from fshard.ops.core.registry import registry_version
from fshard.ops.strategy.local_call import run_local
from fshard.ops.strategy.strategy import Strategy
from fshard.program.program import Program
from fshard.run.creation import rank_on_mesh

CONSTANTS = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.memory_format)
)
"""Types of arguments that are part of a key by their values."""
LISTS = (list, tuple)


class RepeatedCall(NamedTuple):
    """Call of an operation on one rank.

    Attributes:
        key: hashable, equal for calls that run alike.
        places: the index or the name of each argument that is a tensor.
        tensors: the locals of pairs, and plain tensors.
    """

    key: Hashable
    places: tuple[int | str, ...]
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
        key: Any = [*options, registry_version(), len(args), *kwargs]
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
                key += (arg.shape, arg.dtype)
            elif kind in CONSTANTS or (kind in LISTS and {*map(type, arg)} <= CONSTANTS):
                key.append(freeze(arg))
                continue
            else:
                return None
            if type(tensor) not in TENSORS:
                return None
            places.append(place)
            tensors.append(tensor)
            grad = grad or tensor.requires_grad
        try:
            key = (*key, grad and torch.is_grad_enabled(), *places)
            hash(key)
        except TypeError:  # of the operation
            return None
        return RepeatedCall(key, tuple(places), tensors)


class RepeatedPlan(NamedTuple):
    """Plan of calls with one key: the strategy, the programs of operands, and other arguments."""

    strategy: Strategy
    programs: tuple[Program | None, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, call: RepeatedCall) -> Any:
        """Return the pairs of the results."""
        args, kwargs = [*self.args], {**self.kwargs}
        for place, tensor, program in zip(call.places, call.tensors, self.programs, strict=True):
            local = tensor if program is None else program(tensor)
            if isinstance(place, int):
                args[place] = local
            else:
                kwargs[place] = local
        rank = rank_on_mesh(self.strategy.sources[0].mesh, "fs.apply")
        return as_pairs(self.strategy, run_local(self.strategy, rank, args, kwargs))


PLANS: BoundedDict[Hashable, RepeatedPlan] = BoundedDict()
"""Plans of the calls of this process, by their keys."""


def remember(
    call: RepeatedCall, strategy: Strategy, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Record the strategy of a call, whose tensors are `Sharded` in `args` and `kwargs`."""
    programs = tuple(prog if prog.steps else None for prog in strategy.programs)
    others = tuple(None if isinstance(arg, Sharded) else arg for arg in args)
    PLANS[call.key] = RepeatedPlan(strategy, programs, others, dict(kwargs))


def as_pairs(strategy: Strategy, results: Sequence[Any]) -> Any:
    """Return the results of an operation, locals of its layouts, as pairs in its structure."""
    rows = zip(results, strategy.out_specs, strategy.out_halos, strict=True)
    pairs = [
        None if spec is None else Sharded(halo(local) if halo else local, spec)
        for local, spec, halo in rows
    ]
    return strategy.in_tree(pairs)
