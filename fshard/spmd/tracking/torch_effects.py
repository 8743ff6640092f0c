"""Effects of PyTorch's functions on types: which write, draw, read values, or are linear.

Functions are looked up by name. An unlisted function computes a new value from all of its tensors
and is linear in none of them, so that an unknown function may be refused but is never trusted.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from types import (
    BuiltinFunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fshard._torch.operators import (
    OpOverload,
    OpOverloadPacket,
    qualified_name,
    registered_schemas,
    schema_of,
)
from fshard._util.dtypes import is_inexact_dtype
from fshard.spmd.types import TypeRule


class Action(enum.Enum):
    """Effect of a call on the types of its operands and results."""

    OP = "computes the result from the operands"
    NONE = "returns no tensor"
    SAME = "returns the operand itself"
    BLANK = "returns uninitialized memory"
    LIKE = "OP of the first operand; reads only the shapes of others"
    FRESH = "reads only the shape of the first operand"
    RANDOM = "draws from the process's generator"
    READS_VALUE = "OP, and the host reads values"
    INDEX = "OP; the host reads the size of a selection by mask"
    WRITE = "writes the first operand"
    LISTS = "OP on the elements of lists, one by one"
    WRITE_LISTS = "WRITE on the elements of lists, one by one"
    WRITES_ARGUMENT = "OP, and writes some arguments, such as running statistics"
    GRAD = "reads .grad"
    SET_GRAD = "sets .grad"
    GRADIENTS = "torch.autograd.grad"
    BACKWARD = "backward()"


@dataclass(frozen=True, slots=True)
class OpEffect:
    """Effect of a function: its name, its action, and the operands in which it is linear.

    `sizes` has the positions and names of arguments that are sizes.
    """

    name: str
    action: Action
    rule: TypeRule
    sizes: frozenset[int | str] = frozenset()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NOTHING = _words("""
    __dir__ __format__ __hash__ __len__ __repr__ __str__ _debug_has_internal_overlap _dimI _dimV
    _fused_sdp_choice _has_compatible_shallow_copy_type _has_same_storage_numel _is_view
    _is_zerotensor _nested_get_ragged_idx _set_grad_enabled _use_cudnn_ctc_loss
    _use_miopen_ctc_loss cudnn_is_acceptable data_ptr dense_dim dim dim_order element_size
    get_device has_names is_coalesced is_complex is_conj is_contiguous is_distributed
    is_floating_point is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed
    ndimension nelement numel q_per_channel_axis record_stream register_hook
    register_post_accumulate_grad_hook result_type retain_grad set_grad_enabled size sparse_dim
    storage_offset storage_type stride sym_is_contiguous sym_numel sym_size sym_storage_offset
    sym_stride
""")
ATTRIBUTES = _words("""
    _backward_hooks _base _cdata _grad_fn _has_symbolic_sizes_strides _post_accumulate_grad_hooks
    _python_dispatch _version device dtype grad_dtype grad_fn is_cpu is_cuda is_ipu is_leaf is_maia
    is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla
    is_xpu itemsize layout name names nbytes ndim output_nr requires_grad retains_grad shape
    volatile
""")
LIKE = _words("expand_as reshape_as type_as view_as")
SAME = _words("requires_grad_ share_memory_")
BLANK = _words("empty empty_like empty_permuted empty_strided new_empty new_empty_strided")
FRESH = _words("full_like new_full new_ones new_tensor new_zeros ones_like zeros_like")
RANDOM = _words("""
    _fused_dropout _sample_dirichlet _standard_gamma alpha_dropout_ bernoulli bernoulli_ binomial
    cauchy cauchy_ exponential exponential_ feature_alpha_dropout_ feature_dropout_ geometric
    geometric_ gumbel_softmax kaiming_normal_ kaiming_uniform_ log_normal log_normal_ multinomial
    normal normal_ normal_functional orthogonal_ poisson rand rand_like randint randint_like randn
    randn_like random random_ randperm sparse_ trunc_normal_ uniform uniform_ xavier_normal_
    xavier_uniform_
""")
MAYBE_RANDOM = _words("""
    _cudnn_attention_forward _cudnn_rnn _efficient_attention_forward _flash_attention_forward
    _flash_attention_forward_no_dropout_inplace _lstm_mps _scaled_dot_product_attention_math
    _scaled_dot_product_attention_math_for_mps _scaled_dot_product_cudnn_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable
    _triton_scaled_dot_attention miopen_rnn
    alpha_dropout dropout dropout1d dropout2d dropout3d dropout_ feature_alpha_dropout
    feature_dropout fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d
    fractional_max_pool3d_with_indices gru lobpcg lstm pca_lowrank svd_lowrank
    multi_head_attention_forward native_dropout rnn_relu rnn_tanh rrelu rrelu_ rrelu_with_noise
    rrelu_with_noise_ rrelu_with_noise_functional
    scaled_dot_product_attention
