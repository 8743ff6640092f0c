"""Pytrees of values and specs; the only module that imports optree.

Containers are tuples, named tuples, lists, dicts and deques, and the classes that are registered:
with optree, or with `torch.utils._pytree` (`torch.export.register_dataclass`, the outputs of
Hugging Face's models). A subclass of dict that nobody registered is a container of its items,
rebuilt by its constructor. Instances of other classes are leaves.

`Spec`, `PartitionSpec` and pairs are leaves. `None` is a leaf without content: in a tree of specs
it marks an argument without a spec, in a tree of values any spec covers it, as JAX's empty tree.
Dict keys are in sorted order, as in JAX; a subclass of dict keeps its order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from numbers import Number
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any, TypeVar, cast

import optree
import torch

from fshard._torch.dynamo import PytreeNode, registered_node
from fshard._torch.symbolic_numbers import has_symbolic_sizes
from fshard._util.errors import Problem, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec, is_placements, partition_of

_STRINGS = frozenset({str})

NAMESPACE = "fshard"
"""Namespace of optree in which classes are registered that optree itself does not know."""
_ATOMS = frozenset((type(None), bool, int, float, complex, str, torch.Size, torch.dtype))
_ATOMS |= {torch.device, torch.Tensor, torch.nn.Parameter, Sharded, Spec, PartitionSpec}
"""Types that are leaves even if they are registered."""
_OPEN = (type, torch.nn.Module, FunctionType, ModuleType)
"""Types whose instances may have tensors: a function that names them closes over them."""
_REGISTERED: set[type] = set()
"""Classes registered in the namespace; the keys of their children are texts of Python."""

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
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    kinds = {*map(type, leaves)}
    if any(issubclass(kind, Spec) for kind in kinds):
        # It may be of a plain tuple (local, spec), which is one leaf.
        leaves, treedef = optree.tree_flatten(
            tree, is_leaf=_is_leaf, none_is_leaf=True, namespace=NAMESPACE
        )
        kinds = {*map(type, leaves)}
    if not kinds <= _ATOMS and _register_containers(leaves, kinds - _ATOMS):
        return flatten(tree)
    if tuple in kinds:
        leaves = [Sharded(*leaf) if type(leaf) is tuple else leaf for leaf in leaves]
    return list(leaves), treedef


def _register_containers(leaves: Iterable[Any], kinds: set[type]) -> bool:
    """Register with optree those types of leaves that are containers; return True for any."""
    containers = {
        kind for kind in kinds if registered_node(kind) is not None or issubclass(kind, dict)
    } - {type(leaf) for leaf in leaves if _is_leaf(leaf)}
    for kind in containers:
        node = registered_node(kind) or PytreeNode(_flatten_items, partial(_rebuild, kind))
        functions: Any = node
        optree.register_pytree_node(
            kind, *functions, path_entry_type=_KeyEntry, namespace=NAMESPACE
        )
    _REGISTERED.update(containers)
    return bool(containers)


class _KeyEntry(optree.PyTreeEntry):
    """Step of a path to a child of a registered class, as the text of Python."""

    def codify(self, /, node: str = "") -> str:
        return f"{node}{self.entry}"


def _flatten_items(tree: dict[Any, Any]) -> tuple[list[Any], tuple[Any, ...], list[str]]:
    """Return values, keys, and the text of the keys."""
    return list(tree.values()), tuple(tree), [f"[{key!r}]" for key in tree]


def _rebuild(kind: type, keys: tuple[Any, ...], values: Iterable[Any]) -> Any:
    """Return an instance of a subclass of dict with these items."""
    items = dict(zip(keys, values, strict=True))
    return kind(**items) if is_dataclass(kind) else kind(items)


TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types of tensors without a `__torch_function__` of their own."""
local_of, spec_of = attrgetter("local"), attrgetter("spec")
_PAIRS = {Sharded}
_LOCAL_KEY = tuple(map(attrgetter, ("shape", "dtype", "device")))


