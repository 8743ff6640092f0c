"""Rules of neural-network layers, norms, attention and losses."""
