"""`fs.state.save`: each rank writes its shards to one file, then the index is replaced.

The files of a save have names of their own. Rank 0 replaces `index.json` when all of them are on
the disk, and then removes files that no index names: a crash at any moment leaves the old
checkpoint or the new one. Ranks meet in the directory, not by collectives, so that a save may run
while the next step does.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from fshard._util.errors import Problem, ShardingError, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.sharded import Sharded
from fshard.layout.tree import flatten, leaf_names
from fshard.run.transports.base import current_transport, is_simulated
from fshard.spmd.collectives.permutations import pbroadcast
from fshard.state.checkpoints.checkpoint_index import (
    INDEX,
    CheckpointIndex,
    StoredShard,
    StoredTensor,
    check_names,
    nested,
)
from fshard.state.checkpoints.shard_files import (
    as_stored,
    checksum,
    safetensors,
    sync_directory,
    write_file,
    write_text,
)

SUFFIX = ".safetensors"
POLL_SECONDS = 0.02
WHERE = "fs.state.save"


def save(
    directory: str | Path, tree: Any, /, *, async_op: bool = False, timeout: float = 600.0
) -> Saving:
    """Save a tree of pairs, tensors and plain values in a directory, in place of what it has.

    Each rank writes the shards that it is the first to hold, and of replicas its share, to one
    safetensors file. The index is replaced at the end: a crash at any moment leaves the old
    checkpoint or the new one. `fs.state.load` reads it in any other layout, on any other mesh.

    Args:
        directory: the directory, which all ranks see; it is created.
        tree: pytree of pairs, of tensors that are equal on every rank, and of numbers, strings,
            bools and None. Dicts have strings as keys.
        async_op: return when the tensors are copied, and write them in the background.
        timeout: seconds that ranks wait for each other's files.

    Returns:
        A `Saving`; its `wait()` returns when the checkpoint is complete.

    Raises:
        ShardingError: a leaf cannot be saved, a pair is unreduced or not of its spec, a rank failed
            or did not end within the timeout, or the package safetensors is missing.

    >>> import tempfile
    >>> import fshard as fs
    >>> x = fs.arange(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,)))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = fs.state.save(directory, {"x": x, "step": 3})
    ...     state = fs.state.load(directory, fs.P(), mesh=fs.Mesh(y=3))
    >>> state["x"].local[2], state["step"]
    (tensor([0., 1., 2., 3.]), 3)
    """
    safetensors(WHERE)
    leaves, names = flatten(tree)[0], leaf_names(tree)
    check_names(WHERE, tree, names, leaves)
    transport = current_transport()
    if is_simulated():
        fail(WHERE, "a simulated rank", "ranks that save must be processes, or not be in a body",
             "save the pairs outside of fs.simulate and fs.shard_map")  # fmt: skip
    _check_pairs(names, leaves)
    plan = _Plan.of(names, leaves, getattr(transport, "all_ranks", None))
    own = plan.ranks if transport is None else (transport.rank,)
    root = Path(directory)
    save_id = _agree_on_id(root, plan.ranks, None if transport is None else transport.rank)
    writer = _Writer(root, save_id, plan, nested(tree, plan.stored(leaves, save_id)), timeout)
    tensors = {rank: plan.tensors(leaves, rank, transport is None) for rank in own}
    return Saving(writer, tensors, async_op)


def _check_pairs(names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise `ShardingError` for pairs that are unreduced."""
    raise_if(WHERE, [
        Problem(f"{name}: a pair of {leaf.spec}", "a tensor that is saved must not be unreduced",
                f"fs.reshard({name}, fs.P(...)), which sums it")
        for name, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, Sharded) and leaf.spec.partition.unreduced_kinds
    ])  # fmt: skip


def _agree_on_id(root: Path, ranks: Sequence[int], rank: int | None) -> str:
    """Create the directory, and return a text that no other save has, equal on every rank."""
    token = secrets.randbits(48)
    if rank is None or rank == ranks[0]:
        root.mkdir(parents=True, exist_ok=True)
    if rank is not None and len(ranks) > 1:
        mesh = Mesh({"ranks": len(ranks)}, devices=ranks)
        token = int(pbroadcast(torch.tensor(token), "ranks", 0, mesh=mesh))
    return f"{token:012x}"


