"""`Rule`: how an operation acts on layouts, in factor notation.

A *factor* is a loop of the operation: one letter, on every dim of operands and results that it
runs along. `"ik,kj->ij"` is a matrix product: `i` and `j` pass through, `k` is reduced. A dim may
be a product of factors, major to minor: `"(ij)k->i(jk)"` reshapes. After einops, and Shardy's
sharding rules (`sdy.op_sharding_rule`), from which the kinds of factors are.

What makes a rule right: cut the loop `f` in n parts, give each rank the parts of the operands
that its part of the loop reads (whole operands where `f` does not occur), run the same operation
there, and put the results together - one after the other along the dims that have `f`, by `f`'s
reduction where a result has it not. That must give the result of the whole. It is asked of every
factor alone: several mesh axes cut several factors, or one factor several times.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fshard._util.errors import Problem, raise_if
from fshard.layout.partition_spec import REDUCTIONS

__all__ = ["Dims", "Mode", "Rule", "Slice", "rule"]

Dims = tuple[tuple[str, ...], ...]
"""Of every dim its factors, major to minor; none for a dim that no factor runs along."""
Local = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Mode:
    """Operands that may be unreduced together, by `kind`, and what that makes of the results.

    `results` has one kind for each: that by which it is then unreduced, or None where it is the
    same on every rank. A product is linear in each of its operands: two modes of one operand. A
    sum of two tensors is linear in both together: one mode of two.
    """

    operands: tuple[int, ...]
    kind: str
    results: tuple[str | None, ...]

    def __str__(self) -> str:
        places = "+".join(map(str, self.operands))
        made = ", ".join(each or "invariant" for each in self.results)
        same = all(each == self.kind for each in self.results)
        return f"{places} {self.kind}" if same else f"{places} {self.kind} -> {made}"


@dataclass(frozen=True, slots=True)
class Slice:
    """A factor `name` that is elements of another: `start`, `start + step`, ... up to `stop`.

    It is cut where that one is: every rank has of the slice what it has of the whole, which may be
    another number on each, and nothing is sent. Places before the first element of `of` and after
    its last one, those of a padding, are the first and the last rank's.
    """

    name: str
    of: str
    start: int
    stop: int
    step: int = 1

    def __len__(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def sizes(self, parts: Sequence[int]) -> tuple[int, ...]:
        """How many of the elements lie in each of the parts, by the sizes of those.

        >>> Slice("b", "a", 2, 7).sizes((3, 3, 3)), Slice("b", "a", -1, 10).sizes((3, 3, 3))
        ((1, 3, 1), (4, 3, 4))
        """
        ends = list(itertools.accumulate(parts))
        places = range(self.start, self.stop, self.step)
        below = [len(range(self.start, min(end, self.stop), self.step)) for end in ends[:-1]]
        return tuple(b - a for a, b in itertools.pairwise((0, *below, len(places))))

    def __str__(self) -> str:
        step = f":{self.step}" if self.step != 1 else ""
        return f"{self.name} {self.of}[{self.start}:{self.stop}{step}]"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one call of an operation acts on layouts; made by `fs.rule`.

    `operands` are its tensors in order, those inside of lists included; `results` the tensors that
    it returns, None where it returns none. `reductions` gives factors that a result lacks their
    kind; one that has none there is needed whole, as are those in `whole` and `permuted` (kept
    apart for who reads it: the latter only move elements along the dim). `modes` are the
    unreduced operands it takes. `local` runs the operation on one rank where more than shapes
    changes there; `grad` are factors that can be cut, and modes that pass, only where no gradient
    is asked for, since the pieces' gradients are not the gradient's pieces. `sizes` are lengths of
    factors that the tensors' dims do not tell; `unread` operands give their dtype alone and may lie
    as they will; `slices` are factors of results that are cut as another is.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims | None, ...]
    reductions: tuple[tuple[str, str], ...] = ()
    unsharded: frozenset[str] = frozenset()
    permuted: frozenset[str] = frozenset()
    modes: tuple[Mode, ...] = ()
    no_grad: frozenset[str | Mode] = frozenset()
    local: Local | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    unread: frozenset[int] = frozenset()
    slices: tuple[Slice, ...] = ()

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor once, in the order of the text; those that are slices are none."""
        sides = (*self.operands, *(dims for dims in self.results if dims is not None))
        sliced = {each.name for each in self.slices}
        found = dict.fromkeys(f for dims in sides for dim in dims for f in dim)
        return tuple(f for f in found if f not in sliced)

    def as_cut(self, factor: str) -> frozenset[str]:
        """A factor and its slices, which are cut with it."""
        return frozenset((factor, *(each.name for each in self.slices if each.of == factor)))

    def kind(self, factor: str) -> str:
        """What happens to a factor: pass-through, a reduction, whole (needed), or permuted.

        >>> matmul = rule("ik,kj->ij")
        >>> matmul.kind("i"), matmul.kind("k")
        ('pass-through', 'sum')
        """
        if factor in self.unsharded:
            return "unsharded"
        if factor in self.permuted:
            return "permuted"
        cut = self.as_cut(factor)
        if all(dims is None or any(_has(dims, f) for f in cut) for dims in self.results):
            return "pass-through"
        return dict(self.reductions).get(factor, "unsharded")

    def __str__(self) -> str:
        text = ",".join(map(_dims_text, self.operands)) + "->"
        text += ",".join("none" if dims is None else _dims_text(dims) for dims in self.results)
        kinds = [(f, self.kind(f)) for f in self.factors]
        told = [f"{f} {kind}" for f, kind in kinds if kind != "pass-through"]
        told += map(str, self.slices)
        modes = [f"unreduced {mode}" for mode in self.modes]
        return text + ("  {" + "; ".join((*told, *modes)) + "}" if told or modes else "")


