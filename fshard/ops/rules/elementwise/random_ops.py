"""Rules of random operations: keyed draws may be sharded, draws by a generator are refused.

A rank's generator cannot draw the values that one device draws for the global tensor, so
bernoulli, rand_like, normal, dropout in training and others raise an error that names the keyed
replacement. The draws of `fs.random` depend on the key and on each element's global position,
so that every dim may be sharded. A dropout that is off passes its operand through.
"""

from __future__ import annotations

from typing import Any, NoReturn

from fshard._util.errors import fail
from fshard.ops.core.builders import align_factors, dim_factors, unread_modes
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.prng.draw_ops import DRAW_SCHEMAS
from fshard.ops.rules.index.local_indices import EQUAL, select_modes
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

KEYED = (
    "with fs.random.keyed(key): around fs.apply, or in a function for fs.partition, draws by the "
    "key"
)
"""Fix for code whose draws cannot be replaced, such as modules."""


# -- by a key ---------------------------------------------------------------------------------


@register_rule(*(f"fshard::{name}" for name in DRAW_SCHEMAS))
def keyed_draw(call: OpCall) -> Rule:
    """Rule of keyed draws: every dim may be sharded, as in the tensor that the draw is like.

    Dims of several keys come first in the result; they broadcast in the tensor it is like.
    """
    key_index, result = call.operand_index("key"), call.result
    assert key_index is not None
    keys = dim_factors(call.operands[key_index].ndim - 1, "k")
    dims = keys + dim_factors(result.ndim - len(keys))
    if not key_index:
        return Rule(((*keys, ()),), (dims,), local=_draw_shard)
    like = align_factors(call.operands[0].shape, result.shape, dims)
    return Rule((like, (*keys, ())), (dims,), modes=unread_modes(0), local=_draw_shard)


def _draw_shard(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Draw one rank's shard: its global offset and its local size."""
    like, key, shape, start, size, *parameters = args
    keys = len(ctx.shape()) - len(size)
    offsets = [begin + ctx.result_offset(keys + dim) for dim, begin in enumerate(start)]
    return op(like, key, shape, offsets, ctx.shape()[keys:], *parameters, **kwargs)


@register_rule("fshard::split")
def split(call: OpCall) -> Rule:
    """Rule of `fs.random.split`: the dims of several keys may be sharded."""
    keys = dim_factors(call.operands[0].ndim - 1)
    return Rule(((*keys, ()),), ((*keys, (), ()),))


@register_rule("fshard::fold_in")
def fold_in(call: OpCall) -> Rule:
    """Rule of `fs.random.fold_in`: keys and data broadcast; the words of a key stay together."""
    key, *data = call.operands
    result = call.result
    shape, dims = result.shape[:-1], dim_factors(result.ndim - 1)
    operands = ((*align_factors(key.shape[:-1], shape, dims), ()),
                *(align_factors(meta.shape, shape, dims) for meta in data))  # fmt: skip
    return Rule(tuple(operands), ((*dims, ()),))


# -- by a generator ---------------------------------------------------------------------------


def _refuse(call: OpCall, replacement: str) -> NoReturn:
    """Raise the error of an operation that draws by a generator, with its replacement."""
    operands = ", ".join(
        f"{str(m.dtype).removeprefix('torch.')}{list(m.shape)}"
        for m in call.operands or (call.result,)
    )
    fail(f"fs.propagate({call.op})", operands,
         "draws must be keyed: a rank's generator does not draw the values of the global tensor",
         replacement)  # fmt: skip


def _dropout(call: OpCall) -> Rule:
    """Rule of a dropout that is off: the identity."""
    p, train = call.get("p"), call.get("train")
    if p and train is not False:
        _refuse(call, f"{KEYED}; p=0.0, or eval() of a module, drops nothing")
    x = call.operands[0]
    dims = dim_factors(x.ndim)
    if len(call.results) == 1:
        return Rule((dims,), (dims,), modes=select_modes(0))
    # The mask keeps all elements of any operand.
    modes = tuple(Mode((0,), kind, (kind, None)) for kind in EQUAL)
    return Rule((dims,), (dims, dims), modes=modes, local=_masked_shard)


def _masked_shard(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Return the shard and its mask, whose dtype PyTorch gets wrong for empty tensors."""
    out, mask = op(*args, **kwargs)
    mask_spec = ctx.results[1]
    assert mask_spec is not None
    return out, mask.to(mask_spec.dtype)


DROPOUTS = """
    dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout
""".split()  # noqa: SIM905
register_rule(*DROPOUTS)(_dropout)


def _rrelu(call: OpCall) -> Rule:
    """Rule of `rrelu` that is off: a leaky rectifier with one slope."""
    if call.get("training"):
        _refuse(call, f"fs.random.uniform(key, spec) draws slopes; {KEYED}; training=False has "
                "one slope")  # fmt: skip
    dims = dim_factors(call.operands[0].ndim)
    results: tuple[Dims, ...] = (dims,) * len(call.results)
    return Rule((dims,) * len(call.operands), results)


register_rule("rrelu", "rrelu_with_noise", "rrelu_with_noise_functional")(_rrelu)


DRAWS = {
    "fs.random.uniform(key, spec) draws by a key": "rand rand_like uniform cauchy",
    "fs.random.normal(key, spec) draws by a key": (
        "randn randn_like normal normal_functional log_normal"
    ),
    "fs.random.randint(key, spec, low, high) draws by a key": "randint randint_like random",
    "fs.random.permutation(key, spec) draws by a key": "randperm",
    "fs.random.uniform(key, spec) < p draws by a key, in float32": "bernoulli",
    "fs.random.exponential(key, spec) draws by a key": "exponential geometric multinomial",
}
"""Operations that draw by a generator, by their keyed replacement."""
UNKEYED = "poisson binomial _standard_gamma _sample_dirichlet _fused_dropout"


def _register_refusal(replacement: str, names: str) -> None:
    def refuse(call: OpCall) -> Rule:
        _refuse(call, replacement)

    register_rule(*names.split())(refuse)


for _instead, _names in DRAWS.items():
    _register_refusal(f"{_instead}; {KEYED}", _names)
_register_refusal(
    "draw the global tensor with a generator of the same seed on every rank, and fs.shard it",
    UNKEYED,
)
