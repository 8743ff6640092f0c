"""Rules, their registry, and the description of one operation call."""
