"""Optimizers on trees of pairs have the values of `torch.optim` on one device, on every layout."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from fshard.layout.tree import flatten
from tests.helpers.gloo.harness import run_ranks
from tests.state.optimizers.optimizer_cases import (
    OPTIMIZERS,
    difference,
    difference_on_ranks,
    expected,
    published_muon,
    sharded,
    trained,
    values,
)

MESH = Mesh(dp=2, tp=3)
LAYOUTS: dict[str, tuple[Any, Any]] = {
    "invariant": (P(), None),
    "sharded": (P("dp"), None),
    "two axes": (P(("tp", "dp")), None),
    "zero-1": (P(), "zero"),
    "zero-2": (P(reduced={"dp", "tp"}), "zero"),
    "zero-2 of a part": (P("tp", reduced={"dp"}), P(("tp", "dp"))),
    "zero-3": ("zero", None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values_are_those_of_torch_on_one_device(name: str, layout: str) -> None:
    _, params = trained(name, MESH, *LAYOUTS[layout])
    # Muon iterates in bfloat16 on both: rounding could differ by the order of a gemm.
    assert difference(params, expected(name)) < 1e-10


@pytest.mark.parametrize(
    ("name", "layout", "donate"),
    [("momentum", "zero-2", False), ("adamw", "zero-1", True), ("adafactor", "zero-3", True),
     ("muon", "zero-3", False)],
)  # fmt: skip
def test_values_on_processes(name: str, layout: str, donate: bool) -> None:
    differences = run_ranks(
        4, difference_on_ranks, name, {"dp": 2, "tp": 2}, *LAYOUTS[layout], donate
    )
    assert max(differences) < 1e-10


def test_muon_in_float64_is_the_published_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    make, kind, settings = OPTIMIZERS["muon"]
    monkeypatch.setitem(OPTIMIZERS, "muon", (make, kind, settings | {"dtype": None}))
    _, params = trained("muon", MESH, P(("dp", "tp")))
    assert difference(params, published_muon()) < 1e-10


def test_muon_sends_all_matrices_in_one_exchange_each_way() -> None:
    params = fs.state.tree_shard(values("muon", 0), P(("dp", "tp")), mesh=MESH)
    optimizer = fs.state.muon()
    state = optimizer.init(params)
    with fs.comm_log() as log:
        optimizer.update(params, state, params)
    assert sum(log.forward.counts.values()) == 2
    sent = sum(log.forward.bytes.values())
    assert sent <= 2 * sum(math.prod(pair.shape) for pair in params.values()) * 8


def test_elementwise_updates_in_the_layout_of_the_parameters_send_nothing() -> None:
    params = fs.state.tree_shard(values("adamw", 0), P(("dp", "tp")), mesh=MESH)
    for optimizer in (fs.state.adamw(0.1), fs.state.sgd(0.1, momentum=0.9)):
        state = optimizer.init(params)
        with fs.comm_log() as log:
            optimizer.update(params, state, params)
        assert not log.forward.counts


def test_adafactor_sends_two_batches_of_sums() -> None:
    """A batch has one launch for every set of axes that is summed over."""
    params = fs.state.tree_shard(values("adafactor", 0), P("dp"), mesh=MESH)
    optimizer = fs.state.adafactor()
    state = optimizer.init(params)
    with fs.comm_log() as log:
        optimizer.update(params, state, params)
    assert sum(log.forward.counts.values()) == 2


def test_updates_do_not_change_their_arguments() -> None:
    params = fs.state.tree_shard(values("adamw", 0), P("dp"), mesh=MESH)
    for name, (make, _, options) in OPTIMIZERS.items():
        tree = {k: p for k, p in params.items() if name != "muon" or p.spec.ndim == 2}
        optimizer = make(**options)
        state = optimizer.init(tree)
        before = [leaf.clone() for leaf in tensors((tree, state))]
        optimizer.update(tree, state, tree)
        after = tensors((tree, state))
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def tensors(tree: Any) -> list[torch.Tensor]:
    return list(itertools.chain.from_iterable(
        leaf.local for leaf in flatten(tree)[0] if isinstance(leaf, fs.Sharded)
    ))  # fmt: skip


def test_learning_rate_is_a_function_of_the_step() -> None:
    params = fs.state.tree_shard({"w": torch.zeros(2)}, P(), mesh=MESH)
    grads = fs.state.tree_shard({"w": torch.ones(2)}, P(), mesh=MESH)
    optimizer = fs.state.sgd(lambda step: 10.0**-step)
    state = optimizer.init(params)
    for _ in range(3):
        state, params = optimizer.update(grads, state, params)
    assert torch.allclose(fs.unshard(params["w"]), torch.full((2,), -0.111))


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_float32_parameters_and_nested_trees(name: str) -> None:
    tree = {"a": [torch.ones(3, 4), None], "b": {"c": torch.ones(2)}}
    make = OPTIMIZERS[name][0]
    with pytest.raises(fs.ShardingError, match=r"a\.1: NoneType"):
        make(0.1).init(fs.state.tree_shard(tree, P("dp"), mesh=MESH))
    tree["a"].pop()  # type: ignore[attr-defined]
    params = fs.state.tree_shard(tree, P("dp"), mesh=MESH)
    state = make(0.1).init(params)
    state, params = make(0.1).update(params, state, params)
    assert fs.unshard(params["a"][0]).dtype is torch.float32


# -- ZeRO ---------------------------------------------------------------------------------------


def local_bytes(tree: Any) -> int:
    """Return the bytes of a tree on the busiest rank."""
    specs = [leaf.spec for leaf in flatten(tree)[0] if isinstance(leaf, fs.Sharded)]
    return max(sum(spec.local_nbytes(rank) for spec in specs) for rank in specs[0].mesh.ranks)


@pytest.mark.parametrize(
    ("stage", "params_shards", "grads_shards", "state_shards", "launches"),
    [
        (0, 1, 1, 1, {"all_reduce": 2}),  # one is the loss's
        (1, 1, 1, 4, {"all_reduce": 2, "all_gather": 1}),
        (2, 1, 4, 4, {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1}),
        (3, 4, 4, 4, {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1}),
    ],
)
def test_zero_is_a_choice_of_specs(
    stage: int, params_shards: int, grads_shards: int, state_shards: int, launches: dict[str, int]
) -> None:
    """A table of bytes of parameters, gradients and state on a rank, and of what is sent."""
    mesh, size = Mesh(dp=4), (8 * 16 + 16 * 8) * 8
    tree = {"up": torch.ones(8, 16).double(), "down": torch.ones(16, 8).double()}
    partition = {0: P(), 1: P(), 2: P(reduced={"dp"}), 3: P()}[stage]
    params = fs.state.tree_shard(tree, partition, mesh=mesh)
    zero = fs.state.zero_specs(params, "dp") if stage else None
    if stage == 3:
        params = fs.state.tree_shard(tree, zero, mesh=mesh)
    loss_fn = fs.partition(lambda p, x: (x @ p["up"]).relu().matmul(p["down"]).sum(), mesh=mesh,
                           in_specs=(None, P("dp")), out_specs=P())  # fmt: skip
    optimizer = fs.state.adamw(0.1, specs=zero)
    state = optimizer.init(params)
    x = fs.shard(torch.ones(256, 8).double(), mesh, P("dp"))
    with fs.comm_log() as log:
        _, grads = fs.state.value_and_grad(loss_fn)(params, x)
        if stage == 2:
            grads = fs.state.tree_reshard(grads, zero)
        new_state, new_params = optimizer.update(grads, state, params)
    assert local_bytes(params) == local_bytes(new_params) == size // params_shards
    assert local_bytes(grads) == size // grads_shards
    assert local_bytes({**new_state, "step": None}) == 2 * size // state_shards
    counts: Counter[str] = Counter()
    for phase in (log.forward, log.backward):
        for (op, _), count in phase.counts.items():
            counts[op] += count
    assert counts == launches
    one = torch.optim.AdamW(leaves := [x.clone().requires_grad_() for x in tree.values()], 0.1)
    (fs.unshard(x) @ leaves[0]).relu().matmul(leaves[1]).sum().backward()
    one.step()
    for leaf, name in zip(leaves, tree, strict=True):
        torch.testing.assert_close(fs.unshard(new_params[name]), leaf.detach())


@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor"])
def test_zero_table_has_the_bytes_that_ranks_hold(name: str) -> None:
    """Uneven shards too: no dim of the shapes is divisible by 5."""
    make, _, settings = OPTIMIZERS[name]
    mesh = Mesh(dp=5)
    weights = values(name, 0)
    table = fs.state.zero_table(sharded(weights, mesh, P()), "dp", make(**settings))
    for stage in table:
        params = fs.state.tree_shard(weights, stage.params)
        grads = fs.state.tree_shard(weights, stage.grads)
        state = stage.optimizer.init(params)
        del state["step"]
        held = [busiest_nbytes(tree, mesh) for tree in (params, grads, state)]
        assert held == [stage.params_nbytes, stage.grads_nbytes, stage.state_nbytes]
    assert table[3].params_nbytes < table[0].params_nbytes / 3
    assert len(str(table).splitlines()) == 3 + len(table.stages)


def busiest_nbytes(tree: Any, mesh: Mesh) -> int:
    """Return the bytes of the simulated rank that holds the most of a tree of pairs."""
    pairs = [leaf for leaf in flatten(tree)[0] if isinstance(leaf, fs.Sharded)]
    return max(
        (sum(pair.local[rank].nbytes for pair in pairs) for rank in range(mesh.size)), default=0
    )


def test_zero_table_refuses_trees_without_layouts() -> None:
    with pytest.raises(fs.ShardingError, match="the tree must have pairs or specs as leaves"):
        fs.state.zero_table({"w": torch.ones(4)}, "dp", fs.state.sgd(0.1))


def test_zero_specs_name_leaves_and_axes_that_are_refused() -> None:
    with pytest.raises(fs.ShardingError, match=r"fs\.state\.zero_specs[\s\S]*\['Tensor'\]"):
        fs.state.zero_specs({"w": torch.ones(4, 4)}, "x")
    with pytest.raises(fs.ShardingError, match="'y'"):
        fs.state.zero_specs(sharded({"w": torch.ones(4, 4)}, Mesh(x=2), P()), "y")
    assert fs.state.zero_specs({}, "x") == {}
