"""Rules of operations that draw random numbers: they are refused, with what to use in their place.

What a rank's generator draws is no part of what one device's draws, and is either the same on
every rank or of no use to who wants to repeat it elsewhere. `fs.random` draws by keys, of which
every element of the whole tensor has one. What draws nothing, a dropout that is off, passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from fshard.errors import fail
from fshard.ops.build import dims_of
from fshard.ops.call import Call
from fshard.ops.local import Here
from fshard.ops.registry import register_rule
from fshard.ops.rule import Dims, Mode, Rule
from fshard.ops.shifting import EQUAL, selecting

__all__: list[str] = []


def _refused(call: Call, instead: str) -> NoReturn:
    given = ", ".join(
        f"{str(m.dtype).removeprefix('torch.')}{list(m.shape)}" for m in call.operands
    )
    fail(f"fs.propagate({call.op})", given,
         "it draws from this rank's generator, whose numbers are not those of the whole tensor",
         instead)  # fmt: skip


# -- dropout ----------------------------------------------------------------------------------


def _dropout(call: Call) -> Rule:
    """Off, a dropout is the identity: every dim passes."""
    p, train = call.get("p"), call.get("train")
    if p and train is not False:
        _refused(call, "x * fs.random.dropout_mask(key, spec, p) drops by a key; "
                       "p=0.0 or train=False drops nothing")  # fmt: skip
    x = call.operands[0]
    dims = dims_of(x.ndim)
    if len(call.results) == 1:
        return Rule((dims,), (dims,), modes=selecting(0))
    # The mask keeps everything, whatever that is.
    modes = tuple(Mode((0,), kind, (kind, None)) for kind in EQUAL)
    return Rule((dims,), (dims, dims), modes=modes, local=_kept)


def _kept(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: Here) -> Any:
    """A part with its mask, whose dtype PyTorch has wrong where the part is empty."""
    out, mask = op(*args, **kwargs)
    made = here.results[1]
    assert made is not None
    return out, mask.to(made.dtype)


DROPOUTS = """
    dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout
""".split()  # noqa: SIM905
register_rule(*DROPOUTS, family="random")(_dropout)


def _mixed(call: Call) -> Rule:
    """Off, a leaky rectifier of one slope for all elements: every dim passes."""
    if call.get("training"):
        _refused(call, "training=False has one slope; fs.random.uniform(key, spec) draws slopes")
    dims = dims_of(call.operands[0].ndim)
    results: tuple[Dims, ...] = (dims,) * len(call.results)
    return Rule((dims,) * len(call.operands), results)


register_rule("rrelu", "rrelu_with_noise", "rrelu_with_noise_functional", family="random")(_mixed)


# -- draws ------------------------------------------------------------------------------------

DRAWS = {
    "fs.random.uniform(key, spec) draws by a key": "rand_like uniform random",
    "fs.random.normal(key, spec) draws by a key": "randn_like normal normal_functional log_normal",
    "fs.random.randint(key, spec, low, high) draws by a key": "randint_like",
    "fs.random.uniform(key, spec) < p draws by a key": "bernoulli",
    "draw whole with a generator of the same seed on every rank, and fs.shard that": (
        "multinomial poisson binomial exponential geometric cauchy _standard_gamma "
        "_sample_dirichlet _fused_dropout"
    ),
}
"""What to use in the place of operations that draw."""


def _draws(instead: str) -> None:
    def refuse(call: Call) -> Rule:
        _refused(call, instead)

    register_rule(*DRAWS[instead].split(), family="random")(refuse)


for _instead in DRAWS:
    _draws(_instead)
