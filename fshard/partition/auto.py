"""`fs.auto`: layouts of a function's arguments, chosen by the modelled time of a step.

The traced graph is labelled exactly: every operation with its roles, every argument with a layout
(`layout_search/joint_labels`). The least weight is a lower bound of the time of a step, and its
labels are planned as `fs.partition` plans, where a redistribution that several uses share runs
once. Unless the plan is as fast as the bound, other choices are planned: all if they are few, else
one argument at a time is changed while that helps. On meshes of many axes groups of axes are
labelled as one axis each. After Alpa (arXiv 2201.12023) and PyTorch's AutoParallel, whose integer
programs are solved by branch and bound.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fshard._util.errors import Problem, did_you_mean, fail, raise_if
from fshard._util.notebook_view import NotebookView
from fshard._util.text import below, bytes_text, columns, time_text
from fshard.layout.mesh import Mesh, as_mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.tree import (
    broadcast_prefix,
    flatten,
    leaf_names,
    paths,
    read_placements,
    unflatten,
)
from fshard.partition.layout_search.choice_search import PROVEN, Choice, ChoiceSearch
from fshard.partition.partition import Partition
from fshard.partition.partitioned_call import PartitionedCall
from fshard.partition.step_cost.memory_limit import check_memory, peak_of
from fshard.program.cost.topology import Topology
from fshard.program.program_arguments import as_topology

MAX_ALTERNATIVES = 8


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Auto(NotebookView):
    """Layouts that `fs.auto` chose, and the function partitioned with them.

    Called with arguments, it runs the partitioned function.

    Attributes:
        in_specs: the layouts of the arguments, in the trees of the arguments.
        partition: the function as `fs.partition` returns it.
        partitioned: its `PartitionedCall` for the example arguments.
        time: modelled seconds of a step, forward and backward, as the search counts them: gradients
            take two products for each of the forward pass, and nothing overlaps; with `overlap=`,
            all collectives of arguments do. `partitioned.roofline()` has the step in its order.
        memory: the predicted peak bytes of a rank over a step, as `partitioned.memory()` says.
        alternatives: the name of an argument, another layout of it, the time with that layout, and
            an estimate of the bytes of a rank; the fastest first.
        bound: modelled seconds that no layouts of the arguments and strategies of the operations
            undercut, 0 if none is proven in the given seconds.
        explored: the choices that were planned, and the seconds that it took.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=4)
    >>> x = fs.Spec(mesh, fs.P(), shape=(65536, 1024))
    >>> choice = fs.auto(torch.relu, mesh, [x])
    >>> choice.in_specs, choice.memory // 2**20
    ([P(None, 'x')], 256)
    """

    in_specs: list[Any]
    partition: Partition
    partitioned: PartitionedCall
    time: float
    memory: int
    alternatives: tuple[tuple[str, PartitionSpec, float, int], ...]
    bound: float
    explored: str
    _args: list[Any]
    """The example arguments, with specs in the places of tensors."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.in_specs, self.partition, self.time, self.memory,
                          self.alternatives, self.bound, self.explored, self._args)  # fmt: skip

    @property
    def gap(self) -> float:
        """Share by which `time` exceeds the bound: 0.02 is within 2 % of the best possible."""
        return self.time / self.bound - 1 if self.bound else math.inf if self.time else 0.0

    def explain(self) -> str:
        """Return the layout of every argument, the nearest alternatives, and every operation."""
        leaves, _ = flatten(self.in_specs)
        layouts = _with_equal_layers(zip(paths(self.in_specs, "args"), leaves, strict=True))
        text = [line[2:] for line in columns(layouts) or below(layouts)]
        hidden = " if collectives of arguments are hidden" if self.partition.overlap else ""
        text.append(_cost_text(self.time, self.memory, hidden))
        planned = time_text(self.partitioned.roofline().time)
        text.append(f"{planned} a step by roofline(), which has the operations of both passes")
        text += [self._proof(), self.explored]
        rows = [
            (f"{name} as {p}", _cost_text(time, memory))
            for name, p, time, memory in self.alternatives
        ]
        text += columns(rows) or below(rows)
        return "\n".join((*text, str(self.partitioned)))

    def _proof(self) -> str:
        if math.isinf(self.gap):
            return "no bound proven"
        if self.gap <= PROVEN:
            return "the best possible, proven"
        return f"within {100 * self.gap:.1f} % of the best possible, proven"

    def __str__(self) -> str:
        return self.explain()

    __repr__ = __str__

    def __call__(self, *args: Any) -> Any:
        """Run the partitioned function on pairs or global tensors."""
        return self.partition(*args)


