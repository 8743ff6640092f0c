"""`OpCall`, one call of an operation on shapes and dtypes, and helpers that walk its arguments.

Layout rules depend on shapes, dtypes and static arguments, never on values: an `OpCall` has a
`Meta` in the place of every tensor and so can be a cache key.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from fshard._torch.modes import DisableTorchFunction, without_dispatch_modes
from fshard._torch.operators import dereference, reference_of, schema_of, schema_or_none
from fshard._util.errors import ShardingError, fail
from fshard.layout.spec import Spec

T = TypeVar("T")


class Meta(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor | Spec) -> Meta:
        """Return the shape and dtype of a tensor, or the global ones of a spec."""
        return Meta(tuple(tensor.shape), tensor.dtype)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of `op` with a `Meta` in the place of every tensor; the input of rule generators.

    `operands` are the tensors of `args` and `kwargs` in order, those within lists included;
    `results` are the returned tensors in order, None where the operation returns None.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Meta, ...]
    results: tuple[Meta | None, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (reference_of(self.op), self.args, dict(self.kwargs), self.operands,
                          self.results)  # fmt: skip

    @property
    def result(self) -> Meta:
        """First result, which must be a tensor."""
        result = self.results[0]
        assert result is not None
        return result

    def get(self, name: str) -> Any:
        """Return the argument `name` of the schema, or its default if the call omits it.

        Raises `KeyError` if the schema has no argument of that name.

        >>> from fshard.ops.propagate.propagate import call_and_tree
        >>> x = Meta((2, 3), torch.float32)
        >>> call_and_tree(torch.ops.aten.sum.dim_IntList, (x, [1]), {})[0].get("keepdim")
        False
        """
        return argument(self.op, self.args, self.kwargs, name)

    def has(self, name: str) -> bool:
        """Return True if the schema has an argument `name`."""
        return any(argument.name == name for argument in schema_arguments(self.op))

    def operand_index(self, name: str) -> int | None:
        """Return the index in `operands` of the tensor argument `name`, or None if it is absent."""
        index = 0
        for position, argument in enumerate(schema_arguments(self.op)):
            value: Any = self.kwargs.get(argument.name)
            if argument.name not in self.kwargs and position < len(self.args):
                value = self.args[position] if not argument.kwarg_only else None
            if argument.name == name:
                return index if isinstance(value, Meta) else None
            index += len(instances_in(value, Meta))
        raise KeyError(name)


def _rebuild(op: Any, *fields: Any) -> OpCall:
    return OpCall(dereference(op), *fields)


@dataclass(frozen=True, slots=True)
class StaticResult:
    """Result that is not a tensor and depends on shapes and dtypes alone."""

    value: Any


READS_VALUE = StaticResult("a number that is read from a tensor")
"""Result of an operation that turns the value of a tensor into a Python number."""


class ValueDependentShapeError(ShardingError):
    """Result whose shape depends on values, so that no layout describes it before it is there."""


SIZED_CALLS = {
    "nonzero": "fs.nonzero(x, size=n); in place of x[mask] fs.masked_select(x, mask, size=n)",
    "masked_select": "fs.masked_select(x, mask, size=n)",
    "_unique2": "fs.unique(x, size=n)",
    "bincount": "fs.bincount(x, length=n)",
    "repeat_interleave": "torch.repeat_interleave(x, repeats, output_size=n)",
    "linalg_lstsq": "torch.linalg.pinv(a) @ b",
}
"""Calls whose sizes are known, by the operation whose size depends on values."""
CREATED_BY = {
    **{name: f"fs.{name}(spec) creates a pair" for name in ("zeros", "ones", "empty", "eye")},
    "empty_strided": "fs.empty(spec) creates a pair",
    "arange": "fs.arange(spec, start, step) creates a pair",
    "full": "fs.full(spec, value) creates a pair",
    "scalar_tensor": "fs.full(spec, value) creates a pair, of a spec with shape=()",
    "rand": "fs.random.uniform(key, spec) creates a pair",
    "randn": "fs.random.normal(key, spec) creates a pair",
    "randint": "fs.random.randint(key, spec, low, high) creates a pair",
    "randperm": "fs.random.permutation(key, spec) creates a pair",
}
"""Function that creates a pair, by the name of PyTorch's factory without operands."""
OP_ERRORS = (RuntimeError, IndexError, TypeError, ValueError, ZeroDivisionError)
"""Exceptions that PyTorch raises for invalid arguments."""
Results = tuple[tuple[Meta | None, ...], Any]
"""Metas of the returned tensors in order, and the returned tree with their indices as leaves."""

MAX_WRITABLE_ELEMENTS = 4096
"""Larger tensors of zeros are one element, expanded; in-place operations refuse those."""

_READS_VALUE_OPS = frozenset(("item", "_local_scalar_dense", "equal", "is_nonzero", "allclose"))


def reads_value(op: Any) -> bool:
    """Return True if the operation turns the value of a tensor into a Python number."""
    return base_name(op) in _READS_VALUE_OPS


def base_name(op: Any) -> str:
    """Return an operation's name without namespace and overload; empty for Python functions.

    >>> base_name(torch.ops.aten.add_.Tensor), base_name(torch.add)
    ('add_', '')
    """
    schema = schema_or_none(op)
    return "" if schema is None else str(schema.name.partition("::")[2])


def name_of(op: Any) -> str:
    """Return an operation's name without namespace, or the name of a Python function.

    >>> name_of(torch.ops.aten.mm.default), name_of(functools.partial(torch.matmul, torch.ones(2)))
    ('mm.default', 'matmul')
    """
    while isinstance(op, functools.partial):
        op = op.func
    return str(getattr(op, "__name__", op))


