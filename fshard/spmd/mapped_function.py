"""Calls of a mapped function: plans of their arguments, the run on every rank, their results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from fshard._torch.checkpointing import checkpoint_form
from fshard._torch.dynamo import compiler_of, run_uncompiled, skip_frames_below
from fshard._torch.fake_tensors import is_recording_below_autograd
from fshard._torch.functorch import is_transformed
from fshard._torch.symbolic_numbers import has_symbolic_sizes
from fshard._util.cache import BoundedDict
from fshard._util.errors import fail, raise_if
from fshard._util.tracebacks import hide_frames
from fshard.layout.mesh import Mesh
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import (
    TreeDef,
    append_cache_key,
    broadcast_prefix,
    flatten,
    paths,
    read_placements,
    unflatten,
)
from fshard.run.global_tensors import unshard, unshard_blocks
from fshard.run.transports.base import Transport, current_transport, is_simulated
from fshard.run.transports.divergence_check import checked_collectives
from fshard.run.transports.divergence_report import blame
from fshard.spmd.axis_env import BoundAxes, current_axes, current_tracker
from fshard.spmd.boundary import (
    at_boundary,
    check_non_tensors,
    check_specs,
    closure_input,
    empty_results,
    plan_arguments,
    result_problems,
    result_specs,
    slots_of,
    uneven_axes,
)
from fshard.spmd.closure_inputs import call_function, replaced_closures
from fshard.spmd.graph_call import ENDS_GRAPHS, compile_on_ranks, planned, traceable
from fshard.spmd.in_specs import ArgSignature, Argument, PathSpec, match_specs
from fshard.spmd.mesh_scope import Scope, check_check, local_map_scope, shard_map_scope
from fshard.spmd.simulated_map import map_ranks, run_body
from fshard.spmd.tracking.out_spec_check import NonTensor, check_replicas, non_tensor_problem
from fshard.spmd.tracking.tracker import Tracker
from fshard.spmd.tracking.typed_body import (
    check_inner,
    check_result_types,
    new_tracker,
    pause_types,
    set_argument_types,
    set_result_types,
    track_body,
)

Key = tuple[Any, ...]
MAP_RECORDER = ContextVar[Callable[..., Any] | None]("fshard_map_recorder", default=None)
"""Function of a `MappedFunction`, args and kwargs that a trace calls in the place of a call."""

TENSOR = object()
"""Stands for a tensor among the leaves of a rank's result."""


