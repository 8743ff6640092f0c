"""Arguments of a partitioned function: by position, their specs, and the key of a call."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard._torch.functorch import innermost_level, is_transformed
from fshard._torch.module_state import call_with_state
from fshard._util.errors import Problem, ShardingError, fail
from fshard._util.signatures import CALL, bind_call
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import opaque_problem
from fshard.ops.core.call import instances_in
from fshard.plan.redistribute import redistribute
from fshard.run.execute import check_pair
from fshard.run.global_tensors import local_of

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class CallSignature:
    """Cache key of a call beside its specs.

    Attributes:
        requires_grad: for every tensor, if its gradient is requested.
        devices: the device of every tensor.
        grad_enabled: the grad mode.
        ambient: the default dtype, and the key of the state of Python.
    """

    requires_grad: tuple[bool, ...]
    devices: tuple[torch.device, ...]
    grad_enabled: bool
    ambient: Any

    @staticmethod
    def of(
        leaves: Sequence[Any], specs: Sequence[Spec | None], ambient: Any, *, runs: bool
    ) -> CallSignature:
        """Return the signature of a call; unless it `runs`, meta tensors count as CPU tensors."""
        enabled, tensors = torch.is_grad_enabled(), tensor_leaves(leaves, specs)
        flags = tuple(enabled and requires_grad(leaf) for leaf in tensors)
        devices = [_device(leaf) for leaf in tensors]
        if not runs:
            devices = [CPU if device.type == "meta" else device for device in devices]
        return CallSignature(flags, tuple(devices), enabled, ambient)

    @property
    def device(self) -> torch.device:
        """Device of the first tensor that is not on the CPU, else the CPU."""
        return next((device for device in self.devices if device != CPU), CPU)


def _device(leaf: Any) -> torch.device:
    """Return the device of a tensor or of a pair's local; a spec counts as a CPU tensor."""
    tensors = instances_in(leaf.local if isinstance(leaf, Sharded) else leaf, torch.Tensor)
    return tensors[0].device if tensors else CPU


def tensor_leaves(leaves: Sequence[Any], specs: Sequence[Spec | None]) -> list[Any]:
    """Return the leaves that have a spec: tensors, pairs and specs."""
    return [leaf for leaf, spec in zip(leaves, specs, strict=True) if spec is not None]


def locals_of(
    tensors: Sequence[Any], specs: Sequence[Spec], written: Sequence[int], where: str
) -> list[Any]:
    """Return the locals of pairs and plain tensors, `written` ones in memory of their own."""
    locals_ = []
    for index, (x, spec) in enumerate(zip(tensors, specs, strict=True)):
        is_pair = isinstance(x, Sharded)
        locals_.append(x.local if is_pair else local_of(x, spec, where, copied=index in written))
    return locals_


def requires_grad(leaf: Any) -> bool:
    """Return True if the gradient of a leaf is requested; of a spec, if its dtype allows one."""
    if isinstance(leaf, Spec):
        return leaf.dtype.is_floating_point
    local = leaf.local if isinstance(leaf, Sharded) else leaf
    if is_transformed():  # a wrapper does not show what is requested of the value in it
        return any(innermost_level(x) is not None for x in instances_in(local, torch.Tensor))
    if isinstance(local, torch.Tensor):
        return local.requires_grad
    return isinstance(local, Sequence) and any(getattr(x, "requires_grad", False) for x in local)


def tracked(leaves: Sequence[Any]) -> tuple[bool, ...]:
    """Return `requires_grad` of the leaves whose cache key does not show it.

    These are a rank's pairs, and under `torch.func` all leaves.
    """
    if is_transformed():
        return tuple(map(requires_grad, leaves))
    return tuple(
        [
            leaf.local.requires_grad
            for leaf in leaves
            if type(leaf) is Sharded and isinstance(leaf.local, torch.Tensor)
        ]
    )