def _rebuild(in_specs: list[Any], partition: Partition, *others: Any) -> Auto:
    """Return an `Auto` from its pickle; the partitioned call is planned again."""
    return Auto(in_specs, partition, partition.trace(*others[-1]), *others)


def _with_equal_layers(layouts: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Return names and layouts as text; equal layers of one layout are one row."""
    groups: dict[tuple[str, Any], list[str]] = {}
    for name, p in layouts:
        argument, bracket, path = name.partition("]")
        key = argument + bracket + re.sub(r"\b\d+\b", "*", path)
        groups.setdefault((key, p), []).append(name)
    return [
        (key, f"{len(names)} x {p}") if names[1:] else (names[0], str(p))
        for (key, p), names in groups.items()
    ]


def _cost_text(time: float, memory: int, hidden: str = "") -> str:
    return f"{time_text(time)} a step{hidden}, {bytes_text(memory)} on a rank"


def auto(
    fn: Callable[..., Any],
    mesh: Mesh,
    example_args: Sequence[Any],
    *,
    memory: int | None = None,
    topology: Topology | None = None,
    fixed: Mapping[int | str, Any] | None = None,
    out_specs: Any = None,
    overlap: bool = False,
    seconds: float = 20.0,
) -> Auto:
    """Choose the layouts of a function's arguments in which a step takes the least time.

    A step is the forward pass, and the backward pass if an argument requires grad (a spec of a
    floating dtype does). Times and bytes are those of the cost model.

    Args:
        fn: the function, or a module, whose first argument is a dict of its parameters, as in
            `fs.partition`.
        mesh: the mesh of the layouts.
        example_args: its arguments in order: tensors, also on the meta device, or specs of their
            shapes and dtypes; `[dict(module.named_parameters()), x]` of a module.
        memory: bytes that a rank may hold over a step, as for `fs.partition`; None is unlimited.
            Layouts are chosen so that a step fits. If sharded arguments are gathered again in the
            backward pass, or values recomputed, in less time than other layouts take, or if no
            layouts alone fit, that is planned too: `explain()` says which.
        topology: the topology that layouts are costed on; None is one node.
        fixed: layouts that are not to be chosen: of an argument by its index, a tree prefix of it,
            or of all leaves whose path a regular expression matches whole. The path of a leaf has
            the index of the argument and its keys, joined by dots: `0.layers.0.weight`. An index
            comes before patterns, and the first of several patterns counts.
        out_specs: layouts of the results, as for `fs.partition`; None leaves them as they come out.
        overlap: the step is one in which collectives of arguments and of their gradients run beside
            the computation, as with buckets, and products beside the gathers and reductions around
            them (`overlap` of `fs.partition`); by default nothing overlaps. The layouts are those
            of the least `roofline()`, which shows the waiting, among the best by these times.
        seconds: time after which the best choice so far is taken.

    Returns:
        An `Auto` with the chosen `in_specs`, the function partitioned with them, and the proven
        `gap` to the best possible.

    Raises:
        ShardingError: if no choice that was tried fits into `memory`, whatever is recomputed, or
            `fixed` names no argument.

    "The best possible" is that of the cost model, for the operations of the traced graph: over all
    layouts of the arguments with even shards and without partial sums, and all strategies of the
    operations with even shards, where operands stay partial sums only of the reduction that they
    come with. It does not cover other graphs for the same values, uneven shards, recomputation, nor
    the distance of the model from a machine. The bound leaves out operations without a rule,
    functions mapped over the mesh, backward passes of custom functions, halos, and redistributions
    within decompositions; a redistribution that several uses share counts as a mean of them. Where
    operations have too many layouts on all axes (four axes and over, mostly) it is proven for three
    axes at a time, with nothing to pay along the others, and so is lower.

    >>> import fshard as fs
    >>> args = [fs.Spec(fs.Mesh(x=4), fs.P(), shape=s) for s in ((65536, 1024), (1024, 1024))]
    >>> fs.auto(lambda x, w: (x @ w).relu(), fs.Mesh(x=4), args).in_specs
    [P('x', None), P(None, None)]
    """
    mesh = as_mesh(mesh, "fs.auto")
    if not isinstance(example_args, list | tuple):
        fail("fs.auto", f"example_args of type {type(example_args).__name__}",
             "example_args must be a list of the arguments of a call",
             "fs.auto(fn, mesh, [x])")  # fmt: skip
    on = as_topology("fs.auto", topology, meshes=(mesh,))
    args, start = list(example_args), time.monotonic()
    check_memory(memory, "fs.auto")
    if fixed is not None and not isinstance(fixed, Mapping):
        fail("fs.auto", f"fixed={fixed!r}", "fixed must map indices of arguments, or patterns of "
             "paths, to layouts", 'fixed={0: P("x")}, say')  # fmt: skip
    if not isinstance(seconds, int | float) or math.isnan(seconds):
        fail("fs.auto", f"seconds={seconds!r}", "seconds must be a number", "seconds=20.0")
    fixed, out_specs = (read_placements(x, mesh) for x in (dict(fixed or {}), out_specs))
    search = ChoiceSearch(fn, mesh, args, on, memory, _fixed_leaves(fixed, args), out_specs,
                          overlap=overlap)  # fmt: skip
    best = search.run(start + seconds)
    return _result(search, best, start, start + seconds)


def _fixed_leaves(fixed: Mapping[int | str, Any], args: list[Any]) -> dict[int, Any]:
    """Return the layouts of leaves of the arguments by their index.

    Raises:
        ShardingError: for an index without an argument, and a pattern that is none or that no leaf
            matches.
    """
    where, problems, layouts = "fs.auto: fixed", list[Problem](), dict[int, Any]()
    first = [0, *itertools.accumulate(len(flatten(arg)[0]) for arg in args)]
    names = leaf_names(args)
    for key, p in fixed.items():
        if isinstance(key, int):
            if not 0 <= key < len(args):
                rule = f"an index must be that of an argument, 0 to {len(args) - 1}"
                problems.append(Problem(f"the index {key}", rule, "a pattern of paths"))
                continue
            leaves = broadcast_prefix(p, args[key], f"fixed[{key}]", where)
            layouts |= {first[key] + offset: x for offset, x in enumerate(leaves) if x is not None}
            continue
        try:
            matching = [i for i, name in enumerate(names) if re.fullmatch(key, name)]
        except (re.error, TypeError) as error:
            problems.append(Problem(f"the pattern {key!r}", f"a pattern must be one of re: {error}",
                                    "re.escape(path)"))  # fmt: skip
            continue
        if not matching:
            problems.append(Problem(f"the pattern {key!r}", "a pattern must match some path",
                                    did_you_mean(key, names, "leave it out")))  # fmt: skip
        layouts = {**dict.fromkeys(matching, p), **layouts}
    raise_if(where, problems)
    return layouts


def _count_text(count: int, choices: int) -> str:
    many = f"{choices:,}" if choices < 10**6 else f"10^{math.log10(choices):.0f}"
    return f"{count:,} of {many}"


def _result(search: ChoiceSearch, best: Choice, start: float, deadline: float) -> Auto:
    """Return the answer of `auto` for the best choice; raise if it exceeds the memory."""
    planned = search.costs[best]
    if search.memory is not None:
        best, planned = search.fitted(best, deadline)
    step, _, part, call = planned
    memory, seconds = peak_of(call), time.monotonic() - start
    alternatives = []
    for choice, planned in search.costs.items():
        changed = [i for i, (a, b) in enumerate(zip(choice, best, strict=True)) if a != b]
        if len(changed) == 1:
            leaf = changed[0]
            alternatives.append((search.names[leaf], choice[leaf], planned.time, planned.memory))
    nearest = tuple(sorted(alternatives, key=lambda item: item[2])[:MAX_ALTERNATIVES])
    specs = iter(call.in_specs)
    args = [leaf if x.meta is None else next(specs)
            for x, leaf in zip(search.leaves, flatten(search.args)[0], strict=True)]  # fmt: skip
    count = len(search.costs)
    spent = f"{seconds:.0f} s" if seconds >= 10 else "under 10 s"
    share = f"all {count:,}" if search.all_planned else _count_text(count, search.choices)
    return Auto(unflatten(search.tree, list(best)), part, call, step, memory, nearest,
                min(search.bound, step), f"{share} choices of layouts planned in {spent}",
                unflatten(search.tree, args))  # fmt: skip
