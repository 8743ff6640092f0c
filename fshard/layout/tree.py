"""Pytrees of values and specs; the only module that imports optree.

`Spec`, `PartitionSpec` and pairs are leaves. `None` is a leaf: in a tree of specs it marks an
argument without a spec. Dict keys are in sorted order, as in JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import optree
import torch

from fshard._util.errors import Problem, raise_if
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec

_STRINGS = frozenset({str})

TreeDef = optree.PyTreeSpec
Tree = TypeVar("Tree")


def is_pair(value: object) -> bool:
    """Return True for a `(local, spec)` pair.

    >>> is_pair((1, 2)), is_pair(Sharded(None, None))
    (False, True)
    """
    return isinstance(value, Sharded) or (
        type(value) is tuple
        and len(value) == 2
        and isinstance(value[1], Spec)
        # A tuple of two specs is a tree of specs.
        and not isinstance(value[0], (PartitionSpec, Spec))
    )


def _is_leaf(value: object) -> bool:
    return isinstance(value, Spec | PartitionSpec | torch.Tensor) or is_pair(value)


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """Return the leaves of a tree, `None` included, and its structure; pairs as `Sharded`."""
    leaves, treedef = optree.tree_flatten(tree, is_leaf=_is_leaf, none_is_leaf=True)
    if tuple in map(type, leaves):
        leaves = [Sharded(*leaf) if type(leaf) is tuple else leaf for leaf in leaves]
    return list(leaves), treedef


def append_cache_key(tree: Any, leaves: list[Any], key: list[Any]) -> None:
    """Append the leaves of a tree to `leaves`, and to `key` a cache key of all but the values.

    Pairs are appended as `Sharded`.

    Trees with equal keys have one structure and equal specs; their tensors agree in shape, dtype,
    device and, outside of pairs, `requires_grad`; their other leaves agree in type.

    >>> leaves, key = [], []
    >>> append_cache_key({"b": 1, "a": [torch.ones(2)]}, leaves, key)
    >>> leaves[1], key[:4]
    (1, [<class 'dict'>, ('b', 'a'), <class 'list'>, 1])
    """
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        leaves.append(tree)
        key += (tree.shape, tree.dtype, tree.device, tree.requires_grad)
    elif kind is Sharded or (kind is tuple and is_pair(tree)):
        pair = tree if kind is Sharded else Sharded(*tree)
        leaves.append(pair)
        local, spec = pair.local, pair.spec
        if isinstance(local, torch.Tensor):
            key += (spec, local.shape, local.dtype, local.device)
        elif isinstance(local, tuple | list):
            key.append(spec)
            append_cache_key(local, [], key)
        else:  # unknown contents: equal to no other key
            key.append(object())
    elif kind is tuple or kind is list:
        key += (kind, len(tree))
        for item in tree:
            append_cache_key(item, leaves, key)
    elif kind is dict and {*map(type, tree)} <= _STRINGS:
        key += (kind, tuple(tree))
        for name in sorted(tree):
            append_cache_key(tree[name], leaves, key)
    else:
        parts, treedef = flatten(tree)
        if len(parts) == 1 and parts[0] is tree:
            leaves.append(tree)
            key.append(kind)
        else:
            key.append(treedef)
            for part in parts:
                append_cache_key(part, leaves, key)


def unflatten(treedef: TreeDef, leaves: Sequence[Any]) -> Any:
    """Return the tree of a structure and its leaves."""
    return treedef.unflatten(leaves)


def map_leaves(function: Callable[..., Any], tree: Tree, *rest: Any) -> Tree:
    """Return the tree of `function(leaf, ...)`; the trees of `rest` have the same structure."""
    values: Any = tree
    mapped: Any = optree.tree_map(function, values, *rest, is_leaf=_is_leaf, none_is_leaf=True)
    return cast(Tree, mapped)


def paths(tree: Any, name: str) -> list[str]:
    """Return the Python expression of every leaf, for error messages.

    >>> paths({"w": [1, 2]}, "params")
    ["params['w'][0]", "params['w'][1]"]
    """
    accessors, _, _ = optree.tree_flatten_with_accessor(tree, is_leaf=_is_leaf, none_is_leaf=True)
    return [accessor.codify(name) for accessor in accessors]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, tuples, slices and mappings, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def broadcast_prefix(prefix: Any, tree: Any, name: str, where: str) -> list[Any]:
    """Return for every leaf of `tree`, in order, the leaf of `prefix` that covers it.

    Raises `ShardingError` for every place where `prefix` is not a prefix of the tree.
    """
    try:
        return list(optree.broadcast_prefix(prefix, tree, is_leaf=_is_leaf, none_is_leaf=True))
    except ValueError:
        raise_if(where, _no_prefix(prefix, tree, name, name))
        raise


def flatten_like(tree: Any, other: Any, names: tuple[str, str], where: str) -> list[Any]:
    """Return the subtrees of `other` at the leaves of `tree`, in order.

    Raises `ShardingError` for every place where the containers differ; `names` are the names of
    both trees.

    >>> flatten_like({"w": 1, "b": [2]}, {"b": [(5, 6)], "w": 7}, ("a", "b"), "here")
    [(5, 6), 7]
    """
    try:
        return list(flatten(tree)[1].flatten_up_to(other))
    except ValueError:
        raise_if(where, _unlike(tree, other, names, ""))
        raise


def _unlike(tree: Any, other: Any, names: tuple[str, str], at: str) -> list[Problem]:
    """Return the problems of `other`, below path `at`, where its containers are not `tree`'s."""
    children, keys = _children(tree)
    if children is None:
        return []
    other_children, other_keys = _children(other)
    path, other_path = (f"{name}{at}" for name in names)
    rule = f"{names[1]} must be a tree like {names[0]}: the same containers, keys and lengths"
    if other_children is None or type(tree) is not type(other):
        given = f"{other_path} is {_with_article(other)} where {path} is {_with_article(tree)}"
        return [Problem(given, rule, f"{_with_article(tree)} there")]
    missing = [key for key in keys if key not in other_keys]
    extra = [key for key in other_keys if key not in keys]
    if missing or extra:
        if isinstance(tree, Mapping):
            given = f"{other_path} has the keys {list(other_keys)}, {path} {list(keys)}"
        else:
            given = f"{other_path} has length {len(other_children)}, {path} {len(children)}"
        fixes = [f"add {other_path}[{key!r}]" for key in missing]
        fixes += [f"drop {other_path}[{key!r}]" for key in extra]
        return [Problem(given, rule, ", ".join(fixes))]
    other_child = dict(zip(other_keys, other_children, strict=True))
    problems: list[Problem] = []
    for key, child in zip(keys, children, strict=True):
        problems += _unlike(child, other_child[key], names, f"{at}[{key!r}]")
    return problems


