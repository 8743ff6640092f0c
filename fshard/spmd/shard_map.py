"""`shard_map` and `local_map`: a per-device function, mapped over the shards of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fshard._util.errors import fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Sharded, Spec
from fshard.layout.tree import (
    TreeDef,
    broadcast_prefix,
    flatten,
    is_pair,
    outline,
    paths,
    unflatten,
)
from fshard.run.global_tensors import unshard
from fshard.run.transports.base import Transport, current_transport, is_simulated
from fshard.run.transports.divergence_check import checked_collectives
from fshard.run.transports.divergence_report import blame
from fshard.spmd.axis_env import current_axes, current_tracker
from fshard.spmd.boundary import check_others, check_specs, nothing, place_all, result_specs
from fshard.spmd.in_specs import ArgSignature, Argument, PathSpec, match_specs
from fshard.spmd.mesh_scope import (
    Scope,
    check_axis_names,
    check_check,
    check_mesh,
    local_map_scope,
    refuse_unknown_options,
    shard_map_scope,
)
from fshard.spmd.simulated_map import check_untransformed, map_ranks, run_body
from fshard.spmd.tracking.out_spec_check import Other, other_problem
from fshard.spmd.tracking.tracker import Tracker
from fshard.spmd.tracking.typed_body import (
    check_inner,
    enter_types,
    give_types,
    leave_types,
    new_tracker,
    paused,
    typed,
)

__all__ = ["local_map", "map_function", "shard_map"]

T = TypeVar("T")
Key = tuple[Any, ...]

MOST = 256
"""Of what calls and results have in common, so many are kept."""
TENSOR = object()
"""In place of a tensor, among what a rank returned."""


def shard_map(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    in_specs: Any,
    out_specs: Any,
    mesh: Mesh | None = None,
    axis_names: Iterable[str] = frozenset(),
    redistribute_inputs: bool = False,
    check: bool | str = True,
    **unknown: Any,
) -> Any:
    """Map a per-device function over shards of global values; call or decorator form.

    `in_specs` is a tree prefix of the arguments by position (one `P` for all, or a tuple), or a
    mapping from parameter names; arguments may be given by keyword. `out_specs` is a prefix of
    the result. A leaf is a `P`, a `Spec`, or `None` for what is no tensor and passes through:
    in it is the same object on every rank, out it is equal on every rank. A tensor argument is a
    global value that this process holds whole, a pair one that it holds its part of; if any
    argument is a pair, the results are pairs. Mentioned axes cut a dim or are unreduced or
    reduced, unmentioned ones promise equal values; outputs never communicate, but to become
    global. With `redistribute_inputs` a pair of another spec is first brought to the one asked
    for; without, that is an error that prints the program. Ranks outside of the mesh get empty
    results, in the shape of `out_specs`.

    `axis_names`, a set or tuple, are the axes that are mapped, which alone specs may name and
    the body may use; along the others every rank computes the same. None at all means all.
    In the body of another `shard_map` further axes of the same mesh are mapped, `mesh=None`
    takes it, and an argument is a value that this rank holds whole: it is cut and put together
    among the ranks that differ in the further axes alone. The body may name all mapped axes.
    A pair that is made there lies on the axes not mapped yet, or on all of the mesh and then has
    the same on every rank along the mapped ones.

    An argument enters invariant along the axes its spec leaves out: to use it with values that
    vary there takes `fs.pcast(x, axis, to="varying")`, whose transpose is the sum. So does a
    tensor that the function closes over, the parameters of a module, say: gradients reach it.
    With `check=True` the types of all tensors are tracked (`fs.typeof`), that cast is inserted,
    once for each tensor, and out specs are promises that the types must show. What the host learns
    of values that vary (`if`, `.item()`) is allowed: results that may depend on it are then
    compared by value, numbers and strings too. `check="strict"` inserts nothing that changes a
    gradient: it names the line and the cast to write, and what it passes is the same with
    `check=False`, which tracks nothing and costs nothing. `check="values"` also compares what is
    promised to be equal, of arguments and results, and names the first element that differs and its
    ranks. Under torchrun `check="collectives"` also compares every collective among its ranks
    before it is launched: ranks that part ways say who is where instead of hanging, as they always
    do in a simulation. Inside another `shard_map` the check of that holds, and one of "strict" or
    "values" that it has not is refused. With a check the body may not write into its arguments;
    with `check=False` it may, and writes into the caller's own memory where a local shares it, as
    that of a pair does.

    Semantics after `jax.shard_map` (JAX 0.11). Raises `ShardingError` for specs that do not fit
    the mesh, the arguments or the results, naming each by its path.

    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=2)
    >>> @shard_map(mesh=mesh, in_specs=(fs.P(None, "x"), fs.P("x")), out_specs=fs.P())
    ... def matmul(a, b):
    ...     return fs.psum(a @ b, "x")
    >>> matmul(torch.ones(2, 4), torch.ones(4, 3))
    tensor([[4., 4., 4.],
            [4., 4., 4.]])
    """
    where = "fs.shard_map"
    refuse_unknown_options(unknown, where)
    check_mesh(mesh, where)
    names = check_axis_names(axis_names, mesh, where)
    options: dict[str, Any] = {"redistribute_inputs": redistribute_inputs, "check": check}
    return map_function(fn, where, mesh, in_specs, out_specs, names, **options)


def local_map(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    in_specs: Any,
    out_specs: Any,
    redistribute_inputs: bool = False,
) -> Any:
    """Map a function of locals over pairs: pairs in, pairs out; the mesh is the pairs' own.

    As `shard_map` with `check=False` otherwise. In the body of a `shard_map` too the mesh is that
    of the pairs: all of it is mapped, whether the pair was made on the whole mesh (`fs.from_local`
    of what varies makes one) or on a part of it, and if it is a part, the axes mapped around it
    can still be named. After `torch.distributed.tensor.experimental.local_map`.

    >>> import fshard as fs
    >>> pair = fs.shard(torch.arange(4.0), fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,)))
    >>> double = local_map(lambda x: 2 * x, in_specs=fs.P("x"), out_specs=fs.P("x"))
    >>> fs.unshard(double(pair))
    tensor([0., 2., 4., 6.])
    """
    options: dict[str, Any] = {"redistribute_inputs": redistribute_inputs, "check": False}
    return map_function(fn, "fs.local_map", None, in_specs, out_specs, None, **options)


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
    """`fn` mapped, or the decorator that does it; `axis_names` of None are all of the pairs'."""
    options: Any = {"redistribute_inputs": redistribute_inputs, "check": check}
    check_check(check, where)
    if fn is None:
        return lambda fn: map_function(fn, where, mesh, in_specs, out_specs, axis_names, **options)
    if not callable(fn):
        fail(where, f"{fn!r}", "the first argument is a function", f"{where}(fn, ...)")
    mapping = _Mapping(fn, where, mesh, in_specs, out_specs, axis_names, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        return mapping.call(args, kwargs)

    # A module's attributes stay its own.
    return functools.update_wrapper(call, fn, updated=())


@dataclass(slots=True, eq=False)
class _Returned:
    """What results of one outline have in common."""

    treedef: TreeDef
    places: tuple[int, ...]
    """Those of the tensors among the leaves."""


@dataclass(slots=True, eq=False)
class _Plan:
    """What calls of one outline have in common: all that depends on no numbers."""

    scope: Scope
    treedef: TreeDef
    transport: bool
    """Whether the call runs as one rank, else as every rank of a simulation."""
    pairs: bool
    """Whether any argument is a pair, so that results are."""
    arguments: tuple[Argument, ...] | None
    """None on a rank outside of the mesh."""


def _keep(cache: dict[Any, T], key: Any, value: T) -> T:
    if len(cache) >= MOST:
        cache.clear()
    cache[key] = value
    return value


class _Mapping:
    """A mapped function, and the plans of its calls."""

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
        self.in_specs, self.out_specs = in_specs, out_specs
        self.redistribute_inputs = redistribute_inputs
        name = getattr(fn, "__name__", type(fn).__name__)
        self.where = f"{where.removeprefix('fs.')}({name})"
        self.signature = ArgSignature(fn)
        self.plans: dict[Key, _Plan] = {}
        self.returned: dict[Key, _Returned] = {}
        # Of the tensors that were returned, by plan and by what every rank returned.
        self.specs: dict[tuple[_Plan, tuple[_Returned, ...]], tuple[Spec, ...]] = {}
        # By the structures of arguments and results, and by where the call was made.
        self.slots_in: dict[TreeDef, tuple[PathSpec, ...]] = {}
        self.slots_out: dict[TreeDef, tuple[PathSpec, ...]] = {}
        self.checked: dict[tuple[TreeDef, Scope], None] = {}

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call; with `check="collectives"` its collectives are compared."""
        if self.check != "collectives":
            return self._call(args, kwargs)
        outer = current_axes()
        mesh = self.mesh or (outer and outer.mesh)
        with checked_collectives(mesh) if mesh else nullcontext():
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Place the arguments, run the function as every rank or as this one, read the results."""
        transport, outer, tracker = current_transport(), current_axes(), current_tracker()
        # A simulated rank's transport lives as long as the simulation, its number comes again.
        who = transport.rank if transport is not None and is_simulated() else transport
        key: list[Any] = [who, torch.is_grad_enabled()]
        if outer is not None:
            key += (outer.mesh, outer.axes)
        values: list[Any] = []
        with paused(tracker):
            outline(args, values, key)
            if kwargs:
                outline(kwargs, values, key)
            plan = self.plans.get(tuple(key))
            if plan is None:
                plan = _keep(self.plans, tuple(key), self._plan(args, kwargs, transport))
        if plan.arguments is None:
            return nothing(plan.scope, self.out_specs, plan.pairs)
        if transport is None or not plan.transport:
            return _Call(self, plan, plan.arguments, values, None).as_all()
        check_inner(self.check, plan.scope, tracker, self.where)
        return _Call(self, plan, plan.arguments, values, tracker).as_one(transport)

    def _plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], transport: Transport | None
    ) -> _Plan:
        """The plan of a call; raises `ShardingError` for all that is wrong with its arguments."""
        values, treedef = flatten((args, kwargs))
        slots = self.slots_in.get(treedef)
        if slots is None:
            slots = match_specs(self.where, self.signature, self.in_specs, args, kwargs)
            _keep(self.slots_in, treedef, slots)
        # The values decide who executes: a tuple of shards is a simulation, inside a rank too.
        pairs = [value for value in values if is_pair(value)]
        if any(not isinstance(pair[0], torch.Tensor) for pair in pairs):
            transport = None
        scope = self._scope(pairs, transport)
        if (treedef, scope) not in self.checked:
            check_specs(self.where, scope, slots, self.out_specs)
            _keep(self.checked, (treedef, scope), None)
        arguments = None
        if transport is None or transport.rank in scope.mesh:
            free = self.redistribute_inputs
            arguments = place_all(self.where, slots, values, scope, transport, free)
        return _Plan(scope, treedef, transport is not None, bool(pairs), arguments)

    def _scope(self, pairs: Sequence[tuple[Any, Spec]], transport: Transport | None) -> Scope:
        outer = None if transport is None else current_axes()
        rank = None if transport is None else transport.rank
        if self.axis_names is not None:
            return shard_map_scope(self.where, self.mesh, self.axis_names, outer, rank)
        meshes = list(dict.fromkeys(spec.mesh for _, spec in pairs))
        if len(meshes) != 1:
            given = ", ".join(map(str, meshes)) or "no pair at all"
            fail(
                self.where,
                f"pairs of {given}",
                "the mesh is that of the pairs, one for all",
                "fs.shard makes a pair of a tensor and a spec",
            )
        return local_map_scope(meshes[0], outer, rank)

    def results(self, treedef: TreeDef) -> tuple[PathSpec, ...]:
        """Path and out spec of every leaf of a result; raises `ShardingError` for no prefix."""
        slots = self.slots_out.get(treedef)
        if slots is None:
            skeleton = unflatten(treedef, list(range(treedef.num_leaves)))
            specs = broadcast_prefix(self.out_specs, skeleton, "out_specs", self.where)
            slots = tuple(zip(paths(skeleton, "result"), specs, strict=True))
            _keep(self.slots_out, treedef, slots)
        return slots


