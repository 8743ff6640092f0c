"""What makes a sharding rule right, tried on a call: every role on every axis, against the whole.

For each role that a rule has for an axis the operands are cut (or spread, or made addends of
random parts) as it asks, the operation runs on every rank, and the results are put together as it
says. That must be what the operation gives on one device; so must the gradients, taken through the
programs that bring whole tensors there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import fshard as fs
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Sharded, Spec
from fshard.ops.core.call import Meta, OpCall, fill_call, map_call
from fshard.ops.core.rule import Rule
from fshard.ops.propagate.propagate import call_and_tree, overload_of, rule_of
from fshard.ops.strategy.axis_roles import Role, factor_sizes, roles_of
from fshard.ops.strategy.local_call import flat, run_local
from fshard.ops.strategy.strategy import Layouts, Strategy
from fshard.plan.redistribute import redistribute
from fshard.program.cost.topology import Topology

MESHES = (Mesh(x=2), Mesh(x=3))
TWO_AXES = Mesh(x=2, y=3)


def call_with(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OpCall, Rule, Any, list[torch.Tensor]]:
    """The call of `op` on real tensors, its rule, the tree of its results, and the tensors."""
    as_meta = lambda t: Meta(tuple(t.shape), t.dtype)  # noqa: E731
    metas, named = map_call(args, kwargs, torch.Tensor, as_meta)
    call, tree = call_and_tree(overload_of(op, metas, named), metas, named)
    tensors = [t for each in (*args, *kwargs.values()) for t in _tensors(each)]
    return call, rule_of(call), tree, tensors


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for each in value for t in _tensors(each)]
    return []


def strategies(
    call: OpCall, rule: Rule, tree: Any, mesh: Mesh, *, grad: bool, skew: bool = False
) -> Iterator[Strategy]:
    """One strategy for every choice of roles of the mesh's axes; with `skew` unequal shards."""
    lengths = factor_sizes(rule, call)
    roles = roles_of(rule, call, grad=grad)
    for picked in itertools.product(roles, repeat=len(mesh.axes)):
        chosen = dict(zip(mesh.axes, picked, strict=True))
        sources = [
            Spec(mesh, _skewed(rule, at, chosen) if skew else PartitionSpec(), shape=m.shape,
                 dtype=m.dtype, sizes=_sizes(rule, at, chosen, mesh, lengths) if skew else None)
            for at, m in enumerate(call.operands)
        ]  # fmt: skip
        laid = Layouts(call, rule, mesh, sources, lengths).specs(chosen)
        if laid is not None:
            whole = tuple(Spec(mesh, PartitionSpec(), shape=m.shape, dtype=m.dtype)
                          for m in call.operands)  # fmt: skip
            yield Strategy(call.op, rule, call, tuple(chosen.items()), whole, *laid, tree, 0.0,
                           True, Topology.node())  # fmt: skip


def _cut_dims(rule: Rule, at: int, chosen: Mapping[str, Role]) -> dict[int, tuple[str, str]]:
    """Dims of an operand that lead with the factor of an axis: the factor and the axis."""
    return {
        dim: (role.factor, axis)
        for axis, role in chosen.items()
        for dim, factors in enumerate(rule.operands[at])
        if factors and factors[0] == role.factor
    }


def _skewed(rule: Rule, at: int, chosen: Mapping[str, Role]) -> PartitionSpec:
    cut = _cut_dims(rule, at, chosen)
    dims = range(len(rule.operands[at]))
    return PartitionSpec(*(cut[dim][1] if dim in cut else None for dim in dims))


def _sizes(
    rule: Rule, at: int, chosen: Mapping[str, Role], mesh: Mesh, lengths: Mapping[str, int]
) -> dict[int, tuple[int, ...]]:
    """All of a factor but one on the last rank, and nothing on the first ones."""
    made = {}
    for dim, (factor, axis) in _cut_dims(rule, at, chosen).items():
        whole, n = lengths[factor], mesh.shape[axis]
        minor = 1
        for f in rule.operands[at][dim][1:]:
            minor *= lengths[f]
        last = max(whole - 1, 0)
        made[dim] = tuple(size * minor for size in ((0,) * (n - 2) + (whole - last, last)))
    return made


