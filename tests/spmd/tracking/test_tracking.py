"""Types of the results of PyTorch's calls: one body after the other, on two ranks.

Each body takes a tensor that varies and one that is invariant. The states of its result are
written beside it; a result that is invariant by type has one value on both ranks.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs
from tests.helpers.spmd.tracked_bodies import Body, I, V, add, attended, fill, fills, run_body

CASES: list[tuple[str, str, Body]] = []


def gives(states: str, *, reads: bool = False) -> Callable[[Body], Body]:
    """Register a body: states of its result, and whether the host reads varying values."""

    def enter(body: Body) -> Body:
        CASES.append((states, V if reads else I, body))
        return body

    return enter


def each_gives(states: str, *bodies: Body, reads: bool = False) -> None:
    for body in bodies:
        gives(states, reads=reads)(body)


# -- results of operations -------------------------------------------------------------------

each_gives(
    V,
    lambda x, w: x + w,
    lambda x, w: w + x,
    lambda x, w: w @ x.T,
    lambda x, w: torch.addmm(w, x, torch.eye(2)),
    lambda x, w: torch.add(w, x, alpha=2),
    lambda x, w: torch.cat([w[None], x]),
    lambda x, w: torch.stack([w, x[0], w]),
    lambda x, w: torch.where(w > 7, w, x),
    lambda x, w: torch.where(x > 2, w, w),
    lambda x, w: torch.einsum("ij,j->i", x, w),
    lambda x, w: torch.complex(w, x[0]),
    lambda x, w: torch.view_as_real(torch.complex(w, x[0])),
    lambda x, w: torch.max(x, 0).values,
    lambda x, w: x.topk(1).indices,
    lambda x, w: x**0.5,
    lambda x, w: 2.0**x,
    lambda x, w: 1 - x // 2,
    lambda x, w: w.narrow(0, varying_size(x) - 1, 1),
    lambda x, w: w.select(0, varying_size(x) - 1),
    lambda x, w: w.roll(varying_size(x)),
    lambda x, w: F.one_hot((x[0].detach() > 1).long(), 2),
    lambda x, w: torch.repeat_interleave(x, 2),
    lambda x, w: torch.repeat_interleave(x, torch.tensor([2, 1]), 1),
    lambda x, w: torch.ops.aten.index(w, [(x[0] > 1).long()]),
    lambda x, w: torch.broadcast_tensors(w, x)[0],
    lambda x, w: next(iter(x)),
    lambda x, w: w[(x[0] > 2).long()],
    lambda x, w: w[int(0 * w[0].detach()) : 1] * x[0, 0],
    torch.ops.aten.mul.Tensor,
    lambda x, w: torch.ops.aten.mul(w, x),
    lambda x, w: x.to_sparse().to_dense(),
    lambda x, w: torch._foreach_mul([w, w], [x[0], x[0]])[1],
    lambda x, w: torch._foreach_norm([w, x[0]])[1],
    lambda x, w: torch._foreach_mul([w, w], x[0, 0].detach())[0],
    lambda x, w: F.cross_entropy(w[None].expand(2, 2), (x[0] > 1).long()),
    lambda x, w: F.mse_loss(x, w[None]),
    lambda x, w: F.scaled_dot_product_attention(x[None], w[None, None], w[None, None]),
    lambda x, w: nn.utils.parameters_to_vector([w, x[0]]),
    lambda x, w: nn.utils.get_total_norm([w.detach(), x.detach()]),
    lambda x, w: torch.vmap(lambda a: x[0].detach() * 1)(w),
    lambda x, w: torch.vmap(lambda a: a * x.detach(), out_dims=1)(w.detach()),
    lambda x, w: torch.vmap(torch.add, in_dims=(0, None))(w.detach(), x[0, 0].detach()),
)
each_gives(
    I,
    lambda x, w: w * 2 + torch.ones(2),
    lambda x, w: w @ w,
    lambda x, w: w[w > 7],
    lambda x, w: w[: int(w[0])],
    lambda x, w: torch.tensor(w.tolist()),
    lambda x, w: torch.from_numpy(w.detach().numpy()),
    lambda x, w: torch._foreach_norm([w, x[0]])[0],
    lambda x, w: torch._foreach_mul([w, w], [2.0, 3.0])[1],
    lambda x, w: torch.tensor(x.shape),
    lambda x, w: torch.tensor(float(x.requires_grad) + x.ndim),
    lambda x, w: torch.tensor(
        [x.is_quantized, x.is_inference(), x.is_conj(), x.to_sparse().sparse_dim()]
    ),
    lambda x, w: torch.zeros(w.detach()[0].long()),  # type: ignore[call-overload]
    lambda x, w: fs.psum(x, "x"),
    lambda x, w: torch.linalg.norm(fs.psum(x * w, "x")),
)
each_gives(
    V,
    lambda x, w: torch.tensor(x.tolist()),
    lambda x, w: torch.tensor(x[0, 0].item()),
    lambda x, w: torch.ones(2) if x[0, 0] > 1 else torch.zeros(2),
    lambda x, w: torch.zeros(int(x[0, 0])),
    lambda x, w: torch.from_numpy(x.detach().numpy()),
    lambda x, w: torch.from_numpy(np.asarray(x.detach()) * 2),
    lambda x, w: w[torch.stack([x[0, 0] > 2, x[0, 0] < 4])],
    lambda x, w: w[: x[0, 0].detach().long()],
    lambda x, w: torch.masked_select(w, x > 2),
    lambda x, w: torch.nonzero(x > 2),
    lambda x, w: x[x > 2],
    lambda x, w: torch.zeros(x[x > 2].shape),
    lambda x, w: x[None, ..., x[0] > 2],
    lambda x, w: torch.unique(x.detach()),
    lambda x, w: torch.Tensor([x.detach()[0, 0]]),
    lambda x, w: torch.from_dlpack(x.detach()),  # type: ignore[attr-defined]
    lambda x, w: torch.from_dlpack(x.detach().__dlpack__()),  # type: ignore[attr-defined]
    lambda x, w: pickle.loads(pickle.dumps(x.detach())),
    lambda x, w: copy.copy(x.detach()),
    lambda x, w: _saved(x.detach()),
    lambda x, w: torch.zeros(varying_size(x)),
    lambda x, w: torch.zeros((2, varying_size(x))),
    lambda x, w: torch.zeros(size=(2, varying_size(x))),
    lambda x, w: w.new_zeros(2, varying_size(x)),
    lambda x, w: torch.empty(2, varying_size(x)).fill_(1.0),
    lambda x, w: torch.arange(varying_size(x)),
    lambda x, w: torch.linspace(0, 1, varying_size(x)),
    lambda x, w: w.narrow(0, 0, varying_size(x)),
    lambda x, w: w.repeat(varying_size(x)),
    lambda x, w: w.repeat(1, varying_size(x)),
    lambda x, w: w.expand(varying_size(x), 2),
    lambda x, w: w.split(varying_size(x))[0],
    lambda x, w: torch.split(w, varying_size(x))[0],
    lambda x, w: w.tensor_split(varying_size(x))[0],
    lambda x, w: torch.tensor_split(w, tensor_indices_or_sections=varying_size(x)[None])[0],
    lambda x, w: torch.repeat_interleave(w, (x[0].detach() > 1).long()),
    lambda x, w: torch.repeat_interleave((x[0].detach() > 1).long()),
    lambda x, w: F.interpolate(w[None, None], size=varying_size(x)),
    lambda x, w: F.one_hot((x[0].detach() > 1).long()),
    lambda x, w: torch.where(x[0] > 1)[0],
    lambda x, w: torch.nonzero(x, out=torch.zeros(2, 2, dtype=torch.long)),
    lambda x, w: torch.ops.aten.index(w, [x[0] > 1]),
    lambda x, w: torch.zeros(x.detach().to_sparse()._nnz()),
    lambda x, w: torch._unique2(x.detach())[0],
    lambda x, w: (
        nn.utils.rnn.pack_padded_sequence(
            w.expand(2, 3, 2), x[0].detach().long().clamp(1, 2), True, enforce_sorted=False
        ).data
    ),
    lambda x, w: torch.full((2,), torch.ops.fshard_test.counted(x)),
    reads=True,
)


def varying_size(x: torch.Tensor) -> Any:
    """Return an integer from one to two that varies."""
    return (x[0, 0].detach() > 1).long() + 1


def _saved(x: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    loaded: torch.Tensor = torch.load(buffer)
    return loaded


# -- factories ---------------------------------------------------------------------------------

each_gives(
    I,
    lambda x, w: torch.zeros(2),
    lambda x, w: torch.arange(3),
    lambda x, w: torch.tensor([1.0, 2.0]),
    lambda x, w: torch.zeros_like(x),
    lambda x, w: torch.full_like(x, 2.0),
    lambda x, w: x.new_zeros(3),
    lambda x, w: x.new_full((2,), 3.0),
    lambda x, w: x.new_tensor([1.0, 2.0]),
    lambda x, w: x.new_empty(2).fill_(1.0),
    lambda x, w: torch.empty_like(x).zero_(),
)
each_gives(
    V,
    lambda x, w: torch.full((2,), x[0, 0].detach()),  # type: ignore[call-overload]
    lambda x, w: torch.full_like(w, x[0, 0].detach()),  # type: ignore[arg-type]
    lambda x, w: w.new_full((2,), x[0, 0].detach()),  # type: ignore[arg-type]
    lambda x, w: torch.tensor([x[0, 0].detach(), 1.0]),
    lambda x, w: torch.as_tensor(x),
    lambda x, w: torch.linspace(0, x[0, 1].detach(), 3),
    lambda x, w: torch.scalar_tensor(x[0, 0].detach()),  # type: ignore[arg-type]
    lambda x, w: nn.Parameter(x.detach()),
    lambda x, w: nn.Buffer(x.detach()),
    lambda x, w: copy.deepcopy(x.detach()),
    lambda x, w: copy.deepcopy(nn.Parameter(x.detach())),
    lambda x, w: torch.utils.data.default_collate([x.detach()]),
)


# -- shared memory ---------------------------------------------------------------------------


class Named(torch.Tensor):
    """Subclass without behaviour of its own, as a user may define one."""


def renamed(name: Callable[[torch.Tensor], torch.Tensor]) -> Body:
    """Return a body that renames the memory of a tensor which it has computed."""

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        memory = x.detach() * 1
        alias = name(memory)
        fs.typeof(alias)  # while the first name is in the table
        return alias

    return body


def _given_data(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(1, 2)
    y.data = x
    return y


def _without_functions(x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return x[:1]


each_gives(
    V,
    lambda x, w: x.view(2),
    lambda x, w: x.T.contiguous(),
    lambda x, w: x.data,
    lambda x, w: x.detach(),
    lambda x, w: x.expand(3, 2)[1:],
    lambda x, w: x.as_subclass(Named),
    lambda x, w: torch.zeros(2).set_(x.detach() * 1),  # type: ignore[call-overload]
    lambda x, w: _given_data(x.detach() * 1),
    renamed(lambda y: torch.Tensor._make_subclass(Named, y)),
    renamed(torch.Tensor),
    renamed(_without_functions),
)


# -- writes ------------------------------------------------------------------------------------


def into(write: Callable[[torch.Tensor, torch.Tensor], object]) -> Body:
    """Return a body that writes the rank's row into zeros."""

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(2)
        write(y, x.detach()[0])
        return y

    return body


