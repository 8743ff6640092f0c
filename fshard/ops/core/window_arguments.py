"""Problems of the arguments of windowed functions, in words of their own: PyTorch's are few.

`argument_problems` is called where PyTorch or a rule has refused a call: on pairs, and in traced
functions. It returns the problems of functions of `torch.nn.functional` that read windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fshard._util.errors import Problem, did_you_mean
from fshard.layout.validation import as_ints

Values = Mapping[str, Any]
"""Arguments by name."""
Check = Callable[[Values, int], list[Problem]]
"""Function of arguments and a number of spatial dims that returns the problems."""

PARAMETERS = {
    "conv": "input weight bias stride padding dilation groups",
    "conv_transpose": "input weight bias stride padding output_padding groups dilation",
    "avg_pool": "input kernel_size stride padding ceil_mode count_include_pad divisor_override",
    "max_pool": "input kernel_size stride padding dilation ceil_mode return_indices",
    "adaptive_avg_pool": "input output_size",
    "adaptive_max_pool": "input output_size return_indices",
    "interpolate": "input size scale_factor mode align_corners recompute_scale_factor antialias",
    "pad": "input pad mode value",
    "unfold": "input kernel_size dilation padding stride",
    "fold": "input output_size kernel_size dilation padding stride",
}
"""Parameters of each function, or of those of one to three spatial dims."""
NOT_IN_1D = "avg_pool", 1, "divisor_override"
SPATIAL = {
    "nearest": (1, 2, 3), "nearest-exact": (1, 2, 3), "area": (1, 2, 3), "linear": (1,),
    "bilinear": (2,), "bicubic": (2,), "lanczos": (2,), "trilinear": (3,),
}  # fmt: skip
"""Numbers of spatial dims of each mode of interpolation."""
ANTIALIASED = ("bilinear", "bicubic", "lanczos")
ALIGNED = ("linear", "bilinear", "bicubic", "trilinear")
PADDINGS = ("constant", "reflect", "replicate", "circular")


def argument_problems(function: Any, args: Sequence[Any], kwargs: Values) -> list[Problem]:
    """Return the problems of a call, none of a function that is not known here.

    Args:
        function: the function.
        args: its arguments, with pairs or tensors.
        kwargs: those by name.
    """
    try:
        found = _KNOWN.get(function)
    except TypeError:  # it is not hashable
        return []
    if found is None:
        return []
    family, n = found
    names = [name for name in PARAMETERS[family].split() if (family, n, name) != NOT_IN_1D]
    problems = [
        Problem(f"{name}={value!r}", f"an option must be one of {', '.join(names)}",
                did_you_mean(name, names, f"leave {name} out"))
        for name, value in kwargs.items() if name not in names
    ]  # fmt: skip
    values = dict(zip(names, args, strict=False))
    return list(dict.fromkeys([*problems, *_CHECKS[family]({**values, **kwargs}, n)]))


def _known() -> dict[Any, tuple[str, int]]:
    """Return the family and the number of spatial dims of each function, in all its forms."""
    known: dict[Any, tuple[str, int]] = {}
    for family in PARAMETERS:
        for n in (1, 2, 3):
            name = family if hasattr(F, family) else f"{family}{n}d"
            for module, form in ((F, name), (F, f"_{name}"), (F, f"{name}_with_indices"),
                                 (torch, name)):  # fmt: skip
                if hasattr(module, form):
                    known[getattr(module, form)] = family, 2 if name == family else n
    return known


# -- numbers ------------------------------------------------------------------------------------


def _shape(x: Any) -> tuple[int, ...]:
    """Return the global shape of a pair or the shape of a tensor, () of anything else."""
    return tuple(getattr(x[1] if type(x) is tuple and len(x) == 2 else x, "shape", ()))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _each(value: Any, n: int) -> list[Any]:
    """Return the values of `n` dims, of one for all or one for each."""
    return _listed(value) * n if len(_listed(value)) == 1 else _listed(value)


def number_problems(
    n: int, numbers: Mapping[str, tuple[Any, int]], *, single: bool = True
) -> list[Problem]:
    """Return the problems of arguments for `n` spatial dims, given as their value and the least.

    A list of one number is for all dims if `single`.
    """
    several, lengths = f", or {n} of them" if n > 1 else "", (1, n) if single else (n,)
    problems = []
    for name, (value, least) in numbers.items():
        items = _listed(value)
        ints = as_ints(items) if not any(type(item) is bool for item in items) else None
        is_list = isinstance(value, list | tuple)
        if not ints or min(ints) < least or (is_list and len(ints) not in lengths):
            rule = f"{name} must be an int of at least {least}{several}"
            given = items[0] if len(items) == 1 and n == 1 else value
            problems.append(Problem(f"{name}={given!r}", rule, f"{name}={least}"))
    return problems


def _word_problems(words: Sequence[str], **values: Any) -> list[Problem]:
    """Return the problems of arguments that are not among `words`."""
    return [
        Problem(f"{name}={value!r}", f"{name} must be one of {', '.join(words)}",
                f"{name}={words[0]!r}")
        for name, value in values.items() if not isinstance(value, str) or value not in words
    ]  # fmt: skip


def _flag_problems(values: Values, *names: str) -> list[Problem]:
    """Return the problems of arguments that are not bools."""
    return [
        Problem(f"{name}={values[name]!r}", f"{name} must be True or False", f"{name}=False")
        for name in names if type(values.get(name, False)) is not bool
    ]  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _dim_problems(x: Any, n: int) -> list[Problem]:
    """Return the problem of an input without the `n` spatial dims, channels and maybe a batch."""
    shape = _shape(x)
    if len(shape) in (n + 1, n + 2):
        return []
    rule = f"the input must have shape ([batch,] channels, *spatial) with {n} spatial dims"
    return [Problem(f"an input of {len(shape)} dims, {shape}", rule, f"{n + 2} dims")]


def _window_problems(
    x: Any, n: int, kernel: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    *, pools: bool = False, single: bool = True, sized: bool = True,
) -> list[Problem]:  # fmt: skip
    """Return the problems of windows in the last `n` dims of an input.

    Args:
        x: the input.
        n: number of spatial dims.
        kernel: elements of a window, one number for all spatial dims or one for each; so are
            stride, padding and dilation.
        stride: distance of windows.
        padding: positions at both ends of a dim.
        dilation: distance of the elements of a window.
        pools: refuse a padding above half of a window, as pooling does.
        single: accept lists of one number.
        sized: the kernel's size is an argument; that of a convolution is its weight's.
    """
    problems = number_problems(
        n, {"kernel_size": (kernel, 1), "stride": (stride, 1), "padding": (padding, 0),
            "dilation": (dilation, 1)}, single=single,
    ) or _dim_problems(x, n)  # fmt: skip
    if problems:
        return problems
    numbers = (_each(values, n) for values in (kernel, padding, dilation))
    for size, count, pad, step in zip(_shape(x)[-n:], *numbers, strict=True):
        extent, room = step * (count - 1) + 1, size + 2 * pad
        if extent > room:
            rule = f"a window must not be longer than the padded dim of {room}"
            fix = f"kernel_size={max((room - 1) // step + 1, 1)}"
            if not sized:
                wider = f"padding={-(-(extent - size) // 2)}"
                fix = f"dilation={(room - 1) // (count - 1)}" if room >= count > 1 else wider
            given = f"kernel_size={count}, dilation={step}: windows of {extent}"
            problems.append(Problem(given, rule, fix))
        if pools and pad > extent // 2:
            rule = "padding must be at most half of a window"
            given = f"padding={pad} of windows of {extent}"
            problems.append(Problem(given, rule, f"padding={extent // 2}"))
    return problems


# -- convolutions -------------------------------------------------------------------------------


def _channel_problems(values: Values, n: int, transposed: bool) -> list[Problem]:
    """Return the problems of the weight, the channels, the groups and the bias."""
    x, weight, groups = values.get("input"), values.get("weight"), values.get("groups", 1)
    problems, kernel = number_problems(1, {"groups": (groups, 1)}), _shape(weight)
    if isinstance(groups, list | tuple):
        rule = "groups must be one int of at least 1"
        problems = [Problem(f"groups={groups!r}", rule, "groups=1")]
    if len(kernel) != n + 2:
        rule = f"the weight must have {n + 2} dims, {n} of them of space"
        return [*problems, Problem(f"a weight of shape {kernel}", rule, f"{n + 2} dims")]
    problems = problems or _dim_problems(x, n)
    if problems:
        return problems
    channels = _shape(x)[-n - 1]
    sides = kernel[1] * groups, kernel[0]
    expected, outputs = sides[::-1] if transposed else sides
    if channels != expected or kernel[0] % groups:
        order = "(in, out / groups, ...)" if transposed else "(out, in / groups, ...)"
        given = f"{channels} channels, a weight of shape {kernel}, groups={groups}"
        rule = f"the weight must have shape {order}, and groups must divide both channels"
        return [Problem(given, rule, f"an input of {expected} channels")]
    bias = values.get("bias")
    if bias is None or _shape(bias) == (outputs,):
        return []
    given = f"a bias of shape {_shape(bias)}" if hasattr(bias, "shape") else f"bias={bias!r}"
    rule = f"the bias must be None, or have shape ({outputs},): one element for each channel"
    return [Problem(given, rule, "bias=None")]


def convolution_problems(values: Values, n: int, transposed: bool) -> list[Problem]:
    """Return the problems of the arguments of a convolution, or of a transposed one."""
    return (_transposed if transposed else _convolution)(values, n)


def _convolution(values: Values, n: int) -> list[Problem]:
    stride, padding, dilation = (
        values.get(name, default)
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    problems = _channel_problems(values, n, False)
    if problems:
        return problems
    kernel = _shape(values["weight"])[2:]
    if not isinstance(padding, str):
        return _window_problems(values["input"], n, kernel, stride, padding, dilation, sized=False)
    if padding not in ("same", "valid"):
        rule = "padding must be an int of at least 0, one for each spatial dim, same or valid"
        return [Problem(f"padding={padding!r}", rule, "padding='same'")]
    problems = number_problems(n, {"stride": (stride, 1), "dilation": (dilation, 1)})
    if problems or padding == "valid":
        return problems or _window_problems(
            values["input"], n, kernel, stride, 0, dilation, sized=False
        )
    if set(_each(stride, n)) == {1}:
        return []
    half = [d * (k - 1) // 2 for k, d in zip(kernel, _each(dilation, n), strict=True)]
    rule = "with padding='same' the stride must be 1"
    return [Problem(f"padding='same', stride={stride!r}", rule, f"padding={tuple(half)}")]


def _transposed(values: Values, n: int) -> list[Problem]:
    defaults = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
    numbers = {name: (values.get(name, least), least) for name, least in defaults.items()}
    problems = _channel_problems(values, n, True) or number_problems(n, numbers)
    if problems:
        return problems
    each = [_each(value, n) for value, _ in numbers.values()]
    spatial = _shape(values["input"])[-n:], _shape(values["weight"])[2:]
    for size, kernel, stride, pad, more, step in zip(*spatial, *each, strict=True):
        if more and more >= max(stride, step):
            problems.append(Problem(f"output_padding={more}, stride={stride}",
                                    "output_padding must be less than stride or dilation",
                                    f"output_padding={max(stride, step) - 1}"))  # fmt: skip
        length = (size - 1) * stride + step * (kernel - 1) + 1 + more
        if length <= 2 * pad:
            rule = f"it must leave an element of the {length} of the result"
            fix = f"padding={(length - 1) // 2}"
            problems.append(Problem(f"padding={pad} at both ends", rule, fix))
    return problems


# -- pooling ------------------------------------------------------------------------------------


def _pooling(values: Values, n: int) -> list[Problem]:
    kernel, stride = values.get("kernel_size"), values.get("stride")
    padding, dilation = values.get("padding", 0), values.get("dilation", 1)
    steps = kernel if stride is None or stride == [] else stride
    problems = _window_problems(
        values.get("input"), n, kernel, steps, padding, dilation, pools=True
    )
    problems += _flag_problems(values, "ceil_mode", "count_include_pad", "return_indices")
    divisor = values.get("divisor_override")
    if divisor is not None and (type(divisor) is not int or divisor == 0):
        rule = "divisor_override must be None or an int other than 0"
        problems.append(Problem(f"divisor_override={divisor!r}", rule, "divisor_override=None"))
    return problems


def _adaptive(values: Values, n: int) -> list[Problem]:
    x, size = values.get("input"), values.get("output_size")
    problems = _dim_problems(x, n)
    if not problems:
        kept = _shape(x)[-n:]
        listed = size
        if isinstance(size, list | tuple) and len(size) == n:
            listed = [k if s is None else s for s, k in zip(size, kept, strict=True)]
        if number_problems(n, {"output_size": (listed, 0)}, single=False):
            several = f", or {n} of them" if n > 1 else ""
            rule = f"output_size must be an int of at least 0{several}, in which None keeps a size"
            problems = [Problem(f"output_size={size!r}", rule, "output_size=1")]
    return problems + _flag_problems(values, "return_indices")


# -- other functions ----------------------------------------------------------------------------


def _interpolation(values: Values, _: int) -> list[Problem]:
    mode, shape = values.get("mode", "nearest"), _shape(values.get("input"))
    aligned, given = values.get("align_corners"), {k: v for k, v in values.items() if v is not None}
    n = len(shape) - 2
    problems = _word_problems(tuple(SPATIAL), mode=mode) or _flag_problems(
        given, "recompute_scale_factor", "antialias"
    )
    if problems:
        return problems
    if n not in SPATIAL[mode]:
        fitting = next((name for name in ALIGNED if n in SPATIAL[name]), "nearest")
        counts = " or ".join(map(str, SPATIAL[mode]))
        rule = f"mode {mode} must have an input of 2 dims and {counts} spatial ones"
        return [Problem(f"mode={mode!r}, an input of shape {shape}", rule, f"mode={fitting!r}")]
    if aligned is not None and (mode not in ALIGNED or type(aligned) is not bool):
        others = ", True or False" if mode in ALIGNED else ""
        rule = f"with mode {mode} align_corners must be None{others}"
        problems.append(Problem(f"align_corners={aligned!r}", rule, "align_corners=None"))
    if values.get("antialias") and mode not in ANTIALIASED:
        rule = f"antialias must be False unless the mode is {' or '.join(ANTIALIASED[:2])}"
        problems.append(Problem(f"antialias=True, mode={mode!r}", rule, "antialias=False"))
    return problems + _scale_problems(values, n, shape[2:])


def _scale_problems(values: Values, n: int, spatial: Sequence[int]) -> list[Problem]:
    """Return the problems of the size of a result and of its quotient to the input's."""
    size, scale = values.get("size"), values.get("scale_factor")
    several = f", or {n} of them" if n > 1 else ""
    if (size is None) == (scale is None):
        rule, fix = "one of size and scale_factor must be given", "size=None, scale_factor=2.0"
        return [Problem(f"size={size!r}, scale_factor={scale!r}", rule, fix)]
    if size is not None:
        problems = number_problems(n, {"size": (size, 1)}, single=False)
        if values.get("recompute_scale_factor"):
            rule, fix = "recompute_scale_factor must be None with a size", "it left out"
            problems.append(Problem("recompute_scale_factor=True", rule, fix))
        return problems
    factors: Any = scale if isinstance(scale, list | tuple) else [scale] * n
    if len(factors) == n and all(
        _is_number(factor) and int(k * factor) > 0
        for k, factor in zip(spatial, factors, strict=True)
    ):
        return []
    rule = f"scale_factor must be a number above 0{several}, and leave an element of each dim"
    return [Problem(f"scale_factor={scale!r}", rule, "scale_factor=1.0")]


