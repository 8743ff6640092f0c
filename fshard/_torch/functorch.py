"""Transforms of `torch.func` and forward-mode levels, and a fast `autograd.Function.apply`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch._C._functorch import (
    CGradInterpreterPtr,
    CJvpInterpreterPtr,
    CVmapInterpreterPtr,
    TransformType,
)
from torch._functorch import eager_transforms
from torch._functorch.autograd_function import custom_function_call
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.function import FunctionMeta, _SingleLevelFunction

from fshard._torch.fake_tensors import is_recording_below_autograd, recording_differentiably
from fshard._torch.legacy_vmap import is_legacy_batched
from fshard._torch.modes import DisableTorchFunction
from fshard._util.errors import fail

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""Level of the innermost running transform of `torch.func`, None outside of all."""
forward_ad_level: Callable[[], int] = partial(attrgetter("_current_level"), forward_ad)
"""Level of the innermost `forward_ad.dual_level`, -1 outside of all."""
is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Return True for a tensor that wraps another one for a transform."""
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_batchedtensor
"""Return True for a tensor that wraps another one for a `vmap`."""
get_unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped
unwrap_if_dead: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.unwrap_if_dead
add_batch_dim: Callable[[torch.Tensor, int, int], torch.Tensor] = torch._add_batch_dim
"""`add_batch_dim(x, dim, level)`: make `dim` of `x` the batch dim of a legacy `vmap` level."""

set_forward_mode = forward_ad._set_fwd_grad_enabled
"""`set_forward_mode(True)`: context in which tangents propagate; PyTorch calls a `jvp` without."""

_single_level_allowed: Callable[[], bool] = (
    torch._C._functorch.get_single_level_autograd_function_allowed
)
_allow_single_level: Callable[[bool], None] = (
    torch._C._functorch.set_single_level_autograd_function_allowed
)
_innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_pop_layer: Callable[[], Any] = torch._C._functorch.pop_dynamic_layer_stack
_push_layer: Callable[[Any], object] = torch._C._functorch.push_dynamic_layer_stack
_set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled
_set_forward_mode: Callable[[bool], None] = torch._C._set_fwd_grad_enabled
_level_of: Callable[[torch.Tensor], int] = torch._C._functorch.maybe_get_level
_unwrap_for_grad: Callable[..., torch.Tensor] = torch._C._functorch._unwrap_for_grad
_wrap_for_grad: Callable[..., torch.Tensor] = torch._C._functorch._wrap_for_grad


_GRAD, _JVP, _VMAP = (
    kind.value for kind in (TransformType.Grad, TransformType.Jvp, TransformType.Vmap)
)
Modes = tuple[bool, bool]
"""The grad mode, and whether tangents propagate."""


class _BelowCurrentLevel:
    """Context below the innermost transform, a `grad` or `jvp`, with the modes of its outside.

    The equivalent of its interpreter's `lower()`, in a tenth of the time.
    """

    __slots__ = ("_layer", "_modes", "_modes_below")

    def __init__(self, modes_below: Modes) -> None:
        self._modes_below = modes_below

    def __enter__(self) -> None:
        self._modes = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        self._layer = _pop_layer()
        grad_mode, forward_mode = self._modes_below
        _set_grad_mode(grad_mode)
        _set_forward_mode(forward_mode)

    def __exit__(self, *_: object) -> None:
        grad_mode, forward_mode = self._modes
        _set_forward_mode(forward_mode)
        _set_grad_mode(grad_mode)
        _push_layer(self._layer)


def _modes_below(kind: int, pointer: Any) -> Modes:
    """Return the modes below a `grad` or `jvp`, with derivatives enabled there.

    A grad mode that is off at the call, within the transform, is off at all levels, as for
    operations.
    """
    grad_mode = torch.is_grad_enabled()
    if kind == _GRAD:
        return grad_mode and pointer.prevGradMode(), True
    return grad_mode, pointer.prevFwdGradMode()


without_transforms = temporarily_clear_interpreter_stack
"""Context in which no transform of `torch.func` runs: `grad` wraps even tensors made anew."""


def function_metaclasses() -> list[Any]:
    """Return the metaclasses of custom functions that define how attributes are looked up.

    Every `apply` looks up the forward in its class, by PyTorch's metaclass or by one of the user.
    """
    classes: list[Any] = [FunctionMeta]
    for cls in classes:
        classes += [x for x in type.__subclasses__(cls) if x not in classes]
    return [x for x in classes if x is FunctionMeta or "__getattribute__" in vars(x)]


def has_setup_context(function: type[torch.autograd.Function]) -> bool:
    """Return True for a custom function whose forward gets no `ctx`."""
    return function.setup_context is not _SingleLevelFunction.setup_context


def new_context(function: type[torch.autograd.Function]) -> Any:
    """Return a `ctx` of a custom function, as autograd gives to its forward."""
    return function._backward_cls()


def is_transformed() -> bool:
    """Return True if tensors may be wrappers of `torch.func` or have forward-mode tangents now."""
    return transforms_active() or forward_ad._current_level >= 0


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return `function.apply(*args)`, about ten times faster than PyTorch.

    For a function with `setup_context`, PyTorch binds the arguments to the signature of `forward`,
    which it inspects in every call, and under `torch.func` walks them as trees and makes a class.
    Here all arguments must be positional and without default, tensors must not be nested in them,
    and no output may be an input. A function may have a static method `duals(level, args,
    tangents)` in the place of `jvp`. It is called a level below that of the tangents, which are
    None for arguments without one, and returns the outputs and their tangents. With a static method
    `needs_batch(level, *args)` it is called on batches at a level of `vmap`, where that is True,
    even if no argument is a batch: then the last one is repeated.

    >>> class Twice(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(x):
    ...         return 2 * x
    ...
    ...     @staticmethod
    ...     def setup_context(ctx, inputs, output):
    ...         pass
    >>> apply_function(Twice, torch.ones(2))
    tensor([2., 2.])
    """
    if torch.compiler.is_compiling():
        return function.apply(*args)
    if forward_ad._current_level >= 0 and is_recording_below_autograd():
        with recording_differentiably():
            return _apply_now(function, args)
    return _apply_now(function, args)


