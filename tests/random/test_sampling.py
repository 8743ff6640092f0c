"""Draws of `fs.random`: the same values on every layout, in bodies, and under transforms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import P, ShardingError
from fshard.ops.prng import threefry
from fshard.ops.prng.threefry import Box, derive_keys, fill_box, hash_counter, key_words
from tests.helpers.spec_grid import all_specs, message
from tests.helpers.tensor_memory import LargestTensor

KEY = fs.random.key(7)
MESH = fs.Mesh(dp=2, tp=3)
F64, F32, I64 = torch.float64, torch.float32, torch.int64

DRAWS: dict[str, tuple[torch.dtype, Callable[[Any], Any]]] = {
    "uniform": (F32, lambda to: fs.random.uniform(KEY, to)),
    "uniform between": (F64, lambda to: fs.random.uniform(KEY, to, minval=-2, maxval=5)),
    "normal": (torch.bfloat16, lambda to: fs.random.normal(KEY, to)),
    "exponential": (torch.float16, lambda to: fs.random.exponential(KEY, to)),
    "randint": (I64, lambda to: fs.random.randint(KEY, to, -3, 9)),
    "randint of few bits": (torch.int8, lambda to: fs.random.randint(KEY, to, -3, 9)),
    "bits": (torch.int32, lambda to: fs.random.bits(KEY, to)),
    "bernoulli": (torch.bool, lambda to: fs.random.bernoulli(KEY, to, 0.3)),
    "dropout_mask": (F32, lambda to: fs.random.dropout_mask(KEY, to, 0.3)),
}


def unsharded_draw(name: str, shape: Any) -> torch.Tensor:
    """Return the draw on one device."""
    dtype, draw = DRAWS[name]
    result: torch.Tensor = draw(torch.empty(shape, dtype=dtype))
    return result


# -- the generator --------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "counter", "words"), [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
])  # fmt: skip
def test_threefry_matches_published_vectors(
    key: tuple[int, int], counter: tuple[int, int], words: tuple[int, int]
) -> None:
    """Compare the tensor and the integer form with the authors' published vectors."""
    assert hash_counter(key, counter) == words
    pair = torch.tensor([key], dtype=I64).expand(threefry.MAX_HOST_HASHES + 1, 2)
    many = derive_keys(pair, torch.tensor(counter[1], dtype=I64))
    few = derive_keys(pair[0], torch.tensor(counter[1], dtype=I64))
    assert (many == few).all()
    assert tuple(few.tolist()) == hash_counter(key, (0, counter[1]))


def draw_box(box: Box) -> torch.Tensor:
    out = torch.empty(box.size, dtype=torch.int32)
    fill_box(box, out, lambda hash_, part: torch.bitwise_xor(*hash_(key_words(KEY)), out=part))
    return out


BOXES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), max_size=4)


@given(BOXES, st.sampled_from((1, 2, 3, 8, 50, 1 << 15)))
@settings(max_examples=200, deadline=None)
def test_boxes_match_the_full_draw(edges: list[tuple[int, int, int]], block: int) -> None:
    """Draw boxes with blocks of any length."""
    shape, start, size = (tuple(each[at] for each in edges) for at in range(3))
    shape = tuple(map(sum, zip(shape, start, size, strict=True)))
    with pytest.MonkeyPatch.context() as patch:
        full = draw_box(Box(shape, (0,) * len(shape), shape))
        patch.setattr(threefry, "CPU_BLOCK", block)
        part = draw_box(Box(shape, start, size))
    index = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
    assert torch.equal(part, full[index])


@pytest.mark.parametrize(("shape", "start", "size"), [
    ((1 << 33,), ((1 << 32) - 5,), (10,)),
    ((3, 1 << 31), (1, (1 << 31) - 4), (2, 4)),
    ((1 << 40, 3), ((1 << 39) + 1, 1), (4, 2)),
    ((1 << 20, 1 << 20), (1 << 12, 3), (2, 1 << 10)),
])  # fmt: skip
def test_indices_beyond_32_bits(
    shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]
) -> None:
    values = draw_box(Box(shape, start, size)).flatten().tolist()
    strides = torch.empty(shape, device="meta").stride()
    ranges = [range(a, a + n) for a, n in zip(start, size, strict=True)]
    for value, index in zip(values, itertools.product(*ranges), strict=True):
        offset = sum(i * stride for i, stride in zip(index, strides, strict=True))
        x, y = hash_counter(KEY.tolist(), (offset >> 32, offset & 0xFFFFFFFF))
        assert value & 0xFFFFFFFF == x ^ y


