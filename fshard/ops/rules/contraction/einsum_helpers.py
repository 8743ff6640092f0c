"""What generators of contractions and of batched operations share: letters, and calls on parts.

A rank's part of a loop may be empty, and a bias that every rank adds to its part of a sum would be
added many times: `Parts` runs an operation where either can happen.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from fshard.layout.spec import Spec
from fshard.ops.core.builders import is_inexact, linear_modes
from fshard.ops.core.call import Meta, OpCall, argument, map_instances
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.strategy.local_call import LocalCall, LocalRewrite, RankContext, with_argument

__all__ = [
    "Expanded", "Parts", "Pinned", "Sized", "added", "are_apart", "contracted", "dims_of_text",
    "fitted", "has_nothing", "is_widened", "letters", "named", "nil", "nothing", "trailing",
    "untouched",
]  # fmt: skip

Change = Callable[[LocalCall, RankContext], LocalCall]


# -- factors --------------------------------------------------------------------------------


def dims_of_text(text: str) -> Dims:
    """One letter for every dim.

    >>> dims_of_text("ik")
    (('i',), ('k',))
    """
    return tuple((letter,) for letter in text)


def letters(count: int, taken: Iterable[str] = "") -> str:
    """As many letters, the first of the alphabet from b on, that are not taken.

    >>> letters(2, "ck")
    'bd'
    """
    free = [each for each in string.ascii_letters[1:] + "a" if each not in taken]
    return "".join(free[:count]) if count else ""


def named(*texts: str) -> tuple[Any, ...]:
    """Operations of aten by their names, with spaces between.

    >>> named("mm bmm")[0]
    <OpOverloadPacket(op='aten.mm')>
    """
    return tuple(getattr(torch.ops.aten, name) for text in texts for name in text.split())


def trailing(text: str, ndim: int) -> Dims:
    """The factors of a tensor that broadcasts to one with the dims of `text`.

    >>> trailing("bij", 1), trailing("bij", 0)
    ((('j',),), ())
    """
    return dims_of_text(text[len(text) - ndim :])


def are_apart(call: OpCall, at: int, size: int, kernel: int) -> bool:
    """Whether windows of `kernel` along the spatial dim `at` lie one beside the other.

    Then all of a dim of `size` is read, every element by one window. Reads the arguments stride,
    padding, output_padding and dilation, of which a number or one in a list is of all dims.
    """

    def value(name: str, default: int) -> int | str:
        given = call.get(name) if call.has(name) else default
        if isinstance(given, list | tuple):
            given = given[at if len(given) > 1 else 0] if given else default
        return default if given is None else given

    padding = value("padding", 0)
    return (
        kernel > 0
        and size % kernel == 0
        and value("stride", kernel) == kernel
        and (padding in (0, "valid") or (padding == "same" and kernel == 1))
        and value("output_padding", 0) == 0
        and (value("dilation", 1) == 1 or kernel == 1)
    )


def untouched(meta: Meta) -> Dims:
    """No factors: a tensor that is needed whole."""
    return ((),) * meta.ndim


def fitted(operands: Sequence[Dims], metas: Sequence[Meta]) -> tuple[Dims, ...]:
    """The factors of operands without those along which they broadcast."""
    lengths: dict[str, int] = {}
    for dims, meta in zip(operands, metas, strict=True):
        for dim, size in zip(dims, meta.shape, strict=True):
            if len(dim) == 1 and size != 1:
                lengths[dim[0]] = size
    return tuple(
        tuple(
            () if len(dim) == 1 and size == 1 and lengths.get(dim[0], 1) != 1 else dim
            for dim, size in zip(dims, meta.shape, strict=True)
        )
        for dims, meta in zip(operands, metas, strict=True)
    )


def contracted(
    call: OpCall,
    operands: Sequence[Dims],
    result: Dims,
    *,
    addend: int | None = None,
    linear_in: Iterable[int] | None = None,
    local: Callable[..., Any] | None = None,
) -> Rule:
    """The rule of a sum of products: factors that the result lacks are summed.

    `linear_in` are the operands it is linear in, all but the addend if not given.
    """
    dims = fitted(operands, call.operands)
    seen = dict.fromkeys(f for each in dims for dim in each for f in dim)
    made = {f for dim in result for f in dim}
    places = [at for at in range(len(dims)) if at != addend] if linear_in is None else linear_in
    if call.results[0] is not None and is_widened(call.operands[0], call.results[0]):
        places = ()
    modes = linear_modes(*places) if addend is None else added(addend, places)
    if addend is not None and local is None:
        local = Parts(once=(addend,), zeros=False)
    kinds = tuple(sorted((f, "sum") for f in seen if f not in made))
    return Rule(dims, (result,), kinds, modes=modes, local=local)


def is_widened(source: Meta, made: Meta) -> bool:
    """Whether integers become numbers of another range, where their sums do not overflow alike."""
    return source.dtype != made.dtype and not is_inexact(source)


def added(addend: int, products: Iterable[int]) -> tuple[Mode, ...]:
    """Modes of a sum of an addend and of products, each linear, of the addend counted once."""
    places = tuple(products)
    both = tuple(tuple(sorted((at, addend))) for at in places)
    return linear_modes(*places, *both) + linear_modes(addend, affine=True)


# -- on one rank ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parts(LocalRewrite):
    """A local call: arguments changed, addends counted once, and zeros where a part is empty.

    Of an axis over which the first result is a sum, the ranks after the first take zeros for the
    operands `once`, unless those are unreduced there themselves. With `zeros` the operation does
    not run on operands of which this rank has nothing: its part of the loop is empty, so that its
    results are, or are sums of nothing. What is added then lies `along` that dim of the result.
    """

    once: tuple[int, ...] = ()
    changes: tuple[Change, ...] = ()
    zeros: bool = True
    along: int = -1

    def call(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext
    ) -> LocalCall | None:
        """The call with its changes, where the rank has a part and adds what there is to add."""
        parts = any(_is_later(here, at) for at in self.once) or has_nothing(here)
        parts = parts or _is_cut_off(here.results[0], here.rank)
        if parts or not all(isinstance(change, Pinned | Sized) for change in self.changes):
            return None
        return self._changed(op, args, kwargs, here)

    def _changed(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext
    ) -> LocalCall:
        call: LocalCall = op, tuple(args), dict(kwargs)
        for change in self.changes:
            call = change(call, here)
        return call

    def __call__(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext
    ) -> Any:
        """Run it on a rank."""
        args, kwargs = tuple(args), dict(kwargs)
        later = frozenset(at for at in self.once if _is_later(here, at))
        if later:
            args, kwargs = _without(args, kwargs, later)
        if _is_cut_off(here.results[0], here.rank):
            return nothing(args, kwargs, here)
        if self.zeros and has_nothing(here):
            return nothing(args, kwargs, here, dict.fromkeys(self.once, self.along))
        op, args, kwargs = self._changed(op, args, kwargs, here)
        return op(*args, **kwargs)


def _is_later(here: RankContext, place: int) -> bool:
    """Whether a rank before this one adds the operand to the first result."""
    made, given = here.results[0], here.operands[place]
    assert made is not None
    own = {axis for axis, _ in given.partition.unreduced_kinds}
    coords = made.mesh.coords(here.rank)
    return any(
        coords[axis] > 0
        for axis, kind in made.partition.unreduced_kinds
        if kind == "sum" and axis not in own
    )


def _without(
    args: Any, kwargs: Any, places: frozenset[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with zeros for some operands, to which gradients still have a way."""
    seen = iter(range(1 << 30))

    def change(x: torch.Tensor) -> torch.Tensor:
        return nil(x) if next(seen) in places else x

    placed = tuple(map_instances(each, torch.Tensor, change) for each in args)
    return placed, {key: map_instances(each, torch.Tensor, change) for key, each in kwargs.items()}


