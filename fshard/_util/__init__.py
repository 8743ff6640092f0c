"""Text, errors and the hook registry that every other room uses."""