# -- what a rank writes ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """Boxes of all tensors, and the rank that writes each of them.

    Attributes:
        names: names of the leaves.
        ranks: ranks that may write.
        boxes: for each leaf that is a tensor its boxes `(offsets, shape)`, by their owners.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    boxes: Mapping[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]

    @staticmethod
    def of(names: Sequence[str], leaves: Sequence[Any], world: Any) -> _Plan:
        """Return the plan, equal on every rank: replicas are shared out by their bytes."""
        meshes = {rank for leaf in leaves if isinstance(leaf, Sharded) for rank in leaf.mesh.ranks}
        ranks = tuple(sorted(meshes)) if world is None else tuple(sorted(world))
        ranks = ranks or (0,)
        load: dict[int, int] = defaultdict(int)
        boxes: dict[int, list[Any]] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Sharded):
                holders: dict[Any, list[int]] = defaultdict(list)
                for rank in leaf.mesh.ranks:
                    holders[leaf.spec.offsets(rank), leaf.spec.local_shape(rank)].append(rank)
                item = leaf.dtype.itemsize
            elif isinstance(leaf, torch.Tensor):
                holders = {((0,) * leaf.ndim, tuple(leaf.shape)): list(ranks)}
                item = leaf.dtype.itemsize
            else:
                continue
            boxes[index] = []
            for (offsets, shape), candidates in holders.items():
                nbytes = item * torch.Size(shape).numel()
                if nbytes == 0 and boxes[index]:
                    continue  # an empty shard beside others
                owner = min(candidates, key=lambda rank: (load[rank], rank))
                load[owner] += nbytes
                boxes[index].append((owner, offsets, shape))
        return _Plan(tuple(names), ranks, boxes)

    @property
    def writers(self) -> tuple[int, ...]:
        """The ranks that write a file."""
        return tuple(sorted({owner for boxes in self.boxes.values() for owner, *_ in boxes}))

    def stored(self, leaves: Sequence[Any], save_id: str) -> list[Any]:
        """Return the leaves with a `StoredTensor` for every tensor, without checksums."""
        return [
            StoredTensor(self.names[i], tuple(leaf.shape), leaf.dtype, tuple(
                StoredShard(_file(save_id, owner), _key(self.names[i], offsets), offsets, shape)
                for owner, offsets, shape in self.boxes[i]
            )) if i in self.boxes else leaf
            for i, leaf in enumerate(leaves)
        ]  # fmt: skip

    def tensors(self, leaves: Sequence[Any], rank: int, simulated: bool) -> dict[str, torch.Tensor]:
        """Return copies on the CPU of the boxes that a rank writes, by their keys."""
        result: dict[str, torch.Tensor] = {}
        for index, boxes in self.boxes.items():
            leaf = leaves[index]
            for owner, offsets, _ in boxes:
                if owner != rank:
                    continue
                x = leaf.local if isinstance(leaf, Sharded) else leaf
                if isinstance(leaf, Sharded) and simulated:
                    x = leaf.local[list(leaf.mesh.ranks).index(rank)]
                result[_key(self.names[index], offsets)] = as_stored(x)
        return result


def _file(save_id: str, rank: int) -> str:
    return f"{save_id}-{rank:05d}{SUFFIX}"


def _key(name: str, offsets: Sequence[int]) -> str:
    """Return the name of a box in its file; that of an unsharded tensor is the tensor's."""
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