""")
READS_VALUE = _words("""
    __array__ __bool__ __complex__ __contains__ __dlpack__ __float__ __index__ __int__
    __nonzero__ _choose_qparams_per_tensor _ctc_loss _local_scalar_dense _typed_storage _unique
    _unique2 allclose argwhere bincount equal index is_nonzero item linalg_lstsq masked_select
    nonzero numpy one_hot repeat_interleave storage tolist unique unique_consecutive unique_dim
    unique_dim_consecutive untyped_storage where
""")
SIZES: dict[str, tuple[int | str, ...]] = {
    "_pack_padded_sequence": (1, "lengths"),
    "_pad_packed_sequence": (1, "batch_sizes"),
    "arange": (0, 1, 2, "start", "end", "step"),
    "interpolate": (2, "scale_factor"),
    "range": (0, 1, 2, "start", "end", "step"),
    "repeat_interleave": (1, "repeats"),
    "split": (1, "split_size"),
    "tensor_split": (1, "indices_or_sections", "tensor_indices_or_sections"),
    "unflatten": (2, "sizes"),
}
"""Positions and names of arguments whose values determine shapes, beside integers."""
MAX_DIMS = 64
NON_SIZE_INTEGERS = {
    "narrow": "start",
    "narrow_copy": "start",
    "roll": "shifts",
    "select": "index",
    "select_scatter": "index",
    "tril": "diagonal",
    "triu": "diagonal",
}
"""Integer arguments that determine values and not shapes."""
WRITES_ARGUMENT = _words("""
    batch_norm batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_update_stats
    cudnn_batch_norm embedding embedding_bag instance_norm miopen_batch_norm native_batch_norm
""")
OVERWRITES = _words("""
    bernoulli_ cauchy_ constant_ copy_ dirac_ exponential_ eye_ fill_ geometric_ kaiming_normal_
    kaiming_uniform_ log_normal_ normal_ ones_ orthogonal_ random_ sparse_ trunc_normal_ uniform_
    xavier_normal_ xavier_uniform_ zero_ zeros_
""") | {"data ="}
"""Functions that overwrite all of their first operand, and do not read it."""
MOVE = _words("""
    H T __get__ alias as_strided atleast_1d atleast_2d atleast_3d bfloat16 broadcast_to cat
    channel_shuffle chunk clone concat concatenate contiguous copy cpu cuda detach diagonal double
    dsplit dstack expand expand_as flatten flip fliplr flipud float half hsplit hstack mH mT
    moveaxis movedim narrow permute pixel_shuffle pixel_unshuffle ravel repeat reshape reshape_as
    roll rot90 select split split_with_sizes squeeze stack swapaxes swapdims t tensor_split tile to
    transpose type unbind unflatten unsafe_chunk unsafe_split unsqueeze view view_as vsplit vstack
""")
LINEAR = _words("""
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d add avg_pool1d avg_pool2d
    avg_pool3d conj cumsum diff fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_irfft
    fft_rfft fft_rfftn fold imag mean neg negative real resolve_conj resolve_neg rsub sub subtract
    sum trace tril triu unfold
""")
SCALED = _words("__getitem__ div divide gather index_select take take_along_dim true_divide")
MASKED = _words("embedding where")
PRODUCT = _words("""
    __matmul__ bmm chain_matmul conv1d conv2d conv3d cross dot einsum ger inner kron linear matmul
    mm mul multiply mv outer tensordot vdot