def _add(y: torch.Tensor, r: torch.Tensor) -> None:
    y += r


def _item(y: torch.Tensor, r: torch.Tensor) -> None:
    y[0] = r[1]


def _index(y: torch.Tensor, r: torch.Tensor) -> None:
    y[(r > 2).long()] = 1


def _mask(y: torch.Tensor, r: torch.Tensor) -> None:
    y[r > 2] = 1


def _real(y: torch.Tensor, r: torch.Tensor) -> None:
    torch.view_as_complex(y.view(1, 2)).real = r[:1]


def _imag(y: torch.Tensor, r: torch.Tensor) -> None:
    torch.view_as_complex(y.view(1, 2)).imag = r[:1]


def _amp(y: torch.Tensor, r: torch.Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(2), r * 1.0], y[0], torch.ones(()))


def _statistics(y: torch.Tensor, r: torch.Tensor) -> None:
    torch.batch_norm(r.expand(3, 2), None, None, y, torch.ones(2), True, 0.1, 1e-5, False)


def _two_outs(y: torch.Tensor, r: torch.Tensor) -> None:
    torch.sort(r, out=(y, torch.zeros(2, dtype=torch.long)))


each_gives(
    V,
    into(lambda y, r: y.copy_(r)),
    into(lambda y, r: y.add_(r)),
    into(lambda y, r: y.mul_(2).addcmul_(r, r)),
    into(lambda y, r: y.fill_(r[0])),
    into(lambda y, r: y.index_add_(0, torch.tensor([0]), r[:1])),
    into(lambda y, r: y.scatter_(0, torch.tensor([1]), r)),
    into(lambda y, r: y[:1].copy_(r[:1])),
    into(lambda y, r: y.view(2, 1)[:, 0].mul_(3).add_(r)),
    into(lambda y, r: y.unbind()[0].copy_(r[0])),
    into(lambda y, r: y.data.copy_(r)),
    into(lambda y, r: y.detach().copy_(r)),
    into(lambda y, r: torch.add(r, r, out=y)),
    into(torch.ops.aten.add_.Tensor),
    into(lambda y, r: torch.ops.aten.add.out(r, r, out=y)),
    into(lambda y, r: torch._foreach_add_([torch.zeros(2), y], [r, r])),
    into(lambda y, r: torch._foreach_copy_([y], [r])),
    into(lambda y, r: fs.pcast(y, "x", to="varying").add_(r)),
    into(lambda y, r: torch.Tensor(y).add_(r)),
    into(lambda y, r: nn.utils.vector_to_parameters(r, [y])),
    into(lambda y, r: fill(r, y)),
    into(lambda y, r: fill(out=y, x=r)),
    into(lambda y, r: torch.ops.fshard_test.fill(r, y)),
    into(lambda y, r: fills([torch.zeros(2), y], r)),
    into(lambda y, r: torch._cummax_helper(r, y, torch.zeros(2, dtype=torch.long), 0)),
    into(_amp), into(_statistics), into(_real), into(_imag),
    into(_add), into(_item), into(_index), into(_mask), into(_two_outs),
)  # fmt: skip
each_gives(
    I,
    into(lambda y, r: y.copy_(torch.ones(2))),
    into(lambda y, r: y.copy_(r).zero_()),
    into(lambda y, r: y.copy_(r).fill_(2)),
    into(lambda y, r: torch.add(torch.ones(2), 1, out=y.copy_(r))),
    into(lambda y, r: y.clone().copy_(r)),
    into(lambda y, r: y.add_(fs.psum(r, "x"))),
)


