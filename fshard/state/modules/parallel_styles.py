"""Parallel styles of modules as data: layouts of their parameters, arguments and results.

A style says which dims of a module's tensors are sharded over some mesh axes. `distribute_module`
turns a plan of styles into layouts of parameters and into constraints (`fs.constrain`) on what
enters and leaves each module. Forward hooks impose the constraints: they are registered when a call
begins and removed when it ends, so that the module is not changed and its code runs as it is.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard._util.errors import Problem, did_you_mean, fail, raise_if
from fshard.layout.mesh import Axes, as_axes
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.tree import flatten, leaf_names, unflatten
from fshard.ops.trace.trace import constrain

Dims = Mapping[int | str, int | None]
"""Dim that is sharded, None for none, of tensors by index or name; others keep their layout."""
Styles = Mapping[str, "Style"]
"""Styles by regular expression on the paths of modules, in order of precedence."""


@dataclass(frozen=True, slots=True)
class Style:
    """Layouts of one module along some mesh axes, as `fs.state.colwise` and others return it.

    Along all other axes its tensors keep their layouts.

    Attributes:
        name: the function that made it.
        axes: the mesh axes, major to minor.
        weight: the part of the module's own parameters that the axes shard: `"outputs"`,
            `"inputs"`, nothing (`"replicated"`), or `""` where the style has no request for them.
        inputs: the dim that the axes shard, None for none, of arguments by position or name.
        outputs: likewise of results' tensors, by position or by path.

    >>> import fshard as fs
    >>> fs.state.rowwise("tp").weight
    'inputs'
    """

    name: str
    axes: tuple[str, ...]
    weight: str
    inputs: Dims
    outputs: Dims

    def __post_init__(self) -> None:
        where, problems = f"fs.state.{self.name}", []
        if len({*self.axes}) != len(self.axes):
            problems.append(Problem(f"axes {self.axes}", "an axis must be named once",
                                    repr(tuple(dict.fromkeys(self.axes)))))  # fmt: skip
        for attribute in ("inputs", "outputs"):
            dims = getattr(self, attribute)
            if not isinstance(dims, Mapping):
                fail(where, f"{dims!r} as dims", "dims must map positions or names to dims",
                     "{0: None}, for the first tensor replicated")  # fmt: skip
            object.__setattr__(self, attribute, dict(dims))
            problems += [
                Problem(f"the dim {dim!r} of {key!r}", "a dim must be an int or None",
                        f"{{{key!r}: 0}}")
                for key, dim in dims.items() if dim is not None and type(dim) is not int
            ]  # fmt: skip
        raise_if(where, problems)


def colwise(axes: Axes, /, *, output: int | None = -1) -> Style:
    """Return the style of a layer whose outputs are sharded: each rank computes some columns.

    Args:
        axes: mesh axis, or axes major to minor.
        output: dim of the result that stays sharded, the last one; None gathers it.

    Returns:
        The style of `nn.Linear` (weight `P(axes)`, bias `P(axes)`), of `nn.Embedding` and of the
        `Conv1D` of transformers (weight `P(None, axes)`). The argument is replicated along the
        axes.

    Raises:
        ShardingError: axes are not names, or a dim is not an int.

    Megatron-LM's column-parallel layer (arXiv 1909.08053), DTensor's `ColwiseParallel`.

    >>> import fshard as fs
    >>> fs.state.colwise("tp").outputs
    {0: -1}
    """
    return Style("colwise", as_axes(axes, "fs.state.colwise"), "outputs", {0: None}, {0: output})


def rowwise(axes: Axes, /, *, output: int | None = None) -> Style:
    """Return the style of a layer whose inputs are sharded: results are summed over the axes.

    Args:
        axes: mesh axis, or axes major to minor.
        output: dim of the result that is sharded, by a reduce-scatter; None for an all-reduce.

    Returns:
        The style of `nn.Linear` (weight `P(None, axes)`, bias replicated, the last dim of the
        argument sharded), of the `Conv1D` of transformers (weight `P(axes)`), and of
        `nn.Embedding` (weight `P(axes)`: the vocabulary is sharded).

    Raises:
        ShardingError: axes are not names, or a dim is not an int.

    Megatron-LM's row-parallel layer (arXiv 1909.08053), DTensor's `RowwiseParallel`.

    >>> import fshard as fs
    >>> fs.state.rowwise("tp", output=1).outputs
    {0: 1}
    """
    return Style("rowwise", as_axes(axes, "fs.state.rowwise"), "inputs", {0: -1}, {0: output})


def sequence(axes: Axes, /, *, dim: int = 1) -> Style:
    """Return the style of a layer that runs on parts of the sequence, as a norm or a dropout.

    Args:
        axes: mesh axis, or axes major to minor.
        dim: the dim of the sequence, sharded in the argument and in the result.

    Returns:
        The style; the layer's parameters are replicated along the axes, and their gradients summed.

    Raises:
        ShardingError: axes are not names, or a dim is not an int.

    Megatron-LM's sequence parallelism (arXiv 2205.05198), DTensor's `SequenceParallel`.

    >>> import fshard as fs
    >>> fs.state.sequence("tp").inputs
    {0: 1}
    """
    return Style("sequence", as_axes(axes, "fs.state.sequence"), "replicated", {0: dim}, {0: dim})


def prepare_input(axes: Axes, /, dims: Dims) -> Style:
    """Return the style of a module whose arguments are redistributed before it runs.

    Args:
        axes: mesh axis, or axes major to minor.
        dims: for arguments by position or by name the dim that the axes shard, None for none.
            Other arguments keep their layouts.

    Returns:
        The style; it has no layout for parameters.

    Raises:
        ShardingError: axes are not names, or a dim is not an int.

    DTensor's `PrepareModuleInput`.

    >>> import fshard as fs
    >>> fs.state.prepare_input("tp", {"hidden_states": None}).inputs
    {'hidden_states': None}
    """
    return Style("prepare_input", as_axes(axes, "fs.state.prepare_input"), "", dims, {})


def prepare_output(axes: Axes, /, dims: Dims) -> Style:
    """Return the style of a module whose results are redistributed after it.

    Args:
        axes: mesh axis, or axes major to minor.
        dims: for results' tensors, by position among them or by path, the dim that the axes shard,
            None for none. Other results keep their layouts.

    Returns:
        The style; it has no layout for parameters.

    Raises:
        ShardingError: axes are not names, or a dim is not an int.

    DTensor's `PrepareModuleOutput`.

    >>> import fshard as fs
    >>> fs.state.prepare_output("tp", {0: 1}).outputs
    {0: 1}
    """
    return Style("prepare_output", as_axes(axes, "fs.state.prepare_output"), "", {}, dims)


def loss_parallel(axes: Axes, /, *, dim: int = 1) -> Style:
    """Return the style of a loss on logits that stay sharded over classes.

    Args:
        axes: mesh axis, or axes major to minor.
        dim: the dim of classes of the first argument.

    Returns:
        The style of a module such as `nn.CrossEntropyLoss`: the targets are replicated, and the
        ranks exchange maxima and sums of each row in the place of logits. A loss that is not a
        module needs no style: logits of a `colwise` layer stay sharded.

    Raises:
        ShardingError: axes are not names, or a dim is not an int.

    DTensor's `loss_parallel`.

    >>> import fshard as fs
    >>> fs.state.loss_parallel("tp").inputs
    {0: 1, 1: None}
    """
    axes = as_axes(axes, "fs.state.loss_parallel")
    return Style("loss_parallel", axes, "", {0: dim, 1: None}, {0: None})


# -- expansion -------------------------------------------------------------------------------


class StyledModule(NamedTuple):
    """Module with its path and its style."""

    path: str
    module: torch.nn.Module
    style: Style

    @property
    def where(self) -> str:
        """The style and its module, for errors."""
        return f"fs.state.{self.style.name} of {self.path!r}"


def styled_modules(where: str, module: torch.nn.Module, styles: Styles) -> list[StyledModule]:
    """Return the modules that a plan names, each with the first style that matches a path of it.

    Raises:
        ShardingError: a pattern is not a regular expression or matches no module, or a style does
            not fit its module.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    unused, problems = dict(styles), list[Problem]()
    styled: dict[torch.nn.Module, StyledModule] = {}
    for path, submodule in modules.items():
        for pattern, style in styles.items():
            if _compiled(where, pattern, style).fullmatch(path):
                unused.pop(pattern, None)
                if submodule not in styled:  # a module with several paths has one style
                    styled[submodule] = StyledModule(path, submodule, style)
                    problems += _unfit(styled[submodule])
                break
    problems += [
        Problem(f"the style {pattern!r}", "every pattern must be the first that matches the path "
                "of some module", did_you_mean(pattern, list(modules), "remove it, or move it "
                                               "before the pattern that matches its modules"))
        for pattern in unused
    ]  # fmt: skip
    raise_if(where, problems)
    return [*styled.values()]


