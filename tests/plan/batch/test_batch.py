"""Batches as values: running, text and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Batch, Mesh, P, Program, ShardingError, Spec
from tests.helpers.batches import check_equal
from tests.helpers.spec_grid import message, random_locals

F64 = torch.float64


MESH = Mesh(x=2, y=3)


# -- running -----------------------------------------------------------------------------


def tree() -> tuple[Batch, dict[str, Any]]:
    """Return a batch of three leaves, one of them None, and its locals."""
    w, b = Spec(MESH, P("x"), shape=(4, 3)), Spec(MESH, P(unreduced={"y"}), shape=(6,))
    programs = {"w": Program(w, (fs.AllGather("x", 0),)), "n": None,
                "b": [Program(b, (fs.ReduceScatter("y", 0),))]}  # fmt: skip
    xs = {"w": random_locals(w), "n": "passed on", "b": [random_locals(b)]}
    return Batch(programs), xs


def test_batch_maps_trees_to_trees() -> None:
    batch, xs = tree()
    ys = batch({"b": xs["b"], "n": None, "w": xs["w"]})
    assert list(ys) == list(xs)
    assert ys["n"] is None
    assert batch(xs)["n"] == "passed on"
    check_equal([ys["w"], *ys["b"]],
                [batch.programs["w"](xs["w"]), batch.programs["b"][0](xs["b"][0])])  # fmt: skip
    pending = batch(xs, async_op=True)
    check_equal([pending.wait()["w"]], [ys["w"]])
    with pytest.raises(ShardingError, match="a second wait"):
        pending.wait()
    assert fs.redistribute([None, []], [None, []])([1, []]) == [1, []]
    src = (Spec(MESH, P("x"), shape=(4,)), Spec(MESH, P("y"), shape=(6,)))
    pair_batch = fs.redistribute(src, (src[0].replace(partition=P()), src[1]))
    check_equal(
        pair_batch((random_locals(src[0]), random_locals(src[1])))[1:], [random_locals(src[1])]
    )


def test_batch_runs_in_rank_local_code() -> None:
    batch, xs = tree()

    def body() -> Any:
        rank = int(fs.axis_index(("x", "y"), mesh=MESH))
        w = xs["w"][rank].clone().requires_grad_()
        local = {"w": w, "n": None, "b": [xs["b"][0][rank]]}
        ys = batch(local, async_op=True).wait()
        (grad,) = torch.autograd.grad((ys["w"] * (1 + rank)).sum(), w)
        loss = lambda w: (batch({**local, "w": w})["w"] * (1 + rank)).sum()  # noqa: E731
        assert torch.equal(grad, torch.func.grad(loss)(w))
        assert not ys["b"][0].requires_grad
        ys["b"][0].zero_()  # autograd allows writes to it
        return ys["w"].detach(), grad

    with fs.comm_log() as log:
        results = fs.simulate(MESH, body)
    check_equal([[y for y, _ in results]], [batch(xs)["w"]])
    assert [g.unique().tolist() for _, g in results] == [[1.0 + i] for i in range(MESH.size)]
    assert log.forward.counts["reduce_scatter", "y"] == 2


def test_batch_in_a_mapped_function_checks_and_sets_types() -> None:
    mesh = Mesh(x=2, y=2)
    src = [Spec(mesh, P("x"), shape=(4,)), Spec(mesh, P("x", None), shape=(4, 2))]
    batch = fs.redistribute(src, [spec.replace(partition=P()) for spec in src])
    seen: list[str] = []

    def body(a: torch.Tensor, b: torch.Tensor) -> Any:
        ys = batch([a, b])
        seen.append(str(fs.typeof(ys[1])))
        pending = batch([a, b], async_op=True)
        return tuple(y + z for y, z in zip(ys, pending.wait(), strict=True))

    mapped = fs.shard_map(body, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P())
    a, b = torch.arange(4.0), torch.ones(4, 2)
    check_equal([mapped(a, b)], [(2 * a, 2 * b)])
    assert seen[0] == "f32[4,2]"
    slices = fs.redistribute(batch.dst, batch.src)
    wrong = fs.shard_map(
        lambda a, b: slices([a, b])[0], mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")
    )
    with pytest.raises(ShardingError, match=r"the batch at \[0\]"):
        wrong(torch.arange(8.0), b)


def test_unreduced_maxima_have_gradients() -> None:
    mesh = Mesh(x=2)
    top = Spec(mesh, P(unreduced={"x": "max"}), shape=(3,))
    total = Spec(mesh, P(unreduced={"x"}), shape=(3,))
    src = [top, total, top]
    batch = fs.redistribute(src, [spec.replace(partition=P()) for spec in src])
    assert not batch.is_linear
    assert len(batch.launches) <= 2
    needs = (True, True, False)
    xs = [
        tuple(x.requires_grad_(need) for x in random_locals(spec, seed))
        for seed, (spec, need) in enumerate(zip(src, needs, strict=True))
    ]
    flat = [x for shards in xs[:2] for x in shards]

    def gradients(ys: Any) -> Any:
        return torch.autograd.grad(sum((y * (2 + y)).sum() for s in ys[:2] for y in s), flat)

    ys = batch(xs)
    alone = [prog(x) for prog, x in zip(batch.programs, xs, strict=True)]
    check_equal(ys, alone)
    check_equal([gradients(ys)], [gradients(alone)])
    with pytest.raises(ShardingError) as error:
        batch(xs, async_op=True)
    assert str(error.value) == message(
        "batch(locals, async_op=True)",
        f"at [0]: a program with a maximum or minimum, {top} -> f32[3], of a local that "
        "requires grad",
        "programs must be linear to run ahead with gradients",
        "run it without async_op, or detach() the local",
    )
    check_equal(batch([tuple(x.detach() for x in s) for s in xs], async_op=True).wait(),
                [[y.detach() for y in s] for s in ys])  # fmt: skip


def test_gradients_of_maxima_coalesce() -> None:
    mesh = Mesh(x=2, y=2)
    tops = [
        Spec(mesh, P(unreduced={"x": kind}), shape=(4, n), dtype=F64)
        for n in (1, 2, 3)
        for kind in ("max", "min")
    ]
    batch = fs.redistribute(tops, [spec.replace(partition=P("y")) for spec in tops])
    alone = [prog.cost().launches for prog in batch.programs]

    def gradients(move: Callable[[Any], Any]) -> Any:
        xs = [tuple(x.requires_grad_() for x in random_locals(spec, 3)) for spec in tops]
        with fs.comm_log() as log:
            ys = move(xs)
            total = sum(((1 + rank) * (y * (2 + y))).sum() for s in ys for rank, y in enumerate(s))
            grads = torch.autograd.grad(total, [x for s in xs for x in s], create_graph=True)
            second = torch.autograd.grad(
                sum((g**2).sum() for g in grads), [x for s in xs for x in s]
            )
        return log.counts.total(), ys, [grads, second]

    num_alone, *want = gradients(lambda xs: [p(x) for p, x in zip(batch.programs, xs, strict=True)])
    num_batched, *got = gradients(batch)
    for actual, expected in zip(got, want, strict=True):
        check_equal(actual, expected)
    assert len(set(alone)) == 1
    assert num_batched <= num_alone / 3


def test_batch_sends_in_forward_and_backward_dtype() -> None:
    mesh = Mesh(x=2)
    src = [Spec(mesh, P("x"), shape=(n,)) for n in (4, 8)]
    steps = (fs.AllGather("x", 0, "reduced"),)
    batch = Batch([
        Program(spec, steps, forward_dtype=torch.bfloat16, backward_dtype=F64) for spec in src
    ])  # fmt: skip
    dst = batch.dst
    planned = fs.redistribute(src, dst, forward_dtype=torch.bfloat16, backward_dtype=F64)
    assert {(p.forward_dtype, p.backward_dtype) for p in planned.leaves} == {(torch.bfloat16, F64)}
    xs = [tuple(x.requires_grad_() for x in random_locals(spec)) for spec in src]
    with fs.comm_log() as log:
        ys = batch(xs)
        grads = torch.autograd.grad(sum(y.sum() for s in ys for y in s), [x for s in xs for x in s])
    assert {y.dtype for s in ys for y in s} | {g.dtype for g in grads} == {torch.float32}
    assert log.forward.bytes["all_gather", "x"] == (2 + 4) * 2
    assert log.backward.bytes["reduce_scatter", "x"] == (2 + 4) * 8


def test_text_of_batches() -> None:
    batch, _ = tree()
    assert str(batch) == repr(batch)
    assert str(batch).splitlines() == [
        "2 leaves on Mesh(x=2, y=3), 2 launches, 40 B sent",
        "  ['b'][0]  f32[6]{unreduced: y} -> f32[6@y]  reduce_scatter(y, dim 0)",
        "  ['w']     f32[4@x,3] -> f32[4,3]            all_gather(x, dim 0)",
    ]
    assert batch.explain().summary.rows[0] == ("launches", "2", "2", "1.00x")
    bundle = batch._repr_mimebundle_()
    assert bundle["text/plain"] == str(batch)
    assert bundle["text/html"].count("<table") == 3
    assert str(fs.redistribute({}, {})) == "0 leaves, 0 launches, 0 B sent"
    far = Spec(Mesh({"z": 2}, devices=(1, 2)), P("z"), shape=(4,))
    near = Spec(Mesh(x=2), P("x"), shape=(4,))
    back = Program(far, (fs.Exchange(near.partition, mesh=near.mesh),))
    forward = Program(near, (fs.Exchange(far.partition, mesh=far.mesh),))
    inside = Program(near, (fs.AllGather("x", 0),))
    between = Batch([forward, forward, inside, inside])
    meshes = str(near.mesh), str(far.mesh)
    assert str(between).splitlines() == [
        "4 leaves, 2 launches, 32 B sent",
        "  [0] and 1 more",
        f"    f32[4@x] on {meshes[0]} -> f32[4@z] on {meshes[1]}",
        f"    exchange(P('z'), {meshes[1]})",
        "  [2] and 1 more",
        f"    f32[4@x] -> f32[4] on {meshes[0]}",
        "    all_gather(x, dim 0)",
        f"  in one launch: exchange of 2 from {meshes[0]} to {meshes[1]}",
        f"  in one launch: all_gather of 2 over x of {meshes[0]}",
    ]
    assert between.explain().launches.rows[0][:2] == (
        "exchange", f"from {meshes[0]} to {meshes[1]}",
    )  # fmt: skip
    assert str(Batch([forward, back])).endswith(
        "in one launch: exchange of 2 between several meshes"
    )
    many = Batch([inside] * 6, bucket_bytes=32)
    assert str(many).splitlines()[-1] == "  in each of 3 launches: all_gather of 2 over x"


# -- errors ----------------------------------------------------------------------------

FEW = {"w": Spec(MESH, P("x"), shape=(4,)), "b": [Spec(MESH, P("y"), shape=(6,))]}


def refused(text: str, function: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises(ShardingError) as error:
        function(*args, **options)
    assert str(error.value) == text


def test_different_tree_structures_are_refused_with_the_path() -> None:
    rule = "dst must be a tree like src: the same containers, keys and lengths"
    spec = FEW["w"]
    refused(
        message("fs.redistribute", "dst has the keys ['a', 'b'], src ['b', 'w']", rule,
                "add dst['w'], drop dst['a']"),
        fs.redistribute, FEW, {"a": spec, "b": [spec]},
    )  # fmt: skip
    refused(
        message("fs.redistribute", "dst['b'] is a tuple where src['b'] is a list", rule,
                "a list there"),
        fs.redistribute, FEW, {"w": spec, "b": (spec,)},
    )  # fmt: skip
    refused(
        message("fs.redistribute", "dst['b'] has length 2, src['b'] 1", rule,
                "drop dst['b'][1]"),
        fs.redistribute, FEW, {"w": spec, "b": [spec, spec]},
    )  # fmt: skip
    refused(
        message("fs.redistribute", "dst['b'] is a Spec where src['b'] is a list", rule,
                "a list there"),
        fs.redistribute, FEW, {"w": spec, "b": spec},
    )  # fmt: skip
    batch = fs.redistribute(FEW, FEW)
    refused(
        message("the batch", "locals['b'] is a Tensor where batch.src['b'] is a list",
                "locals must be a tree like batch.src: the same containers, keys and lengths",
                "a list there"),
        batch, {"w": torch.ones(4), "b": torch.ones(2)},
    )  # fmt: skip


def test_all_leaves_that_cannot_be_planned_are_named() -> None:
    other = Spec(MESH, P("y"), shape=(9,))
    fix = "reshape first; dst.replace(shape=src.shape) keeps it"
    rule = "source and target must have the same global shape"
    first = message("fs.redistribute", "at ['b'][0]: f32[6@y] -> f32[9@y]",
                    f"{rule}: (6,) is not (9,)", fix)  # fmt: skip
    second = message("", "at ['w'] and 1 more: f32[4@x] -> f32[9@y]",
                     f"{rule}: (4,) is not (9,)",
                     "reshape first; src.replace(...) keeps it")  # fmt: skip
    src = FEW | {"z": FEW["w"]}
    refused(f"{first}\n{second}", fs.redistribute, src, {"w": other, "b": [other], "z": other})
    refused(
        message("fs.redistribute", "topology='bytes'", "topology must be a Topology",
                'objective="bytes"'),
        fs.redistribute, FEW, FEW, topology="bytes",
    )  # fmt: skip
    refused(
        message("fs.redistribute", "at ['w']: redistribute(Spec, NoneType)", "both must be Specs",
                "spec.replace(partition=P(...)) makes the target"),
        fs.redistribute, FEW, FEW | {"w": None},
    )  # fmt: skip
    refused(
        message("fs.Batch", "programs['w'] is a Spec",
                "every leaf must be a Program or None",
                "fs.redistribute(tree_of_specs, tree_of_specs) plans them"),
        Batch, FEW | {"b": None},
    )  # fmt: skip


@pytest.mark.parametrize("given", [0, -1, 64.0, "64", True])
def test_invalid_bucket_bytes_are_refused(given: object) -> None:
    """A single leaf, which has no buckets, is checked too."""
    text = message("fs.redistribute", f"bucket_bytes={given!r}",
                   "bucket_bytes must be an int of at least 1, or None",
                   "bucket_bytes=2**23, or None")  # fmt: skip
    for tree in (FEW, FEW["w"]):
        refused(text, fs.redistribute, tree, tree, bucket_bytes=given)


def test_all_locals_that_do_not_fit_are_named() -> None:
    batch = fs.redistribute(FEW, {"w": FEW["w"].replace(partition=P()), "b": FEW["b"]})
    good = {"w": random_locals(FEW["w"]), "b": [random_locals(FEW["b"][0])]}
    fix = "fs.from_local makes a spec from locals, fs.reshard changes one"
    wide = tuple(torch.ones(3) for _ in MESH.ranks)
    first = message(
        "the batch",
        "at ['b'][0]: on ranks 0, 1, 2, 3, 4, 5 a local of shape (3,) and torch.float32",
        f"with f32[6@y] on {MESH} it must have shape (2,) and torch.float32", fix,
    )  # fmt: skip
    second = message(
        "", "at ['w']: on ranks 0, 1, 2, 3, 4, 5 a local of shape (3,) and torch.float32",
        f"with f32[4@x] on {MESH} it must have shape (2,) and torch.float32", fix,
    )  # fmt: skip
    refused(f"{first}\n{second}", batch, {"w": wide, "b": [wide]})
    refused(
        message("the batch", "at ['w']: a local of type int",
                "a local must be a tensor, or in a simulation the tuple of all shards",
                "fs.shard(global_tensor, spec).local"),
        batch, good | {"w": 3},
    )  # fmt: skip
    refused(
        message("the batch", f"one tensor for {MESH}, in a process that is not a rank of it",
                "a local must be one tensor inside shard_map, fs.simulate or after fs.init under "
                f"torchrun, and a tuple of {MESH.size} shards outside",
                "call it inside fs.shard_map, or after fs.init(mesh); a program also takes the "
                "tuple of all shards, as fs.shard makes it"),
        batch, good | {"w": good["w"][0]},
    )  # fmt: skip
    shards = {"w": good["w"][0], "b": [good["b"][0]]}
    with pytest.raises(ShardingError) as error:
        fs.simulate(MESH, batch, shards)
    assert str(error.value) == message(
        "the batch", "at ['b'][0]: a local of type tuple",
        "on a rank of the source's mesh a local must be a tensor", "pass this rank's tensor",
    )  # fmt: skip
