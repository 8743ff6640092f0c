"""Layers of the package, read from its imports; private PyTorch; sizes of files and functions."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent / "fshard"

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
    {"testing"},
    {"__init__"},
    {"__main__"},
)
ORDER = {name: height for height, names in enumerate(LAYERS) for name in names}
ONLY_IN = {
    "torch.distributed": {"run", "interop", "_torch.process_groups"},
    "optree": {"layout"},
    "rich": {"show", "__main__"},
}
PRIVATE_TORCH_ATTRIBUTES = {
    "_backward_hooks", "_base", "_can_decompose", "_cdata", "_current_level", "_default_pg",
    "_dynamo_marked_constant", "_grad_fn", "_is_view", "_op", "_qualified_op_name", "_schema",
    "_torchdynamo_disable", "_torchdynamo_disable_msg", "_torchdynamo_orig_callable",
    "_torchdynamo_wrapper_id", "_values", "_version",
}  # fmt: skip
"""Attributes of PyTorch's tensors, operators and modules that only `_torch` may use."""
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def layer_of(module: str) -> str:
    """Return the layer of a module: `run` for `fshard.run.groups`, `__init__` for `fshard`."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(nodes: Sequence[ast.AST], package: str) -> list[tuple[int, str]]:
    """Return the line and full name of every imported module, imports in functions included.

    A name of `from fshard import name` is a module if the package has one of that name.
    """
    result = []
    for node in nodes:
        if isinstance(node, ast.Import):
            result += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, *filter(None, [node.module])])
            for alias in node.names:
                is_module = base.startswith("torch") or (base == "fshard" and alias.name in ORDER)
                result.append((node.lineno, f"{base}.{alias.name}" if is_module else base))
    return result


def dotted(node: ast.AST) -> str:
    """Return the text of `a.b.c`, an empty one for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_private_torch(name: str) -> bool:
    """Return True for a dotted name with an underscored part of PyTorch, `torch.ops` aside."""
    first, *rest = name.split(".")
    underscored = any(part.startswith("_") and not part.startswith("__") for part in rest)
    return first == "torch" and underscored and rest[0] != "ops"


def private_torch(nodes: Sequence[ast.AST]) -> list[tuple[int, str]]:
    """Return the line and text of every use of private PyTorch."""
    result = [(line, name) for line, name in imports(nodes, "") if is_private_torch(name)]
    aliases = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch"
        for alias in node.names
    }
    aliases |= {
        alias.asname: alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname and alias.name.startswith("torch")
    }
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            name = f"{aliases.get(first, first)}.{rest}"
            is_longest = id(node) not in inner
            if node.attr in PRIVATE_TORCH_ATTRIBUTES or (is_longest and is_private_torch(name)):
                result.append((node.lineno, dotted(node)))
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr"):
            result += [
                (node.lineno, str(argument.value))
                for argument in node.args[1:2]
                if isinstance(argument, ast.Constant) and argument.value in PRIVATE_TORCH_ATTRIBUTES
            ]
    return result


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function's body without its docstring."""
    first, *rest = function.body
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if is_docstring and not rest:
        return 0
    start = rest[0] if is_docstring else first
    return (function.end_lineno or 0) - start.lineno + 1


def violations(source: str, module: str, package: str | None = None) -> list[str]:
    """Return the violations in the source of `module`; `package` resolves relative imports."""
    nodes = [*ast.walk(ast.parse(source))]
    layer = layer_of(module)
    rooms = {layer, module.removeprefix("fshard.")}
    result = []
    for line, name in imports(nodes, package or module.rpartition(".")[0]):
        if name == "fshard" or name.startswith("fshard."):
            other = layer_of(name)
            if other not in ORDER:
                result.append(f"{module}:{line} imports {name}, which has no layer")
            elif other != layer and ORDER[other] >= ORDER[layer]:
                result.append(f"{module}:{line} imports {name}: {layer} is below {other}")
        for owned, owners in ONLY_IN.items():
            if (name == owned or name.startswith(f"{owned}.")) and not rooms & owners:
                result.append(f"{module}:{line} imports {name}: only {sorted(owners)} may")
    if layer != "_torch":
        result += [
            f"{module}:{line} uses {name}: private PyTorch belongs in _torch"
            for line, name in private_torch(nodes)
        ]
    for node in nodes:
        if isinstance(node, ast.Attribute):
            text = dotted(node)
            if text == "torch.distributed" and not rooms & ONLY_IN["torch.distributed"]:
                result.append(f"{module}:{node.lineno} uses {text}: only run and interop may")
        if isinstance(node, ast.ClassDef):
            bases = {dotted(base).removeprefix("torch.") for base in node.bases}
            if bases & {"Tensor", "nn.Parameter", "Parameter"}:
                result.append(f"{module}:{node.lineno} {node.name} subclasses torch.Tensor")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = body_lines(node)
            if lines > MAX_FUNCTION_LINES:
                result.append(f"{module}:{node.lineno} {node.name} has {lines} lines")
    if source.count("\n") > MAX_FILE_LINES:
        result.append(f"{module} has {source.count(chr(10))} lines")
    return result


