"""PyTorch's operator database as test cases for layouts.

A *case* is one sample of one `OpInfo`: a function of tensors alone, and the operations that
PyTorch calls for it before decomposition (`make_fx` with `pre_dispatch=True`). Every case goes
through `fs.on_pairs`, call by call, on many layouts of its tensors (see `op_layouts`). Values and
gradients are compared with the same function on global tensors.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
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
from fshard._util.dtypes import is_inexact
from fshard.layout.mesh import Mesh
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair
from fshard.ops.core.registry import functional_of, read_arguments
from fshard.partition.partition import partition
from tests.helpers.ops.op_checks import shards_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

__all__ = [
    "Case", "Outcome", "calls_of", "case_of", "cases", "info_name", "op_db", "result_difference",
    "results_error", "try_layout",
]  # fmt: skip

UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
             "new_empty_strided", "resize_", "resize_as_"}  # fmt: skip
"""Operations with undefined results."""
SEEDS = range(4)
"""Seeds with which results must agree, else the operation is random."""
MAX_SAMPLES, MAX_ELEMENTS = 24, 50_000
"""Samples considered per OpInfo, and the maximum number of elements of one."""


@dataclass(frozen=True, eq=False)
class Case:
    """One sample of an OpInfo: `function` of `tensors`, and its `expected` results, flat.

    `graph` has its calls; if it cannot be traced, for numbers in its results, the one operation of
    its name is the call, and `untraced` is the error. `has_gradient` marks tensors whose gradients
    are compared; `reason` says why results cannot be compared.
    """

    name: str
    number: int
    function: Callable[..., Any] = field(repr=False)
    tensors: tuple[torch.Tensor, ...]
    expected: tuple[Any, ...] = field(repr=False, default=())
    graph: GraphModule | None = field(repr=False, default=None)
    has_gradient: tuple[bool, ...] = ()
    reason: str = ""
    untraced: str = ""


def info_name(op: Any) -> str:
    """Return the name of an OpInfo with its variant."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def cases(op: Any, count: int, dtype: torch.dtype | None = None) -> list[Case]:
    """Return up to `count` samples of an OpInfo: one of each shape first, shardable ones first.

    Samples have `dtype` if the OpInfo has it; without one float64, or the first that it has.
    """
    dtype = _dtype(op) if dtype is None else dtype
    if dtype is None or not op.supports_dtype(dtype, "cpu"):
        return []
    try:
        wants = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        # PyTorch reads the sources of all callers to find a test case of its own.
        with mock.patch("inspect.stack", return_value=()):
            generator = op.sample_inputs("cpu", dtype, requires_grad=wants)
            samples = list(itertools.islice(generator, MAX_SAMPLES))
        if hasattr(generator, "close"):
            # A generator collected while a graph is traced would restore the grad mode there.
            generator.close()
    except Exception:
        return []
    by_shapes: dict[Any, list[Any]] = {}
    for sample in samples:
        leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        inputs = [x for x in leaves if isinstance(x, torch.Tensor)]
        if inputs and sum(x.numel() for x in inputs) <= MAX_ELEMENTS:
            by_shapes.setdefault(tuple(tuple(x.shape) for x in inputs), []).append(sample)
    ordered = sorted(by_shapes.items(), key=lambda item: not _is_shardable(item[0]))
    rounds = itertools.zip_longest(*(similar for _, similar in ordered))
    chosen = [sample for x in rounds for sample in x if sample is not None][:count]
    return [_case(op, dtype, i, sample) for i, sample in enumerate(chosen)]


def _dtype(op: Any) -> torch.dtype | None:
    if op.supports_dtype(torch.float64, "cpu"):
        return torch.float64
    return min(op.supported_dtypes("cpu"), key=str, default=None)


def _is_shardable(shapes: Sequence[Sequence[int]]) -> bool:
    return any(size > 1 for size in shapes[0]) if shapes else False