""")
RULES: dict[str, TypeRule] = {
    name: rule
    for rule, names in (
        (TypeRule.MOVE, MOVE),
        (TypeRule.LINEAR, LINEAR),
        (TypeRule.SCALED, SCALED),
        (TypeRule.MASKED, MASKED),
        (TypeRule.PRODUCT, PRODUCT),
    )
    for name in names
}

_EFFECTS: dict[Callable[..., Any], OpEffect] = {}
_WEAK_EFFECTS: WeakKeyDictionary[Callable[..., Any], OpEffect] = WeakKeyDictionary()
_PERMANENT_TYPES = (
    BuiltinFunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
    OpOverload,
    OpOverloadPacket,
)
"""Types of functions that are never freed; a Python function may exist for one call."""


def effect_of(func: Callable[..., Any]) -> OpEffect:
    """Return the effect of a function that a `TorchFunctionMode` receives.

    >>> effect_of(torch.Tensor.add_).action.name, effect_of(torch.matmul).rule.name
    ('WRITE', 'PRODUCT')
    """
    effect = _EFFECTS.get(func)
    if effect is None:
        cache = _EFFECTS if isinstance(func, _PERMANENT_TYPES) else _WEAK_EFFECTS
        effect = cache.get(func)
        if effect is None:
            effect = _classify(func)
            effect = cache[func] = replace(effect, sizes=_sizes(func, effect.name))
    return effect


def _classify(func: Callable[..., Any]) -> OpEffect:
    name = str(getattr(func, "__name__", func)).partition(".")[0]
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(name, owner)
    if name == "grad" and inspect.isfunction(func):
        return OpEffect(name, Action.GRADIENTS, TypeRule.OTHER)
    if name == "backward" and inspect.isfunction(func):
        return OpEffect(name, Action.BACKWARD, TypeRule.OTHER)
    written = _written_names(func, name)
    if isinstance(func, OpOverload | OpOverloadPacket) and not _is_aten(func):
        first = {arg.name for schema in _schemas(func, name) for arg in schema.arguments[:1]}
        action = (
            Action.FRESH if first == {"like"} else Action.WRITES_ARGUMENT if written else Action.OP
        )
        return OpEffect(name, action, TypeRule.OTHER)
    if name == "__getitem__":
        return OpEffect(name, Action.INDEX, RULES[name])
    for action, names in (
        (Action.NONE, NOTHING),
        (Action.LIKE, LIKE),
        (Action.SAME, SAME),
        (Action.BLANK, BLANK),
        (Action.FRESH, FRESH),
        (Action.RANDOM, RANDOM | MAYBE_RANDOM),
        (Action.READS_VALUE, READS_VALUE),
        (Action.WRITES_ARGUMENT, WRITES_ARGUMENT),
    ):
        if name in names:
            return OpEffect(name, action, RULES.get(name, TypeRule.OTHER))
    writes = name.endswith("_") and not name.startswith("__")
    if name.startswith("__i") and name not in ("__init__", "__invert__", "__iter__"):
        name, writes = name.removeprefix("__i").removesuffix("__"), True
    base = name.rstrip("_") if writes else name
    if writes and base.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return OpEffect(name, Action.WRITE_LISTS, TypeRule.OTHER)
    if base.startswith("_foreach_"):
        return OpEffect(name, Action.LISTS, TypeRule.OTHER)
    if written and not (writes and len(written) == 1):
        return OpEffect(name, Action.WRITES_ARGUMENT, TypeRule.OTHER)
    rule = RULES.get(base, TypeRule.OTHER)
    if writes or name == "__setitem__":
        return OpEffect(name, Action.WRITE, rule)
    return OpEffect(name, Action.OP, rule)


def _attribute(access: str, name: str) -> OpEffect:
    if access == "__get__" and name == "grad":
        return OpEffect("grad", Action.GRAD, TypeRule.OTHER)
    if access == "__set__" and name == "grad":
        return OpEffect("grad =", Action.SET_GRAD, TypeRule.OTHER)
    if name in ATTRIBUTES or access == "__delete__":
        return OpEffect(name, Action.NONE, TypeRule.OTHER)
    if access == "__get__":
        return OpEffect(name, Action.OP, TypeRule.MOVE)
    return OpEffect(f"{name} =", Action.WRITE if name == "data" else Action.NONE, TypeRule.MOVE)


# -- calls ----------------------------------------------------------------------------------


def _schemas(func: Callable[..., Any], name: str) -> list[Any]:
    """Return the schemas of the overloads of an operation."""
    if isinstance(func, OpOverload):
        return [schema_of(func)]
    full = qualified_name(func) if isinstance(func, OpOverloadPacket) else f"aten::{name}"
    return registered_schemas(full)


def _sizes(func: Callable[..., Any], name: str) -> frozenset[int | str]:
    """Return the positions and names of integer arguments of a function.

    The host reads a tensor that is passed there. Sizes may also be separate positional arguments.
    """
    integers, tensors = set(SIZES.get(name, ())), set[int | str]()
    if inspect.isfunction(func):
        # A wrapped builtin has no signature.
        signature = inspect.signature(func, follow_wrapped=False)
        for i, (key, parameter) in enumerate(signature.parameters.items()):
            if "int" in str(parameter.annotation) and "Tensor" not in str(parameter.annotation):
                integers |= {i, key}
        return frozenset(integers)
    for schema in _schemas(func, name):
        positional = sum(not arg.kwarg_only for arg in schema.arguments)
        for i, arg in enumerate(schema.arguments):
            keys = {arg.name} if arg.kwarg_only else {i, arg.name}
            if "Tensor" in str(arg.type):
                tensors |= keys
            elif "int" in str(arg.type) and arg.name != NON_SIZE_INTEGERS.get(name):
                integers |= keys
                if "List" in str(arg.type) and i == positional - 1:
                    integers |= {*range(i, i + MAX_DIMS)}
    return frozenset(integers - tensors | set(SIZES.get(name, ())))


def _is_aten(func: OpOverload[..., Any] | OpOverloadPacket[..., Any]) -> bool:
    packet = func if isinstance(func, OpOverloadPacket) else func.overloadpacket
    return qualified_name(packet).startswith("aten::")


def _written_names(func: Callable[..., Any], name: str) -> frozenset[str]:
    """Return the names of the arguments that an operation writes, without `out`."""
    if inspect.isfunction(func):
        return frozenset()
    return frozenset(
        arg.name
        for schema in _schemas(func, name)
        for arg in schema.arguments
        if arg.alias_info is not None and arg.alias_info.is_write and not arg.is_out
    )


def _arguments(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of the first overload."""
    if inspect.isfunction(func):
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments
    declared: list[Any] = next((schema.arguments for schema in _schemas(func, name)), [])
    defaults = {arg.name: arg.default_value for arg in declared if arg.has_default_value()}
    return defaults | dict(zip((arg.name for arg in declared), args, strict=False)) | dict(kwargs)


