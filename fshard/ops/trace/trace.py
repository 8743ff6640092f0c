"""Graphs of functions: operations above PyTorch's decompositions, with the shapes of all values.

`make_fx` records before dispatch, so that `aten.linear` or `aten.scaled_dot_product_attention` are
one operation, as rules are written for, and autograd differentiates the operations of the graph.
"""

from __future__ import annotations

import ast
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from fshard._torch.autograd_state import is_any_autocast_enabled
from fshard._torch.checkpointing import checkpoint_form
from fshard._torch.dynamo import compiled_functions_inlined
from fshard._torch.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    graph_recorder,
    unpatched_modules,
    without_cudnn,
    without_fake_tensor_logs,
)
from fshard._torch.functorch import transform_level, without_transforms
from fshard._torch.memory import innermost
from fshard._torch.modes import without_dispatch_modes
from fshard._torch.operators import torch_decomposition
from fshard._torch.symbolic_numbers import Accepts, SymbolicNumbers
from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import Problem, ShardingError, fail, raise_if
from fshard.layout.mesh import Axes, as_axes
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec, is_placements
from fshard.layout.tree import tensors_in
from fshard.ops.core.cache_keys import freeze, unfreeze_call
from fshard.ops.core.call import (
    Meta,
    fill_call,
    instances_in,
)
from fshard.ops.trace.checkpoints import (
    name_checkpoints,
    record_and_recompute,
    record_checkpoint,
    recorded_checkpoints,
)
from fshard.ops.trace.custom_functions import extract_backwards, has_effects
from fshard.ops.trace.functionalize import functional, split_lists, writes
from fshard.ops.trace.grad_modes import inference_without_grad
from fshard.ops.trace.inner_gradients import (
    AboveAutograd,
    BelowAutograd,
    ReadsBatchedTensor,
    TakesGradients,
    refuse_grads,
    refuse_hidden_gradients,
)
from fshard.ops.trace.kept_tensors import ClosureGuard, LeftTensorError, clear_left, end_failed
from fshard.ops.trace.mapped_regions import name_regions, recorded_regions
from fshard.ops.trace.passes.draw_layouts import assign_draw_layouts
from fshard.ops.trace.passes.hidden_writes import copy_overwritten, keep_gradients
from fshard.ops.trace.passes.merged_dims import separate_merged_dims
from fshard.ops.trace.refused_functions import refuse_conversions, refuse_function
from fshard.ops.trace.source_places import place_of_node, recorded_places
from fshard.run.transports.base import TRACE_DEPTH
from fshard.run.transports.divergence_report import user_line

_TRACE_LOCK = threading.RLock()
"""Tracing patches PyTorch for all threads; a function that is traced may trace others."""


def trace_depth() -> int:
    """Return the number of functions, one within another, that are being traced here."""
    return TRACE_DEPTH.get()


def check_untraced(where: str, spec: Spec, plain: str) -> None:
    """Raise `ShardingError` in a traced function, which must not create pairs.

    Args:
        where: function that creates the pair, for the error.
        spec: layout of the pair.
        plain: code that creates the global tensor.
    """
    if trace_depth():
        fail(where, f"{spec} in a traced function",
             "a traced function must create global tensors, whose layouts fs.partition chooses",
             f"{plain}; fs.constrain(x, P(...)) requests a layout")  # fmt: skip


@contextmanager
def _deeper() -> Iterator[None]:
    token = TRACE_DEPTH.set(TRACE_DEPTH.get() + 1)
    try:
        yield
    finally:
        TRACE_DEPTH.reset(token)


