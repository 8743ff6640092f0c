"""`fs.propagate`: the choice of a strategy for one call."""
