"""Rules of convolutions and their gradients: correctness for every role, texts."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.helpers.ops.samples import Sample, rand, rule_errors, rule_factors, rule_text

aten = torch.ops.aten

FORWARD: dict[str, Sample] = {
    "conv1d": lambda: (aten.conv1d, rand(3, 4, 5), rand(6, 4, 3), rand(6)),
    "conv1d of one": lambda: (aten.conv1d, rand(4, 5), rand(6, 4, 3)),
    "conv1d of none": lambda: (aten.conv1d, rand(0, 4, 5), rand(6, 4, 3), rand(6)),
    "conv1d of integers": lambda: (aten.conv1d, rand(3, 4, 5, dtype=torch.int64),
                                   rand(6, 4, 3, dtype=torch.int64)),
    "conv2d": lambda: (aten.conv2d, rand(3, 4, 5, 5), rand(6, 4, 3, 3), rand(6), [2, 2], [1, 1]),
    "conv2d in groups": lambda: (aten.conv2d, rand(2, 6, 4, 4), rand(9, 2, 3, 3), rand(9),
                                 [1, 1], [1, 1], [1, 1], 3),
    "conv2d of channels": lambda: (aten.conv2d, rand(2, 4, 4, 4), rand(8, 1, 3, 3), rand(8),
                                   [1, 1], [1, 1], [1, 1], 4),
    "conv2d of elements": lambda: (aten.conv2d, rand(2, 4, 3, 5), rand(6, 4, 1, 1), rand(6)),
    "conv2d of every other":
        lambda: (aten.conv2d, rand(2, 4, 3, 5), rand(6, 4, 1, 1), None, [2, 2]),
    "conv2d same": lambda: (aten.conv2d.padding, rand(2, 4, 5, 5), rand(3, 4, 3, 3), rand(3),
                            [1, 1], "same"),
    "conv2d complex": lambda: (aten.conv2d, rand(2, 4, 3, 3, dtype=torch.complex128),
                               rand(3, 4, 2, 2, dtype=torch.complex128)),
    "patches": lambda: (aten.conv2d, rand(2, 3, 6, 4), rand(5, 3, 2, 2), rand(5), [2, 2]),
    "patches with a rest": lambda: (aten.conv2d, rand(2, 3, 7, 4), rand(5, 3, 2, 2), None, [2, 2]),
    "patches transposed": lambda: (aten.conv_transpose2d, rand(2, 3, 3, 2), rand(3, 4, 2, 2),
                                   rand(4), [2, 2]),
    "conv3d": lambda: (aten.conv3d, rand(2, 2, 3, 3, 3), rand(3, 2, 2, 2, 2), rand(3)),
    "conv_transpose1d": lambda: (aten.conv_transpose1d, rand(2, 6, 5), rand(6, 2, 3), rand(6),
                                 [2], [1], [1], 3),
    "conv_transpose2d":
        lambda: (aten.conv_transpose2d, rand(3, 4, 3, 3), rand(4, 6, 3, 3), rand(6)),
    "convolution": lambda: (aten.convolution, rand(2, 6, 5), rand(6, 2, 3), rand(6),
                            [1], [0], [1], True, [0], 3),
    "conv_tbc": lambda: (aten.conv_tbc, rand(5, 3, 2), rand(3, 2, 4), rand(4), 1),
    "slow_conv3d": lambda: (aten.slow_conv3d, rand(2, 2, 3, 3, 3), rand(3, 2, 2, 2, 2), [2, 2, 2],
                            rand(3)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_convolutions_equal_one_device(name: str) -> None:
    assert rule_errors(FORWARD[name]) == []


BACKWARD: dict[str, Sample] = {
    "plain": lambda: (aten.convolution_backward, rand(2, 6, 5, 5), rand(2, 4, 5, 5),
                      rand(6, 4, 3, 3), [6], [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "groups": lambda: (aten.convolution_backward, rand(2, 9, 5), rand(2, 6, 5), rand(9, 2, 3), [9],
                       [1], [1], [1], False, [0], 3),
    "transposed": lambda: (aten.convolution_backward, rand(2, 6, 7), rand(2, 6, 5), rand(6, 2, 3),
                           [6], [1], [0], [1], True, [0], 3),
    "elements": lambda: (aten.convolution_backward, rand(2, 6, 3, 4), rand(2, 4, 3, 4),
                         rand(6, 4, 1, 1), [6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "patches": lambda: (aten.convolution_backward, rand(2, 5, 3, 2), rand(2, 3, 6, 4),
                        rand(5, 3, 2, 2), [5], [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
    "patches transposed": lambda: (aten.convolution_backward, rand(2, 4, 6, 4), rand(2, 3, 3, 2),
                                   rand(3, 4, 2, 2), [4], [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
}  # fmt: skip


@pytest.mark.parametrize("mask", [m for m in itertools.product((True, False), repeat=3) if any(m)])
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_equal_one_device(name: str, mask: tuple[bool, ...]) -> None:
    assert rule_errors(lambda: (*BACKWARD[name](), list(mask)), grad=False) == []


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_gradients(name: str) -> None:
    assert rule_errors(lambda: (*BACKWARD[name](), [True, True, True])) == []


def test_two_axes() -> None:
    groups = aten.conv1d, rand(2, 6, 4), rand(9, 2, 3), rand(9), [1], [1], [1], 3
    assert rule_errors(lambda: groups, grad=False, two_axes=True) == []


def test_rule_texts() -> None:
    assert rule_text(aten.conv2d, rand(3, 4, 5, 5), rand(6, 4, 3, 3)) == (
        "ncbd,ochi->noef  "
        "{c sum; h unsharded; i unsharded; e b[i..i+2]; f d[i..i+2]; "
        "unreduced 0 sum; unreduced 0 avg; unreduced 1 sum; unreduced 1 avg}"
    )
    assert rule_factors(*FORWARD["conv2d in groups"]()) == "n(gc)bd,(go)chi,(go)->n(go)ef"
    assert rule_factors(*FORWARD["conv_transpose1d"]()) == "n(gc)b,(gc)oe,(go)->n(go)d"
    assert rule_factors(*FORWARD["conv2d of elements"]()) == "ncbd,oc11,o->nobd"
    assert rule_factors(*FORWARD["conv2d of every other"]()) == "ncbd,ochi->noef"
    assert "d b[i/2..(i+1)/2]" in rule_text(*FORWARD["conv_transpose1d"]())
    assert rule_text(*BACKWARD["groups"](), [True, False, True]) == (
        "n(go)d,n(gc)b,(go)ce->n(gc)b,none,(go)  "
        "{n sum; o sum; c sum; b sum; e unsharded; d b[i-1..i+1]; unreduced 0 sum; unreduced 0 avg}"
    )
