"""Topologies: links of axes and between meshes, presets, files."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.program.cost.links import Link
from fshard.program.cost.topology import Topology
from tests.helpers import spec_grid


def test_links_of_a_cluster() -> None:
    cluster, node = Topology.cluster(), Topology.node()
    mesh = Mesh(dp=4, tp=8)
    inner, outer = cluster.inner, cluster.outer
    assert (cluster.link(mesh, "tp"), cluster.link(mesh, "dp")) == (inner, outer)
    assert cluster.link(mesh, ("dp", "tp"), exchange=True) == outer
    assert cluster.link(mesh, ("dp", "tp")) == Link(outer.latency, inner.bandwidth)
    assert node.link(mesh, "dp") == inner
    assert cluster.link(mesh, ()) == inner
    scattered = Mesh(dp=4, tp=8, devices=sorted(range(32), key=lambda rank: rank % 8))
    assert cluster.link(scattered, "tp") == outer
    nested = Mesh(dp=2, a=2, tp=4)
    assert [cluster.link(nested, axis) for axis in nested.axes] == [outer, inner, inner]
    assert Topology.cluster(4).link(nested, "a") == outer


def test_links_of_a_cluster_are_those_of_its_groups() -> None:
    inner, outer = Topology.cluster().inner, Topology.cluster().outer
    assert Topology.cluster().link(Mesh(tp=6), "tp") == inner
    assert Topology.cluster().link(Mesh(dp=2, tp=3), "tp") == inner
    assert Topology.cluster().link(Mesh(dp=2, tp=3), ("dp", "tp")) == inner
    sizes, starts = [(6,), (2, 3), (3, 2), (4, 3), (3, 4), (2, 3, 2), (5, 2)], range(9)
    for size, start, nodes in itertools.product(sizes, starts, range(1, 13)):
        grid = dict(zip("abc", size, strict=False))
        mesh = Mesh(grid, devices=range(start, start + math.prod(size)))
        for axis in mesh.axes:
            inside = all(len({r // nodes for r in group}) == 1 for group in mesh.groups(axis))
            topology = Topology.cluster(nodes)
            assert topology.link(mesh, axis, exchange=True) == (inner if inside else outer)
            groups = [Counter(r // nodes for r in group) for group in mesh.groups(axis)]
            shared = {count for group in groups for count in group.values()}
            cards = shared.pop() if len(shared) == 1 else 1
            rate = min(inner.bandwidth, cards * outer.bandwidth)
            expected = inner if inside else Link(outer.latency, rate)
            assert topology.link(mesh, axis) in (expected, outer), (mesh, axis, nodes)


def test_links_of_a_huge_cluster() -> None:
    mesh = Mesh(a=1024, b=1024, devices=range(3, 3 + 2**20))
    assert Topology.cluster().link(mesh, "b") == Topology.cluster().outer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology.cluster(0), "a node must have at least 1 device"),
        (lambda: Topology.cluster(2.5), "a node must have at least 1 device"),  # type: ignore[arg-type]
        (lambda: Topology.of({"x": (1e-6, 1e9)}), "a connection must be a Link"),  # type: ignore[dict-item]
        (lambda: Topology.of("x"), "a mapping from mesh axis to Link"),  # type: ignore[arg-type]
        (
            lambda: Topology.of({}, memory=0),
            "given: memory=0\n  rule:  memory must",
        ),
        (
            lambda: Topology.of({}, launch=-1.0),
            "given: launch=-1.0\n  rule:  launch must",
        ),
        (lambda: Topology.of({}, message="1 us"), "given: message='1 us'\n"),  # type: ignore[arg-type]
        (lambda: Link("fast", 1), "latency must be a number"),  # type: ignore[arg-type]
    ],
)
def test_invalid_topologies_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        make()


@pytest.mark.parametrize(
    ("link", "name"),
    [((-1, 1), "latency"), ((1, 0), "bandwidth"), ((1, -1), "bandwidth"), ((1, 1, 0), "exchange"),
     ((1, 1, "fast"), "exchange"), ((math.nan, 1), "latency")],
)  # fmt: skip
def test_invalid_links_are_refused(link: tuple[float, ...], name: str) -> None:
    with pytest.raises(ShardingError, match=rf"given: {name}=\S+\n  rule:  {name} must be"):
        Link(*link)


LINK_NAME = "a link must be named by a mesh axis, or by different ones joined by commas"
LINK_PAIRS = "links must be a mapping from mesh axis to Link, or pairs of them"


@pytest.mark.parametrize(
    ("links", "given", "rule"),
    [
        ({"": Link(1, 1)}, "a link of ''", LINK_NAME),
        ({"x,": Link(1, 1)}, "a link of 'x,'", LINK_NAME),
        ({"x,x": Link(1, 1)}, "a link of 'x,x'", LINK_NAME),
        ({"x y": Link(1, 1)}, "a link of 'x y'", LINK_NAME),
        ({3: Link(1, 1)}, "a link of 3", LINK_NAME),
        ({"x": 3}, "x 3", "a connection must be a Link"),
        (3, "links with 3", LINK_PAIRS),
        ("xy", "links with 'xy'", LINK_PAIRS),
        ([("x",)], "links with ('x',)", LINK_PAIRS),
        ([("x,y", Link(1, 1)), ("y,x", Link(1, 2))], "a link of 'y,x'",
         "axes must have one link, 'y,x' has 1.00 s, 0.00 MB/s already"),
    ],
)  # fmt: skip
def test_invalid_names_of_links_are_refused(links: Any, given: str, rule: str) -> None:
    with pytest.raises(ShardingError) as caught:
        Topology(links=links)
    (problem,) = caught.value.problems
    assert problem.given.startswith(given)
    assert problem.rule == rule


def test_links_of_several_axes_have_names_in_any_order() -> None:
    joint, links = Link(1e-6, 5e9), {"x": Link(1e-6, 1e9), "y": Link(1e-6, 2e9)}
    one, other = (Topology.of({**links, name: joint}) for name in ("x,y", "y, x"))
    assert one == other
    for axes in (("x", "y"), ("y", "x")):
        assert one.link(Mesh(y=2, x=2), axes) == joint


def test_split_axes_have_the_link_of_the_axis() -> None:
    slow, slower = Link(1e-3, 1e6), Link(2e-3, 1e5)
    topology = Topology.of({"x": slow, "x_1": slower})
    mesh = Mesh(x_0=2, x_1=2, x_0_1=2, y_0=2, x_y=2)
    assert topology.link(mesh, "x_0") == topology.link(mesh, "x_0_1") == slow
    assert topology.link(mesh, "x_1") == slower
    assert topology.link(mesh, "y_0") == topology.link(mesh, "x_y") == topology.inner
    assert topology.link(mesh, ("x_0", "y_0")) == Link(1e-3, 1e6)


@st.composite
def some_devices(draw: st.DrawFn) -> Mesh:
    size = draw(st.integers(1, 5))
    chosen = draw(st.lists(st.integers(0, 12), min_size=size, max_size=size, unique=True))
    return Mesh(x=size, devices=chosen)


@given(some_devices(), some_devices(), st.integers(1, 6))
def test_links_between_meshes(one: Mesh, other: Mesh, nodes: int) -> None:
    cluster = Topology.cluster(nodes)
    ranks = {*one.ranks, *other.ranks}
    inside = len({rank // nodes for rank in ranks}) == 1
    assert cluster.between(one, other) == (cluster.inner if inside else cluster.outer)
    assert Topology.node().between(one, other) == Topology.node().inner


def test_links_between_meshes_of_named_axes() -> None:
    slow, thin = Link(1e-3, 1e9), Link(1e-6, 1e6)
    topology = Topology.of({"x": slow, "y": thin, "z": Link(1.0, 1.0)})
    assert topology.between(Mesh(x=2, z=1), Mesh(y=3, devices=range(2, 5))) == Link(1e-3, 1e6)


# -- presets -------------------------------------------------------------------------------

MACHINES = [
    (Topology.dgx_a100(), 8, 300e9, 25e9, 2.039e12),
    (Topology.dgx_h100(), 8, 450e9, 50e9, 3.35e12),
    (Topology.gb200_nvl72(), 72, 900e9, 50e9, 8e12),
]


@pytest.mark.parametrize(
    ("machine", "size", "nvlink", "network", "memory"),
    MACHINES,
    ids=lambda v: getattr(v, "name", ""),
)
def test_presets_achieve_most_of_the_promised_bandwidth(
    machine: Topology, size: int, nvlink: float, network: float, memory: float
) -> None:
    assert machine.node_size == size
    assert machine.inner.bandwidth == pytest.approx(0.8 * nvlink)
    assert machine.outer.bandwidth == pytest.approx(0.9 * network)
    assert machine.memory == pytest.approx(0.8 * memory)
    mesh = Mesh(dp=2, tp=size)
    assert machine.link(mesh, "tp") == machine.inner
    assert machine.link(mesh, "dp") == machine.outer


def test_cpu_host() -> None:
    host = Topology.cpu_host(4)
    assert host.link(Mesh(x=4), "x") == host.inner
    assert host.link(Mesh(x=8), "x", exchange=True) == host.outer
    assert host.link(Mesh(x=8), "x").bandwidth == 2e9  # loopback, slower than one Ethernet
    assert host.memory > host.inner.bandwidth


def test_cluster_has_the_links_of_dgx_h100() -> None:
    cluster, machine = Topology.cluster(), Topology.dgx_h100()
    assert (cluster.inner, cluster.outer) == (machine.inner, machine.outer)
    assert Topology.node().inner == machine.inner


# -- files ---------------------------------------------------------------------------------

NUMBERS = st.floats(1e-12, 1e15)
LINKS = st.builds(Link, NUMBERS, NUMBERS)
TOPOLOGIES = st.builds(
    Topology,
    name=st.text(),
    inner=LINKS,
    outer=LINKS,
    node_size=st.none() | st.integers(1, 100),
    links=st.dictionaries(st.sampled_from(["x", "y", "inner"]), LINKS).map(
        lambda d: tuple(d.items())
    ),
    launch=NUMBERS,
    memory=NUMBERS,
    message=NUMBERS,
)


@given(TOPOLOGIES)
def test_save_and_load_round_trip(
    tmp_path_factory: pytest.TempPathFactory, topology: Topology
) -> None:
    path = tmp_path_factory.mktemp("topology") / "wires.json"
    topology.save(path)
    assert Topology.load(path) == topology
    topology.save(str(path))
    assert Topology.load(str(path)) == topology


KEYS = (
    "the keys must be capacity, flops, inner, kernel, launch, links, memory, message, name, "
    "node_size, outer, overlap"
)
LINK = "a link must have a latency and a bandwidth"


@pytest.mark.parametrize(
    ("change", "given", "rule"),
    [
        ({"memory": None}, "without memory", KEYS),
        ({"speed": 3}, "with speed", KEYS),
        ({"speed": 3, "memory": None}, "without memory and with speed", KEYS),
        ({"inner": 3}, "with inner 3", LINK),
        ({"outer": {"latency": 1}}, "with outer {'latency': 1}", LINK),
        ({"links": [1]}, "with links [1]", LINK),
        ({"links": {"x": 1}}, "with x 1", LINK),
        ({"name": None}, "with name=None", "name must be a str"),
        ({"node_size": True}, "with node_size=True", "a node must have at least 1 device"),
        ({"launch": "6e-6"}, "with launch='6e-6'", "launch must be at least 0 seconds"),
        ({"links": {"x": {"latency": "fast", "bandwidth": 1}}},
         "with x latency='fast'", "latency must be a number of at least 0 seconds"),
    ],
)  # fmt: skip
def test_load_refuses_other_keys(
    tmp_path: Path, change: dict[str, object], given: str, rule: str
) -> None:
    path = tmp_path / "wires.json"
    Topology.cluster().save(path)
    read = {**json.loads(path.read_text()), **change}
    if "memory" in change:
        del read["memory"]
    path.write_text(json.dumps(read))
    with pytest.raises(ShardingError) as caught:
        Topology.load(path)
    assert str(caught.value) == spec_grid.message(
        "fs.Topology.load", f"{str(path)!r} {given}", rule,
        "write it again with topology.save(path)")  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": 0}, "memory must be above 0"),
        ({"node_size": 0}, "a node must have at least 1 device"),
        ({"inner": {"latency": -1, "bandwidth": 1}}, "latency must be a number of at least 0"),
        ({"inner": {"latency": 0, "bandwidth": math.inf}}, "bandwidth must be a number above 0"),
        ({"name": 3}, "name must be a str"),
    ],
)
def test_load_refuses_values(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "wires.json"
    Topology.cluster().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ShardingError, match=message):
        Topology.load(path)


def test_load_refuses_files_that_are_not_json(tmp_path: Path) -> None:
    path = tmp_path / "wires.json"
    with pytest.raises(ShardingError) as caught:
        Topology.load(path)
    assert str(caught.value) == spec_grid.message(
        "fs.Topology.load", f"{str(path)!r}: No such file or directory",
        "the file must be readable",
        "topology.save(path) writes one, fs.calibrate(mesh, save=path) too")  # fmt: skip
    for text in ("", "{", "\x00\xff", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ShardingError) as caught:
            Topology.load(path)
        assert str(caught.value) == spec_grid.message(
            "fs.Topology.load", f"{str(path)!r}",
            "the file must hold JSON, as Topology.save writes it",
            "write it again with topology.save(path)")  # fmt: skip
    path.write_text("{}")
    with pytest.raises(ShardingError) as caught:
        Topology.load(path)
    assert str(caught.value) == spec_grid.message(
        "fs.Topology.load", f"{str(path)!r} without {KEYS.removeprefix('the keys must be ')}", KEYS,
        "write it again with topology.save(path)")  # fmt: skip
    path.write_text("[1]")
    with pytest.raises(ShardingError, match="with no mapping"):
        Topology.load(path)


def test_load_lists_all_problems(tmp_path: Path) -> None:
    path = tmp_path / "wires.json"
    Topology.cluster().save(path)
    wrong = {"links": {"x": 1}, "inner": 2, "memory": -1, "name": 3}
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    with pytest.raises(ShardingError) as caught:
        Topology.load(path)
    value = [problem.given for problem in caught.value.problems]
    assert value == [
        f"{str(path)!r} with {text}" for text in ("x 1", "inner 2", "name=3", "memory=-1")
    ]


@pytest.mark.parametrize("path", [3, None, b"wires.json"])
@pytest.mark.parametrize("name", ["load", "save"])
def test_invalid_paths_are_refused(name: str, path: object) -> None:
    with pytest.raises(ShardingError) as caught:
        getattr(Topology.cluster(), name)(path)
    assert str(caught.value) == spec_grid.message(
        f"fs.Topology.{name}", f"path {path!r}", "path must be a str or a Path",
        "'topology.json'")  # fmt: skip


# -- links of axes that a mesh does not have ---------------------------------------------

TYPO = Topology.of({"xx": Link(1e-4, 1e8)})
SPEC = fs.Spec(Mesh(x=2, y=2), fs.P("x"), shape=(4,))
REPLICATED = SPEC.replace(partition=fs.P())


def negate(x: torch.Tensor) -> torch.Tensor:
    return -x


@pytest.mark.parametrize(
    "use",
    [
        lambda topology: fs.redistribute(SPEC, REPLICATED, topology=topology),
        lambda topology: fs.redistribute([SPEC], [REPLICATED], topology=topology),
        lambda topology: fs.redistribute(SPEC, REPLICATED).cost(topology),
        lambda topology: fs.redistribute(SPEC, REPLICATED).explain(topology),
        lambda topology: fs.redistribute(SPEC, REPLICATED).simplify(topology),
        lambda topology: fs.redistribute([SPEC], [REPLICATED]).cost(topology),
        lambda topology: fs.propagate(torch.neg, SPEC, topology=topology),
        lambda topology: fs.partition(negate, mesh=SPEC.mesh, topology=topology),
        lambda topology: fs.auto(negate, SPEC.mesh, [torch.ones(4)], topology=topology),
        lambda topology: fs.on_pairs(negate, topology=topology)(fs.shard(torch.ones(4), SPEC)),
    ],
    ids=["redistribute", "batch", "cost", "explain", "simplify", "batch cost", "propagate",
         "partition", "auto", "on_pairs"],
)  # fmt: skip
def test_link_of_an_unknown_axis_is_refused(use: Callable[[Topology], Any]) -> None:
    with pytest.raises(
        ShardingError, match=r"link of axis 'xx' for Mesh\(x=2, y=2\), which (.*\n)*.*'x'"
    ):
        use(TYPO)
    use(Topology.of({"x": Link(1e-4, 1e8), "x_1": Link(1e-4, 1e8)}))


def test_links_of_further_axes_are_allowed_if_every_axis_has_one() -> None:
    topology = Topology.of(dict.fromkeys("xyz", Link(1e-4, 1e8)))
    assert fs.redistribute(SPEC, REPLICATED, topology=topology).topology == topology


def test_links_of_both_meshes_are_known() -> None:
    other = fs.Spec(Mesh(z=4), fs.P("z"), shape=(4,))
    topology = Topology.of({"x": Link(1e-4, 1e8), "z": Link(1e-4, 1e8)})
    assert fs.redistribute(SPEC, other, topology=topology).topology == topology
