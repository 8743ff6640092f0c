"""`prog(local)`: who executes a program is decided by the value it is given."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard._util.hooks import Hook
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair
from fshard.program.program import Program, run_program_hook
from fshard.run.autograd.linear_function import apply_program, is_transformed
from fshard.run.capture import Function, Launcher, Launchers, record, replay
from fshard.run.interpreter import launch, ranks_of
from fshard.run.transports.base import (
    Label,
    Transport,
    current_rank,
    current_transport,
    direct_transport,
    is_simulated,
    labelled,
    under,
)
from fshard.run.transports.divergence_report import call_line, place
from fshard.run.transports.torch_distributed import give_up

__all__ = [
    "Pending", "check_given", "check_local", "check_shards", "check_tuple", "nothing_of",
]  # fmt: skip


class Pending:
    """A result that is on its way: `wait()` gives it, once.

    Raises `ShardingError` on a second `wait()`. One with a `name`, that of the collective
    that `fs.start` has launched, warns if it is dropped without a wait. `line` is the user's that
    launched it, where that is told.
    """

    __slots__ = ("_finish", "_launched", "line", "name")

    def __init__(self, finish: Callable[[], Any], name: str = "", line: str = "") -> None:
        self._finish: Callable[[], Any] | None = finish
        # Simulated ranks leave nothing behind, and under `torch.func` it is `wait()` that launches.
        self._launched = not (torch.compiler.is_compiling() or is_simulated() or is_transformed())
        self.name, self.line = name, line

    @property
    def waited(self) -> bool:
        """Whether the result has been waited for."""
        return self._finish is None

    def abandon(self) -> None:
        """Give the result up: nobody will wait for it any more."""
        finish, self._finish = self._finish, None
        if finish is not None and self._launched:
            give_up(finish)

    def __del__(self) -> None:
        # The tracer of `torch.compile` makes some that never come to `__init__`.
        if getattr(self, "_finish", None) is None:
            return
        if self.name:
            warnings.warn(f"{self.name} was never waited for: pending.wait()", RuntimeWarning,
                          stacklevel=1)  # fmt: skip
        self.abandon()

    def wait(self) -> Any:
        """Wait for the result and return it."""
        finish, self._finish = self._finish, None
        if finish is None:
            fail("Pending.wait", "a second wait()", "a pending result is waited for once",
                 "keep what the first wait() returned")  # fmt: skip
        return finish()

    def __repr__(self) -> str:
        return f"<Pending, {'under way' if self._finish else 'waited for'}>"


@lru_cache(maxsize=4096)
def _where(dst: Spec) -> str:
    return f"the program to {dst}"


@run_program_hook.set
def run_program(prog: Program, local: Any, *, async_op: bool = False) -> Any:
    """Run a program on a tuple of shards (a simulation) or on this rank's local.

    Where the meshes of source and target differ, there is a shard for each rank of the source's
    and one for each of the target's. A rank outside of the source's gives None or an empty
    tensor (one that requires grad if gradients are to come back from it), one outside of the
    target's gets an empty tensor.
    """
    if local is None:
        local = nothing_of(prog)
    if isinstance(local, torch.Tensor):
        run = lambda x: _run_one(prog, x, async_op=async_op)  # noqa: E731
        return run_typed_hook.call(_where(prog.dst), local, prog.src, prog.dst, run)
    shards = check_shards(local, prog.src, _where(prog.dst))
    out = _apply_everywhere(prog, shards)
    return Pending(lambda: out) if async_op else out


def nothing_of(prog: Program) -> torch.Tensor | None:
    """What a rank outside of the source's mesh holds; None in other code."""
    transport = current_transport()
    if transport is None or transport.rank in prog.src.mesh:
        return None
    device = getattr(transport, "device", torch.device("cpu"))
    return torch.empty(0, dtype=prog.src.dtype, device=device)


