"""Threefry-2x32: words that follow from a key and a counter, each alone and in any order.

Of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with 20
rounds. The counter of an element is its place in the whole tensor, row by row, as JAX counts with
`jax_threefry_partitionable`: so a part of a tensor is drawn without the rest, and a layout changes
no number.

Tensors of words are int32, whose sums wrap around as those of uint32 do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

__all__ = ["Box", "Hash", "derived", "fill", "hashed", "word", "words_of"]

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
MASK = 0xFFFFFFFF
FEW = 16
"""So many pairs of words are faster in Python's numbers, without a kernel."""
BLOCK = 1 << 15
"""Elements that a thread draws at once, with what it needs for them: they fit its cache."""
BLOCK_ELSEWHERE = 1 << 22
"""Elements that are drawn at once where a kernel costs a launch."""

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
Hash = Callable[[Words], Pair]
"""Of the counters of a block the two words under a key, in memory that the next call takes."""


def hashed(key: Sequence[int], counter: Sequence[int]) -> tuple[int, int]:
    """The two words of one counter, in Python's numbers.

    >>> [hex(word) for word in hashed((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3))]
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
def word(value: int) -> torch.Tensor:
    """A number as a word, in an int32 tensor of no dims: as an operand that costs no conversion."""
    value &= MASK
    return torch.tensor(value - (value >> 31 << 32), dtype=torch.int32, device="cpu")


def words_of(key: torch.Tensor) -> Words:
    """The words that a key mixes in: its own two, and their parity. Of several keys those of all.

    On the device of the key, which is not asked for its numbers.
    """
    x, y = key.to(torch.int32).unbind(-1)
    return x, y, x ^ y ^ word(PARITY)


def mix(x: torch.Tensor, y: torch.Tensor, spare: torch.Tensor, words: Words) -> None:
    """The rounds, in place, of counters that the key's first words were added to.

    A rotation is two shifts; the one to the right copies the sign, which is masked off, the one
    to the left is a product in the sum.
    """
    for turn in range(5):
        for by in ROTATIONS[turn % 2]:
            x.add_(y)
            torch.bitwise_right_shift(y, word(32 - by), out=spare)
            spare.bitwise_and_(word((1 << by) - 1)).add_(y, alpha=1 << by)
            torch.bitwise_xor(spare, x, out=y)
        x.add_(words[(turn + 1) % 3])
        y.add_(words[(turn + 2) % 3] + word(turn + 1))


def derived(key: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Keys that follow from keys and counters below 2**32, which broadcast: `(..., 2)`, int64."""
    first, second, low = torch.broadcast_tensors(key[..., 0], key[..., 1], counter)
    if low.numel() <= FEW and low.device.type == "cpu":
        listed = zip(*(each.flatten().tolist() for each in (first, second, low)), strict=True)
        made = [hashed((a, b), (0, c & MASK)) for a, b, c in listed]
        return torch.tensor(made, dtype=torch.int64, device="cpu").reshape(*low.shape, 2)
    words = words_of(torch.stack((first, second), -1))
    x, y = words[0].clone(), words[1] + low.to(torch.int32)
    mix(x, y, torch.empty_like(x), words)
    return torch.stack((x, y), -1).long() & MASK


# -- parts of a whole -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor of `shape`: `size` elements of every dim from `start` on."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def run(self) -> int:
        """So many elements lie one after the other in the whole, as in the part."""
        length = 1
        for whole, part in zip(reversed(self.shape), reversed(self.size), strict=True):
            length *= part
            if part != whole:
                break
        return length

    def begins(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Places in the whole where the runs from `first` to `last` begin, int64."""
        runs = torch.arange(first, last, device=device)
        places = torch.zeros_like(runs)
        inner, stride, run = 1, 1, self.run
        for whole, start, part in zip(
            reversed(self.shape), reversed(self.start), reversed(self.size), strict=True
        ):
            if inner < run:
                places += start * stride
                inner *= part
            else:
                places += (runs % part + start) * stride
                runs = runs // part
            stride *= whole
        return places


def fill(box: Box, out: torch.Tensor, write: Callable[[Hash, torch.Tensor], None]) -> None:
    """Write a part of a tensor block by block: `write` gets the blocks' words, and their places.

    `out` is contiguous, and of as many elements as the part.
    """
    flat, device = out.view(-1), out.device
    count = flat.numel()
    most = BLOCK * torch.get_num_threads() if device.type == "cpu" else BLOCK_ELSEWHERE
    block = min(count, most)
    places = torch.arange(block, dtype=torch.int32, device=device)
    memory = torch.empty(3, block, dtype=torch.int32, device=device)
    for first, last, counters in _blocks(box, count, block, places):

        def hash_(words: Words, n: int = last - first, counters: _Counters = counters) -> Pair:
            x, y, spare = memory[:, :n]
            counters(words, x, y)
            mix(x, y, spare, words)
            return x, y

        write(hash_, flat[first:last])


_Counters = Callable[[Words, torch.Tensor, torch.Tensor], None]
"""Writes the counters of a block, with the words of a key added to them."""


def _blocks(
    box: Box, count: int, block: int, places: torch.Tensor
) -> Iterator[tuple[int, int, _Counters]]:
    """The blocks of a part: where they begin and end in it, and their counters."""
    run = box.run if count else 1
    if run > block // 2:
        for first in range(0, count, run):
            whole = int(box.begins(first // run, first // run + 1, torch.device("cpu")))
            at = 0
            while at < run:
                # The upper word is the same in all of a block.
                n = min(block, run - at, (1 << 32) - (whole + at & MASK))
                yield first + at, first + at + n, _line(whole + at, places[:n])
                at += n
        return
    rows = max(block // run, 1)
    for row in range(0, count // run, rows):
        last = min(row + rows, count // run)
        yield row * run, last * run, _rows(box, row, last, places[:run])


def _line(begin: int, places: torch.Tensor) -> _Counters:
    def write(words: Words, x: torch.Tensor, y: torch.Tensor) -> None:
        x.copy_(words[0] + word(begin >> 32))
        torch.add(places, words[1] + word(begin), out=y)

    return write


def _rows(box: Box, first: int, last: int, places: torch.Tensor) -> _Counters:
    def write(words: Words, x: torch.Tensor, y: torch.Tensor) -> None:
        begins = box.begins(first, last, places.device).unsqueeze(-1)
        shape = begins.shape[0], places.shape[0]
        x.copy_(words[0])
        torch.add(begins.to(torch.int32), places, out=y.view(shape))
        if math.prod(box.shape) > 1 << 32:
            x.view(shape).add_((begins + places >> 32).to(torch.int32))
        y.add_(words[1])

    return write
