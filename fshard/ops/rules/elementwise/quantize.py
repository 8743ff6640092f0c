"""Rules of fake quantization, which rounds elements by one scale or by one scale per channel."""

from __future__ import annotations

from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.letters import letters
from fshard.ops.rules.shard_call import ShardCall

FAKE_QUANTIZE = """
    fake_quantize_per_tensor_affine fake_quantize_per_tensor_affine_cachemask
    fake_quantize_per_channel_affine fake_quantize_per_channel_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
"""


@register_rule(*FAKE_QUANTIZE.split())
def fake_quantize(call: OpCall) -> Rule:
    """Rule `bc,b,b->bc` of fake quantization per channel, `ab->ab` with one scale."""
    names = letters(call.operands[0].ndim)
    dims: Dims = tuple((letter,) for letter in names)
    channel: Dims = ((names[call.get("axis")],),) if call.has("axis") else ((),)
    scales = [channel[: meta.ndim] for meta in call.operands[1:]]
    return Rule((dims, *scales), (dims,) * len(call.results), local=ShardCall())
