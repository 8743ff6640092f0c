"""Execution of `prog(local)`, on this rank's local or on the shards of all simulated ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NoReturn, get_args

import torch

from fshard._torch.dynamo import graph_constant
from fshard._torch.functorch import is_transformed
from fshard._torch.legacy_vmap import is_legacy_batched
from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import Problem, fail, raise_if
from fshard._util.hooks import Hook
from fshard.layout.mesh import Mesh
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair
from fshard.program.cost.traffic import step_axes, traffic
from fshard.program.program import Program, run_program_hook
from fshard.program.steps import Step
from fshard.run.autograd.linear_function import (
    ProgramGroup,
    apply_linear,
    apply_programs,
    are_linear,
)
from fshard.run.autograd.replay import replay
from fshard.run.capture import Recording, Recordings, record
from fshard.run.graphs.graph_node import graph_node
from fshard.run.interpreter import launch, program_label, ranks_of
from fshard.run.transports.agreement import compare_once, comparing_world
from fshard.run.transports.base import (
    LABEL,
    Group,
    Label,
    Transport,
    check_device,
    current_rank,
    current_transport,
    direct_transport,
    is_simulated,
    with_label,
)
from fshard.run.transports.divergence_report import deferred_label, rank_text
from fshard.run.transports.reduce_dtypes import TensorFunction
from fshard.run.transports.shape_only import is_abstract
from fshard.run.transports.torch_distributed import wait_in_background


class Pending:
    """Result of an operation that is under way: call `wait()` once.

    `prog(local, async_op=True)` and `fs.start(op, ...)` return it. Gradients go through the result
    of `wait()`. A named pending result that is dropped without a wait is reported by a warning.

    Args:
        finish: the function that waits and returns the result.
        name: the collective that `fs.start` launched, such as "fs.psum".
        line: `file:line` of the launch, if it is recorded.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=2)
    >>> prog = fs.redistribute(fs.Spec(mesh, fs.P("x"), shape=(2,)),
    ...                        fs.Spec(mesh, fs.P(), shape=(2,)))
    >>> pending = prog((torch.ones(1), torch.zeros(1)), async_op=True)
    >>> pending.wait()[0]
    tensor([1., 0.])
    """

    __slots__ = ("_finish", "_launched", "line", "name")

    def __init__(self, finish: Callable[[], Any], name: str = "", line: str = "") -> None:
        self._finish: Callable[[], Any] | None = finish
        # A simulation ends with its ranks, and under `torch.func` only `wait()` launches.
        self._launched = not (torch.compiler.is_compiling() or is_simulated() or is_transformed())
        self.name, self.line = name, line

    def __reduce__(self) -> NoReturn:
        fail("pickle", f"a pending {self.name or 'program'}",
             "a pending result belongs to the process that launched it",
             "pickle pending.wait()")  # fmt: skip

    @property
    def waited(self) -> bool:
        """True if `wait()` was called."""
        return self._finish is None

    def abandon(self) -> None:
        """Discard the result: nobody will wait for it."""
        finish, self._finish = self._finish, None
        if finish is not None and self._launched:
            wait_in_background(finish)

    def __del__(self) -> None:
        # `torch.compile` creates instances without calling `__init__`.
        if getattr(self, "_finish", None) is None:
            return
        if self.name:
            warnings.warn(f"{self.name} was never waited for: pending.wait()", RuntimeWarning,
                          stacklevel=1)  # fmt: skip
        self.abandon()

    def wait(self) -> Any:
        """Wait for the result.

        Returns:
            The tensors that the operation returns when it is called directly.

        Raises:
            ShardingError: on a second call.
        """
        finish, self._finish = self._finish, None
        if finish is None:
            fail("Pending.wait", "a second wait()", "a pending result must be waited for once",
                 "keep what the first wait() returned")  # fmt: skip
        return finish()

    def __repr__(self) -> str:
        return f"<Pending, {'under way' if self._finish else 'waited for'}>"


@lru_cache(maxsize=CACHE_SIZE)
def _local_shapes(spec: Spec) -> list[tuple[int, ...]]:
    return [spec.local_shape(rank) for rank in spec.mesh.ranks]


@lru_cache(maxsize=CACHE_SIZE)
def _input_of(prog: Program, rank: int) -> tuple[torch.Size, torch.dtype] | None:
    """Return the shape and dtype of a program's local on a rank that takes part in it."""
    if rank not in ranks_of(prog):
        return None
    shape = prog.src.local_shape(rank) if rank in prog.src.mesh else (0,)
    return torch.Size(shape), prog.src.dtype


