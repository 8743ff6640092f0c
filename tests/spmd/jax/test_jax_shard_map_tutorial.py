"""JAX's `shard_map` tutorial and the transposition of its JEP 17111, by `torch.func.grad`.

The sections are those of the tutorial: collectives by their reference semantics, matrix products
with collectives and with their overlapped forms, and a network under data, fully sharded, tensor
and pipeline parallelism. Each is differentiated around the map, and compared with one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp

import fshard as fs
from fshard import Mesh, P
from tests.helpers.spmd.transform_cases import close

MESH = Mesh(i=4)
N = 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) / 2


def sample_loss(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *xs: (f(*xs) ** 2).sin().sum()


def derivatives(f: Callable[..., Tensor], *xs: Tensor) -> Any:
    """Return value, gradients, and the tangent of the gradients."""
    of_all = grad_and_value(sample_loss(f), tuple(range(len(xs))))
    gradients = lambda *xs: of_all(*xs)[0]  # noqa: E731
    return f(*xs), of_all(*xs), jvp(gradients, xs, tuple(x.cos() for x in xs))[1]


# -- collectives ----------------------------------------------------------------------------------

Blocks = list[Tensor]
COLLECTIVES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Blocks], Blocks]]] = {
    "psum": (lambda x: fs.pcast(fs.psum(x, "i"), "i", to="varying"), lambda xs: [sum(xs)] * N),  # type: ignore[list-item]
    "all_gather, tiled": (
        lambda x: fs.all_gather(x, "i", tiled=True), lambda xs: [torch.cat(xs)] * N,
    ),
    "all_gather": (lambda x: fs.all_gather(x, "i"), lambda xs: [torch.stack(xs)] * N),
    "psum_scatter, tiled": (
        lambda x: fs.psum_scatter(x, "i", tiled=True), lambda xs: [*sum(xs).chunk(N)],  # type: ignore[attr-defined]
    ),
    "ppermute": (
        lambda x: fs.ppermute(x, "i", [(j, (j + 1) % N) for j in range(N)]),
        lambda xs: xs[-1:] + xs[:-1],
    ),
    "all_to_all, tiled": (
        lambda x: fs.all_to_all(x, "i", 0, 0, tiled=True),
        lambda xs: [torch.cat([x.chunk(N)[j] for x in xs]) for j in range(N)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_have_the_derivatives_of_their_reference_semantics(name: str) -> None:
    """Between the two parts of a body, a collective is a function of all blocks."""
    collective, reference = COLLECTIVES[name]

    def body(x: Tensor) -> Tensor:
        z = x.sin()
        return collective(z) * z.sum() + x.mean()

    def dense(x: Tensor) -> Tensor:
        xs = [*x.chunk(N)]
        zs = [x.sin() for x in xs]
        blocks = zip(xs, zs, reference(zs), strict=True)
        return torch.cat([u * z.sum() + x.mean() for x, z, u in blocks])

    mapped = fs.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    x = normal(16, 2)
    close(derivatives(mapped, x), derivatives(dense, x))


# -- matrix products ------------------------------------------------------------------------------


def gathered(a: Tensor, b: Tensor) -> Tensor:
    return fs.all_gather(a, "i", tiled=True) @ b


def overlapped_gather(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a block while the next one is on its way around the ring."""
    index, parts = fs.axis_index("i"), [a @ b]
    for _ in range(N - 1):
        a = fs.ppermute(a, "i", [(j, (j - 1) % N) for j in range(N)])
        parts.append(a @ b)
    order = (torch.arange(N) - index) % N
    return torch.stack(parts)[order].flatten(0, 1)


def overlapped_both_ways(a: Tensor, b: Tensor) -> Tensor:
    """Send half of a block in either direction of the ring."""
    index = fs.axis_index("i")
    up, down = a.chunk(2)
    ups, downs = [up @ b], [down @ b]
    for _ in range(N - 1):
        up = fs.ppermute(up, "i", [(j, (j + 1) % N) for j in range(N)])
        down = fs.ppermute(down, "i", [(j, (j - 1) % N) for j in range(N)])
        ups.append(up @ b)
        downs.append(down @ b)
    first = torch.stack(ups)[(index - torch.arange(N)) % N]
    second = torch.stack(downs)[(torch.arange(N) - index) % N]
    return torch.cat([first, second], 1).flatten(0, 1)


