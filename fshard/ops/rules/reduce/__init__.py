"""Rules of reductions, scans and sorts."""
