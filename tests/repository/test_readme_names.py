"""README: every row of its tables of other systems' names runs, and has the values of its oracle.

The code of a row's last cell is evaluated; its oracle is an expression that is true of the right
result `y`. Rows of collectives run in a mapped function over `X`, on rank `(d, t)`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: F401 - names of oracles

import fshard as fs
from fshard import P

README = (Path(__file__).parent.parent.parent / "README.md").read_text()
TABLES = dict(
    re.findall(r"^<!-- names: (\w+) -->\n(.*?)^<!-- end", README, re.MULTILINE | re.DOTALL)
)
MESH = fs.Mesh(dp=2, tp=4)
CLOSE = "close(fs.unshard(y), x)"
ORACLES = {
    'fs.Mesh(dp=2, tp=4)': "y == fs.Mesh({'dp': 2, 'tp': 4}) and y.shape == {'dp': 2, 'tp': 4}",
    'P("dp", None)': "fs.Spec.from_placements(mesh, [Shard(0), Replicate()], x.shape).partition"
    " == fs.Spec(mesh, y, shape=x.shape).partition",
    'P(None, "tp", unreduced={"dp"})': "fs.Spec.from_placements(mesh, [Partial(), Shard(1)],"
    " x.shape) == fs.Spec(mesh, y, shape=x.shape)",
    'P("tp", None)': "counts_of_mlp('0.weight', y) == {('all_reduce', 'tp'): 1}",
    'P(None, "tp")': "counts_of_mlp('2.weight', y) == {('all_reduce', 'tp'): 1}",
    'fs.Spec(mesh, P("dp"), shape=x.shape)': "str(y) == 'f32[8@dp,16]'",
    'fs.shard(x, mesh, P("dp"))': CLOSE,
    'fs.scatter(x, spec, src=0)': CLOSE,
    'fs.reshard(pair, P(None, "tp"))': f"{CLOSE} and str(y.spec) == 'f64[8,16@tp]'",
    'fs.from_local(local, mesh, P("dp"))': CLOSE,
    'fs.from_local(local, mesh, P("dp"), sizes="infer")': CLOSE,
    'fs.from_local(tuple(get(spec.index(rank)) for rank in mesh.devices), mesh, P("dp"))': CLOSE,
    'fs.zeros(spec)': "fs.unshard(y).equal(torch.zeros_like(x))",
    'fs.unshard(pair)': "y.equal(x)",
    'pair.local, pair.spec': "y[0][4].equal(x[4:]) and y[1] == spec",
    'pair.local, pair.spec.placements': "y[1] == (Shard(0), Replicate())",
    'fs.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))': "close(y(x), x.sin())",
    'fs.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check=False)':
    "close(y(x), x.sin())",
    'fs.local_map(body, in_specs=P("dp"), out_specs=P("dp"))':
    "close(fs.unshard(y(pair)), x.sin())",
    'fs.smap(body, in_axes=0, out_axes=0, axis_name="dp", mesh=mesh)': "close(y(x), x.sin())",
    'fs.partition(f, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))': "close(y(x), f(x))",
    'fs.partition(f, mesh=mesh, in_specs=P("dp"), remat=["relu"])': "close(y(x), f(x))",
    'fs.partition(lambda x: fs.constrain(x.relu(), P(None, "tp")), mesh=mesh, in_specs=P("dp"))':
    "str(y(pair).spec) == 'f64[8,16@tp]' and close(y(x), x.relu())",
    'fs.apply(torch.matmul, pair, w)': "close(fs.unshard(y), x @ w)",
    'fs.apply(torch.matmul, pair, w, mode="auto")': "close(fs.unshard(y), x @ w)",
    'torch.func.grad(loss)': "close(y(x), 3 * x**2)",
    'torch.func.grad_and_value(loss)': "close(y(x)[0], 3 * x**2) and close(y(x)[1], (x**3).sum())",
    'torch.func.vmap(f)': "close(y(x), f(x))",
    'torch.func.vjp(f, x), torch.func.jvp(f, (x,), (x,))':
    "close(y[0][1](x)[0], x * (x > 0)) and close(y[1][1], x * (x > 0))",
    'torch.func.hessian(loss)': "close(y(x[0]), (6 * x[0]).diag())",
    'torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)': "close(y, f(x))",
    'fs.random.normal(fs.random.key(0), spec)':
    "close(fs.unshard(y), fs.random.normal(fs.random.key(0), x.shape, dtype=x.dtype))",
    'fs.visualize(pair)': "str(y).startswith(str(spec))",
    'fs.register_rule(op)("bd,d->bd")': "close(fs.unshard(fs.apply(op, pair, x[0])), x * x[0])",
    'fs.comm_log()': "counts(y) == {('all_gather', 'dp'): 1}",
    'fs.partition(net, mesh=mesh, params=P(), in_specs=P("dp"))': "close(y(params, x), net(x))",
    'fs.partition(net, mesh=mesh, params=P("dp"), in_specs=P("dp"), remat="gathers")':
    "close(y(params, x), net(x))",
    'fs.state.distribute_module(net, mesh, fsdp="dp", in_specs=P("dp"))':
    "close(fs.unshard(y(y.params, y.buffers, x)[0]), net(x))",
    'fs.state.distribute_module(net, mesh, styles={"0": fs.state.colwise("tp"), '
    '"2": fs.state.rowwise("tp")})': "close(fs.unshard(y(y.params, y.buffers, x)[0]), net(x))",
    'fs.state.clip_by_global_norm(grads, 1.0)':
    "close(y[1], x.norm()) and close(fs.unshard(y[0]['w']), x / x.norm())",
    'fs.state.zero_table(pairs, "dp", fs.state.adamw(1e-3))': "len(y.stages) == 4",
    'fs.state.save(directory, pairs).wait(), fs.state.load(directory, P(), mesh=mesh)':
    "fs.unshard(y[1]['w']).equal(x)",
    'fs.domain.context_parallel(attention, "dp")': "close(attention(*[tokens] * 3),"
    " fs.shard_map(y, mesh=mesh, in_specs=q.spec, out_specs=q.spec.partition)(*[tokens] * 3))",
    'fs.domain.conv2d(image, kernel, padding=1)':
    "close(fs.unshard(y), F.conv2d(tokens, kernel, padding=1))",
    'fs.domain.halo_exchange(image, {2: (1, 1)})':
    "y.local[0].equal(F.pad(tokens, (0, 0, 1, 1))[:, :, :7])",
    'fs.domain.scaled_dot_product_attention(q, q, q, is_causal=True)':
    "close(fs.unshard(y), attention(tokens, tokens, tokens, is_causal=True))",
    'fs.domain.knn(cloud, cloud, 3)':
    "fs.unshard(y[0]).equal(torch.cdist(x, x).topk(3, largest=False).indices)",
}  # fmt: skip
BODIES = {
    'fs.psum(x, "tp")': "y.equal(X[4 * d : 4 * d + 4].view(4, 4, 4).sum(1))",
    'fs.all_gather(x, "dp", axis=0, tiled=True)': "y.equal(X[:, 4 * t : 4 * t + 4])",
    'fs.all_gather(x, "tp", tiled=True)': "y.equal(torch.cat(X[4 * d : 4 * d + 4].split(4, 1)))",
    'fs.psum_scatter(x, "dp", scatter_dimension=0, tiled=True)':
    "y.equal((X[:4] + X[4:])[2 * d : 2 * d + 2, 4 * t : 4 * t + 4])",
    'fs.psum_scatter(x, "tp", tiled=True)':
    "y.equal(X[4 * d : 4 * d + 4].view(4, 4, 4).sum(1)[t : t + 1])",
    'fs.all_to_all(x, "dp", 1, 0, tiled=True)':
    "y.equal(X[:, 4 * t + 2 * d : 4 * t + 2 * d + 2])",
    'fs.ppermute(x, "dp", [(0, 1), (1, 0)])':
    "y.equal(X.roll(4, 0)[4 * d : 4 * d + 4, 4 * t : 4 * t + 4])",
    'fs.pcast(x, "tp", to="varying")': "str(fs.typeof(y)) == 'f64[4,16]{varying: dp, tp}'",
    'fs.axis_index("dp"), fs.axis_size("dp")': "(int(y[0]), y[1]) == (d, 2)",
    'fs.typeof(x)': "str(y) == 'f64[4,4]{varying: dp, tp}'",
}  # fmt: skip


def rows(table: str) -> list[tuple[str, str]]:
    """Return the code of the first cell of each row of a table, and of its last cell."""
    cells = [line.strip("| ").rpartition(" | ") for line in TABLES[table].splitlines()[2:]]
    return [(left, right.strip("`")) for left, _, right in cells]


CODES = list(dict.fromkeys(code for table in TABLES for _, code in rows(table)))


@torch.library.custom_op("readme_names::scale", mutates_args=())
def scale(x: Tensor, by: Tensor) -> Tensor:
    return x * by


@scale.register_fake
def _(x: Tensor, by: Tensor) -> Tensor:
    return torch.empty_like(x)


def names(directory: Path) -> dict[str, Any]:
    """Return the names that the tables use, and those of the oracles."""
    torch.manual_seed(0)
    mesh, x = MESH, torch.randn(8, 16, dtype=torch.float64)
    spec = fs.Spec(mesh, P("dp"), shape=x.shape, dtype=x.dtype)
    pair, tokens = fs.shard(x, spec), torch.randn(1, 2, 10, 8, dtype=x.dtype)
    q = fs.shard(tokens, mesh, P(None, None, "dp"))
    layers = torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)
    net = torch.nn.Sequential(*layers).double()

    def counts(log: Any, run: Callable[[], object] = lambda: fs.reshard(pair, P())) -> object:
        with log as entries:
            run()
        return dict(entries.counts)

    def counts_of_mlp(name: str, partition: P) -> object:
        specs = {"0.weight": P("tp"), "0.bias": P("tp"), "2.weight": P(None, "tp"), "2.bias": P()}
        part = fs.partition(
            net, mesh=mesh, params=specs | {name: partition}, in_specs=P("dp"), out_specs=P("dp")
        )
        values = {
            name: fs.shard(value.detach(), mesh, part.params[name])
            for name, value in net.named_parameters()
        }
        return counts(fs.comm_log(), lambda: part(values, pair))

    return globals() | locals() | {
        "w": torch.randn(16, 4, dtype=x.dtype),
        "kernel": torch.randn(3, 2, 3, 3, dtype=x.dtype),
        "get": x.__getitem__, "local": pair.local, "cloud": pair, "image": q, "op": scale,
        "f": torch.relu, "body": torch.sin, "loss": lambda x: (x**3).sum(),
        "close": torch.allclose, "attention": F.scaled_dot_product_attention,
        "params": dict(net.named_parameters()), "grads": {"w": pair},
        "pairs": {"w": fs.shard(x, mesh, P())},
    }  # fmt: skip


def test_every_row_has_an_oracle() -> None:
    assert len(CODES) > 50
    assert {*CODES} == {*ORACLES} | {*BODIES}


@pytest.mark.parametrize("code", [code for code in CODES if code in ORACLES])
def test_row_has_the_values_of_its_oracle(code: str, tmp_path: Path) -> None:
    scope = names(tmp_path)
    scope["y"] = eval(code, scope)
    assert eval(ORACLES[code], scope)


@pytest.mark.parametrize("code", [code for code in CODES if code in BODIES])
def test_collective_has_the_values_of_its_oracle(code: str) -> None:
    full = torch.arange(8.0 * 16, dtype=torch.float64).view(8, 16)

    def body(x: Tensor) -> bool:
        first = int(x[0, 0])
        scope: dict[str, Any] = {"fs": fs, "torch": torch, "x": x, "X": full}
        scope |= {"d": first // 64, "t": first % 16 // 4, "y": eval(code, scope)}
        return bool(eval(BODIES[code], scope))

    partition = P("dp") if "pcast" in code else P("dp", "tp")
    assert fs.shard_map(body, mesh=MESH, in_specs=partition, out_specs=None)(full)


def test_names_of_jax_exist() -> None:
    jax = pytest.importorskip("jax")
    mentioned = re.findall(r"jax(?:\.\w+)+", TABLES["jax"])
    assert len(mentioned) > 30
    for name in mentioned:
        module, _, last = name.rpartition(".")
        found = importlib.import_module(module) if module != "jax" else jax
        assert hasattr(found, last), name
