"""Execution of the lines of a partitioned call.

Lines run in two ways, with the calls of PyTorch prepared once per rank: on one rank as the code of
a graph, in which nothing of fshard runs but the programs, and on all ranks of a simulation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from fshard._torch.autograd_state import SET_GRAD_ENABLED
from fshard._torch.memory import BufferPool, copy_all
from fshard._torch.modes import without_dispatch_modes
from fshard._torch.operators import (
    OpOverload,
    builtin_of,
    direct_function,
    out_overload,
    tensordot_into,
)
from fshard._util.cache import BoundedDict
from fshard.layout.mesh import Mesh
from fshard.ops.core.cache_keys import freeze
from fshard.ops.core.call import Meta, fill_call, map_call
from fshard.ops.strategy import local_call
from fshard.ops.strategy.strategy import Strategy
from fshard.partition.ir import (
    BeginCheckpoint,
    Buffer,
    CheckpointedLines,
    ClosureTensor,
    Copy,
    CustomGradient,
    EndCheckpoint,
    Factory,
    GradMode,
    LaunchBatch,
    Line,
    NumberOperation,
    Operation,
    Pick,
    Redistribution,
    Ref,
    RegionCall,
    WaitBatch,
    Write,
    operands_of,
    write_value,
)
from fshard.run.autograd.linear_function import FinishAll
from fshard.run.autograd.overlapped import launch_programs
from fshard.run.autograd.replicate import replicate_shards
from fshard.run.transports.base import is_observed
from fshard.run.transports.running_modules import as_in_module

# -- execution on one rank ------------------------------------------------------------------


TENSORDOT = torch.ops.aten.tensordot.default
DIRECT = "direct"
"""Key of the function that a node calls in the place of its operator."""


class _NamedFunction:
    """Callable with a readable name, which FX writes into a graph's code.

    `module` is the module path of what it launches, which is set around it for observers.
    """

    def __init__(self, run: Callable[..., Any], name: str, module: str = "") -> None:
        self.run, self.__name__, self.__qualname__, self.__module__ = (run, name, name, "fshard")
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def called(self, observed: bool) -> Callable[..., Any]:
        """Return the function, called in its module if calls are observed."""
        if observed and self.module:
            return partial(as_in_module, self.module, self.run)
        return self.run


def _rank_call(
    line: Operation | Factory, rank: int
) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Return the function that a rank calls for a line, and its arguments with their `Ref`s.

    The function returns one tensor, or for several results a flat list.
    """
    if isinstance(line, Factory):
        if not any(line.spec.partition.dims):
            return line.op, line.args, line.kwargs
        return _NamedFunction(partial(line.create, rank), line.name), (), {}
    strategy = line.strategy
    op, local = strategy.call.op, strategy.rule.local
    nested = not line.single and not _returns_flat(strategy)
    if line.into is not None:
        kwargs = {**line.kwargs, "out": line.into}
        if op is TENSORDOT:
            shapes = [spec.local_shape(rank) for spec in strategy.in_specs]
            product = tensordot_into(*shapes, *line.args[2:])
            return _NamedFunction(product, "tensordot_into"), line.args, kwargs
        return out_overload(op), line.args, kwargs
    if local is None and not nested:
        return op, line.args, line.kwargs
    context = local_call.RankContext(rank, strategy.in_specs, strategy.computed_specs)
    if isinstance(local, local_call.LocalRewrite) and not nested:
        call = local.call(op, line.args, line.kwargs, context)
        if call is not None:
            return call

    attaches = local is not None and context.has_empty

    def run(*args: Any, **kwargs: Any) -> Any:
        out = op(*args, **kwargs) if local is None else local(op, args, kwargs, context)
        if attaches:
            out = local_call.attach_to_operands(out, (*args, *kwargs.values()))
        return local_call.flat(out)[0] if line.single else local_call.flat(out)

    return _NamedFunction(run, line.name), line.args, line.kwargs


_DIRECT: dict[Any, Callable[..., Any]] = BoundedDict()


