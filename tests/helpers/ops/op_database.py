"""PyTorch's operator database as cases for layouts: samples, their calls, and what became of them.

A *case* is one sample of one `OpInfo`: a function of tensors alone, and the calls of operations
that PyTorch makes of it before it decomposes any (`make_fx` with `pre_dispatch=True`). Every case
goes through `apply`, call by call, on many layouts of its tensors (`COLUMNS`), and is judged
against the same function on whole tensors: values, and gradients where PyTorch has them.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import fshard as fs
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Sharded, Spec
from fshard.layout.tree import is_pair
from fshard.layout.validation import state_problems
from fshard.partition.apply import apply
from fshard.partition.partition import partition
from tests.helpers.ops.op_checks import lie

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

__all__ = [
    "COLUMNS", "Case", "Column", "Outcome", "calls_of", "case_of", "cases", "layouts", "named",
    "op_db", "try_layout",
]  # fmt: skip

UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
             "new_empty_strided", "resize_", "resize_as_"}  # fmt: skip
"""Operations whose results are whatever was in memory."""
EXACT = {"hash_tensor", "eq", "equal"}
"""Operations that show the last bit of a sum: not tried on addends."""
SEEDS = range(4)
"""What is the same with so many seeds draws nothing."""
LOOKED_AT, LARGEST = 24, 50_000
"""Samples of an OpInfo that are looked at, and elements of a sample that is taken."""


@dataclass(frozen=True)
class Case:
    """One sample of an OpInfo: `function` of `tensors`, and its `expected` results, flat.

    `graph` has its calls; where it cannot be traced, since numbers come out, the one operation of
    its name is the call, and `untraced` says why. `wanted` says which tensors have gradients that
    are judged, `reason` why the results cannot be.
    """

    name: str
    number: int
    function: Callable[..., Any] = field(repr=False)
    tensors: tuple[torch.Tensor, ...]
    expected: tuple[Any, ...] = field(repr=False, default=())
    graph: GraphModule | None = field(repr=False, default=None)
    wanted: tuple[bool, ...] = ()
    reason: str = ""
    untraced: str = ""


def named(op: Any) -> str:
    """The name of an OpInfo with its variant."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def cases(op: Any, count: int, dtype: torch.dtype | None = None) -> list[Case]:
    """Up to `count` samples of an OpInfo: of every shape one first, and what can be cut before.

    Of a dtype if it has that one; without, of float64, or the first that it has.
    """
    dtype = _dtype(op) if dtype is None else dtype
    if dtype is None or not op.supports_dtype(dtype, "cpu"):
        return []
    try:
        wants = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        samples = op.sample_inputs("cpu", dtype, requires_grad=wants)
        found = list(itertools.islice(samples, LOOKED_AT))
        if hasattr(samples, "close"):
            # One that is collected while a graph is traced restores the mode of gradients there.
            samples.close()
    except Exception:
        return []
    by_shapes: dict[Any, list[Any]] = {}
    for sample in found:
        leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        given = [each for each in leaves if isinstance(each, torch.Tensor)]
        if given and sum(each.numel() for each in given) <= LARGEST:
            by_shapes.setdefault(tuple(tuple(each.shape) for each in given), []).append(sample)
    ordered = sorted(by_shapes.items(), key=lambda item: not _can_be_cut(item[0]))
    rounds = itertools.zip_longest(*(alike for _, alike in ordered))
    taken = [sample for each in rounds for sample in each if sample is not None][:count]
    return [_case(op, dtype, at, sample) for at, sample in enumerate(taken)]


def _dtype(op: Any) -> torch.dtype | None:
    if op.supports_dtype(torch.float64, "cpu"):
        return torch.float64
    return min(op.supported_dtypes("cpu"), key=str, default=None)


def _can_be_cut(shapes: Sequence[Sequence[int]]) -> bool:
    return any(size > 1 for size in shapes[0]) if shapes else False


