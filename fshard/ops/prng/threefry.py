"""Threefry-2x32: a hash of a key and a counter into two random 32-bit words.

After Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with
20 rounds. The counter of an element is its row-major index in the global tensor, as in JAX with
`jax_threefry_partitionable`. Any shard can thus be drawn alone, and the layout changes no value.

Words are stored as int32, whose sums wrap around as those of uint32 do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
MASK = 0xFFFFFFFF
MAX_HOST_HASHES = 16
"""Up to this number of hashes Python integers are faster than tensor kernels."""
CPU_BLOCK = 1 << 15
"""Elements per thread and block on CPUs: a block and its scratch memory fit the cache."""
DEVICE_BLOCK = 1 << 22
"""Elements per block on other devices."""

KeyWords = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
HashBlock = Callable[[KeyWords], Pair]
"""Returns the two words of each counter of a block; the next call reuses their memory."""


def hash_counter(key: Sequence[int], counter: Sequence[int]) -> tuple[int, int]:
    """Return the two words of one counter, computed with Python integers.

    >>> [hex(word) for word in hash_counter((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3))]
    ['0xc4923a9c', '0x483df7a0']
    """
    words = key[0], key[1], key[0] ^ key[1] ^ PARITY
    x, y = (counter[0] + words[0]) & MASK, (counter[1] + words[1]) & MASK
    for turn in range(5):
        for by in ROTATIONS[turn % 2]:
            x = (x + y) & MASK
            y = ((y << by | y >> (32 - by)) & MASK) ^ x
        x = (x + words[(turn + 1) % 3]) & MASK
        y = (y + words[(turn + 2) % 3] + turn + 1) & MASK
    return x, y


@lru_cache(maxsize=1024)
def word_tensor(value: int) -> torch.Tensor:
    """Return an integer, modulo 2**32, as an int32 tensor without dims; cached."""
    value &= MASK
    return torch.tensor(value - (value >> 31 << 32), dtype=torch.int32, device="cpu")


def key_words(key: torch.Tensor) -> KeyWords:
    """Return the two words of a key, or of each of several keys, and their parity word.

    They stay on the key's device; nothing is copied to the host.
    """
    x, y = key.to(torch.int32).unbind(-1)
    return x, y, x ^ y ^ word_tensor(PARITY)


def mix_in_place(x: torch.Tensor, y: torch.Tensor, scratch: torch.Tensor, words: KeyWords) -> None:
    """Apply the 20 rounds in place to counters plus the first two key words.

    A rotation is a right shift, with the copied sign bits masked off, and a left shift, written
    as a product within the sum.
    """
    for turn in range(5):
        for by in ROTATIONS[turn % 2]:
            x.add_(y)
            torch.bitwise_right_shift(y, word_tensor(32 - by), out=scratch)
            scratch.bitwise_and_(word_tensor((1 << by) - 1)).add_(y, alpha=1 << by)
            torch.bitwise_xor(scratch, x, out=y)
        x.add_(words[(turn + 1) % 3])
        y.add_(words[(turn + 2) % 3] + word_tensor(turn + 1))


def derive_keys(key: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Return the keys `(..., 2)`, int64, of keys `(..., 2)` and counters below 2**32, broadcast."""
    first, second, low = torch.broadcast_tensors(key[..., 0], key[..., 1], counter)
    if low.numel() <= MAX_HOST_HASHES and low.device.type == "cpu":
        rows = zip(*(x.flatten().tolist() for x in (first, second, low)), strict=True)
        keys = [hash_counter((a, b), (0, c & MASK)) for a, b, c in rows]
        return torch.tensor(keys, dtype=torch.int64, device="cpu").reshape(*low.shape, 2)
    words = key_words(torch.stack((first, second), -1))
    x, y = words[0].clone(), words[1] + low.to(torch.int32)
    mix_in_place(x, y, torch.empty_like(x), words)
    return torch.stack((x, y), -1).long() & MASK


# -- boxes of a tensor ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Box:
    """Box of a tensor of `shape`: `size` elements of each dim, beginning at `start`."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def run(self) -> int:
        """Number of consecutive elements of the box that are also consecutive in the tensor."""
        length = 1
        for full, size in zip(reversed(self.shape), reversed(self.size), strict=True):
            length *= size
            if size != full:
                break
        return length

    def run_starts(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Return the row-major indices, int64, at which the runs `first` to `last` begin."""
        runs = torch.arange(first, last, device=device)
        indices = torch.zeros_like(runs)
        inner, stride, run = 1, 1, self.run
        for full, start, size in zip(
            reversed(self.shape), reversed(self.start), reversed(self.size), strict=True
        ):
            if inner < run:
                indices += start * stride
                inner *= size
            else:
                indices += (runs % size + start) * stride
                runs = runs // size
            stride *= full
        return indices


def fill_box(box: Box, out: torch.Tensor, write: Callable[[HashBlock, torch.Tensor], None]) -> None:
    """Call `write` with the hash function and the elements of each block of `out`.

    `out` is contiguous and has as many elements as the box.
    """
    flat, device = out.view(-1), out.device
    count = flat.numel()
    max_block = CPU_BLOCK * torch.get_num_threads() if device.type == "cpu" else DEVICE_BLOCK
    block = min(count, max_block)
    offsets = torch.arange(block, dtype=torch.int32, device=device)
    memory = torch.empty(3, block, dtype=torch.int32, device=device)
    for first, last, write_counters in _blocks(box, count, block, offsets):

        def hash_block(
            words: KeyWords, n: int = last - first, write_counters: _WriteCounters = write_counters
        ) -> Pair:
            x, y, scratch = memory[:, :n]
            write_counters(words, x, y)
            mix_in_place(x, y, scratch, words)
            return x, y

        write(hash_block, flat[first:last])


_WriteCounters = Callable[[KeyWords, torch.Tensor, torch.Tensor], None]
"""Writes the counters of a block plus the first two words of a key."""


def _blocks(
    box: Box, count: int, block: int, offsets: torch.Tensor
) -> Iterator[tuple[int, int, _WriteCounters]]:
    """Yield each block's first and last element in the box, and the function of its counters."""
    run = box.run if count else 1
    if run > block // 2:
        for first in range(0, count, run):
            start = int(box.run_starts(first // run, first // run + 1, torch.device("cpu")))
            done = 0
            while done < run:
                # All counters of a block share their upper word.
                n = min(block, run - done, (1 << 32) - (start + done & MASK))
                yield first + done, first + done + n, _run_counters(start + done, offsets[:n])
                done += n
        return
    rows = max(block // run, 1)
    for row in range(0, count // run, rows):
        last = min(row + rows, count // run)
        yield row * run, last * run, _row_counters(box, row, last, offsets[:run])


def _run_counters(start: int, offsets: torch.Tensor) -> _WriteCounters:
    def write(words: KeyWords, x: torch.Tensor, y: torch.Tensor) -> None:
        x.copy_(words[0] + word_tensor(start >> 32))
        torch.add(offsets, words[1] + word_tensor(start), out=y)

    return write


def _row_counters(box: Box, first: int, last: int, offsets: torch.Tensor) -> _WriteCounters:
    def write(words: KeyWords, x: torch.Tensor, y: torch.Tensor) -> None:
        starts = box.run_starts(first, last, offsets.device).unsqueeze(-1)
        shape = starts.shape[0], offsets.shape[0]
        x.copy_(words[0])
        torch.add(starts.to(torch.int32), offsets, out=y.view(shape))
        if math.prod(box.shape) > 1 << 32:
            x.view(shape).add_((starts + offsets >> 32).to(torch.int32))
        y.add_(words[1])

    return write
