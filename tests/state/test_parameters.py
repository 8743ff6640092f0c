"""Rules on paths, creation in a layout, and trees that are sharded and redistributed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, Spec
from fshard.run.transports.base import as_rank
from tests.helpers.gloo.harness import run_ranks

MESH = Mesh(dp=2, tp=2)


class Block(torch.nn.Module):
    """An attention block with an embedding, a norm, a buffer and tied weights."""

    def __init__(self, vocabulary: int = 12, width: int = 8) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.attention = torch.nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))
        self.out = torch.nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.embed.weight


RULES = [
    (r"embed\.weight", P("tp")),
    (r"attention\.in_proj_weight", P("tp", "dp")),
    (r"attention\..*", P()),
    (r"norm\..*", P()),
    (r"layers\.\d+\.weight", P(None, ("dp", "tp"))),
    (r"layers\.\d+\.bias", P("dp")),
]


def parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters())


def test_first_rule_that_matches_the_path_counts() -> None:
    tree = parameters(Block())
    specs = fs.state.match_rules(RULES, tree, mesh=MESH)
    assert specs.keys() == tree.keys()
    assert specs["attention.in_proj_weight"] == P("tp", "dp")
    assert specs["attention.in_proj_bias"] == P()
    assert specs["layers.1.weight"] == P(None, ("dp", "tp"))


def test_rules_match_nested_trees_and_skip_scalars() -> None:
    tree = {"blocks": [{"w": torch.ones(4, 4)}], "step": torch.tensor(0), "none": None}
    specs = fs.state.match_rules([(r"blocks\.0\.w", P("tp"))], tree, mesh=MESH)
    assert specs == {"blocks": [{"w": P("tp")}], "step": P(), "none": P()}


def test_a_rule_matches_the_path_from_end_to_end() -> None:
    specs = fs.state.match_rules(
        [("w", P("tp")), (".*", P())], {"w": torch.ones(2), "wo": torch.ones(2)}
    )
    assert specs == {"w": P("tp"), "wo": P()}


def test_all_failures_of_rules_are_in_one_error() -> None:
    tree = {"w": torch.ones(6, 4), "b": torch.ones(3), "norm.scale": torch.ones(4)}
    rules = [("w", P(("dp", "tp"))), ("b", P(None, "tp")), ("c", P()), ("w|b", P())]
    with pytest.raises(fs.ShardingError) as caught:
        fs.state.match_rules(rules, tree, mesh=MESH)
    text = str(caught.value)
    assert "dim 0 of size 6 must be divisible by 4, the ranks along dp, tp" in text
    assert "a partition must have at most 1 dims" in text
    assert "norm.scale of shape (4,)" in text
    assert "the rule 'c'" in text
    assert "the rule 'w|b'" in text


FIXES: dict[str, tuple[list[tuple[str, P]], dict[str, torch.Tensor]]] = {
    "no rule": ([("a", P())], {"a": torch.ones(2), "b.c": torch.ones(2)}),
    "does not divide": ([(".*", P("tp", "dp"))], {"a": torch.ones(3, 4)}),
    "too many dims": ([(".*", P(None, "tp"))], {"a": torch.ones(3)}),
}


@pytest.mark.parametrize("case", FIXES)
def test_printed_rule_mends_the_error(case: str) -> None:
    rules, tree = FIXES[case]
    with pytest.raises(fs.ShardingError) as caught:
        fs.state.match_rules(rules, tree, mesh=MESH)
    fix = str(caught.value).partition("fix:   ")[2]
    rule = eval(fix.removeprefix("add ").partition(" before")[0], {"fs": fs})
    fs.state.match_rules([rule, *rules][: 1 + len(rules) * (case == "no rule")], tree, mesh=MESH)


BAD_RULES: dict[str, tuple[Any, str]] = {
    "pattern": ([("(", P())], "must be a pair of a regular expression"),
    "no P": ([("w", "tp")], "'tp' is not a P"),
    "no pair": (["w"], "must be a pair"),
    "axis": ([(".*", P("pt"))], "an axis must be one of dp, tp, not 'pt'"),
}


@pytest.mark.parametrize("case", BAD_RULES)
def test_bad_rules_are_refused(case: str) -> None:
    rules, message = BAD_RULES[case]
    with pytest.raises(fs.ShardingError, match=message):
        fs.state.match_rules(rules, {"w": torch.ones(2)}, mesh=MESH)


# -- init ------------------------------------------------------------------------------------


def create(key: torch.Tensor) -> dict[str, torch.Tensor]:
    with fs.random.keyed(key):
        return {name: x.detach() for name, x in parameters(Block()).items()}


@pytest.mark.parametrize(
    "mesh", [Mesh(dp=1, tp=1), MESH, Mesh(dp=4, tp=1), Mesh(dp=1, tp=2)], ids=str
)
def test_modules_are_initialised_equally_on_every_mesh(mesh: Mesh) -> None:
    key = fs.random.key(3)
    rules = [rule for rule in RULES if "layers" not in rule[0]] + [(r"layers\..*", P("tp"))]
    params = fs.state.init(create, key, rules, mesh=mesh)
    assert str(params["layers.0.weight"].spec) == "f32[8@tp,8]"
    expected = create(key)
    for name, x in fs.state.tree_unshard(params).items():
        assert torch.equal(x, expected[name]), name


def test_each_rank_initialises_its_shards_alone() -> None:
    """The largest tensor is a shard: a model larger than a rank's memory is initialised."""
    from tests.helpers.tensor_memory import LargestTensor

    def large(key: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"w": fs.random.normal(key, (64, 64)) * 0.02, "b": fs.random.uniform(key, (64,))}

    specs = {"w": P("dp", "tp"), "b": P()}
    fs.state.init(large, fs.random.key(0), specs, mesh=MESH)
    with LargestTensor() as largest:
        fs.state.init(large, fs.random.key(0), specs, mesh=MESH)
    assert largest.numel <= 2 * 64 * 64 // 4


