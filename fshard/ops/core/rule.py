"""`Rule`: the layouts that an operation maps to layouts, in factor notation.

A *factor* is a loop of the operation: one letter, on every dim of operands and results that it
runs along. `"ik,kj->ij"` is a matrix product: `i` and `j` pass through, `k` is reduced. A dim may
be a product of factors, major to minor: `"(ij)k->i(jk)"` reshapes. After einops, and Shardy's
sharding rules (`sdy.op_sharding_rule`), which define the kinds of factors.

A rule is correct if each factor `f` can be sharded alone: divide the loop `f` into n parts, give
each rank the shards of the operands that its part reads (an operand without `f` is replicated),
run the operation on them, then concatenate each result along its dim with `f`, or combine it by
the reduction of `f` if it has no such dim. The outcome must equal the operation on global tensors.
Several mesh axes shard several factors, or one factor several times.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.partition_spec import REDUCTIONS
from fshard.ops.core.windows import Window

Dims = tuple[tuple[str, ...], ...]
"""Factors of each dim of a tensor, major to minor; () for a dim without a factor."""
LocalFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Mode:
    """Operands that may be jointly unreduced by `kind`, and the states of the results then.

    `results` has one entry for each result: the kind by which it is unreduced, or None if it is
    invariant. A product is linear in each of its operands and has two modes of one operand; a sum
    of two tensors is linear in both jointly and has one mode of two operands.

    >>> import fshard as fs
    >>> print(fs.Mode((0, 1), "sum", ("sum",)), "|", fs.Mode((0,), "max", ("max",)))
    0+1 sum | 0 max
    """

    operands: tuple[int, ...]
    kind: str
    results: tuple[str | None, ...]

    def __str__(self) -> str:
        text = f"{'+'.join(map(str, self.operands))} {self.kind}"
        results = ", ".join(kind or "invariant" for kind in self.results)
        same = all(kind == self.kind for kind in self.results)
        return text if same else f"{text} -> {results}"


@dataclass(frozen=True, slots=True)
class Slice:
    """Factor `name` that selects elements `start:stop:step` of the factor `of`.

    It is sharded wherever `of` is: each rank keeps the selected elements of its own shard, so
    shard sizes may differ and nothing is communicated. Positions before the first element of `of`
    and after its last one (padding) belong to the first and to the last rank.
    """

    name: str
    of: str
    start: int
    stop: int
    step: int = 1

    def __len__(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def sizes(self, shard_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the number of selected elements in each shard of `of`, given the shards' sizes.

        >>> Slice("b", "a", 2, 7).sizes((3, 3, 3)), Slice("b", "a", -1, 10).sizes((3, 3, 3))
        ((1, 3, 1), (4, 3, 4))
        """
        ends = list(itertools.accumulate(shard_sizes))
        counts = [len(range(self.start, min(end, self.stop), self.step)) for end in ends[:-1]]
        return tuple(b - a for a, b in itertools.pairwise((0, *counts, len(self))))

    def __str__(self) -> str:
        step = f":{self.step}" if self.step != 1 else ""
        return f"{self.name} {self.of}[{self.start}:{self.stop}{step}]"


