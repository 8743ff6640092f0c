"""Graph networks of torch_geometric; nodes and edges are sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fshard import P
from tests.partition.models.model_checks import Model
from tests.partition.models.zoo import MODELS, noise

NODES, EDGES = 12, 24
EDGE_SPECS = {"edge_index": P(None, "dp")}


def edges() -> Tensor:
    """Return the sources and targets of random edges, `(2, EDGES)`."""
    return torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(3))


def graph(**rest: Tensor) -> dict[str, Any]:
    return {"x": noise(NODES, 8), "edge_index": edges(), **rest}


def batch() -> Tensor:
    return torch.arange(NODES) // 3


def graph_model(
    name: str, inputs: Callable[[], dict[str, Any]], *args: Any, **options: Any
) -> Model:
    """Return a model of torch_geometric."""
    import torch_geometric.nn as pyg

    module = getattr(pyg, name)(*args, **options)
    return Model(module, inputs(), specs=EDGE_SPECS)


def with_weights() -> dict[str, Any]:
    return graph(edge_weight=noise(EDGES).abs())


def with_features() -> dict[str, Any]:
    return graph(edge_attr=noise(EDGES, 4))


def typed() -> dict[str, Any]:
    return graph(edge_type=torch.arange(EDGES) % 3)


for name, inputs, args, options in (
    ("GCN", with_weights, (8, 16, 2, 4), {"dropout": 0.5}),
    ("GAT", graph, (8, 16, 2, 4), {"heads": 4}),
    ("GraphSAGE", graph, (8, 16, 2, 4), {"norm": "BatchNorm"}),
    ("GIN", graph, (8, 16, 2, 4), {"jk": "cat"}),
    (
        "PNA",
        graph,
        (8, 16, 2, 4),
        {
            "aggregators": ["mean", "min", "max", "std"],
            "scalers": ["identity", "amplification", "attenuation"],
            "deg": torch.tensor([1, 3, 5, 2, 1]),
        },
    ),
    ("EdgeCNN", graph, (8, 16, 2, 4), {}),
    ("TransformerConv", with_features, (8, 4), {"heads": 4, "edge_dim": 4}),
    ("GATv2Conv", with_features, (8, 4), {"heads": 4, "edge_dim": 4}),
    ("NNConv", with_features, (8, 4), {"nn": nn.Linear(4, 32)}),
    ("RGCNConv", typed, (8, 16, 3), {}),
    ("ChebConv", with_weights, (8, 16, 3), {}),
    ("ARMAConv", with_weights, (8, 16), {}),
    ("TAGConv", with_weights, (8, 16), {}),
    ("GatedGraphConv", with_weights, (16, 2), {}),
    ("APPNP", with_weights, (3, 0.1), {}),
    ("GCN2Conv", lambda: {**with_weights(), "x_0": noise(NODES, 8)}, (8, 0.1), {}),
    ("LightGCN", lambda: {"edge_index": edges()}, (NODES, 8, 2), {}),
    ("DenseGCNConv", lambda: {"x": noise(4, 6, 8), "adj": noise(4, 6, 6).abs()}, (8, 16), {}),
):
    MODELS[f"pyg_{name}"] = partial(graph_model, name, inputs, *args, **options)


def pyg_gps() -> Model:
    import torch_geometric.nn as pyg

    class GPS(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            conv = pyg.GINConv(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
            self.inp, self.conv = nn.Linear(8, 16), pyg.GPSConv(16, conv, heads=4)
            self.pool, self.out = pyg.global_mean_pool, nn.Linear(16, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return self.out(self.pool(self.conv(self.inp(x), edge_index), batch(), 4))

    return Model(GPS(), graph(), specs=EDGE_SPECS)


MODELS["pyg_GPS"] = pyg_gps
