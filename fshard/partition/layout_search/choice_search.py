"""Search for the layouts of a function's arguments in which a step takes the least time."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.tree import broadcast_prefix, flatten, paths, unflatten
from fshard.layout.validation import check_plain_tensor
from fshard.ops.core.call import name_of
from fshard.ops.propagate.choice_hints import RoleHint
from fshard.ops.propagate.role_costs import nbytes
from fshard.partition.arguments import module_function
from fshard.partition.function_traces import FunctionTraces
from fshard.partition.ir import ClosureTensor, Operation, Redistribution
from fshard.partition.layout_search.argument_layouts import ArgumentLeaf
from fshard.partition.layout_search.joint_labels import JointLabels, LabelledLayouts
from fshard.partition.layout_search.merged_axes import MergedAxes, mergers
from fshard.partition.layout_search.role_labels import TooManyLabels
from fshard.partition.partition import Partition
from fshard.partition.partitioned_call import PartitionedCall
from fshard.partition.step_cost.memory_limit import fitting_call, peak_of, refuse_memory
from fshard.partition.step_cost.memory_timeline import MemoryChoice
from fshard.partition.training_time import StepTime, step_times
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes
from fshard.spmd.in_specs import ArgSignature

MAX_EXHAUSTIVE = 1024
"""Number of choices up to which all of them are planned."""
MAX_STARTS = 2
"""Number of the best choices that are improved argument by argument."""
MAX_RELABELLED = 8
"""Number of the best choices whose operations are labelled again for their layouts."""
MAX_MERGED = 4
"""Number of ways to merge axes whose labels are planned."""
MAX_ATTEMPTS, RATE = 4, 1.5
"""Number of labellings with other shares of the uses of values, to raise the bound, and the first
rate of their change."""
MAX_LABELLED_AXES = 3
"""Number of axes that are labelled together, where all of a mesh have too many labels."""
PROVEN = 1e-3
"""Share of the time by which a choice may exceed the bound, to count as the best possible."""
MAX_RECORDED, RECORDED_SHARE = 32, 0.3
"""Number of choices whose rooflines are compared, if collectives overlap, and share of the time."""
MAX_FITTED = 3
"""Number of the fastest choices, and of the smallest, that are planned to fit into the memory."""
MEMORY_PRICES = (0.0, *(10.0**power for power in range(-16, -7)))
"""Seconds charged per byte of an argument on a rank, so that choices fit into the memory."""
OVERLAP_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of the computation in means with the collectives that overlap with it."""

Choice = tuple[Any, ...]
"""A layout for every leaf of the arguments, None for one that is not a tensor."""


class Planned(NamedTuple):
    """Plan of a choice.

    Attributes:
        time: modelled seconds of a step.
        memory: the predicted peak bytes of a rank if there is a limit, else `step_memory`.
        partition: the partition.
        call: its partitioned call.
    """

    time: float
    memory: int
    partition: Partition
    call: PartitionedCall


def step_memory(call: PartitionedCall) -> int:
    """Return an estimate of the bytes that a rank holds, which takes no run of the step.

    It counts arguments, their gradients, constants and results. All results are kept for the
    backward pass; without one only the largest is counted.
    """
    inputs = sum(max_local_nbytes(spec) * (2 if call.grad and spec.dtype.is_floating_point else 1)
                 for spec in call.in_specs)  # fmt: skip
    results = [
        sum(max_local_nbytes(spec) for spec in line.strategy.out_specs if spec is not None)
        for line in call.lines if isinstance(line, Operation)
    ] + [max_local_nbytes(line.program.dst) for line in call.lines
         if isinstance(line, Redistribution) and not line.program.is_local]  # fmt: skip
    constants = [line.tensor.nbytes for line in call.lines if isinstance(line, ClosureTensor)]
    return inputs + sum(constants) + (sum(results) if call.grad else max(results, default=0))


def call_times(call: PartitionedCall, topology: Topology) -> StepTime:
    """Return the modelled seconds of a step of a partitioned call."""
    inputs = dict(zip(call._inputs, call.requires_grad, strict=False))
    return step_times(call.lines, call.mesh, topology, grad=call.grad, inputs=inputs)