def _case(op: Any, dtype: torch.dtype, number: int, sample: Any) -> Case:
    leaves, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    given = [each for each in leaves if isinstance(each, torch.Tensor)]
    tensors = tuple(each.detach() for each in given)

    def function(given: Sequence[Any], run: Callable[..., Any] = op) -> Any:
        left = iter(given)
        placed = [next(left) if isinstance(each, torch.Tensor) else each for each in leaves]
        first, args, kwargs = pytree.tree_unflatten(placed, tree)
        return run(first, *args, **kwargs)

    made = Case(named(op), number, function, tensors)
    if op.name in UNDEFINED:
        return _with(made, reason="what it returns is undefined")
    if any(each.layout != torch.strided for each in tensors):
        return _with(made, reason="sparse tensors")
    try:
        expected, *again = (_seeded(function, tensors, seed) for seed in SEEDS)
    except Exception as error:
        return _with(made, reason=f"does not run: {_first_line(error)}")
    if any(differ(*both) for each in again for both in zip(expected, each, strict=True)):
        return _with(made, reason="random")
    if _is_of_a_device(function, tensors, expected):
        return _with(made, reason="of another shape or dtype on another device")
    made = _with(made, expected=tuple(expected), wanted=tuple(x.requires_grad for x in given))
    try:
        return _with(made, graph=_traced(function, tensors))
    except Exception as error:
        return _with(made, untraced=_first_line(error))


def case_of(name: str, function: Callable[..., Any], *tensors: torch.Tensor) -> Case:
    """A case of one's own: a function of tensors."""
    run = lambda given: function(*given)  # noqa: E731
    expected = tuple(flat(run([each.clone() for each in tensors])))
    wanted = tuple(map(_inexact, tensors))
    return Case(name, 0, run, tensors, expected, _traced(run, tensors), wanted)


def _with(case: Case, **changes: Any) -> Case:
    return Case(**{**case.__dict__, **changes})


def _seeded(function: Any, tensors: Sequence[torch.Tensor], seed: int) -> list[Any]:
    # Some OpInfos of what draws set a seed of their own, so as to seem not to.
    with torch.random.fork_rng(devices=()), mock.patch("torch.manual_seed"):
        torch.default_generator.manual_seed(seed)
        return flat(function([each.clone() for each in tensors]))


def _is_of_a_device(function: Any, tensors: Sequence[torch.Tensor], found: Sequence[Any]) -> bool:
    """Whether a kernel returns what PyTorch's meta form does not: no saved statistics, or others.

    fshard goes by the meta form, which is that of GPUs.
    """
    try:
        with torch.no_grad():
            meta = flat(function([each.to("meta") for each in tensors]))
    except Exception:
        return False
    return any(
        isinstance(x, torch.Tensor)
        and isinstance(y, torch.Tensor)
        and (x.shape, x.dtype) != (y.shape, y.dtype)
        for x, y in zip(found, meta, strict=False)
    )


