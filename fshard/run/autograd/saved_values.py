"""Tensors that calls of fshard save for the backward pass."""

from __future__ import annotations

import re
from typing import Any

import torch

from fshard._util.errors import fail
from fshard.run.transports.divergence_report import user_line


def saved_tensors(ctx: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a node of autograd, which has its call's backward label in `label`.

    Raises:
        ShardingError: if one was written since it was saved.
    """
    try:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        written = re.search(r"modified by an inplace operation: (.*?)\. Hint", str(error))
        if written is None or ctx.label is None:
            raise
        fail(f"{ctx.label.name}{user_line(None, ctx.label)}",
             f"an operand or result that was written in place after the call, {written[1]}",
             "what a call saves for its gradient must keep its values until the backward pass",
             "write a copy: y = x.clone(), and y in the place of x from there on")  # fmt: skip
    return saved