def _apply_now(function: type[torch.autograd.Function], args: Sequence[Any]) -> Any:
    unwrapped = [unwrap_if_dead(x) if isinstance(x, torch.Tensor) else x for x in args]
    if not transforms_active():
        if forward_ad._current_level >= 0:
            duals = getattr(function, "duals", None)
            primals, tangents = _unpack_duals(unwrapped)
            if any(t is not None and is_legacy_batched(t) for t in tangents):
                fail("a tangent", "a batch of torch.autograd.functional, with vectorize=True",
                     "tangents must be plain tensors or batches of torch.func",
                     "torch.func.jacfwd(f)(x), torch.func.hessian(f)(x)")  # fmt: skip
            if duals is not None and any(t is not None for t in tangents):
                return make_duals(*duals(0, primals, tangents))
        tracked = any([isinstance(x, torch.Tensor) and x.requires_grad for x in unwrapped])  # noqa: C419
        if not tracked and forward_ad._current_level < 0:
            grad_mode = torch.is_grad_enabled()
            _set_grad_mode(False)
            try:
                return function.forward(*unwrapped)
            finally:
                _set_grad_mode(grad_mode)
        return super(torch.autograd.Function, function).apply(*unwrapped)  # type: ignore[misc]
    interpreter: Any = _innermost_transform()
    kind, level = interpreter.key().value, interpreter.level()
    here = [x for x in unwrapped if isinstance(x, torch.Tensor) and _level_of(x) == level]
    if kind not in (_GRAD, _JVP):
        needs_batch = getattr(function, "needs_batch", None)
        if kind == _VMAP and not here and needs_batch and needs_batch(level, *unwrapped):
            size = CVmapInterpreterPtr(interpreter).batchSize()
            unwrapped[-1] = _repeated(unwrapped[-1], size, level)
        return custom_function_call(function, *unwrapped)
    pointer: Any = (CGradInterpreterPtr if kind == _GRAD else CJvpInterpreterPtr)(interpreter)
    modes = _modes_below(kind, pointer)
    # A level of `grad` has no derivative for tensors that do not require grad there.
    if not here or (kind == _GRAD and not any([x.requires_grad for x in here])):  # noqa: C419
        return _run_below(function, level, modes, unwrapped)
    lift = pointer.lift
    lifted = [lift(x) if isinstance(x, torch.Tensor) else x for x in unwrapped]
    if kind == _JVP and (duals := getattr(function, "duals", None)) is not None:
        primals, tangents = _unpack_duals(lifted)
        if any(t is not None for t in tangents):
            return make_duals(*_duals_below(duals, level, modes, primals, tangents))
    allowed = _single_level_allowed()
    _allow_single_level(True)
    try:
        return _at_level(function, level, modes).apply(*lifted)
    finally:
        _allow_single_level(allowed)


def _run_below(
    function: type[torch.autograd.Function], level: int, modes: Modes, args: Sequence[Any]
) -> Any:
    """Return the results of a function a level below, as wrapped tensors of the level."""
    unwrapped = [_unwrap_for_grad(x, level) if isinstance(x, torch.Tensor) else x for x in args]
    with _BelowCurrentLevel(modes):
        outputs = _apply_now(function, unwrapped)
    if isinstance(outputs, torch.Tensor):
        return _wrap_for_grad(outputs, level)
    return tuple([_wrap_for_grad(y, level) for y in outputs])