def _case(op: Any, dtype: torch.dtype, number: int, sample: Any) -> Case:
    leaves, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    inputs = [item for item in leaves if isinstance(item, torch.Tensor)]
    tensors = tuple(item.detach() for item in inputs)

    def function(inputs: Sequence[Any], run: Callable[..., Any] = op) -> Any:
        remaining = iter(inputs)
        new_args = [next(remaining) if isinstance(item, torch.Tensor) else item for item in leaves]
        first, args, kwargs = pytree.tree_unflatten(new_args, tree)
        return run(first, *args, **kwargs)

    result = Case(info_name(op), number, function, tensors)
    if op.name in UNDEFINED:
        return _with(result, reason="undefined results")
    if any(item.layout != torch.strided for item in tensors):
        return _with(result, reason="sparse tensors")
    if op.name == "linalg.lstsq" and any(item.is_complex() for item in tensors):
        return _with(result, reason="PyTorch has other residuals in a dispatch mode")
    if op.name == "logcumsumexp" and dtype.itemsize == 2 and tensors[0].abs().max() > 1000:
        # 10,000 + log(2) is 10,000 there, so that the gradient depends on the order of sums.
        return _with(result, reason="steps of the dtype above 1")
    try:
        expected, *again = (_seeded(function, tensors, seed) for seed in SEEDS)
    except Exception as error:
        return _with(result, reason=f"does not run: {_first_line(error)}")
    if any(result_difference(*both) for item in again for both in zip(expected, item, strict=True)):
        return _with(result, reason="random")
    if _is_of_a_device(function, tensors, expected):
        return _with(result, reason="of another shape or dtype on another device")
    result = _with(
        result, expected=tuple(expected), has_gradient=tuple(x.requires_grad for x in inputs)
    )
    try:
        return _with(result, graph=_traced(function, tensors))
    except Exception as error:
        return _with(result, untraced=_first_line(error))


def case_of(name: str, function: Callable[..., Any], *tensors: torch.Tensor) -> Case:
    """Return a case of a function of tensors."""
    run = lambda inputs: function(*inputs)  # noqa: E731
    expected = tuple(flat(run([x.clone() for x in tensors])))
    has_gradient = tuple(map(is_inexact, tensors))
    return Case(name, 0, run, tensors, expected, _traced(run, tensors), has_gradient)


def _with(case: Case, **changes: Any) -> Case:
    return Case(**{**case.__dict__, **changes})


def _seeded(function: Any, tensors: Sequence[torch.Tensor], seed: int) -> list[Any]:
    # OpInfos of some random operations set a seed themselves.
    with torch.random.fork_rng(devices=()), mock.patch("torch.manual_seed"):
        torch.default_generator.manual_seed(seed)
        return flat(function([x.clone() for x in tensors]))


def _is_of_a_device(function: Any, tensors: Sequence[torch.Tensor], results: Sequence[Any]) -> bool:
    """Return True if a kernel's results have other shapes or dtypes than the meta kernel's.

    fshard uses the meta kernel's, which are those of GPUs.
    """
    try:
        with torch.no_grad():
            meta = flat(function([item.to("meta") for item in tensors]))
    except Exception:
        return False
    return any(
        isinstance(x, torch.Tensor)
        and isinstance(y, torch.Tensor)
        and (x.shape, x.dtype) != (y.shape, y.dtype)
        for x, y in zip(results, meta, strict=False)
    )


def _traced(function: Any, tensors: Sequence[torch.Tensor]) -> GraphModule:
    copies = [x.clone() for x in tensors]
    result: GraphModule = make_fx(lambda *inputs: function(inputs), pre_dispatch=True)(*copies)
    return result


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


# -- the calls of a case ------------------------------------------------------------------


class Unsupported(Exception):
    """Raised for a graph that these tests cannot walk."""


def walk(graph: GraphModule, inputs: Sequence[Any], run: Callable[[Any, Any, Any], Any]) -> Any:
    """Return the result of a graph with `run(op, args, kwargs)` for every call of an operation."""
    remaining, values = iter(inputs), dict[Node, Any]()
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        for node in graph.graph.nodes:
            args, kwargs = _filled(node.args, values), _filled(node.kwargs, values)
            if node.op == "placeholder":
                values[node] = next(remaining)
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
        return [_filled(x, values) for x in value]
    if isinstance(value, tuple):
        return tuple(_filled(x, values) for x in value)
    if isinstance(value, dict):
        return {key: _filled(x, values) for key, x in value.items()}
    return value