def append_cache_key(
    tree: Any, leaves: list[Any], key: list[Any], tensors: list[torch.Tensor] | None = None
) -> None:
    """Append the leaves of a tree to `leaves`, and to `key` a cache key of all but the values.

    Pairs are appended as `Sharded`. With a list `tensors` the tensors, also of pairs, are
    appended to it, and the key has nothing of them.

    Trees with equal keys have one structure and equal specs; their tensors agree in shape, dtype,
    device and, outside of pairs, `requires_grad` and layout in memory; their other leaves agree in
    type.

    >>> leaves, key = [], []
    >>> append_cache_key({"b": 1, "a": [torch.ones(2)]}, leaves, key)
    >>> leaves[1], key[:4]
    (1, [<class 'dict'>, ('b', 'a'), <class 'list'>, 1])
    """
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        leaves.append(tree)
        if tensors is not None:
            tensors.append(tree)
            return
        # Sizes that are symbols are equal to no other key.
        shape = object() if has_symbolic_sizes(tree) else tree.shape
        key += (shape, tree.dtype, tree.device, tree.requires_grad, tree.layout)
    elif kind is Sharded or (kind is tuple and is_pair(tree)):
        pair = tree if kind is Sharded else Sharded(*tree)
        leaves.append(pair)
        local, spec = pair.local, pair.spec
        if isinstance(local, torch.Tensor) and tensors is not None:
            key.append(spec)
            tensors.append(local)
        elif isinstance(local, torch.Tensor):
            key += (spec, local.shape, local.dtype, local.device)
        elif isinstance(local, tuple | list):
            key.append(spec)
            append_cache_key(local, [], key, tensors)
        else:  # unknown contents: equal to no other key
            key.append(object())
    elif kind is tuple or kind is list:
        key += (kind, len(tree))
        _append_items(tree, leaves, key, tensors)
    elif kind is dict and {*map(type, tree)} <= _STRINGS:
        key += (kind, tuple(tree))
        _append_items([tree[name] for name in sorted(tree)], leaves, key, tensors)
    else:
        parts, treedef = flatten(tree)
        if len(parts) == 1 and parts[0] is tree:
            leaves.append(tree)
            key.append(kind)
        else:
            key.append(treedef)
            for part in parts:
                append_cache_key(part, leaves, key, tensors)


def _append_items(
    items: Sequence[Any], leaves: list[Any], key: list[Any], tensors: list[torch.Tensor] | None
) -> None:
    """Append the key of a container's items; many pairs of tensors are read without a loop."""
    if len(items) > 1 and {*map(type, items)} == _PAIRS:
        locals_ = [*map(local_of, items)]
        if {*map(type, locals_)} <= TENSORS:
            leaves += items
            key += map(spec_of, items)
            if tensors is not None:
                tensors += locals_
                return
            for read in _LOCAL_KEY:
                key += map(read, locals_)
            return
    for item in items:
        append_cache_key(item, leaves, key, tensors)


def unflatten(treedef: TreeDef, leaves: Sequence[Any]) -> Any:
    """Return the tree of a structure and its leaves."""
    return treedef.unflatten(leaves)


def map_leaves(function: Callable[..., Any], tree: Tree, *rest: Any) -> Tree:
    """Return the tree of `function(leaf, ...)`; the trees of `rest` have the same structure."""
    leaves, treedef = flatten(tree)
    others = [treedef.flatten_up_to(other) for other in rest]
    return cast(Tree, treedef.unflatten(map(function, leaves, *others)))


def read_placements(specs: Any, mesh: Mesh | None) -> Any:
    """Return a tree of specs in which DTensor's placements on `mesh` are partitions."""
    if mesh is not None and is_placements(specs):
        return partition_of(mesh, specs)
    if type(specs) in (tuple, list):
        return type(specs)(read_placements(item, mesh) for item in specs)
    if type(specs) is dict:
        return {name: read_placements(item, mesh) for name, item in specs.items()}
    return specs


def paths(tree: Any, name: str) -> list[str]:
    """Return the Python expression of every leaf, for error messages.

    >>> paths({"w": [1, 2]}, "params")
    ["params['w'][0]", "params['w'][1]"]
    """
    return [accessor.codify(name) for accessor in flatten(tree)[1].accessors()]


def leaf_names(tree: Any) -> list[str]:
    """Return the keys of every leaf joined by dots, as a module's `state_dict` names tensors.

    >>> leaf_names({"layers": [{"w": 1}, {"w": 2}]})
    ['layers.0.w', 'layers.1.w']
    """
    return [
        ".".join(str(_plain_key(entry.type, entry.entry)) for entry in accessor)
        for accessor in flatten(tree)[1].accessors()
    ]


def _plain_key(kind: type, key: Any) -> Any:
    """Return the key of a child of a container of a type, without the syntax of Python's text."""
    if kind not in _REGISTERED:
        return key
    return key[1:] if key.startswith(".") else key[1:-1].strip("'\"")


def plain_containers(tree: Any, leaves: Iterable[Any]) -> Any:
    """Return the containers of a tree, empty ones too, as dicts, lists and tuples of other leaves.

    Subclasses of these become what they are subclasses of, deques lists, registered classes dicts.

    >>> plain_containers(({}, {"w": 1}), [5])
    ({}, {'w': 5})
    """
    remaining = iter(leaves)

    def build(node: Any) -> Any:
        children, keys = _children(node)
        if children is None:
            return next(remaining)
        built = [*map(build, children)]
        if isinstance(node, tuple):
            return tuple(built)
        if isinstance(node, list | deque):
            return built
        return {_plain_key(type(node), key): x for key, x in zip(keys, built, strict=True)}

    return build(tree)


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


