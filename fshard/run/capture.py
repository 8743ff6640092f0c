"""What a function of one tensor does on this rank, recorded once and replayed.

Between a call and the operations of PyTorch that it comes to lie plans, specs and groups, which
are the same for all tensors of one shape. A recording runs the function on a tensor without
numbers, takes down the operations below autograd, and leaves out the views that cancel. So the
general path stays the one definition of what is done, and the replay costs what the operations
cost. After the tracing of JAX and of `torch.fx`.
"""

from __future__ import annotations

import marshal
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fshard._torch.legacy_vmap import is_legacy_batched
from fshard._torch.memory import storage_address
from fshard._torch.modes import TorchDispatchMode, disable_dispatch_modes
from fshard._torch.operators import builtin_of, schema_of
from fshard._torch.process_groups import resolve_group
from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.tree import tensors_in
from fshard.run.transports.base import LABEL, Label, backward_phase, direct_transport, unobserved
from fshard.run.transports.divergence_report import lost
from fshard.run.transports.shape_only import recording

__all__ = ["MOST", "Function", "Launcher", "Launchers", "plain_key", "record", "replay"]

Function = Callable[[torch.Tensor], torch.Tensor]
ATEN = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default
EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
# Operations that are linear in their one tensor, whatever their other arguments are.
LINEAR = {
    ATEN.view.default, ATEN._unsafe_view.default, ATEN.unsqueeze.default, ATEN.squeeze.dim,
    ATEN.permute.default, ATEN.transpose.int, ATEN.slice.Tensor, ATEN.select.int,
    ATEN.split.Tensor, ATEN.split_with_sizes.default, ATEN.unbind.int, ATEN.cat.default,
    ATEN.clone.default, ATEN.alias.default, ATEN.detach.default, ATEN._to_copy.default,
    ATEN.sum.dim_IntList, ATEN.repeat.default, ATEN.expand.default, ATEN.stack.default,
    ATEN.zeros_like.default, ATEN.new_zeros.default, ATEN.new_empty.default,
    ATEN.slice_backward.default, ATEN.select_backward.default, ATEN.index_select.default,
}  # fmt: skip


# The same with less to parse.
METHODS = {ATEN.div.Tensor: torch.div, ATEN.mul.Tensor: torch.mul, ATEN.clone.default: torch.clone}
WORDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""The transport's names of PyTorch's collectives, where they differ."""


class _Call(NamedTuple):
    """One operation that ran, and under which label."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    label: Label | None


