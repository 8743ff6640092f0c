"""`shard_map` and `local_map`: a per-device function, mapped over the shards of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fshard.errors import fail
from fshard.mesh import Mesh
from fshard.partition import PartitionSpec
from fshard.run.checked import checked_collectives
from fshard.run.fingerprint import blame
from fshard.run.transport import Transport, current_transport
from fshard.spec import Sharded, Spec
from fshard.spmd.arguments import Argument, AtDim, Signature, Slot, match_specs
from fshard.spmd.axes import innermost, tracking
from fshard.spmd.boundary import check_others, check_specs, place_all, read_results
from fshard.spmd.mapped import map_ranks, run_body
from fshard.spmd.scope import Scope, check_axis_names, check_mesh, pair_scope, scope_of
from fshard.spmd.tracking import Tracker
from fshard.spmd.typed import enter_types, give_types, leave_types, new_tracker, paused, typed
from fshard.tree import TreeDef, broadcast_prefix, flatten, is_pair, map_leaves, paths, unflatten

__all__ = ["local_map", "mapped", "shard_map"]

MOST_STRUCTURES = 256
CHECKS = ("strict", "values", "collectives")
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
    once for each tensor, and out specs are promises that the types must show. What the host
    learns of values that vary (`if`, `.item()`) is allowed: what depends on it is then compared
    by value. `check="strict"` inserts nothing that changes a gradient: it names the line and the
    cast to write, and what it passes is the same with `check=False`, which tracks nothing and
    costs nothing. `check="values"` also compares what is promised to be equal, of arguments and
    results, and names the first element that differs and its ranks. Under torchrun
    `check="collectives"` also compares every collective among its ranks before it is launched:
    ranks that part ways say who is where instead of hanging, as they always do in a simulation.
    Inside another `shard_map` the types of that are tracked on.

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
    if not (check is True or check is False or check in CHECKS):
        fail(where, f"check={check!r}", f"check is True, False, {' or '.join(map(repr, CHECKS))}",
             "leave it out: True")  # fmt: skip
    check_mesh(mesh, where)
    names = check_axis_names(axis_names, where)
    options = {"redistribute_inputs": redistribute_inputs, "check": check}
    return mapped(fn, where, mesh, in_specs, out_specs, names, **options)


def local_map(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    in_specs: Any,
    out_specs: Any,
    redistribute_inputs: bool = False,
) -> Any:
    """Map a function of locals over pairs: pairs in, pairs out; the mesh is the pairs' own.

    As `shard_map` otherwise. In the body of a `shard_map` too the mesh is that of the pairs: all
    of it is mapped, whether the pair was made on the whole mesh (`fs.from_local` of what varies
    makes one) or on a part of it, and if it is a part, the axes mapped around it can still be
    named. After `torch.distributed.tensor.experimental.local_map`.

    >>> import fshard as fs
    >>> pair = fs.shard(torch.arange(4.0), fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,)))
    >>> double = local_map(lambda x: 2 * x, in_specs=fs.P("x"), out_specs=fs.P("x"))
    >>> fs.unshard(double(pair))
    tensor([0., 2., 4., 6.])
    """
    options = {"redistribute_inputs": redistribute_inputs, "check": False}
    return mapped(fn, "fs.local_map", None, in_specs, out_specs, None, **options)


def mapped(
    fn: Callable[..., Any] | None,
    where: str,
    mesh: Mesh | None,
    in_specs: Any,
    out_specs: Any,
    axis_names: frozenset[str] | None,
    **options: Any,
) -> Any:
    """`fn` mapped, or the decorator that does it; `axis_names` of None are all of the pairs'."""
    if fn is None:
        return lambda each: mapped(each, where, mesh, in_specs, out_specs, axis_names, **options)
    if not callable(fn):
        fail(where, f"{fn!r}", "the first argument is a function", f"{where}(fn, ...)")
    mapping = _Mapping(fn, where, mesh, in_specs, out_specs, axis_names, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        return mapping.call(args, kwargs)

    # A module's attributes stay its own.
    return functools.update_wrapper(call, fn, updated=())


class _Mapping:
    """A mapped function, and what its calls need that depends on no values."""

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
        self.signature = Signature(fn)
        # By the structures of arguments and results, and by where the call was made.
        self.slots_in: dict[TreeDef, tuple[Slot, ...]] = {}
        self.slots_out: dict[TreeDef, tuple[Slot, ...]] = {}
        self.checked: set[tuple[TreeDef, Scope]] = set()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call; with `check="collectives"` its collectives are compared."""
        if self.check != "collectives":
            return self._call(args, kwargs)
        outer = innermost()
        mesh = self.mesh or (outer and outer.mesh)
        with checked_collectives(mesh) if mesh else nullcontext():
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Place the arguments, run the function as every rank or as this one, read the results."""
        leaves, treedef = flatten((args, kwargs))
        slots = self.slots_in.get(treedef)
        if slots is None:
            slots = match_specs(self.where, self.signature, self.in_specs, args, kwargs)
            _keep(self.slots_in, treedef, slots)
        arguments = [Argument(*slot, leaf) for slot, leaf in zip(slots, leaves, strict=True)]
        # The values decide who executes: a tuple of shards is a simulation, inside a rank too.
        pairs = [leaf for leaf in leaves if is_pair(leaf)]
        whole = any(not isinstance(pair[0], torch.Tensor) for pair in pairs)
        transport = None if whole else current_transport()
        scope = self._scope(pairs, transport)
        if (treedef, scope) not in self.checked:
            check_specs(self.where, scope, slots, self.out_specs)
            if len(self.checked) >= MOST_STRUCTURES:
                self.checked.clear()
            self.checked.add((treedef, scope))
        if transport is not None and transport.rank not in scope.mesh:
            return self._nothing(scope, bool(pairs))
        outer = None if transport is None else tracking()
        with paused(outer):
            place_all(self.where, arguments, scope, transport, self.redistribute_inputs)
        call = _Call(self, scope, arguments, treedef, outer)
        return call.as_all() if transport is None else call.as_one(transport)

    def _scope(self, pairs: Sequence[tuple[Any, Spec]], transport: Transport | None) -> Scope:
        outer = None if transport is None else innermost()
        rank = None if transport is None else transport.rank
        if self.axis_names is not None:
            return scope_of(self.where, self.mesh, self.axis_names, outer, rank)
        meshes = list(dict.fromkeys(spec.mesh for _, spec in pairs))
        if len(meshes) != 1:
            given = ", ".join(map(str, meshes)) or "no pair at all"
            fail(
                self.where,
                f"pairs of {given}",
                "the mesh is that of the pairs, one for all",
                "fs.shard makes a pair of a tensor and a spec",
            )
        return pair_scope(meshes[0], outer, rank)

    def _nothing(self, scope: Scope, pairs: bool) -> Any:
        """What a rank outside of the mesh gets: empty results in the shape of `out_specs`."""

        def leaf(given: Any) -> Any:
            if given is None:
                return None
            empty = torch.empty(0)
            if not pairs:
                return empty
            if isinstance(given, Spec):
                return Sharded(empty, given)
            p: PartitionSpec = given.smallest if isinstance(given, AtDim) else given
            return Sharded(empty, Spec(scope.mesh, p, shape=(0,) * len(p)))

        return map_leaves(leaf, self.out_specs)

    def results(self, treedef: TreeDef) -> tuple[Slot, ...]:
        """Path and out spec of every leaf of a result; raises `ShardingError` for no prefix."""
        slots = self.slots_out.get(treedef)
        if slots is None:
            skeleton = unflatten(treedef, list(range(treedef.num_leaves)))
            specs = broadcast_prefix(self.out_specs, skeleton, "out_specs", self.where)
            slots = tuple(zip(paths(skeleton, "result"), specs, strict=True))
            _keep(self.slots_out, treedef, slots)
        return slots


def _keep(cache: dict[TreeDef, tuple[Slot, ...]], key: TreeDef, slots: tuple[Slot, ...]) -> None:
    if len(cache) >= MOST_STRUCTURES:
        cache.clear()
    cache[key] = slots


class _Call:
    """One call: the function on one rank's locals, and what its results mean."""

    def __init__(
        self,
        mapping: _Mapping,
        scope: Scope,
        arguments: Sequence[Argument],
        treedef: TreeDef,
        outer: Tracker | None,
    ) -> None:
        self.mapping, self.scope, self.arguments, self.treedef = mapping, scope, arguments, treedef
        # What tracks the types of the enclosing body, if this is a call in one.
        self.outer = outer
        # Per rank that ran: the structure of its result, and in place of tensors `TENSOR`.
        self.returned: list[tuple[TreeDef, list[Any]]] = []

    # -- as ranks -----------------------------------------------------------------------

    def as_all(self) -> Any:
        """Run as every rank of a simulation."""
        mapped = [each.local for each in self.arguments if each.spec is not None]
        ranks = self.scope.mesh.size
        rows = list(zip(*mapped, strict=True)) if mapped else [()] * ranks
        outs = map_ranks(self.scope, self.body, rows, self.mapping.fn, self.agree)
        return self.read(list(zip(*outs, strict=True)), None)

    def as_one(self, transport: Transport) -> Any:
        """Run as the one rank that this process, or this simulated rank, is."""
        mine = tuple(each.local for each in self.arguments if each.spec is not None)
        try:
            outs = run_body(self.scope, self.body, mine)
        except BaseException as error:
            blame(error, self.scope.names)
            raise
        return self.read(outs, transport)

    def body(self, locals_: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Call the function as one rank; its tensors, in order."""
        args, kwargs = unflatten(self.treedef, self.enter(locals_))
        tracker = self.outer or new_tracker(self.mapping.check, self.scope, self.mapping.where)
        if tracker is None:
            return self.leave(self.mapping.fn(*args, **kwargs))
        enter_types(tracker, self.scope, self.arguments, locals_)
        with typed(tracker, inner=self.outer is not None):
            ys = self.leave(self.mapping.fn(*args, **kwargs))
            treedef, kept = self.returned[-1]
            slots = [
                slot
                for slot, leaf in zip(self.mapping.results(treedef), kept, strict=True)
                if leaf is TENSOR
            ]
            return leave_types(tracker, self.scope, slots, ys)

    def enter(self, locals_: tuple[torch.Tensor, ...]) -> list[Any]:
        """What one rank's body gets: the local of each argument, what has no spec as it is."""
        mine = iter(locals_)
        return [each.value if each.spec is None else next(mine) for each in self.arguments]

    def leave(self, result: Any) -> tuple[torch.Tensor, ...]:
        """What one rank's body gives: its tensors; the rest is kept for all of them."""
        out, treedef = flatten(result)
        kept = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in out]
        self.returned.append((treedef, kept))
        return tuple(leaf for leaf in out if isinstance(leaf, torch.Tensor))

    # -- results ------------------------------------------------------------------------

    def agree(self) -> None:
        """Raise `ShardingError` unless all ranks returned one structure, with equal numbers."""
        where, ranks = self.mapping.where, self.scope.mesh.ranks
        first, kept = self.returned[0]
        for rank, (treedef, others) in zip(ranks, self.returned, strict=False):
            if treedef != first or any(
                (a is TENSOR) != (b is TENSOR) for a, b in zip(kept, others, strict=True)
            ):
                fail(
                    where,
                    f"rank {ranks[0]} returned {first}, rank {rank} {treedef}",
                    "every rank returns the same structure",
                    "return the same tree on every rank",
                )
            for (path, _), a, b in zip(self.mapping.results(first), kept, others, strict=True):
                if a is not b and not _equal(a, b):
                    fail(
                        where,
                        f"{path}: rank {ranks[0]} returned {a!r}, rank {rank} {b!r}",
                        "what is no tensor passes through, equal on every rank",
                        "torch.tensor([value]) with an out spec that puts the ranks' together",
                    )

    def read(self, columns: Sequence[Any], transport: Transport | None) -> Any:
        """The result tree: pairs if any argument was one, else global tensors."""
        treedef, kept = self.returned[0]
        slots = self.mapping.results(treedef)
        places = [at for at, leaf in enumerate(kept) if leaf is TENSOR]
        rows = [(*slots[at], local) for at, local in zip(places, columns, strict=True)]
        others = [(*slots[at], leaf) for at, leaf in enumerate(kept) if leaf is not TENSOR]
        check_others(self.mapping.where, others)
        leaves = list(kept)
        with paused(self.outer):
            found = read_results(self.mapping.where, rows, self.arguments, self.scope, transport)
        if self.outer is not None:
            give_types(self.outer, self.scope, columns, found)
        for at, value in zip(places, found, strict=True):
            leaves[at] = value
        return unflatten(treedef, leaves)


def _equal(a: Any, b: Any) -> bool:
    """Whether two ranks returned the same: arrays of equal elements are, and so is no number."""
    if isinstance(a, float) and a != a:
        return bool(b != b)
    same = a == b
    return bool(same.all() if hasattr(same, "all") else same)