def primal_of(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its tangent of the innermost level of forward mode, if it has one.

    A batch of a `vmap` within that level is a batch of such tensors.
    """
    if forward_ad._current_level < 0:
        return x
    primal: torch.Tensor
    if is_batched(x):
        functorch = torch._C._functorch
        dim, level = functorch.maybe_get_bdim(x), functorch.maybe_get_level(x)
        primal = functorch._add_batch_dim(primal_of(get_unwrapped(x)), dim, level)
    else:
        primal = forward_ad.unpack_dual(x).primal
    return primal


def _unpack_duals(args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return arguments without their tangents of the innermost level, and these, None without."""
    pairs = [
        forward_ad.unpack_dual(x)
        if isinstance(x, torch.Tensor) and not is_legacy_batched(x)
        else (x, None)
        for x in args
    ]
    return [x for x, _ in pairs], [t for _, t in pairs]


def _repeated(x: torch.Tensor, size: int, level: int) -> torch.Tensor:
    """Return a batch of a level with `size` times the same element."""
    batch: torch.Tensor = torch._C._functorch._add_batch_dim(x.expand(size, *x.shape), 0, level)
    return batch


def has_tangent(x: torch.Tensor) -> bool:
    """Return True for a tensor with a tangent of the innermost level of forward mode."""
    return tangent_of(x) is not None


def tangent_of(x: torch.Tensor) -> torch.Tensor | None:
    """Return the tangent of a tensor at the innermost level of forward mode, None without one.

    It is the tensor that a `jvp` of a custom function gets, as long as `x` has it.
    """
    if forward_ad._current_level < 0:
        return None
    with DisableTorchFunction():
        tangent: torch.Tensor | None = forward_ad.unpack_dual(x).tangent
    return tangent


def make_duals(ys: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Return values with their tangents at the innermost level; None stands for none."""
    return tuple(
        [y if t is None else forward_ad.make_dual(y, t) for y, t in zip(ys, tangents, strict=True)]
    )


def unpack_duals(
    ys: Sequence[torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return values and their tangents at the innermost level, zeros for those without."""
    pairs = [forward_ad.unpack_dual(y) for y in ys]
    zeros = [torch.zeros_like(y) if t is None else t for y, t in pairs]
    return tuple([y for y, _ in pairs]), tuple(zeros)


def _duals_below(
    duals: Callable[..., Any],
    level: int,
    modes: Modes,
    primals: Sequence[Any],
    tangents: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Return the outputs of a level and their tangents, which are computed a level below."""

    def unwrapped(xs: Sequence[Any]) -> list[Any]:
        return [_unwrap_for_grad(x, level) if isinstance(x, torch.Tensor) else x for x in xs]

    with _BelowCurrentLevel(modes):
        results = duals(level, unwrapped(primals), unwrapped(tangents))
    ys, ts = (
        [_wrap_for_grad(x, level) if isinstance(x, torch.Tensor) else x for x in xs]
        for xs in results
    )
    return ys, ts


def run_with_tangents(
    fn: Callable[..., tuple[torch.Tensor, ...]],
    primals: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor | None],
    *,
    within_jvp: bool = False,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return `fn(*primals)` and the tangents of its results, in forward mode.

    An open `forward_ad.dual_level` is used as it is, since levels do not nest; `torch.func.jvp`
    makes a level of its own otherwise, or within another `jvp`.

    Args:
        fn: a function that returns a tuple of tensors.
        primals: its arguments.
        tangents: tangents of the arguments, None without.
        within_jvp: whether to use the open level of a `torch.func.jvp`, too, whose tensors must not
            be among those of `fn`. Tangents then stay in the graph of `fn` until that level ends.
    """

    def run(*duals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        remaining = iter(duals)
        return fn(
            *(x if t is None else next(remaining) for x, t in zip(primals, tangents, strict=True))
        )

    pairs = [(x, t) for x, t in zip(primals, tangents, strict=True) if t is not None]
    if forward_ad._current_level >= 0 and (within_jvp or eager_transforms.JVP_NESTING == 0):
        with set_forward_mode(True):
            return unpack_duals(run(*(forward_ad.make_dual(x, t) for x, t in pairs)))
    ys, ts, *_ = torch.func.jvp(run, tuple([x for x, _ in pairs]), tuple([t for _, t in pairs]))
    return ys, ts


@lru_cache(maxsize=1024)
def _at_level(function: type[torch.autograd.Function], level: int, modes: Modes) -> Any:
    """Return the function of tensors of a level of `grad` or `jvp`, which calls it a level below.

    The equivalent of `torch._functorch.autograd_function.generate_single_level_function`, for flat
    arguments and for calls with these modes below.
    """

    def forward(*args: Any) -> Any:
        return _run_below(function, level, modes, args)

    members: dict[str, Callable[..., Any]] = {
        "forward": forward, "setup_context": function.setup_context,
        "backward": function.backward, "jvp": function.jvp,
    }  # fmt: skip
    methods: dict[str, Any] = {name: staticmethod(member) for name, member in members.items()}
    methods["__module__"] = function.__module__
    return type(f"{function.__name__}Generated", (_SingleLevelFunction,), methods)


def flattens_for_gradients() -> bool:
    """Return True in a pytree's flattening by `torch.func.grad` or `vjp`.

    They flatten the values that they differentiate for the structure of the gradients, and the
    results for the structure of the cotangents.
    """
    if not transforms_active() or torch.compiler.is_dynamo_compiling():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PYTREE_MODULES):
        frame = frame.f_back
    return frame is not None and frame.f_code in _DIFFERENTIATING


_PYTREE_MODULES = "fshard.", "torch.utils._pytree"
_DIFFERENTIATING = frozenset(
    inspect.unwrap(function).__code__
    for function in (eager_transforms.grad_and_value_impl, eager_transforms._vjp_with_argnums)
)


def is_foreign(x: torch.Tensor) -> bool:
    """Return True for a tensor that wraps another one for a transform of another thread."""
    level = torch._C._functorch.maybe_get_level(x)
    stack = torch._C._functorch.get_interpreter_stack() or ()
    keys = [item.key() for item in stack if item.level() == level]
    return (TransformType.Vmap in keys) is not is_batched(x) if keys else True


def is_batched_at_any_level(x: torch.Tensor) -> bool:
    """Return True for a tensor that wraps another one for a `vmap`, or wraps one that does."""
    while is_wrapped(x):
        if is_batched(x):
            return True
        x = get_unwrapped(x)
    return False


def wrapped_tensors(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor and those that it wraps for transforms, one for each level."""
    yield x
    while is_wrapped(x):
        x = get_unwrapped(x)
        yield x


def innermost_level(x: torch.Tensor) -> int | None:
    """Return the innermost level at which a derivative for `x` may be taken, None without one."""
    return next(derivative_levels(x), None)


def derivative_levels(x: torch.Tensor) -> Iterator[int]:
    """Yield the levels at which derivatives for `x` may be taken, from the innermost.

    Levels are those of `torch.func`; 0 is ordinary autograd, in reverse or forward mode.
    """
    x = unwrap_if_dead(x)
    while is_wrapped(x):
        if not is_batched(x):
            level = torch._C._functorch.maybe_get_level(x)
            if x.requires_grad or (x.dtype.is_floating_point and level in _levels_of(_JVP)):
                yield level
        x = unwrap_if_dead(get_unwrapped(x))
    if x.requires_grad or has_tangent(x):
        yield 0


def innermost_derivative() -> int:
    """Return the level of the innermost running `grad` or `jvp` of `torch.func`, 0 without one."""
    return max(_levels_of(_GRAD, _JVP), default=0)


def levels_without_gradients() -> frozenset[int]:
    """Return the levels outside of a running `grad` that began while the grad mode was off.

    >>> with torch.no_grad():
    ...     torch.func.vjp(lambda x: print(levels_without_gradients()) or x, torch.ones(()))[0]
    frozenset({0})
    tensor(1.)
    """
    levels = set[int]()
    for item in torch._C._functorch.get_interpreter_stack() or ():
        if item.key().value == _GRAD and not CGradInterpreterPtr(item).prevGradMode():
            levels.update(range(item.level()))
    return frozenset(levels)


def is_vectorized() -> bool:
    """Return True if a `vmap` of `torch.func` runs, so that tensors may be batches."""
    return bool(_levels_of(_VMAP))


def _levels_of(*kinds: int) -> list[int]:
    """Return the levels of the running transforms of some kinds."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return [item.level() for item in stack if item.key().value in kinds]


def with_batch_at(x: torch.Tensor, dim: int | None, position: int, n: int) -> torch.Tensor:
    """Move the batch dim of `x` to a position; repeat a tensor without one n times.

    >>> with_batch_at(torch.zeros(3, 2), 1, 0, 2).shape, with_batch_at(torch.ones(3), None, 1, 2)
    (torch.Size([2, 3]), tensor([[1., 1.],
            [1., 1.],
            [1., 1.]]))
    """
    if dim is not None:
        return x.movedim(dim, position)
    x = x.unsqueeze(position)
    shape = list(x.shape)
    shape[position] = n
    return x.expand(shape)
