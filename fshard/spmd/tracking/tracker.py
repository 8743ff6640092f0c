"""Types of plain tensors, tracked while a mapped function runs.

Nothing is hung on the tensors: a weak table knows the states of every tensor that the body has
made or been given. What the table does not know comes from outside of the body and is invariant.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from fshard._torch.autograd_state import version_of, view_base
from fshard._torch.functorch import get_unwrapped, is_transformed, is_wrapped
from fshard._torch.memory import sparse_values, storage_id
from fshard._torch.modes import DisableTorchFunction
from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.tree import flatten, unflatten
from fshard.run.transports.divergence_report import user_frame, user_line
from fshard.spmd.axis_env import current_axes, current_tracker
from fshard.spmd.collectives.collective_plan import CollectivePlan
from fshard.spmd.collectives.pcast import cast_to_varying
from fshard.spmd.types import (
    INVARIANT,
    JoinedStates,
    LocalType,
    States,
    TypeConflict,
    TypeRule,
    apply_signature,
    format_axes,
    join_states,
    newly_cast_axes,
    state_word,
)

__all__ = ["Tracker", "has_gradient", "typeof"]

Launch = Callable[[CollectivePlan, Any, bool], Callable[[], Any]]


class TypeRecord(weakref.ref[torch.Tensor]):
    """A tensor of the table: its states, the casts of it that were made, and its memory."""

    __slots__ = ("casts", "key", "states", "storage")

    key: int
    states: States
    storage: int
    casts: dict[tuple[str, ...], tuple[int, torch.Tensor]] | None


class Tracker:
    """The types of the tensors of one rank, in one call of a mapped function."""

    def __init__(
        self, mesh: Mesh, name: str, *, strict: bool = False, values: bool = False
    ) -> None:
        self.mesh, self.name, self.strict, self.values = mesh, name, strict, values
        self.paused = False
        # Along these axes the host knows values that vary, since these lines.
        self.read_states: States = INVARIANT
        self.read_sites: list[str] = []
        self.table: dict[int, TypeRecord] = {}
        # Where a tensor lies is asked for when one is written: most are gone by then.
        self._unindexed: dict[int, TypeRecord] = {}
        self._by_storage: dict[int, dict[int, TypeRecord]] = {}
        self.blank: set[int] = set()  # by id: tensors that nothing was seen to write
        self._outside: dict[int, torch.Tensor] = {}  # by id: arguments and closures
        self._memory: set[int] = set()  # their storages
        table, unplaced, by_storage = self.table, self._unindexed, self._by_storage
        blank = self.blank

        def forget(known: TypeRecord) -> None:
            key = known.key
            if table.get(key) is known:
                del table[key]
                blank.discard(key)
                if unplaced.pop(key, None) is None and known.storage:
                    sharing = by_storage[known.storage]
                    del sharing[key]
                    if not sharing:
                        del by_storage[known.storage]

        self._drop: Any = forget

    # -- the table --

    def states(self, x: torch.Tensor) -> States:
        """The states of a tensor; one that is not known is from outside, and invariant."""
        known = self.table.get(id(x))
        return known.states if known is not None else self._infer_states(x)

    def typeof(self, x: torch.Tensor) -> LocalType:
        """The type of a tensor."""
        return LocalType(x.shape, x.dtype, self.states(x))

    def enter(self, x: torch.Tensor, states: States) -> None:
        """Take in what comes from outside: an argument, or what the body closes over."""
        self.record(x, states)
        self._outside[id(x)] = x
        storage = _storage(x)
        if storage:
            self._memory.add(storage)

    def record(self, result: Any, states: States) -> None:
        """Write down the states of a result: a tensor, or a tuple or list of results."""
        if isinstance(result, torch.Tensor):
            known = self.table.get(id(result))
            if known is None:
                known = TypeRecord(result, self._drop)
                known.key = key = id(result)
                known.states, known.casts, known.storage = states, None, 0
                self.table[key] = self._unindexed[key] = known
            elif known.states is not states:
                known.states, known.casts = states, None
            if is_transformed():
                inner = _unwrapped(result)
                if inner is not None:
                    self.record(inner, states)
        elif isinstance(result, tuple | list):
            for each in result:
                self.record(each, states)

    def _infer_states(self, x: torch.Tensor) -> States:
        """The states of a tensor that no tracked call has made.

        Memory that is known tells its own. Else it is from outside, and the same on every rank;
        but where the host has learnt of what varies, it may have been made of that. What is
        closed over and also cut, as an argument, needs its gradient summed: it is invariant.
        """
        inner = _unwrapped(x)
        if inner is not None:
            states = self.states(inner)
            self.record(x, states)
            return states
        sharing = [each.states for _, each in self._aliases(x)]
        if sharing and not (x.requires_grad and _storage(x) in self._memory):
            joined = join_states(tuple(sharing), TypeRule.MOVE)
            axes = {axis for each in sharing for axis, _ in each.items}
            states = States.varying(axes) if isinstance(joined, TypeConflict) else joined.result
            self.record(x, states)
            return states
        states = INVARIANT if x.requires_grad else self.read_states
        self.enter(x, states)
        return states

    def _aliases(self, x: torch.Tensor) -> list[tuple[torch.Tensor, TypeRecord]]:
        """The other tensors of the table that share memory with `x`."""
        while self._unindexed:
            key, known = self._unindexed.popitem()
            each = known()
            if each is not None:
                known.storage = _storage(each)
                if known.storage:
                    self._by_storage.setdefault(known.storage, {})[key] = known
        found = ((known(), known) for known in list(self._by_storage.get(_storage(x), {}).values()))
        return [(each, known) for each, known in found if each is not None and each is not x]

    def forget(self, x: torch.Tensor) -> None:
        """Forget what is known of a tensor that was given other memory: that tells its states."""
        known = self.table.get(id(x))
        if known is not None:
            self._drop(known)

    def is_outside(self, x: torch.Tensor) -> bool:
        """Whether a tensor is an argument, or from outside of the body."""
        self.states(x)
        return id(x) in self._outside

    # -- casts --

    def cast(self, x: torch.Tensor, states: States, target: States) -> torch.Tensor:
        """`x` in other states; where it was invariant, its gradient becomes the sum.

        A tensor is cast once, however often it is used: its gradient is cast_to_varying once.
        """
        axes = newly_cast_axes(states, target)
        if not axes or not has_gradient(x):
            return x
        known = self.table[id(x)]
        if known.casts is None:
            known.casts = {}
        version = version_of(x)
        found = known.casts.get(axes)
        if found is not None and found[0] == version:
            return found[1]
        y = cast_to_varying(self.mesh, axes, x)
        if not is_transformed():  # what torch.func wraps ends with the transform
            known.casts[axes] = (version, y)
        self.record(y, states.updated(axes, target.at(axes[0])))
        return y

    def check_cast(self, x: torch.Tensor, states: States, target: States, op: str) -> None:
        """Raise, if strict, for a cast that is not written and would change gradients."""
        axes = newly_cast_axes(states, target) if self.strict else ()
        if not axes or not has_gradient(x):
            return
        word = state_word(target.at(axes[0]))
        self.fail(
            op,
            f"an operand {LocalType(x.shape, x.dtype, states)} that requires grad, where the "
            f"others are {word} along {', '.join(axes)}",
            f"the operands agree along every axis; the gradient of this one is a sum over "
            f"{', '.join(axes)}, which check='strict' wants to see written",
            f"fs.pcast(operand, {format_axes(axes)}, to={word!r}), or check=True, which inserts it",
        )

    def fail(self, op: str, given: str, rule: str, fix: str) -> NoReturn:
        """Raise for a call in the body, with its line."""
        self.raise_all([Problem(given, rule, fix)], f": {op}{user_line(None, None)}")
        raise AssertionError("unreachable")

    def raise_all(self, problems: Sequence[Problem], what: str = "") -> None:
        """Raise for the problems, if there are any: types are the same on every rank."""
        raise_if(f"{self.name}{what}", problems, everywhere=True)

    # -- collectives --

    def start_collective(
        self, plan: CollectivePlan, tree: Any, ahead: bool, launch: Launch
    ) -> Callable[[], Any]:
        """Launch a collective on the leaves of a tree, cast as its signature asks."""
        leaves, treedef = flatten(tree)
        rows = [(leaf, self._join(plan, leaf)) for leaf in leaves]
        same = [one is not None and self._is_only_typed(plan, leaf) for leaf, one in rows]
        given = [
            None if stays else leaf if one is None else self._cast_for(plan, leaf, one)
            for (leaf, one), stays in zip(rows, same, strict=True)
        ]
        with self.pause():
            finish = launch(plan, unflatten(treedef, given), ahead)

        def done() -> Any:
            with self.pause():
                results = flatten(finish())[0]
                for at, (leaf, one) in enumerate(rows):
                    if one is None or not isinstance(leaf, torch.Tensor):
                        continue
                    y = leaf if same[at] else results[at]
                    results[at] = y.view_as(y) if y is leaf else y
                    self.record(results[at], one.result)
            return unflatten(treedef, results)

        return done

    def _join(self, plan: CollectivePlan, leaf: Any) -> JoinedStates | None:
        """What a collective makes of a leaf; None for one that is no tensor."""
        if not isinstance(leaf, torch.Tensor):
            return None
        joined = apply_signature(self.states(leaf), plan.signature)
        if isinstance(joined, TypeConflict):
            self.fail(plan.name, f"an operand {self.typeof(leaf)}", joined.rule, joined.fix)
        if self.strict:
            self._check_source(plan, leaf)
        return joined

    def _check_source(self, plan: CollectivePlan, leaf: torch.Tensor) -> None:
        """Raise for a cast that takes its operand for invariant where nothing is tracked."""
        to, source, axes = plan.signature.cast_to, plan.signature.source, plan.signature.axes
        state = self.states(leaf).at(axes[0]) if axes else None
        if to == "varying" and source is None and state is not None:
            self.fail(
                plan.name,
                f"an operand {self.typeof(leaf)} and no src",
                "what is not tracked is taken to be invariant, and its gradient summed: "
                "check='strict' passes what is the same with check=False",
                f"fs.pcast(x, {axes[0]!r}, to='varying', src={state[0]!r})",
            )

    def _is_only_typed(self, plan: CollectivePlan, leaf: torch.Tensor) -> bool:
        """Whether a leaf changes its type and nothing else happens, not in backward either."""
        signature, states = plan.signature, self.states(leaf)
        return signature.cast_to is not None and any(map(states.at, signature.axes))

    def _cast_for(
        self, plan: CollectivePlan, leaf: torch.Tensor, joined: JoinedStates
    ) -> torch.Tensor:
        states, (target,) = self.states(leaf), joined.operands
        if states is target:
            return leaf
        self.check_cast(leaf, states, target, plan.name)
        return self.cast(leaf, states, target)

    # -- writes and the host --

    def states_beside(self, target: torch.Tensor) -> tuple[States, ...]:
        """The states of other tensors to which gradients of what is written into one go back.

        Views of one base. A cast shares memory too, and stays of its own type.
        """
        if not torch.is_grad_enabled():
            return ()
        sharing = self._aliases(target)
        return tuple(known.states for other, known in sharing if _base(other) is _base(target))

    def overwrites_all(self, target: torch.Tensor) -> bool:
        """Whether nothing that shares memory with a tensor is left when it is overwritten."""
        if not self._aliases(target):
            return True
        if target.layout is not torch.strided:  # others may hold its indices too
            return False
        return target.numel() * target.element_size() == target.untyped_storage().nbytes()

    def record_write(self, target: torch.Tensor, states: States) -> None:
        """Write down that `target`, and all that shares its memory, now is in `states`."""
        for other, known in self._aliases(target):
            joined = join_states((known.states, states), TypeRule.MOVE)
            axes = (axis for each in (known.states, states) for axis, _ in each.items)
            same = torch.is_grad_enabled() and _base(other) is _base(target)
            rest = States.varying(axes) if isinstance(joined, TypeConflict) else joined.result
            self.record(other, states if same else rest)
        if target.layout is not torch.strided:  # it may hold other values now
            self.forget(target)
        self.record(target, states)
        self.blank.discard(id(target))

    def check_write(self, target: torch.Tensor, op: str) -> None:
        """Raise unless `target` is a tensor that the body has made."""
        self.states(target)
        if _storage(target) in self._memory:
            self.fail(
                op,
                f"a write into a tensor of shape {tuple(target.shape)} from outside of the body",
                "a mapped function returns what it computes: arguments and closed-over tensors "
                "belong to all ranks",
                "write into its clone(), and return that; of a module that keeps statistics: "
                "eval(), or track_running_stats=False",
            )

    def record_read(self, states: States, op: str) -> None:
        """Note that the host has learnt of values in `states`: all that follows may depend on it.

        What is invariant or reduced is the same on every rank: so is what the host makes of it.
        """
        axes = [axis for axis, (word, _) in states.items if word != "reduced"]
        if axes and not set(axes) <= set(self.read_states.axes("varying")):
            self.read_states = States.varying({*self.read_states.axes("varying"), *axes})
        if axes and len(self.read_sites) < 3:
            line = f"{op}{user_line(None, None)}"
            if line not in self.read_sites:
                self.read_sites.append(line)

    @property
    def read_note(self) -> str:
        """Where the host has learnt of values that vary, if anywhere."""
        told = ", ".join(self.read_sites)
        return f"told the host of values that vary: {told}" if told else ""

    def draw_states(self, op: str, kwargs: Mapping[str, Any]) -> States:
        """The states of what is drawn from a generator of this process; warns once per line."""
        if kwargs.get("generator") is None:
            frame = user_frame(sys._getframe())
            text = (
                f"{op} draws from this process's generator: ranks draw different numbers, and "
                "other ones on another mesh. In the body, fs.random.keyed(key) has it draw by a "
                "key; or draw before the call and pass the numbers in"
            )
            if frame is None:
                warnings.warn(text, stacklevel=2)
            else:
                seen = frame.f_globals.setdefault("__warningregistry__", {})
                file, line = frame.f_code.co_filename, frame.f_lineno
                warnings.warn_explicit(text, UserWarning, file, line, registry=seen)
        bound = current_axes()
        return States.varying(self.mesh.axes if bound is None else bound.axes)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Track nothing in the block: the engine runs a graph that is typed already."""
        before, self.paused = self.paused, True
        try:
            with DisableTorchFunction():
                yield
        finally:
            self.paused = before


