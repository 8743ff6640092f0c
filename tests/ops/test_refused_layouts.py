"""Right layouts that rules refuse: the search for them, and the reasons.

With `-m slow` over the full database: every operation that has some is listed with its reason.
"""

from __future__ import annotations

import warnings
from contextlib import suppress

import pytest
import torch

from fshard._util.errors import ShardingError
from tests.helpers.ops.op_database import Unsupported, calls_of, cases, op_db
from tests.helpers.ops.refused_layouts import refused_layouts_of

aten = torch.ops.aten

REASONS = {
    "an infinite constant and an infinite candidate make what is no number": """
        add sub subtract rsub lerp addmv linear conv1d conv2d conv3d conv_transpose1d
        conv_transpose2d conv_transpose3d layer_norm native_layer_norm group_norm native_group_norm
        div divide ldexp xlogy special_xlog1py softplus kl_div scatter_add index_add index_reduce
        scatter_reduce cosine_embedding_loss pow special_i1 special_modified_bessel_i1
    """,
    "a candidate that is no number is hidden, or hides others": """
        fmax fmin sign sgn signbit nan_to_num nansum nanmean nanquantile sqrt eq ne isclose le lt
        nextafter heaviside copysign logical_and logical_xor angle igamma igammac
        polygamma special_polygamma special_zeta special_modified_bessel_k0
        special_modified_bessel_k1 special_scaled_modified_bessel_k0 any all count_nonzero
        special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    """,
    "other integers wrap around, or are rounded otherwise": """
        bitwise_or bitwise_left_shift bitwise_right_shift floor_divide gcd lcm round frac to chalf
    """,
    "the sample is of one element, of one part, or of none that is left out": """
        mean quantile corrcoef linalg_matrix_rank
        nll_loss_nd histogram index_copy put masked_fill
        adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_unpool2d max_unpool3d
        hardshrink softshrink
    """,
    "a sharded sum and an unreduced partial sum are not one role": """
        addmv linear conv1d conv2d conv_transpose1d conv_transpose2d conv_transpose3d put
        max_unpool2d
    """,
    "two kinds of candidates or addends are no one mode": """
        expand_as reshape_as view_as broadcast_tensors
    """,
    "what it makes of ones and zeros beside candidates is no mode of its own": """
        lu_unpack
    """,
}
"""Reasons why rules refuse layouts that are right on a sample, with the operations."""
REFUSED = 154
"""Maximum number of refused right layouts of the database's first samples."""


def test_search_finds_missing_layouts() -> None:
    """A maximum of sums is the sum of the maximum and a constant, if that is finite."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    assert refused_layouts_of(aten.add.Tensor, (x, y), {}) == [
        "I, Umax -> Umax",
        "Umax, I -> Umax",
    ]
    assert refused_layouts_of(aten.eq.Tensor, (x, y), {}) == []
    assert refused_layouts_of(aten.mm.default, (x, y.mT.contiguous()), {}) == []
    assert refused_layouts_of(aten.slice.Tensor, (x, 1, 2, 5), {}) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_refused_layouts_have_reasons() -> None:
    """The full database, one sample of each OpInfo."""
    options = {name for names in REASONS.values() for name in names.split()}
    matches: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in [x for op in op_db for x in cases(op, 1) if not x.reason]:
            # Gradient kernels read invalid indices out of bounds.
            if "with_indices_backward" in case.name:
                continue
            with suppress(Unsupported, ShardingError):
                matches |= {f"{op}: {x}" for op, args, kwargs in calls_of(case)
                          for x in refused_layouts_of(op, args, kwargs)}  # fmt: skip
    unknown = {x for x in matches if x.split(".")[1] not in options}
    assert not unknown, "\n".join(sorted(unknown))
    assert len(matches) <= REFUSED, "\n".join(sorted(matches))
