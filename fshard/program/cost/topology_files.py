"""Files of topologies: JSON with one key for each field, checked when it is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fshard._util.errors import Problem, ShardingError, fail, raise_if
from fshard.program.cost.links import Link, Torus

T = TypeVar("T")
ENDS = ("inner", "outer")
MAPPINGS = ("links", "flops")
"""Fields that are pairs in a topology and mappings in a file."""
REWRITE = "write it again with topology.save(path)"
PLACEHOLDER = Link(0.0, 1.0)
"""Link in the place of one that cannot be read, so that all other problems are found too."""


def as_path(where: str, path: object) -> str | os.PathLike[str]:
    """Return a path; raise `ShardingError` if it is neither a str nor a Path."""
    if not isinstance(path, str | os.PathLike):
        fail(where, f"path {path!r}", "path must be a str or a Path", "'topology.json'")
    return path


def topology_json(topology: Any) -> str:
    """Return the JSON of a topology, a dataclass."""
    values = asdict(topology)
    values["links"] = {axis: asdict(link) for axis, link in topology.links}
    return json.dumps({**values, "flops": dict(topology.flops)}, indent=2)


def read_topology(path: object, make: Callable[..., T], names: Iterable[str]) -> T:
    """Return `make` of the fields, called `names`, that a file holds.

    Raises `ShardingError` with all problems if the file cannot be read or holds something else.
    """
    where = "fs.Topology.load"
    path = as_path(where, path)
    file = repr(os.fspath(path))
    try:
        read = json.loads(Path(path).read_text())
    except OSError as error:
        fail(where, f"{file}: {error.strerror}", "the file must be readable",
             "topology.save(path) writes one, fs.calibrate(mesh, save=path) too")  # fmt: skip
    except (ValueError, RecursionError):
        fail(where, file, "the file must hold JSON, as Topology.save writes it", REWRITE)
    raise_if(where, problems := _key_problems(read, file, {*names}))
    links, flops = ({name: read[name]} if not isinstance(read[name], dict) else read[name]
                    for name in MAPPINGS)  # fmt: skip
    values = {
        **read,
        "links": tuple(_read_links(links, file, problems).items()),
        "flops": tuple(flops.items()),
        **dict.fromkeys(ENDS, PLACEHOLDER),
        **_read_links({name: read[name] for name in ENDS}, file, problems),
    }
    if not isinstance(values["inner"], Link | Torus):
        values["inner"] = PLACEHOLDER
    topology = _build(f"{file} with", lambda: make(**values), problems)
    raise_if(where, problems)
    assert topology is not None
    return topology


def _key_problems(read: Any, file: str, names: set[str]) -> list[Problem]:
    """Return a problem if the keys of a file are not those of a topology."""
    rule = f"the keys must be {', '.join(sorted(names))}"
    if not isinstance(read, dict):
        return [Problem(f"{file} with no mapping", rule, REWRITE)]
    differences = ("without", names - {*read}), ("with", {*read} - names)
    given = " and ".join(f"{word} {', '.join(sorted(keys))}" for word, keys in differences if keys)
    return [Problem(f"{file} {given}", rule, REWRITE)] if given else []


def _read_links(
    read: dict[str, Any], file: str, problems: list[Problem]
) -> dict[str, Link | Torus]:  # fmt: skip
    """Return the links of a file that are valid, and add to `problems` for the others."""
    links: dict[str, Link | Torus] = {}
    for name, value in read.items():
        given, keys = f"{file} with {name}", {*value} if isinstance(value, dict) else set()
        link: Link | Torus | None = None
        if {"latency", "bandwidth"} <= keys <= {field.name for field in fields(Link)}:
            link = _build(given, partial(Link, **value), problems)
        elif name == "inner" and keys == {field.name for field in fields(Torus)}:
            edge = _read_links({f"{name}.link": value["link"]}, file, problems)
            torus = partial(Torus, **{**value, "link": next(iter(edge.values()), PLACEHOLDER)})
            link = _build(given, torus, problems)
        else:
            rule = "a link must have a latency and a bandwidth"
            problems.append(Problem(f"{given} {value!r}", rule, REWRITE))
        if link is not None:
            links[name] = link
    return links


def _build(given: str, make: Callable[[], T], problems: list[Problem]) -> T | None:
    """Return `make()`, or add its problems to `problems` and return None."""
    try:
        return make()
    except ShardingError as error:
        problems += [Problem(f"{given} {p.given}", p.rule, REWRITE) for p in error.problems]
    return None