def test_specs_name_the_mesh() -> None:
    spec = Spec(MESH, P("tp"), shape=(8,))
    (x,) = fs.state.init(lambda key: [fs.random.uniform(key, (8,))], fs.random.key(1), [spec])
    assert x.spec == spec
    with pytest.raises(fs.ShardingError, match="the mesh must be that of all specs"):
        fs.state.init(lambda key: [fs.random.uniform(key, (8,))], fs.random.key(1), [P("tp")])


def on_ranks() -> dict[str, torch.Tensor]:
    fs.init(MESH)
    params = fs.state.init(create, fs.random.key(3), RULES, mesh=MESH)
    moved = fs.state.tree_reshard(params, P("tp"))
    result: dict[str, torch.Tensor] = fs.state.tree_unshard(moved)
    return result


def test_processes_initialise_and_redistribute_as_one_device() -> None:
    expected = create(fs.random.key(3))
    for params in run_ranks(4, on_ranks):
        assert all(torch.equal(x, expected[name]) for name, x in params.items())


# -- trees -----------------------------------------------------------------------------------


def test_trees_are_sharded_redistributed_in_one_batch_and_unsharded() -> None:
    tree = {"w": [torch.arange(16.0).view(4, 4), torch.arange(8.0)], "n": 3, "none": None}
    pairs = fs.state.tree_shard(tree, P("tp"), mesh=MESH)
    assert pairs["n"] == 3
    with fs.comm_log() as log:
        moved = fs.state.tree_reshard(pairs, P())
    assert [str(x.spec) for x in moved["w"]] == ["f32[4,4]", "f32[8]"]
    assert sum(log.counts.values()) == 1
    back = fs.state.tree_unshard(moved)
    assert torch.equal(back["w"][0], tree["w"][0])  # type: ignore[index]
    assert torch.equal(back["w"][1], tree["w"][1])  # type: ignore[index]


def test_gradients_of_trees_are_those_of_one_device() -> None:
    tree = {"w": torch.randn(4, 4, dtype=torch.float64, requires_grad=True)}
    pairs = fs.state.tree_shard(tree, P("tp"), mesh=MESH)
    y = fs.state.tree_unshard(fs.state.tree_reshard(pairs, P(None, "tp")))["w"]
    (y**3).sum().backward()
    assert tree["w"].grad is not None
    torch.testing.assert_close(tree["w"].grad, 3 * tree["w"].detach() ** 2)


BAD_TREES: dict[str, tuple[Callable[[], Any], str]] = {
    "rules of a module": (
        lambda: fs.state.match_rules([(".*", P())], torch.nn.Linear(2, 2)),
        r"dict\(module\.named_parameters\(\)\)",
    ),
    "result that is a module": (
        lambda: fs.state.init(lambda key: torch.nn.Linear(2, 2), fs.random.key(0), P(), mesh=MESH),
        r"a result of .*Linear(.|\n)*dict\(module\.named_parameters\(\)\)",
    ),
    "seed in the place of a key": (
        lambda: fs.state.init(lambda key: key, 0, P(), mesh=MESH),
        r"fs\.random\.key\(0\)",
    ),
    "P without a mesh": (
        lambda: fs.state.tree_shard({"w": torch.ones(2)}, P()),
        "the mesh of every",
    ),
    "no prefix": (
        lambda: fs.state.tree_shard({"w": torch.ones(2)}, {"v": P()}, mesh=MESH),
        r"specs",
    ),
}


@pytest.mark.parametrize("case", BAD_TREES)
def test_bad_trees_are_refused(case: str) -> None:
    call, message = BAD_TREES[case]
    with pytest.raises(fs.ShardingError, match=message):
        call()


class NoBackend:
    """Rank 0 of 2, whose process groups have no backend for any device."""

    rank, all_ranks = 0, range(2)

    def accepts(self, device: torch.device) -> bool:
        """Refuse a device."""
        return False


def test_locals_on_devices_without_a_backend_are_refused() -> None:
    spec = Spec(Mesh(x=2), P("x"), shape=(4,))
    transport: Any = NoBackend()
    with as_rank(transport), pytest.raises(fs.ShardingError, match="on rank 0 a local on cpu"):
        fs.state.tree_reshard([fs.Sharded(torch.ones(2), spec)], P())


LEAVES = {"w": torch.ones(4), "deep": {"step": torch.tensor(1.0)}}
BY_LEAF: dict[str, Callable[[], Any]] = {
    "fs.state.tree_shard": lambda: fs.state.tree_shard(LEAVES, P("x"), mesh=Mesh(x=2)),
    "fs.state.tree_reshard": lambda: fs.state.tree_reshard(
        fs.state.tree_shard(LEAVES, P(), mesh=Mesh(x=2)), P("x")),
    "fs.state.sgd.init": lambda: fs.state.sgd(1, specs=P("x")).init(
        fs.state.tree_shard(LEAVES, P(), mesh=Mesh(x=2))),
}  # fmt: skip


@pytest.mark.parametrize("where", BY_LEAF)
def test_a_layout_that_does_not_fit_names_its_leaf(where: str) -> None:
    text = rf"{re.escape(where)}\n  given: deep.step: P\('x'\) with 1 entries for shape \(\)"
    with pytest.raises(fs.ShardingError, match=text):
        BY_LEAF[where]()
