"""Errors of functions that cannot be traced, with the user's line in them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import fx, nn

from fshard._torch.fake_tensors import DataDependentOutputException, DynamicOutputShapeException
from fshard._torch.module_state import conversions_by
from fshard._util.errors import did_you_mean, fail
from fshard._util.other_names import COLLECTIVES, NO_PROCESS_GROUP
from fshard._util.text import listing, one_line
from fshard.ops.core.call import ValueDependentShapeError, base_name, name_of, sized_call
from fshard.ops.trace.inner_gradients import READ, is_itself
from fshard.run.transports.divergence_report import raise_line, user_line

FOREIGN_RESULT = "argument of type: "
"""Beginning of the error of `torch.fx` for a result that a graph cannot have."""
UNKNOWN_KEYWORD = "got an unexpected keyword argument '"
"""Words of Python and PyTorch before the name of a keyword that a function does not have."""
TRACED_ONCE = "the function is traced once on tensors without values, of the global shapes"
_POSITION = (
    "x[i] in place of x[int(i)]; torch.stack(xs)[i] of a list; numbers as arguments, int(n.max())"
)
_SLICE = "x.narrow(dim, i, length) in place of x[i : i + length]"
_ROLL = "x.index_select(dim, (torch.arange(n) - i) % n)"
_AT_POSITIONS: dict[Any, str] = {
    torch.Tensor.__int__: _POSITION, torch.Tensor.__index__: _POSITION,
    torch.Tensor.__getitem__: _SLICE, torch.Tensor.__setitem__: _SLICE,
    torch.roll: _ROLL, torch.Tensor.roll: _ROLL,
}  # fmt: skip
"""Functions that take positions as numbers, with calls that take tensors."""


def refuse_function(where: str, error: Exception, names: Sequence[str]) -> NoReturn:
    """Raise `ShardingError` for a function that cannot be traced, with the user's line in it.

    `names` are those of the arguments.
    """
    place, cause = f"{where}{raise_line(error.__traceback__)}", one_line(error)
    if isinstance(error, DataDependentOutputException):
        func, nodes = getattr(error, READ, (error.func, ()))
        cause = f"{name_of(func)} reads a tensor's values{_sources(nodes, names)}"
        if func in _AT_POSITIONS:
            fail(place, cause, TRACED_ONCE, _AT_POSITIONS[func])
    elif isinstance(error, DynamicOutputShapeException):
        fail(place, f"{error.func} returns a shape that depends on a tensor's values", TRACED_ONCE,
             f"{sized_call(error.func)}; or fs.shard_map within the function, whose body runs on "
             "locals; fs.apply(op, pair, mode=\"auto\") runs one on unsharded values",
             ValueDependentShapeError)  # fmt: skip
    elif isinstance(error, NotImplementedError) and str(error).startswith(FOREIGN_RESULT):
        fail(place, f"a result of {str(error).removeprefix(FOREIGN_RESULT)}",
             "results must be tensors, numbers and strings, in containers that are pytrees",
             "dict(module.named_parameters()) of a module; torch.export.register_dataclass(cls) of "
             "a class")  # fmt: skip
    elif "level <= current_level" in cause:  # an assertion of functorch
        fail(place, "a tensor of a transform of torch.func, which an autograd.Function closes over "
             "and uses after the transform has ended",
             "tensors that a backward or jvp uses must be arguments of apply",
             "F.apply(x, w), and ctx.save_for_backward(x, w) in setup_context")  # fmt: skip
    elif isinstance(error, TypeError) and UNKNOWN_KEYWORD in cause:
        name = cause.partition(UNKNOWN_KEYWORD)[2].partition("'")[0]
        options = ("mode", "topology") if where.startswith("fs.apply") else ()
        fail(place, cause, f"keywords must be {' and '.join(options)}, or those of the function"
             if options else "keywords must be those of the function that is called",
             did_you_mean(name, options, f"leave {name}= out"))  # fmt: skip
    elif _fails_in_forward_mode(error):
        fail(place, f"forward mode, as of hessian or jacfwd, within a vmap: {cause}",
             "nested transforms must be among those that PyTorch can trace",
             "jacrev(jacfwd(f)) in the place of hessian(f)")  # fmt: skip
    elif "at least two devices" in cause:
        fail(place, cause, "all tensors must be on one device; arguments on meta are traced on CPU",
             "buffers as arguments: dict([*m.named_parameters(), *m.named_buffers()])")  # fmt: skip
    else:
        is_collective = NO_PROCESS_GROUP in cause
        fail(place, cause, "the function is traced once on tensors of the global shapes",
             COLLECTIVES if is_collective else "check that it runs on global tensors, and calls no "
             "numpy() on them")  # fmt: skip
    fail(place, cause, TRACED_ONCE,
         "torch.where instead of masks and branches on values, counts by one_hot; checks before "
         "the call, and numbers as arguments, int(n.max()); buffers and constants that it reads "
         "closed over; no random branches, as encoder_layerdrop=0.0; validate_args=False of a "
         "distribution with a covariance")  # fmt: skip


def _sources(nodes: Sequence[fx.Node | None], names: Sequence[str]) -> str:
    """Return a clause with the arguments and draws that values depend on, "" if there are none."""
    seen, todo = dict[fx.Node, None](), [node for node in nodes if node is not None]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen[node] = None
            todo += node.all_input_nodes
    arguments = next((node.graph.find_nodes(op="placeholder") for node in seen), ())
    sources = [name for x, name in zip(arguments, names, strict=False) if x in seen]
    sources += [f"a draw of {base_name(x.target)}" for x in seen
                if torch.Tag.nondeterministic_seeded in getattr(x.target, "tags", ())]  # fmt: skip
    if not sources:
        return ""
    return f", which depend on {listing(sources, len(sources), sources[-1], 3)}"


def _fails_in_forward_mode(error: Exception) -> bool:
    """Return True for an error that PyTorch's fake tensors raise below `torch.func.jvp`."""
    frames = traceback.extract_tb(error.__traceback__)
    below_jvp = any(frame.name == "_jvp_with_argnums" for frame in frames)
    return below_jvp and "_subclasses" in frames[-1].filename


def refuse_conversions(depth: Callable[[], int], where: str) -> AbstractContextManager[None]:
    """Refuse `module.to(...)` in the block, unless it changes nothing; `depth` is 0 elsewhere.

    PyTorch exchanges tensors with others, which those of a trace do not allow.
    """

    def convert(original: Any, module: nn.Module, fn: Callable[[Any], Any], recurse: bool) -> Any:
        if not depth():
            return original(module, fn, recurse)
        for name, x in [*module.named_parameters(), *module.named_buffers()]:
            with torch.no_grad():
                y = fn(x)
            if not is_itself(x, y):
                change = " to ".join(f"{z.dtype} on {z.device}" for z in (x, y))
                fail(f"{where}{user_line(None, None)}",
                     f"a {type(module).__name__} whose {name} is converted, from {change}",
                     "tensors of modules must keep their dtypes and devices",
                     f"m.to(...) before the call, or {name}.to(...) where it is used")  # fmt: skip
        return module

    return conversions_by(convert)
