"""Counter-based random generator and its operations."""
