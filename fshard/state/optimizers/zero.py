"""ZeRO and FSDP as choices of layouts of parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from fshard._util.errors import fail
from fshard._util.notebook_view import TableView
from fshard.layout.mesh import Axes, as_axes
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import flatten, unflatten
from fshard.state.optimizers.optimizer import Optimizer, invariant_spec


def zero_specs(tree: Any, axes: Axes, /) -> Any:
    """Return the partition of each leaf, sharded further over axes as by ZeRO and FSDP.

    Args:
        tree: pytree of pairs or specs.
        axes: axis, or axes major to minor. A leaf that they shard already keeps its partition.

    Returns:
        A tree of partitions. The dim with the largest shards is sharded, minor to the axes that
        shard it, among those that divide evenly if there are any. A tensor without dims is `P()`.

    Raises:
        ShardingError: a leaf is neither a pair nor a spec, or a mesh does not have the axes.

    As `specs` of an optimizer it shards the state, ZeRO-1 with parameters that are invariant along
    the axes and ZeRO-2 with `reduced` ones; as the layout of the parameters it is ZeRO-3, FSDP.
    After ZeRO (arXiv 1910.02054).

    >>> import fshard as fs
    >>> specs = {"w": fs.Spec(fs.Mesh(dp=2, tp=2), fs.P(None, "tp"), shape=(4, 6))}
    >>> fs.state.zero_specs(specs, "dp")
    {'w': P('dp', 'tp')}
    """
    where = "fs.state.zero_specs"
    names = as_axes(axes, where)
    leaves, treedef = flatten(tree)
    return unflatten(treedef, [_further(spec, names, where) for spec in _specs(leaves, where)])


def _specs(leaves: Sequence[Any], where: str) -> list[Spec]:
    """Return the specs of pairs and specs; raise `ShardingError` for other leaves."""
    specs = [leaf.spec if isinstance(leaf, Sharded) else leaf for leaf in leaves]
    if not all(isinstance(spec, Spec) for spec in specs):
        _fail_leaves(f"{sorted({type(leaf).__name__ for leaf in leaves})}", where)
    return specs


def _fail_leaves(given: str, where: str) -> NoReturn:
    fail(where, f"a tree of {given}", "the tree must have pairs or specs as leaves",
         "fs.state.tree_shard(params, fs.P(), mesh=mesh)")  # fmt: skip


def _further(spec: Spec, axes: tuple[str, ...], where: str) -> PartitionSpec:
    spec.mesh.check_axes(axes, where)
    dims = [*spec.partition.dims]
    new = tuple(axis for axis in axes if not any(axis in names for names in dims))
    if not dims or not new:
        return PartitionSpec(*dims)
    counts = [spec.mesh.axis_size(names) for names in dims]
    n = spec.mesh.axis_size(new)
    sizes = [size / count for size, count in zip(spec.shape, counts, strict=True)]
    dim = max(range(len(dims)), key=lambda d: (spec.shape[d] % (counts[d] * n) == 0, sizes[d]))
    dims[dim] = (*dims[dim], *new)
    return PartitionSpec(*dims)


STAGES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP")


@dataclass(frozen=True, slots=True)
class ZeroStage:
    """Layouts of one stage of ZeRO, and the bytes that the busiest rank holds of each.

    Attributes:
        name: "data parallel", "ZeRO-1", "ZeRO-2" or "ZeRO-3, FSDP".
        params: tree of the specs of the parameters.
        grads: tree of the specs of their gradients.
        optimizer: the optimizer with the layout of its state.
        params_nbytes: bytes of the parameters on the busiest rank.
        grads_nbytes: bytes of the gradients on the busiest rank.
        state_nbytes: bytes of the state of the optimizer on the busiest rank.

    >>> import fshard as fs
    >>> specs = [fs.Spec(fs.Mesh(dp=2), fs.P(), shape=(8,))]
    >>> stage = fs.state.zero_table(specs, "dp", fs.state.adamw(1e-3))[3]
    >>> stage.name, stage.params, stage.state_nbytes
    ('ZeRO-3, FSDP', [f32[8@dp]], 32)
    """

    name: str
    params: Any
    grads: Any
    optimizer: Optimizer
    params_nbytes: int
    grads_nbytes: int
    state_nbytes: int


@dataclass(frozen=True, slots=True, repr=False)
class ZeroTable(TableView):
    """Stages of ZeRO, from 0 to 3; prints as a table of bytes per rank.

    Attributes:
        axes: the axes that the stages shard over.
        stages: the stages; `table[2]` is ZeRO-2.

    >>> import fshard as fs
    >>> specs = [fs.Spec(fs.Mesh(dp=2), fs.P(), shape=(8,))]
    >>> table = fs.state.zero_table(specs, "dp", fs.state.sgd(0.1))
    >>> [stage.grads_nbytes for stage in table]
    [32, 32, 16, 16]
    """

    axes: tuple[str, ...]
    stages: tuple[ZeroStage, ...]

    def __getitem__(self, stage: int) -> ZeroStage:
        return self.stages[stage]

    def __iter__(self) -> Iterator[ZeroStage]:
        return iter(self.stages)

    __rich__ = TableView.table


def zero_table(params: Any, axes: Axes, optimizer: Optimizer, /) -> ZeroTable:
    """Return the layouts of the stages of ZeRO, with the bytes of each on the busiest rank.

    Args:
        params: pytree of pairs or specs, invariant along the axes, as in data parallelism.
        axes: axis, or axes major to minor, that ZeRO shards over.
        optimizer: the optimizer; its own `specs` do not count.

    Returns:
        The stages. ZeRO-1 shards the state of the optimizer, ZeRO-2 the gradients too, ZeRO-3 also
        the parameters, all as `fs.state.zero_specs`. A stage has the specs to pass to
        `fs.partition` and its optimizer.

    Raises:
        ShardingError: the tree is empty, has leaves other than pairs and specs, or the optimizer
            does not take one of them.

    After ZeRO (arXiv 1910.02054), figure 1.

    >>> import fshard as fs
    >>> specs = {"w": fs.Spec(fs.Mesh(dp=4), fs.P(), shape=(1024, 1024))}
    >>> table = fs.state.zero_table(specs, "dp", fs.state.adamw(1e-3))
    >>> table[2].grads["w"], table[2].grads_nbytes
    (f32[1024@dp,1024], 1048576)
    >>> print(table)
    bytes of the busiest rank, sharded over dp
                   parameters  gradients     state       sum
    ────────────────────────────────────────────────────────
    data parallel    4.00 MiB   4.00 MiB  8.00 MiB  16.0 MiB
    ZeRO-1           4.00 MiB   4.00 MiB  2.00 MiB  10.0 MiB
    ZeRO-2           4.00 MiB   1.00 MiB  2.00 MiB  7.00 MiB
    ZeRO-3, FSDP     1.00 MiB   1.00 MiB  2.00 MiB  4.00 MiB
    """
    where = "fs.state.zero_table"
    leaves, treedef = flatten(params)
    specs, names = _specs(leaves, where), as_axes(axes, where)
    if not specs:
        _fail_leaves("no leaves", where)
    further = [
        spec.replace(partition=_further(spec, names, where), uneven="chunk") for spec in specs
    ]
    replicated = [invariant_spec(spec) for spec in specs]
    stages = []
    for number, name in enumerate(STAGES):
        held, grads, state = ((further if number >= stage else replicated) for stage in (3, 2, 1))
        slots = [x for spec in state for x in optimizer.slots(spec).values() if x is not None]
        stages.append(ZeroStage(
            name, unflatten(treedef, held), unflatten(treedef, grads),
            replace(optimizer, specs=unflatten(treedef, state)),
            *map(_busiest, (held, grads, slots)),
        ))  # fmt: skip
    return ZeroTable(names, tuple(stages))


def _busiest(specs: list[Spec]) -> int:
    """Return the bytes of all specs on the rank that has the most."""
    ranks = {rank for spec in specs for rank in spec.mesh.ranks}
    return max((sum(spec.local_nbytes(rank) for spec in specs) for rank in ranks), default=0)
