"""`fs.partition`: a whole function on layouts, as a local program with explicit collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fshard._torch.dynamo import run_uncompiled, skip_frames_below, tree_map
from fshard._torch.fake_tensors import is_recording_below_autograd
from fshard._util.cache import BoundedDict
from fshard._util.errors import Problem, fail, raise_if
from fshard._util.text import plural
from fshard._util.tracebacks import hide_frames
from fshard.layout.mesh import Mesh, as_mesh
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
from fshard.ops.core.cache_keys import freeze
from fshard.ops.core.call import name_of
from fshard.ops.core.registry import registry_version
from fshard.ops.propagate.choice_hints import RoleHint
from fshard.ops.trace.trace import TracedFunction, refuse_autocast
from fshard.partition import arguments
from fshard.partition.arguments import CallSignature
from fshard.partition.assignment.fastest_assignment import copy_aliased_results, fastest_assignment
from fshard.partition.execution.remat_plan import Remat, check_remat
from fshard.partition.function_traces import FunctionTraces
from fshard.partition.ir import Ref, Write
from fshard.partition.number_variants import NumberVariants, Plan
from fshard.partition.partitioned_call import PartitionedCall
from fshard.partition.recent_calls import RecentCalls
from fshard.partition.step_cost.memory_limit import check_memory, within_memory
from fshard.program.cost.topology import Topology
from fshard.program.program_arguments import as_topology
from fshard.run.global_tensors import unshard
from fshard.run.graphs.graph_node import graph_node, with_integer_sizes
from fshard.spmd.in_specs import ArgSignature, match_specs

META = torch.device("meta")


class Partition:
    """Function on layouts, as `fs.partition` returns it.

    Called with pairs `(local, spec)` it returns pairs, called with global tensors global tensors.
    It is traced and planned once for every kind of arguments: trees, shapes, dtypes, layouts,
    `requires_grad`, and values that are not tensors. The pickle of one with an importable function
    has its options, and no plans.

    Attributes:
        fn: the function.
        mesh: the mesh that it runs on.
        in_specs: the layouts of the arguments.
        out_specs: the layouts of the results, None where they are left as they come out.
        params: the layouts of the first argument, if given apart.
        topology: the topology that layouts are costed on.
        remat: the policy by which the backward pass recomputes values, None for none.
        module: the module that `fn` calls, None for a function.
        memory: bytes that a rank may hold over a step, None for no limit.
        overlap: True if products may run beside collectives, a block at a time.

    >>> import torch
    >>> import fshard as fs
    >>> double = fs.partition(lambda x: 2 * x, mesh=fs.Mesh(x=2), in_specs=(fs.P("x"),))
    >>> double(torch.arange(4.0))
    tensor([0., 2., 4., 6.])
    >>> double(fs.shard(torch.arange(4.0), fs.Spec(double.mesh, fs.P("x"), shape=(4,)))).spec
    f32[4@x]
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        in_specs: Any,
        out_specs: Any,
        params: Any,
        topology: Topology | None,
        traces: FunctionTraces | None = None,
        *,
        refuse_writes: bool = False,
        where: str = "",
        module: torch.nn.Module | None = None,
        hold: tuple[str, ...] = (),
        remat: Remat = None,
        replicate: tuple[str, ...] = (),
        memory: int | None = None,
        overlap: bool = True,
        roles: Mapping[str, RoleHint] | None = None,
    ) -> None:
        self.fn, self.mesh, self.in_specs, self.out_specs = (fn, mesh, in_specs, out_specs)
        self.params, self.refuse_writes, self.module = params, refuse_writes, module
        self.hold, self.remat, self.replicate, self.memory = hold, remat, replicate, memory
        self.overlap, self._roles = overlap, {**(roles or {})}
        self.where = where or f"fs.partition({name_of(fn)})"
        self.topology = as_topology("fs.partition", topology, meshes=(mesh,))
        self._calls: dict[Any, NumberVariants] = BoundedDict()
        self._recent = RecentCalls()
        self._last: PartitionedCall | None = None
        self._traces = traces or FunctionTraces(fn, self.where)
        self._node = graph_node(self._run_in_graph)

    def __reduce__(self) -> tuple[Any, ...]:
        module = self.module
        fn = arguments.importable(self.fn, self.where) if module is None else module
        names = ("mesh", "in_specs", "out_specs", "params", "topology", "hold", "remat",
                 "replicate", "memory", "overlap")  # fmt: skip
        return _rebuild, (fn, {name: getattr(self, name) for name in names}, self._roles)

    @run_uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function: pairs in, pairs out; global tensors in, global tensors out."""
        if torch.compiler.is_dynamo_compiling():
            return self._node(*args, **kwargs)
        try:
            if is_recording_below_autograd():
                args, kwargs = tree_map(with_integer_sizes, (args, kwargs))
            if kwargs:
                args, kwargs = arguments.bind(self.fn, args, kwargs, self.where)
            leaves, call, specs = self._lookup(args, kwargs, runs=True)
            tensors = arguments.tensor_leaves(leaves, specs)
            if call.written:
                call.check_disjoint(tensors, self.where)
            locals_ = arguments.locals_of(tensors, call.in_specs, call.written, self.where)
            results = call.run(locals_, [leaves[index] for index in call.numbers])
            if call.written:
                call.write_global_tensors(tensors, locals_)
            has_pairs = Sharded in map(type, tensors)
            for index, spec in enumerate(call.out_specs):
                if spec is not None:
                    pair = Sharded(results[index], spec)
                    results[index] = pair if has_pairs else unshard(pair)
            return unflatten(call._tree, results)
        except Exception as error:
            hide_frames(error)
            raise

    def _run_in_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call in a graph of `torch.compile`, where closures are constants."""
        self.trace(*args, **kwargs).check_closures(self.where)
        return self(*args, **kwargs)

    @skip_frames_below("part.trace(*args).graph(rank) is a graph that can be compiled")
    def trace(self, *args: Any, **kwargs: Any) -> PartitionedCall:
        """Return the local program for arguments of one kind, without running it.

        Args:
            *args: arguments of the function: pairs, tensors (also on the meta device), or specs
                in their places.
            **kwargs: arguments by name.

        Returns:
            The `PartitionedCall`, with `lines`, `in_specs`, `out_specs`, `programs`, `cost()`,
            `graph(rank)` and `explain()`.
        """
        if kwargs:
            args, kwargs = arguments.bind(self.fn, args, kwargs, self.where)
        return self._lookup(args, kwargs, runs=False)[1]

    def __repr__(self) -> str:
        count = plural(sum(map(len, self._calls.values())), "signature")
        return f"fs.partition({name_of(self.fn)}) on {self.mesh}, planned for {count}"

    def explain(self, *args: Any, only: str | None = None, **kwargs: Any) -> Any:
        """Return tables of a call's operations: layouts and bytes sent, FLOPs and times.

        Args:
            *args: arguments as for `trace`; without any, the last new kind of call is explained.
            only: "layouts", "compute" or "communication" for a table of these alone, "modules" for
                the times of modules. For a function with a parameter of that name,
                `trace(...).explain(only=...)`.
            **kwargs: arguments by name.

        To see why an operation gathers, call `fs.propagate(op, *specs)` with the specs above its
        row, and read `.alternatives`; the choice is made in `ops/propagate/select.py`.
        """
        if args or kwargs:
            return self.trace(*args, **kwargs).explain(only=only)
        call = self._last_call("explain()", "explain(*args), with pairs, tensors or specs")
        return call.explain(only=only)

    @property
    def graph(self) -> fx.GraphModule:
        """The FX graph of the last new kind of call, as the first rank runs it."""
        return self._last_call("graph", "call it, or trace(*args).graph()").graph(
            self.mesh.ranks[0]
        )

    def _last_call(self, where: str, fix: str) -> PartitionedCall:
        if self._last is None:
            fail(where, "no arguments, and no call before",
                 "layouts follow from the arguments' shapes", fix)  # fmt: skip
        return self._last

    def _lookup(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, runs: bool
    ) -> tuple[list[Any], PartitionedCall, Sequence[Spec | None]]:
        """Return the leaves of a call's arguments, its partitioned call, and their specs."""
        refuse_autocast(self.where)
        leaves, tensors = list[Any](), list[torch.Tensor]()
        state = self._traces.state(self._calls)
        key: list[Any] = [torch.is_grad_enabled(), registry_version(), state]
        # A list: a tuple of two arguments of which the second is a spec would be a pair.
        append_cache_key([[*args], kwargs], leaves, key, tensors)
        plan = self._recent.find(key, tensors) if runs else None
        if plan is None:
            leaves, plan = self._find_plan(args, kwargs, state, runs=runs)
            if runs:
                self._recent.add(key, leaves, tensors, plan)
        return leaves, *plan

    def _find_plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: Any, *, runs: bool
    ) -> tuple[list[Any], Plan]:
        """Return the leaves of a call's arguments, and its plan by a key of all it depends on."""
        leaves: list[Any] = []
        key: list[Any] = [torch.is_grad_enabled(), registry_version(), state]
        append_cache_key([[*args], kwargs], leaves, key)
        repeats = arguments.repeated_tensors(leaves)
        key += (repeats, arguments.tracked(leaves))
        numbers = {i: x for i, x in enumerate(leaves) if type(x) is float or type(x) is int}
        key += [freeze(x) for i, x in enumerate(leaves)
                if i not in numbers and not isinstance(x, torch.Tensor | Sharded)]  # fmt: skip
        # A meta tensor stands for one with values if nothing runs.
        key.append(runs or META not in key)

        def compute(symbols: tuple[int, ...]) -> Plan:
            return self._new_call(args, kwargs, leaves, state, symbols, repeats, runs=runs)

        try:
            kinds = self._calls.get(kind := tuple(key))
        except TypeError:  # a leaf without a hash
            return leaves, compute(())
        if kinds is None:
            kinds = self._calls[kind] = NumberVariants()
        return leaves, kinds.find(numbers, compute)

    # -- specs -----------------------------------------------------------------------------

    def _specs(
        self, args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str],
        leaves: Sequence[Any],
    ) -> list[Spec | None]:  # fmt: skip
        """Return the spec of every leaf, None for one that is not a tensor.

        Raises:
            ShardingError: for pairs with other layouts than `in_specs`.
        """
        where, in_specs, apart = self.where, self.in_specs, self.params is not None
        if isinstance(in_specs, list):
            in_specs = tuple(in_specs)
        requested: list[Any] = []
        if apart and args:
            requested += broadcast_prefix(self.params, args[0], "params", where)
        signature = ArgSignature(self.fn, skip=apart)
        if isinstance(in_specs, Mapping):  # a default in between was not passed by the caller
            pairs = zip(signature.parameters, args[apart:], strict=False)
            in_specs = {p.name: None for p, value in pairs if value is p.default} | {**in_specs}
        matched = match_specs(where, signature, in_specs, args[apart:], kwargs)
        requested += [spec for _, spec in matched]
        problems: list[Problem] = []
        specs = [
            arguments.leaf_spec(leaf, request, name, self.mesh, problems)
            for leaf, request, name in zip(leaves, requested, names, strict=True)
        ]
        raise_if(where, problems)
        return specs

    # -- tracing and layout ------------------------------------------------------------------

    def _new_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any], state: Any,
        numbers: tuple[int, ...], repeats: tuple[int, ...], *, runs: bool,
    ) -> tuple[PartitionedCall, Sequence[Spec | None]]:  # fmt: skip
        """Trace and plan a call, and return it with the specs of its leaves.

        The leaves of the indices `numbers` are symbols.
        """
        tree = flatten(([*args], kwargs))[1]
        leaf_names = [*paths([*args], "args"), *paths(kwargs, "kwargs")]
        specs = self._specs(args, kwargs, leaf_names, leaves)
        signature = CallSignature.of(leaves, specs, state, runs=runs)
        inputs = [*zip((s for s in specs if s is not None), signature.requires_grad, strict=True)]
        if not inputs:
            types = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves)) or "none"
            fail(self.where, f"arguments of the types {types}",
                 "at least one argument must be a tensor or a pair",
                 "torch.as_tensor(x) of an array")  # fmt: skip
        traced, result_tree = self._traces.trace(leaves, tree, specs, signature, numbers, repeats)
        names = tuple(
            name for name, spec in zip(leaf_names, specs, strict=True) if spec is not None
        )
        if traced.written and self.refuse_writes:
            fail(self.where, "a function that writes an argument in place",
                 "an operation on pairs must return new pairs, and change none",
                 "inplace=False where it has that option; or fs.partition of it")  # fmt: skip
        traced.check(signature.requires_grad, names, self.where)
        params = sum(map(bool, specs[: flatten([*args[:1]])[1].num_leaves]))

        def plan(hold: tuple[str, ...]) -> PartitionedCall:
            number_types = tuple(type(leaves[index]) for index in numbers)
            all_names = (*names, *(leaf_names[index] for index in numbers))
            return self._planned(traced, result_tree, inputs, signature, number_types, numbers,
                                 all_names, params, hold)  # fmt: skip

        if self.memory is None:
            call = plan(self.hold)
        else:
            holds = [self.hold] + ([] if self.params is None else [self.mesh.axes])
            call = within_memory(plan, holds, self.memory, self.where)
        self._last = call
        return call, specs

    def _planned(
        self, traced: TracedFunction, result_tree: TreeDef, inputs: Sequence[tuple[Spec, bool]],
        signature: CallSignature, number_types: tuple[type, ...], numbers: tuple[int, ...],
        names: tuple[str, ...], params: int, hold: tuple[str, ...],
    ) -> PartitionedCall:  # fmt: skip
        """Return the call with layouts, whose parameters stay sharded along the axes `hold`."""
        requested = self._requested(result_tree)
        count = len(requested)
        requested += [inputs[index][0] for index in traced.written]
        assignment, outputs, out_specs, grad = fastest_assignment(
            traced.graph, inputs, signature, requested, count,
            number_types, [hold] * params,
            tuple(axis for axis in self.mesh.axes if axis not in self.replicate),
            0 if self.params is None else params, self._roles, self.mesh, self.topology,
            self.where, overlap=self.overlap)  # fmt: skip
        targets = {assignment.inputs[index] for index in traced.written}
        copy_aliased_results(assignment, outputs, count, targets)
        for index, value in zip(traced.written, outputs[count:], strict=True):
            target = Ref(assignment.inputs[index])
            assignment.lines.append(Write(target, Ref(value), names[index]))
        return PartitionedCall(
            self.mesh, tuple(assignment.lines), tuple(s for s, _ in inputs),
            tuple(out_specs[:count]), tuple(assignment.inputs), tuple(outputs[:count]),
            traced.written, result_tree, self.topology, grad, traced.graph,
            names, numbers, traced.accepts, signature.requires_grad, number_types,
            signature.device, self.remat, num_params=0 if self.params is None else params,
        )  # fmt: skip

    def _requested(self, tree: TreeDef) -> list[Any]:
        """Return the item of `out_specs` for every result, None where there is none."""
        if self.out_specs is None:
            return [None] * tree.num_leaves
        results = unflatten(tree, [0] * tree.num_leaves)
        return broadcast_prefix(self.out_specs, results, "out_specs", self.where)


