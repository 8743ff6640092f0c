"""How operations act on layouts: rules, propagation, single operations and whole functions."""
