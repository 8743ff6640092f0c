"""Rules of operations that draw random numbers: those of a key pass, those of a generator do not.

What a rank's generator draws is no part of what one device's draws, and is either the same on
every rank or of no use to who wants to repeat it elsewhere: such an operation is refused, with what
to use in its place. `fs.random` draws by a key, every element from its place in the whole tensor,
so that a draw can be cut as one likes. What draws nothing, a dropout that is off, passes.
"""

from __future__ import annotations

from typing import Any, NoReturn

from fshard._util.errors import fail
from fshard.ops.core.builders import align_factors, dim_factors, unread_modes
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.prng.draw_ops import DRAWN
from fshard.ops.rules.index.local_indices import EQUAL, selecting
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

__all__ = ["KEYED"]

KEYED = "with fs.random.keyed(key): in a function for fs.partition draws by the key"
"""The way out for code that draws by itself, as modules do."""


# -- by a key ---------------------------------------------------------------------------------


@register_rule(*(f"fshard::{name}" for name in DRAWN))
def drawn(call: OpCall) -> Rule:
    """Every dim can be cut on every axis: a rank draws its part. It lies as what it is to be like.

    Several keys make as many tensors, so their dims come first; one of size 1 of what it is to be
    like is there for all keys.
    """
    place, made = call.operand_index("key"), call.result
    assert place is not None
    keys = dim_factors(call.operands[place].ndim - 1, "k")
    dims = keys + dim_factors(made.ndim - len(keys))
    if not place:
        return Rule(((*keys, ()),), (dims,), local=_part)
    like = align_factors(call.operands[0].shape, made.shape, dims)
    return Rule((like, (*keys, ())), (dims,), modes=unread_modes(0), local=_part)


def _part(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """The draw of what a rank holds: its place in the whole, and its size."""
    like, key, shape, start, size, *rest = args
    mine = ctx.shape()
    keys = len(mine) - len(size)
    begins = [begin + ctx.result_offset(keys + dim) for dim, begin in enumerate(start)]
    return op(like, key, shape, begins, mine[keys:], *rest, **kwargs)


@register_rule("fshard::split")
def split(call: OpCall) -> Rule:
    """Of a key all that follow, on every rank."""
    keys = dim_factors(call.operands[0].ndim - 1)
    return Rule(((*keys, ()),), ((*keys, (), ()),))


@register_rule("fshard::fold_in")
def folded(call: OpCall) -> Rule:
    """Keys and numbers broadcast; the words of a key stay together."""
    key, *data = call.operands
    made = call.result
    shape, dims = made.shape[:-1], dim_factors(made.ndim - 1)
    operands = (
        (*align_factors(key.shape[:-1], shape, dims), ()),
        *(align_factors(each.shape, shape, dims) for each in data),
    )
    return Rule(tuple(operands), ((*dims, ()),))


# -- by a generator ---------------------------------------------------------------------------


def _refused(call: OpCall, instead: str) -> NoReturn:
    given = ", ".join(
        f"{str(m.dtype).removeprefix('torch.')}{list(m.shape)}" for m in call.operands
    )
    fail(f"fs.propagate({call.op})", given,
         "it draws from this rank's generator, whose numbers are not those of the whole tensor",
         instead)  # fmt: skip


def _dropout(call: OpCall) -> Rule:
    """Off, a dropout is the identity: every dim passes."""
    p, train = call.get("p"), call.get("train")
    if p and train is not False:
        _refused(call, f"fs.random.dropout_mask(key, spec, p), a factor, drops by a key; {KEYED}; "
                       "p=0.0 or train=False drops nothing")  # fmt: skip
    x = call.operands[0]
    dims = dim_factors(x.ndim)
    if len(call.results) == 1:
        return Rule((dims,), (dims,), modes=selecting(0))
    # The mask keeps everything, whatever that is.
    modes = tuple(Mode((0,), kind, (kind, None)) for kind in EQUAL)
    return Rule((dims,), (dims, dims), modes=modes, local=_kept)


def _kept(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """A part with its mask, whose dtype PyTorch has wrong where the part is empty."""
    out, mask = op(*args, **kwargs)
    made = ctx.results[1]
    assert made is not None
    return out, mask.to(made.dtype)


DROPOUTS = """
    dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout
""".split()  # noqa: SIM905
register_rule(*DROPOUTS)(_dropout)


def _mixed(call: OpCall) -> Rule:
    """Off, a leaky rectifier of one slope for all elements: every dim passes."""
    if call.get("training"):
        _refused(call, f"fs.random.uniform(key, spec) draws slopes; {KEYED}; training=False has "
                       "one slope")  # fmt: skip
    dims = dim_factors(call.operands[0].ndim)
    results: tuple[Dims, ...] = (dims,) * len(call.results)
    return Rule((dims,) * len(call.operands), results)


register_rule("rrelu", "rrelu_with_noise", "rrelu_with_noise_functional")(_mixed)


DRAWS = {
    "fs.random.uniform(key, spec) draws by a key": "rand_like uniform cauchy",
    "fs.random.normal(key, spec) draws by a key": (
        "randn_like normal normal_functional log_normal"
    ),
    "fs.random.randint(key, spec, low, high) draws by a key": "randint_like random",
    "fs.random.uniform(key, spec) < p draws by a key, in float32": "bernoulli",
    "fs.random.exponential(key, spec) draws by a key": "exponential geometric multinomial",
}
"""Operations that draw, by what draws by a key in their place, or what they are made of."""
UNKEYED = "poisson binomial _standard_gamma _sample_dirichlet _fused_dropout"


def _draws(instead: str, names: str) -> None:
    def refuse(call: OpCall) -> Rule:
        _refused(call, instead)

    register_rule(*names.split())(refuse)


for _instead, _names in DRAWS.items():
    _draws(f"{_instead}; {KEYED}", _names)
_draws("draw whole with a generator of the same seed on every rank, and fs.shard that", UNKEYED)
