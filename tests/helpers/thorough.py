"""Switch of the environment: `FSHARD_THOROUGH=1` doubles random cases and layouts of rules."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("FSHARD_THOROUGH") == "1"
