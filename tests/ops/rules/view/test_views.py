"""Rules of views: correctness for every role, texts, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, Spec
from fshard._util.errors import ShardingError
from fshard.ops.rules.view.view_factors import reshape_factors
from tests.helpers.ops.op_checks import call_with, check_call

A = torch.ops.aten
MOVED = "unreduced 0 sum; unreduced 0 avg; unreduced 0 max; unreduced 0 min; unreduced 0 product"


def tensor(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


CASES: dict[str, tuple[Any, ...]] = {
    "split a dim": (A.view.default, tensor(6, 4), [2, 3, 4]),
    "move a border": (A.view.default, tensor(6, 4), [2, 12]),
    "share no border": (A.reshape.default, tensor(6, 4), [4, 6]),
    "share inner factors": (A.reshape.default, tensor(2, 9, 2), [6, 6]),
    "no elements": (A.view.default, tensor(0, 4), [0, 2, 2]),
    "no elements, other dims": (A.view.default, tensor(0, 4), [4, 0]),
    "dims of one": (A.view.default, tensor(1, 4), [4, 1]),
    "a number": (A.view.default, tensor(), [1, 1]),
    "integers": (A.view.default, torch.arange(12), [3, 4]),
    "flatten": (A.flatten.using_ints, tensor(2, 3, 4), 1),
    "unflatten": (A.unflatten.int, tensor(2, 12), 1, [3, 4]),
    "squeeze": (A.squeeze.default, tensor(1, 4, 1)),
    "squeeze what is longer": (A.squeeze.dim, tensor(4, 4), 0),
    "squeeze_": (A.squeeze_.dims, tensor(1, 4, 1), [0, 2]),
    "unsqueeze": (A.unsqueeze.default, tensor(4), 0),
    "view_as": (A.view_as.default, tensor(6, 4), tensor(24)),
    "_reshape_alias": (A._reshape_alias.default, tensor(4, 6), [24], [1]),
    "atleast_3d": (A.atleast_3d.default, tensor(4)),
    "permute": (A.permute.default, tensor(4, 3, 5), [2, 0, 1]),
    "transpose": (A.transpose.int, tensor(4, 3), 0, -1),
    "movedim": (A.movedim.intlist, tensor(4, 3, 2), [0, 1], [-1, 0]),
    "mH": (A.mH.default, torch.complex(tensor(4, 3), tensor(4, 3))),
    "t_": (A.t_.default, tensor(4, 3)),
    "flip": (A.flip.default, tensor(4, 3, 1), [0, 2]),
    "fliplr": (A.fliplr.default, tensor(4, 3)),
    "roll": (A.roll.default, tensor(4, 3), [1], [0]),
    "roll all": (A.roll.default, tensor(4, 3), [1]),
    "rot90 once": (A.rot90.default, tensor(4, 3, 2), 1, [0, 1]),
    "rot90 thrice": (A.rot90.default, tensor(4, 3, 2), 3, [0, 1]),
    "slice": (A.slice.Tensor, tensor(4, 6), 1, 2, 4),
    "slice all": (A.slice.Tensor, tensor(4, 6), 1, 0, 9),
    "slice by steps": (A.slice.Tensor, tensor(4, 6), 1, 1, 6, 2),
    "slice the end": (A.slice.Tensor, tensor(7, 2), 0, -3),
    "slice nothing": (A.slice.Tensor, tensor(7, 2), 0, 5, 3),
    "slice_copy": (A.slice_copy.Tensor, tensor(7, 2), 0, 1, 6, 3),
    "narrow": (A.narrow.default, tensor(4, 6), 1, 0, 3),
    "narrow from the end": (A.narrow.default, tensor(4, 6), 1, -4, 3),
    "narrow all": (A.narrow.default, tensor(4, 6), 1, -6, 6),
    "narrow_copy all": (A.narrow_copy.default, tensor(4, 6), 0, 0, 4),
    "narrow_copy of complex numbers": (
        A.narrow_copy.default,
        torch.complex(tensor(4, 6), tensor(4, 6)),
        1,
        2,
        3,
    ),
    "select": (A.select.int, tensor(4, 6), 1, 2),
    "select from the end": (A.select.int, tensor(4, 6), 0, -1),
    "select booleans": (A.select.int, tensor(4, 6) > 0, 1, 2),
    "select integers": (A.select_copy.int, torch.arange(12).reshape(3, 4), 0, 1),
    "unbind": (A.unbind.int, tensor(4, 3), 1),
    "split": (A.split.Tensor, tensor(4, 6), 4, 1),
    "chunk": (A.chunk.default, tensor(4, 6), 3, -1),
    "split in sizes": (A.split_with_sizes.default, tensor(7, 2), [2, 0, 4, 1]),
    "split_copy": (A.split_copy.Tensor, tensor(4, 6), 4, 1),
    "one chunk": (A.chunk.default, tensor(4, 6), 1, -1),
    "hsplit": (A.hsplit.int, tensor(4), 2),
    "tensor_split": (A.tensor_split.indices, tensor(4, 6), [2, 3], 1),
    "expand": (A.expand.default, tensor(4, 1), [3, -1, 5]),
    "expand to nothing": (A.expand.default, tensor(1, 1), [1, 0]),
    "expand_as": (A.expand_as.default, tensor(1, 6), tensor(4, 6)),
    "repeat": (A.repeat.default, tensor(4, 3), [2, 1, 2]),
    "repeat one": (A.repeat.default, tensor(4, 1), [2, 3]),
    "repeat to nothing": (A.repeat.default, tensor(4, 3), [1, 0]),
    "tile": (A.tile.default, tensor(4, 3), [2]),
    "repeat_interleave": (A.repeat_interleave.self_int, tensor(4, 3), 2, 0),
    "repeat_interleave all": (A.repeat_interleave.self_int, tensor(4, 3), 2),
    "tril": (A.tril.default, tensor(4, 6), -1),
    "triu_": (A.triu_.default, tensor(2, 3, 4), 1),
    "tril of integers": (A.tril.default, torch.arange(12).reshape(3, 4)),
    "diagonal of rows": (A.diagonal.default, tensor(3, 6), 2),
    "diagonal of columns": (A.diagonal.default, tensor(6, 3, 2), -1),
    "short diagonal": (A.diagonal.default, tensor(4, 4), 1),
    "diag_embed": (A.diag_embed.default, tensor(2, 4), 0, 2, 0),
    "diag_embed beside": (A.diag_embed.default, tensor(2, 4), 1),
    "diag of a vector": (A.diag.default, tensor(4)),
    "diag of a matrix": (A.diag.default, tensor(4, 3), -1),
    "diagflat": (A.diagflat.default, tensor(2, 2), 1),
    "diagonal_scatter": (A.diagonal_scatter.default, tensor(3, 4, 4), tensor(3, 4), 0, 1, 2),
    "diagonal_backward": (A.diagonal_backward.default, tensor(3, 3), [3, 4, 4], 1, 1, 2),
    "patches": (A.unfold.default, tensor(4, 6), 1, 3, 3),
    "windows": (A.unfold.default, tensor(4, 6), 1, 3, 1),
    "unfold_backward": (A.unfold_backward.default, tensor(4, 4, 3), [4, 6], 1, 3, 1),
    "pixel_shuffle": (A.pixel_shuffle.default, tensor(3, 8, 2, 3), 2),
    "pixel_unshuffle": (A.pixel_unshuffle.default, tensor(2, 3, 4, 4), 2),
    "channel_shuffle": (A.channel_shuffle.default, tensor(2, 6, 2, 2), 3),
    "slice_scatter": (A.slice_scatter.default, tensor(4, 6), tensor(4, 2), 1, 2, 4),
    "slice_scatter by steps": (A.slice_scatter.default, tensor(7, 2), tensor(2, 2), 0, 1, None, 4),
    "slice_scatter all": (A.slice_scatter.default, tensor(4, 6), tensor(4, 6), 1),
    "select_scatter": (A.select_scatter.default, tensor(4, 6), tensor(4), 1, 2),
    "select_scatter of integers": (
        A.select_scatter.default,
        torch.arange(12).reshape(3, 4),
        torch.arange(4),
        0,
        -1,
    ),
    "slice_backward": (A.slice_backward.default, tensor(4, 2), [4, 6], 1, 2, 4, 1),
    "select_backward": (A.select_backward.default, tensor(4), [4, 6], 1, 2),
    "bits": (A.view.dtype, tensor(4, 6), torch.int32),
    "same bits": (A.view.dtype, tensor(4, 6), torch.int64),
    "view_as_real": (A.view_as_real.default, torch.complex(tensor(4, 3), tensor(4, 3))),
    "view_as_complex": (A.view_as_complex.default, tensor(4, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_are_right(name: str) -> None:
    op, *args = CASES[name]
    assert check_call(op, *args) == []


ON_TWO_AXES = (
    "move a border", "patches", "expand", "diag_embed", "slice by steps", "split", "slice_scatter",
)  # fmt: skip


@pytest.mark.parametrize("name", ON_TWO_AXES)
def test_rules_on_two_axes(name: str) -> None:
    op, *args = CASES[name]
    assert check_call(op, *args, grad=False, two_axes=True) == []


def test_repeat_interleave_with_output_size() -> None:
    args = (tensor(4, 3), torch.tensor([1, 0, 2, 1]), 0)
    assert check_call(A.repeat_interleave.self_Tensor, *args, output_size=4) == []


TEXTS = {
    "split a dim": "(ab)c->abc",
    "move a border": "(ab)c->a(bc)",
    "share inner factors": "a(bc)d->(ab)(cd)",
    "flatten": "abc->a(bc)",
    "squeeze": "1a1->a",
    "permute": "abc->cab",
    "expand": "b1->abc",
    "repeat": "ab->ca(db)",
    "repeat_interleave": "ab->(ac)b  {c unsharded; ",
    "roll": "ab->cb  {c a[i-1..i-1]; ",
    "rot90 once": "abc->bac  {b permuted; ",
    "slice": "ab->ac  {c b[2:4]; ",
    "slice by steps": "ab->ac  {c b[1:6:2]; ",
    "slice all": "ab->ab",
    "split": "ab->ac,ad  {c b[0:4]; d b[4:6]; ",
    "tensor_split": "ab->ac,ad,ae  {c b[0:2]; d b[2:3]; e b[3:6]; ",
    "one chunk": "ab->ab",
    "slice_scatter": "ab,ac->ab  {c b[2:4]; ",
    "select": "ab->a  {b sum; ",
    "select booleans": "ab->a  {b max; ",
    "unbind": "ab->a,a,a  {b unsharded; ",
    "diagonal of rows": "ab->a  {b unsharded; ",
    "short diagonal": "ab->1  {a unsharded; b unsharded; ",
    "patches": "ab->acd  {d unsharded; c b[3i..3i+2]; ",
    "pixel_shuffle": "a(bcd)ef->ab(ec)(fd)  {c unsharded; d unsharded; ",
    "share no border": "(ac)(db)->(ae)(fb)  {c unsharded; d unsharded; e unsharded; f unsharded; ",
}


@pytest.mark.parametrize("name", TEXTS)
def test_rule_texts(name: str) -> None:
    op, *args = CASES[name]
    text = TEXTS[name]
    moved = MOVED if "scatter" not in name else MOVED.replace("unreduced 0", "unreduced 0+1")
    assert str(call_with(op, args, {})[1]) == text + ("" if "{" in text else "  {") + moved + "}"


def test_views_of_another_dtype_are_not_linear() -> None:
    assert (
        str(call_with(A.view.dtype, (tensor(4, 6), torch.int32), {})[1])
        == "ab->a(bc)  {c unsharded}"
    )


def test_reshape_factors_keep_positions_in_memory() -> None:
    """Row-major indices by factors have the same memory position in both shapes."""
    shapes = [(a, b, c) for a in (1, 2, 3, 4, 6) for b in (1, 2, 3, 6) for c in (1, 2, 4)]
    for before in shapes:
        for after in shapes:
            full = torch.Size(before).numel()
            if torch.Size(after).numel() != full:
                continue
            matches = reshape_factors(before, after)
            sizes = dict(matches.sizes)
            for dims, shape in ((matches.before, before), (matches.after, after)):
                result = tuple(torch.Size(sizes[f] for f in dim).numel() for dim in dims)
                assert result == shape
            shared = {f for dim in matches.before for f in dim} - matches.unsharded
            for factor in shared:
                assert _stride(matches.before, sizes, factor) == _stride(
                    matches.after, sizes, factor
                )


def _stride(dims: Any, sizes: dict[str, int], factor: str) -> int:
    order = [f for dim in dims for f in dim]
    return torch.Size(sizes[f] for f in order[order.index(factor) + 1 :]).numel()


def test_strides_are_refused() -> None:
    with pytest.raises(ShardingError) as raised:
        call_with(A.as_strided.default, (tensor(4, 6), [2], [1]), {})
    assert str(raised.value) == (
        "fs.propagate(aten.as_strided.default)\n"
        "  given: [4, 6]\n"
        "  rule:  strides must not be used: they address the global tensor's memory, which no rank "
        "has\n"
        "  fix:   use operations on dims: view, permute, expand, slice, diagonal or unfold"
    )


PRIMS: dict[str, tuple[Any, ...]] = {
    "transpose": (tensor(4, 6), [1, 0]),
    "reshape": (tensor(4, 6), [24]),
    "squeeze": (tensor(1, 4), [0]),
    "rev": (tensor(4, 6), [0]),
    "split_dim": (tensor(4, 6), 1, 2),
    "collapse_view": (tensor(4, 6), 0, 1),
    "broadcast_in_dim": (tensor(4, 1), [3, 4, 6], [1, 2]),
}


@pytest.mark.parametrize("name", PRIMS)
def test_view_prims_equal_one_device(name: str) -> None:
    assert check_call(getattr(torch.ops.prims, name).default, *PRIMS[name], grad=False) == []


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4), (5, 0)])
def test_flattened_uneven_shards_return_without_communication(sizes: tuple[int, int]) -> None:
    """The sizes of a factor are those in a dim where it follows a dim in parts of size 1."""
    spec = Spec(Mesh(x=2, y=2), P("x", "y", None), shape=(2, 5, 3), sizes={1: sizes})
    x = torch.randn(spec.shape)
    there_and_back = fs.partition(lambda x: x.flatten().sin().view(2, 5, 3), mesh=spec.mesh)
    with fs.comm_log() as log:
        y = there_and_back(fs.shard(x, spec))
    assert y.spec == spec
    assert not log.counts
    torch.testing.assert_close(fs.unshard(y), x.sin())
