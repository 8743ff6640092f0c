"""Casts of values that depend on what the host has read, with one of two rules for gradients.

After the host reads a varying value, later results are control-dependent: ranks may have run other
code. By the first rule such a value varies. Invariant operands are cast where they enter, and their
cotangents are summed there; this holds whether ranks have diverged or not. By the second rule, for
axes along which ranks are known to agree, such a value is invariant. Cotangents are summed where it
meets varying values, as without the read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fshard.layout.mesh import Mesh
from fshard.run.autograd.linear_function import FinishAll, ProgramGroup, Tensors
from fshard.run.graphs.blocks import block_shape
from fshard.run.transports.base import Transport
from fshard.spmd.collectives.pcast import cast_program


@dataclass(slots=True, eq=False)
class AgreedAxes:
    """Axes along which ranks are known to agree: the second rule holds."""

    axes: frozenset[str] = frozenset()

    @contextmanager
    def extended(self, axes: frozenset[str]) -> Iterator[None]:
        """Add axes in the block, which runs a backward pass."""
        before, self.axes = self.axes, self.axes | axes
        try:
            yield
        finally:
            self.axes = before


@dataclass(frozen=True, slots=True)
class EnterControl:
    """Cast from invariant to control-dependent."""

    mesh: Mesh
    axes: tuple[str, ...]
    agreed: AgreedAxes

    @property
    def T(self) -> ExitControl:  # noqa: N802 - the mathematical name
        """Return the transpose by the rule that holds now."""
        agreed, others = _split(self.axes, self.agreed)
        return ExitControl(self.mesh, others, agreed, self.agreed)

    def wider(self, n: int) -> EnterControl:
        """Return the operation on tensors with a last dim of size `n` more."""
        return self

    def launch(self, transport: Transport, xs: Tensors) -> FinishAll:
        """Return the values, without communication."""
        return lambda: xs


@dataclass(frozen=True, slots=True)
class ExitControl:
    """Sum to invariant over `sums`; the values along `equal`, where coordinate 0 stands for all."""

    mesh: Mesh
    sums: tuple[str, ...]
    equal: tuple[str, ...]
    agreed: AgreedAxes

    @property
    def T(self) -> EnterControl | PickFirst:  # noqa: N802 - the mathematical name
        """Return the transpose by the rule that holds now."""
        _, picked = _split(self.equal, self.agreed)
        if picked:
            return PickFirst(self.mesh, picked)
        return EnterControl(self.mesh, self.sums + self.equal, self.agreed)

    def wider(self, n: int) -> ExitControl:
        """Return the operation on tensors with a last dim of size `n` more."""
        return self

    def launch(self, transport: Transport, xs: Tensors) -> FinishAll:
        """Start the sums of this rank's locals."""
        return _launch_sums(self.mesh, self.sums, transport, xs)


@dataclass(frozen=True, slots=True)
class LeaveControl:
    """Cast from control-dependent to varying along `axes`, and a control-dependent sum over `sums`.

    By the second rule they are each other's transposes. By the first one a cast is its own
    transpose, and so is a sum. Along other axes invariant values are cast too, and summed: in one
    collective, as on a rank that has not read.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    sums: tuple[str, ...]
    agreed: AgreedAxes
    cast: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()

    @property
    def T(self) -> LeaveControl:  # noqa: N802 - the mathematical name
        """Return the transpose by the rule that holds now."""
        cast_axes, _ = _split(self.axes, self.agreed)
        agreed_sums, sums = _split(self.sums, self.agreed)
        sums += cast_axes
        return LeaveControl(self.mesh, agreed_sums, sums, self.agreed, self.summed, self.cast)

    def wider(self, n: int) -> LeaveControl:
        """Return the operation on tensors with a last dim of size `n` more."""
        return self

    def launch(self, transport: Transport, xs: Tensors) -> FinishAll:
        """Start the sums of this rank's locals."""
        return _launch_sums(self.mesh, tuple(sorted(self.sums + self.summed)), transport, xs)


@dataclass(frozen=True, slots=True)
class PickFirst:
    """The values of coordinate 0 along `axes`, zeros at others: its own transpose."""

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def T(self) -> PickFirst:  # noqa: N802 - the mathematical name
        """Return the transpose."""
        return self

    def wider(self, n: int) -> PickFirst:
        """Return the operation on tensors with a last dim of size `n` more."""
        return self

    def launch(self, transport: Transport, xs: Tensors) -> FinishAll:
        """Return the values or zeros, without communication."""
        is_first = self.mesh.index(transport.rank, self.axes) == 0
        return lambda: xs if is_first else tuple(map(torch.zeros_like, xs))


def _split(axes: tuple[str, ...], agreed: AgreedAxes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes along which ranks are known to agree, and the others."""
    known = tuple(axis for axis in axes if axis in agreed.axes)
    return known, tuple(axis for axis in axes if axis not in known)


def _launch_sums(mesh: Mesh, axes: tuple[str, ...], transport: Transport, xs: Tensors) -> FinishAll:
    if not axes:
        return lambda: xs
    progs = (cast_program(mesh, axes, block_shape(x), x.dtype, None).T for x in xs)
    return ProgramGroup(tuple(progs)).launch(transport, xs)
