"""`partition`: a whole function on layouts, as a local program with explicit collectives."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fshard._torch.dynamo import skip_frames_below
from fshard._util.errors import Problem, ShardingError, fail, raise_if
from fshard._util.text import plural
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Sharded, Spec
from fshard.layout.tree import (
    TreeDef,
    broadcast_prefix,
    flatten,
    is_pair,
    append_cache_key,
    paths,
    tensors_in,
    unflatten,
)
from fshard.ops.core.cache_keys import concrete_number, freeze
from fshard.ops.core.call import Meta, name_of
from fshard.ops.trace.trace import TracedFunction, refuse_autocast, trace
from fshard.partition.assign_layouts import Assigned, Known, assign, brought
from fshard.partition.call_signature import How, by_place, tensors_of, wants_grad
from fshard.partition.ir import Copy, Ref, Write, same_memory, with_gradients_of
from fshard.partition.layout_hints import wishes
from fshard.partition.partitioned_call import Other, Partitioned
from fshard.partition.step_time import lines_time
from fshard.plan.redistribute import redistribute
from fshard.program.cost.topology import Topology
from fshard.program.program import as_topology
from fshard.run.global_tensors import shard, unshard

__all__ = ["Partition", "partition"]

MOST_CALLS = 1024
"""Of calls so many kinds are remembered."""
CALLED = (
    "a partitioned function is laid out for the sizes of its arguments: it is called outside of "
    "graphs; part.trace(*args).graph(rank) is one that can be compiled"
)


class Partition:
    """A function on layouts, made by `fs.partition`: called with pairs, or with whole tensors."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        in_specs: Any,
        out_specs: Any,
        params: Any,
        cost: Topology | None,
        traces: dict[Any, tuple[TracedFunction, TreeDef]] | None = None,
        *,
        drop_writes: bool = False,
        where: str = "",
        module: torch.nn.Module | None = None,
    ) -> None:
        self.fn, self.mesh, self.in_specs, self.out_specs = fn, mesh, in_specs, out_specs
        self.params, self.drop_writes = params, drop_writes
        self.module = module
        self.where = where or f"fs.partition({name_of(fn)})"
        self.topology = as_topology("fs.partition", cost)
        self._made: dict[Any, Partitioned] = {}
        self._calls: dict[Any, tuple[Partitioned, Sequence[Spec | None]]] = {}
        self._traces = {} if traces is None else traces

    @skip_frames_below(CALLED)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it: pairs in, pairs out; whole tensors in, whole tensors out."""
        if kwargs:
            args = by_place(self.fn, args, kwargs, self.where)
        leaves, given, made, specs = self._called(args)
        pairs = any(each is not leaf for each, leaf in zip(given, leaves, strict=True))
        # Of a leaf that is no pair the whole is given.
        locals_ = [
            each if each is not leaf else shard(each, spec).local
            for each, leaf, spec in zip(given, leaves, specs, strict=True) if spec is not None
        ]  # fmt: skip
        if made.written:
            made.check_apart(tensors_of(leaves, specs), self.where)
        results: list[Any] = [
            local if spec is None else Sharded(local, spec)
            for local, spec in zip(made.run(locals_), made.out_specs, strict=True)
        ]
        if made.written:
            made.write_wholes(tensors_of(leaves, specs), locals_)
        if not pairs:
            results = [unshard(each) if isinstance(each, Sharded) else each for each in results]
        return unflatten(made._tree, results)

    def _state(self) -> Any:
        """What a function's graph depends on beside its arguments, as far as that can be known."""
        modules = () if self.module is None else self.module.modules()
        return torch.get_default_dtype(), tuple([each.training for each in modules])

    def _called(
        self, args: tuple[Any, ...]
    ) -> tuple[list[Any], list[Any], Partitioned, Sequence[Spec | None]]:
        """The leaves of a call, their locals, what it is partitioned to, and their specs.

        It is looked up by kind.
        """
        refuse_autocast(self.where)
        leaves: list[Any] = []
        key: list[Any] = [torch.is_grad_enabled(), self._state()]
        # A list: two arguments of which the second is a spec would be a pair.
        append_cache_key(list(args), leaves, key)
        given: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                given.append(leaf)
            elif isinstance(leaf, tuple):  # a leaf, and so a pair
                local = leaf[0]
                given.append(local)
                one = isinstance(local, torch.Tensor)
                key.append(local.requires_grad if one else wants_grad(leaf))
            else:
                given.append(leaf)
                key.append(freeze(leaf))
        kind = tuple(key)
        try:
            found = self._calls.get(kind)
        except TypeError:  # of what cannot be a key nothing is remembered
            return leaves, given, *self._new(args, leaves)
        if found is None:
            if len(self._calls) >= MOST_CALLS:
                self._calls.clear()
            found = self._calls[kind] = self._new(args, leaves)
        return leaves, given, *found

    def _new(
        self, args: tuple[Any, ...], leaves: Sequence[Any]
    ) -> tuple[Partitioned, Sequence[Spec | None]]:
        """What a call of a kind not seen before is partitioned to, and its leaves' specs."""
        specs = self._specs(args, leaves)
        return self._of(leaves, flatten(list(args))[1], specs, runs=True), specs

    @skip_frames_below(CALLED)
    def trace(self, *args: Any, **kwargs: Any) -> Partitioned:
        """The partitioned call for arguments of one kind, of which specs alone may be given."""
        args = by_place(self.fn, args, kwargs, self.where) if kwargs else args
        leaves, tree = flatten(list(args))
        return self._of(leaves, tree, self._specs(args, leaves), runs=False)

    def __repr__(self) -> str:
        kinds = plural(len(self._made), "signature")
        return f"fs.partition({name_of(self.fn)}) on {self.mesh}, laid out for {kinds}"

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """What a call does: a table of operations, their layouts, and what is sent each way."""
        if args or kwargs:
            return self.trace(*args, **kwargs).explain()
        if not self._made:
            fail("explain()", "no arguments, and no call before",
                 "layouts follow from the arguments' shapes",
                 "explain(*args), with pairs, tensors or specs")  # fmt: skip
        return next(reversed(self._made.values())).explain()

    @property
    def graph(self) -> fx.GraphModule:
        """The FX graph of the last call, as the first rank runs it."""
        if not self._made:
            fail("graph", "no call before", "layouts follow from the arguments' shapes",
                 "call it, or trace(*args).graph()")  # fmt: skip
        return next(reversed(self._made.values())).graph(self.mesh.ranks[0])

    # -- specs -----------------------------------------------------------------------------

    def _specs(self, args: Sequence[Any], leaves: Sequence[Any]) -> list[Spec | None]:
        """The spec of every leaf that is a tensor; raises `ShardingError` for pairs of others."""
        where, rest = self.where, args
        asked: list[Any] = []
        if self.params is not None:
            asked += broadcast_prefix(self.params, args[0], "params", where) if args else []
            rest = args[1:]
        prefix = (None,) * len(rest) if self.in_specs is None else self.in_specs
        if isinstance(prefix, PartitionSpec | Spec):
            prefix = (prefix,) * len(rest)
        # Lists: two arguments of which the second is a spec would be a pair.
        asked += broadcast_prefix(list(prefix), list(rest), "in_specs", where)
        names = paths(list(args), "args")
        problems: list[Problem] = []
        found = [
            self._spec(leaf, each, name, problems)
            for leaf, each, name in zip(leaves, asked, names, strict=True)
        ]
        raise_if(where, problems)
        return found

    def _spec(self, leaf: Any, asked: Any, name: str, problems: list[Problem]) -> Spec | None:
        given = leaf[1] if is_pair(leaf) else leaf
        if not isinstance(given, torch.Tensor | Spec):
            problems += [_no_tree(given, name)] if _holds(given) else []
            return None
        if isinstance(given, Spec) and given.mesh != self.mesh:
            problems.append(Problem(f"{name}: {given} on {given.mesh}",
                                    f"the function runs on {self.mesh}",
                                    "fs.reshard(pair, spec) with a spec on that mesh"))  # fmt: skip
            return None
        if isinstance(given, Spec) and asked is None:
            return given
        p = PartitionSpec() if asked is None else asked
        try:
            spec = p if isinstance(p, Spec) else Spec(
                self.mesh, p, shape=tuple(given.shape), dtype=given.dtype,
                sizes=_own_sizes(given, p))  # fmt: skip
        except ShardingError as error:
            problems += _at(f"{name}: {p}", error, "in_specs")
            return None
        if isinstance(given, Spec) and given != spec:
            prog = redistribute(given, spec)
            problems.append(Problem(f"{name}: {given}", f"the function asks for {spec}",
                                    "fs.reshard(pair, spec), which is\n"
                                    + textwrap.indent(str(prog), "    ")))  # fmt: skip
        return spec

    # -- making ----------------------------------------------------------------------------

    def _of(
        self, leaves: Sequence[Any], tree: TreeDef, specs: Sequence[Spec | None], *, runs: bool
    ) -> Partitioned:
        how = How.of(leaves, specs, self._state(), runs=runs)
        key = tree, tuple(specs), _others(leaves, specs), how
        try:
            made = self._made.get(key)
        except TypeError:  # of what cannot be a key nothing is remembered
            return self._make(leaves, tree, specs, how)
        if made is None:
            if len(self._made) >= MOST_CALLS:
                self._made.clear()
            made = self._made[key] = self._make(leaves, tree, specs, how)
        return made

    def _make(
        self, leaves: Sequence[Any], tree: TreeDef, specs: Sequence[Spec | None], how: How
    ) -> Partitioned:
        inputs = [*zip((s for s in specs if s is not None), how.wanted, strict=True)]
        if not inputs:
            fail(self.where, "no tensors", "at least one argument is a tensor",
                 "give it pairs or tensors")  # fmt: skip
        metas = tuple(None if s is None else Meta.of(s) for s in specs)
        traced, shape = self._traced(leaves, tree, metas, _others(leaves, specs), how)
        listed = zip(paths(unflatten(tree, list(leaves)), "args"), specs, strict=True)
        names = tuple(name for name, spec in listed if spec is not None)
        wrote = () if self.drop_writes else traced.written
        if not self.drop_writes:
            traced.check(how.wanted, names, self.where)
        asked = self._asked(shape)
        count = len(asked)
        asked += [inputs[at][0] if at in wrote else None for at in traced.written]
        made, outputs, out_specs, grad = self._laid(traced.graph, inputs, how, asked, count)
        _copy_results(made, outputs, count, {made.inputs[at] for at in wrote})
        for at, value in zip(traced.written, outputs[count:], strict=True):
            if at in wrote:
                made.lines.append(Write(Ref(made.inputs[at]), Ref(value), names[at]))
        return Partitioned(
            self.mesh, tuple(made.lines), tuple(s for s, _ in inputs), tuple(out_specs[:count]),
            tuple(made.inputs), tuple(outputs[:count]), wrote, shape, self.topology,
            grad, traced.graph, names,
        )  # fmt: skip

    def _laid(
        self, graph: fx.GraphModule, inputs: Sequence[tuple[Spec, bool]], how: How,
        asked: Sequence[Any], count: int,
    ) -> tuple[Assigned, list[Any], list[Spec | None], bool]:  # fmt: skip
        """The lines of a graph: those of the least time, where there are wishes to follow or not.

        The values and specs of its results, and whether one of the first `count` has a gradient;
        the others are written.

        A wish that what every rank computes whole be cut saves work, and may cost a gather where
        something else needs it whole.
        """
        wished = [p.partition if isinstance(p, Spec) else p for p in asked]
        found = wishes(graph, self.mesh, wished)
        ways = []
        for bold in (True, False) if found else (False,):
            made, results = assign(
                graph,
                inputs,
                self.topology,
                grad=how.enabled,
                device=how.device,
                wishes=found,
                bold=bold,
            )
            outputs, specs, grads = self._finish(made, results, asked)
            flows = [at for at, flow in zip(outputs, grads[:count], strict=False) if flow]
            made.lines = with_gradients_of(made.lines, flows)
            ways.append((made, outputs, specs, bool(flows)))
        return min(ways, key=lambda way: lines_time(
            way[0].lines, self.mesh, self.topology, grad=way[3]))  # fmt: skip

    def _traced(
        self, leaves: Sequence[Any], tree: TreeDef, metas: Sequence[Meta | None], others: Any,
        how: How,
    ) -> tuple[TracedFunction, TreeDef]:  # fmt: skip
        """`_trace`, once for arguments of one kind; `others` are those that are no tensors."""
        key = tree, tuple(metas), others, how
        try:
            found = self._traces.get(key)
        except TypeError:
            return self._trace(leaves, tree, metas, how)
        if found is None:
            if len(self._traces) >= MOST_CALLS:
                self._traces.clear()
            found = self._traces[key] = self._trace(leaves, tree, metas, how)
        return found

    def _trace(
        self, leaves: Sequence[Any], tree: TreeDef, metas: Sequence[Meta | None], how: How
    ) -> tuple[TracedFunction, TreeDef]:
        """The function on whole tensors as a graph, and the structure of its results."""
        outer: list[TreeDef] = []

        def flat(*tensors: torch.Tensor) -> list[Any]:
            left = iter(tensors)
            given = [concrete_number(leaf) if meta is None else next(left)
                     for leaf, meta in zip(leaves, metas, strict=True)]  # fmt: skip
            results, shape = flatten(self.fn(*unflatten(tree, given)))
            problems = [_no_tree(each, name) for each, name in zip(
                results, paths(unflatten(shape, results), "result"), strict=True)
                if _holds(each)]  # fmt: skip
            raise_if(self.where, problems)
            outer.append(shape)
            return results

        given = [meta for meta in metas if meta is not None]
        made = trace(flat, given, self.where, requires_grad=how.wanted, devices=how.devices)
        return made, outer[-1]

    def _asked(self, tree: TreeDef) -> list[Any]:
        """What `out_specs` ask of every result; None where nothing."""
        if self.out_specs is None:
            return [None] * tree.num_leaves
        shape = unflatten(tree, [0] * tree.num_leaves)
        return broadcast_prefix(self.out_specs, shape, "out_specs", self.where)

    def _finish(
        self, made: Assigned, results: Sequence[Any], asked: Sequence[Any]
    ) -> tuple[list[Any], list[Spec | None], list[bool]]:
        """The values that come out, brought to `out_specs` where they are given.

        And whether they have gradients.
        """
        outputs: list[Any] = []
        grads: list[bool] = []
        specs: list[Spec | None] = []
        problems: list[Problem] = []
        for at, (value, p) in enumerate(zip(results, asked, strict=True)):
            if not isinstance(value, Known):
                outputs.append(Other(value))
                specs.append(None)
                grads.append(False)
                continue
            spec = value.spec
            try:
                if p is not None:
                    spec = p if isinstance(p, Spec) else spec.replace(partition=p)
            except ShardingError as error:
                problems += _at(f"result {at}: {p}", error, "out_specs")
                continue
            outputs.append(brought(made, value, spec, self.topology, grad=True))
            specs.append(spec)
            grads.append(value.grad)
        raise_if(f"{self.where}: out_specs", problems)
        return outputs, specs, grads


