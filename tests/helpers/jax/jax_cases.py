"""Mapped functions whose results `jax_expected.json` has, by the behaviour that they show.

The behaviours are those of JAX's own tests of `shard_map`; the bodies are written against a
world, as `jax_bodies.py` describes.
"""

from __future__ import annotations

from typing import Any

import torch

from fshard import Mesh, P
from tests.helpers.jax.jax_bodies import Case, ramp

__all__ = ["CASES"]

I4, I2 = Mesh(i=4), Mesh(i=2)
XY = Mesh(x=2, y=2)
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
HALVES = [[0, 1], [2, 3]]
PARITY = [[0, 2], [1, 3]]


def reductions() -> list[Case]:
    x4, x8, m = ramp(4), ramp(8), ramp(4, 4)

    def case(name: str, mesh: Mesh, ins: Any, outs: Any, *args: Any, **options: Any) -> Case:
        return Case(name, mesh, ins, outs, args[:-1], args[-1], **options)

    both = P(("x", "y"))
    return [
        case("psum", I4, P("i"), P(), x8, lambda w, x: w.psum(x, "i")),
        case("psum, sharded again", I4, P("i"), P("i"), x4,
             lambda w, x: w.pcast(w.psum(x, "i"), "i", to="varying")),
        case("psum, sharded again uncast", I4, P("i"), P("i"), x4, lambda w, x: w.psum(x, "i"),
             casts=False),
        case("psum of an invariant value", I4, P(), P(), x4, lambda w, x: w.psum(x, "i"),
             casts=False),
        case("psum twice", I4, P("i"), P(), x4, lambda w, x: w.psum(w.psum(x, "i"), "i"),
             casts=False),
        case("psum over x of (x, y)", XY, both, P("y"), x8, lambda w, x: w.psum(x, "x")),
        case("psum over (x, y)", XY, both, P(), x8, lambda w, x: w.psum(x, ("x", "y"))),
        case("psum over (y, x)", XY, both, P(), x8, lambda w, x: w.psum(x, ("y", "x"))),
        case("psum over x, then y", XY, both, P(), x8, lambda w, x: w.psum(w.psum(x, "x"), "y")),
        case("psum of a product", I4, (P("i"), P("i")), P(), ramp(4, start=1), x4,
             lambda w, a, b: w.psum(a * b, "i")),
        case("psum of numbers", I4, P("i"), P("i"), x4,
             lambda w, x: x * w.psum(1, "i") + w.psum(2.5, "i")),
        case("pmean", I4, P("i"), P(), x8, lambda w, x: w.pmean(x, "i")),
        case("pmean over (y, x)", XY, both, P(), x8, lambda w, x: w.pmean(x, ("y", "x"))),
        case("pmax", I4, P("i"), P(), -x8, lambda w, x: w.pmax(x, "i"), grad=False),
        case("pmin over y", XY, both, P("x"), -x8, lambda w, x: w.pmin(x, "y"), grad=False),
        case("pmax over (y, x)", XY, both, P(), x8 % 5, lambda w, x: w.pmax(x, ("y", "x")),
             grad=False),
        case("psum in groups", I4, P("i"), P("i"), x8,
             lambda w, x: w.psum(x, "i", axis_index_groups=PARITY), vma=False, grad=False),
        case("pmax in groups", I4, P("i"), P("i"), x8,
             lambda w, x: w.pmax(x, "i", axis_index_groups=PARITY), vma=False, grad=False),
        *(
            case(f"psum_scatter({dim}, tiled={tiled})", I4, P("i"), P(*outs), ramp(*shape),
                 lambda w, x, d=dim, t=tiled: w.psum_scatter(
                     x, "i", scatter_dimension=d, tiled=t))
            for dim, tiled, shape, outs in (
                (0, True, (16, 2), ("i",)), (1, True, (8, 4), (None, "i")),
                (0, False, (16, 2), ("i",)), (1, False, (8, 4), ("i",)),
            )
        ),
        case("psum_scatter over (x, y)", XY, both, both, ramp(16),
             lambda w, x: w.psum_scatter(x, ("x", "y"), tiled=True)),
        case("psum_scatter over (y, x)", XY, both, both, ramp(16),
             lambda w, x: w.psum_scatter(x, ("y", "x"), tiled=True)),
        case("psum_scatter over y", XY, P("x", "y"), P(("x", "y")), m,
             lambda w, x: w.psum_scatter(x, "y", tiled=True)),
        case("psum_scatter in groups", I4, P(None, "i"), P(None, "i"), m,
             lambda w, x: w.psum_scatter(x, "i", axis_index_groups=PARITY, tiled=True)),
        case("a matmul, scattered", XY, (P("x", "y"), P("y")), P(("x", "y")), m, m,
             lambda w, a, b: w.psum_scatter(a @ w.pcast(b, "x", to="varying"), "y", tiled=True)),
        case("a matmul, scattered, uncast", XY, (P("x", "y"), P("y")), P(("x", "y")), m, m,
             lambda w, a, b: w.psum_scatter(a @ b, "y", tiled=True), casts=False),
    ]  # fmt: skip