def _traced(function: Any, tensors: Sequence[torch.Tensor]) -> GraphModule:
    copies = [each.clone() for each in tensors]
    made: GraphModule = make_fx(lambda *given: function(given), pre_dispatch=True)(*copies)
    return made


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _inexact(x: torch.Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


# -- the calls of a case ------------------------------------------------------------------


class Unsupported(Exception):
    """A graph that these tests cannot walk."""


def walk(graph: GraphModule, given: Sequence[Any], run: Callable[[Any, Any, Any], Any]) -> Any:
    """The result of a graph with `run(op, args, kwargs)` for every call of an operation."""
    left, values = iter(given), dict[Node, Any]()
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        for node in graph.graph.nodes:
            args, kwargs = _filled(node.args, values), _filled(node.kwargs, values)
            if node.op == "placeholder":
                values[node] = next(left)
            elif node.op == "get_attr":
                values[node] = getattr(graph, node.target)
            elif node.op == "output":
                return args[0]
            elif isinstance(node.target, OpOverload):
                values[node] = run(node.target, args, kwargs)
                for written in _written(node):
                    values[written] = values[node]
            else:
                values[node] = node.target(*args, **kwargs)
    raise AssertionError("a graph ends with its output")


def _filled(value: Any, values: dict[Node, Any]) -> Any:
    if isinstance(value, Node):
        return values[value]
    if isinstance(value, list):
        return [_filled(each, values) for each in value]
    if isinstance(value, tuple):
        return tuple(_filled(each, values) for each in value)
    if isinstance(value, dict):
        return {key: _filled(each, values) for key, each in value.items()}
    return value


def _written(node: Node) -> list[Node]:
    """The tensors that a call writes: one, that shares its memory with no other."""
    schema = node.target._schema  # type: ignore[union-attr]
    if not schema.is_mutable:
        return []
    places = [at for at, each in enumerate(schema.arguments)
              if each.alias_info is not None and each.alias_info.is_write]  # fmt: skip
    written = [node.args[at] for at in places if at < len(node.args)]
    found = [each for each in written if isinstance(each, Node) and _used_after(each, node)]
    shares = any(
        isinstance(each.target, OpOverload)
        and any(given.alias_info is not None for given in each.target._schema.returns)
        for each in found
    )
    if len(found) > 1 or shares:
        raise Unsupported(f"{node.target} writes to several tensors, or to a view")
    return found


def _used_after(value: Node, node: Node) -> bool:
    order = list(node.graph.nodes)
    return any(order.index(user) > order.index(node) for user in value.users)


def calls_of(case: Case) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The calls of a case on its whole tensors: operation, arguments and keyword arguments."""
    found = []

    def run(op: Any, args: Any, kwargs: Any) -> Any:
        found.append((op, args, kwargs))
        return op(*args, **kwargs)

    if case.graph is not None:
        walk(case.graph, [each.clone() for each in case.tensors], run)
    return found


@lru_cache(maxsize=8)
def _at_once(function: Callable[..., Any], mesh: Mesh) -> Any:
    return partition(lambda *given: function(given), mesh=mesh)


def _single(name: str) -> Any:
    """The operation, or the function of PyTorch's, that has the name of an OpInfo."""
    if name.startswith("nn.functional."):
        return getattr(torch.nn.functional, name.removeprefix("nn.functional."), None)
    return getattr(torch.ops.aten, name, None)


def on_pairs(case: Case, pairs: Sequence[Any], *, at_once: bool = False) -> list[Any]:
    """The results of a case on pairs as whole tensors: call by call, or by `fs.partition`."""

    def run(op: Any, args: Any, kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs), is_leaf=is_pair)
        if not any(is_pair(each) for each in given):
            return op(*args, **kwargs)
        return apply(op, *args, mode="auto", **kwargs)

    single = _single(case.name)
    if at_once:
        made = _at_once(case.function, pairs[0].spec.mesh)(*pairs)
    elif case.graph is not None:
        made = walk(case.graph, pairs, run)
    elif single is not None:
        made = case.function(pairs, lambda *args, **kwargs: run(single, args, kwargs))
    else:
        raise Unsupported(case.untraced)
    out = pytree.tree_leaves(made, is_leaf=is_pair)
    return [fs.unshard(each) if is_pair(each) else each for each in out]


# -- the layouts --------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A kind of layouts: on which mesh, and how many of a case are tried.

    `states` are those that a tensor may be in, all tensors whole aside; `foreign` are layouts that
    DTensor has not.
    """

    name: str
    mesh: Mesh
    limit: int
    states: tuple[str, ...]
    foreign: bool = False


COLUMNS = (
    Column("replicate, 4 ranks", Mesh(x=4), 1, ()),
    Column("even, 4 ranks", Mesh(x=4), 12, ("even",)),
    Column("uneven, 3 ranks", Mesh(x=3), 12, ("chunks",)),
    Column("empty and one, 3 ranks", Mesh(x=3), 6, ("skewed",), foreign=True),
    Column("unreduced, 4 ranks", Mesh(x=4), 6, ("unreduced",)),
    Column("reduced, 4 ranks", Mesh(x=4), 3, ("reduced", "even"), foreign=True),
    Column("two axes, 2x2 ranks", Mesh(x=2, y=2), 8, ("chunks", "sum")),
)
WHOLE = PartitionSpec()
KINDS = ("sum", "max", "avg", "min")


def layouts(case: Case, column: Column) -> list[tuple[Spec, ...]]:
    """The layouts of a column's kind that a case is tried on; none if it has none such."""
    if not column.states:
        return [tuple(_whole(column, x) for x in case.tensors)]
    if case.name in EXACT and {"unreduced", "sum"} & {*column.states}:
        return []
    draw = random.Random(f"{case.name} {case.number} {column.name}")
    axes, n = column.mesh.axes, len(case.tensors)
    options = [_options(each, column, axis) for axis in axes for each in case.tensors]
    found = list(_choices(options, column.limit * len(axes), draw))
    if len(axes) > 1:
        draw.shuffle(found)
        found = [_joined(each[:n], each[n:], case.tensors) for each in found]
    return found[: column.limit]


