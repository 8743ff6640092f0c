"""Rules of gradient operations, of recurrent layers and of fake quantization."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard._util.errors import ShardingError
from tests.helpers.ops.samples import Sample, rand, rule_errors, rule_text

aten = torch.ops.aten

DIFFERENTIABLE: dict[str, Sample] = {
    "cummaxmin": lambda: (aten.cummaxmin_backward, rand(4, 3), rand(4, 3, seed=1),
                          rand(4, 3, seed=1).cummax(1)[1], 1),
    "cumprod": lambda: (aten.cumprod_backward, rand(4, 3), rand(4, 3, seed=1), 1,
                        rand(4, 3, seed=1).cumprod(1)),
    "value_selecting": lambda: (aten.value_selecting_reduction_backward, rand(4), 1,
                                rand(4, 3).max(1)[1], [4, 3], False),
    "value_selecting, kept": lambda: (
        aten.value_selecting_reduction_backward, rand(4, 1), 1, rand(4, 3).max(1, True)[1],
        [4, 3], True),
    "index_select": lambda: (aten.index_select_backward, rand(4, 5), [4, 3], 1,
                             torch.tensor([0, 2, 1, 1, 0])),
    "gather": lambda: (aten.gather_backward, rand(4, 2), rand(4, 3), 1,
                       torch.tensor([[0, 2], [1, 1], [2, 0], [1, 2]]), False),
    "gather of less": lambda: (aten.gather_backward, rand(2, 2), rand(4, 3), 1,
                               torch.tensor([[0, 2], [1, 1]]), False),
    "masked_select": lambda: (aten.masked_select_backward, rand(12), rand(4, 3),
                              torch.ones(4, 3, dtype=torch.bool)),
    "masked_scatter": lambda: (aten.masked_scatter_backward, rand(4, 3),
                               torch.ones(4, 3, dtype=torch.bool), [12]),
    "trace": lambda: (aten.trace_backward, rand(), [3, 3]),
    "rounding": lambda: (aten.fake_quantize_per_tensor_affine_cachemask_backward, rand(4, 3),
                         rand(4, 3) > 0),
}  # fmt: skip

PLAIN: dict[str, Sample] = {
    "cdist": lambda: (aten._cdist_backward, rand(2, 4, 5), rand(2, 4, 3), rand(2, 5, 3), 2.0,
                      torch.cdist(rand(2, 4, 3), rand(2, 5, 3))),
    "pdist": lambda: (aten._pdist_backward, rand(6), rand(4, 3), 2.0, torch.pdist(rand(4, 3))),
    "log_sigmoid_forward": lambda: (aten.log_sigmoid_forward, rand(4, 3)),
    "log_sigmoid": lambda: (aten.log_sigmoid_backward, rand(4, 3), rand(4, 3, seed=1),
                            aten.log_sigmoid_forward(rand(4, 3, seed=1))[1]),
    "rrelu_with_noise": lambda: (aten.rrelu_with_noise_backward, rand(4, 3), rand(4, 3, seed=1),
                                 rand(4, 3, seed=2).abs(), 0.1, 0.3, True, False),
    "_masked_softmax": lambda: (aten._masked_softmax_backward, rand(4, 3), rand(4, 3).softmax(1),
                                torch.zeros(4, 3, dtype=torch.bool), 1),
    "_standard_gamma": lambda: (aten._standard_gamma_grad, rand(4, 3).abs(), rand(4, 3).abs()),
    "fake_quantize": lambda: (aten.fake_quantize_per_tensor_affine, floats(4, 3), 0.1, 0, 0, 255),
    "fake_quantize by a tensor": lambda: (
        aten.fake_quantize_per_tensor_affine.tensor_qparams, floats(4, 3), torch.tensor([0.1]),
        torch.zeros(1, dtype=torch.int32), 0, 255),
    "fake_quantize by channel": lambda: (
        aten.fake_quantize_per_channel_affine_cachemask, floats(4, 3), floats(3).abs(),
        torch.zeros(3, dtype=torch.int32), 1, 0, 255),
}  # fmt: skip

RECURRENT: dict[str, Sample] = {
    "lstm_cell": lambda: (aten.lstm_cell, rand(4, 3), [rand(4, 2), rand(4, 2, seed=1)], rand(8, 3),
                          rand(8, 2), rand(8), rand(8, seed=1)),
    "gru_cell": lambda: (aten.gru_cell, rand(4, 3), rand(4, 2), rand(6, 3), rand(6, 2)),
    "rnn_tanh_cell": lambda: (aten.rnn_tanh_cell, rand(4, 3), rand(4, 2), rand(2, 3), rand(2, 2)),
    "lstm": lambda: (aten.lstm.input, rand(5, 4, 3), [rand(1, 4, 2), rand(1, 4, 2, seed=1)],
                     [rand(8, 3), rand(8, 2), rand(8), rand(8, seed=1)], True, 1, 0.0, True, False,
                     False),
    "gru": lambda: (aten.gru.input, rand(4, 5, 3), rand(2, 4, 2), [rand(6, 3), rand(6, 2)] * 2,
                    False, 1, 0.0, False, True, True),
}  # fmt: skip


def floats(*shape: int) -> torch.Tensor:
    return rand(*shape, dtype=torch.float32)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward_operations_equal_one_device(name: str) -> None:
    assert rule_errors(DIFFERENTIABLE[name]) == []


@pytest.mark.parametrize("name", PLAIN)
def test_values_of_backward_operations(name: str) -> None:
    assert rule_errors(PLAIN[name], grad=False) == []


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_backward_operations(name: str) -> None:
    assert rule_errors(RECURRENT[name]) == []


def test_rule_texts() -> None:
    linear = "unreduced 0 sum; unreduced 0 avg}"
    assert rule_text(*DIFFERENTIABLE["index_select"]()) == f"bi,i->b1  {{i sum; {linear}"
    assert rule_text(*PLAIN["cdist"]()) == f"bpq,bpk,bqk,bpq->bpk  {{q sum; {linear}"
    assert rule_text(*RECURRENT["lstm"]()) == "1n1,1n1,1n1,11,11,1,1->1n1,1n1,1n1"
    assert rule_text(*PLAIN["fake_quantize by channel"]()) == "bc,c,c->bc,bc"


def test_dropout_between_layers_is_refused() -> None:
    mesh = fs.Mesh(x=2)
    x = fs.Spec(mesh, fs.P("x"), shape=(4, 5, 3))
    state = fs.Spec(mesh, fs.P(None, "x"), shape=(2, 4, 2))
    weights = [fs.Spec(mesh, fs.P(), shape=shape) for shape in ((6, 3), (6, 2))] * 2
    with pytest.raises(ShardingError) as error:
        fs.propagate(aten.gru.input, x, state, weights, False, 1, 0.5, True, True, True)
    assert str(error.value) == (
        "fs.propagate(aten.gru.input)\n"
        "  given: dropout=0.5 while training\n"
        "  rule:  draws must be keyed: a rank's generator does not draw the values of the global "
        "tensor\n"
        "  fix:   dropout=0.0, and between the layers, each called alone, "
        "x * fs.random.dropout_mask(key, x, p)"
    )


def test_fused_cells_of_gpus_are_sharded_by_rows() -> None:
    """They do not run on the CPU: their layouts alone are checked."""
    mesh = fs.Mesh(x=2)
    gates, state = (fs.Spec(mesh, fs.P("x"), shape=(4, n)) for n in (24, 6))
    bias = fs.Spec(mesh, fs.P(), shape=(24,))
    forward = fs.propagate(aten._thnn_fused_lstm_cell.default, gates, gates, state, bias, bias)
    assert forward.out_specs == (state, state, gates)
    backward = fs.propagate(aten._thnn_fused_lstm_cell_backward_impl.default,
                            state, state, state, state, gates, True)  # fmt: skip
    assert backward.out_specs == (
        gates, state, bias.replace(partition=fs.P(unreduced="x")),
    )  # fmt: skip
