"""Operators of PyTorch: overloads, schemas, decompositions, types written in C++."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch._library import custom_ops
from torch._ops import OpOverload, OpOverloadPacket

from fshard._torch.dynamo import tree_map
from fshard._torch.functorch import without_transforms
from fshard._torch.modes import DisableTorchFunction, DispatchMode, without_dispatch_modes

__all__ = [
    "AdamWOptions", "OpOverload", "OpOverloadPacket", "ScriptMethod", "TensorBase", "all_op_names",
    "builtin_of", "dereference", "direct_function", "foreach_adamw", "fused_adamw", "fused_step",
    "has_registered_gradient", "is_composite", "is_query", "out_overload", "overload_or_self",
    "packet_of", "qualified_name", "reference_of", "registered_schemas", "resolve_overload",
    "schema_of", "schema_or_none", "tensordot_into", "torch_decomposition",
]  # fmt: skip

TensorBase = torch._C.TensorBase
ScriptMethod = torch._C.ScriptMethod

all_op_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
"""Return the names of all registered overloads, `"aten::add.Tensor"` for one."""
schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return the `torch.FunctionSchema` of an `OpOverload`."""
qualified_name: Callable[[Any], str] = attrgetter("_qualified_op_name")
"""Return the name of an `OpOverloadPacket`, `"aten::add"` for one."""
builtin_of: Callable[[Any], Callable[..., Any]] = attrgetter("_op")
"""Return the builtin that an `OpOverload` calls: faster by the checks in between."""


def has_registered_gradient(op: Any) -> bool:
    """Return True for an operation of `torch.library.custom_op` with `register_autograd`.

    It has no derivative in forward mode: PyTorch gives it no tangent.
    """
    definition: Any = custom_ops.OPDEFS.get(getattr(op, "_name", "").partition(".")[0])
    return definition is not None and definition._backward_fn is not None


def overload_or_self(op: Any) -> Any:
    """Return the overload that a decorator `torch.library.custom_op` defined, else `op`."""
    return op._opoverload if isinstance(op, custom_ops.CustomOpDef) else op


BUILTIN = ("builtin_function_or_method", "method_descriptor")
"""Names of the types of PyTorch's functions and methods in C++."""


def packet_of(op: Any) -> OpOverloadPacket[..., Any] | None:
    """Return a packet itself, and that of a builtin of PyTorch; None for any other operation."""
    if isinstance(op, OpOverloadPacket) or type(op).__name__ not in BUILTIN:
        return op if isinstance(op, OpOverloadPacket) else None
    module = getattr(op, "__objclass__", op).__module__ or ""
    return _packet_named(op.__name__) if module.partition(".")[0] == "torch" else None


@cache
def _packet_named(name: str) -> OpOverloadPacket[..., Any] | None:
    for candidate in (name, name.strip("_"), f"linalg_{name}"):
        packet = getattr(torch.ops.aten, candidate, None)
        # TorchScript's own operations, such as aten::cpu, have no kernel.
        if isinstance(packet, OpOverloadPacket) and registered_schemas(qualified_name(packet)):
            return packet
    return None


Tensors = list[torch.Tensor]


def fused_step(kernel: str) -> Callable[..., None]:
    """Return the function that writes a fused optimizer step: `"adamw"`, for one."""
    function: Callable[..., None] = getattr(torch, f"_fused_{kernel}_")
    return function


UNSCALE: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_
"""Operation by which a gradient scaler multiplies gradients and looks for infinite ones."""
UPDATE_SCALE: Callable[..., torch.Tensor] = torch._amp_update_scale_
norms: Callable[[Sequence[torch.Tensor], float], list[torch.Tensor]] = torch._foreach_norm  # type: ignore[assignment]
"""Return the norm of each tensor."""


