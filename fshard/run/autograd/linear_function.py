"""Gradients of operations over ranks: the backward pass of a linear one runs its transpose.

A linear operation maps the locals of one rank, or the shards of all ranks of a simulation. Backward
runs the transpose through the same autograd function, so derivatives of every order exist. Maxima
and minima are not linear: their gradient is `torch.amax`'s, shared equally between ties.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress, zip_longest
from typing import Any, Protocol, TypeVar, cast

import torch

from fshard._torch.autograd_state import is_view, unviewed, view_base
from fshard._torch.fake_tensors import depends_on_inputs, is_recording
from fshard._torch.functorch import (
    add_batch_dim,
    apply_function,
    forward_ad_level,
    is_transformed,
    is_wrapped,
    set_forward_mode,
    with_batch_at,
)
from fshard._torch.legacy_vmap import batch_level, is_legacy_batched, unwrap
from fshard._torch.memory import own_memory
from fshard._torch.modes import without_dispatch_modes
from fshard._torch.symbolic_numbers import has_symbolic_sizes
from fshard._util.cache import CACHE_SIZE
from fshard._util.tracebacks import hiding_frames
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.plan.batch.coalesce import buckets, rounds
from fshard.program.program import Program
from fshard.run.autograd.max_min_gradient import extreme_gradient, linear_parts
from fshard.run.autograd.saved_values import saved_tensors
from fshard.run.bucketing import bucket_plans, launch_all
from fshard.run.graphs.blocks import launch_on_blocks
from fshard.run.interpreter import launch, program_label, program_text, ranks_of, run_on_shards
from fshard.run.transports.base import (
    LABEL,
    Label,
    Transport,
    backward_phase,
    check_ranks,
    current_rank,
    labelled,
    unobserved,
)
from fshard.run.transports.divergence_report import backward_label
from fshard.run.transports.reduce_dtypes import as_number
from fshard.run.transports.running_modules import as_in_module, current_module
from fshard.run.transports.shape_only import has_values, is_abstract, shape_transport
from fshard.run.transports.simulator import SimulatedRank, run_ranks, run_together

V = TypeVar("V")
Tensors = tuple[torch.Tensor, ...]
FinishAll = Callable[[], Tensors]
Launch = Callable[[Transport, Tensors], FinishAll]


class LinearOp(Protocol):
    """Linear operation of one rank among others, and its transpose."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of the ranks that take part."""
        ...

    @property
    def T(self) -> LinearOp:  # noqa: N802 - the mathematical name
        """The transpose."""
        ...

    def wider(self, n: int) -> LinearOp:
        """Return the operation with one more dim of tensors, last, of size n: a `vmap`'s batch."""
        ...

    def launch(self, transport: Transport, xs: Tensors) -> FinishAll:
        """Launch it on this rank's locals; as many tensors result."""
        ...


