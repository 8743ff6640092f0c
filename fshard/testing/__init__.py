"""Assertions on layouts and communication for unit tests, and tests on real processes.

- `layouts`: `assert_layout`.
- `communication`: `assert_communicates`, `assert_local`.
- `fits`: `assert_fits`.
- `one_device`: `assert_like_one_device`.
- `differentiable`: arguments that require gradients, backward passes of trees of results.
- `ranks`: `run_ranks`, `outcomes`, warm gloo processes; `rank_process`: one of them; `rank_server`:
  the process that forks them.
- `mesh_cases`: `meshes`, which parametrises a test.
- `pytest_plugin`: fixtures `comm_log` and `run_ranks`.
"""

from fshard.testing.communication import assert_communicates, assert_local
from fshard.testing.fits import assert_fits
from fshard.testing.layouts import assert_layout
from fshard.testing.mesh_cases import meshes
from fshard.testing.one_device import assert_like_one_device
from fshard.testing.ranks import Outcome, RankDied, RankHung, outcomes, run_ranks

__all__ = [
    "Outcome", "RankDied", "RankHung", "assert_communicates", "assert_fits", "assert_layout",
    "assert_like_one_device", "assert_local", "meshes", "outcomes", "run_ranks",
]  # fmt: skip
