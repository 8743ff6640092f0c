"""Checks of results against their out specs, by type or, where types do not decide, by value.

A spec that omits an axis requires equal values along it, which an invariant type shows. JAX trusts
the type of a branch and returns different values if its predicate varied; here results that may
depend on such a predicate are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import torch

from fshard._torch.memory import innermost
from fshard._torch.modes import DisableTorchFunction
from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import Problem, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.run.autograd.replicate import compare_values
from fshard.run.compared_values import value_digest
from fshard.run.transports.base import Label, current_transport, labelled
from fshard.spmd.collectives.gather_scatter import all_gather
from fshard.spmd.collectives.pcast import cast_by
from fshard.spmd.in_specs import PathSpec
from fshard.spmd.tracking.control_casts import ExitControl
from fshard.spmd.tracking.read_agreement import all_have_read, gathered_digests
from fshard.spmd.tracking.tracker import Tracker, has_gradient
from fshard.spmd.types import (
    CONTROL_DEPENDENT,
    UNSEEN,
    VARYING,
    State,
    States,
    format_axes,
    state_word,
    states_of,
)


class Promise(NamedTuple):
    """Tensor of a rank, and the partition that its spec requires."""

    path: str
    x: torch.Tensor
    p: PartitionSpec
    is_result: bool = True
    """False for an argument whose layout a program expects."""


NonTensor = tuple[str, Any]
"""Path and value of a result that is not a tensor."""

RESULTS, ARGUMENTS, GRADIENTS = "its results", "its arguments", "its gradients"
"""Values to compare."""

MAX_TEXT_BYTES = 48
"""Bytes of a non-tensor's text that are compared exactly and shown in errors."""


def check_promises(
    tracker: Tracker,
    axes: Sequence[str],
    promises: Sequence[Promise],
    others: Sequence[NonTensor] = (),
    *,
    last: bool = False,
) -> list[torch.Tensor]:
    """Return the tensors, cast to the states that their specs require along `axes`.

    The gradient of a control-dependent value that must be equal is coordinate 0's.

    Raises `ShardingError` for types that contradict the specs, all at once. Values that must be
    equal, and results that are not tensors (`others`), are compared if the hosts of all ranks have
    read varying values, and always with `check="values"`; `last` are the results of the body.
    """
    problems: list[Problem] = []
    outputs: list[torch.Tensor] = []
    all_read = all_have_read(tracker, "results", last=last)
    for promise in promises:
        x, states, required = promise.x, tracker.states(promise.x), states_of(promise.p)
        promise_problems = _type_problems(tracker, axes, promise, all_read)
        problems += promise_problems
        if not promise_problems:
            target = States.of({a: s for a, s in required.items if a in axes})
            op = f"returning {promise.path}" if promise.is_result else promise.path
            tracker.check_cast(x, states, target, op)
            y = tracker.cast(x, states, target)
            controlled = tuple(a for a in axes if states.at(a) and not required.at(a))
            if controlled and has_gradient(y):
                with DisableTorchFunction():
                    y = cast_by(ExitControl(tracker.mesh, (), controlled, tracker.agreed), y)
            outputs.append(y)
    tracker.raise_all(problems)
    must_compare = others or any(_equal_along(promise.p, axes) for promise in promises)
    if must_compare and (tracker.values or all_read):
        with tracker.pause():
            sites = tracker.read_sites
            check_values(tracker.mesh, axes, promises, tracker.name, sites, others)
    return outputs


def _type_problems(
    tracker: Tracker, axes: Sequence[str], promise: Promise, all_read: bool
) -> list[Problem]:
    """Return a problem for each pair of states that neither agree nor can be cast.

    Values that may depend on a read are accepted if all ranks have read, and will be compared; on a
    rank that has read alone if they would be invariant without the read.
    """
    states, required = tracker.states(promise.x), states_of(promise.p)
    mismatches: dict[tuple[str, str], list[str]] = {}
    for axis in axes:
        state, required_state = states.at(axis), required.at(axis)
        may_depend = axis in tracker.read_states.axes("varying") and required_state is None
        if all_read:
            accepted = may_depend and not tracker.strict and state_word(state) == "varying"
        else:
            accepted = may_depend and state == CONTROL_DEPENDENT
        if not accepted and not _is_castable(state, required_state):
            mismatches.setdefault((state_word(state), state_word(required_state)), []).append(axis)
    return [_type_problem(tracker, promise, *words, along) for words, along in mismatches.items()]