def _padding(values: Values, _: int) -> list[Problem]:
    pad, mode, value = values.get("pad"), values.get("mode", "constant"), values.get("value")
    problems, shape = _word_problems(PADDINGS, mode=mode), _shape(values.get("input"))
    ints, count = as_ints(pad), 2 * min(max(len(shape) - 2, 1), 3)
    if value is not None and not isinstance(value, int | float | complex):
        problems.append(Problem(f"value={value!r}", "value must be a number or None", "value=0.0"))
    if ints is None or len(ints) % 2 or len(ints) > 2 * len(shape):
        rule = f"pad must be pairs of ints from the last dim on, at most {2 * len(shape)} ints"
        return [*problems, Problem(f"pad={pad!r}", rule, f"pad={(1, 1, *[0] * (count - 2))}")]
    if problems:
        return problems
    if mode != "constant" and len(shape) - len(ints) // 2 not in (1, 2):
        rule = f"with mode {mode} pad must have {count} ints, for all spatial dims"
        return [Problem(f"pad={pad!r}", rule, f"pad={(*ints, *[0] * count)[:count]}")]
    limits = {"reflect": 1, "circular": 0}
    for dim, (before, after) in enumerate(zip(ints[::2], ints[1::2], strict=True), 1):
        size = shape[-dim]
        most = size - limits[mode] if mode in limits else max(before, after)
        if max(before, after) > most:
            rule = f"with mode {mode} at most {most} elements must be added at an end of {size}"
            problems.append(Problem(f"pad={pad!r}: {max(before, after)} at dim -{dim}", rule,
                                    "mode='replicate'"))  # fmt: skip
        if size + before + after < (mode != "constant"):
            rule = f"at most {size} elements of dim -{dim} must be cropped"
            problems.append(
                Problem(
                    f"pad={pad!r}: {before + after} of {size} elements",
                    rule,
                    "mode='constant', pad=(0, 0)",
                )
            )
    return problems