def bind(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call: by position, and those that have a name alone.

    Parameters left out in between get their defaults.

    Raises:
        SignatureError: for a call that does not fit the signature; it is a `TypeError`, too.

    >>> bind(lambda x, scale=1.0, mask=None, *, sign=1: x, (0,), {"mask": 2, "sign": 3}, "f")
    ((0, 1.0, 2), {'sign': 3})
    """
    bound = bind_call(where, inspect.signature(fn), args, kwargs)
    passed = {*bound.arguments}
    bound.apply_defaults()
    positional: list[Any] = []
    named: dict[str, Any] = {}
    count = 0
    for name, parameter in bound.signature.parameters.items():
        value = bound.arguments[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= value
        elif parameter.kind is parameter.KEYWORD_ONLY:
            named |= {name: value} if name in passed else {}
        else:
            positional += value if parameter.kind is parameter.VAR_POSITIONAL else [value]
            count = len(positional) if name in passed else count
    return tuple(positional[:count]), named


def module_function(module: torch.nn.Module, where: str, call: str) -> Callable[..., Any]:
    """Return a module as a function of a dict of its parameters and of its arguments.

    Args:
        module: the module.
        where: the caller, for errors.
        call: a call of the function with the module's parameters, for errors.
    """

    def run(params: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(params, dict):
            rule = "a module must be called with a dict of its parameters first"
            given = "a first argument that is not a dict"
            fail(f"{where}({type(module).__name__})", given, rule, call)
        values = with_tied_names(module, params)
        return call_with_state(module, values, args, kwargs)

    run.__name__ = type(module).__name__
    setattr(run, CALL, call)
    signature = inspect.signature(type(module).forward)
    itself, *parameters = signature.parameters.values()
    if "params" not in signature.parameters:
        itself = itself.replace(name="params")
    run.__signature__ = signature.replace(parameters=[itself, *parameters])  # type: ignore[attr-defined]
    return run


def with_tied_names(module: torch.nn.Module, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters and buffers by name, and those that are tied under all their names.

    A name that is left out has the value of the first that is there.
    """
    tied: dict[int, list[str]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, x in named(remove_duplicate=False):
            tied.setdefault(id(x), []).append(name)
    values = dict(params)
    for names in tied.values():
        first = next((name for name in names if name in params), None)
        if first is not None:
            values |= {name: params.get(name, params[first]) for name in names}
    return values


def repeated_tensors(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return for every leaf the index of the first that is the same tensor or pair.

    The result is empty if all differ.
    """
    if len({*map(id, leaves)}) == len(leaves):
        return ()
    firsts: dict[int, int] = {}
    kinds = torch.Tensor | Sharded
    firsts_of_leaves = tuple(
        firsts.setdefault(id(leaf), index) if isinstance(leaf, kinds) else index
        for index, leaf in enumerate(leaves)
    )
    return () if firsts_of_leaves == tuple(range(len(leaves))) else firsts_of_leaves


def importable(fn: Callable[..., Any], where: str) -> Callable[..., Any]:
    """Return `fn`; raise `ShardingError` for a lambda or a function within another."""
    name = getattr(fn, "__qualname__", "")
    if "<" in name:
        fail(where, f"a pickle of {name}",
             "a function must be importable to be pickled: its pickle is its name",
             "def it in a module, outside of functions, with all it needs as "
             "arguments")  # fmt: skip
    return fn


def leaf_spec(
    leaf: Any, requested: Any, name: str, mesh: Mesh, problems: list[Problem]
) -> Spec | None:
    """Return the spec of one leaf of the arguments, and append what is wrong to `problems`.

    Args:
        leaf: a tensor, a pair, a spec, or any other value, whose spec is None.
        requested: the item of `in_specs` for it.
        name: its path in errors.
        mesh: the mesh of the function.
        problems: a list to extend.
    """
    tensor = leaf
    if isinstance(leaf, Sharded):
        tensor = leaf.spec
        try:
            check_pair(leaf, name)
        except ShardingError as error:
            problems += located(name, error, "in_specs")
            return None
    if not isinstance(tensor, torch.Tensor | Spec):
        opaque = opaque_problem(tensor, name)
        problems += [] if opaque is None else [opaque]
        is_array = hasattr(tensor, "__array__") and getattr(tensor, "ndim", 0) > 0
        if is_array and (isinstance(requested, Spec) or getattr(requested, "axes", ())):
            problems.append(Problem(f"{name}: a value of type {type(tensor).__name__} with "
                                    f"{requested}", "only tensors and pairs can be sharded",
                                    "torch.as_tensor(x); or None for it"))  # fmt: skip
        return None
    if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
        if requested not in (None, PartitionSpec()):
            problems.append(Problem(f"{name}: {requested} for a tensor of {tensor.layout}",
                                    "a tensor that is sharded must be dense",
                                    "x.to_dense(), or None in its place"))  # fmt: skip
        return None  # as a value that is not a tensor: the function may not compute with it
    if isinstance(tensor, Spec) and tensor.mesh != mesh:
        problems.append(Problem(f"{name}: {tensor} on {tensor.mesh}",
                                f"the function runs on {mesh}",
                                "fs.reshard(pair, spec) with a spec on that mesh"))  # fmt: skip
        return None
    if isinstance(tensor, Spec) and requested is None:
        return tensor
    p = PartitionSpec() if requested is None else requested
    try:
        spec = p if isinstance(p, Spec) else Spec(
            mesh, p, shape=tuple(tensor.shape), dtype=tensor.dtype,
            sizes=_shard_sizes_of(tensor, p))  # fmt: skip
    except ShardingError as error:
        problems += located(f"{name}: {p}", error, "in_specs")
        return None
    if isinstance(tensor, Spec) and tensor != spec:
        prog = redistribute(tensor, spec)
        problems.append(Problem(f"{name}: {tensor}", f"the function requires {spec}",
                                "fs.reshard(pair, spec), which is\n"
                                + textwrap.indent(str(prog), "    ")))  # fmt: skip
    return spec


def located(place: str, error: ShardingError, argument: str) -> list[Problem]:
    """Return the problems of an error with the place where they are, and fixes that fit there."""
    replacement = "uneven=", f"a Spec in {argument} with uneven="
    return [Problem(f"{place}, {problem.given}", problem.rule, problem.fix.replace(*replacement))
            for problem in error.problems]  # fmt: skip


def _shard_sizes_of(tensor: Any, p: PartitionSpec) -> Mapping[int, Sequence[int] | None] | None:
    """Return the shard sizes of a pair's spec, for the dims that `p` shards over the same axes."""
    if not isinstance(tensor, Spec):
        return None
    dims = p.dims + ((),) * (tensor.ndim - len(p.dims))
    return {d: tensor.sizes[d] for d in range(tensor.ndim) if dims[d] == tensor.partition.dims[d]}
