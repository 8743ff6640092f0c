"""The layers of the package, read from its imports; and the sizes of its files and functions."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "fshard"

LAYERS = (
    {"_util"},
    {"_torch"},
    {"layout"},
    {"program"},
    {"plan"},
    {"run"},
    {"spmd"},
    {"ops"},
    {"partition", "random"},
    {"domain"},
    {"state"},
    {"show"},
    {"interop"},
    {"__init__"},
    {"__main__"},
)
ORDER = {name: height for height, names in enumerate(LAYERS) for name in names}
ONLY_IN = {
    "torch.distributed": {"run", "interop"},
    "optree": {"layout"},
    "rich": {"show", "__main__"},
}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def layer_of(module: str) -> str:
    """`fshard.run.groups` -> `run`; `fshard` -> `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(tree: ast.AST, package: str) -> list[tuple[int, str]]:
    """Every imported module by its full name, with the line, imports in functions included.

    `from fshard import spec` may be a module or a name of `fshard`: it counts as the module
    if the package has one of that name.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, *filter(None, [node.module])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                deeper = base.startswith("torch") or (base == "fshard" and alias.name in ORDER)
                found.append((node.lineno, whole if deeper else base))
    return found


def dotted(node: ast.AST) -> str:
    """The text of `a.b.c`, or an empty one."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body, its docstring aside."""
    first, *rest = function.body
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if is_docstring and not rest:
        return 0
    start = rest[0] if is_docstring else first
    return (function.end_lineno or 0) - start.lineno + 1


def violations(source: str, module: str, package: str | None = None) -> list[str]:
    """Everything the layers forbid in the source of `module` (of `package`, for relative ones)."""
    tree = ast.parse(source)
    here = layer_of(module)
    found = []
    for line, name in imports(tree, package or module.rpartition(".")[0]):
        if name == "fshard" or name.startswith("fshard."):
            other = layer_of(name)
            if other not in ORDER:
                found.append(f"{module}:{line} imports {name}, which has no layer")
            elif other != here and ORDER[other] >= ORDER[here]:
                found.append(f"{module}:{line} imports {name}: {here} is below {other}")
        for owned, owners in ONLY_IN.items():
            if (name == owned or name.startswith(f"{owned}.")) and here not in owners:
                found.append(f"{module}:{line} imports {name}: only {sorted(owners)} may")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = dotted(node)
            if text == "torch.distributed" and here not in ONLY_IN["torch.distributed"]:
                found.append(f"{module}:{node.lineno} uses {text}: only run and interop may")
        if isinstance(node, ast.ClassDef):
            bases = {dotted(base).removeprefix("torch.") for base in node.bases}
            if bases & {"Tensor", "nn.Parameter", "Parameter"}:
                found.append(f"{module}:{node.lineno} {node.name} subclasses torch.Tensor")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = body_lines(node)
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{module}:{node.lineno} {node.name} has {lines} lines")
    if source.count("\n") > MAX_FILE_LINES:
        found.append(f"{module} has {source.count(chr(10))} lines")
    return found


def module_of(path: Path) -> tuple[str, str]:
    """The dotted module and package of a file: a package's `__init__` is the package."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    package = ".".join(parts[:-1])
    if parts[-1] == "__init__" and len(parts) > 2:
        return package, package
    return ".".join(parts), package


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_layers(path: Path) -> None:
    module, package = module_of(path)
    assert layer_of(module) in ORDER, f"{module} has no layer: give it one in LAYERS"
    assert violations(path.read_text(), module, package) == []


def test_package_is_there() -> None:
    assert {"errors.py", "mesh.py", "spec.py"} <= {path.name for path in FILES}
    assert (ROOT / "py.typed").is_file()


CASES = [
    ("fshard.layout.mesh", "from fshard.program.steps import Step", "layout is below program"),
    ("fshard.layout.mesh", "import fshard.program.steps", "layout is below program"),
    ("fshard.layout.mesh", "from fshard import program", "layout is below program"),
    ("fshard.layout.mesh", "from .. import program", "layout is below program"),
    ("fshard.layout.mesh", "from ..program.steps import Step", "layout is below program"),
    ("fshard._util.hooks", "from fshard.layout.mesh import Mesh", "_util is below layout"),
    ("fshard.program.infer", "from ..run import groups", "program is below run"),
    ("fshard.program.infer", "from fshard.run.groups import group", "program is below run"),
    ("fshard.program.infer", "def f():\n    from fshard.plan import x", "program is below plan"),
    ("fshard.run.groups", "import fshard", "run is below __init__"),
    ("fshard.show.text", "from fshard import redistribute", "show is below __init__"),
    ("fshard.show.text", "from fshard.nowhere import x", "which has no layer"),
    ("fshard.plan.astar", "import torch.distributed as dist", "imports torch.distributed"),
    ("fshard.plan.astar", "from torch import distributed", "imports torch.distributed"),
    (
        "fshard.plan.astar",
        "from torch.distributed import get_rank",
        "torch.distributed.get_rank",
    ),
    (
        "fshard.plan.astar",
        "import torch\ntorch.distributed.barrier()",
        "uses torch.distributed",
    ),
    ("fshard.plan.astar", "import optree", "imports optree"),
    ("fshard.plan.astar", "from rich.table import Table", "imports rich.table"),
    ("fshard.show.text", "import torch\nclass A(torch.Tensor): ...", "subclasses torch.Tensor"),
    ("fshard.show.text", "from torch import Tensor\nclass A(Tensor): ...", "subclasses"),
    ("fshard.show.text", "def f():\n" + "    x = 1\n" * 61, "f has 61 lines"),
    ("fshard.show.text", "x = 1\n" * 501, "has 501 lines"),
]


@pytest.mark.parametrize(("module", "source", "message"), CASES)
def test_checker_finds(module: str, source: str, message: str) -> None:
    (found,) = violations(source, module)
    assert message in found


def test_checker_allows() -> None:
    source = """
        import torch
        from fshard._util import hooks
        from fshard.layout.mesh import Mesh
        from fshard.program.steps import Step
        from . import groups
        from ..layout.spec import Spec
        import torch.distributed as dist

        class Better(torch.nn.Module):
            '''Not a tensor.'''

        def f():
            '''A long docstring.
            DOC
            '''
            return dist
        """
    source = textwrap.dedent(source).replace("DOC", "text\n" * 80)
    assert violations(source, "fshard.run.groups") == []