def gathers() -> list[Case]:
    m, both = ramp(4, 4), P(("x", "y"))

    def gather(name: str, mesh: Mesh, ins: P, outs: P, x: torch.Tensor, ax: Any, **o: Any) -> Case:
        return Case(name, mesh, ins, outs, (x,), lambda w, v: w.all_gather(v, ax, **o))

    return [
        gather("all_gather", I4, P("i"), P("i"), ramp(8), "i"),
        gather("all_gather(1)", I4, P("i"), P("i"), ramp(8), "i", axis=1),
        gather("all_gather(tiled)", I4, P("i"), P("i"), ramp(4, 2), "i", tiled=True),
        gather("all_gather(-1, tiled)", I4, P("i"), P("i"), ramp(4, 2), "i", axis=-1, tiled=True),
        gather("all_gather to invariant", I4, P("i"), P(), ramp(8), "i", tiled=True,
               to="invariant"),
        gather("all_gather to invariant, stacked", I4, P("i"), P(), ramp(8), "i", axis=1,
               to="invariant"),
        gather("all_gather over (x, y)", XY, both, P(), ramp(8), ("x", "y"), tiled=True,
               to="invariant"),
        gather("all_gather over (y, x)", XY, both, P(), ramp(8), ("y", "x"), tiled=True,
               to="invariant"),
        gather("all_gather over y of 2 dims", XY, P("x", "y"), P("x"), m, "y", axis=1, tiled=True,
               to="invariant"),
        gather("all_gather over x of 2 dims", XY, P("x", "y"), P(None, "y"), m, "x", tiled=True,
               to="invariant"),
        gather("all_gather over (y, x) of 2 dims", XY, P("x", "y"), P(("x", "y")), m, ("y", "x"),
               axis=-1, tiled=True),
        gather("all_gather in groups", I4, P("i"), P("i"), ramp(8), "i", axis_index_groups=PARITY,
               tiled=True),
        Case("all_gather to reduced", I4, P("i"), P("i"), (ramp(4),),
             lambda w, x: w.pcast(w.all_gather(x, "i", tiled=True, to="reduced"), "i",
                                  src="reduced", to="varying") * (1 + w.axis_index("i"))),
        Case("all_gather to reduced, uncast", I4, P("i"), P("i"), (ramp(4),),
             lambda w, x: w.all_gather(x, "i", tiled=True, to="reduced")
             * (1 + w.axis_index("i")), casts=False),
        Case("FSDP", I4, (P("i"), P("i")), P("i"), (ramp(8, 4), ramp(4, 2)),
             lambda w, x, p: x @ w.all_gather(p, "i", tiled=True)),
        Case("all_gather of an invariant value", I2, P(), P("i"), (ramp(2),),
             lambda w, x: w.all_gather(x, "i") * (1 + w.axis_index("i")), casts=False),
    ]  # fmt: skip