@dataclass(frozen=True, slots=True)
class Rule:
    """Sharding rule of one call of an operation, built by `fs.rule` from text.

    Args:
        operands: Factors of the dims of each operand, in order, tensors within lists included.
        results: Factors of the dims of each result; None for a result that is not a tensor.
        reductions: Pairs of a factor that some result lacks and its reduction (`"sum"`, `"avg"`,
            `"max"`, `"min"`, `"product"`). A lacking factor without one must stay unsharded.
        unsharded: Factors that must stay unsharded.
        permuted: Factors that must stay unsharded because elements move along them.
        modes: Operands that may be unreduced, and the states of the results then.
        no_grad: Factors that may be sharded, and modes that pass, only if no gradient is
            requested: gradients of the shards are not shards of the gradient.
        local: Function that runs the operation on one rank, if it differs in more than shapes.
        sizes: Lengths of factors that are not a dim of any tensor.
        unread: Operands of which only shape and dtype matter; they may have any layout.
        slices: Factors that are sharded wherever another factor is: slices of it, and windows,
            which also extend the tensors that have the other factor.
        added: Operands that are added to a sum over factors that they lack. Where such a factor is
            sharded they are unreduced: the value on the first rank, zeros on others.

    Kinds of factors are those of Shardy's `sdy.op_sharding_rule`.

    >>> import fshard as fs
    >>> fs.rule("ik,kj->ij").factors
    ('i', 'k', 'j')
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims | None, ...]
    reductions: tuple[tuple[str, str], ...] = ()
    unsharded: frozenset[str] = frozenset()
    permuted: frozenset[str] = frozenset()
    modes: tuple[Mode, ...] = ()
    no_grad: frozenset[str | Mode] = frozenset()
    local: LocalFunction | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    unread: frozenset[int] = frozenset()
    slices: tuple[Slice | Window, ...] = ()
    added: frozenset[int] = frozenset()

    @property
    def factors(self) -> tuple[str, ...]:
        """Distinct factors in the order of the text, without slices."""
        tensors = (*self.operands, *(dims for dims in self.results if dims is not None))
        sliced = {part.name for part in self.slices}
        factors = dict.fromkeys(f for dims in tensors for dim in dims for f in dim)
        return tuple(f for f in factors if f not in sliced)

    @property
    def windows(self) -> dict[str, Window]:
        """Windows by the factor that they read; tensors with that factor are extended."""
        return {part.of: part for part in self.slices if isinstance(part, Window)}

    def with_slices(self, factor: str) -> frozenset[str]:
        """Return a factor and its slices, which are sharded together."""
        return frozenset((factor, *(part.name for part in self.slices if part.of == factor)))

    def kind(self, factor: str) -> str:
        """Return a factor's kind: `pass-through`, `unsharded`, `permuted` or a reduction.

        Args:
            factor: A factor of this rule.

        >>> import fshard as fs
        >>> matmul = fs.rule("ik,kj->ij")
        >>> matmul.kind("i"), matmul.kind("k")
        ('pass-through', 'sum')
        """
        if factor in self.unsharded:
            return "unsharded"
        if factor in self.permuted:
            return "permuted"
        names = self.with_slices(factor)
        if all(dims is None or any(_has(dims, f) for f in names) for dims in self.results):
            return "pass-through"
        return dict(self.reductions).get(factor, "unsharded")

    def __str__(self) -> str:
        text = ",".join(map(_dims_text, self.operands)) + "->"
        text += ",".join("none" if dims is None else _dims_text(dims) for dims in self.results)
        kinds = [(f, self.kind(f)) for f in self.factors]
        notes = [f"{f} {kind}" for f, kind in kinds if kind != "pass-through"]
        notes += [*map(str, self.slices), *(f"unreduced {mode}" for mode in self.modes)]
        return text + ("  {" + "; ".join(notes) + "}" if notes else "")


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
    local: LocalFunction | None = None,
) -> Rule:
    """Build a sharding rule from its text, such as `"ik,kj->ij"`.

    Args:
        text: Operands, an arrow, results; tensors are separated by commas. A letter is a factor,
            `(ij)` a dim that is a product of factors, major to minor, and `1` a dim without a
            factor (of size 1, or one that must stay unsharded). Nothing after the arrow is one
            result without dims.
        reduce: Reduction of the factors that a result lacks (`"sum"`, `"avg"`, `"max"`, `"min"`,
            `"product"`): one for all, or a mapping from factor to reduction.
        unsharded: Factors that must stay unsharded.
        permuted: Factors that must stay unsharded because elements move along them.
        linear: Indices of the operands that the operation is linear in: an int for an operand
            alone, a tuple for several jointly.
        modes: Further modes of unreduced operands.
        no_grad: Factors that may be sharded only if no gradient is requested.
        local: Function that runs the operation on one rank, if it differs in more than shapes.

    Returns:
        The rule; `fs.register_rule(op)(rule)` registers it.

    Raises:
        ShardingError: If the text or a factor, reduction or operand is invalid; all problems are
            listed.

    After the sharding rules of Shardy (`sdy.op_sharding_rule`) and the notation of einops.

    >>> import fshard as fs
    >>> print(fs.rule("ik,kj->ij", linear=(0, 1)))
    ik,kj->ij  {k sum; unreduced 0 sum; unreduced 0 avg; unreduced 1 sum; unreduced 1 avg}
    >>> fs.rule("(ij)k->i(jk)").operands
    ((('i', 'j'), ('k',)),)
    """
    where = f"fs.rule({text!r})"
    if not isinstance(text, str):
        fail("fs.rule", f"a {type(text).__name__}", "a rule must be a text", '"ik,kj->ij", say')
    problems: list[Problem] = []
    left, arrow, right = text.replace(" ", "").partition("->")
    if not arrow:
        problems.append(Problem(text, "a rule must have an arrow between operands and results",
                                '"ik,kj->ij", say'))  # fmt: skip
    operands = tuple(_parse(tensor, problems) for tensor in left.split(",")) if left else ()
    results = tuple(_parse(tensor, problems) for tensor in right.split(","))
    raise_if(where, problems)
    factors = dict.fromkeys(f for dims in (*operands, *results) for dim in dims for f in dim)
    lacking = [f for f in factors if any(not _has(dims, f) for dims in results)]
    kinds = dict.fromkeys(lacking, reduce) if isinstance(reduce, str) else dict(reduce)
    groups = [(group,) if isinstance(group, int) else tuple(group) for group in linear]
    all_modes = tuple(modes) + tuple(
        Mode(group, kind, (kind,) * len(results)) for group in groups for kind in ("sum", "avg")
    )
    mentioned = (*unsharded, *permuted, *no_grad)
    problems += _problems(factors, len(operands), kinds, mentioned, all_modes)
    raise_if(where, problems)
    return Rule(operands, results, tuple(sorted(kinds.items())), frozenset(unsharded),
                frozenset(permuted), all_modes, frozenset(no_grad), local)  # fmt: skip


def _parse(text: str, problems: list[Problem]) -> Dims:
    tokens = re.findall(r"\(([A-Za-z1]*)\)|([A-Za-z1])|(.)", text)
    dims: list[tuple[str, ...]] = []
    for group, letter, invalid in tokens:
        if invalid:
            problems.append(Problem(f"{invalid!r} in {text!r}",
                "a dim must be a letter, 1, or letters in parentheses",
                '"(ij)k->i(jk)", say'))  # fmt: skip
        dims.append(tuple(f for f in (letter or group) if f != "1"))
    factors = [f for dim in dims for f in dim]
    problems += [
        Problem(f"factor {f!r} {factors.count(f)} times in {text!r}",
                "a factor must be on at most one dim of a tensor",
                "give the second one another letter")
        for f in dict.fromkeys(factors) if factors.count(f) > 1
    ]  # fmt: skip
    return tuple(dims)


def _problems(
    factors: Mapping[str, object],
    operand_count: int,
    kinds: Mapping[str, str],
    mentioned: Iterable[str],
    modes: Iterable[Mode],
) -> list[Problem]:
    listed = ", ".join(factors) or "none"
    problems = [
        Problem(f"factor {f!r}", f"a factor must be one of {listed}", "name one of them")
        for f in dict.fromkeys((*mentioned, *kinds)) if f not in factors
    ]  # fmt: skip
    problems += [
        Problem(f"reduce {f}={kind!r}", f"a reduction must be one of {', '.join(REDUCTIONS)}",
                "reduce='sum', say")
        for f, kind in kinds.items() if kind not in REDUCTIONS
    ]  # fmt: skip
    problems += [
        Problem(f"operand {index}", f"an operand must be in 0..{operand_count - 1}",
                "name one of them")
        for index in dict.fromkeys(index for mode in modes for index in mode.operands)
        if not 0 <= index < operand_count
    ]  # fmt: skip
    return problems