@skip_frames_below("functions are mapped outside of graphs, which contain their calls")
def map_function(
    fn: Callable[..., Any] | None,
    where: str,
    mesh: Mesh | None,
    in_specs: Any,
    out_specs: Any,
    axis_names: frozenset[str] | None,
    *,
    redistribute_inputs: bool,
    check: bool | str,
) -> Any:
    """Return `fn` mapped, or the decorator; None as `axis_names` are all axes of the pairs."""
    options: Any = {"redistribute_inputs": redistribute_inputs, "check": check}
    check_check(check, where)
    if fn is None:
        return lambda fn: map_function(fn, where, mesh, in_specs, out_specs, axis_names, **options)
    if not callable(fn):
        fail(where, f"{fn!r}", "the first argument must be a function", f"{where}(fn, ...)")
    compiler = None if check is False else compiler_of(fn)
    if compiler is not None:  # types are tracked in its graph, not around it
        body, compile_ = compiler
        options |= {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
        mapped = map_function(body, where, axis_names=axis_names, **options)
        # Comparisons of values and of collectives are not part of a graph.
        return mapped if check in ENDS_GRAPHS else compile_on_ranks(mapped, compile_, fn)
    function = MappedFunction(fn, where, mesh, in_specs, out_specs, axis_names, **options)

    @run_uncompiled
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return in_graph(args, kwargs)
        try:
            return function.call(args, kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    in_graph = traceable(function, uncompiled=call)
    return functools.update_wrapper(call, fn, updated=())  # without a module's attributes


@dataclass(slots=True, eq=False)
class ResultTree:
    """Structure that results of equal types and shapes share."""

    treedef: TreeDef
    tensor_indices: tuple[int, ...]
    """Indices of the tensors among the leaves."""
    out_specs: tuple[PathSpec, ...] | None = None
    """Path and out spec of every leaf, once they are needed."""


@dataclass(slots=True, eq=False)
class BoundaryPlan:
    """Plan of a call, which depends on the types, shapes and specs of its arguments."""

    scope: Scope
    treedef: TreeDef
    transport: bool
    """True if the call runs as one rank, False if as every rank of a simulation."""
    pairs: bool
    """True if any argument is a pair, so that the results are pairs."""
    arguments: tuple[Argument, ...] | None
    """None on a rank outside of the mesh."""


class MappedFunction:
    """A function mapped by `shard_map`, and the plans of its calls."""

    def __init__(
        self,
        fn: Callable[..., Any],
        where: str,
        mesh: Mesh | None,
        in_specs: Any,
        out_specs: Any,
        axis_names: frozenset[str] | None,
        *,
        redistribute_inputs: bool,
        check: bool | str,
    ) -> None:
        self.fn, self.mesh, self.axis_names, self.check = fn, mesh, axis_names, check
        self.in_specs, self.out_specs = (read_placements(x, mesh) for x in (in_specs, out_specs))
        self.redistribute_inputs = redistribute_inputs
        name = getattr(fn, "__name__", type(fn).__name__)
        self.where = f"{where.removeprefix('fs.')}({name})"
        self.signature = ArgSignature(fn)
        self.plans: BoundedDict[Key, BoundaryPlan] = BoundedDict()
        self.result_trees: BoundedDict[Key, ResultTree] = BoundedDict()
        # Specs of the returned tensors, by the plan and the results of all ranks.
        self.result_specs: BoundedDict[
            tuple[BoundaryPlan, tuple[ResultTree, ...]], tuple[Spec, ...]
        ] = BoundedDict()
        # Paths and specs of arguments, by their structure and the scopes that they were checked in.
        self.matched: BoundedDict[TreeDef, tuple[PathSpec, ...]] = BoundedDict()
        self.checked: BoundedDict[tuple[TreeDef, Scope], None] = BoundedDict()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call; with `check="collectives"` its collectives are compared."""
        args, kwargs = replaced_closures((args, kwargs))
        if is_recording_below_autograd():
            args, kwargs = planned(self, args, kwargs)
        recorder = MAP_RECORDER.get()
        if recorder is not None:
            return recorder(self, args, kwargs)
        outer = current_axes()
        if self.check != "collectives":
            return self._call(args, kwargs, outer)
        mesh = self.mesh or (outer and outer.mesh)
        with checked_collectives(mesh) if mesh else nullcontext():
            return self._call(args, kwargs, outer)

    def with_body(self, fn: Callable[..., Any]) -> MappedFunction:
        """Return `fn`, which has the same parameters, mapped with the same options."""
        other = MappedFunction(
            fn, "", self.mesh, self.in_specs, self.out_specs, self.axis_names,
            redistribute_inputs=self.redistribute_inputs, check=self.check)  # fmt: skip
        other.where, other.signature = self.where, self.signature
        return other

    def specs_of_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Spec | None, ...]:
        """Return the specs of the leaves of global arguments, None for those without one."""
        arguments = self._plan(args, kwargs, None, None).arguments
        return tuple([arg.spec for arg in arguments or ()])

    def scope_of_rank(self) -> Scope:
        """Return the scope of a call as this process's rank, outside of other calls."""
        return self._scope((), current_transport(), None)

    def rank_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MappedCall:
        """Return a call as this process's rank, outside of other calls."""
        plan = self._plan(args, kwargs, current_transport(), None)
        assert plan.arguments is not None
        return MappedCall(self, plan, plan.arguments, flatten((args, kwargs))[0], None)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], outer: BoundAxes | None) -> Any:
        """Look up or make the plan, and run the call as every rank or as this one."""
        transport = current_transport()
        tracker = None if outer is None else current_tracker()
        # Transports end with their simulation or process groups; their ranks recur.
        rank = None if transport is None else (transport.rank, is_simulated())
        key: list[Any] = [rank, torch.is_grad_enabled(), is_transformed()]
        if outer is not None:
            key += (outer.mesh, outer.axes, outer.uneven)
        values: list[Any] = []
        with pause_types(tracker):
            append_cache_key(args, values, key)
            if kwargs:
                append_cache_key(kwargs, values, key)
            plan = self.plans.get(tuple(key))
            if plan is None:
                plan = self.plans[tuple(key)] = self._plan(args, kwargs, transport, outer)
        if plan.arguments is None:
            return empty_results(plan.scope, self.out_specs, plan.pairs)
        if transport is None or not plan.transport:
            return MappedCall(self, plan, plan.arguments, values, None).run_all()
        check_inner(self.check, plan.scope, tracker, self.where)
        return MappedCall(self, plan, plan.arguments, values, tracker).run_one(transport)

    def _plan(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        transport: Transport | None,
        outer: BoundAxes | None,
    ) -> BoundaryPlan:
        """Plan a call; raise `ShardingError` for everything that is wrong with its arguments."""
        values, treedef = flatten((args, kwargs))
        path_specs = self.matched.get(treedef)
        if path_specs is None:
            self.signature.check(self.where, args, kwargs)
            path_specs = match_specs(self.where, self.signature, self.in_specs, args, kwargs)
            self.matched[treedef] = path_specs
        # The values decide who executes: a tuple of shards is a simulation, also inside a rank.
        pairs = [value for value in values if isinstance(value, Sharded)]
        if any(not isinstance(pair.local, torch.Tensor) for pair in pairs):
            transport = None
        scope = self._scope(pairs, transport, outer)
        if (treedef, scope) not in self.checked:
            check_specs(self.where, scope, path_specs, self.out_specs)
            self.checked[treedef, scope] = None
        if self.axis_names is None:  # local_map: None is the pair's layout
            path_specs = tuple(
                (path, value.spec if leaf is None and isinstance(value, Sharded) else leaf)
                for (path, leaf), value in zip(path_specs, values, strict=True)
            )
        arguments = None
        if transport is None or transport.rank in scope.mesh:
            options = self.redistribute_inputs, self.check is not False
            arguments = plan_arguments(self.where, path_specs, values, scope, transport, *options)
            scope = scope.with_uneven(uneven_axes(arguments), outer)
        return BoundaryPlan(scope, treedef, transport is not None, bool(pairs), arguments)

    def _scope(
        self,
        pairs: Sequence[Sharded],
        transport: Transport | None,
        outer: BoundAxes | None,
    ) -> Scope:
        rank = None if transport is None else transport.rank
        if self.axis_names is not None:
            outer = None if transport is None else outer
            return shard_map_scope(self.where, self.mesh, self.axis_names, outer, rank)
        named = [] if self.mesh is None else [self.mesh]
        meshes = list(dict.fromkeys([*named, *(pair.mesh for pair in pairs)]))
        if len(meshes) != 1:
            fail(self.where, f"pairs of {', '.join(map(str, meshes)) or 'no pair at all'}",
                 "all pairs must have one mesh, which is the one that is mapped over",
                 "fs.shard makes a pair of a tensor and a spec; or mesh=, without pairs",
            )  # fmt: skip
        return local_map_scope(meshes[0], outer, rank)

    def specs_of(self, tree: ResultTree) -> tuple[PathSpec, ...]:
        """Return path and out spec of every leaf of results; raise if they are not a prefix."""
        if tree.out_specs is None:
            skeleton = unflatten(tree.treedef, list(range(tree.treedef.num_leaves)))
            specs = broadcast_prefix(self.out_specs, skeleton, "out_specs", self.where)
            tree.out_specs = tuple(zip(paths(skeleton, "result"), specs, strict=True))
        return tree.out_specs