@run_program_hook.set
def run_program(prog: Program, local: Any, *, async_op: bool = False) -> Any:
    """Run a program on this rank's local, or on a tuple of the shards of all simulated ranks.

    Where the meshes of source and target differ, the tuple has a shard for each rank of the
    source's, and the result one for each of the target's. A rank outside of the source's mesh
    passes None or an empty tensor (one that requires grad if gradients are to come back from it),
    one outside of the target's gets an empty tensor.
    """
    if torch.compiler.is_dynamo_compiling():
        return _run_in_graph(prog, local, async_op)
    if local is None:
        local = empty_local(prog)
    if not isinstance(local, torch.Tensor):
        outputs = _run_on_shards(prog, check_shards(local, prog.src, program_label(prog).name))
        return Pending(lambda: outputs) if async_op else outputs
    if current_tracker_hook.call() is None:
        return _run_local(prog, local, async_op)
    run = lambda x: _run_local(prog, x, async_op)  # noqa: E731
    return run_typed_hook.call(program_label(prog).name, local, prog.src, prog.dst, run)


for _kind in get_args(Step):
    graph_constant(_kind)


def _run_in_graph(prog: Program, local: Any, async_op: bool) -> Any:
    result = _run_steps(prog.src, prog.steps, (prog.forward_dtype, prog.backward_dtype), local)
    return Pending(lambda: result) if async_op else result


@graph_node
def _run_steps(
    src: Spec,
    steps: tuple[Step, ...],
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    local: Any,
) -> Any:
    """Run the program of these steps, which are constants of a graph."""
    forward, backward = dtypes
    return Program(src, steps, forward_dtype=forward, backward_dtype=backward)(local)


def empty_local(prog: Program) -> torch.Tensor | None:
    """Return the local of a rank outside of the source's mesh; None in other code."""
    transport = current_transport()
    if transport is None or transport.rank in prog.src.mesh:
        return None
    device = getattr(transport, "device", torch.device("cpu"))
    return torch.empty(0, dtype=prog.src.dtype, device=device)