def _whole(column: Column, x: torch.Tensor, p: PartitionSpec = WHOLE, **more: Any) -> Spec:
    return Spec(column.mesh, p, shape=x.shape, dtype=x.dtype, **more)


def _options(x: torch.Tensor, column: Column, axis: str = "x") -> list[Spec]:
    """How one tensor may lie on an axis: whole first, then in the states of the column."""
    n, made = column.mesh.shape[axis], [_whole(column, x)]
    for dim, size in enumerate(x.shape):
        partition = PartitionSpec(*[None] * dim, axis)
        if "skewed" in column.states:
            last = max(size - 1, 0)
            sizes = {dim: (0,) * (n - 2) + (size - last, last)}
            made.append(_whole(column, x, partition, sizes=sizes))
        elif "chunks" in column.states or ("even" in column.states and size and size % n == 0):
            made.append(_whole(column, x, partition, uneven="chunk"))
    kinds = {"unreduced": KINDS, "sum": KINDS[:1]}
    made += [
        _whole(column, x, PartitionSpec(unreduced={axis: kind}))
        for state in column.states
        for kind in kinds.get(state, ())
        if _reduces(kind, x.dtype)
    ]
    if "reduced" in column.states and _inexact(x):
        made.append(_whole(column, x, PartitionSpec(reduced={axis})))
    return made


def _reduces(kind: str, dtype: torch.dtype) -> bool:
    """Whether addends of a dtype exist, and PyTorch adds them on a CPU: not floats of 8 bits.

    Averages of those of 16 bits are rounded: they are not told from wrong ones.
    """
    small = dtype.is_floating_point and (
        dtype.itemsize == 1 or (kind, dtype.itemsize) == ("avg", 2)
    )
    return not small and not state_problems((("x", kind),), (), dtype)


def _choices(
    options: Sequence[Sequence[Spec]], limit: int, draw: random.Random
) -> Iterator[tuple[Spec, ...]]:
    """Choices of one option for every tensor, not all whole: all, or the telling ones and some."""
    whole = tuple(each[0] for each in options)
    if math.prod(map(len, options)) <= limit + 1:
        yield from itertools.islice(itertools.product(*options), 1, None)
        return
    seen = {whole}
    most = max(map(len, options))
    together = [tuple(each[min(at, len(each) - 1)] for each in options) for at in range(1, most)]
    from_last = [tuple(each[-at] if at < len(each) else each[0] for each in options)
                 for at in range(1, most)]  # fmt: skip
    alone = [(*whole[:at], option, *whole[at + 1 :])
             for at, each in enumerate(options) for option in each[1:]]  # fmt: skip
    some = (tuple(draw.choice(each) for each in options) for _ in range(4 * limit))
    for choice in itertools.chain(together, from_last, alone, some):
        if choice not in seen:
            seen.add(choice)
            yield choice


def _joined(
    one: Sequence[Spec], other: Sequence[Spec], tensors: Sequence[torch.Tensor]
) -> tuple[Spec, ...]:
    """Layouts on two axes from layouts on each."""
    found = []
    for a, b, x in zip(one, other, tensors, strict=True):
        dims = [(*a.partition.dims[d], *b.partition.dims[d]) for d in range(x.ndim)]
        unreduced = {**a.partition.unreduced, **b.partition.unreduced}
        p = PartitionSpec(*dims, unreduced=unreduced)
        found.append(Spec(a.mesh, p, shape=x.shape, dtype=x.dtype, uneven="chunk"))
    return tuple(found)


# -- one case on one layout ---------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of a case on a layout: `word` is ok, raises or wrong; `text` says more."""

    word: str
    text: str = ""


