"""Index of a checkpoint: the tree that was saved, and where the bytes of its tensors are.

Nothing in it is executed, and its file names cannot leave the directory of the index.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.tree import flatten, plain_containers

FORMAT, VERSION = "fshard", 1
INDEX = "index.json"
"""File of the index, which is replaced at once when all files of a checkpoint are complete."""
HUGGING_FACE_INDEX = "model.safetensors.index.json"
JSON_TYPES = (bool, int, float, str, type(None))

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A box of a tensor in a file.

    Attributes:
        file: name of the file, in the directory of the index.
        key: name of the shard in the file.
        offsets: first index of the box in each dim of the tensor.
        shape: sizes of the box.
        crc32: checksum of the bytes, None if it is unknown.
    """

    file: str
    key: str
    offsets: Shape
    shape: Shape
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint; its shards cover each element once."""

    name: str
    shape: Shape
    dtype: torch.dtype
    shards: tuple[StoredShard, ...]


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """Content of a checkpoint.

    Attributes:
        tree: nested dicts, lists and tuples, with a `StoredTensor` for every tensor.
        files: bytes of each file.
        save_id: text in the names of the files of one `save`.
    """

    tree: Any
    files: Mapping[str, int]
    save_id: str

    @property
    def tensors(self) -> list[StoredTensor]:
        """The tensors, in the order of the tree."""
        return [leaf for leaf in flatten(self.tree)[0] if isinstance(leaf, StoredTensor)]

    def to_json(self) -> str:
        """Return the text of the index."""
        tensors = {
            tensor.name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": tensor.shape,
                "shards": [asdict(shard) for shard in tensor.shards],
            }
            for tensor in self.tensors
        }
        content = {
            "format": FORMAT, "version": VERSION, "id": self.save_id,
            "tree": _node_of(self.tree), "files": self.files, "tensors": tensors,
        }  # fmt: skip
        return json.dumps({**content, "crc32": index_checksum(content)}, indent=1)

    @staticmethod
    def read(directory: Path, where: str) -> CheckpointIndex:
        """Read the index of a directory; raise `ShardingError` if there is none, or a foreign one.

        Raises:
            ShardingError: the file is missing, is not an index of fshard, has a newer version or
                names files outside of the directory.
        """
        path = directory / INDEX
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            known = sorted(child.name for child in directory.glob("*"))[:5]
            fail(where, f"no {INDEX} in {directory}, which has {', '.join(known) or 'no files'}",
                 f"a checkpoint must have {INDEX}, or be safetensors files of Hugging Face",
                 "fs.state.save(directory, tree) makes one")  # fmt: skip
        except ValueError as error:
            fail(where, f"{path}: {error}", "an index must be JSON",
                 "load an older checkpoint: this file was damaged after it was saved")  # fmt: skip
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            fail(where, f"{path} without the format {FORMAT!r}",
                 "the index must be one that fs.state.save wrote",
                 "the directory of another checkpoint")  # fmt: skip
        if content.get("version") != VERSION:
            fail(where, f"{path} of version {content.get('version')}",
                 f"the version must be {VERSION}", "a newer fshard")  # fmt: skip
        if index_checksum(content) != content.get("crc32"):
            fail(where, f"{path}, which was changed after it was written",
                 f"its checksum must be {content.get('crc32')}",
                 "load an older checkpoint, or copy the file again")  # fmt: skip
        try:
            return _parsed(content, where, path)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            fail(where, f"{path}: {type(error).__name__}: {error}",
                 "every entry of an index must be as fs.state.save wrote it",
                 "load an older checkpoint: this file was changed")  # fmt: skip


def index_checksum(content: Mapping[str, Any]) -> int:
    """Return the CRC-32 of the content of an index, without its own entry `crc32`."""
    rest = {key: value for key, value in content.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest).encode())


def _parsed(content: dict[str, Any], where: str, path: Path) -> CheckpointIndex:
    """Return the index of the JSON of a file."""
    files = {
        check_file_name(str(name), where, path): int(n) for name, n in content["files"].items()
    }
    tensors: dict[str, StoredTensor] = {}
    for name, entry in content["tensors"].items():
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{entry['dtype']!r} is not a dtype")
        shards = tuple(
            StoredShard(check_file_name(shard["file"], where, path), str(shard["key"]),
                        _ints(shard["offsets"]), _ints(shard["shape"]), shard["crc32"])
            for shard in entry["shards"]
        )  # fmt: skip
        tensors[name] = StoredTensor(name, _ints(entry["shape"]), dtype, shards)
    return CheckpointIndex(_tree_of(content["tree"], tensors), files, str(content["id"]))


def check_file_name(name: str, where: str, path: Path) -> str:
    """Return the name of a file in the directory of an index; raise for any other path."""
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
        fail(where, f"the file {name!r} in {path}",
             "a file of an index must be a name in the directory of the index",
             "do not load it: fs.state.save writes no such index")  # fmt: skip
    return name


def _ints(values: Sequence[Any]) -> Shape:
    result = tuple(values)
    if not all(type(value) is int and value >= 0 for value in result):
        raise ValueError(f"{values} must be ints of at least 0")
    return result


# -- trees as JSON ------------------------------------------------------------------------


def _node_of(tree: Any) -> Any:
    """Return the JSON of nested dicts, lists and tuples."""
    if isinstance(tree, StoredTensor):
        return {"tensor": tree.name}
    if isinstance(tree, dict):
        return {"dict": {key: _node_of(child) for key, child in tree.items()}}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [_node_of(child) for child in tree]}
    return {"value": tree}


def _tree_of(node: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Any:
    """Return the tree of its JSON."""
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _tree_of(child, tensors) for key, child in content.items()}
    if kind in ("list", "tuple"):
        children = [_tree_of(child, tensors) for child in content]
        return children if kind == "list" else tuple(children)
    if kind == "value" and isinstance(content, JSON_TYPES):
        return content
    raise ValueError(f"{kind!r} is not a kind of node")


def check_names(where: str, tree: Any, names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise `ShardingError` for leaves that a checkpoint cannot have, and names that repeat."""
    problems = [
        Problem(f"{name or 'a tree'}: a {type(leaf).__name__}",
                "a leaf must be a tensor, a pair, a number, a string, a bool or None",
                "module.state_dict() of a module" if isinstance(leaf, torch.nn.Module)
                else f"leave it out, or save {name or 'it'} as one of these")
        for name, leaf in zip(names, leaves, strict=True)
        if not isinstance(leaf, (torch.Tensor, *JSON_TYPES)) and not hasattr(leaf, "spec")
    ]  # fmt: skip
    problems += [
        Problem(f"two leaves of the name {name}", "the name of every leaf must be its own",
                "rename a key of the tree: keys are joined by dots")
        for name in dict.fromkeys(names) if names.count(name) > 1
    ]  # fmt: skip
    problems += [
        Problem(f"the key {key!r} of {name}", "the keys of dicts must be strings", f"{str(key)!r}")
        for name, key in _foreign_keys("", plain_containers(tree, names))
    ]  # fmt: skip
    raise_if(where, problems)


def _foreign_keys(name: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the key of all items of dicts whose keys are not strings."""
    is_dict = isinstance(node, dict)
    if not is_dict and not isinstance(node, list | tuple):
        return
    for key, child in node.items() if is_dict else enumerate(node):
        path = f"{name}.{key}".removeprefix(".")
        if is_dict and not isinstance(key, str):
            yield path, key
        yield from _foreign_keys(path, child)


def directory_path(where: str, directory: Any, call: str) -> Path:
    """Return a directory's path; raise `ShardingError` for other arguments."""
    if not isinstance(directory, str | os.PathLike):
        fail(where, f"a {type(directory).__name__} as the first argument",
             "the directory must be a str or a Path", call)  # fmt: skip
    return Path(directory)
