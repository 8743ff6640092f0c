"""Problems of the arguments of windowed operations, in words of their own: PyTorch's are few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fshard._util.errors import Problem
from fshard.layout.validation import as_ints
from fshard.ops.rules.window.window_dims import number_problems


def _each(values: Any, n: int) -> tuple[int, ...]:
    """Return the numbers of `n` spatial dims, of one for all or one for each."""
    listed = as_ints(values if isinstance(values, list | tuple) else (values,)) or ()
    return listed * n if len(listed) == 1 else listed


def window_problems(
    x: Any, n: int, kernel: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    *, pools: bool = False,
) -> list[Problem]:  # fmt: skip
    """Return the problems of windows in the last `n` dims of a pair.

    Args:
        x: the pair, or what was given in its place.
        n: number of spatial dims.
        kernel: elements of a window, one number for all spatial dims or one for each; so are
            stride, padding and dilation. No stride is the kernel, and padding may be a word.
        stride: distance of windows.
        padding: positions at both ends of a dim.
        dilation: distance of the elements of a window.
        pools: refuse a padding above half of a window, as pooling does.
    """
    stride = 1 if stride is None else stride
    pads = 0 if isinstance(padding, str) else padding
    problems = number_problems(
        n, kernel_size=(kernel, 1), stride=(stride, 1), padding=(pads, 0), dilation=(dilation, 1)
    )
    shape = tuple(getattr(x, "shape", ()))[-n:]
    if problems or len(shape) < n:
        return problems
    rows = zip(shape, *(_each(values, n) for values in (kernel, pads, dilation)), strict=True)
    for size, count, pad, step in rows:
        extent, room = step * (count - 1) + 1, size + 2 * pad
        if extent > room and padding != "same":
            rule = f"a window must not be longer than the padded dim of {room}"
            fix = f"kernel_size={max((room - 1) // step + 1, 1)}"
            given = f"kernel_size={count}, dilation={step}: windows of {extent}"
            problems.append(Problem(given, rule, fix))
        if pools and pad > extent // 2:
            rule = "padding must be at most half of a window"
            given = f"padding={pad} of windows of {extent}"
            problems.append(Problem(given, rule, f"padding={extent // 2}"))
    return problems


def channel_problems(x: Any, weight: Any, n: int, groups: Any, transposed: bool) -> list[Problem]:
    """Return the problems of the channels of a pair, a weight and groups."""
    problems = number_problems(1, groups=(groups, 1))
    shape, kernel = (tuple(getattr(y, "shape", ())) for y in (x, weight))
    if len(kernel) != n + 2:
        rule = f"the weight must have {n + 2} dims, {n} of them of space"
        return [*problems, Problem(f"a weight of shape {kernel}", rule, f"conv{len(kernel) - 2}d")]
    if problems or len(shape) <= n:
        return problems
    expected = kernel[0] if transposed else kernel[1] * groups
    if shape[-n - 1] != expected or kernel[0] % groups:
        order = "(in, out / groups, ...)" if transposed else "(out, in / groups, ...)"
        given = f"{shape[-n - 1]} channels, a weight of shape {kernel}, groups={groups}"
        rule = f"the weight must have shape {order}, and groups must divide both channels"
        problems.append(Problem(given, rule, f"an input of {expected} channels"))
    return problems


def convolution_problems(
    x: Any, weight: Any, n: int, stride: Any, padding: Any, dilation: Any, groups: Any
) -> list[Problem]:
    """Return the problems of a convolution's channels, or without one those of its windows."""
    return channel_problems(x, weight, n, groups, False) or window_problems(
        x, n, weight.shape[2:], stride, padding, dilation
    )


def word_problems(words: Sequence[str], **values: Any) -> list[Problem]:
    """Return the problems of arguments that are not among `words`."""
    return [
        Problem(f"{name}={value!r}", f"{name} must be one of {', '.join(words)}",
                f"{name}={words[0]!r}")
        for name, value in values.items() if value not in words
    ]  # fmt: skip
