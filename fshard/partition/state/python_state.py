"""`PythonState`: the state of Python that a function can read beside its arguments.

A trace fixes everything that the function reads, so a changed state must not meet an old trace.
The state is read where the function's code can name it: starting from the function, a walk follows
closure cells, defaults, named globals, bound objects and modules, and of every object the
attributes whose names occur in the code that the walk met. It records what it reads, and a guard
compares all of it. After a change the state is walked again: equal states have equal keys, and
so their traces are cached.
"""

from __future__ import annotations

import functools
import sys
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter, methodcaller
from pathlib import Path
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch

from fshard._torch.module_state import BASE_CLASSES, meta_getter, state_dictionaries
from fshard._util.code_names import global_names
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.cache_keys import freeze
from fshard.partition.state.host_generators import is_generator
from fshard.partition.state.state_guard import Read, StateGuard

MAX_ITEMS = 256
"""Size up to which the items of a list, tuple, dict, set or array are part of the state."""
VALUES = (
    bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, Mesh, PartitionSpec,
    Spec,
)  # fmt: skip
"""Types of immutable values, which are compared by value."""
WRAPPERS = (
    MethodType, BuiltinMethodType, functools.partial, weakref.ref, ContextVar, staticmethod,
    classmethod, property,
)  # fmt: skip
"""Types of objects that stand for a function or for another object."""
ALWAYS_NAMED = frozenset((
    "forward", "backward", "setup_context", "__call__", "__wrapped__", "fn", "func", "data", "maps",
))  # fmt: skip
"""Names read by calls of modules, custom gradients and wrappers, and by classes of collections."""
CONSTRUCTORS = frozenset(("__init__", "__new__", "__post_init__", "__init_subclass__"))
_LIBRARIES = sys.stdlib_module_names | {"torch", "fshard", "numpy"}

CONTAINERS: dict[type, tuple[Callable[..., Any], ...]] = {
    OrderedDict: (OrderedDict.__len__, OrderedDict.__iter__, OrderedDict.values),
    dict: (dict.__len__, dict.__iter__, dict.values),
    MappingProxyType: (MappingProxyType.__len__, iter, MappingProxyType.values),
    list: (list.__len__, list.__iter__),
    deque: (deque.__len__, deque.__iter__),
    set: (set.__len__, set.__iter__),
}
"""Mutable containers: their sizes, keys and items, whatever methods a subclass has."""

_ABSENT = object()
_contents, _current = attrgetter("cell_contents"), methodcaller("get", None)
_code, _bases = attrgetter("__code__"), attrgetter("__mro__")
_defaults, _keyword_defaults = attrgetter("__defaults__"), attrgetter("__kwdefaults__")


@dataclass(frozen=True, slots=True, eq=False)
class StateKey:
    """Hashable key of a state; `objects` keeps those alive whose ids are in `items`."""

    items: tuple[Any, ...]
    objects: tuple[Any, ...] = field(repr=False)
    hash: int

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, StateKey) and self.items == other.items)


class PythonState:
    """Guard of the Python state that a function can read.

    >>> scale = 2.0
    >>> state = PythonState(lambda x: x * scale)
    >>> before = state.key()
    >>> state.key() is before
    True
    """

    def __init__(self, function: Any) -> None:
        self.function, self.names = function, ALWAYS_NAMED
        self.walk: _Walk | None = None
        self.guard: StateGuard
        self.logs: dict[int, Any] = {}

    def key(self) -> StateKey:
        """Return the key of the current state; equal states have equal keys."""
        walk = self.walk
        if walk is None or not self.guard.holds():
            walk = _Walk(self.names, self.logs)
            walk.visit_all(self.function)
            while walk.names != self.names:  # names of code that the walk met last
                self.names = frozenset(walk.names)
                walk = _Walk(self.names, self.logs)
                walk.visit_all(self.function)
            self.walk, self.guard = walk, walk.guard()
        return walk.key

    @property
    def generators(self) -> list[Any]:
        """The random generators of Python and NumPy in the state."""
        return [] if self.walk is None else self.walk.generators

    def ignore_logs(self) -> bool:
        """Ignore the lists, dicts and sets that a trace has just grown, as logs and memos.

        Returns:
            True if there are such, and the rest of the state is unchanged.
        """
        walk = self.walk
        if walk is None or self.guard.holds():
            return False
        logs = {id(x): x for length, x, size in walk.containers if length(x) > size}
        self.logs.update(logs)
        return bool(logs) and walk.guard(logs).holds()