class MappedCall:
    """One call: runs the function on the locals of ranks, and assembles the results.

    Attributes:
        outer: the tracker of the types of the enclosing body, if this is a call in one.
        returned: by rank, the tree of its results and their leaves, `TENSOR` for tensors.
    """

    def __init__(
        self,
        function: MappedFunction,
        plan: BoundaryPlan,
        arguments: Sequence[Argument],
        values: Sequence[Any],
        outer: Tracker | None,
    ) -> None:
        self.function, self.plan, self.scope = function, plan, plan.scope
        self.arguments, self.values = arguments, values
        self.outer = outer
        self.returned: dict[int, tuple[ResultTree, list[Any]]] = {}

    # -- ranks --------------------------------------------------------------------------

    def run_all(self) -> Any:
        """Run as every rank of a simulation."""
        where, mesh, typed = self.function.where, self.scope.mesh, self.function.check is not False
        with at_boundary(where, mesh):
            slots, flat = slots_of(self.arguments, self.values)
        share = functools.partial(closure_input, where, mesh, typed)
        fn, check = self.function.fn, self.check_agreement
        with checkpoint_form():
            columns = map_ranks(self.scope, self.body, slots, flat, fn, check, share)
        self.values = ()  # the call, which autograd keeps, must not keep its arguments
        returned = list(map(self.returned.__getitem__, mesh.ranks))
        return self.assemble(returned, columns, None)

    def run_one(self, transport: Transport) -> Any:
        """Run as the one rank that this process, or this simulated rank, is."""
        with pause_types(self.outer):
            locals_ = self.locals_()
        try:
            outs = run_body(self.scope, self.body, transport.rank, locals_)
        except BaseException as error:
            blame(error, self.scope.named_mesh)
            raise
        return self.assemble([self.returned[transport.rank]], outs, transport)

    def locals_(self) -> tuple[Any, ...]:
        """Return this rank's locals of the arguments that have a spec."""
        arguments = zip(self.arguments, self.values, strict=True)
        with at_boundary(self.function.where, self.scope.mesh):
            return tuple([arg.to_local(x) for arg, x in arguments if arg.spec is not None])

    def body(self, rank: int, locals_: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Call the function as one rank, and return the tensors of its result in order."""
        function = self.function
        args, kwargs = self.local_tree(locals_)
        tracker = self.outer or new_tracker(function.check, self.scope, function.where)
        if tracker is None:
            return self.typed_result(None, rank, call_function(function.fn, args, kwargs))
        set_argument_types(tracker, self.scope, self.arguments, self.values, locals_)
        with track_body(tracker, inner=self.outer is not None):
            return self.typed_result(tracker, rank, call_function(function.fn, args, kwargs))

    def typed_result(
        self, tracker: Tracker | None, rank: int, result: Any
    ) -> tuple[torch.Tensor, ...]:
        """Record the result of the function on a rank, and return its tensors, types checked."""
        if tracker is None:
            return self.record_result(rank, result)[1]
        with tracker.pause():
            tree, ys = self.record_result(rank, result)
        path_specs = self.function.specs_of(tree)
        promised = [path_specs[index] for index in tree.tensor_indices]
        return check_result_types(tracker, self.scope, promised, ys, self.non_tensors(rank))

    def local_tree(self, locals_: tuple[torch.Tensor, ...]) -> Any:
        """Return one rank's arguments: locals, and the values without a spec."""
        leaves: Sequence[Any] = locals_
        if len(locals_) != len(self.values):
            remaining = iter(locals_)
            arguments = zip(self.arguments, self.values, strict=True)
            leaves = [value if arg.spec is None else next(remaining) for arg, value in arguments]
        return unflatten(self.plan.treedef, leaves)

    def record_result(self, rank: int, result: Any) -> tuple[ResultTree, tuple[torch.Tensor, ...]]:
        """Return the tree and tensors of one rank's result; the other leaves are recorded."""
        leaves: list[Any] = []
        key: list[Any] = []
        append_cache_key(result, leaves, key)
        trees = self.function.result_trees
        tree = trees.get(tuple(key))
        if tree is None:
            tensors = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
            raise_if(self.function.where, result_problems(result, leaves))
            tree = trees[tuple(key)] = ResultTree(flatten(result)[1], tensors)
        ys = tuple([leaves[index] for index in tree.tensor_indices])
        for index in tree.tensor_indices:
            leaves[index] = TENSOR
        self.returned[rank] = tree, leaves
        return tree, ys

    def non_tensors(self, rank: int) -> list[NonTensor]:
        """Return path and value of the leaves of one rank's result that are not tensors."""
        tree, leaves = self.returned[rank]
        if len(leaves) == len(tree.tensor_indices):
            return []
        path_specs = self.function.specs_of(tree)
        return [(path_specs[i][0], leaf) for i, leaf in enumerate(leaves) if leaf is not TENSOR]

    # -- results ------------------------------------------------------------------------

    def check_agreement(self) -> None:
        """Raise `ShardingError` unless all ranks returned one structure, with equal values."""
        where, ranks = self.function.where, self.scope.mesh.ranks
        first, leaves = self.returned[ranks[0]]
        for rank in ranks:
            tree, others = self.returned[rank]
            if tree is first and len(leaves) == len(first.tensor_indices):
                continue
            if tree.treedef != first.treedef or tree.tensor_indices != first.tensor_indices:
                fail(where, f"rank {ranks[0]} returned {first.treedef}, rank {rank} {tree.treedef}",
                     "every rank must return the same structure",
                     "return the same tree on every rank")  # fmt: skip
            path_specs = self.function.specs_of(first)
            for (path, _), a, b in zip(path_specs, leaves, others, strict=True):
                if a is not b and not _is_equal(a, b):
                    raise_if(
                        where, [non_tensor_problem(path, (ranks[0], repr(a)), (rank, repr(b)))]
                    )

    def assemble(
        self,
        returned: Sequence[tuple[ResultTree, list[Any]]],
        columns: Sequence[Any],
        transport: Transport | None,
    ) -> Any:
        """Return the result tree: with pairs if any argument is one, else global tensors.

        `columns` are the tensors of this rank, or for each tensor the shards of all ranks.
        """
        tree, leaves = returned[0]
        key = self.plan, tuple([tree for tree, _ in returned])
        specs = self.function.result_specs.get(key)
        if specs is None:
            specs = self.function.result_specs[key] = self.specs(tree, leaves, columns, transport)
        if transport is None and self.function.check is not False:
            path_specs = self.function.specs_of(tree)
            path_specs = tuple(map(path_specs.__getitem__, tree.tensor_indices))
            check_replicas(self.function.where, path_specs, specs, columns)
        tensors: list[Any] = list(map(Sharded, columns, specs))
        if not self.plan.pairs:
            with pause_types(self.outer), at_boundary(self.function.where, self.scope.mesh):
                tensors = list(map(_unshard, tensors))
        if self.outer is not None:
            set_result_types(self.outer, self.scope, columns, tensors)
        values = list(leaves)  # the call, which autograd keeps, must not keep its results
        for index, value in zip(tree.tensor_indices, tensors, strict=True):
            values[index] = value
        return unflatten(tree.treedef, values)

    def specs(
        self,
        tree: ResultTree,
        leaves: Sequence[Any],
        columns: Sequence[Any],
        transport: Transport | None,
    ) -> tuple[Spec, ...]:
        """Return the specs of the tensors in results; raise `ShardingError` for bad out specs."""
        where, path_specs = self.function.where, self.function.specs_of(tree)
        others = [(*path_specs[i], leaf) for i, leaf in enumerate(leaves) if leaf is not TENSOR]
        check_non_tensors(where, others)
        rows = [(*path_specs[i], x) for i, x in zip(tree.tensor_indices, columns, strict=True)]
        with pause_types(self.outer):
            return tuple(result_specs(where, rows, self.arguments, self.scope, transport))


def _unshard(pair: Sharded) -> torch.Tensor:
    """Return the global tensor of a result."""
    local, spec = pair
    is_symbolic = isinstance(local, torch.Tensor) and has_symbolic_sizes(local)
    return unshard_blocks(local, spec) if is_symbolic else unshard(pair)


def _is_equal(a: Any, b: Any) -> bool:
    """Return True for equal results of two ranks that are not one object; NaN is NaN.

    Arrays are compared by shape and element, pairs by identity.
    """
    if isinstance(a, Sharded) or getattr(a, "shape", None) != getattr(b, "shape", None):
        return False
    if isinstance(a, float) and a != a:
        return bool(b != b)
    same = a == b
    if hasattr(same, "all"):
        same = (same | ((a != a) & (b != b))).all()
    return bool(same)
