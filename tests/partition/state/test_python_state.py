"""State of Python that a partitioned function reads: changes are seen, states are cached."""

from __future__ import annotations

import functools
import gc
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call

import fshard as fs
from fshard.partition.state.python_state import PythonState
from tests.helpers.ops.block_cases import traces_of
from tests.partition.state.state_checks import MESH, check_sees

scale: Any = 2.0
table = {"shift": 1.0}


@pytest.fixture(autouse=True)
def _restore_globals() -> Any:
    yield
    set_scale(2.0)
    table["shift"] = 1.0


def test_eval_and_train_of_a_closed_over_module_are_seen_and_cached() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Dropout(0.5)))

    def fn(key: torch.Tensor, p: Any, x: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key):
            y: torch.Tensor = functional_call(module, p, (x,))
            return y

    key, p = fs.random.key(0), dict(module.named_parameters())
    x = torch.ones(2, 4)
    part = check_sees(fn, module.eval, key, p, x)
    for _ in range(3):
        for training in (True, False):
            module.train(training)
            torch.testing.assert_close(part(key, p, x), fn(key, p, x))
    assert traces_of(part) == 2
    [*module.modules()][-1].train()
    torch.testing.assert_close(part(key, p, x), fn(key, p, x))


@dataclass
class Settings:
    scale: float = 2.0


@dataclass(slots=True)
class Slotted:
    scale: float = 2.0


class Scaler:
    """Object with state in a class attribute, an instance attribute and a list."""

    shift = 1.0

    def __init__(self) -> None:
        self.scales = [2.0]
        self.module = torch.nn.Linear(4, 4)

    def _scale(self) -> float:
        return self.scales[0]

    @property
    def doubled(self) -> float:
        return 2 * self.scales[0]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._scale() + self.shift + self.doubled

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(self, "optional", 1.0)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.zeros(4))
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.weight * self.factor + self.offset  # type: ignore[operator]


def set_scale(value: Any) -> None:
    globals()["scale"] = value


def helper(x: torch.Tensor) -> Any:
    return x * scale


def with_defaults(x: torch.Tensor, factor: float = 2.0, *, shift: float = 1.0) -> torch.Tensor:
    return x * factor + shift


@pytest.mark.parametrize("target", ["scale", "shift"])
def test_globals_are_seen(target: str) -> None:
    if target == "scale":
        check_sees(helper, lambda: set_scale(3.0))
        check_sees(lambda x: helper(x) + 1, lambda: set_scale(torch.tensor(5.0)))
        check_sees(helper, lambda: scale.mul_(2))
    else:
        check_sees(lambda x: x + table["shift"], lambda: table.update(shift=3.0))


def test_cells_defaults_and_partial_arguments_are_seen() -> None:
    factor, steps = 2.0, [1.0, 2.0]

    def change() -> None:
        nonlocal factor
        factor = 3.0

    check_sees(lambda x: x * factor, change)
    check_sees(lambda x: x * sum(steps), lambda: steps.append(4.0))
    check_sees(lambda x: x * steps[0], lambda: steps.__setitem__(0, 7.0))
    check_sees(with_defaults, lambda: setattr(with_defaults, "__defaults__", (5.0,)))
    check_sees(with_defaults, lambda: setattr(with_defaults, "__kwdefaults__", {"shift": 4.0}))
    settings = Settings()
    bound = functools.partial(lambda settings, x: x * settings.scale, settings)
    check_sees(bound, lambda: setattr(settings, "scale", 4.0))
    array = np.array([2.0])
    check_sees(lambda x: x * float(array[0]), lambda: array.__setitem__(0, 9.0))


@pytest.mark.parametrize("make", [Settings, Slotted, lambda: SimpleNamespace(scale=2.0)])
def test_attributes_of_objects_are_seen(make: Callable[[], Any]) -> None:
    settings = make()
    check_sees(lambda x: x * settings.scale, lambda: setattr(settings, "scale", 4.0))


class Factor:
    """Number with the operators of one."""

    def __init__(self, table: dict[str, float]) -> None:
        self.table = table

    def __getattr__(self, name: str) -> float:
        return self.__dict__["table"][name]

    def __mul__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value


def test_state_behind_operators_is_seen() -> None:
    factor = Factor({"value": 2.0})
    check_sees(lambda x: factor * x, lambda: factor.table.update(value=3.0))


