"""Rules of recurrent layers and cells: lstm, gru, rnn_tanh, rnn_relu.

Only the batch may be sharded: a step reads all of the previous step's hidden state.
"""

from __future__ import annotations

from fshard._torch.operators import schema_of
from fshard._util.errors import fail
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.letters import no_factors
from fshard.ops.rules.shard_call import ShardCall


@register_rule("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def layers(call: OpCall) -> Rule:
    """Rule of all steps of all layers; dropout between layers is refused."""
    if call.get("dropout") and call.get("train"):
        fail(
            f"fs.propagate({call.op})",
            f"dropout={call.get('dropout')} while training",
            "draws must be keyed: a rank's generator does not draw the values of the global tensor",
            "dropout=0.0, and between the layers, each called alone, "
            "x * fs.random.dropout_mask(key, x, p)",
        )
    states = 2 if schema_of(call.op).name == "aten::lstm" else 1
    rows: Dims = (("n",), (), ()) if call.get("batch_first") else ((), ("n",), ())
    state: Dims = ((), ("n",), ())
    weights = [no_factors(meta) for meta in call.operands[1 + states :]]
    return Rule((rows, *(state,) * states, *weights), (rows, *(state,) * states), local=ShardCall())


@register_rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
               "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")  # fmt: skip
def cell(call: OpCall) -> Rule:
    """Rule of one step; on GPUs it is one operation of both products and the state."""
    name = schema_of(call.op).name
    states = 3 if name == "aten::lstm_cell" or "fused" in name else 2
    rows: Dims = (("n",), ())
    weights = [no_factors(meta) for meta in call.operands[states:]]
    return Rule((*(rows,) * states, *weights), (rows,) * len(call.results), local=ShardCall())


@register_rule("_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward")
def fused_cell_backward(call: OpCall) -> Rule:
    """Rule of the gradients of a step on GPUs; gradients of biases are sums over the batch."""
    rows: Dims = (("n",), ())
    results = tuple(
        None if meta is None else rows if meta.ndim == 2 else no_factors(meta)
        for meta in call.results
    )
    sums = (("n", "sum"),) if any(dims == ((),) for dims in results) else ()
    return Rule((rows,) * len(call.operands), results, sums, modes=(), local=ShardCall())
