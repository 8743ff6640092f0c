"""`ShardReader`: boxes of tensors in safetensors files, read into the memory of their destination.

Files are read, not mapped, so that no pages of them stay in the memory of a process.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard.state.checkpoints.checkpoint_index import StoredShard, StoredTensor
from fshard.state.checkpoints.shard_files import DTYPES, checksum, crc32, memory_of, safetensors

Ranges = Sequence[tuple[int, int]]
"""First and last index, exclusive, in each dim of a tensor in a file."""
MAX_GAP = 2**13
"""Bytes between two parts of a box up to which both are read at once.

Two pages of memory: a disk and the cache of the OS read most of these bytes anyway. In 8 columns of
1024 values of float32, 72 ms in the place of 464 ms for 128 MiB of which 16 are a rank's.
"""
MAX_STAGED = 2**22
"""Bytes of a file that are read at once to be copied from."""
MAX_OPEN = 64
"""Files that are open at once: a checkpoint may have more than a process may open."""
CHECKSUM_THREADS = 2  # one computes the checksum of what another reads from the cache of the OS
MAX_UNCHECKED = 2**26
"""Bytes of which the checksums may still be computed while others are read."""


class FileTensor(NamedTuple):
    """Tensor in a file.

    Attributes:
        shape: its sizes; complex128 is stored as float64, with a last dim of 2.
        dtype: its dtype in the file.
        begin: first byte of its elements in the file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int