def exchanges() -> list[Case]:
    m, both = ramp(4, 4), P(("x", "y"))
    sharded = {"all_to_all(1, 0, tiled)": ((1, 0, True), P("i"), P(None, "i"), (4, 4)),
           "all_to_all(0, 1, tiled)": ((0, 1, True), P(None, "i"), P("i"), (4, 4)),
           "all_to_all(1, 1, tiled)": ((1, 1, True), P("i"), P(None, "i"), (4, 4)),
           "all_to_all(0, 0)": ((0, 0, False), P("i"), P("i"), (16, 1)),
           "all_to_all(1, 0)": ((1, 0, False), P("i"), P("i"), (8, 4)),
           "all_to_all(0, 1)": ((0, 1, False), P("i"), P("i"), (16, 2))}  # fmt: skip
    return [
        *(
            Case(name, I4, ins, outs, (ramp(*shape),),
                 lambda w, x, s=split, c=concat, t=tiled: w.all_to_all(x, "i", s, c, tiled=t),
                 # The transpose of JAX 0.10 fails where the dims differ.
                 grad=tiled or split == concat)
            for name, ((split, concat, tiled), ins, outs, shape) in sharded.items()
        ),
        Case("all_to_all over (x, y)", XY, both, P(None, ("x", "y")), (m,),
             lambda w, x: w.all_to_all(x, ("x", "y"), 1, 1, tiled=True)),
        Case("all_to_all over (y, x)", XY, both, P(None, ("x", "y")), (m,),
             lambda w, x: w.all_to_all(x, ("y", "x"), 1, 0, tiled=True)),
        Case("all_to_all in groups", I4, P("i"), P(None, "i"), (m,),
             lambda w, x: w.all_to_all(x, "i", 1, 0, axis_index_groups=HALVES, tiled=True)),
        Case("pswapaxes", I4, P("i"), P("i"), (m,), lambda w, x: w.pswapaxes(x, "i", 1)),
        Case("ppermute", I4, P("i"), P("i"), (ramp(8),), lambda w, x: w.ppermute(x, "i", RING)),
        Case("ppermute with gaps", I4, P("i"), P("i"), (ramp(8, start=1),),
             lambda w, x: w.ppermute(x, "i", [(0, 3), (2, 1)])),
        Case("ppermute to nobody", I4, P("i"), P("i"), (ramp(8, start=1),),
             lambda w, x: w.ppermute(x, "i", [])),
        Case("ppermute over (x, y)", XY, both, both, (ramp(8),),
             lambda w, x: w.ppermute(x, ("x", "y"), RING)),
        Case("ppermute over y", XY, both, both, (ramp(8),),
             lambda w, x: w.ppermute(x, "y", [(0, 1), (1, 0)])),
        Case("pshuffle", I4, P("i"), P("i"), (ramp(8),),
             lambda w, x: w.pshuffle(x, "i", [2, 0, 3, 1])),
        Case("a ring of sums", I4, P("i"), P("i"), (ramp(8),),
             lambda w, x: x + 2 * w.ppermute(x + w.ppermute(x, "i", RING), "i", RING)),
        Case("places", XY, P("x", "y"), P(("x", "y")), (m,),
             lambda w, x: x[0] * w.axis_index(("x", "y")) + w.axis_index(("y", "x"))
             + 10 * w.axis_index("y") + 100 * w.axis_size(("x", "y"))),
    ]  # fmt: skip