def _no_prefix(prefix: Any, tree: Any, name: str, at: str) -> list[Problem]:
    """Return the problems of `prefix`, below path `at`, where it is not a prefix of `tree`."""
    children, keys = _children(prefix)
    if children is None:
        return []
    values, value_keys = _children(tree)
    rule = f"{name} must be a tree prefix of the values: a leaf of it covers a subtree"
    given = ""
    if values is None:
        given = f"{at} is {_with_article(prefix)} where the value is {_with_article(tree)}"
        fix = "one spec"
    elif type(prefix) is not type(tree):
        given = f"{at} is {_with_article(prefix)} where the value is {_with_article(tree)}"
        fix = f"{_with_article(tree)} of specs, or one spec for all of it"
    elif sorted(map(repr, keys)) != sorted(map(repr, value_keys)):
        if isinstance(prefix, dict):
            given = f"{at} has the keys {list(keys)}, the value {list(value_keys)}"
        else:
            given = f"{at} has length {len(children)}, the value {len(values)}"
        fix = "an entry for each, or one spec for all of it"
    if given:
        return [Problem(given, rule, fix)]
    problems: list[Problem] = []
    for key, child, value in zip(keys, children, values or [], strict=True):
        problems += _no_prefix(child, value, name, f"{at}[{key!r}]")
    return problems


def _children(tree: Any) -> tuple[list[Any] | None, list[Any]]:
    """Return the subtrees right below and their keys or indices; `(None, [])` for a leaf."""
    if _is_leaf(tree) or optree.tree_is_leaf(tree, none_is_leaf=True):
        return None, []
    children, _, entries, _ = optree.tree_flatten_one_level(tree, none_is_leaf=True)
    return list(children), list(entries)


def _with_article(value: Any) -> str:
    """Return the name of a value's type with an article."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"
