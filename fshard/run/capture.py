"""Recordings of collectives on one rank: the operations of PyTorch that one call ran, replayed.

Between the call of a collective and these operations are plans, specs and groups, equal for all
tensors of one shape. A recording runs the collective on a meta tensor, lists the operations below
autograd, leaves out views that cancel, and compiles the rest to one Python function. The general
path remains the only definition of a collective; a replay saves about half of its time, most with
gradients. After the tracing of JAX and `torch.fx`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fshard._torch.memory import storage_address
from fshard._torch.modes import DispatchMode, disable_dispatch_modes
from fshard._torch.operators import builtin_of, schema_of
from fshard._torch.process_groups import call_below_autograd, resolve_group
from fshard._util.cache import BoundedDict
from fshard._util.errors import ShardingError
from fshard.layout.tree import tensors_in
from fshard.run.transports.base import LABEL, Label, ObservedCall, observe_only
from fshard.run.transports.divergence_report import lost
from fshard.run.transports.observed_calls import ObservedLaunch
from fshard.run.transports.reduce_dtypes import TensorFunction
from fshard.run.transports.shape_only import meta_as_real

ATEN = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
LINEAR_OPS = {
    ATEN.view.default, ATEN._unsafe_view.default, ATEN.unsqueeze.default, ATEN.squeeze.dim,
    ATEN.permute.default, ATEN.transpose.int, ATEN.slice.Tensor, ATEN.select.int,
    ATEN.split.Tensor, ATEN.split_with_sizes.default, ATEN.unbind.int, ATEN.cat.default,
    ATEN.clone.default, ATEN.alias.default, ATEN.detach.default, ATEN._to_copy.default,
    ATEN.sum.dim_IntList, ATEN.repeat.default, ATEN.expand.default, ATEN.stack.default,
    ATEN.zeros_like.default, ATEN.new_zeros.default, ATEN.new_empty.default,
    ATEN.slice_backward.default, ATEN.select_backward.default, ATEN.index_select.default,
}  # fmt: skip
"""Operations that are linear in their tensor for all other arguments."""

Start = Callable[[torch.Tensor], Generator[None, None, torch.Tensor]]
"""Function of a generator that launches all collectives, and then returns the result."""

TRANSPORT_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""Names of the transport's methods, for PyTorch's collectives of other names."""


class RecordedOp(NamedTuple):
    """One operation that ran, and the label that was set."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    label: Label | None

    @property
    def is_collective(self) -> bool:
        """True for a functional collective."""
        return str(self.func.namespace) == "_c10d_functional"

    @property
    def is_linear(self) -> bool:
        """True if the operation is linear in its tensor."""
        if self.is_collective:
            return not {"max", "min", "product"} & {
                arg for arg in self.args if isinstance(arg, str)
            }
        if self.func in (ATEN.add.Tensor, ATEN.add.out):
            return isinstance(self.args[1], torch.Tensor)
        if self.func in (ATEN.mul.Tensor, ATEN.div.Tensor):
            return not isinstance(self.args[1], torch.Tensor)
        return self.func in LINEAR_OPS


class _Recorder(DispatchMode):
    """List of the operations that run in a block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[RecordedOp] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ops.append(RecordedOp(func, args, kwargs or {}, out, LABEL.get()))
        return out