def try_layout(
    case: Case, specs: Sequence[Spec], *, gradients: bool = True, at_once: bool = False
) -> Outcome:
    """Run a case on pairs that lie as `specs`, and judge its values, and gradients if asked."""
    where = f"{case.name} #{case.number} [{', '.join(map(str, specs))}]"
    try:
        with torch.no_grad():
            places = enumerate(zip(case.tensors, specs, strict=True))
            pairs = [Sharded(lie(x, spec, at), spec) for at, (x, spec) in places]
            wrong = judged(on_pairs(case, pairs, at_once=at_once), case.expected)
        if not wrong and gradients and any(case.wanted):
            wrong = _gradients(case, specs, at_once)
    except TimeoutError:
        raise
    except Exception as error:
        return Outcome("raises", f"{where}: {_first_line(error)}")
    return Outcome("wrong", f"{where}: {wrong}") if wrong else Outcome("ok")


def judged(made: Sequence[Any], expected: Sequence[Any]) -> str:
    """What is wrong with flat results; an empty text if nothing is."""
    if len(made) != len(expected):
        return f"{len(made)} results for {len(expected)}"
    texts = (differ(one, other) for one, other in zip(made, expected, strict=True))
    return next((f"result {at}: {text}" for at, text in enumerate(texts) if text), "")


def _gradients(case: Case, specs: Sequence[Spec], at_once: bool) -> str:
    kinds = {kind for spec in specs for _, kind in spec.partition.unreduced_kinds}
    if not kinds <= {"sum", "avg"}:
        return ""
    leaves = [x.clone().requires_grad_(w) for x, w in zip(case.tensors, case.wanted, strict=True)]
    try:
        right = _gradient_of(flat(case.function([x.view_as(x) for x in leaves])), leaves)
    except RuntimeError:
        return ""  # of what has no gradient for this sum of results, as an eigenvector's phase
    if right is None or any(x.itemsize == 2 and x.isinf().any() for x in right):
        return ""  # 16 bits overflow on the way, at other places in other orders
    pairs = [fs.shard(x, s) for x, s in zip(leaves, specs, strict=True)]
    made = on_pairs(case, pairs, at_once=at_once)
    found = _gradient_of(made, leaves) or [torch.zeros_like(each) for each in right]
    texts = (differ(one, other) for one, other in zip(found, right, strict=True))
    return next((f"gradient {at}: {text}" for at, text in enumerate(texts) if text), "")


def _gradient_of(
    results: Sequence[Any], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """The gradients of a fixed weighting of all results; None where they have none."""
    total = torch.zeros((), dtype=torch.float64)
    for at, each in enumerate(results):
        if isinstance(each, torch.Tensor) and each.requires_grad and _inexact(each):
            generator = torch.Generator().manual_seed(at)
            weights = torch.rand(each.shape, generator=generator, dtype=torch.float64)
            part = each.real + each.imag if each.dtype.is_complex else each
            total = total + (part * weights).sum()
    if not total.requires_grad:
        return None
    wanted = [x for x in leaves if x.requires_grad]
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True)]


def flat(out: Any) -> list[Any]:
    """The tensors and numbers in a result, in order."""
    return list(pytree.tree_leaves(out))


def differ(made: Any, whole: Any) -> str:
    """How two results differ beyond what another order of sums does; an empty text if not."""
    if not isinstance(whole, torch.Tensor) or not isinstance(made, torch.Tensor):
        same = type(made) is type(whole) and (made == whole or (made != made and whole != whole))
        close = isinstance(made, float) and isinstance(whole, float) and math.isclose(made, whole)
        return "" if same or close else f"{made!r} for {whole!r}"
    if whole.layout != torch.strided:
        made, whole = (each.to_dense() if each.layout != torch.strided else each
                       for each in (made, whole))  # fmt: skip
    if made.shape != whole.shape or made.dtype != whole.dtype:
        return f"{tuple(made.shape)} {made.dtype} for {tuple(whole.shape)} {whole.dtype}"
    if not whole.numel():
        return ""
    wide = torch.complex128 if whole.dtype.is_complex else torch.float64
    mine, right = made.detach().to(wide), whole.detach().to(wide)
    eps = torch.finfo(whole.dtype).eps if _inexact(whole) else 0.0
    slack = min(eps**0.5, 0.1)
    most = float(right.abs().nan_to_num(0, 0, 0).max())
    if torch.allclose(mine, right, rtol=slack, atol=slack * max(1.0, most), equal_nan=True):
        return ""
    return f"{mine.flatten()[:6].tolist()} for {right.flatten()[:6].tolist()}"