def _run_on_shards(prog: Program, shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run a program on the shards of the source's ranks; return those of the target's."""
    if not prog.steps and prog.forward_dtype is prog.backward_dtype is None:
        return tuple([x.view_as(x) for x in shards])
    op = ProgramGroup((prog,))
    if prog.src.mesh == op.mesh == prog.dst.mesh:
        return apply_programs(op, tuple(shards), on_shards=True)
    ranks, by_rank = op.mesh.ranks, dict(zip(prog.src.mesh.ranks, shards, strict=True))
    empty = shards[0].new_empty(0)
    inputs = tuple(by_rank.get(rank, empty) for rank in ranks)
    outputs = dict(zip(ranks, apply_programs(op, inputs, on_shards=True), strict=True))
    return tuple(outputs[rank] for rank in prog.dst.mesh.ranks)


@lru_cache(maxsize=CACHE_SIZE)
def communication(*progs: Program, rank: int) -> tuple[Group, str]:
    """Return the ranks that a rank reaches along the axes of programs, and their layouts as text.

    With several meshes they are all ranks.
    """
    mesh = ranks_of(*progs)
    text = ", ".join(f"{prog.src} -> {prog.dst}" for prog in progs)
    if any(spec.mesh != mesh for prog in progs for spec in prog.specs):
        return () if all(prog.is_local for prog in progs) else tuple(mesh.ranks), text
    steps = chain.from_iterable(zip(p.steps, p.specs, p.specs[1:], strict=False) for p in progs)
    axes = {axis for step in steps if traffic(*step).launches for axis in step_axes(*step)}
    return mesh.group(rank, tuple(axis for axis in mesh.axes if axis in axes)), text


def compare_layouts(label: Label, progs: Sequence[Program], rank: int, call: str = "") -> None:
    """Raise `ShardingError` if ranks of a collective run other programs; see `compare_once`.

    `call` is the call as text, by default the programs.
    """
    world = comparing_world()
    if world is not None and rank in label.mesh:
        group, text = communication(*progs, rank=rank)
        compare_once(world, label, group, call or text)


def _run_local(prog: Program, local: torch.Tensor, async_op: bool) -> Any:
    """Run a program on this rank's local.

    It is launched before autograd records it, which adds the gradient to the launched result. The
    second call on a local of one shape is recorded, later ones are replayed.
    """
    recorded = None if async_op else _recording_of(prog, local)
    if recorded is not None:
        return replay((recorded,), (local,))[0]
    label = program_label(prog)
    where = label.name
    transport = current_transport() or current_rank(label.mesh, where)
    valid = (local.shape, local.dtype) == _input_of(prog, transport.rank)
    if not (valid and transport.accepts(local.device)):
        check_local_input(prog, local, transport, where)
    if not is_abstract(local):
        compare_layouts(label, (prog,), transport.rank)
    label = deferred_label(label) if async_op else label
    needs_grad = local.requires_grad and torch.is_grad_enabled()
    if async_op and local.requires_grad and not prog.is_linear:
        fail("prog(local, async_op=True)", f"a program with a maximum or minimum, {prog.src} -> "
             f"{prog.dst}, of a local that requires grad", "the program must be linear to run "
             "ahead with gradients", "run it without async_op, or detach() the local")  # fmt: skip
    op = ProgramGroup((prog,))
    finish: Callable[[], torch.Tensor]
    token = LABEL.set(LABEL.get() or label)
    try:
        if (
            (needs_grad and not are_linear((prog,)))
            or not valid
            or is_transformed()
            or is_legacy_batched(local)
            or is_abstract(local)
        ):
            finish = lambda: apply_programs(op, (local,), False)[0]  # noqa: E731
        elif needs_grad:
            with torch.no_grad():
                launched = launch(prog, transport, local)
            finish = lambda: apply_linear(op, (local,), False, lambda: (launched(),))[0]  # noqa: E731
        else:
            finish = launch(prog, transport, local)
        return Pending(with_label(label, finish)) if async_op else finish()
    finally:
        LABEL.reset(token)


def run_programs(progs: Sequence[Program | None], locals_: Sequence[torch.Tensor]) -> list[Any]:
    """Run programs on this rank's locals; a local without a program stays as it is.

    If all are recorded, their collectives are under way together, and backward those of their
    transposes: the sums of weights' gradients while halos are exchanged.
    """
    results: list[Any] = list(locals_)
    rows = [(i, prog, locals_[i]) for i, prog in enumerate(progs) if prog is not None]
    recordings = []
    if rows and current_tracker_hook.call() is None:
        recordings = [r for _, prog, x in rows if (r := _recording_of(prog, x)) is not None]
    if not rows or len(recordings) < len(rows):
        outputs: Sequence[Any] = [prog(x) for _, prog, x in rows]
    else:
        outputs = replay(recordings, [x for _, _, x in rows])
    for (i, _, _), output in zip(rows, outputs, strict=True):
        results[i] = output
    return results


_RECORDINGS = Recordings()


def _recording_of(prog: Program, local: torch.Tensor) -> Recording | None:
    """Return the recording of a program on this rank of `torchrun`, or None."""
    transport = direct_transport()
    if transport is None or is_transformed() or torch.compiler.is_compiling():
        return None
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.is_meta:
        return None
    needs_grad = local.requires_grad and torch.is_grad_enabled()
    key = prog, transport, local.shape, local.stride(), local.dtype, local.device, needs_grad
    cached = _RECORDINGS.get(key)
    if type(cached) is Recording:
        return cached
    return _RECORDINGS.get_or_record(key, _record, prog, local, transport, needs_grad)


def _record(
    prog: Program, local: torch.Tensor, transport: Transport, needs_grad: bool
) -> Recording | None:
    label = program_label(prog)
    check_local_input(prog, local, transport, label.name)
    if transport.rank not in prog.src.mesh or (needs_grad and not prog.is_linear):
        return None
    compare_layouts(label, (prog,), transport.rank)
    forward, backward = _runner(prog), _runner(prog.T) if needs_grad else _runner(prog)
    like = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    recorded = record(forward, backward, like, label)
    if needs_grad and recorded and record(backward, forward, recorded.out) is None:
        return None
    return recorded


def _runner(prog: Program) -> TensorFunction:
    op = ProgramGroup((prog,))
    return lambda x: apply_linear(op, (x,), on_shards=False)[0]


def check_local_input(prog: Program, local: torch.Tensor, transport: Transport, where: str) -> None:
    """Raise `ShardingError` unless `local` is a valid argument of a program on this rank."""
    src, rank = prog.src, transport.rank
    check_local(local, src, transport, where)
    if not prog.is_local:
        check_device(local.device, transport, where)
    if rank in src.mesh or rank not in ranks_of(prog):
        return
    if local.shape != (0,) or local.dtype != src.dtype:
        fail(where, f"on rank {rank}, which is not of {src.mesh}, a local of shape "
             f"{tuple(local.shape)} and {local.dtype}",
             "a rank outside of the source's mesh must pass None or an empty tensor of its dtype",
             f"None, or torch.empty(0, dtype={src.dtype})")  # fmt: skip


def check_local(local: torch.Tensor, spec: Spec, transport: Transport, where: str) -> None:
    """Raise `ShardingError` unless `local` has this rank's shape and dtype of `spec`."""
    if transport.rank not in spec.mesh:
        return
    expected = spec.local_shape(transport.rank)
    if local.shape != expected or local.dtype != spec.dtype:
        raise_if(where, [_mismatch(local.shape, local.dtype, spec, [transport.rank])])


def check_pair(pair: Sharded, where: str) -> None:
    """Raise `ShardingError` unless a pair's local, or all ranks', have the shapes of its spec."""
    local, transport = pair.local, current_transport()
    if not isinstance(local, torch.Tensor):
        check_shards(local, pair.spec, where)
    elif transport is not None:
        check_local(local, pair.spec, transport, where)


def check_shards(local: Any, spec: Spec, where: str) -> tuple[torch.Tensor, ...]:
    """Return `local` as a tuple of all shards; raise `ShardingError` naming every wrong rank."""
    shards = check_tuple(local, spec.mesh, where)
    dtype = spec.dtype
    if [x.shape for x in shards if x.dtype == dtype] == _local_shapes(spec):
        return shards
    wrong: dict[tuple[torch.Size, torch.dtype, tuple[int, ...]], list[int]] = {}
    for rank, shard in zip(spec.mesh.ranks, shards, strict=True):
        if shard.shape != spec.local_shape(rank) or shard.dtype != spec.dtype:
            wrong.setdefault((shard.shape, shard.dtype, spec.local_shape(rank)), []).append(rank)
    raise_if(where, [_mismatch(*key[:2], spec, wrong_ranks) for key, wrong_ranks in wrong.items()])
    return shards


def check_tuple(local: Any, mesh: Mesh, where: str) -> tuple[torch.Tensor, ...]:
    """Return `local` as one tensor per rank, all on one device, or raise `ShardingError`."""
    if is_pair(local):
        fail(where, "a pair", "a local must be without its spec, which is known here", "pair.local")
    is_tensor = (
        [isinstance(x, torch.Tensor) for x in local] if isinstance(local, Sequence) else None
    )
    if is_tensor is None or not all(is_tensor):
        fail(where, f"a local of type {type(local).__name__}",
             "a local must be a tensor, or in a simulation the tuple of all shards",
             "fs.shard(global_tensor, spec).local")  # fmt: skip
    if len(local) != mesh.size:
        fail(where, f"{len(local)} shards for {mesh}",
             f"a simulation must have one shard per rank, {mesh.size} in rank order",
             "fs.shard(global_tensor, spec).local")  # fmt: skip
    devices = {shard.device for shard in local}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        fail(where, f"shards on {', '.join(names)}",
             "all shards of a simulation must be on one device",
             f"shard.to({names[0]!r}) for each")  # fmt: skip
    return tuple(local)


def _mismatch(shape: torch.Size, dtype: torch.dtype, spec: Spec, ranks: Sequence[int]) -> Problem:
    """Return the problem of ranks whose locals have one wrong shape and dtype."""
    several = f"ranks {', '.join(map(str, ranks))}"
    name = several if len(ranks) > 1 else rank_text(spec.mesh, ranks[0])
    return Problem(
        f"on {name} a local of shape {tuple(shape)} and {dtype}",
        f"with {spec} on {spec.mesh} it must have shape {spec.local_shape(ranks[0])} and "
        f"{spec.dtype}",
        "fs.from_local makes a spec from locals, fs.reshard changes one",
    )


@Hook
def current_tracker_hook() -> Any:
    """Return the tracker of types in the running body, or None; set by `spmd/axis_env.py`."""
    raise NotImplementedError


@Hook
def run_typed_hook(
    where: str, x: torch.Tensor, src: Spec, dst: Spec, run: Callable[[torch.Tensor], Any]
) -> Any:
    """Return `run(x)`, its types tracked in a `shard_map`; set by `spmd/tracking/typed_body.py`."""
    raise NotImplementedError
