"""`StateGuard`: all reads of a walk over a state, compared by a few calls in C.

After a step of a model nothing of the state is in the processor's caches, so what counts is the
memory that is read, not the instructions. A dict that is as it was at the last comparison, by its
version, is not read again, and tensors are compared by one call.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import call, eq, is_
from typing import Any, NamedTuple

from fshard._torch.module_state import dict_version, meta_getter, same_metas

Read = tuple[Callable[[Any], Any], Any, Any]
"""Function, its argument, and the value that it returned."""
Columns = tuple[tuple[Any, ...], ...]
"""Functions, their arguments, and the values that they returned."""
FALSE_IF_EMPTY = frozenset((OrderedDict, dict, list, deque, set))


class _ContainerReads(NamedTuple):
    """Reads of containers.

    Attributes:
        empty: containers that were empty.
        filled: other containers.
        sizes: their sizes.
        namespaces: namespaces of objects, classes, modules and functions.
        last: their last names; a name that is added is the last.
        getters: functions of containers to the keys or items that were read, in their order.
        containers: the containers.
        items: the keys and items of all, which are compared by identity.
    """

    empty: tuple[Any, ...]
    filled: tuple[Any, ...]
    sizes: list[int]
    namespaces: tuple[Any, ...]
    last: tuple[Any, ...]
    getters: tuple[Callable[[Any], Any], ...]
    containers: tuple[Any, ...]
    items: tuple[Any, ...]

    @staticmethod
    def of(
        sizes: Sequence[Read], namespaces: Sequence[Any], items: Sequence[Read]
    ) -> _ContainerReads:
        """Return the reads of sizes, last names and items."""
        is_empty = [not size and type(container) in FALSE_IF_EMPTY for _, container, size in sizes]
        rows = [*zip(sizes, is_empty, strict=True)]
        return _ContainerReads(
            tuple([container for (_, container, _), empty in rows if empty]),
            tuple([container for (_, container, _), empty in rows if not empty]),
            [size for (*_, size), empty in rows if not empty],
            tuple(namespaces),
            tuple([next(reversed(names), None) for names in namespaces]),
            tuple([getter for getter, *_ in items]),
            tuple([container for _, container, _ in items]),
            tuple([value for *_, values in items for value in values]),
        )

    def hold(self) -> bool:
        """Return True if every read still returns the value that it returned in the walk."""
        items = chain.from_iterable(map(call, self.getters, self.containers))
        last = map(next, map(reversed, self.namespaces), repeat(None))
        return (
            not any(self.empty)
            and [*map(len, self.filled)] == self.sizes
            and all(map(is_, last, self.last))
            and all(map(is_, items, self.items))
        )


class StateGuard:
    """Comparison of a state with what a walk has read of it.

    Args:
        sizes: the sizes of containers, by `len`.
        namespaces: dicts of names and their views, to which no name is added.
        items: keys and items of containers, which are compared by identity.
        reads: other values, which are compared by identity.
        contents: values that are compared by value.
    """

    def __init__(
        self, sizes: Iterable[Read], namespaces: Iterable[Any], items: Iterable[Read],
        reads: Sequence[Read], contents: Sequence[Read],
    ) -> None:  # fmt: skip
        by_dict: dict[int, tuple[list[Read], list[Any], list[Read]]]
        by_dict = defaultdict(lambda: ([], [], []))
        others: tuple[list[Read], list[Any], list[Read]] = [], [], []
        dicts: dict[int, dict[Any, Any]] = {}
        names = [(reversed, namespace, namespace) for namespace in namespaces]
        for place, rows in enumerate((sizes, names, items)):
            for row in rows:
                container = row[1]
                group = others
                if dict_version is not None and type(container) is dict and container:
                    dicts[id(container)], group = container, by_dict[id(container)]
                group[place].append(container if place == 1 else row)
        self.others = _ContainerReads.of(*others)
        self.dicts = tuple(dicts.values())
        self.reads_of_dicts = [_ContainerReads.of(*by_dict[key]) for key in dicts]
        self.versions = self._versions()
        self.reads = _columns(reads)
        self.tensors = tuple([x for getter, x, _ in contents if getter is meta_getter])
        self.metas = _columns([read for read in contents if read[0] is meta_getter])
        self.contents = _columns([read for read in contents if read[0] is not meta_getter])
        self.same_metas = same_metas(self.tensors)

    def _versions(self) -> list[int]:
        return [] if dict_version is None else [*map(dict_version, self.dicts)]

    def holds(self) -> bool:
        """Return True if every read still returns the value that it returned in the walk."""
        try:
            return (
                self.others.hold()
                and self._dicts_hold()
                and _equal(is_, self.reads)
                and (self.same_metas(*self.tensors) or _equal(eq, self.metas))
                and _equal(eq, self.contents)
            )
        except Exception:  # noqa: BLE001 - a removed item, an emptied cell
            return False

    def _dicts_hold(self) -> bool:
        """Compare the dicts that have changed since they were compared last."""
        versions = self._versions()
        if versions == self.versions:
            return True
        rows = zip(versions, self.versions, self.reads_of_dicts, strict=True)
        if not all(reads.hold() for version, before, reads in rows if version != before):
            return False
        self.versions = versions
        return True


def _columns(reads: Sequence[Read]) -> Columns:
    return tuple(zip(*reads, strict=True)) if reads else ((), (), ())


def _equal(compare: Callable[[Any, Any], bool], columns: Columns) -> bool:
    functions, arguments, values = columns
    return all(map(compare, map(call, functions, arguments), values))