def _is_castable(state: State | None, required: State | None) -> bool:
    """Return True if a state is the required one or can be cast to it."""
    if state == required or (state is None and required is not None and required[0] != "unreduced"):
        return True
    return required == VARYING and state in (CONTROL_DEPENDENT, ("reduced", "sum"))


def _type_problem(
    tracker: Tracker, promise: Promise, have: str, want: str, axes: Sequence[str]
) -> Problem:
    """Return the problem of a result in one state along some axes whose spec requires another."""
    names, along = ", ".join(axes), format_axes(axes)
    braces = f"{{{', '.join(map(repr, axes))}}}"
    spec, it = ("out spec", "result") if promise.is_result else ("spec", "x")
    given = f"{promise.path}: {tracker.typeof(promise.x)} with the {spec} {promise.p!r}"
    if want != "invariant":
        rule = f"the {spec} requires {want} along {names}; this is {have}"
        total = f"fs.psum({it}, {along})"
        fixes = {
            ("varying", "unreduced"): f"fs.pcast({it}, {along}, to='unreduced')",
            ("varying", "reduced"): f"{total}, or fs.all_gather({it}, {along}, to='reduced')",
            ("unreduced", "reduced"): total,
            ("unreduced", "varying"): f"fs.psum_scatter({it}, {along}, tiled=True), or {total}",
            ("invariant", "unreduced"): f"leave unreduced={braces} out of the {spec}",
            ("reduced", "unreduced"): f"reduced={braces} in the {spec}",
        }
        if have == want:
            rule += " by another reduction"
        if (have, want) == ("varying", "reduced") and (
            fix := _replication_fix(tracker, axes, want)
        ):
            fixes[have, want] = f"{fix}; of partial sums {total}"
        return Problem(given, rule, fixes.get((have, want), f"the {spec} with its own reduction"))
    rule = f"along {names}, which the {spec} omits, values must be equal; this is {have}"
    if tracker.read_sites and have == "varying":
        rule += f", and may depend on values that the host read: {', '.join(tracker.read_sites)}"
    part = f"P({along})" if promise.x.ndim else f"{it}[None] with P({along})"
    fixes_to_one = {
        "varying": f"fs.psum({it}, {along}), fs.all_gather({it}, {along}, to='invariant') or "
        f"similar; or {part}, the shard of each rank",
        "unreduced": f"fs.psum({it}, {along}), or unreduced={braces} in the {spec}",
        "reduced": f"reduced={braces} in the {spec}",
    }
    if have == "varying" and (fix := _replication_fix(tracker, axes, want)):
        fixes_to_one[have] = f"{fix}; of partial sums fs.psum({it}, {along}); of shards {part}"
    return Problem(given, rule, fixes_to_one[have])


def _replication_fix(tracker: Tracker, axes: Sequence[str], want: str) -> str:
    """Return the fix for a varying value if a collective or a draw could be equal, or ""."""
    along, names = format_axes(axes), {tracker.replicated_by.get(axis) for axis in axes}
    fixes = {
        "fs.all_gather": f"to={want!r} in fs.all_gather",
        "fs.pbroadcast": f"fs.psum(torch.where(fs.axis_index({along}) == source, x, 0), {along}) "
        "in place of fs.pbroadcast",
        "a draw": "with fs.random.keyed(key) around what draws, dropout say",
    }
    matching = [fix for name, fix in fixes.items() if names == {name}]
    return f"{matching[0]}, if nothing else in it varies" if matching else ""


# -- values ------------------------------------------------------------------------------