@dataclass(frozen=True, slots=True, eq=False)
class TracedFunction:
    """Graph of a function without writes, and the writes of the function.

    `written` are the indices of the arguments that the function writes; the graph returns their
    final values after the results. `tracked` are the indices of the arguments that are written
    while gradients are tracked. `accepts` says if the graph holds for other values of the symbolic
    numbers, None if it depends on one of them.
    """

    graph: fx.GraphModule
    written: tuple[int, ...] = ()
    tracked: frozenset[int] = frozenset()
    accepts: Accepts | None = None
    read: tuple[torch.Tensor, ...] = ()
    """Closed-over tensors whose values the function read."""

    def check(self, requires_grad: Sequence[bool], names: Sequence[str], where: str) -> None:
        """Raise `ShardingError` for arguments that are written and whose gradients are requested.

        `requires_grad` and `names` have an item for every argument.
        """
        raise_if(where, [
            Problem(f"{names[index]} is written, and requires grad",
                    "a value that is written to an argument has no gradient",
                    "write a clone(), return the new value, or write it under torch.no_grad()")
            for index in sorted(self.tracked) if requires_grad[index]
        ])  # fmt: skip


def trace(
    fn: Callable[..., Sequence[Any]], metas: Sequence[Meta], where: str, *, above: bool = True,
    requires_grad: Sequence[bool] = (), devices: Sequence[torch.device] = (),
    numbers: Sequence[int | float] = (), names: Sequence[str] = (),
) -> TracedFunction:  # fmt: skip
    """Trace a function of tensors that returns a flat list.

    Args:
        fn: the function.
        numbers: arguments after the tensors that are symbols in the graph, with their values now.
        metas: shapes and dtypes of its arguments.
        where: name of the function in errors.
        above: record operations above PyTorch's decompositions. A function that takes gradients
            itself is always recorded below them.
        requires_grad: for every argument, if its gradient is requested.
        devices: for every argument its device, as the function sees it.
        names: names of the arguments in errors, those of `numbers` last.

    Raises:
        ShardingError: if the function fails, reads values of a tensor, or calls a custom
            `autograd.Function` while gradients are requested.
    """
    outer_levels: list[int | None] = [None]
    hidden = refuse_hidden_gradients(requires_grad, trace_depth, lambda: outer_levels[-1], where)

    def trace_with(new_mode: Callable[[], AboveAutograd | BelowAutograd]) -> TracedFunction:
        def attempt() -> TracedFunction:
            mode = new_mode()
            is_above = isinstance(mode, AboveAutograd)
            with checkpoint_form(record_checkpoint if is_above else record_and_recompute):
                return _trace(fn, metas, where, requires_grad, devices, mode, numbers, names)

        try:
            return attempt()
        except LeftTensorError:
            if not clear_left():
                raise
        return attempt()

    def trace_once(*, outside: bool) -> TracedFunction:
        if above:
            with suppress(TakesGradients):
                return trace_with(lambda: AboveAutograd(where, requires_grad, outside=outside))
        tracked = torch.is_grad_enabled()
        return trace_with(lambda: BelowAutograd(where, requires_grad, tracked, outside=outside))

    with (
        _TRACE_LOCK,
        without_dispatch_modes(),
        inference_without_grad(trace_depth),
        refuse_conversions(trace_depth, where),
        hidden,
        recorded_regions() as regions,
        recorded_checkpoints() as checkpoints,
        recorded_places(),
    ):
        try:
            with without_transforms():  # `grad` would wrap the results of factories
                traced = trace_once(outside=True)
        except ReadsBatchedTensor:
            outer_levels.append(transform_level())
            traced = trace_once(outside=False)
    graph = traced.graph
    within = outer_levels[-1] is not None
    if within or not trace_depth():  # a trace may close over tensors of the one around it
        _check_constants(graph, where, within=within)
    graph.graph.eliminate_dead_code(is_impure_node=has_effects)
    _check_copies(graph, where)
    extract_backwards(graph, where)
    name_regions(graph, regions)
    name_checkpoints(graph, checkpoints)
    separate_merged_dims(graph)
    assign_draw_layouts(graph)
    return traced