class _Recorder(TorchDispatchMode):
    """Takes down every operation that runs in the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append(_Call(func, args, kwargs or {}, out, LABEL.get()))
        return out


def _is_collective(func: Any) -> bool:
    return str(func.namespace) == "_c10d_functional"


def _is_linear(func: Any, args: tuple[Any, ...]) -> bool:
    if _is_collective(func):
        return not {"max", "min", "product"} & {arg for arg in args if isinstance(arg, str)}
    if func is ATEN.add.Tensor:
        return isinstance(args[1], torch.Tensor)
    if func in (ATEN.mul.Tensor, ATEN.div.Tensor):
        return not isinstance(args[1], torch.Tensor)
    return func in LINEAR


class _Name(str):
    """A value by its name."""

    __slots__ = ()


class _Listing:
    """The operations of one recording as the lines of a Python function."""

    def __init__(self, x: torch.Tensor, calls: Sequence[_Call], y: torch.Tensor) -> None:
        self.x, self.y = x, y
        self.calls = calls
        self.names = {id(x): "x"}
        self.values: dict[str, Any] = {}
        self.lines: list[str] = []
        # The shape in which an exchange gives what was recorded as flat.
        self.shapes: dict[int, tuple[int, ...]] = {}
        # Names in the shape that was recorded, where that is another.
        self.views: dict[int, str] = {}
        # What each tensor is a view of, if it is one.
        self.bases: dict[int, torch.Tensor] = {id(x): x}
        self.made: dict[int, int] = {}
        for at, (_, args, _, out, _) in enumerate(calls):
            first = next(tensors_in(args), None)
            for each in tensors_in(out):
                if id(each) in self.bases:
                    continue
                shares = first is not None and storage_address(first) == storage_address(each)
                self.bases[id(each)] = self.bases.get(id(first), each) if shares else each
                self.made[id(each)] = at

    def base(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor that `value` is another shape of, itself where it is no plain view."""
        base = self.bases.get(id(value), value)
        same = (
            base.dtype == value.dtype
            and base.numel() == value.numel()
            and base.storage_offset() == value.storage_offset()
            and base.is_contiguous()
            and value.is_contiguous()
        )
        return base if same else value

    def needed(self) -> set[int]:
        """The places of the calls that matter: all collectives, and what leads to the result."""
        places: set[int] = set()
        todo = [at for at, (func, *_) in enumerate(self.calls) if _is_collective(func)]
        base = self.base(self.y)
        todo += [self.made[id(base)]] if id(base) in self.made else []
        while todo:
            at = todo.pop()
            if at in places:
                continue
            places.add(at)
            call = self.calls[at]
            for each in tensors_in([*call.args, *call.kwargs.values()]):
                base = self.base(each)
                if id(base) in self.made:
                    todo.append(self.made[id(base)])
        return places

    def lost(self, calls: Sequence[_Call]) -> bool:
        """Whether a call takes numbers that were left behind: those of a tensor from nowhere."""
        given = [each for call in calls for each in (*call.args, *call.kwargs.values())]
        return any(each.is_meta and id(each) not in self.bases for each in tensors_in(given))

    def constant(self, value: Any) -> str:
        name = f"c{len(self.values)}"
        self.values[name] = value
        return name

    def text(self, value: Any) -> str:
        """An argument as an expression."""
        if isinstance(value, torch.Tensor):
            return self.reshaped(value)
        if isinstance(value, list | tuple) and next(tensors_in(value), None) is not None:
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, _Name):
            return str(value)
        return repr(value) if isinstance(value, int | str) else self.constant(value)

    def reshaped(self, value: torch.Tensor) -> str:
        base = self.base(value)
        if id(base) not in self.names:
            self.names[id(base)] = self.constant(base)
        name = self.names[id(base)]
        if self.shapes.get(id(base), base.shape) == value.shape:
            return name
        if id(value) not in self.views:
            self.views[id(value)] = made = f"v{len(self.names) + len(self.views)}"
            shape = str(tuple(value.shape))
            if value is self.y and base is not self.x:
                # The memory is nobody else's: autograd need not know it for a view.
                reshape = self.constant(builtin_of(ATEN._unsafe_view.default))
                self.lines.append(f"{made} = {reshape}({name}, {shape})")
            else:
                self.lines.append(f"{made} = {name}.view({shape})")
        return self.views[id(value)]

    def explanation(self, call: _Call) -> Callable[[RuntimeError], ShardingError]:
        """What is said of a collective that does not end."""
        op = call.func.overloadpacket.__name__
        name: Any = call.args[-1]
        group = tuple(dist.get_process_group_ranks(resolve_group(name)))
        return lambda error: lost(error, call.label, WORDS.get(op, op), group)

    def arguments(self, func: Any, args: tuple[Any, ...], out: Any) -> Sequence[Any]:
        """The arguments of a call; a flat exchange is one of rows, where there are whole rows."""
        if func is WAIT and id(args[0]) in self.shapes:
            self.shapes[id(out)] = self.shapes[id(args[0])]
            return [_Name(self.names[id(args[0])])]
        if func is EXCHANGE:
            flat, *sizes, name = args
            x = self.base(flat)
            row = math.prod(x.shape[1:])
            if x.ndim > 1 and row and not any(n % row for each in sizes for n in each):
                self.shapes[id(out)] = (sum(sizes[0]) // row, *x.shape[1:])
                return [x, *([n // row for n in each] for each in sizes), name]
        return args

    def function(self) -> Function:
        """The recording as a function."""
        places = self.needed()
        for at in sorted(places):
            func, args, kwargs, out, _ = self.calls[at]
            given = [self.text(each) for each in self.arguments(func, args, out)]
            given += [f"{key}={self.text(each)}" for key, each in kwargs.items() if key != "device"]
            if "device" in kwargs:
                given.append("device=x.device")
            name = f"v{len(self.names) + len(self.views)}"
            line = f"{name} = {self.constant(METHODS.get(func) or builtin_of(func))}({', '.join(given)})"
            if func is WAIT:
                explain = self.constant(self.explanation(self.calls[self.made[id(args[0])]]))
                self.lines += [f"try: {line}", "except RuntimeError as error:",
                               f"    raise {explain}(error) from error"]  # fmt: skip
            else:
                self.lines.append(line)
            if isinstance(out, torch.Tensor):
                self.names.setdefault(id(out), name)
                continue
            for place, each in enumerate(out):
                self.names[id(each)] = f"{name}[{place}]"
        self.lines.append(f"return {self.reshaped(self.y)}")
        arguments = ", ".join(["x", *(f"{name}={name}" for name in self.values)])
        source = "\n    ".join([f"def replayed({arguments}):", *self.lines])
        # As `dataclasses` does: a loop over the calls would cost as much as they do.
        exec(source, self.values)
        found: Function = self.values["replayed"]
        return found


@dataclass(slots=True, eq=False)
class Launcher:
    """A recorded function of tensors of one shape and layout: `run`; and its transpose."""

    function: Function
    transpose: Function
    run: Function
    is_linear: bool
    is_identity: bool
    out: torch.Tensor
    _flipped: Launcher | None = None

    @property
    def T(self) -> Launcher:  # noqa: N802 - the mathematical name
        """The transpose, recorded when it is first asked for; of a linear function."""
        if self._flipped is None:
            with disable_dispatch_modes():
                self._flipped = record(self.transpose, self.function, self.out)
            assert self._flipped is not None
        return self._flipped


MOST = 4096
"""How many plans or recordings are kept."""
_NEVER, _ONCE = object(), object()


class Launchers:
    """Recordings by what they depend on, made when it comes for the second time; `MOST` at most.

    Recording costs more than a call: what comes once is not recorded.
    """

    __slots__ = ("_known", "get")

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        # What is kept for a key, a `Launcher` or not: a builtin costs a fifth of calling `of`.
        self.get = self._known.get

    def of(
        self, key: Hashable, make: Callable[..., Launcher | None], *args: Any
    ) -> Launcher | None:
        """The recording for `key`, which is `make(*args)`; None where there is none."""
        found = self._known.get(key, _NEVER)  # once: other threads clear it
        if found is _NEVER:
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[key] = _ONCE
            return None
        if found is _ONCE:
            # What is recorded only pretends to run: the caller's modes are told of the replay.
            with disable_dispatch_modes():
                found = self._known[key] = make(*args)
        return found  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()

    def __len__(self) -> int:
        """How many functions are recorded."""
        return sum(type(each) is Launcher for each in self._known.values())


_LISTS = frozenset((list, tuple))
_PLAIN = frozenset((int, bool, str, type(None), torch.dtype, Mesh))
_WRITTEN = object()
"""What stands before a list that is written down, as bytes."""


def plain_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
    """What is equal for equal arguments of equal types; None where one is no plain value.

    What can change is no key by its identity, a tensor is not. Numbers that are equal need not
    mean the same, 0 and 0.0 do not.
    """
    try:
        return _token(_WRITTEN, marshal.dumps(args, 0), **kwargs)
    except (TypeError, ValueError):  # a mesh or a dtype by its place, a list by its name
        pass
    try:
        return (_token(*_written((*args, *kwargs.values()))), *kwargs)
    except (TypeError, ValueError):
        return None


def _written(values: tuple[Any, ...]) -> list[Any]:
    """Values with the lists and tuples among them written down; raises where it cannot be."""
    written: list[Any] = []
    for each in values:
        if type(each) in _LISTS:
            written += _WRITTEN, marshal.dumps(each, 0)
        else:
            written.append(each)
    return written


@lru_cache(maxsize=MOST, typed=True)
def _token(*args: Any, **kwargs: Any) -> object:
    """One object for equal values of equal types; `TypeError` for what is no plain value.

    The cache compares the types of what it is given, not of what is in a tuple.
    """
    values = iter((*args, *kwargs.values()))
    for each in values:
        if each is _WRITTEN:  # an array is written as bytes, and as bytes it is read
            plain = _is_plain(marshal.loads(next(values)))
        elif type(each) is tuple:
            plain = {str}.issuperset(map(type, each))
        else:
            plain = type(each) in _PLAIN
        if not plain:
            raise TypeError
    return object()


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) in _LISTS else type(value) in _PLAIN


def record(function: Function, transpose: Function, like: torch.Tensor) -> Launcher | None:
    """Record what `function` does to tensors like `like`, which has no numbers.

    `transpose` is its transpose, if it is linear. None for a function that writes in place, or
    that makes tensors of numbers.
    """
    recorder = _Recorder()
    with torch.no_grad(), unobserved(), recording(), recorder:
        y = function(like)
    calls = recorder.calls
    listing = _Listing(like, calls, y)
    kept = [calls[at] for at in listing.needed()]
    if any(schema_of(call.func).is_mutable for call in calls) or listing.lost(kept):
        return None
    return Launcher(
        function,
        transpose,
        listing.function(),
        is_linear=all(_is_linear(call.func, call.args) for call in kept),
        is_identity=not kept and y.shape == like.shape,
        out=torch.empty(y.shape, dtype=y.dtype, device="meta"),
    )


def replay(launcher: Launcher, x: torch.Tensor) -> torch.Tensor:
    """The function of a linear launcher, differentiably."""
    out: torch.Tensor = _Replay.apply(launcher, x)  # type: ignore[no-untyped-call]
    return out


class _Replay(torch.autograd.Function):
    """Forward replays a function, backward its transpose."""

    @staticmethod
    def forward(ctx: Any, launcher: Launcher, x: torch.Tensor) -> torch.Tensor:
        ctx.launcher = launcher
        y = launcher.run(x)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[None, torch.Tensor]:
        launcher = ctx.launcher.T
        if direct_transport() is None or type(g) is not torch.Tensor or is_legacy_batched(g):
            with backward_phase():
                return None, launcher.function(g)
        if not launcher.is_identity:
            g = g.contiguous()
        if torch.is_grad_enabled() and g.requires_grad:
            return None, replay(launcher, g)
        return None, launcher.run(g)
