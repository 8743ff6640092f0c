"""Conversion to and from DTensor, `DeviceMesh` and their placements.

- `placements`: `Spec.placements` and `Spec.from_placements`.
- `dtensor`: `fs.to_dtensor`, `fs.from_dtensor`, `Mesh.from_device_mesh` and `to_device_mesh`.
"""

from fshard.interop import placements as _placements  # noqa: F401 - sets the hooks of Spec
