"""CPU seconds of every question about 65,536 devices.

`python -m tests.benchmarks.bench_large_meshes` asks, on meshes of one to four axes, for plans,
costs, tables and pictures of redistributions between even and uneven layouts, and for plans,
rooflines, memory and pictures of partitioned functions. It prints the slowest answers, and how many
took over a second. Every question is asked once: nothing is cached before.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import fshard as fs
from fshard import Mesh, P, Spec

MESHES = (Mesh(x=65536), Mesh(pod=2, x=32768), Mesh(x=256, y=256), Mesh(x=16, y=64, z=64),
          Mesh(w=4, x=16, y=32, z=32))  # fmt: skip
TOPOLOGIES = None, fs.Topology.dgx_h100()
WIDTH, ROWS = 4096, 1 << 22
SHOWN = 15

Asked = tuple[str, Callable[[], object]]
"""The text of a question, and a function that answers it."""


def layouts(mesh: Mesh) -> Iterator[tuple[Spec, Spec]]:
    """Yield pairs of layouts, even and uneven, that need all kinds of communication."""
    axes, first, last = mesh.axes, mesh.axes[0], mesh.axes[-1]
    other = last if mesh.shape[last] <= 1024 and len(axes) > 1 else None
    even = Spec(mesh, P(first, other), shape=(ROWS, 1024))
    everything, back = P(tuple(axes)), P(tuple(reversed(axes)))
    yield even, even.replace(partition=P())
    yield even.replace(partition=everything), even.replace(partition=back)
    yield even.replace(partition=P(unreduced={*axes})), even.replace(partition=everything)
    yield even.replace(partition=P(unreduced={last})), even.replace(partition=P())
    uneven = Spec(mesh, everything, shape=(ROWS + 12345, 64), uneven="chunk")
    yield uneven, Spec(mesh, P(), shape=uneven.shape)
    for partition in (back, P(None, last), P(last)):
        yield uneven, Spec(mesh, partition, shape=uneven.shape, uneven="chunk")


def questions_of_programs(mesh: Mesh) -> Iterator[Asked]:
    """Yield the questions about layouts and programs between them."""
    yield "visualize mesh", partial(drawn, mesh, topology=TOPOLOGIES[1])
    for (src, dst), topology in ((pair, t) for pair in layouts(mesh) for t in TOPOLOGIES):
        name = f"{src.partition} -> {dst.partition}{', uneven' if any(src.sizes) else ''}"
        yield f"visualize {name}", partial(drawn, src)
        yield f"bound {name}", partial(fs.lower_bound, src, dst)
        plan = partial(fs.redistribute, src, dst, topology=topology)
        yield f"redistribute {name}", plan
        prog = plan()
        limit = prog.cost().peak_memory - 1
        yield f"limit {name}", partial(within, plan, max_memory=limit)
        yield f"refuse {name}", partial(within, plan, max_memory=1)
        yield f"transpose {name}", partial(transposed, prog)
        yield f"explain {name}", partial(explained, prog)
        yield f"visualize program {name}", partial(drawn, prog)


def within(question: Callable[..., object], *args: Any, **options: Any) -> object:
    """Return the answer within a limit, or the error that refuses it."""
    try:
        return question(*args, **options)
    except fs.ShardingError as error:
        return error


def transposed(prog: fs.Program) -> fs.Cost:
    """Return the cost of the transpose."""
    return prog.T.cost()


def explained(value: Any, **options: Any) -> tuple[str, object]:
    """Return the text and the HTML of `explain()`."""
    return shown(value.explain(**options))


def drawn(value: Any, **options: Any) -> tuple[str, object]:
    """Return the text and the HTML of a picture."""
    return shown(fs.visualize(value, **options))


def shown(value: Any) -> tuple[str, object]:
    """Return the text and the HTML of a value."""
    return str(value), value._repr_mimebundle_()


def step(p: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a block of two products."""
    y = x + torch.relu(x @ p["up"]) @ p["down"]
    return torch.autograd.grad(y.square().mean(), list(p.values()))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def calls(mesh: Mesh, **options: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield functions that partition and trace a block, attention and a convolution."""
    first, last, axes = mesh.axes[0], mesh.axes[-1], mesh.axes
    empty = lambda *shape: torch.empty(shape, device="meta", requires_grad=True)  # noqa: E731
    params = {"up": empty(WIDTH, 4 * WIDTH), "down": empty(4 * WIDTH, WIDTH)}
    x = torch.empty(1 << 18, WIDTH, device="meta")
    few = first if mesh.shape[first] <= WIDTH else None
    layouts_ = {"up": P(None, few), "down": P(few)}
    outs = layouts_["up"], layouts_["down"]
    sharded = fs.partition(step, mesh=mesh, params=layouts_, in_specs=P(axes), out_specs=outs,
                           **options)  # fmt: skip
    yield "training step", lambda: sharded.trace(params, x)
    q = empty(256, 16, 4096, 64)
    spec = P(first if mesh.shape[first] <= 256 else None, None,
             last if mesh.shape[last] <= 4096 else None)  # fmt: skip
    attend = fs.partition(attention, mesh=mesh, in_specs=(spec,) * 3, **options)
    yield "attention", lambda: attend.trace(q, q, q)
    image, kernel = torch.empty(4, 3, 1 << 18, 256, device="meta"), empty(8, 3, 3, 3)
    conv = fs.partition(
        lambda a, b: F.conv2d(a, b, padding=1),
        mesh=mesh,
        in_specs=(P(None, None, first), P()),
        **options,
    )
    yield "convolution", lambda: conv.trace(image, kernel)


def questions_of_steps(mesh: Mesh) -> Iterator[Asked]:
    """Yield the questions about partitioned functions."""
    for name, trace in calls(mesh):
        yield f"trace {name}", trace
        call = trace()
        for topology in TOPOLOGIES:
            yield f"explain {name}", partial(explained, call, topology=topology)
            roofline = call.roofline(topology)
            yield f"roofline {name}", partial(shown, roofline)
            yield f"visualize {name}", partial(drawn, roofline)
        yield f"memory {name}", partial(drawn, call.memory())
    for name, trace in calls(mesh, memory=10**5):
        yield f"refuse {name}", partial(within, trace)
    for (src, dst), op in itertools.product(layouts(mesh), (torch.relu, torch.add)):
        operands = (src, dst)[: 1 + (op is torch.add)]
        yield f"propagate {op.__name__} {src.partition}", partial(fs.propagate, op, *operands)


def questions(mesh: Mesh) -> Iterator[Asked]:
    """Yield all questions about a mesh."""
    yield from questions_of_programs(mesh)
    yield from questions_of_steps(mesh)


def main() -> None:
    """Print the slowest answers."""
    times = []
    fs.partition(torch.relu, mesh=Mesh(x=2), in_specs=P("x")).trace(torch.ones(2))  # imports
    for mesh in MESHES:
        for text, answer in questions(mesh):
            start = time.process_time()
            answer()
            times.append((time.process_time() - start, f"{mesh}: {text}"))
    times.sort(reverse=True)
    for seconds, text in times[:SHOWN]:
        print(f"{seconds:6.2f} s  {text}")
    slow = sum(seconds > 1 for seconds, _ in times)
    print(f"{len(times)} questions, {slow} over a second, {sum(s for s, _ in times):.0f} s in all")


if __name__ == "__main__":
    main()