@dataclass(frozen=True, slots=True)
class ProgramGroup:
    """Programs as one operation, one for each of a rank's locals.

    Collectives of one kind are coalesced, in buckets of `bucket_bytes`.

    Attributes:
        progs: the programs.
        ranks: the mesh of the ranks whose shards are given; None for all that take part.
        bucket_bytes: bytes that are sent in one launch; None for no limit.
    """

    progs: tuple[Program, ...]
    ranks: Mesh | None = None
    bucket_bytes: int | None = None
    _derived: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    """Values that follow from the others: the hash of many programs takes longer than a launch."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of the ranks."""
        return self._cached("mesh", lambda: self.ranks or ranks_of(*self.progs))

    @property
    def T(self) -> ProgramGroup:  # noqa: N802
        """The transposed programs."""
        return self._cached("T", lambda: self.with_programs([prog.T for prog in self.progs]))

    @property
    def text(self) -> str:
        """The programs as text."""
        return self._cached("text", lambda: program_text(*self.progs))

    def transposed(self, present: tuple[bool, ...]) -> ProgramGroup:
        """Return the transposes of the programs that are `present`."""
        if all(present):
            return self.T
        programs = lambda: self.with_programs(compress(self.T.progs, present))  # noqa: E731
        return self._cached(present, programs)

    def _cached(self, key: Hashable, compute: Callable[[], V]) -> V:
        """Return the derived value of a key, computed once."""
        if key not in self._derived:
            self._derived[key] = compute()
        value: V = self._derived[key]
        return value

    def wider(self, n: int) -> ProgramGroup:
        """Return the programs with one more dim of tensors, last, of size n: a `vmap`'s batch."""
        return self.with_programs([wider(prog, n) for prog in self.progs])

    def with_programs(self, progs: Iterable[Program]) -> ProgramGroup:
        """Return a group of other programs with the same ranks and buckets."""
        return ProgramGroup(tuple(progs), self.ranks, self.bucket_bytes)

    def launch(self, transport: Transport, xs: Tensors, owned: Collection[int] = ()) -> FinishAll:
        """Launch the programs on this rank's locals, of which those of `owned` may be written."""
        if any(map(has_symbolic_sizes, xs)):
            return _launch_symbolic(self, transport, xs)
        if len(self.progs) > 1:
            rank = transport.rank
            plan = lambda: bucket_plans(self.progs, self.bucket_bytes, rank)  # noqa: E731
            return launch_all(self._cached(rank, plan), transport, xs, owned)
        finish = launch(self.progs[0], transport, xs[0], owned=0 in owned)
        return lambda: (finish(),)

    def run_on_shards(self, xs: Tensors) -> Tensors:
        """Run the programs on the shards of all ranks of a simulation."""
        mesh = self.mesh
        if len(self.progs) == 1:
            with labelled(program_label(self.progs[0])):
                return run_on_shards(self.progs[0], mesh, xs)
        label = lambda: Label("a batch of programs", mesh, arguments=self.text)  # noqa: E731
        with labelled(self._cached("label", label)):
            return self._run_together_on_shards(mesh, xs)

    def _run_together_on_shards(self, mesh: Mesh, xs: Tensors) -> Tensors:
        n = mesh.size
        locals_ = [xs[i::n] for i in range(n)]
        outputs: list[Any]
        if _waits_before_last_launch(self.progs, self.bucket_bytes):
            outputs = run_ranks(mesh, lambda rank, own: self.launch(rank, own)(), locals_)
        else:
            outputs = run_together(mesh, cast(Any, self.launch), locals_)
        return tuple(y for ys in zip(*outputs, strict=True) for y in ys)


def _launch_symbolic(op: ProgramGroup, transport: Transport, xs: Tensors) -> FinishAll:
    """Launch programs on locals of which some have symbols as sizes, each of those on its own."""
    symbolic = list(map(has_symbolic_sizes, xs))
    finishes = [
        launch_on_blocks(prog, transport, x)
        for prog, x, is_symbolic in zip(op.progs, xs, symbolic, strict=True)
        if is_symbolic
    ]
    others = [not is_symbolic for is_symbolic in symbolic]
    finish_others: FinishAll = tuple
    if any(others):
        group = op.with_programs(compress(op.progs, others))
        finish_others = group.launch(transport, tuple(compress(xs, others)))

    def finish() -> Tensors:
        results, rest = iter(finishes), iter(finish_others())
        return tuple([next(results)() if is_symbolic else next(rest) for is_symbolic in symbolic])

    return finish


@lru_cache(maxsize=CACHE_SIZE)
def _waits_before_last_launch(progs: tuple[Program, ...], bucket_bytes: int | None) -> bool:
    """Return True if a rank waits for a collective before it has launched its last one."""
    all_buckets = buckets(progs, bucket_bytes)
    return len(all_buckets) > 1 or len(rounds(progs, all_buckets[0])) > 1


