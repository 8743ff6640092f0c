"""Rules of Fourier transforms: the transformed dims are needed whole, the others pass.

All are linear in the tensor that is transformed, conjugates and real parts included.
"""

from __future__ import annotations

import torch

from fshard.ops.core.builders import all_modes, is_inexact, linear_modes, normalize_dims
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.einsum_letters import letters, text_dims
from fshard.ops.rules.shard_call import ShardCall

__all__: list[str] = []

aten, prims = torch.ops.aten, torch.ops.prims

OF_ONE_TENSOR = """
    fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2
    fft_irfft2 fft_hfft2 fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn
    fft_ihfftn _fft_c2c _fft_r2c _fft_c2r
"""


@register_rule(*OF_ONE_TENSOR.split(), prims.fft_c2c, prims.fft_r2c, prims.fft_c2r)
def transformed(call: OpCall) -> Rule:
    """Dims that are not transformed pass."""
    ndim, given = call.operands[0].ndim, call.get("dim")
    sizes = call.get("s") if call.has("s") else None
    if given is None and sizes is not None:
        over = set(range(ndim - len(sizes), ndim))
    elif isinstance(given, list | tuple) and not given:
        over = set()
    else:
        over = set(normalize_dims(given, ndim))
    every = letters(ndim)
    dims: Dims = tuple(() if dim in over else (every[dim],) for dim in range(ndim))
    modes = linear_modes(0) if is_inexact(call.operands[0]) else ()
    return Rule((dims,), (dims,), modes=modes, local=ShardCall())


@register_rule(aten.fft_fftshift, aten.fft_ifftshift)
def shifted(call: OpCall) -> Rule:
    """Halves of dims exchanged: only elements move along them."""
    ndim = call.operands[0].ndim
    every = letters(ndim)
    over = normalize_dims(call.get("dim"), ndim)
    dims = text_dims(every)
    return Rule((dims,), (dims,), permuted=frozenset(every[dim] for dim in over),
                modes=all_modes(0), local=ShardCall())  # fmt: skip


@register_rule(aten.stft)
def stft(call: OpCall) -> Rule:
    """Transforms of overlapping windows of signals: linear in them, and in the window."""
    made = call.result
    batch = letters(call.operands[0].ndim - 1)
    operands = ((*text_dims(batch), ()), *(((),) for _ in call.operands[1:]))
    result = text_dims(batch) + ((),) * (made.ndim - len(batch))
    return Rule(operands, (result,), modes=linear_modes(*range(len(operands))), local=ShardCall())


@register_rule(aten.istft)
def istft(call: OpCall) -> Rule:
    """Signals put together of windows: linear in the transforms, which the window divides."""
    x, made = call.operands[0], call.result
    batch = letters(made.ndim - 1)
    operands = (text_dims(batch) + ((),) * (x.ndim - len(batch)),
                *(((),) for _ in call.operands[1:]))  # fmt: skip
    return Rule(operands, ((*text_dims(batch), ()),), modes=linear_modes(0), local=ShardCall())
