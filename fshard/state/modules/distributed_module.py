"""`distribute_module`: a module of one device as a pure function on a mesh."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from fshard._torch.autograd_state import version_of
from fshard._util.dtypes import is_inexact
from fshard._util.errors import Problem, fail, raise_if
from fshard._util.notebook_view import table_of
from fshard._util.text import plural
from fshard.layout.mesh import Axes, Mesh, as_axes, as_mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import broadcast_prefix, read_placements
from fshard.partition.partition import Partition
from fshard.partition.partition import partition as partition_function
from fshard.program.cost.topology import Topology
from fshard.random.keyed import keyed
from fshard.run.global_tensors import shard
from fshard.state.local_updates import map_locals
from fshard.state.modules.functional import Functional, Tensors, functional
from fshard.state.modules.module_attributes import refuse_attribute
from fshard.state.modules.parallel_styles import (
    StyledModule,
    Styles,
    constrained_calls,
    style_layouts,
    styled_modules,
)
from fshard.state.optimizers.zero import zero_specs
from fshard.state.parameters import Rules, are_rules, init, matched_partitions

WHERE = "fs.state.distribute_module"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DistributedModule:
    """Module on a mesh, as `fs.state.distribute_module` returns it: a pure function and its state.

    `distributed(params, buffers, *args, **kwargs)` returns `(output, new_buffers)`, as the
    functions of `fs.state.functional` do. `print(distributed)` shows the layout of each parameter.

    Attributes:
        params: the parameters by name, pairs; tied ones once. Of a meta module without `key`
            specs, to be loaded to.
        buffers: the buffers by name, likewise.
        partition: the `fs.Partition` that runs, a function of `(params, buffers, key)`, the key
            None without draws, and of the module's arguments.
        module: the module of one device, unchanged.
        styled: the submodules with a parallel style.

    A copy and a pickle have the module, the state and the layouts, and no plans.

    >>> import torch
    >>> import fshard as fs
    >>> distributed = fs.state.distribute_module(torch.nn.Linear(4, 8), fs.Mesh(x=2))
    >>> distributed
    Linear on Mesh(x=2): 2 parameters, 0 buffers
    """

    params: Tensors
    buffers: Tensors
    partition: Partition
    module: torch.nn.Module
    styled: Sequence[StyledModule] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        names = "mesh", "in_specs", "out_specs", "params", "topology", "hold"
        options = {name: getattr(self.partition, name) for name in names}
        return _rebuild, (self.module, self.styled, self.params, self.buffers, options)

    def __getattr__(self, name: str) -> NoReturn:
        if name == "module":  # before it is set
            raise AttributeError(name)
        refuse_attribute(self.module, name)

    def __call__(
        self, params: Tensors, buffers: Tensors | None = None, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensors]:
        """Run the module on a state; nothing is written to the state or to the module.

        Args:
            params: pairs in the layouts of `self.params`, or global tensors.
            buffers: pairs in the layouts of `self.buffers`, or global tensors; never None.
            *args: arguments of the module: pairs or global tensors.
            **kwargs: arguments by name.

        Returns:
            `(output, new_buffers)`: pairs if any argument is one.

        Raises:
            ShardingError: the state is missing, or the module cannot be traced on these arguments.
        """
        return self._run(None, params, buffers, *args, **kwargs)

    def keyed(self, key: torch.Tensor, /) -> Callable[..., tuple[Any, Tensors]]:
        """Return the function with its random draws, such as those of dropout, by a key.

        The elements drawn are those of one device: of the module in a block
        `with fs.random.keyed(key):`.

        Args:
            key: key of `fs.random`, equal on every rank.

        Returns:
            A function `fn(params, buffers, *args, **kwargs)` to `(output, new_buffers)`.

        Raises:
            ShardingError: from the call, if `key` is not a key.
        """
        return partial(self._run, key)

    def _run(
        self, key: torch.Tensor | None, params: Tensors, buffers: Tensors | None = None,
        *args: Any, **kwargs: Any,
    ) -> tuple[Any, Tensors]:  # fmt: skip
        if not isinstance(params, Mapping) or not isinstance(buffers, Mapping):
            refuse_attribute(self.module, "forward")
        result: tuple[Any, Tensors] = self.partition((params, buffers, key), *args, **kwargs)
        return result

    @property
    def mesh(self) -> Mesh:
        """Mesh that the module runs on."""
        return self.partition.mesh

    @property
    def specs(self) -> dict[str, dict[str, Spec]]:
        """Layouts of `{"params": ..., "buffers": ...}`, as `fs.state.load` takes them."""
        params, buffers, _ = self.partition.params
        return {"params": params, "buffers": buffers}

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """Return a table of a call's operations, layouts and bytes, as `fs.Partition.explain` does.

        Args:
            *args: arguments of the module: pairs, tensors (also on the meta device) or specs.
            **kwargs: arguments by name.

        Raises:
            ShardingError: the module cannot be traced on these arguments.
        """
        state = self.params, self.buffers
        if any(isinstance(x, Spec) for tensors in state for x in tensors.values()):
            form = functional(self.module)  # says which tensors require grad
            state = dict(form.params), dict(form.buffers)
        return self.partition.explain((*state, None), *args, **kwargs)

    def __repr__(self) -> str:
        counts = (plural(len(x), noun) for x, noun in
                  ((self.params, "parameter"), (self.buffers, "buffer")))  # fmt: skip
        return f"{type(self.module).__name__} on {self.mesh}: {', '.join(counts)}"

    def __str__(self) -> str:
        return str(table_of(self))

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        bundle: dict[str, str] = table_of(self)._repr_mimebundle_()
        return bundle


def distribute_module(
    module: torch.nn.Module,
    mesh: Mesh,
    /,
    *,
    partition: Rules | Any = PartitionSpec(),  # noqa: B008 - immutable
    styles: Styles | None = None,
    fsdp: Axes = (),
    in_specs: Any = None,
    out_specs: Any = None,
    hold: Axes = (),
    topology: Topology | None = None,
    uneven: str | None = None,
    key: torch.Tensor | None = None,
    init_fn: Callable[[torch.nn.Module], Any] | None = None,
) -> DistributedModule:
    r"""Distribute a module over a mesh from layouts of its parameters; the module is not changed.

    The functional form of the module (`fs.state.functional`) is partitioned as by `fs.partition`,
    which plans all communication. Nothing is registered on the module; its tensors are copied.

    Args:
        module: any module, also on the meta device; its values must be equal on every rank
            (`fs.state.sync_module` makes them so).
        mesh: the mesh.
        partition: layouts of the parameters: rules as for `fs.state.match_rules`, such as those of
            `fs.state.model_rules`, or a prefix of the tree of parameters. Rules may name buffers,
            which otherwise are replicated, as by default everything is.
        styles: parallel styles by regular expressions on paths of modules, the first that matches
            counts. Parameters of styled modules have the layouts of their style, all others those
            of `partition`. Arguments and results of styled modules are constrained where the
            module is called by its `forward` hooks, which are there during the call alone; a layer
            whose weight the module reads without calling it has no such boundary.
        fsdp: axes that shard every parameter further, as by `fs.state.zero_specs`: FSDP, ZeRO-3.
            A dim that they do not divide is chunked.
        in_specs: layouts of the module's arguments, as for `fs.partition`.
        out_specs: layouts of the module's results; None leaves them as they come out.
        hold: axes along which parameters stay sharded where they are used, as in tensor
            parallelism; parameters of `styles` always do.
        topology: the topology that layouts are costed on; None is one node.
        uneven: "chunk" to chunk dims that are not divisible, as `torch.chunk` does.
        key: key of `fs.random` from which the tensors of a meta module are created, each rank its
            own shards.
        init_fn: function of a module that writes its initial values in place; by default
            `reset_parameters` of every submodule. For models of transformers:
            `lambda model: model.apply(model._init_weights)`.

    Returns:
        The `DistributedModule`, with `.params` and `.buffers` as trees of pairs. Locals are plain
        tensors, leaves of autograd that require grad where the parameter does.

    Raises:
        ShardingError: lists parameters that no rule matches, rules and styles that are not used,
            dims that do not divide, each with its fix; a meta module whose tensors nothing
            initialises. Single tensors of floating dtypes that nothing writes are NaN.

    A call is differentiable, also by `torch.func`: the gradient of a parameter has its dual layout.

    The counterpart of DTensor's `distribute_module` and `parallelize_module`.

    >>> import torch
    >>> import fshard as fs
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> mesh, P = fs.Mesh(dp=2, tp=2), fs.P
    >>> distributed = fs.state.distribute_module(
    ...     mlp, mesh, in_specs=P("dp"),
    ...     styles={"0": fs.state.colwise("tp"), "2": fs.state.rowwise("tp")})
    >>> y, _ = distributed(distributed.params, distributed.buffers, torch.ones(6, 4))
    >>> y.spec, torch.allclose(fs.unshard(y), mlp(torch.ones(6, 4)))
    (f32[6@dp,2], True)
    >>> print(distributed)
    Sequential on Mesh(dp=2, tp=2): 4 parameters, 0 buffers
              layout       bytes  of a rank
    ───────────────────────────────────────
    0.weight  f32[8@tp,4]  128 B       64 B
    0.bias    f32[8@tp]     32 B       16 B
    2.weight  f32[2,8@tp]   64 B       32 B
    2.bias    f32[2]         8 B        8 B
    ───────────────────────────────────────
                           232 B      120 B
    """
    mesh = as_mesh(mesh, WHERE)
    if not isinstance(module, torch.nn.Module):
        fail(WHERE, f"a {type(module).__name__}", "the first argument must be a module",
             "fs.partition(fn, mesh=mesh, ...) of a function")  # fmt: skip
    form = functional(module)
    styled = styled_modules(WHERE, module, styles or {})
    specs = _layouts(
        form,
        mesh,
        read_placements(partition, mesh),
        styled,
        as_axes(fsdp, f"{WHERE}: fsdp"),
        uneven,
    )
    held = (*as_axes(hold, f"{WHERE}: hold"), *(a for item in styled for a in item.style.axes))
    part = partition_function(
        _on_state(form.fn, styled), mesh=mesh, params=(*specs, PartitionSpec()), in_specs=in_specs,
        out_specs=(out_specs, specs[1]), topology=topology, hold=tuple(dict.fromkeys(held)),
    )  # fmt: skip
    state = _initial(form, module, mesh, specs, key, init_fn)
    return DistributedModule(*state, part, module, styled)


def _rebuild(
    module: torch.nn.Module, styled: Sequence[StyledModule], params: Tensors, buffers: Tensors,
    options: dict[str, Any],
) -> DistributedModule:  # fmt: skip
    """Return the distributed module that a pickle or a copy has the parts of."""
    part = partition_function(_on_state(functional(module).fn, styled), **options)
    return DistributedModule(params, buffers, part, module, styled)


def _on_state(fn: Callable[..., Any], styled: Sequence[StyledModule]) -> Callable[..., Any]:
    """Return a function of `(params, buffers, key)` and arguments, in the layouts of styles."""

    def run(
        state: tuple[Tensors, Tensors, torch.Tensor | None], *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensors]:
        params, buffers, key = state
        draws = nullcontext() if key is None else keyed(key)
        with draws, constrained_calls(styled):
            result: tuple[Any, Tensors] = fn(params, buffers, *args, **kwargs)
            return result

    run.__name__ = fn.__name__
    first = inspect.Parameter("state", inspect.Parameter.POSITIONAL_ONLY)
    _, _, *parameters = inspect.signature(fn).parameters.values()
    run.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    return run


# -- layouts ---------------------------------------------------------------------------------


def _layouts(
    form: Functional,
    mesh: Mesh,
    partition: Any,
    styled: Sequence[StyledModule],
    fsdp: tuple[str, ...],
    uneven: str | None,
) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Return the specs of parameters and of buffers."""
    if uneven not in (None, "chunk"):
        fail(WHERE, f"uneven={uneven!r}", 'uneven must be None or "chunk"', 'uneven="chunk"')
    mesh.check_axes(fsdp, f"{WHERE}: fsdp")
    by_style = style_layouts(WHERE, styled, form.params)
    others = {name: x for name, x in form.params.items() if name not in by_style}
    rules: list[tuple[str, PartitionSpec | None]] = [
        _exact_rule(name, p) for name, p in by_style.items()
    ]
    if are_rules(partition):
        rules += partition
    else:
        given = broadcast_prefix(partition, others, "partition", WHERE)
        rules += map(_exact_rule, sorted(others), given)
    rules += [
        _exact_rule(name) for name in form.buffers
        if not any(re.fullmatch(pattern, name) for pattern, _ in rules)
    ]  # fmt: skip
    tensors = {**form.params, **form.buffers}
    checked = mesh if uneven is None else None
    matched = matched_partitions(WHERE, rules, tensors, checked, 'uneven="chunk"')

    def spec_of(name: str, p: PartitionSpec | None, uneven: str | None) -> Spec:
        x, p = tensors[name], PartitionSpec() if p is None else p
        return Spec(mesh, p, shape=tuple(x.shape), dtype=x.dtype, uneven=uneven)

    specs = {name: spec_of(name, p, uneven) for name, p in matched.items()}
    params, buffers = ({name: specs[name] for name in x} for x in (form.params, form.buffers))
    if fsdp:
        params = {name: spec_of(name, p, "chunk") for name, p in zero_specs(params, fsdp).items()}
    return params, buffers


