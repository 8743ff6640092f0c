"""Signatures of public functions as `help()` shows them, and the boundary of their errors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType, UnionType
from typing import Any, NewType

from fshard._util.tracebacks import boundary, explained

DUNDERS = {"__all__", "__doc__", "__file__", "__name__", "__version__"}
"""Names of a package beside its public ones."""


def publish(
    namespace: dict[str, Any], names: Iterable[str], results: Mapping[str, str] | None = None
) -> None:
    """Make signatures of public functions and classes readable, and their errors short.

    Annotations become types in the place of the strings that `from __future__ import annotations`
    leaves, which `inspect.signature` would show. Public unions, `Step` for one, are shown by their
    name. The `__module__` of functions becomes the package's; classes keep theirs, by which
    `inspect.getsource` and doctest find them. Functions become those of `boundary`, constructors
    and methods with options those of `explained`. `dir` of the package lists public names alone.

    Args:
        namespace: globals of the package.
        names: names of its public functions, classes and unions; other values are ignored.
        results: names of classes that users do not construct, and functions that return them.
    """
    package, names = namespace["__name__"], tuple(names)
    namespace["__dir__"] = lambda: sorted({*names, *DUNDERS & namespace.keys()})
    unions: dict[str, Any] = {
        name: NewType(name, object) for name in names if isinstance(namespace[name], UnionType)
    }
    for union in unions.values():
        union.__module__ = package
    for name in names:
        value = namespace[name]
        if isinstance(value, type | FunctionType) and value.__module__ != package:
            members = vars(value).values() if isinstance(value, type) else ()
            for member in (value, *members):
                _resolve(member, vars(sys.modules[value.__module__]), unions)
            if isinstance(value, FunctionType):
                value.__module__ = package
                namespace[name] = boundary(value)
            elif results and name in results:
                _hide_constructor(value, results[name])
                continue
            for member, method in list(vars(value).items()):
                public = member == "__init__" or not member.startswith("_")
                if public and isinstance(method, FunctionType):
                    setattr(value, member, explained(method))


def _hide_constructor(cls: Any, source: str) -> None:
    """Show a class's constructor without its arguments."""
    init = cls.__init__
    init.__doc__ = f"Call `{source}`, which returns one."
    unnamed = inspect.Parameter("_", inspect.Parameter.VAR_POSITIONAL)
    init.__signature__ = inspect.Signature(
        [next(iter(inspect.signature(init).parameters.values())), unnamed]
    )


def _resolve(value: Any, scope: dict[str, Any], unions: dict[str, Any]) -> None:
    """Replace strings by types in the annotations of a class, or of a member's function.

    A decorator may set a method or a `__signature__` that names types of its own module.
    """
    if isinstance(value, property):
        value = value.fget
    if not callable(value := getattr(value, "__func__", value)):
        return

    def type_of(annotation: Any) -> Any:
        text = getattr(annotation, "__forward_arg__", annotation)
        return eval(text, scope, unions) if isinstance(text, str) else annotation

    scope = {**getattr(value, "__globals__", {}), **scope}
    signature = getattr(value, "__signature__", None)
    if signature is not None:
        parameters = [
            parameter.replace(annotation=type_of(parameter.annotation))
            for parameter in signature.parameters.values()
        ]
        value.__signature__ = signature.replace(
            parameters=parameters, return_annotation=type_of(signature.return_annotation)
        )
    annotations = getattr(inspect.unwrap(value), "__annotations__", {})
    for name, annotation in annotations.items():
        annotations[name] = type_of(annotation)
