"""Files of shards in the safetensors format: their dtypes, checksums, and their writing."""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fshard._util.errors import Problem, fail, raise_if

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
}  # fmt: skip
"""Dtypes of the format. Tensors of complex128 are saved as pairs of float64."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PIECE = 2**24
"""Bytes of one write, after which a progress bar moves."""


def _fastest_crc32() -> Callable[..., int]:
    """Return `zlib.crc32`, or the equal function of ISA-L, several times as fast, if installed."""
    try:
        package = import_module("isal.isal_zlib")
    except ImportError:
        package = zlib
    function: Callable[..., int] = package.crc32
    return function


crc32 = _fastest_crc32()
"""Return the CRC-32 of bytes, which continues a second argument; it releases Python's lock."""


def safetensors(where: str) -> ModuleType:
    """Return the package; raise `ShardingError` if it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        fail(where, "no package safetensors", "checkpoints must have safetensors to read and write",
             "pip install 'fshard[checkpoint]'")  # fmt: skip
    package: ModuleType = safetensors
    return package


def as_stored(x: torch.Tensor, *, copy: bool) -> torch.Tensor:
    """Return a tensor on the CPU in contiguous memory, of a dtype of the format.

    Args:
        x: the tensor.
        copy: True for memory of its own.
    """
    stored = x.detach().cpu().resolve_conj().resolve_neg()
    if stored.dtype == torch.complex128:
        stored = torch.view_as_real(stored)
    if copy and stored.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return stored.clone(memory_format=torch.contiguous_format)
    return stored.contiguous()


def checksum(x: torch.Tensor) -> int:
    """Return the CRC-32 of the elements of a tensor on the CPU, in row-major order."""
    x = x.contiguous()  # the view of its memory does not keep it
    return crc32(memory_of(x))


def memory_of(x: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy or a reference to it."""
    if not x.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * x.nbytes).from_address(x.data_ptr())).cast("B")


def write_file(
    path: Path, tensors: Mapping[str, torch.Tensor], advance: Callable[[int], None]
) -> tuple[int, dict[str, int]]:
    """Write tensors of `as_stored` to a file that is on the disk when this returns.

    Their memory is written as it is, while another thread computes the checksums.

    Args:
        path: the file.
        tensors: the tensors by their keys.
        advance: function that is called with the bytes of each piece that is written.

    Returns:
        The bytes of the file, and the CRC-32 of every tensor.
    """
    # In the order of the package: large items first, so that all of them are aligned.
    order = sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in order:
        x = tensors[key]
        begin, end = end, end + x.nbytes
        header[key] = {"dtype": NAMES[x.dtype], "shape": list(x.shape),
                       "data_offsets": [begin, end]}  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as executor:
        sums = {key: executor.submit(checksum, tensors[key]) for key in order}
        file.write(len(text).to_bytes(8, "little") + text)
        for key in order:
            memory = memory_of(tensors[key])
            while memory:
                count = file.write(memory[:PIECE])
                advance(count)
                memory = memory[count:]
        os.fsync(file.fileno())
        return 8 + len(text) + end, {key: future.result() for key, future in sums.items()}


def write_text(path: Path, text: str) -> None:
    """Replace a file by another content: a crash leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Write the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_files(root: Path, files: Mapping[str, int], where: str) -> None:
    """Raise `ShardingError` for files that are missing or have another size than they should."""
    problems = []
    for name, size in files.items():
        path = root / name
        try:
            found = f"{path.stat().st_size:,} B"
            is_whole = path.stat().st_size == size
        except OSError:
            found, is_whole = "missing", False
        if not is_whole:
            problems.append(Problem(f"{path}: {found}", f"the file must have {size:,} B",
                                    "copy it again, or load an older checkpoint"))  # fmt: skip
    raise_if(where, problems)
