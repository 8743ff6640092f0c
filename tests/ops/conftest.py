"""Settings of these tests: one thread, since thousands of small operations run."""

from tests.helpers.threads import one_thread

__all__ = ["one_thread"]