def _direct(
    strategy: Strategy, rank: int, op: OpOverload[..., Any], args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Callable[..., Any]:  # fmt: skip
    """Return the fastest function that runs an operator on a rank's locals, `args` with `Ref`s."""
    metas = [Meta(spec.local_shape(rank), spec.dtype) for spec in strategy.in_specs]
    refs: list[Ref] = []
    map_call(args, kwargs, Ref, refs.append)
    if len(refs) != len(metas):  # some are numbers
        return builtin_of(op)
    key = op, freeze(fill_call(args, kwargs, Ref, metas))
    try:
        function = _DIRECT.get(key)
    except TypeError:  # an argument without a hash
        return builtin_of(op)
    if function is None:
        with without_dispatch_modes():  # no graph that a tracer records has them
            tensors = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in metas]
        function = direct_function(op, *fill_call(args, kwargs, Ref, tensors))
        _DIRECT[key] = function
    return function


def _returns_flat(strategy: Strategy) -> bool:
    """Return True if the results are a flat list, which can be indexed."""
    tree = strategy.tree
    return isinstance(tree, list | tuple) and all(type(item) is int for item in tree)


def rank_graph(
    lines: Sequence[Line], rank: int, inputs: Sequence[int], outputs: Sequence[int | None]
) -> fx.GraphModule:
    """Return the graph of local operations and programs that one rank runs."""
    graph, root = fx.Graph(), torch.nn.Module()
    env: dict[int, fx.Node] = {value: graph.placeholder(f"x{value}") for value in inputs}
    for line in lines:
        if isinstance(line, ClosureTensor):
            root.register_buffer(f"constant{line.out}", line.tensor)
            env[line.out] = graph.get_attr(f"constant{line.out}")
            continue
        target, args, kwargs = _call_of(line, rank)
        nodes = map_call(args, kwargs, Ref, lambda ref: env[ref.value])
        named = target.__name__ if isinstance(target, _NamedFunction) else None
        name = getattr(line, "name", named)
        node = graph.create_node("call_function", target, *nodes, name=name)
        if isinstance(line, Operation) and isinstance(target, OpOverload):
            node.meta[DIRECT] = _direct(line.strategy, rank, target, args, kwargs)
        if not isinstance(line, GradMode | Write | BeginCheckpoint | EndCheckpoint):
            env[line.out] = node
    graph.output(tuple(None if value is None else env[value] for value in outputs))
    return fx.GraphModule(root, graph, "partitioned")