def test_items_of_other_containers_and_context_variables_are_seen() -> None:
    names, queue, table = {"add", "mul"}, deque([1.0]), {"shift": 1.0}
    proxy, variable = MappingProxyType(table), ContextVar("variable", default=1.0)

    def replace() -> None:
        names.remove("mul")
        names.add("sub")

    check_sees(lambda x: x * 2 if "mul" in names else x, replace)
    check_sees(lambda x: x * queue[0], lambda: queue.__setitem__(0, 2.0))
    check_sees(lambda x: x * proxy["shift"], lambda: table.update(shift=2.0))
    check_sees(lambda x: x * variable.get(), lambda: variable.set(2.0))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * scale


def test_state_of_a_custom_backward_is_seen() -> None:
    scaled = Scaled.apply

    def gradient(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        return torch.autograd.grad(scaled(y).sum(), y)[0]

    check_sees(gradient, lambda: set_scale(3.0))


def test_globals_of_a_wrapper_of_a_library_function_are_seen() -> None:
    @functools.wraps(torch.relu)
    def wrapper(x: torch.Tensor) -> Any:
        return torch.relu(x) * scale

    check_sees(wrapper, lambda: set_scale(3.0))


def test_modules_imported_in_the_function_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ModuleType("settings_of_a_test")
    settings.__dict__["shift"] = 1.0
    monkeypatch.setitem(sys.modules, settings.__name__, settings)

    def fn(x: torch.Tensor) -> Any:
        import settings_of_a_test  # type: ignore[import-not-found]

        return x + settings_of_a_test.shift

    check_sees(fn, lambda: vars(settings).update(shift=2.0))


def test_state_behind_methods_and_properties_is_seen() -> None:
    scaler = Scaler()
    check_sees(scaler.run, lambda: scaler.scales.__setitem__(0, 3.0))
    check_sees(scaler.run, lambda: setattr(scaler, "shift", 5.0))
    check_sees(scaler, lambda: setattr(scaler, "optional", 5.0))
    del scaler.shift
    check_sees(lambda x: scaler.run(x) + 1, lambda: setattr(Scaler, "shift", 7.0))
    Scaler.shift = 1.0


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "attribute": lambda m: setattr(m, "factor", 3.0),
    "parameter": lambda m: setattr(m, "weight", torch.nn.Parameter(torch.full((4,), 3.0))),
    "data": lambda m: setattr(m.weight, "data", torch.full((4,), 3.0)),
    "state dict": lambda m: m.load_state_dict(
        {"weight": torch.full((4,), 5.0), "offset": torch.ones(4)}),
    "assigned state dict": lambda m: m.load_state_dict(
        {"weight": torch.full((4,), 5.0), "offset": torch.ones(4)}, assign=True),
    "buffer": lambda m: setattr(m, "offset", torch.ones(4)),
    "buffer in place": lambda m: m.get_buffer("offset").add_(1),
    "hook": lambda m: m.register_forward_hook(lambda m, args, y: y * 2),
    "forward": lambda m: setattr(m, "forward", lambda x: x * 5),
    "dtype": lambda m: m.double(),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_a_closed_over_module_are_seen(name: str) -> None:
    layer = Layer()
    part = check_sees(lambda x: layer(x) / 3, lambda: CHANGES[name](layer))
    assert traces_of(part) == (1 if name in ("data", "state dict", "buffer in place") else 2)


def test_an_optimizer_steps_on_closed_over_parameters() -> None:
    layer, x = Layer(), torch.arange(1.0, 5.0)
    part = fs.partition(lambda x: layer(x).square().sum(), mesh=MESH)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = part(x)
        torch.testing.assert_close(loss, layer(x).square().sum())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    assert traces_of(part) == 1
    layer.requires_grad_(requires_grad=False)
    assert not part(x).requires_grad


def test_unrelated_state_is_not_traced_anew() -> None:
    scaler = Scaler()
    part = fs.partition(scaler.run, mesh=MESH)
    part(torch.ones(4))
    scaler.calls = 1  # type: ignore[attr-defined]
    scaler.module = torch.nn.Linear(2, 2)
    table["other"] = 2.0
    part(torch.ones(4))
    del table["other"]
    assert traces_of(part) == 1


@pytest.mark.parametrize("fn", [helper, lambda x: x * scale.item()])
def test_traces_of_old_states_and_their_tensors_are_dropped(fn: Callable[..., Any]) -> None:
    part = fs.partition(fn, mesh=MESH)
    tensors = []
    for value in range(20):
        set_scale(torch.tensor(float(value)))
        tensors.append(weakref.ref(scale))
        assert part(torch.ones(2))[0] == value
    assert traces_of(part) <= 16
    gc.collect()
    assert sum(tensor() is not None for tensor in tensors) <= 16


def test_a_log_that_the_function_appends_to_is_not_read() -> None:
    calls: list[int] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 2

    part = fs.partition(fn, mesh=MESH)
    for _ in range(3):
        part(torch.ones(2))
    assert len(calls) == traces_of(part) == 1


def test_a_counter_that_the_function_reads_is_traced_for_each_value() -> None:
    counter = Settings(1.0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        counter.scale += 1
        return x * counter.scale

    part = fs.partition(fn, mesh=MESH)
    assert [part(torch.ones(1)).item() for _ in range(3)] == [2.0, 3.0, 4.0]


def test_globals_of_installed_packages_are_not_followed() -> None:
    package = pytest
    state = PythonState(lambda x: (x, package.raises))
    state.key()
    assert state.walk is not None
    items = [value for *_, values in state.walk.item_reads for value in values]
    assert 0 < len(items) + len(state.walk.reads) < 30


def test_objects_of_bound_builtin_methods_are_part_of_the_state() -> None:
    lookup = table.get
    check_sees(lambda x: x + lookup("shift"), lambda: table.update(shift=2.0))


GENERATOR, NUMPY_GENERATOR = random.Random(0), np.random.default_rng(0)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "random"),
        (np.random.rand, "numpy.random"),
        (GENERATOR.random, "a random.Random"),
        (NUMPY_GENERATOR.random, "a numpy.random._generator.Generator"),
    ],
)
def test_draws_of_python_and_numpy_are_refused(draw: Callable[[], float], name: str) -> None:
    part = fs.partition(lambda x: x * (draw() < 0.5), mesh=MESH)
    for _ in range(2):
        with pytest.raises(fs.ShardingError) as caught:
            part(torch.ones(2))
        assert str(caught.value) == (
            "fs.partition(<lambda>)\n"
            f"  given: a function that draws from {name}\n"
            "  rule:  draws must be PyTorch's: the function is traced once, and the values that "
            "others return would be the same in all later calls\n"
            "  fix:   draw with torch.rand(()), under fs.random.keyed for layouts that agree; or "
            "draw before the call and pass the values as arguments"
        )