@gives(V)
def view_taken_before(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(2)
    v = y[1:]
    y.copy_(x.detach()[0])
    return v


@gives(V)
def base_of_a_view_of_what_was_overwritten(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(2)
    v = y[:]
    y.copy_(x.detach()[0])
    y.zero_()
    v.copy_(x.detach()[0])
    return y


@gives(V)
def ranks_write_different_places(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(3)
    y[fs.axis_index("x")] = 1
    return y


# -- modules -----------------------------------------------------------------------------------


def filled(module: nn.Module, value: torch.Tensor | float = 0.5) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.as_tensor(value).expand_as(parameter))
    return module


def inits(body: Body) -> Body:
    """Silence the warning about initial values that modules draw."""

    def silent(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return body(x, w)

    return silent


each_gives(
    V,
    inits(lambda x, w: nn.Linear(2, 2).weight),
    inits(lambda x, w: nn.EmbeddingBag(3, 2).weight),
    inits(lambda x, w: filled(nn.Linear(2, 2))(x)),
    inits(lambda x, w: filled(nn.Linear(2, 2), x.detach()[0, 0])(w)),
    inits(lambda x, w: nn.init.normal_(torch.empty(2))),
    inits(lambda x, w: nn.init.xavier_uniform_(nn.Parameter(torch.empty(2, 2)))),
    inits(lambda x, w: copy.deepcopy(filled(nn.Linear(2, 2), x.detach()[0, 0])).weight),
    lambda x, w: nn.ReLU(inplace=True)(torch.zeros(2).add_(x.detach()[0])),
    lambda x, w: F.relu(torch.zeros(2).add_(x.detach()[0]), inplace=True),
)
each_gives(
    I,
    inits(lambda x, w: filled(nn.Linear(2, 2)).weight),
    inits(lambda x, w: filled(nn.Linear(2, 2))(w)),
    inits(lambda x, w: copy.deepcopy(filled(nn.Linear(2, 2)))(w)),
    lambda x, w: torch.dropout(w, 0.5, False),
    lambda x, w: add(w.detach(), w.detach()),
    lambda x, w: torch._fused_rms_norm(w, [2], None, None)[0],
    lambda x, w: torch.dropout(w, 0.0, True),
    lambda x, w: F.rrelu(-w, 0.1, 0.3, False),
    lambda x, w: torch.rrelu(-w, 0.1, 0.3),
    lambda x, w: attended(w),
    lambda x, w: nn.init.ones_(torch.empty(2)),
    lambda x, w: nn.init.constant_(nn.Parameter(torch.empty(2)), 3.0),
    lambda x, w: F.dropout(w, 0.5, training=False),
    lambda x, w: nn.Dropout(0.5).eval()(w),
)


@gives(V)
def batch_norm_writes_its_statistics(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    norm = nn.BatchNorm1d(2)
    norm(torch.cat([x, 2 * x]))
    assert norm.running_mean is not None
    return norm.running_mean


@gives(I)
def batch_norm_in_eval_writes_nothing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    norm = nn.BatchNorm1d(2).eval()
    norm(torch.cat([x, 2 * x]))
    assert norm.running_mean is not None
    return norm.running_mean


@gives(V)
def embeddings_with_a_norm_write_their_weight(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(3, 2)
    F.embedding((x.detach()[0, :1] > 1).long(), weight, max_norm=0.5)
    return weight


@gives(V)
def a_module_called_with_other_parameters(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    parameters = {"weight": x.expand(2, 2) * 1, "bias": w}
    module = nn.Linear(2, 2, device="meta")
    output: torch.Tensor = torch.func.functional_call(module, parameters, torch.ones(1, 2))
    return output


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_parameters_have_the_states_of_the_state_dict(assign: bool) -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        module = inits(lambda x, w: nn.Linear(2, 2))(x, w)  # type: ignore[arg-type, return-value]
        state = {"weight": x.detach().expand(2, 2) * 1, "bias": w.detach()}
        module.load_state_dict(state, assign=assign)  # type: ignore[attr-defined]
        assert str(fs.typeof(module.bias).states) == I  # type: ignore[attr-defined]
        return module.weight  # type: ignore[attr-defined, no-any-return]

    assert [states for states, *_ in run_body(body, grad=False)] == [V, V]


# -- all cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "read", "body"), CASES, ids=lambda value: getattr(value, "__name__", "")
)
def test_types_of_results(states: str, read: str, body: Body) -> None:
    results = run_body(body)
    assert [result[:2] for result in results] == [(states, read)] * 2
    if states == I:
        assert torch.equal(results[0][2], results[1][2])
