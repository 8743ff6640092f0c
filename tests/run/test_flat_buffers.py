"""Memory of coalesced all-reduces is used again only when nothing else refers to it."""

from __future__ import annotations

import torch

from fshard._torch.memory import FlatBuffer
from fshard.run import bucketing


def test_a_buffer_is_free_only_while_nobody_holds_its_memory() -> None:
    buffer = FlatBuffer([torch.ones(4), torch.ones(2)])
    assert buffer.is_free()
    parts = buffer.parts()
    assert not buffer.is_free()
    storage = parts[0].untyped_storage()
    array = parts[1].numpy()
    del parts
    assert not buffer.is_free(), "the storage and the array are held"
    del array
    assert not buffer.is_free(), "the storage is held, which is one object with the buffer's"
    del storage
    assert buffer.is_free()
    array = buffer.parts()[1].numpy()
    assert not buffer.is_free(), "the array is held"
    del array
    assert buffer.is_free()


def test_a_buffer_whose_memory_was_freed_is_not_used_again() -> None:
    buffer = FlatBuffer([torch.ones(4)])
    buffer.parts()[0].untyped_storage().resize_(0)
    assert not buffer.is_free()


def test_few_plans_keep_buffers() -> None:
    plans: list[list[FlatBuffer]] = [[] for _ in range(2 * bucketing.MAX_KEPT)]
    for plan in plans:
        bucketing._keep(plan, FlatBuffer([torch.ones(4)]))
        bucketing._keep(plans[0], FlatBuffer([torch.ones(4)]))
    assert sum(map(len, plans)) <= bucketing.MAX_KEPT
    assert all((plans[0], plans[-1]))