def _unfolding(values: Values, n: int) -> list[Problem]:
    names = ("kernel_size", None), ("stride", 1), ("padding", 0), ("dilation", 1)
    return _window_problems(
        values.get("input"), n, *(values.get(k, v) for k, v in names), single=False
    )


def _folding(values: Values, n: int) -> list[Problem]:
    least = {"output_size": 1, "kernel_size": 1, "dilation": 1, "padding": 0, "stride": 1}
    optional = {"dilation": 1, "padding": 0, "stride": 1}
    numbers = {name: (values.get(name, optional.get(name)), k) for name, k in least.items()}
    problems, shape = number_problems(n, numbers, single=False), _shape(values.get("input"))
    if problems:
        return problems
    each = [_each(value, n) for value, _ in numbers.values()]
    counts = [(size + 2 * pad - step * (kernel - 1) - 1) // stride + 1
              for size, kernel, step, pad, stride in zip(*each, strict=True)]  # fmt: skip
    elements, windows = math.prod(each[1]), math.prod(counts)
    if min(counts) < 1 or len(shape) not in (2, 3) or shape[-1] != windows or shape[-2] % elements:
        rule = (f"it must be ([batch,] channels * {elements}, {' * '.join(map(str, counts))} "
                f"windows) for output_size={values['output_size']!r}")  # fmt: skip
        fix = "the input of a shape that F.unfold of such a plane returns"
        problems = [Problem(f"an input of shape {shape}", rule, fix)]
    return problems


_KNOWN = _known()
_CHECKS: dict[str, Check] = {
    "conv": _convolution,
    "conv_transpose": _transposed,
    "avg_pool": _pooling,
    "max_pool": _pooling,
    "adaptive_avg_pool": _adaptive,
    "adaptive_max_pool": _adaptive,
    "interpolate": _interpolation,
    "pad": _padding,
    "unfold": _unfolding,
    "fold": _folding,
}