@lru_cache(maxsize=CACHE_SIZE)
def wider(prog: Program, n: int) -> Program:
    """Return the program with one more dim of tensors, last, of size n: a `vmap`'s batch."""
    src, p = prog.src, prog.src.partition
    partition = PartitionSpec._of((*p.dims, ()), p.unreduced_kinds, p.reduced_kinds)
    wide_src = Spec._of(src.mesh, partition, (*src.shape, n), src.dtype, (*src.sizes, None))
    dtypes = prog.forward_dtype, prog.backward_dtype
    return Program(wide_src, prog.steps, forward_dtype=dtypes[0], backward_dtype=dtypes[1])


def launch_linear(op: LinearOp, xs: Tensors, where: str, launch: Launch | None = None) -> FinishAll:
    """Launch `op` on this rank's locals without a gradient; meta and fake tensors send nothing.

    In graphs that `make_fx` records in forward mode, as for `torch.func.linearize`, the collectives
    of values are left out: they run now, and their results are constants.

    Call it under `torch.no_grad()` where a local requires grad; `apply_linear` adds the gradient.

    Args:
        op: the operation.
        xs: this rank's locals.
        where: the caller, for errors.
        launch: the function that launches it; None is `op.launch`.

    Raises:
        ShardingError: without a rank.
    """
    mesh, launch = op.mesh, launch or op.launch
    if is_abstract(xs[0]):
        with unobserved():
            return launch(shape_transport(mesh, where), xs)
    transport = current_rank(mesh, where)
    if isinstance(transport, SimulatedRank):
        transport.world.share_forward_level()
    elif forward_ad_level() >= 0 and is_recording() and all(map(_is_constant, xs)):
        with without_dispatch_modes():
            constants = _launch_on_rank(op, transport, xs, where, launch)()
        return lambda: constants
    return _launch_on_rank(op, transport, xs, where, launch)


def _is_constant(x: torch.Tensor) -> bool:
    """Return True for a value that does not depend on the inputs of the graph being recorded."""
    return has_values(x) and not depends_on_inputs(x)


def _launch_on_rank(
    op: LinearOp, transport: Transport, xs: Tensors, where: str, launch: Launch
) -> FinishAll:
    """Launch `op` over the transport of a rank, with a label."""
    if transport.rank not in op.mesh:
        check_ranks(op.mesh, transport, where)
        return lambda: tuple(x.new_empty(0) for x in xs)
    if LABEL.get() is not None:
        return launch(transport, xs)
    arguments = op.text if isinstance(op, ProgramGroup) else ""
    with labelled(Label(where, op.mesh, arguments=arguments)):
        return launch(transport, xs)


def _execute(op: LinearOp, xs: Tensors, on_shards: bool, launched: FinishAll | None) -> Tensors:
    if launched is not None:
        return launched()
    if on_shards:
        assert isinstance(op, ProgramGroup)
        return op.run_on_shards(xs)
    return launch_linear(op, xs, "a collective")()