def opaque_problem(value: Any, path: str) -> Problem | None:
    """Return the problem of a leaf that has tensors among its attributes, or None.

    Modules may have tensors: they are leaves.
    """
    if type(value) in _ATOMS or isinstance(value, torch.Tensor | torch.nn.Module):
        return None
    kind = type(value)
    if not _holds_tensors(value):
        return None
    return Problem(
        f"{path} is {_with_article(value)}, with tensors in it",
        "tensors must be in tuples, lists, dicts, and instances of registered classes to be found",
        f"torch.export.register_dataclass({kind.__name__}), once, before the call"
        if is_dataclass(kind)
        else "use_cache=False, which leaves it out"
        if kind.__module__ == "transformers.cache_utils"
        else "a dict of them: vars(...) of an object",
    )


def non_tensor_problem(
    value: Any, spec: Any, path: str, text: str = "", fix: str = ""
) -> Problem | None:
    """Return the problem of a result that is not a tensor in an out spec, or None.

    Args:
        value: the result.
        spec: its out spec, None where there is none.
        path: its path in the tree of results.
        text: the out spec in the error, by default its representation.
        fix: another fix, after the first.
    """
    is_replicated = isinstance(spec, PartitionSpec) and not spec.axes
    if spec is None or value is None or (is_replicated and isinstance(value, Number)):
        return None
    return Problem(
        f"{path}: a {type(value).__name__} with the out spec {text or repr(spec)}",
        "only tensors can be sharded, and only tensors and numbers have P()",
        f"None, or P() for a number{fix}",
    )


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """Return True if there are tensors among an object's items, attributes, or theirs."""
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    parts = [value, getattr(value, "__dict__", None), slots]
    if any(True for _ in tensors_in(parts)):
        return True
    items = [item for part in parts if isinstance(part, Mapping) for item in part.values()]
    items += [x for part in (slots, *items) if isinstance(part, list | tuple) for x in part]
    objects = (x for x in items if hasattr(x, "__dict__") and not isinstance(x, _OPEN))
    return depth > 0 and any(_holds_tensors(x, depth - 1) for x in objects)


def broadcast_prefix(prefix: Any, tree: Any, name: str, where: str) -> list[Any]:
    """Return for every leaf of `tree`, in order, the leaf of `prefix` that covers it.

    Raises `ShardingError` for every place where `prefix` is not a prefix of the tree.
    """
    flatten(prefix)
    flatten(tree)  # registers the classes of both
    try:
        return list(
            optree.broadcast_prefix(
                prefix, tree, is_leaf=_is_leaf, none_is_leaf=True, namespace=NAMESPACE
            )
        )
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
    return flatten_up_to(flatten(tree)[1], tree, other, names, where)


def flatten_up_to(
    treedef: TreeDef, tree: Any, other: Any, names: tuple[str, str], where: str
) -> list[Any]:
    """Return `flatten_like(tree, other, names, where)` for a tree whose structure is known."""
    try:
        return list(treedef.flatten_up_to(other))
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
        if _has_keys(tree):
            given = (
                f"{other_path} has the keys {_keys_text(other, other_keys)}, "
                f"{path} {_keys_text(tree, keys)}"
            )
        else:
            given = f"{other_path} has length {len(other_children)}, {path} {len(children)}"
        fixes = [f"add {other_path}{_key_text(tree, key)}" for key in missing]
        fixes += [f"drop {other_path}{_key_text(tree, key)}" for key in extra]
        return [Problem(given, rule, ", ".join(fixes))]
    other_child = dict(zip(other_keys, other_children, strict=True))
    problems: list[Problem] = []
    for key, child in zip(keys, children, strict=True):
        problems += _unlike(child, other_child[key], names, at + _key_text(tree, key))
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
        if _has_keys(prefix):
            given = (
                f"{at} has the keys {_keys_text(prefix, keys)}, "
                f"the value {_keys_text(tree, value_keys)}"
            )
        else:
            given = f"{at} has length {len(children)}, the value {len(values)}"
        fix = "an entry for each, or one spec for all of it"
    if given:
        return [Problem(given, rule, fix)]
    problems: list[Problem] = []
    for key, child, value in zip(keys, children, values or [], strict=True):
        problems += _no_prefix(child, value, name, at + _key_text(prefix, key))
    return problems


def _has_keys(tree: Any) -> bool:
    return isinstance(tree, Mapping) or type(tree) in _REGISTERED


def _key_text(tree: Any, key: Any) -> str:
    """Return the text of Python behind a tree's expression for the child of a key."""
    return str(key) if type(tree) in _REGISTERED else f"[{key!r}]"


def _keys_text(tree: Any, keys: Iterable[Any]) -> str:
    return ", ".join(keys) if type(tree) in _REGISTERED else str([*keys])


def _children(tree: Any) -> tuple[list[Any] | None, list[Any]]:
    """Return the subtrees right below and their keys or indices; `(None, [])` for a leaf."""
    if _is_leaf(tree) or optree.tree_is_leaf(tree, none_is_leaf=True, namespace=NAMESPACE):
        return None, []
    children, _, entries, _ = optree.tree_flatten_one_level(
        tree, none_is_leaf=True, namespace=NAMESPACE
    )
    return list(children), list(entries)


def _with_article(value: Any) -> str:
    """Return the name of a value's type with an article."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"
