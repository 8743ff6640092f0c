"""Values that processes compare: digests of tensors, and some values of plain tensors.

A plain tensor is the global tensor on each process, with equal values. Processes of `torchrun` have
seeds of their own: a model or a batch that is made at random without `torch.manual_seed` differs
between them, and slices of different tensors would be taken for one. `jax.device_put` compares all
values; here a few values of the first tensor of each layout are compared, through the store,
without waiting.
"""

from __future__ import annotations

import json
import math
import threading
from functools import lru_cache
from weakref import WeakKeyDictionary
from zlib import crc32

import torch

from fshard._torch.functorch import is_transformed
from fshard._torch.modes import without_dispatch_modes
from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import fail
from fshard.layout.spec import DTYPE_NAMES, Spec
from fshard.run.transports.base import is_simulated, own_transport
from fshard.run.transports.divergence_report import user_line
from fshard.run.transports.process_end import Listener
from fshard.run.transports.shape_only import has_values, in_graph
from fshard.run.transports.torch_distributed import ProcessWorld

PER_DIM = 4
"""Positions of each dim whose values are compared."""
MAX_VALUES = 64
"""Values that are compared of a tensor."""
TOLERANCE = 1e-3
"""Difference between values, relative to the largest one, that different kernels may cause."""
ULPS = 4
"""Such a difference in units of the dtype's precision, if that is more."""

_COMPARED: WeakKeyDictionary[Listener, set[tuple[str, Spec]]] = WeakKeyDictionary()
"""Layouts whose first tensor was compared, each with the place of the call."""


def check_same_values(where: str, x: torch.Tensor, spec: Spec, *, at_line: bool = False) -> None:
    """Raise `ShardingError` if a global tensor has other values than on the first process.

    The first process of a mesh that comes to a place with a layout leaves some values of its tensor
    in the store; each process that comes later compares its own with them, once. Threads beside the
    main one have no order that all processes share: their tensors are not compared.

    Args:
        where: name of the function, the place for the error.
        x: the tensor as this process holds it.
        spec: its layout, which all processes of the mesh give it.
        at_line: compare calls of one line alone; a process may do others that the rest does not.
    """
    world = None if is_simulated() else own_transport()
    if not isinstance(world, ProcessWorld) or world.rank not in spec.mesh:
        return
    compared = _COMPARED.setdefault(world.listener, set())
    place = f"{where}{user_line(None, None)}" if at_line else where
    if (place, spec) in compared or len(compared) >= CACHE_SIZE or spec.mesh.size == 1:
        return
    if not has_values(x) or x.dtype not in DTYPE_NAMES or in_graph() or is_transformed():
        return
    if threading.current_thread() is not threading.main_thread():
        return
    compared.add((place, spec))
    own, store = _sample(x), world.listener.store
    key = f"fshard {world.start_count} values {place} {_layout_key(spec)}"
    try:
        text = store.compare_set(key, "", json.dumps([world.rank, own])).decode()
    except RuntimeError:  # the store does not answer, or is that of the fake backend
        return
    first, values = json.loads(text)
    at = _first_difference(own, values, x.dtype)
    if at is None:
        return
    here, there = (f"{v:g}" if isinstance(v, float) else str(v) for v in (own[at], values[at]))
    fail(place,
         f"a tensor of {spec}, whose values differ between processes: some are {here} on rank "
         f"{world.rank} and {there} on rank {first}",
         "a plain tensor must be the global tensor, with equal values on every rank; the first of "
         "a layout is compared",
         "torch.manual_seed(0) on every rank before it is made; fs.scatter(x, spec, src=0) of the "
         "values of one rank; fs.from_local(x, mesh, P(\"dp\")) of rows of this rank "
         "alone; None as the in spec of a value of this rank; sorted(names) in place of a set, "
         "which has an order of its own on each rank")  # fmt: skip


@lru_cache(maxsize=CACHE_SIZE)
def _layout_key(spec: Spec) -> str:
    return f"{spec} on {spec.mesh} of {crc32(str(spec.mesh.ranks).encode())}"


def _sample(x: torch.Tensor) -> list[float]:
    """Return some values of a tensor, at most `PER_DIM` positions of each dim.

    >>> _sample(torch.arange(8))
    [0, 2, 4, 6]
    """
    steps = tuple([slice(None, None, -(-n // PER_DIM) or 1) for n in x.shape])
    with without_dispatch_modes():  # a mode of tensors without values would read none
        values = x.detach()[steps].reshape(-1)[:MAX_VALUES].resolve_conj()
        parts = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
        exact = not parts.is_floating_point()
        numbers: list[float] = (parts if exact else parts.to("cpu", torch.float64)).tolist()
    return numbers


def _first_difference(own: list[float], other: list[float], dtype: torch.dtype) -> int | None:
    """Return the position of values that differ by more than kernels cause, None without one.

    >>> _first_difference([1.0, math.nan], [1.0001, math.nan], torch.float32)
    >>> _first_difference([1.0, math.nan], [1.0001, 2.0], torch.float32)
    1
    """
    is_exact = not (dtype.is_floating_point or dtype.is_complex)
    tolerance = 0.0 if is_exact else max(TOLERANCE, ULPS * torch.finfo(dtype).eps)
    limit = tolerance * max((abs(v) for v in (*own, *other) if math.isfinite(v)), default=0.0)
    for i, (a, b) in enumerate(zip(own, other, strict=True)):
        if not (a == b or abs(a - b) <= limit or (math.isnan(a) and math.isnan(b))):
            return i
    return None


# -- all values of a tensor ------------------------------------------------------------------


def value_digest(x: torch.Tensor) -> torch.Tensor:
    """Return shape and values as three integers; different ones agree with probability 2^-60.

    Zeros of both signs are equal, as all NaN are.

    >>> value_digest(torch.zeros(2)).equal(value_digest(torch.zeros(1, 2)))
    False
    >>> zero_and_nan = torch.tensor([0.0, math.nan])
    >>> value_digest(zero_and_nan).equal(value_digest(-zero_and_nan))
    True
    """
    # Copy: a view as bytes needs contiguous elements; `contiguous` keeps odd strides of size 1.
    flat = x.detach().reshape(-1).clone(memory_format=torch.contiguous_format).cpu().resolve_conj()
    parts = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat.resolve_neg()
    if parts.is_floating_point() and parts.itemsize > 1:
        parts = torch.where(parts == parts, parts + 0, math.nan)
    words = parts.view(torch.uint8)
    words = torch.nn.functional.pad(words, (0, -len(words) % 8)).view(torch.int64)
    index = torch.arange(len(words)) * 0x9E3779B97F4A7C1 + 0x2545F4914F6CDD1D
    mixed = (words ^ index) * 0x369DEA0F31A53F85
    total = ((mixed ^ (mixed >> 29)) * 0x27BB2EE687B0B0FD).sum()
    # Not hash(), which differs between processes for strings.
    shape = torch.tensor([x.ndim, crc32(str((*x.shape, x.dtype)).encode())])
    return torch.cat([total.reshape(1), shape]).to(x.device)
