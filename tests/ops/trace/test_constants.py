"""Reads of values in partitioned functions: of constants, and refused ones of arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fshard as fs
from fshard import Mesh, P

MESH = Mesh(dp=2)


def euler(x: Tensor) -> Tensor:
    """Solve an equation on a grid whose values are checked and compared."""
    t = torch.linspace(0, 1, 5, dtype=x.dtype)
    assert (t[1:] > t[:-1]).all()
    for start, end in itertools.pairwise(t):
        if end <= t[-1]:
            x = x + (end - start) * x.sin() * float(start)
    return x


def under_gradient(x: Tensor) -> Tensor:
    step = torch.arange(3.0)[1:].sum().item()
    return torch.func.grad(lambda x: (x * step).sin().sum())(x)


def of_shapes(x: Tensor) -> Tensor:
    """Read values that depend on the shape of an argument alone, as masks of all ones do."""
    mask = torch.ones_like(x, dtype=torch.uint8)[:2]
    lengths = x.new_full((2,), 3).long().tolist()
    assert mask.all()
    return x.repeat(lengths[0]) * mask.sum().item() if mask[0] else -x


CLOSED_OVER = torch.ones(2)


def written(x: Tensor) -> Tensor:
    t = torch.zeros(2)
    t.add_(1)
    return x if t.sum() > 1 else -x


def written_by_index(x: Tensor) -> Tensor:
    t = torch.zeros(2)
    t[0] = 5.0
    return x * float(t[0])


def written_by_view(x: Tensor) -> Tensor:
    t = torch.zeros(2)
    first, flat = t[0], t.view(2)
    flat.add_(5)
    return x * first.item()


def written_by_detached(x: Tensor) -> Tensor:
    parts = torch.zeros(3).split([1, 2])
    parts[1].detach().add_(5)
    return x * parts[1].sum().item()


def read_between_writes(x: Tensor) -> Tensor:
    t = torch.tensor([0.0, 1.0, 2.0, 3.0])
    total, view = 0.0, t[1:]
    for k in range(3):
        view.mul_(float(t[k]) + 2)
        total += t.sum().item()
    return x * total


def written_by_draw(x: Tensor) -> Tensor:
    t = torch.zeros(2)
    t[1:].normal_()
    return x if t.sum() > 0 else -x


def written_by_argument(x: Tensor) -> Tensor:
    mask = torch.ones_like(x)
    mask[0] = x[0]
    return x if mask.all() else -x


def drawn(x: Tensor) -> Tensor:
    return x if torch.rand(2).sum() > 1 else -x


def of_closure(x: Tensor) -> Tensor:
    return x if (CLOSED_OVER * 2).sum() > 1 and CLOSED_OVER[0] > 0 else -x


def of_argument(x: Tensor) -> Tensor:
    return x if (torch.ones(4) * x).sum() > 1 else -x


def negatives(x: Tensor) -> Tensor:
    """Compute SimCLR's similarities without the pairs of a row with itself and its twin."""
    similarity = x @ x.T
    others = ~torch.eye(4, dtype=torch.bool)
    labels = F.one_hot(torch.arange(4) % 2)
    same = (labels @ labels.T).bool()
    rows = similarity[others].view(4, 3)
    return (
        rows.sum(1) + similarity[same & others] * similarity.masked_select(~same).view(4, 2)[:, 0]
    )


def constant_sizes(x: Tensor) -> Tensor:
    keep = torch.arange(4) != 1
    row, column = torch.where(torch.ones(4, 2).tril().bool())
    y = x.sin()
    y[keep] = y[keep, :].flip(0)
    y[:, torch.tensor([True, False, True])] += torch.unique(torch.tensor([2, 1, 2])).to(x.dtype)
    return y[row, column][: len(keep.nonzero())] + x[keep].sum() + torch.bincount(row).sum()


def padded(x: Tensor) -> Tensor:
    left, right = torch.tensor(1), torch.tensor([2, 1]).max() // 2
    return F.pad(x, (left, right)).cumsum(1)


