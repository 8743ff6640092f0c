"""`Optimizer`: the update of one algorithm, in the layout of its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import (
    TENSORS,
    broadcast_prefix,
    flatten,
    flatten_up_to,
    leaf_names,
    local_of,
    read_placements,
    spec_of,
    unflatten,
)
from fshard.run.global_tensors import shard
from fshard.state.factories import device_of, zeros
from fshard.state.local_updates import map_locals
from fshard.state.parameters import by_leaf, reshard_pairs

Rate = float | Callable[[int], float]
"""Learning rate, or a function of the number of the step, from 1, to it."""
Slots = Mapping[str, Sequence[Any]]
"""State by name: for every parameter a pair, or None."""
Kernel = Callable[[int, list[Any], Slots, list[Any]], None]
"""Function of step, gradients, slots and parameters that writes the last two in place."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Pair of pure functions: `init(params) -> state`, `update(grads, state, params)`.

    The state is a dict of trees like that of the parameters, with pairs as leaves, and `step`, the
    number of updates. The layout in which the update is computed and the state is kept is that of
    the parameters or `specs`: ZeRO is a choice of layouts (see `fs.state.zero_specs`). Updates have
    no gradient. Parameters with other options, as no weight decay, are a tree of their own with an
    optimizer of their own.

    Attributes:
        name: the function that made it.
        slots: function of the spec of one parameter to the specs of its state.
        kernel: function of step, gradients, slots and parameters that writes the last two.
        specs: the layout of the state, a prefix of the tree of parameters; None is theirs.

    >>> import torch
    >>> import fshard as fs
    >>> params = fs.state.tree_shard({"w": torch.ones(4)}, fs.P("x"), mesh=fs.Mesh(x=2))
    >>> optimizer = fs.state.sgd(0.5)
    >>> state = optimizer.init(params)
    >>> state, params = optimizer.update(params, state, params)  # any gradients of these layouts
    >>> fs.unshard(params["w"])
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    name: str
    slots: Callable[[Spec], Mapping[str, Spec | None]]
    kernel: Kernel
    specs: Any = None

    def init(self, params: Any) -> dict[str, Any]:
        """Return the state before the first update, zeros created shard by shard.

        Args:
            params: tree of pairs, or of specs.

        Raises:
            ShardingError: the tree is empty, a leaf is neither, or the optimizer does not take it.
        """
        where = f"{self.name}.init"
        leaves, treedef = flatten(params)
        specs = [leaf.spec if isinstance(leaf, Sharded) else leaf for leaf in leaves]
        _check_pairs(where, params, specs, Spec)
        slots = [self.slots(spec) for spec in self._layouts(where, params, specs)]
        devices = [device_of(leaf) if isinstance(leaf, Sharded) else None for leaf in leaves]
        mesh = specs[0].mesh
        state: dict[str, Any] = {"step": shard(torch.zeros((), dtype=torch.int64), mesh, _P)}
        for name in slots[0]:
            created = [
                None if (spec := slot[name]) is None else zeros(spec, device=device)
                for slot, device in zip(slots, devices, strict=True)
            ]
            state[name] = unflatten(treedef, created)
        return state

    def update(
        self, grads: Any, state: Mapping[str, Any], params: Any, *, donate: bool = False
    ) -> tuple[dict[str, Any], Any]:
        """Return the state and the parameters after a step.

        Gradients and parameters are redistributed to the layout of the state, and parameters back,
        each by one batch of programs; without `specs` nothing is communicated but what the
        algorithm itself requires.

        Args:
            grads: tree of pairs like `params`, in any layout: unreduced ones are reduced.
            state: the state, of `init` or of an update before.
            params: tree of pairs.
            donate: True to write into the memory of `state` and `params`, which are then invalid.
                A simulation copies.

        Raises:
            ShardingError: the trees differ, or a leaf is not a pair.
        """
        where = f"{self.name}.update"
        leaves, treedef = flatten(params)
        _check_pairs(where, params, leaves, Sharded)
        specs = [*map(spec_of, leaves)]
        layouts = self._layouts(where, params, specs)
        expected = _slot_names(self.slots, layouts[0])
        if state.keys() != expected:
            fail(where, f"a state of {', '.join(sorted(state))}",
                 f"the state must be one of this optimizer, of {', '.join(sorted(expected))}",
                 "state = optimizer.init(params)")  # fmt: skip
        columns = {
            name: flatten_up_to(treedef, params, tree, ("params", f"state[{name!r}]"), where)
            for name, tree in state.items() if name != "step"
        }  # fmt: skip
        gradients = flatten_up_to(treedef, params, grads, ("params", "grads"), where)
        _check_pairs(where, params, gradients, Sharded, " of grads")
        with torch.no_grad():
            gradients = reshard_pairs(gradients, layouts)
            working = reshard_pairs(leaves, layouts)
            count = len(leaves)
            pairs = [*working, *chain.from_iterable(columns.values())]
            owned_pairs = _owned(pairs, donate=donate)
            working = owned_pairs[:count]
            slots = {name: owned_pairs[count * i : count * (i + 1)]
                     for i, name in enumerate(columns, 1)}  # fmt: skip
            (step,) = map_locals(lambda xs: [xs[0] + 1], [state["step"]])
            number = int(step if isinstance(step, torch.Tensor) else step[0])
            self.kernel(number, gradients, slots, working)
            updated = working if layouts == specs else reshard_pairs(working, specs)
        state = {"step": Sharded(step, state["step"].spec)} | {
            name: unflatten(treedef, column) for name, column in slots.items()
        }
        return state, unflatten(treedef, updated)

    def _layouts(self, where: str, params: Any, specs: Sequence[Spec]) -> list[Spec]:
        """Return the spec of every parameter while it is updated: sharded or invariant."""
        if self.specs is None:
            return [*_invariant_specs(tuple(specs))]
        layouts = broadcast_prefix(
            read_placements(self.specs, specs[0].mesh), params, "specs", where
        )

        def layout_of(spec: Spec, layout: Any) -> Spec:
            if isinstance(layout, PartitionSpec):
                return _chunked(spec, layout)
            if layout is None:
                return invariant_spec(spec)
            # Anything else is refused.
            return layout if isinstance(layout, Spec) else spec.replace(partition=layout)

        resolved: list[Spec] = by_leaf(where, params, layout_of, specs, layouts)
        return resolved