class Largest(TorchDispatchMode):
    """Records the bytes of the largest allocation beside that of `out`."""

    def __init__(self, out: torch.Tensor) -> None:
        super().__init__()
        self.most, self.out = 0, out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not torch._C._overlaps(result, self.out):
            self.most = max(self.most, result.untyped_storage().nbytes())
        return result


def test_scratch_memory_is_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory is three words per element of a block."""
    monkeypatch.setattr(threefry, "CPU_BLOCK", 1 << 10)
    out = torch.empty(1 << 14, dtype=torch.int32)
    block = threefry.CPU_BLOCK * torch.get_num_threads()
    with Largest(out) as largest:
        fill_box(Box((1 << 14,), (0,), (1 << 14,)), out,
             lambda hash_, part: torch.bitwise_xor(*hash_(key_words(KEY)), out=part))  # fmt: skip
    assert largest.most == 3 * 4 * block


def test_means_and_variances() -> None:
    """Check a million values to five standard errors."""
    u, n = (draw(KEY, (1000, 1000), dtype=F64) for draw in (fs.random.uniform, fs.random.normal))
    assert abs(u.mean() - 1 / 2) < 5e-3 / 12**0.5
    assert abs(u.var() - 1 / 12) < 5e-3 / 180**0.5
    assert abs(n.mean()) < 5e-3
    assert abs(n.var() - 1) < 5e-3 * 2**0.5
    assert abs((n**4).mean() - 3) < 5e-3 * 96**0.5
    assert abs(fs.random.bernoulli(KEY, (1000, 1000), 0.3).double().mean() - 0.3) < 5e-3 * 0.46
    assert abs(fs.random.dropout_mask(KEY, (1000, 1000), 0.3).mean() - 1) < 5e-3 * 0.66


# -- layouts --------------------------------------------------------------------------------

SPECS = [
    *all_specs(fs.Mesh(dp=2, tp=2), (4, 8)),
    *(spec for spec in all_specs(fs.Mesh(dp=2, tp=3), (5, 7), uneven="chunk")),
    *all_specs(fs.Mesh(x=1, y=1), (3, 4)),
    *(
        spec
        for mesh in (fs.Mesh(x=8), fs.Mesh(x=5))
        for spec in all_specs(mesh, (7, 3), uneven="chunk")
    ),
    fs.Spec(fs.Mesh(x=4), P("x"), shape=(5, 3), sizes={0: (0, 3, 0, 2)}),
    fs.Spec(fs.Mesh(x=2), P(), shape=()),
    fs.Spec(fs.Mesh(x=2), P("x"), shape=(0,)),
]


@pytest.mark.parametrize("name", DRAWS)
def test_every_layout_draws_the_same_values(name: str) -> None:
    """Compare bit for bit with `fs.shard` of the draw on one device."""
    dtype, draw = DRAWS[name]
    for spec in SPECS:
        p = spec.partition
        if dtype == torch.bool and (p.unreduced_kinds or p.reduced_kinds):
            continue
        pair, expected = draw(spec.replace(dtype=dtype)), unsharded_draw(name, spec.shape)
        assert pair.spec == spec.replace(dtype=dtype)
        for shard, expected_shard in zip(
            pair.local, fs.shard(expected, pair.spec).local, strict=True
        ):
            assert shard.dtype == expected_shard.dtype
            assert torch.equal(shard, expected_shard), spec
        assert torch.equal(fs.unshard(pair), expected), spec


@pytest.mark.parametrize("name", DRAWS)
def test_no_tensor_is_larger_than_a_shard(name: str) -> None:
    dtype, draw = DRAWS[name]
    spec = fs.Spec(fs.Mesh(x=4, y=2), P("x", "y"), shape=(64, 32), dtype=dtype)
    with LargestTensor() as largest:
        draw(spec)
    assert largest.numel == 64 * 32 // 8


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
def test_unreduced_draws_of_every_kind(kind: str) -> None:
    spec = fs.Spec(MESH, P("dp", unreduced={"tp": kind}), shape=(4, 3))
    for draw in (fs.random.normal, fs.random.exponential):
        expected = fs.shard(draw(KEY, (4, 3)), spec).local
        for shard, expected_shard in zip(draw(KEY, spec).local, expected, strict=True):
            assert torch.equal(shard, expected_shard)


def test_replicas_do_not_share_memory() -> None:
    local = fs.random.uniform(KEY, fs.Spec(MESH, P("dp"), shape=(4,))).local
    assert len({x.data_ptr() for x in local}) == MESH.size


def test_permutation_contains_each_integer_once() -> None:
    for n in (0, 1, 5, 1000):
        result = fs.random.permutation(KEY, n)
        assert torch.equal(result.sort().values, torch.arange(n))
        spec = fs.Spec(MESH, P(("tp", "dp")), shape=(n,), dtype=I64, uneven="chunk")
        assert torch.equal(fs.unshard(fs.random.permutation(KEY, spec)), result)


def test_rank_local_draws_match_shards() -> None:
    """Each rank draws its shard alone."""
    spec = fs.Spec(MESH, P("tp", "dp"), shape=(5, 4), uneven="chunk")
    shards = fs.simulate(MESH, lambda: fs.random.normal(KEY, spec).local)
    for shard, expected_shard in zip(shards, fs.random.normal(KEY, spec).local, strict=True):
        assert torch.equal(shard, expected_shard)


# -- shapes, tensors, keys ------------------------------------------------------------------


def test_tensor_argument_sets_shape_and_dtype() -> None:
    x = torch.zeros(3, 4, dtype=F64, requires_grad=True)
    result = fs.random.normal(KEY, x)
    assert result.dtype == F64
    assert not result.requires_grad
    assert torch.equal(result, fs.random.normal(KEY, (3, 4), dtype=F64))
    assert fs.random.uniform(KEY, x, dtype=F32).dtype == F32
    assert fs.random.bernoulli(KEY, x, 0.5).dtype == torch.bool
    assert fs.random.uniform(KEY, 5).shape == (5,)
    assert fs.random.uniform(KEY, ()).shape == ()
    assert fs.random.uniform(KEY, (2,), device="meta").is_meta


def test_default_device_of_draws() -> None:
    """Draws are on the default device; keys and intermediate values on the host."""
    x = torch.zeros(3, 4)
    with torch.device("meta"):
        key = fs.random.key(7)
        first, second = fs.random.split(key)
        assert fs.random.uniform(first, 3).is_meta
        assert fs.random.normal(second, SPEC).local[0].is_meta
        for dtype, draw in DRAWS.values():
            assert draw(x.to(dtype)).device == x.device
        assert fs.random.randint(key, 5, 0, 9, device="cpu").device == x.device
        assert fs.random.permutation(key, 5, device="cpu").device == x.device
        drawn_ = fs.random.normal(fs.random.fold_in(first, 3), x, dtype=F64)
    assert torch.equal(key, KEY)
    expected = fs.random.normal(fs.random.fold_in(fs.random.split(KEY)[0], 3), (3, 4), dtype=F64)
    assert torch.equal(drawn_, expected)


def test_dropout_rates_zero_and_one() -> None:
    for p, all_of in ((0.0, 1.0), (1.0, 0.0)):
        mask = fs.random.dropout_mask(KEY, (100,), p)
        assert torch.equal(mask, torch.full((100,), all_of))
    assert fs.random.bernoulli(KEY, (100,), 1.0).all()


def test_vmap_over_keys() -> None:
    """`torch.vmap` over keys equals a loop over keys; one key draws once for the batch."""
    keys = fs.random.split(KEY, 3)
    x = torch.zeros(3, 2, 4)
    for draw in (fs.random.normal, fs.random.uniform):
        alone = torch.stack([draw(each, (2, 4)) for each in keys])
        assert torch.equal(torch.vmap(lambda k, d=draw: d(k, (2, 4)))(keys), alone)
        assert torch.equal(torch.vmap(draw)(keys, x), alone)
        assert torch.equal(torch.vmap(draw, (None, 0), None)(KEY, x), draw(KEY, (2, 4)))
    numbers = torch.arange(3)
    folded = torch.stack([fs.random.fold_in(k, n) for k, n in zip(keys, range(3), strict=True)])
    assert torch.equal(torch.vmap(fs.random.fold_in)(keys, numbers), folded)
    assert torch.equal(torch.vmap(lambda k: fs.random.split(k, 2)[1])(keys),
                       torch.stack([fs.random.split(k, 2)[1] for k in keys]))  # fmt: skip
    assert torch.equal(torch.vmap(lambda n: fs.random.fold_in(KEY, n))(numbers),
                       fs.random.fold_in(KEY, numbers))  # fmt: skip
    assert torch.equal(fs.random.fold_in(KEY, numbers)[2], fs.random.fold_in(KEY, 2))
    twice = torch.vmap(torch.vmap(fs.random.fold_in, (None, 0)), (0, None))(keys, numbers)
    assert torch.equal(twice[1, 2], fs.random.fold_in(keys[1], 2))
    rows = torch.vmap(torch.vmap(lambda k: fs.random.uniform(k, 4)))(keys.reshape(3, 1, 2))
    assert torch.equal(rows[2, 0], fs.random.uniform(keys[2], 4))


BOTH = [each for each in itertools.product((0, None), repeat=2) if each != (None, None)]


@pytest.mark.parametrize("outer", BOTH)
@pytest.mark.parametrize("inner", BOTH)
def test_nested_vmap_over_keys_and_tensors(outer: Any, inner: Any) -> None:
    """Batch keys, tensors or both at two levels of `torch.vmap`, and shard any dim."""
    keys, like = fs.random.split(KEY, 12).reshape(6, 2, 2), torch.randn(6, 2, 4)
    key, x = (
        each[tuple(0 if dim is None else slice(None) for dim in dims)]
        for each, dims in zip((keys, like), zip(outer, inner, strict=True), strict=True)
    )

    def draw(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.vmap(torch.vmap(one, inner), outer)(key, x)
        return result

    def one(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = fs.random.normal(key, x)
        return result + x

    batched = draw(key, x)
    for i, j in itertools.product(range(6), range(2)):
        shard = [each[tuple(index for index, level in ((i, outer), (j, inner)) if level[n] == 0)]
                for n, each in enumerate((key, x))]  # fmt: skip
        assert torch.equal(batched[i, j], one(*shard))
    for dim in range(x.dim()):
        sharded = P(*(None,) * dim, "x")
        spread = fs.partition(draw, mesh=fs.Mesh(x=2), in_specs=(P(), sharded))
        assert torch.equal(spread(key, x), batched)


def test_derive_many_keys() -> None:
    """Derive more keys than the host computes with Python integers."""
    keys = fs.random.split(KEY, 1000)
    assert torch.equal(keys[:5], fs.random.split(KEY, 5))
    assert keys.unique(dim=0).shape == (1000, 2)
    assert torch.equal(fs.random.fold_in(KEY, torch.arange(100))[99], fs.random.fold_in(KEY, 99))


def test_draws_compile_in_one_graph() -> None:
    def f(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        a, b = fs.random.split(key)
        result: torch.Tensor = x * fs.random.dropout_mask(a, x, 0.5) + fs.random.normal(b, (4, 6))
        return result

    x = torch.ones(4, 6)
    result = torch.compile(f, backend="aot_eager", fullgraph=True)(KEY, x)
    assert torch.equal(result, f(KEY, x))


SPEC = fs.Spec(MESH, P("dp"), shape=(4, 6))
ZERO = "fs.random.key(0)"
TWO_WORDS = "a key must be an int64 tensor of two words of 32 bits"
SHAPES = "the target of a draw must be a spec, a tensor or a shape"
DTYPES = f"the dtype must be one of {torch.float16}, {torch.bfloat16}, {F32}, {F64}"
WRONG: dict[str, tuple[Callable[[], Any], str, str, str, str]] = {
    "a seed": (lambda: fs.random.key("a"), "fs.random.key", "'a'",  # type: ignore[arg-type]
               "a seed must be an integer of 64 bits",
               "fs.random.key(0), say; fs.random.fold_in(key, number) takes a tensor"),
    "no key": (lambda: fs.random.uniform(3, 4), "fs.random.uniform",  # type: ignore[arg-type]
               "a key that is int", TWO_WORDS, ZERO),
    "JAX's words": (lambda: fs.random.normal(KEY.to(torch.uint32), 4), "fs.random.normal",
                    "a key of torch.uint32", TWO_WORDS, "key.long() & 0xFFFFFFFF"),
    "keys": (lambda: fs.random.bits(fs.random.split(KEY), 4), "fs.random.bits",
             "a key of shape (2, 2)", TWO_WORDS,
             "torch.vmap over the keys, or one of them: keys[0]"),
    "num": (lambda: fs.random.split(KEY, -1), "fs.random.split", "num=-1",
            "num must be an integer >= 0", "num=2, say"),
    "data": (lambda: fs.random.fold_in(KEY, -1), "fs.random.fold_in", "data=-1",
             "data must be an integer from 0 to 4294967295",
             "fold in its 32 lower bits, and then the others"),
    "data of fractions": (lambda: fs.random.fold_in(KEY, torch.ones(2)), "fs.random.fold_in",
                          "data of torch.float32", "data must be of integers", "data.long()"),
    "a dtype": (lambda: fs.random.uniform(KEY, 4, dtype=I64), "fs.random.uniform", "torch.int64",
                DTYPES,
                "dtype=torch.float64, or a spec of it"),
    "two dtypes": (lambda: fs.random.uniform(KEY, SPEC, dtype=F64), "fs.random.uniform",
                   f"dtype=torch.float64 for {SPEC}", "dtype must be that of the spec",
                   "spec.replace(dtype=torch.float64)"),
    "a shape": (lambda: fs.random.uniform(KEY, "ab"), "fs.random.uniform", "'ab'", SHAPES,
                "fs.Spec(mesh, P(...), shape=...), or (8, 16)"),
    "a size": (lambda: fs.random.normal(KEY, (2, -1)), "fs.random.normal", "(2, -1)", SHAPES,
               "fs.Spec(mesh, P(...), shape=...), or (8, 16)"),
    "limits": (lambda: fs.random.uniform(KEY, 4, maxval=float("inf")), "fs.random.uniform",
               "minval=0.0, maxval=inf", "limits must be finite", "minval=0.0, maxval=1.0"),
    "limits of elements": (
        lambda: fs.random.uniform(KEY, 2, maxval=torch.ones(2)),  # type: ignore[arg-type]
        "fs.random.uniform", "maxval of shape (2,)",
        "limits must be numbers, the same for all elements",
        "minval + (maxval - minval) * fs.random.uniform(key, spec)"),
    "limits of fractions": (
        lambda: fs.random.randint(KEY, 4, 0.5, 3),  # type: ignore[arg-type]
        "fs.random.randint", "from 0.5 to 3", "limits must be integers",
        "randint(key, spec, 0, 2), say"),
    "no range": (lambda: fs.random.randint(KEY, 4, 5, 5), "fs.random.randint",
                 "from 5 to 5 in torch.int64",
                 "the range must not be empty, within -9223372036854775808 to 9223372036854775808",
                 "randint(key, spec, 0, 2), say"),
    "a rate": (lambda: fs.random.dropout_mask(KEY, 4, 2.0), "fs.random.dropout_mask", "p=2.0",
               "p must be a number from 0 to 1", "p=0.5, say"),
    "rates": (lambda: fs.random.bernoulli(KEY, 4, torch.ones(4)),  # type: ignore[arg-type]
              "fs.random.bernoulli", "p of shape (4,)", "p must be a number from 0 to 1",
              "fs.random.uniform(key, p.float()) < p for a tensor of probabilities"),
    "a table": (lambda: fs.random.permutation(KEY, (3, 4)),  # type: ignore[arg-type]
                "fs.random.permutation", "a shape of 2 dims", "a permutation must have one dim",
                "permutation(key, n), and index rows with it"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_invalid_arguments_are_refused(name: str) -> None:
    call, where, given_, rule, fix = WRONG[name]
    with pytest.raises(ShardingError) as error:
        call()
    assert str(error.value) == message(where, given_, rule, fix)