def _copy_results(made: Assigned, outputs: list[Any], count: int, written: set[int]) -> None:
    """Copy the first `count` results that may lie in the memory of arguments that are written."""
    inside = set(written)
    for line in made.lines:
        inside.update(each for each, source in same_memory(line) if source in inside)
    for at, value in enumerate(outputs[:count]):
        if type(value) is int and value in inside:
            outputs[at], made.count = made.count, made.count + 1
            made.lines.append(Copy(outputs[at], Ref(value)))


def _holds(value: Any) -> bool:
    """Whether what is no tensor has some among its attributes; a module may be closed over."""
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return False
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return any(True for _ in tensors_in([value, getattr(value, "__dict__", None), slots]))


def _no_tree(value: Any, name: str) -> Problem:
    return Problem(f"{name} is a {type(value).__name__}, with tensors in it",
                   "tensors are seen as they are, in tuples, named tuples, lists and dicts",
                   "a dict of them: vars(...) of a dataclass")  # fmt: skip


def _at(place: str, error: ShardingError, among: str) -> list[Problem]:
    """The problems of an error, each with the place where it is, and ways out there."""
    way = "uneven=", f"a Spec in {among} with uneven="
    return [Problem(f"{place}, {each.given}", each.rule, each.fix.replace(*way))
            for each in error.problems]  # fmt: skip


