"""Memory of coalesced all-reduces is used again only when nothing else refers to it."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from fshard._torch.memory import MAX_KEPT, BufferPool, FlatBuffer, keep_buffer

CPU = torch.device("cpu")


def test_a_buffer_is_free_only_while_nobody_holds_its_memory() -> None:
    buffer = FlatBuffer([(4,), (2,)], torch.float32, CPU)
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
    buffer = FlatBuffer([(4,)], torch.float32, CPU)
    buffer.parts()[0].untyped_storage().resize_(0)
    assert not buffer.is_free()


def test_few_plans_keep_buffers() -> None:
    plans: list[list[FlatBuffer]] = [[] for _ in range(2 * MAX_KEPT)]
    for plan in plans:
        keep_buffer(plan, FlatBuffer([(4,)], torch.float32, CPU))
        keep_buffer(plans[0], FlatBuffer([(4,)], torch.float32, CPU))
    assert sum(map(len, plans)) <= MAX_KEPT
    assert all((plans[0], plans[-1]))


def test_inference_tensors_are_not_used_again() -> None:
    pool = BufferPool([(4,)], torch.float32, CPU)
    with torch.inference_mode():
        pool()
    assert not pool()[0].is_inference()


def test_threads_do_not_share_a_buffer() -> None:
    pool = BufferPool([(1,)], torch.float32, CPU)

    def run(thread: int) -> bool:
        values = []
        for _ in range(500):
            (part,) = pool()
            values.append(part.fill_(thread) == thread)
        return all(values)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(run, range(4)))
    finally:
        sys.setswitchinterval(interval)
