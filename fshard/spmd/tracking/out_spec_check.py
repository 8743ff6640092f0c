"""What out specs promise: shown by types, or where those cannot tell, compared by value.

A spec that leaves an axis out promises one value along it. A type shows that; JAX believes what
the type of a branch says, and returns different values where its predicate varied. Here what
may depend on such a predicate is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import torch

from fshard._torch.modes import DisableTorchFunction
from fshard._util.errors import Problem, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.program.program import Program
from fshard.program.steps import ReducedToInvariant
from fshard.run.autograd.linear_function import ProgramGroup, apply_linear
from fshard.run.transports.base import Label, current_transport, labelled
from fshard.spmd.collectives.gather_scatter import all_gather
from fshard.spmd.tracking.tracker import Tracker, has_gradient
from fshard.spmd.types import VARYING, State, States, format_axes, state_word, states_of

__all__ = [
    "ARGUMENTS",
    "NonTensor",
    "Promise",
    "check_promises",
    "check_values",
    "non_tensor_problem",
]


class Promise(NamedTuple):
    """A rank's tensor, and how it is promised to lie."""

    path: str
    x: torch.Tensor
    p: PartitionSpec
    is_result: bool = True
    """Of a mapped function; else the argument of a function that knows how it lies."""


NonTensor = tuple[str, Any]
"""The path of a result that is no tensor, and the result."""

RETURNED, ARGUMENTS = "what it returned", "its arguments"
"""What is compared."""

SHOWN = 48
"""So many bytes of what ranks returned are compared as they are, and told of."""


def check_promises(
    tracker: Tracker,
    axes: Sequence[str],
    promises: Sequence[Promise],
    others: Sequence[NonTensor] = (),
) -> list[torch.Tensor]:
    """The tensors as promised along `axes`, cast where that is left to be done.

    Raises `ShardingError` for types that do not show it, all failures at once. Where the host
    has learnt of what varies, and with `check="values"` everywhere, what is promised to be equal
    is also compared; so are the others, which always are.
    """
    problems: list[Problem] = []
    kept: list[torch.Tensor] = []
    for each in promises:
        x, states, wanted = each.x, tracker.states(each.x), states_of(each.p)
        found = _broken(tracker, axes, each)
        problems += found
        if not found:
            target = States.of({a: s for a, s in wanted.items if a in axes})
            op = f"returning {each.path}" if each.is_result else each.path
            tracker.check_cast(x, states, target, op)
            kept.append(_first(tracker.mesh, axes, tracker.cast(x, states, target), states, wanted))
    tracker.raise_all(problems)
    if tracker.values or tracker.read_states.items:
        with tracker.pause():
            told = tracker.read_sites
            check_values(tracker.mesh, axes, promises, tracker.name, told, others)
    return kept


def _broken(tracker: Tracker, axes: Sequence[str], promise: Promise) -> list[Problem]:
    """Why a result is not as promised, unless it is or can be cast: the axes of a kind in one."""
    states, wanted = tracker.states(promise.x), states_of(promise.p)
    unlike: dict[tuple[str, str], list[str]] = {}
    for axis in axes:
        have, want = states.at(axis), wanted.at(axis)
        told = axis in tracker.read_states.axes("varying") and not tracker.strict
        if not _shown(have, want) and not (told and (have, want) == (VARYING, None)):
            unlike.setdefault((state_word(have), state_word(want)), []).append(axis)
    return [_unlike(tracker, promise, *words, along) for words, along in unlike.items()]


def _shown(have: State | None, want: State | None) -> bool:
    """Whether a type shows what is promised, or a cast makes it."""
    if have == want or (have is None and want is not None and want[0] != "unreduced"):
        return True
    return want == VARYING and have == ("reduced", "sum")