def states() -> list[Case]:
    """Return bodies with casts, and with reduced and unreduced values."""

    def place(w: Any) -> Any:
        return 1 + w.axis_index("i")

    return [
        Case("cast to varying", I4, P(), P("i"), (ramp(2),),
             lambda w, x: w.pcast(x, "i", to="varying")),
        Case("fan out uncast", I4, P(), P("i"), (ramp(2),), lambda w, x: x, casts=False),
        Case("identity", I4, P(), P(), (ramp(3),), lambda w, x: x),
        Case("cast to reduced", I4, P(), P("i"), (ramp(2),),
             lambda w, x: w.pcast(w.pcast(x, "i", to="reduced"), "i", src="reduced", to="varying")
             * place(w)),
        Case("reduced meets varying", I4, (P(), P("i")), P(), (ramp(2), ramp(8)),
             lambda w, a, b: w.psum(w.pcast(a, "i", to="reduced") * b, "i"), casts=False),
        Case("addends summed", I4, P("i"), P(), (ramp(8),),
             lambda w, x: w.psum(w.pcast(x, "i", to="unreduced"), "i")),
        Case("addends scattered", I4, P("i"), P("i"), (ramp(16),),
             lambda w, x: w.psum_scatter(w.pcast(x, "i", to="unreduced"), "i", tiled=True)),
        Case("addends of addends", I4, (P("i"), P("i")), P(), (ramp(4), ramp(4, start=3)),
             lambda w, a, b: w.psum(w.pcast(a, "i", to="unreduced")
                                    + w.pcast(b * b, "i", to="unreduced"), "i")),
        Case("addends times reduced", I4, (P("i"), P()), P(), (ramp(8), ramp(2, start=2)),
             lambda w, a, b: w.psum(w.pcast(a, "i", to="unreduced")
                                    * w.pcast(b, "i", to="reduced"), "i")),
        Case("sum of addends", I4, P("i"), P(), (ramp(8),),
             lambda w, x: w.psum(w.pcast(x, "i", to="unreduced").sum(), "i")),
        Case("reduced to reduced", I4, (P(), P("i")), P(), (ramp(2), ramp(8)),
             lambda w, a, b: w.psum(
                 w.pcast(w.pcast(a, "i", to="reduced") * w.pcast(a, "i", to="reduced"), "i",
                         src="reduced", to="varying") * b, "i")),
    ]  # fmt: skip


def boundary() -> list[Case]:
    """Return bodies with reduced and unreduced arguments and results."""
    addends, reduced, sharded = P(unreduced={"i"}), P(reduced={"i"}), P("i")
    matmul = (P("i"), P(None, None, reduced={"i"}))

    def varying(w: Any, x: Any, axes: Any = "i") -> Any:
        return w.pcast(x, axes, src="reduced", to="varying")

    return [
        Case("gathered, reduced out", I4, sharded, reduced, (ramp(8),),
             lambda w, x: w.all_gather(x, "i", tiled=True, to="reduced")),
        Case("cast, reduced out", I4, P(), reduced, (ramp(4),),
             lambda w, x: w.pcast(x, "i", to="reduced")),
        Case("reduced in, varying out", I4, reduced, sharded, (ramp(3),), varying),
        Case("reduced through", I4, reduced, reduced, (ramp(4),), lambda w, x: x * x),
        Case("reduced, reshaped", I4, reduced, reduced, (ramp(4),), lambda w, x: x.reshape(2, 2)),
        Case("reduced, summed", I4, reduced, reduced, (ramp(4),), lambda w, x: (x * x).sum()),
        Case("reduced, transposed", I4, (P(reduced={"i"}), P(None, "i")), P(None, "i"),
             (ramp(2, 3), ramp(2, 4)), lambda w, x, y: varying(w, x.T) @ y),
        Case("reduced meets sharded", I4, matmul, sharded, (ramp(8, 2), ramp(2, 3)),
             lambda w, x, y: x @ varying(w, y)),
        Case("reduced meets sharded, uncast", I4, matmul, sharded, (ramp(8, 2), ramp(2, 3)),
             lambda w, x, y: x @ y, casts=False),
        Case("reduced plus sharded", I4, (sharded, reduced), P(), (ramp(8), ramp(2)),
             lambda w, x, y: w.psum((x + varying(w, y)) ** 2, "i")),
        Case("reduced along x, sharded along y", XY, (P("x", "y"), P("y", None, reduced={"x"})),
             P("x"), (ramp(4, 2), ramp(2, 3)),
             lambda w, x, y: w.psum(x @ varying(w, y, "x"), "y")),
        Case("gathered along y, summed along x", XY, P("x", "y"), P(reduced={"y"}), (ramp(2, 4),),
             lambda w, x: w.psum(w.all_gather(x, "y", axis=1, tiled=True, to="reduced").sum(),
                                 "x")),
        Case("unreduced out", I4, sharded, addends, (ramp(8),),
             lambda w, x: w.pcast(x, "i", to="unreduced")),
        Case("unreduced in, scattered", I4, addends, sharded, (ramp(8),),
             lambda w, x: w.psum_scatter(x, "i", tiled=True)),
        Case("unreduced in, summed", I4, addends, P(), (ramp(4),), lambda w, x: w.psum(x, "i")),
        Case("unreduced through, reduced factor", I4, (addends, reduced), addends,
             (ramp(4), ramp(4, start=1)), lambda w, x, y: (x * y).sum()),
        Case("a matmul of addends", XY, (P("x", "y"), P("y")), P("x", None, unreduced={"y"}),
             (ramp(2, 4), ramp(4, 2)),
             lambda w, a, b: w.pcast(a @ w.pcast(b, "x", to="varying"), "y", to="unreduced")),
    ]  # fmt: skip