def check_values(
    mesh: Mesh,
    axes: Sequence[str],
    promises: Sequence[Promise],
    where: str,
    read_sites: Sequence[str] = (),
    others: Sequence[NonTensor] = (),
    subject: str = RESULTS,
) -> None:
    """Raise `ShardingError`, the same on every rank, if values that must be equal differ.

    Every rank of the mesh takes part. Digests are compared first, in one gather of a few bytes.
    """
    rows = [(promise, _equal_along(promise.p, axes)) for promise in promises]
    rows = [(p._replace(x=innermost(p.x)), along) for p, along in rows if along]
    with torch.no_grad(), labelled(Label(f"the check of {subject}", mesh)):
        # Diverged ranks may have returned other structures: compare these first.
        tensors, rest = [promise.path for promise, _ in rows], [path for path, _ in others]
        device = getattr(current_transport(), "device", torch.device("cpu"))  # of the collective
        if len(set(gathered_digests(mesh, repr((tensors, rest)), f"the check of {subject}"))) > 1:
            values = f"here the tensors {', '.join(tensors) or '(none)'}"
            values += f" and the values {', '.join(rest)}" if rest else ""
            values += ", on another rank others"
            fix = f"return the same tree on every rank{_divergence_note(read_sites)}"
            rule = "every rank must return the same structure"
            raise_if(where, [Problem(values, rule, fix)], same_on_all_ranks=True)
        problem = _non_tensor_difference(mesh, axes, others, device, read_sites)
        if problem is not None:
            raise_if(where, [problem], same_on_all_ranks=True)
        if not rows:
            return
        local = torch.stack([value_digest(promise.x).to(device) for promise, _ in rows])
        gathered = all_gather(local, mesh.axes, mesh=mesh).tolist()
        for i, (promise, along) in enumerate(rows):
            digests = [row[i] for row in gathered]
            groups = [[mesh.devices.index(r) for r in group] for group in mesh.groups(along)]
            if any(digests[i] != digests[group[0]] for group in groups for i in group):
                rule, fix = _equality_rule(along, subject)
                fix += _divergence_note(read_sites)
                problem = _difference(mesh, groups, promise, digests, device, rule, fix)
                if problem is not None:
                    raise_if(where, [problem], same_on_all_ranks=True)


def sums_problem(tracker: Tracker, sums: str) -> Problem | None:
    """Return the problem of ranks whose backward passes have other collectives, None without one.

    Every rank of the mesh takes part, and gets the same result.

    Args:
        tracker: the types of the body.
        sums: the collectives of this rank's backward pass as text.
    """
    mesh = tracker.mesh
    with tracker.pause():
        digests = gathered_digests(mesh, sums, f"the check of {GRADIENTS}")
    ranks: dict[int, list[int]] = {}
    for rank, digest in zip(mesh.devices, digests, strict=True):
        ranks.setdefault(digest, []).append(rank)
    if len(ranks) == 1:
        return None
    groups = ", ".join(map(str, ranks.values()))
    return Problem(
        f"ranks {groups} would add gradients of different tensors, or wait for each other",
        "backward every rank must call the transposes of the same collectives and inserted casts",
        "torch.where(condition, a, b) in the place of a branch that only some ranks take"
        + _divergence_note(tracker.read_sites),
    )


def check_replicas(
    where: str,
    path_specs: Sequence[PathSpec],
    specs: Sequence[Spec],
    results: Sequence[Sequence[torch.Tensor]],
) -> None:
    """Raise `ShardingError` if results of a simulation that must be equal differ beyond rounding.

    Types have shown them to be equal, but for what types do not see.

    Args:
        where: function, for errors.
        path_specs: path and out spec of each result.
        specs: spec of each result.
        results: the shards of all ranks of each result.
    """
    for (path, _), spec, shards in zip(path_specs, specs, results, strict=True):

        def report(
            i: int, j: int, a: torch.Tensor, b: torch.Tensor, spec: Spec = spec, path: str = path
        ) -> None:
            values = _first_difference(a, b, (spec.mesh.ranks[i], spec.mesh.ranks[j]))
            rule, fix = _equality_rule(_equal_along(spec.partition, spec.mesh.axes), RESULTS)
            raise_if(where, [Problem(f"{path}: {values}", f"{rule}; {UNSEEN}", fix)])

        compare_values(shards, _replicas(spec), report)


@lru_cache(maxsize=CACHE_SIZE)
def _replicas(spec: Spec) -> tuple[tuple[int, ...], ...]:
    """Return the groups of positions in rank order whose ranks hold one shard."""
    ranks, axes = list(spec.mesh.ranks), _equal_along(spec.partition, spec.mesh.axes)
    groups = spec.mesh.groups(axes) if axes else ()
    return tuple(tuple(map(ranks.index, group)) for group in groups)


