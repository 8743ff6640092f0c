"""Graphs without writes: a tensor that a function writes in place becomes a new value.

PyTorch's functionalization, as `torch.export` uses it, makes values of writes into results, views,
lists, arguments and running statistics, and puts a written view back into its base. Writes that
cannot be values, since code outside the function or autograd would see them, raise an error.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from fshard._torch.autograd_state import SET_GRAD_ENABLED
from fshard._torch.fake_tensors import (
    from_functional,
    functional_mode,
    graph_recorder,
    shares_memory,
    sync_functional,
    to_functional,
)
from fshard._torch.memory import storage_address
from fshard._torch.operators import OpOverload, schema_of, schema_or_none
from fshard._util.dtypes import is_inexact
from fshard._util.errors import fail
from fshard.layout.tree import tensors_in
from fshard.ops.core.call import base_name, instances_in
from fshard.ops.prng.draw_ops import DRAW_SCHEMAS
from fshard.spmd.tracking.torch_effects import WRITES_ARGUMENT, written_arguments


def has_no_gradient(op: Any) -> bool:
    """Return True if the results of an operation have no gradient, whatever its operands are."""
    name = base_name(op)
    return name in ("detach", "detach_") or (name in DRAW_SCHEMAS and op.namespace == "fshard")


def writes(node: fx.Node) -> list[fx.Node]:
    """Return the operands that an operation writes, running statistics included."""
    op = node.target
    if not isinstance(op, OpOverload):
        return []
    written = [*written_operands(op, node.args, node.kwargs), *statistics_of(node)]
    return instances_in(written, fx.Node)


def written_operands(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the operands that an operation writes by its schema."""
    named = _named(op, args, kwargs)
    return [named.get(parameter.name) for parameter in schema_of(op).arguments
            if parameter.alias_info is not None and parameter.alias_info.is_write]  # fmt: skip