def typeof(x: torch.Tensor, /) -> LocalType:
    """Return the type of a tensor in a running `shard_map`: local shape, dtype, states of the mesh axes.

    After `jax.typeof`.

    Args:
        x: a tensor of the mapped function.

    Returns:
        A `LocalType`. It is equal on every rank if shards are even; a mapped function may then
        return it with the out spec `None`.

    Raises:
        ShardingError: no types are tracked, outside of a `shard_map` or with `check=False`.

    >>> import torch
    >>> import fshard as fs
    >>> @fs.shard_map(mesh=fs.Mesh(i=2), in_specs=fs.P("i"), out_specs=None)
    ... def types(x):
    ...     return fs.typeof(x), fs.typeof(fs.psum(x, "i"))
    >>> types(torch.ones(4))
    (f32[2]{varying: i}, f32[2])
    """
    tracker = current_tracker()
    if tracker is None:
        fail(
            "fs.typeof",
            "a call where no types are tracked",
            "types are tracked in the body of a shard_map, unless with check=False",
            "fs.shard_map(..., check=True)",
        )
    if not isinstance(x, torch.Tensor):
        fail("fs.typeof", f"a {type(x).__name__}", "tensors have types along the mesh axes",
             "torch.as_tensor(x)")  # fmt: skip
    found: LocalType = tracker.typeof(x)
    return found


