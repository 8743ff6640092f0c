"""`fs.state.save`: each rank writes its shards to one file, then the index is replaced.

The files of a save have names of their own. Rank 0 replaces `index.json` when all of them are on
the disk, and then removes files that no index names: a crash at any moment leaves the old
checkpoint or the new one. Ranks meet in the directory, not by collectives, so that a save may run
while the next step does. Saves to one directory run one after another.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch

from fshard._util.errors import ShardingError, fail
from fshard._util.hooks import Hook
from fshard.layout.mesh import Mesh
from fshard.layout.sharded import Sharded
from fshard.layout.tree import flatten, leaf_names, plain_containers
from fshard.layout.validation import check_plain_tensor
from fshard.run.transports.base import current_transport, is_simulated, own_transport
from fshard.run.transports.process_end import ProcessWatch
from fshard.run.transports.torch_distributed import ProcessWorld
from fshard.spmd.collectives.permutations import pbroadcast
from fshard.state.checkpoints.checkpoint_index import (
    INDEX,
    CheckpointIndex,
    StoredShard,
    StoredTensor,
    check_names,
    directory_path,
)
from fshard.state.checkpoints.save_plan import SavePlan, check_reduced
from fshard.state.checkpoints.shard_files import (
    NAMES,
    as_stored,
    safetensors,
    sync_directory,
    write_file,
    write_text,
)
from fshard.state.parameters import by_leaf

SUFFIX = ".safetensors"
POLL_SECONDS = 0.02
STALE_SECONDS = 60.0
"""Time until a file of another machine is seen: network file systems cache directories."""
WHERE = "fs.state.save"
UNCHANGED = "  the checkpoint that was there before is unchanged"


def save(
    directory: str | Path, tree: Any, /, *, async_op: bool = False, progress: bool = False,
    timeout: float = 600.0,
) -> Saving:  # fmt: skip
    """Save a tree of pairs, tensors and plain values in a directory, in place of what it has.

    Each rank writes the shards that it is the first to hold, and of replicas its share, to one
    safetensors file. The index is replaced at the end: a crash at any moment leaves the old
    checkpoint or the new one. `fs.state.load` reads it in any other layout, on any other mesh.

    Args:
        directory: the directory, which all ranks see; it is created.
        tree: pytree of pairs, of tensors that are equal on every rank, and of numbers, strings,
            bools and None. Dicts have strings as keys.
        async_op: return when the tensors are copied, and write them in the background, after
            earlier saves to the directory.
        progress: show a bar of the bytes that the first rank writes, in a terminal.
        timeout: seconds that ranks wait for each other's files.

    Returns:
        A `Saving`; its `wait()` returns when the checkpoint is complete.

    Raises:
        ShardingError: a leaf cannot be saved, a pair is unreduced or not of its spec, the directory
            cannot be created or written, a rank failed or did not end within the timeout, or the
            package safetensors is missing.

    >>> import tempfile
    >>> import fshard as fs
    >>> x = fs.arange(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,)))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = fs.state.save(directory, {"x": x, "step": 3})
    ...     state = fs.state.load(directory, fs.P(), mesh=fs.Mesh(y=3))
    >>> state["x"].local[2], state["step"]
    (tensor([0., 1., 2., 3.]), 3)
    """
    root = directory_path(WHERE, directory, f"{WHERE}(directory, tree)")
    safetensors(WHERE)
    leaves, names = flatten(tree)[0], leaf_names(tree)
    check_names(WHERE, tree, names, leaves)
    transport = current_transport()
    if is_simulated():
        fail(WHERE, "a simulated rank", "ranks that save must be processes, or not be in a body",
             "save the pairs outside of fs.simulate and fs.shard_map")  # fmt: skip
    check_reduced(WHERE, names, leaves)
    by_leaf(WHERE, tree, _check_tensor, leaves)
    plan = SavePlan.of(leaves, getattr(transport, "all_ranks", None))
    own = plan.ranks if transport is None else (transport.rank,)
    watch = _watch_of(plan.ranks[0])
    save_id = _agree_on_id(root, plan.ranks, None if transport is None else transport.rank)
    stored = [
        StoredTensor(name, tuple(leaf.shape), leaf.dtype, tuple(
            StoredShard(_file(save_id, owner), _key(name, offsets), offsets, shape)
            for owner, offsets, shape in plan.boxes[index]
        )) if index in plan.boxes else leaf
        for index, (name, leaf) in enumerate(zip(names, leaves, strict=True))
    ]  # fmt: skip
    reporters = plan.writers if transport is None else plan.ranks
    tree = plain_containers(tree, stored)
    writer = _Writer(root, save_id, plan, reporters, tree, timeout, watch)
    tensors = {
        rank: {
            _key(names[index], offsets): as_stored(local, copy=async_op)
            for index, offsets, local in plan.locals(leaves, rank, transport is None)
        }
        for rank in own
    }
    return Saving(writer, tensors, async_op, progress)


def _check_tensor(leaf: Any) -> None:
    """Raise `ShardingError` for a tensor that the format lacks, or without values."""
    if not isinstance(leaf, torch.Tensor | Sharded):
        return
    if leaf.dtype != torch.complex128 and leaf.dtype not in NAMES:
        fail(WHERE, f"a tensor of {leaf.dtype}", "the dtype must be one of safetensors",
             "another dtype, or fs.interop.save_dcp")  # fmt: skip
    local = leaf.local if isinstance(leaf, Sharded) else leaf
    for x in (local,) if isinstance(local, torch.Tensor) else local:
        check_plain_tensor(x, WHERE)
        if x.is_meta or (x.nbytes and not x.data_ptr()):
            fail(WHERE, f"a {type(x).__name__} on {x.device} without memory",
                 "a tensor must have values in memory of its own",
                 "fs.state.init(fn, key, specs) creates the tensors of a meta module")  # fmt: skip


def _file(save_id: str, rank: int) -> str:
    """Return the name of the file of one rank."""
    return f"{save_id}-{rank:05d}{SUFFIX}"


def _key(name: str, offsets: Sequence[int]) -> str:
    """Return the name of a box in its file; an unsharded tensor keeps its own name."""
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


def _watch_of(first: int) -> ProcessWatch | None:
    """Return this process's connections to the others, one to the first rank among them."""
    world = own_transport()
    if not isinstance(world, ProcessWorld):
        return None
    world.listener.watch.ended((first,))  # now: it may keep the store that has its address
    return world.listener.watch


