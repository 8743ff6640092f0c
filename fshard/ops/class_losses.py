"""Rules of losses over classes."""
