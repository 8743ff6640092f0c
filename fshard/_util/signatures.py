"""Errors of calls that do not match a function's signature.

Python raises a bare `TypeError` for an option passed by position or under an unknown name, and for
a missing argument. A public function that catches one calls `explain_binding`; calls that match
cost nothing more.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from fshard._util.errors import Problem, ShardingError, did_you_mean, fail, raise_if
from fshard._util.text import plural

Parameters = Mapping[str, inspect.Parameter]
MISSING = inspect.Parameter.empty
PUBLIC_PACKAGES = ("domain", "interop", "random", "state", "testing")
"""Packages with public functions: `fs.random.normal`."""
OTHER_OPTIONS = {"dim": "axis", "axis": "dim"}
"""Options of PyTorch's functions to those of JAX's that mean the same, and the reverse."""


class SignatureError(ShardingError, TypeError):
    """Call that does not match a function's signature; also a `TypeError`, as Python's own."""


def explain_binding(
    error: Exception,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inner: Callable[..., Any] | None = None,
) -> None:
    """Raise a `SignatureError` if `error` is of a call that does not match `fn`'s signature.

    `inner` is the function to which `fn` passes its `**options`.
    """
    if not isinstance(error, TypeError) or isinstance(error, ShardingError):
        return
    signature = inspect.signature(fn)
    if inner is not None:
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = inspect.signature(inner).parameters.values()
        signature = signature.replace(
            parameters=[*named, *(p for p in options if p.kind is p.KEYWORD_ONLY)]
        )
    with suppress(TypeError):
        signature.bind(*args, **kwargs)
        return
    args, parameters = _without_self(args, signature.parameters)
    problems = binding_problems(parameters, args, kwargs)
    raise_if(public_name(fn), problems, kind=SignatureError)


CALL = "_fshard_call"
"""Attribute of functions that are made of others, for errors: a call that they take."""
ANY_CALL = "change the call, or the function's parameters"


def bind_call(
    where: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    example: str = ANY_CALL,
) -> inspect.BoundArguments:
    """Bind the arguments of a call of a user's function.

    Raises:
        SignatureError: for a call that the function does not take.

    >>> bind_call("f", inspect.signature(lambda x, scale=1.0: x), (), {"scal": 2})
    Traceback (most recent call last):
    fshard._util.signatures.SignatureError: f
      given: missing a required argument: 'x'
      rule:  arguments must be those of the function, (x, scale=1.0)
      fix:   did you mean 'scale'?
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        given = str(error)
    parameters = [p.replace(annotation=MISSING) for p in signature.parameters.values()]
    shown = signature.replace(parameters=parameters, return_annotation=MISSING)
    unknown = [name for name in kwargs if name not in signature.parameters]
    fix = did_you_mean(unknown[0], signature.parameters, example) if unknown else example
    rule = f"arguments must be those of the function, {shown}"
    fail(where, given, rule, fix, SignatureError)


def public_name(fn: Callable[..., Any]) -> str:
    """Return a public function's name as users write it: `fs.random.normal`, `fs.Spec`."""
    qualname = fn.__qualname__.removesuffix(".__init__")
    package = fn.__module__.split(".")[1:2]
    in_package = {*package} <= {*PUBLIC_PACKAGES} and not hasattr(
        sys.modules["fshard"], qualname.partition(".")[0]
    )
    return ".".join(["fs", *(package if in_package else ()), qualname])


def _without_self(
    args: tuple[Any, ...], parameters: Parameters
) -> tuple[tuple[Any, ...], Parameters]:
    if next(iter(parameters), None) != "self":
        return args, parameters
    return args[1:], {name: p for name, p in parameters.items() if name != "self"}


def binding_problems(
    parameters: Parameters, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Problem]:
    """Return the problems of a call: surplus positional, unknown and missing arguments."""
    of_kind: dict[Any, list[str]] = {}
    for name, p in parameters.items():
        of_kind.setdefault(p.kind, []).append(name)
    either = of_kind.get(inspect.Parameter.POSITIONAL_OR_KEYWORD, [])
    by_position = [*of_kind.get(inspect.Parameter.POSITIONAL_ONLY, []), *either]
    options = of_kind.get(inspect.Parameter.KEYWORD_ONLY, [])
    problems, names = [], [*by_position[: len(args)], *kwargs]
    surplus = args[len(by_position) :]
    if surplus and inspect.Parameter.VAR_POSITIONAL not in of_kind:
        free = {name: parameters[name] for name in options if name not in kwargs}
        intended = _names_of(surplus, free)
        names += intended
        problems.append(_surplus_problem(args, surplus, by_position, free, intended))
    if inspect.Parameter.VAR_KEYWORD not in of_kind:
        known = [*either, *options]
        unknown = [name for name in kwargs if name not in known]
        rule = f"an option must be one of {', '.join(known)}" if known else "it has no options"
        for name in unknown:
            value, other = _short(kwargs[name]), OTHER_OPTIONS.get(name)
            fix = (
                f"{other}={value}" if other in known else did_you_mean(name, known, "leave it out")
            )
            problems.append(Problem(f"{name}={value}", rule, fix))
    required = [name for name in (*by_position, *options) if parameters[name].default is MISSING]
    problems += [
        Problem(f"no {name}", f"{name} must be given", f"{name}=..." if name in options else
                f"{name} as argument {by_position.index(name) + 1}")
        for name in required if name not in names
    ]  # fmt: skip
    return problems


def _surplus_problem(
    args: tuple[Any, ...],
    surplus: tuple[Any, ...],
    by_position: list[str],
    free: Parameters,
    intended: list[str],
) -> Problem:
    taken = f"only {', '.join(by_position)}" if by_position else "no argument"
    rule = f"{taken} can be positional"
    if free:
        rule += f"; options must be named: {', '.join(f'{name}=' for name in free)}"
    fix = [f"{name}={_short(x)}" for name, x in zip(intended, surplus, strict=False)]
    given = f"{plural(len(args), 'positional argument')}: {', '.join(map(_short, args))}"
    otherwise = "name the last ones" if free else "leave the last ones out"
    return Problem(given, rule, ", ".join(fix) or otherwise)


def _names_of(surplus: tuple[Any, ...], options: Parameters) -> list[str]:
    """Return the option that each surplus argument is meant for; an empty list unless all have one.

    It is the first one of the argument's class, else the first one that accepts it.
    """
    names: list[str] = []
    for value in surplus:
        free = [name for name in options if name not in names]
        of_class = [name for name in free if type(value) in get_args(options[name].annotation)]
        accepting = [name for name in free if _accepts(options[name].annotation, value)]
        names += (of_class or accepting)[:1]
    return names if len(names) == len(surplus) else []


def _accepts(annotation: Any, value: Any) -> bool:
    """Return True if a value is of an annotation's outermost type."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return any(_accepts(arg, value) for arg in get_args(annotation))
    if origin is Literal:
        return value in get_args(annotation)
    kind = origin or annotation
    if kind is Any or not isinstance(kind, type):
        return kind is not None or value is None
    return isinstance(value, (int, float) if kind is float else kind)


def _short(value: Any) -> str:
    """Return a value's text, or its type's name if that is long."""
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else f"a {type(value).__name__}"