# -- writing ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Writer:
    """Writes the files of some ranks and, as the first rank, the index.

    Attributes:
        tree: the tree with a `StoredTensor` for every tensor, without checksums.
    """

    root: Path
    save_id: str
    plan: _Plan
    tree: Any
    timeout: float

    def write(self, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the file of one rank and a report of it; the report of a failure, if it fails."""
        try:
            checksums = {key: checksum(x) for key, x in tensors.items()}
            size = write_file(self.root / _file(self.save_id, rank), tensors, WHERE)
            self._report(rank, {"bytes": size, "crc32": checksums})
        except BaseException as error:
            with suppress(OSError):
                self._report(rank, {"error": f"{type(error).__name__}: {error}"})
            raise

    def _report(self, rank: int, content: Any) -> None:
        write_text(self._report_path(rank), json.dumps(content))

    def _report_path(self, rank: int) -> Path:
        return self.root / f"{self.save_id}-{rank:05d}.json"

    def publish(self) -> None:
        """Wait for the reports of all ranks, replace the index, and remove unused files."""
        reports = {rank: self._await(rank) for rank in self.plan.writers}
        checksums = {
            (_file(self.save_id, rank), key): crc32
            for rank, report in reports.items()
            for key, crc32 in report["crc32"].items()
        }
        leaves, treedef = flatten(self.tree)
        leaves = [
            StoredTensor(leaf.name, leaf.shape, leaf.dtype, tuple(
                StoredShard(s.file, s.key, s.offsets, s.shape, checksums[s.file, s.key])
                for s in leaf.shards
            )) if isinstance(leaf, StoredTensor) else leaf
            for leaf in leaves
        ]  # fmt: skip
        files = {_file(self.save_id, rank): report["bytes"] for rank, report in reports.items()}
        index = CheckpointIndex(treedef.unflatten(leaves), files, self.save_id)
        sync_directory(self.root)
        write_text(self.root / INDEX, index.to_json())
        self._remove_unused()

    def await_index(self) -> None:
        """Wait until the first rank has replaced the index."""
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError, KeyError):
                if json.loads((self.root / INDEX).read_text())["id"] == self.save_id:
                    return
            for rank in self.plan.ranks:
                self._read_report(rank)
            time.sleep(POLL_SECONDS)
        fail(WHERE, f"no index of this save in {self.root} within {self.timeout:g} s",
             "the first rank must write the index within the timeout",
             f"look at the error of rank {self.plan.ranks[0]}; timeout= waits longer")  # fmt: skip

    def _await(self, rank: int) -> Any:
        """Return the report of a rank; raise `ShardingError` if it failed or is late."""
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            report = self._read_report(rank)
            if report is not None:
                return report
            time.sleep(POLL_SECONDS)
        fail(WHERE, f"no file of rank {rank} in {self.root} within {self.timeout:g} s",
             "every rank must write its file within the timeout",
             f"look at the error of rank {rank}; timeout= waits longer")  # fmt: skip

    def _read_report(self, rank: int) -> Any:
        """Return the report of a rank, None before there is one; raise if it failed."""
        try:
            report = json.loads(self._report_path(rank).read_text())
        except (OSError, ValueError):
            return None
        if "error" in report:
            raise ShardingError(
                f"{WHERE}: rank {rank} failed: {report['error']}\n"
                "  the checkpoint that was there before is unchanged"
            )
        return report

    def _remove_unused(self) -> None:
        """Remove the files of other saves, and those of this one that its index does not name."""
        for path in self.root.iterdir():
            name = path.name
            prefix, dash, rest = name.partition("-")
            ours = dash and len(prefix) == 12 and rest.endswith((SUFFIX, ".json", ".tmp"))
            named = prefix == self.save_id and name.endswith(SUFFIX)
            unfinished = name.startswith(INDEX) and name.endswith(".tmp")
            if unfinished or (ours and not named):
                with suppress(OSError):
                    path.unlink()


class Saving:
    """Save that is under way, as `fs.state.save` returns it.

    >>> import tempfile
    >>> import torch
    >>> import fshard as fs
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     saving = fs.state.save(directory, {"w": torch.ones(2)}, async_op=True)
    ...     saving.wait()
    >>> saving.is_done
    True
    """

    def __init__(
        self, writer: _Writer, tensors: dict[int, dict[str, torch.Tensor]], async_op: bool
    ) -> None:
        self._writer, self._tensors = writer, tensors
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="fshard-save")
        if async_op:
            self._thread.start()
        else:
            self._run()
            self.wait()

    def _run(self) -> None:
        writer, plan = self._writer, self._writer.plan
        try:
            for rank, tensors in self._tensors.items():
                if rank in plan.writers:
                    writer.write(rank, tensors)
            if plan.ranks[0] in self._tensors:
                writer.publish()
            else:
                writer.await_index()
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._error = error
        finally:
            self._tensors = {}

    @property
    def is_done(self) -> bool:
        """True if nothing is left to write."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises:
            ShardingError: a rank failed; the old checkpoint is unchanged.
        """
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