def check_callable(op: object, where: str) -> None:
    """Raise `ShardingError` unless an operation is a function."""
    if not callable(op):
        known = isinstance(op, str) and callable(getattr(torch, op, None))
        fail(
            where,
            f"{op!r} of type {type(op).__name__} as the operation",
            "an operation must be a function of torch, a torch.ops overload or a function of "
            "tensors",
            f"torch.{op}" if known else "torch.matmul, say",
        )


def argument(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return the argument `name` of a call, or its default if the call omits it.

    A number in the place of a list of fixed length is that number for every item.
    """
    for position, parameter in enumerate(schema_arguments(op)):
        if parameter.name == name:
            value = args[position] if position < len(args) else parameter.default_value
            value = kwargs.get(name, value)
            is_number = type(value) in (int, float)
            return [value] * parameter.N if is_number and parameter.N is not None else value
    raise KeyError(name)


def schema_arguments(op: Any) -> Sequence[Any]:
    """Return the arguments that the schema of an operation declares."""
    arguments: Sequence[Any] = schema_of(op).arguments
    return arguments


_SEQUENCES = (list, tuple)  # a union would be built at every call


def instances_in(value: Any, kind: type[T]) -> list[T]:
    """Return the instances of `kind` in an argument, nested lists and tuples included."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, _SEQUENCES):
        return [item for inner in value for item in instances_in(inner, kind)]
    return []


def map_instances(value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """Return an argument with `change` applied to the instances of `kind` in it."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list):  # fx graphs have their own subclass of list
        return [map_instances(item, kind, change) for item in value]
    if type(value) is tuple:
        return tuple(map_instances(item, kind, change) for item in value)
    return value


def map_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], kind: type | tuple[type, ...],
    change: Callable[[Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Return the arguments of a call with `change` applied to the instances of `kind` in them."""
    positional = tuple(map_instances(arg, kind, change) for arg in args)
    return positional, {key: map_instances(arg, kind, change) for key, arg in kwargs.items()}


def fill_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], kind: type | tuple[type, ...],
    items: Iterable[Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Return the arguments of a call with the instances of `kind` replaced by `items` in order."""
    remaining = iter(items)
    return map_call(args, kwargs, kind, lambda _: next(remaining))


def meta_results(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results:
    """Return the metas of a call's results and their tree, from a run on meta tensors.

    An operation without a meta kernel runs on zeros. Raises `ShardingError` if PyTorch refuses the
    arguments or if the shape of a result depends on values.
    """
    if reads_value(op):
        return (), READS_VALUE
    try:
        return flatten_results(dry_run(op, args, kwargs, "meta"))
    except OP_ERRORS as error:
        return flatten_results(_on_zeros(op, args, kwargs, error))


def flatten_results(out: Any) -> Results:
    """Return the metas of returned tensors and the returned tree with their indices as leaves."""
    metas: list[Meta | None] = []

    def index_of(value: Any) -> Any:
        if value is None or isinstance(value, torch.Tensor):
            metas.append(None if value is None else Meta.of(value))
            return len(metas) - 1
        if isinstance(value, list | tuple):
            return type(value)(*map(index_of, value)) if hasattr(value, "_fields") else (
                type(value)(index_of(item) for item in value))  # fmt: skip
        return StaticResult(value)

    tree = index_of(out)
    return tuple(metas), tree


def dry_run(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> Any:
    """Run an operation on meta tensors, or on zeros if `device` is another one."""

    def tensor_of(meta: Meta) -> torch.Tensor:
        if device == "meta":
            return torch.empty(meta.shape, dtype=meta.dtype, device=device)
        if math.prod(meta.shape) <= MAX_WRITABLE_ELEMENTS:
            return torch.zeros(meta.shape, dtype=meta.dtype)
        return torch.zeros((), dtype=meta.dtype).expand(meta.shape)

    with without_dispatch_modes(), DisableTorchFunction():
        tensor_args, tensor_kwargs = map_call(args, kwargs, Meta, tensor_of)
        if "device" in tensor_kwargs:
            tensor_kwargs["device"] = torch.device(device)
        with torch.no_grad():
            return op(*tensor_args, **tensor_kwargs)


def _on_zeros(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> Any:
    """Run a call that has no meta kernel on zeros; raise if a result's shape depends on values."""
    lacking, text = isinstance(error, NotImplementedError), str(error)
    dynamic = torch.Tag.dynamic_output_shape in getattr(op, "tags", ())
    if (
        "nonzero" in text
        or "without output_size" in text
        or (dynamic and (lacking or "item()" in text))
    ):
        fail(f"fs.propagate({op})", ", ".join(map(_text, (*args, *kwargs.values()))),
             "the shape of its result depends on values, but a layout must have a shape",
             "fs.apply(op, pair, mode=\"auto\") runs it on unsharded values; in a function for "
             f"fs.partition {sized_call(op)}; or fs.shard_map within it",
             ValueDependentShapeError)  # fmt: skip
    if not lacking:
        _refuse(op, args, kwargs, error)
    try:
        return dry_run(op, args, kwargs, "cpu")
    except OP_ERRORS as cpu_error:
        _refuse(op, args, kwargs, cpu_error)


def sized_call(op: Any) -> str:
    """Return the fix for an operation whose result's shape depends on values."""
    return SIZED_CALLS.get(name_of(op).split(".")[0], "torch.where with a mask")


def _refuse(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> NoReturn:
    call = ", ".join(map(_text, (*args, *kwargs.values())))
    fail(f"fs.propagate({op})", call, f"it must run on tensors of these shapes: {error}",
         "check the arguments with the same call on unsharded tensors")  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, Meta):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)