class ShardReader:
    """Open files of one directory, of which slices are read.

    Checksums are computed by other threads while other values are read; the end of the `with`
    block waits for them.

    Attributes:
        compares: False to compute no checksums.
        problems: shards whose checksums differ, which the end of the `with` block raises.
    """

    def __init__(self, directory: Path, where: str) -> None:
        self.directory, self.where, self.compares = directory, where, True
        self.problems: list[Problem] = []
        self.headers: dict[str, dict[str, FileTensor]] = {}
        self.open: dict[str, FileIO] = {}
        self.unchecked: deque[tuple[Future[int], int, StoredShard, str]] = deque()
        self.staging: torch.Tensor | None = None
        self.executor = ThreadPoolExecutor(CHECKSUM_THREADS)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            with self.executor:
                if kind is None:
                    self._compare(0)
                    raise_if(self.where, self.problems)
        finally:
            for file in self.open.values():
                file.close()

    def tensors(self, name: str) -> dict[str, FileTensor]:
        """Return the tensors of a file by key; raise `ShardingError` if it is damaged."""
        header = self.headers.get(name)
        if header is None:
            path, package = self.directory / name, safetensors(self.where)
            try:
                with package.safe_open(path, framework="pt"):  # checks the header
                    header = self.headers[name] = _header(path, self.where)
            except (OSError, package.SafetensorError) as error:
                fail(self.where, f"{path}: {error}",
                     "the files of a checkpoint must be whole safetensors files",
                     "load an older checkpoint, or copy the file again")  # fmt: skip
        return header

    def read(
        self, tensor: StoredTensor, shard: StoredShard, ranges: Ranges, target: torch.Tensor
    ) -> None:
        """Read a box of a shard into a tensor on the CPU; few other bytes are read.

        The checksum of a shard that is read completely is compared with that in the index, soon.

        Args:
            tensor: the tensor that was saved.
            shard: one of its shards.
            ranges: the box in the shard.
            target: tensor of the sizes of the box and of the dtype of `tensor`, also a view.

        Raises:
            ShardingError: the file is damaged, or its tensor has another shape or dtype than in the
                index; from the end of the block if checksums differ.
        """
        shape, box = [*shard.shape], [*ranges]
        if tensor.dtype == torch.complex128:
            shape, box, target = [*shape, 2], [*box, (0, 2)], torch.view_as_real(target)
        begin = self._begin(shard, tuple(shape), target.dtype)
        if not target.numel():
            return
        if not shape:
            shape, box, target = [1], [(0, 1)], target.view(1)
        file = self._file(shard.file)
        is_checked = (
            self.compares
            and shard.crc32 is not None
            and all((low, high) == (0, n) for (low, high), n in zip(box, shape, strict=True))
        )
        if is_checked and target.is_contiguous():
            _fill(file, begin, target, self.where)
            future = self.executor.submit(checksum, target)
            self.unchecked.append((future, target.nbytes, shard, tensor.name))
            self._compare(MAX_UNCHECKED)
            return
        total = 0
        for offset, sizes, inner, part in _blocks(shape, box, target):
            is_direct = part.is_contiguous() and inner == tuple(slice(0, n) for n in sizes)
            staged = part if is_direct else self._staging(sizes, target.dtype)
            _fill(file, begin + offset, staged, self.where)
            summed = self.executor.submit(crc32, memory_of(staged), total) if is_checked else None
            if not is_direct:
                part.copy_(staged[inner])
            total = 0 if summed is None else summed.result()
        if is_checked:
            self._check(total, shard, tensor.name)

    def _file(self, name: str) -> FileIO:
        """Return an open file; the one used least recently is closed if there are `MAX_OPEN`."""
        file = self.open.pop(name, None)
        if file is None:
            if len(self.open) == MAX_OPEN:
                self.open.pop(next(iter(self.open))).close()
            file = FileIO(self.directory / name)
        self.open[name] = file
        return file

    def _begin(self, shard: StoredShard, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the first byte of a shard in its file; raise if the file contradicts the index."""
        source, path = self.tensors(shard.file).get(shard.key), self.directory / shard.file
        if source is None:
            fail(self.where, f"no {shard.key!r} in {path}",
                 "the files of a checkpoint must be those of its index",
                 "load an older checkpoint, or copy the files again")  # fmt: skip
        if source[:2] != (shape, dtype):
            fail(self.where, f"{shard.key} of shape {source.shape} and {source.dtype} in {path}",
                 f"it must have the shape {shape} and {dtype} of the index",
                 "load an older checkpoint, or copy the files again")  # fmt: skip
        return source.begin

    def _staging(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in the memory that all staged blocks share."""
        if self.staging is None:
            self.staging = torch.empty(MAX_STAGED, dtype=torch.uint8, device="cpu")
        return self.staging[: prod(sizes) * dtype.itemsize].view(dtype).view(sizes)

    def _compare(self, limit: int) -> None:
        """Wait for checksums, the oldest first, until at most `limit` bytes are unchecked."""
        while self.unchecked and sum(nbytes for _, nbytes, *_ in self.unchecked) > limit:
            future, _, shard, name = self.unchecked.popleft()
            self._check(future.result(), shard, name)

    def _check(self, total: int, shard: StoredShard, name: str) -> None:
        """Record the problem of a checksum that does not equal the one in the index."""
        if total != shard.crc32:
            self.problems.append(Problem(
                f"{name}: other bytes in {self.directory / shard.file} than were saved",
                f"the checksum of {shard.key} must be {shard.crc32}",
                "copy the file again, or load an older checkpoint"))  # fmt: skip


def _header(path: Path, where: str) -> dict[str, FileTensor]:
    """Return the tensors of a file whose header the package safetensors has checked."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    raise_if(where, [
        Problem(f"{key} of dtype {entry['dtype']} in {path}",
                f"the dtype of a tensor must be one of {', '.join(DTYPES)}",
                f"save {key} as another dtype")
        for key, entry in header.items() if entry["dtype"] not in DTYPES
    ])  # fmt: skip
    return {
        key: FileTensor(tuple(entry["shape"]), DTYPES[entry["dtype"]],
                        8 + length + entry["data_offsets"][0])
        for key, entry in header.items()
    }  # fmt: skip


def _fill(file: FileIO, begin: int, target: torch.Tensor, where: str) -> None:
    """Read the bytes of a contiguous tensor on the CPU from a position of a file."""
    memory = memory_of(target)
    file.seek(begin)
    while memory:
        count = file.readinto(memory)
        if not count:
            fail(where, f"{file.name}, which ends while it is read",
                 "files must not change meanwhile",
                 "load again when nothing writes to the directory")  # fmt: skip
        memory = memory[count:]


Block = tuple[int, tuple[int, ...], tuple[slice, ...], torch.Tensor]
"""First byte of a contiguous part of a tensor in a file, its sizes, the slices of it that belong to
a box, and the part of the target that these go to."""


def _blocks(shape: Sequence[int], box: Ranges, target: torch.Tensor) -> Iterator[Block]:
    """Yield the contiguous parts of a row-major tensor that have the elements of a box.

    Each has some rows of one dim: the outermost dim in which the gaps between the parts of the box
    are at most `MAX_GAP`, or further in until a row is small enough to be staged. A block that the
    target takes as it is has all rows of its dim.
    """
    strides = [prod(shape[d + 1 :]) * target.dtype.itemsize for d in range(len(shape))]
    sizes = [high - low for low, high in box]
    inner = max((d for d, n in enumerate(sizes) if n != shape[d]), default=0)
    dim = inner
    while dim and (shape[dim] - sizes[dim]) * strides[dim] <= MAX_GAP:
        dim -= 1
    is_direct = dim == inner and all(
        target.stride(d) * target.dtype.itemsize == strides[d] or sizes[d] == 1
        for d in range(dim, len(shape))
    )
    while not is_direct and strides[dim] > MAX_STAGED and dim + 1 < len(shape):
        dim += 1
    low, high = box[dim]
    rows = high - low if is_direct else max(1, MAX_STAGED // strides[dim])
    for index in product(*(range(*limits) for limits in box[:dim])):
        part = target[tuple(i - first for i, (first, _) in zip(index, box, strict=False))]
        outer = sum(i * stride for i, stride in zip(index, strides, strict=False))
        for first in range(low, high, rows):
            count = min(rows, high - first)
            yield (
                outer + first * strides[dim],
                (count, *shape[dim + 1 :]),
                (slice(0, count), *(slice(*limits) for limits in box[dim + 1 :])),
                part[first - low : first - low + count],
            )
