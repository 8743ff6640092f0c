"""Rules of Fourier transforms: fft_*, fftshift, stft, istft.

Transformed dims stay unsharded, all others may be sharded. Transforms are linear in their
input, conjugates and real parts included. Over several dims they are decomposed into transforms
over one dim each, between which an all-to-all moves the axis of a sharded dim to another one, and
those of windows of a signal into windows, for which shards exchange halos.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from fshard._util.dtypes import is_inexact
from fshard.ops.core.builders import all_modes, linear_modes, normalize_dims
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.letters import letters, text_dims
from fshard.ops.rules.shard_call import ShardCall

aten, prims = torch.ops.aten, torch.ops.prims

TRANSFORMS = """
    fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2
    fft_irfft2 fft_hfft2 fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn
    fft_ihfftn _fft_c2c _fft_r2c _fft_c2r
"""


@register_rule(*TRANSFORMS.split(), prims.fft_c2c, prims.fft_r2c, prims.fft_c2r)
def transformed(call: OpCall) -> Rule:
    """Rule `b1->b1` of Fourier transforms along the last dim: transformed dims stay unsharded."""
    ndim, dim = call.operands[0].ndim, call.get("dim")
    sizes = call.get("s") if call.has("s") else None
    if dim is None and sizes is not None:
        transformed_dims = set(range(ndim - len(sizes), ndim))
    elif isinstance(dim, list | tuple) and not dim:
        transformed_dims = set()
    else:
        transformed_dims = set(normalize_dims(dim, ndim))
    names = letters(ndim)
    dims: Dims = tuple(() if dim in transformed_dims else (names[dim],) for dim in range(ndim))
    modes = linear_modes(0) if is_inexact(call.operands[0]) else ()
    return Rule((dims,), (dims,), modes=modes, local=ShardCall())


# -- transforms over several dims ------------------------------------------------------------


def _register_by_dims(
    name: str, one: Callable[..., Any], last: Callable[..., Any], *, last_first: bool = True
) -> None:
    """Register the decomposition of transforms `name` and `name` over two dims.

    Args:
        name: `fft_fftn`, say.
        one: the transform over one dim.
        last: that over the last of the dims.
        last_first: False if the last dim is transformed after the others.
    """

    def transform(
        x: torch.Tensor, s: Sequence[int] | None, dim: Sequence[int] | None, norm: str | None
    ) -> torch.Tensor:
        if dim is None:
            dim = range(-x.ndim if s is None else -len(s), 0)
        sizes = [None if n == -1 else n for n in s or [-1] * len(dim)]
        calls = [*zip([one] * (len(dim) - 1) + [last], sizes, dim, strict=True)]
        for fn, size, d in calls[::-1] if last_first else calls:
            x = fn(x, size, d, norm)
        return x

    @register_decomposition(name)
    def _(x: Any, s: Any = None, dim: Any = None, norm: Any = None) -> torch.Tensor:
        return transform(x, s, dim, norm)

    @register_decomposition(f"{name[:-1]}2")
    def _(x: Any, s: Any = None, dim: Any = (-2, -1), norm: Any = None) -> torch.Tensor:
        return transform(x, s, dim, norm)


_register_by_dims("fft_fftn", torch.fft.fft, torch.fft.fft)
_register_by_dims("fft_ifftn", torch.fft.ifft, torch.fft.ifft)
_register_by_dims("fft_rfftn", torch.fft.fft, torch.fft.rfft)
_register_by_dims("fft_irfftn", torch.fft.ifft, torch.fft.irfft, last_first=False)


@register_decomposition("_fft_c2c")
def _c2c(x: torch.Tensor, dim: list[int], normalization: int, forward: bool) -> torch.Tensor:
    for d in dim[::-1]:
        x = aten._fft_c2c(x, [d], normalization, forward)
    return x


@register_decomposition("_fft_r2c")
def _r2c(x: torch.Tensor, dim: list[int], normalization: int, onesided: bool) -> torch.Tensor:
    return _c2c(aten._fft_r2c(x, dim[-1:], normalization, onesided), dim[:-1], normalization, True)


@register_decomposition("_fft_c2r")
def _c2r(x: torch.Tensor, dim: list[int], normalization: int, last_dim_size: int) -> torch.Tensor:
    x = _c2c(x, dim[:-1], normalization, False)
    return aten._fft_c2r(x, dim[-1:], normalization, last_dim_size)  # type: ignore[no-any-return]


@register_rule(aten.fft_fftshift, aten.fft_ifftshift)
def shifted(call: OpCall) -> Rule:
    """Rule of `fftshift`: the dims whose halves are exchanged are permuted."""
    ndim = call.operands[0].ndim
    names = letters(ndim)
    shifted_dims = normalize_dims(call.get("dim"), ndim)
    dims = text_dims(names)
    return Rule((dims,), (dims,), permuted=frozenset(names[dim] for dim in shifted_dims),
                modes=all_modes(0), local=ShardCall())  # fmt: skip


@register_rule(aten.stft)
def stft(call: OpCall) -> Rule:
    """Rule `b1,1->b11` of `stft`: batch dims may be sharded; linear in signal and window."""
    result_meta = call.result
    batch = letters(call.operands[0].ndim - 1)
    operands = ((*text_dims(batch), ()), *(((),) for _ in call.operands[1:]))
    result = text_dims(batch) + ((),) * (result_meta.ndim - len(batch))
    return Rule(operands, (result,), modes=linear_modes(*range(len(operands))), local=ShardCall())


@register_decomposition(aten.stft.default)
def windowed_transforms(
    x: torch.Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: torch.Tensor | None = None, normalized: bool = False, onesided: bool | None = None,
    return_complex: bool | None = None, align_to_window: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """Decompose the transforms of windows of a signal, whose shards then exchange halos."""
    width, hop = win_length or n_fft, hop_length or n_fft // 4
    sides = (n_fft - width) // 2, n_fft - width - (n_fft - width) // 2
    if window is None and width < n_fft:
        window = x.new_ones(width)
    frames = (pad(x, sides) if align_to_window else x).unfold(-1, n_fft, hop)
    if window is not None:
        frames = frames * pad(window, sides)
    is_half = not frames.is_complex() if onesided is None else onesided
    transform = torch.fft.rfft if is_half else torch.fft.fft
    result = transform(frames, norm="ortho" if normalized else "backward").mT
    return result if return_complex or x.is_complex() else torch.view_as_real(result)


@register_decomposition(aten.stft.center)
def centered_transforms(
    x: torch.Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: torch.Tensor | None = None, center: bool = True, pad_mode: str = "reflect",
    normalized: bool = False, onesided: bool | None = None, return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """Decompose the transforms of windows of a signal that is padded if `center`."""
    if center:
        sides = n_fft // 2, n_fft // 2
        x = pad(x.view(1, -1, x.shape[-1]), sides, pad_mode).view(*x.shape[:-1], -1)
    return windowed_transforms(x, n_fft, hop_length, win_length, window, normalized, onesided,
                               return_complex, align_to_window)  # fmt: skip


@register_rule(aten.istft)
def istft(call: OpCall) -> Rule:
    """Rule `b11,1->b1` of `istft`: batch dims may be sharded; linear in the transforms."""
    x, result_meta = call.operands[0], call.result
    batch = letters(result_meta.ndim - 1)
    operands = (text_dims(batch) + ((),) * (x.ndim - len(batch)),
                *(((),) for _ in call.operands[1:]))  # fmt: skip
    return Rule(operands, ((*text_dims(batch), ()),), modes=linear_modes(0), local=ShardCall())