def _agree_on_id(root: Path, ranks: Sequence[int], rank: int | None) -> str:
    """Create the directory, and return a text that no other save has, equal on every rank.

    Raises:
        ShardingError: on every rank, if the first one cannot create or write the directory.
    """
    token, reason = secrets.randbits(48), ""
    if rank is None or rank == ranks[0]:
        try:
            root.mkdir(parents=True, exist_ok=True)
            if not os.access(root, os.W_OK):
                raise PermissionError("it cannot be written")
        except OSError as error:
            token, reason = -1, f": {error}"
    if rank is not None and len(ranks) > 1:
        mesh = Mesh({"ranks": len(ranks)}, devices=ranks)
        token = int(pbroadcast(torch.tensor(token), "ranks", 0, mesh=mesh))
    if token < 0:
        fail(WHERE, f"the directory {root}{reason}",
             f"rank {ranks[0]} must be able to create and write the directory",
             "the path of another directory, or other permissions")  # fmt: skip
    return f"{token:012x}"


# -- writing ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Writer:
    """Writes the files of some ranks and, as the first rank, the index.

    Attributes:
        reporters: ranks that report: all processes, so that none is left behind at an older save.
        tree: the tree with a `StoredTensor` for every tensor, without checksums.
        timeout: seconds that ranks wait for each other.
        watch: the connections to the other processes, None if there are none.
        ended_since: the time at which this process noticed the end of another.
    """

    root: Path
    save_id: str
    plan: SavePlan
    reporters: Sequence[int]
    tree: Any
    timeout: float
    watch: ProcessWatch | None
    ended_since: dict[int, float] = field(default_factory=dict)

    def write(
        self, rank: int, tensors: Mapping[str, torch.Tensor], advance: Callable[[int], None]
    ) -> None:
        """Write the file of one rank and a report of it; the report of a failure, if it fails."""
        with self._reporting_failure(rank):
            size, checksums = 0, dict[str, int]()
            if rank in self.plan.writers:
                path = self.root / _file(self.save_id, rank)
                size, checksums = write_file(path, tensors, advance)
            self._report(rank, {"bytes": size, "crc32": checksums})

    @contextmanager
    def _reporting_failure(self, rank: int) -> Iterator[None]:
        """Report an error in the block to the other ranks."""
        try:
            yield
        except BaseException as error:
            text = f"{WHERE}: rank {rank} failed: {type(error).__name__}: {error}\n{UNCHANGED}"
            with suppress(OSError):
                shared = isinstance(error, ShardingError)
                self._report(rank, {"error": str(error) if shared else text})
            raise

    def _report(self, rank: int, content: Any) -> None:
        write_text(self._report_path(rank), json.dumps(content))

    def _report_path(self, rank: int) -> Path:
        return self.root / f"{self.save_id}-{rank:05d}.json"

    def publish(self) -> None:
        """Wait for the reports of all ranks, replace the index, and remove files unused before."""
        with self._reporting_failure(self.plan.ranks[0]):
            reports = {rank: self._await(rank) for rank in self.reporters}
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
        files = {_file(self.save_id, rank): reports[rank]["bytes"] for rank in self.plan.writers}
        index = CheckpointIndex(treedef.unflatten(leaves), files, self.save_id)
        sync_directory(self.root)
        unused = self._unused()  # before the index: other ranks then begin the next save
        write_text(self.root / INDEX, index.to_json())
        for path in unused:
            with suppress(OSError):
                path.unlink()

    def await_index(self) -> None:
        """Wait until the first rank has replaced the index."""
        deadline, first = time.monotonic() + self.timeout, self.plan.ranks[0]
        while time.monotonic() < deadline:
            ended = self._has_ended(first)
            with suppress(OSError, ValueError, KeyError):
                if json.loads((self.root / INDEX).read_text())["id"] == self.save_id:
                    return
            for rank in self.plan.ranks:
                self._read_report(rank)
            if ended:
                self._fail_without(first)
            time.sleep(POLL_SECONDS)
        fail(WHERE, f"no index of this save in {self.root} within {self.timeout:g} s",
             "the first rank must write the index within the timeout",
             f"look at the error of rank {first}; timeout= waits longer")  # fmt: skip

    def _await(self, rank: int) -> Any:
        """Return the report of a rank; raise `ShardingError` if it failed or is late."""
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            ended = self._has_ended(rank)  # before the read: it may report and end
            report = self._read_report(rank)
            if report is not None:
                return report
            if ended:
                self._fail_without(rank)
            time.sleep(POLL_SECONDS)
        fail(WHERE, f"no file of rank {rank} in {self.root} within {self.timeout:g} s",
             "every rank must write its file within the timeout",
             f"look at the error of rank {rank}; timeout= waits longer")  # fmt: skip

    def _has_ended(self, rank: int) -> bool:
        """Return True if a process has ended, and this one would see the files that it wrote."""
        if self.watch is None or not self.watch.ended((rank,)):
            return False
        since = self.ended_since.setdefault(rank, time.monotonic())
        return self.watch.is_local[rank] or time.monotonic() - since > STALE_SECONDS

    def _fail_without(self, rank: int) -> NoReturn:
        fail(WHERE, f"the process of rank {rank} ended before the checkpoint in {self.root} was "
             "complete; the one that was there before is unchanged",
             "every rank must run until its save has ended",
             f"look at the output of rank {rank}")  # fmt: skip

    def _read_report(self, rank: int) -> Any:
        """Return the report of a rank, None before there is one; raise if it failed."""
        try:
            report = json.loads(self._report_path(rank).read_text())
        except (OSError, ValueError):
            return None
        if "error" in report:
            raise ShardingError(report["error"])
        return report

    def _unused(self) -> list[Path]:
        """Return the files of other saves, and those of this one that its index does not name."""
        unused = []
        for path in self.root.iterdir():
            name = path.name
            prefix, dash, rest = name.partition("-")
            ours = dash and len(prefix) == 12 and rest.endswith((SUFFIX, ".json", ".tmp"))
            named = prefix == self.save_id and name.endswith(SUFFIX)
            unfinished = name.startswith(INDEX) and name.endswith(".tmp")
            if unfinished or (ours and not named):
                unused.append(path)
        return unused