def gradients() -> list[Case]:
    """Return bodies that take gradients."""
    x4, w6 = ramp(4), ramp(2, start=1)

    def inner(name: str, ins: Any, outs: Any, *args: Any, **options: Any) -> Case:
        return Case(f"inner: {name}", I4, ins, outs, args[:-1], args[-1], **options)

    both = (P(), P("i"))
    return [
        inner("psum of squares", P("i"), P("i"), x4,
              lambda w, x: w.grad(lambda v: w.psum((v**2).sum(), "i"))(x)[0]),
        inner("squares", P("i"), P("i"), x4, lambda w, x: w.grad(lambda v: (v**2).sum())(x)[0]),
        inner("invariant weight", both, P(), w6, ramp(8),
              lambda w, a, x: w.grad(lambda v: (v * x).sum())(a)[0], casts=False),
        inner("invariant weight, cast inside", both, P(), w6, ramp(8),
              lambda w, a, x: w.grad(lambda v: (w.pcast(v, "i", to="varying") * x).sum())(a)[0]),
        inner("pmean of an invariant weight", both, P(), w6, ramp(8),
              lambda w, a, x: w.grad(lambda v: w.pmean((v * x).sum(), "i"))(a)[0], casts=False),
        inner("psum of an invariant weight", both, P(), w6, ramp(8),
              lambda w, a, x: w.grad(lambda v: w.psum((v * x).sum(), "i"))(a)[0], casts=False),
        inner("weight cast before", both, P("i"), w6, ramp(8),
              lambda w, a, x: w.grad(lambda v: (v * x).sum())(w.pcast(a, "i", to="varying"))[0]),
        inner("pmean", P("i"), P("i"), x4,
              lambda w, x: w.grad(lambda v: w.pmean((v**3).sum(), "i"))(x)[0]),
        inner("gathered, each weighs alike", P("i"), P("i"), x4,
              lambda w, x: w.grad(lambda v: (w.all_gather(v, "i", tiled=True) ** 3).sum())(x)[0]),
        inner("gathered to invariant", P("i"), P("i"), x4,
              lambda w, x: w.grad(lambda v: (w.all_gather(v, "i", tiled=True, to="invariant")
                                             ** 3).sum())(x)[0]),
        inner("scattered", P("i"), P("i"), ramp(16),
              lambda w, x: w.grad(lambda v: (w.psum_scatter(v, "i", tiled=True) ** 2).sum())(x)[0]),
        inner("all_to_all", P("i"), P("i"), ramp(16),
              lambda w, x: w.grad(lambda v: (w.all_to_all(v, "i", 0, 0, tiled=True)
                                             * w.axis_index("i")).sum())(x)[0]),
        inner("ppermute", P("i"), P("i"), ramp(8),
              lambda w, x: w.grad(lambda v: (w.ppermute(v, "i", RING) ** 2
                                             * w.axis_index("i")).sum())(x)[0]),
        inner("two weights of two kinds", (P(), P("i"), P("i")), (P(), P("i")), w6, ramp(8),
              ramp(8, start=1),
              lambda w, a, b, x: w.grad(lambda c, d: w.psum((c * d * x).sum(), "i"))(a, b),
              casts=False),
        inner("second order", P("i"), P("i"), x4,
              lambda w, x: w.grad(lambda v: w.grad(
                  lambda u: w.psum((u**3).sum(), "i"))(v)[0].sum())(x)[0]),
        inner("a step of descent", both, P(), w6, ramp(8),
              lambda w, a, x: a - w.grad(lambda v: w.pmean(((v * x) ** 2).sum(), "i"))(a)[0],
              casts=False),
    ]  # fmt: skip