def _has(dims: Dims, factor: str) -> bool:
    return any(factor in dim for dim in dims)


def _dims_text(dims: Dims) -> str:
    if any(len(f) > 1 for dim in dims for f in dim):
        return " ".join(f"({' '.join(dim)})" if len(dim) != 1 else dim[0] for dim in dims)
    return "".join(dim[0] if len(dim) == 1 else f"({''.join(dim)})" if dim else "1" for dim in dims)


def rule(
    text: str,
    *,
    reduce: str | Mapping[str, str] = "sum",
    unsharded: Iterable[str] = (),
    permuted: Iterable[str] = (),
    linear: Iterable[int | Sequence[int]] = (),
    modes: Iterable[Mode] = (),
    no_grad: Iterable[str] = (),
    local: Local | None = None,
) -> Rule:
    """A sharding rule from its text: `"ik,kj->ij"`.

    Letters are factors, `1` a dim that no factor runs along (of size 1, or one that must be
    whole), `(ij)` a dim that is a product of factors; operands before the arrow, results after
    it; nothing after it is a result of no dims. `reduce` is the reduction of factors that results
    lack: one of `sum`, `avg`, `max`, `min`, `product` for all, or a mapping from factor. `linear`
    are the operands that the operation is linear in: numbers for each alone, tuples for several
    together. For the rest see `Rule`.

    Raises `ShardingError`, listing everything that is wrong.

    >>> print(rule("ik,kj->ij", linear=(0, 1)))
    ik,kj->ij  {k sum; unreduced 0 sum; unreduced 0 avg; unreduced 1 sum; unreduced 1 avg}
    >>> rule("(ij)k->i(jk)").operands
    ((('i', 'j'), ('k',)),)
    """
    where = f"fs.rule({text!r})"
    problems: list[Problem] = []
    left, arrow, right = text.replace(" ", "").partition("->")
    if not arrow:
        problems.append(Problem(text, "a rule has an arrow between operands and results",
                                '"ik,kj->ij", say'))  # fmt: skip
    operands = tuple(_parse(each, problems) for each in left.split(",")) if left else ()
    results = tuple(_parse(each, problems) for each in right.split(","))
    raise_if(where, problems)
    made = dict.fromkeys(f for dims in (*operands, *results) for dim in dims for f in dim)
    lacking = [f for f in made if any(not _has(dims, f) for dims in results)]
    kinds = dict.fromkeys(lacking, reduce) if isinstance(reduce, str) else dict(reduce)
    together = [(each,) if isinstance(each, int) else tuple(each) for each in linear]
    given = tuple(modes) + tuple(
        Mode(places, kind, (kind,) * len(results)) for places in together for kind in ("sum", "avg")
    )
    problems += _problems(made, len(operands), kinds, (*unsharded, *permuted, *no_grad), given)
    raise_if(where, problems)
    return Rule(operands, results, tuple(sorted(kinds.items())), frozenset(unsharded),
                frozenset(permuted), given, frozenset(no_grad), local)  # fmt: skip


def _parse(text: str, problems: list[Problem]) -> Dims:
    tokens = re.findall(r"\(([A-Za-z1]*)\)|([A-Za-z1])|(.)", text)
    dims: list[tuple[str, ...]] = []
    for group, letter, wrong in tokens:
        if wrong:
            problems.append(Problem(f"{wrong!r} in {text!r}",
                "a dim is a letter, 1, or letters in parentheses",
                '"(ij)k->i(jk)", say'))  # fmt: skip
        dims.append(tuple(f for f in (letter or group) if f != "1"))
    named = [f for dim in dims for f in dim]
    problems += [
        Problem(f"factor {f!r} {named.count(f)} times in {text!r}",
                "a factor is on at most one dim of a tensor", "give the second one another letter")
        for f in dict.fromkeys(named) if named.count(f) > 1
    ]  # fmt: skip
    return tuple(dims)


def _problems(
    made: Mapping[str, object],
    operands: int,
    kinds: Mapping[str, str],
    named: Iterable[str],
    modes: Iterable[Mode],
) -> list[Problem]:
    there = ", ".join(made) or "none"
    problems = [
        Problem(f"factor {f!r}", f"the factors of this rule are {there}", "name one of them")
        for f in dict.fromkeys((*named, *kinds)) if f not in made
    ]  # fmt: skip
    problems += [
        Problem(f"reduce {f}={kind!r}", f"a reduction is one of {', '.join(REDUCTIONS)}",
                "reduce='sum', say")
        for f, kind in kinds.items() if kind not in REDUCTIONS
    ]  # fmt: skip
    problems += [
        Problem(f"operand {place}", f"the rule has operands 0..{operands - 1}", "name one of them")
        for place in dict.fromkeys(place for mode in modes for place in mode.operands)
        if not 0 <= place < operands
    ]  # fmt: skip
    return problems
