"""`shard_map` and `local_map`: a per-device function, mapped over the shards of its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fshard.errors import Problem, ShardingError, fail, raise_if
from fshard.mesh import Mesh
from fshard.partition import PartitionSpec
from fshard.plan.redistribute import redistribute
from fshard.run.execute import check_local, check_shards
from fshard.run.moving import lay_out, shard, unshard
from fshard.run.transport import Transport, current_transport
from fshard.spec import Sharded, Spec
from fshard.spmd.arguments import Argument, match_specs, signature_of
from fshard.spmd.mapped import map_ranks, run_body
from fshard.tree import TreeDef, broadcast_prefix, flatten, is_pair, map_leaves, paths, unflatten

__all__ = ["local_map", "shard_map"]


def shard_map(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    check: bool = False,
) -> Any:
    """Map a per-device function over shards of global values; call or decorator form.

    `in_specs` is a tree prefix of the arguments by position (one `P` for all, or a tuple), or a
    mapping from parameter names; arguments may be given by keyword. `out_specs` is a prefix of
    the result. A leaf is a `P`, a `Spec`, or `None` for what is passed through as it is. A
    tensor argument is a global value that this process holds whole, a pair one that it holds
    its part of; if any argument is a pair, the results are pairs. Mentioned axes cut a dim,
    unmentioned ones promise equal values; outputs never communicate, but to become global.

    An argument enters invariant along the axes its spec leaves out: to use it with values that
    vary there, `fs.pcast(x, axis, to="varying")`, whose transpose is the sum. Nothing is
    tracked or inserted yet, so `check` must be False.

    Semantics after `jax.shard_map` (JAX 0.11). Raises `ShardingError` for specs that do not fit
    the arguments, naming each by its path.

    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=2)
    >>> @shard_map(mesh=mesh, in_specs=(fs.P(None, "x"), fs.P("x")), out_specs=fs.P())
    ... def matmul(a, b):
    ...     return fs.psum(a @ b, "x")
    >>> matmul(torch.ones(2, 4), torch.ones(4, 3))
    tensor([[4., 4., 4.],
            [4., 4., 4.]])
    """
    if check:
        fail(
            "fs.shard_map",
            f"check={check!r}",
            "types are not tracked yet: casts are explicit",
            "check=False, with fs.pcast where invariant meets varying",
        )
    if fn is None:
        return functools.partial(
            shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check
        )
    _check_callable(fn, "fs.shard_map")
    if not isinstance(mesh, Mesh):
        fail("fs.shard_map", f"mesh={mesh!r}", "mesh is a fs.Mesh", "mesh=fs.Mesh(x=2)")
    return _wrap(_Mapping("shard_map", fn, mesh, in_specs, out_specs))


def local_map(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    in_specs: Any,
    out_specs: Any,
    redistribute_inputs: bool = False,
) -> Any:
    """Map a function of locals over pairs: pairs in, pairs out; the mesh is the pairs' own.

    As `shard_map` otherwise. With `redistribute_inputs` a pair of another spec is first brought
    to the one that `in_specs` asks for; without, that is an error that prints the program.
    After `torch.distributed.tensor.experimental.local_map`.

    >>> import fshard as fs
    >>> pair = fs.shard(torch.arange(4.0), fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,)))
    >>> double = local_map(lambda x: 2 * x, in_specs=fs.P("x"), out_specs=fs.P("x"))
    >>> fs.unshard(double(pair))
    tensor([0., 2., 4., 6.])
    """
    if fn is None:
        return functools.partial(
            local_map,
            in_specs=in_specs,
            out_specs=out_specs,
            redistribute_inputs=redistribute_inputs,
        )
    _check_callable(fn, "fs.local_map")
    return _wrap(_Mapping("local_map", fn, None, in_specs, out_specs, redistribute_inputs))


def _check_callable(fn: object, where: str) -> None:
    if not callable(fn):
        fail(where, f"{fn!r}", "the first argument is a function", f"{where}(fn, ...)")


def _wrap(mapping: _Mapping) -> Callable[..., Any]:
    @functools.wraps(mapping.fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return mapping.call(args, kwargs)

    return call


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A mapped function: what is called behind `shard_map` and `local_map`."""

    word: str
    fn: Callable[..., Any]
    mesh: Mesh | None
    in_specs: Any
    out_specs: Any
    redistribute_inputs: bool = False
    signature: inspect.Signature | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "signature", signature_of(self.fn))

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @property
    def where(self) -> str:
        return f"{self.word}({self.name})"

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Place the arguments, run the function as every rank or as this one, read the results."""
        arguments = match_specs(self.where, self.signature, self.in_specs, args, kwargs)
        mesh = self.mesh or self._mesh_of(arguments)
        # The values decide who executes: a tuple of shards is a simulation, inside a rank too.
        held = [each.value[0] for each in arguments if is_pair(each.value)]
        whole = any(not isinstance(local, torch.Tensor) for local in held)
        transport = None if whole else current_transport()
        if transport is not None and transport.rank not in mesh:
            return self._nothing(mesh, bool(held))
        self._place_all(arguments, mesh, transport)
        call = _Call(self, mesh, arguments, flatten((args, kwargs))[1])
        mapped = [each.local for each in arguments if each.spec is not None]
        if transport is None:
            rows = list(zip(*mapped, strict=True)) if mapped else [()] * mesh.size
            outs = map_ranks(mesh, call.body, rows, self.name, call.agree)
            columns: Sequence[Any] = list(zip(*outs, strict=True))
        else:
            columns = run_body(mesh, call.body, tuple(mapped), self.name)
        return call.results(columns, transport)

    def _nothing(self, mesh: Mesh, pairs: bool) -> Any:
        """What a rank outside of the mesh gets: empty results in the shape of `out_specs`."""

        def leaf(given: Any) -> Any:
            if not isinstance(given, PartitionSpec | Spec):
                return None
            empty = torch.empty(0)
            if not pairs:
                return empty
            if isinstance(given, PartitionSpec):
                given = Spec(mesh, given, shape=(0,) * len(given))
            return Sharded(empty, given)

        return map_leaves(leaf, self.out_specs)

    # -- arguments --------------------------------------------------------------------

    def _mesh_of(self, arguments: Sequence[Argument]) -> Mesh:
        meshes: list[Mesh] = list(
            dict.fromkeys(a.value[1].mesh for a in arguments if is_pair(a.value))
        )
        if len(meshes) != 1:
            given = ", ".join(map(str, meshes)) or "no pair at all"
            fail(
                self.where,
                f"pairs of {given}",
                "the mesh is that of the pairs, one for all",
                "fs.shard makes a pair of a tensor and a spec",
            )
        return meshes[0]

    def _place_all(
        self, arguments: Sequence[Argument], mesh: Mesh, transport: Transport | None
    ) -> None:
        """Give every argument its spec and its local; all failures at once."""
        problems: list[Problem] = []
        for argument in arguments:
            try:
                self._place(argument, mesh, transport)
            except ShardingError as error:
                if not error.problems:
                    raise
                problems += [
                    Problem(
                        f"{argument.path}: {p.given}",
                        p.rule,
                        p.fix.replace("uneven=", "a Spec in in_specs with uneven="),
                    )
                    for p in error.problems
                ]
        raise_if(self.where, problems)

    def _place(self, argument: Argument, mesh: Mesh, transport: Transport | None) -> None:
        value, given = argument.value, argument.given
        if given is None:
            return
        if not isinstance(given, PartitionSpec | Spec):
            fail(
                self.where,
                f"in_specs leaf {given!r}",
                "a leaf of specs is a P, a Spec or None",
                "P('x'), or P() for a value that is whole on every rank",
            )
        if isinstance(given, Spec) and given.mesh != mesh:
            fail(
                self.where,
                f"in_specs leaf {given} on {given.mesh}",
                f"the mesh is {mesh}",
                "given.replace(mesh=mesh)",
            )
        if is_pair(value):
            argument.spec, argument.local = self._place_pair(value, given, mesh, transport)
        elif isinstance(value, torch.Tensor):
            spec = (
                given
                if isinstance(given, Spec)
                else Spec(mesh, given, shape=value.shape, dtype=value.dtype)
            )
            argument.spec = spec
            if transport is None:
                argument.local = lay_out(value, spec)
            else:
                argument.local = shard(value, spec).local
        elif isinstance(given, Spec) or any(given.dims):
            fail(
                self.where,
                f"a {type(value).__name__} with {given!r}",
                "only tensors and pairs can be cut",
                "None, or P() for a number",
            )

    def _place_pair(
        self,
        pair: tuple[Any, Spec],
        given: PartitionSpec | Spec,
        mesh: Mesh,
        transport: Transport | None,
    ) -> tuple[Spec, Any]:
        local, spec = pair
        if spec.mesh != mesh:
            fail(
                self.where,
                f"a pair of {spec} on {spec.mesh}",
                f"the mesh is {mesh}",
                "unshard it, or map over its mesh",
            )
        target = given if isinstance(given, Spec) else spec.replace(partition=given, uneven="chunk")
        if target != spec:
            prog = redistribute(spec, target)
            if not self.redistribute_inputs:
                lines = str(prog).replace("\n", "\n           ")
                fix = f"fs.reshard(pair, {given!r}), which runs\n           {lines}"
                fail(self.where, f"a pair of {spec}", f"in_specs ask for {target}", fix)
            local = prog(local)
        if transport is None:
            return target, check_shards(local, target, self.where)
        check_local(local, target, transport, self.where)
        return target, local


class _Call:
    """One call: the function on one rank's locals, and what its results mean."""

    def __init__(
        self, mapping: _Mapping, mesh: Mesh, arguments: Sequence[Argument], treedef: TreeDef
    ) -> None:
        self.mapping, self.mesh, self.arguments, self.treedef = mapping, mesh, arguments, treedef
        # Per rank that ran: the structure of its result, and the leaves that are no tensors.
        self.structures: list[tuple[TreeDef, list[Any]]] = []

    def body(self, locals_: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Call the function as one rank; its tensors, in order."""
        mine = iter(locals_)
        leaves = [each.value if each.spec is None else next(mine) for each in self.arguments]
        args, kwargs = unflatten(self.treedef, leaves)
        out, treedef = flatten(self.mapping.fn(*args, **kwargs))
        self.structures.append(
            (treedef, [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in out])
        )
        return tuple(leaf for leaf in out if isinstance(leaf, torch.Tensor))

    def agree(self) -> None:
        """Raise `ShardingError` unless all ranks returned one structure."""
        first = self.structures[0]
        for rank, (treedef, rest) in zip(self.mesh.ranks, self.structures, strict=False):
            kinds = [each is None for each in rest]
            if treedef != first[0] or kinds != [each is None for each in first[1]]:
                fail(
                    self.mapping.where,
                    f"rank {self.mesh.ranks[0]} returned {first[0]}, rank {rank} {treedef}",
                    "every rank returns the same structure",
                    "return the same tree on every rank",
                )

    def results(self, columns: Sequence[Any], transport: Transport | None) -> Any:
        """The result tree: pairs if any argument was one, else global tensors."""
        treedef, rest = self.structures[0]
        skeleton = unflatten(treedef, list(range(len(rest))))
        where, name = self.mapping.where, "out_specs"
        specs = broadcast_prefix(self.mapping.out_specs, skeleton, name, where)
        pairs = any(is_pair(each.value) for each in self.arguments)
        column = iter(columns)
        leaves: list[Any] = []
        problems: list[Problem] = []
        for path, other, given in zip(paths(skeleton, "result"), rest, specs, strict=True):
            if other is not None:
                leaves.append(other[0])
                continue
            local = next(column)
            try:
                pair = Sharded(local, self._spec_of(local, given, transport))
                leaves.append(pair if pairs else unshard(pair))
            except ShardingError as error:
                if not error.problems:
                    raise
                problems += [Problem(f"{path}: {p.given}", p.rule, p.fix) for p in error.problems]
        raise_if(where, problems)
        return unflatten(treedef, leaves)

    def _spec_of(self, local: Any, given: Any, transport: Transport | None) -> Spec:
        """The spec of a result, read off the locals at hand and the arguments' uneven dims."""
        where = self.mapping.where
        shards = (
            {transport.rank: local}
            if transport is not None
            else dict(zip(self.mesh.ranks, local, strict=True))
        )
        rank, first = next(iter(shards.items()))
        if not isinstance(given, PartitionSpec | Spec):
            fail(
                where,
                f"a tensor with the out spec {given!r}",
                "the out spec of a tensor is a P or a Spec",
                "P() promises equal values",
            )
        if isinstance(given, Spec):
            spec = given
        elif len(given) > first.ndim:
            fail(
                where,
                f"a local of {first.ndim} dims with {given!r}",
                f"a tensor of {first.ndim} dims has at most {first.ndim} entries",
                "unsqueeze a scalar, x[None], to cut it" if first.ndim == 0 else "drop entries",
            )
        else:
            shape, sizes = list(first.shape), {}
            for dim, axes in enumerate(given.dims):
                cut = self._sizes_of(axes, rank, first.shape[dim])
                if cut is not None:
                    sizes[dim] = cut
                shape[dim] = sum(cut) if cut else shape[dim] * self.mesh.axis_size(axes)
            spec = Spec(self.mesh, given, shape=shape, dtype=first.dtype, sizes=sizes)
        for each, shard_ in shards.items():
            if tuple(shard_.shape) != spec.local_shape(each) or shard_.dtype != spec.dtype:
                fail(
                    where,
                    f"rank {each} returned shape {tuple(shard_.shape)}, {shard_.dtype}",
                    f"{spec} has there shape {spec.local_shape(each)}, {spec.dtype}",
                    "give a Spec with sizes= as the out spec of an uneven result",
                )
        return spec

    def _sizes_of(self, axes: tuple[str, ...], rank: int, here: int) -> tuple[int, ...] | None:
        """The uneven sizes that an argument has along the same axes, if this rank's fits."""
        found = {
            spec.shard_sizes(dim)
            for spec in (each.spec for each in self.arguments)
            if spec is not None
            for dim, cut in enumerate(spec.sizes)
            if cut is not None and spec.partition.dims[dim] == axes
        }
        fitting = [cut for cut in found if cut[self.mesh.index(rank, axes)] == here]
        return fitting[0] if len(fitting) == 1 else None
