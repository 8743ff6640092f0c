"""Public names: `dir(fs)`, signatures and docstrings as a user of `help()` sees them."""

from __future__ import annotations

import ast
import doctest
import inspect
import pickle
import re
import textwrap
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fshard as fs

DUNDERS = {"__all__", "__doc__", "__file__", "__name__", "__version__"}
PACKAGES = (fs, fs.domain, fs.interop, fs.random, fs.state, fs.testing)
RAISES = {"fail", "raise_if"}


def public(kind: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the public objects of a kind by their name in the user's code."""
    return {
        f"{package.__name__}.{name}": getattr(package, name)
        for package in PACKAGES
        for name in package.__all__
        if kind(getattr(package, name))
    }


FUNCTIONS = public(inspect.isfunction)
CLASSES = public(inspect.isclass)


def function_of(member: Any) -> Any:
    """Return the function of a method, a property or a static method; other values as they are."""
    if isinstance(member, property):
        return member.fget
    return getattr(member, "__func__", member)


METHODS = {
    f"{name}.{attribute}": member
    for name, cls in CLASSES.items()
    for attribute, member in vars(cls).items()
    if not attribute.startswith("_") and inspect.isfunction(function_of(member))
}


def parameters(function: Any) -> list[str]:
    """Return the names of the parameters, without `self`."""
    names = inspect.signature(function_of(function)).parameters
    return [name for name in names if name != "self"]


def sections(docstring: str) -> dict[str, str]:
    """Return the Google-style sections of a docstring by their heading."""
    parts = re.split(r"^(\w+):\n", inspect.cleandoc(docstring), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def raises_itself(function: Any) -> bool:
    """Return True if the body of a function raises an error."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return bool(calls & RAISES) or any(isinstance(node, ast.Raise) for node in ast.walk(tree))


def undocumented(function: Any) -> Iterator[str]:
    """Yield the parameters of a function that the section Args of its docstring lacks."""
    text = sections(function_of(function).__doc__ or "").get("Args", "")
    for name in parameters(function):
        if not re.search(rf"^\s*[^:\n]*\b{name}\b[^:\n]*:", text, re.MULTILINE):
            yield name


# -- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_dir_lists_the_public_names(package: Any) -> None:
    assert {*dir(package)} - DUNDERS == {*package.__all__}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_public_names_are_sorted_and_exist(package: Any) -> None:
    assert len(set(package.__all__)) == len(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def test_public_functions_belong_to_the_package() -> None:
    modules = {name: function.__module__ for name, function in FUNCTIONS.items()}
    assert modules == {name: name.rpartition(".")[0] for name in FUNCTIONS}


def test_source_of_public_classes_is_found() -> None:
    for cls in CLASSES.values():
        assert f"class {cls.__name__}" in inspect.getsource(cls)


def test_public_classes_pickle() -> None:
    for cls in CLASSES.values():
        assert pickle.loads(pickle.dumps(cls)) is cls


def classes_in(annotation: Any) -> Iterator[type]:
    """Yield the classes that a type consists of."""
    if isinstance(annotation, type):
        yield annotation
    for argument in typing.get_args(annotation):
        for item in argument if isinstance(argument, list) else [argument]:
            yield from classes_in(item)


def annotations(function: Any) -> dict[str, Any]:
    """Return the annotations of the parameters, and that of the result as `return`."""
    signature = inspect.signature(function_of(function))
    types = {name: item.annotation for name, item in signature.parameters.items()}
    return types | {"return": signature.return_annotation}


def test_types_in_signatures_are_public() -> None:
    """A user can name the types of all arguments and results."""
    private = {
        (name, cls)
        for name, function in FUNCTIONS.items()
        for annotation in annotations(function).values()
        for cls in classes_in(annotation)
        if cls.__module__.startswith("fshard") and cls not in CLASSES.values()
    }
    assert not private


# -- signatures ---------------------------------------------------------------------------------


def test_annotations_are_types() -> None:
    texts = {
        (name, key)
        for name, function in (FUNCTIONS | METHODS).items()
        for key, annotation in annotations(function).items()
        if isinstance(annotation, str)
    }
    assert not texts


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (fs.Mesh.rank, "(self, **coords: int) -> int"),
        (fs.lower_bound, "src: fshard.layout.spec.Spec, dst: fshard.layout.spec.Spec"),
        (fs.Program, "tuple[fshard.Step, ...]"),
        (fs.random.key, "-> torch.Tensor"),
    ],
)
def test_signature_text(function: Any, text: str) -> None:
    assert text in str(inspect.signature(function))


# -- docstrings ---------------------------------------------------------------------------------


def test_functions_document_arguments_results_and_errors() -> None:
    for name, function in FUNCTIONS.items():
        result = sections(function.__doc__ or "")
        assert list(undocumented(function)) == [], name
        if inspect.signature(function).return_annotation is not None:
            assert "Returns" in result or "Yields" in result, name
        if raises_itself(function):
            assert "Raises" in result, name


def test_methods_document_several_arguments() -> None:
    """A single argument may be described by the first line."""
    for name, method in METHODS.items():
        assert function_of(method).__doc__, name
        if len(parameters(method)) > 1:
            assert list(undocumented(method)) == [], name


def test_docstrings_have_an_example() -> None:
    """The example is that of a user, who has imported `fshard`."""
    for name, value in (FUNCTIONS | CLASSES).items():
        examples = doctest.DocTestParser().get_examples(value.__doc__ or "")
        assert "import fshard as fs" in [example.source.strip() for example in examples], name


def test_checks_find_what_is_missing() -> None:
    def function(x: int, y: int) -> int:
        """Return a sum.

        Args:
            x: an int.
        """
        if x < 0:
            raise ValueError
        return x + y

    assert list(undocumented(function)) == ["y"]
    assert set(sections(function.__doc__ or "")) == {"Args"}
    assert raises_itself(function)
    assert not raises_itself(parameters)


def test_modules_of_a_package_with_the_name_of_a_function_are_imported() -> None:
    """`import ... as` reads attributes; other forms take modules by their names."""
    import fshard.partition.step_cost.roofline as roofline

    assert roofline.Roofline is fs.Roofline
    assert inspect.ismodule(roofline)
