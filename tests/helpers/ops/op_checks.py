"""Check of a rule on one call: every role on every axis against the global operation.

For each role of a mesh axis the operands are sharded, replicated or split into random partial
sums, the operation runs on every rank, and the results are combined as the rule says. They must
equal the results on one device, as must the gradients, taken through the programs that
redistribute the operands from replicated tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import fshard as fs
from fshard._util.dtypes import is_inexact
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.ops.core.call import Meta, OpCall, fill_call, map_call
from fshard.ops.core.rule import Rule
from fshard.ops.propagate.propagate import call_and_tree, overload_of, rule_of
from fshard.ops.strategy.axis_roles import Role, factor_sizes, roles_of
from fshard.ops.strategy.local_call import flat, run_local
from fshard.ops.strategy.strategy import Layouts, Strategy
from fshard.program.cost.topology import Topology
from tests.helpers.thorough import THOROUGH

MESHES = (Mesh(x=2), Mesh(x=3))
TWO_AXES = Mesh(x=2, y=3)


def call_with(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OpCall, Rule, Any, list[torch.Tensor]]:
    """Return the call of `op`, its rule, the tree of its results, and its tensors."""
    as_meta = lambda t: Meta(tuple(t.shape), t.dtype)  # noqa: E731
    metas, options = map_call(args, kwargs, torch.Tensor, as_meta)
    call, tree = call_and_tree(overload_of(op, metas, options), metas, options)
    tensors = [t for x in (*args, *kwargs.values()) for t in _tensors(x)]
    return call, rule_of(call), tree, tensors


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for x in value for t in _tensors(x)]
    return []


def strategies(
    call: OpCall, rule: Rule, tree: Any, mesh: Mesh, *, skew: bool
) -> Iterator[Strategy]:
    """Yield one strategy per choice of the axes' roles; with `skew` uneven shards."""
    lengths = factor_sizes(rule, call)
    roles = roles_of(rule, call, grad=False)
    for picked in itertools.product(roles, repeat=len(mesh.axes)):
        chosen = dict(zip(mesh.axes, picked, strict=True))
        sources = [
            Spec(mesh, _skewed(rule, i, chosen) if skew else PartitionSpec(), shape=m.shape,
                 dtype=m.dtype, sizes=_sizes(rule, i, chosen, mesh, lengths) if skew else None)
            for i, m in enumerate(call.operands)
        ]  # fmt: skip
        layouts = Layouts(call, rule, mesh, sources, lengths).specs(chosen)
        if layouts is not None:
            full = tuple(Spec(mesh, PartitionSpec(), shape=m.shape, dtype=m.dtype)
                          for m in call.operands)  # fmt: skip
            yield Strategy(call.op, rule, call, tuple(chosen.items()), full, *layouts, tree, 0.0,
                           True, Topology.node())  # fmt: skip


def _sharded_dims(rule: Rule, i: int, chosen: Mapping[str, Role]) -> dict[int, tuple[str, str]]:
    """Return the factor and the axis of each dim of an operand that leads with a chosen factor."""
    return {
        dim: (role.factor, axis)
        for axis, role in chosen.items()
        for dim, factors in enumerate(rule.operands[i])
        if factors and factors[0] == role.factor
    }


def _skewed(rule: Rule, i: int, chosen: Mapping[str, Role]) -> PartitionSpec:
    sharded = _sharded_dims(rule, i, chosen)
    dims = range(len(rule.operands[i]))
    return PartitionSpec(*(sharded[dim][1] if dim in sharded else None for dim in dims))


def _sizes(
    rule: Rule, i: int, chosen: Mapping[str, Role], mesh: Mesh, lengths: Mapping[str, int]
) -> dict[int, tuple[int, ...]]:
    """Give the last rank one element of the factor, the one before it the rest, others nothing."""
    result = {}
    for dim, (factor, axis) in _sharded_dims(rule, i, chosen).items():
        full, n = lengths[factor], mesh.shape[axis]
        minor = 1
        for f in rule.operands[i][dim][1:]:
            minor *= lengths[f]
        last = max(full - 1, 0)
        result[dim] = tuple(size * minor for size in ((0,) * (n - 2) + (full - last, last)))
    return result


# -- shards of a layout -------------------------------------------------------------------


