"""Rules and schemas of the draw operations: shards on any axis are shards of one global draw."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard.ops.prng.draw_ops import DRAW_SCHEMAS
from tests.helpers.ops.samples import Sample, rand, rule_errors, rule_text

ops = torch.ops.fshard
KEY = fs.random.key(3)
KEYS = fs.random.split(KEY, 4)
F64 = {"dtype": torch.float64}
BOX = [4, 3], [0, 0], [4, 3]

SAMPLES: dict[str, Sample] = {
    "uniform": lambda: (ops.uniform, None, KEY, *BOX, -1.0, 2.0, F64),
    "uniform like": lambda: (ops.uniform, rand(4, 3), KEY, *BOX, 0.0, 1.0, F64),
    "uniform of a part": lambda: (
        ops.uniform, None, KEY, [9, 9], [2, 5], [4, 3], 0.0, 1.0, F64),
    "normal": lambda: (ops.normal, rand(4, 3), KEY, *BOX, F64),
    "normal of no dims": lambda: (ops.normal, rand(), KEY, [], [], [], F64),
    "normal of nothing": lambda: (ops.normal, rand(0, 3), KEY, [0, 3], [0, 0], [0, 3], F64),
    "normal by keys": lambda: (ops.normal, None, KEYS, *BOX, F64),
    "normal by keys, like": lambda: (ops.normal, rand(4, 3), KEYS, *BOX, F64),
    "normal by keys, like all": lambda: (ops.normal, rand(4, 4, 3), KEYS, *BOX, F64),
    "normal by keys, like one": lambda: (ops.normal, rand(1, 4, 3), KEYS, *BOX, F64),
    "randint": lambda: (
        ops.randint, rand(4, 3), KEY, *BOX, -5, 5, {"dtype": torch.int64}),
    "bits": lambda: (ops.bits, None, KEY, *BOX, {"dtype": torch.int32}),
    "bernoulli": lambda: (ops.bernoulli, rand(4, 3), KEY, *BOX, 0.5, {"dtype": torch.bool}),
    "permutation": lambda: (ops.permutation, None, KEY, [7], [0], [7], {"dtype": torch.int64}),
    "permutation by keys": lambda: (
        ops.permutation, None, KEYS, [7], [0], [7], {"dtype": torch.int32}),
    "split": lambda: (ops.split, KEY, 3),
    "split of keys": lambda: (ops.split, KEYS, 3),
    "fold_in": lambda: (ops.fold_in, KEYS, 3),
    "fold_in of numbers": lambda: (ops.fold_in, KEYS, torch.arange(4)),
    "fold_in of many": lambda: (ops.fold_in, KEYS, torch.arange(12).reshape(3, 4)),
    "fold_in of a number": lambda: (ops.fold_in, KEYS, torch.tensor(3)),
    "fold_in of numbers in one": lambda: (ops.fold_in, KEY, torch.arange(4)),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SAMPLES)
def test_shards_of_draws_match_the_global_draw(name: str) -> None:
    assert rule_errors(SAMPLES[name], two_axes=name in ("uniform like", "normal by keys")) == []


RULES = {
    "uniform": "1->d0 d1",
    "uniform of a part": "1->d0 d1",
    "normal by keys": "k0 1->k0 d0 d1",
    "permutation": "1->d0",
    "split of keys": "d0 1->d0 1 1",
    "fold_in of many": "d1 1,d0 d1->d0 d1 1",
}


@pytest.mark.parametrize("name", RULES)
def test_str_of_rules(name: str) -> None:
    assert rule_text(*SAMPLES[name]()).replace("()", "1") == RULES[name]


def test_draw_follows_the_layout_of_like() -> None:
    """A draw like an unreduced tensor is invariant."""
    assert rule_text(*SAMPLES["normal"]()).replace("()", "1") == (
        "d0 d1,1->d0 d1  {unreduced 0 sum -> invariant; unreduced 0 avg -> invariant; "
        "unreduced 0 max -> invariant; unreduced 0 min -> invariant; "
        "unreduced 0 product -> invariant}"
    )


def test_operations_pass_opcheck() -> None:
    """Check schemas, and shapes of fake tensors."""
    checks = ("test_schema", "test_faketensor")
    for name in DRAW_SCHEMAS:
        op = getattr(ops, name).default
        sample = next(make for key, make in SAMPLES.items() if key.startswith(name))
        _, *args, named = sample()
        torch.library.opcheck(op, tuple(args), named, test_utils=checks)
    torch.library.opcheck(ops.split.default, (KEYS, 3), test_utils=checks)
    torch.library.opcheck(ops.fold_in.default, (KEYS, 3), test_utils=checks)
    torch.library.opcheck(ops.fold_in.Tensor, (KEYS, torch.arange(4)), test_utils=checks)
