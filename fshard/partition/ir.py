"""What a partitioned function does, line by line, and how the lines run."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fshard._torch.autograd_state import SET_GRAD_ENABLED
from fshard._torch.operators import OpOverload, builtin_of, schema_or_none
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.ops.core.call import map_call, map_instances
from fshard.ops.strategy.local_call import (
    LocalRewrite,
    RankContext,
    attach_to_operands,
    flat,
    run_local,
)
from fshard.ops.strategy.strategy import Strategy
from fshard.program.program import Program
from fshard.run.autograd.replicate import spread

__all__ = ["Constant", "Copy", "GradMode", "Line", "Move", "Operation", "Pick", "Ref", "Whole",
           "Write", "directly", "local_graph", "run_everywhere", "same_memory"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of an earlier line, by its number."""

    at: int


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operation on locals, by its strategy; `single` if it returns one tensor."""

    out: int
    strategy: Strategy
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    single: bool
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A program that brings a value to another layout; with `grad` its transpose runs backward."""

    out: int
    source: Ref
    program: Program
    grad: bool


@dataclass(frozen=True, slots=True, eq=False)
class Pick:
    """One of several results."""

    out: int
    source: Ref
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A tensor that the function closes over, whole on every rank."""

    out: int
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """An operation without operands: every rank makes the same tensor."""

    out: int
    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class GradMode:
    """Gradients are attach_to_operands from here on, or are not."""

    enabled: bool


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """An argument becomes another value, without gradient."""

    target: Ref
    source: Ref
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A value in memory of its own, for what it lies in is written."""

    out: int
    source: Ref


Line = Operation | Move | Pick | Constant | Whole | GradMode | Write | Copy


def _last_uses(lines: Sequence[Line], outputs: Sequence[int]) -> dict[int, int]:
    """Of every value the last line that reads it."""
    last: dict[int, int] = {}
    for place, line in enumerate(lines):
        for ref in _refs(line):
            last[ref] = place
    return {at: place for at, place in last.items() if at not in outputs}


def _refs(line: Line) -> list[int]:
    match line:
        case Operation():
            found: list[int] = []
            for each in (*line.args, *line.kwargs.values()):
                map_instances(each, Ref, lambda ref: found.append(ref.at))
            return found
        case Move() | Pick() | Copy():
            return [line.source.at]
        case Write():
            return [line.target.at, line.source.at]
        case _:
            return []


def same_memory(line: Line) -> list[tuple[int, int]]:
    """Values of a line that may lie in the memory of values before it, each with that."""
    match line:
        case Move() | Pick():
            return [(line.out, line.source.at)]
        case Operation():
            schema = schema_or_none(line.strategy.call.op)
            is_view = schema is None or any(each.alias_info for each in schema.returns)
            return [(line.out, at) for at in _refs(line) if is_view]
        case _:
            return []


def with_gradients_of(lines: Sequence[Line], outputs: Sequence[int]) -> list[Line]:
    """The lines, with gradients only where they come back to from some outputs."""
    flows = set(outputs)
    found: list[Line] = []
    for line in reversed(lines):
        out = getattr(line, "out", None)
        flows.update(_refs(line) if out in flows else ())
        if isinstance(line, Move) and line.grad and out not in flows:
            found.append(replace(line, grad=False))
        else:
            found.append(line)
    return found[::-1]


def write(local: torch.Tensor, value: torch.Tensor) -> None:
    """Make a local another value, where it is."""
    with torch.no_grad():
        local.copy_(value)


# -- all ranks in one process ---------------------------------------------------------------


def run_everywhere(
    lines: Sequence[Line], mesh: Mesh, inputs: Mapping[int, Any], outputs: Sequence[int]
) -> dict[int, Any]:
    """Run the lines on tuples of all ranks' locals; the values of `outputs`."""
    env, last = dict(inputs), _last_uses(lines, outputs)
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        for place, line in enumerate(lines):
            match line:
                case Operation():
                    env[line.out] = _on_all(line, mesh, env)
                case Move():
                    env[line.out] = line.program(env[line.source.at])
                case Pick():
                    env[line.out] = tuple(each[line.index] for each in env[line.source.at])
                case Constant():
                    env[line.out] = spread(line.tensor, mesh.size)
                case Whole():
                    env[line.out] = spread(line.op(*line.args, **line.kwargs), mesh.size)
                case GradMode():
                    torch.set_grad_enabled(line.enabled)
                case Copy():
                    env[line.out] = tuple(each.clone() for each in env[line.source.at])
                case Write():
                    for local, value in zip(env[line.target.at], env[line.source.at], strict=True):
                        write(local, value)
            for at in {*_refs(line)}:
                if last.get(at) == place:
                    env.pop(at, None)
    return {at: env[at] for at in outputs}


