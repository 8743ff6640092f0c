"""Containers, classes and hooks that a partitioned function reads: each change is seen."""

from __future__ import annotations

import builtins
from array import array
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as all_modules
from torch.nn.utils import prune

import fshard as fs
from tests.partition.state.state_checks import MESH, check_sees

Tensor = torch.Tensor


def reorder(table: Any) -> None:
    """Move the first item to the end."""
    name = next(iter(table))
    table[name] = table.pop(name)


def replace_key(table: dict[Any, Any], key: Any) -> None:
    """Replace the only key by an equal one."""
    item = table.popitem()[1]
    table[key] = item


def chain(functions: Any) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        for function in functions.values():
            x = function(x)
        return x

    return fn


@pytest.mark.parametrize(
    "make", [dict, OrderedDict, lambda **items: defaultdict(None, items), UserDict]
)
def test_orders_of_dicts_are_seen(make: Callable[..., Any]) -> None:
    functions = make(a=torch.sin, b=torch.exp)
    check_sees(chain(functions), lambda: reorder(functions))
    check_sees(lambda x: x * (2 + [*functions].index("a")), lambda: reorder(functions))


def test_orders_behind_views_and_modules_are_seen() -> None:
    functions = OrderedDict(a=torch.sin, b=torch.exp)
    check_sees(chain(MappingProxyType(functions)), lambda: reorder(functions))
    check_sees(chain(functions), lambda: functions.move_to_end("a", last=False))
    layers = torch.nn.ModuleDict({"a": torch.nn.Tanh(), "b": torch.nn.Softplus()})
    check_sees(chain(layers), lambda: reorder(layers._modules))