def shards_of(x: torch.Tensor, spec: Spec, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return the shards of `x` with layout `spec`; unreduced values are random."""
    parts = dict.fromkeys(spec.mesh.ranks, x)
    generator = torch.Generator().manual_seed(seed)
    for axis, kind in spec.partition.unreduced_kinds:
        for group in spec.mesh.groups(axis):
            split = _split(parts[group[0]], kind, len(group), generator)
            parts |= dict(zip(group, split, strict=True))
        # Ranks of other groups hold the same: shards differ along this axis only.
        first = spec.mesh.groups(axis)[0]
        for group in spec.mesh.groups(axis)[1:]:
            if all(axis == a for a, _ in spec.partition.unreduced_kinds):
                parts |= {rank: parts[f] for rank, f in zip(group, first, strict=True)}
    return tuple(parts[rank][spec.index(rank)].clone() for rank in spec.mesh.ranks)


def _split(x: torch.Tensor, kind: str, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    exact = not (x.dtype.is_floating_point or x.dtype.is_complex)
    draw = lambda: torch.randint(1, 4, x.shape, generator=generator)  # noqa: E731
    if kind == "sum" and x.dtype.is_floating_point and x.dtype.itemsize < 4:
        return _exact_partial_sums(x, n, generator)
    if kind in ("sum", "avg"):
        rest = [(draw() if exact else draw() / 4).to(x.dtype) for _ in range(n - 1)]
        full = x * n if kind == "avg" else x
        return [*rest, full - sum(rest)]
    if kind == "product":
        rest = [torch.ones_like(x) if exact else (draw() / 2).to(x.dtype) for _ in range(n - 1)]
        last = x.clone()
        for item in rest:
            last = last / item if not exact else last
        return [*rest, last]
    owner = torch.randint(0, n, x.shape, generator=generator)
    if x.dtype == torch.bool:
        losing = torch.full_like(x, kind == "min")
    else:
        # Unsigned integers wrap around.
        losing = (torch.minimum(x, x - draw().to(x.dtype)) if kind == "max"
                  else torch.maximum(x, x + draw().to(x.dtype)))  # fmt: skip
    return [torch.where(owner == rank, x, losing) for rank in range(n)]


def _exact_partial_sums(x: torch.Tensor, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return partial sums that are exact in few bits, in any order of summation."""
    times = torch.tensor([1.0, 1.0, -1.0, *[0.0] * n] if n > 2 else [0.5, 0.5])[:n].to(x.dtype)
    order = torch.rand((n, *x.shape), generator=generator).argsort(0)
    return [x * times[item] for item in order]


# -- the checks ---------------------------------------------------------------------------


def check_values(strategy: Strategy, args: Sequence[Any], kwargs: Mapping[str, Any],
                 tensors: Sequence[torch.Tensor], expected: Sequence[Any]) -> str:  # fmt: skip
    """Return an error text for the results of a strategy, empty if they are right."""
    mesh = strategy.in_specs[0].mesh
    shards = [shards_of(*row, i) for i, row in enumerate(
        zip(tensors, strategy.shard_specs, strict=True))]  # fmt: skip
    shards = [halo(x) if halo else x for x, halo in zip(shards, strategy.in_halos, strict=True)]
    outputs = []
    for rank, local in zip(mesh.ranks, zip(*shards, strict=True), strict=True):
        outputs.append(run_local(strategy, rank, *fill_call(args, kwargs, torch.Tensor, local)))
    for i, (spec, full) in enumerate(zip(strategy.out_specs, expected, strict=True)):
        if spec is None:
            continue
        unsharded = _unsharded(strategy, outputs, i)
        wrong = difference(unsharded, full)
        if wrong:
            return f"{_named(strategy)}: result {i} as {spec}: {wrong}"
    return ""


def _unsharded(strategy: Strategy, outputs: Sequence[Sequence[Any]], index: int) -> torch.Tensor:
    """Return the global tensor of a result, from the results of all ranks."""
    spec, halo = strategy.out_specs[index], strategy.out_halos[index]
    assert spec is not None
    local = tuple(tensors[index] for tensors in outputs)
    return fs.unshard(Sharded(halo(local) if halo else local, spec))


class _Gradients:
    """Gradients of a weighted sum of a call's results on one device, computed once."""

    def __init__(self, call: OpCall, rule: Rule, args: Any, kwargs: Any, tensors: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.leaves = [t.detach().clone().requires_grad_(is_inexact(t)) for t in tensors]
        self.targets = [x for x in self.leaves if x.requires_grad]
        new_args, options = fill_call(args, kwargs, torch.Tensor, self.leaves)
        results = flat(call.op(*new_args, **options))
        self.weights = [
            None if dims is None or x is None or not x.requires_grad
            else torch.rand(x.shape, generator=torch.Generator().manual_seed(i)).to(x.dtype)
            for i, (dims, x) in enumerate(zip(rule.results, results, strict=True))
        ]  # fmt: skip
        self.expected = self.of(results)

    def of(self, results: Sequence[Any]) -> list[torch.Tensor] | None:
        """Return the gradients of a weighted sum of results; None without any gradient."""
        pairs = zip(results, self.weights, strict=True)
        total = sum((x * w).sum().abs() for x, w in pairs if w is not None)
        if not isinstance(total, torch.Tensor) or not total.requires_grad:
            return None
        gradients = torch.autograd.grad(total, self.targets, allow_unused=True)
        both = zip(gradients, self.targets, strict=True)
        return [torch.zeros_like(x) if gradient is None else gradient for gradient, x in both]

    def check(self, strategy: Strategy) -> str:
        """Return an error text for the gradients of a strategy, empty if they are right."""
        if self.expected is None:
            return ""
        locals_ = [
            prog(fs.shard(x, prog.src).local)
            for x, prog in zip(self.leaves, strategy.programs, strict=True)
        ]
        outputs = [
            run_local(strategy, rank, *fill_call(self.args, self.kwargs, torch.Tensor, shards))
            for rank, shards in zip(strategy.in_specs[0].mesh.ranks, zip(*locals_, strict=True),
                                    strict=True)
        ]  # fmt: skip
        gradients = self.of(
            [
                None if weights is None else _unsharded(strategy, outputs, i)
                for i, weights in enumerate(self.weights)
            ]
        )
        for i, expected in enumerate(self.expected):
            actual = torch.zeros_like(expected) if gradients is None else gradients[i]
            wrong = difference(actual, expected)
            if wrong:
                return f"{_named(strategy)}: gradient of operand {i}: {wrong}"
        return ""


def check_call(
    op: Any, *args: Any, grad: bool = True, two_axes: bool = False, **kwargs: Any
) -> list[str]:
    """Return the error texts of all strategies of a call on global tensors.

    Each role's values are checked in even shards on 2 ranks and in uneven ones on 3, one of which
    is empty, and on two axes; its gradients in uneven shards on 2 and in even ones on 3. Thorough
    runs check values in both.
    """
    call, rule, tree, tensors = call_with(op, args, kwargs)
    expected = flat(call.op(*args, **kwargs))
    grad = grad and any(map(is_inexact, tensors))
    gradients = _Gradients(call, rule, args, kwargs, tensors) if grad else None
    differentiable = set(roles_of(rule, call, grad=True))
    assert differentiable <= set(roles_of(rule, call, grad=False))
    wrong = []
    for mesh in (*MESHES, *((TWO_AXES,) if two_axes else ())):
        for skew in (False, True):
            of_values = THOROUGH or skew == (mesh != MESHES[0])
            of_gradients = gradients is not None and skew != bool(mesh.size % 2)
            if not of_values and not of_gradients:
                continue
            for strategy in strategies(call, rule, tree, mesh, skew=skew):
                if of_values:
                    wrong.append(check_values(strategy, args, kwargs, tensors, expected))
                roles = {role for _, role in strategy.roles}
                if of_gradients and roles <= differentiable and _is_linear(strategy):
                    wrong.append(gradients.check(strategy))
    return [text for text in wrong if text]


def _is_linear(strategy: Strategy) -> bool:
    """Return True if replicated tensors can be redistributed to the operands differentiably."""
    kinds = {kind for spec in strategy.in_specs for _, kind in spec.partition.unreduced_kinds}
    return kinds <= {"sum", "avg"}


def _named(strategy: Strategy) -> str:
    roles = ", ".join(f"{axis}: {role.name}" for axis, role in strategy.roles)
    return f"{strategy.op} [{', '.join(map(str, strategy.in_specs))}] {roles}"


def difference(result: torch.Tensor, full: torch.Tensor, roundings: int = 64) -> str:
    """Return a text if two tensors differ by more than `roundings`, else an empty text."""
    if result.shape != full.shape or result.dtype != full.dtype:
        return f"{tuple(result.shape)} {result.dtype} for {tuple(full.shape)} {full.dtype}"
    wide = torch.complex128 if full.dtype.is_complex else torch.float64
    eps = torch.finfo(full.dtype).eps if is_inexact(full) else 0.0
    if torch.equal(result, full):
        return ""
    tolerance = (
        roundings * eps * max(1.0, float(full.to(wide).abs().nan_to_num(0, 0, 0).max()))
        if full.numel()
        else 0
    )
    if torch.allclose(
        result.to(wide), full.to(wide), rtol=roundings * eps, atol=tolerance, equal_nan=True
    ):
        return ""
    return f"{result.flatten()[:6].tolist()} for {full.flatten()[:6].tolist()}"