def partition(
    fn: Callable[..., Any],
    *,
    mesh: Mesh,
    in_specs: Any = None,
    out_specs: Any = None,
    params: Any = None,
    topology: Topology | None = None,
    hold: str | Sequence[str] = (),
    remat: Remat = None,
    replicate: str | Sequence[str] = (),
    memory: int | None = None,
    overlap: bool = True,
) -> Partition:
    """Transform a function of one device into a local program with explicit collectives.

    The function is traced once for each kind of arguments, on tensors of the global shapes without
    values: layouts are planned for sizes, and a graph of `torch.compile` ends before a call whose
    sizes are symbols (see `fs.shard_map`). Ints and floats that differ from
    call to call, as a learning rate, become inputs of the graph (`explain()` says "any value") if
    they are used in Python arithmetic, comparisons and pointwise operations alone; others, as
    sizes, are traced once for each value. Writes in place are supported: arguments that the
    function writes, such as running statistics, are written in their locals, without gradient. A
    `fs.shard_map` in the function is one operation: its body runs on locals at every call and may
    read values. It takes the tensors of the function as arguments, and gradients through it are
    taken outside of the function.

    Python state that the function's code can name beside its arguments is guarded: closure cells,
    default arguments, globals, attributes of objects, items of lists and dicts up to 256, and of
    modules the training flags, attributes, hooks, parameters and buffers. A call after a change
    traces anew, or reuses the trace of an equal state, as after `train()` and `eval()`. Tensors
    that the function closes over are replicated and read by each call: values written in place,
    as by an optimizer or `load_state_dict`, need no new trace. Not guarded are larger containers,
    arrays of more than 256 elements, names that the code computes (`getattr(x, "a" + b)`),
    iterators, lists and dicts that the function itself fills as it is traced, and globals of
    installed packages and of Python, as `os.environ`. A function that changes a number it reads is
    traced at every call; one that draws from generators of Python or NumPy is refused.

    Args:
        fn: the function, or a module, which is then called with its parameters as the first
            argument: `part(dict(module.named_parameters()), x)`, or `dict(module.state_dict())`.
            A tied weight may have any of its names, or all.
        mesh: the mesh to run on.
        in_specs: layouts of the arguments, as in `fs.shard_map`: one `P` for all, a tuple by
            position, or a dict by parameter name; tree prefixes of `P` or `Spec`.
            None replicates a plain tensor and keeps the layout of a pair.
        out_specs: layouts of the results, a tree prefix of them; None leaves them as they come out,
            possibly unreduced.
        params: layouts of the first argument alone; `in_specs` are then those of the others.
        topology: the topology that layouts are costed on; None is one node.
        hold: axes along which the tensors of `params` stay sharded where they are used, as in
            tensor parallelism: activations are sent instead, also where the cost model prefers to
            gather a weight (`explain()` says where). An operation that has no such rule gathers.
        remat: the values that the backward pass computes again in place of keeping them. None keeps
            what autograd keeps. `"gathers"` redistributes sharded arguments again, as ZeRO-3 and
            FSDP with `reshard_after_forward=True` do: gathered parameters are freed after their
            use. `"all"` keeps the arguments alone. A function `policy(op, *args, **kwargs)` decides
            for every operation, with specs in the places of tensors, and for every redistribution,
            as `policy(program, spec)`: True or a `CheckpointPolicy` that saves keeps the results,
            False or one that recomputes does not. A list of operations or their names, as that of
            `torch.utils.checkpoint.create_selective_checkpoint_contexts`, keeps their results alone
            (`explain()` has the operations of a function: `"matmul"`, say). Layouts and values are
            the same under every policy, and random operations draw the same values again. Launches
            that run again are coalesced, and one is ahead of its use; where some rank has an empty
            shard none runs again. Parts that `torch.utils.checkpoint` recomputes stay as they are.
            Transforms of `torch.func` and graphs of `torch.compile` ignore the option. `explain()`
            marks by `↻` what runs again, and `trace(*args).saved_bytes()` has the bytes that are
            kept.
        replicate: axes along which sharded arguments may be gathered, and work repeated on all
            ranks, where that is modelled as faster. Along the others the layouts of `in_specs` are
            intentions: operations on them stay sharded, except those that have no such rule
            (`explain()` names them). Tensors of `params` may be gathered along all axes.
        memory: bytes that a rank may hold over a step, as `trace(...).memory()` predicts it without
            an optimizer. If a plan exceeds it, parameters are gathered again in the backward pass,
            or stay sharded where they are used, or all but products is recomputed, or all between
            checkpoints; `explain()` says which. A `remat` that is given is kept.
        overlap: run products a block at a time while their operand is gathered, or their sums are
            scattered (collective matmul, as `fs.all_gather_matmul`), where that is modelled as
            faster: large products on machines that compute while they communicate. False waits for
            the collectives. Layouts and values are the same.

    Returns:
        A `Partition`: called with pairs it returns pairs, with global tensors global tensors. It is
        differentiable; the gradient of an argument has the dual layout of the argument.

    Raises:
        ShardingError: from the call, if no plan fits into `memory`, if an operation has no rule, if
            the function reads values or writes tensors it closes over, if autograd would not see a
            write, or if a pair has another layout than `in_specs`.

    After GSPMD (arXiv 2105.04663), `jax.jit` and `jax.checkpoint`; the result is a value:
    `explain()` has a line for every operation, `graph` is code.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(dp=2, tp=2)
    >>> f = fs.partition(lambda w, x: (x @ w).relu(), mesh=mesh,
    ...                  in_specs=(fs.P(None, "tp"), fs.P("dp")))
    >>> print(f.explain(torch.ones(4, 8), torch.ones(2, 4), only="layouts"))
    2 operations on Mesh(dp=2, tp=2), topology node
                   spec            forward
    ──────────────────────────────────────
    args[0]        f32[4,8@tp]
    args[1]        f32[2@dp,4]
    matmul         f32[2@dp,8@tp]
    relu           f32[2@dp,8@tp]
    result         f32[2@dp,8@tp]
    ──────────────────────────────────────
    launches                             0
    sent                               0 B
    communication                     0 µs
    """
    mesh = as_mesh(mesh, "fs.partition")
    if not callable(fn):
        fail("fs.partition", f"a function of type {type(fn).__name__}",
             "the first argument must be a function",
             "fs.partition(fn, mesh=mesh, in_specs=...)")  # fmt: skip
    source = fn if isinstance(fn, torch.nn.Module) else None
    call = "part(dict(module.named_parameters()), *args)"
    run = fn if source is None else arguments.module_function(source, "fs.partition", call)
    axes, repeated = ((x,) if isinstance(x, str) else tuple(x) for x in (hold, replicate))
    mesh.check_axes(axes, "fs.partition: hold")
    mesh.check_axes(repeated, "fs.partition: replicate")
    if axes and params is None:
        fail("fs.partition", f"hold={hold!r} without params",
             "the held tensors must be those of params",
             "params=P(...), the layouts of the first argument")  # fmt: skip
    check_remat(remat)
    check_memory(memory, "fs.partition")
    in_specs, out_specs, params = (read_placements(x, mesh) for x in (in_specs, out_specs, params))
    return Partition(run, mesh, in_specs, out_specs, params, topology, module=source, hold=axes,
                     remat=remat, replicate=repeated, memory=memory, overlap=overlap)  # fmt: skip


def _rebuild(
    fn: Callable[..., Any], options: dict[str, Any], roles: Mapping[str, RoleHint]
) -> Partition:
    rebuilt = partition(fn, **options)
    rebuilt._roles = {**roles}
    return rebuilt
