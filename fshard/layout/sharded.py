"""`Sharded`, the named form of a pair `(local, spec)`, and its refusals of operations on tensors.

A pair is one value, a leaf of every tree. It is neither a tuple nor a tensor: Python's operators,
attributes of `torch.Tensor` and functions of torch on it raise `NotATensorError`, whose fix is the
same call through `fs.apply`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.overrides import resolve_name
from torch.serialization import add_safe_globals

from fshard._torch.dynamo import register_pytree_node
from fshard._torch.functorch import flattens_for_gradients
from fshard._util.errors import ShardingError, fail
from fshard._util.other_names import PAIR_NAMES, refuse_attribute
from fshard._util.text import plural, ranks_text
from fshard._util.tracebacks import boundary
from fshard.layout.mesh import Mesh, rebuild_mesh
from fshard.layout.partition_spec import rebuild_partition
from fshard.layout.spec import Spec, rebuild_spec

MAX_PRINTED_SHARDS = 16
MAX_PRINTED_LINES = 40

COMMUTATIVE = ("add", "mul", "and", "or", "xor")
REFLECTED = (*COMMUTATIVE, "sub", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift")
OPERATORS = (*REFLECTED, "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert")
"""Names of Python's operators in its special methods; `==` and `!=` are methods of the class."""
TORCH_NAMES = {
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "pos": "positive",
    "invert": "bitwise_not",
}
"""Functions of torch that have another name than the operator."""
VIEWS = ("T", "mT", "H", "mH", "real", "imag")
"""Attributes of a tensor that are tensors computed from it."""
OF_VALUES = ("item", "tolist", "numpy", "backward")
"""Methods of a tensor that need the values of all shards in this process."""
OF_LOCALS = (
    "requires_grad_", "retain_grad", "register_hook", "cpu", "cuda", "pin_memory", "share_memory_",
    "stride", "is_contiguous", "data_ptr", "element_size", "untyped_storage",
)  # fmt: skip
"""Methods of a tensor that are of its memory, device or gradient."""
AUTOGRAD_FIXES = {
    "torch.autograd.backward": "torch.autograd.backward(fs.unshard(pair))",
    "torch.autograd.grad": "torch.autograd.grad(fs.unshard(loss), pair.local); or "
                           "fs.state.value_and_grad(fn)(pair)",
}  # fmt: skip
"""Fixes for functions that `fs.apply` does not run."""


class NotATensorError(ShardingError, TypeError, AttributeError):
    """Operation of tensors on a pair; also the types of error that Python itself would raise."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sharded:
    """Pair of the part of a global tensor that this process has, and the tensor's spec.

    It unpacks as `local, spec`; any 2-tuple of the same two values is accepted in its place. It is
    one leaf of a tree. It is not a tensor: arithmetic, comparisons, indexing, `len`, `bool`,
    methods of tensors and functions of torch raise an error that names `fs.apply`. Pairs are equal
    and have equal hashes only if they are one object, as tensors have; `==` with a pair, a tensor
    or a number raises. Iteration is for unpacking; functions of torch that take the items of a pair
    for tensors are refused.

    In the trees of `torch.func.grad` and `vjp`, gradients and cotangents have the dual layout of
    the pair that they belong to, `spec.dual`.

    Attributes:
        local: a tensor under `torchrun`; in a simulation the tuple of all shards in rank order.
        spec: layout of the global tensor.

    >>> import torch
    >>> import fshard as fs
    >>> pair = fs.shard(torch.arange(4.0), fs.Spec(fs.Mesh(x=2, y=2), fs.P("x"), shape=(4,)))
    >>> pair
    Sharded f32[4@x] on Mesh(x=2, y=2)
      ranks 0-1: tensor([0., 1.])
      ranks 2-3: tensor([2., 3.])
    >>> local, spec = pair
    >>> pair.shape, pair.dtype, pair.mesh
    ((4,), torch.float32, Mesh(x=2, y=2))
    >>> pair + 1
    Traceback (most recent call last):
    fshard.layout.sharded.NotATensorError: torch.add
      given: torch.add(f32[4@x], 1)
      rule:  the operands of torch functions must be tensors, and f32[4@x] is a pair (local, spec)
      fix:   fs.apply(torch.add, pair, 1)
    """

    local: Any
    spec: Spec

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.spec.dtype

    @property
    def mesh(self) -> Mesh:
        """Devices of the layout."""
        return self.spec.mesh

    def __iter__(self) -> Iterator[Any]:
        if not torch.compiler.is_compiling():
            _check_unpacking(self, sys._getframe(1))
        return iter((self.local, self.spec))

    def __repr__(self) -> str:
        if not isinstance(self.spec, Spec):
            return f"Sharded({self.local!r}, {self.spec!r})"
        head = f"Sharded {self.spec} on {self.spec.mesh}"
        ranks = self.spec.mesh.ranks
        if not isinstance(self.local, tuple) or len(self.local) != len(ranks):
            return f"{head}\n{_labelled('local', self.local)}"
        shards = dict(zip(ranks, self.local, strict=True))
        owners = [*_replicas(self.spec).values()]
        lines = [
            _labelled(ranks_text(group), shards[group[0]]) for group in owners[:MAX_PRINTED_SHARDS]
        ]
        if sum(line.count("\n") + 1 for line in lines) > MAX_PRINTED_LINES:
            shapes = (self.spec.local_shape(group[0]) for group in owners)
            lines = [_begin(line, shape) for line, shape in zip(lines, shapes, strict=False)]
            lines.append("  all values: print(pair.local), or print(fs.unshard(pair))")
        if len(owners) > MAX_PRINTED_SHARDS:
            lines.append(f"  … {plural(len(owners) - MAX_PRINTED_SHARDS, 'more shard')}")
        return "\n".join([head, *lines])

    # -- refusals ---------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        name = resolve_name(function) or f"{function.__module__}.{function.__name__}"
        refuse(f"torch.ops.{name}" if name.startswith("aten.") else name, args, kwargs or {})

    def __eq__(self, other: object) -> Any:
        return _compare("torch.eq", self, other)

    def __ne__(self, other: object) -> Any:
        return _compare("torch.ne", self, other)

    __hash__ = object.__hash__


def refuse(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    """Raise `NotATensorError` for a call of torch's function `name` that has a pair in it."""
    pairs = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Sharded)]
    which = pairs[0].spec if pairs else "an item"
    fail(
        name,
        f"{name}({_call_text(args, kwargs, spec=True)})",
        f"the operands of torch functions must be tensors, and {which} is a pair (local, spec)",
        AUTOGRAD_FIXES.get(name, f"fs.apply({name}, {_call_text(args, kwargs)})"),
        NotATensorError,
    )