def nil(x: torch.Tensor) -> torch.Tensor:
    """Zeros in the place of a tensor, NaN and infinities included, differentiable as it is."""
    return torch.where(x.new_zeros((), dtype=torch.bool), x, 0)


def has_nothing(here: RankContext) -> bool:
    """Whether an operand that has something along a dim has nothing of it on this rank."""
    return any(_is_cut_off(spec, here.rank) for spec in here.operands)


def _is_cut_off(spec: Spec | None, rank: int) -> bool:
    return spec is not None and any(
        not mine and size for mine, size in zip(spec.local_shape(rank), spec.shape, strict=True)
    )


def nothing(
    args: Any, kwargs: Any, here: RankContext, addends: Mapping[int, int] = MappingProxyType({})
) -> list[torch.Tensor | None]:
    """Zeros for every result, with a way for gradients to every operand that wants some.

    Every rank takes part in the collectives of the backward pass, those with nothing to do too.
    To the first result are added `addends`, operands that lie along one of its dims.
    """
    given: list[torch.Tensor] = []
    for each in (*args, *kwargs.values()):
        map_instances(each, torch.Tensor, given.append)
    wanted = [nil(x).sum() for x in given if x.requires_grad]
    made: list[torch.Tensor | None] = []
    for spec in here.results:
        if spec is None:
            made.append(None)
            continue
        zeros = given[0].new_zeros(spec.local_shape(here.rank), dtype=spec.dtype)
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            for each in wanted:
                real = each.real if each.is_complex() and not spec.dtype.is_complex else each
                zeros = zeros + real.to(spec.dtype)
        made.append(zeros)
    first = made[0]
    for place, dim in addends.items():
        assert first is not None
        shape = [-1 if at == dim % first.ndim else 1 for at in range(first.ndim)]
        first = first + given[place].reshape(shape)
    return [first, *made[1:]]


@dataclass(frozen=True, slots=True)
class Pinned:
    """A change: the argument `name` has this value, which depends on the whole tensors."""

    name: str
    value: Any

    def __call__(self, call: LocalCall, here: RankContext) -> LocalCall:
        """The call with it."""
        return with_argument(*call, self.name, self.value)


@dataclass(frozen=True, slots=True)
class Sized:
    """A change: the argument `name`, a shape, becomes that of a result on the rank."""

    name: str
    result: int = 0

    def __call__(self, call: LocalCall, here: RankContext) -> LocalCall:
        """The call with it."""
        return with_argument(*call, self.name, list(here.shape(self.result)))


@dataclass(frozen=True, slots=True)
class Expanded:
    """A change: the argument `name` has the shape of a result on the rank."""

    name: str
    result: int = 0

    def __call__(self, call: LocalCall, here: RankContext) -> LocalCall:
        """The call with it."""
        x = argument(*call, self.name)
        return with_argument(*call, self.name, x.expand(here.shape(self.result)))
