"""Gradients and transforms within a partitioned function, up to training steps.

The oracle is the same function on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P
from tests.helpers.ops import blocks
from tests.helpers.ops.block_cases import BLOCKS, BYTES, MESH, collectives_of, sample
from tests.helpers.ops.training_steps import in_place_step, layer_params, loss

Params = blocks.Params


def functional(p: Params, x: Tensor) -> Any:
    """Return the parameters after a step."""
    grads, value = torch.func.grad_and_value(loss)(p, x)
    return {name: p[name] - 0.1 * grads[name] for name in p}, value


def by_data(p: Params, x: Tensor) -> Any:
    value = loss(p, x)
    for item, g in zip(p.values(), torch.autograd.grad(value, list(p.values())), strict=True):
        item.data.add_(g, alpha=-0.1)
    return value.detach()


def by_backward(p: Params, x: Tensor) -> Any:
    q = {name: item.detach().requires_grad_() for name, item in p.items()}
    loss(q, x).backward()
    return [item.grad for item in q.values()]


def per_sample(p: Params, x: Tensor) -> Any:
    grads = torch.vmap(torch.func.grad(loss), (None, 0))(p, x[:, None])
    return {name: item.square().sum((1, 2)) for name, item in grads.items()}


def curvature(p: Params, x: Tensor) -> Any:
    _, product = torch.func.jvp(torch.func.grad(lambda x: loss(p, x)), (x,), (torch.ones_like(x),))
    return product


def hessian(p: Params, x: Tensor) -> Any:
    return torch.func.hessian(lambda b: loss({**p, "b": b}, x[:1]))(p["b"])


def recomputed(p: Params, x: Tensor) -> Any:
    def inner(a: Tensor) -> Tensor:
        h: Tensor = checkpoint(lambda a: (x @ a).tanh(), a, use_reentrant=False)
        return h.sum()

    a = p["a"].detach().requires_grad_()
    return torch.autograd.grad(inner(a), a)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


def custom(p: Params, x: Tensor) -> Any:
    y = x.detach().requires_grad_()
    return torch.autograd.grad(Straight.apply(y @ p["a"]).square().sum(), y)[0]


STEPS = [
    functional, in_place_step, by_data, by_backward, per_sample, curvature, hessian, recomputed,
    custom,
]  # fmt: skip
LAYOUTS = [
    ({"a": P(None, "tp"), "b": P("tp")}, P("dp")),
    ({"a": P("dp"), "b": P("dp")}, P("dp")),
    ({"a": P(), "b": P("tp", "dp")}, P(None, "tp")),
]


@pytest.mark.parametrize("fn", STEPS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["tensor", "fsdp", "mixed"])
def test_inner_gradients_equal_one_device(fn: Callable[..., Any], layout: Any) -> None:
    params, specs = layout
    p, q = layer_params(), layer_params()
    if fn in (in_place_step, by_data):
        p, q = ({k: v.requires_grad_() for k, v in item.items()} for item in (p, q))
    x = sample(4, 4).detach()
    part = fs.partition(fn, mesh=MESH, params=params, in_specs=(specs,))
    torch.testing.assert_close(part(p, x), fn(q, x))
    torch.testing.assert_close(p, q)


# -- gradients of gradients, and untracked values ----------------------------------------------


def penalty(p: Params, x: Tensor) -> Tensor:
    """Return a gradient norm, as of WGAN-GP, or the residual of a differential equation."""
    if not x.requires_grad:
        x = x.detach().requires_grad_()
    value = (x @ p["a"]).sin() @ p["b"]
    (g,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    return g.square().sum() + value.mean()


def saved(p: Params, x: Tensor) -> Tensor:
    """Differentiate operations that save their results, and a detached tensor."""
    x = x.detach().requires_grad_()
    value = torch.tanh(x @ p["a"]).exp() @ p["b"]
    value = value.softmax(-1) * value.detach().sigmoid()
    (g,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    return g.square().sum()


def saved_by_checkpoint(p: Params, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    value = checkpoint(lambda a: torch.tanh(x @ a).exp(), p["a"], use_reentrant=False)
    grads = torch.autograd.grad(value.square().sum(), (x, p["a"]), create_graph=True)
    return sum(g.square().sum() for g in grads) * (x @ p["b"].T).sum()


def untracked(p: Params, x: Tensor) -> Tensor:
    """Use a gradient without a graph, and values under no_grad, as constants."""
    value = ((x @ p["a"]).sin() @ p["b"]).sum()
    (g,) = torch.autograd.grad(value, p["a"], retain_graph=True)
    with torch.no_grad():
        scale = (x @ p["a"]).amax() + 1
    return value * g.sum() / scale


def untracked_by_backward(p: Params, x: Tensor) -> Tensor:
    """Use a retained `.grad`, which has no graph either."""
    hidden = x @ p["a"]
    hidden.retain_grad()
    (hidden.sin() @ p["b"]).sum().backward(inputs=[hidden])
    assert hidden.grad is not None
    return (x.sin() @ p["a"]) * hidden.grad @ p["b"]


def meta_learning(p: Params, x: Tensor) -> Tensor:
    grads = torch.func.grad(loss)(p, x)
    return loss({name: p[name] - 0.1 * grads[name] for name in p}, x)


def mapped(p: Params, x: Tensor) -> Tensor:
    with torch.no_grad():
        shift = x.mean()
    return torch.vmap(lambda row: (row @ p["a"]).softmax(0) @ p["b"] - shift)(x)


@pytest.mark.parametrize(
    "fn",
    [
        penalty, saved, saved_by_checkpoint, untracked, untracked_by_backward, meta_learning,
        mapped,
    ],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS, ids=["tensor", "fsdp", "mixed"])
def test_inner_gradients_are_differentiated_again(fn: Callable[..., Tensor], layout: Any) -> None:
    params, specs = layout
    p = {name: x.requires_grad_() for name, x in layer_params().items()}
    x = sample(4, 4)
    part = fs.partition(fn, mesh=MESH, params=params, in_specs=(specs,))
    actual, expected = part(p, x), fn(p, x)
    torch.testing.assert_close(actual, expected)
    leaves = [*p.values(), x]
    grads = (
        torch.autograd.grad(y.sum(), leaves, materialize_grads=True) for y in (actual, expected)
    )
    for g, expected_grad in zip(*grads, strict=True):
        torch.testing.assert_close(g, expected_grad)


def test_writes_under_no_grad_pass_no_gradients() -> None:
    """Averages of parameters, as of an EMA, that a training step writes are constants."""

    def step(p: Params, average: Tensor, x: Tensor) -> Any:
        torch.autograd.grad(loss(p, x), list(p.values()))
        with torch.no_grad():
            average.lerp_(p["a"], 0.1)
            torch._foreach_add_([average], [p["a"]])
            torch.add(average, p["a"], out=average)
            average[0] = p["a"][1]
        return average.clone(), average * p["b"].sum()

    p = {name: x.detach().requires_grad_() for name, x in layer_params().items()}
    part = fs.partition(step, mesh=MESH, params=P(), in_specs=(P(), P("dp")))
    x, average = sample(4, 4).detach(), torch.ones_like(p["a"]).detach()
    actual, expected = part(p, average.clone(), x), step(p, average.clone(), x)
    assert not actual[0].requires_grad
    torch.testing.assert_close(actual[0], expected[0])
    grads = [
        torch.autograd.grad(y.sum(), list(p.values()), materialize_grads=True)
        for _, y in (actual, expected)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("on_lists", [False, True])
def test_gradients_are_written_with_values_that_have_gradients(on_lists: bool) -> None:
    """Weight decay is added to a gradient where gradients are tracked."""

    def step(p: Params, x: Tensor) -> Tensor:
        grads = torch.autograd.grad(loss(p, x), list(p.values()))
        if on_lists:
            torch._foreach_add_(grads, list(p.values()), alpha=0.1)
        for w, g in zip(p.values(), grads, strict=True):
            if not on_lists:
                g.add_(w, alpha=0.1)
            with torch.no_grad():
                w.sub_(0.1 * g)
        return sum(g.sin().sum() for g in grads)

    p = {name: x.detach().requires_grad_() for name, x in layer_params().items()}
    one = {name: x.detach().clone().requires_grad_() for name, x in p.items()}
    part = fs.partition(step, mesh=MESH, params=P(), in_specs=P("dp"))
    x = sample(4, 4).detach()
    actual, expected = part(p, x), step(one, x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(p, one)
    torch.testing.assert_close(
        *(torch.autograd.grad(y, list(q.values())) for y, q in ((actual, p), (expected, one)))
    )


# -- training steps of whole blocks ---------------------------------------------------------


def step_of(fn: Callable[[Params, Tensor], Tensor]) -> Callable[..., Any]:
    def step(p: Params, x: Tensor) -> Any:
        grads, value = torch.func.grad_and_value(lambda p: fn(p, x).sin().sum())(p)
        return {name: p[name] - 0.1 * grads[name] for name in p}, value

    return step


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_training_steps_of_recurrent_layers(kind: Callable[..., torch.nn.Module]) -> None:
    """Below autograd, RNN cells write views that their schema declares as new tensors."""
    net = kind(4, 6, batch_first=True).double()
    p = {name: item.detach() for name, item in net.named_parameters()}
    step = step_of(lambda p, x: torch.func.functional_call(net, p, (x,))[0])
    part = fs.partition(step, mesh=MESH, params=P("tp"), in_specs=(P("dp"),))
    x = sample(4, 3, 4).detach()
    torch.testing.assert_close(part(p, x), step(p, x))


@pytest.mark.parametrize(("name", "pairs"), [("gpt", 2), ("llama", 2), ("vit", 2), ("resnet", 1)])
def test_training_steps_have_megatron_collectives(name: str, pairs: int) -> None:
    fn, params, asked, shape = BLOCKS[name]
    p = {key: item.detach() for key, item in params().items()}
    specs = {key: asked.get(key, P()) for key in p}
    step = step_of(fn)
    part = fs.partition(step, mesh=MESH, params=specs, in_specs=(P("dp"),),
                        out_specs=(specs, P()))  # fmt: skip
    x = sample(*shape).detach()
    torch.testing.assert_close(part(p, x), step(p, x), rtol=1e-10, atol=1e-11)
    forward, _ = collectives_of(part.trace(p, x))
    # The first convolution's input needs no gradient; norms before a layer have parameters.
    inner = 2 * pairs - (name == "resnet")
    assert forward == {("AllReduce", ("tp",)): inner, ("AllReduce", ("dp",)): len(p) + 1}


@pytest.mark.parametrize(("name", "twice"), [("gpt", 6), ("llama", 7), ("vit", 4), ("resnet", 2)])
def test_training_steps_have_fsdp_collectives(name: str, twice: int) -> None:
    fn, params, _, shape = BLOCKS[name]
    p, mesh = {key: item.detach() for key, item in params().items()}, Mesh(dp=2)
    step = step_of(fn)
    specs = {key: P("dp") for key in p}
    part = fs.partition(step, mesh=mesh, params=specs, in_specs=(P("dp"),),
                        out_specs=(specs, P()), topology=BYTES)  # fmt: skip
    x = sample(64, *shape[1:]).detach()
    torch.testing.assert_close(part(p, x), step(p, x), rtol=1e-10, atol=1e-11)
    forward, _ = collectives_of(part.trace(p, x))
    # A weight that the backward pass needs is gathered for it again, as FSDP2 does.
    assert forward == {
        ("AllGather", ("dp",)): len(p) + twice, ("ReduceScatter", ("dp",)): len(p),
        ("AllReduce", ("dp",)): 1,
    }  # fmt: skip


# -- closed-over tensors, and calls that cannot be traced -----------------------------------------

CLOSED_OVER = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)


def constant_gradient(x: Tensor) -> Tensor:
    """Use a gradient without a graph of a closed-over tensor as a constant."""
    g = torch.autograd.grad((x @ CLOSED_OVER).sin().sum(), CLOSED_OVER)[0]
    return x @ CLOSED_OVER + x @ g


def beside_a_gradient(x: Tensor) -> Tensor:
    g = torch.func.grad(lambda x: x.sin().sum())(x)
    with torch.no_grad():
        scale = (x @ CLOSED_OVER).amax()
    return (x @ CLOSED_OVER) * scale + g


def reads_requires_grad(x: Tensor) -> Tensor:
    return x @ CLOSED_OVER * 2 if x.requires_grad else x @ CLOSED_OVER


@pytest.mark.parametrize("fn", [constant_gradient, beside_a_gradient, reads_requires_grad])
@pytest.mark.parametrize("tracked", [True, False])
def test_closed_over_tensors_have_gradients(fn: Callable[[Tensor], Tensor], tracked: bool) -> None:
    x = sample(4, 4).detach().requires_grad_(tracked)
    actual, expected = fs.partition(fn, mesh=MESH, in_specs=P("dp"))(x), fn(x)
    torch.testing.assert_close(actual, expected)
    leaves = [CLOSED_OVER, x] if tracked else [CLOSED_OVER]
    grads, expected_grads = (torch.autograd.grad(y.sin().sum(), leaves) for y in (actual, expected))
    torch.testing.assert_close(grads, expected_grads)


def fills_closed_over(x: Tensor) -> Tensor:
    value = (x @ CLOSED_OVER).sum()
    value.backward()
    return value.detach()


def fills_an_argument(x: Tensor) -> Tensor:
    value = (x * 2).sum()
    torch.autograd.backward(value)
    return value.detach()


def sets_grad(x: Tensor) -> Tensor:
    value = (x * 2).square().sum()
    (x.grad,) = torch.autograd.grad(value, x, create_graph=True)
    return value


def test_gradients_with_graphs_are_written_to_arguments() -> None:
    def fn(w: Tensor, x: Tensor, buffers: dict[str, Tensor]) -> Tensor:
        value = (w * x).square().sum()
        buffers["grad"].copy_(torch.autograd.grad(value, w, create_graph=True)[0].sin())
        return value

    w, x = sample(4, 4), sample(4, 4).detach()
    part = fs.partition(fn, mesh=MESH, in_specs=(P(), P("dp"), P()))
    results = []
    for f in (part, fn):
        buffers = {"grad": torch.zeros_like(x)}
        value = f(w, x, buffers)
        results.append([value, torch.autograd.grad(value, w)[0], buffers["grad"].detach()])
    torch.testing.assert_close(*results)


HOOKED = torch.nn.Linear(4, 4).double()
HOOKED.register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))


def hooked(x: Tensor) -> Tensor:
    out: Tensor = HOOKED(x)
    return out


def hooked_tensor(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda g: g * 3)
    return y


def other_data(x: Tensor) -> Tensor:
    y = x * 1
    y.data = y.data * 3
    return y


@pytest.mark.parametrize(
    ("fn", "refused"),
    [
        (fills_closed_over, "backward() fills .grad of a tensor that the function closes over"),
        (fills_an_argument, "backward() or an assignment fills .grad of argument 0"),
        (sets_grad, "backward() or an assignment fills .grad of argument 0"),
        (hooked, "a module with backward hooks"),
        (hooked_tensor, "x.register_hook(...), with gradients"),
        (other_data, "an assignment to `x.data`, which cannot be traced"),
    ],
)
def test_untraceable_calls_are_refused(fn: Callable[[Tensor], Tensor], refused: str) -> None:
    part = fs.partition(fn, mesh=MESH, in_specs=P("dp"))
    with pytest.raises(fs.ShardingError) as caught:
        part(sample(4, 4))
    text = str(caught.value).splitlines()
    assert text[0].startswith(f"fs.partition({fn.__name__})")
    assert text[1] == f"  given: {refused}"
    assert CLOSED_OVER.grad is None


def leaf_view(w: Tensor, x: Tensor) -> Tensor:
    """Require the gradient of a view of data, as speech models do for gradient checkpoints."""
    rows = x[:, None]
    rows.requires_grad = True
    return (rows @ w).sin().sum()


def test_view_that_requires_grad_is_traced() -> None:
    """Autograd holds the mutex of such a view while it asks the traced tensor for its device."""
    w, x = sample(4, 4), sample(4, 4).detach()
    part = fs.partition(leaf_view, mesh=MESH, in_specs=(P(), P("dp")))
    grads = [torch.autograd.grad(fn(w, x), w)[0] for fn in (part, leaf_view)]
    torch.testing.assert_close(*grads)


def own_norm(x: Tensor) -> Tensor:
    """Normalize by modules that are created within, whose parameters are values of the trace."""
    return torch.nn.BatchNorm1d(4, dtype=x.dtype)(x) + torch.nn.LayerNorm(4, dtype=x.dtype)(x)


def own_norm_step(x: Tensor) -> Tensor:
    norm = torch.nn.LayerNorm(4, dtype=x.dtype)
    (grad,) = torch.autograd.grad(norm(x).sin().sum(), norm.weight, create_graph=True)
    return x * grad


def drawn_layer(key: Tensor, x: Tensor) -> Tensor:
    with fs.random.keyed(key):
        return torch.nn.Linear(4, 4, dtype=x.dtype)(x)


@pytest.mark.parametrize("fn", [own_norm, own_norm_step], ids=lambda fn: fn.__name__)
def test_modules_are_created_within(fn: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    actual, expected = fs.partition(fn, mesh=MESH, in_specs=P("dp"))(x), fn(x)
    torch.testing.assert_close(actual, expected)
    grads, right = (torch.autograd.grad(y.sin().sum(), x) for y in (actual, expected))
    torch.testing.assert_close(grads, right)


def test_parameters_drawn_within_need_a_key() -> None:
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    part = fs.partition(lambda x: torch.nn.Linear(4, 4, dtype=x.dtype)(x), mesh=MESH)
    with pytest.raises(fs.ShardingError, match=r"draws must be keyed(.|\n)*fs\.random\.keyed\(key"):
        part(x)
    key = fs.random.key(0)
    part = fs.partition(drawn_layer, mesh=MESH, in_specs=(P(), P("dp")))  # the fix
    torch.testing.assert_close(part(key, x), drawn_layer(key, x))


def test_train_and_eval_of_a_module_are_noticed() -> None:
    module = torch.nn.BatchNorm1d(4).double()
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    part = fs.partition(module, mesh=MESH, params=P(), in_specs=(P("dp"),))
    x = sample(4, 4).detach()
    with torch.no_grad():
        part(state, x)
        module.eval()
        mean = state["running_mean"].clone()
        torch.testing.assert_close(part(state, x), module(x))
        torch.testing.assert_close(state["running_mean"], mean)


def test_default_dtype_is_noticed() -> None:
    part = fs.partition(lambda x: x + torch.ones(3), mesh=MESH)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert part(torch.ones(4, 3, dtype=torch.float32)).dtype == dtype
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("takes_gradients", [False, True])
def test_inference_blocks_have_no_history(takes_gradients: bool) -> None:
    def fn(a: Tensor, b: Tensor) -> list[Tensor]:
        if takes_gradients:
            a = a + torch.autograd.grad((b * b).sum(), b, create_graph=True)[0]
        with torch.inference_mode():
            first, without = (a + b).sin(), torch.inference_mode(mode=False)
            with without:
                within = a * b
                with torch.no_grad():
                    inner = a * 3
            with torch.enable_grad():
                last = b * 5
        decorated = torch.inference_mode()(torch.cos)(a)
        return [first, within, inner, last, decorated, a + b]

    a, b = sample(4, 3), sample(4, 3)
    results = fs.partition(fn, mesh=MESH, in_specs=(P("dp"), P("dp")))(a, b)
    expected = fn(a, b)
    tracked = [y.requires_grad for y in expected]
    assert tracked == [False, True, False, False, False, True]
    assert [y.requires_grad for y in results] == tracked
    torch.testing.assert_close([y.detach() for y in results], [y.clone() for y in expected],
                               check_device=False)  # fmt: skip
    grads = [torch.autograd.grad(ys[1].sum() + ys[5].sum(), (a, b)) for ys in (results, expected)]
    torch.testing.assert_close(*grads)
    assert torch.ones(2, requires_grad=True).sin().requires_grad


def test_inference_block_that_raises_ends() -> None:
    def fn(a: Tensor) -> Tensor:
        try:
            with torch.inference_mode():
                raise ValueError
        except ValueError:
            return a * 2

    assert fs.partition(fn, mesh=MESH)(sample(4, 3)).requires_grad


def test_a_pruned_weight_is_updated_through_its_data() -> None:
    mask = torch.ones(4, 3, dtype=torch.float64).triu()

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        loss = (x @ w).square().mean()
        (g,) = torch.autograd.grad(loss, w)
        w.data -= 0.1 * g
        w.data *= mask
        return loss.detach()

    x = torch.randn(6, 4, dtype=torch.float64)
    ws = [torch.ones(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    part = fs.partition(step, mesh=fs.Mesh(dp=2), in_specs=(P("dp"), P("dp")))
    for _ in range(2):
        torch.testing.assert_close(part(ws[0], x), step(ws[1], x))
        torch.testing.assert_close(*ws)


# -- x.requires_grad ------------------------------------------------------------------------------


def reads_requires_grad(rows: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Sum rows, times a number with one digit for each tensor that requires grad."""
    y, z = rows["a"] * 2, rows["b"] * 3
    with torch.no_grad():
        under_no_grad = z * 2
    read = (y, z, y + z, (y + z).detach(), z.long(), under_no_grad, x, x * CLOSED)
    digits = sum(10**i * int(tensor.requires_grad) for i, tensor in enumerate(read))
    return x.sum() * digits + y.sum() + z.sum()


CLOSED = torch.ones(2, requires_grad=True)


@pytest.mark.parametrize("tracked", ["", "a", "b", "ab"])
def test_requires_grad_is_that_of_one_device(tracked: str) -> None:
    """One argument's gradient does not make another's `requires_grad` true."""
    rows = {key: torch.ones(2, requires_grad=key in tracked) for key in "ab"}
    part = fs.partition(reads_requires_grad, mesh=fs.Mesh(x=2), in_specs=P())
    assert part(rows, torch.ones(2)) == reads_requires_grad(rows, torch.ones(2))


def test_hessian_of_a_product_with_a_vector() -> None:
    """Forward mode makes zeros in the place of the tangent of the matrix."""

    def of_vector(x: Tensor, w: Tensor) -> Any:
        return torch.func.hessian(lambda w: (x @ w).sin().sum())(w)

    x, w = torch.randn(2, 4, 4, dtype=torch.float64).requires_grad_()
    part = fs.partition(of_vector, mesh=fs.Mesh(x=2), in_specs=(P("x"), P("x")))
    torch.testing.assert_close(part(x, w[0]), of_vector(x, w[0]))