def scattered(a: Tensor, b: Tensor) -> Tensor:
    return fs.psum_scatter(a @ b, "i", tiled=True)


def overlapped_scatter(a: Tensor, b: Tensor) -> Tensor:
    """Add up a block of the result on its way around the ring."""
    index = fs.axis_index("i")

    def block(step: int) -> Tensor:
        parts = torch.stack(a.chunk(N))
        return parts[(index + step) % N] @ b

    total = block(N - 1)
    for step in range(1, N):
        total = fs.ppermute(total, "i", [(j, (j + 1) % N) for j in range(N)])
        total = total + block(N - 1 - step)
    return total


PRODUCTS = {
    gathered: (P("i"), P(None, "i"), P(None, "i")),
    overlapped_gather: (P("i"), P(None, "i"), P(None, "i")),
    overlapped_both_ways: (P("i"), P(None, "i"), P(None, "i")),
    scattered: (P(None, "i"), P("i"), P("i")),
    overlapped_scatter: (P(None, "i"), P("i"), P("i")),
}


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.__name__)
def test_products_and_their_overlapped_forms(product: Callable[..., Tensor]) -> None:
    *in_specs, out_specs = PRODUCTS[product]
    mapped = fs.shard_map(product, mesh=MESH, in_specs=tuple(in_specs), out_specs=out_specs)
    a, b = normal(8, 8), normal(8, 4, seed=1)
    close(derivatives(mapped, a, b), derivatives(torch.matmul, a, b))


def test_first_example_of_the_tutorial() -> None:
    mapped = fs.shard_map(
        lambda a, b: fs.psum(a @ b, "y"), mesh=Mesh(x=4, y=2),
        in_specs=(P("x", "y"), P("y")), out_specs=P("x"),
    )  # fmt: skip
    a, b = normal(8, 16), normal(16, 4, seed=1)
    close(derivatives(mapped, a, b), derivatives(torch.matmul, a, b))


# -- networks -------------------------------------------------------------------------------------

Layers = list[tuple[Tensor, Tensor]]
LAYERS = [(normal(8, 8, seed=i), normal(8, seed=10 + i)) for i in range(3)]
BATCH = normal(8, 8, seed=20), normal(8, 8, seed=21)
Batch = tuple[Tensor, Tensor]
GRID = Mesh(batch=2, feats=2)


def network(layers: Layers, x: Tensor, layer: Callable[..., Tensor]) -> Tensor:
    for w, b in layers[:-1]:
        x = torch.relu(layer(x, w, b))
    return layer(x, *layers[-1])


def dense_loss(layers: Layers, batch: Batch) -> Tensor:
    x, y = batch
    return (network(layers, x, lambda x, w, b: x @ w + b) - y).square().sum(1).mean()


def data_parallel(layers: Layers, batch: Batch) -> Tensor:
    return fs.pmean(dense_loss(fs.pcast(layers, "batch", to="varying"), batch), "batch")


def fully_sharded(layers: Layers, batch: Batch) -> Tensor:
    """Gather the parameters of each layer where it is used; gradients are scattered."""

    def layer(x: Tensor, *parameters: Tensor) -> Tensor:
        w, b = (fs.all_gather(p, "batch", tiled=True) for p in parameters)
        return x @ w + b

    x, y = batch
    return fs.pmean((network(layers, x, layer) - y).square().sum(1).mean(), "batch")


def tensor_parallel(layers: Layers, batch: Batch) -> Tensor:
    """Scatter the sum of each product over the features."""

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return fs.psum_scatter(x @ w, "feats", scatter_dimension=1, tiled=True) + b

    x, y = batch
    return fs.psum((network(layers, x, layer) - y).square().sum(1).mean(), "feats")


def both(layers: Layers, batch: Batch) -> Tensor:
    """Shard parameters over both axes, and gather them over the batch axis."""

    def layer(x: Tensor, *parameters: Tensor) -> Tensor:
        w, b = (fs.all_gather(p, "batch", tiled=True) for p in parameters)
        return fs.psum_scatter(x @ w, "feats", scatter_dimension=1, tiled=True) + b

    x, y = batch
    loss = (network(layers, x, layer) - y).square().sum(1).mean()
    return fs.pmean(fs.psum(loss, "feats"), "batch")


