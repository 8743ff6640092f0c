"""Countable rules of prose and names: docstring openings, words, unique names, sizes of folders.

The words are those that readers outside of the project misread; each row names the replacement.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "fshard"
FILES = sorted(
    file for room in ("fshard", "tests", "examples") for file in (ROOT / room).rglob("*.py")
)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_FINDINGS_PER_DOCSTRING = 0.03
MAX_ENTRIES = 16
TOPS = {"fshard": 18, "tests": 19}
"""Largest numbers of entries of the folders whose rooms the design lists."""

HEADLESS = re.compile(r"(What|Where|That|Those|Of|Which|As|Whether|How|Who|Whose|So|There)\b")
WORDS = {
    "sharded": r"\b(?:is|are|was|be|being|dims?|ax[ei]s|sizes?|rows?|parts?) cut\b"
    r"|\bcut (?:over|along|by|in|where|as|width|dims?|samples|rows)\b",
    "has the layout": r"\b(?:lies?|lying|laid)\b(?! in wait)",
    "replicated or unsharded": r"\b(?:is|are|be|stays?|held|needs?|needed|sent) whole\b"
    r"|\bwhole (?:on|over|everywhere)\b",
    "redistributed": r"\bbrought\b",
    "reported, requested": r"\b(?:told|tells?|hears?|wants?|wishe[sd]|asks? for|asked)\b",
    "decomposed": r"\bby others\b",
    "is not a, must be": r"\b(?:is|are|was|were) no (?!longer|more|less|need)\w+",
    "a noun": r"(?:^|[.,;:(]\s*)(?:what|that of|those of|those that|what is)\b",
    "values": r"\b(?:tensor'?s?|its|their|the) numbers\b",
}
COMMENT = re.compile(r"(?:^|  ) *#[# ]*(.*)")
"""Comments as the formatter places them, also of code in strings; tokens take seconds."""
PATTERNS = {better: re.compile(pattern, re.IGNORECASE) for better, pattern in WORDS.items()}


@cache
def prose(path: Path) -> list[tuple[int, str, str]]:
    """Return `(line, kind, text)` of the docstrings, comments and longer strings of a file."""
    return list(_prose(path))


def _prose(path: Path) -> Iterator[tuple[int, str, str]]:
    if path.suffix == ".ipynb":
        for number, cell in enumerate(json.loads(path.read_text())["cells"]):
            if cell["cell_type"] == "markdown":
                yield number, "cell", "".join(cell["source"])
        return
    source = path.read_text()
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docstrings.add(id(node.value))
                yield node.lineno, "docstring", node.value.value.partition(">>>")[0]
        elif (
            isinstance(node, ast.Constant)
            and id(node) not in docstrings
            and isinstance(node.value, str)
            and node.value.count(" ") >= 3
        ):
            yield node.lineno, "string", node.value
    for number, line in enumerate(source.splitlines(), 1):
        if comment := COMMENT.search(line):
            yield number, "comment", comment[1]


def findings(path: Path) -> list[str]:
    """Return a line for each finding in a file."""
    lines = []
    for line, kind, text in prose(path):
        if kind == "docstring" and HEADLESS.match(text.strip()):
            lines.append(f"{path.name}:{line} begins with {text.split()[0]!r}: begin with a verb")
        for better, pattern in PATTERNS.items():
            lines += [f"{path.name}:{line} {m[0]!r}: {better}" for m in pattern.finditer(text)]
    return lines


@pytest.mark.parametrize("room", ["fshard", "tests", "examples", "notebooks"])
def test_prose_has_few_findings(room: str) -> None:
    files = [path for path in (*FILES, *NOTEBOOKS) if path.is_relative_to(ROOT / room)]
    files = [path for path in files if path != Path(__file__)]
    texts = sum(kind in ("docstring", "cell") for path in files for _, kind, _ in prose(path))
    lines = [line for path in files for line in findings(path)]
    assert texts > 20
    assert len(lines) <= MAX_FINDINGS_PER_DOCSTRING * texts, "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is cut over an axis.", ["begins with", "sharded", "a noun"]),
        ("Return the rows; those of the last rank come first.", ["a noun"]),
        ("The dim is no multiple of the axis.", ["is not a, must be"]),
        ("Return the tensor's values.", []),
    ],
)
def test_findings_of_a_docstring(tmp_path: Path, text: str, expected: list[str]) -> None:
    file = tmp_path / "module.py"
    file.write_text(f'"""{text}"""\n')
    lines = findings(file)
    assert len(lines) == len(expected)
    assert all(part in line for part, line in zip(expected, lines, strict=True))


def test_module_names_are_unique() -> None:
    counts = Counter(file.stem for file in PACKAGE.rglob("*.py") if file.stem != "__init__")
    assert [name for name, count in counts.items() if count > 1] == []


def test_class_names_are_unique() -> None:
    counts = Counter(
        node.name.lstrip("_")
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in counts.items() if count > 1] == []


def test_folders_are_small() -> None:
    folders = {file.parent for file in FILES} - {ROOT / "tests" / "benchmarks"}
    sizes = {
        str(folder.relative_to(ROOT)): sum(child.name[0] != "_" for child in folder.iterdir())
        for folder in folders
    }
    assert {name: size for name, size in sizes.items() if size > TOPS.get(name, MAX_ENTRIES)} == {}


def test_test_modules_do_not_import_each_other() -> None:
    imports = re.compile(
        r"^\s*(?:from|import) (tests\.\S*\btest_\w+)|^from tests\.\S+ import test_"
    )
    result = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in (ROOT / "tests").rglob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if imports.match(line)
    ]
    assert result == []
