"""Arguments that programs and planners share: topologies, step types, dtypes to send, endpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import torch

from fshard._util.errors import Problem, ShardingError, did_you_mean, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.program.cost.links import JOIN
from fshard.program.cost.topology import Topology
from fshard.program.steps import Step

STEPS: tuple[type, ...] = get_args(Step)


def as_topology(
    where: str,
    topology: Topology | None,
    default: Topology | None = None,
    meshes: Iterable[Mesh] = (),
) -> Topology:
    """Return `topology`, else `default`, else a single node.

    Raises `ShardingError` if `topology` is of another type, or has links of axes that `meshes`, if
    any are known, do not have.
    """
    if topology is not None and not isinstance(topology, Topology):
        fail(where, f"topology {topology!r}", "topology must be a Topology",
             "fs.Topology.node(), fs.Topology.cluster(8) or fs.Topology.of({...})")  # fmt: skip
    if topology is not None and topology.links and (known := tuple(meshes)):
        raise_if(where, link_problems(topology, known))
    return topology or default or Topology.node()


def link_problems(topology: Topology, meshes: Sequence[Mesh]) -> list[Problem]:
    """Return a problem for each link of an unknown axis, if an axis of `meshes` has no link.

    A topology may have links of further axes, of a mesh that these meshes are part of.

    >>> import fshard as fs
    >>> typo = fs.Topology.of({"tq": fs.Link(latency=20e-6, bandwidth=1e9)})
    >>> print(*link_problems(typo, [fs.Mesh(dp=2, tp=2)]))
      given: a link of axis 'tq' for Mesh(dp=2, tp=2), which has no link for dp, tp
      rule:  the axes of links must be among dp, tp
      fix:   did you mean 'tp'?
    """
    linked = [axis for name, _ in topology.links for axis in name.split(JOIN)]
    sizes = {axis: size for mesh in meshes for axis, size in mesh.shape.items()}
    without = [axis for axis, size in sizes.items() if size > 1 and not _is_related(axis, linked)]
    unknown = [name for name in linked if without and not _is_related(name, sizes)]
    names, known = " and ".join(map(str, dict.fromkeys(meshes))), ", ".join(sizes)
    return [
        Problem(
            f"a link of axis {name!r} for {names}, which has no link for {', '.join(without)}",
            f"the axes of links must be among {known}",
            did_you_mean(name, without, f"links of {known} alone"),
        )
        for name in unknown
    ]


def _is_related(axis: str, others: Iterable[str]) -> bool:
    """Return True if an axis is one of `others`, a part of one (`x_1` of `x`), or has one."""
    return any(_is_part(axis, other) or _is_part(other, axis) for other in others)


def _is_part(axis: str, other: str) -> bool:
    rest = axis.removeprefix(other)
    return axis.startswith(other) and re.fullmatch(r"(_\d+)*", rest) is not None


def can_carry(wire: object, dtype: torch.dtype) -> bool:
    """Return True if a tensor of `dtype` may be sent in `wire`: of one kind, or bool in integers.

    >>> can_carry(torch.bfloat16, torch.float32), can_carry(torch.bfloat16, torch.int64)
    (True, False)
    """
    if not isinstance(wire, torch.dtype):
        return False
    return _dtype_kind(wire) == _dtype_kind(dtype) or (
        dtype == torch.bool and _dtype_kind(wire) == "integer"
    )


def _dtype_kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "boolean"
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"


def wire_problems(src: Spec, wires: Iterable[torch.dtype | None]) -> list[Problem]:
    """Return a problem for each of `wires` that a tensor of `src` cannot be sent in."""
    return [
        Problem(
            f"{src} sent in {wire!r}",
            "the dtype sent must be of the same kind: floating for floating, integer for integer",
            "torch.bfloat16 for floating dtypes, or leave it out",
        )
        for wire in wires
        if wire is not None and not can_carry(wire, src.dtype)
    ]


def as_types(exclude: object) -> tuple[Any, ...]:
    """Return one step type, or several, as a tuple; the elements are not checked.

    >>> from fshard.program.steps import AllGather
    >>> as_types(AllGather) == as_types([AllGather])
    True
    """
    if isinstance(exclude, str | type) or not isinstance(exclude, Iterable):
        return (exclude,)
    return tuple(exclude)


def exclude_problems(exclude: Iterable[object]) -> list[Problem]:
    """Return a problem if elements of `exclude` are not step types."""
    unknown = [item for item in exclude if item not in STEPS]
    if not unknown:
        return []
    names = [_type_name(item) for item in unknown]
    types = [f"fs.{name}" for name in dict.fromkeys(names) if name is not None]
    fix = types[0] if len(types) == 1 else f"({', '.join(types)})"
    given = ", ".join(str(item) if isinstance(item, Step) else repr(item) for item in unknown)
    fix = "(fs.AllGather, fs.AllToAll), say" if None in names else fix
    return [Problem(f"exclude={given}", "exclude must consist of step types", f"exclude={fix}")]


def _type_name(item: object) -> str | None:
    """Return the name of the step type that a step, or a similar name, stands for."""
    word = item.replace("_", "").lower() if isinstance(item, str) else type(item).__name__
    names = (step.__name__ for step in STEPS)
    return next((name for name in names if word in (name, name.lower())), None)


def endpoint_problems(
    where: str,
    src: object,
    dst: object,
    fix: str = "spec.replace(partition=P(...)) makes the target",
) -> list[Problem]:
    """Return the problems that keep two values from being source and target of a program."""
    if not isinstance(src, Spec) or not isinstance(dst, Spec):
        given = f"{where}({type(src).__name__}, {type(dst).__name__})"
        return [Problem(given, "both must be Specs", fix)]
    if src.shape == dst.shape:
        return []
    try:
        works = bool(dst.replace(shape=src.shape))
    except ShardingError:
        works = False
    rule = f"source and target must have the same global shape: {src.shape} is not {dst.shape}"
    fix = (
        f"reshape first; {'dst.replace(shape=src.shape)' if works else 'src.replace(...)'} keeps it"
    )
    return [Problem(f"{src} -> {dst}", rule, fix)]