_VALUES: dict[torch.layout, Callable[[torch.Tensor], torch.Tensor]] = {
    torch.sparse_coo: sparse_values,
    **dict.fromkeys(
        (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc),
        torch.Tensor.values,
    ),
}


def _storage(x: torch.Tensor) -> int:
    """What is the same for tensors that share memory; 0 for one that has none.

    That of a sparse tensor is the memory of its values.
    """
    try:
        return storage_id(x)
    except (NotImplementedError, RuntimeError):  # sparse tensors, functorch's wrappers
        with DisableTorchFunction():
            values = _VALUES.get(x.layout)
            return 0 if values is None else _storage(values(x))


def _base(x: torch.Tensor) -> torch.Tensor:
    """The tensor that a view is a view of, or the tensor itself."""
    return x if (base := view_base(x)) is None else base


def has_gradient(x: torch.Tensor) -> bool:
    """Whether what is computed from `x` now has a gradient with respect to it.

    A wrapper of `torch.vmap` does not know; what it holds does.
    """
    if x.requires_grad:
        return torch.is_grad_enabled()
    held = _unwrapped(x) if is_transformed() else None
    return held is not None and has_gradient(held)


def _unwrapped(x: torch.Tensor) -> torch.Tensor | None:
    """What a wrapper of `torch.func` holds, or None for another tensor."""
    return get_unwrapped(x) if is_wrapped(x) else None
