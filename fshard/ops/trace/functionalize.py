"""Graphs without writes: what a function writes in place is another value from there on.

Writes into results, views, lists, arguments and running statistics are all made values by
PyTorch's functionalization, the one that `torch.export` uses, which knows how to put a written view
back into what it is a view of. What cannot be said so, because others than the function would see
it or because autograd would, is refused.
"""

from __future__ import annotations

import gc
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from fshard._torch.autograd_state import SET_GRAD_ENABLED
from fshard._torch.fake_tensors import (
    FakeTensor,
    from_functional,
    functional_mode,
    shares_memory,
    sync_functional,
    to_functional,
)
from fshard._torch.memory import storage_address
from fshard._torch.modes import TorchDispatchMode
from fshard._torch.operators import OpOverload, schema_of, schema_or_none
from fshard._util.errors import fail
from fshard.layout.tree import tensors_in
from fshard.ops.core.builders import is_inexact
from fshard.ops.core.call import base_name, instances_in
from fshard.ops.prng.draw_ops import DRAWN
from fshard.spmd.tracking.torch_effects import STATE, writes_state

__all__ = ["Held", "check_writes", "functional", "has_no_gradient", "refuse_held", "writes"]


def has_no_gradient(op: Any) -> bool:
    """Whether the results of an operation have no gradient, whatever its operands have."""
    name = base_name(op)
    return name in ("detach", "detach_") or (name in DRAWN and op.namespace == "fshard")


_NONE: frozenset[int] = frozenset()
HELD = frozenset((-1,))
"""In the place of arguments: a tensor that the function closes over, and that requires grad."""