def _others(leaves: Sequence[Any], specs: Sequence[Spec | None]) -> tuple[Any, ...]:
    """The leaves that are no tensors, as a key: 1, 1.0 and True trace to other graphs."""
    return tuple(freeze(leaf) for leaf, spec in zip(leaves, specs, strict=True) if spec is None)


def _own_sizes(given: Any, p: PartitionSpec) -> Mapping[int, Sequence[int] | None] | None:
    """The sizes that a pair's spec has of dims that are cut by the same axes."""
    if not isinstance(given, Spec):
        return None
    dims = p.dims + ((),) * (given.ndim - len(p.dims))
    return {d: given.sizes[d] for d in range(given.ndim) if dims[d] == given.partition.dims[d]}


def partition(
    fn: Callable[..., Any],
    *,
    mesh: Mesh,
    in_specs: Any = None,
    out_specs: Any = None,
    params: Any = None,
    cost: Topology | None = None,
) -> Partition:
    """A single-device function as a local program with its collectives, on pairs or tensors.

    `in_specs` are trees of `P` (or `Spec`) that are prefixes of the arguments, by their places if
    they are given by name; None is whole and invariant, or as the pair lies. `params`, if given,
    are those of the first argument, and `in_specs` of the rest; a module is then called with its
    parameters as the first argument. `out_specs` are those of the results; None leaves them as they
    come out, unreduced too. The function is traced once for each signature, Python's numbers
    included (give those that change in tensors of no dims), on tensors without numbers, so what it
    reads beside its arguments is as it was then (`train()` and `eval()` of a module are seen).
    `cost` is the topology that layouts are weighed on. What the function writes in place it writes
    here too: arguments that it writes, running statistics say, are written where they lie, without
    gradient.

    Raises `ShardingError` for what no rule is for, for writes to what the function closes over or
    that autograd would not see, and for pairs that lie otherwise than asked. After GSPMD (arXiv
    2105.04663) and JAX's `jit`, but the result is a value: `.explain()` has a line for every
    operation, `.graph` is code.

    >>> import fshard as fs
    >>> mesh = fs.Mesh(dp=2, tp=2)
    >>> f = partition(lambda w, x: (x @ w).relu(), mesh=mesh,
    ...               in_specs=(fs.P(None, "tp"), fs.P("dp")))
    >>> print(f.explain(torch.ones(4, 8), torch.ones(2, 4)))
    2 operations on Mesh(dp=2, tp=2), topology node
              spec            forward
    ─────────────────────────────────
    args[0]   f32[4,8@tp]
    args[1]   f32[2@dp,4]
    matmul    f32[2@dp,8@tp]
    relu      f32[2@dp,8@tp]
    result    f32[2@dp,8@tp]
    ─────────────────────────────────
    launches                        0
    sent                          0 B
    time                         0 µs
    """
    if not callable(fn) or not isinstance(mesh, Mesh):
        fail("fs.partition", f"{type(fn).__name__} and {type(mesh).__name__}",
             "it takes a function and a mesh",
             "fs.partition(fn, mesh=mesh, in_specs=...)")  # fmt: skip
    run, module = fn, None
    if isinstance(fn, torch.nn.Module):
        module = fn

        def run(params: Any, *args: Any) -> Any:
            if not isinstance(params, dict):
                fail(f"fs.partition({type(module).__name__})",
                     "a first argument that is no dict",
                     "a module is called with its parameters, and then with its arguments",
                     "part(dict(module.named_parameters()), *args)")  # fmt: skip
            return torch.func.functional_call(module, params, args)

        run.__name__ = type(module).__name__
        # As the module's own forward, where its parameters are in the place of the module.
        run.__signature__ = inspect.signature(type(module).forward)  # type: ignore[attr-defined]
    return Partition(run, mesh, in_specs, out_specs, params, cost, module=module)
