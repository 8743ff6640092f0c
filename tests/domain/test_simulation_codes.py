"""Steps of simulation and point-cloud codes for one device, over uneven shards of space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard import Mesh, P, Spec

F64 = torch.float64
LINE, GRID = Mesh(h=3), Mesh(x=2, y=2)
Tensors = list[torch.Tensor]


def rand(*shape: int) -> torch.Tensor:
    values: torch.Tensor = fs.random.normal(fs.random.key(sum(shape)), shape, dtype=F64)
    return values


def fourier_layer(
    x: torch.Tensor, real: torch.Tensor, imaginary: torch.Tensor, lift: torch.Tensor
) -> torch.Tensor:
    """Return a Fourier layer whose transform is over the dims that are not sharded."""
    lifted = torch.einsum("bcxyz,cd->bdxyz", x, lift)
    spectrum = torch.fft.rfftn(lifted, dim=(-2, -1))
    modes = torch.zeros_like(spectrum)
    weight = torch.complex(real, imaginary)
    modes[..., :4, :3] = torch.einsum("bixyz,ioyz->boxyz", spectrum[..., :4, :3], weight)
    return F.gelu(torch.fft.irfftn(modes, s=lifted.shape[-2:], dim=(-2, -1)) + lifted)


def message_passing(
    nodes: torch.Tensor, edges: torch.Tensor, edge_weight: torch.Tensor, node_weight: torch.Tensor,
    sources: torch.Tensor, targets: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the nodes after a step of a MeshGraphNet."""
    rows = torch.cat([edges, nodes[sources], nodes[targets]], 1)
    messages = edges + torch.tanh(rows @ edge_weight)
    received = torch.zeros_like(nodes).index_add(0, targets, messages)
    return nodes + torch.tanh(torch.cat([nodes, received], 1) @ node_weight)


def diffusion(u: torch.Tensor) -> torch.Tensor:
    """Return a field after explicit steps of the heat equation, zero at the boundary."""
    inner = slice(1, -1)
    for _ in range(2):
        p = F.pad(u, (1,) * 6)
        sides = (p[2:, inner, inner], p[:-2, inner, inner], p[inner, 2:, inner],
                 p[inner, :-2, inner], p[inner, inner, 2:], p[inner, inner, :-2])  # fmt: skip
        u = u + 0.1 * (torch.stack(sides).sum(0) - 6 * u)
    return u


def weno(u: torch.Tensor) -> torch.Tensor:
    """Return a periodic field after a step of advection by a fifth-order WENO scheme."""
    a, b, c, d, e = (torch.roll(u, -k, 0) for k in range(-2, 3))
    smoothness = (
        13 / 12 * (a - 2 * b + c) ** 2 + 0.25 * (a - 4 * b + 3 * c) ** 2,
        13 / 12 * (b - 2 * c + d) ** 2 + 0.25 * (b - d) ** 2,
        13 / 12 * (c - 2 * d + e) ** 2 + 0.25 * (3 * c - 4 * d + e) ** 2,
    )
    weights = [k / (1e-6 + s) ** 2 for k, s in zip((0.1, 0.6, 0.3), smoothness, strict=True)]
    fluxes = (2 * a - 7 * b + 11 * c) / 6, (-b + 5 * c + 2 * d) / 6, (2 * c + 5 * d - e) / 6
    total = weights[0] + weights[1] + weights[2]
    parts = [w / total * f for w, f in zip(weights, fluxes, strict=True)]
    flux = parts[0] + parts[1] + parts[2]
    return u - 0.1 * (flux - torch.roll(flux, 1, 0))


def navier_stokes(vorticity: torch.Tensor) -> torch.Tensor:
    """Return a periodic vorticity after a pseudo-spectral step, dealiased by the 2/3 rule."""
    n, m = vorticity.shape
    ky = torch.fft.fftfreq(n, 1 / n, dtype=F64)[:, None]
    kx = torch.fft.rfftfreq(m, 1 / m, dtype=F64)
    square = kx**2 + ky**2
    spectrum = torch.fft.rfft2(vorticity)
    stream = spectrum / square.clamp(min=1)
    waves = (1j * ky * stream, -1j * kx * stream, 1j * kx * spectrum, 1j * ky * spectrum)
    u, v, along, across = (torch.fft.irfft2(wave, s=(n, m)) for wave in waves)
    flux = torch.fft.rfft2(u * along + v * across) * ((kx < m / 3) & (ky.abs() < n / 3))
    return torch.fft.irfft2((spectrum - 0.01 * flux) / (1 + 1e-4 * square), s=(n, m))


