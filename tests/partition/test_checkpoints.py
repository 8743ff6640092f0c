"""`torch.utils.checkpoint` in and around mapped functions, partitioned functions and programs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P
from tests.helpers.spmd.checkpoint_cases import OPTIONS, differentiated, layer, results

MESH = Mesh(x=2, y=2)
ROWS = ("x", "y")
EXPECTED = differentiated(lambda x, w, v: layer(layer(x, w, v), w, v))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("form", ["single", "nested", "sequence"])
def test_checkpoints_equal_one_device(name: str, form: str) -> None:
    for key, values in results(MESH, name, form).items():
        torch.testing.assert_close(
            values, EXPECTED, rtol=0, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_dropout_has_the_same_mask(reentrant: bool) -> None:
    """The zeros of the gradient are those of the result: the generator's state is restored."""

    def body(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(lambda x: F.dropout(x, 0.5) * x, x, use_reentrant=reentrant)
        return y

    f = fs.shard_map(body, mesh=MESH, in_specs=P(ROWS), out_specs=P(ROWS), check=False)
    x = torch.rand(8, 8, dtype=torch.float64).requires_grad_()
    y = f(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert 0 < (y == 0).sum() < y.numel()
    torch.testing.assert_close(grad * x, 2 * y)