@Hook
def progress_bar_hook(total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show a bar of bytes in the block, which calls the result with those of each piece.

    Set by `fshard.show.progress_bar`.
    """
    raise NotImplementedError


class Saving:
    """Save that is under way, as `fs.state.save` returns it.

    Attributes:
        nbytes: bytes of the tensors that this process writes.
        written: bytes of them that are written.

    >>> import tempfile
    >>> import torch
    >>> import fshard as fs
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     saving = fs.state.save(directory, {"w": torch.ones(2)}, async_op=True)
    ...     saving.wait()
    >>> saving.is_done, saving.written, saving.nbytes
    (True, 8, 8)
    """

    def __init__(
        self,
        writer: _Writer,
        tensors: dict[int, dict[str, torch.Tensor]],
        async_op: bool,
        progress: bool,
    ) -> None:
        self._writer, self._tensors, self._progress = writer, tensors, progress
        self._error: BaseException | None = None
        self.nbytes = sum(x.nbytes for part in tensors.values() for x in part.values())
        self.written = 0
        root = writer.root.resolve()
        self._earlier, _LATEST[root] = _LATEST.get(root), self
        self._thread = Thread(target=self._run, name="fshard-save")
        if async_op:
            self._thread.start()
        else:
            self._run()
            self.wait()

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.is_done else "under way"
        return f"Saving({str(self._writer.root)!r}), {self.written:,} of {self.nbytes:,} B, {state}"

    def _run(self) -> None:
        if self._earlier is not None:
            self._earlier.join()
            self._earlier = None
        is_first = self._writer.plan.ranks[0] in self._tensors
        shown = self._progress and is_first
        try:
            with progress_bar_hook.call(self.nbytes) if shown else nullcontext(_nothing) as show:
                self._write(show, is_first)
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._error = error
        finally:
            self._tensors = {}

    def _write(self, show: Callable[[int], None], is_first: bool) -> None:
        """Write the files of this process and wait for the index, or write that too."""

        def advance(count: int) -> None:
            self.written += count
            show(count)

        for rank, tensors in self._tensors.items():
            if rank in self._writer.reporters:
                self._writer.write(rank, tensors, advance)
        if is_first:
            self._writer.publish()
        else:
            self._writer.await_index()

    @property
    def is_done(self) -> bool:
        """True if nothing is left to write."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises:
            ShardingError: a rank failed; the old checkpoint is unchanged.
        """
        self.join()
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Return when nothing is left to write, also if that failed."""
        if self._thread.ident is not None:
            self._thread.join()


_LATEST: WeakValueDictionary[Path, Saving] = WeakValueDictionary()
"""The last save to each directory; one that is under way lives by its thread."""


def _nothing(count: int) -> None:
    """Show no progress."""