def _exact_rule(
    name: str,
    p: PartitionSpec | None = PartitionSpec(),  # noqa: B008 - immutable
) -> tuple[str, PartitionSpec | None]:
    """Return the rule of one leaf."""
    return re.escape(name), p


# -- values ----------------------------------------------------------------------------------


def _initial(
    form: Functional,
    module: torch.nn.Module,
    mesh: Mesh,
    specs: tuple[dict[str, Spec], dict[str, Spec]],
    key: torch.Tensor | None,
    init_fn: Callable[[torch.nn.Module], Any] | None,
) -> tuple[Tensors, Tensors]:
    """Return parameters and buffers: of the module's values, or created from a key, or specs."""
    tensors = form.params, form.buffers
    meta = [name for x in tensors for name, value in x.items() if value.is_meta]
    if key is not None and len(meta) == len(form.params) + len(form.buffers):
        return _created(module, mesh, specs, key, init_fn)
    problems = []
    if key is not None:
        problems.append(Problem("a key, for a module with values",
                                "a module that is created from a key must be on the meta device",
                                'with torch.device("meta"): around its constructor'))  # fmt: skip
    elif 0 < len(meta) < len(form.params) + len(form.buffers):
        problems.append(Problem(f"{', '.join(meta[:4])} on the meta device, others with values",
                                "all tensors of a module must be on the meta device, or none",
                                'with torch.device("meta"): around its constructor'))  # fmt: skip
    raise_if(WHERE, problems)
    if meta:
        return dict(specs[0]), dict(specs[1])
    params, buffers = (
        {name: _owned(x, layouts[name]) for name, x in values.items()}
        for values, layouts in zip(tensors, specs, strict=True)
    )
    return params, buffers