def _compiled(where: str, pattern: str, style: Style) -> re.Pattern[str]:
    """Return a pattern; raise `ShardingError` for one that is none, or for a style that is none."""
    try:
        if isinstance(style, Style):
            return re.compile(pattern)
        given = f"{style!r} for {pattern!r}"
    except (TypeError, re.error) as error:
        given = f"{pattern!r}: {error}"
    fail(where, given, "styles must map regular expressions on paths of modules to styles",
         r'{r"layers\.\d+\.up": fs.state.colwise("tp")}')  # fmt: skip


def _weight_dims(module: torch.nn.Module) -> tuple[int, int] | None:
    """Return the dims of outputs and of inputs of a layer's weight, None for an unknown layer."""
    if isinstance(module, torch.nn.Linear):
        return 0, 1
    if isinstance(module, torch.nn.Embedding) or _is_transposed_linear(module):
        return 1, 0
    return None


def _is_transposed_linear(module: torch.nn.Module) -> bool:
    """Return True for the `Conv1D` of transformers, a linear layer of weight (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _unfit(styled: StyledModule) -> list[Problem]:
    """Return the problems of a module with its style."""
    path, module, style = styled
    problems = []
    if style.weight in ("outputs", "inputs") and _weight_dims(module) is None:
        problems.append(Problem(f"{style.name} for {path!r}, a {type(module).__name__}",
                                "the module must be a Linear, an Embedding or a Conv1D",
                                "the paths of its layers; or rules in partition="))  # fmt: skip
    parameters = inspect.signature(module.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return problems
    return problems + [
        Problem(f"{style.name} for {path!r}: {name!r}",
                f"an argument must be one of {', '.join(parameters)}",
                did_you_mean(name, list(parameters), "its position"))
        for name in style.inputs if isinstance(name, str) and name not in parameters
    ]  # fmt: skip


def style_layouts(
    where: str, styled: Sequence[StyledModule], params: Mapping[str, torch.Tensor]
) -> dict[str, PartitionSpec]:
    """Return the partitions of the parameters of styled modules, by name.

    Args:
        where: function, for errors.
        styled: the modules.
        params: all parameters, tied ones under their first name.

    Raises:
        ShardingError: styles request different layouts of a tied weight.
    """
    names = {id(x): name for name, x in params.items()}
    layouts: dict[str, tuple[PartitionSpec, StyledModule]] = {}
    problems = []
    for item in styled:
        for x, p in _partitions(item.module, item.style) if item.style.weight else ():
            name = names[id(x)]
            other, first = layouts.setdefault(name, (p, item))
            if other != p:
                problems.append(Problem(
                    f"{name}: {other!r} by {first.style.name} of {first.path!r}, and {p!r} by "
                    f"{item.style.name} of {item.path!r}", "a tied weight must have one layout",
                    "rowwise for the embedding, colwise for the layer of logits"))  # fmt: skip
    raise_if(where, problems)
    return {name: p for name, (p, _) in layouts.items()}


def _partitions(
    module: torch.nn.Module, style: Style
) -> Iterator[tuple[torch.Tensor, PartitionSpec]]:
    """Yield the parameters of a layer, and the partition of each.

    A weight of `torch.nn.utils.parametrize` is computed from parameters. A parameter of its size
    in the sharded dim is sharded as the weight is, such as the original and one factor of LoRA.
    """
    for x in module.parameters(recurse=False):
        yield x, _partition(module, style, x.ndim)
    for parametrized in getattr(module, "parametrizations", {}).values():
        shape = max((x.shape for x in parametrized.parameters(recurse=False)), key=math.prod)
        p = _partition(module, style, len(shape))
        for x in parametrized.parameters():
            fits = x.ndim == len(shape) and all(
                not names or x.shape[d] == shape[d] for d, names in enumerate(p.dims)
            )
            yield x, p if fits else PartitionSpec()


def _partition(module: torch.nn.Module, style: Style, ndim: int) -> PartitionSpec:
    """Return the partition of a parameter of `ndim` dims: a weight, or a bias of outputs."""
    dims = _weight_dims(module)
    if style.weight == "replicated" or dims is None:
        return PartitionSpec()
    if ndim == 1:
        return PartitionSpec(style.axes if style.weight == "outputs" else None)
    return _sharded(dims[style.weight == "inputs"], ndim, style.axes)


def _sharded(dim: int | None, ndim: int, axes: tuple[str, ...]) -> PartitionSpec:
    """Return the partition that shards one dim, or none."""
    return PartitionSpec() if dim is None else PartitionSpec(*(None,) * (dim % ndim), axes)


# -- calls -----------------------------------------------------------------------------------


@contextmanager
def constrained_calls(styled: Sequence[StyledModule]) -> Iterator[None]:
    """Constrain in a block what enters and leaves styled modules, by hooks removed at its end."""
    with ExitStack() as stack:
        for item in styled:
            before, after = (partial(hook, item) for hook in (_before, _after))
            stack.enter_context(item.module.register_forward_pre_hook(before, with_kwargs=True))
            stack.enter_context(item.module.register_forward_hook(after))
        yield


def _before(
    styled: StyledModule, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a module's arguments in the layouts of its style."""
    names = list(inspect.signature(module.forward).parameters)
    arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for key, dim in styled.style.inputs.items():
        index = names.index(key) if isinstance(key, str) and key in names else key
        name = names[index] if isinstance(index, int) and index < len(names) else key
        used = index if index in arguments else name
        if used in arguments:
            is_index = isinstance(module, torch.nn.Embedding)
            arguments[used] = _constrained(styled, arguments[used], None if is_index else dim)
    return tuple(arguments[i] for i in range(len(args))), {name: arguments[name] for name in kwargs}