def sized(x: Tensor) -> Tensor:
    one, two, four = (torch.ones(n).sum().long() for n in (1, 2, 4))
    y = x * 1
    y[:two, one:] = 0.5
    tall = x.repeat(two, one).view(two, four, -1).roll(one, dims=0)[one]
    images = F.interpolate(x[None, None], size=(four, two)).flatten(0, 2)
    parts = y.narrow(0, 0, two).split([one, two], one)
    return torch.zeros(four, 1) + tall + images.sum(one, keepdim=True) + sum(map(torch.sum, parts))


def repeated(x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: (x[torch.ones(4, dtype=torch.bool)] ** 2).sum())(x)


def repeated_rows(x: Tensor) -> Tensor:
    counts = torch.tensor([1, 2, 0, 3])
    rows = x.repeat_interleave(counts, dim=0) + x[torch.repeat_interleave(counts)]
    twice = x.repeat_interleave(torch.tensor(2), dim=-1).repeat_interleave(2)
    return rows.square().sum() + torch.repeat_interleave(twice, torch.tensor([3]))


@pytest.mark.parametrize("fn", [negatives, constant_sizes, padded, sized, repeated, repeated_rows])
def test_shapes_may_depend_on_constants(fn: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    part = fs.partition(fn, mesh=MESH, in_specs=P("dp"))
    torch.testing.assert_close(part(x), fn(x))
    grads = [torch.autograd.grad(f(x).sin().sum(), x)[0] for f in (part, fn)]
    torch.testing.assert_close(*grads)


def test_masks_of_arguments_are_refused() -> None:
    with pytest.raises(fs.ShardingError, match="depends on a tensor's values"):
        fs.partition(lambda x: x[x > 0], mesh=MESH)(torch.ones(4))
    with pytest.raises(fs.ShardingError, match="output_size=n"):
        fs.partition(lambda x: x.repeat_interleave(x.long(), 0), mesh=MESH)(torch.ones(4))


@pytest.mark.parametrize(
    "fn",
    [
        euler, under_gradient, of_shapes, written, written_by_index, written_by_view,
        written_by_detached, read_between_writes,
    ],
)  # fmt: skip
def test_constants_are_read(fn: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, requires_grad=True)
    part = fs.partition(fn, mesh=MESH, in_specs=P("dp"))
    torch.testing.assert_close(part(x), fn(x))
    grads = [torch.autograd.grad(f(x).sum(), x)[0] for f in (part, fn)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "fn",
    [
        written_by_argument,
        written_by_draw,
        drawn,
        of_argument,
    ],
)
def test_other_reads_are_refused(fn: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(fs.ShardingError, match="reads a tensor's values"):
        fs.partition(fn, mesh=MESH)(torch.ones(4))


def first(x: Tensor, options: dict[str, Any]) -> Tensor:
    return (x * 2)[:, : int(options["lengths"].max()) + options["more"]]


def skips(x: Tensor, options: dict[str, Any]) -> Tensor:
    return x if torch.rand([]) < 0.5 else -x


def test_values_that_are_read_are_named() -> None:
    x, lengths = torch.ones(2, 4), torch.tensor([1, 3])
    options = {"lengths": lengths, "more": 0.5}
    cases = [(first, "__int__", "args[1]['lengths']"), (skips, "__bool__", "a draw of rand")]
    for fn, read, source in cases:
        given = f"  given: {read} reads a tensor's values, which depend on {source}\n"
        with pytest.raises(fs.ShardingError) as caught:
            fs.partition(fn, mesh=MESH)(x, options)
        assert given in str(caught.value)
    part = fs.partition(lambda xs: xs[0] if sum(xs).sum() > 0 else -xs[0], mesh=MESH)
    given = r"depend on args\[0\]\[0\], args\[0\]\[1\], args\[0\]\[2\], … args\[0\]\[4\] \(5 in all"
    with pytest.raises(fs.ShardingError, match=given):
        part([*torch.ones(5, 2, 4)])


def test_values_to_read_are_closed_over_or_numbers() -> None:
    """Fixes of the error run."""
    x, lengths = torch.rand(2, 4), torch.tensor([1, 3])
    expected = first(x, {"lengths": lengths, "more": 0})
    closed_over = fs.partition(lambda x: first(x, {"lengths": lengths, "more": 0}), mesh=MESH)
    torch.testing.assert_close(closed_over(x), expected)
    part = fs.partition(lambda x, n: (x * 2)[:, :n], mesh=MESH)
    torch.testing.assert_close(part(x, int(lengths.max())), expected)


def test_values_of_closures_are_read_and_guarded() -> None:
    x = torch.arange(4.0)
    part = fs.partition(of_closure, mesh=MESH, in_specs=P("dp"))
    try:
        for value in (1, -1, 2):
            CLOSED_OVER.fill_(value)
            for _ in range(2):
                torch.testing.assert_close(part(x), of_closure(x))
    finally:
        CLOSED_OVER.fill_(1)


def test_distributions_are_traced_without_checks_of_values() -> None:
    def entropy(logits: Tensor, action: Tensor) -> Tensor:
        policy = torch.distributions.Categorical(logits=logits)
        noise = torch.distributions.Normal(logits, logits.exp())
        return policy.log_prob(action) + policy.entropy() + noise.log_prob(logits.sin()).sum(1)

    logits, action = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 2, 1, 1])
    part = fs.partition(entropy, mesh=MESH, in_specs=P("dp"))
    torch.testing.assert_close(part(logits, action), entropy(logits, action))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_gaussian_nll_loss_pass_by_its_clamp(reduction: str) -> None:
    def loss(x: Tensor, target: Tensor, var: Tensor) -> Tensor:
        y = F.gaussian_nll_loss(x, target, var.square(), full=True, eps=0.5, reduction=reduction)
        return y.sum()

    x, target, var = (torch.randn(4, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    part = fs.partition(loss, mesh=MESH, in_specs=(P("dp"), P("dp"), P("dp")))
    expected = torch.autograd.grad(loss(x, target, var), (x, target, var))
    torch.testing.assert_close(part(x, target, var), loss(x, target, var))
    actual = torch.autograd.grad(part(x, target, var), (x, target, var))
    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
def test_where_takes_conditions_of_bytes() -> None:
    def fn(x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, x, 0.0) + x.where(condition=1 - mask, other=x * 2)

    x, mask = torch.randn(4), torch.tensor([1, 0, 2, 0], dtype=torch.uint8)
    part = fs.partition(fn, mesh=MESH, in_specs=P("dp"))
    torch.testing.assert_close(part(x, mask), fn(x, mask))


def test_traces_leave_modules_as_they_are() -> None:
    """Replacing methods of `nn.Module` takes milliseconds; tracers within the function need it."""
    methods, graphs = [], []

    def fn(x: Tensor) -> Tensor:
        methods.append((torch.nn.Module.__call__, torch.nn.Module.__getattr__))
        graphs.append(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())))
        return x * 2

    before = torch.nn.Module.__call__, torch.nn.Module.__getattr__
    fs.partition(fn, mesh=fs.Mesh(x=2))(torch.ones(2))
    assert before == (torch.nn.Module.__call__, torch.nn.Module.__getattr__)
    assert all(item == before for item in methods)
    assert [node.op for node in graphs[0].graph.nodes] == ["placeholder", "call_module", "output"]


class Converting(torch.nn.Module):
    """Linear map whose module is converted in each call."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.map, self.dtype = torch.nn.Linear(4, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.map.to(x.device, self.dtype)(x.to(self.dtype))
        return result + self.map.weight.to(x.dtype).sum()


@pytest.mark.parametrize("closed", [True, False])
def test_conversions_of_modules_that_change_nothing_are_traced(closed: bool) -> None:
    def run(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return module(x) if closed else torch.func.functional_call(module, params, (x,))

    module, x = Converting(torch.float32), torch.randn(4, 4)
    params = dict(module.named_parameters())
    part = fs.partition(run, mesh=MESH, in_specs=(P(), P("dp")))
    torch.testing.assert_close(part(params, x), run(params, x))
    module.dtype = torch.float64
    with pytest.raises(fs.ShardingError, match="a Linear whose weight is converted"):
        part(params, x)
    assert params["map.weight"].dtype == torch.float32
    module.to(torch.float64)  # the fix of the error
    params = dict(module.named_parameters())
    torch.testing.assert_close(part(params, x), run(params, x))