class Key:
    """Key that is equal to all others."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key)

    def __hash__(self) -> int:
        return 1


@pytest.mark.parametrize("make", [lambda key: {key: 1}, lambda key: {key}], ids=["dict", "set"])
def test_equal_keys_are_distinguished(make: Callable[[Any], Any]) -> None:
    def replace(key: Any) -> None:
        table.clear()
        table.update(make(key))

    table = make(1)
    check_sees(lambda x: x * (2 if type(next(iter(table))) is int else 3), lambda: replace(True))
    check_sees(lambda x: x / float(next(iter(table))), lambda: replace(-0.0))
    key = Key(2.0)
    replace(key)
    check_sees(lambda x: x * next(iter(table)).scale, lambda: replace(Key(3.0)))
    replace(key)
    check_sees(lambda x: x * next(iter(table)).scale, lambda: setattr(key, "scale", 5.0))


class Silent(dict[str, float]):
    """Dict that hides its items, with an attribute."""

    scale = 2.0

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __getitem__(self, name: str) -> float:
        return 2 * dict.__getitem__(self, name)

    def run(self, x: Tensor) -> Tensor:
        return x * self.scale


class SilentList(list[float]):
    """List that hides its length."""

    def __len__(self) -> int:
        return 0


class Box(frozenset[int]):
    """Frozen set with an attribute."""

    scale = 2.0


def test_subclasses_of_containers_are_read_as_containers_and_as_objects() -> None:
    table, items, box = Silent(a=1.0), SilentList([1.0]), Box((1,))
    check_sees(lambda x: x * table["a"], lambda: table.update(a=3.0))
    check_sees(lambda x: x * table.get("b", 1.0), lambda: table.update(b=3.0))
    check_sees(lambda x: x * items[0], lambda: items.__setitem__(0, 3.0))
    check_sees(lambda x: x * (1 + sum(iter(items))), lambda: items.append(3.0))
    check_sees(table.run, lambda: setattr(table, "scale", 3.0))
    check_sees(lambda x: Silent().run(x), lambda: setattr(Silent, "scale", 5.0))
    check_sees(lambda x: x * box.scale, lambda: setattr(box, "scale", 3.0))


def test_containers_of_the_standard_library_are_seen() -> None:
    queue, maps = deque([1.0, 2.0]), ChainMap({"a": 2.0}, {"a": 3.0})
    numbers, raw, values = array("d", [1.0]), bytearray(b"\x01"), np.ones(2)
    check_sees(lambda x: x * queue[0], lambda: queue.rotate(1))
    check_sees(lambda x: x * maps["a"], maps.maps[0].clear)
    check_sees(lambda x: x * numbers[0], lambda: numbers.__setitem__(0, 3.0))
    check_sees(lambda x: x * (1 + len(raw)), lambda: raw.append(1))
    check_sees(lambda x: x * values.ndim, lambda: values.resize((1, 2)))


class Slot:
    __slots__ = ("scale",)
    scale: float


class Double:
    scale = 2.0


class Triple:
    scale = 3.0


class Derived(Double):
    pass


def test_names_that_are_added_for_others_are_seen() -> None:
    names, slot = SimpleNamespace(other=1.0), Slot()

    def swap() -> None:
        del names.other
        names.scale = 3.0

    check_sees(lambda x: x * getattr(names, "scale", 1.0), swap)
    check_sees(lambda x: x * getattr(slot, "scale", 1.0), lambda: setattr(slot, "scale", 3.0))
    check_sees(lambda x: x * getattr(slot, "scale", 1.0), lambda: delattr(slot, "scale"))


def test_a_global_that_hides_a_builtin_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def hide() -> None:
        monkeypatch.setitem(globals(), "sum", lambda items: builtins.sum(items) * 2)

    check_sees(lambda x: x * sum((1, 2)), hide)


def test_replaced_code_and_classes_are_seen() -> None:
    def helper(x: Tensor) -> Tensor:
        return x * 2

    def other(x: Tensor) -> Tensor:
        return x * 3

    scaled, derived = Double(), Derived()
    check_sees(helper, lambda: setattr(helper, "__code__", other.__code__))
    check_sees(lambda x: x * scaled.scale, lambda: setattr(scaled, "__class__", Triple))
    check_sees(lambda x: x * derived.scale, lambda: setattr(Derived, "__bases__", (Triple,)))
    Derived.__bases__ = (Double,)


def test_hooks_of_all_modules_are_seen() -> None:
    layer = torch.nn.Tanh()
    handles: list[Any] = []

    def register() -> None:
        hook = all_modules.register_module_forward_hook(lambda layer, args, y: y * 2)
        handles.append(hook)

    try:
        check_sees(chain({"a": layer}), register)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    "reparametrize",
    [lambda layer: prune.l1_unstructured(layer, "weight", 0.5), nn.utils.weight_norm,
     nn.utils.spectral_norm],
    ids=["prune", "weight_norm", "spectral_norm"],
)  # fmt: skip
def test_weights_that_hooks_compute_are_traced(reparametrize: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
    reparametrize(model[0])
    part = fs.partition(model, mesh=MESH, params=fs.P(), in_specs=fs.P("dp"))
    names = [name for name, _ in model.named_parameters()]
    x, weight = torch.randn(4, 4), model[0].weight
    rows = []
    for run in (part, lambda p, x: torch.func.functional_call(model, p, (x,))):
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state = {n: t.detach().clone().requires_grad_(n in names) for n, t in state.items()}
        y: Any = sum(run(state, x).sin().sum() for _ in range(2))  # type: ignore[no-untyped-call]
        grads = torch.autograd.grad(y, [state[name] for name in names])
        if run is part:
            assert model[0].weight is weight
        rows.append([y.detach(), *grads, *(t for n, t in state.items() if n not in names)])
    torch.testing.assert_close(*rows)


class Irreps(tuple[Any, ...]):
    """A tuple whose length is not a number of items, as e3nn's representations."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError


def test_items_of_a_tuple_without_a_length_are_seen() -> None:
    factors = Irreps([SimpleNamespace(factor=2.0)])

    def replace() -> None:
        factors[0].factor = 3.0

    check_sees(lambda x: x * factors[0].factor, replace)