class _Walk:
    """One walk over a state: its reads with their values, and its key.

    Objects are visited in an order that depends on the state alone.
    """

    def __init__(self, names: frozenset[str], logs: dict[int, Any]) -> None:
        self.filter, self.names, self.logs = names, set(names), logs
        self.weak: set[int] = set()
        self.kinds: set[int] = set()
        self.containers: list[Read] = []
        self.generators: list[Any] = []
        self.todo: list[Any] = []
        self.seen: dict[int, int] = {}
        self.objects: list[Any] = []
        self.items: list[Any] = []
        self.sizes: list[Read] = []
        self.namespaces: dict[int, Any] = {}
        self.item_reads: list[Read] = []
        self.reads: list[Read] = []
        self.contents: list[Read] = []

    def guard(self, logs: Collection[int] = ()) -> StateGuard:
        """Return the guard of what was read, but for the containers with ids in `logs`."""
        sizes, rows, reads, contents = (
            [read for read in reads if id(read[1]) not in logs]
            for reads in (self.sizes, self.item_reads, self.reads, self.contents)
        )
        others = [read for read in sizes if not _has_length(read)]
        sizes = [read for read in sizes if _has_length(read)]
        return StateGuard(sizes, [*self.namespaces.values()], rows, reads, [*contents, *others])

    def visit_all(self, root: Any) -> None:
        """Visit everything that can be reached from `root`."""
        self.todo.append(root)
        while self.todo:
            self.visit(self.todo.pop())
        items = tuple(self.items)
        self.key = StateKey(items, tuple(self.objects), hash(items))

    def read(self, reader: Callable[[Any], Any], argument: Any, value: Any) -> None:
        """Record a read, and visit its value later."""
        self.reads.append((reader, argument, value))
        self.todo.append(value)

    def read_all(self, container: Any, keys: Sequence[Any]) -> None:
        """Record reads of the items of a container, and visit them later."""
        if keys:
            getter = itemgetter(*keys, keys[0])  # of a key alone it returns no tuple
            values = getter(container)
            self.item_reads.append((getter, container, values))
            self.todo += values[:-1]

    def compare(self, getter: Callable[[Any], Any], value: Any) -> None:
        """Record the contents of an object, which are compared by value."""
        contents = getter(value)
        self.items.append(contents)
        self.contents.append((getter, value, contents))

    def read_names(self, namespace: Any) -> None:
        """Record the size and the last name of a namespace: a name that is added may be read."""
        if id(namespace) not in self.namespaces:
            self.namespaces[id(namespace)] = namespace
            self.sizes.append((type(namespace).__len__, namespace, len(namespace)))

    def visit(self, value: Any) -> None:
        """Add one value to the key, and what can be read of it to the work."""
        if value is None or isinstance(value, VALUES):
            self.items.append(freeze(value))
            return
        if id(value) in self.seen:
            self.items.append(self.seen[id(value)])
            return
        self.seen[id(value)] = -1 - len(self.seen)
        if id(value) not in self.weak:
            self.objects.append(value)
        self.items.append(type(value))
        if id(value) in self.logs:
            return
        if isinstance(value, torch.Tensor):
            self.items.append(id(value))
            self.compare(meta_getter, value)
        elif isinstance(value, tuple(CONTAINERS)):
            self.visit_container(value)
        elif isinstance(value, tuple | frozenset):
            kind: Any = tuple if isinstance(value, tuple) else frozenset
            items = [*kind.__iter__(value)]  # a subclass may count and iterate otherwise
            self.items.append(len(items))
            self.todo += items[:MAX_ITEMS]
            if type(value) is not tuple:
                self.visit_attributes(value)
        elif isinstance(value, bytearray | array):
            if len(value) <= MAX_ITEMS:
                self.compare(repr, value)
        elif isinstance(value, FunctionType):
            self.visit_function(value)
        elif isinstance(value, WRAPPERS):
            self.visit_wrapper(value)
        elif isinstance(value, ModuleType):
            self.items.append(id(value))
            if not _is_library(value.__name__):
                self.read_names(vars(value))
                self.read_named(vars(value))
        elif isinstance(value, type):  # which the code may call
            self.items.append(id(value))
            self.visit_class(value)
            self.visit_methods(value, CONSTRUCTORS.__contains__)
        else:
            self.visit_object(value)

    def visit_wrapper(self, value: Any) -> None:
        """Visit the function or the object that another object stands for."""
        if isinstance(value, MethodType):
            self.todo += (value.__func__, value.__self__)
        elif isinstance(value, BuiltinMethodType):
            self.items.append(value.__name__)
            self.todo.append(value.__self__)
        elif isinstance(value, functools.partial):
            self.todo += (value.func, value.args, value.keywords)
        elif isinstance(value, weakref.ref):
            target: Any = value()
            if isinstance(target, MethodType):
                self.todo.append(target.__func__)
                target = target.__self__
            self.weak.add(id(target))
            self.todo.append(target)
        elif isinstance(value, ContextVar):
            self.read(_current, value, _current(value))
        elif isinstance(value, staticmethod | classmethod):
            self.todo.append(value.__func__)
        else:
            self.todo.append(value.fget)

    def visit_container(self, container: Any) -> None:
        """Visit the keys and items of a container in their order, unless there are too many."""
        kind = next(kind for kind in CONTAINERS if isinstance(container, kind))
        length, *getters = CONTAINERS[kind]
        size = length(container)
        self.items.append(size)
        self.containers.append((length, container, size))
        if type(container) not in CONTAINERS:
            self.visit_attributes(container)
        if size <= MAX_ITEMS:
            self.sizes.append((length, container, size))
            for getter in getters if size else ():
                values = tuple(getter(container))
                self.item_reads.append((getter, container, values))
                self.todo += values

    def read_named(self, attributes: Any) -> None:
        """Read the items of a namespace that the code names."""
        names = [name for name in attributes if name in self.filter]
        self.items += names
        self.read_all(attributes, names)

    def visit_function(self, function: FunctionType) -> None:
        """Visit the code, defaults, cells and named globals of a function, and its attributes."""
        code = function.__code__
        self.items.append(id(code))
        self.objects.append(code)
        if id(function) in self.weak:  # its reads must not keep it alive
            self.todo += (function.__defaults__, function.__kwdefaults__)
        else:
            self.reads.append((_code, function, code))
            self.read(_defaults, function, function.__defaults__)
            self.read(_keyword_defaults, function, function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                contents = cell.cell_contents
            except ValueError:  # not assigned yet
                self.items.append("empty")
            else:
                self.read(_contents, cell, contents)
        self.read_named(vars(function))
        namespace = function.__globals__
        if not _is_library(namespace.get("__name__")):  # a wrapper has the `__module__` it wraps
            names = _names_in(code)
            self.names |= names
            present = sorted(global_names(code) & namespace.keys())
            self.items += present
            self.read_names(namespace)
            self.read_all(namespace, present)
            for name in sorted(names & sys.modules.keys()):  # imported in the function
                self.todo.append(sys.modules[name])

    def visit_class(self, kind: type) -> None:
        """Visit the named attributes of a class and its bases; PyTorch's add names."""
        self.reads.append((_bases, kind, kind.__mro__))
        for base in kind.__mro__:
            if base in BASE_CLASSES:
                continue
            if not _is_library(base.__module__):
                self.read_names(vars(base))
                self.read_named(vars(base))
            elif issubclass(base, torch.nn.Module):
                for name in self.filter & vars(base).keys():
                    function = vars(base)[name]
                    if isinstance(function, FunctionType):
                        self.names |= _names_in(function.__code__)

        # Operators call special methods without their names.
        self.visit_methods(kind, lambda name: name.startswith("__") and name not in CONSTRUCTORS)

    def visit_methods(self, kind: type, is_called: Callable[[str], bool]) -> None:
        """Visit the methods with some names of a class and its bases outside of libraries."""
        for base in kind.__mro__:
            if base not in BASE_CLASSES and not _is_library(base.__module__):
                for name, method in vars(base).items():
                    function = getattr(method, "__func__", method)  # of a static method, as __new__
                    if is_called(name) and isinstance(function, FunctionType):
                        self.todo.append(function)

    def visit_object(self, value: Any) -> None:
        """Visit an object that is compared by identity."""
        self.items.append(id(value))
        if is_generator(value):
            self.generators.append(value)
        if isinstance(value, torch.nn.Module):
            for dictionary in state_dictionaries(value):
                self.todo.append(dictionary)
        if type(value).__module__ == "numpy" and getattr(value, "size", MAX_ITEMS + 1) <= MAX_ITEMS:
            self.compare(_array_contents, value)
        self.visit_attributes(value)

    def visit_attributes(self, value: Any) -> None:
        """Visit the named attributes of an object, and those of its class."""
        kind, is_weak = type(value), id(value) in self.weak
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self.read_names(attributes)
            self.read_named(attributes)
        for name in () if is_weak else _slots(kind):
            if name in self.filter:
                self.read(_slot_reader(name), value, getattr(value, name, _ABSENT))
        if not is_weak:
            self.reads.append((type, value, kind))
        if id(kind) not in self.kinds:  # not in `seen`: the code may call the class, too
            self.kinds.add(id(kind))
            self.objects.append(kind)
            self.items.append(id(kind))
            self.visit_class(kind)


def _has_length(read: Read) -> bool:
    """Return True for a size that `len` returns; a subclass may have another one."""
    length, container, _ = read
    return type(container).__len__ is length


@functools.lru_cache(maxsize=4096)
def _is_library(name: str | None) -> bool:
    """Return True for a module of Python or of an installed package; its globals are not followed.

    They are constants, and there are millions of them behind the names of a large package.
    """
    root = (name or "").partition(".")[0]
    module = sys.modules.get(root)
    paths = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    installed = {part for path in paths if path for part in Path(path).parts}
    return root in _LIBRARIES or not installed.isdisjoint(("site-packages", "dist-packages"))


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in code, also those in strings (`getattr`)."""
    names = {*code.co_names}
    for const in code.co_consts:
        if isinstance(const, str) and const.isidentifier():
            names.add(const)
        elif isinstance(const, CodeType):
            names |= _names_in(const)
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def _slot_reader(name: str) -> Callable[[Any], Any]:
    """Return a function of objects to an attribute, `_ABSENT` without it."""
    return lambda value: getattr(value, name, _ABSENT)


def _array_contents(value: Any) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.tobytes()


def _slots(kind: type) -> Iterator[str]:
    """Yield the slots of a class and its bases."""
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