def _unlike(
    tracker: Tracker, promise: Promise, have: str, want: str, along: Sequence[str]
) -> Problem:
    """A result that is in one state along some axes, and promised in another."""
    names, named = ", ".join(along), format_axes(along)
    braces = f"{{{', '.join(map(repr, along))}}}"
    spec, it = ("out spec", "result") if promise.is_result else ("spec", "x")
    given = f"{promise.path}: {tracker.typeof(promise.x)} with the {spec} {promise.p!r}"
    if want != "invariant":
        rule = f"the {spec} says {want} along {names}; this is {have}"
        total = f"fs.psum({it}, {named})"
        fixes = {
            ("varying", "unreduced"): f"fs.pcast({it}, {named}, to='unreduced')",
            ("varying", "reduced"): f"{total}, or fs.all_gather({it}, {named}, to='reduced')",
            ("unreduced", "reduced"): total,
            ("unreduced", "varying"): f"fs.psum_scatter({it}, {named}, tiled=True), or {total}",
            ("invariant", "unreduced"): f"leave unreduced={braces} out of the {spec}",
            ("reduced", "unreduced"): f"reduced={braces} in the {spec}",
        }
        if have == want:
            rule += " by another reduction"
        return Problem(given, rule, fixes.get((have, want), f"the {spec} with its own reduction"))
    article = "an" if promise.is_result else "a"
    rule = f"{article} {spec} that leaves {names} out promises one value along it; this is {have}"
    if tracker.read_sites and have == "varying":
        rule += f", and may depend on what the host was told: {', '.join(tracker.read_sites)}"
    part = f"P({named})" if promise.x.ndim else f"{it}[None] with P({named})"
    fixes_to_one = {
        "varying": f"fs.psum({it}, {named}), fs.all_gather({it}, {named}, to='invariant') or "
        f"the like; or {part}, each rank's part",
        "unreduced": f"fs.psum({it}, {named}), or unreduced={braces} in the {spec}",
        "reduced": f"reduced={braces} in the {spec}",
    }
    return Problem(given, rule, fixes_to_one[have])


