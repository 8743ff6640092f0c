"""Strategies: one choice of layouts for one operation call."""
