"""One call that `fs.partition` laid out: its lines, what they cost, and how they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fshard._util.errors import fail
from fshard._util.hooks import Hook
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Sharded, Spec
from fshard.layout.tree import TreeDef, is_pair
from fshard.ops.core.call import instances_in
from fshard.ops.strategy.local_call import rank_on_mesh
from fshard.partition.ir import Line, Move, directly, local_graph, run_everywhere, write
from fshard.program.cost.model import Cost
from fshard.program.cost.topology import Topology
from fshard.program.program import as_topology
from fshard.run.global_tensors import unshard

__all__ = ["Other", "Partitioned"]


@dataclass(frozen=True, slots=True)
class Other:
    """A result that is no tensor."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Partitioned:
    """One partitioned call: lines of local operations and programs, for arguments of one kind.

    `in_specs` and `out_specs` are those of the leaves of arguments and results, None where a
    result is no tensor; `written` are the places of the leaves that are written; `grad` says
    whether results have gradients, `source` is the traced graph before layouts, `names` are the
    paths of the arguments' leaves.
    """

    mesh: Mesh
    lines: tuple[Line, ...]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec | None, ...]
    _inputs: tuple[int, ...]
    _outputs: tuple[Any, ...]
    written: tuple[int, ...]
    _tree: TreeDef
    _topology: Topology
    grad: bool
    source: fx.GraphModule
    names: tuple[str, ...]
    _graphs: dict[int, fx.GraphModule] = field(default_factory=dict)
    _direct: dict[int, Callable[..., tuple[Any, ...]]] = field(default_factory=dict)

    @property
    def programs(self) -> tuple[Any, ...]:
        """Every program that runs, in order."""
        return tuple(line.program for line in self.lines if isinstance(line, Move))

    def cost(self, topology: Topology | None = None, *, backward: bool = False) -> Cost:
        """The cost of all programs, one after the other; with `backward` that of their transposes.

        Local operations are not in it.
        """
        on = topology or self._topology
        moves = [line for line in self.lines if isinstance(line, Move)]
        progs = [
            line.program.T if backward else line.program for line in moves
            if not backward or (line.grad and line.program.is_linear)
        ]  # fmt: skip
        return Cost.in_turn(prog.cost(on) for prog in progs)

    def graph(self, rank: int = 0) -> fx.GraphModule:
        """The FX graph of local operations and programs that a rank runs."""
        if rank not in self._graphs:
            outputs = [each if type(each) is int else None for each in self._outputs]
            self._graphs[rank] = local_graph(self.lines, rank, self._inputs, outputs)
        return self._graphs[rank]

    def _directly(self, rank: int) -> Callable[..., tuple[Any, ...]]:
        """What that graph does."""
        found = self._direct.get(rank)
        if found is None:
            found = self._direct[rank] = directly(self.graph(rank))
        return found

    def explain(self, topology: Topology | None = None) -> Any:
        """A table of every operation's layout and of what is sent each way; prints anywhere."""
        on = self._topology if topology is None else as_topology("explain", topology)
        return explain_partitioned_hook.call(self, on)

    def __str__(self) -> str:
        return str(self.explain())

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        bundle: dict[str, str] = self.explain()._repr_mimebundle_()
        return bundle

    def run(self, locals_: Sequence[Any]) -> list[Any]:
        """The function on the locals of its leaves: one rank's tensors, or tuples of all ranks'."""
        if self.grad or not torch.is_grad_enabled():
            return self._run(locals_)
        # No result has a gradient, as of a training step: nothing need be kept for one.
        with torch.no_grad():
            return self._run(locals_)

    def _run(self, locals_: Sequence[Any]) -> list[Any]:
        for each in locals_:
            if not isinstance(each, torch.Tensor):
                break
        else:
            made = self._directly(rank_on_mesh(self.mesh, "a partitioned function"))(*locals_)
            return [y if type(at) is int else at.value
                    for at, y in zip(self._outputs, made, strict=True)]  # fmt: skip
        wanted = [each for each in self._outputs if type(each) is int]
        given = dict(zip(self._inputs, locals_, strict=True))
        found = run_everywhere(self.lines, self.mesh, given, wanted)
        return [found[each] if type(each) is int else each.value for each in self._outputs]

    def check_apart(self, given: Sequence[Any], where: str) -> None:
        """Raise `ShardingError` where a tensor that is written lies in another's memory."""
        owner: dict[int, int] = {}
        first = sorted(range(len(given)), key=lambda at: at not in self.written)
        for at in first:
            for each in instances_in(given[at], torch.Tensor):
                place = each.untyped_storage().data_ptr()
                mine = owner.setdefault(place, at) if place else at
                if mine != at and mine in self.written:
                    fail(where, f"{self.names[at]} in the memory of "
                         f"{self.names[mine]}, which is written",
                         "the function was traced for tensors that share no memory",
                         "give it a clone() of one of them")  # fmt: skip

    def write_wholes(self, given: Sequence[Any], locals_: Sequence[Any]) -> None:
        """Make whole tensors that were given what the function wrote to their parts."""
        for at in self.written:
            if not is_pair(given[at]):
                write(given[at], unshard(Sharded(locals_[at], self.in_specs[at])))


@Hook
def explain_partitioned_hook(call: Partitioned, topology: Topology) -> Any:
    """`Partitioned.explain`; set by `show/partition_table.py`."""
    raise NotImplementedError