_P = PartitionSpec()
_requires_grad = attrgetter("requires_grad")


@lru_cache(maxsize=CACHE_SIZE)
def invariant_spec(spec: Spec) -> Spec:
    """Return a spec of the same shards, invariant along all other axes."""
    if not spec.partition.unreduced_kinds and not spec.partition.reduced_kinds:
        return spec
    return Spec(spec.mesh, PartitionSpec(*spec.partition.dims), shape=spec.shape, dtype=spec.dtype,
                sizes={d: s for d, s in enumerate(spec.sizes) if s is not None})  # fmt: skip


@lru_cache(maxsize=CACHE_SIZE)
def _invariant_specs(specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
    return tuple(map(invariant_spec, specs))


@lru_cache(maxsize=CACHE_SIZE)
def _chunked(spec: Spec, partition: PartitionSpec) -> Spec:
    """Return a spec with another partition, dims that it does not divide as `torch.chunk`."""
    return spec.replace(partition=partition, uneven="chunk")


def _owned(pairs: Sequence[Any], *, donate: bool) -> list[Any]:
    """Return pairs with locals that can be written, None for None."""
    filled = [pair for pair in pairs if pair is not None]
    locals_ = [*map(local_of, filled)]
    if donate and {*map(type, locals_)} <= TENSORS:
        if not any(map(_requires_grad, locals_)):
            return [*pairs]
        owned = [x.detach() for x in locals_]
    else:
        owned = map_locals(lambda xs: [x.clone() for x in xs], filled)
    written = map(Sharded, owned, map(spec_of, filled))
    return [None if pair is None else next(written) for pair in pairs]


@lru_cache(maxsize=CACHE_SIZE)
def _slot_names(slots: Callable[[Spec], Mapping[str, Any]], spec: Spec) -> frozenset[str]:
    """Return the keys of the state of an optimizer."""
    return frozenset(("step", *slots(spec)))


def _check_pairs(
    where: str, tree: Any, leaves: Sequence[Any], kind: type, of_tree: str = ""
) -> None:
    """Raise `ShardingError` for leaves that are not pairs (or specs)."""
    if {*map(type, leaves)} == {kind}:
        return  # without the names of the leaves
    if not leaves:
        fail(where, "a tree without leaves", "there must be parameters",
             "fs.state.tree_shard(tree, specs, mesh=mesh) of a tree with tensors")  # fmt: skip
    raise_if(where, [
        Problem(f"{name}{of_tree}: {type(leaf).__name__}",
                "every leaf must be a pair (local, spec)",
                f"params, grads and a state without {name}, which then stays as it is"
                if leaf is None else "fs.state.tree_shard(tree, specs, mesh=mesh)")
        for name, leaf in zip(leaf_names(tree), leaves, strict=True)
        if not isinstance(leaf, kind)
    ])  # fmt: skip


def rate_at(rate: Rate, step: int) -> float:
    """Return the learning rate of a step."""
    return rate(step) if callable(rate) else rate
