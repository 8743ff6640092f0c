"""Rules of gathers, scatters and index operations."""
