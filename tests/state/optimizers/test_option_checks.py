"""Arguments of optimizers out of range: refused when the optimizer is made, all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs

S = fs.state
NAN = float("nan")
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: S.sgd(-0.1), r"sgd.*lr=-0\.1.*lr must be a finite number of at least 0"),
    (lambda: S.sgd(NAN), r"lr=nan.*lr must be a finite number"),
    (lambda: S.sgd("0.1"), r"lr='0\.1'.*lr must be"),  # type: ignore[arg-type]
    (lambda: S.sgd(0.1, momentum=-1.0), r"momentum must be a finite number of at least 0"),
    (lambda: S.sgd(0.1, nesterov=True), r"nesterov must be False with momentum=0\.0"),
    (lambda: S.sgd(0.1, momentum=0.9, dampening=0.1, nesterov=True), r"and dampening=0\.1"),
    (lambda: S.adamw(0.1, betas=(0.9, 1.0)), r"betas\[1\]=1\.0.*from 0 to below 1"),
    (lambda: S.adamw(0.1, betas=0.9), r"betas must be a tuple of two"),  # type: ignore[arg-type]
    (lambda: S.adamw(0.1, eps=-1e-8), r"eps must be a finite number of at least 0"),
    (lambda: S.adamw(-1, weight_decay=-1), r"lr must be.*weight_decay must be"),
    (lambda: S.adafactor(0.1, d=0.5), r"d must be a finite number of at least 1"),
    (lambda: S.adafactor(0.1, beta2_decay=0.8), r"beta2_decay must be a number of at most 0"),
    (lambda: S.adafactor(0.1, eps=(None, -1.0)), r"eps\[1\] must be"),
    (lambda: S.muon(0.1, momentum=1.0), r"momentum must be a number from 0 to below 1"),
    (lambda: S.muon(0.1, steps=0), r"steps must be an int of at least 1"),
    (lambda: S.clip_by_global_norm({}, 0.0), r"max_norm must be a number above 0"),
    (lambda: S.clip_by_global_norm({}, NAN), r"max_norm must be a number above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("create", "error"), REFUSED)
def test_arguments_out_of_range_are_refused(create: Callable[[], Any], error: str) -> None:
    with pytest.raises(fs.ShardingError, match=f"(?s){error}"):
        create()


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (S.sgd, torch.optim.SGD, {"momentum": 1.5, "dampening": 0.5}),
        (S.sgd, torch.optim.SGD, {"lr": 0.0, "weight_decay": 0.0}),
        (S.adamw, torch.optim.AdamW, {"betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 2.0}),
        (S.adafactor, torch.optim.Adafactor, {"d": 1.0, "eps": (1e-30, 0.0), "beta2_decay": 0.0}),
    ],
)
def test_limits_are_those_of_torch(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    rate = {"lr": 0.1} | options
    theirs([torch.ones(2)], **rate)
    assert ours(**rate).name


def test_rates_may_be_functions() -> None:
    assert S.adamw(lambda step: 1e-3 / step).name == "fs.state.adamw"


def test_trees_without_parameters_are_refused() -> None:
    with pytest.raises(fs.ShardingError, match="there must be parameters"):
        fs.state.adamw(0.1).init({})


def test_states_and_gradients_of_others_are_refused() -> None:
    params = S.tree_shard({"w": torch.ones(4), "b": torch.ones(2)}, fs.P("x"), mesh=fs.Mesh(x=2))
    adamw, sgd = S.adamw(0.1), S.sgd(0.1)
    with pytest.raises(fs.ShardingError, match=r"a state of step(.|\n)*mean, square, step"):
        adamw.update(params, sgd.init(params), params)
    with pytest.raises(fs.ShardingError, match=r"b of grads: NoneType(.|\n)*a state without b"):
        adamw.update({**params, "b": None}, adamw.init(params), params)


def test_attributes_of_optimizers_of_pytorch_name_those_of_fshard() -> None:
    with pytest.raises(
        AttributeError, match=r"an Optimizer has no attribute 'step'\n  fix:   state"
    ):
        fs.state.sgd(0.1).step()  # type: ignore[attr-defined]