Specs = tuple[Mesh, list[tuple[P, P]], P]
NETWORKS: dict[Callable[[Layers, Batch], Tensor], Specs] = {
    data_parallel: (Mesh(batch=4), [(P(), P())] * 3, P("batch")),
    fully_sharded: (Mesh(batch=4), [(P("batch"), P("batch"))] * 3, P("batch")),
    tensor_parallel: (Mesh(feats=4), [(P("feats"), P("feats"))] * 3, P(None, "feats")),
    both: (GRID, [(P(("feats", "batch")), P(("feats", "batch")))] * 3, P("batch", "feats")),
}


@pytest.mark.parametrize("loss", NETWORKS, ids=lambda loss: loss.__name__)
def test_gradients_of_parallel_networks(loss: Callable[..., Tensor]) -> None:
    mesh, layer_specs, batch = NETWORKS[loss]
    mapped = fs.shard_map(loss, mesh=mesh, in_specs=(layer_specs, (batch, batch)), out_specs=P())
    close(grad_and_value(mapped)(LAYERS, BATCH), grad_and_value(dense_loss)(LAYERS, BATCH))
    hessian_row = lambda f: jvp(lambda layers: grad(f)(layers, BATCH), (LAYERS,), (LAYERS,))[1]  # noqa: E731
    close(hessian_row(mapped), hessian_row(dense_loss))


def test_gradients_of_a_pipeline() -> None:
    """Each rank has a layer; micro-batches move along the ranks, one step at a time."""
    stages, micro_batches = 4, 3

    def body(w: Tensor, x: Tensor) -> Tensor:
        index, state = fs.axis_index("i"), fs.pcast(torch.zeros_like(x[0]), "i", to="varying")
        outputs = []
        for step in range(micro_batches + stages - 1):
            entering = x[min(step, micro_batches - 1)]
            state = torch.tanh(torch.where(index == 0, entering, state) @ w[0])
            outputs.append(torch.where(index == stages - 1, state, 0.0))
            state = fs.ppermute(state, "i", [(j, j + 1) for j in range(stages - 1)])
        return fs.psum(torch.stack(outputs[stages - 1 :]), "i")

    def dense(w: Tensor, x: Tensor) -> Tensor:
        for layer in w:
            x = torch.tanh(x @ layer)
        return x

    mapped = fs.shard_map(body, mesh=MESH, in_specs=(P("i"), P()), out_specs=P())
    w, x = normal(stages, 4, 4), normal(micro_batches, 2, 4, seed=1)
    close(derivatives(mapped, w, x), derivatives(dense, w, x))


# -- JEP 17111: efficient transposition -----------------------------------------------------------


@pytest.mark.parametrize("check", [True, False])
def test_transposing_twice_adds_no_collectives(check: bool) -> None:
    """The transpose of psum is a cast: derivatives of any order have as many sums as values."""
    mapped = fs.shard_map(
        lambda x: fs.psum(x**3, "i"), mesh=MESH, in_specs=P("i"), out_specs=P(), check=check
    )
    x = normal(8)
    first = grad(lambda x: mapped(x).sin().sum())
    with fs.comm_log() as log:
        mapped(x)
    forward = log.counts["all_reduce", "i"]
    with fs.comm_log() as log:
        first(x)
    assert log.counts["all_reduce", "i"] == forward
    dense = lambda x: (x.reshape(4, 2) ** 3).sum(0)  # noqa: E731
    close(derivatives(mapped, x), derivatives(dense, x))


def test_gradient_in_the_body_is_that_around_it() -> None:
    """A mapped function that takes a gradient agrees with the gradient of a mapped function."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return fs.psum((x @ fs.pcast(w, "i", to="varying")).sin().sum(), "i")

    specs = (P(), P("i"))
    inside = fs.shard_map(grad(loss), mesh=MESH, in_specs=specs, out_specs=P())
    around = grad(fs.shard_map(loss, mesh=MESH, in_specs=specs, out_specs=P()))
    w, x = normal(3), normal(8, 3, seed=1)
    expected = grad(lambda w: (x @ w).sin().sum())(w)
    close((inside(w, x), around(w, x)), (expected, expected))
