"""Values that describe layouts: mesh, partition spec, spec, their text and pytrees.

- `mesh`: `Mesh`, devices in a grid with named axes.
- `axis_sizes`: its axes' sizes by name.
- `mesh_groups`: its ranks in order, and groups along axes.
- `partition_spec`: `PartitionSpec`, the mesh axes of each dim, and states along axes.
- `spec`: `Spec`, the layout of a global tensor.
- `sharded`: `Sharded`, a pair of local and spec, and its refusals of operations on tensors.
- `validation`: checks of the arguments of `Spec`.
- `parsing`: `fs.parse`, the inverse of `str(spec)`.
- `equivalence`: canonical forms by which two layouts are compared.
- `refinement`: finer axes that two meshes or layouts have in common.
- `tree`: pytrees of values and specs.
"""