class _Call:
    """One call: the function on one rank's locals, and what its results mean."""

    def __init__(
        self,
        mapping: _Mapping,
        plan: _Plan,
        arguments: Sequence[Argument],
        values: Sequence[Any],
        outer: Tracker | None,
    ) -> None:
        self.mapping, self.plan, self.scope = mapping, plan, plan.scope
        self.arguments, self.values = arguments, values
        # What tracks the types of the enclosing body, if this is a call in one.
        self.outer = outer
        # By rank that ran: what its result has in common with others, and what in it is no tensor.
        self.returned: dict[int, tuple[_Returned, list[Any]]] = {}

    # -- as ranks -----------------------------------------------------------------------

    def locals_(self) -> tuple[Any, ...]:
        """The locals of all ranks or of this one, without what passes through."""
        with paused(self.outer):
            arguments = zip(self.arguments, self.values, strict=True)
            return tuple([each.to_local(x) for each, x in arguments if each.spec is not None])

    def as_all(self) -> Any:
        """Run as every rank of a simulation."""
        check_untransformed(self.mapping.where)
        mapped, ranks = self.locals_(), self.scope.mesh.ranks
        rows = list(zip(*mapped, strict=True)) if mapped else [()] * len(ranks)
        outs = map_ranks(self.scope, self.body, rows, self.mapping.fn, self.agree)
        return self.read(
            [self.returned[rank] for rank in ranks], list(zip(*outs, strict=True)), None
        )

    def as_one(self, transport: Transport) -> Any:
        """Run as the one rank that this process, or this simulated rank, is."""
        mine = self.locals_()
        try:
            outs = run_body(self.scope, self.body, mine)
        except BaseException as error:
            blame(error, self.scope.named_mesh)
            raise
        return self.read([self.returned[transport.rank]], outs, transport)

    def body(self, locals_: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Call the function as one rank; its tensors, in order."""
        args, kwargs = unflatten(self.plan.treedef, self.enter(locals_))
        check = self.mapping.check
        tracker = self.outer or new_tracker(check, self.scope, self.mapping.where)
        if tracker is None:
            return self.leave(self.mapping.fn(*args, **kwargs))
        enter_types(tracker, self.scope, self.arguments, self.values, locals_)
        with typed(tracker, inner=self.outer is not None):
            result = self.mapping.fn(*args, **kwargs)
            with tracker.pause():
                ys = self.leave(result)
            return leave_types(tracker, self.scope, self.promised(), ys, self.others())

    def enter(self, locals_: tuple[torch.Tensor, ...]) -> Sequence[Any]:
        """What one rank's body gets: the local of each argument, what has no spec as it is."""
        if len(locals_) == len(self.values):
            return locals_
        mine = iter(locals_)
        arguments = zip(self.arguments, self.values, strict=True)
        return [value if each.spec is None else next(mine) for each, value in arguments]

    def leave(self, result: Any) -> tuple[torch.Tensor, ...]:
        """What one rank's body gives: its tensors; the rest is kept for all of them."""
        kept: list[Any] = []
        key: list[Any] = []
        outline(result, kept, key)
        cache = self.mapping.returned
        returned = cache.get(tuple(key))
        if returned is None:
            places = tuple(at for at, leaf in enumerate(kept) if isinstance(leaf, torch.Tensor))
            returned = _Returned(flatten(result)[1], places)
            _keep(cache, tuple(key), returned)
        ys = tuple([kept[at] for at in returned.places])
        for at in returned.places:
            kept[at] = TENSOR
        self.returned[_rank()] = returned, kept
        return ys

    def promised(self) -> list[PathSpec]:
        """Path and out spec of the tensors that this rank's body has given."""
        returned, _ = self.returned[_rank()]
        slots = self.mapping.results(returned.treedef)
        return [slots[at] for at in returned.places]

    def others(self) -> list[Other]:
        """Path and value of what this rank's body has given that is no tensor."""
        returned, kept = self.returned[_rank()]
        if len(kept) == len(returned.places):
            return []
        slots = self.mapping.results(returned.treedef)
        return [(slots[at][0], x) for at, x in enumerate(kept) if x is not TENSOR]

    # -- results ------------------------------------------------------------------------

    def agree(self) -> None:
        """Raise `ShardingError` unless all ranks returned one structure, with equal numbers."""
        where, ranks = self.mapping.where, self.scope.mesh.ranks
        first, kept = self.returned[ranks[0]]
        for rank in ranks:
            each, others = self.returned[rank]
            if each.treedef != first.treedef or each.places != first.places:
                fail(
                    where,
                    f"rank {ranks[0]} returned {first.treedef}, rank {rank} {each.treedef}",
                    "every rank returns the same structure",
                    "return the same tree on every rank",
                )
            slots = self.mapping.results(first.treedef)
            for (path, _), a, b in zip(slots, kept, others, strict=True):
                if a is not b and not _equal(a, b):
                    raise_if(where, [other_problem(path, (ranks[0], repr(a)), (rank, repr(b)))])

    def read(
        self,
        returned: Sequence[tuple[_Returned, list[Any]]],
        columns: Sequence[Any],
        transport: Transport | None,
    ) -> Any:
        """The result tree: pairs if any argument was one, else global tensors."""
        first, kept = returned[0]
        key = self.plan, tuple([each for each, _ in returned])
        specs = self.mapping.specs.get(key)
        if specs is None:
            specs = self.specs(first, kept, columns, transport)
            _keep(self.mapping.specs, key, specs)
        found: list[Any] = list(map(Sharded, columns, specs))
        if not self.plan.pairs:
            with paused(self.outer):
                found = list(map(unshard, found))
        if self.outer is not None:
            give_types(self.outer, self.scope, columns, found)
        leaves = list(kept)
        for at, value in zip(first.places, found, strict=True):
            leaves[at] = value
        return unflatten(first.treedef, leaves)

    def specs(
        self,
        returned: _Returned,
        kept: Sequence[Any],
        columns: Sequence[Any],
        transport: Transport | None,
    ) -> tuple[Spec, ...]:
        """The specs of the tensors among results; raises `ShardingError` for what has none."""
        where, slots = self.mapping.where, self.mapping.results(returned.treedef)
        others = [(*slots[at], leaf) for at, leaf in enumerate(kept) if leaf is not TENSOR]
        check_others(where, others)
        rows = [(*slots[at], x) for at, x in zip(returned.places, columns, strict=True)]
        with paused(self.outer):
            found = result_specs(where, rows, self.arguments, self.scope, transport)
        return tuple(found)


def _rank() -> int:
    transport = current_transport()
    assert transport is not None
    return transport.rank


def _equal(a: Any, b: Any) -> bool:
    """Whether two ranks returned the same: arrays of equal elements are, and so is no number."""
    if isinstance(a, float) and a != a:
        return bool(b != b)
    same = a == b
    return bool(same.all() if hasattr(same, "all") else same)