def _trace(
    fn: Callable[..., Sequence[Any]], metas: Sequence[Meta], where: str,
    requires_grad: Sequence[bool], devices: Sequence[torch.device],
    mode: AboveAutograd | BelowAutograd, numbers: Sequence[int | float], names: Sequence[str],
) -> TracedFunction:  # fmt: skip
    """Trace a function under a mode; dead code is not eliminated."""

    def run(*tensors: torch.Tensor) -> Sequence[Any]:
        with mode:
            results = fn(*tensors)
            mode.positions.refresh(tensors_in(results))
            return results

    above = isinstance(mode, AboveAutograd)
    written: tuple[int, ...] = ()
    tracked: frozenset[int] = frozenset()
    symbolic = SymbolicNumbers(numbers) if numbers else None
    symbols, env = (symbolic.symbols, symbolic.env) if symbolic else ((), None)
    guard = ClosureGuard()
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    record = graph_recorder(run, above_autograd=above)  # whose import needs no fake mode
    with (
        fake_mode, _deeper(), without_fake_tensor_logs(), compiled_functions_inlined(),
        without_cudnn(), unpatched_modules(),
    ):  # fmt: skip
        fakes = _arguments(metas, devices, () if above else requires_grad)
        try:
            with guard, mode.positions, mode.autograd:
                graph: fx.GraphModule = record(*fakes, *symbols)
            mode.autograd.undo_detach()
            mode.positions.gathered.clear()
            filled = [i for i, fake in enumerate(fakes) if fake.is_leaf and fake.grad is not None]
            if filled:
                refuse_grads(f"backward() or an assignment fills .grad of argument {filled[0]}",
                             where)  # fmt: skip
            for written_fake in [fake for fake in fakes if not fake.is_leaf]:
                written_fake.detach_()  # a value with a graph was written, which keeps tensors
            if transform_level() is None:  # transforms keep the tensors that they wrap
                guard.check_leaks(fakes, where)
            if any(map(writes, graph.graph.nodes)):
                # An unused result must not count as a use of a written tensor.
                graph.graph.eliminate_dead_code(lambda n: bool(writes(n)) or has_effects(n))
                _check_shapes(fakes, metas, where)
                split_lists(graph.graph)
                tracked = keep_gradients(graph, requires_grad, grad=torch.is_grad_enabled())
                graph, written = functional(graph, fakes, symbols, above=above)
                copy_overwritten(graph, tracked)
                _check_functional(graph, where)
        except BaseException as error:
            end_failed(fake_mode)
            if isinstance(error, Exception) and not isinstance(error, ShardingError):
                refuse_function(where, error, names)  # it is the user's function that ran
            raise
    return TracedFunction(graph, written, tracked if above else frozenset(),
                          symbolic.condition() if symbolic else None,
                          tuple(mode.closures))  # fmt: skip


def _arguments(
    metas: Sequence[Meta], devices: Sequence[torch.device], requires_grad: Sequence[bool]
) -> list[torch.Tensor]:
    """Return the tensors that a function is traced on, as the running mode creates them."""
    return [
        torch.empty(meta.shape, dtype=meta.dtype, device=device, requires_grad=bool(tracks))
        for meta, device, tracks in itertools.zip_longest(metas, devices, requires_grad)
    ]


def _check_shapes(fakes: Sequence[torch.Tensor], metas: Sequence[Meta], where: str) -> None:
    """Raise `ShardingError` for an argument whose shape the function changed."""
    for index, (fake, meta) in enumerate(zip(fakes, metas, strict=True)):
        if tuple(fake.shape) != tuple(meta.shape):
            fail(where, f"argument {index} of shape {tuple(meta.shape)} becomes one of "
                 f"{tuple(fake.shape)}", "an argument that is written must keep its shape",
                 "return the new tensor: x.t() in place of x.t_()")  # fmt: skip


def _check_functional(graph: fx.GraphModule, where: str) -> None:
    """Raise `ShardingError` for an operation of `torch.library` that writes its arguments."""
    for node in graph.graph.nodes:
        if getattr(node.target, "__name__", "") == "auto_functionalized_v2":
            fail(where, f"{node.args[0]}, an operation of torch.library that writes its arguments",
                 "an operation with a sharding rule must return its results as new tensors",
                 "a custom_op with mutates_args=(); or the call in a fs.shard_map within the "
                 "function, whose body runs on locals")  # fmt: skip


