"""Differences between ranks that types do not see: a simulation compares values and gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError
from fshard.spmd.types import UNSEEN

MESH = Mesh(x=2)
Body = Callable[[torch.Tensor], torch.Tensor]
COUNTER: list[int] = []


def from_text(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(str(x[0]).removeprefix("tensor(").removesuffix(")")))


def from_format(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(f"{x[0]:.3f}"))


def caught_error(x: torch.Tensor) -> torch.Tensor:
    try:
        torch.linalg.cholesky((2.0 - x[0]) * torch.eye(2))
    except RuntimeError:
        return torch.tensor(3.0)
    return torch.tensor(1.0)


def other_thread(x: torch.Tensor) -> torch.Tensor:
    values: list[float] = []
    thread = threading.Thread(target=lambda: values.append(float(x[0])))
    thread.start()
    thread.join()
    return torch.tensor(values[0])


def tensor_hook(x: torch.Tensor) -> torch.Tensor:
    values: list[float] = []
    leaf = x.clone().requires_grad_()
    leaf.register_hook(lambda g: values.append(float(x[0])))
    leaf.sum().backward()
    return torch.tensor(values[0])


def container(x: torch.Tensor) -> torch.Tensor:
    COUNTER.append(2 * len(COUNTER) + 1)
    return torch.tensor(float(COUNTER[-1]))


BODIES: list[Body] = [
    from_text, from_format, caught_error, other_thread, tensor_hook, container,
]  # fmt: skip


def mapped(body: Callable[..., Any], **options: Any) -> Any:
    return fs.shard_map(body, mesh=MESH, **{"in_specs": P("x"), "out_specs": P(), **options})


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_unseen_differences_of_results_are_refused(body: Body) -> None:
    COUNTER.clear()
    with pytest.raises(ShardingError) as error:
        mapped(body)(torch.tensor([1.0, 3.0]))
    assert str(error.value).splitlines() == [
        f"shard_map({body.__name__})",
        "  given: result: element () is 1.0 on rank 0 and 3.0 on rank 1",
        f"  rule:  along x, which the spec omits, values must be equal; {UNSEEN}",
        "  fix:   fs.psum or fs.pbroadcast over x, or name it in the spec",
    ]
    COUNTER.clear()
    y = mapped(lambda x: body(x)[None], out_specs=P("x"))(torch.tensor([1.0, 3.0]))
    assert y.tolist() == [1.0, 3.0]


UNUSED = f"a branch may use it on some ranks alone; else {UNSEEN}"
CHOICE = "torch.where(condition, a, b) in the place of a branch"


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_unseen_differences_of_gradients_are_refused(body: Body) -> None:
    """Cast at its return, the product sums cotangents before the factor, which differs."""
    COUNTER.clear()
    w, x = torch.ones(1, requires_grad=True), torch.tensor([1.0, 3.0])
    options: dict[str, Any] = {"in_specs": (P(), P("x")), "out_specs": P("x")}
    y = mapped(lambda w, x: w * body(x), **options)(w, x)
    with pytest.raises(ShardingError) as error:
        torch.autograd.grad(y.sum(), w)
    library = str(Path(fs.__file__).parent)
    assert not any(str(entry.path).startswith(library) for entry in error.traceback)
    assert str(error.value).splitlines()[1:] == [
        "  given: w: gradients that differ on ranks 0 and 1",
        f"  rule:  along x, which the spec omits, a gradient must be equal: {UNUSED}",
        f"  fix:   {CHOICE}; else fs.pcast(w, 'x', to='varying') before its use",
    ]
    COUNTER.clear()
    y = mapped(lambda w, x: fs.pcast(w, "x", to="varying") * body(x), **options)(w, x)
    assert torch.autograd.grad(y.sum(), w)[0].tolist() == [4.0]


def test_rounding_and_nan_are_not_differences() -> None:
    ranks: list[int] = []

    def body(x: torch.Tensor) -> Any:
        ranks.append(0)
        noise = torch.tensor(1 + 1e-12 * len(ranks), dtype=torch.float64)
        return noise, noise * torch.nan, torch.zeros(0)

    values = mapped(body)(torch.ones(2))
    assert values[0] == pytest.approx(1)


DTYPES = torch.int64, torch.bool, torch.float8_e5m2, torch.complex64, torch.complex32


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES)
def test_differences_of_any_dtype_are_found(dtype: torch.dtype) -> None:
    ranks: list[int] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        ranks.append(0)
        return torch.tensor([0, len(ranks) - 1]).to(dtype)

    with pytest.raises(ShardingError, match=r"result: element \(1,\) is .* on rank 0 and "):
        mapped(body)(torch.ones(2))
    assert mapped(body, check=False)(torch.ones(2)).shape == (2,)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2])
def test_equal_values_of_any_dtype_pass(dtype: torch.dtype) -> None:
    values = torch.ones(4 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    for value in (values, values[:0]):
        y = mapped(lambda x, value=value: value)(torch.ones(2))
        assert torch.equal(y.view(torch.uint8), value.view(torch.uint8))


def test_meta_results_are_not_compared() -> None:
    y = mapped(lambda x: fs.psum(x, "x"))(torch.ones(2, device="meta"))
    assert y.shape == (1,)


@pytest.mark.parametrize("check", [True, False])
def test_compared_gradients_may_be_batched(check: bool) -> None:
    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fs.psum((fs.pcast(w, "x", to="varying") * x).sum(), "x") * w.sum()

    options: dict[str, Any] = {"in_specs": (P(), P("x")), "check": check}
    w, x = torch.ones(1, requires_grad=True), torch.tensor([1.0, 3.0])
    y = mapped(body, **options)(w, x)
    (g,) = torch.autograd.grad(y, w, torch.tensor([1.0, 2.0]), is_grads_batched=True)
    assert g.tolist() == [[8.0], [16.0]]