class AdamWOptions(NamedTuple):
    """Scalars of one step of AdamW.

    Attributes:
        step: number of the step, from 1.
        lr: learning rate.
        beta1: decay of the means of gradients.
        beta2: decay of the means of their squares.
        eps: added to the roots of these.
        weight_decay: decoupled decay of parameters, times `lr`.
    """

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def foreach_adamw(
    params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, *, options: AdamWOptions
) -> None:
    """Write a step of AdamW to parameters and means, rounded as by `torch.optim.AdamW`.

    Args:
        params: parameters.
        grads: their gradients.
        means: means of gradients.
        squares: means of their squares.
        options: scalars of the step.
    """
    step, lr, beta1, beta2, eps, weight_decay = options
    if weight_decay:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    scales = torch._foreach_sqrt(squares)
    torch._foreach_div_(scales, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(scales, eps)
    torch._foreach_addcdiv_(params, means, scales, -lr / (1 - beta1**step))


def fused_adamw(
    params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, *, options: AdamWOptions
) -> None:
    """Write a step of AdamW as `foreach_adamw` by one kernel; all tensors have one dtype."""
    step, lr, beta1, beta2, eps, weight_decay = options
    steps = [torch.tensor(float(step), device=params[0].device)] * len(params)
    torch._fused_adamw_(
        params, grads, means, squares, [], steps, lr=lr, beta1=beta1, beta2=beta2,
        weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip


def schema_or_none(target: Any) -> Any:
    """Return the schema of an `OpOverload`, None for any other target of a graph node."""
    return getattr(target, "_schema", None)


def is_query(op: OpOverload[..., Any]) -> bool:
    """Return True for an operator that returns values and no tensor: a device, a size, a number.

    >>> is_query(torch.ops.prim.device.default), is_query(torch.ops.aten._foreach_add_.List)
    (True, False)
    """
    returns = schema_of(op).returns
    return bool(returns) and not any("Tensor" in str(result.type) for result in returns)


def reference_of(op: Any) -> Any:
    """Return the name of an `OpOverload`, which pickles, and any other value unchanged.

    >>> reference_of(torch.ops.aten.sum.dim_IntList)
    'aten::sum.dim_IntList'
    """
    return op.name() if isinstance(op, OpOverload) else op


def dereference(reference: Any) -> Any:
    """Return the value that `reference_of` returned the reference of.

    >>> dereference("aten::relu")
    <OpOverload(op='aten.relu', overload='default')>
    """
    if not isinstance(reference, str):
        return reference
    namespace, _, name = reference.partition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def registered_schemas(name: str) -> list[Any]:
    """Return the schemas of the overloads of `"aten::add"`, say, that have a kernel.

    TorchScript's overloads for Python scalars and lists have none.
    """
    return [
        schema
        for schema in torch._C._jit_get_schemas_for_operator(name)
        if torch._C._dispatch_has_kernel(_full_name(schema))
    ]


def _full_name(schema: Any) -> str:
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def resolve_overload(
    packet: OpOverloadPacket[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Return the name of the overload that a call runs; raise `RuntimeError` without one."""
    name: str = torch._C._jit_resolve_packet(qualified_name(packet), *args, **kwargs)
    return name


@cache
def out_overload(op: Any) -> OpOverload[..., Any] | None:
    """Return the overload of an operator that writes its one result into `out`, None without one.

    >>> out_overload(torch.ops.aten.sub.Tensor), out_overload(torch.ops.aten.view.default)
    (<OpOverload(op='aten.sub', overload='out')>, None)
    """
    if not isinstance(op, OpOverload):
        return None
    packet, own = op.overloadpacket, [(x.name, str(x.type)) for x in schema_of(op).arguments]
    for name in packet.overloads():
        other: OpOverload[..., Any] = getattr(packet, name)
        arguments = schema_of(other).arguments
        outs = [x.name for x in arguments if x.is_out]
        if outs == ["out"] and own == [(x.name, str(x.type)) for x in arguments if not x.is_out]:
            return other
    return None


def tensordot_into(
    shape_x: Sequence[int], shape_y: Sequence[int], dims_x: Sequence[int], dims_y: Sequence[int]
) -> Callable[..., torch.Tensor]:
    """Return `torch.tensordot` of tensors of some shapes as a product that is written into `out=`.

    PyTorch's own `out=` copies the result.

    >>> product = tensordot_into((2, 3, 4), (3, 4, 5), [1, 2], [0, 1])
    >>> out = torch.empty(2, 5)
    >>> product(torch.ones(2, 3, 4), torch.ones(3, 4, 5), [1, 2], [0, 1], out=out) is out, out[0]
    (True, tensor([12., 12., 12., 12., 12.]))
    >>> product = tensordot_into((2, 3), (1, 5), [1], [0])  # a dim of size 1 is broadcast
    >>> product(torch.ones(2, 3), torch.ones(1, 5), out=out)[0]
    tensor([3., 3., 3., 3., 3.])
    """
    summed_x, summed_y = [i % len(shape_x) for i in dims_x], [i % len(shape_y) for i in dims_y]
    rows = [i for i in range(len(shape_x)) if i not in summed_x]
    columns = [i for i in range(len(shape_y)) if i not in summed_y]
    order_x, order_y = rows + summed_x, summed_y + columns
    pairs = [*zip(summed_x, summed_y, strict=True)]
    broadcast = [(i, j) for i, j in pairs if shape_x[i] != shape_y[j]]  # one is of size 1
    m, n = (math.prod(z[i] for i in kept) for z, kept in ((shape_x, rows), (shape_y, columns)))
    k = math.prod(min(shape_x[i], shape_y[j]) for i, j in pairs)

    def run(x: torch.Tensor, y: torch.Tensor, *_: object, out: torch.Tensor) -> torch.Tensor:
        for i, j in broadcast:
            x, y = x.sum(i, True, dtype=x.dtype), y.sum(j, True, dtype=y.dtype)
        x, y = x.permute(order_x).reshape(m, k), y.permute(order_y).reshape(k, n)
        torch.mm(x, y, out=out.view(m, n))
        return out

    return run


def has_batch_rule(op: OpOverload[..., Any]) -> bool:
    """Return True if `torch.func.vmap` has a rule for an operator, and needs no fallback."""
    key = "FuncTorchBatched"
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def is_composite(op: OpOverload[..., Any]) -> bool:
    """Return True for an operator that is made of others, which may return its operand.

    >>> is_composite(torch.ops.aten.einsum.default), is_composite(torch.ops.aten.mm.default)
    (True, False)
    """
    key = "CompositeImplicitAutograd"
    return op._can_decompose() and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def torch_decomposition(op: Any) -> Callable[..., Any] | None:
    """Return PyTorch's decomposition of an operator, None for one that has kernels only."""
    if not isinstance(op, OpOverload):
        return None
    if is_composite(op):
        return op.decompose
    from torch._decomp import decomposition_table

    return decomposition_table.get(op)


# -- direct functions --------------------------------------------------------------------------
#
# Parsing the arguments of an operator takes twice as long as a Python function's. One of the same
# name may run another overload, or have other defaults: it is taken only if on tensors without
# values it dispatches the same operators with the same arguments.

_HOMES: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C._nn, TensorBase)


class _DispatchLog(DispatchMode):
    """Operators that run in a block, with their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls.append((func, tree_map(_described, (args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _described(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.device
    return type(x), x


def direct_function(
    op: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the fastest function that runs an operator on arguments like these.

    Args:
        op: the operator.
        args: positional arguments, with tensors on the meta device.
        kwargs: arguments by name.

    >>> x = torch.empty(2, 3, device="meta")
    >>> direct_function(torch.ops.aten.relu.default, (x,), {}) is torch.relu
    True
    >>> loss = torch.ops.aten.cross_entropy_loss.default  # by name, reduction=0 is the default
    >>> direct_function(loss, (x, x), {}) is loss._op
    True
    """
    builtin = builtin_of(op)
    namespace, _, name = schema_of(op).name.partition("::")
    if namespace != "aten":
        return builtin
    candidates = [getattr(home, name) for home in _HOMES if hasattr(home, name)]
    with torch.no_grad(), DisableTorchFunction(), without_dispatch_modes(), without_transforms():
        expected = _dispatched(builtin, args, kwargs) if candidates else []
        for function in candidates:
            if expected and _dispatched(function, args, kwargs) == expected:
                return function  # type: ignore[no-any-return]
    return builtin


def _dispatched(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the operators that a call dispatches; [] if PyTorch refuses it."""
    log = _DispatchLog()
    try:
        with log:
            function(*args, **kwargs)
    except Exception:  # noqa: BLE001 - no meta kernel, or no such arguments
        return []
    return log.calls


FOREACH_ADD: tuple[Callable[..., Any], ...] = (torch._foreach_add, torch._foreach_add_)
"""Additions to lists, which read a tensor that is their number."""
IS_ALL_TRUE = torch._is_all_true
"""Check of the values of a bool tensor by which `torch.distributions` validates its arguments."""