def _check_copies(graph: fx.GraphModule, where: str) -> None:
    """Raise `ShardingError` for copies to meta, which forward mode within a vmap makes of some."""
    copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    for node in copies:
        if node.meta["val"].is_meta and not node.args[0].meta["val"].is_meta:
            fail(where, "a copy to meta, as of forward mode, jacfwd for one, within a vmap",
                 "nested transforms must be among those that PyTorch can trace, and tensors have "
                 "values", "jacrev(f) in the place of jacfwd(f)")  # fmt: skip


def _check_constants(graph: fx.GraphModule, where: str, *, within: bool) -> None:
    """Raise `ShardingError` for a constant without values.

    It is a result that an earlier trace has left, or in a trace `within` transforms of
    `torch.func` that of a factory.
    """
    for node in graph.graph.find_nodes(op="get_attr"):
        x = innermost(getattr(graph, node.target))
        if not isinstance(x, FakeTensor):
            continue
        if within:
            fail(where, "a tensor that it makes, and one that it closes over from a vmap, in a "
                 "gradient", "the function is traced outside of transforms of torch.func",
                 "give it the closed-over tensor as an argument")  # fmt: skip
        place = place_of_node(next(iter(node.users), node))
        fail(f"{where} at {place}" if place else where,
             f"a tensor of shape {tuple(x.shape)} without values, that the function closes over",
             "closed-over tensors must have values: a trace that was refused has left this one in "
             "a module or a cache", "remove it there; a call on global tensors then computes "
             "it")  # fmt: skip


def refuse_autocast(where: str) -> None:
    """Raise `ShardingError` under `torch.autocast`, which would change dtypes that specs have."""
    if is_any_autocast_enabled():
        fail(where, "torch.autocast around the call", "the dtype of every result is in its spec, "
             "and autocast would give it another one where it runs",
             "enter torch.autocast within the function")  # fmt: skip


def decompose(
    op: Any, decomposition: Callable[..., Any] | None, args: Sequence[Any],
    kwargs: Mapping[str, Any], device: torch.device, requires_grad: Sequence[bool] = (),
) -> fx.GraphModule | None:  # fmt: skip
    """Return the graph of one operation in terms of others, traced once per kind of arguments.

    Args:
        op: the operation.
        decomposition: a function that computes the same; None takes PyTorch's decomposition.
        args: arguments with `Meta` in the places of tensors.
        kwargs: keyword arguments, likewise.
        device: the device of the tensors.
        requires_grad: for every tensor, if its gradient is requested.

    Returns:
        The graph, None if PyTorch has no decomposition.
    """
    run = decomposition or torch_decomposition(op)
    if run is None:
        return None
    needed = tuple(requires_grad) if any(requires_grad) else ()
    state = torch.is_grad_enabled(), torch.get_default_dtype(), device, needed
    return _decomposed(
        op, run, decomposition is not None, freeze(tuple(args)), freeze(dict(kwargs)), *state
    )


@lru_cache(maxsize=CACHE_SIZE)
def _decomposed(
    op: Any,
    run: Callable[..., Any],
    above: bool,
    frozen_args: Any,
    frozen_kwargs: Any,
    grad: bool,
    default_dtype: torch.dtype,
    device: torch.device,
    requires_grad: tuple[bool, ...],
) -> fx.GraphModule:
    args, kwargs = unfreeze_call(frozen_args, frozen_kwargs)
    metas = instances_in((*args, *kwargs.values()), Meta)

    def flat(*tensors: torch.Tensor) -> list[Any]:
        placed, named = fill_call(args, kwargs, Meta, tensors)
        out = run(*placed, **named)
        return list(out) if isinstance(out, list | tuple) else [out]

    devices = [device] * len(metas)
    with torch.set_grad_enabled(grad or any(requires_grad)):
        traced = trace(flat, metas, f"fs.partition: {op}", above=above,
                       requires_grad=requires_grad, devices=devices)  # fmt: skip
    assert not traced.written, f"{op} writes an argument"
    return traced.graph


# -- layouts that a function requests -------------------------------------------------------


@torch.library.custom_op("fshard::constrain", mutates_args=())
def _constrain(x: torch.Tensor, partition: str, place: str) -> torch.Tensor:
    return x.clone()


