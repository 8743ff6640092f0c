"""`OpCall`: one call of an operation with tensors known by shape and dtype alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode

from fshard._util.errors import fail
from fshard.layout.spec import Spec

__all__ = [
    "OP_ERRORS",
    "READS_VALUE",
    "Meta",
    "OpCall",
    "Results",
    "StaticResult",
    "argument",
    "base_name",
    "dry_run",
    "fill_call",
    "flatten_results",
    "instances_in",
    "map_call",
    "map_instances",
    "meta_results",
    "name_of",
    "schema_arguments",
    "without_dispatch_modes",
]  # fmt: skip

Op = OpOverload[..., Any]
T = TypeVar("T")


class Meta(NamedTuple):
    """What a tensor is without its numbers: a shape and a dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor | Spec) -> Meta:
        """That of a tensor, or of one that lies as a spec."""
        return Meta(tuple(tensor.shape), tensor.dtype)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of `op`: arguments with `Meta` in the places of tensors, and what it returns.

    `args` and `kwargs` are as given; `operands` are their tensors in order, `results` what comes
    out, None where the operation returns none there. Rule generators read all of it.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Meta, ...]
    results: tuple[Meta | None, ...]

    def get(self, name: str) -> Any:
        """The argument called `name` in the operation's schema, its default where not given.

        Raises `KeyError` for a name that the schema has not.

        >>> from fshard.ops.propagate.propagate import call_of
        >>> x = Meta((2, 3), torch.float32)
        >>> call_of(torch.ops.aten.sum.dim_IntList, (x, [1]), {}).get("keepdim")
        False
        """
        return argument(self.op, self.args, self.kwargs, name)

    def has(self, name: str) -> bool:
        """Whether the schema has an argument of that name."""
        return any(argument.name == name for argument in schema_arguments(self.op))

    def operand_index(self, name: str) -> int | None:
        """The number among `operands` of the tensor argument `name`; None where it is absent."""
        seen = 0
        for at, argument in enumerate(schema_arguments(self.op)):
            given: Any = self.kwargs.get(argument.name)
            if argument.name not in self.kwargs and at < len(self.args):
                given = self.args[at] if not argument.kwarg_only else None
            if argument.name == name:
                return seen if isinstance(given, Meta) else None
            seen += len(instances_in(given, Meta))
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class StaticResult:
    """What an operation returns beside tensors, which shapes alone tell."""

    value: Any


READS_VALUE = StaticResult("a number that is read from a tensor")
"""In the place of what an operation returns that turns a tensor into a number."""

OP_ERRORS = (RuntimeError, IndexError, TypeError, ValueError)
"""What PyTorch raises for arguments that it does not take."""
Results = tuple[tuple[Meta | None, ...], Any]
"""What a call returns: tensors, flat, and the tree of them by number."""

SMALL = 4096
"""Of so many elements there may be zeros, which then can be written."""

_READING = frozenset(("item", "_local_scalar_dense", "equal", "is_nonzero", "allclose"))


def reads_number(op: Any) -> bool:
    """Whether an operation turns what is in tensors into a number of Python's."""
    return base_name(op) in _READING


def base_name(op: Any) -> str:
    """An operation's name without its space and overload; empty for other functions.

    >>> base_name(torch.ops.aten.add_.Tensor), base_name(torch.add)
    ('add_', '')
    """
    schema = getattr(op, "_schema", None)
    return "" if schema is None else str(schema.name.partition("::")[2])


def name_of(op: Any) -> str:
    """An operation's name without the space that it is in, a function's without its address.

    >>> name_of(torch.ops.aten.mm.default), name_of(functools.partial(torch.matmul, torch.ones(2)))
    ('mm.default', 'matmul')
    """
    while isinstance(op, functools.partial):
        op = op.func
    return str(getattr(op, "__name__", op))