def compositions() -> list[Case]:
    """Return bodies with layers, recomputation, custom gradients and batches."""

    def mlp(w: Any, x: Any, a: Any, b: Any) -> Any:
        x = w.pcast(x, "y", to="varying")
        a, b = w.pcast(a, "x", to="varying"), w.pcast(b, "x", to="varying")
        return w.psum((x @ a) ** 2 @ b, "y")

    def dense(w: Any, x: Any, a: Any, b: Any) -> Any:
        return w.psum((x @ a) ** 2 @ b, "y")

    specs, args = (P("x"), P(None, "y"), P("y")), (ramp(2, 2), ramp(2, 2), ramp(2, 2))
    doubled = lambda w: w.custom(lambda x: x * x, lambda x, g: 10 * x * g)  # noqa: E731
    summed = lambda w: w.custom(  # noqa: E731
        lambda x: x, lambda x, g: w.pcast(w.psum(g, "i"), "i", to="varying")
    )
    return [
        Case("two layers", XY, specs, P("x"), args, mlp),
        Case("two layers, uncast", XY, specs, P("x"), args, dense, casts=False),
        Case("two layers, recomputed", XY, specs, P("x"), args,
             lambda w, *a: w.checkpoint(lambda *b: mlp(w, *b))(*a)),
        Case("recomputed gathers", I4, P("i"), P("i"), (ramp(4),),
             lambda w, x: w.checkpoint(lambda v: w.all_gather(v, "i") * w.all_gather(v, "i"))(x)),
        Case("recomputed sum", I4, P("i"), P(), (ramp(8),),
             lambda w, x: w.checkpoint(lambda v: w.psum(v * v, "i"))(x)),
        Case("a gradient of one's own", I4, P("i"), P(), (ramp(4),),
             lambda w, x: w.psum(doubled(w)(x), "i")),
        Case("a sum in one's own gradient", I4, P("i"), P("i"), (ramp(4),),
             lambda w, x: summed(w)(x) * (1 + w.axis_index("i"))),
        Case("a batch of squares", I4, P("i"), P(), (ramp(8, 2),),
             lambda w, x: w.psum(w.vmap(lambda row: row * row.sum())(x), "i")),
        Case("invariant beside varying", I4, (P(), P("i")), (P(), P("i")), (ramp(3), ramp(4)),
             lambda w, a, b: (a * a, b * b)),
        Case("one result is not used", I4, P("i"), P("i"), (ramp(8),),
             lambda w, x: (x[:1], x[1:])[0]),
        Case("a scalar to be sharded", I4, P("i"), P("i"), (ramp(8),),
             lambda w, x: (x * x).sum()[None]),
        Case("attention of heads", I4, (P("i"), P(), P()), P("i"), (ramp(4, 2), ramp(2), ramp(2)),
             lambda w, q, k, v: q * k[None] + v[None], casts=False),
        Case("an entry at an index", I4, P(), P("i"), (ramp(4),),
             lambda w, x: x[w.axis_index("i")][None] ** 2, casts=False),
        Case("prefix of a tree", I4, (P("i"),), P("i"), (ramp(4),),
             lambda w, x: {"a": x, "b": (2 * x, [3 * x])}),
        Case("a promise unmentioned", I4, (P("i"), P()), P(), (ramp(4), ramp(1)),
             lambda w, x, y: w.psum(x * x, "i") + y),
    ]  # fmt: skip