def _named(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, without defaults."""
    names = (parameter.name for parameter in schema_of(op).arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def statistics_of(node: fx.Node) -> list[Any]:
    """Return the running statistics that a norm writes, which its schema does not say."""
    name = base_name(node.target)
    if name not in WRITES_ARGUMENT or "norm" not in name:
        return []
    return written_arguments(node.target, name, node.args, node.kwargs)  # type: ignore[arg-type]


def functional(
    graph: fx.GraphModule, fakes: Sequence[torch.Tensor], numbers: Sequence[Any] = (), *,
    above: bool,
) -> tuple[fx.GraphModule, tuple[int, ...]]:  # fmt: skip
    """Return the same function without writes, and the indices of the arguments it wrote.

    The new graph returns their final values after its results. With `above`, operations are
    recorded above PyTorch's decompositions.
    """
    written: list[int] = []

    def run(*args: Any) -> list[Any]:
        with functional_mode(pre_dispatch=above):
            wrapped = [to_functional(arg) for arg in args[: len(fakes)]]
            interpreter = _FunctionalInterpreter(graph)
            results = [from_functional(x) for x in interpreter.run(*wrapped, *args[len(fakes) :])]
            written.clear()
            for index, (arg, wrapper) in enumerate(zip(args, wrapped, strict=False)):
                sync_functional(wrapper)
                after = from_functional(wrapper)
                if after is not arg:
                    written.append(index)
                    results.append(after)
        return results

    # The function may end in another grad mode; a grad mode that it sets is in the graph.
    with warnings.catch_warnings(), torch.set_grad_enabled(torch.is_grad_enabled()):
        # The warning is for composite operations that do not write: they are kept as they are.
        warnings.filterwarnings("ignore", "At pre-dispatch tracing, we assume")
        # Gradients are operations of the graph already, so none are tracked here.
        tensors = (x.detach() for x in fakes)
        rewritten: fx.GraphModule = graph_recorder(run, above_autograd=above)(*tensors, *numbers)
    return rewritten, tuple(written)


def split_lists(graph: fx.Graph) -> None:
    """Write lists whose elements share memory one element after the other, as kernels of CPUs.

    As values all elements would be computed from what was there before.
    """
    for node in filter(_writes_what_others_read, graph.nodes):
        named = _named(node.target, node.args, node.kwargs)
        lists = [key for key, x in named.items() if isinstance(x, list | tuple)]
        with graph.inserting_before(node):
            for index in range(len(named[lists[0]])):
                elements = {key: [named[key][index]] for key in lists}
                graph.call_function(node.target, (), {**named, **elements})
        graph.erase_node(node)


def _writes_what_others_read(node: fx.Node) -> bool:
    """Return True for an operation on lists one of whose elements writes memory of another one."""
    if not base_name(node.target).startswith("_foreach_"):
        return False
    users: dict[int, set[int]] = {}
    for value in (*node.args, *node.kwargs.values()):
        members = enumerate(value) if isinstance(value, list | tuple) else [(-1, value)]
        for index, member in members:
            for storage in _storages(member) if isinstance(member, fx.Node) else ():
                users.setdefault(storage, set()).add(index)
    return any(len(users[storage]) > 1 for x in writes(node) for storage in _storages(x))


class _FunctionalInterpreter(fx.Interpreter):
    """Interpreter of a graph that replaces operations whose schemas hide a write or a view."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # errors name the user's line already

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if n.target is SET_GRAD_ENABLED and torch.is_grad_enabled():
            # Views of what was written are recorded at their next use, which must have gradients.
            for x in tensors_in([*self.env.values()]):
                sync_functional(x)
        operand = _hidden_base(n)
        if operand is not None and _is_identity(n, operand):
            return self.env[operand]
        replacements = _VIEWS if operand is not None else _EXPLICIT_WRITES if writes(n) else {}
        replacement = replacements.get(base_name(n.target))
        if replacement is not None:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return replacement(*args, **kwargs)
        result = super().run_node(n)
        if operand is not None and not _are_views(result, self.env[operand]):
            _refuse_views(n, operand)
        return result


def _instance_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, var: torch.Tensor,
    use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> torch.Tensor:  # fmt: skip
    detached, dims = x.detach(), [*range(2, x.ndim)]
    mean.lerp_(detached.mean([0, *dims]).to(mean.dtype), momentum)
    var.lerp_(detached.var(dims).mean(0).to(var.dtype), momentum)
    return torch.instance_norm(x, weight, bias, None, None, True, momentum, eps, cudnn_enabled)


def _fill_diagonal(x: torch.Tensor, fill_value: Any, wrap: bool = False) -> torch.Tensor:
    if x.ndim != 2 or (wrap and x.shape[0] > x.shape[1]):
        return x.fill_diagonal_(fill_value, wrap)
    x.diagonal().fill_(fill_value)
    return x


def _polygamma(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.copy_(torch.polygamma(n, x))


_EXPLICIT_WRITES: dict[str, Callable[..., torch.Tensor]] = {
    "instance_norm": _instance_norm, "fill_diagonal_": _fill_diagonal, "polygamma_": _polygamma,
}  # fmt: skip


_VIEWS: dict[str, Callable[..., Any]] = {
    "unsafe_split": torch.ops.aten.split,
    "unsafe_split_with_sizes": torch.ops.aten.split_with_sizes,
    "unsafe_chunk": torch.ops.aten.chunk,
}
"""Operations whose schema says that results are new, and that return views: gates of RNN cells."""

# -- memory that no schema declares ------------------------------------------------------------

_DROPS = frozenset(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"))


def _hidden_base(node: fx.Node) -> fx.Node | None:
    """Return the operand whose memory a result shares against its schema, None if there is none."""
    schema = schema_or_none(node.target)
    if schema is None or any(result.alias_info is not None for result in schema.returns):
        return None
    if drops_nothing(node):
        return node.all_input_nodes[0]
    storages = _storages(node)
    return next((x for x in node.all_input_nodes if storages & _storages(x)), None)


def drops_nothing(node: fx.Node) -> bool:
    """Return True for a dropout that returns its operand, as it does for tensors with values."""
    if not isinstance(node.target, OpOverload) or base_name(node.target) not in _DROPS:
        return False
    named = _named(node.target, node.args, node.kwargs)
    return not named["train"] or named["p"] == 0


def _is_identity(node: fx.Node, operand: fx.Node) -> bool:
    """Return True if a result in the memory of an operand is that operand itself."""
    if drops_nothing(node):
        return True
    x, y = operand.meta.get("val"), node.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    before, after = ((z.shape, z.stride(), z.storage_offset(), z.dtype) for z in (x, y))
    return before == after


def _are_views(results: Any, operand: Any) -> bool:
    """Return True if functionalization has recorded the results as views of the operand."""
    bases: list[Any] = list(tensors_in(operand))
    views: list[Any] = list(tensors_in(results))
    return all(any(shares_memory(view.elem, base.elem) for base in bases) for view in views)


def _refuse_views(node: fx.Node, operand: fx.Node) -> None:
    """Raise `ShardingError` if memory that an operation shares in secret is written later."""
    memory = {*aliases(node)}
    for later in node.graph.nodes:
        if node < later and memory & {*writes(later)}:
            fail("fs.partition", f"{later.name} writes the memory of {operand.name}, in which "
                 f"{node.name} is too", "an operation that returns a view says so in its schema",
                 f"a clone() of {node.name}, or of the tensor that is written")  # fmt: skip


def _storages(node: fx.Node) -> set[int]:
    return {storage_address(x) for x in tensors_in(node.meta.get("val"))}


# -- operands that are refused -------------------------------------------------------------------


def refuse_sparse(values: Any, name: str) -> None:
    """Raise `ShardingError` for operands or results of an operation that are not dense."""
    for x in tensors_in(values):
        if x.layout is not torch.strided:
            fail("fs.partition", f"{name} with a tensor of {x.layout}",
                 "the tensors of a partitioned function must be dense",
                 "x.to_dense() before the call; or fs.shard_map, whose function runs on "
                 "locals")  # fmt: skip


def refuse_closure_write(name: str) -> NoReturn:
    """Raise `ShardingError` for an operation that writes a tensor the function closes over."""
    fail("fs.partition", f"{name} writes a tensor that the function closes over",
         "a function may write only its results and its arguments",
         "give it as an argument: to a module its buffers with its parameters, "
         "{**dict(m.named_parameters()), **dict(m.named_buffers())}")  # fmt: skip


def aliases(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values share the memory of a node's value, itself included."""
    while (base := base_of(node)) is not None:
        node = base
    return [node, *_views_of(node)]


def base_of(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory a result shares, or may share; None if it is new."""
    if node.target is operator.getitem:
        # One of several results, which share memory if they are views.
        source = node.args[0]
        return base_of(source) if isinstance(source, fx.Node) else None
    schema: Any = schema_or_none(node.target)
    if schema is None or all(result.alias_info is None for result in schema.returns):
        return _hidden_base(node)
    named = _named(node.target, node.args, node.kwargs)
    bases = [named.get(p.name) for p in schema.arguments if p.alias_info is not None]
    return next((x for x in bases if isinstance(x, fx.Node)), None)


def _views_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes whose values are in the memory of a node's value."""
    for user in node.users:
        if base_of(user) is node or user.target is operator.getitem:
            yield user
            yield from _views_of(user)


def has_inexact_value(node: fx.Node) -> bool:
    """Return True if a result has gradients, by its dtype."""
    return any(map(is_inexact, instances_in(node.meta.get("val"), torch.Tensor)))