def _written(node: Node) -> list[Node]:
    """Return the tensor that a call writes, which must not share memory."""
    schema = node.target._schema  # type: ignore[union-attr]
    if not schema.is_mutable:
        return []
    places = [i for i, x in enumerate(schema.arguments)
              if x.alias_info is not None and x.alias_info.is_write]  # fmt: skip
    written = [node.args[i] for i in places if i < len(node.args)]
    written_nodes = [x for x in written if isinstance(x, Node) and _used_after(x, node)]
    shares = any(
        isinstance(x.target, OpOverload)
        and any(inputs.alias_info is not None for inputs in x.target._schema.returns)
        for x in written_nodes
    )
    if len(written_nodes) > 1 or shares:
        raise Unsupported(f"{node.target} writes to several tensors, or to a view")
    return written_nodes


def _used_after(value: Node, node: Node) -> bool:
    order = list(node.graph.nodes)
    return any(order.index(user) > order.index(node) for user in value.users)


def calls_of(case: Case) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return the calls of a case: operation, global arguments and keyword arguments."""
    calls = []

    def run(op: Any, args: Any, kwargs: Any) -> Any:
        calls.append((op, args, kwargs))
        return op(*args, **kwargs)

    if case.graph is not None:
        walk(case.graph, [x.clone() for x in case.tensors], run)
    return calls


@lru_cache(maxsize=8)
def _at_once(function: Callable[..., Any], mesh: Mesh) -> Any:
    return partition(lambda *inputs: function(inputs), mesh=mesh)


def _single(name: str) -> Any:
    """Return the operation or torch function with the name of an OpInfo."""
    if name.startswith("nn.functional."):
        return getattr(torch.nn.functional, name.removeprefix("nn.functional."), None)
    return getattr(torch.ops.aten, name, None)


def on_pairs(case: Case, pairs: Sequence[Any], *, at_once: bool = False) -> list[Any]:
    """Return the results of a case on pairs, unsharded: call by call, or by `fs.partition`."""

    def run(op: Any, args: Any, kwargs: Any) -> Any:
        inputs = pytree.tree_leaves((args, kwargs), is_leaf=is_pair)
        if not any(is_pair(x) for x in inputs):
            return op(*args, **kwargs)
        read = read_arguments(op, kwargs)
        return fs.on_pairs(functional_of(op), mode="auto")(*args, **read)

    single = _single(case.name)
    if at_once:
        result = _at_once(case.function, pairs[0].spec.mesh)(*pairs)
    elif case.graph is not None:
        result = walk(case.graph, pairs, run)
    elif single is not None:
        result = case.function(pairs, lambda *args, **kwargs: run(single, args, kwargs))
    else:
        raise Unsupported(case.untraced)
    out = pytree.tree_leaves(result, is_leaf=is_pair)
    return [fs.unshard(x) if is_pair(x) else x for x in out]


# -- one case on one layout ---------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case on a layout: `word` is ok, raises or wrong; `text` has details."""

    word: str
    text: str = ""


def try_layout(
    case: Case, specs: Sequence[Spec], *, gradients: bool = True, at_once: bool = False
) -> Outcome:
    """Run a case on pairs with layouts `specs`; compare values and, if `gradients`, gradients."""
    where = f"{case.name} #{case.number} [{', '.join(map(str, specs))}]"
    try:
        with torch.no_grad():
            places = enumerate(zip(case.tensors, specs, strict=True))
            pairs = [Sharded(shards_of(x, spec, i), spec) for i, (x, spec) in places]
            wrong = results_error(on_pairs(case, pairs, at_once=at_once), case.expected)
        if not wrong and gradients and any(case.has_gradient):
            wrong = _gradients(case, specs, at_once)
    except TimeoutError:
        raise
    except Exception as error:
        return Outcome("raises", f"{where}: {_first_line(error)}")
    return Outcome("wrong", f"{where}: {wrong}") if wrong else Outcome("ok")