def draws(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Return True if a call of a random function draws: dropout does so in training only."""
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in (*args[:1], kwargs.get("tensor"))):
        return False
    if name not in MAYBE_RANDOM:
        return True
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        rate_index = next((i for i, arg in enumerate(args) if isinstance(arg, float)), None)
        return rate_index is not None and bool(args[rate_index]) and bool(args[rate_index + 1])
    named = _arguments(func, name, args, kwargs)
    rate = next((named[key] for key in ("p", "dropout_p", "dropout") if key in named), 1)
    return bool(rate) and bool(named.get("training", named.get("train", True)))


def reads_values(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call of one of `READS_VALUE` reads values: some do so for some arguments."""
    match name:
        case "where":
            return len(args) + len(kwargs) == 1
        case "repeat_interleave":
            return len(args) + ("repeats" in kwargs) + ("self" in kwargs or "input" in kwargs) == 1
        case "one_hot":
            return int(kwargs.get("num_classes", args[1] if len(args) > 1 else -1)) == -1
        case "index":
            indices = args[1] if len(args) > 1 else kwargs.get("indices", ())
            return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)
    return True


def adds_number(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call of a linear function adds a nonzero Python number."""
    if name.rstrip("_") not in ("add", "sub", "rsub", "subtract", "where"):
        return False
    operands = (*args, *(kwargs.get(key) for key in ("input", "other", "self")))
    return any(isinstance(x, Number) and x for x in operands)


def stays_linear(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call of a linear function is linear with its further arguments."""
    if name == "linear" or name.startswith("conv"):
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        return bias is None
    if name.rstrip("_") in ("div", "divide", "true_divide"):
        dividend = args[0] if args else kwargs.get("input", kwargs.get("self"))
        return isinstance(dividend, torch.Tensor) and kwargs.get("rounding_mode") is None
    if name.startswith("embedding"):
        return all(x is None for x in (*args[3:4], kwargs.get("max_norm")))
    # Reinterpreting bits, and rounding to integers, are not linear.
    arguments = (*args, *kwargs.values())
    if name == "type":
        arguments = tuple(map(_dtype_of, arguments))
    dtypes = [x for x in arguments if isinstance(x, torch.dtype)]
    integral = [dtype for dtype in dtypes if not is_inexact_dtype(dtype)]
    return not (integral or (dtypes and name == "view"))


def _dtype_of(target: Any) -> Any:
    """Return the dtype of an argument of `Tensor.type`: a dtype, a tensor class, or its name."""
    if isinstance(target, str):
        target = getattr(torch, target.rpartition(".")[2], None)
    return getattr(target, "dtype", target)


def written_arguments(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the arguments that a call of an `Action.WRITES_ARGUMENT` function writes."""
    if name.startswith("embedding"):
        if all(x is None for x in (*args[3:4], kwargs.get("max_norm"))):
            return []
        return [args[1] if len(args) > 1 else kwargs["weight"]]
    named = _arguments(func, name, args, kwargs)
    written = _written_names(func, name)
    if name in WRITES_ARGUMENT and not written:
        if not named.get("training", named.get("use_input_stats", True)):
            return []
        written = frozenset(("running_mean", "running_var"))
    return [arg for key, arg in named.items() if key in written and arg is not None]