def _on_all(line: Operation, mesh: Mesh, env: Mapping[int, Any]) -> tuple[Any, ...]:
    made = []
    for place, rank in enumerate(mesh.ranks):
        pick = lambda ref, place=place: env[ref.at][place]  # noqa: E731
        args, kwargs = map_call(line.args, line.kwargs, Ref, pick)
        found = run_local(line.strategy, rank, args, kwargs)
        made.append(found[0] if line.single else found)
    return tuple(made)


# -- one rank -------------------------------------------------------------------------------


class _Called:
    """A function with a name of its own in the code of a graph."""

    def __init__(self, run: Callable[..., Any], name: str) -> None:
        self.run, self.__name__, self.__qualname__, self.__module__ = run, name, name, "fshard"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def local_graph(
    lines: Sequence[Line], rank: int, inputs: Sequence[int], outputs: Sequence[int | None]
) -> fx.GraphModule:
    """The graph of local operations and collectives that one rank runs.

    Operations are PyTorch's own, called directly: nothing of fshard runs between them but the
    programs.
    """
    graph, root = fx.Graph(), torch.nn.Module()
    env: dict[int, fx.Node] = {at: graph.placeholder(f"x{at}") for at in inputs}

    for line in lines:
        match line:
            case Operation():
                target, args, kwargs = _local_call(line, rank)
                placed = map_call(args, kwargs, Ref, lambda ref: env[ref.at])
                env[line.out] = graph.create_node("call_function", target, *placed, name=line.name)
            case Move():
                name = "_then_".join(_step_name(step) for step in line.program.steps) or "same"
                target = _Called(line.program.__call__, name)
                env[line.out] = graph.create_node(
                    "call_function", target, (env[line.source.at],), name=name)  # fmt: skip
            case Pick():
                env[line.out] = graph.call_function(
                    operator.getitem, (env[line.source.at], line.index))  # fmt: skip
            case Constant():
                root.register_buffer(f"constant{line.out}", line.tensor)
                env[line.out] = graph.get_attr(f"constant{line.out}")
            case Whole():
                call = line.op, line.args, dict(line.kwargs)
                env[line.out] = graph.create_node("call_function", *call, name=line.name)
            case GradMode():
                graph.call_function(SET_GRAD_ENABLED, (line.enabled,))
            case Copy():
                env[line.out] = graph.call_function(torch.clone, (env[line.source.at],))
            case Write():
                graph.call_function(write, (env[line.target.at], env[line.source.at]))
    graph.output(tuple(None if at is None else env[at] for at in outputs))
    return fx.GraphModule(root, graph, "partitioned")


def directly(graph: fx.GraphModule) -> Callable[..., tuple[Any, ...]]:
    """What a graph's code does, its operations called without the Python around each.

    >>> graph = fx.Graph()
    >>> y = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    >>> _ = graph.output((y,))
    >>> directly(fx.GraphModule({}, graph))(torch.tensor([-1.0, 2.0]))
    (tensor([0., 2.]),)
    """
    code = graph.graph.python_code("self")
    known = {
        name: each.run if isinstance(each, _Called) else each for name, each in code.globals.items()
    }
    text = code.src
    targets = [node.target for node in graph.graph.nodes]
    for op in {each for each in targets if isinstance(each, OpOverload)}:
        name = f"direct_{op}".replace(".", "_")
        text, known[name] = text.replace(f"torch.ops.{op}(", f"{name}("), builtin_of(op)
    exec(compile(text, "<partitioned>", "exec"), known)
    return functools.partial(known["forward"], graph)


def _step_name(step: object) -> str:
    name = type(step).__name__
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def _local_call(line: Operation, rank: int) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """The operation of a line as this rank calls it, its arguments already local."""
    strategy = line.strategy
    op, local = strategy.call.op, strategy.rule.local
    several = not line.single and not _returns_flat(strategy)
    if local is None and not several:
        return op, line.args, line.kwargs
    here = RankContext(rank, strategy.in_specs, strategy.out_specs)
    if isinstance(local, LocalRewrite) and not several:
        call = local.call(op, line.args, line.kwargs, here)
        if call is not None:
            return call

    empty = local is not None and here.has_empty

    def run(*args: Any, **kwargs: Any) -> Any:
        out = op(*args, **kwargs) if local is None else local(op, args, kwargs, here)
        if empty:
            out = attach_to_operands(out, (*args, *kwargs.values()))
        return flat(out)[0] if line.single else flat(out)

    return _Called(run, line.name), line.args, line.kwargs


def _returns_flat(strategy: Strategy) -> bool:
    """Whether the results are a flat list, so that one is got by its number."""
    tree = strategy.tree
    return isinstance(tree, list | tuple) and all(type(each) is int for each in tree)


def specs_text(specs: Sequence[Spec | None]) -> str:
    """Specs one after the other."""
    return ", ".join("none" if spec is None else str(spec) for spec in specs)