def _check_unpacking(pair: Sharded, frame: FrameType) -> None:
    """Raise `NotATensorError` if a function of torch iterates over a pair, as over tensors."""
    module = str(frame.f_globals.get("__name__", ""))
    if module.partition(".")[0] == "torch":
        function = frame.f_code.co_qualname.partition(".<locals>")[0]
        fail(
            f"{module}.{function}",
            f"a pair {pair.spec} as an iterable of tensors",
            f"the operands of torch functions must be tensors, and {pair.spec} is a pair "
            "(local, spec)",
            "fs.unshard(pair), which is differentiable; or the tensors of pair.local",
            NotATensorError,
        )


def _fail(call: str, pair: Sharded, fix: str) -> NoReturn:
    rule = f"{call} must be of a tensor, and {pair.spec} is a pair (local, spec)"
    fail(call, f"a pair {pair.spec}", rule, fix, NotATensorError)


def _call_text(args: Sequence[Any], kwargs: Mapping[str, Any], spec: bool = False) -> str:
    named = [f"{name}={_text(value, spec)}" for name, value in kwargs.items()]
    return ", ".join([*(_text(value, spec) for value in args), *named])


def _text(value: Any, spec: bool = False) -> str:
    """Return an argument as text: a pair by its spec or as `pair`, a tensor as `tensor`."""
    if isinstance(value, Sharded):
        return str(value.spec) if spec else "pair"
    if isinstance(value, list | tuple):
        items = [_text(item, spec) for item in value]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    return "tensor" if isinstance(value, torch.Tensor) else repr(value)


def _compare(name: str, pair: Sharded, other: object) -> Any:
    """Return `NotImplemented`; raise if tensors would be compared by element."""
    if isinstance(other, Number | torch.Tensor | Sharded | tuple | list):
        refuse(name, (pair, other), {})
    return NotImplemented