def _after(
    styled: StyledModule, module: torch.nn.Module, args: tuple[Any, ...], output: Any
) -> Any:
    """Return a module's results in the layouts of its style."""
    leaves, treedef = flatten(output)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    indices: dict[int | str, int] = {**dict(enumerate(tensors))}
    indices |= {name: i for i, name in enumerate(leaf_names(output))}
    for key, dim in styled.style.outputs.items():
        if key not in indices:
            fail(styled.where, f"the result {key!r}", "a result must be one of "
                 f"{', '.join(map(repr, indices))}", "0, for the first tensor")  # fmt: skip
        leaves[indices[key]] = _constrained(styled, leaves[indices[key]], dim)
    return unflatten(treedef, leaves)


def _constrained(styled: StyledModule, x: Any, dim: int | None) -> Any:
    """Return a tensor sharded along a style's axes at a dim; other values stay."""
    if not isinstance(x, torch.Tensor):
        return x
    if dim is not None and not -x.ndim <= dim < x.ndim:
        fail(styled.where, f"dim {dim} of a tensor of shape {tuple(x.shape)}",
             f"the dim must be in {-x.ndim}..{x.ndim - 1}", "a dim that it has")  # fmt: skip
    axes = styled.style.axes
    return constrain(x, _sharded(dim, x.ndim, axes), axes=axes)