class ChoiceSearch:
    """One call of `auto`: the arguments, and all choices planned so far with their costs.

    Args:
        fn: the function.
        mesh: the mesh of the layouts.
        args: the example arguments.
        topology: the topology that layouts are costed on.
        memory: bytes that a rank may hold, None for no limit.
        fixed: for every leaf of the arguments its layout, None for one that is chosen.
        out_specs: layouts of the results, as `fs.partition` takes them.
        overlap: True if collectives of arguments run beside the computation.
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: Mesh, args: list[Any], topology: Topology,
        memory: int | None, fixed: Mapping[int, Any], out_specs: Any = None, *,
        overlap: bool = False,
    ) -> None:  # fmt: skip
        self.mesh, self.topology, self.memory = mesh, topology, memory
        self.out_specs, self.overlap = out_specs, overlap
        flat, self.tree = flatten(args)
        self.names = paths(args, "args")
        for name, x in zip(self.names, flat, strict=True):
            if isinstance(x, torch.Tensor):
                check_plain_tensor(x, f"fs.auto: {name}")
        self.leaves = [ArgumentLeaf.of(x, fixed.get(i)) for i, x in enumerate(flat)]
        self.args = unflatten(self.tree, [
            x if leaf.meta is None
            else torch.empty(leaf.meta.shape, dtype=leaf.meta.dtype, device="meta",
                             requires_grad=leaf.requires_grad)
            for x, leaf in zip(flat, self.leaves, strict=True)
        ])  # fmt: skip
        self.module = fn if isinstance(fn, torch.nn.Module) else None
        if self.module is not None:
            call = "fs.auto(module, mesh, [dict(module.named_parameters()), *args])"
            fn = module_function(self.module, "fs.auto", call)
        self.fn, self.traces = fn, FunctionTraces(fn, f"fs.auto({name_of(fn)})")
        ArgSignature(fn).check(self.traces.where, args, {})
        self.options = [self.options_of(i) for i in range(len(self.leaves))]
        self.costs: dict[Choice, Planned] = {}
        self.fastest: dict[Choice, Planned] = {}
        """The fastest plan of each choice, whether it fits into the memory or not."""
        self.planned: set[tuple[Choice, Any]] = set()
        """Choices with the roles that they were planned with."""
        self.plans = 0
        self.bound = 0.0
        self.all_planned = False

    @property
    def choices(self) -> int:
        """Number of choices."""
        return math.prod(len(options) for options in self.options if options is not None)

    def run(self, deadline: float) -> Choice:
        """Search until a time of `time.monotonic()`, and return the best choice."""
        end, now = deadline, time.monotonic()
        if self.overlap:  # the rest of the time is for rooflines
            deadline -= RECORDED_SHARE * max(0.0, deadline - now)
        replicated, smallest = self.replicated(), self.smallest()
        self.cost(replicated)
        labels = self.labels(self.costs[replicated].call)
        axes = sum(self.mesh.shape[axis] > 1 for axis in self.mesh.axes)
        if labels is not None:
            self.label_jointly(labels, deadline)
        for count in range(1, min(axes - 1, MAX_LABELLED_AXES) + 1):
            if not self.is_proven():
                self.label_merged_axes(count, deadline)
        if labels is None:
            self.label_some_axes(deadline)
        if self.memory is not None and not self.is_proven():
            self.cost(smallest)
        for choice in (smallest, self.sharded_data()):
            if time.monotonic() < deadline and not self.is_proven():
                self.cost(choice)
        if self.choices <= MAX_EXHAUSTIVE and not self.is_proven():
            self.plan_all(labels, deadline)
        starts = sorted(self.costs, key=self.rank)[:MAX_STARTS]
        for start in dict.fromkeys((*starts, *([smallest] if self.memory is not None else []))):
            self.descend(start, deadline)
        if labels is not None and not self.all_planned:
            for choice in sorted(self.costs, key=self.rank)[:MAX_RELABELLED]:
                if time.monotonic() < deadline and not self.is_proven():
                    self.cost(choice, labels.solve(layouts=choice).roles)
        return self.least_in_order(end) if self.overlap else self.best()

    def labels(
        self, call: PartitionedCall, axes: Sequence[str] | None = None,
        merged: MergedAxes | None = None,
    ) -> JointLabels | None:  # fmt: skip
        """Return the labelling of the traced graph, None if an operation has too many labels.

        With `axes` only these are labelled, with `merged` the merged axes, for which there is no
        labelling if the axes of a group differ in a fixed layout.
        """
        results: list[Any] = [None] * call._tree.num_leaves
        if self.out_specs is not None:
            tree = unflatten(call._tree, [0] * len(results))
            results = broadcast_prefix(self.out_specs, tree, "out_specs", "fs.auto")
        options, mesh = self.options, self.mesh
        if merged is not None:
            given = [*results, *(leaf.fixed for leaf in self.leaves)]
            if (layouts := merged.merge_all(given)) is None:
                return None
            results, fixed, mesh = layouts[: len(results)], layouts[len(results) :], merged.mesh
            options = [
                None if leaf.meta is None else [*leaf.layouts(mesh)] if p is None else [p]
                for leaf, p in zip(self.leaves, fixed, strict=True)
            ]
        try:
            return JointLabels(call.source, mesh, options, self.leaves, results, self.topology,
                               grad=call.grad, axes=axes)  # fmt: skip
        except TooManyLabels:
            return None

    def label_jointly(self, labels: JointLabels, deadline: float) -> None:
        """Plan the labels of least weight, and take their weight as bound.

        A price of the memory is a Lagrange multiplier: the weight less the price of all memory is
        a bound, too.
        """
        prices = MEMORY_PRICES if self.memory is not None else MEMORY_PRICES[:1]
        layouts, roles, _ = labels.solve(shared=False)
        self.cost(layouts, roles)
        for price, share, attempt in itertools.product(prices, self.shares, range(MAX_ATTEMPTS)):
            if self.bound and (time.monotonic() > deadline or self.is_proven()):
                return
            compute, arguments = share
            layouts, roles, weight = labels.solve(price=price, compute=compute, arguments=arguments,
                                                  overlap=self.overlap)  # fmt: skip
            self.bound = max(self.bound, weight - price * (self.memory or 0))
            self.cost(layouts, roles)
            if self.choices <= MAX_EXHAUSTIVE:
                self.cost(layouts)
            labels.improve_shares(RATE / (1 + attempt) ** 0.5)

    def label_some_axes(self, deadline: float) -> None:
        """Raise the bound by labels of as many axes as possible, where all have too many.

        Along other axes everything is sharded, at no cost: the least weight is a bound for each
        choice of axes.
        """
        call = self.costs[self.replicated()].call
        axes = [axis for axis in self.mesh.axes if self.mesh.shape[axis] > 1]
        for count in range(min(len(axes) - 1, MAX_LABELLED_AXES), 0, -1):
            seen = set[tuple[int, ...]]()  # with axes left out, links are those of all axes
            for some in itertools.combinations(axes, count):
                sizes = tuple(sorted(self.mesh.shape[axis] for axis in some))
                if self.is_symmetric and sizes in seen:
                    continue
                seen.add(sizes)
                if (labels := self.labels(call, some)) is None:
                    break
                for share, attempt in itertools.product(self.shares, range(MAX_ATTEMPTS)):
                    if self.bound and time.monotonic() > deadline:
                        return
                    compute, arguments = share
                    weight = labels.solve(compute=compute, arguments=arguments,
                                          overlap=self.overlap).weight  # fmt: skip
                    self.bound = max(self.bound, weight)
                    labels.improve_shares(RATE / (1 + attempt) ** 0.5)
            if self.bound:
                return

    @property
    def is_symmetric(self) -> bool:
        """True if axes of equal sizes and links are alike in all given layouts."""
        given = (*flatten(self.out_specs)[0], *(leaf.fixed for leaf in self.leaves))
        return not any((p.partition if isinstance(p, Spec) else p).axes for p in given if p)

    @property
    def shares(self) -> Sequence[tuple[float, float]]:
        """Factors of the computation, and of the collectives of arguments, for bounds.

        The longer of two times that overlap is at least any mean of them.
        """
        hidden = self.topology.overlap if self.overlap else 0.0
        return [(share, 1 - share * hidden) for share in (OVERLAP_SHARES if hidden else (1.0,))]

    def label_merged_axes(self, count: int, deadline: float) -> None:
        """Plan the labels of least weight on merged axes, for the best ways to merge to `count`."""
        call = self.costs[self.replicated()].call
        prices = MEMORY_PRICES if self.memory is not None else MEMORY_PRICES[:1]
        found: dict[float, list[tuple[LabelledLayouts, MergedAxes]]] = defaultdict(list)
        for merged in mergers(self.mesh, self.topology, count, distinct=self.is_symmetric):
            if time.monotonic() > deadline and (found or self.plans > 1):
                break
            if (labels := self.labels(call, merged=merged)) is not None:
                for price in prices:
                    found[price].append((labels.solve(shared=False, price=price), merged))
        for price, labelled in found.items():
            labelled.sort(key=lambda item: item[0].weight)
            for (layouts, roles, weight), merged in labelled[: 1 if price else MAX_MERGED]:
                choice = tuple(
                    merged.separated(p) if leaf.is_free else leaf.fixed
                    for p, leaf in zip(layouts, self.leaves, strict=True)
                )
                is_comparable = not (price or self.overlap)  # a sum of the times of a step
                slower = is_comparable and weight >= self.rank(self.best())[1]
                if self.plans == 1 or (time.monotonic() < deadline and not slower):
                    self.cost(choice, merged.separated_roles(roles))

    def plan_all(self, labels: JointLabels | None, deadline: float) -> None:
        """Plan all choices, but those whose own bound exceeds the best."""
        for choice in itertools.product(*([None] if x is None else x for x in self.options)):
            if time.monotonic() > deadline:
                return
            if labels is None:
                self.cost(choice)
                continue
            roles, weight = labels.solve(layouts=choice)[1:]
            over, step, _ = self.rank(self.best())
            if over or self.overlap or weight < step:
                self.cost(choice)
                self.cost(choice, roles)
        self.all_planned = True

    def descend(self, choice: Choice, deadline: float) -> None:
        """Change one argument of a choice at a time, as long as that helps."""
        better: Choice | None = None
        while better != choice and time.monotonic() < deadline and not self.is_proven():
            choice, better = better or choice, self.improved(better or choice, deadline)

    # -- choices ---------------------------------------------------------------------------

    def replicated(self) -> Choice:
        """Return the choice with every argument replicated."""
        return tuple(
            PartitionSpec(*[None] * leaf.ndim) if leaf.is_free else leaf.fixed
            for leaf in self.leaves
        )

    def sharded_data(self) -> Choice:
        """Return the choice with arguments without gradient sharded most, others replicated."""
        layouts = zip(self.replicated(), self.smallest(), self.leaves, strict=True)
        return tuple(p if leaf.requires_grad else sharded for p, sharded, leaf in layouts)

    def smallest(self) -> Choice:
        """Return the choice with every argument in the most shards, over its first dims."""
        key = lambda p: (self.mesh.axis_size(p.axes), [len(axes) for axes in p.dims])  # noqa: E731
        return tuple(
            max(leaf.layouts(self.mesh), key=key) if leaf.is_free else leaf.fixed
            for leaf in self.leaves
        )

    def cost(self, choice: Choice, roles: Mapping[str, RoleHint] | None = None) -> Planned:
        """Plan a choice, with the same `roles` only once, and return the best plan of it.

        With `roles`, operations have these roles where possible.
        """
        key = choice, None if roles is None else tuple(sorted(roles.items()))
        if key not in self.planned:
            part = self.partitioned(choice, roles)
            call = part.trace(*self.args)
            self.plans += 1
            self.planned.add(key)
            times = call_times(call, self.topology)
            seconds = times.overlapped(self.topology.overlap) if self.overlap else times.in_turn
            memory = step_memory(call) if self.memory is None else peak_of(call)
            planned = Planned(seconds, memory, part, call)
            if choice not in self.fastest or seconds < self.fastest[choice].time:
                self.fastest[choice] = planned
            if choice not in self.costs or self._key(planned) < self._key(self.costs[choice]):
                self.costs[choice] = planned
        return self.costs[choice]

    def partitioned(
        self, choice: Choice, roles: Mapping[str, RoleHint] | None, memory: int | None = None
    ) -> Partition:
        """Return the function partitioned with a choice."""
        return Partition(
            self.fn, self.mesh, unflatten(self.tree, list(choice)), self.out_specs, None,
            self.topology, self.traces, where=self.traces.where, replicate=self.mesh.axes,
            memory=memory, overlap=self.overlap, roles=roles, module=self.module,
        )  # fmt: skip

    def rank(self, choice: Choice) -> tuple[bool, float, int]:
        """Return the sort key of a choice: exceeds the memory, time, memory."""
        return self._key(self.costs[choice] if choice in self.costs else self.cost(choice))

    def _key(self, planned: Planned) -> tuple[bool, float, int]:
        over = self.memory is not None and planned.memory > self.memory
        return over, planned.memory if over else planned.time, planned.memory

    def best(self) -> Choice:
        """Return the best choice so far."""
        return min(self.costs, key=self.rank)

    def least_in_order(self, deadline: float) -> Choice:
        """Return the choice of the least roofline, among the best with and without overlap.

        How much of the collectives is hidden depends on where they are launched and awaited, which
        the record of a step shows. The best comes first, and others while there is time.
        """
        best, least = self.best(), math.inf
        over = self.rank(best)[0]
        fits = [choice for choice in self.costs if self.rank(choice)[0] == over]
        in_turn = {x: call_times(self.costs[x].call, self.topology).in_turn for x in fits}
        orders = sorted(fits, key=self.rank), sorted(fits, key=in_turn.__getitem__)
        first = dict.fromkeys(x for pair in zip(*orders, strict=True) for x in pair)
        for choice in itertools.islice(first, MAX_RECORDED):
            if least < math.inf and time.monotonic() > deadline:
                break
            try:
                seconds = self.costs[choice].call.roofline().time
            except ShardingError:  # an operation does not run without values
                break
            if seconds < least:
                best, least = choice, seconds
        return best

    def fitted(self, best: Choice, deadline: float) -> tuple[Choice, Planned]:
        """Return the fastest choice that fits into the memory, and its plan: `best` if it fits.

        One that does not fit by its layouts may gather again or recompute values in the backward
        pass, as `fs.partition(memory=)` chooses, which takes the more time.

        Raises:
            ShardingError: if none of those that were tried fits.
        """
        limit = self.memory
        assert limit is not None
        tried: list[MemoryChoice] = []
        plans = [*self.fastest.items(), *self.costs.items()]
        over = [item for item in plans if item[1].memory > limit]
        by_time = sorted(over, key=lambda item: item[1].time)[:MAX_FITTED]
        by_memory = sorted(over, key=lambda item: item[1].memory)[:MAX_FITTED]
        fitting = (best, self.costs[best]) if self.costs[best].memory <= limit else None
        for choice, planned in {id(item[1]): item for item in (*by_time, *by_memory)}.values():
            late = fitting is not None and time.monotonic() > deadline
            if late or (fitting is not None and planned.time >= fitting[1].time):
                continue
            call, choices = fitting_call(lambda _, call=planned.call: call, [()], limit)  # type: ignore[misc]
            tried += choices
            if call is not None:
                seconds = planned.time + choices[0].time - choices[1].time
                if fitting is None or seconds < fitting[1].time:
                    fitting = choice, Planned(seconds, choices[0].peak, planned.partition, call)
        if fitting is None:
            refuse_memory(limit, tried, "fs.auto")
        choice, planned = fitting
        part = self.partitioned(choice, planned.partition._roles, limit)
        return choice, planned._replace(partition=part)

    def is_proven(self) -> bool:
        """Return True if the best choice so far takes no longer than the bound."""
        over, step, _ = self.rank(self.best())
        return not over and step <= (1 + PROVEN) * self.bound

    def improved(self, choice: Choice, deadline: float) -> Choice:
        """Return the best choice after one pass that changes every argument, largest first."""
        sizes = {i: nbytes(x.meta) for i, x in enumerate(self.leaves) if x.is_free and x.meta}
        for leaf in sorted(sizes, key=lambda i: (-sizes[i], i)):
            for p in self.leaves[leaf].layouts(self.mesh):
                if time.monotonic() > deadline:
                    return self.best()
                other = (*choice[:leaf], p, *choice[leaf + 1 :])
                if self.rank(other) < self.rank(choice):
                    choice = other
        return choice

    def options_of(self, leaf: int) -> list[PartitionSpec | Spec] | None:
        """Return the layouts of an argument, the fixed one alone if it is fixed."""
        if self.leaves[leaf].meta is None:
            return None
        fixed = self.leaves[leaf].fixed
        return [*self.leaves[leaf].layouts(self.mesh)] if fixed is None else [fixed]