def _attribute(pair: Sharded, name: str) -> str:
    if name == "__qualname__":  # in the errors of torch.optim and nn.Module, by torch.typename
        return "Sharded: parameters must be tensors, pair.local; fs.state.adamw updates pairs"
    if name.startswith("_") or not hasattr(torch.Tensor, name):
        refuse_attribute(pair, "Sharded pair", name, PAIR_NAMES)
    if hasattr(Spec, name):
        _fail(f"pair.{name}", pair, f"pair.spec.{name}")
    if name in OF_VALUES:
        _fail(f"pair.{name}()", pair, f"fs.unshard(pair).{name}()")
    local = "pair.local" if isinstance(pair.local, torch.Tensor) else "pair.local[0]"
    if name in OF_LOCALS:
        _fail(f"pair.{name}()", pair, f"{local}.{name}(*args)")
    if name.endswith("_") and hasattr(torch.Tensor, name[:-1]):
        _fail(f"pair.{name}", pair, f"pair = fs.apply(torch.Tensor.{name[:-1]}, pair, *args)")
    if callable(getattr(torch.Tensor, name)):
        parameter = f"; a parameter is a local, torch.nn.Parameter({local})" * (name == "detach")
        _fail(f"pair.{name}", pair, f"fs.apply(torch.Tensor.{name}, pair, *args){parameter}")
    if name in VIEWS:
        _fail(f"pair.{name}", pair, f"fs.apply(lambda x: x.{name}, pair)")
    _fail(f"pair.{name}", pair, f"{local}.{name}")


def _contains(pair: Sharded, value: object) -> NoReturn:
    _fail(f"{_text(value, spec=True)} in pair", pair, f"{_text(value)} in fs.unshard(pair)")


def _operator(name: str) -> Callable[..., NoReturn]:
    """Return a method that refuses an operator, the function `name` of torch."""
    return lambda *operands: refuse(name, operands, {})


def _conversion(call: str, fix: str) -> Callable[..., NoReturn]:
    """Return a method that refuses a conversion of a pair to a Python value or an array."""
    return lambda pair, *_, **__: _fail(call, pair, fix)


REFUSALS = (
    {f"__{name}__": _operator(f"torch.{TORCH_NAMES.get(name, name)}") for name in OPERATORS}
    | {f"__r{name}__": _operator(f"torch.Tensor.__r{name}__") for name in REFLECTED}
    | {f"__r{name}__": _operator(f"torch.{TORCH_NAMES.get(name, name)}") for name in COMMUTATIVE}
    | {
        "__getattr__": _attribute,
        "__getitem__": _operator("torch.Tensor.__getitem__"),
        "__contains__": _contains,
        "__len__": _conversion("len(pair)", "pair.shape[0]; for its values, fs.unshard(pair)"),
        "__bool__": _conversion("bool(pair)", "bool(fs.unshard(pair)), or pair is not None"),
        "__float__": _conversion("float(pair)", "float(fs.unshard(pair))"),
        "__int__": _conversion("int(pair)", "int(fs.unshard(pair))"),
        "__array__": _conversion("np.asarray(pair)", "fs.unshard(pair).numpy()"),
    }
)
for _name, _method in REFUSALS.items():
    # Set here, so that a type checker reports these uses of a pair.
    setattr(Sharded, _name, boundary(_method))


# -- text -----------------------------------------------------------------------------


def _replicas(spec: Spec) -> dict[Any, list[int]]:
    """Return the ranks of each distinct shard: replicas share a list, partial sums do not."""
    unreduced = [axis for axis, _ in spec.partition.unreduced_kinds]
    owners: dict[Any, list[int]] = {}
    for rank in spec.mesh.ranks:
        coords = spec.mesh.coords(rank)
        key = spec.offsets(rank), spec.local_shape(rank), *map(coords.__getitem__, unreduced)
        owners.setdefault(key, []).append(rank)
    return owners


def _begin(lines: str, shape: Sequence[int]) -> str:
    """Return the first line of the text of a shard, with its shape, in 80 columns."""
    label, text = lines.partition("\n")[0].split(": ", 1)
    head = f"{label}, {' x '.join(map(str, shape))}: {text}"
    kept = head if len(head) <= 76 else head[:76].rpartition(",")[0]
    return f"{kept.rstrip(' ,')} ..."


def _labelled(label: str, value: Any) -> str:
    """Return `label: value` as lines, those after the first aligned with the value."""
    indent = " " * (len(label) + 4)
    return f"  {label}: " + repr(value).replace("\n", f"\n{indent}")


Pair = Sharded | tuple[Any, Spec]
"""Argument that is a pair, by name or as a plain 2-tuple."""


def _flatten(pair: Sharded) -> tuple[list[Any], Spec]:
    """Return the local, and the spec of what takes its place: a gradient has the dual one."""
    return [pair.local], pair.spec.dual if flattens_for_gradients() else pair.spec


register_pytree_node(Sharded, _flatten, lambda xs, spec: Sharded(next(iter(xs)), spec))
# `torch.load(weights_only=True)` reads pairs.
add_safe_globals([Sharded, rebuild_mesh, rebuild_partition, rebuild_spec, range])