def _apply_everywhere(prog: Program, shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run a program on the shards of the source's ranks; those of the target's."""
    before, ranks, after = prog.src.mesh.ranks, ranks_of(prog).ranks, prog.dst.mesh.ranks
    if len(before) == len(ranks) == len(after):
        return apply_program(prog, tuple(shards), everywhere=True)
    held = dict(zip(before, shards, strict=True))
    empty = shards[0].new_empty(0)
    out = apply_program(prog, tuple(held.get(rank, empty) for rank in ranks), everywhere=True)
    made = dict(zip(ranks, out, strict=True))
    return tuple(made[rank] for rank in after)


# What `torch.compiler.disable` sets: to import that takes a second.
run_program._torchdynamo_disable = True  # type: ignore[attr-defined]
run_program._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "a program's call is no node of a graph: call it outside of what torch.compile traces, "
    "or in its place fs.psum, fs.all_gather and the other collectives"
)


def _run_one(prog: Program, local: torch.Tensor, *, async_op: bool) -> Any:
    """Run a program on this rank's local."""
    where = _where(prog.dst)
    transport = current_rank(ranks_of(prog), where)
    launcher = None if async_op else _launcher(prog, local)
    if launcher is not None:
        wanted = local.requires_grad and torch.is_grad_enabled()
        return replay(launcher, local) if wanted else launcher.run(local)
    check_given(prog, local, transport, where)
    label = Label(where, ranks_of(prog), call_line() if async_op else "")
    with labelled(label):
        if not async_op:
            return _apply(prog, local)
        with torch.no_grad():
            started = launch(prog, transport, local)
    if prog.is_linear or not local.requires_grad:
        finish = lambda: apply_program(prog, (local,), False, lambda: (started(),))[0]  # noqa: E731
        return Pending(under(label, finish))
    fail("prog(local, async_op=True)", f"a program with a maximum or minimum, {prog.src} -> "
         f"{prog.dst}, of a local that requires grad", "only linear programs run ahead "
         "with gradients", "run it without async_op, or detach() the local")  # fmt: skip


_LAUNCHERS = Launchers()


def _launcher(prog: Program, local: torch.Tensor) -> Launcher | None:
    """What a program does to a local on this rank; None where it is not recorded.

    That is under `torchrun` alone, over this process's own transport.
    """
    transport = direct_transport()
    plain = type(local) is torch.Tensor or type(local) is torch.nn.Parameter
    if transport is None or not plain or local.is_meta or torch.compiler.is_compiling():
        return None
    if is_transformed():
        return None
    wanted = local.requires_grad and torch.is_grad_enabled()
    key = prog, transport, local.shape, local.stride(), local.dtype, local.device, wanted
    return _LAUNCHERS.of(key, _record, prog, local, transport, wanted)


def _record(
    prog: Program, local: torch.Tensor, transport: Transport, wanted: bool
) -> Launcher | None:
    check_given(prog, local, transport, _where(prog.dst))
    if transport.rank not in prog.src.mesh or (wanted and not prog.is_linear):
        return None
    forward: Function = lambda x: _apply(prog, x)  # noqa: E731
    backward: Function = lambda g: _apply(prog.T, g)  # noqa: E731
    like = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    with labelled(Label(_where(prog.dst), ranks_of(prog))):
        found = record(forward, backward, like)
        if wanted and found is not None and record(backward, forward, found.out) is None:
            return None
    return found


def _apply(prog: Program, x: torch.Tensor) -> torch.Tensor:
    return apply_program(prog, (x,), everywhere=False)[0]


def check_given(prog: Program, local: torch.Tensor, transport: Transport, where: str) -> None:
    """Raise `ShardingError` unless `local` is what this rank gives to a program."""
    src, rank = prog.src, transport.rank
    check_local(local, src, transport, where)
    if rank in src.mesh or rank not in ranks_of(prog):
        return
    if local.shape != (0,) or local.dtype != src.dtype:
        fail(where, f"on rank {rank}, which is not of {src.mesh}, a local of shape "
             f"{tuple(local.shape)} and {local.dtype}",
             "a rank that holds nothing of the source gives None or an empty tensor of its dtype",
             f"None, or torch.empty(0, dtype={src.dtype})")  # fmt: skip


def check_local(local: torch.Tensor, spec: Spec, transport: Transport, where: str) -> None:
    """Raise `ShardingError` unless `local` is what this rank holds of a tensor of `spec`."""
    if transport.rank not in spec.mesh:
        return
    expected = spec.local_shape(transport.rank)
    if local.shape != expected or local.dtype != spec.dtype:
        raise_if(where, [_mismatch(local.shape, local.dtype, spec, [transport.rank])])
    if not transport.moves(local.device):
        fail(where, f"on rank {transport.rank} a local on {local.device}",
             "no process group moves tensors of that device", "move it with .to(...)")  # fmt: skip


def check_shards(local: Any, spec: Spec, where: str) -> tuple[torch.Tensor, ...]:
    """`local` as a tuple of all shards; raises `ShardingError` with every rank that is wrong."""
    shards = check_tuple(local, spec.mesh, where)
    wrong: dict[tuple[torch.Size, torch.dtype, tuple[int, ...]], list[int]] = {}
    for rank, shard in zip(spec.mesh.ranks, shards, strict=True):
        if shard.shape != spec.local_shape(rank) or shard.dtype != spec.dtype:
            wrong.setdefault((shard.shape, shard.dtype, spec.local_shape(rank)), []).append(rank)
    problems = [_mismatch(shape, dtype, spec, rs) for (shape, dtype, _), rs in wrong.items()]
    raise_if(where, problems)
    return shards


def check_tuple(local: Any, mesh: Mesh, where: str) -> tuple[torch.Tensor, ...]:
    """`local` as one tensor per rank, all on one device; raises `ShardingError` if it is not."""
    if is_pair(local):
        fail(
            where,
            "a pair",
            "a local is what is in a pair, the spec is known",
            "pair.local, pair[0]",
        )
    if not isinstance(local, Sequence) or not all(isinstance(x, torch.Tensor) for x in local):
        fail(where, f"a local of type {type(local).__name__}",
             "a local is a tensor, or in a simulation the tuple of all shards",
             "fs.shard(global_tensor, spec).local")  # fmt: skip
    if len(local) != mesh.size:
        fail(where, f"{len(local)} shards for {mesh}",
             f"a simulation holds one shard per rank, {mesh.size} in rank order",
             "fs.shard(global_tensor, spec).local")  # fmt: skip
    devices = sorted({str(shard.device) for shard in local})
    if len(devices) > 1:
        fail(where, f"shards on {', '.join(devices)}",
             "all shards of a simulation are on one device",
             f"shard.to({devices[0]!r}) for each")  # fmt: skip
    return tuple(local)


def _mismatch(shape: torch.Size, dtype: torch.dtype, spec: Spec, ranks: Sequence[int]) -> Problem:
    """Ranks whose local is not of the spec, all in the same way."""
    several = f"ranks {', '.join(map(str, ranks))}"
    named = several if len(ranks) > 1 else place(spec.mesh, ranks[0])
    return Problem(
        f"on {named} a local of shape {tuple(shape)} and {dtype}",
        f"{spec} on {spec.mesh} has there shape {spec.local_shape(ranks[0])} and {spec.dtype}",
        "fs.from_local makes a spec from locals, fs.reshard changes one",
    )


@Hook
def run_typed_hook(
    where: str, x: torch.Tensor, src: Spec, dst: Spec, run: Callable[[torch.Tensor], Any]
) -> Any:
    """Return `run(x)`, its types tracked in a `shard_map`; set by `spmd/tracking/typed_body.py`."""
    raise NotImplementedError
