"""Functions as graphs of operations, above PyTorch's own decomposition, with their shapes.

`make_fx` records before dispatch, so that `aten.linear` or `aten.scaled_dot_product_attention` are
one operation, as rules are written for, and so that autograd runs on what is recorded.
"""

from __future__ import annotations

import ast
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from fshard._torch.autograd_state import ENTER_AUTOCAST, SET_GRAD_ENABLED, is_any_autocast_enabled
from fshard._torch.fake_tensors import (
    FAKE_TENSOR_LOGGER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from fshard._torch.functorch import transform_level
from fshard._torch.modes import without_dispatch_modes
from fshard._torch.operators import torch_decomposition
from fshard._util.errors import Problem, ShardingError, fail, raise_if
from fshard.layout.partition_spec import PartitionSpec
from fshard.ops.core.cache_keys import freeze, unfreeze_call
from fshard.ops.core.call import Meta, fill_call, instances_in
from fshard.ops.trace.draw_layouts import follow
from fshard.ops.trace.functionalize import Held, check_writes, functional, writes
from fshard.ops.trace.inner_gradients import (
    Above,
    Below,
    Saved,
    TakesGradients,
    gradients_within,
    refuse_grads,
)
from fshard.run.transports.divergence_report import here, one_line, raise_line

__all__ = [
    "Traced", "constrain", "constraint_of", "decompose", "refuse_autocast", "trace",
    "trace_depth",
]  # fmt: skip


_ONE_AT_A_TIME = threading.RLock()
"""What traces patches PyTorch for all threads; a function that is traced may trace others."""
_DEPTH: ContextVar[int] = ContextVar("fshard_traces", default=0)


def trace_depth() -> int:
    """So many functions, one in another, are being traced around this place."""
    return _DEPTH.get()


@contextmanager
def _deeper() -> Iterator[None]:
    token = _DEPTH.set(_DEPTH.get() + 1)
    try:
        yield
    finally:
        _DEPTH.reset(token)


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A function's graph, in which nothing is written, and what the function writes.

    `written` are the places of the arguments that it writes: the graph returns what they are in
    the end after the results. `lost` are writes by which the gradient of some arguments would be
    lost, by name, and `tracked` the arguments that are written where gradients are tracked.
    """

    graph: fx.GraphModule
    written: tuple[int, ...] = ()
    lost: tuple[tuple[str, frozenset[int]], ...] = ()
    tracked: frozenset[int] = frozenset()

    def check(self, wanted: Sequence[bool], names: Sequence[str], where: str) -> None:
        """Raise `ShardingError` for writes that gradients would not see as PyTorch's do.

        `wanted` are the arguments whose gradients are asked for.
        """
        problems = [
            Problem(f"{name} writes a tensor that has a gradient, under no_grad or by its detach()",
                    "PyTorch passes gradients by such a write, as if it had not been",
                    "write it where gradients are tracked, or write its detach().clone()")
            for name, flow in self.lost if any(at < 0 or wanted[at] for at in flow)
        ]  # fmt: skip
        problems += [
            Problem(f"{names[at]} is written, and requires grad",
                    "what is written to an argument has no gradient",
                    "write a clone(), return the new value, or write it under torch.no_grad()")
            for at in sorted(self.tracked) if wanted[at]
        ]  # fmt: skip
        raise_if(where, problems)


def trace(
    fn: Callable[..., Sequence[Any]], metas: Sequence[Meta], where: str, *, above: bool = True,
    wanted: Sequence[bool] = (), devices: Sequence[torch.device] = (),
) -> Traced:  # fmt: skip
    """The graph of a function of tensors that returns a flat list.

    With `above` operations are recorded above PyTorch's decomposition, else below it; and those of
    a function that takes gradients itself below it in any case. `wanted` are the tensors whose
    gradients are asked for, `devices` where they are, which is what the function is told.

    Raises `ShardingError` for a function that reads a tensor's numbers, or cannot run, and where
    gradients are asked for one that calls a custom `autograd.Function`.
    """
    made = None
    with _ONE_AT_A_TIME, without_dispatch_modes(), gradients_within(wanted, trace_depth, where):
        if above:
            with suppress(TakesGradients):
                made = _traced(fn, metas, where, above, wanted, devices, Above(where, wanted))
        if made is None:
            below = Below(where, wanted, torch.is_grad_enabled())
            made = _traced(fn, metas, where, False, wanted, devices, below)
    graph = made.graph
    if any(node.target is ENTER_AUTOCAST for node in graph.graph.nodes):
        _no_autocast(where)
    graph.graph.eliminate_dead_code(is_impure_node=_has_effects)
    follow(graph)
    return made


def _traced(
    fn: Callable[..., Sequence[Any]], metas: Sequence[Meta], where: str, above: bool,
    wanted: Sequence[bool], devices: Sequence[torch.device], watch: TorchFunctionMode,
) -> Traced:  # fmt: skip
    """`trace`, before what is not used is left out."""
    # What traces is imported where something is traced: it takes a second.
    from torch.fx.experimental.proxy_tensor import make_fx

    def watched(*tensors: torch.Tensor) -> Sequence[Any]:
        with watch:
            return fn(*tensors)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    written: tuple[int, ...] = ()
    lost: list[tuple[str, frozenset[int]]] = []
    grads: frozenset[int] = frozenset()
    with mode, _deeper(), _quiet():
        fakes = [torch.empty(meta.shape, dtype=meta.dtype, device=device)
                 for meta, device in itertools.zip_longest(metas, devices)]  # fmt: skip
        if not above:
            for fake, want in zip(fakes, wanted, strict=False):
                fake.requires_grad_(want)
        try:
            with Held() as held, Saved() as saved:
                graph: fx.GraphModule = make_fx(watched, pre_dispatch=above)(*fakes)
            saved.join()
            left = [at for at, fake in enumerate(fakes) if fake.is_leaf and fake.grad is not None]
            if left:
                refuse_grads(f"backward() fills .grad of argument {left[0]}", where)
            if transform_level() is None:  # transforms keep what they see
                held.check_left(fakes, where)
            if any(map(writes, graph.graph.nodes)):
                # What nobody uses is no use of what is written.
                graph.graph.eliminate_dead_code(lambda n: bool(writes(n)) or _has_effects(n))
                _check_shapes(fakes, metas, where)
                lost, grads = check_writes(graph, grad=torch.is_grad_enabled())
                graph, written = functional(graph, fakes, above=above)
        except ShardingError:
            raise
        except Exception as error:  # noqa: BLE001 - it is the user's function that ran
            _refuse(where, error)
    return Traced(graph, written, tuple(lost), grads if above else frozenset())


@contextmanager
def _quiet() -> Iterator[None]:
    """Run a block without the pages that PyTorch logs of a function that cannot run."""
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _refuse(where: str, error: Exception) -> NoReturn:
    """Raise `ShardingError` for a function that cannot be traced, with the user's line in it."""
    place, given = f"{where}{raise_line(error.__traceback__)}", one_line(error)
    if isinstance(error, DataDependentOutputException):
        given = f"{error.func} reads a tensor's numbers"
    elif isinstance(error, DynamicOutputShapeException):
        given = f"{error.func} returns a shape that depends on a tensor's numbers"
    else:
        fail(place, given, "the function is traced once on tensors of the global shapes",
             "check that it runs on whole tensors; no numpy() of them")  # fmt: skip
    fail(place, given,
         "the function is traced once on tensors without numbers, of the global shapes",
         "torch.where instead of masks and branches on values, no .item(), counts by one_hot; "
         "validate_args=False of a distribution")  # fmt: skip


def _check_shapes(fakes: Sequence[torch.Tensor], metas: Sequence[Meta], where: str) -> None:
    """Raise `ShardingError` for arguments that have another shape after the function ran."""
    for at, (fake, meta) in enumerate(zip(fakes, metas, strict=True)):
        if tuple(fake.shape) != tuple(meta.shape):
            fail(where, f"argument {at} of shape {tuple(meta.shape)} becomes one of "
                 f"{tuple(fake.shape)}", "an argument that is written keeps its shape",
                 "return the new tensor: x.t() in place of x.t_()")  # fmt: skip


def refuse_autocast(where: str) -> None:
    """Raise `ShardingError` under `torch.autocast`, which layouts know nothing of."""
    if is_any_autocast_enabled():
        _no_autocast(where)


def _no_autocast(where: str) -> NoReturn:
    fail(where, "torch.autocast", "the dtype of every result is in its spec, and autocast would "
         "give it another one where it runs",
         "cast the tensors that are to be of another dtype: x.to(torch.bfloat16)")  # fmt: skip


def _has_effects(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.target is SET_GRAD_ENABLED


def decompose(
    op: Any, how: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any],
    device: torch.device,
) -> fx.GraphModule | None:  # fmt: skip
    """The graph of one operation in terms of others; None where PyTorch has no other way.

    `how` computes the same; without it PyTorch's own ways are tried: those of composite
    operations, and its table of decompositions. Traced once for arguments of one kind.
    """
    run = how or torch_decomposition(op)
    if run is None:
        return None
    grad = torch.is_grad_enabled()
    call = freeze(tuple(args)), freeze(dict(kwargs))
    return _decomposed(op, run, how is not None, *call, grad, device)


@lru_cache(maxsize=4096)
def _decomposed(
    op: Any,
    run: Callable[..., Any],
    above: bool,
    args: Any,
    kwargs: Any,
    grad: bool,
    device: torch.device,
) -> fx.GraphModule:
    given, named = unfreeze_call(args, kwargs)
    metas = instances_in((*given, *named.values()), Meta)

    def flat(*tensors: torch.Tensor) -> list[Any]:
        placed, filled = fill_call(given, named, Meta, tensors)
        out = run(*placed, **filled)
        return list(out) if isinstance(out, list | tuple) else [out]

    devices = [device] * len(metas)
    made = trace(flat, metas, f"fs.partition: {op}", above=above, devices=devices)
    assert not made.written, f"{op} writes what it is given"
    return made.graph


# -- what a function asks for ---------------------------------------------------------------


@torch.library.custom_op("fshard::constrain", mutates_args=())
def _constrain(x: torch.Tensor, partition: str, place: str) -> torch.Tensor:
    return x.clone()


@_constrain.register_fake
def _(x: torch.Tensor, partition: str, place: str) -> torch.Tensor:
    return torch.empty_like(x)


_constrain.register_autograd(lambda ctx, grad: (grad, None, None))


def constrain(x: torch.Tensor, partition: PartitionSpec) -> torch.Tensor:
    """The same tensor, which `fs.partition` lays as `partition` at this place.

    A dim that the partition does not divide is chunked, as `fs.reshard` does. Outside of a
    partitioned function it changes nothing. JAX's `with_sharding_constraint`.

    >>> constrain(torch.ones(2), PartitionSpec("dp"))
    tensor([1., 1.])
    """
    if not isinstance(partition, PartitionSpec):
        fail("fs.constrain", f"{partition!r}", "a layout is a PartitionSpec", 'fs.P("dp", None)')
    # The line is told with what cannot be laid so, which is found after the whole was traced.
    place = "" if torch.compiler.is_compiling() else here()
    made: torch.Tensor = torch.ops.fshard.constrain(x, _written(partition), place)
    return made


def _written(p: PartitionSpec) -> str:
    return repr((p.dims, p.unreduced_kinds, p.reduced_kinds))


def constraint_of(text: str) -> PartitionSpec:
    """The partition that `constrain` has written into a graph."""
    return PartitionSpec._of(*ast.literal_eval(text))