DIRECTIONS = ((0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1))


def lattice_boltzmann(f: torch.Tensor) -> torch.Tensor:
    """Return the populations of a D2Q9 lattice after a collision and a streaming step."""
    weight = f.new_tensor([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4)[:, None, None]
    speeds = [f.new_tensor(c)[:, None, None] for c in zip(*DIRECTIONS, strict=True)]
    density = f.sum(0)
    ux, uy = ((f * c).sum(0) / density for c in speeds)
    along = speeds[0] * ux + speeds[1] * uy
    equilibrium = weight * density * (1 + 3 * along + 4.5 * along**2 - 1.5 * (ux**2 + uy**2))
    f = f + 0.6 * (equilibrium - f)
    return torch.stack([torch.roll(f[i], d, (0, 1)) for i, d in enumerate(DIRECTIONS)])


def edge_convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the features of a layer of DGCNN, over the three nearest points."""
    neighbours = x[torch.cdist(x, x).topk(3, largest=False).indices]
    edges = torch.cat([neighbours - x[:, None], x[:, None].expand_as(neighbours)], -1)
    return torch.relu(edges @ weight).amax(1)


def convolutional_lstm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the hidden states of an LSTM whose gates are convolutions (arXiv 1506.04214)."""
    hidden = cell = torch.zeros(2, 3, *x.shape[-2:], dtype=x.dtype)
    states = []
    for frame in x.unbind(1):
        gates = F.conv2d(torch.cat([frame, hidden], 1), weight, bias, padding=(2, 1))
        i, f, o, g = torch.split(gates, 3, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        states.append(hidden)
    return torch.stack(states, 1)


def cellular_automaton(x: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the cells after steps of a growing automaton (Mordvintsev et al., Distill, 2020).

    Cells perceive their neighbors by Sobel filters, some of them drawn at random change, and those
    without a living neighbor die. Channels are last.
    """
    sobel = torch.outer(torch.tensor([1.0, 2, 1]), torch.tensor([-1.0, 0, 1])).to(x.dtype) / 8
    filters = torch.stack([sobel, sobel.mT]).repeat(x.shape[-1], 1, 1).unsqueeze(1)

    def alive(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(x[:, 3:4], 3, 1, 1) > 0.1

    with fs.random.keyed(fs.random.key(1)):
        for _ in range(2):
            planes = x.transpose(1, 3)
            before = alive(planes)
            slopes = F.conv2d(planes, filters, padding=1, groups=x.shape[-1]).transpose(1, 3)
            change = torch.relu(F.linear(torch.cat([x, slopes], -1), first)) @ last
            planes = (x + change * (torch.rand(*x.shape[:-1], 1) > 0.5)).transpose(1, 3)
            x = (planes * (before & alive(planes))).transpose(1, 3)
    return x


def indices(n: int, *shape: int) -> torch.Tensor:
    return rand(*shape).mul(100).long().remainder(n)


Case = tuple[Callable[..., torch.Tensor], Mesh, Tensors, list[Any], set[str] | None]
"""Function, mesh, arguments, the partition and sizes of those that are sharded, collectives."""
EDGES = P("h"), {0: (6, 0, 8)}
CASES: dict[str, Case] = {
    "Fourier layer": (
        fourier_layer, LINE,
        [rand(1, 2, 7, 8, 6), rand(3, 3, 4, 3), rand(3, 4, 3, 3).transpose(1, 2), rand(2, 3)],
        [(P(None, None, "h"), {2: (4, 1, 2)}), None, None, None], set(),
    ),
    "MeshGraphNet, edges sharded": (
        message_passing, LINE,
        [rand(9, 4), rand(14, 4), rand(12, 4), rand(8, 4), indices(9, 14), indices(9, 1, 14)[0]],
        [None, EDGES, None, None, EDGES, EDGES], {"all_reduce"},
    ),
    "MeshGraphNet, nodes and edges sharded": (
        message_passing, LINE,
        [rand(9, 4), rand(14, 4), rand(12, 4), rand(8, 4), indices(9, 14), indices(9, 1, 14)[0]],
        [(P("h"), {0: (4, 3, 2)}), EDGES, None, None, EDGES, EDGES],
        {"all_gather", "all_reduce", "reduce_scatter"},
    ),
    "diffusion": (diffusion, GRID, [rand(7, 6, 5)], [(P("x", "y"), {0: (5, 2), 1: (1, 5)})], None),
    "WENO": (weno, LINE, [rand(11, 3)], [(P("h"), {0: (5, 2, 4)})], {"halo_exchange"}),
    "Navier-Stokes": (
        navier_stokes, GRID, [rand(9, 8)], [(P("x", "y"), {0: (7, 2), 1: (3, 5)})],
        {"all_to_all", "exchange"},
    ),
    "lattice Boltzmann": (
        lattice_boltzmann, GRID, [1 + 0.1 * rand(9, 7, 6)],
        [(P(None, "x", "y"), {1: (5, 2), 2: (2, 4)})], {"halo_exchange"},
    ),
    "convolutional LSTM": (
        convolutional_lstm, LINE, [rand(2, 2, 2, 7, 6), rand(12, 5, 5, 3), rand(12)],
        [(P(None, None, None, "h"), {3: (1, 5, 1)}), None, None],
        {"halo_exchange", "halo_reduce", "all_reduce"},
    ),
    "cellular automaton": (
        cellular_automaton, LINE, [rand(1, 9, 4, 5), rand(6, 15), rand(6, 5)],
        [(P(None, "h"), {1: (3, 0, 6)}), None, None],
        {"halo_exchange", "halo_reduce", "all_reduce"},
    ),
    "DGCNN": (
        edge_convolution, LINE, [rand(10, 3), rand(6, 5)], [(P("h"), {0: (4, 0, 6)}), None],
        {"all_gather", "all_reduce", "reduce_scatter"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_step_and_gradients_equal_one_device(name: str) -> None:
    function, mesh, arguments, layouts, collectives = CASES[name]

    def step(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = function(*xs)
        differentiated = [x for x in xs if x.is_floating_point()]
        return (y, *torch.autograd.grad(y.square().sum(), differentiated))

    specs = [
        Spec(mesh, P(), shape=x.shape, dtype=x.dtype) if layout is None
        else Spec(mesh, layout[0], shape=x.shape, dtype=x.dtype, sizes=layout[1])
        for x, layout in zip(arguments, layouts, strict=True)
    ]  # fmt: skip
    xs = [x.clone().requires_grad_(x.is_floating_point()) for x in arguments]
    part = fs.partition(step, mesh=mesh, in_specs=tuple(specs))
    with fs.comm_log() as log:
        out = part(*map(fs.shard, xs, specs))
    actual = tuple(map(fs.unshard, out))
    torch.testing.assert_close(actual, step(*xs), rtol=1e-10, atol=1e-10)
    if collectives is not None:
        assert {kind for kind, _ in log.counts} <= collectives


def test_edge_convolution_with_nearest_neighbours_of_a_ring() -> None:
    x, weight = rand(10, 3).requires_grad_(), rand(6, 5)
    spec = Spec(LINE, P("h"), shape=x.shape, dtype=F64, sizes={0: (4, 0, 6)})
    points = fs.shard(x, spec)

    def features(x: torch.Tensor, nearest: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        edges = torch.cat([x[nearest] - x[:, None], x[:, None].expand(-1, 3, -1)], -1)
        return torch.relu(edges @ weight).amax(1)

    y = fs.unshard(
        fs.apply(features, points, fs.domain.knn(points, points, 3)[0], weight, mode="auto")
    )
    expected = edge_convolution(x, weight)
    grads = [torch.autograd.grad(z.square().sum(), x)[0] for z in (y, expected)]
    torch.testing.assert_close((y, grads[0]), (expected, grads[1]), rtol=1e-10, atol=1e-10)
