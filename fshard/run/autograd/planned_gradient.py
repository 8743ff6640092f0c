"""Values of a forward pass whose backward pass runs a planned function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from fshard._torch.autograd_state import UNSAFE_VIEW
from fshard._torch.functorch import (
    apply_function,
    primal_of,
    set_forward_mode,
    without_transforms,
)
from fshard._util.errors import fail
from fshard._util.tracebacks import hiding_frames
from fshard.program.program import Program
from fshard.run.autograd.saved_values import saved_tensors
from fshard.run.transports.base import Label, backward_phase, current_transport
from fshard.run.transports.divergence_report import backward_label

Tensors = tuple[torch.Tensor, ...]


class PlannedBackward(Protocol):
    """Planned function of cotangents and saved tensors that returns gradients."""

    @property
    def programs(self) -> tuple[Program, ...]:
        """Its programs."""
        ...

    def run(self, locals_: Sequence[Any]) -> list[Any]:
        """Run on the arguments' locals, of one rank or tuples of all ranks."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class OutputGradient:
    """Gradient of outputs with respect to inputs, as a function of cotangents and saved tensors.

    Attributes:
        calls: the functions, by the outputs that have a cotangent (a bool for each), which are
            their arguments; first that of all.
        inputs: number of inputs.
        outputs: number of outputs.
        saved: for every saved tensor the index of the output that it is, None for another tensor.
        materialized: True if outputs that are not used have cotangents of zeros.
        once: True if the function is not differentiable.
        label: name of the custom function, and the line that calls it.
    """

    calls: Mapping[tuple[bool, ...], PlannedBackward]
    inputs: int
    outputs: int
    saved: tuple[int | None, ...]
    materialized: bool
    once: bool
    label: Label

    @property
    def call(self) -> PlannedBackward:
        """The function of all cotangents."""
        return next(iter(self.calls.values()))

    def attach(self, values: Sequence[Any]) -> list[Any]:
        """Return the outputs with this gradient.

        Args:
            values: the inputs, the outputs and the saved tensors that are not outputs, as locals of
                one rank or as tuples of all ranks' locals.
        """
        n = None if isinstance(values[0], torch.Tensor) else len(values[0])
        flat = values if n is None else [x for locals_ in values for x in locals_]
        return _grouped(apply_function(_Attach, self, n, *flat), n)


def _grouped(xs: Sequence[torch.Tensor], n: int | None) -> list[Any]:
    """Return a list of values, in tuples if they are n ranks'."""
    return list(xs) if n is None else [tuple(xs[i : i + n]) for i in range(0, len(xs), n)]


class _Attach(torch.autograd.Function):
    """Return outputs unchanged; backward runs the planned function."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: OutputGradient, n: int | None, *xs: torch.Tensor) -> Tensors:
        first = gradient.inputs * (n or 1)
        outputs = xs[first : first + gradient.outputs * (n or 1)]
        return tuple(UNSAFE_VIEW(x, x.shape) for x in outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.gradient, ctx.n, *xs = inputs
        ctx.count, ctx.label = len(xs), backward_label(ctx.gradient.label)
        ctx.set_materialize_grads(ctx.gradient.materialized)
        ctx.like = [(y.shape, y.dtype, y.device) for y in output]
        outputs = _grouped(output, ctx.n)
        others = iter(_grouped(xs, ctx.n)[ctx.gradient.inputs + ctx.gradient.outputs :])
        saved = [next(others) if i is None else outputs[i] for i in ctx.gradient.saved]
        flat = saved if ctx.n is None else [x for xs in saved for x in xs]
        ctx.save_for_backward(*flat)
        ctx.save_for_forward(*flat)  # a generated vmap rule keeps the batch dims of one list

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        run = once_differentiable(_run_backward) if ctx.gradient.once else _run_backward
        gradients = run(ctx, *grads)
        return (None, None, *gradients, *[None] * (ctx.count - len(gradients)))

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor) -> Tensors:
        """Transpose the backward: it is linear in the cotangents."""
        gradient, n = ctx.gradient, ctx.n or 1
        if gradient.once:
            fail("a partitioned function", "a tangent through an autograd.Function whose backward "
                 "is marked @once_differentiable", "the tangent is the transpose of its backward, "
                 "which must be differentiable",
                 "leave the mark out, if its operations are PyTorch's")  # fmt: skip
        saved = [primal_of(x) for x in ctx.saved_tensors]

        def transposed(*cts: torch.Tensor) -> Tensors:
            return tuple(_gradients(ctx, cts, saved))

        with set_forward_mode(True):
            zeros = [torch.zeros(s, dtype=dtype, device=device) for s, dtype, device in ctx.like]
            transpose: Any = torch.func.vjp(transposed, *zeros)[1]
            results: Tensors = transpose(tangents[: gradient.inputs * n])
        return results


def _run_backward(ctx: Any, *grads: torch.Tensor) -> Sequence[Any]:
    return _gradients(ctx, grads, saved_tensors(ctx))


def _gradients(ctx: Any, cts: Sequence[Any], saved: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Run the planned function of the cotangents that are not None, on flat tensors."""
    gradient, n = ctx.gradient, ctx.n or 1
    by_output = [cts[i : i + n] for i in range(0, len(cts), n)]
    used = tuple(any(ct is not None for ct in group) for group in by_output)
    if ctx.n is None and len(gradient.calls) > 1:
        with backward_phase(ctx.label):
            used = _used_on_any_rank(gradient, used, ctx.like[0][-1])
    if not any(used):
        return [None] * (gradient.inputs * n)
    call = gradient.calls.get(used)
    if call is None:
        missing = ", ".join(str(index) for index, has in enumerate(used) if not has)
        fail("a partitioned function", f"a gradient through a custom autograd.Function without "
             f"cotangents of its outputs {missing}, which are not used",
             "its backward must run on None in their place, and it raised when it was traced so",
             "use every output, or test the cotangents for None in the backward")  # fmt: skip
    flat = [
        torch.zeros(shape, dtype=dtype, device=device) if ct is None else ct
        for (shape, dtype, device), ct in compress(
            zip(ctx.like, cts, strict=True), [has for has in used for _ in range(n)]
        )
    ]  # ranks that do not use an output that others use have zeros
    with backward_phase(ctx.label):
        gradients = call.run(_grouped((*flat, *saved), ctx.n))
    return tuple(gradients if ctx.n is None else [x for xs in gradients for x in xs])


def _used_on_any_rank(
    gradient: OutputGradient, used: tuple[bool, ...], device: torch.device
) -> tuple[bool, ...]:
    """Return which outputs have a cotangent on any rank; the ranks must run one function."""
    transport = current_transport()
    programs = [prog for call in gradient.calls.values() for prog in call.programs]
    ranks = sorted({rank for prog in programs if not prog.is_local for rank in prog.src.mesh.ranks})
    if transport is None or not ranks:
        return used
    with without_transforms(), torch.no_grad():
        flags = torch.tensor(used, dtype=torch.int32, device=device)
        return tuple(map(bool, transport.all_reduce(flags, "max", tuple(ranks))().tolist()))