def _owned(x: torch.Tensor, spec: Spec) -> Sharded:
    """Return a tensor's pair, in memory of its own, whose locals require grad if `x` does."""
    return _leaves(shard(x.detach(), spec), requires_grad=x.requires_grad)


def _leaves(pair: Sharded, *, requires_grad: bool) -> Sharded:
    (local,) = map_locals(lambda xs: [xs[0].clone().requires_grad_(requires_grad)], [pair])
    return Sharded(local, pair.spec)


class _Initializer(torch.nn.Module):
    """Module that initialises another one when it is called.

    It raises `ShardingError` for tensors of integers or bools that nothing writes. Tensors of
    other dtypes stay as they are: NaN, which shows.
    """

    def __init__(self, module: torch.nn.Module, init_fn: Callable[[torch.nn.Module], Any]) -> None:
        super().__init__()
        self.module, self.init_fn = module, init_fn

    def forward(self) -> None:
        """Write the initial values in place."""
        before = self._versions()
        with torch.no_grad():
            self.init_fn(self.module)
        raise_if(WHERE, [
            Problem(f"{name} of {x.dtype} on the meta device, which init_fn does not write",
                    "every tensor of a meta module must be initialised",
                    f"init_fn=fn with a function that also writes {name} in place")
            for name, (x, version) in self._versions().items()
            if before[name][0] is x and before[name][1] == version
            and not is_inexact(x)
        ])  # fmt: skip

    def _versions(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Return every tensor of the module and the number of writes to it."""
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: (x, version_of(x)) for name, x in tensors}


def _created(
    module: torch.nn.Module,
    mesh: Mesh,
    specs: tuple[dict[str, Spec], dict[str, Spec]],
    key: torch.Tensor,
    init_fn: Callable[[torch.nn.Module], Any] | None,
) -> tuple[Tensors, Tensors]:
    """Return parameters and buffers created from a key, each rank its own shards."""
    if init_fn is None:
        _check_initialised(module)
    initialize = functional(_Initializer(module, init_fn or _reset_all))
    prefix = len("module.")

    def create(key: torch.Tensor) -> tuple[Tensors, Tensors]:
        params, buffers = (
            {
                name: torch.full(x.shape, math.nan if x.is_floating_point() else 0, dtype=x.dtype)
                for name, x in tensors.items()
            }  # a value that nothing writes stays NaN on every rank
            for tensors in (initialize.params, initialize.buffers)
        )
        with keyed(key):
            _, buffers = initialize.fn(params, buffers)
        return ({name[prefix:]: x for name, x in params.items()},
                {name[prefix:]: x for name, x in buffers.items()})  # fmt: skip

    params, buffers = init(create, key, specs, mesh=mesh)
    flags = {name: x.requires_grad for name, x in module.named_parameters()}
    return {name: _leaves(x, requires_grad=flags[name]) for name, x in params.items()}, buffers


def _reset_all(module: torch.nn.Module) -> None:
    """Call `reset_parameters` of all submodules that have it, the innermost first."""
    module.apply(lambda submodule: getattr(submodule, "reset_parameters", lambda: None)())


def _check_initialised(module: torch.nn.Module) -> None:
    """Raise `ShardingError` for tensors of submodules without `reset_parameters`."""
    raise_if(WHERE, [
        Problem(f"{path or type(module).__name__}, a {type(submodule).__name__} on the meta device "
                "without reset_parameters()",
                "every tensor of a meta module must be initialised",
                "init_fn=fn, a function of the module that writes them all in place; "
                "lambda model: model.apply(model._init_weights) for models of transformers")
        for path, submodule in module.named_modules()
        if not hasattr(submodule, "reset_parameters")
        and next(submodule.parameters(recurse=False), next(submodule.buffers(recurse=False), None))
        is not None
    ])  # fmt: skip
