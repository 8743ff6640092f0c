"""Draws in bodies vary and warn; effects of PyTorch's functions are classified completely."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.spmd.tracking import torch_effects
from tests.helpers.spmd.tracked_bodies import Body, V, attended, run_body

WARNING = (
    "draws from this process's generator: the values differ between ranks and meshes. In the body, "
    "fs.random.keyed(key) makes it draw with a key; or draw before the call and pass the values in"
)


def warnings_of(body: Body) -> list[str]:
    """Return the warnings of a body."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run_body(body)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("rand", lambda x, w: torch.rand(2)),
        ("randn_like", lambda x, w: torch.randn_like(w)),
        ("dropout", lambda x, w: F.dropout(w, 0.5)),
        ("normal_", lambda x, w: torch.empty(2).normal_()),
        ("bernoulli", lambda x, w: torch.bernoulli(w * 0)),
        ("kaiming_uniform_", lambda x, w: nn.init.kaiming_uniform_(torch.empty(2, 2))),
        ("multinomial", lambda x, w: torch.multinomial(w, 1)),
        ("binomial", lambda x, w: torch.binomial(w.detach(), w.detach() / 16)),
        ("_standard_gamma", lambda x, w: torch.distributions.Gamma(w.detach(), 1.0).sample()),
        ("_sample_dirichlet", lambda x, w: torch.distributions.Dirichlet(w.detach()).sample()),
        ("rrelu", lambda x, w: F.rrelu(-w, training=True)),
        ("rrelu", lambda x, w: torch.rrelu(-w, 0.0, 0.3, True)),
        ("rrelu_", lambda x, w: F.rrelu_(-w.detach(), 0.1, 0.3, True)),
        ("dropout", lambda x, w: torch.dropout(w, 0.5, True)),
        ("dropout", lambda x, w: torch.ops.aten.dropout(w, p=0.5, train=True)),
        (
            "scaled_dot_product_attention",
            lambda x, w: attended(w, 0.5),
        ),
    ],
)
def test_draws_vary_and_warn_once_per_line(name: str, body: Body) -> None:
    assert warnings_of(lambda x, w: [body(x, w) for _ in range(3)].pop()) == [f"{name} {WARNING}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [states for states, *_ in run_body(body)] == [V, V]


def test_draws_with_a_generator_vary_without_warning() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.randn(2, generator=torch.Generator().manual_seed(1))

    assert warnings_of(body) == []
    assert [states for states, *_ in run_body(body)] == [V, V]


def test_results_of_draws_are_equal_by_key() -> None:
    """A sum over ranks would multiply what is to be replicated."""
    mesh, key = fs.Mesh(x=2), fs.random.key(0)

    def run(body: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return fs.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P())(torch.ones(4))

    def keyed(x: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key):
            return F.dropout(x)

    match = r"with fs.random.keyed\(key\) around .*; of partial sums fs.psum"
    with (
        pytest.warns(UserWarning, match="draws from"),
        pytest.raises(fs.ShardingError, match=match),
    ):
        run(F.dropout)
    assert run(keyed).shape == (4,)


DRAWN_BEFORE = """
    _cudnn_attention_backward _cudnn_init_dropout_state _fill_mem_eff_dropout_mask_
    _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward
"""
"""Operations that take a seed and draw nothing themselves."""
DRAWS_NOTHING = "_fused_sdp_choice _nested_tensor_softmax_with_shape"


def overloads() -> Iterator[tuple[str, Any]]:
    """Yield the names of PyTorch's own operations with their overloads."""
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::").partition(".")[0]
        if full.startswith("aten::") and hasattr(torch.ops.aten, name):
            packet = getattr(torch.ops.aten, name)
            yield from ((name, getattr(packet, overload)) for overload in packet.overloads())


def test_effects_of_temporary_functions_are_freed() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def local_function(y: torch.Tensor) -> torch.Tensor:
            if torch.overrides.has_torch_function((y,)):
                return torch.overrides.handle_torch_function(local_function, (y,), y)
            return y * 2

        refs.append(weakref.ref(local_function))
        return local_function(x)

    refs: list[weakref.ref[Any]] = []
    run_body(body)
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_all_seeded_operations_are_classified() -> None:
    listed = {*DRAWN_BEFORE.split(), *DRAWS_NOTHING.split()}
    drawing = {name for name, op in overloads() if torch.Tag.nondeterministic_seeded in op.tags}
    assert drawing - torch_effects.RANDOM - torch_effects.MAYBE_RANDOM == listed


def test_all_data_dependent_operations_are_classified() -> None:
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    assert {name for name, op in overloads() if tags & {*op.tags}} <= torch_effects.READS_VALUE