def _non_tensor_difference(
    mesh: Mesh,
    axes: Sequence[str],
    others: Sequence[NonTensor],
    device: torch.device,
    read_sites: Sequence[str],
) -> Problem | None:
    """Return a problem for the first non-tensor result that differs along `axes`."""
    if not others:
        return None
    texts = [_text(value).encode() for _, value in others]
    table = [[crc32(text), *text[:MAX_TEXT_BYTES].ljust(MAX_TEXT_BYTES)] for text in texts]
    local = torch.tensor(table, device=device)
    gathered = all_gather(local, mesh.axes, mesh=mesh).tolist()
    for group in mesh.groups(tuple(axes)):
        rows = [gathered[mesh.devices.index(rank)] for rank in group]
        for i, (path, _) in enumerate(others):
            for rank, row in zip(group, rows, strict=True):
                if row[i] != rows[0][i]:
                    a, b = (
                        bytes(r[i][1:]).decode(errors="replace").rstrip() for r in (rows[0], row)
                    )
                    return non_tensor_problem(path, (group[0], a), (rank, b), read_sites)
    return None


def non_tensor_problem(
    path: str, first: tuple[int, str], second: tuple[int, str], read_sites: Sequence[str] = ()
) -> Problem:
    """Return the problem of two ranks that returned different non-tensors."""
    return Problem(
        f"{path}: rank {first[0]} returned {first[1]}, rank {second[0]} {second[1]}",
        "a result that is not a tensor must be equal on every rank",
        "torch.tensor([value]) with an out spec that concatenates the ranks' values"
        + _divergence_note(read_sites),
    )


def _text(value: object) -> str:
    """Return a text of a value that processes can compare: its repr if simple, else its type."""
    plain = bool | int | float | complex | str | bytes | None
    return repr(value) if isinstance(value, plain) else f"a {type(value).__name__}"


def _equal_along(p: PartitionSpec, axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes along which a partition requires equal values."""
    states = states_of(p)
    return tuple(a for a in axes if (states.at(a) or ("reduced",))[0] == "reduced")


def _difference(
    mesh: Mesh,
    groups: Sequence[Sequence[int]],
    promise: Promise,
    digests: Sequence[Sequence[int]],
    device: torch.device,
    rule: str,
    fix: str,
) -> Problem | None:
    """Return a problem for the first element that differs within a group, or None."""
    if len({tuple(digest[1:]) for digest in digests}) > 1:
        values = f"{promise.path}: shapes or dtypes that differ; here {tuple(promise.x.shape)}"
        return Problem(values, rule, fix)
    gathered = all_gather(promise.x.detach().to(device), mesh.axes, mesh=mesh).cpu()
    for group in groups:
        for i in group[1:]:
            ranks = mesh.devices[group[0]], mesh.devices[i]
            values = _first_difference(gathered[group[0]], gathered[i], ranks)
            if values:
                return Problem(f"{promise.path}: {values}", rule, fix)
    return None


def _first_difference(a: torch.Tensor, b: torch.Tensor, ranks: tuple[int, int]) -> str:
    """Return a description of the first element that differs between two ranks, or ""."""
    differ = ((a != b) & ~((a != a) & (b != b))).reshape(-1)
    if not differ.any():
        return ""
    flat = int(differ.nonzero()[0])
    index = tuple(int(n) for n in torch.unravel_index(torch.tensor(flat), a.shape))
    value, other = a.reshape(-1)[flat].item(), b.reshape(-1)[flat].item()
    return f"element {index} is {value} on rank {ranks[0]} and {other} on rank {ranks[1]}"


def _equality_rule(along: Sequence[str], subject: str) -> tuple[str, str]:
    """Return the rule that values must be equal along axes, and a fix."""
    names = ", ".join(along)
    rule = f"along {names}, which the spec omits, values must be equal"
    if subject == GRADIENTS:
        rule = f"along {names}, where all operands are invariant, values must be equal"
        return rule, f"fs.pcast(x, {format_axes(along)}, to='varying') of a value that differs"
    if subject == RESULTS:
        return rule, f"fs.psum or fs.pbroadcast over {names}, or name it in the spec"
    broadcast = f"fs.pbroadcast(x, {format_axes(along)}, 0, mesh=mesh) before the call"
    return rule, f"the same seed, or {broadcast}, or name it in the spec"


def _divergence_note(read_sites: Sequence[str]) -> str:
    """Return a clause that lists where ranks may have diverged, or ""."""
    if not read_sites:
        return ""
    sites = ", ".join(read_sites)
    return f"; the ranks may have diverged where the host read varying values: {sites}"