class _Compiler:
    """Translation of recorded operations from the input `x` to the result `y` to Python."""

    def __init__(self, x: torch.Tensor, ops: Sequence[RecordedOp], y: torch.Tensor) -> None:
        self.x, self.y, self.ops = x, y, list(ops)
        self.names = {id(x): "x"}  # variables, by tensor
        self.views: dict[int, str] = {}  # variables of views that are needed, by tensor
        self.values: dict[str, Any] = {}  # constants, by variable
        self.lines: list[str] = []
        self.bases: dict[int, torch.Tensor] = {id(x): x}  # the tensor that each shares memory with
        self.producers: dict[int, int] = {}  # the index of the operation behind each tensor
        self.overwritten: dict[int, int] = {}  # the value that an operation overwrites
        self.writes_others = False  # an operation writes a tensor that none of them made
        for index, recorded in enumerate(ops):
            op = self.in_rows(recorded) if recorded.func in (ALL_TO_ALL, WAIT) else recorded
            self.ops[index] = op
            first = next(tensors_in(op.args), None)
            for out in tensors_in(op.out):
                if id(out) not in self.bases:
                    aliases = first is not None and storage_address(first) == storage_address(out)
                    self.bases[id(out)] = self.bases.get(id(first), out) if aliases else out
                    self.producers[id(out)] = index
            if op is not recorded:
                self.bases[id(recorded.out)] = op.out
            if schema_of(op.func).is_mutable:
                self.record_write(index, op)

    def record_write(self, index: int, op: RecordedOp) -> None:
        """Make an operation with `out=` the producer of that tensor, which another one made."""
        target = op.kwargs.get("out")
        base = None if target is None else self.base(target)
        if base is None or id(base) not in self.producers:
            self.writes_others = True
        else:
            self.overwritten[index] = self.producers[id(base)]
            self.producers[id(base)] = index

    def in_rows(self, op: RecordedOp) -> RecordedOp:
        """Return a flat all-to-all, or its wait, on the rows of its base, which needs no views."""
        x, counts = self.base(op.args[0]), op.args[1:3]
        row = math.prod(x.shape[1:]) if x.ndim > 1 else 0
        if x is op.args[0] or not row or any(n % row for sizes in counts for n in sizes):
            return op
        args = x, *([n // row for n in sizes] for sizes in counts), *op.args[3:]
        return op._replace(args=args, out=x.new_empty(op.out.numel() // row, *x.shape[1:]))

    def base(self, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor that `value` is a reshaped view of, or `value`."""
        base = self.bases.get(id(value), value)
        reshaped = (
            base.dtype == value.dtype
            and base.numel() == value.numel()
            and base.storage_offset() == value.storage_offset()
            and base.is_contiguous()
            and value.is_contiguous()
        )
        return base if reshaped else value

    def needed(self) -> list[RecordedOp]:
        """Return all collectives and the operations that lead to them and to the result."""
        indices: set[int] = set()
        pending = [index for index, op in enumerate(self.ops) if op.is_collective]
        base = self.base(self.y)
        pending += [self.producers[id(base)]] if id(base) in self.producers else []
        while pending:
            index = pending.pop()
            if index not in indices:
                indices.add(index)
                op = self.ops[index]
                inputs = map(self.base, tensors_in([*op.args, *op.kwargs.values()]))
                pending += [self.producers[id(x)] for x in inputs if id(x) in self.producers]
                pending += [self.overwritten[index]] if index in self.overwritten else []
        return [self.ops[index] for index in sorted(indices)]

    def reads_unknown(self, op: RecordedOp) -> bool:
        """Return True if an operation reads a meta tensor that no recorded operation made."""
        inputs = tensors_in([*op.args, *op.kwargs.values()])
        return any(x.is_meta and id(x) not in self.bases for x in inputs)

    def constant(self, value: Any) -> str:
        name = f"c{len(self.values)}"
        self.values[name] = value
        return name

    def new_name(self) -> str:
        return f"v{len(self.names) + len(self.views)}"

    def expression(self, value: Any) -> str:
        """Return an argument as an expression."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, list | tuple) and next(tensors_in(value), None) is not None:
            return f"[{', '.join(map(self.expression, value))}]"
        return repr(value) if isinstance(value, int | str) else self.constant(value)

    def tensor(self, value: torch.Tensor) -> str:
        """Return the variable of a tensor, adding a line for a view of its base."""
        base = self.base(value)
        if id(base) not in self.names:
            self.names[id(base)] = self.constant(base)
        name = self.names[id(base)]
        if base.shape == value.shape:
            return name
        if id(value) not in self.views:
            view, shape = self.new_name(), str(tuple(value.shape))
            if value is self.y and base is not self.x:
                # The base is private: autograd must not take the result for a view.
                reshape = self.constant(builtin_of(ATEN._unsafe_view.default))
                self.lines.append(f"{view} = {reshape}({name}, {shape})")
            else:
                self.lines.append(f"{view} = {name}.view({shape})")
            self.views[id(value)] = view
        return self.views[id(value)]

    def explanation(self, op: RecordedOp) -> Callable[[RuntimeError], ShardingError]:
        """Return a function that explains the error of a collective that does not end."""
        name = op.func.overloadpacket.__name__
        group = tuple(dist.get_process_group_ranks(resolve_group(op.args[-1])))
        called = TRANSPORT_NAMES.get(name, name)
        return lambda error: lost(error, LABEL.get() or op.label, called, group)

    def functions(self, ops: Sequence[RecordedOp]) -> tuple[TensorFunction, Start]:
        """Return the needed operations as one Python function, and as a generator."""
        for op in ops:
            args = [self.expression(arg) for arg in op.args]
            args += [f"{k}={self.expression(v)}" for k, v in op.kwargs.items() if k != "device"]
            args += ["device=x.device"] * ("device" in op.kwargs)
            name, func = self.new_name(), builtin_of(op.func)
            func = partial(call_below_autograd, func) if op.is_collective else func
            line = f"{name} = {self.constant(func)}({', '.join(args)})"
            if op.func is WAIT:
                launch = self.ops[self.producers[id(op.args[0])]]
                explain = self.constant(self.explanation(launch))
                self.lines += [f"try: {line}", "except RuntimeError as error:",
                               f"    raise {explain}(error) from error"]  # fmt: skip
            else:
                self.lines.append(line)
            if isinstance(op.out, torch.Tensor):
                self.names.setdefault(id(op.out), name)
            else:
                self.names |= {id(out): f"{name}[{i}]" for i, out in enumerate(op.out)}
        self.lines.append(f"return {self.tensor(self.y)}")
        return self.compiled(self.lines), self.compiled(self.lines_of_start())

    def lines_of_start(self) -> list[str]:
        """Return the lines of a generator that pauses before it waits for the last time.

        Its launches are then in the order that those of the function have.
        """
        waits = [i for i, line in enumerate(self.lines) if line.startswith("try: ")]
        last = waits[-1] if waits else len(self.lines) - 1
        return [*self.lines[:last], "yield", *self.lines[last:]]

    def compiled(self, lines: Sequence[str]) -> Any:
        """Return lines as a function of `x`."""
        arguments = ", ".join(["x", *(f"{name}={name}" for name in self.values)])
        # As `dataclasses` does: a loop over the operations would take as long as they do.
        names = dict(self.values)
        exec("\n    ".join([f"def replayed({arguments}):", *lines]), names)
        return names["replayed"]


@dataclass(slots=True, eq=False)
class Recording:
    """Recorded function of tensors of one shape, strides and dtype.

    Attributes:
        function: the function that was recorded.
        transpose: its transpose, if it is linear.
        run: the recorded operations.
        start: the same in two parts, up to the last wait and from there.
        is_linear: whether all operations are.
        is_identity: whether there are none.
        out: a meta tensor like the result.
        launch: its collectives and the label of the call, for observers.
    """

    function: TensorFunction
    transpose: TensorFunction
    run: TensorFunction
    start: Start
    is_linear: bool
    is_identity: bool
    out: torch.Tensor
    launch: ObservedLaunch
    _transposed: Recording | None = None

    @property
    def T(self) -> Recording:  # noqa: N802 - the mathematical name
        """The recording of the transpose, made on first use."""
        if self._transposed is None:
            with disable_dispatch_modes():
                self._transposed = record(self.transpose, self.function, self.out)
            assert self._transposed is not None
        return self._transposed


_MISSING, _CALLED_ONCE = object(), object()


class Recordings:
    """Cache of recordings; one is made when its key comes for the second time.

    Recording costs more than a call, so that a call that comes once is not recorded.

    Attributes:
        get: the cached value of a key, a `Recording` or not; a builtin, unlike `get_or_record`.
    """

    __slots__ = ("_cache", "get")

    def __init__(self) -> None:
        self._cache: BoundedDict[Hashable, Any] = BoundedDict()
        self.get = self._cache.get

    def get_or_record(
        self, key: Hashable, make: Callable[..., Recording | None], *args: Any
    ) -> Recording | None:
        """Return the recording of `key`, made by `make(*args)`; None if there is none (yet)."""
        cached = self._cache.get(key, _MISSING)  # once, since other threads may clear the cache
        if cached is _MISSING:
            self._cache[key] = _CALLED_ONCE
            return None
        if cached is _CALLED_ONCE:
            # The caller's modes see the replay, and must not see the recording as well.
            with disable_dispatch_modes():
                cached = self._cache[key] = make(*args)
        return cached  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Remove all recordings."""
        self._cache.clear()

    def __len__(self) -> int:
        """Return the number of recordings."""
        return sum(type(value) is Recording for value in self._cache.values())


def record(
    function: TensorFunction,
    transpose: TensorFunction,
    like: torch.Tensor,
    label: Label | None = None,
) -> Recording | None:
    """Record a function of tensors like the meta tensor `like`.

    Args:
        function: the function.
        transpose: its transpose, if it is linear.
        like: a meta tensor with the shape, strides and dtype of the argument.
        label: the label of the call; None is that of its collectives.

    Returns:
        The recording; None for a function that writes its argument or reads values of new tensors.
    """
    recorder, calls = _Recorder(), list[ObservedCall]()
    token = LABEL.set(label)
    try:
        with torch.no_grad(), observe_only(calls.append), meta_as_real(), recorder:
            y = function(like)
    finally:
        LABEL.reset(token)
    compiler = _Compiler(like, recorder.ops, y)
    needed = compiler.needed()
    if compiler.writes_others:
        return None
    if any(map(compiler.reads_unknown, needed)):
        return None
    events = {
        phase: tuple(event._replace(phase=phase) for call in calls for event in call.events)
        for phase in ("forward", "backward")
    }
    return Recording(
        function,
        transpose,
        *compiler.functions(needed),
        is_linear=all(op.is_linear for op in needed),
        is_identity=not needed and y.shape == like.shape,
        out=torch.empty(y.shape, dtype=y.dtype, device="meta"),
        launch=ObservedLaunch(events, next((call.label for call in calls), label)),
    )
