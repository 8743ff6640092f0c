"""`FunctionTraces`: the traces of one function, by kind of arguments and state of Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from fshard._torch.autograd_state import version_of
from fshard._torch.module_state import recomputed_weights
from fshard._util.cache import BoundedDict
from fshard._util.errors import Problem, raise_if
from fshard.layout.spec import Spec
from fshard.layout.tree import TreeDef, flatten, opaque_problem, paths, unflatten
from fshard.ops.core.cache_keys import concrete_number, freeze
from fshard.ops.core.call import Meta
from fshard.ops.trace.functionalize import refuse_sparse
from fshard.ops.trace.trace import TracedFunction, trace
from fshard.partition.arguments import CallSignature
from fshard.partition.state.host_generators import refuse_draws
from fshard.partition.state.python_state import PythonState, StateKey
from fshard.spmd.in_specs import ArgSignature

MAX_STATES = 16
"""States whose traces are kept: old traces keep the tensors alive that the function closed over."""
MAX_TRACES = 256
"""Traces that are kept, of structures and shapes of arguments: each holds a graph."""
V = TypeVar("V")


def cached(cache: dict[Any, V], key: Any, compute: Callable[[], V]) -> V:
    """Return `cache[key]`, computed once; nothing is cached for a key that cannot be hashed."""
    try:
        result = cache.get(key)
    except TypeError:
        return compute()
    if result is None:
        result = cache[key] = compute()
    return result


def _tensors_by_path(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors in arguments by their paths."""
    names = [*paths(args, "args"), *paths(kwargs, "kwargs")]
    leaves = flatten((args, kwargs))[0]
    return {name: x for name, x in zip(names, leaves, strict=True) if isinstance(x, torch.Tensor)}


class FunctionTraces:
    """Traces of a function on global tensors, shared by all layouts of its arguments.

    Args:
        fn: the function.
        where: its name in errors.
    """

    def __init__(self, fn: Callable[..., Any], where: str) -> None:
        self.fn, self.where = fn, where
        self.python_state = PythonState(fn)
        self.states: dict[StateKey, StateKey] = {}
        self.last: StateKey | None = None
        self.read: dict[int, tuple[torch.Tensor, int]] = {}
        """Closed-over tensors whose values a trace read, with their versions then."""
        self.traces: dict[Any, tuple[TracedFunction, TreeDef]] = BoundedDict(MAX_TRACES)

    def state(self, calls: dict[Any, Any]) -> Any:
        """Return the key of all that a trace depends on beside its arguments.

        After many states the traces of all are dropped, and the `calls` planned from them.
        """
        key = self.python_state.key()
        known = self.states.get(key)
        if known is None:
            if len(self.states) >= MAX_STATES:
                for cache in (self.states, self.traces, self.read, calls):
                    cache.clear()
            known = self.states[key] = key
        self.last = known
        versions = [(key, version_of(x), before) for key, (x, before) in self.read.items()]
        written = tuple([(key, now) for key, now, before in versions if now != before])
        return torch.get_default_dtype(), known, written

    def trace(
        self, leaves: Sequence[Any], tree: TreeDef, specs: Sequence[Spec | None],
        signature: CallSignature, numbers: tuple[int, ...] = (), repeats: tuple[int, ...] = (),
    ) -> tuple[TracedFunction, TreeDef]:  # fmt: skip
        """Return the function on global tensors as a graph, and the tree of its results.

        It is traced once for arguments that differ in layouts alone. The values that are not
        tensors are in the key: 1, 1.0 and True trace to different graphs. The leaves of the indices
        `numbers` are symbols, whose values now decide which graph it is. Leaves that are the same
        tensor with one spec are one input of the function: `repeats` has the first one's indices.
        """
        metas = [None if spec is None else Meta.of(spec) for spec in specs]
        others = [freeze(leaf) for leaf, meta in zip(leaves, metas, strict=True) if meta is None]
        pairs = enumerate(zip(repeats, specs, strict=True)) if repeats else ()
        inputs = tuple([first if specs[first] == spec else i for i, (first, spec) in pairs])
        key = tree, tuple(metas), tuple(others), signature, numbers, inputs
        compute = lambda: self._trace(leaves, tree, metas, signature, numbers, inputs)  # noqa: E731
        return cached(self.traces, key, compute)

    def _refuse_replaced(
        self, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
    ) -> None:
        """Raise `ShardingError` for tensors that the function put into an argument's container."""
        rule = "an argument's container must keep its tensors: a copy of it is traced"
        raise_if(self.where, [
            Problem(f"{path}, which the function replaces by another tensor", rule,
                    f"{path}.copy_(new), which writes in place, or return the new tensor")
            if path in before else
            Problem(f"{path}, a tensor that the function adds", rule, "return the new tensor")
            for path, x in after.items()
            if x is not before.get(path)
        ])  # fmt: skip

    def _trace(
        self, leaves: Sequence[Any], tree: TreeDef, metas: Sequence[Meta | None],
        signature: CallSignature, numbers: tuple[int, ...], repeats: tuple[int, ...],
    ) -> tuple[TracedFunction, TreeDef]:  # fmt: skip
        result_trees: list[TreeDef] = []
        args, kwargs = unflatten(tree, leaves)
        ArgSignature(self.fn).check(self.where, args, kwargs)
        leaf_names = [*paths(args, "args"), *paths(kwargs, "kwargs")]
        names = [name for name, meta in zip(leaf_names, metas, strict=True) if meta is not None]
        tensors = [meta for meta in metas if meta is not None]
        walk = self.python_state.walk
        recomputed = [] if walk is None else recomputed_weights(walk.objects)

        def flat(*inputs: Any) -> list[Any]:
            remaining = iter(inputs)
            symbols = dict(zip(numbers, inputs[len(tensors) :], strict=True))
            args = [symbols.get(index, concrete_number(leaf)) if meta is None else next(remaining)
                    for index, (leaf, meta) in enumerate(zip(leaves, metas, strict=True))
                    ]  # fmt: skip
            args, kwargs = unflatten(tree, [args[index] for index in repeats] or args)
            inputs_by_path = _tensors_by_path(args, kwargs)
            try:
                result = self.fn(*args, **kwargs)
            finally:
                for attributes, name, weight in recomputed:
                    attributes[name] = weight
            self._refuse_replaced(inputs_by_path, _tensors_by_path(args, kwargs))
            results, result_tree = flatten(result)
            refuse_sparse(results, "return")
            names = paths(result, "result")
            problems = map(opaque_problem, results, names)
            raise_if(self.where, [problem for problem in problems if problem is not None])
            result_trees.append(result_tree)
            return results

        with refuse_draws(self.python_state.generators, self.where):
            traced = trace(flat, tensors, self.where, requires_grad=signature.requires_grad,
                           devices=signature.devices,
                           numbers=[leaves[index] for index in numbers],
                           names=[*names, *(leaf_names[index] for index in numbers)])  # fmt: skip
        for x in traced.read:
            self.read.setdefault(id(x), (x, version_of(x)))
        if self.last is not None and self.python_state.ignore_logs():
            self.states[self.python_state.key()] = self.last
        return traced, result_trees[-1]