def module_of(path: Path) -> tuple[str, str]:
    """Return the dotted module and package of a file; an `__init__` is the package."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    package = ".".join(parts[:-1])
    if parts[-1] == "__init__" and len(parts) > 2:
        return package, package
    return ".".join(parts), package


FILES = sorted(ROOT.rglob("*.py"))


def test_modules_follow_the_layers() -> None:
    found = []
    for path in FILES:
        module, package = module_of(path)
        assert layer_of(module) in ORDER, f"{module} has no layer: give it one in LAYERS"
        found += violations(path.read_text(), module, package)
    assert found == []


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda p: p.name)
def test_rooms_list_their_modules(folder: Path) -> None:
    """The root's folders and modules are listed in the README."""
    is_root = folder == ROOT
    path = ROOT.parent / "README.md" if is_root else folder / "__init__.py"
    text = path.read_text() if is_root else ast.get_docstring(ast.parse(path.read_text())) or ""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in folder.glob("*/__init__.py")}
    if is_root:
        modules, folders = {f"fshard/{m}.py" for m in modules}, {f"fshard/{f}" for f in folders}
    missing = [name for name in modules | folders if f"`{name}`" not in text.replace("/`", "`")]
    assert not missing, f"{path} does not list {missing}"


def test_files_are_found() -> None:
    assert {"errors.py", "mesh.py", "spec.py"} <= {path.name for path in FILES}
    assert (ROOT / "py.typed").is_file()


CASES = [
    ("fshard.layout.mesh", "from fshard.program.steps import Step", "layout is below program"),
    ("fshard.layout.mesh", "import fshard.program.steps", "layout is below program"),
    ("fshard.layout.mesh", "from fshard import program", "layout is below program"),
    ("fshard.layout.mesh", "from .. import program", "layout is below program"),
    ("fshard.layout.mesh", "from ..program.steps import Step", "layout is below program"),
    ("fshard._util.hooks", "from fshard.layout.mesh import Mesh", "_util is below layout"),
    ("fshard._torch.memory", "from fshard.layout.mesh import Mesh", "_torch is below layout"),
    ("fshard._torch.memory", "import torch.distributed", "imports torch.distributed"),
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
    ("fshard.run.groups", "import torch._C", "uses torch._C: private PyTorch"),
    ("fshard.run.groups", "from torch._ops import OpOverload", "uses torch._ops.OpOverload"),
    ("fshard.run.groups", "from torch.overrides import _pop_mode", "uses torch.overrides._pop"),
    ("fshard.run.groups", "import torch\ntorch._C._storage_id(x)", "uses torch._C._storage_id"),
    ("fshard.run.groups", "import torch.distributed as dist\ndist._world.pg", "uses dist._world"),
    ("fshard.run.groups", "from torch.distributed import c10d\nc10d._world", "uses c10d._world"),
    ("fshard.run.groups", "from torch.utils import checkpoint\ncheckpoint._f()", "checkpoint._f"),
    (
        "fshard.run.groups",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "uses forward_ad._current_level",
    ),
    ("fshard.run.groups", "call.op._schema.arguments", "uses call.op._schema"),
    ("fshard.run.groups", "f(x)._is_view()", "uses ._is_view"),
    ("fshard.run.groups", "getattr(node.target, '_schema', None)", "uses _schema"),
    ("fshard.plan.astar", "import optree", "imports optree"),
    ("fshard.plan.astar", "from rich.table import Table", "imports rich.table"),
    ("fshard.show.text", "import torch\nclass A(torch.Tensor): ...", "subclasses torch.Tensor"),
    ("fshard.show.text", "from torch import Tensor\nclass A(Tensor): ...", "subclasses"),
    ("fshard.show.text", "def f():\n" + "    x = 1\n" * 61, "f has 61 lines"),
    ("fshard.show.text", "x = 1\n" * 501, "has 501 lines"),
]


@pytest.mark.parametrize(("module", "source", "message"), CASES)
def test_checker_finds(module: str, source: str, message: str) -> None:
    (violation,) = violations(source, module)
    assert message in violation


def test_checker_allows() -> None:
    source = """
        import torch
        from fshard._util import hooks
        from fshard.layout.mesh import Mesh
        from fshard.program.steps import Step
        from . import groups
        from ..layout.spec import Spec
        import torch.distributed as dist

        aten = torch.ops.aten
        OPS = aten._unsafe_view, torch.ops._c10d_functional.wait_tensor, torch.__version__

        class Layer(torch.nn.Module):
            '''Not a tensor.'''

        def f():
            '''A long docstring.
            DOC
            '''
            return dist, self._private, Spec._of
        """
    source = textwrap.dedent(source).replace("DOC", "text\n" * 80)
    assert violations(source, "fshard.run.groups") == []