def _call_of(line: Line, rank: int) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Return the function that a rank calls for a line, and its arguments with their `Ref`s."""
    match line:
        case Operation() | Factory():
            return _rank_call(line, rank)
        case NumberOperation():
            return line.function, line.args, line.kwargs
        case Redistribution():
            name = "_then_".join(_step_name(step) for step in line.program.steps) or "same"
            return _NamedFunction(line.program.__call__, name, line.module), (line.source,), {}
        case Buffer():
            shapes = [spec.local_shape(rank) for spec in line.specs]
            pool = BufferPool(shapes, line.specs[0].dtype, line.device)
            return _NamedFunction(pool, "buffer"), (), {}
        case LaunchBatch():
            names = sorted({step.name for prog in line.programs for step in prog.steps})
            name = "launch_" + "_and_".join(names)
            operands = line.sources if line.buffer is None else (*line.sources, line.buffer)
            return _NamedFunction(partial(launch_line, line), name, line.module), operands, {}
        case WaitBatch():
            return wait, (line.source,), {}
        case Pick():
            return operator.getitem, (line.source, line.index), {}
        case GradMode():
            return SET_GRAD_ENABLED, (line.enabled,), {}
        case CustomGradient():
            attach = _NamedFunction(line.gradient.attach, "custom_gradient")
            return attach, ([*line.operands],), {}
        case RegionCall():
            run = line.region.__call__
            return _NamedFunction(run, "mapped_region", line.module), ([*line.operands],), {}
        case CheckpointedLines():
            used = [ref.value for ref in line.operands]
            graph = rank_graph(line.lines, rank, used, line.outputs)
            compiled = cache(partial(compile_graph, graph))
            run = lambda *xs: line.call.run(compiled(is_observed()), *xs)  # noqa: E731
            return _NamedFunction(run, "checkpointed"), line.operands, {}
        case Copy():
            return torch.clone, (line.source,), {}
        case Write():
            return write_value, (line.target, line.source), {}
        case _:  # blocks of checkpoints are one line by now
            raise AssertionError(line)


def launch_line(line: LaunchBatch, *xs: Any, on_shards: bool = False) -> FinishAll:
    """Launch a batch on this rank's locals, or on the shards of all ranks for each leaf in turn.

    After the locals come the parts of the line's buffer, if it has one.
    """
    if line.buffer is not None:
        *locals_, parts = xs
        targets = dict(zip(line.buffered, parts, strict=True))
        copied = [i for i, part in targets.items() if locals_[i] is not part]
        if copied:
            copy_all([targets[i] for i in copied], [locals_[i] for i in copied])
        xs = tuple([targets.get(i, x) for i, x in enumerate(locals_)])
    with torch.set_grad_enabled(line.grad):
        return launch_programs(line.group, xs, on_shards, waits=line.waits, owned=line.owned)


def wait(finish: FinishAll) -> tuple[torch.Tensor, ...]:
    """Return the results of a launched batch."""
    return finish()


def _step_name(step: object) -> str:
    name = type(step).__name__
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def compile_graph(graph: fx.GraphModule, observed: bool) -> Callable[..., tuple[Any, ...]]:
    """Return the code of a graph as a function that calls C functions of its operations directly.

    Each function is called in its module if calls are `observed`.

    >>> graph = fx.Graph()
    >>> y = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    >>> _ = graph.output((y,))
    >>> compile_graph(fx.GraphModule({}, graph), False)(torch.tensor([-1.0, 2.0]))
    (tensor([0., 2.]),)
    """
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    for node in copy.nodes:
        if isinstance(node.target, OpOverload):
            function = node.meta.get(DIRECT) or builtin_of(node.target)
            name = getattr(function, "__name__", node.name)  # PyTorch 2.14's have none
            node.target = _NamedFunction(function, f"direct_{name}")
    code = copy.python_code("self")
    names = {
        name: value.called(observed) if isinstance(value, _NamedFunction) else value
        for name, value in code.globals.items()
    }
    exec(compile(code.src, "<partitioned>", "exec"), names)
    return partial(names["forward"], graph)


LOCAL_LINES = (
    Operation, NumberOperation, Pick, ClosureTensor, Factory, GradMode, Write, Copy,
)  # fmt: skip
"""Lines that a rank runs without others."""


# -- execution on all ranks -----------------------------------------------------------------


RankCall = tuple[Any, tuple[Any, ...], dict[str, Any], Any]
"""Function, its arguments, and the shape and dtype of its result, None if it returns several."""
PreparedLine = tuple[Line, tuple[Any, ...], tuple[int, ...]]
"""Line, its calls on all ranks or the prepared lines in it, and the values that it reads last."""


def prepare_lines(
    lines: Sequence[Line], mesh: Mesh, outputs: Collection[int]
) -> list[PreparedLine]:
    """Prepare lines for `run_on_all_ranks`; `outputs` are the values that are kept."""
    last_use = {operand: i for i, line in enumerate(lines) for operand in operands_of(line)}
    dead: dict[int, tuple[int, ...]] = {}
    for value, index in last_use.items():
        if value not in outputs:
            dead[index] = (*dead.get(index, ()), value)
    return [
        (line, _prepare_calls(line, mesh), dead.get(index, ())) for index, line in enumerate(lines)
    ]


def _prepare_calls(line: Line, mesh: Mesh) -> tuple[Any, ...]:
    """Return the calls of all ranks for an operation, and the prepared lines of a call."""
    if isinstance(line, CheckpointedLines):
        return tuple(prepare_lines(line.lines, mesh, line.outputs))
    return tuple(_prepare_call(line, rank) for rank in mesh.ranks)


def _prepare_call(line: Line, rank: int) -> RankCall:
    if not isinstance(line, Operation):
        return None, (), {}, None
    function, args, kwargs = _rank_call(line, rank)
    if isinstance(function, OpOverload):
        function = _direct(line.strategy, rank, function, args, kwargs)
    run = function.run if isinstance(function, _NamedFunction) else function
    spec = line.strategy.computed_specs[0] if line.single else None
    expected = None if spec is None else (spec.local_shape(rank), spec.dtype)
    return run, tuple(args), dict(kwargs), expected


def run_on_all_ranks(prepared: Sequence[PreparedLine], mesh: Mesh, env: dict[int, Any]) -> None:
    """Run lines on tuples of all ranks' locals.

    `env` has the tuples of the inputs by value id. The tuples of the outputs are added, and values
    without further use are removed.
    """
    for line, calls, dead in prepared:
        match line:
            case Operation():
                env[line.out] = _run_calls(line, mesh, calls, env)
            case Redistribution():
                env[line.out] = as_in_module(line.module, line.program, env[line.source.value])
            case LaunchBatch():
                shards = [x for source in line.sources for x in env[source.value]]
                launch = partial(launch_line, line, on_shards=True)
                env[line.out] = as_in_module(line.module, launch, *shards)
            case WaitBatch():
                ys, n = wait(env[line.source.value]), mesh.size
                env[line.out] = tuple([ys[rank::n] for rank in range(n)])
            case Pick():
                env[line.out] = tuple([x[line.index] for x in env[line.source.value]])
            case ClosureTensor():
                env[line.out] = replicate_shards(line.tensor, mesh.size)
            case Factory():
                if any(line.spec.partition.dims):
                    env[line.out] = tuple([line.create(rank) for rank in mesh.ranks])
                else:
                    env[line.out] = replicate_shards(line.create(mesh.ranks[0]), mesh.size)
            case NumberOperation():
                args, kwargs = map_call(line.args, line.kwargs, Ref, lambda ref: env[ref.value][0])
                env[line.out] = (line.function(*args, **kwargs),) * mesh.size
            case GradMode():
                torch.set_grad_enabled(line.enabled)
            case CustomGradient():
                outputs = line.gradient.attach([env[ref.value] for ref in line.operands])
                env[line.out] = tuple(zip(*outputs, strict=True))
            case RegionCall():
                operands = [env[ref.value] for ref in line.operands]
                locals_ = as_in_module(line.module, line.region, operands)
                env[line.out] = tuple(zip(*locals_, strict=True))
            case CheckpointedLines():
                env[line.out] = _run_checkpointed(line, mesh, calls, env)
            case Copy():
                env[line.out] = tuple([x.clone() for x in env[line.source.value]])
            case Write():
                values = env[line.source.value]
                for local, value in zip(env[line.target.value], values, strict=True):
                    write_value(local, value)
        for operand in dead:
            del env[operand]


def _run_checkpointed(
    line: CheckpointedLines, mesh: Mesh, prepared: Sequence[PreparedLine], env: Mapping[int, Any]
) -> tuple[Any, ...]:
    """Run the lines of a checkpointed call; return the tuple of the results for every rank."""
    values, n = [ref.value for ref in line.operands], mesh.size

    def run(*shards: Any) -> tuple[Any, ...]:
        inner = {value: shards[i * n : (i + 1) * n] for i, value in enumerate(values)}
        run_on_all_ranks(prepared, mesh, inner)
        return tuple(x for value in line.outputs for x in inner[value])

    results = line.call.run(run, *(x for value in values for x in env[value]))
    return tuple([results[rank::n] for rank in range(n)])


def _run_calls(
    line: Operation, mesh: Mesh, calls: Sequence[RankCall], env: Mapping[int, Any]
) -> tuple[Any, ...]:
    """Run an operation on every rank, and check the results against its specs."""
    results = []
    for index, (function, args, kwargs, expected) in enumerate(calls):
        if kwargs or not CONTAINERS.isdisjoint(map(type, args)):
            pick = lambda ref, index=index: env[ref.value][index]  # noqa: E731
            placed, named = map_call(args, kwargs, Ref, pick)
            out = function(*placed, **named)
        else:
            out = function(*[env[arg.value][index] if type(arg) is Ref else arg for arg in args])
        if expected is None or (out.shape, out.dtype) != expected:
            local_call.check_results(
                line.strategy, mesh.ranks[index], [out] if line.single else out
            )
        results.append(out)
    return tuple(results)


CONTAINERS = {list, tuple}
