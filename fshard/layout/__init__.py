"""Values that describe layouts: mesh, partition spec, spec, their text and pytrees."""