def results_error(result: Sequence[Any], expected: Sequence[Any]) -> str:
    """Return an error text for flat results, empty if they are right."""
    if len(result) != len(expected):
        return f"{len(result)} results for {len(expected)}"
    texts = (
        result_difference(actual, reference)
        for actual, reference in zip(result, expected, strict=True)
    )
    return next((f"result {i}: {text}" for i, text in enumerate(texts) if text), "")


def _gradients(case: Case, specs: Sequence[Spec], at_once: bool) -> str:
    kinds = {kind for spec in specs for _, kind in spec.partition.unreduced_kinds}
    if not kinds <= {"sum", "avg"}:
        return ""
    right = _expected_gradients(case)
    if right is None:
        return ""
    leaves = _leaves(case)
    pairs = [fs.shard(x, s) for x, s in zip(leaves, specs, strict=True)]
    result = on_pairs(case, pairs, at_once=at_once)
    actual_gradients = _gradient_of(result, leaves) or [torch.zeros_like(item) for item in right]
    texts = (
        result_difference(actual, expected)
        for actual, expected in zip(actual_gradients, right, strict=True)
    )
    return next((f"gradient {i}: {text}" for i, text in enumerate(texts) if text), "")


def _leaves(case: Case) -> list[torch.Tensor]:
    return [
        x.clone().requires_grad_(w) for x, w in zip(case.tensors, case.has_gradient, strict=True)
    ]


@lru_cache(maxsize=4)
def _expected_gradients(case: Case) -> list[torch.Tensor] | None:
    """Return the gradients of the global function, None if they cannot be compared."""
    leaves = _leaves(case)
    try:
        gradients = _gradient_of(flat(case.function([x.view_as(x) for x in leaves])), leaves)
    except RuntimeError:
        return None  # no gradient for this sum of results, as for an eigenvector's phase
    if gradients is None or any(x.itemsize == 2 and x.isinf().any() for x in gradients):
        return None  # 16 bits overflow in intermediate values, depending on the order
    return gradients


def _gradient_of(
    results: Sequence[Any], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Return the gradients of a fixed weighting of all results, None if they have none."""
    total = torch.zeros((), dtype=torch.float64)
    for i, item in enumerate(results):
        if isinstance(item, torch.Tensor) and item.requires_grad and is_inexact(item):
            generator = torch.Generator().manual_seed(i)
            weights = torch.rand(item.shape, generator=generator, dtype=torch.float64)
            part = item.real + item.imag if item.dtype.is_complex else item
            total = total + (part * weights).sum()
    if not total.requires_grad:
        return None
    expected = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(total, expected, allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else g for g, x in zip(gradients, expected, strict=True)
    ]


def flat(out: Any) -> list[Any]:
    """Return the tensors and numbers of a result, in order."""
    return list(pytree.tree_leaves(out))


def result_difference(result: Any, full: Any) -> str:
    """Return a text if two results differ beyond the order of sums, else an empty text."""
    if not isinstance(full, torch.Tensor) or not isinstance(result, torch.Tensor):
        same = type(result) is type(full) and (
            result == full or (result != result and full != full)
        )
        close = isinstance(result, float) and isinstance(full, float) and math.isclose(result, full)
        return "" if same or close else f"{result!r} for {full!r}"
    if full.layout != torch.strided:
        result, full = (x.to_dense() if x.layout != torch.strided else x
                       for x in (result, full))  # fmt: skip
    if result.shape != full.shape or result.dtype != full.dtype:
        return f"{tuple(result.shape)} {result.dtype} for {tuple(full.shape)} {full.dtype}"
    if not full.numel():
        return ""
    wide = torch.complex128 if full.dtype.is_complex else torch.float64
    local, right = result.detach().to(wide), full.detach().to(wide)
    eps = torch.finfo(full.dtype).eps if is_inexact(full) else 0.0
    slack = min(eps**0.5, 0.1)
    limit = float(right.abs().nan_to_num(0, 0, 0).max())
    if torch.allclose(local, right, rtol=slack, atol=slack * max(1.0, limit), equal_nan=True):
        return ""
    return f"{local.flatten()[:6].tolist()} for {right.flatten()[:6].tolist()}"
