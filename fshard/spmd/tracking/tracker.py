"""States of plain tensors, tracked while a mapped function runs.

A table of weak references has the states of every tensor that the body received or computed;
tensors carry no attributes. A tensor that is not in the table comes from outside and is invariant.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from fshard._torch.autograd_state import version_of, view_base
from fshard._torch.functorch import (
    get_unwrapped,
    is_foreign,
    is_transformed,
    is_wrapped,
    tangent_of,
    transforms_active,
    unwrap_if_dead,
)
from fshard._torch.memory import sparse_values, storage_id
from fshard._torch.modes import DisableTorchFunction
from fshard._util.errors import Problem, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.tree import flatten, unflatten
from fshard.run.autograd.linear_function import ProgramGroup
from fshard.run.graphs.blocks import block_shape
from fshard.run.transports.base import label_of, labelled
from fshard.run.transports.divergence_report import user_frame, user_line
from fshard.run.transports.roll_call import RollCalls
from fshard.spmd.axis_env import current_axes
from fshard.spmd.closure_inputs import refuse_closure
from fshard.spmd.collectives.collective_plan import CollectivePlan
from fshard.spmd.collectives.pcast import cast_by, cast_program
from fshard.spmd.tracking.control_casts import AgreedAxes, EnterControl, LeaveControl
from fshard.spmd.types import (
    CONTROL_DEPENDENT,
    INVARIANT,
    VARYING,
    JoinedStates,
    LocalType,
    States,
    TypeConflict,
    TypeRule,
    apply_signature,
    control_cast_axes,
    format_axes,
    join_states,
    newly_cast_axes,
    state_word,
)

REPLICATING = ("fs.all_gather", "fs.pbroadcast")

Launch = Callable[[CollectivePlan, Any, bool], Callable[[], Any]]


class TypeRecord(weakref.ref[torch.Tensor]):
    """Weak reference to a tensor, with its states, its storage, and its casts so far."""

    __slots__ = ("casts", "key", "states", "storage")

    key: int
    states: States
    storage: int
    casts: dict[States, tuple[int, torch.Tensor]] | None


class Tracker:
    """Types of the tensors of one rank during one call of a mapped function."""

    def __init__(
        self, mesh: Mesh, name: str, *, strict: bool = False, values: bool = False
    ) -> None:
        self.mesh, self.name, self.strict, self.values = mesh, name, strict, values
        self.paused = False
        # The host has read values that vary along these axes, at these lines.
        self.read_states: States = INVARIANT
        self.read_sites: list[str] = []
        self.num_outside_at_read = 0
        self.first_read = ""
        # Which ranks have read: see `read_agreement`.
        self.roll_calls = RollCalls(mesh, name)
        self.all_have_read, self.reads_compared, self.reads_agree = False, False, True
        self.agreed = AgreedAxes()
        # The last collective or draw along an axis whose results vary and could be equal.
        self.replicated_by: dict[str, str] = {}
        self.table: dict[int, TypeRecord] = {}
        # Storages are looked up when a tensor is written: most tensors are freed before.
        self._unindexed: dict[int, TypeRecord] = {}
        self._by_storage: dict[int, dict[int, TypeRecord]] = {}
        self.blank: set[int] = set()  # ids of tensors without a recorded write
        self._outside: dict[int, torch.Tensor] = {}  # by id: arguments and closures
        self._memory: set[int] = set()  # their storages
        table, unplaced, by_storage = self.table, self._unindexed, self._by_storage
        blank = self.blank

        def forget(record: TypeRecord) -> None:
            key = record.key
            if table.get(key) is record:
                del table[key]
                blank.discard(key)
                if unplaced.pop(key, None) is None and record.storage:
                    sharing = by_storage[record.storage]
                    del sharing[key]
                    if not sharing:
                        del by_storage[record.storage]

        self._drop: Any = forget

    def __del__(self) -> None:
        """Free the records, which would wait for the garbage collector: they refer to `forget`."""
        for records in (self.table, self._unindexed, self._by_storage):
            records.clear()

    # -- the table --

    def states(self, x: torch.Tensor) -> States:
        """Return the states of a tensor; an unknown one comes from outside and is invariant."""
        record = self.table.get(id(x))
        return record.states if record is not None else self._infer_states(x)

    def typeof(self, x: torch.Tensor) -> LocalType:
        """Return the type of a tensor."""
        return LocalType(x.shape, x.dtype, self.states(x))

    def enter(self, x: torch.Tensor, states: States) -> None:
        """Record a tensor from outside of the body: an argument or a closure."""
        self.record(x, states)
        self._outside[id(x)] = x
        storage = _storage(x)
        if storage:
            self._memory.add(storage)

    def record(self, result: Any, states: States) -> None:
        """Record the states of a result: a tensor, or a tuple or list of results."""
        if isinstance(result, torch.Tensor):
            record = self.table.get(id(result))
            if record is None:
                record = TypeRecord(result, self._drop)
                record.key = key = id(result)
                record.states, record.casts, record.storage = states, None, 0
                self.table[key] = self._unindexed[key] = record
            elif record.states is not states:
                record.states, record.casts = states, None
            if is_transformed():
                self._record_within(result, states)
        elif isinstance(result, tuple | list):
            for item in result:
                self.record(item, states)

    def _record_within(self, x: torch.Tensor, states: States) -> None:
        """Record the tensor that a wrapper of `torch.func` wraps, and the tangent of another one.

        The `jvp` of a custom function gets that tangent. Without a gradient it needs no cast, and
        one that is known may be a value of the body.
        """
        inner = _inner(x)
        if inner is not None:
            self.record(inner, states)
        elif not transforms_active():
            tangent = tangent_of(x)
            if tangent is not None and (tangent.requires_grad or id(tangent) not in self.table):
                self.record(tangent, states)

    def _infer_states(self, x: torch.Tensor) -> States:
        """Infer the states of a tensor that no tracked call returned, and record them.

        They are those of known tensors with the same memory. Otherwise the tensor is from outside
        and invariant; but if the host read varying values, it may have been made from them and
        varies. A closure that is also an argument is invariant, so that its gradient is summed.
        """
        inner = _inner(x)
        if inner is not None:
            live = unwrap_if_dead(x)
            if is_wrapped(live) and is_foreign(live):
                refuse_closure(self.name, x)
            states = self.states(inner)
            self.record(x, states)
            return states
        alias_states = [record.states for _, record in self._aliases(x)]
        if alias_states and not (x.requires_grad and _storage(x) in self._memory):
            joined = join_states(tuple(alias_states), TypeRule.MOVE)
            axes = {axis for other in alias_states for axis, _ in other.items}
            states = States.varying(axes) if isinstance(joined, TypeConflict) else joined.result
            self.record(x, states)
            return states
        states = INVARIANT if x.requires_grad else self.read_states
        self.enter(x, states)
        return states

    def _aliases(self, x: torch.Tensor) -> list[tuple[torch.Tensor, TypeRecord]]:
        """Return the other tensors of the table that share memory with `x`."""
        while self._unindexed:
            key, record = self._unindexed.popitem()
            tensor = record()
            if tensor is not None:
                record.storage = _storage(tensor)
                if record.storage:
                    self._by_storage.setdefault(record.storage, {})[key] = record
        records = list(self._by_storage.get(_storage(x), {}).values())
        return [(y, record) for record in records if (y := record()) is not None and y is not x]

    def forget(self, x: torch.Tensor) -> None:
        """Drop the record of a tensor that has new memory, which determines its states."""
        record = self.table.get(id(x))
        if record is not None:
            self._drop(record)

    @property
    def outside(self) -> Collection[torch.Tensor]:
        """Tensors from outside of the body, in the order of their first use."""
        return self._outside.values()

    def is_outside(self, x: torch.Tensor) -> bool:
        """Return True for an argument or another tensor from outside of the body."""
        self.states(x)
        return id(x) in self._outside

    # -- casts --

    def cast(self, x: torch.Tensor, states: States, target: States) -> torch.Tensor:
        """Return `x` cast to `target`; its gradient is summed along axes where it was invariant.

        A tensor is cast once for all uses, so that its gradient is summed once.
        """
        axes, (entered, left) = newly_cast_axes(states, target), control_cast_axes(states, target)
        if not (axes or left) or not has_gradient(x):
            return x
        record = self.table[id(x)]
        if record.casts is None:
            record.casts = {}
        version = version_of(x)
        reached = States.of(
            dict(states.items) | {a: s for a, s in target.items if a in axes + left}
        )
        cached = record.casts.get(reached)
        if cached is not None and cached[0] == version:
            return cached[1]
        y, summed = x, tuple(axis for axis in axes if axis not in entered)
        if summed and not left:
            prog = cast_program(self.mesh, summed, block_shape(x), x.dtype, None)
            y = cast_by(ProgramGroup((prog,)), y)
        if entered:
            y = cast_by(EnterControl(self.mesh, entered, self.agreed), y)
        if left:
            y = cast_by(LeaveControl(self.mesh, left, (), self.agreed, cast=summed), y)
        if not is_transformed():  # wrappers of torch.func end with the transform
            record.casts[reached] = (version, y)
        self.record(y, reached)
        return y

    def check_cast(self, x: torch.Tensor, states: States, target: States, op: str) -> None:
        """Raise, with `check="strict"`, for an implicit cast that changes gradients."""
        axes = newly_cast_axes(states, target) if self.strict else ()
        if not axes or not has_gradient(x):
            return
        word = state_word(target.at(axes[0]))
        self.fail(
            op,
            f"an operand {LocalType(x.shape, x.dtype, states)} that requires grad, while the "
            f"others are {word} along {', '.join(axes)}",
            f"the operands must agree along every axis; check='strict' requires a written cast, "
            f"which sums the gradient over {', '.join(axes)}",
            f"fs.pcast(operand, {format_axes(axes)}, to={word!r}), or check=True, which inserts it",
        )

    def fail(self, op: str, given: str, rule: str, fix: str) -> NoReturn:
        """Raise for a call in the body, with its source line."""
        self.raise_all([Problem(given, rule, fix)], f": {op}{user_line(None, None)}")
        raise AssertionError("unreachable")

    def raise_all(self, problems: Sequence[Problem], what: str = "") -> None:
        """Raise if there are problems; types, and so problems, are the same on every rank."""
        raise_if(f"{self.name}{what}", problems, same_on_all_ranks=True)

    # -- collectives --

    def launch_collective(
        self, plan: CollectivePlan, tree: Any, ahead: bool, launch: Launch
    ) -> Callable[[], Any]:
        """Launch a collective on the leaves of a tree, cast as its signature requires."""
        leaves, treedef = flatten(tree)
        rows = [(leaf, self._join(plan, leaf)) for leaf in leaves]
        if plan.name in REPLICATING and plan.signature.result == VARYING:
            self.replicated_by |= dict.fromkeys(plan.signature.axes, plan.name)
        unchanged = [
            joined is not None and self._is_only_typed(plan, leaf) for leaf, joined in rows
        ]
        operands = [
            leaf if joined is None else self._cast_for(plan, leaf, joined) for leaf, joined in rows
        ]
        moved = [None if stays else x for x, stays in zip(operands, unchanged, strict=True)]
        is_of_all = set(plan.signature.axes) == set(self.mesh.axes)
        if is_of_all and not plan.signature.cast_to and "axis_index_groups" not in plan.arguments:
            self.roll_calls.join_collective(write=bool(self.read_states.items))
        with self.pause():
            finish = launch(plan, unflatten(treedef, moved), ahead)

        def complete() -> Any:
            with self.pause():
                results = flatten(finish())[0]
                for i, (leaf, joined) in enumerate(rows):
                    if joined is None or not isinstance(leaf, torch.Tensor):
                        continue
                    y = operands[i] if unchanged[i] else results[i]
                    results[i] = y.view_as(y) if y is leaf else y
                    self.record(results[i], joined.result)
            return unflatten(treedef, results)

        return complete

    def _join(self, plan: CollectivePlan, leaf: Any) -> JoinedStates | None:
        """Return the result's and the operand's states of a collective; None for a non-tensor."""
        if not isinstance(leaf, torch.Tensor):
            return None
        joined = apply_signature(self.states(leaf), plan.signature)
        if isinstance(joined, TypeConflict):
            self.fail(plan.name, f"an operand {self.typeof(leaf)}", joined.rule, joined.fix)
        if self.strict:
            self._check_source(plan, leaf)
        return joined

    def _check_source(self, plan: CollectivePlan, leaf: torch.Tensor) -> None:
        """Raise for a cast whose source state is assumed rather than tracked."""
        to, source, axes = plan.signature.cast_to, plan.signature.source, plan.signature.axes
        state = self.states(leaf).at(axes[0]) if axes else None
        if to == "varying" and source is None and state is not None:
            self.fail(
                plan.name,
                f"an operand {self.typeof(leaf)} and no src",
                "src must be given: check=False assumes an invariant operand, sums the gradient, "
                "and must give the same result as check='strict'",
                f"fs.pcast(x, {axes[0]!r}, to='varying', src={state[0]!r})",
            )

    def _is_only_typed(self, plan: CollectivePlan, leaf: torch.Tensor) -> bool:
        """Return True if a cast changes the type alone, in forward and backward."""
        signature, states = plan.signature, self.states(leaf)
        return signature.cast_to is not None and any(map(states.at, signature.axes))

    def _cast_for(
        self, plan: CollectivePlan, leaf: torch.Tensor, joined: JoinedStates
    ) -> torch.Tensor:
        states, (target,) = self.states(leaf), joined.operands
        if states is target:
            return leaf
        if plan.signature.cast_to is None:
            self.check_cast(leaf, states, target, plan.name)
            return self.cast(leaf, states, target)
        with labelled(label_of(plan.name, self.mesh, plan.arguments, (block_shape(leaf),))):
            return self.cast(leaf, states, target)

    # -- writes and the host --

    def states_beside(self, target: torch.Tensor) -> tuple[States, ...]:
        """Return the states of tensors whose gradients flow through a write into `target`.

        These are views of the same base. A cast shares memory too, but keeps its own type.
        """
        if not torch.is_grad_enabled():
            return ()
        sharing = self._aliases(target)
        return tuple(record.states for other, record in sharing if _base(other) is _base(target))

    def overwrites_all(self, target: torch.Tensor) -> bool:
        """Return True if overwriting `target` overwrites all tensors that share its memory."""
        if not self._aliases(target):
            return True
        if target.layout is not torch.strided:  # others may hold its indices too
            return False
        return target.numel() * target.element_size() == target.untyped_storage().nbytes()

    def record_write(self, target: torch.Tensor, states: States) -> None:
        """Record that `target`, and all that shares its memory, now has `states`."""
        for other, record in self._aliases(target):
            joined = join_states((record.states, states), TypeRule.MOVE)
            axes = (axis for side in (record.states, states) for axis, _ in side.items)
            same = torch.is_grad_enabled() and _base(other) is _base(target)
            rest = States.varying(axes) if isinstance(joined, TypeConflict) else joined.result
            self.record(other, states if same else rest)
        if target.layout is not torch.strided:  # it may hold other values now
            self.forget(target)
        self.record(target, states)
        self.blank.discard(id(target))

    def check_write(self, target: torch.Tensor, op: str) -> None:
        """Raise unless the body has computed `target`."""
        self.states(target)
        if _storage(target) in self._memory:
            self.fail(
                op,
                f"a write into a tensor of shape {tuple(target.shape)} from outside of the body",
                "a body must not write into its arguments and closures, which all ranks share",
                "write into its clone(), and return that; for a module with running statistics, "
                "eval() or track_running_stats=False",
            )

    def record_read(self, states: States, op: str) -> None:
        """Record that the host read values in `states`, on which all later code may depend.

        Invariant and reduced values are the same on every rank, and so is what the host computes.
        """
        axes = [axis for axis, (state_name, _) in states.items if state_name != "reduced"]
        if axes and not set(axes) <= set(self.read_states.axes("varying")):
            if not self.read_states.items:
                self.num_outside_at_read = len(self._outside)
                place = f"{self.roll_calls.collectives} {self.roll_calls.place}"
                self.first_read = f"{place} {op}{user_line(None, None)}"
            read_axes = {*self.read_states.axes("varying"), *axes}
            self.read_states = States.of(dict.fromkeys(read_axes, CONTROL_DEPENDENT))
        if axes and len(self.read_sites) < 3:
            line = f"{op}{user_line(None, None)}"
            if line not in self.read_sites:
                self.read_sites.append(line)

    def draw_states(self, op: str, kwargs: Mapping[str, Any]) -> States:
        """Return the states of a draw from this process's generator; warn once per line."""
        if kwargs.get("generator") is None:
            frame = user_frame(sys._getframe())
            text = (
                f"{op} draws from this process's generator: the values differ between ranks and "
                "meshes. In the body, fs.random.keyed(key) makes it draw with a key; or draw "
                "before the call and pass the values in"
            )
            if frame is None:
                warnings.warn(text, stacklevel=2)
            else:
                seen = frame.f_globals.setdefault("__warningregistry__", {})
                file, line = frame.f_code.co_filename, frame.f_lineno
                warnings.warn_explicit(text, UserWarning, file, line, registry=seen)
        bound = current_axes()
        axes = self.mesh.axes if bound is None else bound.axes
        self.replicated_by |= dict.fromkeys(axes, "a draw")
        return States.varying(axes)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Track nothing in the block, which runs a graph that has types already."""
        before, self.paused = self.paused, True
        try:
            with DisableTorchFunction():
                yield
        finally:
            self.paused = before


def read_note(sites: Sequence[str]) -> str:
    """Return the source lines at which the host read varying values, for error texts."""
    return f"the host read varying values: {', '.join(sites)}" if sites else ""


_VALUES: dict[torch.layout, Callable[[torch.Tensor], torch.Tensor]] = {
    torch.sparse_coo: sparse_values,
    **dict.fromkeys(
        (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc),
        torch.Tensor.values,
    ),
}


def _storage(x: torch.Tensor) -> int:
    """Return an id that tensors sharing memory have in common; 0 without memory.

    For a sparse tensor it is the storage of its values.
    """
    try:
        return storage_id(x)
    except (NotImplementedError, RuntimeError):  # sparse tensors, functorch's wrappers
        with DisableTorchFunction():
            values = _VALUES.get(x.layout)
            return 0 if values is None else _storage(values(x))


def _base(x: torch.Tensor) -> torch.Tensor:
    """Return the base of a view, or the tensor itself."""
    return x if (base := view_base(x)) is None else base


def has_gradient(x: torch.Tensor) -> bool:
    """Return True if results computed from `x` now would require grad with respect to it.

    For a wrapper of `torch.vmap` it is checked on the wrapped tensor.
    """
    if x.requires_grad:
        return torch.is_grad_enabled()
    inner = _inner(x) if is_transformed() else None
    return inner is not None and has_gradient(inner)


def _inner(x: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor within a wrapper of `torch.func`, or None for another tensor."""
    return get_unwrapped(x) if is_wrapped(x) else None