def _as_output(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return `y` such that autograd does not take it for its input or a view of a private base."""
    if y is x:
        return y.view_as(y)
    if is_view(y) and view_base(y) is not x and view_base(y) is not view_base(x):
        y = unviewed(y)
    return y


class _Apply(torch.autograd.Function):
    """Forward runs a linear operation, backward its transpose."""

    @staticmethod
    def forward(
        op: LinearOp, on_shards: bool, launched: FinishAll | None, *xs: torch.Tensor
    ) -> Tensors:
        return tuple(map(_as_output, xs, _execute(op, xs, on_shards, launched)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensors) -> None:
        op, on_shards, _, *xs = inputs
        ctx.op, ctx.on_shards, ctx.label = op, on_shards, backward_label()
        ctx.module = current_module()
        ctx.shapes = [x.shape for x in xs]
        needs = ctx.needs_input_grad[3:]
        if not on_shards and any(needs) and not is_transformed():
            # Each output depends on its own local alone: it requires grad only if that does.
            ctx.mark_non_differentiable(*(y for y, n in zip(output, needs, strict=True) if not n))

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with backward_phase(ctx.label):
            cotangents = as_in_module(ctx.module, apply_linear, ctx.op.T, grads, ctx.on_shards)
        filled = (
            g if g.shape == shape else g.new_zeros(shape)
            for g, shape in zip(cotangents, ctx.shapes, strict=True)
        )
        return (None, None, None, *filled)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensors:
        return apply_linear(ctx.op, tangents[3:], ctx.on_shards)

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: LinearOp, on_shards: bool, _: None, *xs: Any) -> Any:
        n, dims = info.batch_size, in_dims[3:]
        ys = apply_linear(op.wider(n), _with_batch_last(xs, dims, n), on_shards)
        return _with_empty_batch(ys, n), (-1,) * len(ys)


def _with_empty_batch(ys: Tensors, n: int) -> Tensors:
    """Give the empty results of ranks outside of the mesh a last dim of size n as well."""
    return tuple(y.reshape(0, n) if y.shape == (0,) else y for y in ys)


def _with_batch_last(xs: Tensors, dims: Sequence[int | None], n: int) -> Tensors:
    """Move the dims that `vmap` maps to the end; a tensor without one is copied n times."""
    moved = (with_batch_at(x, dim, -1, n) for x, dim in zip(xs, dims, strict=True))
    return tuple(map(own_memory, moved))


def is_differentiated(*xs: torch.Tensor) -> bool:
    """Return True if a gradient of something computed from a tensor of `xs` may be taken.

    A wrapper of `torch.func` always counts: one of a `vmap` does not show whether its value
    requires grad, and a tensor with a tangent does not need to.
    """
    if is_transformed():
        return forward_ad_level() >= 0 or any([x.requires_grad or is_wrapped(x) for x in xs])  # noqa: C419
    return torch.is_grad_enabled() and any([x.requires_grad for x in xs])  # noqa: C419 - one frame


def apply_linear(
    op: LinearOp, xs: Tensors, on_shards: bool, launched: FinishAll | None = None
) -> Tensors:
    """Run `op` differentiably on a rank's locals or on the shards of all ranks.

    Args:
        op: the operation; a `ProgramGroup` with `on_shards`.
        xs: the locals, or the shards in rank order for each local in turn.
        on_shards: whether `xs` are the shards of all ranks.
        launched: the operation already started on `xs`, if it is.
    """
    if any(map(is_legacy_batched, xs)):
        return _apply_batched(op, xs, on_shards, batch_level(xs))
    if is_differentiated(*xs):
        outputs: Tensors = apply_function(_Apply, op, on_shards, launched, *xs)
        return outputs
    return _execute(op, xs, on_shards, launched)


def _apply_batched(op: LinearOp, xs: Tensors, on_shards: bool, level: int) -> Tensors:
    """Run `op` on legacy batched tensors: the batch of each level becomes one more last dim."""
    if level == 0:
        return apply_linear(op, xs, on_shards)
    n, wide = unwrap(xs, level, -1)
    if n == 1:
        return _apply_batched(op, tuple(x.squeeze(-1) for x in wide), on_shards, level - 1)
    outputs = _with_empty_batch(_apply_batched(op.wider(n), wide, on_shards, level - 1), n)
    return tuple(add_batch_dim(y, y.ndim - 1, level) for y in outputs)


@lru_cache(maxsize=CACHE_SIZE)
def are_linear(progs: tuple[Program, ...]) -> bool:
    """Return True if all programs are linear."""
    return all(prog.is_linear for prog in progs)


def apply_programs(op: ProgramGroup, xs: Tensors, on_shards: bool) -> Tensors:
    """Run programs differentiably, also those with maxima or minima; see `apply_linear`."""
    if are_linear(op.progs) or not is_differentiated(*xs):
        return apply_linear(op, xs, on_shards)
    n = op.mesh.size if on_shards else 1
    values = [xs[i : i + n] for i in range(0, len(xs), n)]
    need_grad = [is_differentiated(*shards) for shards in values]
    for parts in zip_longest(*map(linear_parts, op.progs)):
        for run, is_linear in ((apply_linear, True), (_apply_extreme, False)):
            places = [i for i, part in enumerate(parts) if part and part.is_linear == is_linear]
            if places:
                group = ProgramGroup(tuple(parts[i] for i in places), op.mesh, op.bucket_bytes)
                ys = run(group, tuple(x for i in places for x in values[i]), on_shards)
                for k, i in enumerate(places):
                    values[i] = ys[k * n : (k + 1) * n]
    return tuple(
        y if need else y.detach() for ys, need in zip(values, need_grad, strict=True) for y in ys
    )


def _apply_extreme(op: ProgramGroup, xs: Tensors, on_shards: bool) -> Tensors:
    """Run maxima or minima over ranks; the gradient goes to the elements that attain them."""
    outputs: Tensors = apply_function(_Extreme, op, on_shards, *xs)
    return outputs


def _reshape_like(xs: Tensors, ys: Tensors) -> Tensors:
    """Reshape every y to its x; both may be empty tensors of different shapes."""
    return tuple(y.reshape(x.shape) for x, y in zip(xs, ys, strict=True))


def _as_sent(op: ProgramGroup, xs: Tensors) -> Tensors:
    """Return `xs` rounded to the dtypes in which the programs compare them."""
    per_program = len(xs) // len(op.progs)
    wires = [prog.forward_dtype for prog in op.progs for _ in range(per_program)]
    return tuple(
        x if wire is None else x.to(wire).to(x.dtype) for x, wire in zip(xs, wires, strict=True)
    )


def _shared(g: torch.Tensor, mask: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the share of cotangent `g` of each element in `mask`, one of `total` ties."""
    number, restore = as_number(g, "sum")
    return restore(number * mask.to(number.dtype) / total.to(number.dtype))


class _Extreme(torch.autograd.Function):
    """Reductions by maximum or minimum; every program has one step."""

    @staticmethod
    def forward(op: ProgramGroup, on_shards: bool, *xs: torch.Tensor) -> Tensors:
        return tuple(map(_as_output, xs, _execute(op, xs, on_shards, None)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensors) -> None:
        ctx.op, ctx.on_shards, *xs = inputs
        ctx.n, ctx.label = len(xs), backward_label()
        ctx.save_for_backward(*xs, *output)
        ctx.save_for_forward(*xs, *output)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor) -> Tensors:
        with set_forward_mode(True), labelled(ctx.label):
            masks, totals, replicate_grad = _ties(ctx)
            return apply_linear(
                replicate_grad.T, tuple(map(_shared, tangents, masks, totals)), ctx.on_shards
            )

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: ProgramGroup, on_shards: bool, *xs: Any) -> Any:
        n, dims = info.batch_size, in_dims[2:]
        ys = _apply_extreme(op.wider(n), _with_batch_last(xs, dims, n), on_shards)
        return _with_empty_batch(ys, n), (-1,) * len(ys)

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with backward_phase(ctx.label):
            masks, totals, replicate_grad = _ties(ctx)
            cotangents = apply_linear(replicate_grad, grads, ctx.on_shards)
        return (None, None, *map(_shared, _reshape_like(masks, cotangents), masks, totals))


def _ties(ctx: Any) -> tuple[Tensors, Tensors, ProgramGroup]:
    """Return masks of the elements that attain an extreme, their counts, and a program.

    The program replicates cotangents; its transpose sums what the ranks hold of a tangent.
    """
    saved = saved_tensors(ctx)
    xs, ys = saved[: ctx.n], saved[ctx.n :]
    op, on_shards = ctx.op, ctx.on_shards
    progs = zip(*map(extreme_gradient, op.progs), strict=True)
    count, replicate, replicate_grad = (op.with_programs(group) for group in progs)
    extremes = apply_linear(replicate, tuple(y.detach() for y in ys), on_shards)
    extremes = _reshape_like(xs, extremes)
    pairs = zip(_as_sent(op, xs), extremes, strict=True)
    masks = tuple((x == y).to(x.dtype) for x, y in pairs)
    totals = _reshape_like(xs, apply_linear(count, masks, on_shards))
    return masks, totals, replicate_grad