def argument(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """The argument called `name` of a call, its default where it is not given."""
    for at, each in enumerate(schema_arguments(op)):
        if each.name == name:
            if name in kwargs:
                return kwargs[name]
            return args[at] if at < len(args) else each.default_value
    raise KeyError(name)


def schema_arguments(op: Any) -> Sequence[Any]:
    """The arguments of an operation's schema."""
    arguments: Sequence[Any] = op._schema.arguments
    return arguments


def instances_in(value: Any, kind: type[T]) -> list[T]:
    """What is a `kind` in an argument: itself, or those in a list of them, in order."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, list | tuple):
        return [each for inner in value for each in instances_in(inner, kind)]
    return []


def map_instances(value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """An argument with `change` applied to what is a `kind` in it, lists included."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list):  # also those of graphs, which are of a class of their own
        return [map_instances(each, kind, change) for each in value]
    if type(value) is tuple:
        return tuple(map_instances(each, kind, change) for each in value)
    return value


def map_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], kind: type | tuple[type, ...],
    change: Callable[[Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The arguments of a call with `change` applied to what is a `kind` in them."""
    placed = tuple(map_instances(each, kind, change) for each in args)
    return placed, {key: map_instances(each, kind, change) for key, each in kwargs.items()}


def fill_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], kind: type | tuple[type, ...],
    items: Iterable[Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The arguments of a call with what is a `kind` in them replaced by `items`, in order."""
    left = iter(items)
    return map_call(args, kwargs, kind, lambda _: next(left))


def meta_results(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results:
    """What a call returns, flat, and the tree of it with their numbers in the place of tensors.

    The operation runs on meta tensors: it computes shapes and nothing else; or on zeros, where
    PyTorch has no meta form of it. Raises `ShardingError` where it refuses its arguments, and
    where the shape of what it returns is not known from them.
    """
    if reads_number(op):
        return (), READS_VALUE
    try:
        return flatten_results(dry_run(op, args, kwargs, "meta"))
    except OP_ERRORS as error:
        return flatten_results(_on_zeros(op, args, kwargs, error))


def flatten_results(out: Any) -> Results:
    """Of what an operation returned the tensors' metas, flat, and the tree with their numbers."""
    found: list[Meta | None] = []

    def number(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found.append(Meta.of(value))
            return len(found) - 1
        if value is None:
            found.append(None)
            return len(found) - 1
        if isinstance(value, list | tuple):
            return type(value)(*map(number, value)) if hasattr(value, "_fields") else (
                type(value)(number(each) for each in value))  # fmt: skip
        return StaticResult(value)

    tree = number(out)
    return tuple(found), tree


def dry_run(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> Any:
    """The operation on tensors without numbers: meta ones, or zeros; one for all that is large."""

    def make(meta: Meta) -> torch.Tensor:
        if device == "meta":
            return torch.empty(meta.shape, dtype=meta.dtype, device=device)
        if math.prod(meta.shape) <= SMALL:
            return torch.zeros(meta.shape, dtype=meta.dtype)
        return torch.zeros((), dtype=meta.dtype).expand(meta.shape)

    with without_dispatch_modes(), torch._C.DisableTorchFunction():
        real, named = map_call(args, kwargs, Meta, make)
        if "device" in named:
            named["device"] = torch.device(device)
        with torch.no_grad():
            return op(*real, **named)


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Run a block unseen by what traces or fakes the operations of the code around it."""
    # Modes above dispatch are of the process, not of the thread: others' are left alone.
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        with _disable_current_modes():
            yield
        return
    modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def _on_zeros(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> Any:
    """What a call without a meta form returns, unless its shape depends on the numbers."""
    lacking, text = isinstance(error, NotImplementedError), str(error)
    dynamic = torch.Tag.dynamic_output_shape in getattr(op, "tags", ())
    if "nonzero" in text or (dynamic and (lacking or "item()" in text)):
        fail(f"fs.propagate({op})", ", ".join(map(_text, (*args, *kwargs.values()))),
             "the shape of what it returns depends on the numbers, and a layout has a shape",
             "compute with a mask and torch.where; a size argument, where it has one, fixes the "
             "shape; fs.unshard gives the whole tensor")  # fmt: skip
    if not lacking:
        _refused(op, args, kwargs, error)
    try:
        return dry_run(op, args, kwargs, "cpu")
    except OP_ERRORS as refused:
        _refused(op, args, kwargs, refused)


def _refused(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> NoReturn:
    given = ", ".join(map(_text, (*args, *kwargs.values())))
    fail(f"fs.propagate({op})", given, f"it must run on tensors of these shapes: {error}",
         "check the arguments with the same call on whole tensors")  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, Meta):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)
