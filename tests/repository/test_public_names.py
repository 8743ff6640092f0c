"""Public names: `dir(fs)`, signatures and docstrings as a user of `help()` sees them."""

from __future__ import annotations

import ast
import doctest
import inspect
import pickle
import re
import subprocess
import sys
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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_belong_to_the_package(name: str) -> None:
    assert FUNCTIONS[name].__module__ == name.rpartition(".")[0]


@pytest.mark.parametrize("name", CLASSES)
def test_source_of_public_classes_is_found(name: str) -> None:
    assert f"class {CLASSES[name].__name__}" in inspect.getsource(CLASSES[name])


@pytest.mark.parametrize("name", CLASSES)
def test_public_classes_pickle(name: str) -> None:
    assert pickle.loads(pickle.dumps(CLASSES[name])) is CLASSES[name]


def classes_in(annotation: Any) -> Iterator[type]:
    """Yield the classes that a type consists of."""
    if isinstance(annotation, type):
        yield annotation
    for argument in typing.get_args(annotation):
        for item in argument if isinstance(argument, list) else [argument]:
            yield from classes_in(item)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_in_signatures_are_public(name: str) -> None:
    """A user can name the types of all arguments and results."""
    signature = inspect.signature(FUNCTIONS[name])
    annotations = [parameter.annotation for parameter in signature.parameters.values()]
    private = {
        cls
        for annotation in (*annotations, signature.return_annotation)
        for cls in classes_in(annotation)
        if cls.__module__.startswith("fshard") and cls not in CLASSES.values()
    }
    assert not private


# -- signatures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS | METHODS)
def test_annotations_are_types(name: str) -> None:
    signature = inspect.signature(function_of((FUNCTIONS | METHODS)[name]))
    annotations = {key: item.annotation for key, item in signature.parameters.items()}
    annotations["return"] = signature.return_annotation
    assert {key for key, item in annotations.items() if isinstance(item, str)} == set()


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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_document_arguments_results_and_errors(name: str) -> None:
    function = FUNCTIONS[name]
    result = sections(function.__doc__ or "")
    assert list(undocumented(function)) == []
    if inspect.signature(function).return_annotation is not None:
        assert "Returns" in result or "Yields" in result
    if raises_itself(function):
        assert "Raises" in result


@pytest.mark.parametrize("name", METHODS)
def test_methods_document_several_arguments(name: str) -> None:
    """A single argument may be described by the first line."""
    assert function_of(METHODS[name]).__doc__
    if len(parameters(METHODS[name])) > 1:
        assert list(undocumented(METHODS[name])) == []


@pytest.mark.parametrize("name", FUNCTIONS | CLASSES)
def test_docstrings_have_an_example(name: str) -> None:
    """The example is that of a user, who has imported `fshard`."""
    examples = doctest.DocTestParser().get_examples((FUNCTIONS | CLASSES)[name].__doc__ or "")
    assert examples
    assert "import fshard as fs" in [example.source.strip() for example in examples]


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


def test_pickles_do_not_need_the_import_of_a_module() -> None:
    """A pickle of public values loads in a process that has imported nothing."""
    values = pickle.dumps((fs.Mesh(x=2), fs.P("x"), fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))))
    code = f"import pickle; print(pickle.loads({values!r}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "(Mesh(x=2), P('x'), f32[4@x])\n"


def test_modules_of_a_package_with_the_name_of_a_function_are_imported() -> None:
    """`import ... as` reads attributes; other forms take modules by their names."""
    import fshard.partition.step_cost.roofline as roofline

    assert roofline.Roofline is fs.Roofline
    assert inspect.ismodule(roofline)