def writes(node: fx.Node) -> list[fx.Node]:
    """The operands that an operation writes, running statistics too, of which no schema tells."""
    op = node.target
    if not isinstance(op, OpOverload):
        return []
    found = [*_written(op, node.args, node.kwargs), *_statistics(node)]
    return instances_in(found, fx.Node)


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The operands that an operation writes by its schema."""
    given = _named(op, args, kwargs)
    return [given.get(each.name) for each in schema_of(op).arguments
            if each.alias_info is not None and each.alias_info.is_write]  # fmt: skip


def _named(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that are given, by name."""
    names = (each.name for each in schema_of(op).arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _statistics(node: fx.Node) -> list[Any]:
    """The running statistics that a norm writes, which its schema does not say."""
    name = base_name(node.target)
    if name not in STATE or "norm" not in name:
        return []
    return writes_state(node.target, name, node.args, node.kwargs)  # type: ignore[arg-type]


def functional(
    graph: fx.GraphModule, fakes: Sequence[torch.Tensor], *, above: bool
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """The same function without writes, and the places of the arguments that it wrote.

    What they are in the end it returns after its results.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    written: list[int] = []

    def run(*args: torch.Tensor) -> list[Any]:
        with functional_mode(pre_dispatch=above):
            given = [to_functional(arg) for arg in args]
            results = [from_functional(each) for each in _Run(graph).run(*given)]
            written.clear()
            for at, (arg, each) in enumerate(zip(args, given, strict=True)):
                sync_functional(each)
                after = from_functional(each)
                if after is not arg:
                    written.append(at)
                    results.append(after)
        return results

    # The function may end in another mode of gradients; a mode that is set inside is traced.
    with warnings.catch_warnings(), torch.set_grad_enabled(torch.is_grad_enabled()):
        # Of operations that are made of others, and that do not write: they are kept as they are.
        warnings.filterwarnings("ignore", "At pre-dispatch tracing, we assume")
        # Gradients are operations of the graph already: nothing is differentiated here.
        made: fx.GraphModule = make_fx(run, pre_dispatch=above)(*(x.detach() for x in fakes))
    return made, tuple(written)


class _Run(fx.Interpreter):
    """Runs a graph with writes and views that functionalization does not know made openly."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # errors say what there is to say

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        operand = _shared(n)
        if operand is not None and _is_same(n, operand):
            return self.env[operand]
        known = _VIEWS if operand is not None else _OPENLY if writes(n) else {}
        openly = known.get(base_name(n.target))
        if openly is not None:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return openly(*args, **kwargs)
        made = super().run_node(n)
        if operand is not None and not _are_views(made, self.env[operand]):
            _refuse_views(n, operand)
        return made


def _instance_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, var: torch.Tensor,
    use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> torch.Tensor:  # fmt: skip
    given, dims = x.detach(), [*range(2, x.ndim)]
    mean.lerp_(given.mean([0, *dims]).to(mean.dtype), momentum)
    var.lerp_(given.var(dims).mean(0).to(var.dtype), momentum)
    return torch.instance_norm(x, weight, bias, None, None, True, momentum, eps, cudnn_enabled)


def _fill_diagonal(x: torch.Tensor, fill_value: Any, wrap: bool = False) -> torch.Tensor:
    if x.ndim != 2 or (wrap and x.shape[0] > x.shape[1]):
        return x.fill_diagonal_(fill_value, wrap)
    x.diagonal().fill_(fill_value)
    return x


def _polygamma(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.copy_(torch.polygamma(n, x))


_OPENLY: dict[str, Callable[..., torch.Tensor]] = {
    "instance_norm": _instance_norm, "fill_diagonal_": _fill_diagonal, "polygamma_": _polygamma,
}  # fmt: skip


_VIEWS: dict[str, Callable[..., Any]] = {
    "unsafe_split": torch.ops.aten.split,
    "unsafe_split_with_sizes": torch.ops.aten.split_with_sizes,
    "unsafe_chunk": torch.ops.aten.chunk,
}
"""Of what says that its results are new, and cuts what it is given: gates of recurrent cells."""

# -- memory that no schema tells of ------------------------------------------------------------

_DROPS = frozenset(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"))


def _shared(node: fx.Node) -> fx.Node | None:
    """The operand in whose memory a result is, where the schema says that it is new."""
    schema = schema_or_none(node.target)
    if schema is None or any(each.alias_info is not None for each in schema.returns):
        return None
    if _drops_nothing(node):
        return node.all_input_nodes[0]
    made = _memories(node)
    return next((each for each in node.all_input_nodes if made & _memories(each)), None)


def _drops_nothing(node: fx.Node) -> bool:
    """Whether it is a dropout that returns what it is given, if only on tensors with numbers."""
    if base_name(node.target) not in _DROPS:
        return False
    given = _named(node.target, node.args, node.kwargs)
    return not given["train"] or given["p"] == 0


def _is_same(node: fx.Node, operand: fx.Node) -> bool:
    """Whether a result in the memory of an operand is that operand itself."""
    if _drops_nothing(node):
        return True
    one, other = operand.meta.get("val"), node.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    mine, theirs = (
        (x.shape, x.stride(), x.storage_offset(), x.dtype) for x in (one, other)
    )  # fmt: skip
    return mine == theirs


def _are_views(made: Any, operand: Any) -> bool:
    """Whether functionalization knows of results that they are in the memory of an operand."""
    mine: list[Any] = list(tensors_in(operand))
    theirs: list[Any] = list(tensors_in(made))
    return all(any(shares_memory(x.elem, y.elem) for y in mine) for x in theirs)


def _refuse_views(node: fx.Node, operand: fx.Node) -> None:
    """Raise `ShardingError` where memory that an operation shares in secret is written later."""
    memory = {*_memory(node)}
    for each in node.graph.nodes:
        if node < each and memory & {*writes(each)}:
            fail("fs.partition", f"{each.name} writes the memory of {operand.name}, in which "
                 f"{node.name} is too", "an operation that returns a view says so in its schema",
                 f"a clone() of {node.name}, or of what is written")  # fmt: skip


def _memories(node: fx.Node) -> set[int]:
    return {storage_address(each) for each in tensors_in(node.meta.get("val"))}


# -- what is refused --------------------------------------------------------------------------


def check_writes(
    graph: fx.GraphModule, *, grad: bool
) -> tuple[list[tuple[str, frozenset[int]]], frozenset[int]]:
    """The writes that would lose a gradient, each with the arguments whose gradient that is.

    And the arguments that are written where gradients are tracked.

    PyTorch passes gradients by what is written under `no_grad`, or through `detach()`, as if it
    had not been; a new value has none. `grad` says whether gradients are tracked at first.
    Raises `ShardingError` for writes to tensors that the function closes over.
    """
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    own = {node: frozenset((at,)) for at, node in enumerate(arguments) if _is_inexact(node)}
    flows = dict(own)
    for node in graph.graph.nodes:
        if node.op == "get_attr" and getattr(graph, node.target).requires_grad:
            flows[node] = HELD
    found: list[tuple[str, frozenset[int]]] = []
    tracked = _NONE
    passing = _passing(graph, grad)
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        before = [flows.get(each, _NONE) for each in node.all_input_nodes if node in passing]
        into = _NONE.union(*before)
        statistics = _statistics(node)  # which have no gradient
        for target in writes(node):
            lost, root, cut = _lost(target, node, flows, passing)
            found += lost
            if target not in statistics:
                tracked |= _NONE if cut else own.get(root, _NONE)
                flows.update((each, flows.get(each, _NONE) | into) for each in _memory(target))
        flows[node] = into if _is_inexact(node) else _NONE
    return found, tracked


class Held(TorchDispatchMode):
    """Refuses to write tensors that a traced function closes over, for they would be written.

    And to leave those outside that it makes, which have no numbers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own: set[int] = set()
        self.made: list[tuple[weakref.ref[torch.Tensor], str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for each in tensors_in(_written(func, args, kwargs or {})):
            if not isinstance(each, FakeTensor) and storage_address(each) not in self.own:
                refuse_held(base_name(func))
        out = func(*args, **(kwargs or {}))
        before = {storage_address(each) for each in tensors_in((args, kwargs))}
        self.own |= {storage_address(each) for each in tensors_in(out)} - before
        # What is made of no tensor may be a constant, which the mode that fakes it keeps.
        self.made += [(weakref.ref(each), base_name(func)) for each in tensors_in(out)
                      if before and isinstance(each, FakeTensor)]  # fmt: skip
        return out

    def check_left(self, known: Sequence[torch.Tensor], where: str) -> None:
        """Raise `ShardingError` for what was made and is still somewhere, beside what is known."""
        left = self._left(known)
        if left:
            gc.collect()  # what only refers to itself is nowhere
            left = self._left(known)
        if not left:
            return
        fail(where, f"a result of {left[0]} is kept outside of the function",
             "the function is traced once on tensors without numbers, which are of no use after it",
             "return it; what a module or a cache keeps is made before, by a call on whole "
             "tensors")  # fmt: skip

    def _left(self, known: Sequence[torch.Tensor]) -> list[str]:
        own = {id(each) for each in known}
        alive = ((ref(), name) for ref, name in self.made)
        return [name for x, name in alive if x is not None and id(x) not in own]


def refuse_held(name: str) -> NoReturn:
    """Raise `ShardingError` for an operation that writes what the function closes over."""
    fail("fs.partition", f"{name} writes a tensor that the function closes over",
         "a function writes what it makes and what it is given, nothing else",
         "give it as an argument: to a module its buffers with its parameters, "
         "{**dict(m.named_parameters()), **dict(m.named_buffers())}")  # fmt: skip


def _passing(graph: fx.GraphModule, grad: bool) -> frozenset[fx.Node]:
    """The operations by which gradients pass, and the results; `grad` is as it is at first."""
    found = []
    for node in graph.graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            grad = node.args[0]
        if node.op == "output" or (grad and not has_no_gradient(node.target)):
            found.append(node)
    return frozenset(found)


def _lost(
    target: fx.Node, node: fx.Node, flows: dict[fx.Node, frozenset[int]],
    passing: frozenset[fx.Node],
) -> tuple[list[tuple[str, frozenset[int]]], fx.Node, bool]:  # fmt: skip
    """What `check_writes` says of one operand that is written, in whose memory it lies.

    And whether autograd does not see the write.
    """
    root, cut = target, node not in passing
    while (below := _below(root)) is not None:
        cut = cut or has_no_gradient(root.target)
        root = below
    if root.op == "get_attr":
        refuse_held(node.name)
    flow = flows.get(root, _NONE)
    later = (user for each in _memory(target) for user in each.users if node < user)
    used = any(user in passing for user in later)
    return [(node.name, flow)] if cut and flow and used else [], root, cut


def _memory(node: fx.Node) -> list[fx.Node]:
    """The values that lie in the same memory as one, itself too."""
    while (below := _below(node)) is not None:
        node = below
    return [node, *_above(node)]


def _below(node: fx.Node) -> fx.Node | None:
    """The value in whose memory an operation's result is, or may be."""
    if node.target is operator.getitem:
        # Of several results, which share memory if they are views all.
        source = node.args[0]
        return _below(source) if isinstance(source, fx.Node) else None
    schema: Any = schema_or_none(node.target)
    if schema is None or all(each.alias_info is None for each in schema.returns):
        return _shared(node)
    given = _named(node.target, node.args, node.kwargs)
    found = [given.get(each.name) for each in schema.arguments if each.alias_info is not None]
    return next((each for each in found if isinstance(each, fx.Node)), None)


def _above(node: fx.Node) -> Iterator[fx.Node]:
    """The values in the memory of one."""
    for user in node.users:
        if _below(user) is node or user.target is operator.getitem:
            yield user
            yield from _above(user)


def _is_inexact(node: fx.Node) -> bool:
    return any(map(is_inexact, instances_in(node.meta.get("val"), torch.Tensor)))