# -- tensors in a state -------------------------------------------------------------------


def lie(x: torch.Tensor, spec: Spec, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """The shards of `x` as `spec` lays it, addends and candidates random."""
    parts = dict.fromkeys(spec.mesh.ranks, x)
    generator = torch.Generator().manual_seed(seed)
    for axis, kind in spec.partition.unreduced_kinds:
        for group in spec.mesh.groups(axis):
            split = _split(parts[group[0]], kind, len(group), generator)
            parts |= dict(zip(group, split, strict=True))
        # Ranks of other groups hold the same: what differs is this axis alone.
        first = spec.mesh.groups(axis)[0]
        for group in spec.mesh.groups(axis)[1:]:
            if all(axis == a for a, _ in spec.partition.unreduced_kinds):
                parts |= {rank: parts[f] for rank, f in zip(group, first, strict=True)}
    return tuple(parts[rank][spec.index(rank)].clone() for rank in spec.mesh.ranks)


def _split(x: torch.Tensor, kind: str, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    exact = not (x.dtype.is_floating_point or x.dtype.is_complex)
    draw = lambda: torch.randint(1, 4, x.shape, generator=generator)  # noqa: E731
    if kind == "sum" and x.dtype.is_floating_point and x.dtype.itemsize < 4:
        return _exactly(x, n, generator)
    if kind in ("sum", "avg"):
        others = [(draw() if exact else draw() / 4).to(x.dtype) for _ in range(n - 1)]
        whole = x * n if kind == "avg" else x
        return [*others, whole - sum(others)]
    if kind == "product":
        others = [torch.ones_like(x) if exact else (draw() / 2).to(x.dtype) for _ in range(n - 1)]
        last = x.clone()
        for each in others:
            last = last / each if not exact else last
        return [*others, last]
    owner = torch.randint(0, n, x.shape, generator=generator)
    if x.dtype == torch.bool:
        losing = torch.full_like(x, kind == "min")
    else:
        # Unsigned integers wrap around.
        losing = (torch.minimum(x, x - draw().to(x.dtype)) if kind == "max"
                  else torch.maximum(x, x + draw().to(x.dtype)))  # fmt: skip
    return [torch.where(owner == rank, x, losing) for rank in range(n)]


def _exactly(x: torch.Tensor, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Addends whose sums, in any order, are exact in few bits: the tensor, its negative, zeros."""
    times = torch.tensor([1.0, 1.0, -1.0, *[0.0] * n] if n > 2 else [0.5, 0.5])[:n].to(x.dtype)
    order = torch.rand((n, *x.shape), generator=generator).argsort(0)
    return [x * times[each] for each in order]


# -- the checks ---------------------------------------------------------------------------


def check_values(strategy: Strategy, args: Sequence[Any], kwargs: Mapping[str, Any],
                 tensors: Sequence[torch.Tensor], expected: Sequence[Any]) -> str:  # fmt: skip
    """What is wrong with the results of a strategy; an empty text if nothing is."""
    mesh = strategy.in_specs[0].mesh
    shards = [
        lie(t, s, at) for at, (t, s) in enumerate(zip(tensors, strategy.in_specs, strict=True))
    ]
    found = []
    for rank, mine in zip(mesh.ranks, zip(*shards, strict=True), strict=True):
        found.append(run_local(strategy, rank, *fill_call(args, kwargs, torch.Tensor, mine)))
    for at, (spec, whole) in enumerate(zip(strategy.out_specs, expected, strict=True)):
        if spec is None:
            continue
        made = fs.unshard(Sharded(tuple(each[at] for each in found), spec))
        wrong = difference(made, whole)
        if wrong:
            return f"{_named(strategy)}: result {at} as {spec}: {wrong}"
    return ""


def check_gradients(strategy: Strategy, args: Sequence[Any], kwargs: Mapping[str, Any],
                    tensors: Sequence[torch.Tensor]) -> str:  # fmt: skip
    """What is wrong with the gradients of a strategy; an empty text if nothing is."""
    leaves = [t.detach().clone().requires_grad_(_inexact(t)) for t in tensors]
    mesh = strategy.in_specs[0].mesh

    def run(given: Sequence[Any]) -> list[Any]:
        placed, named = fill_call(args, kwargs, torch.Tensor, given)
        return flat(strategy.call.op(*placed, **named))

    whole = run(leaves)
    pairs = [
        redistribute(src, dst)(fs.shard(x, src).local)
        for x, src, dst in zip(leaves, strategy.sources, strategy.in_specs, strict=True)
    ]
    found = []
    for rank, mine in zip(mesh.ranks, zip(*pairs, strict=True), strict=True):
        found.append(run_local(strategy, rank, *fill_call(args, kwargs, torch.Tensor, mine)))
    mine_sum = whole_sum = torch.zeros((), dtype=torch.float64)
    for at, (spec, one) in enumerate(zip(strategy.out_specs, whole, strict=True)):
        if spec is None or one is None or not one.requires_grad:
            continue
        made = fs.unshard(Sharded(tuple(each[at] for each in found), spec))
        weights = torch.rand(one.shape, generator=torch.Generator().manual_seed(at)).to(one.dtype)
        mine_sum = mine_sum + (made * weights).sum().abs()
        whole_sum = whole_sum + (one * weights).sum().abs()
    if not whole_sum.requires_grad:
        return ""
    wanted = [x for x in leaves if x.requires_grad]
    right = torch.autograd.grad(whole_sum, wanted, allow_unused=True)
    given = (torch.autograd.grad(mine_sum, wanted, allow_unused=True)
             if mine_sum.requires_grad else [None] * len(wanted))  # fmt: skip
    for at, (one, other) in enumerate(zip(given, right, strict=True)):
        zero = torch.zeros_like(wanted[at])
        wrong = difference(zero if one is None else one, zero if other is None else other)
        if wrong:
            return f"{_named(strategy)}: gradient of operand {at}: {wrong}"
    return ""


def check_call(
    op: Any, *args: Any, grad: bool = True, two_axes: bool = False, **kwargs: Any
) -> list[str]:
    """Everything that is wrong with the rule of `op` for a call on whole tensors."""
    call, rule, tree, tensors = call_with(op, args, kwargs)
    expected = flat(call.op(*args, **kwargs))
    wrong = []
    for mesh in (*MESHES, *((TWO_AXES,) if two_axes else ())):
        for skew in (False, True):
            wrong += [
                text
                for strategy in strategies(call, rule, tree, mesh, grad=False, skew=skew)
                if (text := check_values(strategy, args, kwargs, tensors, expected))
            ]
            if grad and any(_inexact(t) for t in tensors):
                wrong += [
                    text
                    for strategy in strategies(call, rule, tree, mesh, grad=True, skew=skew)
                    if _comes_from_whole(strategy)
                    and (text := check_gradients(strategy, args, kwargs, tensors))
                ]
    return wrong


def _comes_from_whole(strategy: Strategy) -> bool:
    """Whether its operands can be made of whole tensors with a gradient: sums and averages can."""
    kinds = {kind for spec in strategy.in_specs for _, kind in spec.partition.unreduced_kinds}
    return kinds <= {"sum", "avg"}


def _named(strategy: Strategy) -> str:
    roles = ", ".join(f"{axis}: {role.name}" for axis, role in strategy.roles)
    return f"{strategy.op} [{', '.join(map(str, strategy.in_specs))}] {roles}"


def _inexact(x: torch.Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def difference(made: torch.Tensor, whole: torch.Tensor) -> str:
    """How two tensors differ beyond rounding; an empty text if they do not."""
    if made.shape != whole.shape or made.dtype != whole.dtype:
        return f"{tuple(made.shape)} {made.dtype} for {tuple(whole.shape)} {whole.dtype}"
    wide = torch.complex128 if whole.dtype.is_complex else torch.float64
    eps = torch.finfo(whole.dtype).eps if _inexact(whole) else 0.0
    tolerance = (
        64 * eps * max(1.0, float(whole.to(wide).abs().nan_to_num(0, 0, 0).max()))
        if whole.numel()
        else 0
    )
    if torch.allclose(made.to(wide), whole.to(wide), rtol=64 * eps, atol=tolerance, equal_nan=True):
        return ""
    return f"{made.flatten()[:6].tolist()} for {whole.flatten()[:6].tolist()}"
