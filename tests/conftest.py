"""Settings of every test: Hypothesis without clocks, and the same examples every time."""

from __future__ import annotations

from hypothesis import settings

# A clock makes tests fail on a busy machine; chance makes them fail on another's change.
settings.register_profile("fshard", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("fshard")
