"""`PlanOptions`: the options of `redistribute` as one hashable value, a key of caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from fshard._util.errors import Problem, did_you_mean
from fshard.program.cost.topology import Topology
from fshard.program.program_arguments import exclude_problems

NODE = Topology.node()
Objective = Literal["time", "bytes"]


class PlanOptions(NamedTuple):
    """Options of `redistribute`; `sharers` programs are assumed to share each launch.

    A program whose cost is at most `enough` need not be the cheapest.
    """

    topology: Topology | None
    objective: Objective
    max_memory: int | None
    exclude: tuple[type, ...]
    forward_dtype: torch.dtype | None
    backward_dtype: torch.dtype | None
    sharers: int = 1
    enough: float = 0.0

    @property
    def cost_topology(self) -> Topology | None:
        """Topology whose estimated time is minimized, or None if bytes are."""
        if self.objective == "bytes":
            return None
        topology = self.topology or NODE
        if self.sharers == 1:
            return topology
        return replace(topology, launch=topology.launch / self.sharers)

    def restrictions(self) -> str:
        """Return the given restrictions as text, each after a comma."""
        texts = [] if self.max_memory is None else [f"max_memory={self.max_memory}"]
        names = ", ".join(step_type.__name__ for step_type in self.exclude)
        if self.exclude:
            texts.append(f"exclude={names if len(self.exclude) == 1 else f'({names})'}")
        return "".join(f", {text}" for text in texts)

    def restriction_problems(self) -> list[Problem]:
        """Return the problems of `max_memory`, `exclude` and the types of dtypes."""
        problems, limit = exclude_problems(self.exclude), self.max_memory
        is_int = isinstance(limit, int) and not isinstance(limit, bool)
        if limit is not None and (not is_int or limit < 0):
            rule = "max_memory must be a number of bytes, an int of at least 0"
            problems.append(Problem(f"max_memory={limit!r}", rule, "max_memory=2**30"))
        for name in ("forward_dtype", "backward_dtype"):
            wire = getattr(self, name)
            if not isinstance(wire, torch.dtype | None):
                fix = f"{name}=torch.bfloat16"
                problems.append(Problem(f"{name}={wire!r}", f"{name} must be a torch.dtype", fix))
        return problems

    def is_hashable(self) -> bool:
        """Return True if plans can be cached by the options; others have problems."""
        try:
            hash(self)
        except TypeError:
            return False
        return True


def objective_problems(topology: object, objective: object) -> list[Problem]:
    """Return the problems of the options that define the cost."""
    problems = []
    if topology is not None and not isinstance(topology, Topology):
        named = topology in ("time", "bytes")
        fix = f'objective="{topology}"' if named else "topology=fs.Topology.cluster(8)"
        problems.append(Problem(f"topology={topology!r}", "topology must be a Topology", fix))
    if objective not in ("time", "bytes"):
        rule = "objective must be 'time' or 'bytes'"
        fix = did_you_mean(str(objective), ("time", "bytes"), 'objective="bytes"')
        if isinstance(objective, Topology):
            fix = "topology= takes the Topology"
        problems.append(Problem(f"objective={objective!r}", rule, fix))
    return problems
