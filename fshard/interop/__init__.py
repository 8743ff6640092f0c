"""Conversion of layouts and tensors to and from DTensor, JAX and Shardy.

- `placements`: `Spec.placements` and `Spec.from_placements`.
- `dtensor`: `fs.to_dtensor`, `fs.from_dtensor`, `Mesh.from_device_mesh` and `to_device_mesh`.
- `jax_sharding`: `fs.interop.to_jax` and `from_jax`, of meshes, partitions and specs.
- `dcp`: `fs.interop.save_dcp`, with `dcp_planner`; `fs.state.load` is the other way.
- `shardy`: `fs.interop.to_shardy` and `from_shardy`, of meshes and specs.
"""

from fshard.interop import placements as _placements  # noqa: F401 - sets the hooks of Spec
from fshard.interop.dcp import save_dcp
from fshard.interop.jax_sharding import from_jax, to_jax
from fshard.interop.shardy import from_shardy, to_shardy

__all__ = ["from_jax", "from_shardy", "save_dcp", "to_jax", "to_shardy"]