def test_draws_within_a_traced_function_have_replacements() -> None:
    def keyed(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key):
            return x * (torch.rand(()) < 0.5)

    x, keys = torch.ones(2), [fs.random.key(seed) for seed in range(4)]
    drawn = [fs.partition(keyed, mesh=MESH)(key, x) for key in keys]
    torch.testing.assert_close(drawn, [keyed(key, x) for key in keys])
    passed = fs.partition(lambda x, draw: x * (draw < 0.5), mesh=MESH)
    torch.testing.assert_close([passed(x, draw) for draw in (0.2, 0.7)], [x, 0 * x])
    seeded = fs.partition(lambda x: x * random.Random(0).random(), mesh=MESH)
    torch.testing.assert_close(seeded(x), x * random.Random(0).random())


def test_names_of_attributes_are_not_names_of_globals() -> None:
    """A global is guarded if the code loads it, by name, in a nested function or a class body."""
    namespace: dict[str, Any] = {"scale": 1.0, "torch": torch}
    reads = {
        "lambda x: x.scale": False,
        "lambda x: x.scale()[scale]": True,
        "lambda x: [scale for _ in x]": True,
        "lambda x: globals()['scale'] * x": True,
        "lambda x: type('T', (), {})": False,
    }
    for code, is_read in reads.items():
        state = PythonState(eval(code, namespace))
        before = state.key()
        namespace["scale"] += 1.0
        assert (state.key() is not before) is is_read, code
    source = "def f(x):\n  class T:\n    y = scale\n  return x"
    exec(source, namespace)
    state = PythonState(namespace["f"])
    before = state.key()
    namespace["scale"] += 1.0
    assert state.key() is not before


class Constructed:
    """Object whose constructor reads a global."""

    def __new__(cls) -> Constructed:
        made = super().__new__(cls)
        made.shift = table["shift"]
        return made

    def __init__(self) -> None:
        self.factor = scale

    shift: float


@pytest.mark.parametrize("instance", [None, Constructed()], ids=["class", "class and instance"])
def test_state_that_a_constructor_reads_is_seen(instance: Constructed | None) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        made = Constructed()
        kept = 0.0 if instance is None else instance.factor
        return x * made.factor + made.shift + kept

    check_sees(fn, lambda: set_scale(3.0))
    check_sees(fn, lambda: table.update(shift=4.0))


def test_reads_are_compared_after_other_changes_of_their_dict() -> None:
    module = Layer()
    state = PythonState(module.forward)
    before = state.key()
    vars(module).update(unread=1)
    vars(module).update(unread=2)
    assert state.key() == before
    vars(module).update(unread=3)
    assert state.key() == before
    vars(module).update(factor=3.0)
    assert state.key() != before
