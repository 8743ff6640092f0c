"""Pytrees, as fshard reads them: the only file that imports optree.

`Spec`, `PartitionSpec` and pairs are leaves; `None` is a leaf of spec trees (it marks an
argument that has no spec) and dict keys are walked in sorted order, as JAX does. Decided here once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import optree
import torch

from fshard._util.errors import Problem, raise_if
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Sharded, Spec

__all__ = [
    "TreeDef", "broadcast_prefix", "flatten", "is_pair", "map_leaves", "matching", "outline",
    "paths", "tensors_in", "unflatten",
]  # fmt: skip

STRINGS = frozenset({str})

TreeDef = optree.PyTreeSpec
Tree = TypeVar("Tree")


def is_pair(value: object) -> bool:
    """Whether a value is a `(local, spec)` pair.

    >>> is_pair((1, 2)), is_pair(Sharded(None, None))
    (False, True)
    """
    return isinstance(value, Sharded) or (
        type(value) is tuple
        and len(value) == 2
        and isinstance(value[1], Spec)
        # Two specs are a tree of specs.
        and not isinstance(value[0], (PartitionSpec, Spec))
    )


def _is_leaf(value: object) -> bool:
    return isinstance(value, Spec | PartitionSpec | torch.Tensor) or is_pair(value)


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """The leaves of a tree (`None` included) and its structure."""
    leaves, treedef = optree.tree_flatten(tree, is_leaf=_is_leaf, none_is_leaf=True)
    return list(leaves), treedef


def outline(tree: Any, leaves: list[Any], key: list[Any]) -> None:
    """Add the leaves of a tree, and what it has in common with others of its kind: a key.

    Trees of one key have one structure and equal specs, their tensors equal shapes, dtypes and
    devices, outside of pairs require grad alike, and other leaves are of equal types.

    >>> leaves, key = [], []
    >>> outline({"b": 1, "a": [torch.ones(2)]}, leaves, key)
    >>> leaves[1], key[:4]
    (1, [<class 'dict'>, ('b', 'a'), <class 'list'>, 1])
    """
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        leaves.append(tree)
        key += (tree.shape, tree.dtype, tree.device, tree.requires_grad)
    elif isinstance(tree, Sharded) or (kind is tuple and is_pair(tree)):
        leaves.append(tree)
        local, spec = tree
        if isinstance(local, torch.Tensor):
            key += (spec, local.shape, local.dtype, local.device)
        elif isinstance(local, tuple | list):
            key.append(spec)
            outline(local, [], key)
        else:  # what it is made of is not known: it is like no other
            key.append(object())
    elif kind is tuple or kind is list:
        key += (kind, len(tree))
        for each in tree:
            outline(each, leaves, key)
    elif kind is dict and {*map(type, tree)} <= STRINGS:
        key += (kind, tuple(tree))
        for name in sorted(tree):
            outline(tree[name], leaves, key)
    else:
        parts, treedef = flatten(tree)
        if len(parts) == 1 and parts[0] is tree:
            leaves.append(tree)
            key.append(kind)
        else:
            key.append(treedef)
            for each in parts:
                outline(each, leaves, key)


def unflatten(treedef: TreeDef, leaves: Sequence[Any]) -> Any:
    """The tree of a structure and its leaves."""
    return treedef.unflatten(leaves)


def map_leaves(function: Callable[..., Any], tree: Tree, *rest: Any) -> Tree:
    """A tree of `function(leaf, ...)`; the other trees have the same structure."""
    values: Any = tree
    mapped: Any = optree.tree_map(function, values, *rest, is_leaf=_is_leaf, none_is_leaf=True)
    return cast(Tree, mapped)


def paths(tree: Any, name: str) -> list[str]:
    """The Python expression of every leaf, for error messages.

    >>> paths({"w": [1, 2]}, "params")
    ["params['w'][0]", "params['w'][1]"]
    """
    found, _, _ = optree.tree_flatten_with_accessor(tree, is_leaf=_is_leaf, none_is_leaf=True)
    return [accessor.codify(name) for accessor in found]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments, in order; lists, tuples, slices and mappings are looked into."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)


def broadcast_prefix(prefix: Any, tree: Any, name: str, where: str) -> list[Any]:
    """The leaf of `prefix` over every leaf of `tree`, in order of the leaves.

    Raises `ShardingError` at the place where `prefix` is not a prefix of the tree.
    """
    try:
        return list(optree.broadcast_prefix(prefix, tree, is_leaf=_is_leaf, none_is_leaf=True))
    except ValueError:
        raise_if(where, _no_prefix(prefix, tree, name, name))
        raise


def matching(tree: Any, other: Any, names: tuple[str, str], where: str) -> list[Any]:
    """What `other` has where `tree` has its leaves, in order of the leaves.

    Raises `ShardingError` with every place where `other` is no tree like `tree`.

    >>> matching({"w": 1, "b": [2]}, {"b": [(5, 6)], "w": 7}, ("a", "b"), "here")
    [(5, 6), 7]
    """
    try:
        return list(flatten(tree)[1].flatten_up_to(other))
    except ValueError:
        raise_if(where, _unlike(tree, other, names, ""))
        raise


def _unlike(tree: Any, other: Any, names: tuple[str, str], at: str) -> list[Problem]:
    """Where, and how, `other` is another tree than `tree`."""
    mine, entries = _children(tree)
    if mine is None:
        return []
    theirs, others = _children(other)
    ours, its = (f"{name}{at}" for name in names)
    rule = f"{names[1]} is a tree like {names[0]}: the same containers, keys and lengths"
    if theirs is None or type(tree) is not type(other):
        given = f"{its} is {_called(other)} where {ours} is {_called(tree)}"
        return [Problem(given, rule, f"{_called(tree)} there")]
    missing = [each for each in entries if each not in others]
    further = [each for each in others if each not in entries]
    if missing or further:
        if isinstance(tree, Mapping):
            given = f"{its} has the keys {list(others)}, {ours} {list(entries)}"
        else:
            given = f"{its} has length {len(theirs)}, {ours} {len(mine)}"
        fixes = [f"give {its}[{each!r}]" for each in missing]
        fixes += [f"leave {its}[{each!r}] out" for each in further]
        return [Problem(given, rule, ", ".join(fixes))]
    found = dict(zip(others, theirs, strict=True))
    problems: list[Problem] = []
    for entry, one in zip(entries, mine, strict=True):
        problems += _unlike(one, found[entry], names, f"{at}[{entry!r}]")
    return problems


def _no_prefix(prefix: Any, tree: Any, name: str, at: str) -> list[Problem]:
    """Where, and why, `prefix` is not a prefix of the tree."""
    mine, entries = _children(prefix)
    if mine is None:
        return []
    theirs, others = _children(tree)
    rule = f"{name} is a tree prefix of the values: a leaf of it covers all below"
    given = ""
    if theirs is None:
        given = f"{at} is {_called(prefix)} where the value is {_called(tree)}"
        fix = "one spec"
    elif type(prefix) is not type(tree):
        given = f"{at} is {_called(prefix)} where the value is {_called(tree)}"
        fix = f"{_called(tree)} of specs, or one spec for all of it"
    elif sorted(map(repr, entries)) != sorted(map(repr, others)):
        if isinstance(prefix, dict):
            given = f"{at} has the keys {list(entries)}, the value {list(others)}"
        else:
            given = f"{at} has length {len(mine)}, the value {len(theirs)}"
        fix = "an entry for each, or one spec for all of it"
    if given:
        return [Problem(given, rule, fix)]
    problems: list[Problem] = []
    for entry, one, other in zip(entries, mine, theirs or [], strict=True):
        problems += _no_prefix(one, other, name, f"{at}[{entry!r}]")
    return problems


def _children(tree: Any) -> tuple[list[Any] | None, list[Any]]:
    """The trees right below, and the entries under which they are; None for a leaf."""
    if _is_leaf(tree) or optree.tree_is_leaf(tree, none_is_leaf=True):
        return None, []
    children, _, entries, _ = optree.tree_flatten_one_level(tree, none_is_leaf=True)
    return list(children), list(entries)


def _called(value: Any) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"
