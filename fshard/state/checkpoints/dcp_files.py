"""Checkpoints of `torch.distributed.checkpoint` (DCP), read as those of fshard are.

Their `.metadata` is a pickle. Nothing in it is executed: the few classes that DCP writes are read
as records of their fields, and any other name is refused. Their tensors are read chunk by chunk by
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fshard._util.errors import ShardingError, fail
from fshard.state.checkpoints.checkpoint_index import (
    CheckpointIndex,
    StoredShard,
    StoredTensor,
    check_file_name,
)
from fshard.state.checkpoints.shard_files import check_files
from fshard.state.checkpoints.shard_reader import Ranges, ShardReader

METADATA = ".metadata"
MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
PATHS = {"Path", "PosixPath", "PurePosixPath", "WindowsPath"}
PATH_MODULES = {"pathlib", "pathlib._local"}  # the latter's in Python 3.13
MEMORY_FORMAT = "_MEM_FORMAT_ENCODING"  # the one enumeration

UNREADABLE = (pickle.UnpicklingError, AttributeError, KeyError, TypeError, EOFError, IndexError,
              ValueError, RuntimeError, OverflowError, MemoryError)  # fmt: skip
"""Errors that pickles with changed bytes raise."""


class Record:
    """State of an object of a pickle, in place of the object: its fields, mostly.

    Attributes:
        state: a dict of fields, or whatever the class of the object makes of them.
    """

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.state = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str, default: Any = None) -> Any:
        """Return a field; DCP leaves out those that are None."""
        return self.state.get(name, default) if isinstance(self.state, Mapping) else default


def _read_member(owner: Any, name: Any) -> Record:
    """Return a member of an enumeration as a record; Python 3.11.0 to 3.11.4 pickle it by name."""
    if isinstance(owner, type) and issubclass(owner, Record) and owner.__name__ == MEMORY_FORMAT:
        return owner(name)
    raise pickle.UnpicklingError(f"the attribute {name} of {owner}, which DCP does not write")


class _Unpickler(pickle.Unpickler):
    """Reads a pickle as records; refuses names that DCP does not write."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a constructor of records, of sizes as tuples, or a dtype."""
        is_path = module in PATH_MODULES and name in PATHS
        is_layout = module == "torch.serialization" and name == "_get_layout"
        if module in MODULES or is_path or is_layout:
            return type(name, (Record,), {})
        if module == "builtins" and name == "getattr":
            return _read_member
        if module == "torch" and name == "Size":
            return tuple
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"the name {module}.{name}, which DCP does not write")


class DcpReader(ShardReader):
    """Files of chunks, of which whole chunks are read and slices returned.

    Attributes:
        places: by file and key the first byte of a chunk and its length.
    """

    def __init__(self, directory: Path, where: str) -> None:
        super().__init__(directory, where)
        self.places: dict[tuple[str, str], tuple[int, int]] = {}
        self.last: tuple[tuple[str, str], Any] | None = None

    def load(self, file: str, key: str) -> Any:
        """Return the value of a chunk; the last one is kept, for other slices of it."""
        if self.last is None or self.last[0] != (file, key):
            offset, length = self.places[file, key]
            with (self.directory / file).open("rb") as opened:
                opened.seek(offset)
                content = io.BytesIO(opened.read(length))
            try:
                value = torch.load(content, map_location="cpu", weights_only=True)
            except UNREADABLE as error:
                reason = str(error).partition(".")[0]
                fail(self.where, f"{key} in {self.directory / file}: {reason}",
                     "a value must be one that torch.load(weights_only=True) reads",
                     "save it again without the value, or copy the file again")  # fmt: skip
            self.last = (file, key), value
        return self.last[1]

    def read(
        self, tensor: StoredTensor, shard: StoredShard, ranges: Ranges, target: torch.Tensor
    ) -> None:
        """Copy a box of a chunk into a tensor on the CPU."""
        chunk: torch.Tensor = self.load(shard.file, shard.key)
        target.copy_(chunk[tuple(slice(a, b) for a, b in ranges)])


def open_dcp(root: Path, where: str) -> tuple[CheckpointIndex, ShardReader]:
    """Return the index of a checkpoint of DCP, and a reader of its files.

    Raises:
        ShardingError: the metadata is damaged, has other names than DCP writes or files outside of
            the directory, or a value is transformed or cannot be read without executing it.
    """
    path = root / METADATA
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        return _index(metadata, root, where)
    except ShardingError:
        raise
    except UNREADABLE as error:
        fail(where, f"{path}: {type(error).__name__}: {error}",
             "the metadata must be as torch.distributed.checkpoint writes it",
             "load an older checkpoint, or copy the file again")  # fmt: skip


def _index(metadata: Any, root: Path, where: str) -> tuple[CheckpointIndex, ShardReader]:
    reader = DcpReader(root, where)
    files: dict[str, int] = {}
    chunks: dict[str, dict[Any, tuple[str, str]]] = {}
    for index, info in metadata.field("storage_data").items():
        name, offsets = index.field("fqn"), tuple(index.field("offset", ()))
        if info.field("transform_descriptors"):
            fail(where, f"{name}, which is transformed by {info.field('transform_descriptors')}",
                 "values must be stored as they are",
                 "save it by a FileSystemWriter without extensions")  # fmt: skip
        file = check_file_name(info.field("relative_path"), where, root / METADATA)
        key = f"{name}@{','.join(map(str, offsets))}"
        first, length = int(info.field("offset")), int(info.field("length"))
        files[file] = max(files.get(file, 0), first + length)
        reader.places[file, key] = (first, length)
        chunks.setdefault(name, {})[offsets] = (file, key)
    check_files(root, files, where)
    leaves: dict[str, Any] = {}
    for name, entry in metadata.field("state_dict_metadata").items():
        if entry.field("chunks") is None:  # a value other than a tensor
            leaves[name] = reader.load(*chunks[name][()])
            continue
        boxes = {tuple(chunk.field("offsets")): tuple(chunk.field("sizes"))
                 for chunk in entry.field("chunks")}  # fmt: skip
        shards = tuple(
            StoredShard(*chunks[name][offsets], offsets, sizes)
            for offsets, sizes in boxes.items() if offsets in chunks.get(name, {})
        )  # fmt: skip
        dtype = entry.field("properties").state[0]
        leaves[name] = StoredTensor(name, tuple(entry.field("size")), dtype, shards)
    tree = _nested(leaves, metadata.field("planner_data", {}))
    return CheckpointIndex(tree, files, ""), reader


def _nested(leaves: Mapping[str, Any], paths: Mapping[str, Sequence[Any]]) -> Any:
    """Return the dicts and lists that DCP has flattened; without paths a dict by name."""
    root: dict[Any, Any] = {}
    for name, leaf in leaves.items():
        path = paths.get(name, (name,))
        if not path:
            return leaf  # the only one: a tree without containers, or an empty one
        *parents, last = path
        node = root
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf

    def build(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        children = {key: build(child) for key, child in node.items()}
        is_list = children and all(isinstance(key, int) for key in children)
        return [children[key] for key in sorted(children)] if is_list else children

    return build(root)