@_constrain.register_fake
def _(x: torch.Tensor, partition: str, place: str) -> torch.Tensor:
    return torch.empty_like(x)


_constrain.register_autograd(lambda ctx, grad: (grad, None, None))


def constrain(
    x: torch.Tensor, partition: PartitionSpec, *, axes: Axes | None = None
) -> torch.Tensor:
    """Return a copy of `x` that has the layout `partition` in a partitioned function.

    Args:
        x: a tensor of a function that `fs.partition` or `fs.apply` runs, of its global shape.
        partition: the partition of the result; a dim that it does not divide is chunked as by
            `fs.reshard`. Layouts of operations before it are chosen with this request in view.
        axes: the axes along which a layout is requested; along all others `x` keeps the one it has,
            major to the new one where both shard a dim. None requests it along all.

    Returns:
        A tensor of the same values; outside of a partitioned function simply a copy. A result of a
        partitioned function may share memory with an argument if nothing else changes it. The
        gradient passes unchanged, in the dual layout.

    Raises:
        ShardingError: if `partition` is not a `PartitionSpec` or has other axes than `axes`, and
            from the partitioned function if the mesh lacks its axes.

    The counterpart of `jax.lax.with_sharding_constraint`; its `P.UNCONSTRAINED` is by dims, `axes`
    is by mesh axes.

    >>> import torch
    >>> import fshard as fs
    >>> fs.constrain(torch.ones(2), fs.P("dp"))
    tensor([1., 1.])
    """
    if not isinstance(partition, PartitionSpec):
        by_name = f"fs.Spec.from_placements(mesh, {partition!r}, x.shape).partition"
        fail("fs.constrain", f"{partition!r}", "a layout must be a PartitionSpec: the function is "
             "traced without a mesh",
             by_name if is_placements(partition) else 'fs.P("dp", None)')  # fmt: skip
    requested = None if axes is None else as_axes(axes, "fs.constrain: axes")
    if requested is not None and not {*partition.axes} <= {*requested}:
        fail("fs.constrain", f"{partition!r} with axes={axes!r}",
             "the axes of the partition must be among axes", "leave axes out")  # fmt: skip
    # The partition is checked after the trace, and an error then names this line.
    place = "" if torch.compiler.is_compiling() else user_line(None, None)
    written = Constraint(partition, requested).written
    constrained: torch.Tensor = torch.ops.fshard.constrain(x, written, place)
    return constrained


@dataclass(frozen=True, slots=True)
class Constraint:
    """Layout that `fs.constrain` requests: a partition along `axes`, None for all axes.

    >>> Constraint.read(Constraint(PartitionSpec("tp"), ("tp",)).written)
    Constraint(partition=P('tp'), axes=('tp',))
    """

    partition: PartitionSpec
    axes: tuple[str, ...] | None

    @property
    def written(self) -> str:
        """The constraint as an argument of an operation in a graph."""
        p = self.partition
        return repr(((p.dims, p.unreduced_kinds, p.reduced_kinds), self.axes))

    @staticmethod
    def read(text: str) -> Constraint:
        """Return the constraint that `constrain` has written into a graph."""
        parts, axes = ast.literal_eval(text)
        return Constraint(PartitionSpec._of(*parts), axes)

    def applied(self, p: PartitionSpec) -> PartitionSpec:
        """Return the partition of a tensor with the partition `p` after the constraint.

        >>> Constraint(PartitionSpec(None, "tp"), ("tp",)).applied(PartitionSpec(("dp", "tp")))
        P('dp', 'tp')
        """
        new, axes = self.partition, self.axes
        if axes is None:
            return new
        pairs = itertools.zip_longest(p.dims, new.dims, fillvalue=())
        dims = tuple((*(a for a in old if a not in axes), *added) for old, added in pairs)
        kinds = (
            (*((axis, kind) for axis, kind in old if axis not in axes), *added)
            for old, added in (
                (p.unreduced_kinds, new.unreduced_kinds),
                (p.reduced_kinds, new.reduced_kinds),
            )
        )
        return PartitionSpec._of(dims, *kinds)
