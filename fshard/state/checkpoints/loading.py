"""`fs.state.load`: each rank reads the bytes of its own slices, in any layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fshard._util.errors import Problem, ShardingError, did_you_mean, fail, raise_if
from fshard._util.text import plural
from fshard.layout.mesh import Mesh, as_mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import broadcast_prefix, flatten, leaf_names, read_placements, unflatten
from fshard.run.creation import create_pair, default_device
from fshard.state.checkpoints.checkpoint_index import (
    HUGGING_FACE_INDEX,
    INDEX,
    CheckpointIndex,
    StoredShard,
    StoredTensor,
    check_file_name,
    directory_path,
)
from fshard.state.checkpoints.dcp_files import METADATA, open_dcp
from fshard.state.checkpoints.shard_files import check_files
from fshard.state.checkpoints.shard_reader import ShardReader
from fshard.state.parameters import are_rules, by_leaf, match_rules

WHERE, VERIFY = "fs.state.load", "fs.state.verify"


def load(
    directory: str | Path,
    specs: Any = None,
    /,
    *,
    mesh: Mesh | None = None,
    device: torch.device | str | None = None,
    checksums: bool = True,
) -> Any:
    """Load a checkpoint in any layout; each rank reads the bytes of its own slices.

    Between the parts of a slice, gaps of at most 8 KiB are read too, and dropped: columns of a
    matrix with short rows load at least 6 times as fast so, and take no more memory.

    Args:
        directory: a directory that `fs.state.save` wrote, one with safetensors files of Hugging
            Face, or one such file, or a checkpoint of `torch.distributed.checkpoint`, whose chunks
            are read whole.
        specs: pytree of `P` or `Spec`, a prefix of the saved tree, or rules as for
            `fs.state.match_rules`. A tree with the names of the saved one may have containers of
            other types, and the result has these. None loads whole tensors.
        mesh: the mesh of each `P`; dims that it does not divide are chunked as `torch.chunk` does.
        device: device of the tensors; by default PyTorch's or, if that is the CPU, the one of
            `fs.init`'s backend.
        checksums: False to compare no checksums. They take 0.08 ns a byte with the package isal,
            0.8 ns without, on threads of their own.

    Returns:
        The tree: pairs for leaves with a spec, tensors for the others, and values other than
        tensors as they were saved. A `Spec` of another dtype casts. Tensors require no gradient.

    Raises:
        ShardingError: files are missing, cut short, damaged or foreign, names or shapes are not
            those of the specs, or a checksum of a shard that is read completely differs.

    >>> import tempfile
    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=2)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = fs.state.save(directory, {"w": torch.arange(6.0).view(2, 3)})
    ...     fs.state.load(directory, {"w": fs.P(None, "x")}, mesh=mesh)["w"].local
    (tensor([[0., 1.],
            [3., 4.]]), tensor([[2.],
            [5.]]))
    """
    root = directory_path(WHERE, directory, f"{WHERE}(directory, specs)")
    index, reader = _open(root, WHERE)
    stored = index.tree
    check_files(reader.directory, index.files, WHERE)
    reader.compares = checksums
    owner = None if mesh is None else as_mesh(mesh, WHERE)
    specs = read_placements(specs, owner)
    if are_rules(specs):
        specs = match_rules(specs, stored, mesh=owner)
    layouts, leaves, treedef = _matched(specs, stored)
    tree = unflatten(treedef, leaves)
    targets = by_leaf(WHERE, tree, partial(_target, owner), layouts, leaves)
    with reader:
        return unflatten(treedef, [
            _load(leaf, target, reader, device) if isinstance(leaf, StoredTensor) else leaf
            for leaf, target in zip(leaves, targets, strict=True)
        ])  # fmt: skip


def verify(directory: str | Path, /) -> None:
    """Read all bytes of a checkpoint and compare them with its checksums.

    Args:
        directory: a directory that `fs.state.save` wrote.

    Raises:
        ShardingError: lists every file and shard that is missing or damaged.

    >>> import tempfile
    >>> import torch
    >>> import fshard as fs
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = fs.state.save(directory, {"w": torch.ones(2)})
    ...     fs.state.verify(directory)
    """
    index, reader = _open(directory_path(VERIFY, directory, f"{VERIFY}(directory)"), VERIFY)
    check_files(reader.directory, index.files, VERIFY)
    with reader:
        for tensor in index.tensors:
            for shard in tensor.shards:
                target = torch.empty(shard.shape, dtype=tensor.dtype, device="cpu")
                try:
                    reader.read(tensor, shard, [(0, n) for n in shard.shape], target)
                except ShardingError as error:
                    reader.problems += error.problems


# -- files -------------------------------------------------------------------------------------


def _open(root: Path, where: str) -> tuple[CheckpointIndex, ShardReader]:
    """Return the index of a directory or file, and a reader of its files."""
    if root.is_file():
        reader = ShardReader(root.parent, where)
        return _hugging_face([root.name], reader), reader
    reader = ShardReader(root, where)
    if (root / INDEX).exists():
        return CheckpointIndex.read(root, where), reader
    if (root / METADATA).exists():
        return open_dcp(root, where)
    path = root / HUGGING_FACE_INDEX
    if path.exists():
        try:
            names = set(json.loads(path.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fail(where, f"{path}: {type(error).__name__}: {error}",
                 "the index must map names to files, as Hugging Face writes it",
                 "download the file again")  # fmt: skip
        return _hugging_face(
            [check_file_name(n, where, path) for n in sorted(names)], reader
        ), reader
    files = sorted(child.name for child in root.glob("*.safetensors"))
    if not files:
        return CheckpointIndex.read(root, where), reader  # which says what is missing
    return _hugging_face(files, reader), reader


def _hugging_face(files: Sequence[str], reader: ShardReader) -> CheckpointIndex:
    """Return the index of files with whole tensors."""
    tree: dict[str, StoredTensor] = {}
    for file in files:
        for name, (shape, dtype, _) in sorted(reader.tensors(file).items()):
            shard = StoredShard(file, name, (0,) * len(shape), shape)
            tree[name] = StoredTensor(name, shape, dtype, (shard,))
    sizes = {file: (reader.directory / file).stat().st_size for file in files}
    return CheckpointIndex(tree, sizes, "")


# -- layouts -----------------------------------------------------------------------------------


def _matched(specs: Any, stored: Any) -> tuple[list[Any], list[Any], Any]:
    """Return the layout and the stored leaf of every leaf of the result, and its structure."""
    leaves, treedef = flatten(stored)
    if specs is None:
        return [None] * len(leaves), leaves, treedef
    names, given = leaf_names(stored), leaf_names(specs)
    if given != [""] and sorted(names) == sorted(given):
        by_name = dict(zip(names, leaves, strict=True))
        layouts, other = flatten(specs)
        return layouts, [by_name[name] for name in given], other
    unknown = [name for name in given if not _covers(name, names)]
    raise_if(WHERE, [
        Problem(f"the spec of {name}", "specs must have the names of the checkpoint",
                did_you_mean(name, names, f"it has {plural(len(names), 'leaf', 'leaves')}: "
                             f"{', '.join(names[:5])}{', ...' if names[5:] else ''}"))
        for name in unknown
    ])  # fmt: skip
    return broadcast_prefix(specs, stored, "specs", WHERE), leaves, treedef


def _covers(name: str, names: Sequence[str]) -> bool:
    return name == "" or any(other == name or other.startswith(f"{name}.") for other in names)


def _target(mesh: Mesh | None, layout: Any, leaf: Any) -> Spec | None:
    """Return the spec of a tensor, None for one that is loaded whole and for other values."""
    if layout is None or not isinstance(leaf, StoredTensor):
        return None
    if isinstance(layout, Spec):
        if layout.shape != leaf.shape:
            fail(WHERE, f"a spec {layout}", f"its shape must be {leaf.shape}, that of the "
                 "checkpoint", f"layout.replace(shape={leaf.shape})")  # fmt: skip
        return layout
    if not isinstance(layout, PartitionSpec):
        fail(WHERE, f"{layout!r} as its layout", "a layout must be a P, a Spec or None", "fs.P()")
    if mesh is None:
        fail(WHERE, f"{layout!r} without a mesh", "the mesh of every P must be given",
             "mesh=fs.Mesh(x=2)")  # fmt: skip
    return Spec(mesh, layout, shape=leaf.shape, dtype=leaf.dtype, uneven="chunk")


# -- values ------------------------------------------------------------------------------------


def _load(
    tensor: StoredTensor, spec: Spec | None, reader: ShardReader, device: torch.device | str | None
) -> Any:
    """Return a tensor of the checkpoint: a pair for a spec."""
    if spec is None:
        return _box(tensor, (0,) * len(tensor.shape), tensor.shape, reader).to(_device(device))
    seed = torch.empty(0, device=_device(device))

    def create(
        seed: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        return _box(tensor, offsets, shape, reader).to(seed.device, spec.dtype)

    pair: Sharded = create_pair(WHERE, spec, seed, create)
    return pair


def _device(device: torch.device | str | None) -> torch.device:
    return default_device() if device is None else torch.device(device)


def _box(
    tensor: StoredTensor, offsets: Sequence[int], shape: Sequence[int], reader: ShardReader
) -> torch.Tensor:
    """Return a box of a stored tensor, from all shards that it overlaps."""
    result = torch.empty(tuple(shape), dtype=tensor.dtype, device="cpu")
    count = 0
    for shard, ranges, size, start in _overlaps(tensor, offsets, shape):
        target = result
        for dim, (first, n) in enumerate(zip(start, size, strict=True)):
            target = target.narrow(dim, first, n)
        reader.read(tensor, shard, ranges, target)
        count += target.numel()
    if count != result.numel():
        fail(WHERE, f"{tensor.name}: shards with {count} of {result.numel()} elements of a box",
             "the shards of a checkpoint must cover each element once",
             "load an older checkpoint: the index was changed")  # fmt: skip
    return result


Overlap = tuple[StoredShard, list[tuple[int, int]], tuple[int, ...], tuple[int, ...]]
"""A shard, the ranges in it, their sizes, and where they begin in the box."""


def _overlaps(
    tensor: StoredTensor, offsets: Sequence[int], shape: Sequence[int]
) -> Iterator[Overlap]:
    for shard in tensor.shards:
        ranges, start = [], []
        for first, size, other, n in zip(offsets, shape, shard.offsets, shard.shape, strict=True):
            low, high = max(first, other), min(first + size, other + n)
            ranges.append((low - other, high - other))
            start.append(low - first)
        if all(low < high for low, high in ranges):
            yield shard, ranges, tuple(high - low for low, high in ranges), tuple(start)