@lru_cache(maxsize=4096)
def _picking(mesh: Mesh, axes: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Program:
    src = Spec(mesh, PartitionSpec(reduced=set(axes)), shape=shape, dtype=dtype)
    return Program(src, (ReducedToInvariant(axes),))


def _first(
    mesh: Mesh, axes: Sequence[str], x: torch.Tensor, states: States, wanted: States
) -> torch.Tensor:
    """What varies by type and is promised equal: of equal values the first counts, in backward."""
    picked = tuple(a for a in axes if wanted.at(a) is None and states.at(a) is not None)
    if not picked or not has_gradient(x):
        return x
    with DisableTorchFunction():
        prog = _picking(mesh, picked, x.shape, x.dtype)
        return apply_linear(ProgramGroup((prog,)), (x,), everywhere=False)[0]


# -- values ------------------------------------------------------------------------------


def check_values(
    mesh: Mesh,
    axes: Sequence[str],
    promises: Sequence[Promise],
    where: str,
    told: Sequence[str] = (),
    others: Sequence[NonTensor] = (),
    what: str = RETURNED,
) -> None:
    """Raise `ShardingError`, the same on every rank, where values promised equal differ.

    Every rank of the mesh takes part. Digests are compared first, in one gather of a few bytes.
    """
    rows = [(each, _equal_along(each.p, axes)) for each in promises]
    rows = [(each, along) for each, along in rows if along]
    with torch.no_grad(), labelled(Label(f"the check of {what}", mesh)):
        # Ranks that parted may have returned other structures: that is seen first.
        tensors, rest = [each.path for each, _ in rows], [path for path, _ in others]
        device = getattr(current_transport(), "device", torch.device("cpu"))  # what it moves
        mine = torch.tensor([crc32(repr((tensors, rest)).encode())], device=device)
        if len(set(all_gather(mine, mesh.axes, mesh=mesh).flatten().tolist())) > 1:
            given = f"here the tensors {', '.join(tensors) or '(none)'}"
            given += f" and the values {', '.join(rest)}" if rest else ""
            given += ", on another rank others"
            fix = f"return the same tree on every rank{_parted(told)}"
            rule = "every rank must return the same structure"
            raise_if(where, [Problem(given, rule, fix)], everywhere=True)
        found = _unlike_others(mesh, axes, others, device, told)
        if found is not None:
            raise_if(where, [found], everywhere=True)
        if not rows:
            return
        mine = torch.stack([_digest(each.x).to(device) for each, _ in rows])
        everyones = all_gather(mine, mesh.axes, mesh=mesh).tolist()
        for at, (each, along) in enumerate(rows):
            digests = [row[at] for row in everyones]
            groups = [[mesh.devices.index(r) for r in group] for group in mesh.groups(along)]
            if any(digests[i] != digests[group[0]] for group in groups for i in group):
                fix = f"{_equal_by(along, what)}, or name it in the spec{_parted(told)}"
                found = _difference(mesh, along, groups, each, digests, device, fix)
                if found is not None:
                    raise_if(where, [found], everywhere=True)


def _unlike_others(
    mesh: Mesh,
    axes: Sequence[str],
    others: Sequence[NonTensor],
    device: torch.device,
    told: Sequence[str],
) -> Problem | None:
    """The first result that is no tensor and differs along `axes`, and on which ranks."""
    if not others:
        return None
    texts = [_text(value).encode() for _, value in others]
    table = [[crc32(text), *text[:SHOWN].ljust(SHOWN)] for text in texts]
    mine = torch.tensor(table, device=device)
    everyones = all_gather(mine, mesh.axes, mesh=mesh).tolist()
    for group in mesh.groups(tuple(axes)):
        rows = [everyones[mesh.devices.index(rank)] for rank in group]
        for at, (path, _) in enumerate(others):
            for rank, row in zip(group, rows, strict=True):
                if row[at] != rows[0][at]:
                    a, b = (bytes(each[at][1:]).decode(errors="replace") for each in (rows[0], row))
                    return non_tensor_problem(
                        path, (group[0], a.rstrip()), (rank, b.rstrip()), told
                    )
    return None


def non_tensor_problem(
    path: str, one: tuple[int, str], another: tuple[int, str], told: Sequence[str] = ()
) -> Problem:
    """Two ranks, and what they returned that is no tensor."""
    return Problem(
        f"{path}: rank {one[0]} returned {one[1]}, rank {another[0]} {another[1]}",
        "what is no tensor passes through, equal on every rank",
        f"torch.tensor([value]) with an out spec that puts the ranks' together{_parted(told)}",
    )


def _text(value: object) -> str:
    """What processes can compare of a value: a number or text itself, of what else the type."""
    plain = bool | int | float | complex | str | bytes | None
    return repr(value) if isinstance(value, plain) else f"a {type(value).__name__}"


def _equal_along(p: PartitionSpec, axes: Sequence[str]) -> tuple[str, ...]:
    """The axes along which a partition promises equal values."""
    states = states_of(p)
    return tuple(a for a in axes if (states.at(a) or ("reduced",))[0] == "reduced")


def _digest(x: torch.Tensor) -> torch.Tensor:
    """Shape and values in a few numbers: different ones are different, but for one in 2^60."""
    # A copy: a view of bytes needs elements side by side, `contiguous` keeps odd strides of one.
    flat = x.detach().reshape(-1).clone(memory_format=torch.contiguous_format).cpu()
    words = flat.view(torch.uint8)
    words = torch.nn.functional.pad(words, (0, -len(words) % 8)).view(torch.int64)
    place = torch.arange(len(words)) * 0x9E3779B97F4A7C1 + 0x2545F4914F6CDD1D
    mixed = (words ^ place) * 0x369DEA0F31A53F85
    total = ((mixed ^ (mixed >> 29)) * 0x27BB2EE687B0B0FD).sum()
    # Not by hash(): that of a string is another in every process.
    shape = torch.tensor([x.ndim, crc32(str((*x.shape, x.dtype)).encode())])
    return torch.cat([total.reshape(1), shape]).to(x.device)


def _difference(
    mesh: Mesh,
    along: tuple[str, ...],
    groups: Sequence[Sequence[int]],
    promise: Promise,
    digests: Sequence[Sequence[int]],
    device: torch.device,
    fix: str,
) -> Problem | None:
    """The first element that differs in a group, and on which ranks; None for equal numbers."""
    rule = f"what a spec leaves {', '.join(along)} out of is one value along it"
    if len({tuple(each[1:]) for each in digests}) > 1:
        given = f"{promise.path}: shapes or dtypes that differ; here {tuple(promise.x.shape)}"
        return Problem(given, rule, fix)
    everyones = all_gather(promise.x.detach().to(device), mesh.axes, mesh=mesh).cpu()
    for group in groups:
        for i in group[1:]:
            a, b = everyones[group[0]], everyones[i]
            differ = ((a != b) & ~((a != a) & (b != b))).reshape(-1)
            if differ.any():
                flat = int(differ.nonzero()[0])
                place = tuple(int(n) for n in torch.unravel_index(torch.tensor(flat), a.shape))
                one, other = a.reshape(-1)[flat].item(), b.reshape(-1)[flat].item()
                given = (
                    f"{promise.path}: element {place} is {one} on rank {mesh.devices[group[0]]} "
                    f"and {other} on rank {mesh.devices[i]}"
                )
                return Problem(given, rule, fix)
    return None


def _equal_by(along: Sequence[str], what: str) -> str:
    """How values become equal along axes."""
    if what == RETURNED:
        return f"fs.psum or fs.pbroadcast over {', '.join(along)}"
    return f"the same seed, or fs.pbroadcast(x, {format_axes(along)}, 0, mesh=mesh) before the call"


def _parted(told: Sequence[str]) -> str:
    """Where ranks may have parted, if anywhere, as the end of a sentence."""
    if not told:
        return ""
    return f"; the ranks may have parted where the host learnt of what varies: {', '.join(told)}"
