"""Rules of elementwise operations, factories and random operations."""