def nestings() -> list[Case]:
    """Return nested maps, maps along one axis, and closures."""

    def nested(name: str, *args: Any, **options: Any) -> Case:
        # JAX 0.10 cannot lower the second derivative.
        return Case(name, *args, explicit=False, second=False, **options)

    def closing_over(name: str, x: Any, p: Any, body: Any, **options: Any) -> Case:
        return Case(name, I4, (P("i"),), P(), (x, p), body, closed=1, explicit=False, **options)

    m, rows, x8, p2 = ramp(4, 4), P("x"), ramp(8), ramp(2, start=1)

    def squares(w: Any, x: Any) -> Any:
        return w.nest(lambda v: w.psum(v * v, "y"), P("y"), P(), {"y"})(x)

    def both(w: Any, x: Any) -> Any:
        return w.nest(lambda v: w.psum(v * v, ("x", "y")), P(None, "y"), P(), {"y"})(x)

    def closing(w: Any, x: Any, p: Any) -> Any:
        scale = x.sum()
        return w.nest(lambda v: w.psum(v * v * scale, "y"), P("y"), P(), {"y"})(p) + x

    def one_by_one(w: Any, x: Any) -> Any:
        inner = w.smap(lambda v: w.psum(v * v, "y"), 0, None, "y")
        return w.smap(lambda v: inner(v) * v.sum(), 0, 0, "x")(x)

    return [
        nested("a map over y in one over x", XY, rows, rows, (ramp(8),), squares, axes={"x"}),
        nested("a sum over both in the inner map", XY, rows, P(), (m,), both, axes={"x"}),
        nested("an inner map closes over a local", XY, (rows, P()), rows, (ramp(4), ramp(2)),
               closing, axes={"x"}, casts=False, grad=False),
        nested("a map over one of two axes", XY, rows, P(), (ramp(4),),
               lambda w, x: w.psum(x * x, "x"), axes={"x"}),
        nested("one axis after the other", XY, None, None, (ramp(8),), one_by_one, axes=None),
        closing_over("a closed-over weight", x8, p2,
                     lambda w, x, p: w.psum(x * w.pcast(p, "i", to="varying") ** 2, "i")),
        closing_over("a closed-over weight, uncast", x8, p2,
                     lambda w, x, p: w.psum(x * p**2, "i"), casts=False),
        closing_over("a closed-over weight stays invariant", ramp(4), ramp(1),
                     lambda w, x, p: w.psum(x, "i") * p),
        closing_over("an inner gradient of what is closed over", x8, p2,
                     lambda w, x, p: w.grad(lambda q: w.psum((x * q**2).sum(), "i"))(p)[0],
                     casts=False),
    ]  # fmt: skip


CASES = {
    case.name: case
    for make in (
        reductions,
        gathers,
        exchanges,
        states,
        boundary,
        gradients,
        compositions,
        nestings,
    )
    for case in make()
}
